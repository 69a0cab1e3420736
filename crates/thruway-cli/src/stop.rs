//! SIGINT and SIGTERM: the first cancels what is under way, so that nothing half made is left; the second ends at once.
//! SIGXFSZ (a file longer than `ulimit -f` allows) ends nothing: the write fails, and that is reported as any other failure.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use thruway::{Cancel, Error, ErrorKind, Result};

/// What a shell reports of a command that ended by SIGINT.
pub(crate) const STOPPED_STATUS: u8 = 130;

static CANCEL: OnceLock<Cancel> = OnceLock::new();

/// What the first signal cancels; for the options of transfers.
pub(crate) fn cancel() -> Cancel {
    CANCEL.get_or_init(Cancel::default).clone()
}

/// Ends work that is no transfer, between two steps.
///
/// # Errors
/// [`Cancelled`](ErrorKind::Cancelled) after a signal.
pub(crate) fn check() -> Result<()> {
    if cancel().is_cancelled() { Err(Error::new(ErrorKind::Cancelled, "stopped by a signal")) } else { Ok(()) }
}

/// Listens from now on. Where that cannot be, a signal ends the process as it always did.
pub(crate) fn listen() {
    // Nobody asks whether it came: the call that met the limit says so.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))));
    let Ok(mut signals) = Signals::new([SIGINT, SIGTERM]) else { return };
    let cancel = cancel();
    let listener = move || {
        for _ in signals.forever() {
            if cancel.is_cancelled() {
                signal_hook::low_level::exit(STOPPED_STATUS.into());
            }
            cancel.cancel();
        }
    };
    // Without the thread the first signal would go unheard; the process cannot have started others either then.
    drop(std::thread::Builder::new().name("signals".to_owned()).spawn(listener));
}
