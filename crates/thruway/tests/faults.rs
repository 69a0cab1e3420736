//! A fault at every I/O operation of a load, a save and a copy: the bytes are right, or the error names file,
//! tensor and offset; nothing hangs, nothing leaks, nothing half-written is published.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::format::safetensors::Dtype;
use thruway::io::layer::{Fault, FaultPlan, Faulty};
use thruway::io::policy::Source as StorageSide;
use thruway::io::{EngineFactory, Made, OsEngines};
use thruway::{CopyOptions, Error, ErrorKind, HostBuffer, LoadOptions, Model, PathPolicy, SaveOptions, Session, Source, Tensors};

/// The operating system's engines with faults in front of them.
#[derive(Debug)]
struct FaultyEngines {
    inner: OsEngines,
    plan: FaultPlan,
}

impl EngineFactory for FaultyEngines {
    fn make(&self, source: StorageSide) -> thruway::Result<Made> {
        let Made { engine, note } = self.inner.make(source)?;
        Ok(Made { engine: Box::new(Faulty::new(engine, self.plan.clone())), note })
    }
}

const ENGINES: [EngineChoice; 2] = [EngineChoice::Auto, EngineChoice::Posix];

fn session(choice: EngineChoice, plan: &FaultPlan) -> Session {
    // Small chunks, so that a small model takes many operations; a ring of two slabs.
    let settings = Settings {
        engine: choice,
        queue_depth: 4,
        threads: 2,
        chunk_bytes: 256 << 10,
        drive_chunk_bytes: 256 << 10,
        ring_bytes: 2 << 20,
        cufile: CuFileChoice::Auto,
    };
    let inner = OsEngines { choice, depth: 4, threads: 2, direct: None };
    Session::builder().settings(settings).engines(Box::new(FaultyEngines { inner, plan: plan.clone() })).build().expect("session")
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

const TENSORS: [(&str, usize); 5] = [("large", 1_300_000), ("aligned", 524_288), ("small", 33), ("empty", 0), ("middle", 70_000)];

fn content(name: &str, length: usize, seed: u8) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32 ^ u32::from(seed) ^ name.bytes().map(u32::from).sum::<u32>();
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        })
        .collect()
}

/// The model as a file written without our own writer: data begins at an offset that suits no block.
fn write_foreign(path: &Path, seed: u8) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, length) in TENSORS {
        let entry = serde_json::json!({"dtype": "U8", "shape": [length], "data_offsets": [data.len(), data.len() + length]});
        header.insert(name.to_owned(), entry);
        data.extend(content(name, length, seed));
    }
    let text = serde_json::Value::Object(header).to_string().into_bytes();
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend(text);
    file.extend(data);
    std::fs::write(path, file).expect("write");
}

fn is_right(tensors: &Tensors, seed: u8) -> bool {
    tensors.len() == TENSORS.len()
        && TENSORS.iter().all(|(name, length)| {
            tensors.get(name).is_some_and(|tensor| tensor.bytes().expect("done") == content(name, *length, seed))
        })
}

fn load(session: &Session, path: &Path, policy: &str) -> thruway::Result<Tensors> {
    let model: Model = session.open(path)?;
    let policy: PathPolicy = policy.parse().expect("a known path");
    Ok(model.load(LoadOptions::all().path(policy))?.0)
}

/// Descriptors that this process has open, to see that none is left behind.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

const PERMANENT: [(i32, ErrorKind); 3] =
    [(libc::EIO, ErrorKind::Io), (libc::ENOSPC, ErrorKind::NoSpace), (libc::EBADF, ErrorKind::Io)];

fn assert_names_the_place(error: &Error) {
    for key in ["file", "offset", "engine"] {
        assert!(error.context(key).is_some(), "the error does not say the {key}: {error}");
    }
}

#[test]
fn a_fault_at_any_operation_of_a_load_gives_right_bytes_or_an_error_that_names_the_place() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    write_foreign(&path, 1);
    for (choice, policy) in ENGINES.iter().flat_map(|choice| ["staged", "cached"].map(|policy| (*choice, policy))) {
        let counting = FaultPlan::default();
        assert!(is_right(&load(&session(choice, &counting), &path, policy).expect("no fault"), 1));
        let operations = counting.operations();
        assert!(operations > 8, "the model is too small to test anything: {operations} operations");
        let before = open_descriptors();
        for at in 0..operations {
            // A header read that fails leaves no tensor to name; after it, every failure names one.
            for fault in [Fault::Short(1), Fault::Short(4097), Fault::Errno(libc::EINTR), Fault::Errno(libc::EAGAIN)] {
                let session = session(choice, &FaultPlan::single(at, fault));
                let tensors = load(&session, &path, policy).unwrap_or_else(|error| panic!("{fault:?} at {at}: {error}"));
                assert!(is_right(&tensors, 1), "{fault:?} at operation {at} of {operations} ({choice:?}, {policy})");
            }
            for (errno, kind) in PERMANENT {
                let plan = FaultPlan::single(at, Fault::Errno(errno));
                let error = load(&session(choice, &plan), &path, policy).expect_err("the operation failed");
                assert_eq!(error.kind(), kind, "{error}");
                assert_names_the_place(&error);
                let in_data = at >= operations - 6;
                assert!(error.context("tensor").is_some() || !in_data, "no tensor at operation {at}: {error}");
            }
            // Nothing more can be read: as if the file had ended.
            let error = load(&session(choice, &FaultPlan::single(at, Fault::Short(0))), &path, policy).expect_err("cut");
            assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
            assert_names_the_place(&error);
        }
        assert_eq!(open_descriptors(), before, "a failed load left a descriptor open");
    }
}

/// Past the page cache whole blocks are read, and with them bytes of neighbours that nobody asked for.
#[test]
fn a_failed_load_of_one_tensor_names_that_one_and_not_a_neighbour_in_the_same_block() {
    let directory = scratch();
    // Errors show a path whole, however long, and tensors are found by it.
    let path = directory.path().join("d".repeat(200)).join("model.safetensors");
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
    write_foreign(&path, 1);
    let load_one = |plan: &FaultPlan| {
        let session = session(EngineChoice::Auto, plan);
        let model = session.open(&path)?;
        let opening = plan.operations();
        let options = LoadOptions::all().select(["middle"]).path("staged".parse().expect("known"));
        model.load(options).map(|_| opening)
    };
    let counting = FaultPlan::default();
    let opening = load_one(&counting).expect("no fault");
    assert!(counting.operations() > opening);
    for at in opening..counting.operations() {
        let error = load_one(&FaultPlan::single(at, Fault::Errno(libc::EIO))).expect_err("the operation failed");
        assert_eq!(error.context("tensor"), Some("middle"), "operation {at}: {error}");
    }
}

/// Loads while, before operation `at`, `change` happens to the file.
fn load_with(choice: EngineChoice, path: &Path, at: u64, change: impl Fn(&Path) + Send + 'static) -> thruway::Result<Tensors> {
    let target = path.to_owned();
    let plan = FaultPlan::single(at, Fault::Hook).with_hook(move || change(&target));
    load(&session(choice, &plan), path, "staged")
}

#[test]
fn a_file_that_is_cut_replaced_or_rewritten_during_a_load_is_never_mixed() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    let other = directory.path().join("other.safetensors");
    for choice in ENGINES {
        write_foreign(&path, 1);
        let counting = FaultPlan::default();
        load(&session(choice, &counting), &path, "staged").expect("no fault");
        for at in 0..counting.operations() {
            write_foreign(&path, 1);
            let cut = |path: &Path| {
                std::fs::File::options().write(true).open(path).and_then(|file| file.set_len(100_000)).expect("cut")
            };
            let error = load_with(choice, &path, at, cut).expect_err("the file was cut");
            assert!(matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::Changed), "{error}");
            assert!(error.context("file").is_some(), "{error}");

            write_foreign(&path, 1);
            write_foreign(&other, 2);
            let replacement = other.clone();
            match load_with(choice, &path, at, move |path| std::fs::rename(&replacement, path).expect("rename")) {
                Ok(tensors) => assert!(is_right(&tensors, 1) || is_right(&tensors, 2), "mixed at operation {at}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Changed, "{error}"),
            }

            write_foreign(&path, 1);
            let rewrite = |path: &Path| write_in_place(path);
            match load_with(choice, &path, at, rewrite) {
                // The change was there before the header was read.
                Ok(tensors) => assert!(!is_right(&tensors, 1) && at == 0, "a change at operation {at} went unnoticed"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Changed, "{error}"),
            }
        }
    }
}

fn write_in_place(path: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(path).expect("open");
    let length = file.metadata().expect("metadata").len();
    file.write_all_at(&[0xAB; 1000], length - 1000).expect("write");
    // Two changes within one tick of the filesystem's clock leave one time stamp; a real writer has a later one.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(1);
    file.set_modified(later).expect("time stamp");
}

fn sources(seed: u8) -> (Vec<HostBuffer>, Vec<Source>) {
    let buffers: Vec<HostBuffer> =
        TENSORS.iter().map(|(name, length)| HostBuffer::from_vec(content(name, *length, seed))).collect();
    let source = |((name, length), buffer): (&(&str, usize), &HostBuffer)| {
        Source::new(*name, Dtype::U8, vec![*length as u64], buffer.source(0..*length).expect("all of it"))
    };
    let sources = TENSORS.iter().zip(&buffers).map(source).collect();
    (buffers, sources)
}

/// What lies in a directory, hidden names included.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .expect("list")
        .map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Runs `save` once for each operation and fault; the target must hold the old model or the new one, whole.
fn with_every_write_fault(what: &str, save: &dyn Fn(&Session, &Path) -> thruway::Result<()>) {
    for choice in ENGINES {
        let directory = scratch();
        let target: PathBuf = directory.path().join("model.safetensors");
        write_foreign(&target, 1);
        let counting = FaultPlan::default();
        save(&session(choice, &counting), &target).expect("no fault");
        let plain = Session::builder().build().expect("session");
        for at in 0..counting.operations() {
            for fault in [Fault::Short(1), Fault::Short(4097), Fault::Errno(libc::EINTR), Fault::Errno(libc::EAGAIN)] {
                write_foreign(&target, 1);
                save(&session(choice, &FaultPlan::single(at, fault)), &target)
                    .unwrap_or_else(|error| panic!("{fault:?} at {at}: {error}"));
                assert!(is_right(&load(&plain, &target, "auto").expect("whole"), 2), "{what}: {fault:?} at operation {at}");
            }
            for fault in [Fault::Errno(libc::EIO), Fault::Errno(libc::ENOSPC), Fault::Short(0)] {
                write_foreign(&target, 1);
                let error = save(&session(choice, &FaultPlan::single(at, fault)), &target).expect_err("the operation failed");
                assert_names_the_place(&error);
                assert!(is_right(&load(&plain, &target, "auto").expect("untouched"), 1), "{what}: {fault:?} at operation {at}");
                let left: Vec<String> = names(directory.path()).into_iter().filter(|name| name.starts_with('.')).collect();
                assert!(left.is_empty(), "{what}: {fault:?} at operation {at} left {left:?}");
            }
        }
    }
}

#[test]
fn a_fault_at_any_operation_of_a_save_leaves_the_old_file_or_the_new_one() {
    let (_buffers, sources) = sources(2);
    let sources = Arc::new(sources);
    with_every_write_fault("save", &|session, target| session.save(&sources, target, SaveOptions::default()).map(drop));
}

#[test]
fn a_fault_at_any_operation_of_a_copy_leaves_the_old_file_or_the_new_one() {
    let directory = scratch();
    let source = directory.path().join("source.safetensors");
    write_foreign(&source, 2);
    with_every_write_fault("copy", &|session, target| session.open(&source)?.copy_to(target, CopyOptions::default()).map(drop));
}

#[test]
fn thousands_of_failing_loads_leave_neither_memory_nor_descriptors_behind() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    write_foreign(&path, 1);
    let mapped = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmSize:"))
            .expect("VmSize")
            .trim()
            .trim_end_matches(" kB")
            .to_owned();
        line.parse::<u64>().expect("a number")
    };
    let round = || {
        for at in 0..12 {
            let plan = FaultPlan::single(at, Fault::Errno(libc::EIO));
            drop(load(&session(EngineChoice::Auto, &plan), &path, "staged"));
        }
    };
    // Else the allocator may reserve 64 MiB of address space for one more thread at any moment, which is no leak.
    // An allocator without arenas (a sanitizer's) refuses, and needs no limit.
    // SAFETY: sets a number of the allocator's.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    (0..10).for_each(|_| round());
    let (descriptors, kib) = (open_descriptors(), mapped());
    (0..90).for_each(|_| round());
    assert_eq!(open_descriptors(), descriptors);
    assert!(mapped() < kib + 64 * 1024, "address space grew from {kib} to {} KiB", mapped());
}
