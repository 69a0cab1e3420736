//! Device code: there is none.

use std::ffi::{c_char, c_uint, c_void};

use thruway_sys::cuda::*;

use crate::world::call;

/// `CUDA_ERROR_NOT_SUPPORTED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(_module: *mut CUmodule, _image: *const c_void) -> CUresult {
    call("cuModuleLoadData", |world| {
        world.current()?;
        Err(CUDA_ERROR_NOT_SUPPORTED)
    })
}

/// No module exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(_module: CUmodule) -> CUresult {
    call("cuModuleUnload", |_world| Err(CUDA_ERROR_INVALID_HANDLE))
}

/// No module exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(_function: *mut CUfunction, _module: CUmodule, _name: *const c_char) -> CUresult {
    call("cuModuleGetFunction", |_world| Err(CUDA_ERROR_INVALID_HANDLE))
}

/// No kernel exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    _function: CUfunction,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared_bytes: c_uint,
    _stream: CUstream,
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    call("cuLaunchKernel", |_world| Err(CUDA_ERROR_INVALID_HANDLE))
}
