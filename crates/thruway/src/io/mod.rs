//! Engines: code that moves bytes between a file and memory by one mechanism.
//!
//! # The contract
//! Every engine and every layer keeps these clauses; the conformance suite of the testkit runs each of them.
//!
//! 1. The caller gives the memory. The engine holds a request's regions and file until it hands the request
//!    back in its completion, whatever happens in between; dropping an engine waits for what the system still works on.
//! 2. An engine does what the request says, once: it neither splits nor stages nor retries. What it cannot do
//!    stands in [`Capabilities`], which the planner reads.
//! 3. A completion carries the bytes transferred, which may be fewer than asked. Only [`layer::Exact`] resumes.
//! 4. A read that finds the end of the file transfers 0 bytes. [`layer::Exact`] turns that into an error of its
//!    own kind (`UnexpectedEof`).
//! 5. Errors are the operating system's numbers, converted once, here; unknown ones are kept.
//! 6. A full queue is a value: [`Engine::submit`] hands the request back. An idle engine sleeps.
//! 7. Requests complete in any order. `token` tells which one it was.
//! 8. A write's success promises nothing about power loss. Durability is asked for by [`crate::storage::File::sync`].

pub mod direct;
#[expect(unsafe_code, reason = "system calls on memory by address are what an engine is for")]
pub mod engine;
pub mod layer;
pub mod policy;
mod pool;
pub mod profile;

pub use pool::{EngineFactory, EnginePool, Made, OsEngines, Pooled};

use std::fmt;
use std::sync::Arc;

use crate::base::{Alignment, Result};
use crate::memory::Region;
use crate::storage::File;

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From storage to memory.
    Read,
    /// From memory to storage.
    Write,
}

/// Which mechanism an engine uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineName {
    /// The kernel's io_uring.
    Uring,
    /// `preadv` and `pwritev` on threads.
    Posix,
    /// The kernel's peer-to-peer DMA.
    P2pDma,
    /// NVIDIA's cuFile.
    CuFile,
    /// A simulated disk in memory, for tests.
    InMemory,
}

impl EngineName {
    /// The name as it stands in receipts and settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Uring => "uring",
            Self::Posix => "posix",
            Self::P2pDma => "p2pdma",
            Self::CuFile => "cufile",
            Self::InMemory => "inmemory",
        }
    }
}

impl fmt::Display for EngineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What an engine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// How many requests may be in flight.
    pub depth: usize,
    /// How many engines of this kind work best side by side, each driven by a thread of its own.
    pub lanes: usize,
    /// How many regions one request may scatter to or gather from.
    pub segments_max: usize,
    /// The most bytes of one request.
    pub request_bytes_max: usize,
}

/// One operation on one file: the bytes from `offset` on, scattered to or gathered from `segments` in order.
#[derive(Debug)]
pub struct Request {
    /// Names the request in its completion; the caller's to choose.
    pub token: usize,
    /// Which way the bytes move.
    pub direction: Direction,
    /// The file, open in the mode that the alignment below needs.
    pub file: Arc<dyn File>,
    /// Where in the file, in bytes.
    pub offset: u64,
    /// The memory, in file order. Empty segments are allowed.
    pub segments: Vec<Region>,
    /// How many bytes must be transferred for success. A direct read of a file's last block asks for the whole
    /// block and needs only what the file holds of it.
    pub needed: u64,
    /// What offset and length are, and on a resumption must stay, multiples of: a block on files opened past
    /// the page cache, else one byte.
    pub alignment: Alignment,
}

impl Request {
    /// The bytes that the segments hold.
    pub fn length(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len() as u64).sum()
    }
}

/// A request handed back, with what became of it.
#[derive(Debug)]
pub struct Completion {
    /// The request as it was submitted.
    pub request: Request,
    /// The bytes transferred, or the operating system's error.
    pub result: std::io::Result<u64>,
}

/// Whether [`Engine::complete`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Take what is done, if anything.
    No,
    /// Sleep until something is done, unless nothing is in flight.
    ForOne,
}

/// Moves bytes by one mechanism. Driven by one thread at a time; see the module's doc for the contract.
pub trait Engine: Send + fmt::Debug {
    /// Which mechanism this is. Layers give that of the engine below.
    fn name(&self) -> EngineName;

    /// What the engine can do.
    fn capabilities(&self) -> Capabilities;

    /// Accepts a request, or hands it back because the queue is full.
    ///
    /// # Errors
    /// The request itself; try again after a completion.
    fn submit(&mut self, request: Request) -> Result<(), Box<Request>>;

    /// Appends what is done to `done`.
    ///
    /// # Errors
    /// Only when the mechanism itself fails; what was in flight is then in an unknown state and stays owned by
    /// the engine.
    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()>;

    /// How many requests are in flight.
    fn in_flight(&self) -> usize;

    /// How often an operation was tried again, since the engine was made. Only [`layer::Exact`] tries again.
    fn retries(&self) -> u64 {
        0
    }
}

impl<E: Engine + ?Sized> Engine for Box<E> {
    fn name(&self) -> EngineName {
        (**self).name()
    }

    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        (**self).submit(request)
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        (**self).complete(done, wait)
    }

    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }

    fn retries(&self) -> u64 {
        (**self).retries()
    }
}
