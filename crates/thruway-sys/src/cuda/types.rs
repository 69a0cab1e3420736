//! The types of the driver API, as they stand in `cuda.h`.

use std::ffi::{c_int, c_uint, c_void};
use std::marker::{PhantomData, PhantomPinned};

/// What a driver call answers (`CUresult`, a C enum). A newtype over the number, not a Rust enum: a newer driver may
/// answer with codes that no header of ours knows, and those must survive.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CUresult(pub c_uint);

/// A device's handle (`CUdevice`): an `int`, in practice its ordinal.
pub type CUdevice = c_int;

/// An address in GPU memory (`CUdeviceptr`). An integer, as in C: the host must not dereference it.
pub type CUdeviceptr = u64;

/// Which fact `cuDeviceGetAttribute` is asked for (`CUdevice_attribute`).
pub type CUdevice_attribute = c_uint;

/// Which fact `cuPointerGetAttribute` is asked for (`CUpointer_attribute`).
pub type CUpointer_attribute = c_uint;

/// Whether a stream is captured: a `CU_STREAM_CAPTURE_STATUS_*` constant.
pub type CUstreamCaptureStatus = c_uint;

/// What a thread may call while a stream is captured: a `CU_STREAM_CAPTURE_MODE_*` constant.
pub type CUstreamCaptureMode = c_uint;

/// Marks a type that only the driver can make: it has no size that we know, does not move and is not ours to share.
type Opaque = PhantomData<(*mut u8, PhantomPinned)>;

/// What a [`CUcontext`] points to. Opaque.
#[repr(C)]
pub struct CUctx_st {
    _data: [u8; 0],
    _opaque: Opaque,
}

/// What a [`CUstream`] points to. Opaque.
#[repr(C)]
pub struct CUstream_st {
    _data: [u8; 0],
    _opaque: Opaque,
}

/// What a [`CUevent`] points to. Opaque.
#[repr(C)]
pub struct CUevent_st {
    _data: [u8; 0],
    _opaque: Opaque,
}

/// What a [`CUmodule`] points to. Opaque.
#[repr(C)]
pub struct CUmod_st {
    _data: [u8; 0],
    _opaque: Opaque,
}

/// What a [`CUfunction`] points to. Opaque.
#[repr(C)]
pub struct CUfunc_st {
    _data: [u8; 0],
    _opaque: Opaque,
}

/// A context: one process's state on one device.
pub type CUcontext = *mut CUctx_st;

/// A stream: a queue of work on a device, carried out in order.
pub type CUstream = *mut CUstream_st;

/// An event: a mark in a stream, to be waited for.
pub type CUevent = *mut CUevent_st;

/// A module: loaded device code.
pub type CUmodule = *mut CUmod_st;

/// A kernel in a module.
pub type CUfunction = *mut CUfunc_st;

/// A device's unique identifier (`CUuuid`): 16 bytes, printed in the usual 8-4-4-4-12 form after `GPU-` or `MIG-`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUuuid {
    /// The bytes, first to last. `char` in C, whose sign means nothing here.
    pub bytes: [u8; 16],
}

/// A place where memory may live (`CUmemLocation`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUmemLocation {
    /// What kind of place (`CUmemLocationType`); 0 says nothing about it.
    pub kind: c_uint,
    /// Which one of that kind.
    pub id: c_int,
}

/// How the copies of a batch behave (`CUmemcpyAttributes`, CUDA 12.8).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUmemcpyAttributes {
    /// When the source may be read: one of the `CU_MEMCPY_SRC_ACCESS_ORDER_*` constants; 0 is refused.
    pub src_access_order: c_uint,
    /// Where the source is. A hint, read for managed and pageable memory only.
    pub src_loc_hint: CUmemLocation,
    /// Where the destination is. A hint, likewise.
    pub dst_loc_hint: CUmemLocation,
    /// `CU_MEMCPY_FLAG_*`.
    pub flags: c_uint,
}

/// A copy of rows (`CUDA_MEMCPY2D_v2`). Of each side the kind of memory says which of its addresses is read; the others are 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_MEMCPY2D {
    /// Where in each row of the source the copy begins, in bytes.
    pub srcXInBytes: usize,
    /// Which row of the source is the first.
    pub srcY: usize,
    /// What kind of memory the source is: a `CU_MEMORYTYPE_*` constant.
    pub srcMemoryType: c_uint,
    /// Its address in host memory.
    pub srcHost: *const c_void,
    /// Its address in device memory.
    pub srcDevice: CUdeviceptr,
    /// Its array, a kind of memory that is not used here.
    pub srcArray: *mut c_void,
    /// From the beginning of one of its rows to that of the next, in bytes.
    pub srcPitch: usize,
    /// Likewise of the destination.
    pub dstXInBytes: usize,
    /// Likewise.
    pub dstY: usize,
    /// Likewise.
    pub dstMemoryType: c_uint,
    /// Likewise.
    pub dstHost: *mut c_void,
    /// Likewise.
    pub dstDevice: CUdeviceptr,
    /// Likewise.
    pub dstArray: *mut c_void,
    /// Likewise.
    pub dstPitch: usize,
    /// The bytes of each row that are copied.
    pub WidthInBytes: usize,
    /// How many rows.
    pub Height: usize,
}

// The C layouts: a mistake here would be memory corruption there.
const _: () = assert!(size_of::<CUuuid>() == 16 && align_of::<CUuuid>() == 1);
const _: () = assert!(size_of::<CUmemLocation>() == 8);
const _: () = assert!(size_of::<CUDA_MEMCPY2D>() == 128 && std::mem::offset_of!(CUDA_MEMCPY2D, dstXInBytes) == 56);
const _: () = assert!(size_of::<CUmemcpyAttributes>() == 24 && align_of::<CUmemcpyAttributes>() == 4);
const _: () = assert!(std::mem::offset_of!(CUmemcpyAttributes, flags) == 20);
