//! Whole transfers from engines that may do less: the one place where short I/O is resumed, where `EINTR` and
//! `EAGAIN` are tried again, and where the end of a file becomes an error.

use std::collections::HashMap;

use crate::base::Result;
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};
use crate::memory::Region;

/// How often in a row a request may make no progress (`EINTR`, `EAGAIN`, a fragment of a block) before that is
/// taken for an error. A drive or a signal storm that does this more often will not stop.
const FRUITLESS_MAX: u32 = 100;

/// An engine that completes a request whole, or with an error.
#[derive(Debug)]
pub struct Exact<E> {
    inner: E,
    /// The requests that are in flight with only their rest, by token.
    resumed: HashMap<usize, Progress>,
    /// What could not be submitted again at once.
    waiting: Vec<Request>,
    retries: u64,
}

/// What is known of a request that did not finish at the first attempt.
#[derive(Debug)]
struct Progress {
    segments: Vec<Region>,
    offset: u64,
    needed: u64,
    /// The bytes that are transferred, a multiple of the alignment.
    moved: u64,
    fruitless: u32,
}

impl<E: Engine> Exact<E> {
    /// Wraps an engine. Tokens in flight must differ from one another.
    pub fn new(inner: E) -> Self {
        Self { inner, resumed: HashMap::new(), waiting: Vec::new(), retries: 0 }
    }

    /// Decides what a completion from below means. `Some` if the request is done, one way or the other.
    fn settle(&mut self, completion: Completion) -> Option<Completion> {
        let Completion { mut request, result } = completion;
        let before = self.resumed.get(&request.token).map_or(0, |progress| progress.moved);
        let moved = match &result {
            Ok(bytes) => before + bytes,
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => before,
            Err(_) => return Some(self.finish(request, result)),
        };
        let needed = self.resumed.get(&request.token).map_or(request.needed, |progress| progress.needed);
        if moved >= needed {
            return Some(self.finish(request, Ok(needed)));
        }
        if matches!(result, Ok(0)) {
            let end = match request.direction {
                Direction::Read => std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the file ends here"),
                Direction::Write => std::io::Error::new(std::io::ErrorKind::WriteZero, "nothing more can be written here"),
            };
            return Some(self.finish(request, Err(end)));
        }
        let Request { offset, ref mut segments, alignment, .. } = request;
        let progress = self.resumed.entry(request.token).or_insert_with(|| Progress {
            segments: std::mem::take(segments),
            offset,
            needed,
            moved: 0,
            fruitless: 0,
        });
        // Past the page cache the rest must begin on a block, so a fragment of one is transferred again.
        let kept = alignment.down(moved);
        if kept == progress.moved && result.is_ok() && ends_within(&request) {
            let end = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "the file ends within this block");
            return Some(self.finish(request, Err(end)));
        }
        progress.fruitless = if kept > progress.moved { 0 } else { progress.fruitless + 1 };
        progress.moved = kept;
        if progress.fruitless > FRUITLESS_MAX {
            let error = result.err().unwrap_or_else(|| std::io::Error::other("the file gives less than a block at a time"));
            return Some(self.finish(request, Err(error)));
        }
        request.segments = rest_of(&progress.segments, kept);
        request.offset = progress.offset + kept;
        request.needed = progress.needed - kept;
        self.retries += 1;
        self.waiting.push(request);
        None
    }

    /// The completion of a request, in the form in which it was submitted.
    fn finish(&mut self, mut request: Request, result: std::io::Result<u64>) -> Completion {
        if let Some(progress) = self.resumed.remove(&request.token) {
            request.segments = progress.segments;
            request.offset = progress.offset;
            request.needed = progress.needed;
        }
        Completion { request, result }
    }

    fn submit_waiting(&mut self) {
        while let Some(request) = self.waiting.pop() {
            if let Err(request) = self.inner.submit(request) {
                self.waiting.push(*request);
                return;
            }
        }
    }
}

/// Whether a read gives only a fragment of a block because the file ends there: it would do so every time.
fn ends_within(request: &Request) -> bool {
    let end = request.offset + request.needed;
    request.direction == Direction::Read && request.file.identity().is_ok_and(|identity| identity.length < end)
}

/// What is left of `segments` after the first `skip` bytes.
fn rest_of(segments: &[Region], skip: u64) -> Vec<Region> {
    let mut skip = usize::try_from(skip).unwrap_or(usize::MAX);
    let mut rest = Vec::new();
    for segment in segments {
        let cut = skip.min(segment.len());
        skip -= cut;
        if cut < segment.len() {
            rest.push(segment.slice(cut..segment.len()));
        }
    }
    rest
}

impl<E: Engine> Engine for Exact<E> {
    fn name(&self) -> EngineName {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        if self.waiting.is_empty() { self.inner.submit(request) } else { Err(Box::new(request)) }
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        let before = done.len();
        loop {
            let mut arrived = Vec::new();
            self.inner.complete(&mut arrived, wait)?;
            let nothing_arrived = arrived.is_empty();
            done.extend(arrived.into_iter().filter_map(|completion| self.settle(completion)).collect::<Vec<_>>());
            self.submit_waiting();
            if wait == Wait::No || done.len() > before || nothing_arrived {
                return Ok(());
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.waiting.len()
    }

    fn retries(&self) -> u64 {
        self.retries
    }
}
