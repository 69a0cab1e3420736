//! The fake CUDA driver of this process: whose memory this is, and where the CPU finds it.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;

use thruway_sys::cuda::{CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CUDA_SUCCESS, CUuuid, Cuda};
use thruway_sys::loader::Library;

/// The driver's functions, and those that it has for other doubles.
pub(crate) struct Driver {
    cuda: Cuda,
    view: unsafe extern "C" fn(u64, usize) -> *mut c_void,
    is_pooled: unsafe extern "C" fn(u64) -> c_int,
}

/// Device memory.
pub(crate) struct DeviceMemory {
    /// Where the CPU finds its first byte.
    pub(crate) view: *mut u8,
    /// Whose it is.
    pub(crate) ordinal: usize,
    /// Whether it comes from a pool.
    pub(crate) pooled: bool,
}

impl Driver {
    /// The driver that this process has loaded, if it has and it works. Opening a library that is open gives the same one.
    pub(crate) fn find() -> Option<Self> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let is_driver = |path: &&str| path.ends_with("libfake_cuda.so");
        let path = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).find(is_driver).map(PathBuf::from)?;
        let library = Library::open([path.as_os_str()]).ok()?;
        let cuda = Cuda::load(Some(&path)).ok()?;
        // SAFETY: the types are those of the functions in the fake driver's `control` module.
        let (view, is_pooled) =
            unsafe { (library.function("fake_cuda_view").ok()?, library.function("fake_cuda_is_pooled").ok()?) };
        let found = Self { cuda, view, is_pooled };
        (found.device_count() > 0).then_some(found)
    }

    /// How many devices a started driver has; 0 if it is not started.
    pub(crate) fn device_count(&self) -> usize {
        let mut count = 0;
        // SAFETY: the pointer is to a local that lives through the call.
        let code = unsafe { (self.cuda.cuDeviceGetCount)(&raw mut count) };
        if code == CUDA_SUCCESS { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    /// Whether a context is current on this thread.
    pub(crate) fn has_context(&self) -> bool {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a local that lives through the call.
        let code = unsafe { (self.cuda.cuCtxGetCurrent)(&raw mut context) };
        code == CUDA_SUCCESS && !context.is_null()
    }

    /// A device's identifier.
    pub(crate) fn uuid(&self, ordinal: usize) -> [u8; 16] {
        let mut uuid = CUuuid::default();
        // SAFETY: the pointer is to a local that lives through the call. Of a device that is not there nothing is written.
        let _zeros_without = unsafe { (self.cuda.cuDeviceGetUuid_v2)(&raw mut uuid, c_int::try_from(ordinal).unwrap_or(-1)) };
        uuid.bytes
    }

    /// What a range is, if it is all device memory of one live allocation.
    pub(crate) fn device_memory(&self, address: u64, bytes: usize) -> Option<DeviceMemory> {
        let mut ordinal: c_int = -1;
        // SAFETY: the pointer is to a local of the attribute's type.
        unsafe { (self.cuda.cuPointerGetAttribute)((&raw mut ordinal).cast(), CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) };
        // SAFETY: any address is allowed.
        let view = unsafe { (self.view)(address, bytes) };
        // SAFETY: any address is allowed.
        let pooled = unsafe { (self.is_pooled)(address) } == 1;
        let ordinal = usize::try_from(ordinal).ok()?;
        (!view.is_null()).then_some(DeviceMemory { view: view.cast(), ordinal, pooled })
    }
}
