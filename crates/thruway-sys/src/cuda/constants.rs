//! The constants of the driver API that Thruway uses, each under its name in `cuda.h` (the enum or group is named
//! above it). Read from the headers of CUDA 11.8, 12.8 and 13.0, which agree on all of them where they have them.

use std::ffi::c_uint;
use std::ptr::without_provenance_mut;

use super::types::{CUdevice_attribute, CUpointer_attribute, CUresult, CUstream};

// enum CUresult (cudaError_enum): the codes that Thruway reacts to or that its test driver answers.

/// The call did what it was asked; for a query, the work is done.
pub const CUDA_SUCCESS: CUresult = CUresult(0);
/// An argument is out of range, an address belongs to no allocation, a range crosses its end.
pub const CUDA_ERROR_INVALID_VALUE: CUresult = CUresult(1);
/// Not enough device memory, or host memory that could not be pinned.
pub const CUDA_ERROR_OUT_OF_MEMORY: CUresult = CUresult(2);
/// `cuInit` has not run in this process; also every call in a child forked after it.
pub const CUDA_ERROR_NOT_INITIALIZED: CUresult = CUresult(3);
/// The driver is shutting down: the process is exiting.
pub const CUDA_ERROR_DEINITIALIZED: CUresult = CUresult(4);
/// The library is the toolkit's link-time stub, not a driver.
pub const CUDA_ERROR_STUB_LIBRARY: CUresult = CUresult(34);
/// The device is busy or in a mode that forbids another context.
pub const CUDA_ERROR_DEVICE_UNAVAILABLE: CUresult = CUresult(46);
/// There is no GPU that this process may use.
pub const CUDA_ERROR_NO_DEVICE: CUresult = CUresult(100);
/// No device has that ordinal.
pub const CUDA_ERROR_INVALID_DEVICE: CUresult = CUresult(101);
/// The device code is not code that the driver understands.
pub const CUDA_ERROR_INVALID_IMAGE: CUresult = CUresult(200);
/// No context is current on this thread, or the handle is not a context.
pub const CUDA_ERROR_INVALID_CONTEXT: CUresult = CUresult(201);
/// The device code has no form for this GPU.
pub const CUDA_ERROR_NO_BINARY_FOR_GPU: CUresult = CUresult(209);
/// Device memory lost bits. The context is unusable from here on.
pub const CUDA_ERROR_ECC_UNCORRECTABLE: CUresult = CUresult(214);
/// A call to the operating system failed inside the driver.
pub const CUDA_ERROR_OPERATING_SYSTEM: CUresult = CUresult(304);
/// A stream, event or other handle is not valid here.
pub const CUDA_ERROR_INVALID_HANDLE: CUresult = CUresult(400);
/// A named symbol does not exist.
pub const CUDA_ERROR_NOT_FOUND: CUresult = CUresult(500);
/// Not an error: work that was queried is still under way.
pub const CUDA_ERROR_NOT_READY: CUresult = CUresult(600);
/// The device touched an address that it may not. Sticky: every later call in the context answers this.
pub const CUDA_ERROR_ILLEGAL_ADDRESS: CUresult = CUresult(700);
/// A kernel needs more than the device has.
pub const CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: CUresult = CUresult(701);
/// The current context has been destroyed, or the primary context was released.
pub const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = CUresult(709);
/// Part of the host range is pinned already.
pub const CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: CUresult = CUresult(712);
/// The host address is not the start of a registered range.
pub const CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: CUresult = CUresult(713);
/// A kernel died. Sticky.
pub const CUDA_ERROR_LAUNCH_FAILED: CUresult = CUresult(719);
/// The operation is not permitted.
pub const CUDA_ERROR_NOT_PERMITTED: CUresult = CUresult(800);
/// This driver or device does not do that.
pub const CUDA_ERROR_NOT_SUPPORTED: CUresult = CUresult(801);
/// A system service that the driver needs (the fabric manager, for one) is not up yet.
pub const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = CUresult(802);
/// The library and the kernel module are of different versions.
pub const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: CUresult = CUresult(803);
/// A forward-compatibility library was loaded on a GPU that cannot use it.
pub const CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: CUresult = CUresult(804);
/// The call is not permitted while a stream is captured.
pub const CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: CUresult = CUresult(900);
/// The default stream was used while a stream is captured that waits for it.
pub const CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: CUresult = CUresult(906);
/// The driver cannot say what failed.
pub const CUDA_ERROR_UNKNOWN: CUresult = CUresult(999);

// enum CUdevice_attribute.

/// How many multiprocessors the device has.
pub const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: CUdevice_attribute = 16;
/// 1 if the GPU shares the host's memory, so that a copy engine has nothing to gain.
pub const CU_DEVICE_ATTRIBUTE_INTEGRATED: CUdevice_attribute = 18;
/// 1 if the device can map host memory.
pub const CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: CUdevice_attribute = 19;
/// The PCI bus number.
pub const CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: CUdevice_attribute = 33;
/// The PCI device (slot) number.
pub const CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: CUdevice_attribute = 34;
/// How many copy engines run beside kernels: 2 or more means both directions at once.
pub const CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: CUdevice_attribute = 40;
/// 1 if host and device share one address space.
pub const CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: CUdevice_attribute = 41;
/// The PCI domain number.
pub const CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: CUdevice_attribute = 50;
/// The compute capability's first number.
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: CUdevice_attribute = 75;
/// The compute capability's second number.
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: CUdevice_attribute = 76;
/// 1 if streams may have priorities.
pub const CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: CUdevice_attribute = 78;
/// 1 if the device can read ordinary host memory by itself.
pub const CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS: CUdevice_attribute = 88;
/// 1 if registered host memory has one address on both sides.
pub const CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: CUdevice_attribute = 91;
/// 1 if `cuMemHostRegister` works.
pub const CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: CUdevice_attribute = 99;
/// 1 if the device walks the host's page tables, so that registering pins nothing.
pub const CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: CUdevice_attribute = 100;
/// 1 if memory from `cuMemCreate` can be a target of peer DMA.
pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: CUdevice_attribute = 110;
/// 1 if read-only host memory can be registered as such.
pub const CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: CUdevice_attribute = 113;
/// 1 if `cuMemAllocAsync` works.
pub const CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: CUdevice_attribute = 115;
/// 1 if device memory can be a target of peer DMA.
pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: CUdevice_attribute = 116;
/// 1 if device memory can be shared as a dma-buf.
pub const CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: CUdevice_attribute = 124;
/// The host's NUMA node nearest to the device, -1 where there is none (absent before CUDA 12).
pub const CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: CUdevice_attribute = 134;

// enum CUpointer_attribute, with the type that each one writes.

/// `CUcontext`: where the memory was allocated or registered.
pub const CU_POINTER_ATTRIBUTE_CONTEXT: CUpointer_attribute = 1;
/// `unsigned`: one of the `CU_MEMORYTYPE_*` constants.
pub const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CUpointer_attribute = 2;
/// `CUdeviceptr`: the address for the device.
pub const CU_POINTER_ATTRIBUTE_DEVICE_POINTER: CUpointer_attribute = 3;
/// `void *`: the address for the host.
pub const CU_POINTER_ATTRIBUTE_HOST_POINTER: CUpointer_attribute = 4;
/// `unsigned`, 1: synchronous copies of this memory are truly synchronous.
pub const CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: CUpointer_attribute = 6;
/// `unsigned long long`: a number never used twice for an allocation: tells a new one at an old address.
pub const CU_POINTER_ATTRIBUTE_BUFFER_ID: CUpointer_attribute = 7;
/// `unsigned`: 1 for managed memory.
pub const CU_POINTER_ATTRIBUTE_IS_MANAGED: CUpointer_attribute = 8;
/// `int`: the device; -2 if the driver does not know the memory.
pub const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: CUpointer_attribute = 9;
/// `CUdeviceptr`: where the allocation begins.
pub const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: CUpointer_attribute = 11;
/// `size_t`: how long the allocation is, as it was asked for.
pub const CU_POINTER_ATTRIBUTE_RANGE_SIZE: CUpointer_attribute = 12;
/// `unsigned`: 1 if the address has memory behind it.
pub const CU_POINTER_ATTRIBUTE_MAPPED: CUpointer_attribute = 13;
/// `unsigned`: 1 if the memory can be a target of peer DMA.
pub const CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: CUpointer_attribute = 15;

// enum CUmemorytype.

/// Pinned host memory.
pub const CU_MEMORYTYPE_HOST: c_uint = 1;
/// Device memory.
pub const CU_MEMORYTYPE_DEVICE: c_uint = 2;
/// A texture array.
pub const CU_MEMORYTYPE_ARRAY: c_uint = 3;
/// Memory of either kind in one address space.
pub const CU_MEMORYTYPE_UNIFIED: c_uint = 4;

// enum CUstream_flags, and the streams that always exist.

/// A stream that waits for the default stream, and it for the stream.
pub const CU_STREAM_DEFAULT: c_uint = 0;
/// A stream that has nothing to do with the default stream.
pub const CU_STREAM_NON_BLOCKING: c_uint = 1;

/// The default stream, by its old meaning: it waits for every blocking stream of the context, and they for it. A null
/// stream means the same.
pub const CU_STREAM_LEGACY: CUstream = without_provenance_mut(1);
/// The calling thread's own default stream.
pub const CU_STREAM_PER_THREAD: CUstream = without_provenance_mut(2);

// enum CUevent_flags and CUevent_wait_flags.

/// Timed; waiting for it spins or sleeps as the context says.
pub const CU_EVENT_DEFAULT: c_uint = 0;
/// `cuEventSynchronize` sleeps.
pub const CU_EVENT_BLOCKING_SYNC: c_uint = 1;
/// Not timed, and cheaper for it.
pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;
/// May be shared with another process; needs `CU_EVENT_DISABLE_TIMING` beside it.
pub const CU_EVENT_INTERPROCESS: c_uint = 4;
/// For `cuStreamWaitEvent`: an ordinary wait.
pub const CU_EVENT_WAIT_DEFAULT: c_uint = 0;

// enum CUstreamCaptureStatus.

/// The stream is not captured.
pub const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
/// It is.
pub const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;

// enum CUstreamCaptureMode.

/// While any thread captures in this mode, no thread in this mode may make a call that could wait or allocate. The default.
pub const CU_STREAM_CAPTURE_MODE_GLOBAL: c_uint = 0;
/// Only a thread's own captures forbid it such calls.
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;
/// Nothing does.
pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;

// enum CUctx_flags.

/// Waiting threads sleep.
pub const CU_CTX_SCHED_BLOCKING_SYNC: c_uint = 4;

// CU_MEMHOSTALLOC_*.

/// Pinned for every context, not the current one alone.
pub const CU_MEMHOSTALLOC_PORTABLE: c_uint = 0x01;
/// Mapped into the device's address space too.
pub const CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 0x02;
/// Fast for the CPU to write in order, and very slow for it to read.
pub const CU_MEMHOSTALLOC_WRITECOMBINED: c_uint = 0x04;

// CU_MEMHOSTREGISTER_*.

/// Pinned for every context, not the current one alone.
pub const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 0x01;
/// Mapped into the device's address space too.
pub const CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 0x02;
/// The range is another device's memory.
pub const CU_MEMHOSTREGISTER_IOMEMORY: c_uint = 0x04;
/// The device only reads it: needed for memory that the process may not write.
pub const CU_MEMHOSTREGISTER_READ_ONLY: c_uint = 0x08;

// enum CUmemcpySrcAccessOrder and CUmemcpyFlags (CUDA 12.8).

/// The source is read when the stream gets there.
pub const CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: c_uint = 1;
/// The source is read before the call returns.
pub const CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: c_uint = 2;
/// The source may be read at any time from the call to the copy's end.
pub const CU_MEMCPY_SRC_ACCESS_ORDER_ANY: c_uint = 3;
/// Nothing special.
pub const CU_MEMCPY_FLAG_DEFAULT: c_uint = 0;
/// Rather beside kernels than fast.
pub const CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: c_uint = 1;
