//! Events.

use std::ffi::{c_float, c_uint};

use thruway_sys::cuda::*;

use crate::stream::{Event, Work};
use crate::world::{Answer, Guard, World, call, put, wait};

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult {
    call("cuEventCreate", |mut world| {
        let context = world.current()?;
        let known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        let shared_and_timed = flags & CU_EVENT_INTERPROCESS != 0 && flags & CU_EVENT_DISABLE_TIMING == 0;
        if event.is_null() || flags & !known != 0 || shared_and_timed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let id = world.fresh_id();
        world.events.insert(id, Event { context, flags, recorded: None, generation: 0, completed_at: None });
        // SAFETY: not null, so writable, as the driver asks.
        unsafe { put(event, World::event_handle(id)) }
    })
}

/// Returns at once; streams that wait for the event still do.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    call("cuEventDestroy_v2", |mut world| {
        if event.is_null() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let id = world.event(event)?;
        world.events.remove(&id);
        Ok(())
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    call("cuEventRecord", |mut world| {
        if event.is_null() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let (id, stream) = (world.event(event)?, world.stream(stream)?);
        let context = world.streams.get(&stream).map(|stream| stream.context);
        let Some(event) = world.events.get_mut(&id).filter(|event| Some(event.context) == context) else {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        };
        event.generation += 1;
        event.completed_at = None;
        let generation = event.generation;
        let mark = world.submit(stream, Vec::new(), Work::Record { event: id, generation });
        if let Some(event) = world.events.get_mut(&id) {
            event.recorded = Some(mark);
        }
        Ok(())
    })
}

/// An event by its handle, in a context that works.
fn usable(world: &mut World, event: CUevent) -> Result<Event, CUresult> {
    if event.is_null() {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let id = world.event(event)?;
    let event = world.events.get(&id).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    world.usable(event.context)?;
    Ok(event)
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    call("cuEventQuery", |mut world| {
        let event = usable(&mut world, event)?;
        if event.recorded.is_none_or(|mark| world.is_done(mark)) { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    call("cuEventSynchronize", |mut world| {
        let event = usable(&mut world, event)?;
        let marks = Vec::from_iter(event.recorded);
        wait(world, &marks).usable(event.context)
    })
}

fn elapsed(mut world: Guard, out: *mut c_float, start: CUevent, end: CUevent) -> Answer {
    let (start, end) = (usable(&mut world, start)?, usable(&mut world, end)?);
    if !start.is_timed() || !end.is_timed() {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    let (Some(from), Some(to)) = (start.recorded, end.recorded) else { return Err(CUDA_ERROR_INVALID_HANDLE) };
    if !world.is_done(from) || !world.is_done(to) {
        return Err(CUDA_ERROR_NOT_READY);
    }
    let (Some(from), Some(to)) = (start.completed_at, end.completed_at) else { return Err(CUDA_ERROR_UNKNOWN) };
    let seconds = match to.checked_duration_since(from) {
        Some(after) => after.as_secs_f32(),
        None => -from.duration_since(to).as_secs_f32(),
    };
    // SAFETY: null or writable, as the driver asks.
    unsafe { put(out, seconds * 1000.0) }
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut c_float, start: CUevent, end: CUevent) -> CUresult {
    call("cuEventElapsedTime", |world| elapsed(world, milliseconds, start, end))
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(milliseconds: *mut c_float, start: CUevent, end: CUevent) -> CUresult {
    call("cuEventElapsedTime_v2", |world| elapsed(world, milliseconds, start, end))
}
