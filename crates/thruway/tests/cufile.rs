//! The direct path by cuFile, over doubles of cuFile and of the CUDA driver: the engine's contract, right bytes by every way and
//! after every failure, and not a word of "direct" without proof.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{DIRECT, World, assert_right, forget, load, model_file, scratch, total};
use thruway::base::settings::CuFileChoice;
use thruway::format::safetensors::TensorSpec;
use thruway::io::EngineName;
use thruway::io::direct::DirectPath;
use thruway::io::engine::{CuFileOptions, CuFilePath};
use thruway::io::policy::Path as Way;
use thruway::memory::RingSettings;
use thruway::storage::File;
use thruway::transfer::{FileRef, Move, Part, TransferOptions};
use thruway::{Error, ErrorKind, Extent, GpuBuffer, LoadOptions, PathPolicy, Receipt, SaveOptions, Source};
use thruway_testkit::conformance::{Layering, OsFiles, Refused, SlowFile, TestFiles, run};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fake_cufile::failure_codes;
use thruway_testkit::random::Random;

/// A loaded tensor, to be saved.
fn source(tensor: &thruway::Tensor) -> Source {
    let spec = TensorSpec { name: tensor.name().to_owned(), dtype: tensor.dtype(), shape: tensor.shape().to_vec() };
    Source { spec, region: tensor.region().expect("nothing fills it") }
}

#[test]
fn foreign_files_and_our_own_go_directly_by_either_mechanism_and_leave_nothing_behind() {
    let directory = scratch();
    let path = model_file(directory.path());
    // Where memory begins on blocks, what we wrote goes in place; where it does not, or cannot be registered, through the window.
    for (has, settings, alignment, in_place) in [
        ("nvidia-fs", "WAY=nvfs; VERSION=1150", 65_536, true),
        ("p2pdma", "WAY=p2p; VERSION=1200; CU_ERR=801", 65_536, true),
        ("nvidia-fs", "WAY=nvfs; VERSION=1190; SHORT=8192", 512, false),
        ("nvidia-fs", "WAY=nvfs; PINNED_MAX=17000000", 65_536, false),
    ] {
        let fake = FakeCuda::start(&format!("DELAY_US=0..200; ALIGNMENT={alignment}"));
        let world = World::new(&fake, has, settings);
        let session = world.session(CuFileChoice::Auto);
        let (loaded, receipt) = load(&session, &path, DIRECT).unwrap_or_else(|error| panic!("{settings}: {error:?}"));
        assert_eq!(receipt.bytes_by(Way::Direct), total(), "{settings}: {receipt}");
        assert!(receipt.files[0].parts.iter().all(|part| part.engine == EngineName::CuFile), "{receipt}");
        assert_right(&loaded);
        let target = directory.path().join("own.safetensors");
        let sources: Vec<_> = loaded.iter().map(source).collect();
        let receipt = session.save(&sources, &target, SaveOptions::default()).expect("saved");
        drop(sources);
        assert!(receipt.bytes_by(Way::Direct) > total() / 2, "{settings}: {receipt}");
        forget(&target);
        let (again, receipt) = load(&session, &target, PathPolicy::Auto).expect("loaded");
        let windowed = |part: &&Part| part.reason.contains("through a window");
        let windowed: u64 = receipt.files[0].parts.iter().filter(windowed).map(|part| part.bytes).sum();
        assert_eq!(windowed < total() / 2, in_place, "{settings}: {receipt}");
        assert_eq!(receipt.bytes_by(Way::Direct), total(), "{settings}: {receipt}");
        assert_right(&again);
        drop(session);
        drop((loaded, again));
        world.assert_clean();
    }
}

#[test]
fn memory_that_a_caller_lent_and_memory_of_a_pool_go_through_the_window() {
    let directory = scratch();
    let bytes = Random::new(3).bytes(3 << 20);
    let path = directory.path().join("file");
    std::fs::write(&path, &bytes).expect("written");
    let fake = FakeCuda::start("");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    let gpu = session.gpu().expect("a GPU");
    let owner = GpuBuffer::new(gpu, bytes.len() + 8192).expect("room");
    for shift in [0, 8, 4096] {
        // SAFETY: the memory is that of `owner`, which lives longer and which nobody else uses.
        let mut lent = unsafe { GpuBuffer::lent(gpu, owner.address() + shift, bytes.len(), Box::new(())) };
        let region = lent.region(0..bytes.len()).expect("free");
        let moves = vec![Move {
            file: FileRef::new(&path),
            extent: Extent::new(0, bytes.len() as u64),
            region,
            direction: thruway::io::Direction::Read,
        }];
        let options = TransferOptions { policy: DIRECT, ..TransferOptions::default() };
        let receipt = session.transfer(moves, &options).expect("direct");
        assert_eq!(receipt.bytes_by(Way::Direct), bytes.len() as u64);
        assert!(receipt.to_string().contains("through a window"), "{receipt}");
        assert!(fake.device_bytes(owner.address() + shift, bytes.len()) == bytes);
    }
    assert_eq!(world.cufile.count("buffers"), 1, "the window, and nothing that was lent");
    drop((session, owner));
    world.assert_clean();
}

#[test]
fn without_counters_that_move_by_the_bytes_nothing_is_called_direct() {
    let directory = scratch();
    let path = model_file(directory.path());
    for (settings, why) in [
        ("COUNTERS=still", "did not move"),
        ("COUNTERS=half", "of the"),
        ("COUNTERS=other; ", "did not move"),
        ("VERSION=1140", "layout"),
        ("VERSION=1300", "layout"),
    ] {
        let fake = FakeCuda::start("");
        let world = World::new(&fake, "nvidia-fs", settings);
        let session = world.session(CuFileChoice::Auto);
        let error = load(&session, &path, DIRECT).expect_err(settings);
        assert_eq!(error.kind(), ErrorKind::PathUnavailable, "{settings}: {error:?}");
        assert!(error.message().contains(why) && error.hint().is_some(), "{settings}: {error:?}");
        assert_eq!(world.cufile.calls("cuFileRead"), 1, "the trial alone: nothing of the caller's has moved");
        forget(&path);
        let (loaded, receipt) = load(&session, &path, PathPolicy::Auto).expect("right all the same");
        assert_right(&loaded);
        assert_eq!((receipt.bytes_by(Way::Direct), receipt.bytes_by(Way::Unverified)), (0, total()), "{settings}: {receipt}");
        drop((session, loaded));
        world.assert_clean();
    }
}

#[test]
fn compatibility_mode_is_used_when_it_is_asked_for_and_never_called_direct() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("");
    for (choice, unverified) in [(CuFileChoice::Compat, total()), (CuFileChoice::Auto, 0), (CuFileChoice::Off, 0)] {
        let world = World::new(&fake, "nothing", "WAY=posix; DAMAGE=0");
        let session = world.session(choice);
        let error = load(&session, &path, DIRECT).expect_err("there is no direct path");
        assert_eq!(error.kind(), ErrorKind::PathUnavailable, "{error:?}");
        forget(&path);
        let (loaded, receipt) = load(&session, &path, PathPolicy::Auto).expect("right all the same");
        assert_right(&loaded);
        assert_eq!((receipt.bytes_by(Way::Direct), receipt.bytes_by(Way::Unverified)), (0, unverified), "{choice:?}: {receipt}");
        let why = if unverified > 0 { "through host memory" } else { "not direct: " };
        assert!(receipt.to_string().contains(why), "{choice:?}: {receipt}");
        drop((session, loaded));
        world.assert_clean();
    }
}

#[test]
fn a_library_that_falls_back_to_host_memory_without_a_word_is_found_out_and_not_used() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("");
    // nvidia-fs is there, and yet every request is counted as one through host memory: the file's drive is not reached.
    let world = World::new(&fake, "nvidia-fs", "WAY=posix; ALLOW_COMPAT=1; FAIL=cuFileSetParameterBool:*:5026");
    let session = world.session(CuFileChoice::Auto);
    let error = load(&session, &path, DIRECT).expect_err("not direct");
    assert!(error.message().contains("through host memory"), "{error:?}");
    forget(&path);
    let (loaded, receipt) = load(&session, &path, PathPolicy::Auto).expect("right all the same");
    assert_right(&loaded);
    assert_eq!(receipt.bytes_by(Way::Staged), total(), "{receipt}");
    assert!(receipt.to_string().contains("through host memory"), "{receipt}");
    drop((session, loaded));
    world.assert_clean();
}

#[test]
fn where_no_direct_path_can_be_cufile_is_not_touched_and_the_reason_comes_at_once() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("");
    let world = World::new(&fake, "nothing", "DAMAGE=1");
    let session = world.session(CuFileChoice::Auto);
    let model = session.open(&path).expect("a model");
    let started = Instant::now();
    let error = model.load(LoadOptions::all().path(DIRECT)).expect_err("no direct path");
    assert!(started.elapsed() < Duration::from_millis(100), "{:?}", started.elapsed());
    assert!(error.message().contains("/dev/nvidia-fs") && error.message().contains("CONFIG_PCI_P2PDMA"), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::PathUnavailable);
    assert!(error.hint().is_some());
    assert_eq!(world.cufile.report()["calls"], serde_json::json!({}), "no function of cuFile's was called");
    // SAFETY: no pointer is passed.
    assert!(unsafe { libc::fcntl(0, libc::F_GETFD) } >= 0, "descriptor 0 is as it was");
    drop((model, session));
    world.assert_clean();
}

/// Loads with a rule that makes a call fail: either the right bytes by another way with the reason, or an error that says where.
fn load_with(fake: &FakeCuda, path: &Path, rule: &str) -> thruway::Result<Receipt> {
    let world = World::new(fake, "nvidia-fs", &format!("DELAY_US=0; FAIL={rule}"));
    let session = world.session(CuFileChoice::Auto);
    forget(path);
    let outcome = load(&session, path, PathPolicy::Auto);
    let outcome = outcome.map(|(loaded, receipt)| {
        assert_right(&loaded);
        receipt
    });
    drop(session);
    // What the library says was opened by somebody else is not ours to close.
    if rule.starts_with("cuFileDriverOpen:1:5026") {
        world.cufile.assert_clean()
    } else {
        world.assert_clean()
    }
    outcome
}

#[test]
fn every_code_wherever_it_comes_leads_to_right_bytes_and_a_reason_or_to_an_error_that_says_where() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..20");
    for (code, name) in failure_codes() {
        // The first read is the trial's.
        for call in ["cuFileDriverOpen:1", "cuFileHandleRegister:1", "cuFileBufRegister:1", "cuFileRead:1", "cuFileRead:3"] {
            let outcome = load_with(&fake, &path, &format!("{call}:{code}"));
            match (code, outcome) {
                // Opened by somebody else, which is as good.
                (5026, Ok(receipt)) if call.starts_with("cuFileDriverOpen") => {
                    assert_eq!(receipt.bytes_by(Way::Direct), 0, "{receipt}");
                }
                (5015 | 5044 | 5047, Err(error)) => {
                    assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Gpu), "{error:?}");
                    assert!(error.to_string().contains(name) && error.hint().is_some(), "{call} {error:?}");
                    if call == "cuFileRead:3" {
                        assert!(error.context("file").is_some() && error.context("offset").is_some(), "{error:?}");
                    }
                }
                (_, Ok(receipt)) => assert!(receipt.to_string().contains(name), "{call} {name}: {receipt}"),
                (_, Err(error)) => panic!("{call} {name}: {error:?}"),
            }
        }
    }
}

#[test]
fn error_numbers_are_retried_refused_or_told_with_file_and_offset() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..20");
    for errno in [libc::EINTR, libc::EAGAIN] {
        let receipt = load_with(&fake, &path, &format!("cuFileRead:3:{errno}")).expect("tried again");
        assert_eq!((receipt.bytes_by(Way::Direct), receipt.retries), (total(), 1), "{receipt}");
    }
    let receipt = load_with(&fake, &path, &format!("cuFileRead:3:{}", libc::EOPNOTSUPP)).expect("by another way");
    assert!(receipt.bytes_by(Way::Direct) < total() && receipt.to_string().contains("refused by the kernel"), "{receipt}");
    for errno in [libc::EIO, libc::ENODATA] {
        let error: Error = load_with(&fake, &path, &format!("cuFileRead:3:{errno}")).expect_err("a drive that fails");
        assert_eq!((error.kind(), error.os_error()), (ErrorKind::Io, Some(errno)));
        assert!(error.context("file").is_some() && error.context("offset").is_some(), "{error:?}");
    }
}

#[test]
fn ten_thousand_registrations_leave_nothing() {
    let fake = FakeCuda::start("MEMORY=33554432; ALIGNMENT=65536");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    let gpu = session.gpu().expect("a GPU");
    let path = CuFilePath::new(Arc::clone(gpu), options(&world));
    drop(path.make().expect("it opens"));
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
        text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number")
    };
    let mut before = 0;
    for round in 0..10_000 {
        let mut buffer = GpuBuffer::new(gpu, 1 << 20).expect("room");
        let region = buffer.region(0..4096).expect("free");
        path.register(&region);
        assert!(region.is_registered());
        drop((region, buffer));
        if round == 1000 {
            before = resident();
        }
    }
    let grown = resident().saturating_sub(before);
    // AddressSanitizer keeps freed memory for a while, to catch who still uses it.
    assert!(grown < 1024 || std::env::var_os("ASAN_OPTIONS").is_some(), "{grown} pages more after 9,000 registrations");
    assert_eq!((world.cufile.count("buffers"), world.cufile.calls("cuFileBufDeregister")), (0, 10_000));
    drop((path, session));
    world.assert_clean();
}

fn options(world: &World<'_>) -> CuFileOptions {
    let window = RingSettings { slot_bytes: 1 << 20, slab_bytes: 16 << 20, bytes_max: 64 << 20 };
    let library = Some(world.cufile.path().to_owned());
    CuFileOptions {
        choice: CuFileChoice::Auto,
        library,
        facts: world.facts.clone(),
        depth: 8,
        window,
        ..CuFileOptions::default()
    }
}

/// The system's files; what cuFile refuses by codes of its own is another test's matter.
struct Files(OsFiles);

impl TestFiles for Files {
    fn with_bytes(&self, bytes: &[u8]) -> Arc<dyn File> {
        self.0.with_bytes(bytes)
    }

    fn direct(&self, bytes: &[u8]) -> Option<(Arc<dyn File>, thruway::storage::DirectRules)> {
        self.0.direct(bytes)
    }

    fn refused(&self) -> Vec<Refused> {
        self.0.refused().into_iter().filter(|refused| refused.errno == libc::EBADF).collect()
    }

    fn slow(&self, engine: EngineName) -> Option<SlowFile> {
        self.0.slow(engine)
    }
}

fn keeps_the_contract(layering: Layering) {
    let fake = FakeCuda::start("");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    let path = CuFilePath::new(Arc::clone(session.gpu().expect("a GPU")), options(&world));
    run(&|| path.make().expect("it opens").engine, &Files(OsFiles::new()), layering);
    drop((path, session));
    world.assert_clean();
}

#[test]
fn keeps_the_contract_bare() {
    keeps_the_contract(Layering::Bare);
}

#[test]
fn keeps_the_contract_under_exact() {
    keeps_the_contract(Layering::Exact);
}

#[test]
fn keeps_the_contract_under_monitored() {
    keeps_the_contract(Layering::Monitored);
}

#[test]
fn keeps_the_contract_under_faulty_without_faults() {
    keeps_the_contract(Layering::Faulty);
}

#[test]
fn keeps_the_contract_in_the_stack_of_the_pool() {
    keeps_the_contract(Layering::Stack);
}

#[test]
fn a_checkpoint_that_no_processor_saw_has_checksums_too_and_a_flipped_bit_is_found() {
    use thruway::checkpoint::{CheckpointOptions, Group, Json, RestoreOptions, VerifyOptions};
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..100");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    let (loaded, _) = load(&session, &path, PathPolicy::Auto).expect("loaded");
    let here = session.checkpoints(directory.path().join("run"));
    let groups = [Group::new("model", loaded.iter().map(source).collect())];
    let options = || CheckpointOptions::default().chunk_size(thruway::ByteSize(64 << 10));
    let saved = here.save(1, &groups, &Json::default(), options()).expect("saved");
    assert!(saved.receipt.files.iter().any(|file| file.parts.iter().any(|part| part.path == Way::Direct)), "{:?}", saved.receipt);
    let checkpoint = here.open(1).expect("open");
    assert_eq!(checkpoint.verify(&VerifyOptions::default()).expect("read").damage, []);
    let record = checkpoint.manifest().groups[0].tensors.iter().find(|tensor| tensor.name == "blocks").expect("saved").clone();
    let file = saved.path.join(&checkpoint.manifest().files[record.file].name);
    assert_right(&here.restore(&RestoreOptions::default()).expect("restored").groups["model"].tensors);
    let mut bytes = std::fs::read(&file).expect("a shard");
    bytes[usize::try_from(record.offset).expect("small") + 100_000] ^= 4;
    std::fs::write(&file, bytes).expect("a shard");
    forget(&file);
    let error = here.restore(&RestoreOptions::default()).expect_err("a bit is another");
    assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::Mismatch, Some("blocks")), "{error}");
    drop((loaded, groups, checkpoint, here, session));
    world.assert_clean();
}
