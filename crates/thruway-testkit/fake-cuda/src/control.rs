//! The functions for tests, beside the driver's.

use std::ffi::{CStr, c_char, c_int, c_void};

use thruway_sys::cuda::CUdeviceptr;

use crate::arena::Found;
use crate::config::Config;
use crate::stream::Mark;
use crate::world::{SHARED, World, address, is_forked, lock, wait};

/// Writes the state as JSON into `buffer`, cut to `size` bytes with the final NUL, and returns the length of the whole
/// text. A buffer of that length and one more holds it all; with a null buffer nothing is written.
///
/// Fields: `initialised`; `devices` (each `ordinal`, `live_allocations`, `live_bytes`, `peak_bytes`,
/// `context_references`, `sticky_error`); `live_allocations`, `live_bytes` (device memory); `pinned_ranges`,
/// `pinned_bytes`, `pinned_peak_bytes`; `live_streams`, `live_events`, `live_modules`; `in_flight_operations`, `in_flight_copies`;
/// `copies`, `pageable_copies` and `host_to_device_bytes`, `device_to_host_bytes`, `device_to_device_bytes`,
/// `fill_bytes` (what has completed); `faults` (each `kind`, `detail`); `calls` (by symbol).
///
/// # Safety
/// `buffer` is null or has `size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_report(buffer: *mut c_char, size: usize) -> usize {
    if is_forked() {
        return 0;
    }
    let text = lock().report().to_string();
    if !buffer.is_null() && size > 0 {
        let bytes = text.len().min(size - 1);
        // SAFETY: `bytes + 1` is at most `size`, which the caller vouches for; the text has at least `bytes` bytes.
        unsafe {
            buffer.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), bytes);
            buffer.add(bytes).write(0);
        }
    }
    text.len()
}

/// Waits for all work, forgets everything and begins anew as if the library had just been loaded: `cuInit` must be called
/// again, every handle and address is void. Settings are the environment's, changed by `config`, which is `KEY=value`
/// pairs separated by semicolons or line ends, or null.
///
/// Returns 0, or 1 and changes nothing if a setting is wrong (standard error says why).
///
/// # Safety
/// `config` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_reset(config: *const c_char) -> c_int {
    // SAFETY: a C string, by the caller's promise.
    let text = if config.is_null() { c"" } else { unsafe { CStr::from_ptr(config) } };
    let config = match Config::read(&text.to_string_lossy()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("fake-cuda: {error}");
            return 1;
        }
    };
    if is_forked() {
        return 1;
    }
    let mut world = lock();
    world.held = false;
    SHARED.work.notify_one();
    let marks: Vec<Mark> = world.streams.iter().map(|(id, stream)| Mark { stream: *id, seq: stream.issued }).collect();
    let mut world = wait(world, &marks);
    let epoch = world.epoch + 1;
    *world = World::new(Ok(config), epoch);
    SHARED.done.notify_all();
    0
}

/// With anything but 0, nothing completes any more (work still begins), until a call with 0 or a reset: for a test that
/// must act while a copy is in flight, however slow the machine. Whatever waits for work meanwhile waits for the release.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_hold(held: c_int) {
    if !is_forked() {
        lock().held = held != 0;
        SHARED.work.notify_one();
    }
}

/// Copies the bytes of a live device range to `out`, beside all streams. Returns 0, or 1 if there is no such range.
///
/// # Safety
/// `out` has `bytes` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_read(pointer: CUdeviceptr, out: *mut c_void, bytes: usize) -> c_int {
    if is_forked() {
        return 1;
    }
    let (world, at) = (lock(), address(pointer));
    match world.arena_of(at).map(|device| &world.arenas[device]) {
        Some(arena) if matches!(arena.find(at, bytes), Found::Inside(_)) => {
            // SAFETY: one live allocation holds the range, and under the lock nobody writes it; the caller vouches for
            // `out`, which is not device memory of ours, since nobody could have its address.
            unsafe { std::ptr::copy(arena.view(at), out.cast(), bytes) };
            0
        }
        _ => 1,
    }
}

/// Where the CPU finds the bytes of a live device range, or null if there is no such range. For other test doubles that
/// play a device: a DMA engine may touch what the CPU may not. Good until the memory is freed; the copies of streams
/// touch the same bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_view(pointer: CUdeviceptr, bytes: usize) -> *mut c_void {
    if is_forked() {
        return std::ptr::null_mut();
    }
    let (world, at) = (lock(), address(pointer));
    match world.arena_of(at).map(|device| &world.arenas[device]) {
        Some(arena) if matches!(arena.find(at, bytes), Found::Inside(_)) => arena.view(at).cast(),
        _ => std::ptr::null_mut(),
    }
}

/// How often a function of the driver was called since the last reset: the same number as in the report, cheaply.
///
/// # Safety
/// `symbol` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cuda_calls(symbol: *const c_char) -> u64 {
    if symbol.is_null() || is_forked() {
        return 0;
    }
    // SAFETY: not null, so a C string, by the caller's promise.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    lock().calls.of(&symbol.to_string_lossy())
}

/// Whether the live device memory at an address comes from a pool (`cuMemAllocAsync`): some libraries cannot register that.
/// Returns 1 for a pool's, 0 for other memory, -1 where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_is_pooled(pointer: CUdeviceptr) -> c_int {
    if is_forked() {
        return -1;
    }
    let (world, at) = (lock(), address(pointer));
    let Some(arena) = world.arena_of(at).map(|device| &world.arenas[device]) else { return -1 };
    match arena.find(at, 1) {
        Found::Inside(start) => arena.get(start).map_or(-1, |allocation| c_int::from(allocation.pooled)),
        _ => -1,
    }
}
