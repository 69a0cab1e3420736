//! Checkpoints that go straight between storage and a GPU's memory, over doubles of cuFile and of the CUDA driver: the GPU computes the
//! checksums of what no processor sees, and where it cannot, the receipt says so and the checksums are right all the same.

mod common;

use std::path::Path;

use common::{DIRECT, World, forget, scratch};
use thruway::base::settings::CuFileChoice;
use thruway::checkpoint::{CheckpointOptions, Checkpoints, Group, Json, RestoreOptions, Restored};
use thruway::format::safetensors::Dtype;
use thruway::io::policy::Path as Way;
use thruway::{ByteSize, Device, ErrorKind, Receipt, Session, Source};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fixtures::{KnownModel, model};

const CHUNK: u64 = 1 << 20;

/// Tensors of several chunks and pieces, of odd lengths, small and empty ones.
fn known() -> KnownModel {
    let small: Vec<String> = (0..20).map(|number| format!("small.{number}")).collect();
    let mut specs: Vec<(&str, Dtype, &[u64])> = vec![
        ("large", Dtype::BF16, &[1_300, 1_001]),
        ("blocks", Dtype::F32, &[1 << 18]),
        ("odd", Dtype::U8, &[700_003]),
        ("scalar", Dtype::F64, &[]),
        ("empty", Dtype::F16, &[0, 5]),
    ];
    specs.extend(small.iter().map(|name| (name.as_str(), Dtype::I32, &[301_u64] as &[u64])));
    model(29, &specs)
}

fn options() -> CheckpointOptions {
    CheckpointOptions::default().chunk_size(ByteSize(CHUNK))
}

fn groups(sources: Vec<Source>) -> [Group; 1] {
    [Group::new("model", sources)]
}

/// Checkpoint 1, saved from host memory, and not in the page cache.
fn saved_from_host(directory: &Path, known: &KnownModel) -> Checkpoints {
    let checkpoints = Session::builder().device(Device::Host).build().expect("session").checkpoints(directory);
    checkpoints.save(1, &groups(known.sources()), &Json::default(), options()).expect("saved");
    forget(&checkpoints.directory_of(1).expect("there").join("model.safetensors"));
    checkpoints
}

fn restored(here: &Checkpoints) -> thruway::Result<Restored> {
    here.restore(&RestoreOptions::default().step(1).path(DIRECT))
}

fn sources(restored: &Restored) -> [Group; 1] {
    let source = |tensor: &thruway::Tensor| {
        Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region().expect("nothing fills it"))
    };
    groups(restored.groups["model"].tensors.iter().map(source).collect())
}

/// The one note about checksums.
fn note(receipt: &Receipt) -> &str {
    let [note] = receipt.notes.as_slice() else { panic!("{receipt}") };
    assert!(receipt.to_string().ends_with(&format!("\n  {note}")), "{receipt}");
    note
}

#[test]
fn the_gpu_sums_what_no_processor_sees_on_the_way_in_and_on_the_way_out() {
    let (directory, known) = (scratch(), known());
    let host = saved_from_host(directory.path(), &known);
    for seed in 0..4 {
        let fake = FakeCuda::start(&format!("SEED={seed}; DELAY_US=0..700; ALIGNMENT=65536"));
        let world = World::new(&fake, "nvidia-fs", "WAY=nvfs; VERSION=1150");
        let session = world.session(CuFileChoice::Auto);
        let here = session.checkpoints(directory.path());
        let before = fake.count("device_to_host_bytes");
        let found = restored(&here).expect("restored");
        let receipt = &found.groups["model"].receipt;
        assert_eq!(receipt.bytes_by(Way::Direct), receipt.bytes, "{receipt}");
        assert!(note(receipt).ends_with("computed on the GPU"), "{receipt}");
        let saved = here.save(2, &sources(&found), &Json::default(), options().replace()).expect("saved");
        assert!(saved.receipt.bytes_by(Way::Direct) > saved.receipt.bytes / 2, "{}", saved.receipt);
        assert!(note(&saved.receipt).ends_with("computed on the GPU"), "{}", saved.receipt);
        let back = fake.count("device_to_host_bytes") - before;
        assert!(
            back < saved.receipt.bytes_by(Way::Staged) + 50_000,
            "{back} bytes came back: more than what was staged, and the sums"
        );
        assert_eq!(fake.calls("cuModuleLoadData"), 1, "once for all");
        known.assert_loaded(&found.groups["model"].tensors);
        let (one, two) = (host.open(1).expect("there"), host.open(2).expect("there"));
        assert_eq!(one.manifest().compare(two.manifest()).0, [], "the same checksums as of host memory");
        drop((found, here, session));
        world.assert_clean();
    }
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is_in_what_went_straight_to_the_gpu() {
    let (directory, known) = (scratch(), known());
    let host = saved_from_host(directory.path(), &known);
    let file = host.directory_of(1).expect("there").join("model.safetensors");
    let large = host.open(1).expect("whole").manifest().groups[0].tensors.iter().find(|tensor| tensor.name == "large").cloned();
    let large = large.expect("saved");
    let fake = FakeCuda::start("DELAY_US=0..50; ALIGNMENT=65536");
    let world = World::new(&fake, "nvidia-fs", "WAY=nvfs; VERSION=1150");
    let session = world.session(CuFileChoice::Auto);
    let here = session.checkpoints(directory.path());
    for at in [0, 1, 4095, 262_143, 262_144, CHUNK - 1, CHUNK, CHUNK + 300_000, large.bytes - 1] {
        let flip = || {
            let mut bytes = std::fs::read(&file).expect("a shard");
            bytes[usize::try_from(large.offset + at).expect("small")] ^= 1 << (at % 8);
            std::fs::write(&file, bytes).expect("a shard");
            forget(&file);
        };
        flip();
        let error = restored(&here).expect_err("a bit is another");
        assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::Mismatch, Some("large")), "{error}");
        assert_eq!(error.context("offset"), Some((large.offset + at / CHUNK * CHUNK).to_string().as_str()), "{at}");
        flip();
    }
    assert!(fake.calls("cuLaunchKernel") > 9, "the GPU found them");
    drop((here, session));
    world.assert_clean();
}

#[test]
fn where_the_gpu_cannot_sum_the_ring_is_taken_and_the_receipt_says_why() {
    let (directory, known) = (scratch(), known());
    let host = saved_from_host(directory.path(), &known);
    for (settings, why) in [
        ("FAIL=cuModuleLoadData:*:NO_BINARY_FOR_GPU", "cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("FAIL=cuModuleGetFunction:*:NOT_FOUND", "cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND"),
        ("FAIL=cuLaunchKernel:*:LAUNCH_OUT_OF_RESOURCES", "cuLaunchKernel failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        // The first is the trial: here it is the first of the restore, and the first of the save.
        ("FAIL=cuLaunchKernel:2:UNKNOWN,cuLaunchKernel:3:UNKNOWN", "cuLaunchKernel failed: CUDA_ERROR_UNKNOWN"),
        ("WRONG_SUMS=1", "the GPU computes wrong checksums of known bytes"),
    ] {
        let fake = FakeCuda::start(&format!("DELAY_US=0..200; ALIGNMENT=65536; {settings}"));
        let world = World::new(&fake, "nvidia-fs", "WAY=nvfs; VERSION=1150");
        let session = world.session(CuFileChoice::Auto);
        let here = session.checkpoints(directory.path());
        let found = restored(&here).unwrap_or_else(|error| panic!("{settings}: {error}"));
        let saved = here.save(2, &sources(&found), &Json::default(), options().replace()).expect("saved");
        for receipt in [&found.groups["model"].receipt, &saved.receipt] {
            let note = note(receipt);
            assert!(note.contains("through the ring") && note.contains(why), "{settings}: {note}");
            assert!(receipt.bytes_by(Way::Direct) > receipt.bytes / 2, "the bytes go straight all the same: {receipt}");
        }
        let (one, two) = (host.open(1).expect("there"), host.open(2).expect("there"));
        assert_eq!(one.manifest().compare(two.manifest()).0, [], "{settings}");
        drop((found, here, session));
        world.assert_clean();
    }
}

#[test]
fn a_kernel_that_dies_takes_the_restore_or_the_save_with_it_and_leaves_what_was_there() {
    let (directory, known) = (scratch(), known());
    let host = saved_from_host(directory.path(), &known);
    for nth in [2, 3] {
        let fake = FakeCuda::start(&format!("ALIGNMENT=65536; FAIL_LATE=cuLaunchKernel:{nth}:ILLEGAL_ADDRESS"));
        let world = World::new(&fake, "nvidia-fs", "WAY=nvfs; VERSION=1150");
        let session = world.session(CuFileChoice::Auto);
        let here = session.checkpoints(directory.path());
        let error = match restored(&here) {
            Err(error) => error,
            Ok(found) => here.save(2, &sources(&found), &Json::default(), options()).expect_err("the context is lost"),
        };
        assert_eq!(error.kind(), ErrorKind::Gpu, "{error}");
        assert_eq!(host.steps().expect("a list"), [1]);
        assert_eq!(host.unfinished().expect("a list"), [""; 0]);
        assert_eq!(fake.faults(), []);
    }
}
