//! The part of the CUDA driver API (`libcuda.so.1`) that Thruway calls.
//!
//! # Names and versions
//! `cuda.h` gives each function one name and maps it by macro to the symbol of its current binary interface:
//! `cuMemAlloc` in a program is `cuMemAlloc_v2` in the library, and the library's own `cuMemAlloc` is an older function
//! with 32-bit sizes. A field here is called as the *exported symbol*, and each one's documentation names the CUDA
//! version that brought it (as `cudaTypedefs.h` has it). The newest that is required is `cuDeviceGetUuid_v2`, so the
//! oldest driver that fills this table is that of CUDA 11.4; what came later is optional.
//!
//! `cuda.h` also maps stream functions to a `_ptsz` or `_ptds` form when a program is compiled for per-thread default
//! streams. Those are not bound: Thruway names a stream in every call.
//!
//! # What needs a current context
//! Functions that create or synchronise (allocation, pinning, stream and event creation, the synchronous copies, the
//! information about memory) answer `CUDA_ERROR_INVALID_CONTEXT` on a thread without one. Functions that are given a
//! stream, an event or an address to free do not ask for one (seen on a driver of CUDA 13.0; the documentation allows
//! them to).
//!
//! # What blocks
//! Beside the functions called `…Synchronize` and the synchronous copies: `cuMemFree_v2`, `cuMemFreeHost` and
//! `cuMemHostUnregister` waited for *all* work of the context on the driver of CUDA 13.0, also for work on other memory.
//! They do not belong in the middle of a transfer.

#[allow(non_camel_case_types, non_snake_case, reason = "types and fields have the names that the C header gives them")]
mod types;

mod constants;

use std::ffi::{OsStr, c_char, c_float, c_int, c_uchar, c_uint, c_void};
use std::path::Path;

pub use constants::*;
pub use types::*;

use crate::loader::{Library, LoadError, symbol_table};

/// Where a driver's library may be, in the order in which it is looked for. The first is the name that every driver
/// installs; the bare `.so` belongs to developer packages; the rest are where containers, WSL and NixOS put it.
pub const LIBRARY_NAMES: [&str; 5] = [
    "libcuda.so.1",
    "libcuda.so",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
];

impl Cuda {
    /// Opens the driver's library and fills the table. With `path_override`, that library and no other: an override
    /// that fails is an error, not a reason to try elsewhere.
    ///
    /// This says that a driver is installed, not that it works: call `cuInit` for that.
    pub fn load(path_override: Option<&Path>) -> Result<Self, LoadError> {
        let library = match path_override {
            Some(path) => Library::open([path.as_os_str()])?,
            None => Library::open(LIBRARY_NAMES.map(OsStr::new))?,
        };
        Self::fill(&library)
    }
}

symbol_table! {
    /// The driver's functions: `(cuda.cuInit)(0)`. Made by [`Cuda::load`].
    ///
    /// Calling one is `unsafe`: the driver believes every pointer, size and handle that it is given.
    pub struct Cuda;
    required: {
        /// Starts the driver in this process; `flags` is 0. CUDA 2.0.
        fn cuInit(flags: c_uint) -> CUresult;
        /// The newest CUDA that the driver serves, as 1000 × major + 10 × minor. Needs no `cuInit`. CUDA 2.2.
        fn cuDriverGetVersion(version: *mut c_int) -> CUresult;
        /// The constant's name for a code, as a static string; an unknown code is `CUDA_ERROR_INVALID_VALUE` and a null
        /// string. CUDA 6.0.
        fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> CUresult;
        /// One sentence about a code, likewise. CUDA 6.0.
        fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult;

        /// How many devices this process may use. CUDA 2.0.
        fn cuDeviceGetCount(count: *mut c_int) -> CUresult;
        /// The handle of the device with this ordinal. CUDA 2.0.
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult;
        /// The device's name, cut to `len` bytes with the final NUL. CUDA 2.0.
        fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) -> CUresult;
        /// One number about the device: a `CU_DEVICE_ATTRIBUTE_*` constant. CUDA 2.0.
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) -> CUresult;
        /// `cuDeviceTotalMem`: the device's memory in bytes. CUDA 3.2.
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult;
        /// The device's PCI address, `0000:00:00.0` and a NUL: 13 bytes; a shorter buffer is
        /// `CUDA_ERROR_INVALID_VALUE`. CUDA 4.1.
        fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: CUdevice) -> CUresult;
        /// `cuDeviceGetUuid` (from 13.0 on): the device's identifier; a MIG instance has its own. CUDA 11.4.
        fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) -> CUresult;

        /// The device's primary context, which every library of the process shares, and one more reference to it. Does
        /// not make it current. CUDA 7.0.
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult;
        /// `cuDevicePrimaryCtxRelease`: gives one reference back; the last one destroys the context with all that is in
        /// it. CUDA 11.0.
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult;
        /// `cuCtxPushCurrent`: makes a context current on this thread, above the one that was. CUDA 4.0.
        fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult;
        /// `cuCtxPopCurrent`: takes the top context off this thread's stack. CUDA 4.0.
        fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult;
        /// The thread's current context, null if it has none. CUDA 4.0.
        fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult;
        /// Replaces the top of this thread's stack; null takes it off. CUDA 4.0.
        fn cuCtxSetCurrent(context: CUcontext) -> CUresult;
        /// Waits for all work of the current context. CUDA 2.0.
        fn cuCtxSynchronize() -> CUresult;

        /// `cuMemAlloc`: device memory, aligned to 256 bytes at least. No bytes is `CUDA_ERROR_INVALID_VALUE`. CUDA 3.2.
        fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> CUresult;
        /// `cuMemFree`: frees it, by the address that the allocation returned. CUDA 3.2.
        fn cuMemFree_v2(address: CUdeviceptr) -> CUresult;
        /// `cuMemGetInfo`: free and total bytes of the current context's device. CUDA 3.2.
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult;
        /// Device memory that exists from this point of the stream on. CUDA 11.2.
        fn cuMemAllocAsync(address: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
        /// Frees device memory at this point of the stream. CUDA 11.2.
        fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult;

        /// Page-locked host memory; `CU_MEMHOSTALLOC_*` flags. CUDA 2.2.
        fn cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint) -> CUresult;
        /// Frees what [`Cuda::cuMemHostAlloc`] returned. CUDA 2.0.
        fn cuMemFreeHost(pointer: *mut c_void) -> CUresult;
        /// `cuMemHostRegister`: page-locks memory that the process has; `CU_MEMHOSTREGISTER_*` flags. Ranges may begin
        /// and end anywhere and share a page, but not a byte. A copy must lie within one range: one that leaves it is
        /// `CUDA_ERROR_INVALID_VALUE`. CUDA 6.5.
        fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint) -> CUresult;
        /// Unlocks a registered range, by its first address. CUDA 4.0.
        fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult;

        /// `cuMemcpyHtoDAsync`: host to device, in stream order. Page-locked memory is read when the copy engine gets
        /// there; other memory is read before the call returns. CUDA 3.2.
        fn cuMemcpyHtoDAsync_v2(destination: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream) -> CUresult;
        /// `cuMemcpyDtoHAsync`: device to host, in stream order; into memory that is not page-locked the call returns
        /// after the copy. CUDA 3.2.
        fn cuMemcpyDtoHAsync_v2(destination: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
        /// `cuMemcpyDtoDAsync`: within device memory, in stream order. CUDA 3.2.
        fn cuMemcpyDtoDAsync_v2(destination: CUdeviceptr, source: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
        /// `cuMemcpy2DAsync`: rows of bytes that lie equally far apart, in stream order. Pitches are at least the width and at most
        /// `CU_DEVICE_ATTRIBUTE_MAX_PITCH`, which is 2 GiB less one on every device. CUDA 3.2.
        fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) -> CUresult;
        /// `cuMemcpyHtoD`: host to device on the default stream, and a wait. CUDA 3.2.
        fn cuMemcpyHtoD_v2(destination: CUdeviceptr, source: *const c_void, bytes: usize) -> CUresult;
        /// `cuMemcpyDtoH`: device to host on the default stream, and a wait. CUDA 3.2.
        fn cuMemcpyDtoH_v2(destination: *mut c_void, source: CUdeviceptr, bytes: usize) -> CUresult;
        /// Fills device memory with one byte's value, in stream order. CUDA 3.2.
        fn cuMemsetD8Async(destination: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream) -> CUresult;

        /// One fact about an address that the driver knows (`CU_POINTER_ATTRIBUTE_*`); of any other address it says
        /// `CUDA_ERROR_INVALID_VALUE`. `data` must have room for that attribute's type. CUDA 4.0.
        fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr) -> CUresult;
        /// Several facts at once. An address that the driver does not know is no error here: the context is null, the
        /// memory type 0, the ordinal -2. CUDA 7.0.
        fn cuPointerGetAttributes(
            count: c_uint, attributes: *mut CUpointer_attribute, data: *mut *mut c_void, address: CUdeviceptr,
        ) -> CUresult;

        /// A new stream; `CU_STREAM_*` flags. CUDA 2.0.
        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult;
        /// A new stream with a priority, a lower number being more urgent; clamped to the device's range. CUDA 5.5.
        fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) -> CUresult;
        /// `cuStreamDestroy`: returns at once; the stream goes when its work is done. CUDA 4.0.
        fn cuStreamDestroy_v2(stream: CUstream) -> CUresult;
        /// Waits for the stream's work. CUDA 2.0.
        fn cuStreamSynchronize(stream: CUstream) -> CUresult;
        /// Whether the stream's work is done: `CUDA_SUCCESS` or `CUDA_ERROR_NOT_READY`. CUDA 2.0.
        fn cuStreamQuery(stream: CUstream) -> CUresult;
        /// Whether work put into the stream becomes part of a graph: a `CU_STREAM_CAPTURE_STATUS_*`. Of the default stream,
        /// while another is captured that waits for it, `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`. CUDA 10.0.
        fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus) -> CUresult;
        /// Swaps this thread's `CU_STREAM_CAPTURE_MODE_*` for another: what it may call while a stream is captured. CUDA 10.1.
        fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> CUresult;
        /// Later work of the stream waits for what the event has recorded by now; an event never recorded holds nothing
        /// up. CUDA 3.2.
        fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> CUresult;

        /// A new event; `CU_EVENT_*` flags. CUDA 2.0.
        fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult;
        /// `cuEventDestroy`: returns at once, also while the event is pending. CUDA 4.0.
        fn cuEventDestroy_v2(event: CUevent) -> CUresult;
        /// Puts the event at this point of the stream; both belong to one context. CUDA 2.0.
        fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult;
        /// Whether the stream has come to the event: `CUDA_SUCCESS` (also if never recorded) or `CUDA_ERROR_NOT_READY`.
        /// CUDA 2.0.
        fn cuEventQuery(event: CUevent) -> CUresult;
        /// Waits for the event. CUDA 2.0.
        fn cuEventSynchronize(event: CUevent) -> CUresult;
        /// Milliseconds between two recorded, timed events. From 13.0 on `cuda.h` maps the name to
        /// [`Cuda::cuEventElapsedTime_v2`]; this symbol stays exported and has the same signature. CUDA 2.0.
        fn cuEventElapsedTime(milliseconds: *mut c_float, start: CUevent, end: CUevent) -> CUresult;

        /// Loads device code: PTX (a C string), a cubin or a fatbin, which carry their own length. CUDA 2.0.
        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult;
        /// Unloads it. CUDA 2.0.
        fn cuModuleUnload(module: CUmodule) -> CUresult;
        /// A kernel of a module by its (mangled) name. CUDA 2.0.
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> CUresult;
        /// Puts a kernel into a stream. `parameters` points to one pointer for each parameter; all are read before the
        /// call returns. CUDA 4.0.
        fn cuLaunchKernel(
            function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void,
        ) -> CUresult;
    }
    optional: {
        /// `cuEventElapsedTime` (from 13.0 on). CUDA 12.8.
        fn cuEventElapsedTime_v2(milliseconds: *mut c_float, start: CUevent, end: CUevent) -> CUresult;
        /// `cuMemcpyBatchAsync` of CUDA 12.8 and 12.9: many copies in one call, in no order among themselves. Says in
        /// `fail_index` which copy was wrong (`SIZE_MAX`: none in particular). Not on the legacy default stream.
        fn cuMemcpyBatchAsync(
            destinations: *mut CUdeviceptr, sources: *mut CUdeviceptr, sizes: *mut usize, count: usize,
            attributes: *mut CUmemcpyAttributes, attribute_starts: *mut usize, attribute_count: usize,
            fail_index: *mut usize, stream: CUstream,
        ) -> CUresult;
        /// `cuMemcpyBatchAsync` from CUDA 13.0 on: the same without `fail_index`, hence another binary interface.
        fn cuMemcpyBatchAsync_v2(
            destinations: *mut CUdeviceptr, sources: *mut CUdeviceptr, sizes: *mut usize, count: usize,
            attributes: *mut CUmemcpyAttributes, attribute_starts: *mut usize, attribute_count: usize, stream: CUstream,
        ) -> CUresult;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_is_the_only_library_tried() {
        let error = Cuda::load(Some(Path::new("/nonexistent/libcuda.so.1"))).expect_err("no such file");
        let LoadError::NotOpened { attempts } = error else { panic!("{error:?}") };
        assert_eq!(attempts.len(), 1);
        assert_eq!(attempts[0].name, Path::new("/nonexistent/libcuda.so.1"));
    }

    #[test]
    fn a_library_that_is_no_driver_is_refused_by_the_first_symbol_that_it_lacks() {
        let error = Cuda::load(Some(Path::new("libc.so.6"))).expect_err("the C library is no driver");
        let LoadError::MissingSymbol { library, symbol, .. } = error else { panic!("{error:?}") };
        assert_eq!((library.as_path(), symbol.as_str()), (Path::new("libc.so.6"), "cuInit"));
    }

    #[test]
    fn without_an_override_every_usual_place_is_tried_before_giving_up() {
        // On a machine with a driver this loads it, which is as good an answer.
        if let Err(error) = Cuda::load(None) {
            let LoadError::NotOpened { attempts } = error else { panic!("{error:?}") };
            assert_eq!(attempts.len(), LIBRARY_NAMES.len());
        }
    }
}
