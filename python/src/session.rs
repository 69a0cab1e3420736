//! Sessions: one for each device, made when first asked for, and never used in a process that was forked afterwards.

use std::collections::HashMap;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use thruway::{Device, Error, ErrorKind, Session};

use crate::error::OrRaise;

/// The sessions of one process.
struct Registry {
    process: u32,
    sessions: Mutex<HashMap<Device, Session>>,
}

/// The registry of this process, or of the one that it was forked from. A forked child makes its own: in its parent's a lock
/// may be held for ever by a thread that the child does not have, and io_uring's rings are not mapped.
static REGISTRY: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());

fn registry() -> &'static Registry {
    let process = std::process::id();
    let mut found = REGISTRY.load(Ordering::Acquire);
    loop {
        // SAFETY: what is published here comes from `Box::into_raw` and is never freed.
        if let Some(registry) = unsafe { found.as_ref() }
            && registry.process == process
        {
            return registry;
        }
        let made = Box::into_raw(Box::new(Registry { process, sessions: Mutex::default() }));
        match REGISTRY.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
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

/// The process that first asked for a GPU: CUDA does not survive a fork.
static GPU_PROCESS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// This process's session for a device.
pub(crate) fn session(device: Device) -> thruway::Result<Session> {
    if device != Device::Host {
        let process = std::process::id();
        match GPU_PROCESS.compare_exchange(0, process, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != process => return Err(forked()),
            _ => {}
        }
    }
    let mut sessions = registry().sessions.lock().unwrap_or_else(PoisonError::into_inner);
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

/// How many GPUs this process sees. No driver is no GPU.
#[pyfunction]
pub(crate) fn device_count(py: Python<'_>) -> PyResult<u32> {
    let library = std::env::var_os(thruway::base::settings::CUDA_LIBRARY).map(std::path::PathBuf::from);
    let counted = py.detach(|| thruway::cuda::Driver::load(library.as_deref()).and_then(|driver| driver.device_count()));
    match counted {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(0),
        counted => counted.or_raise(py),
    }
}
