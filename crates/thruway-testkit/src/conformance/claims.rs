//! Memory and files in flight belong to the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use thruway::io::{Direction, Engine, EngineName};

use super::{Outcome, SlowFile, Subject, buffer, drain, filled, region, request, submit};
use crate::random::Random;

/// Long enough that nothing which only happens to be slow is taken for waiting.
const DELAY: Duration = Duration::from_millis(100);

pub(super) fn held_until_handed_back(subject: &Subject<'_>) -> Outcome {
    let file = subject.files.with_bytes(&[3; 5000]);
    let before = Arc::strong_count(&file);
    subject.with_engine(|engine| {
        let mut target = buffer(5000);
        let read = region(&mut target, 5000);
        submit(engine, request(1, Direction::Read, &file, 0, vec![read]));
        // Whether the bytes have arrived already makes no difference: the completion was not taken.
        std::thread::sleep(Duration::from_millis(5));
        assert!(target.bytes().is_err(), "a buffer being filled cannot be looked at");
        assert!(Arc::strong_count(&file) > before, "the engine holds the file");
        let done = drain(engine);
        assert!(target.bytes().is_err(), "a completion still holds its request");
        drop(done);
        assert_eq!(target.bytes().expect("all claims are back"), [3; 5000]);
        let mut source = filled(vec![4; 10]);
        submit(engine, request(2, Direction::Write, &file, 0, vec![source.source(0..10).expect("free")]));
        assert!(source.bytes_mut().is_err(), "a buffer being written cannot be changed");
        drop(drain(engine));
        assert!(source.bytes_mut().is_ok());
        assert_eq!(Arc::strong_count(&file), before, "and the file");
    });
    Outcome::Passed
}

pub(super) fn dropping_waits_for_a_slow_request(subject: &Subject<'_>) -> Outcome {
    let Some(SlowFile { file, release }) = subject.files.slow((subject.make)().name()) else {
        return Outcome::Skipped("nothing is slow in memory");
    };
    if (subject.make)().name() == EngineName::Posix {
        return Outcome::Skipped("it works only inside `complete`, so a drop finds nothing under way");
    }
    let mut target = buffer(SlowFile::BYTES);
    let part = region(&mut target, SlowFile::BYTES);
    let released = Arc::new(AtomicBool::new(false));
    let releaser = subject.with_engine(|engine| {
        submit(engine, request(1, Direction::Read, &file, 0, vec![part]));
        start(engine);
        let released = Arc::clone(&released);
        std::thread::spawn(move || {
            std::thread::sleep(DELAY);
            released.store(true, Ordering::SeqCst);
            release();
        })
    });
    assert!(released.load(Ordering::SeqCst), "the engine was dropped before its request was done");
    assert_eq!(target.bytes().expect("a dropped engine holds nothing"), [SlowFile::FILL; SlowFile::BYTES]);
    releaser.join().expect("it only releases");
    Outcome::Passed
}

/// Makes sure that the system has the requests: some engines hand them over only here.
fn start(engine: &mut dyn Engine) {
    let mut done = Vec::new();
    engine.complete(&mut done, thruway::io::Wait::No).expect("the mechanism works");
    assert!(done.is_empty(), "a slow request is not done before it is released");
}

pub(super) fn dropping_a_full_queue(subject: &Subject<'_>) -> Outcome {
    const BLOCK: usize = 1 << 16;
    let mut random = Random::new(11);
    for round in 0..6 {
        let depth = subject.with_engine(|engine| engine.capabilities().depth.min(64));
        let bytes = random.bytes(depth * BLOCK);
        let file = subject.files.with_bytes(&bytes);
        let mut target = buffer(depth * BLOCK);
        subject.with_engine(|engine| {
            for block in 0..depth {
                let part = target.region(block * BLOCK..(block + 1) * BLOCK).expect("free");
                submit(engine, request(block, Direction::Read, &file, (block * BLOCK) as u64, vec![part]));
            }
            // Every other round the system has them all already; else the drop comes first.
            if round % 2 == 0 {
                let mut done = Vec::new();
                engine.complete(&mut done, thruway::io::Wait::No).expect("the mechanism works");
            }
        });
        let after = target.bytes().expect("a dropped engine holds nothing").to_vec();
        for block in 0..depth {
            let range = block * BLOCK..(block + 1) * BLOCK;
            let found = &after[range.clone()];
            assert!(found == &bytes[range] || found.iter().all(|byte| *byte == 0), "block {block} is whole or untouched");
        }
        std::thread::sleep(Duration::from_millis(10));
        assert!(target.bytes().expect("free") == after, "nothing moves after the drop, in round {round}");
        assert_eq!(Arc::strong_count(&file), 1, "and no file stays open");
    }
    Outcome::Passed
}
