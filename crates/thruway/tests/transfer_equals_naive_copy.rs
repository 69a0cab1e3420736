//! Plan and pipeline against a naive copy: whatever the extents, alignments, chunk sizes, paths and engines, the
//! bytes that arrive are those that a loop of plain reads or writes would have moved, and no others.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::transfer::FileRef;
use thruway::{Direction, Extent, HostBuffer, Move, PathPolicy, Session, TransferOptions};

/// A directory on the filesystem of the build, which takes `O_DIRECT` where a tmpfs might not.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..length).map(|_| next()).collect()
}

fn write_file(directory: &Path, name: &str, content: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, content).expect("write");
    path
}

/// Makes the page cache forget the file, so that the path past it is taken by choice too.
fn forget(path: &Path) {
    let file = std::fs::File::open(path).expect("open");
    file.sync_all().expect("sync");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
}

#[derive(Debug, Clone)]
struct Setup {
    engine: EngineChoice,
    policy: &'static str,
    chunk_pages: usize,
    drive_chunk_pages: usize,
    ring_chunks: usize,
    depth: usize,
    threads: usize,
    cold: bool,
}

fn setups() -> impl Strategy<Value = Setup> {
    let engine = prop_oneof![Just(EngineChoice::Auto), Just(EngineChoice::Posix)];
    let policy = prop_oneof![Just("auto"), Just("staged"), Just("cached")];
    (engine, policy, 1..40_usize, 1..40_usize, 1..6_usize, 1..9_usize, 1..4_usize, any::<bool>()).prop_map(
        |(engine, policy, chunk_pages, drive_chunk_pages, ring_chunks, depth, threads, cold)| Setup {
            engine,
            policy,
            chunk_pages,
            drive_chunk_pages,
            ring_chunks,
            depth,
            threads,
            cold,
        },
    )
}

fn session(setup: &Setup) -> (Session, TransferOptions) {
    let settings = Settings {
        engine: setup.engine,
        queue_depth: setup.depth,
        threads: setup.threads,
        chunk_bytes: setup.chunk_pages * 4096,
        drive_chunk_bytes: setup.drive_chunk_pages * 4096,
        ring_bytes: setup.ring_chunks * setup.chunk_pages * 4096,
        cufile: CuFileChoice::Auto,
    };
    let policy: PathPolicy = setup.policy.parse().expect("a known path");
    let options = TransferOptions { policy, ..TransferOptions::default() };
    (Session::builder().settings(settings).build().expect("session"), options)
}

/// Ranges of a file of `length` bytes: some anywhere (they may overlap), some one after another with small gaps.
fn ranges(length: u64) -> impl Strategy<Value = Vec<(u64, u64)>> {
    let anywhere = prop::collection::vec((0..length, 0..length), 0..6)
        .prop_map(move |pairs| pairs.into_iter().map(|(start, len)| (start, len.min(length - start))).collect::<Vec<_>>());
    let in_row = (0..5000_u64, prop::collection::vec((0..3000_u64, prop_oneof![Just(0), 0..200_u64]), 0..60)).prop_map(
        move |(mut at, items)| {
            let mut out = Vec::new();
            for (len, gap) in items {
                if at + len > length {
                    break;
                }
                out.push((at, len));
                at += len + gap;
            }
            out
        },
    );
    (anywhere, in_row).prop_map(|(mut a, b)| {
        a.extend(b);
        a
    })
}

const LENGTH: u64 = 700_001;

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn proptest_reads_bring_exactly_the_bytes_asked_for(
        setup in setups(), ranges in ranges(LENGTH), skew in 0..600_usize, spacing in 0..70_usize, shuffle in any::<u64>(),
    ) {
        let directory = scratch();
        let content = bytes(usize::try_from(LENGTH).expect("small"), 7);
        let path = write_file(directory.path(), "input", &content);
        if setup.cold {
            forget(&path);
        }
        let (session, options) = session(&setup);
        let file = FileRef::new(&path);
        let total: usize = ranges.iter().map(|(_, len)| usize::try_from(*len).expect("small") + spacing).sum();
        let mut buffer = HostBuffer::new(skew + total).expect("memory");
        buffer.bytes_mut().expect("free").fill(0xEE);
        let (mut expected, mut moves, mut at) = (vec![0xEE; skew + total], Vec::new(), skew);
        for (offset, length) in &ranges {
            let (start, len) = (usize::try_from(*offset).expect("small"), usize::try_from(*length).expect("small"));
            expected[at..at + len].copy_from_slice(&content[start..start + len]);
            let region = buffer.region(at..at + len).expect("in range");
            moves.push(Move { file: Arc::clone(&file), extent: Extent::new(*offset, *length), region, direction: Direction::Read });
            at += len + spacing;
        }
        let count = moves.len().max(1);
        moves.rotate_left(usize::try_from(shuffle).unwrap_or(0) % count);
        let receipt = session.transfer(moves, &options).expect("a transfer of a whole file");
        prop_assert_eq!(receipt.bytes, ranges.iter().map(|(_, length)| length).sum::<u64>());
        prop_assert!(buffer.bytes().expect("nothing in flight") == expected, "{:?}", receipt);
        prop_assert!(session.ring_bytes() <= setup.ring_chunks * setup.chunk_pages * 4096);
    }

    #[test]
    fn proptest_writes_change_exactly_the_bytes_given(
        setup in setups(), ranges in ranges(LENGTH), skew in 0..600_usize, spacing in 0..70_usize,
    ) {
        let directory = scratch();
        let mut expected = bytes(usize::try_from(LENGTH).expect("small"), 9);
        let path = write_file(directory.path(), "output", &expected);
        if setup.cold {
            forget(&path);
        }
        let mut taken = vec![false; expected.len()];
        let (session, options) = session(&setup);
        let file = FileRef::new(&path);
        let total: usize = ranges.iter().map(|(_, len)| usize::try_from(*len).expect("small") + spacing).sum();
        let buffer = HostBuffer::from_vec(bytes(skew + total, 3));
        let (mut moves, mut at) = (Vec::new(), skew);
        for (offset, length) in &ranges {
            let (start, len) = (usize::try_from(*offset).expect("small"), usize::try_from(*length).expect("small"));
            // Overlapping writes are refused (a test of their own), so leave them out here.
            if taken[start..start + len].iter().any(|taken| *taken) {
                continue;
            }
            taken[start..start + len].fill(true);
            expected[start..start + len].copy_from_slice(&buffer.bytes().expect("free")[at..at + len]);
            let region = buffer.source(at..at + len).expect("in range");
            moves.push(Move { file: Arc::clone(&file), extent: Extent::new(*offset, *length), region, direction: Direction::Write });
            at += len + spacing;
        }
        let receipt = session.transfer(moves, &options).expect("a transfer into a whole file");
        let found = std::fs::read(&path).expect("read");
        prop_assert!(found == expected, "{:?}", receipt);
    }
}

#[test]
fn contradictory_moves_are_refused_before_a_byte_moves() {
    let directory = scratch();
    let path = write_file(directory.path(), "file", &[1; 100]);
    let session = Session::builder().build().expect("session");
    let file = FileRef::new(&path);
    let mut buffer = HostBuffer::new(100).expect("memory");
    let read = |offset, length, region| Move {
        file: Arc::clone(&file),
        extent: Extent::new(offset, length),
        region,
        direction: Direction::Read,
    };
    let same_place =
        vec![read(0, 10, buffer.region(0..10).expect("in range")), read(50, 10, buffer.region(9..19).expect("in range"))];
    let wrong_length = vec![read(0, 11, buffer.region(0..10).expect("in range"))];
    let past_the_end = vec![read(95, 10, buffer.region(0..10).expect("in range"))];
    let wraps = vec![read(u64::MAX, 10, buffer.region(0..10).expect("in range"))];
    for (moves, what) in [(same_place, "destinations"), (wrong_length, "length"), (past_the_end, "100 bytes"), (wraps, "length")]
    {
        let error = session.transfer(moves, &TransferOptions::default()).expect_err(what);
        assert!(error.to_string().contains(what), "{error}");
        assert!(error.context("file").is_some(), "{error}");
    }
    assert!(buffer.bytes().expect("no claim is left").iter().all(|byte| *byte == 0), "nothing was moved");
    let source = buffer.source(0..10).expect("in range");
    let into_read_only = vec![read(0, 10, source.clone())];
    assert!(session.transfer(into_read_only, &TransferOptions::default()).is_err());
    let write = |offset| Move {
        file: Arc::clone(&file),
        extent: Extent::new(offset, 10),
        region: source.clone(),
        direction: Direction::Write,
    };
    let error = session.transfer(vec![write(0), write(9)], &TransferOptions::default()).expect_err("overlap");
    assert!(error.to_string().contains("overlapping extents"), "{error}");
    assert_eq!(std::fs::read(&path).expect("read"), [1; 100], "nothing was written");
}

#[test]
fn one_transfer_reads_and_writes_several_files() {
    let directory = scratch();
    let content = bytes(50_000, 1);
    let input = write_file(directory.path(), "input", &content);
    let output = write_file(directory.path(), "output", &[0; 50_000]);
    let session = Session::builder().build().expect("session");
    let mut into = HostBuffer::new(50_000).expect("memory");
    let from = HostBuffer::from_vec(content.clone());
    let whole = Extent::new(0, 50_000);
    let moves = vec![
        Move {
            file: FileRef::new(&input),
            extent: whole,
            region: into.region(0..50_000).expect("all"),
            direction: Direction::Read,
        },
        Move {
            file: FileRef::new(&output),
            extent: whole,
            region: from.source(0..50_000).expect("all"),
            direction: Direction::Write,
        },
    ];
    let receipt = session.transfer(moves, &TransferOptions::default()).expect("both");
    assert_eq!(receipt.files.iter().map(|file| file.bytes).collect::<Vec<_>>(), [50_000, 50_000]);
    assert_eq!(into.bytes().expect("done"), content);
    let mut written = vec![0; 50_000];
    std::fs::File::open(&output).expect("open").read_exact_at(&mut written, 0).expect("read");
    assert_eq!(written, content);
}

#[test]
fn two_transfers_cannot_fill_the_same_memory_at_once() {
    use thruway::Cancel;
    let directory = scratch();
    let path = write_file(directory.path(), "input", &bytes(4 << 20, 5));
    let session = Session::builder().build().expect("session");
    let mut buffer = HostBuffer::new(4 << 20).expect("memory");
    let whole = || Extent::new(0, 4 << 20);
    let read = |region| vec![Move { file: FileRef::new(&path), extent: whole(), region, direction: Direction::Read }];
    let (first, second) = (read(buffer.region(0..4 << 20).expect("free")), read(buffer.region(0..4 << 20).expect("free")));
    // The first transfer is under way for as long as its progress callback waits.
    let (begun, wait_begun) = std::sync::mpsc::channel();
    let (go_on, wait_go_on) = std::sync::mpsc::channel::<()>();
    let wait_go_on = std::sync::Mutex::new(wait_go_on);
    let progress = move |_| {
        // Only the first call waits; after it nobody is at the other ends.
        if begun.send(()).is_ok() {
            wait_go_on.lock().expect("no panic").recv().expect_err("nothing is sent, the other end is dropped");
        }
    };
    let options = TransferOptions { progress: Some(Arc::new(progress)), cancel: Cancel::default(), ..TransferOptions::default() };
    std::thread::scope(|scope| {
        let running = scope.spawn(|| session.transfer(first, &options));
        wait_begun.recv().expect("the first transfer began");
        let error = session.transfer(second, &TransferOptions::default()).expect_err("the memory is being filled");
        assert!(error.to_string().contains("another transfer"), "{error}");
        drop(go_on);
        running.join().expect("no panic").expect("the first goes on undisturbed");
    });
    assert!(buffer.bytes().expect("done") == bytes(4 << 20, 5));
    session.transfer(read(buffer.region(0..4 << 20).expect("free")), &TransferOptions::default()).expect("free again");
}

#[test]
fn two_expectations_of_one_file_cannot_both_hold() {
    let directory = scratch();
    let path = write_file(directory.path(), "input", &[1; 100]);
    let session = Session::builder().build().expect("session");
    let mut buffer = HostBuffer::new(100).expect("memory");
    let wrong = thruway::storage::Identity { device: 0, inode: 0, length: 100, modified_ns: 0 };
    let expecting = Arc::new(FileRef { path: path.clone(), expected: Some(wrong) });
    let moves = vec![
        Move {
            file: FileRef::new(&path),
            extent: Extent::new(0, 10),
            region: buffer.region(0..10).expect("free"),
            direction: Direction::Read,
        },
        Move {
            file: expecting,
            extent: Extent::new(10, 10),
            region: buffer.region(10..20).expect("free"),
            direction: Direction::Read,
        },
    ];
    let error = session.transfer(moves, &TransferOptions::default()).expect_err("it is not that file");
    assert_eq!(error.kind(), thruway::ErrorKind::Changed);
}

#[test]
fn a_panic_in_the_progress_callback_leaves_the_session_usable() {
    let directory = scratch();
    let path = write_file(directory.path(), "input", &bytes(3 << 20, 5));
    let session = Session::builder().build().expect("session");
    let mut buffer = HostBuffer::new(3 << 20).expect("memory");
    for policy in ["staged", "cached"] {
        let mut read = |options: &TransferOptions| {
            let region = buffer.region(0..3 << 20).expect("free");
            let moves =
                vec![Move { file: FileRef::new(&path), extent: Extent::new(0, 3 << 20), region, direction: Direction::Read }];
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| session.transfer(moves, options)))
        };
        let policy = policy.parse().expect("known");
        let options = TransferOptions {
            policy,
            progress: Some(Arc::new(|_| panic!("the caller's own mistake"))),
            ..TransferOptions::default()
        };
        read(&options).expect_err("the panic reaches the caller");
        let options = TransferOptions { policy, ..TransferOptions::default() };
        read(&options).expect("no panic").expect("the session goes on");
    }
    assert!(buffer.bytes().expect("done") == bytes(3 << 20, 5));
}
