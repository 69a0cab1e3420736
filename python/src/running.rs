//! Work on a thread of its own, while the caller's looks after Python's signals.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use thruway::{Cancel, Error};

use crate::error::OrRaise;
use crate::process;

/// How often signals are looked for: soon enough for somebody who presses Ctrl-C, and too rare to cost anything.
const TICK: Duration = Duration::from_millis(50);

/// Starts a thread.
pub(crate) fn start(work: impl FnOnce() + Send + 'static) -> thruway::Result<JoinHandle<()>> {
    let spawned = std::thread::Builder::new().name("thruway-python".to_owned()).spawn(work);
    spawned.map_err(|source| Error::from_io("cannot start a thread", source))
}

/// Waits, with the interpreter released, for what a thread has to say. An exception of `tick`, which is called now and then,
/// or of a signal's handler ends the waiting, and so does the interpreter's end. The caller is [`Inside`](process::Inside).
pub(crate) fn receive<T: Send>(
    py: Python<'_>,
    events: &mut Receiver<T>,
    mut tick: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    loop {
        let again: &mut Receiver<T> = events;
        match py.detach(move || again.recv_timeout(TICK)) {
            Ok(event) => return Ok(event),
            Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("a thread of Thruway ended unexpectedly")),
            Err(RecvTimeoutError::Timeout) if process::is_closed() => return Err(process::ending()).or_raise(py),
            Err(RecvTimeoutError::Timeout) => py.check_signals().and_then(|()| tick(py))?,
        }
    }
}

/// Does `work` with the interpreter released. What [`receive`] is ended by cancels it, and is raised when it has ended.
pub(crate) fn run<T: Send + 'static>(
    py: Python<'_>,
    cancel: &Cancel,
    tick: impl FnMut(Python<'_>) -> PyResult<()>,
    work: impl FnOnce() -> thruway::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (tell, mut told) = sync_channel(1);
    // Nobody may be left to hear it.
    let thread = start(move || drop(tell.send(work()))).or_raise(py)?;
    let received = receive(py, &mut told, tick);
    if received.is_err() {
        cancel.cancel();
    }
    let ended = py.detach(|| thread.join());
    match (received, ended) {
        (Ok(result), Ok(())) => result.or_raise(py),
        (Err(raised), _) => Err(raised),
        (Ok(_), Err(_)) => Err(PyRuntimeError::new_err("a thread of Thruway ended unexpectedly")),
    }
}

/// Calls `progress` with the bytes moved so far.
pub(crate) fn tell_progress(py: Python<'_>, progress: Option<&Py<PyAny>>, moved: u64) -> PyResult<()> {
    progress.map_or(Ok(()), |progress| progress.call1(py, (moved,)).map(drop))
}
