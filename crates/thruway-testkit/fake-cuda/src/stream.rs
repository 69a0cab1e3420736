//! Streams, events, and the order of work.
//!
//! Every stream numbers its work. "This point of that stream" is a [`Mark`], and all ordering is made of marks: an event
//! is the mark at which it was recorded, a wait is a list of marks, the default stream's rules are marks that are added
//! on submission. A mark can only name work that was already submitted, so nothing can wait in a circle.

use std::collections::VecDeque;
use std::ffi::c_uint;
use std::ptr::without_provenance_mut;
use std::time::Instant;

use thruway_sys::cuda::{
    CU_EVENT_DISABLE_TIMING, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_SUPPORTED,
    CUevent, CUresult, CUstream,
};

use crate::copy::Copy;
use crate::fault::FaultKind;
use crate::kernel::Launch;
use crate::world::{SHARED, World};

/// A stream's number.
pub(crate) type StreamId = u64;
/// An event's number.
pub(crate) type EventId = u64;

const STREAM_BASE: u64 = 0x5354_0000_0000;
const EVENT_BASE: u64 = 0x4556_0000_0000;
const HANDLE_STRIDE: u64 = 0x100;

/// A point of a stream: everything up to and with the work of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) stream: StreamId,
    pub(crate) seq: u64,
}

/// What a stream can be asked to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// Copies and fills, in no order among themselves.
    Copies(Vec<Copy>),
    /// The kernel.
    Kernel(Launch),
    /// An event, unless it was recorded again since.
    Record { event: EventId, generation: u64 },
    /// Nothing: it holds up what follows until its marks are done.
    Barrier,
    /// Device memory begins to exist.
    Allocate { device: usize, start: usize },
    /// Device memory ends.
    Release { device: usize, start: usize },
}

/// How far a piece of work has come.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Progress {
    /// Behind other work.
    Waiting,
    /// On its way; complete at this time, not before.
    Running(Instant),
}

/// A piece of work in a stream.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) seq: u64,
    pub(crate) after: Vec<Mark>,
    pub(crate) work: Work,
    pub(crate) progress: Progress,
    /// It is to fail with this code.
    pub(crate) fail: Option<CUresult>,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) context: usize,
    /// The context's default stream.
    pub(crate) legacy: bool,
    /// Ordered with the default stream.
    pub(crate) blocking: bool,
    pub(crate) queue: VecDeque<Op>,
    pub(crate) issued: u64,
    pub(crate) completed: u64,
    /// The handle is void; the stream goes when its work is done.
    pub(crate) destroyed: bool,
}

/// An event.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) flags: c_uint,
    pub(crate) recorded: Option<Mark>,
    pub(crate) generation: u64,
    pub(crate) completed_at: Option<Instant>,
}

impl Event {
    /// Whether it says when it happened.
    pub(crate) fn is_timed(&self) -> bool {
        self.flags & CU_EVENT_DISABLE_TIMING == 0
    }
}

impl World {
    /// A new stream.
    pub(crate) fn create_stream(&mut self, context: usize, blocking: bool, legacy: bool) -> StreamId {
        let id = self.fresh_id();
        let queue = VecDeque::new();
        self.streams.insert(id, Stream { context, legacy, blocking, queue, issued: 0, completed: 0, destroyed: false });
        id
    }

    /// The handle of a stream.
    pub(crate) fn stream_handle(id: StreamId) -> CUstream {
        without_provenance_mut(crate::world::address(STREAM_BASE + id * HANDLE_STRIDE))
    }

    /// The handle of an event.
    pub(crate) fn event_handle(id: EventId) -> CUevent {
        without_provenance_mut(crate::world::address(EVENT_BASE + id * HANDLE_STRIDE))
    }

    /// The stream that a handle means, in a context that works. The default stream needs a current context; the others
    /// bring theirs.
    pub(crate) fn stream(&mut self, handle: CUstream) -> Result<StreamId, CUresult> {
        self.ready()?;
        if handle.is_null() || handle == CU_STREAM_LEGACY {
            let context = self.current()?;
            let found = self.streams.iter().find(|(_, stream)| stream.legacy && stream.context == context);
            return Ok(match found.map(|(id, _)| *id) {
                Some(id) => id,
                None => self.create_stream(context, true, true),
            });
        }
        if handle == CU_STREAM_PER_THREAD {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let id = (handle.addr() as u64).wrapping_sub(STREAM_BASE) / HANDLE_STRIDE;
        match self.streams.get(&id) {
            Some(stream) if Self::stream_handle(id) == handle && !stream.destroyed && !stream.legacy => {
                let context = stream.context;
                self.usable(context)?;
                Ok(id)
            }
            _ => self.refuse(FaultKind::StaleHandle, format!("stream {handle:?}"), CUDA_ERROR_INVALID_HANDLE),
        }
    }

    /// The event that a handle means.
    pub(crate) fn event(&mut self, handle: CUevent) -> Result<EventId, CUresult> {
        self.ready()?;
        let id = (handle.addr() as u64).wrapping_sub(EVENT_BASE) / HANDLE_STRIDE;
        if self.events.contains_key(&id) && Self::event_handle(id) == handle {
            return Ok(id);
        }
        self.refuse(FaultKind::StaleHandle, format!("event {handle:?}"), CUDA_ERROR_INVALID_HANDLE)
    }

    /// Puts work at a stream's end. The stream exists.
    pub(crate) fn submit(&mut self, id: StreamId, mut after: Vec<Mark>, work: Work) -> Mark {
        let fail = self.late.take();
        let Some((context, legacy, blocking)) =
            self.streams.get(&id).map(|stream| (stream.context, stream.legacy, stream.blocking))
        else {
            return Mark { stream: id, seq: 0 };
        };
        // The default stream waits for all blocking streams of its context, and each of them for it.
        if blocking {
            let others = self.streams.iter().filter(|(_, other)| other.context == context && other.blocking);
            let others = others.filter(|(_, other)| other.legacy != legacy);
            after.extend(others.map(|(other, stream)| Mark { stream: *other, seq: stream.issued }));
        }
        after.retain(|mark| !self.is_done(*mark));
        let Some(stream) = self.streams.get_mut(&id) else { return Mark { stream: id, seq: 0 } };
        stream.issued += 1;
        let seq = stream.issued;
        stream.queue.push_back(Op { seq, after, work, progress: Progress::Waiting, fail });
        SHARED.work.notify_one();
        Mark { stream: id, seq }
    }

    /// Whether everything up to a mark is done. A stream that is gone has nothing left to do.
    pub(crate) fn is_done(&self, mark: Mark) -> bool {
        self.streams.get(&mark.stream).is_none_or(|stream| stream.completed >= mark.seq)
    }

    /// All copies in flight.
    pub(crate) fn copies(&self) -> impl Iterator<Item = &Copy> {
        self.streams.values().flat_map(|stream| &stream.queue).flat_map(|op| match &op.work {
            Work::Copies(copies) => copies.as_slice(),
            _ => &[],
        })
    }

    /// All copies in flight.
    pub(crate) fn copies_mut(&mut self) -> impl Iterator<Item = &mut Copy> {
        self.streams.values_mut().flat_map(|stream| &mut stream.queue).flat_map(|op| match &mut op.work {
            Work::Copies(copies) => copies.as_mut_slice(),
            _ => &mut [],
        })
    }
}
