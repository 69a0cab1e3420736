//! Reads and writes: between a file and wherever the CPU finds the memory.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::PoisonError;
use std::time::Duration;

use thruway_sys::cufile::{
    CU_FILE_CUDA_POINTER_INVALID, CU_FILE_CUDA_POINTER_RANGE_ERROR, CU_FILE_DRIVER_NOT_INITIALIZED,
    CU_FILE_HANDLE_NOT_REGISTERED, CU_FILE_INVALID_CONTEXT_ERROR, CU_FILE_INVALID_MAPPING_RANGE, CU_FILE_INVALID_VALUE,
    CUfileHandle_t, CUfileOpError, off_t,
};

use crate::config::Counters;
use crate::stats;
use crate::world::{SHARED, World, lock};

/// What an operation is given.
pub(crate) struct Operation {
    pub(crate) symbol: &'static str,
    pub(crate) is_read: bool,
    pub(crate) handle: CUfileHandle_t,
    pub(crate) base: u64,
    pub(crate) size: usize,
    pub(crate) file_offset: off_t,
    pub(crate) base_offset: off_t,
}

/// What an operation came to be before any byte moves.
struct Ready {
    fd: c_int,
    memory: *mut u8,
    /// The device whose counters count it; none for host memory.
    ordinal: Option<usize>,
    /// The registration that it uses.
    buffer: Option<u64>,
    bytes: usize,
    delay: Duration,
}

/// A failure: cuFile's code, or the system's number.
enum Failure {
    Code(i32),
    Errno(i32),
}

fn code(code: CUfileOpError) -> Failure {
    Failure::Code(code.0)
}

/// Carries an operation out and returns what the real function would.
pub(crate) fn perform(operation: &Operation) -> isize {
    let answer = begin(operation).and_then(|ready| {
        let moved = transfer(operation, &ready);
        finish(operation, &ready, moved.as_ref().map_or(0, |moved| *moved));
        moved.map_err(Failure::Errno)
    });
    match answer {
        Ok(moved) => isize::try_from(moved).unwrap_or(isize::MAX),
        Err(Failure::Code(code)) => isize::try_from(-code).unwrap_or(-1),
        Err(Failure::Errno(errno)) => {
            // SAFETY: the thread's own error number.
            unsafe { *libc::__errno_location() = errno };
            -1
        }
    }
}

/// Checks everything, and marks what is in use.
fn begin(operation: &Operation) -> Result<Ready, Failure> {
    let mut world = lock();
    if let Some(rule) = world.count(operation.symbol) {
        return Err(if rule.in_errno { Failure::Errno(rule.code) } else { Failure::Code(rule.code) });
    }
    if !world.open {
        return Err(code(CU_FILE_DRIVER_NOT_INITIALIZED));
    }
    let handle = world.handles.get(&operation.handle.addr()).ok_or(code(CU_FILE_HANDLE_NOT_REGISTERED))?;
    let fd = handle.fd;
    let offset = u64::try_from(operation.base_offset).map_err(|_| code(CU_FILE_INVALID_VALUE))?;
    let registered = world.buffers.get(&operation.base).map(|buffer| buffer.bytes as u64);
    match registered {
        Some(bytes) if offset.saturating_add(operation.size as u64) > bytes => return Err(code(CU_FILE_INVALID_MAPPING_RANGE)),
        // An offset belongs to a registration.
        None if offset != 0 => return Err(code(CU_FILE_INVALID_VALUE)),
        _ => {}
    }
    let driver = world.driver(operation.symbol).ok_or(code(CU_FILE_DRIVER_NOT_INITIALIZED))?;
    let address = operation.base + offset;
    let (memory, ordinal) = match (driver.device_memory(address, operation.size), driver.device_memory(address, 1)) {
        (Some(found), _) if driver.has_context() => (found.view, Some(found.ordinal)),
        (Some(_), _) => return Err(code(CU_FILE_INVALID_CONTEXT_ERROR)),
        (None, Some(_)) => return Err(code(CU_FILE_CUDA_POINTER_RANGE_ERROR)),
        (None, None) if registered.is_some() || address == 0 => return Err(code(CU_FILE_CUDA_POINTER_INVALID)),
        // Host memory, which the real library takes as well.
        (None, None) => (std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0)), None),
    };
    if let Some(handle) = world.handles.get_mut(&operation.handle.addr()) {
        handle.in_flight += 1;
    }
    if let Some(buffer) = world.buffers.get_mut(&operation.base) {
        buffer.in_flight += 1;
    }
    world.in_flight += 1;
    world.in_flight_peak = world.in_flight_peak.max(world.in_flight);
    let bytes = if world.config.short > 0 { operation.size.min(world.config.short) } else { operation.size };
    let delay = delay(&mut world);
    let buffer = registered.map(|_| operation.base);
    Ok(Ready { fd, memory, ordinal, buffer, bytes, delay })
}

/// How long the next operation takes.
fn delay(world: &mut World) -> Duration {
    let (min, max) = world.config.delay_us;
    let seed = &mut world.config.seed;
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    Duration::from_micros(min + (*seed >> 33) % (max - min + 1))
}

/// Moves the bytes, late.
fn transfer(operation: &Operation, ready: &Ready) -> Result<usize, i32> {
    std::thread::sleep(ready.delay);
    drop(SHARED.released.wait_while(lock(), |world| world.held).unwrap_or_else(PoisonError::into_inner));
    let first = once(operation, ready.fd, ready.memory.cast(), ready.bytes);
    // A descriptor past the page cache refuses what is not aligned. The real library goes through memory of its own then.
    match first {
        Err(libc::EINVAL) => {
            // SAFETY: the path is a C string; the result is checked.
            let path = std::ffi::CString::new(format!("/proc/self/fd/{}", ready.fd)).unwrap_or_default();
            let mode = if operation.is_read { libc::O_RDONLY } else { libc::O_WRONLY };
            // SAFETY: as above.
            let buffered = unsafe { libc::open(path.as_ptr(), mode | libc::O_CLOEXEC) };
            if buffered < 0 {
                return first;
            }
            let second = once(operation, buffered, ready.memory.cast(), ready.bytes);
            // SAFETY: opened above, and used nowhere else.
            unsafe { libc::close(buffered) };
            second
        }
        _ => first,
    }
}

fn once(operation: &Operation, fd: c_int, memory: *mut c_void, bytes: usize) -> Result<usize, i32> {
    // SAFETY: `begin` found the range in live memory, which the caller keeps until this returns.
    let moved = unsafe {
        if operation.is_read {
            libc::pread(fd, memory, bytes, operation.file_offset)
        } else {
            libc::pwrite(fd, memory, bytes, operation.file_offset)
        }
    };
    usize::try_from(moved).map_err(|_| std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Ends the use of what is used, and counts.
fn finish(operation: &Operation, ready: &Ready, moved: usize) {
    let mut guard = lock();
    let world = &mut *guard;
    world.in_flight -= 1;
    match world.handles.get_mut(&operation.handle.addr()) {
        Some(handle) => handle.in_flight -= 1,
        None => world.fault("handle_gone_in_flight", format!("{:?}", operation.handle)),
    }
    if let Some(base) = ready.buffer {
        match world.buffers.get_mut(&base) {
            Some(buffer) => buffer.in_flight -= 1,
            None => world.fault("memory_gone_in_flight", format!("{base:#x}")),
        }
    }
    world.moved += moved as u64;
    let (counters, way) = (world.config.counters, world.config.way);
    if let (Some(ordinal), true) = (ready.ordinal, world.counting && world.level == 3 && counters != Counters::Still) {
        let ordinal = if counters == Counters::Other { ordinal + 1 } else { ordinal };
        let bytes = if counters == Counters::Half { moved / 2 } else { moved };
        if let Some(gpu) = world.gpus.get_mut(ordinal) {
            stats::count(gpu, operation.is_read, way, bytes as u64);
        }
    }
    count_nvfs(world, operation.is_read, moved as u64);
}

/// Counts what nvidia-fs would.
fn count_nvfs(world: &mut World, is_read: bool, bytes: u64) {
    if world.config.way != crate::config::Way::Nvfs {
        return;
    }
    let nvfs = &mut world.nvfs;
    let (count, all) = if is_read { (&mut nvfs.reads, &mut nvfs.read_bytes) } else { (&mut nvfs.writes, &mut nvfs.write_bytes) };
    (*count, *all) = (*count + 1, *all + bytes);
    write_nvfs(world);
}

/// Writes the totals where `/proc` would have them.
pub(crate) fn write_nvfs(world: &mut World) {
    write(world, world.config.nvfs_stats.clone(), world.nvfs.text());
}

/// Writes the report where a test of another process looks for it.
pub(crate) fn write_report(world: &mut World) {
    write(world, world.config.report.clone(), world.report().to_string());
}

fn write(world: &mut World, path: Option<PathBuf>, text: String) {
    if let Some(path) = path
        && let Err(error) = std::fs::write(&path, text)
    {
        let detail = format!("{}: {error}", path.display());
        world.fault("internal", detail);
    }
}
