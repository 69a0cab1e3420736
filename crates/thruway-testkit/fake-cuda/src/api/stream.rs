//! Streams.

use std::ffi::{c_int, c_uint};

use thruway_sys::cuda::*;

use crate::capture;
use crate::stream::{Mark, Work};
use crate::world::{Answer, Guard, World, call, put, wait};

fn create(mut world: Guard, out: *mut CUstream, flags: c_uint) -> Answer {
    let context = world.current()?;
    if out.is_null() || flags & !CU_STREAM_NON_BLOCKING != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let id = world.create_stream(context, flags & CU_STREAM_NON_BLOCKING == 0, false);
    // SAFETY: not null, so writable, as the driver asks.
    unsafe { put(out, World::stream_handle(id)) }
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult {
    call("cuStreamCreate", |world| create(world, stream, flags))
}

/// The priority changes nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, _priority: c_int) -> CUresult {
    call("cuStreamCreateWithPriority", |world| create(world, stream, flags))
}

/// Returns at once; work that is left is still done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call("cuStreamDestroy_v2", |mut world| {
        if stream.is_null() || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let id = world.stream(stream)?;
        if let Some(stream) = world.streams.get_mut(&id) {
            stream.destroyed = true;
            if stream.queue.is_empty() {
                world.streams.remove(&id);
            }
        }
        Ok(())
    })
}

/// The end of a stream's work, and its context.
fn end(world: &mut World, stream: CUstream) -> Result<(Mark, usize), CUresult> {
    let id = world.stream(stream)?;
    let (seq, context) = world.streams.get(&id).map_or((0, 0), |stream| (stream.issued, stream.context));
    Ok((Mark { stream: id, seq }, context))
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    call("cuStreamSynchronize", |mut world| {
        let (mark, context) = end(&mut world, stream)?;
        wait(world, &[mark]).usable(context)
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamQuery(stream: CUstream) -> CUresult {
    call("cuStreamQuery", |mut world| {
        let (mark, _) = end(&mut world, stream)?;
        if world.is_done(mark) { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    })
}

/// As documented; the event may belong to another device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> CUresult {
    call("cuStreamWaitEvent", |mut world| {
        if event.is_null() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let (id, event) = (world.stream(stream)?, world.event(event)?);
        if flags != CU_EVENT_WAIT_DEFAULT {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let recorded = world.events.get(&event).and_then(|event| event.recorded);
        if let Some(mark) = recorded.filter(|mark| !world.is_done(*mark)) {
            world.submit(id, vec![mark], Work::Barrier);
        }
        Ok(())
    })
}

/// With the setting `CAPTURING` every stream is captured, and the default one cannot be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus) -> CUresult {
    call("cuStreamIsCapturing", |mut world| {
        world.stream(stream)?;
        if world.config.capturing && (stream.is_null() || stream == CU_STREAM_LEGACY) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let found = if world.config.capturing { CU_STREAM_CAPTURE_STATUS_ACTIVE } else { CU_STREAM_CAPTURE_STATUS_NONE };
        // SAFETY: null or writable, as the driver asks.
        unsafe { put(status, found) }
    })
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> CUresult {
    call("cuThreadExchangeStreamCaptureMode", |_world| {
        if mode.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so it can be read and written, as the driver asks.
        let wanted = unsafe { mode.read_unaligned() };
        if wanted > CU_STREAM_CAPTURE_MODE_RELAXED {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: as above.
        unsafe { put(mode, capture::exchange(wanted)) }
    })
}
