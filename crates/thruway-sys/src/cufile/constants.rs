//! The constants of cuFile that Thruway uses, each under its name in `cufile.h`; its codes are in `codes`. Read from the
//! headers of 1.14 to 1.20, which agree on all of them where they have them.

use std::ffi::c_uint;

use super::types::{CUFileBoolConfigParameter_t, CUFileSizeTConfigParameter_t, CUfileDriverStatusFlags_t};

// enum CUfileFileHandleType.

/// The file is given by its descriptor.
pub const CU_FILE_HANDLE_TYPE_OPAQUE_FD: c_uint = 1;

// enum CUfileDriverStatusFlags: numbers of bits.

/// NVMe drives are served.
pub const CU_FILE_NVME_SUPPORTED: CUfileDriverStatusFlags_t = 4;

// enum CUfileDriverControlFlags: numbers of bits.

/// Compatibility mode is allowed: what cannot go directly goes through host memory, with no word said.
pub const CU_FILE_ALLOW_COMPAT_MODE: c_uint = 1;

// enum CUfileFeatureFlags: numbers of bits.

/// The kernel's peer-to-peer DMA is used (1.16).
pub const CU_FILE_P2P_SUPPORTED: c_uint = 4;

// enum CUfileP2PFlags: numbers of bits.

/// The kernel's peer-to-peer DMA.
pub const CUFILE_P2PDMA: c_uint = 0;
/// nvidia-fs.
pub const CUFILE_NVFS: c_uint = 1;

// enum CUFileBoolConfigParameter_t.

/// `properties.allow_compat_mode`.
pub const CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE: CUFileBoolConfigParameter_t = 1;
/// `properties.force_compat_mode`.
pub const CUFILE_PARAM_FORCE_COMPAT_MODE: CUFileBoolConfigParameter_t = 2;
/// `properties.use_pci_p2pdma`.
pub const CUFILE_PARAM_USE_PCIP2PDMA: CUFileBoolConfigParameter_t = 7;

// enum CUFileSizeTConfigParameter_t.

/// `properties.max_direct_io_size_kb`, in KiB.
pub const CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB: CUFileSizeTConfigParameter_t = 5;
/// `properties.max_device_pinned_mem_size_kb`, in KiB.
pub const CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB: CUFileSizeTConfigParameter_t = 8;
