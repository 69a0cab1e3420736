//! A GPU and its primary context.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::Arc;

use thruway_sys::cuda::{
    CU_MEMHOSTREGISTER_PORTABLE, CU_STREAM_CAPTURE_MODE_RELAXED, CUcontext, CUdevice, CUstreamCaptureMode, CUuuid, Cuda,
};

use super::driver::Driver;
use crate::base::{ByteSize, Error, ErrorKind, Result};

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// The driver's name for it.
    pub name: String,
    /// Its address on the PCI bus, such as `0000:41:00.0`.
    pub pci_address: String,
    /// The bytes of its memory.
    pub memory_bytes: u64,
    /// The driver's identifier for it.
    pub uuid: [u8; 16],
}

/// A GPU whose primary context this process holds. Released when the last user is gone.
#[derive(Debug)]
pub struct Gpu {
    driver: Arc<Driver>,
    ordinal: u32,
    device: CUdevice,
    context: CUcontext,
    facts: GpuFacts,
}

// SAFETY: a context handle may be used from any thread; the driver does its own locking.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Retains the primary context of the GPU with this ordinal. `library` is the driver's library, if it is not
    /// the system's.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) without a driver or without such a GPU, [`Gpu`](ErrorKind::Gpu) if
    /// the driver fails.
    pub fn open(ordinal: u32, library: Option<&Path>) -> Result<Arc<Self>> {
        let driver = Driver::load(library)?;
        let count = driver.device_count()?;
        if ordinal >= count {
            let have = match count {
                0 => "this process sees no GPU".to_owned(),
                1 => "this process sees one GPU, cuda:0".to_owned(),
                _ => format!("this process sees {count} GPUs, cuda:0 to cuda:{}", count - 1),
            };
            return Err(Error::new(ErrorKind::Unsupported, format!("there is no cuda:{ordinal}: {have}"))
                .with_hint("look at `nvidia-smi` and at CUDA_VISIBLE_DEVICES"));
        }
        let cuda = &driver.cuda;
        let mut device = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the pointer is to a local that lives through the call.
        driver.check(unsafe { (cuda.cuDeviceGet)(&raw mut device, number) }, "cuDeviceGet")?;
        let facts = facts(&driver, device)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: as above; the device is valid. The matching release is in `drop`.
        driver.check(unsafe { (cuda.cuDevicePrimaryCtxRetain)(&raw mut context, device) }, "cuDevicePrimaryCtxRetain")?;
        Ok(Arc::new(Self { driver, ordinal, device, context, facts }))
    }

    /// Its CUDA ordinal.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What it is.
    pub fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    /// The newest CUDA version that its driver serves, as `(major, minor)`.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn driver_version(&self) -> Result<(u32, u32)> {
        let mut version = 0;
        // SAFETY: the pointer is to a local that lives through the call.
        let code = unsafe { (self.cuda().cuDriverGetVersion)(&raw mut version) };
        self.driver.check(code, "cuDriverGetVersion")?;
        let version = u32::try_from(version).unwrap_or(0);
        Ok((version / 1000, version % 1000 / 10))
    }

    /// The bytes of its memory that are free now.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn free_bytes(&self) -> Result<u64> {
        let _current = self.current()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to locals that live through the call, and a context is current.
        let code = unsafe { (self.cuda().cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        self.driver.check(code, "cuMemGetInfo")?;
        Ok(free as u64)
    }

    /// Refuses an allocation for which the GPU has no room now.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory), with both numbers.
    pub fn ensure_bytes(&self, bytes: u64) -> Result<()> {
        let free = self.free_bytes()?;
        if bytes <= free {
            return Ok(());
        }
        let (needed, have) = (ByteSize(bytes), ByteSize(free));
        Err(Error::new(ErrorKind::OutOfMemory, format!("this needs {needed} of GPU memory and {have} are free"))
            .with("device", format_args!("cuda:{}", self.ordinal))
            .with("free", have)
            .with_hint("free GPU memory (`nvidia-smi` shows who holds it), or load fewer tensors at a time"))
    }

    /// Makes the context current on this thread until the value is dropped, then puts back what was. Meanwhile no thread's
    /// capture of a stream into a graph minds what this one calls, which touches no captured stream: a load beside a
    /// capture would else end both.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails: after a fork, or when the context was destroyed.
    pub fn current(&self) -> Result<Current<'_>> {
        // SAFETY: the context is retained by this value.
        let code = unsafe { (self.cuda().cuCtxPushCurrent_v2)(self.context) };
        self.driver.check(code, "cuCtxPushCurrent")?;
        let mode = self.exchange_capture_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
        Ok(Current { gpu: self, mode, not_send: std::marker::PhantomData })
    }

    /// Gives this thread another capture mode; its former one.
    fn exchange_capture_mode(&self, mut mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
        // SAFETY: the pointer is to a local that lives through the call. It fails only for a mode that does not exist.
        let _never_fails = unsafe { (self.cuda().cuThreadExchangeStreamCaptureMode)(&raw mut mode) };
        mode
    }

    /// Allocates `len` bytes of its memory, not zeroed, and gives their address. Whoever takes it frees it.
    pub(crate) fn allocate(&self, len: usize) -> Result<u64> {
        let _current = self.current()?;
        let mut address = 0;
        // SAFETY: the pointer is to a local that lives through the call, and a context is current.
        let code = unsafe { (self.cuda().cuMemAlloc_v2)(&raw mut address, len) };
        self.driver.check(code, "cuMemAlloc")?;
        Ok(address)
    }

    /// Frees what [`allocate`](Self::allocate) gave. The driver waits here for all work of the context.
    ///
    /// # Safety
    /// Nothing uses the memory any more.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails: the context is gone, and the memory with it.
    pub(crate) unsafe fn free(&self, address: u64) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (self.cuda().cuMemFree_v2)(address) };
        self.driver.check(code, "cuMemFree")
    }

    /// Pins host memory for the copy engines of every GPU of this process.
    ///
    /// # Safety
    /// The range is mapped, and stays so until [`unpin`](Self::unpin) has succeeded.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) or [`OutOfMemory`](ErrorKind::OutOfMemory) if the driver refuses.
    pub(crate) unsafe fn pin(&self, address: usize, len: usize) -> Result<()> {
        let _current = self.current()?;
        let pointer = address as *mut std::ffi::c_void;
        // SAFETY: the caller's promise; a context is current.
        let code = unsafe { (self.cuda().cuMemHostRegister_v2)(pointer, len, CU_MEMHOSTREGISTER_PORTABLE) };
        self.driver.check(code, "cuMemHostRegister")
    }

    /// Lets go of pinned memory. The driver waits here for all work of the context.
    ///
    /// # Safety
    /// No copy over the range is in flight.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails; it may then still hold the pages.
    pub(crate) unsafe fn unpin(&self, address: usize) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller's promise.
        let code = unsafe { (self.cuda().cuMemHostUnregister)(address as *mut std::ffi::c_void) };
        self.driver.check(code, "cuMemHostUnregister")
    }

    /// Copies from GPU memory to the host and waits for it.
    ///
    /// # Safety
    /// The `target.len()` bytes from `from` are valid GPU memory that nothing writes meanwhile.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub(crate) unsafe fn copy_to_host(&self, target: &mut [u8], from: u64) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller's promise for the source; the target is exclusively borrowed through this synchronous call.
        let code = unsafe { (self.cuda().cuMemcpyDtoH_v2)(target.as_mut_ptr().cast(), from, target.len()) };
        self.driver.check(code, "cuMemcpyDtoH")
    }

    /// Copies from the host to GPU memory and waits for it.
    ///
    /// # Safety
    /// The `source.len()` bytes from `to` are valid GPU memory that nothing else uses meanwhile.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub(crate) unsafe fn copy_from_host(&self, to: u64, source: &[u8]) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: the caller's promise for the target; the source is borrowed through this synchronous call.
        let code = unsafe { (self.cuda().cuMemcpyHtoD_v2)(to, source.as_ptr().cast(), source.len()) };
        self.driver.check(code, "cuMemcpyHtoD")
    }

    pub(super) fn cuda(&self) -> &Cuda {
        &self.driver.cuda
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: one release for the one retain. Its failure (the driver is shutting down) has no consequence.
        let _shutting_down = unsafe { (self.cuda().cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// A context that is current on this thread.
#[derive(Debug)]
pub struct Current<'a> {
    gpu: &'a Gpu,
    /// The thread's own capture mode.
    mode: CUstreamCaptureMode,
    /// What is current is a matter of the thread.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        self.gpu.exchange_capture_mode(self.mode);
        let mut popped = std::ptr::null_mut();
        // SAFETY: the pointer is to a local; what is popped is what `current` pushed, since values are dropped in
        // the reverse order of their making on one thread.
        let _nothing_to_do = unsafe { (self.gpu.cuda().cuCtxPopCurrent_v2)(&raw mut popped) };
    }
}

pub(super) fn facts(driver: &Driver, device: CUdevice) -> Result<GpuFacts> {
    const TEXT_BYTES: usize = 128;
    let text = |get: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> thruway_sys::cuda::CUresult, call| {
        let mut buffer: [c_char; TEXT_BYTES] = [0; TEXT_BYTES];
        let length = c_int::try_from(TEXT_BYTES).unwrap_or(0);
        // SAFETY: the buffer has the length that is given, and the driver ends what it writes with a zero.
        driver.check(unsafe { get(buffer.as_mut_ptr(), length, device) }, call)?;
        buffer[TEXT_BYTES - 1] = 0;
        // SAFETY: the last byte is zero, so the string ends within the buffer.
        Ok::<_, Error>(unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_string_lossy().into_owned())
    };
    let name = text(driver.cuda.cuDeviceGetName, "cuDeviceGetName")?;
    let pci_address = text(driver.cuda.cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId")?.to_ascii_lowercase();
    let mut bytes = 0;
    // SAFETY: the pointer is to a local that lives through the call.
    driver.check(unsafe { (driver.cuda.cuDeviceTotalMem_v2)(&raw mut bytes, device) }, "cuDeviceTotalMem")?;
    let mut uuid = CUuuid::default();
    // SAFETY: as above.
    driver.check(unsafe { (driver.cuda.cuDeviceGetUuid_v2)(&raw mut uuid, device) }, "cuDeviceGetUuid")?;
    Ok(GpuFacts { name, pci_address, memory_bytes: bytes as u64, uuid: uuid.bytes })
}
