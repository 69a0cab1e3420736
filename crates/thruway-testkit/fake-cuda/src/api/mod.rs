//! The driver's functions, as `cuda.h` declares them. Only what differs from the driver's documentation is said here.

#![allow(clippy::missing_safety_doc, reason = "each function asks for what the driver's function of its name asks for")]

mod copy;
mod device;
mod event;
mod memory;
mod module;
mod stream;

pub use copy::*;
pub use device::*;
pub use event::*;
pub use memory::*;
pub use module::*;
pub use stream::*;

use thruway_sys::cuda::Cuda;

/// Declares which functions are exported: their names, for rules that make calls fail, and a check by the compiler that
/// each has the very type that the product's table expects.
macro_rules! exported {
    (required: $($name:ident)* ; optional: $($optional:ident)*) => {
        /// Every exported function of the driver.
        pub const SYMBOLS: &[&str] = &[$(stringify!($name),)* $(stringify!($optional),)*];

        const _: fn(&mut Cuda) = |table| {
            $(table.$name = $name;)*
            $(table.$optional = Some($optional);)*
        };
    };
}

exported! {
    required:
        cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString
        cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDeviceTotalMem_v2 cuDeviceGetPCIBusId
        cuDeviceGetUuid_v2
        cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetCurrent
        cuCtxSetCurrent cuCtxSynchronize
        cuMemAlloc_v2 cuMemFree_v2 cuMemGetInfo_v2 cuMemAllocAsync cuMemFreeAsync
        cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
        cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemsetD8Async
        cuMemcpy2DAsync_v2
        cuPointerGetAttribute cuPointerGetAttributes
        cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize cuStreamQuery cuStreamWaitEvent
        cuStreamIsCapturing cuThreadExchangeStreamCaptureMode
        cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize cuEventElapsedTime
        cuModuleLoadData cuModuleUnload cuModuleGetFunction cuLaunchKernel;
    optional:
        cuEventElapsedTime_v2 cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
}
