//! Every reason for which bytes do not go directly by cuFile, reached: with `auto` the right bytes by another way whose receipt has
//! the reason, with `direct` required an error that has it, and a remedy.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{DIRECT, World, assert_right, forget, load, model_file, scratch, total};
use thruway::base::settings::CuFileChoice;
use thruway::io::direct::DirectPath;
use thruway::io::engine::{CuFileOptions, CuFilePath};
use thruway::io::policy::Path as Way;
use thruway::transfer::{FileRef, Move, TransferOptions};
use thruway::{
    Device, Direction, ErrorKind, Extent, GpuBuffer, HostBuffer, LoadOptions, PathPolicy, Receipt, SaveOptions, Session, Source,
};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fake_cufile::failure_codes;

/// Loads both ways; gives the receipt of `auto`.
fn refused_and_explained(session: &Session, path: &Path, why: &str) -> Receipt {
    forget(path);
    let error = load(session, path, DIRECT).expect_err(why);
    assert_eq!(error.kind(), ErrorKind::PathUnavailable, "{why}: {error:?}");
    assert!(error.message().contains(why) && error.hint().is_some_and(|hint| !hint.is_empty()), "{why}: {error:?}");
    forget(path);
    let (loaded, receipt) = load(session, path, PathPolicy::Auto).expect(why);
    assert_right(&loaded);
    assert_eq!(receipt.bytes_by(Way::Direct), 0, "{why}: {receipt}");
    assert!(receipt.to_string().contains(why), "{why}: {receipt}");
    receipt
}

#[test]
fn what_the_machine_or_the_library_lacks_is_said_by_name() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..20");
    for (has, settings, choice, way, why) in [
        ("nvidia-fs", "", CuFileChoice::Off, Way::Staged, "switched off"),
        ("nothing", "", CuFileChoice::Auto, Way::Staged, "nvidia-fs is not loaded"),
        ("p2pdma of 0 bytes", "", CuFileChoice::Auto, Way::Staged, "publishes 0 bytes"),
        ("nvidia-fs", "FAIL=cuFileGetVersion:*:5027", CuFileChoice::Auto, Way::Unverified, "they came with 1.15"),
        ("nvidia-fs", "COUNTERS=absent", CuFileChoice::Auto, Way::Unverified, "do not have this GPU"),
        ("nvidia-fs", "FAIL=cuFileGetStatsL3:*:5027", CuFileChoice::Auto, Way::Unverified, "cuFileGetStatsL3 failed"),
        ("nvidia-fs", "FAIL=cuFileStatsStart:*:5027", CuFileChoice::Auto, Way::Unverified, "did not move"),
        ("nvidia-fs", "PINNED_MAX=4096", CuFileChoice::Auto, Way::Staged, "cuFileBufRegister failed"),
        ("nvidia-fs", "HANDLES_MAX=0", CuFileChoice::Auto, Way::Staged, "cuFileHandleRegister failed"),
        ("nvidia-fs", "FAIL=cuFileRead:*:e95", CuFileChoice::Auto, Way::Staged, "refused by the kernel"),
        ("nvidia-fs", "FAIL=cuFileRead:*:e121", CuFileChoice::Auto, Way::Staged, "refused by the kernel"),
    ] {
        let world = World::new(&fake, has, settings);
        let session = world.session(choice);
        let receipt = refused_and_explained(&session, &path, why);
        assert_eq!(receipt.bytes_by(way), total(), "{why}: {receipt}");
        drop(session);
        world.assert_clean();
    }
}

#[test]
fn a_library_that_is_not_there_or_another_than_the_one_that_is_open_is_said_by_name() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..20");
    let world = World::new(&fake, "nvidia-fs", "");
    let nowhere = world.builder(CuFileChoice::Auto).cufile_library(directory.path().join("libcufile.so.0"));
    let nowhere = nowhere.build().expect("a session");
    refused_and_explained(&nowhere, &path, "there is no usable libcufile here");
    let session = world.session(CuFileChoice::Auto);
    forget(&path);
    let (loaded, receipt) = load(&session, &path, PathPolicy::Auto).expect("loaded");
    assert_eq!(receipt.bytes_by(Way::Direct), total());
    let link = directory.path().join("another-libcufile.so");
    std::os::unix::fs::symlink(world.cufile.path(), &link).expect("a link");
    let another = world.builder(CuFileChoice::Auto).cufile_library(link).build().expect("a session");
    refused_and_explained(&another, &path, "another libcufile is open in this process");
    drop((another, nowhere, session, loaded));
    world.assert_clean();
}

#[test]
fn an_opening_that_hangs_is_given_up() {
    let fake = FakeCuda::start("");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Off);
    let held = world.cufile.hold();
    let (library, facts) = (Some(world.cufile.path().to_owned()), world.facts.clone());
    let patience = Duration::from_millis(50);
    let options = CuFileOptions { library, facts, patience, ..CuFileOptions::default() };
    let path = CuFilePath::new(Arc::clone(session.gpu().expect("a GPU")), options);
    let error = path.make().expect_err("it hangs");
    assert!(error.kind() == ErrorKind::PathUnavailable && error.message().contains("did not return within 50ms"), "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("THRUWAY_CUFILE=off")), "{error:?}");
    drop(held);
    assert_eq!(world.cufile.faults(), []);
}

#[test]
fn a_filesystem_without_o_direct_is_said_by_name() {
    // A file of the kernel's, whose filesystem is always there and never takes O_DIRECT.
    let path = Path::new("/sys/kernel/notes");
    let Ok(bytes) = std::fs::read(path) else {
        assert!(std::env::var_os("THRUWAY_REQUIRE_TEST_INPUTS").is_none(), "sysfs is needed");
        println!("skipped: sysfs is not mounted here");
        return;
    };
    let fake = FakeCuda::start("DELAY_US=0..20");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    for policy in [PathPolicy::Auto, DIRECT] {
        let mut buffer = GpuBuffer::new(session.gpu().expect("a GPU"), bytes.len()).expect("room");
        let region = buffer.region(0..bytes.len()).expect("free");
        let (file, extent) = (FileRef::new(path), Extent::new(0, bytes.len() as u64));
        let moves = vec![Move { file, extent, region, direction: Direction::Read }];
        match (policy, session.transfer(moves, &TransferOptions { policy, ..TransferOptions::default() })) {
            (PathPolicy::Auto, Ok(receipt)) => {
                assert_eq!(receipt.bytes_by(Way::Cached), bytes.len() as u64, "{receipt}");
                assert!(receipt.to_string().contains("not direct: the filesystem refuses O_DIRECT"), "{receipt}");
                let mut found = vec![0; bytes.len()];
                buffer.copy_to_host(0..bytes.len(), &mut found).expect("readable");
                assert!(found == bytes);
            }
            (_, Err(error)) => {
                assert_eq!(error.kind(), ErrorKind::PathUnavailable);
                assert!(error.message().contains("the filesystem refuses O_DIRECT") && error.hint().is_some(), "{error:?}");
                assert_eq!(error.context("file"), path.to_str());
            }
            (policy, outcome) => panic!("{policy:?}: {outcome:?}"),
        }
    }
    drop(session);
    world.assert_clean();
}

#[test]
fn of_a_transfer_to_a_gpu_and_to_the_host_the_part_to_the_host_says_why_it_is_not_direct() {
    let directory = scratch();
    let path = directory.path().join("file");
    std::fs::write(&path, vec![3; 2 << 20]).expect("written");
    forget(&path);
    let fake = FakeCuda::start("DELAY_US=0..20; ALIGNMENT=65536");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    let mut on_gpu = GpuBuffer::new(session.gpu().expect("a GPU"), 1 << 20).expect("room");
    let mut on_host = HostBuffer::new(1 << 20).expect("room");
    let file = FileRef::new(&path);
    let to = |region, offset| Move {
        file: Arc::clone(&file),
        extent: Extent::new(offset, 1 << 20),
        region,
        direction: Direction::Read,
    };
    let moves = vec![to(on_gpu.region(0..1 << 20).expect("free"), 0), to(on_host.region(0..1 << 20).expect("free"), 1 << 20)];
    let receipt = session.transfer(moves, &TransferOptions::default()).expect("moved");
    assert_eq!((receipt.bytes_by(Way::Direct), receipt.bytes_by(Way::Plain)), (1 << 20, 1 << 20), "{receipt}");
    assert!(receipt.to_string().contains("leads to host memory"), "{receipt}");
    assert!(on_host.bytes().expect("nothing fills it").iter().all(|byte| *byte == 3));
    drop((session, on_gpu));
    world.assert_clean();
}

#[test]
fn an_older_cufile_is_proven_by_what_nvidia_fs_counted() {
    let directory = scratch();
    let path = model_file(directory.path());
    for (counts, expected) in [(true, Way::Direct), (false, Way::Unverified)] {
        let fake = FakeCuda::start("DELAY_US=0..20");
        let file = if counts { "NVFS_STATS=ROOT/proc/driver/nvidia-fs/stats" } else { "NVFS_STATS=ROOT/elsewhere" };
        let world = World::new(&fake, "old nvidia-fs", &format!("VERSION=1140; {file}"));
        let session = world.session(CuFileChoice::Auto);
        forget(&path);
        let (loaded, receipt) = load(&session, &path, PathPolicy::Auto).expect("loaded");
        assert_right(&loaded);
        assert_eq!(receipt.bytes_by(expected), total(), "{receipt}");
        assert_eq!(load(&session, &path, DIRECT).is_ok(), counts);
        drop((session, loaded));
        world.assert_clean();
    }
}

#[test]
fn counters_that_fail_after_the_trial_fail_what_had_to_be_direct_and_leave_the_rest_unverified() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..20");
    // Read at the opening, around the trial, and at the end: the fourth reading is the verdict's.
    for policy in [DIRECT, PathPolicy::Auto] {
        let world = World::new(&fake, "nvidia-fs", "FAIL=cuFileGetStatsL3:4:5027");
        let session = world.session(CuFileChoice::Auto);
        forget(&path);
        match (policy, load(&session, &path, policy)) {
            (PathPolicy::Auto, Ok((loaded, receipt))) => {
                assert_right(&loaded);
                assert_eq!(receipt.bytes_by(Way::Unverified), total(), "{receipt}");
                let told = receipt.to_string();
                assert!(told.contains("proven by counters") && told.contains("; unproven: cuFileGetStatsL3 failed"), "{told}");
            }
            (_, Err(error)) => {
                assert!(error.message().contains("nothing proves that they went directly"), "{error:?}");
                assert!(error.kind() == ErrorKind::PathUnavailable && error.hint().is_some(), "{error:?}");
            }
            (policy, outcome) => panic!("{policy:?}: {outcome:?}"),
        }
        drop(session);
        world.assert_clean();
    }
}

#[test]
fn every_code_of_a_required_load_is_an_error_by_name() {
    let directory = scratch();
    let path = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0..20");
    for (code, name) in failure_codes() {
        for call in ["cuFileDriverOpen:1", "cuFileHandleRegister:1", "cuFileBufRegister:1", "cuFileRead:1", "cuFileRead:4"] {
            if (code, call) == (5026, "cuFileDriverOpen:1") {
                continue; // Opened by somebody else, which is as good.
            }
            let world = World::new(&fake, "nvidia-fs", &format!("DELAY_US=0; FAIL={call}:{code}"));
            let session = world.session(CuFileChoice::Auto);
            let error = load(&session, &path, DIRECT).expect_err(name);
            assert!(matches!(error.kind(), ErrorKind::PathUnavailable | ErrorKind::Io | ErrorKind::Gpu), "{call} {error:?}");
            assert!(error.to_string().contains(name) && error.hint().is_some(), "{call} {name}: {error:?}");
            drop(session);
            world.assert_clean();
        }
    }
}

#[test]
fn every_code_of_a_write_leads_to_right_bytes_and_a_reason_or_to_an_error_and_nothing_published() {
    let directory = scratch();
    let fake = FakeCuda::start("DELAY_US=0..20; ALIGNMENT=65536");
    let (originals, bytes) = (scratch(), vec![0x5a; 3 << 20]);
    let original = originals.path().join("original.safetensors");
    let whole = HostBuffer::from_vec(bytes.clone()).source(0..bytes.len()).expect("free");
    let source = Source::new("t", thruway::Dtype::U8, vec![bytes.len() as u64], whole);
    let host = Session::builder().device(Device::Host).build().expect("a session");
    host.save(&[source], &original, SaveOptions::default()).expect("saved");
    for (code, name) in failure_codes() {
        // The first write is the trial's.
        for call in ["cuFileWrite:1", "cuFileWrite:3"] {
            let world = World::new(&fake, "nvidia-fs", &format!("DELAY_US=0; FAIL={call}:{code}"));
            let session = world.session(CuFileChoice::Auto);
            let (loaded, _) = load(&session, &original, PathPolicy::Require(Way::Cached)).expect("no matter of cuFile's");
            let region = loaded.get("t").expect("loaded").region().expect("nothing fills it");
            let source = Source::new("t", thruway::Dtype::U8, vec![bytes.len() as u64], region);
            let target = directory.path().join("saved.safetensors");
            let outcome = session.save(&[source], &target, SaveOptions::default());
            match outcome {
                Ok(receipt) => {
                    assert!(receipt.to_string().contains(name), "{call} {name}: {receipt}");
                    let (saved, _) = host.open(&target).expect("whole").load(LoadOptions::all()).expect("loaded");
                    assert!(saved.get("t").expect("there").to_host().expect("readable") == bytes, "{call} {name}");
                    std::fs::remove_file(&target).expect("removed");
                }
                Err(error) => {
                    assert!(matches!(code, 5015 | 5044 | 5047), "{call} {name}: {error:?}");
                    assert!(error.to_string().contains(name) && error.hint().is_some(), "{call} {name}: {error:?}");
                    assert_eq!(std::fs::read_dir(directory.path()).expect("list").count(), 0, "{call} {name}: nothing is left");
                }
            }
            drop((session, loaded));
            world.assert_clean();
        }
    }
}
