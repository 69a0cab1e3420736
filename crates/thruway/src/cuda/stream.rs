//! Streams: queues of work on a GPU, and the copies that are put into them.

use std::sync::Arc;

use thruway_sys::cuda::{
    CU_EVENT_WAIT_DEFAULT, CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_NON_BLOCKING,
    CUDA_MEMCPY2D, CUstream,
};

use super::event::{Event, Events};
use super::gpu::Gpu;
use crate::base::{Error, ErrorKind, Result};

/// A stream of somebody else's, such as a framework's current one. A number, so that it can be passed between threads; the
/// framework keeps the stream alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerStream(u64);

impl CallerStream {
    /// The stream with this handle (a `CUstream` or `cudaStream_t` as a number; 0 is the default stream).
    ///
    /// # Safety
    /// The handle is that of a stream of the primary context of the GPU that it is used with, and stays so while a transfer
    /// has it. It is not 2, which means another stream on each thread.
    pub const unsafe fn from_handle(handle: u64) -> Self {
        Self(handle)
    }

    /// Waits until what is in the stream by now is done.
    ///
    /// # Errors
    /// As [`mark`](Self::mark), and if something in the stream has failed.
    pub fn wait(self, gpu: &Arc<Gpu>) -> Result<()> {
        self.mark(gpu)?.wait()
    }

    /// Marks the end of what is in the stream by now.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the stream is being captured into a graph, where nothing is ever done;
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn mark(self, gpu: &Arc<Gpu>) -> Result<Event> {
        let (_current, handle) = (gpu.current()?, self.0 as CUstream);
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive by the promise of `from_handle`; the pointer is to a local that lives through the call; a
        // context is current, which the default stream needs.
        let code = unsafe { (gpu.cuda().cuStreamIsCapturing)(handle, &raw mut status) };
        gpu.driver().check(code, "cuStreamIsCapturing")?;
        if status != CU_STREAM_CAPTURE_STATUS_NONE {
            return Err(Error::new(ErrorKind::InvalidInput, "the stream is being captured into a CUDA graph")
                .with_hint("load and save before or after the capture"));
        }
        let mark = Events::default().take(gpu)?;
        // SAFETY: as above; the event is alive, and of the same context.
        let code = unsafe { (gpu.cuda().cuEventRecord)(mark.handle(), handle) };
        gpu.driver().check(code, "cuEventRecord")?;
        Ok(mark)
    }

    /// Lets what is put into the stream from now on wait, on the GPU, for what the event marks.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails: a stream that is being captured takes no events of others.
    pub fn hold_until(self, gpu: &Arc<Gpu>, event: &Event) -> Result<()> {
        let _current = gpu.current()?;
        wait_for(gpu, self.0 as CUstream, event)
    }
}

fn wait_for(gpu: &Gpu, stream: CUstream, event: &Event) -> Result<()> {
    // SAFETY: both handles are alive: the event by its reference, the stream by the promise of `from_handle` or as our own.
    let code = unsafe { (gpu.cuda().cuStreamWaitEvent)(stream, event.handle(), CU_EVENT_WAIT_DEFAULT) };
    gpu.driver().check(code, "cuStreamWaitEvent")
}

/// Equally long pieces of memory that lie equally far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The bytes of each.
    pub bytes: usize,
    /// From the beginning of one to that of the next, in bytes.
    pub pitch: usize,
    /// How many.
    pub count: usize,
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

    pub(super) fn handle(&self) -> CUstream {
        self.handle
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

    /// Queues a copy of rows of `bytes` each from host memory, where they begin `pitch` bytes apart, to GPU memory, where they
    /// lie without gaps. The copy engine takes them as one; a call for each row would take far longer than its bytes.
    ///
    /// # Safety
    /// As [`copy_to_gpu`](Self::copy_to_gpu), for all rows.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn copy_rows_to_gpu(&self, to: u64, from: *const u8, rows: Rows) -> Result<()> {
        let copy = CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: CU_MEMORYTYPE_HOST,
            srcHost: from.cast(),
            srcDevice: 0,
            srcArray: std::ptr::null_mut(),
            srcPitch: rows.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: to,
            dstArray: std::ptr::null_mut(),
            dstPitch: rows.bytes,
            WidthInBytes: rows.bytes,
            Height: rows.count,
        };
        // SAFETY: the caller's promise; the driver reads the description before the call returns.
        let code = unsafe { (self.gpu.cuda().cuMemcpy2DAsync_v2)(&raw const copy, self.handle) };
        self.gpu.driver().check(code, "cuMemcpy2DAsync")
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

    /// Queues a copy within GPU memory.
    ///
    /// # Safety
    /// As [`copy_to_gpu`](Self::copy_to_gpu).
    ///
    /// # Errors
    /// As there.
    pub unsafe fn copy_within_gpu(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.gpu.cuda().cuMemcpyDtoDAsync_v2)(to, from, bytes, self.handle) };
        self.gpu.driver().check(code, "cuMemcpyDtoDAsync")
    }

    /// Lets what is queued from now on wait, on the GPU, for what the event marks.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver fails.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        wait_for(&self.gpu, self.handle, event)
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
