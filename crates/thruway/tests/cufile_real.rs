//! cuFile in its compatibility mode, over real GPU memory: the one way in which the real library runs on a machine without a
//! direct path. `THRUWAY_REQUIRE_GPU=1` demands the machine's own driver and cuFile (`scripts/gpu-check cufile` sets it); else the
//! same tests, with fewer rounds, run over the doubles.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thruway::base::settings::{CUFILE_LIBRARY, CuFileChoice, Settings};
use thruway::io::direct::DirectPath;
use thruway::io::engine::{CuFileOptions, CuFilePath};
use thruway::io::policy::Path as Way;
use thruway::storage::{Access, Buffering, Namespace, OsNamespace};
use thruway::transfer::{FileRef, Move, TransferOptions};
use thruway::{Device, Direction, ErrorKind, Extent, GpuBuffer, PathPolicy, Session};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fake_cufile::FakeCuFile;
use thruway_testkit::random::Random;

const SEED: u64 = 0x00c0_f11e;

/// How often something is done: so often on the real thing, unless `THRUWAY_TEST_ROUNDS` says less, and so often over the doubles.
fn rounds(real: usize, doubles: usize) -> usize {
    let most = std::env::var("THRUWAY_TEST_ROUNDS").map_or(usize::MAX, |text| text.parse().expect("a number"));
    most.min(if is_real() { real } else { doubles })
}

/// What descriptor 0 is: opening cuFile without nvidia-fs has been seen to damage it.
fn descriptor_0() -> Option<PathBuf> {
    std::fs::read_link("/proc/self/fd/0").ok()
}

fn is_real() -> bool {
    std::env::var_os("THRUWAY_REQUIRE_GPU").is_some()
}

/// Lends a session and cuFile's library to a test: the machine's, or the doubles'.
fn with_session(choice: CuFileChoice, test: impl FnOnce(&Session, CuFileOptions)) {
    let settings = Settings { cufile: choice, queue_depth: 8, threads: 4, ..Settings::default() };
    let builder = Session::builder().device(Device::Cuda(0)).settings(settings);
    if is_real() {
        let session = builder.build().expect("a GPU");
        let library = std::env::var_os(CUFILE_LIBRARY).map(PathBuf::from);
        test(&session, CuFileOptions { choice, depth: 8, library, ..CuFileOptions::default() });
        return;
    }
    let fake = FakeCuda::start("DELAY_US=0..50; MEMORY=268435456");
    let cufile = FakeCuFile::start(&fake, "WAY=posix");
    let session = builder.cuda_library(fake.path()).cufile_library(cufile.path()).build().expect("a session");
    let library = Some(cufile.path().to_owned());
    test(&session, CuFileOptions { choice, depth: 8, library, ..CuFileOptions::default() });
    drop(session);
    cufile.assert_clean();
    fake.assert_clean();
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

fn forget(path: &Path) {
    let file = OsNamespace.open(path, Access::Write, Buffering::PageCache).expect("it is there");
    thruway::storage::drop_from_page_cache(&*file).expect("dropped");
}

#[test]
fn reads_and_writes_of_any_offset_length_and_alignment_bring_every_byte() {
    with_session(CuFileChoice::Compat, |session, _| {
        let (directory, mut random) = (scratch(), Random::new(SEED));
        let mut bytes = random.bytes(6 << 20);
        let path = directory.path().join("file");
        std::fs::write(&path, &bytes).expect("written");
        let (gpu, mut by_cufile) = (session.gpu().expect("a GPU"), 0);
        let before = descriptor_0();
        for round in 0..rounds(300, 25) {
            let most = [5000, 70_000, 5 << 20][round % 3];
            let (length, shift) = (1 + random.below(most), [0, 256, 4096, random.below(5000)][random.below(4)]);
            let offset = [0, 4096, random.below(bytes.len() - length)][random.below(3)].min(bytes.len() - length);
            let mut buffer = GpuBuffer::new(gpu, shift + length).expect("room");
            let extent = Extent::new(offset as u64, length as u64);
            forget(&path);
            let region = buffer.region(shift..shift + length).expect("free");
            let file = FileRef::new(&path);
            let moves = vec![Move { file, extent, region, direction: Direction::Read }];
            let receipt = session.transfer(moves, &TransferOptions::default()).expect("read");
            by_cufile += receipt.bytes_by(Way::Unverified);
            assert_eq!(receipt.bytes_by(Way::Direct), 0, "compatibility mode is never called direct: {receipt}");
            let mut found = vec![0; length];
            buffer.copy_to_host(shift..shift + length, &mut found).expect("readable");
            assert!(found == bytes[offset..offset + length], "round {round} of seed {SEED:#x}: {length} bytes at {offset}");
            // Back to another place of the same file.
            let target = [0, 4096, random.below(bytes.len() - length)][random.below(3)].min(bytes.len() - length);
            let region = buffer.source(shift..shift + length).expect("free");
            let (file, extent) = (FileRef::new(&path), Extent::new(target as u64, length as u64));
            let moves = vec![Move { file, extent, region, direction: Direction::Write }];
            by_cufile += session.transfer(moves, &TransferOptions::default()).expect("written").bytes_by(Way::Unverified);
            bytes[target..target + length].copy_from_slice(&found);
            assert!(std::fs::read(&path).expect("readable") == bytes, "round {round} of seed {SEED:#x}: a write to {target}");
        }
        assert!(by_cufile > 0, "cuFile took no part");
        assert_eq!(descriptor_0(), before, "cuFile was opened, and descriptor 0 is as it was");
    });
}

#[test]
fn registering_and_forgetting_leaves_nothing() {
    with_session(CuFileChoice::Compat, |session, options| {
        let gpu = session.gpu().expect("a GPU");
        let path = CuFilePath::new(Arc::clone(gpu), options);
        drop(path.make().expect("cuFile opens"));
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
            text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number")
        };
        let (mut before, mut free) = (0, 0);
        // Over the doubles another test makes ten thousand.
        let rounds = rounds(10_000, 1_500);
        for round in 0..rounds {
            let mut buffer = GpuBuffer::new(gpu, 1 << 20).expect("room");
            let region = buffer.region(0..4096).expect("free");
            path.register(&region);
            assert!(region.is_registered(), "round {round}");
            drop((region, buffer));
            // What is made once is there by then.
            if round == rounds / 10 {
                (before, free) = (resident(), gpu.free_bytes().expect("a number"));
            }
        }
        let (grown, lost) = (resident().saturating_sub(before), free.saturating_sub(gpu.free_bytes().expect("a number")));
        // AddressSanitizer keeps freed memory for a while, to catch who still uses it.
        let flat = grown < 2048 || std::env::var_os("ASAN_OPTIONS").is_some();
        assert!(flat && lost < 16 << 20, "{grown} pages and {lost} bytes of the GPU's more at the end");
    });
}

#[test]
fn a_required_direct_path_fails_at_once_with_the_reason_and_descriptor_0_is_as_it_was() {
    with_session(CuFileChoice::Auto, |session, _| {
        let directory = scratch();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 1 << 20]).expect("written");
        let before = descriptor_0();
        let mut buffer = GpuBuffer::new(session.gpu().expect("a GPU"), 1 << 20).expect("room");
        let region = buffer.region(0..1 << 20).expect("free");
        let moves = vec![Move { file: FileRef::new(&path), extent: Extent::new(0, 1 << 20), region, direction: Direction::Read }];
        let options = TransferOptions { policy: PathPolicy::Require(Way::Direct), ..TransferOptions::default() };
        let started = Instant::now();
        match session.transfer(moves, &options) {
            // A machine that has it.
            Ok(receipt) => assert_eq!(receipt.bytes_by(Way::Direct), 1 << 20, "{receipt}"),
            Err(error) => {
                let elapsed = started.elapsed();
                println!("after {elapsed:?}: {error:?}");
                assert_eq!(error.kind(), ErrorKind::PathUnavailable);
                assert!(error.hint().is_some() && error.message().contains("nvidia-fs"), "{error:?}");
                // The doubles run where others keep the processors busy.
                let most = Duration::from_millis(if is_real() { 100 } else { 5_000 });
                assert!(elapsed < most, "{elapsed:?}");
            }
        }
        assert_eq!(descriptor_0(), before);
    });
}
