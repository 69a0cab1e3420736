//! What belongs to one process: its sessions, and the threads that are in the native half.
//!
//! A forked child makes its own. In its parent's a lock may be held for ever by a thread that the child does not have, and
//! io_uring's rings are not mapped.
//!
//! An interpreter that ends stops every thread that asks for it afterwards, wherever that thread is: in the middle of Rust
//! code that takes the process down. So when the end begins no thread is let in any more, and those that are in are waited
//! for; what they do is cancelled.

use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use thruway::{Device, Error, ErrorKind, Session};

use crate::error::OrRaise;

/// What belongs to one process.
struct Process {
    id: u32,
    sessions: Mutex<HashMap<Device, Session>>,
    threads: Mutex<Threads>,
    left: Condvar,
}

#[derive(Default)]
struct Threads {
    inside: usize,
    closed: bool,
}

/// That of this process, or of the one that it was forked from.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

fn this() -> &'static Process {
    let id = std::process::id();
    let mut found = PROCESS.load(Ordering::Acquire);
    loop {
        // SAFETY: what is published here comes from `Box::into_raw` and is never freed.
        if let Some(process) = unsafe { found.as_ref() }
            && process.id == id
        {
            return process;
        }
        let process = Process { id, sessions: Mutex::default(), threads: Mutex::default(), left: Condvar::new() };
        let made = Box::into_raw(Box::new(process));
        match PROCESS.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above.
            Ok(_) => return unsafe { &*made },
            Err(other) => {
                // SAFETY: `made` was published to nobody.
                drop(unsafe { Box::from_raw(made) });
                found = other;
            }
        }
    }
}

impl Process {
    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The process that first asked for a GPU: CUDA does not survive a fork.
static GPU_PROCESS: AtomicU32 = AtomicU32::new(0);

/// This process's session for a device: one for each, made when first asked for.
pub(crate) fn session(device: Device) -> thruway::Result<Session> {
    if let Device::Pci(_) = device {
        let what = format!("no framework's tensors lie on {device}");
        return Err(Error::new(ErrorKind::Unsupported, what).with_hint("use the command `thruway`, or the Rust library"));
    }
    if device != Device::Host {
        let id = std::process::id();
        match GPU_PROCESS.compare_exchange(0, id, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != id => return Err(forked()),
            _ => {}
        }
    }
    let mut sessions = this().sessions.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(session) = sessions.get(&device) {
        return Ok(session.clone());
    }
    let session = Session::builder().device(device).build()?;
    sessions.insert(device, session.clone());
    Ok(session)
}

/// What a forked child is told.
pub(crate) fn forked() -> Error {
    Error::new(ErrorKind::Unsupported, "this process was forked from one that had used Thruway for this already")
        .with_hint("start workers with multiprocessing's \"spawn\" or \"forkserver\", or open models in the worker only")
}

/// That a thread is in the native half, and may give up the interpreter and come back to it.
pub(crate) struct Inside(&'static Process);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.threads().inside -= 1;
        self.0.left.notify_all();
    }
}

/// Lets a thread in that has the interpreter, unless that is about to end.
pub(crate) fn enter(py: Python<'_>) -> PyResult<Inside> {
    let process = this();
    let mut threads = process.threads();
    if threads.closed {
        return Err(ending()).or_raise(py);
    }
    threads.inside += 1;
    Ok(Inside(process))
}

/// Whether the interpreter is about to end.
pub(crate) fn is_closed() -> bool {
    this().threads().closed
}

/// What threads are told then.
pub(crate) fn ending() -> Error {
    Error::new(ErrorKind::Cancelled, "the interpreter is about to end")
}

/// How long the end waits for threads that are in: one may be stuck at a dead drive, or in a callback of the caller's.
const END_WAIT: Duration = Duration::from_secs(10);

/// Waits until no thread is in the native half, and lets none in again. For the end of the interpreter.
#[pyfunction]
pub(crate) fn close(py: Python<'_>) {
    let process = this();
    process.threads().closed = true;
    py.detach(|| {
        let waited = process.left.wait_timeout_while(process.threads(), END_WAIT, |threads| threads.inside > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    });
}

/// How many GPUs this process sees. No driver is no GPU.
#[pyfunction]
pub(crate) fn device_count(py: Python<'_>) -> PyResult<u32> {
    let _inside = enter(py)?;
    let library = std::env::var_os(thruway::base::settings::CUDA_LIBRARY).map(std::path::PathBuf::from);
    let counted = py.detach(|| thruway::cuda::Driver::load(library.as_deref()).and_then(|driver| driver.device_count()));
    match counted {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(0),
        counted => counted.or_raise(py),
    }
}
