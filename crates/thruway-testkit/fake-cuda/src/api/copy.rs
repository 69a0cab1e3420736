//! Copies and fills.

use std::ffi::{c_uchar, c_void};

use thruway_sys::cuda::*;

use crate::copy::{Copy, Place, Source};
use crate::stream::{StreamId, Work};
use crate::world::{Answer, Guard, address, call, wait};

/// Up to here a copy from memory that is not pinned is staged and the call returns; beyond, it waits for the copy.
/// Seen on a driver: behind a busy stream, 64 KiB returned at once and 16 MiB did not.
const STAGED_BYTES_MAX: usize = 64 << 10;

/// Whether the caller asked to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// Until the bytes are there.
    Always,
    /// Only where pageable memory makes the driver wait.
    IfPageable,
}

/// Submits one copy, and waits where a driver does.
fn submit(mut world: Guard, stream: StreamId, copy: Copy, wanted: Wait) -> Answer {
    let staged = matches!(&copy.from, Source::Staged(bytes) if bytes.len() > STAGED_BYTES_MAX);
    let waits = wanted == Wait::Always || staged || matches!(copy.to, Place::Pageable(_));
    let context = world.streams.get(&stream).map_or(0, |stream| stream.context);
    let mark = world.submit(stream, Vec::new(), Work::Copies(vec![copy]));
    if !waits {
        return Ok(());
    }
    wait(world, &[mark]).usable(context)
}

/// Which side each address of a copy is on.
#[derive(Clone, Copy, Debug)]
enum Ends {
    ToDevice(CUdeviceptr, *const c_void),
    ToHost(*mut c_void, CUdeviceptr),
    OnDevice(CUdeviceptr, CUdeviceptr),
}

fn copy(mut world: Guard, ends: Ends, bytes: usize, stream: CUstream, wanted: Wait) -> Answer {
    let stream = world.stream(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    let (to, from) = match ends {
        Ends::ToDevice(to, from) => (world.device_place(to, bytes)?, world.host_place(from, bytes)?),
        Ends::ToHost(to, from) => (world.host_place(to, bytes)?, world.device_place(from, bytes)?),
        Ends::OnDevice(to, from) => (world.device_place(to, bytes)?, world.device_place(from, bytes)?),
    };
    let plan = world.plan(to, from, bytes)?;
    submit(world, stream, plan, wanted)
}

/// Pinned memory is read when the copy completes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> CUresult {
    call("cuMemcpyHtoDAsync_v2", |world| copy(world, Ends::ToDevice(to, from), bytes, stream, Wait::IfPageable))
}

/// Pinned memory holds rubbish from the copy's beginning to its completion.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    call("cuMemcpyDtoHAsync_v2", |world| copy(world, Ends::ToHost(to, from), bytes, stream, Wait::IfPageable))
}

/// Also between devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult {
    call("cuMemcpyDtoDAsync_v2", |world| copy(world, Ends::OnDevice(to, from), bytes, stream, Wait::IfPageable))
}

/// On the default stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) -> CUresult {
    call("cuMemcpyHtoD_v2", |world| copy(world, Ends::ToDevice(to, from), bytes, CU_STREAM_LEGACY, Wait::Always))
}

/// On the default stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemcpyDtoH_v2", |world| copy(world, Ends::ToHost(to, from), bytes, CU_STREAM_LEGACY, Wait::Always))
}

/// As documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream) -> CUresult {
    call("cuMemsetD8Async", |mut world| {
        let stream = world.stream(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = world.device_place(to, bytes)?;
        let plan = world.plan_fill(to, value, bytes);
        submit(world, stream, plan, Wait::IfPageable)
    })
}

/// The largest pitch that a device takes (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const PITCH_MAX: usize = 0x7fff_ffff;

/// Each row is a copy of its own. Arrays are refused.
fn copy_rows(mut world: Guard, rows: &CUDA_MEMCPY2D, stream: CUstream) -> Answer {
    let stream = world.stream(stream)?;
    let (bytes, count) = (rows.WidthInBytes, rows.Height);
    if bytes == 0 || count == 0 {
        return Ok(());
    }
    if [rows.srcPitch, rows.dstPitch].iter().any(|pitch| !(bytes..=PITCH_MAX).contains(pitch)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut copies = Vec::with_capacity(count);
    for row in 0..count {
        let (from, to) =
            (rows.srcXInBytes + (rows.srcY + row) * rows.srcPitch, rows.dstXInBytes + (rows.dstY + row) * rows.dstPitch);
        let to = match rows.dstMemoryType {
            CU_MEMORYTYPE_DEVICE => world.device_place(rows.dstDevice + to as u64, bytes)?,
            CU_MEMORYTYPE_HOST => world.host_place(rows.dstHost.wrapping_byte_add(to), bytes)?,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        let from = match rows.srcMemoryType {
            CU_MEMORYTYPE_DEVICE => world.device_place(rows.srcDevice + from as u64, bytes)?,
            CU_MEMORYTYPE_HOST => world.host_place(rows.srcHost.wrapping_byte_add(from), bytes)?,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        copies.push(world.plan(to, from, bytes)?);
    }
    let waits = copies.iter().any(|copy| matches!(copy.to, Place::Pageable(_)));
    let context = world.streams.get(&stream).map_or(0, |stream| stream.context);
    let mark = world.submit(stream, Vec::new(), Work::Copies(copies));
    if waits { wait(world, &[mark]).usable(context) } else { Ok(()) }
}

/// The rows run last to first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) -> CUresult {
    call("cuMemcpy2DAsync_v2", |world| {
        // SAFETY: null or readable, as the driver asks.
        let Some(rows) = (unsafe { copy.as_ref() }) else { return Err(CUDA_ERROR_INVALID_VALUE) };
        copy_rows(world, rows, stream)
    })
}

/// The arrays of a batch.
#[derive(Clone, Copy, Debug)]
struct Batch {
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    starts: *mut usize,
    attribute_count: usize,
}

impl Batch {
    /// The access order of each copy's source.
    ///
    /// # Safety
    /// The arrays have as many entries as is said, as the driver asks.
    unsafe fn orders(&self) -> Result<Vec<u32>, CUresult> {
        let missing = self.to.is_null() || self.from.is_null() || self.sizes.is_null() || self.attributes.is_null();
        if missing || self.starts.is_null() || self.count == 0 || !(1..=self.count).contains(&self.attribute_count) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut orders = Vec::new();
        for index in 0..self.attribute_count {
            // SAFETY: in bounds by the caller's promise.
            let (start, order) = unsafe { (*self.starts.add(index), (*self.attributes.add(index)).src_access_order) };
            // The first begins at 0, the others each beyond the one before.
            let in_order = if index == 0 { start == 0 } else { start > orders.len().saturating_sub(1) && start < self.count };
            if !in_order || !(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM..=CU_MEMCPY_SRC_ACCESS_ORDER_ANY).contains(&order) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let last = orders.last().copied().unwrap_or(order);
            orders.resize(start, last);
            orders.push(order);
        }
        let last = orders.last().copied().unwrap_or(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
        orders.resize(self.count, last);
        Ok(orders)
    }

    /// Submits the batch as one piece of work. Sources that may be read during the call are.
    ///
    /// # Safety
    /// As for [`Batch::orders`]; `wrong` learns which copy was refused.
    unsafe fn submit(&self, mut world: Guard, stream: CUstream, wrong: &mut usize) -> Answer {
        if stream.is_null() || stream == CU_STREAM_LEGACY {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let stream = world.stream(stream)?;
        // SAFETY: the caller's promise.
        let orders = unsafe { self.orders() }?;
        let mut copies = Vec::new();
        for (index, order) in orders.into_iter().enumerate() {
            // SAFETY: in bounds by the caller's promise.
            let (to, from, bytes) = unsafe { (*self.to.add(index), *self.from.add(index), *self.sizes.add(index)) };
            *wrong = index;
            if bytes == 0 {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            let (to, mut from) = (world.place(address(to), bytes)?, world.place(address(from), bytes)?);
            if let (Place::Pinned(at), CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL) = (from, order) {
                from = Place::Pageable(at);
            }
            copies.push(world.plan(to, from, bytes)?);
        }
        *wrong = usize::MAX;
        let waits = copies.iter().any(|copy| matches!(copy.to, Place::Pageable(_)));
        let context = world.streams.get(&stream).map_or(0, |stream| stream.context);
        let mark = world.submit(stream, Vec::new(), Work::Copies(copies));
        if waits { wait(world, &[mark]).usable(context) } else { Ok(()) }
    }
}

/// The copies of a batch run last to first. An address that the driver does not know is host memory that is not pinned: a
/// wrong one is a crash on a real driver, and a fault here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    starts: *mut usize,
    attribute_count: usize,
    fail_index: *mut usize,
    stream: CUstream,
) -> CUresult {
    call("cuMemcpyBatchAsync", |world| {
        let mut wrong = usize::MAX;
        let batch = Batch { to, from, sizes, count, attributes, starts, attribute_count };
        // SAFETY: the arrays are as the driver asks.
        let answer = unsafe { batch.submit(world, stream, &mut wrong) };
        if !fail_index.is_null() {
            // SAFETY: not null, so writable, as the driver asks.
            unsafe { fail_index.write_unaligned(wrong) };
        }
        answer
    })
}

/// Likewise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    to: *mut CUdeviceptr,
    from: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    attributes: *mut CUmemcpyAttributes,
    starts: *mut usize,
    attribute_count: usize,
    stream: CUstream,
) -> CUresult {
    call("cuMemcpyBatchAsync_v2", |world| {
        let batch = Batch { to, from, sizes, count, attributes, starts, attribute_count };
        // SAFETY: the arrays are as the driver asks.
        unsafe { batch.submit(world, stream, &mut 0) }
    })
}
