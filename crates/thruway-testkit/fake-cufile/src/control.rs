//! The functions for tests, beside cuFile's.

use std::ffi::{CStr, c_char, c_int};

use crate::config::Config;
use crate::io::write_nvfs;
use crate::world::{SHARED, World, lock};

/// Writes the state as JSON into `buffer`, cut to `size` bytes with the final NUL, and returns the length of the whole
/// text. With a null buffer nothing is written.
///
/// Fields: `open`; `handles`, `buffers`, `registered_bytes` (what is registered); `in_flight`, `in_flight_peak` (reads and
/// writes); `moved` (bytes); `faults` (each `kind`, `detail`); `calls` (by symbol).
///
/// # Safety
/// `buffer` is null or has `size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cufile_report(buffer: *mut c_char, size: usize) -> usize {
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

/// Forgets everything and begins anew as if the library had just been loaded. No request may be in flight. Settings are the
/// environment's, changed by `config`, which is `KEY=value` pairs separated by semicolons or line ends, or null.
///
/// Returns 0, or 1 and changes nothing if a setting is wrong (standard error says why) or a request is in flight.
///
/// # Safety
/// `config` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_cufile_reset(config: *const c_char) -> c_int {
    // SAFETY: a C string, by the caller's promise.
    let text = if config.is_null() { c"" } else { unsafe { CStr::from_ptr(config) } };
    let config = match Config::read(&text.to_string_lossy()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("fake-cufile: {error}");
            return 1;
        }
    };
    let mut world = lock();
    if world.in_flight > 0 {
        eprintln!("fake-cufile: {} requests are in flight", world.in_flight);
        return 1;
    }
    *world = World::new(config);
    write_nvfs(&mut world);
    SHARED.released.notify_all();
    0
}

/// With anything but 0, no read, no write and no opening ends any more, until a call with 0 or a reset.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cufile_hold(held: c_int) {
    lock().held = held != 0;
    SHARED.released.notify_all();
}
