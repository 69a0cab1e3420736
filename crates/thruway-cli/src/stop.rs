//! SIGINT, SIGTERM and SIGHUP: the first cancels what is under way, so that nothing half made is left; the second ends at once.
//! SIGXFSZ (a file longer than `ulimit -f` allows) ends nothing: the write fails, and that is reported as any other failure.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use thruway::{Cancel, Error, ErrorKind, Result};

/// What a shell reports of a command that ended by SIGINT.
pub(crate) const STOPPED_STATUS: u8 = 130;

static CANCEL: OnceLock<Cancel> = OnceLock::new();
/// Whether nothing is under way that would have to be cleared away.
static AT_ONCE: AtomicBool = AtomicBool::new(false);

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

/// Does what changes nothing: meanwhile already the first signal ends the process.
pub(crate) fn at_once<T>(looking: impl FnOnce() -> T) -> T {
    AT_ONCE.store(true, Ordering::SeqCst);
    let seen = if cancel().is_cancelled() { signal_hook::low_level::exit(STOPPED_STATUS.into()) } else { looking() };
    AT_ONCE.store(false, Ordering::SeqCst);
    seen
}

/// Listens from now on. Where that cannot be, a signal ends the process as it always did.
pub(crate) fn listen() {
    // Nobody asks whether it came: the call that met the limit says so.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))));
    let cancel = cancel();
    let (hand_over, to_listen_for) = std::sync::mpsc::sync_channel::<Signals>(1);
    let listener = move || {
        let Ok(mut signals) = to_listen_for.recv() else { return };
        for _ in signals.forever() {
            if cancel.is_cancelled() || AT_ONCE.load(Ordering::SeqCst) {
                signal_hook::low_level::exit(STOPPED_STATUS.into());
            }
            cancel.cancel();
        }
    };
    // The thread comes first: a signal that was registered and that nobody listens for would be swallowed.
    if std::thread::Builder::new().name("signals".to_owned()).spawn(listener).is_err() {
        return;
    }
    let Ok(signals) = Signals::new([SIGINT, SIGTERM]) else { return };
    if !is_ignored(SIGHUP) {
        // Without it a lost terminal ends the process as it always did.
        drop(signals.add_signal(SIGHUP));
    }
    if hand_over.send(signals).is_err() {
        unreachable!("the listener waits for it");
    }
}

/// Whether the process was started with a signal ignored, as `nohup` does with SIGHUP: then it stays so.
fn is_ignored(signal: i32) -> bool {
    let mask = crate::machine::own_status("SigIgn").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::{SIGCHLD, SIGPIPE};

    use super::*;

    #[test]
    fn ignored_signals_are_known() {
        // Rust's start-up code ignores SIGPIPE.
        assert!(is_ignored(SIGPIPE));
        assert!(!is_ignored(SIGCHLD));
    }
}
