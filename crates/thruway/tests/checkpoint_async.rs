//! Saving beside training: what is saved are the bytes of the moment of the call, whatever the caller does next and however small the
//! pool is; whatever fails is told, and never leaves a copy over memory that was freed.

use std::path::Path;
use std::time::Duration;

use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::checkpoint::{
    CheckpointOptions, Checkpointer, CheckpointerOptions, Group, Hold, Json, Level, RestoreOptions, Retention, Saving,
};
use thruway::cuda::CallerStream;
use thruway::format::safetensors::Dtype;
use thruway::io::layer::{Fault, FaultPlan, Faulty};
use thruway::io::policy::Source as StorageSide;
use thruway::io::{EngineFactory, Made, OsEngines};
use thruway::{ByteSize, Device, Error, ErrorKind, HostBuffer, Session, Source, Tensor, Tensors};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fixtures::{KnownModel, model, scratch_dir};

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

fn host_session() -> Session {
    Session::builder().device(Device::Host).settings(SETTINGS).build().expect("session")
}

fn known(seed: u64) -> KnownModel {
    let small: Vec<String> = (0..40).map(|number| format!("small.{number}")).collect();
    let mut specs: Vec<(&str, Dtype, &[u64])> = vec![
        ("large", Dtype::BF16, &[1_300, 1_001]),
        ("blocks", Dtype::F32, &[1 << 18]),
        ("odd", Dtype::U8, &[70_003]),
        ("scalar", Dtype::F64, &[]),
        ("empty", Dtype::F16, &[0, 5]),
    ];
    specs.extend(small.iter().map(|name| (name.as_str(), Dtype::I32, &[301_u64] as &[u64])));
    model(seed, &specs)
}

fn options() -> CheckpointOptions {
    CheckpointOptions::default().chunk_size(ByteSize(64 << 10)).max_shard_size(ByteSize(1_500_000))
}

/// The pool's size: room for the whole, and for a small part of it.
const POOLS: [CheckpointerOptionsOf; 2] =
    [|| CheckpointerOptions::default(), || CheckpointerOptions::default().pool(ByteSize(300 << 10))];
type CheckpointerOptionsOf = fn() -> CheckpointerOptions;

/// The default stream, on which a framework without streams of its own works.
fn default_stream() -> CallerStream {
    // SAFETY: the default stream is always there.
    unsafe { CallerStream::from_handle(0) }
}

fn source(tensor: &Tensor) -> Source {
    Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region().expect("free"))
}

fn group(name: &str, tensors: &Tensors) -> Group {
    Group::new(name, tensors.iter().map(source).collect())
}

/// The model in GPU memory, by way of a checkpoint of step 0.
fn on_the_gpu(session: &Session, directory: &Path, known: &KnownModel) -> Tensors {
    let host = host_session().checkpoints(directory);
    if host.steps().map_or(true, |steps| steps.is_empty()) {
        host.save(0, &[Group::new("model", known.sources())], &Json::default(), options()).expect("saved");
    }
    let mut restored = session.checkpoints(directory).restore(&RestoreOptions::default().step(0)).expect("restored");
    restored.groups.remove("model").expect("there").tensors
}

fn assert_saved(directory: &Path, step: u64, group: &str, known: &KnownModel) {
    let restored = host_session().checkpoints(directory).restore(&RestoreOptions::default().step(step)).expect("restored");
    known.assert_loaded(&restored.groups[group].tensors);
}

#[test]
fn what_is_overwritten_in_the_stream_right_after_the_call_is_saved_as_it_was() {
    for (number, pool) in POOLS.into_iter().enumerate() {
        for seed in 0..3 {
            let (scratch, known) = (scratch_dir(), known(3));
            let fake = FakeCuda::start(&format!("SEED={seed}; DELAY_US=200..1500"));
            let session = session(&fake);
            let tensors = on_the_gpu(&session, scratch.path(), &known);
            let checkpointer = session.checkpointer(scratch.path(), pool()).expect("a pool");
            let fill = fake.filler(1);
            let gpu = session.gpu().expect("a GPU").clone();
            let current = gpu.current().expect("a context");
            let groups = [group("model", &tensors)];
            let saving = checkpointer
                .save_async(1, &groups, &Json::default(), options().after(default_stream()), &Hold::Now)
                .expect("begun");
            tensors
                .iter()
                .filter(|tensor| tensor.byte_count() > 0)
                .for_each(|tensor| fill(tensor.address(), tensor.byte_count()));
            let saved = saving.wait().expect("saved");
            assert_eq!(saved.warnings.iter().map(Error::to_string).collect::<Vec<_>>(), [""; 0]);
            assert_saved(scratch.path(), 1, "model", &known);
            // What the stream wrote since is what the next one has.
            let saving = checkpointer
                .save_async(2, &groups, &Json::default(), options().after(default_stream()), &Hold::Now)
                .expect("begun");
            saving.wait().expect("saved");
            let restored = host_session().checkpoints(scratch.path()).restore(&RestoreOptions::default()).expect("restored");
            let all = restored.groups["model"].tensors.iter().flat_map(|tensor| tensor.bytes().expect("host").to_vec());
            assert!(all.into_iter().all(|byte| byte == 0xee), "pool {number}");
            drop(current);
            drop((groups, tensors, checkpointer, gpu, session));
            fake.assert_clean();
        }
    }
}

#[test]
fn guarded_tensors_are_copied_until_the_stream_is_held_and_the_others_before_anything_else() {
    for pool in POOLS {
        let (scratch, known) = (scratch_dir(), known(4));
        let fake = FakeCuda::start("DELAY_US=200..1500");
        let session = session(&fake);
        let tensors = on_the_gpu(&session, scratch.path(), &known);
        let checkpointer = session.checkpointer(scratch.path(), pool()).expect("a pool");
        let fill = fake.filler(1);
        let gpu = session.gpu().expect("a GPU").clone();
        let current = gpu.current().expect("a context");
        let guarded = |group: &str, name: &str| group == "model" && !name.starts_with("small");
        let groups = [group("model", &tensors)];
        let saving = checkpointer
            .save_async(1, &groups, &Json::default(), options().after(default_stream()), &Hold::Later(&guarded))
            .expect("begun");
        let change = |wanted: bool| {
            let those = tensors.iter().filter(|tensor| guarded("model", tensor.name()) == wanted && tensor.byte_count() > 0);
            those.for_each(|tensor| fill(tensor.address(), tensor.byte_count()));
        };
        change(false);
        saving.hold(default_stream()).expect("held");
        change(true);
        saving.wait().expect("saved");
        assert_saved(scratch.path(), 1, "model", &known);
        default_stream().wait(&gpu).expect("our fills are done");
        drop(current);
        drop((groups, tensors, checkpointer, gpu, session));
        fake.assert_clean();
    }
}

#[test]
fn a_guarded_stream_is_not_held_before_it_asks() {
    let (scratch, known) = (scratch_dir(), known(4));
    let fake = FakeCuda::start("");
    let session = session(&fake);
    let tensors = on_the_gpu(&session, scratch.path(), &known);
    let checkpointer = session.checkpointer(scratch.path(), CheckpointerOptions::default()).expect("a pool");
    let begin = |step, hold: &Hold<'_>| {
        let groups = [group("model", &tensors)];
        checkpointer.save_async(step, &groups, &Json::default(), options().after(default_stream()), hold).expect("begun")
    };
    let waits = || fake.calls("cuStreamWaitEvent");
    let held = fake.hold();
    let before = waits();
    let saving = begin(1, &Hold::Later(&|_, name| name != "odd"));
    // Ours for the caller's, and the caller's for "odd".
    assert_eq!(waits() - before, 2);
    saving.hold(default_stream()).expect("held");
    assert_eq!(waits() - before, 3);
    drop(held);
    saving.wait_for(Level::Staged).expect("staged");
    saving.hold(default_stream()).expect("nothing is left to wait for");
    assert_eq!(waits() - before, 3);
    saving.wait().expect("saved");
}

#[test]
fn tensors_in_host_memory_may_change_as_soon_as_the_call_returns() {
    for pool in POOLS {
        let scratch = scratch_dir();
        let checkpointer = host_session().checkpointer(scratch.path(), pool()).expect("a pool");
        let mut buffer = HostBuffer::from_vec((0..1_000_000_u32).map(|at| at.to_le_bytes()[0]).collect());
        let expected = buffer.bytes().expect("free").to_vec();
        let tensor = Source::new("t", Dtype::U8, [1_000_000], buffer.source(0..1_000_000).expect("free"));
        let saving = checkpointer
            .save_async(1, &[Group::new("model", vec![tensor])], &Json::default(), options(), &Hold::Now)
            .expect("begun");
        buffer.bytes_mut().expect("nothing has a claim any more").fill(0);
        saving.wait().expect("saved");
        let restored = checkpointer.restore(&RestoreOptions::default()).expect("restored");
        assert!(restored.groups["model"].tensors.get("t").expect("there").bytes().expect("host") == expected);
    }
}

#[test]
fn both_kinds_of_memory_lie_in_one_checkpoint_and_a_second_save_waits_its_turn() {
    for pool in POOLS {
        let (scratch, known) = (scratch_dir(), known(6));
        let fake = FakeCuda::start("DELAY_US=0..500");
        let session = session(&fake);
        let tensors = on_the_gpu(&session, scratch.path(), &known);
        let checkpointer = session.checkpointer(scratch.path(), pool()).expect("a pool");
        let groups = [group("model", &tensors), Group::new("optimizer", known.sources())];
        for step in 1..6 {
            let options = options().after(default_stream());
            checkpointer.save_async(step, &groups, &Json::default(), options, &Hold::Now).expect("begun");
        }
        checkpointer.wait().expect("all went well");
        assert_eq!(checkpointer.checkpoints().steps().expect("a list"), [0, 1, 2, 3, 4, 5]);
        for step in 1..6 {
            assert_saved(scratch.path(), step, "model", &known);
            assert_saved(scratch.path(), step, "optimizer", &known);
        }
        drop((groups, tensors, checkpointer, session));
        fake.assert_clean();
    }
}

#[test]
fn a_save_says_how_far_it_is() {
    let (scratch, known) = (scratch_dir(), known(7));
    let fake = FakeCuda::start("");
    let session = session(&fake);
    let tensors = on_the_gpu(&session, scratch.path(), &known);
    let checkpointer = session.checkpointer(scratch.path(), CheckpointerOptions::default()).expect("a pool");
    let held = fake.hold();
    let saving = checkpointer.save_async(1, &[group("model", &tensors)], &Json::default(), options(), &Hold::Now).expect("begun");
    assert_eq!((saving.level(), saving.is_done(), saving.staged_seconds()), (Level::Queued, false, None));
    drop(held);
    saving.wait_for(Level::Staged).expect("staged");
    assert!(saving.staged_seconds().is_some());
    saving.wait_for(Level::Written).expect("written");
    saving.wait_for(Level::Durable).expect("durable");
    assert!(saving.is_done() && saving.level() == Level::Durable);
    assert_eq!(saving.wait().expect("saved").step, 1);
}

#[test]
fn a_save_that_comes_too_soon_waits_or_is_refused_as_was_asked() {
    let (scratch, known) = (scratch_dir(), known(8));
    let fake = FakeCuda::start("");
    let session = session(&fake);
    let tensors = on_the_gpu(&session, scratch.path(), &known);
    let refusing = CheckpointerOptions::default().lag(Duration::ZERO);
    let checkpointer = session.checkpointer(scratch.path(), refusing).expect("a pool");
    let begin = |step| checkpointer.save_async(step, &[group("model", &tensors)], &Json::default(), options(), &Hold::Now);
    let held = fake.hold();
    let saving = begin(1).expect("begun");
    let error = begin(2).expect_err("one is under way");
    assert_eq!(error.kind(), ErrorKind::LimitReached, "{error}");
    assert!(error.to_string().contains("step 1"), "{error}");
    drop(held);
    saving.wait().expect("saved");
    begin(2).expect("begun").wait().expect("saved");
    assert_eq!(checkpointer.checkpoints().steps().expect("a list"), [0, 1, 2]);
}

#[test]
fn whoever_drops_everything_while_a_save_is_under_way_has_saved() {
    for pool in POOLS {
        let (scratch, known) = (scratch_dir(), known(9));
        let fake = FakeCuda::start("DELAY_US=500..2000");
        let session = session(&fake);
        let tensors = on_the_gpu(&session, scratch.path(), &known);
        let checkpointer = session.checkpointer(scratch.path(), pool()).expect("a pool");
        let groups = [group("model", &tensors)];
        drop(checkpointer.save_async(1, &groups, &Json::default(), options(), &Hold::Later(&|_, _| true)).expect("begun"));
        drop((groups, tensors, session));
        drop(checkpointer);
        assert_saved(scratch.path(), 1, "model", &known);
        fake.assert_clean();
    }
}

#[test]
fn retention_is_the_checkpointers() {
    let scratch = scratch_dir();
    let retention = Retention { keep: Some(2), keep_every: Some(4) };
    let checkpointer =
        host_session().checkpointer(scratch.path(), CheckpointerOptions::default().retention(retention)).expect("a pool");
    let groups = [Group::new("model", known(1).sources())];
    for step in 1..=7 {
        match step % 2 {
            0 => drop(checkpointer.save(step, &groups, &Json::default(), options()).expect("saved")),
            _ => drop(checkpointer.save_async(step, &groups, &Json::default(), options(), &Hold::Now).expect("begun")),
        }
    }
    checkpointer.wait().expect("saved");
    assert_eq!(checkpointer.checkpoints().steps().expect("a list"), [4, 6, 7]);
}

#[test]
fn a_pool_that_cannot_be_pinned_is_said_when_it_is_made() {
    let scratch = scratch_dir();
    for nth in [1, 3, 20] {
        let fake = FakeCuda::start(&format!("FAIL=cuMemHostRegister:{nth}:OUT_OF_MEMORY"));
        let session = session(&fake);
        let pool = CheckpointerOptions::default().pool(ByteSize(10 << 20));
        let error = session.checkpointer(scratch.path(), pool).expect_err("no memory");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("smaller pool")) && error.context("pool").is_some(), "{error:?}");
        drop(session);
        fake.assert_clean();
    }
}

#[test]
fn a_failing_driver_call_at_any_point_is_told_and_leaves_the_next_save_free() {
    let (scratch, known) = (scratch_dir(), known(10));
    drop(on_the_gpu(&session(&FakeCuda::start("")), scratch.path(), &known));
    let calls =
        ["cuMemcpyDtoHAsync", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventSynchronize", "cuMemHostRegister"];
    let late = ["FAIL_LATE=cuMemcpyDtoHAsync:2", "FAIL_LATE=cuMemcpyDtoHAsync:9"];
    let now = calls.iter().flat_map(|call| [1, 2, 4, 9, 30].map(|nth| format!("FAIL={call}:{nth}")));
    let mut failures = 0;
    for (number, rule) in now.chain(late.map(str::to_owned)).enumerate() {
        let fake = FakeCuda::start(&format!("DELAY_US=0..300; {rule}:UNKNOWN"));
        let outcome = (|| {
            let session = Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).settings(SETTINGS).build()?;
            let restored = session.checkpoints(scratch.path()).restore(&RestoreOptions::default().step(0))?;
            let checkpointer = session.checkpointer(scratch.path(), POOLS[number % 2]())?;
            let groups = [group("model", &restored.groups["model"].tensors)];
            let begin = || {
                let options = options().after(default_stream()).replace();
                checkpointer.save_async(1, &groups, &Json::default(), options, &Hold::Now)
            };
            let outcome = begin().and_then(|saving| saving.wait().map(drop));
            if outcome.is_err() && !rule.starts_with("FAIL_LATE") {
                // The driver fails once; a GPU that lost a copy is lost for good.
                begin().and_then(|saving| saving.wait().map(drop)).expect("the next one works");
                assert_saved(scratch.path(), 1, "model", &known);
            }
            outcome
        })();
        if let Err(error) = outcome {
            assert!(matches!(error.kind(), ErrorKind::Gpu | ErrorKind::OutOfMemory), "{rule}: {error}");
            failures += 1;
        }
        let misused: Vec<_> = fake.faults().into_iter().filter(|fault| fault.kind != "released_with_memory").collect();
        assert!(misused.is_empty(), "{rule}: {misused:?}");
        assert!(host_session().checkpoints(scratch.path()).unfinished().expect("a list").is_empty(), "{rule}");
        assert_saved(scratch.path(), 0, "model", &known);
    }
    assert!(failures > 15, "the injected failures were hardly ever met: {failures}");
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
fn a_full_disk_is_told_by_the_handle_or_by_the_next_save_and_what_was_there_stays() {
    let (scratch, known) = (scratch_dir(), known(11));
    let fake = FakeCuda::start("DELAY_US=0..300");
    on_the_gpu(&session(&fake), scratch.path(), &known);
    let mut failures = 0;
    for at in 8..40 {
        let engines = Box::new(FaultyEngines(FaultPlan::single(at, Fault::Errno(libc::ENOSPC))));
        let builder = Session::builder().device(Device::Cuda(0)).cuda_library(fake.path()).settings(SETTINGS).engines(engines);
        let session = builder.build().expect("session");
        let checkpointer = session.checkpointer(scratch.path(), POOLS[usize::from(at % 2 == 1)]()).expect("a pool");
        let restored = match session.checkpoints(scratch.path()).restore(&RestoreOptions::default().step(0)) {
            Ok(restored) => restored,
            Err(_) => continue,
        };
        let groups = [group("model", &restored.groups["model"].tensors)];
        let begin = |step| checkpointer.save_async(step, &groups, &Json::default(), options().replace(), &Hold::Now);
        let saving = begin(1).expect("begun");
        let told = if at % 3 == 0 {
            saving.wait().map(drop)
        } else {
            drop(saving);
            checkpointer.save(1, &groups, &Json::default(), options().replace()).map(drop)
        };
        if let Err(error) = told {
            failures += 1;
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            begin(2).expect("it was told once").wait().expect("there is room again");
            assert_saved(scratch.path(), 2, "model", &known);
        }
        drop((groups, restored, checkpointer, session));
        assert!(host_session().checkpoints(scratch.path()).unfinished().expect("a list").is_empty());
        assert_saved(scratch.path(), 0, "model", &known);
    }
    assert!(failures > 5, "the faults were hardly ever met: {failures}");
    fake.assert_clean();
}

#[test]
fn what_can_be_refused_at_once_is_and_what_cannot_by_the_handle() {
    let scratch = scratch_dir();
    let checkpointer: Checkpointer = host_session().checkpointer(scratch.path(), CheckpointerOptions::default()).expect("a pool");
    let twice = [known(1).sources(), known(1).sources()].concat();
    let error = checkpointer
        .save_async(1, &[Group::new("model", twice)], &Json::default(), options(), &Hold::Now)
        .expect_err("names stand twice");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let groups = [Group::new("model", known(1).sources())];
    let begin = || checkpointer.save_async(1, &groups, &Json::default(), options(), &Hold::Now).expect("begun");
    begin().wait().expect("saved");
    assert_eq!(begin().wait().expect_err("the step is there").kind(), ErrorKind::AlreadyExists);
    begin();
    assert_eq!(checkpointer.wait().expect_err("nobody had heard of it").kind(), ErrorKind::AlreadyExists);
    checkpointer.wait().expect("now somebody has");
    let nothing = [Group::new("model", Vec::new())];
    let saving = checkpointer.save_async(2, &nothing, &Json::default(), options(), &Hold::Now).expect("begun");
    saving.wait().expect("a checkpoint without a tensor");
}

#[test]
fn trained_tensors_that_stay_as_they_were_are_warned_about() {
    let scratch = scratch_dir();
    let checkpointer = host_session().checkpointer(scratch.path(), CheckpointerOptions::default()).expect("a pool");
    let specs: &[(&str, Dtype, &[u64])] = &[("w", Dtype::F32, &[10]), ("frozen", Dtype::F32, &[10]), ("none", Dtype::F32, &[0])];
    let save = |step, seed, beside: bool| {
        let groups = [Group::new("model", model(seed, specs).sources())];
        let names = ["w", "none"].map(|name| ("model".to_owned(), name.to_owned()));
        let options = options().trained(names);
        let saved = match beside {
            true => checkpointer.save_async(step, &groups, &Json::default(), options, &Hold::Now).and_then(Saving::wait),
            false => checkpointer.save(step, &groups, &Json::default(), options),
        };
        saved.expect("saved").warnings.iter().map(|warning| warning.message().to_owned()).collect::<Vec<String>>()
    };
    assert_eq!(save(1, 1, false), [""; 0]);
    assert_eq!(save(2, 2, true), [""; 0], "all are others");
    let warning = "1 of 1 trained tensors have the very bytes that they had at step 2: w of model";
    assert_eq!(save(3, 2, true), [warning]);
    assert_eq!(save(4, 3, false), [""; 0]);
}
