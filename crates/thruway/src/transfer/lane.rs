//! A lane: one thread that drives one engine through chunks of one storage side.
//!
//! ```text
//! read   chunk ─► engine ─► slot ─copy─► memory        in `requests`, then in `arriving`
//! write  chunk ─► memory ─copy─► slot ─► engine        in `leaving`, then in `requests`
//! ```
//!
//! Chunks that go straight skip the copy. Copies to and from a GPU are queued and done when their fence is, so the
//! engine and the copy engine work at once; copies in host memory are done at once. Whatever holds a slot, a region
//! or a file is kept until the engine and the copy engine are both done with it, and if either fails in a way that leaves
//! that unknown, it is kept for ever.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use super::FileRef;
use super::files::ensure_same;
use super::pipeline::{Outcome, Shared, cancelled};
use super::plan::{self, Chunk, Piece, Placement};
use super::queue::Queue;
use crate::base::{Error, ErrorKind, Processors, Result};
use crate::cuda::Rows;
use crate::io::direct::DirectPath;
use crate::io::policy::{PathPolicy, Source};
use crate::io::{Completion, Direction, Pooled, Request, Wait};
use crate::memory::{Copies, Fence, Region, Slot};
use crate::storage::{Access, File};

/// How many chunks a lane has under way, from the first to the last step of each, whose engine is the CPU: while it fills one
/// slot, a GPU's copy engine empties the other. More only spreads the ring over more memory than the caches hold.
const UNDER_WAY_EACH: usize = 2;

/// A chunk under way.
struct Flight {
    chunk: Chunk,
    slot: Option<Slot>,
}

impl Flight {
    /// Keeps memory and slot for ever: nobody knows what still uses them.
    fn lose(self) {
        Box::leak(Box::new(self.chunk));
        if let Some(slot) = self.slot {
            slot.lose();
        }
    }
}

/// One thread driving one engine.
pub(super) struct Lane<'a, 'b> {
    shared: &'a Shared<'b>,
    source: Source,
    engine: Pooled<'a>,
    queue: &'a Queue,
    next: Option<Chunk>,
    requests: HashMap<usize, Flight>,
    /// What the engine has done and this lane not yet taken: the flights are still in `requests`.
    landed: VecDeque<Completion>,
    /// A file that was found to be the same after all that has landed of it had been read.
    unchanged: Option<usize>,
    arriving: VecDeque<(Fence, Flight)>,
    leaving: VecDeque<(Fence, Request, Flight)>,
    copies: Copies,
    next_token: usize,
    current: Option<(usize, Access, Arc<dyn File>)>,
    note: Option<Arc<str>>,
    outcome: Outcome,
}

impl<'a, 'b> Lane<'a, 'b> {
    /// A lane that will take chunks of one storage side from `queue`.
    pub(super) fn new(shared: &'a Shared<'b>, source: Source, engine: Pooled<'a>, queue: &'a Queue) -> Self {
        let used_before = shared.context.copies.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Self {
            shared,
            source,
            queue,
            next: None,
            requests: HashMap::new(),
            landed: VecDeque::new(),
            unchanged: None,
            arriving: VecDeque::new(),
            leaving: VecDeque::new(),
            copies: used_before.unwrap_or_else(|| Copies::new(shared.context.streams.clone())),
            next_token: 0,
            current: None,
            note: engine.note(),
            engine,
            outcome: Outcome::default(),
        }
    }

    /// Where a thread of its own should run, if that matters.
    pub(super) fn near(&self) -> Option<&'a Processors> {
        self.shared.context.near.as_ref()
    }

    /// Carries out chunks until none is left. Returns when nothing of this lane's moves any more.
    pub(super) fn run(mut self) -> Result<Outcome> {
        let gpu = self.shared.context.streams.as_ref().map(|streams| Arc::clone(streams.gpu()));
        let retries_before = self.engine.retries();
        // Not every driver lets a thread without a current context queue copies, or wait for them.
        let current = gpu.as_ref().map(|gpu| gpu.current()).transpose();
        let (_current, result) = match current {
            Ok(current) => (current, self.drive()),
            Err(error) => (None, Err(error)),
        };
        let drained = if result.is_err() { self.abandon() } else { Ok(()) };
        self.outcome.retries = self.engine.retries() - retries_before;
        if result.is_ok() {
            let copies = std::mem::replace(&mut self.copies, Copies::new(None));
            self.shared.context.copies.lock().unwrap_or_else(PoisonError::into_inner).push(copies);
        }
        result.and(drained).map(|()| std::mem::take(&mut self.outcome))
    }

    /// Works until every chunk is done, or to the first failure.
    fn drive(&mut self) -> Result<()> {
        let mut done = Vec::new();
        loop {
            self.settle()?;
            self.fill()?;
            if self.is_idle() {
                return Ok(());
            }
            if !self.landed.is_empty() {
                // What `fill` started is handed over first, so that the drive has work while this thread copies.
                self.land(&mut done, Wait::No)?;
                if let Some(completion) = self.landed.pop_front() {
                    self.arrive(completion)?;
                }
            } else if self.has_room() && !self.leaving.is_empty() {
                self.leave()?;
            } else if self.requests.is_empty() || self.is_short_of_slots() {
                self.arrived()?;
            } else {
                self.land(&mut done, Wait::ForOne)?;
            }
        }
    }

    /// Takes what the engine has done.
    fn land(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        self.engine.complete(done, wait)?;
        if !done.is_empty() {
            self.unchanged = None;
            self.landed.extend(done.drain(..));
        }
        Ok(())
    }

    /// Whether the engine can be given one more request.
    fn has_room(&self) -> bool {
        match self.engine.capabilities().depth {
            // It works only while it is waited for, so what it has done is copied on first.
            1 => self.requests.is_empty(),
            depth => self.engine.in_flight() < depth,
        }
    }

    /// How many chunks may be under way if the next is started. An engine that works by itself is kept busy while what it has
    /// done still waits to be copied: completions come in bursts, and a drive that waits for the copies of a burst lost a
    /// quarter of its rate. In host memory these copies are this thread's work, and take long. A GPU's are much faster than a
    /// drive, so few slots wait for them; and slots that a drive fills over and over should stay in the caches
    /// (docs/decisions/0005-requests-to-a-drive.md).
    fn under_way_max(&self) -> usize {
        let to_or_from_gpu = self.next.as_ref().is_some_and(Chunk::is_staged_for_gpu);
        match self.engine.capabilities().depth {
            1 => UNDER_WAY_EACH,
            depth if to_or_from_gpu => depth.div_ceil(2),
            depth => 2 * depth,
        }
    }

    /// Whether what is being copied holds the slots that an engine which works by itself could fill. A copy ends long before the
    /// drive's next answer, so it is waited for first: virtual drives answer for all requests at once, and would find fewer the
    /// next time (docs/decisions/0005-requests-to-a-drive.md).
    fn is_short_of_slots(&self) -> bool {
        let works_by_itself = self.engine.capabilities().depth > 1;
        works_by_itself && self.has_room() && self.next.is_some() && !self.arriving.is_empty()
    }

    /// Whether the next chunk begins with a copy from a GPU, and needs the engine only later.
    fn begins_with_a_copy(&self) -> bool {
        self.next.as_ref().is_some_and(|chunk| chunk.direction == Direction::Write && chunk.is_staged_for_gpu())
    }

    /// Waits for the oldest copy into a slot and submits the slot.
    fn leave(&mut self) -> Result<()> {
        // Until the copy is known to be done, the slot stays where a failure finds it.
        if let Some((fence, _, flight)) = self.leaving.front_mut() {
            self.copies.wait(fence).map_err(|error| self.shared.of_chunk(error, &flight.chunk))?;
        }
        match self.leaving.pop_front() {
            Some((_, request, flight)) => self.submit(request, flight),
            None => Ok(()),
        }
    }

    /// Waits for the oldest copy out of a slot and counts it.
    fn arrived(&mut self) -> Result<()> {
        if let Some((fence, flight)) = self.arriving.front_mut() {
            self.copies.wait(fence).map_err(|error| self.shared.of_chunk(error, &flight.chunk))?;
        }
        if let Some((_, flight)) = self.arriving.pop_front() {
            self.count(flight);
        }
        Ok(())
    }

    /// The chunk that is to be started next.
    fn peek(&mut self) -> Option<&Chunk> {
        if self.next.is_none() {
            self.next = self.queue.take(false);
        }
        if self.next.is_none() {
            // A lane that waits must hold nothing that another might wait for.
            self.current = None;
            self.next = self.queue.take(self.is_idle());
        }
        self.next.as_ref()
    }

    fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.arriving.is_empty() && self.leaving.is_empty()
    }

    /// Takes what the copy engine has finished, without waiting.
    fn settle(&mut self) -> Result<()> {
        while let Some((fence, flight)) = self.arriving.front_mut()
            && self.copies.is_done(fence).map_err(|error| self.shared.of_chunk(error, &flight.chunk))?
        {
            self.arrived()?;
        }
        while self.has_room()
            && let Some((fence, _, flight)) = self.leaving.front_mut()
            && self.copies.is_done(fence).map_err(|error| self.shared.of_chunk(error, &flight.chunk))?
        {
            self.leave()?;
        }
        Ok(())
    }

    /// Starts chunks until the engine's queue, the ring or the descriptors are used up, or none is left.
    fn fill(&mut self) -> Result<()> {
        while self.peek().is_some() {
            if self.shared.options.cancel.is_cancelled() || self.shared.stop.load(Ordering::Relaxed) {
                return Err(cancelled());
            }
            let under_way = self.requests.len() + self.arriving.len() + self.leaving.len();
            if under_way >= self.under_way_max() || !(self.has_room() || self.begins_with_a_copy()) {
                return Ok(());
            }
            let may_wait = self.is_idle();
            let Some(file) = self.file(may_wait)? else {
                // A lane that may wait comes back without a file only when the transfer has failed elsewhere.
                return if may_wait { Err(cancelled()) } else { Ok(()) };
            };
            let Some(slot) = self.slot(may_wait)? else { return Ok(()) };
            let Some(chunk) = self.next.take() else { return Ok(()) };
            self.start(Flight { chunk, slot }, file)?;
        }
        Ok(())
    }

    /// Submits a chunk, or first queues the copies that bring its bytes into its slot.
    fn start(&mut self, flight: Flight, file: Arc<dyn File>) -> Result<()> {
        let request = self.request(&flight, file);
        if let (Placement::ThroughRing(pieces), Some(slot), Direction::Write) =
            (&flight.chunk.placement, &flight.slot, flight.chunk.direction)
        {
            for piece in pieces {
                if let Err(error) = self.copies.hop(&piece.region, &part_of(slot, piece)) {
                    let error = self.shared.of_chunk(error, &flight.chunk);
                    // Copies before this one may be under way, so the chunk is kept until the lane has drained.
                    self.leaving.push_back((Fence::default(), request, flight));
                    return Err(error);
                }
            }
            return match self.copies.fence() {
                Ok(fence) if fence.is_trivial() && self.has_room() => self.submit(request, flight),
                Ok(fence) => {
                    self.leaving.push_back((fence, request, flight));
                    Ok(())
                }
                Err(error) => {
                    let error = self.shared.of_chunk(error, &flight.chunk);
                    self.leaving.push_back((Fence::default(), request, flight));
                    Err(error)
                }
            };
        }
        self.submit(request, flight)
    }

    fn submit(&mut self, request: Request, flight: Flight) -> Result<()> {
        let token = request.token;
        if self.engine.submit(request).is_err() {
            return Err(
                Error::new(ErrorKind::Io, "an engine refused a request below its own depth").with("engine", self.engine.name())
            );
        }
        self.requests.insert(token, flight);
        Ok(())
    }

    /// The next chunk's file, if a descriptor is to be had.
    fn file(&mut self, may_wait: bool) -> Result<Option<Arc<dyn File>>> {
        let source = self.source;
        let Some(chunk) = self.peek() else { return Ok(None) };
        let number = chunk.file;
        let access = if chunk.direction == Direction::Read { Access::Read } else { Access::Write };
        match &self.current {
            Some((file, mode, handle)) if (*file, *mode) == (number, access) => return Ok(Some(Arc::clone(handle))),
            _ => self.current = None,
        }
        let known = self.shared.file(number);
        // The same file as was examined, or what the header said of it no longer holds.
        let expected = FileRef { path: known.file.path.clone(), expected: known.identity };
        let Some(handle) = self.shared.open.open(number, &expected, access, source, may_wait)? else { return Ok(None) };
        self.current = Some((number, access, Arc::clone(&handle)));
        Ok(Some(handle))
    }

    /// The next chunk's slot: `Some(None)` if it needs none, `None` if none is free.
    #[expect(clippy::option_option, reason = "needing no slot and finding none are two different answers")]
    fn slot(&mut self, may_wait: bool) -> Result<Option<Option<Slot>>> {
        let context = self.shared.context;
        let window = context.direct.as_deref().and_then(DirectPath::window).filter(|_| self.source == Source::Direct);
        let ring = window.unwrap_or(&context.ring);
        match self.peek() {
            Some(Chunk { placement: Placement::ThroughRing(_), extent, .. }) => {
                let length = usize::try_from(extent.length).unwrap_or(usize::MAX);
                let slot = if may_wait { ring.take(length).map(Some) } else { ring.try_take(length) };
                match slot {
                    // The lane that failed had to give up its slots: its failure is what is to be told.
                    Err(_) if self.shared.stop.load(Ordering::Relaxed) => Err(cancelled()),
                    slot => Ok(slot?.map(Some)),
                }
            }
            _ => Ok(Some(None)),
        }
    }

    fn request(&mut self, flight: &Flight, file: Arc<dyn File>) -> Request {
        let token = self.next_token;
        self.next_token += 1;
        let segments = match (&flight.chunk.placement, &flight.slot) {
            (Placement::Straight(regions), _) => regions.clone(),
            (Placement::ThroughRing(_), Some(slot)) => {
                let length = usize::try_from(flight.chunk.extent.length).unwrap_or(usize::MAX);
                vec![slot.region().slice(0..length)]
            }
            (Placement::ThroughRing(_), None) => unreachable!("`slot` gives one to every chunk that needs it"),
        };
        let Chunk { direction, extent, needed, alignment, .. } = flight.chunk;
        Request { token, direction, file, offset: extent.offset, segments, needed, alignment }
    }

    /// Takes a completion: queues the copies of staged bytes to their places, or counts what is done.
    fn arrive(&mut self, completion: Completion) -> Result<()> {
        let Completion { request, result } = completion;
        let Some(flight) = self.requests.remove(&request.token) else {
            return Err(Error::new(ErrorKind::Io, "an engine completed a request that is not in flight")
                .with("engine", self.engine.name()));
        };
        if let Err(source) = result {
            return self.refused_or_failed(flight, &request, source);
        }
        let known = self.shared.file(flight.chunk.file);
        if let Some(before) = known.identity
            && self.unchanged != Some(flight.chunk.file)
        {
            // After the read, so that no later change of the file can have gone into it unseen.
            ensure_same(&known.file, before, request.file.identity()?)?;
            self.unchanged = Some(flight.chunk.file);
        }
        let Flight { chunk, slot } = &flight;
        if let (Placement::ThroughRing(pieces), Some(slot), Direction::Read) = (&chunk.placement, slot, chunk.direction) {
            let queued = plan::rows(pieces).try_for_each(|rows| hop(&mut self.copies, slot, rows));
            self.show(&flight);
            match queued.and_then(|()| self.copies.fence()) {
                Ok(fence) if fence.is_trivial() => {}
                Ok(fence) => {
                    self.arriving.push_back((fence, flight));
                    return Ok(());
                }
                Err(error) => {
                    let error = self.shared.of_chunk(error, &flight.chunk);
                    // Copies before the one that failed may be under way, so the chunk is kept until the lane has drained.
                    self.arriving.push_back((Fence::default(), flight));
                    return Err(error);
                }
            }
        }
        if flight.chunk.direction == Direction::Write {
            self.show(&flight);
        }
        self.count(flight);
        Ok(())
    }

    /// Shows the witness what lies in a chunk's slot. Nobody writes there: the engine is done with it, and copies only leave it.
    fn show(&self, flight: &Flight) {
        let (Some(witness), Placement::ThroughRing(pieces), Some(slot)) =
            (&self.shared.options.witness, &flight.chunk.placement, &flight.slot)
        else {
            return;
        };
        let known = self.shared.file(flight.chunk.file);
        for piece in pieces {
            let offset = flight.chunk.extent.offset + piece.at as u64;
            slot.look_at(piece.at..piece.at + piece.region.len(), |bytes| witness.passed(&known.file.path, offset, bytes));
        }
    }

    /// Accounts for a chunk that is done.
    fn count(&mut self, flight: Flight) {
        let Flight { chunk, slot } = flight;
        drop(slot);
        self.outcome.count(&chunk, self.engine.name(), self.note.as_deref());
        let moved = self.shared.moved.fetch_add(chunk.wanted, Ordering::Relaxed) + chunk.wanted;
        if let Some(progress) = &self.shared.options.progress {
            progress(moved);
        }
    }

    /// After a failure: stops the other lanes and waits until neither engine nor copy engine touches anything of this one's.
    fn abandon(&mut self) -> Result<()> {
        self.shared.stop();
        let mut done = Vec::new();
        let mut engine_failed = None;
        while self.engine.in_flight() > 0 && engine_failed.is_none() {
            engine_failed = self.engine.complete(&mut done, Wait::ForOne).err();
            self.landed.extend(done.drain(..));
        }
        for completion in std::mem::take(&mut self.landed) {
            self.requests.remove(&completion.request.token);
        }
        let copied = self.copies.drain();
        let requests = std::mem::take(&mut self.requests).into_values();
        let copying = std::mem::take(&mut self.arriving).into_iter();
        let leaving = std::mem::take(&mut self.leaving).into_iter().map(|(fence, _, flight)| (fence, flight));
        for (fence, flight) in copying.chain(leaving) {
            // A fence that is dropped waits, and keeps its regions if it cannot.
            drop(fence);
            if copied.is_err() { flight.lose() } else { drop(flight) }
        }
        for flight in requests {
            if engine_failed.is_some() { flight.lose() } else { drop(flight) }
        }
        engine_failed.map_or(copied, Err)
    }

    /// Keeps a chunk whose way was refused, to be sent another; everything else is a failure.
    fn refused_or_failed(&mut self, flight: Flight, request: &Request, source: std::io::Error) -> Result<()> {
        let auto = self.shared.options.policy == PathPolicy::Auto;
        match (self.source, &self.shared.context.direct) {
            (Source::Direct, Some(direct)) => {
                let device = request.file.identity()?.device;
                match direct.refusal(&source, device) {
                    Some(refusal) if auto => self.outcome.refused.push((flight.chunk, refusal.reason)),
                    Some(refusal) => return Err(self.shared.of_chunk(refusal.to_error(), &flight.chunk)),
                    None => return Err(self.failed(&flight.chunk, source)),
                }
            }
            (Source::Drive, _) if auto && matches!(source.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                let reason = "the filesystem accepted O_DIRECT and then refused the transfer";
                self.outcome.refused.push((flight.chunk, reason.into()));
            }
            _ => return Err(self.failed(&flight.chunk, source)),
        }
        Ok(())
    }

    fn failed(&self, chunk: &Chunk, source: std::io::Error) -> Error {
        let what = match (chunk.direction, source.kind()) {
            (_, std::io::ErrorKind::UnexpectedEof) => "the file ended before it should, so it was cut while it was being read",
            (Direction::Read, _) => "cannot read",
            (Direction::Write, _) => "cannot write",
        };
        self.shared.of_chunk(Error::from_io(what, source), chunk).with("engine", self.engine.name())
    }
}

impl Drop for Lane<'_, '_> {
    /// A panic in the caller's progress callback comes this way.
    fn drop(&mut self) {
        if !self.is_idle() || self.engine.in_flight() > 0 {
            let gpu = self.shared.context.streams.as_ref().map(|streams| Arc::clone(streams.gpu()));
            // Without a context the waiting fails, and then everything is kept.
            let _current = gpu.as_ref().map(|gpu| gpu.current());
            // What cannot be waited for is kept for ever; a drop has nobody to tell.
            drop(self.abandon());
        }
    }
}

/// The part of a slot that a piece occupies.
fn part_of(slot: &Slot, piece: &Piece) -> Region {
    slot.region().slice(piece.at..piece.at + piece.region.len())
}

/// Copies pieces that [`plan::rows`] found to belong together, out of a slot to their places.
fn hop(copies: &mut Copies, slot: &Slot, pieces: &[Piece]) -> Result<()> {
    let [first, second, others @ ..] = pieces else {
        return pieces.iter().try_for_each(|piece| copies.hop(&part_of(slot, piece), &piece.region));
    };
    let rows = Rows { bytes: first.region.len(), pitch: second.at - first.at, count: pieces.len() };
    let last = others.last().unwrap_or(second);
    let from = slot.region().slice(first.at..last.at + rows.bytes);
    let to = pieces[1..].iter().fold(first.region.clone(), |joined, piece| joined.joined_with(&piece.region));
    if rows.pitch == rows.bytes { copies.hop(&from, &to) } else { copies.hop_rows(&from, &to, rows) }
}
