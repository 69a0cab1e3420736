//! cuFile's functions, as `cufile.h` declares them. Only what differs from their documentation is said here.

#![allow(clippy::missing_safety_doc, reason = "each function asks for what cuFile's function of its name asks for")]

use std::ffi::{c_int, c_void};
use std::sync::PoisonError;

use thruway_sys::cufile::*;

use crate::config::{Counters, Way};
use crate::io::{Operation, perform, write_report};
use crate::stats;
use crate::world::{Answer, Buffer, Handle, SHARED, World, call, lock};

/// Declares which functions are exported, and checks that each has the very type that the product's table expects.
macro_rules! exported {
    (required: $($name:ident)* ; optional: $($optional:ident)*) => {
        /// Every exported function of cuFile.
        pub const SYMBOLS: &[&str] = &[$(stringify!($name),)* $(stringify!($optional),)*];

        const _: fn(&mut CuFile) = |table| {
            $(table.$name = $name;)*
            $(table.$optional = Some($optional);)*
        };
    };
}

exported! {
    required:
        cuFileDriverOpen cuFileDriverClose_v2 cuFileDriverGetProperties cuFileHandleRegister cuFileHandleDeregister
        cuFileBufRegister cuFileBufDeregister cuFileRead cuFileWrite;
    optional:
        cuFileGetVersion cuFileGetParameterBool cuFileSetParameterBool cuFileGetParameterSizeT cuFileSetParameterSizeT
        cuFileSetStatsLevel cuFileGetStatsLevel cuFileStatsStart cuFileStatsStop cuFileGetStatsL3 cuFileDriverGetP2PFlags
}

/// Writes a result where the caller wants it.
unsafe fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(CU_FILE_INVALID_VALUE);
    }
    // SAFETY: not null, so valid, as cuFile asks.
    unsafe { out.write(value) };
    Ok(())
}

fn open(world: &mut World) -> Answer {
    if world.open {
        return Err(CU_FILE_DRIVER_ALREADY_OPEN);
    }
    if world.config.damage {
        // SAFETY: what is seen to happen on machines without nvidia-fs, in a test that looks for it.
        unsafe { libc::close(0) };
    }
    let driver = world.driver("cuFileDriverOpen").ok_or(CU_FILE_NVFS_SETUP_ERROR)?;
    let forced = world.switches.get(&CUFILE_PARAM_FORCE_COMPAT_MODE).copied().unwrap_or(false);
    if forced {
        world.config.way = Way::Posix;
    }
    let allowed = world.switches.get(&CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE).copied();
    if world.config.way == Way::Posix && !allowed.unwrap_or(world.config.allow_compat) {
        return Err(CU_FILE_DRIVER_NOT_INITIALIZED);
    }
    let of_device = |ordinal| CUfilePerGpuStats_t { uuid: driver.uuid(ordinal), ..CUfilePerGpuStats_t::default() };
    let counted = if world.config.counters == Counters::Absent { 0 } else { driver.device_count() };
    world.gpus = (0..counted).map(of_device).collect();
    world.open = true;
    Ok(())
}

/// Does not come back with a spin where there is no CUDA driver, but with 5033 and a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverOpen() -> CUfileError_t {
    drop(SHARED.released.wait_while(lock(), |world| world.held).unwrap_or_else(PoisonError::into_inner));
    call("cuFileDriverOpen", open)
}

/// A driver that is closed while files or memory are registered is a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverClose_v2() -> CUfileError_t {
    call("cuFileDriverClose_v2", |world| {
        if !world.open {
            return Err(CU_FILE_DRIVER_NOT_INITIALIZED);
        }
        if !(world.handles.is_empty() && world.buffers.is_empty()) {
            let left = format!("{} files and {} ranges are registered", world.handles.len(), world.buffers.len());
            world.fault("closed_with_registrations", left);
        }
        (world.open, world.counting) = (false, false);
        write_report(world);
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(properties: *mut CUfileDrvProps_t) -> CUfileError_t {
    call("cuFileDriverGetProperties", |world| {
        let way = world.config.way;
        let nvfs = CUfileNvfsProps {
            major_version: if way == Way::Nvfs { 2 } else { 0 },
            minor_version: if way == Way::Nvfs { 28 } else { 0 },
            max_direct_io_size: 16_384,
            dstatusflags: if way == Way::Posix { 0 } else { 1 << CU_FILE_NVME_SUPPORTED },
            dcontrolflags: if way == Way::Posix { 1 << CU_FILE_ALLOW_COMPAT_MODE } else { 0 },
            ..CUfileNvfsProps::default()
        };
        let pinned = u32::try_from(world.config.pinned_max >> 10).unwrap_or(u32::MAX);
        let fflags = if way == Way::P2p { 1 << CU_FILE_P2P_SUPPORTED } else { 0 };
        let found = CUfileDrvProps_t { nvfs, fflags, max_device_pinned_mem_size: pinned, ..CUfileDrvProps_t::default() };
        // SAFETY: null or writable, as cuFile asks.
        unsafe { put(properties, found) }
    })
}

/// What is open under a descriptor, and with which flags.
fn file_of(fd: c_int) -> Option<(libc::stat, c_int)> {
    // SAFETY: a structure of numbers, which may all be 0.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a local that lives through the call; a descriptor that is not open is an error.
    let found = unsafe { libc::fstat(fd, &raw mut stat) } == 0;
    // SAFETY: no pointer is passed.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    (found && flags >= 0).then_some((stat, flags))
}

/// Opens the driver if nobody has, as the real one does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut CUfileHandle_t, description: *mut CUfileDescr_t) -> CUfileError_t {
    call("cuFileHandleRegister", |world| {
        if handle.is_null() || description.is_null() {
            return Err(CU_FILE_INVALID_VALUE);
        }
        if !world.open {
            open(world)?;
        }
        // SAFETY: not null, so valid, as cuFile asks.
        let description = unsafe { *description };
        if description.kind != CU_FILE_HANDLE_TYPE_OPAQUE_FD {
            return Err(CU_FILE_INVALID_FILE_TYPE);
        }
        // SAFETY: the kind says that it is a descriptor.
        let fd = unsafe { description.handle.fd };
        let (stat, flags) = file_of(fd).ok_or(CU_FILE_INVALID_VALUE)?;
        if !matches!(stat.st_mode & libc::S_IFMT, libc::S_IFREG | libc::S_IFBLK) {
            return Err(CU_FILE_INVALID_FILE_TYPE);
        }
        if flags & (libc::O_APPEND | libc::O_NONBLOCK | libc::O_NOATIME) != 0 {
            return Err(CU_FILE_INVALID_FILE_OPEN_FLAG);
        }
        if world.handles.values().any(|other| other.fd == fd) {
            return Err(CU_FILE_HANDLE_ALREADY_REGISTERED);
        }
        if world.handles.len() >= world.config.handles_max {
            return Err(CU_FILE_GETNEWFD_FAILED);
        }
        let number = world.fresh_handle();
        world.handles.insert(number, Handle { fd, file: (stat.st_dev, stat.st_ino), in_flight: 0 });
        // SAFETY: not null, so writable, as cuFile asks.
        unsafe { put(handle, std::ptr::without_provenance_mut(number)) }
    })
}

/// A handle that is in use or unknown, or whose file was closed before, is a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleDeregister(handle: CUfileHandle_t) {
    call("cuFileHandleDeregister", |world| {
        match world.handles.remove(&handle.addr()) {
            None => world.fault("unknown_handle", format!("{handle:?}")),
            Some(Handle { fd, file, in_flight }) => {
                if in_flight > 0 {
                    world.fault("handle_in_use", format!("{in_flight} requests use {handle:?}"));
                }
                if file_of(fd).is_none_or(|(stat, _)| (stat.st_dev, stat.st_ino) != file) {
                    world.fault("closed_while_registered", format!("descriptor {fd}"));
                }
            }
        }
        Ok(())
    });
}

/// As documented; memory of a pool is refused unless a setting says otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufRegister(base: *const c_void, length: usize, flags: c_int) -> CUfileError_t {
    call("cuFileBufRegister", |world| {
        if base.is_null() || length == 0 || flags != 0 {
            return Err(CU_FILE_INVALID_VALUE);
        }
        if !world.open {
            open(world)?;
        }
        let driver = world.driver("cuFileBufRegister").ok_or(CU_FILE_CUDA_DRIVER_ERROR)?;
        let address = base.addr() as u64;
        let known = driver.device_memory(address, 1).ok_or(CU_FILE_CUDA_POINTER_INVALID)?;
        let memory = driver.device_memory(address, length).ok_or(CU_FILE_CUDA_POINTER_RANGE_ERROR)?;
        if !driver.has_context() {
            return Err(CU_FILE_INVALID_CONTEXT_ERROR);
        }
        if (known.pooled || memory.pooled) && !world.config.pooled {
            return Err(CU_FILE_CUDA_MEMORY_TYPE_INVALID);
        }
        let overlaps =
            |(start, buffer): (&u64, &Buffer)| *start < address + length as u64 && address < start + buffer.bytes as u64;
        if world.buffers.iter().any(overlaps) {
            return Err(CU_FILE_MEMORY_ALREADY_REGISTERED);
        }
        let pinned: usize = world.buffers.values().map(|buffer| buffer.bytes).sum();
        if pinned + length > world.config.pinned_max {
            return Err(CU_FILE_INVALID_MAPPING_SIZE);
        }
        world.buffers.insert(address, Buffer { bytes: length, in_flight: 0 });
        Ok(())
    })
}

/// A range that is in use, or whose memory was freed before, is a fault: a real kernel module may wait for ever.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufDeregister(base: *const c_void) -> CUfileError_t {
    call("cuFileBufDeregister", |world| {
        let address = base.addr() as u64;
        let Buffer { bytes, in_flight } = world.buffers.remove(&address).ok_or(CU_FILE_MEMORY_NOT_REGISTERED)?;
        if in_flight > 0 {
            world.fault("memory_in_use", format!("{in_flight} requests use {address:#x}"));
        }
        let driver = world.driver("cuFileBufDeregister").ok_or(CU_FILE_CUDA_DRIVER_ERROR)?;
        if driver.device_memory(address, bytes).is_none() {
            world.fault("freed_while_registered", format!("{address:#x}"));
        }
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(
    handle: CUfileHandle_t,
    base: *mut c_void,
    size: usize,
    file_offset: off_t,
    base_offset: off_t,
) -> isize {
    let base = base.expose_provenance() as u64;
    perform(&Operation { symbol: "cuFileRead", is_read: true, handle, base, size, file_offset, base_offset })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWrite(
    handle: CUfileHandle_t,
    base: *const c_void,
    size: usize,
    file_offset: off_t,
    base_offset: off_t,
) -> isize {
    let base = base.expose_provenance() as u64;
    perform(&Operation { symbol: "cuFileWrite", is_read: false, handle, base, size, file_offset, base_offset })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> CUfileError_t {
    // SAFETY: null or writable, as cuFile asks.
    call("cuFileGetVersion", |world| unsafe { put(version, world.config.version) })
}

/// As documented; every switch is there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterBool(parameter: CUFileBoolConfigParameter_t, value: *mut bool) -> CUfileError_t {
    call("cuFileGetParameterBool", |world| {
        // SAFETY: null or writable, as cuFile asks.
        unsafe { put(value, world.switches.get(&parameter).copied().unwrap_or(false)) }
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterBool(parameter: CUFileBoolConfigParameter_t, value: bool) -> CUfileError_t {
    call("cuFileSetParameterBool", |world| {
        if world.open {
            return Err(CU_FILE_DRIVER_ALREADY_OPEN);
        }
        world.switches.insert(parameter, value);
        Ok(())
    })
}

/// Knows the two numbers that the product asks for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterSizeT(parameter: CUFileSizeTConfigParameter_t, value: *mut usize) -> CUfileError_t {
    call("cuFileGetParameterSizeT", |world| {
        let number = match parameter {
            CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB => 16_384,
            CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB => world.config.pinned_max >> 10,
            _ => return Err(CU_FILE_INVALID_VALUE),
        };
        // SAFETY: null or writable, as cuFile asks.
        unsafe { put(value, number) }
    })
}

/// As documented, and without effect.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterSizeT(_parameter: CUFileSizeTConfigParameter_t, _value: usize) -> CUfileError_t {
    call("cuFileSetParameterSizeT", |world| if world.open { Err(CU_FILE_DRIVER_ALREADY_OPEN) } else { Ok(()) })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetStatsLevel(level: c_int) -> CUfileError_t {
    call("cuFileSetStatsLevel", |world| {
        if !(0..=3).contains(&level) {
            return Err(CU_FILE_INVALID_VALUE);
        }
        world.level = level;
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsLevel(level: *mut c_int) -> CUfileError_t {
    // SAFETY: null or writable, as cuFile asks.
    call("cuFileGetStatsLevel", |world| unsafe { put(level, world.level) })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileStatsStart() -> CUfileError_t {
    call("cuFileStatsStart", |world| {
        if !world.open {
            return Err(CU_FILE_DRIVER_NOT_INITIALIZED);
        }
        world.counting = true;
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileStatsStop() -> CUfileError_t {
    call("cuFileStatsStop", |world| {
        world.counting = false;
        Ok(())
    })
}

/// Writes the whole structure of the imitated version. A version whose structure nobody knows writes that of 1.20 and as
/// much again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL3(statistics: *mut c_void) -> CUfileError_t {
    call("cuFileGetStatsL3", |world| {
        if !world.open {
            return Err(CU_FILE_DRIVER_NOT_INITIALIZED);
        }
        if statistics.is_null() || world.level < 3 {
            return Err(CU_FILE_INVALID_VALUE);
        }
        match StatsLayout::of_version(world.config.version) {
            // SAFETY: the caller has room for the version that it was told.
            Some(layout) => unsafe { stats::write(statistics, layout, &world.gpus) },
            // SAFETY: as above: a caller that does not know the version must not ask, or have room for anything.
            None => unsafe { statistics.cast::<u8>().write_bytes(0xff, 10_224) },
        }
        Ok(())
    })
}

/// As documented, of NVMe drives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetP2PFlags(
    storage: CUfileDriverStatusFlags_t,
    flags: *mut CUfileP2PFlags_t,
) -> CUfileError_t {
    call("cuFileDriverGetP2PFlags", |world| {
        if !world.open {
            return Err(CU_FILE_DRIVER_NOT_INITIALIZED);
        }
        let found = match (storage, world.config.way) {
            (CU_FILE_NVME_SUPPORTED, Way::P2p) => 1 << CUFILE_P2PDMA,
            (CU_FILE_NVME_SUPPORTED, Way::Nvfs) => 1 << CUFILE_NVFS,
            _ => 0,
        };
        // SAFETY: null or writable, as cuFile asks.
        unsafe { put(flags, found) }
    })
}
