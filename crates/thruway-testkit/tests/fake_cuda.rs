//! The fake driver keeps the promises that other tests lean on: what is right on a GPU is right here, and what a GPU
//! punishes now and then is punished here always.

#[allow(dead_code, reason = "other tests use the rest")]
mod support;

use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use support::{Driver, Mapping, pattern};
use thruway_sys::cuda::*;
use thruway_testkit::fake_cuda::FakeCuda;

/// Each copy takes this long.
const SLOW: &str = "DELAY_US=30000..30000";
const SLOW_MS: u64 = 30;

#[test]
fn bytes_go_to_the_device_across_it_and_back() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let bytes = 3 << 20;
    let (up, down) = (Mapping::registered(&driver, bytes), Mapping::registered(&driver, bytes));
    let (a, b, stream) = (driver.alloc(bytes), driver.alloc(bytes), driver.stream(CU_STREAM_NON_BLOCKING));
    up.write(&pattern(bytes, 1));
    driver.h2d(a, up.pointer(), bytes, stream);
    driver.d2d(b, a, bytes, stream);
    driver.d2h(down.pointer(), b, bytes, stream);
    driver.sync(stream);
    assert_eq!(down.read(), pattern(bytes, 1));
    assert_eq!(fake.device_bytes(b, bytes), pattern(bytes, 1));
    assert_eq!(fake.count("host_to_device_bytes"), bytes as u64);
    assert_eq!(fake.count("pageable_copies"), 0);

    driver.unregister(&up);
    driver.unregister(&down);
    driver.free(a);
    driver.free(b);
    driver.destroy(stream);
    driver.close();
    fake.assert_clean();
}

#[test]
fn a_pinned_source_that_is_overwritten_too_early_arrives_wrong_and_is_noticed() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (source, device) = (Mapping::registered(&driver, 8192), driver.alloc(8192));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    source.write(&pattern(8192, 1));
    let held = fake.hold();
    driver.h2d(device, source.pointer(), 8192, stream);
    source.write(&pattern(8192, 2));
    drop(held);
    driver.sync(stream);
    assert_eq!(fake.device_bytes(device, 8192), pattern(8192, 2));
    assert!(fake.saw("source_changed"), "{:?}", fake.faults());
}

#[test]
fn a_pageable_source_may_be_overwritten_as_soon_as_the_call_returns() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let device = driver.alloc(8192);
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    let held = fake.hold();
    let mut source = pattern(8192, 1);
    driver.h2d(device, source.as_mut_ptr().cast(), 8192, stream);
    assert_eq!(driver.query(stream), CUDA_ERROR_NOT_READY, "small pageable copies are staged, not waited for");
    source.fill(0);
    drop(held);
    driver.sync(stream);
    assert_eq!(fake.device_bytes(device, 8192), pattern(8192, 1));
    assert_eq!((fake.faults(), fake.count("pageable_copies")), (vec![], 1));

    let large = pattern(1 << 20, 3);
    let device = driver.alloc(large.len());
    driver.h2d(device, large.as_ptr().cast_mut().cast(), large.len(), stream);
    assert_eq!(driver.query(stream), CUDA_SUCCESS, "large ones are waited for");
}

#[test]
fn a_destination_that_is_read_too_early_holds_rubbish_even_if_it_was_right_before() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 4096), driver.alloc(4096));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    host.write(&pattern(4096, 1));
    driver.h2d(device, host.pointer(), 4096, stream);
    driver.sync(stream);
    let begin = || {
        let held = fake.hold();
        driver.d2h(host.pointer(), device, 4096, stream);
        support::eventually("the copy begins", || host.read() != pattern(4096, 1));
        held
    };
    drop(begin());
    driver.sync(stream);
    assert_eq!(host.read(), pattern(4096, 1));
    assert_eq!(fake.faults(), []);

    let held = begin();
    host.write(&[0; 4096]);
    drop(held);
    driver.sync(stream);
    assert!(fake.saw("destination_changed"), "{:?}", fake.faults());
}

#[test]
fn a_buffer_may_go_down_and_up_again_in_one_stream_without_a_wait() {
    // The device itself changes the second copy's source: right on a GPU, so no fault here.
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (host, a, b) = (Mapping::registered(&driver, 4096), driver.alloc(4096), driver.alloc(4096));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    driver.fill(a, 7, 4096, stream);
    driver.d2h(host.pointer(), a, 4096, stream);
    driver.h2d(b, host.pointer(), 4096, stream);
    driver.sync(stream);
    assert_eq!(fake.device_bytes(b, 4096), [7; 4096]);
    assert_eq!(fake.faults(), []);
}

#[test]
fn the_nth_call_fails_as_asked_and_only_that_one() {
    let fake = FakeCuda::start("FAIL=cuMemAlloc:2:OUT_OF_MEMORY,cuStreamCreate:*:999");
    let driver = Driver::new(&fake);
    driver.alloc(100);
    assert_eq!(driver.try_alloc(100), Err(CUDA_ERROR_OUT_OF_MEMORY));
    driver.alloc(100);
    for _ in 0..3 {
        assert_eq!(driver.try_stream(CU_STREAM_DEFAULT), Err(CUDA_ERROR_UNKNOWN));
    }
    assert_eq!((fake.calls("cuMemAlloc_v2"), fake.calls("cuStreamCreate")), (3, 3));
}

#[test]
fn a_late_failure_shows_at_the_wait_and_ends_the_context() {
    let fake = FakeCuda::start("FAIL_LATE=cuMemcpyHtoDAsync:2:LAUNCH_FAILED");
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 4096), driver.alloc(4096));
    let (stream, event) = (driver.stream(CU_STREAM_NON_BLOCKING), driver.event(CU_EVENT_DISABLE_TIMING));
    driver.h2d(device, host.pointer(), 4096, stream);
    driver.h2d(device, host.pointer(), 4096, stream);
    driver.record(event, stream);
    // SAFETY: a living stream and event.
    unsafe {
        assert_eq!((driver.cuda.cuStreamSynchronize)(stream), CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!((driver.cuda.cuEventQuery)(event), CUDA_ERROR_LAUNCH_FAILED);
    }
    assert_eq!(driver.try_alloc(1), Err(CUDA_ERROR_LAUNCH_FAILED));
    assert_eq!(fake.report()["devices"][0]["sticky_error"], 719);
}

#[test]
fn device_memory_ends_where_the_setting_says() {
    let fake = FakeCuda::start("MEMORY=1048576");
    let driver = Driver::new(&fake);
    let half = driver.alloc(512 << 10);
    assert_eq!(half % 256, 0);
    assert_eq!(driver.memory(), (512 << 10, 1 << 20));
    assert_eq!(driver.try_alloc((512 << 10) + 1), Err(CUDA_ERROR_OUT_OF_MEMORY));
    driver.free(half);
    driver.free(driver.alloc(1 << 20));
    assert_eq!(driver.try_alloc(0), Err(CUDA_ERROR_INVALID_VALUE));
    driver.close();
    fake.assert_clean();
}

#[test]
fn the_cpu_cannot_touch_device_memory() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let device = driver.alloc(4096);
    assert!(!support::is_readable(device), "{device:#x} is readable");
}

#[test]
fn events_keep_their_stream_s_order_and_carry_it_to_another_stream() {
    let fake = FakeCuda::start(SLOW);
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 4096), driver.alloc(4096));
    let (first, second) = (driver.stream(CU_STREAM_NON_BLOCKING), driver.stream(CU_STREAM_NON_BLOCKING));
    let (before, after) = (driver.event(CU_EVENT_DEFAULT), driver.event(CU_EVENT_DEFAULT));
    assert_eq!(driver.query_event(before), CUDA_SUCCESS, "an event that was never recorded holds nobody up");

    let begun = Instant::now();
    let held = fake.hold();
    driver.record(before, first);
    driver.fill(device, 1, 4096, first);
    driver.fill(device, 2, 4096, first);
    driver.record(after, first);
    // SAFETY: a living stream and event.
    unsafe { assert_eq!((driver.cuda.cuStreamWaitEvent)(second, after, 0), CUDA_SUCCESS) };
    driver.d2h(host.pointer(), device, 4096, second);
    assert_eq!((driver.query_event(after), driver.query(second)), (CUDA_ERROR_NOT_READY, CUDA_ERROR_NOT_READY));
    drop(held);
    driver.sync(second);
    assert!(begun.elapsed() >= Duration::from_millis(3 * SLOW_MS), "three copies in a row take three delays");
    assert_eq!(driver.query_event(after), CUDA_SUCCESS);
    assert_eq!(host.read(), [2; 4096]);
    let milliseconds = driver.elapsed(before, after).expect("both are recorded, timed and done");
    assert!(milliseconds >= 30.0, "{milliseconds} ms");
    assert_eq!(driver.elapsed(before, driver.event(CU_EVENT_DISABLE_TIMING)), Err(CUDA_ERROR_INVALID_HANDLE));
    assert_eq!(fake.faults(), []);
}

#[test]
fn streams_overtake_each_other() {
    // Of many pairs of copies submitted to two streams in the same order, some complete the other way round.
    let fake = FakeCuda::start("DELAY_US=100..4000");
    let driver = Driver::new(&fake);
    let device = driver.alloc(64);
    let streams = [driver.stream(CU_STREAM_NON_BLOCKING), driver.stream(CU_STREAM_NON_BLOCKING)];
    let (mut kept, mut swapped) = (0, 0);
    for _ in 0..30 {
        let events = streams.map(|stream| {
            driver.fill(device, 0, 64, stream);
            let event = driver.event(CU_EVENT_DEFAULT);
            driver.record(event, stream);
            event
        });
        streams.iter().for_each(|stream| driver.sync(*stream));
        *if driver.elapsed(events[0], events[1]).expect("done") < 0.0 { &mut swapped } else { &mut kept } += 1;
    }
    assert!(kept > 0 && swapped > 0, "{kept} in order, {swapped} not");
}

#[test]
fn the_default_stream_waits_for_blocking_streams_and_for_no_others() {
    let fake = FakeCuda::start(SLOW);
    let driver = Driver::new(&fake);
    let device = driver.alloc(4096);
    let (blocking, free) = (driver.stream(CU_STREAM_DEFAULT), driver.stream(CU_STREAM_NON_BLOCKING));
    let held = fake.hold();
    (0..3).for_each(|_| driver.fill(device, 1, 4096, blocking));
    // Far more than the default stream will have to wait for.
    (0..30).for_each(|_| driver.fill(device, 1, 4096, free));
    driver.fill(device, 2, 4096, null_mut());
    drop(held);
    driver.sync(null_mut());
    assert_eq!((driver.query(blocking), driver.query(free)), (CUDA_SUCCESS, CUDA_ERROR_NOT_READY));

    let held = fake.hold();
    (0..3).for_each(|_| driver.fill(device, 1, 4096, null_mut()));
    driver.fill(device, 2, 4096, blocking);
    drop(held);
    driver.sync(blocking);
    assert_eq!(driver.query(null_mut()), CUDA_SUCCESS, "and a blocking stream for the default stream");
}

#[test]
fn taking_a_buffer_away_under_a_copy_is_noticed() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (registered, allocated, device) = (Mapping::registered(&driver, 4096), driver.host_alloc(4096), driver.alloc(4096));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    let mut seen = vec![];
    let mut expect = |kind: &str, submit: &dyn Fn(), take_away: &dyn Fn()| {
        let held = fake.hold();
        submit();
        held.release_after(Duration::from_millis(20));
        take_away();
        assert_eq!(driver.query(stream), CUDA_SUCCESS, "the driver waits for all work first");
        seen.push(kind.to_owned());
        assert_eq!(fake.faults().into_iter().map(|fault| fault.kind).collect::<Vec<_>>(), seen);
    };
    let up = || driver.h2d(device, registered.pointer(), 4096, stream);
    expect("unpinned_in_flight", &up, &|| driver.unregister(&registered));
    expect("unpinned_in_flight", &|| driver.d2h(allocated, device, 4096, stream), &|| driver.host_free(allocated));
    expect("freed_in_flight", &|| driver.fill(device, 1, 4096, stream), &|| driver.free(device));
}

#[test]
fn host_memory_that_is_unmapped_under_a_copy_is_an_error_and_not_a_crash() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 8192), driver.alloc(8192));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    let held = fake.hold();
    driver.h2d(device, host.pointer(), 8192, stream);
    host.vanish();
    drop(held);
    // SAFETY: a living stream.
    assert_eq!(unsafe { (driver.cuda.cuStreamSynchronize)(stream) }, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(fake.saw("host_memory_gone"), "{:?}", fake.faults());
}

#[test]
fn work_outside_a_living_allocation_is_refused() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 8192), driver.alloc(4096));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    let refused = |to: CUdeviceptr, bytes: usize, kind: &str| {
        assert_eq!(driver.try_h2d(to, host.pointer(), bytes, stream), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(fake.faults().last().map(|fault| fault.kind.clone()).as_deref(), Some(kind));
    };
    refused(device, 4097, "out_of_bounds");
    refused(device + 4000, 97, "out_of_bounds");
    refused(host.pointer().addr() as u64 + 16384, 16, "wrong_side");
    driver.free(device);
    refused(device, 1, "use_after_free");
    assert_eq!(driver.try_free(device), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(fake.faults().last().map(|fault| fault.kind.clone()).as_deref(), Some("invalid_free"));
    assert_eq!(driver.try_h2d(0, null_mut(), 0, stream), CUDA_SUCCESS, "no bytes are no work, wherever they are");
    // A refusal is not sticky.
    driver.alloc(1);
}

#[test]
fn stream_ordered_memory_lives_between_two_points_of_its_stream() {
    let fake = FakeCuda::start(SLOW);
    let driver = Driver::new(&fake);
    let (home, other) = (driver.stream(CU_STREAM_NON_BLOCKING), driver.stream(CU_STREAM_NON_BLOCKING));
    let held = fake.hold();
    let device = driver.alloc_async(4096, home);
    driver.fill(device, 1, 4096, home);
    driver.free_async(device, home);
    assert_eq!(driver.try_fill(device, 1, 4096, home), CUDA_ERROR_INVALID_VALUE, "freed in this order");
    drop(held);
    driver.sync(home);
    assert_eq!(fake.count("live_allocations"), 0);

    // Another stream that does not wait gets there first.
    let anchor = driver.alloc(4096);
    (0..20).for_each(|_| driver.fill(anchor, 1, 4096, home));
    let device = driver.alloc_async(4096, home);
    driver.fill(device, 1, 4096, other);
    // SAFETY: a living stream.
    assert_eq!(unsafe { (driver.cuda.cuStreamSynchronize)(other) }, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert!(fake.saw("use_before_alloc"), "{:?}", fake.faults());
}

#[test]
fn registered_ranges_begin_anywhere_share_pages_and_never_bytes() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let mapping = Mapping::new(1 << 16);
    let at = |offset: usize| mapping.pointer().wrapping_byte_add(offset);
    let register = |offset: usize, bytes: usize| driver.register(at(offset), bytes);
    let unregister = |offset: usize| driver.try_unregister(at(offset));
    assert_eq!(register(100, 1000), CUDA_SUCCESS);
    assert_eq!(register(1100, 1000), CUDA_SUCCESS);
    assert_eq!(register(2099, 1), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    assert_eq!(register(0, 101), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    assert_eq!(register(8192, 0), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(driver.register(null_mut(), 4096), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(driver.register(std::ptr::without_provenance_mut(0x10000), 4096), CUDA_ERROR_INVALID_VALUE, "not mapped");
    let allocated = driver.host_alloc(4096);
    assert_eq!(driver.register(allocated, 4096), CUDA_ERROR_INVALID_VALUE);

    let (device, stream) = (driver.alloc(1 << 16), driver.stream(CU_STREAM_NON_BLOCKING));
    assert_eq!(driver.try_h2d(device, at(1000), 200, stream), CUDA_ERROR_INVALID_VALUE, "across two registrations");
    assert_eq!(driver.try_h2d(device, at(2000), 200, stream), CUDA_ERROR_INVALID_VALUE, "out of one");
    assert!(fake.saw("crosses_pinned"), "{:?}", fake.faults());

    assert_eq!(unregister(101), CUDA_ERROR_INVALID_VALUE);
    assert_eq!((unregister(100), unregister(1100)), (CUDA_SUCCESS, CUDA_SUCCESS));
    assert_eq!(unregister(100), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

#[test]
fn pinned_allocations_are_not_page_aligned_unless_asked() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let pointer = driver.host_alloc(1 << 20);
    assert_eq!(pointer.addr() % 4096, 512);
    assert_eq!(fake.count("pinned_peak_bytes"), 1 << 20);
    driver.host_free(pointer);
    driver.close();
    fake.assert_clean();
    drop(fake);

    let fake = FakeCuda::start("HOST_OFFSET=0");
    assert_eq!(Driver::new(&fake).host_alloc(1 << 20).addr() % 4096, 0);
}

#[test]
fn a_thread_without_a_context_may_use_streams_but_make_nothing() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 4096), driver.alloc(4096));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    let (stream_address, host_address) = (stream.addr(), host.pointer().addr());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let stream: CUstream = std::ptr::without_provenance_mut(stream_address);
            driver.h2d(device, std::ptr::without_provenance_mut(host_address), 4096, stream);
            driver.sync(stream);
            assert_eq!(driver.try_alloc(1), Err(CUDA_ERROR_INVALID_CONTEXT));
            assert_eq!(driver.try_stream(0), Err(CUDA_ERROR_INVALID_CONTEXT));
            assert_eq!(driver.try_fill(device, 0, 1, null_mut()), CUDA_ERROR_INVALID_CONTEXT);
            // SAFETY: no arguments.
            assert_eq!(unsafe { (driver.cuda.cuCtxSynchronize)() }, CUDA_ERROR_INVALID_CONTEXT);
        });
    });
}

#[test]
fn the_last_reference_ends_the_context_and_what_is_left_in_it_is_a_fault() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    driver.alloc(100);
    driver.close();
    assert!(fake.saw("released_with_memory"), "{:?}", fake.faults());
    assert_eq!(fake.count("live_allocations"), 0);
    // SAFETY: device 0 exists.
    let again = unsafe { (driver.cuda.cuDevicePrimaryCtxRelease_v2)(0) };
    assert_eq!(again, CUDA_ERROR_INVALID_CONTEXT);
    // The thread still has the context's handle current.
    assert_eq!(driver.try_alloc(1), Err(CUDA_ERROR_CONTEXT_IS_DESTROYED));
    Driver::new(&fake).alloc(1);
}

#[test]
fn a_forked_child_is_told_that_nothing_is_initialised() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let answer = support::in_child(|| {
        let mut count = 0;
        // SAFETY: a writable number; the call takes no lock and allocates nothing in a child.
        let answer = unsafe { (driver.cuda.cuDeviceGetCount)(&raw mut count) };
        answer == CUDA_ERROR_NOT_INITIALIZED
    });
    assert!(answer);
}

#[test]
fn batches_move_every_copy_and_read_early_only_if_asked() {
    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let (host, device) = (Mapping::registered(&driver, 8192), driver.alloc(8192));
    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    host.write(&pattern(8192, 1));
    let held = fake.hold();
    let start = host.pointer().addr() as u64;
    let copies = [(device + 4096, start, 4096), (device, start + 4096, 4096)];
    assert_eq!(driver.batch(&copies, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, stream), CUDA_SUCCESS);
    host.write(&[0; 8192]);
    drop(held);
    driver.sync(stream);
    let whole = pattern(8192, 1);
    assert_eq!(fake.device_bytes(device, 8192), [&whole[4096..], &whole[..4096]].concat());
    assert_eq!(fake.faults(), []);
    assert_eq!(driver.batch(&copies, 0, stream), CUDA_ERROR_INVALID_VALUE);
    assert_eq!(driver.batch(&copies, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, null_mut()), CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn an_address_tells_what_it_is() {
    let fake = FakeCuda::start("DEVICES=2");
    let driver = Driver::on(&fake, 1);
    let (host, device) = (Mapping::registered(&driver, 4096), driver.alloc(100));
    let pageable = [0u8; 16];
    assert_eq!(driver.identify(device + 10), (CU_MEMORYTYPE_DEVICE, 1));
    assert_eq!(driver.identify(host.pointer().addr() as u64 + 10), (CU_MEMORYTYPE_HOST, 1));
    assert_eq!(driver.identify(pageable.as_ptr().addr() as u64), (0, -2));
    let (mut size, mut kind) = (0usize, 0u32);
    // SAFETY: each datum has its attribute's type.
    unsafe {
        let attribute = driver.cuda.cuPointerGetAttribute;
        assert_eq!(attribute((&raw mut size).cast(), CU_POINTER_ATTRIBUTE_RANGE_SIZE, device + 99), CUDA_SUCCESS);
        let answer = attribute((&raw mut kind).cast(), CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pageable.as_ptr().addr() as u64);
        assert_eq!(answer, CUDA_ERROR_INVALID_VALUE);
    }
    assert_eq!(size, 100);
}

#[test]
fn a_machine_without_devices_says_so_and_handles_that_are_gone_are_noticed() {
    let fake = FakeCuda::start("DEVICES=0");
    let cuda = Cuda::load(Some(fake.path())).expect("the fake");
    // SAFETY: no preconditions.
    assert_eq!(unsafe { (cuda.cuInit)(0) }, CUDA_ERROR_NO_DEVICE);
    drop(fake);

    let fake = FakeCuda::start("");
    let driver = Driver::new(&fake);
    let stream = driver.stream(CU_STREAM_DEFAULT);
    driver.destroy(stream);
    assert_eq!(driver.query(stream), CUDA_ERROR_INVALID_HANDLE);
    assert!(fake.saw("stale_handle"), "{:?}", fake.faults());
}

#[test]
fn device_code_is_ptx_with_the_products_kernel_which_runs_late() {
    let fake = FakeCuda::start("DELAY_US=0..50");
    let driver = Driver::new(&fake);
    let (mut module, mut kernel) = (null_mut(), null_mut());
    // SAFETY: a C string, and a pointer to a local.
    let mut load = |text: &CStr| unsafe { (driver.cuda.cuModuleLoadData)(&raw mut module, text.as_ptr().cast()) };
    assert_eq!(load(c"ELF"), CUDA_ERROR_INVALID_IMAGE);
    assert_eq!(load(c"// by hand\n.version 6.0\n.visible .entry thruway_crc64(\n.maxntid 256, 1, 1\n"), CUDA_SUCCESS);
    // SAFETY: as above.
    let mut find = |name: &CStr| unsafe { (driver.cuda.cuModuleGetFunction)(&raw mut kernel, module, name.as_ptr()) };
    assert_eq!(find(c"thruway_crc"), CUDA_ERROR_NOT_FOUND);
    assert_eq!(find(c"thruway_crc64"), CUDA_SUCCESS);

    let stream = driver.stream(CU_STREAM_NON_BLOCKING);
    let memory = driver.alloc(24 + 9);
    let piece = [(memory + 24).to_le_bytes(), 9_u64.to_le_bytes(), [0; 8]].concat();
    let bytes = [piece.as_slice(), b"123456789"].concat();
    // SAFETY: the driver checks the ranges.
    assert_eq!(unsafe { (driver.cuda.cuMemcpyHtoD_v2)(memory, bytes.as_ptr().cast(), bytes.len()) }, CUDA_SUCCESS);
    let launch = |threads| {
        let (mut address, mut count) = (memory, 1_u64);
        let mut parameters = [(&raw mut address).cast(), (&raw mut count).cast()];
        let (parameters, extra) = (parameters.as_mut_ptr(), null_mut());
        // SAFETY: the kernel has two parameters.
        unsafe { (driver.cuda.cuLaunchKernel)(kernel, 1, 1, 1, threads, 1, 1, 0, stream, parameters, extra) }
    };
    assert_eq!(launch(128), CUDA_ERROR_INVALID_VALUE);
    let held = fake.hold();
    assert_eq!(launch(256), CUDA_SUCCESS);
    assert_eq!(fake.device_bytes(memory + 16, 8), [0; 8], "nothing waited for it");
    drop(held);
    driver.sync(stream);
    // The check value, without what the ones at the beginning and the end make of nine bytes.
    let zeros = crc_of_zeros(9);
    assert_eq!(fake.device_bytes(memory + 16, 8), (0xae8b_1486_0a79_9888_u64 ^ zeros).to_le_bytes());
    driver.free(memory);
    driver.destroy(stream);
    // SAFETY: the module is alive, and then it is not.
    let unload = || unsafe { (driver.cuda.cuModuleUnload)(module) };
    assert_eq!((unload(), unload(), launch(256)), (CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE));
}

/// The CRC-64/NVME of zeros, bit by bit.
fn crc_of_zeros(bytes: u32) -> u64 {
    let step = |register: u64| register >> 1 ^ if register & 1 == 1 { 0x9a6c_9329_ac4b_c9b5 } else { 0 };
    !(0..bytes * 8).fold(!0, |register, _| step(register))
}
