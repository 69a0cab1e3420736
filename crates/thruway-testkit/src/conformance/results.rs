//! What a completion says: bytes, the end of the file, errors.

use thruway::Alignment;
use thruway::io::Direction;

use super::{Outcome, Subject, buffer, filled, perform, region, request};
use crate::random::Random;

pub(super) fn across_the_end(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(3).bytes(1000);
    let file = subject.files.with_bytes(&bytes);
    subject.with_engine(|engine| {
        let mut target = buffer(600);
        let whole = region(&mut target, 600);
        let parts = vec![whole.slice(0..150), whole.slice(150..600)];
        drop(whole);
        let completion = perform(engine, request(1, Direction::Read, &file, 700, parts));
        assert_eq!((completion.request.segments.len(), completion.request.length()), (2, 600), "handed back as submitted");
        match completion.result {
            Ok(moved) => {
                assert!(!subject.layering.is_exact(), "Exact does not take less than is needed");
                assert_eq!(moved, 300);
            }
            Err(error) => {
                assert!(subject.layering.is_exact(), "a short read is no error: {error}");
                assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
            }
        }
        drop(completion.request);
        let found = target.bytes().expect("all claims are back");
        assert!(found[..300] == bytes[700..] && found[300..] == [0; 300], "what there was is there and nothing else");
    });
    Outcome::Passed
}

pub(super) fn past_the_end(subject: &Subject<'_>) -> Outcome {
    let file = subject.files.with_bytes(&[7; 1000]);
    subject.with_engine(|engine| {
        for offset in [1000, 1001, 1 << 40] {
            let mut target = buffer(10);
            let part = region(&mut target, 10);
            let completion = perform(engine, request(1, Direction::Read, &file, offset, vec![part]));
            drop(completion.request);
            match completion.result {
                Ok(moved) => assert!(moved == 0 && !subject.layering.is_exact(), "{moved} bytes at {offset}"),
                Err(error) => {
                    let expected = error.kind() == std::io::ErrorKind::UnexpectedEof && subject.layering.is_exact();
                    assert!(expected, "at {offset}: {error}");
                }
            }
            assert_eq!(target.bytes().expect("all claims are back"), [0; 10]);
        }
    });
    Outcome::Passed
}

pub(super) fn last_block(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(4).bytes(2 * 4096 + 100);
    let Some((file, rules)) = subject.files.direct(&bytes) else { return Outcome::Skipped("the filesystem refuses O_DIRECT") };
    subject.with_engine(|engine| {
        let mut target = buffer(2 * 4096);
        let part = region(&mut target, 2 * 4096);
        let mut read = request(1, Direction::Read, &file, 4096, vec![part]);
        read.needed = 4096 + 100;
        read.alignment = rules.offset;
        let completion = perform(engine, read);
        assert_eq!(completion.result.expect("all that is needed is there"), 4096 + 100);
        drop(completion.request);
        assert!(target.bytes().expect("all claims are back")[..4196] == bytes[4096..]);
    });
    Outcome::Passed
}

pub(super) fn ends_within_a_block(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(5).bytes(4096 + 100);
    let Some((file, rules)) = subject.files.direct(&bytes) else { return Outcome::Skipped("the filesystem refuses O_DIRECT") };
    subject.with_engine(|engine| {
        // The file was longer when the request was planned: all of the second block is needed.
        let mut target = buffer(2 * 4096);
        let part = region(&mut target, 2 * 4096);
        let mut read = request(1, Direction::Read, &file, 0, vec![part]);
        read.alignment = rules.offset;
        match perform(engine, read).result {
            Ok(moved) => assert!(moved == 4196 && !subject.layering.is_exact(), "{moved} bytes"),
            Err(error) => {
                let expected = error.kind() == std::io::ErrorKind::UnexpectedEof && subject.layering.is_exact();
                assert!(expected, "{error}");
            }
        }
    });
    Outcome::Passed
}

pub(super) fn errors(subject: &Subject<'_>) -> Outcome {
    subject.with_engine(|engine| {
        for refused in subject.files.refused() {
            let mut memory = filled(vec![8; 4096]);
            let whole = match refused.direction {
                Direction::Read => region(&mut memory, 4096),
                Direction::Write => memory.source(0..4096).expect("free"),
            };
            let parts = vec![whole.slice(0..1000), whole.slice(1000..4096)];
            drop(whole);
            let mut failing = request(77, refused.direction, &refused.file, 512, parts);
            failing.alignment = Alignment::ONE;
            let completion = perform(engine, failing);
            let error = completion.result.expect_err(refused.what);
            assert_eq!(error.raw_os_error(), Some(refused.errno), "{}: {error}", refused.what);
            let lengths: Vec<usize> = completion.request.segments.iter().map(thruway::Region::len).collect();
            assert_eq!((completion.request.token, completion.request.offset), (77, 512), "{}", refused.what);
            assert_eq!(lengths, [1000, 3096], "{}", refused.what);
            drop(completion.request.segments);
            assert_eq!(memory.bytes().expect("all claims are back"), [8; 4096], "{}", refused.what);
        }
    });
    Outcome::Passed
}
