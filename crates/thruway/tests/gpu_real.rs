//! What only a real GPU can confirm: the bytes, the memory and the clean end of failed transfers, with a real driver's
//! timing. `THRUWAY_REQUIRE_GPU=1` demands the machine's own driver and GPU (`scripts/gpu-check` sets it); else the same
//! tests, with fewer rounds, run on the driver without a GPU.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::cuda::Crc64;
use thruway::io::layer::{Fault, FaultPlan, Faulty};
use thruway::io::policy::Source as StorageSide;
use thruway::io::{EngineFactory, Made, OsEngines};
use thruway::transfer::{Cancel, FileRef};
use thruway::{
    Device, Direction, ErrorKind, Extent, GpuBuffer, LoadOptions, Move, PathPolicy, Session, SessionBuilder, TransferOptions,
};
use thruway_testkit::fake_cuda::FakeCuda;

/// The GPU's driver, or the one that stands in for it.
enum Driver {
    Real,
    Fake(FakeCuda),
}

impl Driver {
    fn start() -> Self {
        if std::env::var_os("THRUWAY_REQUIRE_GPU").is_some() {
            Self::Real
        } else {
            Self::Fake(FakeCuda::start("DELAY_US=0..200"))
        }
    }

    fn rounds(&self, real: usize, fake: usize) -> usize {
        if matches!(self, Self::Real) { real } else { fake }
    }

    fn session(&self, settings: Settings) -> SessionBuilder {
        let builder = Session::builder().device(Device::Cuda(0)).settings(settings);
        match self {
            Self::Real => builder,
            Self::Fake(fake) => builder.cuda_library(fake.path()),
        }
    }

    fn end(self) {
        if let Self::Fake(fake) = self {
            fake.assert_clean();
        }
    }
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

/// A generator whose seed, printed by a failing assertion, repeats the case.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).expect("64-bit") % bound.max(1)
    }

    fn below_one_of(&mut self, bounds: &[usize]) -> usize {
        let bound = bounds[self.below(bounds.len())];
        self.below(bound)
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.below(256).to_le_bytes()[0]).collect()
    }

    fn settings(&mut self) -> Settings {
        let engine = [EngineChoice::Auto, EngineChoice::Posix][self.below(2)];
        let chunk_bytes = 4096 * (1 + self.below(300));
        let ring_bytes = chunk_bytes * (1 + self.below(12));
        let drive_chunk_bytes = 4096 * (1 + self.below(300));
        let (queue_depth, threads) = (1 + self.below(32), 1 + self.below(12));
        Settings { engine, queue_depth, threads, chunk_bytes, drive_chunk_bytes, ring_bytes, cufile: CuFileChoice::Auto }
    }

    fn options(&mut self) -> TransferOptions {
        let policy = ["auto", "staged", "cached"][self.below(3)];
        TransferOptions { policy: policy.parse::<PathPolicy>().expect("known"), ..TransferOptions::default() }
    }
}

/// Writes a file and makes the page cache forget it, so that the paths past it are taken by choice too.
fn write_file(path: &Path, content: &[u8], forget: bool) {
    std::fs::write(path, content).expect("write");
    if forget {
        let file = std::fs::File::open(path).expect("open");
        file.sync_all().expect("sync");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
    }
}

fn on_host(buffer: &GpuBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.copy_to_host(0..buffer.len(), &mut bytes).expect("readable");
    bytes
}

/// Fills a buffer with the content of a file.
fn fill(session: &Session, path: &Path, buffer: &mut GpuBuffer) {
    let region = buffer.region(0..buffer.len()).expect("free");
    let extent = Extent::new(0, buffer.len() as u64);
    let item = Move { file: FileRef::new(path), extent, region, direction: Direction::Read };
    session.transfer(vec![item], &TransferOptions::default()).expect("a whole file");
}

#[test]
fn random_ranges_arrive_at_random_places_and_leave_from_them() {
    let driver = Driver::start();
    let directory = scratch();
    let [input, blank, output] = ["input", "blank", "output"].map(|name| directory.path().join(name));
    let length = 9_000_000 + 4321;
    let content = Random(77).bytes(length);
    write_file(&blank, &vec![0xEE; length], false);
    for round in 0..driver.rounds(120, 25) {
        let seed = 0x9e37_79b9_7f4a_7c15 ^ (round as u64 + 1);
        let mut random = Random(seed);
        write_file(&input, &content, random.below(2) == 0);
        let session = driver.session(random.settings()).build().expect("session");
        let mut buffer = GpuBuffer::new(session.gpu().expect("a GPU"), length).expect("memory");
        fill(&session, &blank, &mut buffer);
        // Disjoint ranges of the memory, each with a range of the file, which may overlap others.
        let (mut expected, mut moves, mut at) = (vec![0xEE; length], Vec::new(), random.below(5000));
        let sizes = [1, 700, 66_000, 1_500_000];
        loop {
            let count = random.below_one_of(&sizes);
            if at + count > length {
                break;
            }
            let from = random.below(length - count);
            expected[at..at + count].copy_from_slice(&content[from..from + count]);
            let region = buffer.region(at..at + count).expect("in range");
            let extent = Extent::new(from as u64, count as u64);
            moves.push(Move { file: FileRef::new(&input), extent, region, direction: Direction::Read });
            at += count + random.below(9000);
        }
        let options = random.options();
        session.transfer(moves, &options).unwrap_or_else(|error| panic!("seed {seed:#x}: {error}"));
        assert!(on_host(&buffer) == expected, "seed {seed:#x}: other bytes than were asked for");

        // And back: ranges of that memory into a file, at other offsets.
        write_file(&output, &vec![0x11; length], random.below(2) == 0);
        let (mut written, mut moves, mut to) = (vec![0x11; length], Vec::new(), random.below(5000));
        loop {
            let count = random.below_one_of(&sizes);
            if to + count > length {
                break;
            }
            let from = random.below(length - count);
            written[to..to + count].copy_from_slice(&expected[from..from + count]);
            let region = buffer.source(from..from + count).expect("in range");
            let extent = Extent::new(to as u64, count as u64);
            moves.push(Move { file: FileRef::new(&output), extent, region, direction: Direction::Write });
            to += count + random.below(9000);
        }
        let options = random.options();
        session.transfer(moves, &options).unwrap_or_else(|error| panic!("seed {seed:#x}: {error}"));
        assert!(std::fs::read(&output).expect("readable") == written, "seed {seed:#x}: the file holds other bytes");
    }
    driver.end();
}

fn small_model(directory: &Path) -> (PathBuf, Vec<u8>) {
    let (path, length) = (directory.join("model.safetensors"), 900_001);
    let header = serde_json::json!({"t": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).to_string();
    let content = Random(5).bytes(length);
    write_file(&path, &[&(header.len() as u64).to_le_bytes(), header.as_bytes(), &content].concat(), false);
    (path, content)
}

#[test]
fn slices_of_columns_arrive_whole() {
    let driver = Driver::start();
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    let session = driver.session(Settings::default()).build().expect("session");
    for seed in 0..driver.rounds(60, 10) as u64 {
        let mut random = Random(0x51ce + seed);
        let (rows, columns) = (1 + random.below(3000), 1 + random.below(4000));
        let whole = random.bytes(rows * columns);
        let text = format!(r#"{{"m":{{"dtype":"U8","shape":[{rows},{columns}],"data_offsets":[0,{}]}}}}"#, whole.len());
        write_file(&path, &[&(text.len() as u64).to_le_bytes(), text.as_bytes(), &whole].concat(), seed % 2 == 0);
        let first = random.below(columns);
        let range = first..first + random.below(columns - first + 1);
        let policy = ["cached", "staged", "auto"][random.below(3)];
        let options = LoadOptions::all().slice("m", 1, range.start as u64..range.end as u64);
        let options = options.path(policy.parse().expect("known"));
        let (loaded, _) = session.open(&path).expect("open").load(options).expect("load");
        let wanted: Vec<u8> = whole.chunks(columns).flat_map(|row| &row[range.clone()]).copied().collect();
        let found = loaded.get("m").expect("loaded").to_host().expect("readable");
        assert!(found == wanted, "seed {seed}: columns {range:?} of {rows} x {columns}, {policy}");
    }
    drop(session);
    driver.end();
}

/// The anonymous memory and the descriptors of this process.
fn held() -> (u64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    (kib << 10, std::fs::read_dir("/proc/self/fd").expect("proc").count())
}

#[test]
fn ten_thousand_small_loads_leave_gpu_and_host_memory_flat() {
    let driver = Driver::start();
    let directory = scratch();
    let (path, content) = small_model(directory.path());
    let session = driver.session(Settings::default()).build().expect("session");
    let gpu = Arc::clone(session.gpu().expect("a GPU"));
    let load = |policy: &str| {
        let options = LoadOptions::all().path(policy.parse().expect("known"));
        session.open(&path).expect("open").load(options).expect("load").0
    };
    let policies = ["cached", "staged"];
    // What grows once, grows now: the ring, each lane's stream of events, the allocator's arenas.
    for round in 0..driver.rounds(500, 20) {
        drop(load(policies[round % 2]));
    }
    let (free, ring, (host, descriptors)) = (gpu.free_bytes().expect("known"), session.ring_bytes(), held());
    for round in 0..driver.rounds(10_000, 200) {
        let loaded = load(policies[round % 2]);
        if round % 1000 == 999 {
            assert!(loaded.get("t").expect("loaded").to_host().expect("readable") == content);
        }
    }
    let (host_after, descriptors_after) = held();
    assert_eq!(session.ring_bytes(), ring);
    assert_eq!(descriptors_after, descriptors);
    // AddressSanitizer keeps freed memory for a while, to catch who still uses it.
    if std::env::var_os("ASAN_OPTIONS").is_none() {
        assert!(host_after < host + (8 << 20), "{} bytes of host memory more", host_after - host);
    }
    // Others may use the GPU meanwhile; a leak of a load each would be 9 GB.
    assert!(gpu.free_bytes().expect("known") + (512 << 20) > free, "GPU memory has gone");
    drop(session);
    driver.end();
}

#[derive(Debug)]
struct FaultyEngines(FaultPlan, EngineChoice);

impl EngineFactory for FaultyEngines {
    fn make(&self, source: StorageSide) -> thruway::Result<Made> {
        let made = OsEngines { choice: self.1, depth: 6, threads: 3, direct: None }.make(source)?;
        Ok(Made { engine: Box::new(Faulty::new(made.engine, self.0.clone())), note: made.note })
    }
}

#[test]
fn a_failure_or_a_cancellation_at_any_step_ends_clean_and_the_gpu_goes_on_working() {
    let driver = Driver::start();
    let directory = scratch();
    let (path, content) = small_model(directory.path());
    let settings = Settings { chunk_bytes: 64 << 10, drive_chunk_bytes: 64 << 10, ring_bytes: 1 << 20, ..Settings::default() };
    let mut failed = 0;
    for choice in [EngineChoice::Auto, EngineChoice::Posix] {
        for policy in ["staged", "cached"] {
            for at in 0..18 {
                let plan = FaultPlan::single(at, Fault::Errno(libc::EIO));
                let faulty = Box::new(FaultyEngines(plan, choice));
                let session = driver.session(settings).engines(faulty).build().expect("session");
                let options = || LoadOptions::all().path(policy.parse().expect("known"));
                let result = session.open(&path).and_then(|model| model.load(options()));
                let first_failed = result.is_err();
                if let Err(error) = result {
                    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                    failed += 1;
                }
                // The plan holds one fault, and it is spent: the same session serves the next load.
                let again = session.open(&path).and_then(|model| model.load(options()));
                match again {
                    Ok((loaded, _)) => assert!(loaded.get("t").expect("loaded").to_host().expect("readable") == content),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
                        assert!(!first_failed, "the fault at operation {at} was met twice");
                        failed += 1;
                    }
                }
            }
        }
    }
    assert!(failed >= 4 * 15, "the faults were met only {failed} times");
    for step in 0..14 {
        let session = driver.session(settings).build().expect("session");
        let (cancel, steps) = (Cancel::default(), Arc::new(AtomicU64::new(0)));
        let (by_callback, counted) = (cancel.clone(), Arc::clone(&steps));
        let progress = Arc::new(move |_: u64| {
            if counted.fetch_add(1, Ordering::Relaxed) == step {
                by_callback.cancel();
            }
        });
        let options = LoadOptions::all().path("staged".parse().expect("known")).progress(progress).cancel(cancel);
        match session.open(&path).expect("open").load(options) {
            Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}"),
            // Too late: everything was on its way.
            Ok((loaded, _)) => assert!(loaded.get("t").expect("loaded").to_host().expect("readable") == content),
        }
        let (loaded, _) = session.open(&path).expect("open").load(LoadOptions::all()).expect("load");
        assert!(loaded.get("t").expect("loaded").to_host().expect("readable") == content);
    }
    driver.end();
}

#[test]
fn the_gpus_checksums_are_those_of_the_cpu_for_every_length_and_alignment() {
    let driver = Driver::start();
    let directory = scratch();
    let mut random = Random(0xc64);
    let content = random.bytes(5_000_000);
    let path = directory.path().join("input");
    write_file(&path, &content, false);
    let session = driver.session(Settings::default()).build().expect("session");
    let gpu = session.gpu().expect("a GPU");
    let mut buffer = GpuBuffer::new(gpu, content.len()).expect("memory");
    fill(&session, &path, &mut buffer);
    let kernel = Crc64::load(gpu).expect("the driver takes the kernel, and it computes what it should");
    let lengths = (0..=300).chain(2040..2060).chain(4090..4110).chain([262_143, 262_144, 262_145, 2_000_003]);
    let mut ranges: Vec<_> = lengths.flat_map(|length| (0..16).map(move |start| 48 + start..48 + start + length)).collect();
    // To the very end: nothing behind it may be touched.
    ranges.extend((0..40).map(|length| content.len() - length..content.len()));
    for _ in 0..driver.rounds(20_000, 2000) {
        let (start, length) = (random.below(1 << 20), random.below_one_of(&[100, 5000, 70_000, 600_000]));
        ranges.push(start..start + length);
    }
    let pieces: Vec<(u64, u64)> =
        ranges.iter().map(|range| (buffer.address() + range.start as u64, range.len() as u64)).collect();
    // SAFETY: the pieces lie in the buffer, which was filled before, and which nobody writes to.
    let found = unsafe { kernel.remainders(&pieces) }.expect("summed");
    let crc = |bytes: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes);
    for (range, found) in ranges.into_iter().zip(found) {
        assert_eq!(found, crc(&content[range.clone()]) ^ crc(&vec![0; range.len()]), "{range:?}");
    }

    let large = GpuBuffer::new(gpu, driver.rounds(4 << 30, 4 << 20)).expect("memory");
    let pieces: Vec<(u64, u64)> = (0..large.len() as u64 >> 18).map(|piece| (large.address() + (piece << 18), 1 << 18)).collect();
    let begun = std::time::Instant::now();
    for _ in 0..5 {
        // SAFETY: as above; what the memory holds does not matter.
        unsafe { kernel.remainders(&pieces) }.expect("summed");
    }
    let rate = 5.0 * large.len() as f64 / begun.elapsed().as_secs_f64() / 1e9;
    // Not by a macro, whose output a test that passes keeps to itself.
    writeln!(std::io::stderr(), "checksums of {} bytes on the GPU: {rate:.0} GB/s", large.len()).expect("told");
    drop((kernel, buffer, large, session));
    driver.end();
}
