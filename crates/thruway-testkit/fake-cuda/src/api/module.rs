//! Device code: the product's kernel and no other.

use std::ffi::{CStr, c_char, c_uint, c_void};

use thruway_sys::cuda::*;

use crate::kernel::{ENTRY, Launch, Module, PIECE_BYTES};
use crate::stream::Work;
use crate::world::{World, address, call, put};

/// Takes PTX alone, and looks no further than for the version at its head.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult {
    call("cuModuleLoadData", |mut world| {
        let context = world.current()?;
        if image.is_null() || module.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: PTX is a C string, as the driver asks.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned();
        let head = text.lines().find(|line| !line.trim().is_empty() && !line.starts_with("//"));
        if !head.is_some_and(|line| line.starts_with(".version ")) {
            return Err(CUDA_ERROR_INVALID_IMAGE);
        }
        let id = world.fresh_id();
        world.modules.insert(id, Module { context, text });
        // SAFETY: not null, so writable, as the driver asks.
        unsafe { put(module, World::module_handle(id)) }
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: CUmodule) -> CUresult {
    call("cuModuleUnload", |mut world| {
        world.current()?;
        let id = world.module(module)?;
        world.modules.remove(&id);
        Ok(())
    })
}

/// Knows the product's kernel alone: any other of the module's is not supported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> CUresult {
    call("cuModuleGetFunction", |mut world| {
        world.current()?;
        let id = world.module(module)?;
        if name.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so a C string, as the driver asks.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        if !world.modules.get(&id).is_some_and(|module| module.has(&name)) {
            return Err(CUDA_ERROR_NOT_FOUND);
        }
        if name != ENTRY {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(function, World::kernel_handle(id)) }
    })
}

/// The kernel runs late, as copies do. A block has as many threads as it was compiled for, which a driver takes for a maximum.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> CUresult {
    call("cuLaunchKernel", |mut world| {
        let stream = world.stream(stream)?;
        let id = world.module(function.cast())?;
        let threads = world.modules.get(&id).and_then(Module::threads);
        let fits = (grid_x > 0, grid_y, grid_z, shared_bytes) == (true, 1, 1, 0) && threads == Some(block_x);
        if !fits || (block_y, block_z) != (1, 1) || parameters.is_null() || !extra.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: one pointer for each parameter of the kernel, as the driver asks.
        let [pieces, count] = unsafe { [0, 1].map(|at| (*parameters.add(at)).cast::<u64>().read_unaligned()) };
        let launch = Launch { pieces: address(pieces), count: address(count) };
        world.device_place(pieces, launch.count.saturating_mul(PIECE_BYTES))?;
        world.submit(stream, Vec::new(), Work::Kernel(launch));
        Ok(())
    })
}
