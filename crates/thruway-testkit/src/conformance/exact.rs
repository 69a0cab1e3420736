//! What only `Exact` does: whole transfers from engines that do less.

use std::sync::{Arc, Mutex, PoisonError};

use thruway::io::layer::{Exact, Fault, FaultPlan, Faulty};
use thruway::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};
use thruway::storage::File;
use thruway::{Alignment, HostBuffer, Region};

use super::{Outcome, Subject, buffer, contents, filled, perform, region, request};
use crate::random::Random;

/// How often a request may make no progress. One time more is an error.
const FRUITLESS_MAX: u64 = 100;

/// An engine that remembers the place of everything that it was asked for.
#[derive(Debug)]
struct Watched {
    inner: Box<dyn Engine>,
    seen: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl Engine for Watched {
    fn name(&self) -> EngineName {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).push((request.offset, request.length()));
        self.inner.submit(request)
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> thruway::Result<()> {
        self.inner.complete(done, wait)
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// One transfer by `Exact` over faults: how it ended, how often something was tried again, and what was asked for.
struct Trial {
    result: std::io::Result<u64>,
    retries: u64,
    seen: Vec<(u64, u64)>,
}

fn trial(subject: &Subject<'_>, plan: FaultPlan, request: Request) -> Trial {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let watched = Watched { inner: Box::new(Faulty::new((subject.make)(), plan)), seen: Arc::clone(&seen) };
    let mut engine = Exact::new(watched);
    let (token, offset, lengths) = (request.token, request.offset, lengths(&request));
    let needed = request.needed;
    let completion = perform(&mut engine, request);
    let back = &completion.request;
    let expected = (token, offset, lengths, needed);
    assert_eq!((back.token, back.offset, self::lengths(back), back.needed), expected, "handed back as submitted");
    let retries = engine.retries();
    let seen = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    Trial { result: completion.result, retries, seen }
}

fn lengths(request: &Request) -> Vec<usize> {
    request.segments.iter().map(Region::len).collect()
}

const LEN: usize = 5 * 4096;

/// A read of five blocks into three segments.
fn read(file: &Arc<dyn File>, target: &mut HostBuffer, alignment: Alignment) -> Request {
    let whole = region(target, LEN);
    let parts = vec![whole.slice(0..4096), whole.slice(4096..3 * 4096), whole.slice(3 * 4096..LEN)];
    Request { alignment, ..request(5, Direction::Read, file, 4096, parts) }
}

fn plan(faults: &[Fault]) -> FaultPlan {
    (0..).zip(faults).fold(FaultPlan::default(), |plan, (at, fault)| plan.and(at, *fault))
}

pub(super) fn short_transfers(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(21).bytes(8 * 4096);
    let mut cases: Vec<(Arc<dyn File>, Alignment)> =
        vec![(subject.files.with_bytes(&bytes), Alignment::ONE), (subject.files.with_bytes(&bytes), Alignment::PAGE)];
    cases.extend(subject.files.direct(&bytes).map(|(file, rules)| (file, rules.offset)));
    for (file, alignment) in cases {
        // Some cut within a block, twice at the same place; one ends on a block; one gives less than a block.
        let faults = [5000, 100, 4096, 1, 4097].map(Fault::Short);
        let mut target = buffer(LEN);
        let Trial { result, retries, seen } = trial(subject, plan(&faults), read(&file, &mut target, alignment));
        assert_eq!(result.expect("Exact resumes"), LEN as u64);
        assert!(target.bytes().expect("all claims are back") == &bytes[4096..4096 + LEN], "{alignment:?}");
        assert_eq!((retries, seen.len()), (5, 6), "each short transfer is one more attempt, {alignment:?}");
        for (offset, length) in seen {
            assert!(alignment.divides(offset) && alignment.divides(length), "{length} bytes at {offset} for {alignment:?}");
            assert_eq!(offset + length, (4096 + LEN) as u64, "an attempt asks for the whole rest");
        }
    }
    only_exact_resumes(subject, Fault::Short(5000), &bytes);
    writes_are_resumed(subject);
    Outcome::Passed
}

fn writes_are_resumed(subject: &Subject<'_>) {
    let bytes = Random::new(22).bytes(LEN);
    let file = subject.files.with_bytes(&vec![0; LEN + 7]);
    let source = filled(bytes.clone());
    let part = source.source(0..LEN).expect("free");
    let faults = [Fault::Short(1), Fault::Errno(libc::EINTR), Fault::Short(9000)];
    let write = request(6, Direction::Write, &file, 7, vec![part]);
    let Trial { result, retries, .. } = trial(subject, plan(&faults), write);
    assert_eq!((result.expect("Exact resumes"), retries), (LEN as u64, 3));
    assert!(contents(&*file, LEN + 7) == [vec![0; 7], bytes].concat());
}

/// Checks a fault of the first operation against the layers of the subject: below `Exact` it shows, above it does not.
fn only_exact_resumes(subject: &Subject<'_>, fault: Fault, bytes: &[u8]) {
    let file = subject.files.with_bytes(bytes);
    let mut target = buffer(LEN);
    let asked = read(&file, &mut target, Alignment::ONE);
    let (result, retries) =
        subject.with_faults(FaultPlan::single(0, fault), |engine| (perform(engine, asked).result, engine.retries()));
    if subject.layering.is_exact() {
        assert_eq!((result.expect("Exact resumes"), retries), (LEN as u64, 1));
        assert!(target.bytes().expect("all claims are back") == &bytes[4096..4096 + LEN]);
        return;
    }
    assert_eq!(retries, 0, "only Exact tries again");
    match fault {
        Fault::Short(most) => assert_eq!(result.expect("short is no error"), most),
        Fault::Errno(errno) => assert_eq!(result.expect_err("the fault").raw_os_error(), Some(errno)),
        Fault::Hook => unreachable!("no check uses it"),
    }
}

pub(super) fn interruptions(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(23).bytes(8 * 4096);
    for errno in [libc::EINTR, libc::EAGAIN] {
        let file = subject.files.with_bytes(&bytes);
        let mut target = buffer(LEN);
        let faults = [Fault::Errno(errno), Fault::Errno(errno), Fault::Short(300), Fault::Errno(errno)];
        let Trial { result, retries, seen } = trial(subject, plan(&faults), read(&file, &mut target, Alignment::ONE));
        assert_eq!((result.expect("Exact resumes"), retries), (LEN as u64, 4), "error number {errno}");
        let offsets: Vec<u64> = seen.iter().map(|(offset, _)| *offset).collect();
        assert_eq!(offsets, [4096, 4096, 4096, 4396, 4396], "what has arrived is not asked for again");
        assert!(target.bytes().expect("all claims are back") == &bytes[4096..4096 + LEN]);
        only_exact_resumes(subject, Fault::Errno(errno), &bytes);
    }
    Outcome::Passed
}

pub(super) fn fruitless(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(24).bytes(8 * 4096);
    let file = subject.files.with_bytes(&bytes);
    let endless = |fault: Fault, count: u64| (0..count).fold(FaultPlan::default(), |plan, at| plan.and(at, fault));
    // (fault, what it ends with): a fragment of a block is as fruitless as an interruption.
    for (fault, errno) in [
        (Fault::Errno(libc::EINTR), Some(libc::EINTR)),
        (Fault::Errno(libc::EAGAIN), Some(libc::EAGAIN)),
        (Fault::Short(100), None),
    ] {
        let mut target = buffer(LEN);
        let most = trial(subject, endless(fault, FRUITLESS_MAX), read(&file, &mut target, Alignment::PAGE));
        assert_eq!((most.result.expect("not yet too often"), most.retries), (LEN as u64, FRUITLESS_MAX), "{fault:?}");
        assert!(target.bytes().expect("all claims are back") == &bytes[4096..4096 + LEN], "{fault:?}");
        let more = trial(subject, endless(fault, FRUITLESS_MAX + 1), read(&file, &mut target, Alignment::PAGE));
        let error = more.result.expect_err("too often");
        assert_eq!((error.raw_os_error(), more.retries), (errno, FRUITLESS_MAX), "{fault:?}");
        assert_ne!(error.kind(), std::io::ErrorKind::UnexpectedEof, "the file goes on");
        assert!(target.bytes().is_ok(), "all claims are back");
    }
    Outcome::Passed
}

pub(super) fn error_after_progress(subject: &Subject<'_>) -> Outcome {
    let bytes = Random::new(25).bytes(8 * 4096);
    for errno in [libc::EIO, libc::ENOSPC, libc::EINVAL] {
        let file = subject.files.with_bytes(&bytes);
        let mut target = buffer(LEN);
        let faults = [Fault::Short(4500), Fault::Errno(errno)];
        let Trial { result, retries, .. } = trial(subject, plan(&faults), read(&file, &mut target, Alignment::ONE));
        assert_eq!(result.expect_err("the second attempt failed").raw_os_error(), Some(errno));
        assert_eq!(retries, 1, "error number {errno} is not tried again");
        assert!(target.bytes().is_ok(), "all claims are back");
    }
    Outcome::Passed
}
