//! The types of cuFile, as they stand in `cufile.h`. The sizes asserted below are those that a C compiler gives for the
//! headers of 1.14, 1.15 and 1.20 on x86-64.

use std::ffi::{c_int, c_uint, c_void};

use crate::cuda::CUresult;

/// A code of cuFile's own (`CUfileOpError`, a C enum): 0, or 5001 and up. A newtype over the number, not a Rust enum: a newer
/// library may answer with codes that no header of ours knows, and those must survive.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CUfileOpError(pub c_int);

/// What most functions return, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUfileError_t {
    /// The code.
    pub err: CUfileOpError,
    /// CUDA's code. It means something if `err` is [`CU_FILE_CUDA_DRIVER_ERROR`](super::CU_FILE_CUDA_DRIVER_ERROR), and nothing
    /// else: on some machines it holds a failure beside success.
    pub cu_err: CUresult,
}

/// A registered file. A pointer of the library's.
pub type CUfileHandle_t = *mut c_void;

/// C's `off_t` on 64-bit Linux.
pub type off_t = i64;

/// A kind of storage (`CUfileDriverStatusFlags`): the number of a bit in [`CUfileNvfsProps`]' `dstatusflags`.
pub type CUfileDriverStatusFlags_t = c_uint;

/// Bits of peer-to-peer mechanisms.
pub type CUfileP2PFlags_t = c_uint;

/// A switch of the configuration (`CUFILE_PARAM_*`).
pub type CUFileBoolConfigParameter_t = c_uint;

/// A number of the configuration (`CUFILE_PARAM_*`).
pub type CUFileSizeTConfigParameter_t = c_uint;

/// What a file is given by: a descriptor, or something of Windows'.
#[repr(C)]
#[derive(Clone, Copy)]
pub union CUfileDescrHandle {
    /// With [`CU_FILE_HANDLE_TYPE_OPAQUE_FD`](super::CU_FILE_HANDLE_TYPE_OPAQUE_FD).
    pub fd: c_int,
    /// With the others.
    pub handle: *mut c_void,
}

/// A file to be registered.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUfileDescr_t {
    /// What `handle` is (`type` in C).
    pub kind: c_uint,
    /// The file.
    pub handle: CUfileDescrHandle,
    /// For filesystems in user space; null otherwise.
    pub fs_ops: *const c_void,
}

impl CUfileDescr_t {
    /// A file by its descriptor.
    pub const fn of_descriptor(fd: c_int) -> Self {
        // The whole union is written, its upper half with zeros, so that no byte that the library might read is unset.
        let mut handle = CUfileDescrHandle { handle: std::ptr::null_mut() };
        handle.fd = fd;
        Self { kind: super::CU_FILE_HANDLE_TYPE_OPAQUE_FD, handle, fs_ops: std::ptr::null() }
    }
}

/// The part of the properties that is about nvidia-fs. All sizes are in KiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUfileNvfsProps {
    /// The version of nvidia-fs; 0.0 without it, which is not to say that there is no direct path.
    pub major_version: c_uint,
    /// Its second part.
    pub minor_version: c_uint,
    /// Up to this size requests are polled for, if they are at all.
    pub poll_thresh_size: usize,
    /// The largest request; larger ones are cut by the library.
    pub max_direct_io_size: usize,
    /// A bit for each kind of storage that is served, by its `CU_FILE_*_SUPPORTED`.
    pub dstatusflags: c_uint,
    /// A bit for each `CU_FILE_*_MODE` that is on.
    pub dcontrolflags: c_uint,
}

/// What the library found and how it is set up. Sizes are in KiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUfileDrvProps_t {
    /// About nvidia-fs.
    pub nvfs: CUfileNvfsProps,
    /// A bit for each feature (`CU_FILE_*_SUPPORTED` of `CUfileFeatureFlags`).
    pub fflags: c_uint,
    /// The library's own device memory, in all.
    pub max_device_cache_size: c_uint,
    /// The same for one buffer.
    pub per_buffer_cache_size: c_uint,
    /// The most device memory that may be registered, the library's own included.
    pub max_device_pinned_mem_size: c_uint,
    /// The most requests of a batch.
    pub max_batch_io_size: c_uint,
    /// How long a batch is waited for.
    pub max_batch_io_timeout_msecs: c_uint,
}

/// What was counted for one GPU. Counts of operations begin with `n_`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it, in pairs for reads and writes")]
pub struct CUfilePerGpuStats_t {
    /// Which GPU, as `cuDeviceGetUuid` gives it.
    pub uuid: [u8; 16],
    pub read_bytes: u64,
    pub read_bw_bytes_per_sec: u64,
    pub read_utilization: u64,
    pub read_duration_us: u64,
    pub n_total_reads: u64,
    /// By the kernel's peer-to-peer DMA.
    pub n_p2p_reads: u64,
    /// By nvidia-fs.
    pub n_nvfs_reads: u64,
    /// In compatibility mode: through host memory.
    pub n_posix_reads: u64,
    pub n_unaligned_reads: u64,
    pub n_dr_reads: u64,
    pub n_sparse_regions: u64,
    pub n_inline_regions: u64,
    pub n_reads_err: u64,
    /// `writes_bytes` in the header too.
    pub writes_bytes: u64,
    pub write_bw_bytes_per_sec: u64,
    pub write_utilization: u64,
    pub write_duration_us: u64,
    pub n_total_writes: u64,
    pub n_p2p_writes: u64,
    pub n_nvfs_writes: u64,
    pub n_posix_writes: u64,
    pub n_unaligned_writes: u64,
    pub n_dr_writes: u64,
    pub n_writes_err: u64,
    /// Registrations of device memory, tried, done, failed and ended.
    pub n_mmap: u64,
    pub n_mmap_ok: u64,
    pub n_mmap_err: u64,
    pub n_mmap_free: u64,
    pub reg_bytes: u64,
}

// The C layouts: a mistake here would be memory corruption there.
const _: () = assert!(size_of::<CUfileError_t>() == 8 && align_of::<CUfileError_t>() == 4);
const _: () = assert!(size_of::<CUfileDescr_t>() == 24 && std::mem::offset_of!(CUfileDescr_t, handle) == 8);
const _: () = assert!(std::mem::offset_of!(CUfileDescr_t, fs_ops) == 16);
const _: () = assert!(size_of::<CUfileDrvProps_t>() == 56 && align_of::<CUfileDrvProps_t>() == 8);
const _: () = assert!(std::mem::offset_of!(CUfileNvfsProps, dstatusflags) == 24 && size_of::<CUfileNvfsProps>() == 32);
const _: () = assert!(std::mem::offset_of!(CUfileDrvProps_t, fflags) == 32);
const _: () = assert!(std::mem::offset_of!(CUfileDrvProps_t, max_batch_io_timeout_msecs) == 52);
const _: () = assert!(size_of::<CUfilePerGpuStats_t>() == 248 && align_of::<CUfilePerGpuStats_t>() == 8);
const _: () = assert!(std::mem::offset_of!(CUfilePerGpuStats_t, n_p2p_reads) == 56);
const _: () = assert!(std::mem::offset_of!(CUfilePerGpuStats_t, writes_bytes) == 120);
const _: () = assert!(std::mem::offset_of!(CUfilePerGpuStats_t, n_p2p_writes) == 160);
const _: () = assert!(std::mem::offset_of!(CUfilePerGpuStats_t, reg_bytes) == 240);
