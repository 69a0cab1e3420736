//! Streams: queues of work on a GPU, and the copies that are put into them.

use std::sync::Arc;

use thruway_sys::cuda::{CU_EVENT_WAIT_DEFAULT, CU_STREAM_NON_BLOCKING, CUstream};

use super::event::Event;
use super::gpu::Gpu;
use crate::base::Result;

/// A stream of somebody else's, such as a framework's current one. A number, so that it can be passed between threads; the
/// framework keeps the stream alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerStream(u64);

impl CallerStream {
    /// The stream with this handle (a `CUstream` or `cudaStream_t` as a number; 0 is the default stream).
    ///
    /// # Safety
    /// The handle is that of a stream of the primary context of the GPU that it is used with, and stays so while a transfer
    /// has it.
    pub const unsafe fn from_handle(handle: u64) -> Self {
        Self(handle)
    }

    fn handle(self) -> CUstream {
        self.0 as CUstream
    }
}

/// A stream of this library's own, which does not wait for the default stream. Destroyed when dropped; the driver
/// then still finishes what is in it.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    handle: CUstream,
}

// SAFETY: a stream handle may be used from any thread; the driver does its own locking.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver fails.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let _current = gpu.current()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is to a local that lives through the call, and a context is current.
        let code = unsafe { (gpu.cuda().cuStreamCreate)(&raw mut handle, CU_STREAM_NON_BLOCKING) };
        gpu.driver().check(code, "cuStreamCreate")?;
        Ok(Self { gpu: Arc::clone(gpu), handle })
    }

    /// The GPU that it belongs to.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Queues a copy from host memory to GPU memory.
    ///
    /// # Safety
    /// Both ranges are valid for `bytes`, and stay so, unchanged and otherwise unused, until an event recorded after
    /// the copy is done.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver refuses; then nothing was queued.
    pub unsafe fn copy_to_gpu(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.gpu.cuda().cuMemcpyHtoDAsync_v2)(to, from.cast(), bytes, self.handle) };
        self.gpu.driver().check(code, "cuMemcpyHtoDAsync")
    }

    /// Queues a copy from GPU memory to host memory.
    ///
    /// # Safety
    /// As [`copy_to_gpu`](Self::copy_to_gpu).
    ///
    /// # Errors
    /// As there.
    pub unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.gpu.cuda().cuMemcpyDtoHAsync_v2)(to.cast(), from, bytes, self.handle) };
        self.gpu.driver().check(code, "cuMemcpyDtoHAsync")
    }

    /// Marks the end of what is queued so far.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver fails.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive, and of one context.
        let code = unsafe { (self.gpu.cuda().cuEventRecord)(event.handle(), self.handle) };
        self.gpu.driver().check(code, "cuEventRecord")
    }

    /// Lets everything that is queued from now on wait for what is in `other` by now.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver fails.
    pub fn follow(&self, other: CallerStream, mark: &Event) -> Result<()> {
        let _current = self.gpu.current()?;
        // SAFETY: the event is alive; the stream is by the promise of `CallerStream::from_handle`; a context is current, which
        // the default stream needs.
        let code = unsafe { (self.gpu.cuda().cuEventRecord)(mark.handle(), other.handle()) };
        self.gpu.driver().check(code, "cuEventRecord")?;
        // SAFETY: both handles are alive, and of one context.
        let code = unsafe { (self.gpu.cuda().cuStreamWaitEvent)(self.handle, mark.handle(), CU_EVENT_WAIT_DEFAULT) };
        self.gpu.driver().check(code, "cuStreamWaitEvent")
    }

    /// Waits until everything queued so far is done.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver fails, or if something that was queued has failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        let code = unsafe { (self.gpu.cuda().cuStreamSynchronize)(self.handle) };
        self.gpu.driver().check(code, "cuStreamSynchronize")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle is alive and used nowhere else. A failure (the driver is shutting down) frees nothing less.
        let _shutting_down = unsafe { (self.gpu.cuda().cuStreamDestroy_v2)(self.handle) };
    }
}
