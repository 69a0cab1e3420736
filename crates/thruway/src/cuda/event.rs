//! Events: marks in a stream that can be asked for and waited for.

use std::sync::Arc;

use thruway_sys::cuda::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CUDA_ERROR_NOT_READY, CUevent};

use super::gpu::Gpu;
use crate::base::Result;

/// An event without timing, on which waiting sleeps.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    handle: CUevent,
}

// SAFETY: an event handle may be used from any thread; the driver does its own locking.
unsafe impl Send for Event {}

impl Event {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let _current = gpu.current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a local that lives through the call, and a context is current.
        let code = unsafe { (gpu.cuda().cuEventCreate)(&raw mut handle, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC) };
        gpu.driver().check(code, "cuEventCreate")?;
        Ok(Self { gpu: Arc::clone(gpu), handle })
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }

    /// Whether everything before the mark is done.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if something before the mark failed.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the handle is alive.
        let code = unsafe { (self.gpu.cuda().cuEventQuery)(self.handle) };
        if code == CUDA_ERROR_NOT_READY { Ok(false) } else { self.gpu.driver().check(code, "cuEventQuery").map(|()| true) }
    }

    /// Sleeps until everything before the mark is done.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if something before the mark failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        let code = unsafe { (self.gpu.cuda().cuEventSynchronize)(self.handle) };
        self.gpu.driver().check(code, "cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is alive and used nowhere else; the driver defers the release of a pending one.
        let _shutting_down = unsafe { (self.gpu.cuda().cuEventDestroy_v2)(self.handle) };
    }
}

/// Events to be used again: making one takes a call into the driver and a lock there.
#[derive(Debug, Default)]
pub struct Events {
    free: Vec<Event>,
}

impl Events {
    /// An event that marks nothing that matters any more.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if a new one is needed and the driver fails.
    pub fn take(&mut self, gpu: &Arc<Gpu>) -> Result<Event> {
        self.free.pop().map_or_else(|| Event::new(gpu), Ok)
    }

    /// Takes back an event that is done.
    pub fn give_back(&mut self, event: Event) {
        self.free.push(event);
    }
}
