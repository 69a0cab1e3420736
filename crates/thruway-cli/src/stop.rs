//! SIGINT, SIGTERM and SIGHUP: the first cancels what is under way, so that nothing half made is left; the second ends at once,
//! but for work that is [held](hold) together.
//! SIGXFSZ (a file longer than `ulimit -f` allows) ends nothing: the write fails, and that is reported as any other failure.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use thruway::{Cancel, Error, ErrorKind, Result};

/// What a shell reports of a command that ended by SIGINT.
pub(crate) const STOPPED_STATUS: u8 = 130;

static CANCEL: OnceLock<Cancel> = OnceLock::new();
/// Whether nothing is under way that would have to be cleared away.
static AT_ONCE: AtomicBool = AtomicBool::new(false);
static IS_HELD: AtomicBool = AtomicBool::new(false);
/// Wakes whoever waits for something else than a signal.
static WAKE: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);

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

/// Work that is finished or undone, however many signals come while this lives.
#[derive(Debug)]
pub(crate) struct Held(());

/// Keeps signals from ending the process, until the value is dropped. The work looks at [`check`] between its steps.
pub(crate) fn hold() -> Held {
    IS_HELD.store(true, Ordering::SeqCst);
    Held(())
}

impl Drop for Held {
    fn drop(&mut self) {
        IS_HELD.store(false, Ordering::SeqCst);
    }
}

/// Waits for `work`, such as the reading of an answer, or for a signal, whichever comes first.
///
/// # Errors
/// [`Cancelled`](ErrorKind::Cancelled) after a signal; that no thread could be started.
pub(crate) fn or_stopped<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (tell, told) = channel();
    let done = tell.clone();
    let waker = |wake| *WAKE.lock().unwrap_or_else(PoisonError::into_inner) = wake;
    waker(Some(Box::new(move || drop(tell.send(None)))));
    // Nobody listens for an answer that comes behind a signal.
    let started = std::thread::Builder::new().name("answer".to_owned()).spawn(move || drop(done.send(Some(work()))));
    let result = started.map_err(|error| Error::from_io("cannot wait for an answer", error)).and_then(|_| {
        check()?;
        let answer = told.recv().ok().flatten();
        answer.ok_or_else(|| Error::new(ErrorKind::Cancelled, "stopped by a signal"))
    });
    waker(None);
    result
}

/// What a signal does.
fn on_signal(cancel: &Cancel) {
    let is_second = cancel.is_cancelled();
    cancel.cancel();
    if IS_HELD.load(Ordering::SeqCst) {
        // Whether anybody can read it does not matter.
        drop(std::io::stderr().write_all(b"note: a signal: what is under way is finished, and then all is undone\n"));
    } else if is_second || AT_ONCE.load(Ordering::SeqCst) {
        signal_hook::low_level::exit(STOPPED_STATUS.into());
    }
    if let Some(wake) = &*WAKE.lock().unwrap_or_else(PoisonError::into_inner) {
        wake();
    }
}

/// Listens from now on. Where that cannot be, a signal ends the process as it always did.
pub(crate) fn listen() {
    // Nobody asks whether it came: the call that met the limit says so.
    drop(signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))));
    let cancel = cancel();
    let (hand_over, to_listen_for) = std::sync::mpsc::sync_channel::<Signals>(1);
    let listener = move || {
        let Ok(mut signals) = to_listen_for.recv() else { return };
        signals.forever().for_each(|_| on_signal(&cancel));
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
