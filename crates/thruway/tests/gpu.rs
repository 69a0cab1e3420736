//! Loads to and saves from GPU memory, on a CUDA driver without a GPU whose copies finish late: every byte right, every
//! failure a clear error, nothing freed while a copy uses it, nothing left behind.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::format::safetensors::Dtype;
use thruway::io::layer::{Fault, FaultPlan, Faulty};
use thruway::io::policy::Source as StorageSide;
use thruway::io::{Capabilities, Completion, Engine, EngineFactory, EngineName, Made, OsEngines, Request, Wait};
use thruway::{Device, Error, ErrorKind, GpuBuffer, LoadOptions, PathPolicy, SaveOptions, Session, Source, Tensors};
use thruway_testkit::fake_cuda::FakeCuda;

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

const SETTINGS: Settings = Settings {
    engine: EngineChoice::Auto,
    queue_depth: 6,
    threads: 3,
    chunk_bytes: 256 << 10,
    drive_chunk_bytes: 256 << 10,
    ring_bytes: 3 << 20,
    cufile: CuFileChoice::Auto,
};

fn session(fake: &FakeCuda) -> Session {
    Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).settings(SETTINGS).build().expect("session")
}

fn content(name: &str, length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32 ^ name.bytes().fold(7, |sum: u32, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        })
        .collect()
}

/// Sizes that meet every branch of the planner: large, whole blocks, tiny, empty, odd, many small ones in a row.
fn tensors() -> Vec<(String, usize)> {
    let mut all: Vec<(String, usize)> = [("large", 3_300_001), ("blocks", 1 << 20), ("tiny", 1), ("empty", 0), ("odd", 70_003)]
        .map(|(n, l)| (n.to_owned(), l))
        .into();
    all.extend((0..200).map(|number| (format!("small.{number}"), 100 + number * 37 % 4000)));
    all
}

/// The model as a file written without our own writer, its data at an offset that suits no block.
fn write_foreign(path: &Path) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, length) in tensors() {
        let entry = serde_json::json!({"dtype": "U8", "shape": [length], "data_offsets": [data.len(), data.len() + length]});
        data.extend(content(&name, length));
        header.insert(name, entry);
    }
    let text = serde_json::Value::Object(header).to_string().into_bytes();
    std::fs::write(path, [&(text.len() as u64).to_le_bytes(), text.as_slice(), &data].concat()).expect("write");
}

fn model_file(directory: &tempfile::TempDir) -> PathBuf {
    let path = directory.path().join("model.safetensors");
    write_foreign(&path);
    path
}

fn load(session: &Session, path: &Path, policy: &str) -> thruway::Result<Tensors> {
    let policy: PathPolicy = policy.parse().expect("known");
    Ok(session.open(path)?.load(LoadOptions::all().path(policy))?.0)
}

fn assert_right(loaded: &Tensors) {
    assert_eq!(loaded.len(), tensors().len());
    for (name, length) in tensors() {
        let tensor = loaded.get(&name).expect("loaded");
        assert_eq!(tensor.device(), Device::Cuda(0));
        assert!(tensor.to_host().expect("readable") == content(&name, length), "{name} has other bytes");
    }
}

#[test]
fn a_load_to_the_gpu_brings_every_byte_by_every_path_and_leaves_nothing_behind() {
    let directory = scratch();
    let path = model_file(&directory);
    for seed in 0..8 {
        let fake = FakeCuda::start(&format!("SEED={seed}; DELAY_US=0..900"));
        for policy in ["auto", "staged", "cached"] {
            let session = session(&fake);
            let loaded = load(&session, &path, policy).expect("load");
            assert!(session.ring_bytes() <= SETTINGS.ring_bytes);
            drop(session);
            // The tensors outlive their session.
            assert_right(&loaded);
            for tensor in &loaded {
                assert!(tensor.address().is_multiple_of(256) || tensor.byte_count() == 0, "{} is not aligned", tensor.name());
                assert_eq!(tensor.bytes().expect_err("not on the host").kind(), ErrorKind::InvalidInput);
            }
        }
        fake.assert_clean();
    }
}

#[test]
fn many_small_tensors_cost_few_copies() {
    let directory = scratch();
    let path = directory.path().join("many.safetensors");
    let (mut header, count, each) = (serde_json::Map::new(), 4000, 1024);
    for number in 0..count {
        let entry =
            serde_json::json!({"dtype": "BF16", "shape": [each / 2], "data_offsets": [number * each, (number + 1) * each]});
        header.insert(format!("t{number}"), entry);
    }
    let text = serde_json::Value::Object(header).to_string().into_bytes();
    let data = content("all", count * each);
    std::fs::write(&path, [&(text.len() as u64).to_le_bytes(), text.as_slice(), &data].concat()).expect("write");
    let fake = FakeCuda::start("DELAY_US=0..10");
    for policy in ["staged", "cached"] {
        let before = fake.calls("cuMemcpyHtoDAsync_v2");
        let loaded = load(&session(&fake), &path, policy).expect("load");
        let copies = fake.calls("cuMemcpyHtoDAsync_v2") - before;
        assert!(copies <= (count * each / SETTINGS.chunk_bytes + 2) as u64, "{policy}: {copies} copies");
        for number in [0, 1, count / 2, count - 1] {
            let bytes = loaded.get(&format!("t{number}")).expect("loaded").to_host().expect("readable");
            assert!(bytes == data[number * each..(number + 1) * each]);
        }
    }
    fake.assert_clean();
}

/// A model in GPU memory and the sources to save it from.
fn on_the_gpu(session: &Session, path: &Path) -> (Tensors, Vec<Source>) {
    let loaded = load(session, path, "auto").expect("load");
    let source =
        |tensor: &thruway::Tensor| Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region().expect("free"));
    let sources = loaded.iter().map(source).collect();
    (loaded, sources)
}

#[test]
fn a_save_from_the_gpu_writes_every_byte_by_every_path() {
    let directory = scratch();
    let path = model_file(&directory);
    let target = directory.path().join("saved.safetensors");
    let host = Session::builder().device(Device::Host).build().expect("session");
    for seed in 0..5 {
        let fake = FakeCuda::start(&format!("SEED={seed}; DELAY_US=0..900"));
        let session = session(&fake);
        let (loaded, sources) = on_the_gpu(&session, &path);
        for policy in ["auto", "staged", "cached"] {
            let options = SaveOptions::default().path(policy.parse().expect("known"));
            session.save(&sources, &target, options).expect("save");
            let (saved, _) = host.open(&target).and_then(|model| model.load(LoadOptions::all())).expect("load");
            for (name, length) in tensors() {
                assert!(
                    saved.get(&name).expect("saved").bytes().expect("host") == content(&name, length),
                    "{name}, {policy}, seed {seed}"
                );
            }
        }
        drop((loaded, sources, session));
        fake.assert_clean();
    }
}

#[test]
fn a_load_fills_a_lent_gpu_buffer_in_place_and_a_slice_arrives_alone() {
    let directory = scratch();
    let path = model_file(&directory);
    let fake = FakeCuda::start("DELAY_US=0..300");
    let session = session(&fake);
    let model = session.open(&path).expect("open");
    let buffer = GpuBuffer::new(session.gpu().expect("a GPU"), 70_003).expect("memory");
    let address = buffer.address();
    let options = LoadOptions::all().select(["odd"]).slice("large", 0, 1_000_000..1_000_777).into("odd", buffer);
    let (loaded, _) = model.load(options).expect("load");
    let odd = loaded.get("odd").expect("loaded");
    assert_eq!(odd.address(), address);
    assert!(odd.to_host().expect("readable") == content("odd", 70_003));
    let slice = loaded.get("large").expect("loaded").to_host().expect("readable");
    assert!(slice == content("large", 3_300_001)[1_000_000..1_000_777]);
    drop((loaded, session, model));
    fake.assert_clean();
}

#[test]
fn a_load_into_the_memory_of_an_earlier_one_allocates_nothing_and_leaves_what_is_still_used_alone() {
    let directory = scratch();
    let path = model_file(&directory);
    let fake = FakeCuda::start("DELAY_US=0..300");
    for device in [Device::Cuda(0), Device::Host] {
        let session = Session::builder().device(device).cuda_library(fake.path()).settings(SETTINGS).build().expect("session");
        let model = session.open(&path).expect("open");
        let first = model.load(LoadOptions::all()).expect("load").0;
        let addresses = |tensors: &Tensors| tensors.iter().map(thruway::Tensor::address).collect::<Vec<u64>>();
        let (before, allocations) = (addresses(&first), fake.calls("cuMemAlloc_v2"));
        let second = model.load(LoadOptions::all().reusing(first)).expect("load").0;
        assert_eq!(addresses(&second), before);
        assert_eq!(fake.calls("cuMemAlloc_v2"), allocations);
        for (name, length) in tensors() {
            assert!(second.get(&name).expect("loaded").to_host().expect("readable") == content(&name, length));
        }
        // A tensor that someone still holds keeps its bytes; another layout gets memory of its own.
        let kept = second.get("odd").expect("loaded").clone();
        let third = model.load(LoadOptions::all().reusing(second)).expect("load").0;
        assert!(addresses(&third).iter().zip(&before).all(|(now, then)| now != then));
        let fourth = model.load(LoadOptions::all().select(["blocks"]).reusing(third)).expect("load").0;
        assert!(fourth.get("blocks").expect("loaded").to_host().expect("readable") == content("blocks", 1 << 20));
        assert!(kept.to_host().expect("readable") == content("odd", 70_003));
        drop((kept, fourth, model, session));
    }
    fake.assert_clean();
}

/// What a lane does in which order: how many reads its engine has done, and how many chunks have arrived on the GPU.
#[derive(Debug, Default)]
struct Order {
    read: AtomicU64,
    arrived: AtomicU64,
    /// How many of those reads had not yet arrived whenever the next began.
    behind: Mutex<Vec<u64>>,
}

#[derive(Debug)]
struct Watched(Box<dyn Engine>, Arc<Order>);

impl Engine for Watched {
    fn name(&self) -> EngineName {
        self.0.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        self.0.submit(request)
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> thruway::Result<()> {
        let before = done.len();
        // An engine that is the CPU reads now.
        let behind = self.1.read.load(Ordering::SeqCst) - self.1.arrived.load(Ordering::SeqCst);
        self.0.complete(done, wait)?;
        let read = (done.len() - before) as u64;
        self.1.read.fetch_add(read, Ordering::SeqCst);
        if read > 0 {
            self.1.behind.lock().expect("no panic").push(behind);
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }
}

#[derive(Debug)]
struct WatchedEngines(Arc<Order>);

impl EngineFactory for WatchedEngines {
    fn make(&self, source: StorageSide) -> thruway::Result<Made> {
        let made = OsEngines { choice: EngineChoice::Posix, depth: 1, threads: 1, direct: None }.make(source)?;
        Ok(Made { engine: Box::new(Watched(made.engine, Arc::clone(&self.0))), note: made.note })
    }
}

#[test]
fn a_lane_reads_the_next_chunk_while_the_last_is_copied() {
    let directory = scratch();
    let path = model_file(&directory);
    let fake = FakeCuda::start("DELAY_US=2000..3000");
    let order = Arc::new(Order::default());
    let settings = Settings { chunk_bytes: 64 << 10, drive_chunk_bytes: 64 << 10, ..SETTINGS };
    let builder = Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).settings(settings);
    let session = builder.engines(Box::new(WatchedEngines(Arc::clone(&order)))).build().expect("session");
    for policy in ["cached", "staged"] {
        for counter in [&order.read, &order.arrived] {
            counter.store(0, Ordering::SeqCst);
        }
        let counted = Arc::clone(&order);
        let progress = Arc::new(move |_: u64| _ = counted.arrived.fetch_add(1, Ordering::SeqCst));
        let options = LoadOptions::all().path(policy.parse().expect("known")).progress(progress);
        session.open(&path).and_then(|model| model.load(options)).expect("load");
        let behind = std::mem::take(&mut *order.behind.lock().expect("no panic"));
        // A read that came short is resumed, and is then two reads of one chunk.
        let resumed = order.read.load(Ordering::SeqCst) - order.arrived.load(Ordering::SeqCst);
        let overlapping = behind.iter().filter(|behind| **behind > resumed).count();
        assert!(behind.len() > 50 && overlapping > behind.len() * 3 / 4, "{policy}: {behind:?}, {resumed} resumed");
    }
}

#[test]
fn lanes_that_wait_for_memory_which_another_lost_do_not_hide_its_failure() {
    let directory = scratch();
    let path = model_file(&directory);
    let settings = Settings { threads: 7, chunk_bytes: 64 << 10, drive_chunk_bytes: 64 << 10, ring_bytes: 64 << 10, ..SETTINGS };
    for _ in 0..20 {
        let fake = FakeCuda::start("DELAY_US=0..50; FAIL_LATE=cuMemcpyHtoDAsync:3:ILLEGAL_ADDRESS");
        let session = Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).settings(settings).build();
        let error = session.and_then(|session| load(&session, &path, "cached")).expect_err("a copy failed");
        assert_eq!(error.kind(), ErrorKind::Gpu, "{error}");
        assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
    }
}

/// Every driver function that a transfer calls, with a call number beyond its last use.
const CALLS: [&str; 11] = [
    "cuCtxPushCurrent",
    "cuMemAlloc",
    "cuMemHostRegister",
    "cuStreamCreate",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuDevicePrimaryCtxRetain",
];

/// The error that an injected failure becomes; a failure that a transfer can do without becomes none.
fn is_clear(error: &Error, symbol: &str) {
    let text = format!("{error}");
    assert!(matches!(error.kind(), ErrorKind::Gpu | ErrorKind::OutOfMemory | ErrorKind::Unsupported), "{symbol}: {error:?}");
    assert!(text.contains(symbol) || text.contains("cuStreamSynchronize"), "the error does not name {symbol}: {text}");
}

#[test]
fn a_failing_driver_call_at_any_point_is_a_clear_error_and_leaves_no_copy_over_freed_memory() {
    let directory = scratch();
    let path = model_file(&directory);
    let target = directory.path().join("saved.safetensors");
    let mut failures = 0;
    for symbol in CALLS {
        for nth in [1, 2, 3, 5, 8, 13, 21, 34] {
            let code = if symbol == "cuMemAlloc" { "OUT_OF_MEMORY" } else { "UNKNOWN" };
            let fake = FakeCuda::start(&format!("DELAY_US=0..400; FAIL={symbol}:{nth}:{code}"));
            let built = Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).settings(SETTINGS).build();
            let result = built.and_then(|session| {
                let loaded = load(&session, &path, "staged")?;
                let source =
                    |tensor: &thruway::Tensor| Ok(Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region()?));
                let sources = loaded.iter().map(source).collect::<thruway::Result<Vec<Source>>>()?;
                session.save(&sources, &target, SaveOptions::default()).map(drop)
            });
            if let Err(error) = result {
                is_clear(&error, symbol);
                failures += 1;
            }
            // Where even the release of memory fails, the memory stays; that is no misuse.
            let misused: Vec<_> = fake.faults().into_iter().filter(|fault| fault.kind != "released_with_memory").collect();
            assert!(misused.is_empty(), "{symbol} failing at call {nth}: {misused:?}");
        }
    }
    assert!(failures > 40, "the injected failures were hardly ever met: {failures}");
}

#[test]
fn work_that_fails_late_is_reported_and_nothing_it_might_touch_is_freed() {
    let directory = scratch();
    let path = model_file(&directory);
    for nth in [1, 3, 9] {
        let fake = FakeCuda::start(&format!("DELAY_US=0..400; FAIL_LATE=cuMemcpyHtoDAsync:{nth}:ILLEGAL_ADDRESS"));
        let error = load(&session(&fake), &path, "cached").expect_err("a copy failed");
        assert_eq!(error.kind(), ErrorKind::Gpu, "{error}");
        assert!(fake.faults().is_empty(), "{:?}", fake.faults());
    }
}

#[derive(Debug)]
struct FaultyEngines(FaultPlan);

impl EngineFactory for FaultyEngines {
    fn make(&self, source: StorageSide) -> thruway::Result<Made> {
        let made = OsEngines { choice: EngineChoice::Auto, depth: 6, threads: 3, direct: None }.make(source)?;
        Ok(Made { engine: Box::new(Faulty::new(made.engine, self.0.clone())), note: made.note })
    }
}

#[test]
fn a_storage_failure_during_a_gpu_transfer_waits_for_the_copies_under_way() {
    let directory = scratch();
    let path = model_file(&directory);
    for at in (0..24).step_by(2) {
        for fault in [Fault::Errno(libc::EIO), Fault::Short(100), Fault::Errno(libc::EAGAIN)] {
            let fake = FakeCuda::start("DELAY_US=200..2000");
            let faulty = Box::new(FaultyEngines(FaultPlan::single(at, fault)));
            let session = Session::builder()
                .device(Device::Cuda(0))
                .cuda_library(fake.path())
                .settings(SETTINGS)
                .engines(faulty)
                .build()
                .expect("session");
            match load(&session, &path, "staged") {
                Ok(loaded) => assert_right(&loaded),
                Err(error) => assert!(fault == Fault::Errno(libc::EIO) && error.context("file").is_some(), "{error}"),
            }
            drop(session);
            fake.assert_clean();
        }
    }
}

#[test]
fn without_a_driver_or_a_gpu_auto_is_the_host_and_says_why_and_asking_for_one_is_an_error() {
    let fake = FakeCuda::start("DEVICES=0");
    let build = |device, library: &Path| Session::builder().device(device).cuda_library(library).build();
    for library in [fake.path(), Path::new("/nonexistent/libcuda.so.1")] {
        let session = build(Device::Auto, library).expect("the host is always there");
        assert_eq!(session.device(), Device::Host);
        assert!(!session.device_reason().is_empty());
        let error = build(Device::Cuda(0), library).expect_err("there is none");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.hint().is_some());
    }
    drop(fake);
    let fake = FakeCuda::start("DEVICES=2");
    assert_eq!(build(Device::Auto, fake.path()).expect("a GPU").device(), Device::Cuda(0));
    let error = build(Device::Cuda(7), fake.path()).expect_err("only two");
    assert!(error.to_string().contains("2 GPUs"), "{error}");
}

#[test]
fn a_gpu_that_is_there_and_fails_is_an_error_and_no_reason_to_use_the_host() {
    for symbol in ["cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain"] {
        let fake = FakeCuda::start(&format!("FAIL={symbol}:1:UNKNOWN"));
        let error = Session::builder().device(Device::Auto).cuda_library(fake.path()).build().expect_err("the GPU failed");
        assert_eq!(error.kind(), ErrorKind::Gpu, "{error}");
        is_clear(&error, symbol);
        assert!(error.hint().is_some() && error.context("code").is_some(), "{error:?}");
    }
}

#[test]
fn direct_is_refused_with_its_reason_on_a_gpu_without_such_a_path() {
    let directory = scratch();
    let path = model_file(&directory);
    let fake = FakeCuda::start("");
    let error = load(&session(&fake), &path, "direct").expect_err("no direct path");
    assert_eq!(error.kind(), ErrorKind::PathUnavailable);
    fake.assert_clean();
}

#[test]
fn a_tensor_larger_than_the_gpus_memory_is_refused_before_anything_is_read() {
    let directory = scratch();
    let path = model_file(&directory);
    let fake = FakeCuda::start("MEMORY=1048576");
    let error = load(&session(&fake), &path, "auto").expect_err("too large");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.context("free").is_some() && error.hint().is_some(), "{error}");
    assert_eq!(fake.calls("cuMemcpyHtoDAsync_v2"), 0);
    drop(error);
    fake.assert_clean();
}

#[test]
fn a_thousand_small_loads_leave_gpu_and_host_memory_flat() {
    let directory = scratch();
    let path = directory.path().join("small.safetensors");
    let header = serde_json::json!({"t": {"dtype": "U8", "shape": [5000], "data_offsets": [0, 5000]}}).to_string();
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &content("t", 5000)].concat())
        .expect("write");
    let fake = FakeCuda::start("DELAY_US=0..1; CHECK=0");
    let session = session(&fake);
    let report = |fake: &FakeCuda| fake.report().to_string().len();
    drop(load(&session, &path, "cached").expect("load"));
    let (ring, first) = (session.ring_bytes(), report(&fake));
    for _ in 0..1000 {
        let loaded = load(&session, &path, "cached").expect("load");
        assert_eq!(loaded.get("t").expect("loaded").dtype(), Dtype::U8);
    }
    assert_eq!(session.ring_bytes(), ring);
    assert!(report(&fake) < first + 200, "the driver holds more and more");
    drop(session);
    fake.assert_clean();
}

#[test]
fn a_panic_or_a_failing_wait_in_a_lane_frees_nothing_that_the_gpu_still_uses() {
    let directory = scratch();
    let path = model_file(&directory);
    for policy in ["staged", "cached"] {
        let fake = FakeCuda::start("DELAY_US=500..3000");
        let session = session(&fake);
        let model = session.open(&path).expect("open");
        let options = LoadOptions::all().path(policy.parse().expect("known"));
        let options = options.progress(std::sync::Arc::new(|_| panic!("the caller's own mistake")));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.load(options))).expect_err("the panic reaches the caller");
        assert_right(&load(&session, &path, policy).expect("the session goes on"));
        drop((model, session));
        fake.assert_clean();
        drop(fake);

        let fake = FakeCuda::start("DELAY_US=500..3000; FAIL=cuEventSynchronize:1:UNKNOWN,cuStreamSynchronize:*:UNKNOWN");
        let session = self::session(&fake);
        // Whether a wait is met depends on the copies' timing; what must never happen is a hang or a freed buffer in use.
        let results: Vec<bool> = (0..4).map(|_| load(&session, &path, policy).is_ok()).collect();
        drop(session);
        let misused: Vec<_> = fake.faults().into_iter().filter(|fault| fault.kind != "released_with_memory").collect();
        assert!(misused.is_empty(), "{results:?}: {misused:?}");
    }
}

#[test]
fn a_load_into_memory_of_an_allocator_asks_for_all_of_it_in_small_shares() {
    let fake = FakeCuda::start("DELAY_US=0..200");
    let directory = scratch();
    let path = model_file(&directory);
    let session = session(&fake);
    let gpu = Arc::clone(session.gpu().expect("a GPU"));
    let asked: Arc<Mutex<Vec<thruway::model::Allocation>>> = Arc::default();
    let (record, maker) = (Arc::clone(&asked), Arc::clone(&gpu));
    let allocator = Box::new(move |wanted: &[thruway::model::Allocation]| {
        record.lock().expect("no panic").extend(wanted.to_vec());
        wanted.iter().map(|one| Ok(GpuBuffer::new(&maker, one.bytes)?.into())).collect()
    });
    let model = session.open(&path).expect("open");
    let options = LoadOptions::all().allocator(allocator).shared_bytes(64 << 10);
    let (loaded, _) = model.load(options).expect("load");
    assert_right(&loaded);
    let asked = asked.lock().expect("no panic");
    let places: Vec<&thruway::model::Place> = asked.iter().flat_map(|one| &one.places).collect();
    assert_eq!(places.len(), tensors().len());
    for one in asked.iter() {
        assert!(one.bytes <= 64 << 10 || one.places.len() == 1, "{} bytes for {} tensors", one.bytes, one.places.len());
        assert!(one.places.iter().all(|place| place.range.start % 256 == 0 && place.range.end <= one.bytes));
    }
    for place in places {
        assert_eq!(place.range.len() as u64, model.entries()[place.entry].extent.length);
    }
}

/// The default stream, which is always there.
fn default_stream() -> thruway::cuda::CallerStream {
    // SAFETY: 0 is its handle in every context.
    unsafe { thruway::cuda::CallerStream::from_handle(0) }
}

#[test]
fn a_load_comes_after_what_its_callers_stream_still_does_with_the_memory() {
    let fake = FakeCuda::start("DELAY_US=2000..4000");
    let directory = scratch();
    let path = model_file(&directory);
    let session = session(&fake);
    let (gpu, fill_later) = (Arc::clone(session.gpu().expect("a GPU")), fake.filler(8));
    // What a framework's allocator does: memory whose former user is still queued.
    let allocator = Box::new(move |wanted: &[thruway::model::Allocation]| {
        let _current = gpu.current()?;
        let fill = |one: &thruway::model::Allocation| {
            let buffer = GpuBuffer::new(&gpu, one.bytes)?;
            fill_later(buffer.address(), one.bytes);
            Ok(buffer.into())
        };
        wanted.iter().map(fill).collect()
    });
    let options = LoadOptions::all().allocator(allocator).after(default_stream());
    let (loaded, _) = session.open(&path).expect("open").load(options).expect("load");
    assert_right(&loaded);
    assert!(fake.faults().is_empty(), "{:?}", fake.faults());
}

#[test]
fn loads_and_saves_go_on_beside_a_capture_into_a_graph_and_leave_it_whole() {
    let fake = FakeCuda::start("CAPTURING=1;DELAY_US=0..200");
    let directory = scratch();
    let path = model_file(&directory);
    let session = session(&fake);
    let loaded = load(&session, &path, "auto").expect("load");
    assert_right(&loaded);
    let error = session.open(&path).expect("open").load(LoadOptions::all().after(default_stream())).expect_err("no such wait");
    assert!(error.to_string().contains("STREAM_CAPTURE_IMPLICIT"), "{error}");
    drop((loaded, session));
    assert!(fake.faults().is_empty(), "{:?}", fake.faults());
}

#[test]
fn an_allocator_that_fails_or_gives_something_else_ends_the_load() {
    let fake = FakeCuda::start("DELAY_US=0..200");
    let directory = scratch();
    let path = model_file(&directory);
    let session = session(&fake);
    let gpu = Arc::clone(session.gpu().expect("a GPU"));
    let model = session.open(&path).expect("open");
    let fails = Box::new(|_: &[thruway::model::Allocation]| Err(Error::new(ErrorKind::OutOfMemory, "none is left")));
    let error = model.load(LoadOptions::all().allocator(fails)).expect_err("no memory");
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    let short = Box::new(move |wanted: &[thruway::model::Allocation]| {
        wanted.iter().map(|one| Ok(GpuBuffer::new(&gpu, one.bytes / 2)?.into())).collect()
    });
    let error = model.load(LoadOptions::all().allocator(short)).expect_err("half of it");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_right(&load(&session, &path, "auto").expect("the session works on"));
}
