//! The engine contract as a suite: every clause of [`thruway::io`] is one or more checks here, and every engine runs
//! all of them, bare and under each layer.
//!
//! ```no_run
//! use thruway::io::engine::InMemory;
//! use thruway_testkit::conformance::{Layering, SimFiles, run};
//!
//! run(&|| Box::new(InMemory::new(8, 1)), &SimFiles::default(), Layering::Bare);
//! ```
//!
//! A check that fails does not stop the others: [`run`] panics at the end with the names of all that failed.

mod claims;
mod exact;
mod files;
mod results;
mod transfers;
mod waiting;

pub use files::{OsFiles, Refused, SimFiles, SlowFile, TestFiles};

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use thruway::io::layer::{Exact, FaultPlan, Faulty, Monitored};
use thruway::io::policy::Source;
use thruway::io::{Completion, Direction, Engine, EngineFactory, EnginePool, Made, Request, Wait};
use thruway::storage::File;
use thruway::telemetry::Counters;
use thruway::{Alignment, HostBuffer, Region};

/// What lies over the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layering {
    /// Nothing.
    Bare,
    /// [`Exact`].
    Exact,
    /// [`Monitored`].
    Monitored,
    /// [`Faulty`] without a fault.
    Faulty,
    /// Everything that an [`EnginePool`] puts there.
    Stack,
}

impl Layering {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Bare, Self::Exact, Self::Monitored, Self::Faulty, Self::Stack];

    /// Whether requests are completed whole or with an error.
    fn is_exact(self) -> bool {
        matches!(self, Self::Exact | Self::Stack)
    }
}

/// What is examined.
struct Subject<'a> {
    make: &'a dyn Fn() -> Box<dyn Engine>,
    files: &'a dyn TestFiles,
    layering: Layering,
}

impl Subject<'_> {
    /// Lends a new engine with its layers to `body`, then drops it.
    fn with_engine<T>(&self, body: impl FnOnce(&mut dyn Engine) -> T) -> T {
        self.over((self.make)(), body)
    }

    /// The same with faults right above the engine, below all layers.
    fn with_faults<T>(&self, plan: FaultPlan, body: impl FnOnce(&mut dyn Engine) -> T) -> T {
        self.over(Box::new(Faulty::new((self.make)(), plan)), body)
    }

    fn over<T>(&self, lowest: Box<dyn Engine>, body: impl FnOnce(&mut dyn Engine) -> T) -> T {
        let counters = Arc::new(Counters::default());
        match self.layering {
            Layering::Bare => body(&mut { lowest }),
            Layering::Exact => body(&mut Exact::new(lowest)),
            Layering::Monitored => body(&mut Monitored::new(lowest, counters)),
            Layering::Faulty => body(&mut Faulty::new(lowest, FaultPlan::default())),
            Layering::Stack => {
                let pool = EnginePool::new(Box::new(Once(Mutex::new(Some(lowest)))), counters);
                let mut pooled = pool.take(Source::Drive).expect("the factory has one engine");
                body(&mut *pooled)
            }
        }
    }
}

/// A factory of one engine.
#[derive(Debug)]
struct Once(Mutex<Option<Box<dyn Engine>>>);

impl EngineFactory for Once {
    fn make(&self, _source: Source) -> thruway::Result<Made> {
        let engine = self.0.lock().unwrap_or_else(PoisonError::into_inner).take().expect("one engine is asked for");
        Ok(Made { engine, note: None })
    }
}

/// What came of a check that did not fail.
enum Outcome {
    Passed,
    /// Why it could not be made.
    Skipped(&'static str),
}

type Check = fn(&Subject<'_>) -> Outcome;

/// Every check, with the clause of the contract that it belongs to.
const CHECKS: &[(u8, &str, Check)] = &[
    (1, "memory and file are held until the request is handed back", claims::held_until_handed_back),
    (1, "dropping an engine waits for a slow request", claims::dropping_waits_for_a_slow_request),
    (1, "dropping an engine with its queue full leaves the memory alone from then on", claims::dropping_a_full_queue),
    (2, "a request may have as many segments as the capabilities say", transfers::segments_max),
    (2, "a request of several mebibytes is one request", transfers::several_mebibytes),
    (2, "what is not aligned as a direct file demands is refused and not repaired", transfers::misaligned),
    (2, "whole blocks of a direct file are read and written", transfers::direct_blocks),
    (3, "bytes come back from odd offsets whatever the segments", transfers::round_trip),
    (3, "a request without a byte succeeds with none", transfers::nothing_asked),
    (3, "a read across the end of the file tells how much there was", results::across_the_end),
    (3, "a direct read of the last block needs only what the file holds of it", results::last_block),
    (3, "a short transfer is resumed by Exact alone, on a block, and counted", exact::short_transfers),
    (3, "what EINTR and EAGAIN interrupt is resumed by Exact alone, and counted", exact::interruptions),
    (3, "attempts that lead nowhere end in the error", exact::fruitless),
    (3, "an error after some bytes is the error", exact::error_after_progress),
    (4, "a read past the end of the file gives no byte, or UnexpectedEof", results::past_the_end),
    (4, "a file that ends within a block ends", results::ends_within_a_block),
    (5, "errors carry the system's number and hand the request back", results::errors),
    (6, "a full queue hands the request back", waiting::full_queue),
    (6, "completing nothing returns at once", waiting::nothing_in_flight),
    (6, "completing without waiting does not wait", waiting::no_wait),
    (6, "waiting costs no CPU time", waiting::sleeps),
    (6, "a signal does not end the waiting", waiting::signal),
    (7, "many requests come back once each, with their tokens", transfers::many_in_flight),
    (7, "completions are appended to those that are there", waiting::appends),
];

/// Examines an engine under some layers. Prints what is skipped and why.
///
/// # Panics
/// If a check fails, after all of them were made.
pub fn run(make: &dyn Fn() -> Box<dyn Engine>, files: &dyn TestFiles, layering: Layering) {
    let subject = Subject { make, files, layering };
    let mut failed = Vec::new();
    let name = subject.with_engine(|engine| engine.name());
    let bare = make().capabilities();
    assert_eq!(subject.with_engine(|engine| engine.capabilities()), bare, "layers add nothing and take nothing away");
    for (clause, sentence, check) in CHECKS {
        match catch_unwind(AssertUnwindSafe(|| check(&subject))) {
            Ok(Outcome::Passed) => {}
            Ok(Outcome::Skipped(reason)) => println!("{name}, {layering:?}: clause {clause} not checked: {sentence}: {reason}"),
            Err(_) => failed.push(format!("clause {clause}: {sentence}")),
        }
    }
    assert!(
        failed.is_empty(),
        "{name}, {layering:?}: {} of {} checks failed:\n  {}",
        failed.len(),
        CHECKS.len(),
        failed.join("\n  ")
    );
}

/// Gives zeroed buffers of so many bytes.
pub type MemorySource = Box<dyn Fn(usize) -> HostBuffer>;

thread_local! {
    /// Where the checks' buffers come from, if not from the host's memory.
    static MEMORY: RefCell<Option<MemorySource>> = const { RefCell::new(None) };
}

/// Examines an engine as [`run`] does, on memory from `memory`: what lies in a device, say, and is mapped.
///
/// # Panics
/// As [`run`].
pub fn run_in(memory: MemorySource, make: &dyn Fn() -> Box<dyn Engine>, files: &dyn TestFiles, layering: Layering) {
    MEMORY.set(Some(memory));
    run(make, files, layering);
    MEMORY.set(None);
}

/// A request as the checks make it: everything that is asked for is needed.
fn request(token: usize, direction: Direction, file: &Arc<dyn File>, offset: u64, segments: Vec<Region>) -> Request {
    let needed = segments.iter().map(|segment| segment.len() as u64).sum();
    Request { token, direction, file: Arc::clone(file), offset, segments, needed, alignment: Alignment::ONE }
}

/// Submits a request that must be accepted.
fn submit(engine: &mut dyn Engine, request: Request) {
    let before = engine.in_flight();
    assert!(engine.submit(request).is_ok(), "a request below the depth is accepted");
    assert_eq!(engine.in_flight(), before + 1);
}

/// Everything in flight, completed.
fn drain(engine: &mut dyn Engine) -> Vec<Completion> {
    let mut done = Vec::new();
    while engine.in_flight() > 0 {
        let before = done.len();
        engine.complete(&mut done, Wait::ForOne).expect("the mechanism works");
        assert!(done.len() > before, "waiting for one gives at least one");
    }
    done
}

/// One request, completed.
fn perform(engine: &mut dyn Engine, request: Request) -> Completion {
    submit(engine, request);
    let mut done = drain(engine);
    assert_eq!(done.len(), 1, "one request, one completion");
    done.remove(0)
}

/// The first bytes of a buffer as a destination.
fn region(buffer: &mut HostBuffer, len: usize) -> Region {
    buffer.region(0..len).expect("the buffer is free")
}

fn buffer(len: usize) -> HostBuffer {
    MEMORY.with_borrow(|memory| match memory {
        Some(memory) => memory(len),
        None => HostBuffer::new(len).expect("memory"),
    })
}

fn filled(bytes: Vec<u8>) -> HostBuffer {
    if MEMORY.with_borrow(Option::is_none) {
        return HostBuffer::from_vec(bytes);
    }
    let mut buffer = buffer(bytes.len());
    buffer.bytes_mut().expect("nothing else has it yet").copy_from_slice(&bytes);
    buffer
}

/// The bytes of a page-cached file, read past any engine.
fn contents(file: &dyn File, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut at = 0;
    while at < len {
        match file.read_at(&mut bytes[at..], at as u64).expect("the file can be read") {
            0 => break,
            count => at += count,
        }
    }
    bytes.truncate(at);
    bytes
}

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }
}

impl fmt::Debug for SlowFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlowFile({:?})", self.file)
    }
}
