//! Full queues, empty queues, and sleep.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use thruway::io::{Direction, Wait};

use super::{Outcome, SlowFile, Subject, buffer, drain, region, request, submit};

const DELAY: Duration = Duration::from_millis(300);
/// What a thread may use of that time: it is to sleep through nearly all of it.
const CPU_MAX: Duration = Duration::from_millis(30);

pub(super) fn full_queue(subject: &Subject<'_>) -> Outcome {
    let file = subject.files.with_bytes(&[5; 4096]);
    subject.with_engine(|engine| {
        let depth = engine.capabilities().depth;
        let mut target = buffer(depth + 2);
        let mut part = |at: usize| target.region(at..at + 1).expect("free");
        for token in 0..depth {
            submit(engine, request(token, Direction::Read, &file, token as u64 % 4096, vec![part(token)]));
        }
        let back = engine.submit(request(9999, Direction::Read, &file, 17, vec![part(depth)])).expect_err("the queue is full");
        assert_eq!((back.token, back.offset, back.segments.len()), (9999, 17, 1), "it is the very request");
        assert_eq!(engine.in_flight(), depth, "a refused request is not in flight");
        let mut done = Vec::new();
        engine.complete(&mut done, Wait::ForOne).expect("the mechanism works");
        assert_eq!(engine.in_flight(), depth - done.len());
        assert!(engine.submit(*back).is_ok(), "there is room again");
        done.extend(drain(engine));
        assert_eq!(done.len(), depth + 1);
    });
    Outcome::Passed
}

pub(super) fn nothing_in_flight(subject: &Subject<'_>) -> Outcome {
    let file = subject.files.with_bytes(&[5; 10]);
    subject.with_engine(|engine| {
        for round in 0..2 {
            for wait in [Wait::No, Wait::ForOne] {
                let mut done = Vec::new();
                engine.complete(&mut done, wait).expect("nothing can go wrong");
                assert!(done.is_empty() && engine.in_flight() == 0, "{wait:?} in round {round}");
            }
            let mut target = buffer(10);
            let part = region(&mut target, 10);
            submit(engine, request(1, Direction::Read, &file, 0, vec![part]));
            assert_eq!(drain(engine).len(), 1);
        }
    });
    Outcome::Passed
}

pub(super) fn appends(subject: &Subject<'_>) -> Outcome {
    let file = subject.files.with_bytes(&[5; 10]);
    subject.with_engine(|engine| {
        let mut done = Vec::new();
        for token in 0..3 {
            let mut target = buffer(10);
            let part = region(&mut target, 10);
            submit(engine, request(token, Direction::Read, &file, 0, vec![part]));
            engine.complete(&mut done, Wait::ForOne).expect("the mechanism works");
            let tokens: Vec<usize> = done.iter().map(|completion| completion.request.token).collect();
            assert_eq!(tokens, (0..=token).collect::<Vec<usize>>(), "waiting for one waits, whatever was there before");
        }
    });
    Outcome::Passed
}

pub(super) fn no_wait(subject: &Subject<'_>) -> Outcome {
    let Some(SlowFile { file, release }) = subject.files.slow((subject.make)().name()) else {
        return Outcome::Skipped("nothing is slow in memory");
    };
    subject.with_engine(|engine| {
        let mut target = buffer(SlowFile::BYTES);
        let part = region(&mut target, SlowFile::BYTES);
        submit(engine, request(1, Direction::Read, &file, 0, vec![part]));
        let mut done = Vec::new();
        for _ in 0..100 {
            engine.complete(&mut done, Wait::No).expect("the mechanism works");
        }
        assert!(done.is_empty() && engine.in_flight() == 1);
        release();
        assert_eq!(drain(engine).len(), 1);
    });
    Outcome::Passed
}

/// The CPU time of the calling thread.
fn thread_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to the structure that it is given, which lives through it.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every Linux has this clock");
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

pub(super) fn sleeps(subject: &Subject<'_>) -> Outcome {
    let Some(SlowFile { file, release }) = subject.files.slow((subject.make)().name()) else {
        return Outcome::Skipped("nothing is slow in memory");
    };
    subject.with_engine(|engine| {
        let mut target = buffer(SlowFile::BYTES);
        let part = region(&mut target, SlowFile::BYTES);
        submit(engine, request(1, Direction::Read, &file, 0, vec![part]));
        let releaser = std::thread::spawn(move || {
            std::thread::sleep(DELAY);
            release();
        });
        let (started, cpu_started) = (Instant::now(), thread_cpu());
        assert_eq!(drain(engine).remove(0).result.expect("it was released"), SlowFile::BYTES as u64);
        let (elapsed, cpu) = (started.elapsed(), thread_cpu() - cpu_started);
        releaser.join().expect("it only releases");
        assert!(elapsed > DELAY / 2, "the request took only {elapsed:?}: it was not slow");
        assert!(cpu < CPU_MAX, "waiting {elapsed:?} took {cpu:?} of CPU time");
    });
    Outcome::Passed
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// Lets `SIGUSR2` interrupt system calls and do nothing else.
fn interruptible() {
    // SAFETY: an all-zero `sigaction` is a valid one: no flags (so that system calls are not restarted), empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the handler does nothing, so it may run at any time; the structure lives through the call.
    let result = unsafe { libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()) };
    assert_eq!(result, 0);
}

pub(super) fn signal(subject: &Subject<'_>) -> Outcome {
    let Some(SlowFile { file, release }) = subject.files.slow((subject.make)().name()) else {
        return Outcome::Skipped("nothing is slow in memory");
    };
    interruptible();
    subject.with_engine(|engine| {
        let mut target = buffer(SlowFile::BYTES);
        let part = region(&mut target, SlowFile::BYTES);
        submit(engine, request(1, Direction::Read, &file, 0, vec![part]));
        // SAFETY: it only tells who is calling.
        let waiter = unsafe { libc::pthread_self() };
        let (finished, is_finished) = channel::<()>();
        let signaller = std::thread::spawn(move || {
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(20));
                // SAFETY: the waiting thread lives until this one is joined, below.
                let result = unsafe { libc::pthread_kill(waiter, libc::SIGUSR2) };
                assert_eq!(result, 0);
            }
            release();
            // Should the waiting have failed, the other end is gone; then there is nothing to wait for either.
            is_finished.recv().ok();
        });
        let mut done = Vec::new();
        let outcome = engine.complete(&mut done, Wait::ForOne);
        drop(finished);
        signaller.join().expect("it only signals");
        outcome.expect("a signal is no failure of the mechanism");
        assert_eq!(done.len(), 1, "waiting for one waits, signal or not");
        assert_eq!(done.remove(0).result.expect("it was released"), SlowFile::BYTES as u64);
    });
    Outcome::Passed
}
