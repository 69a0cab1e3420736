//! Checkpoints of tensors in GPU memory, on a CUDA driver without a GPU whose copies finish late: checksums are of the bytes that
//! pass, by every path, and nothing that differs from them is restored.

use std::path::Path;

use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::checkpoint::{CheckpointOptions, Checkpoints, Group, Json, RestoreOptions};
use thruway::cuda::CallerStream;
use thruway::format::safetensors::Dtype;
use thruway::{ByteSize, Device, ErrorKind, GpuBuffer, LoadOptions, PathPolicy, Session, Source, Tensor};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fixtures::{KnownModel, model, scratch_dir};
use thruway_testkit::random::Random;

const SETTINGS: Settings = Settings {
    engine: EngineChoice::Auto,
    queue_depth: 6,
    threads: 3,
    chunk_bytes: 256 << 10,
    drive_chunk_bytes: 256 << 10,
    ring_bytes: 3 << 20,
    cufile: CuFileChoice::Auto,
};

fn session(fake: &FakeCuda, device: Device) -> Session {
    Session::builder().device(device).cuda_library(fake.path()).settings(SETTINGS).build().expect("session")
}

/// Tensors of many chunks, of one, of a block, of less, of nothing; and many small ones.
fn known(seed: u64) -> KnownModel {
    let small: Vec<String> = (0..60).map(|number| format!("small.{number}")).collect();
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

const CHUNK: u64 = 64 << 10;

fn options() -> CheckpointOptions {
    CheckpointOptions::default().chunk_size(ByteSize(CHUNK)).max_shard_size(ByteSize(3_000_000))
}

fn groups(sources: Vec<Source>) -> [Group; 1] {
    [Group::new("model", sources)]
}

/// Checkpoint 1 of the model, saved from host memory.
fn saved_from_host(directory: &Path, known: &KnownModel) -> Checkpoints {
    let checkpoints = Session::builder().device(Device::Host).build().expect("session").checkpoints(directory);
    checkpoints.save(1, &groups(known.sources()), &Json::default(), options()).expect("saved");
    checkpoints
}

fn source(tensor: &Tensor) -> Source {
    Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region().expect("free"))
}

#[test]
fn what_is_saved_from_a_gpu_has_the_checksums_of_the_same_bytes_in_host_memory_by_every_path() {
    let (scratch, known) = (scratch_dir(), known(3));
    let host = saved_from_host(scratch.path(), &known);
    for seed in 0..4 {
        let fake = FakeCuda::start(&format!("SEED={seed}; DELAY_US=0..700"));
        let gpu = session(&fake, Device::Cuda(0));
        let here = gpu.checkpoints(scratch.path());
        let restored = here.restore(&RestoreOptions::default().step(1)).expect("restored");
        let tensors = &restored.groups["model"].tensors;
        assert!(tensors.iter().all(|tensor| tensor.device() == Device::Cuda(0)));
        known.assert_loaded(tensors);
        for (step, policy) in [(10, "auto"), (11, "staged"), (12, "cached")] {
            let policy: PathPolicy = policy.parse().expect("known");
            let sources = tensors.iter().map(source).collect();
            let options = options().path(policy).replace();
            here.save(step, &groups(sources), &Json::default(), options).expect("saved");
            let (one, two) = (host.open(1).expect("there"), host.open(step).expect("there"));
            assert_eq!(one.manifest().compare(two.manifest()).0, [], "{policy:?}");
            assert_eq!(host.verify(step, &thruway::checkpoint::VerifyOptions::default()).expect("read").damage, []);
            let options = RestoreOptions::default().step(step).path(policy);
            known.assert_loaded(&host.restore(&options).expect("restored").groups["model"].tensors);
        }
        drop((restored, here, gpu));
        fake.assert_clean();
    }
}

#[test]
fn checksums_of_a_gpus_tensors_cost_no_second_copy() {
    let (scratch, known) = (scratch_dir(), known(4));
    saved_from_host(scratch.path(), &known);
    let bytes: u64 = known.tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
    let fake = FakeCuda::start("");
    let here = session(&fake, Device::Cuda(0)).checkpoints(scratch.path());
    for policy in ["staged", "cached"] {
        let policy: PathPolicy = policy.parse().expect("known");
        let (to_gpu, to_host) = (fake.count("host_to_device_bytes"), fake.count("device_to_host_bytes"));
        let restored = here.restore(&RestoreOptions::default().step(1).path(policy)).expect("restored");
        assert_eq!(fake.count("host_to_device_bytes") - to_gpu, bytes);
        assert_eq!(fake.count("device_to_host_bytes"), to_host, "nothing was read back to be verified");
        let sources = restored.groups["model"].tensors.iter().map(source).collect();
        here.save(2, &groups(sources), &Json::default(), options().path(policy).replace()).expect("saved");
        assert_eq!(fake.count("device_to_host_bytes") - to_host, bytes);
    }
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is_when_a_checkpoint_is_restored_to_a_gpu() {
    let (scratch, known) = (scratch_dir(), known(5));
    let path = saved_from_host(scratch.path(), &known).directory_of(1).expect("there");
    let fake = FakeCuda::start("DELAY_US=0..50");
    let here = session(&fake, Device::Cuda(0)).checkpoints(scratch.path());
    let tensors = here.open(1).expect("whole").manifest().groups[0].tensors.clone();
    let files = here.open(1).expect("whole").manifest().files.clone();
    let mut random = Random::new(11);
    for round in 0..60 {
        let tensor = &tensors[random.below(tensors.len())];
        if tensor.bytes == 0 {
            continue;
        }
        let at = random.next_u64() % tensor.bytes;
        let file = path.join(&files[tensor.file].name);
        let flip = || {
            let mut bytes = std::fs::read(&file).expect("a shard");
            bytes[usize::try_from(tensor.offset + at).expect("small")] ^= 1 << (round % 8);
            std::fs::write(&file, bytes).expect("a shard");
        };
        flip();
        let policy: PathPolicy = ["auto", "staged", "cached"][round % 3].parse().expect("known");
        let error = here.restore(&RestoreOptions::default().path(policy)).expect_err("a bit is another");
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        assert_eq!(error.context("tensor"), Some(tensor.name.as_str()));
        assert_eq!(error.context("offset"), Some((tensor.offset + at / CHUNK * CHUNK).to_string().as_str()));
        flip();
    }
    known.assert_loaded(&here.restore(&RestoreOptions::default()).expect("whole again").groups["model"].tensors);
}

#[test]
fn a_slice_is_loaded_unverified_beside_tensors_that_are_verified() {
    let (scratch, known) = (scratch_dir(), known(6));
    saved_from_host(scratch.path(), &known);
    let fake = FakeCuda::start("DELAY_US=0..50");
    let here = session(&fake, Device::Cuda(0)).checkpoints(scratch.path());
    let options = LoadOptions::all().select(["odd", "small.3"]).slice("large", 1, 3..70);
    let loaded = here.open(1).expect("open").load("model", options).expect("loaded");
    assert_eq!((loaded.tensors.len(), loaded.unverified), (3, vec!["large".to_owned()]));
}

#[test]
fn a_save_takes_what_the_stream_before_it_writes() {
    let scratch = scratch_dir();
    let fake = FakeCuda::start("DELAY_US=2000..4000");
    let session = session(&fake, Device::Cuda(0));
    let gpu = session.gpu().expect("a GPU").clone();
    let buffer = GpuBuffer::new(&gpu, 700_000).expect("memory");
    let _current = gpu.current().expect("a context");
    fake.filler(4)(buffer.address(), buffer.len());
    let tensor = Source::new("t", Dtype::U8, [700_000], buffer.source(0..700_000).expect("free"));
    // SAFETY: 0 is the default stream, which is always there.
    let stream = unsafe { CallerStream::from_handle(0) };
    let here = session.checkpoints(scratch.path());
    here.save(1, &groups(vec![tensor]), &Json::default(), options().after(stream)).expect("saved");
    let restored = here.restore(&RestoreOptions::default()).expect("its checksums are of what was written");
    let found = restored.groups["model"].tensors.get("t").expect("there").to_host().expect("readable");
    assert!(found.iter().all(|byte| *byte == 0xee));
}

#[test]
fn memory_of_another_gpu_is_refused_before_anything_is_made() {
    let scratch = scratch_dir();
    let fake = FakeCuda::start("DEVICES=2");
    let (one, two) = (session(&fake, Device::Cuda(0)), session(&fake, Device::Cuda(1)));
    let buffer = GpuBuffer::new(two.gpu().expect("a GPU"), 64).expect("memory");
    let tensor = || Source::new("t", Dtype::U8, [64], buffer.source(0..64).expect("free"));
    let directory = scratch.path().join("run");
    for session in [one, Session::builder().device(Device::Host).build().expect("session")] {
        let here = session.checkpoints(&directory);
        let error = here.save(1, &groups(vec![tensor()]), &Json::default(), options()).expect_err("not reachable");
        assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::InvalidInput, Some("t")), "{error}");
        assert!(!directory.exists());
    }
}

#[test]
fn a_copy_that_fails_fails_the_save_and_leaves_what_was_there() {
    let (scratch, known) = (scratch_dir(), known(7));
    saved_from_host(scratch.path(), &known);
    let mut failures = 0;
    for rule in ["FAIL=cuMemcpyDtoHAsync:1:UNKNOWN", "FAIL=cuMemcpyDtoHAsync:7:UNKNOWN", "FAIL_LATE=cuMemcpyDtoHAsync:5:UNKNOWN"]
    {
        let fake = FakeCuda::start(&format!("DELAY_US=0..400; {rule}"));
        let here = session(&fake, Device::Cuda(0)).checkpoints(scratch.path());
        let restored = here.restore(&RestoreOptions::default()).expect("restored");
        let sources = restored.groups["model"].tensors.iter().map(source).collect();
        let error = here.save(2, &groups(sources), &Json::default(), options()).expect_err("a copy failed");
        failures += usize::from(error.kind() == ErrorKind::Gpu);
        assert_eq!(here.steps().expect("a list"), [1], "{rule}");
        assert_eq!(here.unfinished().expect("a list"), [""; 0], "{rule}");
        assert_eq!(fake.faults(), [], "{rule}");
    }
    assert_eq!(failures, 3);
}
