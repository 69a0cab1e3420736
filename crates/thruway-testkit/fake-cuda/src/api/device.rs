//! Initialisation, devices and contexts.

use std::ffi::{CStr, c_char, c_int, c_uint};

use thruway_sys::cuda::*;

use crate::arena::Arena;
use crate::context::Context;
use crate::world::{Answer, World, call, own, put, wait};
use crate::{engine, host, names};

/// Also reserves the devices' memory, and starts the thread that plays them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> CUresult {
    call("cuInit", |mut world| {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if let Some(error) = &world.config_error {
            eprintln!("fake-cuda: {error}");
            return Err(CUDA_ERROR_UNKNOWN);
        }
        if world.config.devices == 0 {
            return Err(CUDA_ERROR_NO_DEVICE);
        }
        if world.initialised { Ok(()) } else { initialise(&mut world) }
    })
}

fn initialise(world: &mut World) -> Answer {
    // The engine copies host memory by these calls; a sandbox that forbids them would make every copy look unmapped.
    let probe = 1u64;
    if host::digest_of((&raw const probe).addr(), size_of::<u64>()).is_err() {
        eprintln!("fake-cuda: process_vm_readv is not permitted here");
        return Err(CUDA_ERROR_OPERATING_SYSTEM);
    }
    let arenas: std::io::Result<Vec<Arena>> =
        (0..world.config.devices).map(|ordinal| Arena::new(ordinal, world.config.memory_bytes)).collect();
    world.arenas = arenas.map_err(|error| {
        eprintln!("fake-cuda: no address space for the devices: {error}");
        CUDA_ERROR_OPERATING_SYSTEM
    })?;
    world.contexts = vec![Context::default(); world.config.devices];
    own();
    engine::start();
    world.initialised = true;
    Ok(())
}

/// As the settings say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: null or writable, as the driver asks.
    call("cuDriverGetVersion", |world| unsafe { put(version, world.config.version) })
}

/// Knows the codes that this driver answers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: null or writable, as the driver asks.
    call("cuGetErrorName", |_world| unsafe { put_text(text, names::describe(error).map(|(name, _)| name)) })
}

/// Knows the codes that this driver answers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: null or writable, as the driver asks.
    call("cuGetErrorString", |_world| unsafe { put_text(text, names::describe(error).map(|(_, sentence)| sentence)) })
}

/// # Safety
/// `out` is null or writable.
unsafe fn put_text(out: *mut *const c_char, text: Option<&'static CStr>) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { put(out, text.map_or(std::ptr::null(), CStr::as_ptr)) }?;
    text.map(|_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Writes `text`, cut to `len` bytes with the final NUL.
///
/// # Safety
/// `out` is null or has `len` writable bytes.
unsafe fn put_string(out: *mut c_char, len: c_int, text: &str) -> Answer {
    let len = usize::try_from(len).unwrap_or(0);
    if out.is_null() || len == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let bytes = text.len().min(len - 1);
    // SAFETY: `bytes + 1` is at most `len`, which the caller vouches for; the text has at least `bytes` bytes.
    unsafe {
        out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), bytes);
        out.add(bytes).write(0);
    }
    Ok(())
}

impl World {
    /// The ordinal that a device handle means.
    fn device(&self, device: CUdevice) -> Result<usize, CUresult> {
        self.ready()?;
        usize::try_from(device).ok().filter(|ordinal| *ordinal < self.config.devices).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }
}

/// As the settings say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    call("cuDeviceGetCount", |world| {
        world.ready()?;
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(count, c_int::try_from(world.config.devices).unwrap_or(c_int::MAX)) }
    })
}

/// The handle is the ordinal.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    call("cuDeviceGet", |world| {
        world.device(ordinal)?;
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(device, ordinal) }
    })
}

/// As the settings say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) -> CUresult {
    call("cuDeviceGetName", |world| {
        world.device(device)?;
        // SAFETY: null or `len` writable bytes, as the driver asks.
        unsafe { put_string(name, len, &world.config.name) }
    })
}

/// Knows the attributes that the product's table names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) -> CUresult {
    call("cuDeviceGetAttribute", |world| {
        let pci = world.config.pci_of(world.device(device)?);
        let part = |index: usize| {
            let text = pci.split([':', '.']).nth(index).unwrap_or("0");
            c_int::from_str_radix(text, 16).unwrap_or(0)
        };
        let found = match attribute {
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID => part(0),
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => part(1),
            CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID => part(2),
            CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => 0,
            CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => 0,
            CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
            CU_DEVICE_ATTRIBUTE_INTEGRATED
            | CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
            | CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
            | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED => 0,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(value, found) }
    })
}

/// As the settings say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult {
    call("cuDeviceTotalMem_v2", |world| {
        world.device(device)?;
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(bytes, world.config.memory_bytes) }
    })
}

/// As the settings say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: CUdevice) -> CUresult {
    call("cuDeviceGetPCIBusId", |world| {
        let pci = world.config.pci_of(world.device(device)?);
        if usize::try_from(len).unwrap_or(0) <= pci.len() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: null or `len` writable bytes, as the driver asks.
        unsafe { put_string(text, len, &pci) }
    })
}

/// `FAKE` and the ordinal.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) -> CUresult {
    call("cuDeviceGetUuid_v2", |world| {
        world.device(device)?;
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(b"FAKE");
        bytes[12..].copy_from_slice(&device.to_be_bytes());
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(uuid, CUuuid { bytes }) }
    })
}

/// The handle of a device's context is always the same, as a driver was seen to do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRetain", |mut world| {
        let device = world.device(device)?;
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(context, World::context_handle(device)) }?;
        world.contexts[device].references += 1;
        Ok(())
    })
}

/// The last reference waits for the context's work and destroys it; memory that is left in it is a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRelease_v2", |mut world| {
        let device = world.device(device)?;
        match world.contexts[device].references {
            0 => Err(CUDA_ERROR_INVALID_CONTEXT),
            1 => {
                let marks = world.marks_of(device);
                let mut world = wait(world, &marks);
                world.destroy_context(device);
                Ok(())
            }
            _ => {
                world.contexts[device].references -= 1;
                Ok(())
            }
        }
    })
}

/// Refuses what is not the handle of a primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult {
    call("cuCtxPushCurrent_v2", |mut world| {
        world.ready()?;
        let context = world.context_by_handle(context)?;
        world.with_stack(|stack| stack.push(context));
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult {
    call("cuCtxPopCurrent_v2", |world| {
        world.ready()?;
        let popped = world.with_stack(Vec::pop).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: writable, as the driver asks.
        unsafe { put(context, World::context_handle(popped)) }
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult {
    call("cuCtxGetCurrent", |world| {
        world.ready()?;
        let current = world.with_stack(|stack| stack.last().copied());
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(context, current.map_or(std::ptr::null_mut(), World::context_handle)) }
    })
}

/// Refuses what is neither null nor the handle of a primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    call("cuCtxSetCurrent", |mut world| {
        world.ready()?;
        let context = if context.is_null() { None } else { Some(world.context_by_handle(context)?) };
        world.with_stack(|stack| {
            stack.pop();
            stack.extend(context);
        });
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxSynchronize() -> CUresult {
    call("cuCtxSynchronize", |world| {
        let context = world.current()?;
        let marks = world.marks_of(context);
        wait(world, &marks).usable(context)
    })
}
