//! Device memory, pinned host memory, and what an address is.

use std::ffi::{c_uint, c_void};
use std::ptr::{null_mut, without_provenance_mut};

use thruway_sys::cuda::*;

use crate::fault::FaultKind;
use crate::host::{self, Origin, Pinned};
use crate::stream::{Mark, Work};
use crate::world::{Answer, Guard, World, address, call, put, wait};

const PAGE: usize = 4096;

/// The memory is filled with rubbish, not zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemAlloc_v2", |mut world| {
        let context = world.current()?;
        if out.is_null() || bytes == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let id = world.fresh_id();
        let alignment = world.config.alignment;
        let start = world.arenas[context].allocate(bytes, id, false, alignment).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        // SAFETY: not null, so writable, as the driver asks.
        unsafe { put(out, start as CUdeviceptr) }
    })
}

/// Waits for all work of the context, as a driver was seen to do for memory of [`cuMemAlloc_v2`]. The documentation only
/// says "may": work over this very memory in flight is a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(pointer: CUdeviceptr) -> CUresult {
    call("cuMemFree_v2", |mut world| {
        world.ready()?;
        if pointer == 0 {
            return Ok(());
        }
        let (device, start) = begin_free(&mut world, pointer)?;
        let (pooled, bytes) = world.arenas[device].get(start).map_or((false, 0), |have| (have.pooled, have.bytes));
        let busy = world.copies().filter(|copy| copy.uses_device(start, bytes)).count();
        if busy > 0 {
            let detail = format!("{bytes} bytes at {start:#x}, with {busy} copies in flight");
            world.fault(FaultKind::FreedInFlight, detail);
        }
        let mut world = if pooled { world } else { drain(world, device) };
        world.arenas[device].release(start);
        world.usable(device)
    })
}

/// The allocation that a free names, from now on closed to new work.
fn begin_free(world: &mut World, pointer: CUdeviceptr) -> Result<(usize, usize), CUresult> {
    let start = address(pointer);
    if let Some(device) = world.arena_of(start)
        && let Some(allocation) = world.arenas[device].get_mut(start).filter(|allocation| !allocation.free_issued)
    {
        allocation.free_issued = true;
        return Ok((device, start));
    }
    world.refuse(FaultKind::InvalidFree, format!("device memory at {pointer:#x}"), CUDA_ERROR_INVALID_VALUE)
}

/// Waits for all work of a context.
fn drain(world: Guard, context: usize) -> Guard {
    let marks: Vec<Mark> = world.marks_of(context);
    wait(world, &marks)
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo_v2", |world| {
        let context = world.current()?;
        // SAFETY: null or writable, as the driver asks.
        unsafe {
            put(free, world.arenas[context].free_bytes())?;
            put(total, world.config.memory_bytes)
        }
    })
}

/// Work over the memory that runs before the stream has come here is a fault and an illegal address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    call("cuMemAllocAsync", |mut world| {
        let stream = world.stream(stream)?;
        if bytes == 0 {
            // SAFETY: null or writable, as the driver asks.
            return unsafe { put(out, 0) };
        }
        if out.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let device = world.streams.get(&stream).map_or(0, |stream| stream.context);
        let id = world.fresh_id();
        let alignment = world.config.alignment;
        let start = world.arenas[device].allocate(bytes, id, true, alignment).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        world.submit(stream, Vec::new(), Work::Allocate { device, start });
        // SAFETY: not null, so writable, as the driver asks.
        unsafe { put(out, start as CUdeviceptr) }
    })
}

/// Takes memory of either allocation function, as a driver was seen to do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) -> CUresult {
    call("cuMemFreeAsync", |mut world| {
        let stream = world.stream(stream)?;
        let (device, start) = begin_free(&mut world, pointer)?;
        world.submit(stream, Vec::new(), Work::Release { device, start });
        Ok(())
    })
}

/// Begins a little way into a page, as a driver does with all but the first allocation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: c_uint) -> CUresult {
    call("cuMemHostAlloc", |mut world| {
        let context = world.current()?;
        let known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
        if out.is_null() || flags & !known != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if bytes == 0 {
            // SAFETY: not null, so writable, as the driver asks.
            return unsafe { put(out, null_mut()) };
        }
        let offset = world.config.host_offset % PAGE;
        let length = bytes.checked_add(offset).and_then(|length| length.checked_next_multiple_of(PAGE));
        let length = length.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that replaces none; the result is checked.
        let mapped = unsafe { libc::mmap(null_mut(), length, protection, kind, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let pointer = mapped.wrapping_byte_add(offset);
        let origin = Origin::Allocated(mapped.expose_provenance(), length);
        let id = world.fresh_id();
        world.pinned.insert(pointer.addr(), Pinned { bytes, origin, context, id });
        // SAFETY: not null, so writable, as the driver asks.
        unsafe { put(out, pointer) }
    })
}

/// Waits for all work of the context, as a driver was seen to do; a copy over this very memory in flight is a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(pointer: *mut c_void) -> CUresult {
    call("cuMemFreeHost", |mut world| {
        world.ready()?;
        if pointer.is_null() {
            return Ok(());
        }
        let start = pointer.addr();
        let pinned = world.pinned.get(start).cloned();
        let Some(Pinned { origin: Origin::Allocated(mapping, length), bytes, context, .. }) = pinned else {
            return world.refuse(FaultKind::InvalidFree, format!("pinned memory at {pointer:?}"), CUDA_ERROR_INVALID_VALUE);
        };
        note_pinned_use(&mut world, start, bytes);
        let mut world = drain(world, context);
        world.pinned.remove(start);
        // SAFETY: the mapping was made by `cuMemHostAlloc`, it has just been taken out of the table, and the caller gives
        // it up; no copy over it is in flight any more.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(mapping), length) };
        world.usable(context)
    })
}

fn note_pinned_use(world: &mut World, start: usize, bytes: usize) {
    let busy = world.copies().filter(|copy| copy.uses_pinned(start, bytes)).count();
    if busy > 0 {
        let detail = format!("{bytes} bytes at {start:#x}, with {busy} copies in flight");
        world.fault(FaultKind::UnpinnedInFlight, detail);
    }
}

/// Ranges may begin and end anywhere; they may share a page but not a byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(pointer: *mut c_void, bytes: usize, flags: c_uint) -> CUresult {
    call("cuMemHostRegister_v2", |mut world| {
        let context = world.current()?;
        let known = CU_MEMHOSTREGISTER_PORTABLE
            | CU_MEMHOSTREGISTER_DEVICEMAP
            | CU_MEMHOSTREGISTER_IOMEMORY
            | CU_MEMHOSTREGISTER_READ_ONLY;
        let start = pointer.addr();
        let wrong = pointer.is_null() || bytes == 0 || flags & !known != 0 || start.checked_add(bytes).is_none();
        if wrong || world.arena_of(start).is_some() || !host::is_mapped(start, bytes) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        match world.pinned.overlap(start, bytes).map(|(_, pinned)| pinned.origin) {
            Some(Origin::Registered) => return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
            Some(Origin::Allocated(..)) => return Err(CUDA_ERROR_INVALID_VALUE),
            None => {}
        }
        let id = world.fresh_id();
        world.pinned.insert(start, Pinned { bytes, origin: Origin::Registered, context, id });
        Ok(())
    })
}

/// Waits for all work of the context, as a driver was seen to do; a copy over this very memory in flight is a fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(pointer: *mut c_void) -> CUresult {
    call("cuMemHostUnregister", |mut world| {
        world.ready()?;
        let start = pointer.addr();
        let Some(Pinned { origin: Origin::Registered, bytes, context, .. }) = world.pinned.get(start).cloned() else {
            let code = match world.pinned.overlap(start, 1) {
                Some(_) => CUDA_ERROR_INVALID_VALUE,
                None => CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            };
            return world.refuse(FaultKind::InvalidFree, format!("registered memory at {pointer:?}"), code);
        };
        note_pinned_use(&mut world, start, bytes);
        let mut world = drain(world, context);
        world.pinned.remove(start);
        world.usable(context)
    })
}

/// What the driver knows about an address.
struct Known {
    context: usize,
    kind: c_uint,
    start: usize,
    bytes: usize,
    id: u64,
}

impl World {
    fn known(&self, at: usize) -> Option<Known> {
        if let Some(context) = self.arena_of(at) {
            let crate::arena::Found::Inside(start) = self.arenas[context].find(at, 1) else { return None };
            let allocation = self.arenas[context].get(start)?;
            return Some(Known { context, kind: CU_MEMORYTYPE_DEVICE, start, bytes: allocation.bytes, id: allocation.id });
        }
        let (start, pinned) = self.pinned.overlap(at, 1)?;
        Some(Known { context: pinned.context, kind: CU_MEMORYTYPE_HOST, start, bytes: pinned.bytes, id: pinned.id })
    }
}

/// Writes one fact. What an unknown address gets is what a driver was seen to write.
///
/// # Safety
/// `out` is null or writable for the attribute's type.
unsafe fn put_attribute(out: *mut c_void, attribute: CUpointer_attribute, at: usize, known: Option<&Known>) -> Answer {
    let on_device = known.is_some_and(|known| known.kind == CU_MEMORYTYPE_DEVICE);
    let ordinal = known.map_or(-2, |known| i32::try_from(known.context).unwrap_or(-2));
    // SAFETY: the caller's promise, for the type that the header gives each attribute.
    unsafe {
        match attribute {
            CU_POINTER_ATTRIBUTE_CONTEXT => {
                put(out.cast(), known.map_or(null_mut(), |known| World::context_handle(known.context)))
            }
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(out.cast(), known.map_or(0, |known| known.kind)),
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER => put(out.cast(), known.map_or(0, |_| at as u64)),
            CU_POINTER_ATTRIBUTE_HOST_POINTER => {
                let pointer = if known.is_some() && !on_device { without_provenance_mut(at) } else { null_mut::<c_void>() };
                put(out.cast(), pointer)?;
                if on_device { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
            }
            CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
            | CU_POINTER_ATTRIBUTE_IS_MANAGED
            | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => put::<c_uint>(out.cast(), 0),
            CU_POINTER_ATTRIBUTE_BUFFER_ID => put(out.cast(), known.map_or(0, |known| known.id)),
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(out.cast(), ordinal),
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(out.cast(), known.map_or(0, |known| known.start as u64)),
            CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(out.cast(), known.map_or(0, |known| known.bytes)),
            CU_POINTER_ATTRIBUTE_MAPPED => put(out.cast(), c_uint::from(known.is_some())),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
}

/// As documented; knows the attributes that the product's table names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    pointer: CUdeviceptr,
) -> CUresult {
    call("cuPointerGetAttribute", |world| {
        world.ready()?;
        let known = world.known(address(pointer)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: null or writable for the attribute's type, as the driver asks.
        unsafe { put_attribute(data, attribute, address(pointer), Some(&known)) }
    })
}

/// As documented; knows the attributes that the product's table names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    pointer: CUdeviceptr,
) -> CUresult {
    call("cuPointerGetAttributes", |world| {
        world.ready()?;
        if attributes.is_null() || data.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let known = world.known(address(pointer));
        for index in 0..count as usize {
            // SAFETY: both arrays have `count` entries, each datum is writable for its attribute, as the driver asks.
            let answer = unsafe { put_attribute(*data.add(index), *attributes.add(index), address(pointer), known.as_ref()) };
            // The host's address of device memory is null here, and no error.
            // SAFETY: as above.
            if unsafe { *attributes.add(index) } != CU_POINTER_ATTRIBUTE_HOST_POINTER {
                answer?;
            }
        }
        Ok(())
    })
}
