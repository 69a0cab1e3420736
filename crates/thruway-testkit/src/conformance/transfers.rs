//! What is asked for is transferred: any offset, any segments, any number at once.

use std::collections::BTreeSet;
use std::sync::Arc;

use thruway::io::{Direction, Engine, Request};
use thruway::storage::File;
use thruway::{Alignment, HostBuffer, Region};

use super::{Outcome, Subject, buffer, contents, drain, filled, perform, region, request, submit};
use crate::random::Random;

const SEED: u64 = 0x7ead_5eed;

/// Carries out a request whole. A bare engine may do less than it was asked (clause 3); the suite then asks for the rest,
/// as a careful caller would.
fn perform_whole(engine: &mut dyn Engine, direction: Direction, file: &Arc<dyn File>, offset: u64, segments: Vec<Region>) {
    let mut rest = request(0, direction, file, offset, segments);
    while rest.length() > 0 {
        let completion = perform(engine, rest);
        let moved = completion.result.expect("nothing is wrong with the file");
        assert!(moved > 0, "progress is made while bytes are left");
        let Request { offset, segments, .. } = completion.request;
        let mut skip = usize::try_from(moved).expect("no more than was asked");
        let mut left = Vec::new();
        for segment in segments {
            let cut = skip.min(segment.len());
            skip -= cut;
            left.push(segment.slice(cut..segment.len()));
        }
        assert_eq!(skip, 0, "no more is transferred than was asked for");
        rest = request(0, direction, file, offset + moved, left);
    }
}

/// Cuts a region into `count` parts of random lengths, some of them empty.
fn cut(whole: &Region, count: usize, random: &mut Random) -> Vec<Region> {
    let mut cuts: Vec<usize> = (1..count).map(|_| random.below(whole.len() + 1)).collect();
    cuts.extend([0, whole.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| whole.slice(pair[0]..pair[1])).collect()
}

pub(super) fn round_trip(subject: &Subject<'_>) -> Outcome {
    let mut random = Random::new(SEED);
    let file_bytes = 300_000;
    let file = subject.files.with_bytes(&vec![0xee; file_bytes]);
    let mut expected = vec![0xee; file_bytes];
    subject.with_engine(|engine| {
        for case in 0..40 {
            let len = 1 + random.below(60_000);
            let at = random.below(file_bytes - len);
            let parts = 1 + random.below(12);
            let source = filled(random.bytes(len));
            expected[at..at + len].copy_from_slice(source.bytes().expect("no claim"));
            let whole = source.source(0..len).expect("no claim");
            perform_whole(engine, Direction::Write, &file, at as u64, cut(&whole, parts, &mut random));

            // Read with another cut, a few bytes of what was there before around it.
            let (from, to) = (at - at.min(3), (at + len + 5).min(file_bytes));
            let mut target = buffer(to - from);
            let whole = region(&mut target, to - from);
            perform_whole(engine, Direction::Read, &file, from as u64, cut(&whole, 1 + random.below(12), &mut random));
            drop(whole);
            let found = target.bytes().expect("all claims are back");
            assert!(found == &expected[from..to], "case {case} of seed {SEED:#x}: {len} bytes at {at} in {parts} parts");
        }
    });
    assert!(contents(&*file, file_bytes + 1) == expected, "nothing else has changed (seed {SEED:#x})");
    Outcome::Passed
}

pub(super) fn nothing_asked(subject: &Subject<'_>) -> Outcome {
    let file = subject.files.with_bytes(&[1; 100]);
    subject.with_engine(|engine| {
        for direction in [Direction::Read, Direction::Write] {
            for count in [0, 1, 3] {
                let mut memory = buffer(8);
                let segments = (0..count).map(|at| memory.region(at..at).expect("free")).collect();
                let completion = perform(engine, request(9, direction, &file, 50, segments));
                assert_eq!(completion.result.expect("nothing can go wrong"), 0, "{direction:?} of {count} empty segments");
                assert_eq!(completion.request.segments.len(), count);
            }
        }
    });
    assert_eq!(contents(&*file, 200), [1; 100]);
    Outcome::Passed
}

pub(super) fn segments_max(subject: &Subject<'_>) -> Outcome {
    let mut random = Random::new(SEED);
    subject.with_engine(|engine| {
        let count = engine.capabilities().segments_max;
        let bytes = random.bytes(count * 3);
        let file = subject.files.with_bytes(&bytes);
        let mut target = buffer(count * 8);
        // Backwards in memory and with gaps, so that neither order nor neighbourhood can be assumed.
        let segments = (0..count).rev().map(|at| target.region(at * 8..at * 8 + 3).expect("free")).collect();
        perform_whole(engine, Direction::Read, &file, 0, segments);
        let found = target.bytes().expect("all claims are back");
        for (index, expected) in bytes.chunks(3).enumerate() {
            let at = (count - 1 - index) * 8;
            assert_eq!(&found[at..at + 8], [expected, &[0; 5]].concat(), "segment {index} of {count}");
        }
    });
    Outcome::Passed
}

pub(super) fn several_mebibytes(subject: &Subject<'_>) -> Outcome {
    let len = (9 << 20) + 13;
    let bytes = Random::new(SEED).bytes(len);
    let file = subject.files.with_bytes(&vec![0; len + 1]);
    subject.with_engine(|engine| {
        assert!(engine.capabilities().request_bytes_max >= len);
        let source = filled(bytes.clone());
        perform_whole(engine, Direction::Write, &file, 1, vec![source.source(0..len).expect("free")]);
        let mut target = buffer(len);
        let whole = region(&mut target, len);
        perform_whole(engine, Direction::Read, &file, 1, vec![whole.slice(0..5), whole.slice(5..len)]);
        drop(whole);
        assert!(target.bytes().expect("all claims are back") == bytes);
    });
    Outcome::Passed
}

pub(super) fn many_in_flight(subject: &Subject<'_>) -> Outcome {
    const BLOCK: usize = 777;
    let mut random = Random::new(SEED);
    subject.with_engine(|engine| {
        let depth = engine.capabilities().depth;
        let bytes = random.bytes(depth * BLOCK);
        let file = subject.files.with_bytes(&bytes);
        for round in 0..5 {
            let mut target = buffer(depth * BLOCK);
            let mut expected = BTreeSet::new();
            for block in (0..depth).rev() {
                let token = block * 31 + round;
                expected.insert(token);
                let part = target.region(block * BLOCK..(block + 1) * BLOCK).expect("free");
                submit(engine, request(token, Direction::Read, &file, (block * BLOCK) as u64, vec![part]));
            }
            let done = drain(engine);
            assert_eq!(done.len(), depth);
            for completion in done {
                let token = completion.request.token;
                assert!(expected.remove(&token), "token {token} comes back once, in round {round}");
                assert_eq!(completion.request.offset, ((token - round) / 31 * BLOCK) as u64, "with its own request");
                assert_eq!(completion.result.expect("nothing is wrong with the file"), BLOCK as u64);
            }
            assert!(target.bytes().expect("all claims are back") == bytes, "every request filled its own memory");
        }
    });
    Outcome::Passed
}

/// A request of whole blocks.
fn aligned(mut request: Request, alignment: Alignment) -> Request {
    request.alignment = alignment;
    request
}

pub(super) fn direct_blocks(subject: &Subject<'_>) -> Outcome {
    let block = Alignment::PAGE.bytes().try_into().unwrap_or(4096_usize);
    let mut bytes = Random::new(SEED).bytes(8 * block);
    let Some((file, rules)) = subject.files.direct(&bytes) else { return Outcome::Skipped("the filesystem refuses O_DIRECT") };
    assert!(Alignment::PAGE.divides(rules.memory.bytes()) || rules.memory <= Alignment::PAGE, "{rules:?}");
    subject.with_engine(|engine| {
        let mut pages = HostBuffer::new(3 * block).expect("memory");
        pages.bytes_mut().expect("free").copy_from_slice(&Random::new(SEED + 1).bytes(3 * block));
        bytes[2 * block..5 * block].copy_from_slice(pages.bytes().expect("free"));
        let parts = vec![pages.source(0..block).expect("free"), pages.source(block..3 * block).expect("free")];
        let write = aligned(request(1, Direction::Write, &file, 2 * block as u64, parts), rules.offset);
        assert_eq!(perform(engine, write).result.expect("aligned"), 3 * block as u64);

        let mut target = HostBuffer::new(8 * block).expect("memory");
        let whole = region(&mut target, 8 * block);
        let parts = vec![whole.slice(0..2 * block), whole.slice(2 * block..8 * block)];
        drop(whole);
        let read = perform(engine, aligned(request(2, Direction::Read, &file, 0, parts), rules.offset));
        assert_eq!(read.result.expect("aligned"), 8 * block as u64);
        drop(read.request);
        assert!(target.bytes().expect("all claims are back") == bytes);
    });
    Outcome::Passed
}

pub(super) fn misaligned(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(SEED).bytes(3 * 4096);
    let Some((file, _)) = subject.files.direct(&bytes) else { return Outcome::Skipped("the filesystem refuses O_DIRECT") };
    subject.with_engine(|engine| {
        for (offset, len) in [(1, 4096), (0, 100), (4096, 4097)] {
            let mut target = buffer(8192);
            let part = region(&mut target, len);
            let completion = perform(engine, request(3, Direction::Read, &file, offset as u64, vec![part]));
            drop(completion.request);
            match completion.result {
                // Some filesystems go through the page cache rather than refuse.
                Ok(moved) => {
                    assert_eq!(moved, len as u64);
                    assert!(target.bytes().expect("free")[..len] == bytes[offset..offset + len]);
                }
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{len} bytes at {offset}"),
            }
        }
    });
    Outcome::Passed
}
