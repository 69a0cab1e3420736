//! The second hop: copies between slots of the ring and the memory that was asked for.
//!
//! To and from host memory a copy is done when the call returns. To and from a GPU it is queued on a stream of the
//! lane's own and done when a [`Fence`] says so; until then slot and region must be kept.

use std::sync::Arc;

use super::MemoryKind;
use super::region::Region;
use crate::base::{Error, ErrorKind, Result};
use crate::cuda::{Event, Events, Gpu, Stream};

/// The copies of one lane.
#[derive(Debug)]
pub struct Copies {
    gpu: Option<Arc<Gpu>>,
    stream: Option<Stream>,
    events: Events,
    /// Whether copies were queued since the last fence.
    queued: bool,
}

/// A point after some copies.
#[derive(Debug)]
pub enum Fence {
    /// They are done.
    Done,
    /// They are done when the event is.
    Event(Event),
}

impl Copies {
    /// Copies for a lane; those that involve a GPU go through this one's context.
    pub fn new(gpu: Option<Arc<Gpu>>) -> Self {
        Self { gpu, stream: None, events: Events::default(), queued: false }
    }

    /// Copies, or queues a copy of, the whole of `from` to the start of `to`. Both must live until a fence made
    /// afterwards is done.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver refuses, [`InvalidInput`](ErrorKind::InvalidInput) for memory of another
    /// GPU than this lane's.
    pub fn copy(&mut self, from: &Region, to: &Region) -> Result<()> {
        assert!(from.len() <= to.len(), "a copy of {} bytes into {}", from.len(), to.len());
        match (from.kind(), to.kind()) {
            (from_kind, to_kind) if from_kind.is_host_accessible() && to_kind.is_host_accessible() => {
                to.copy_from_region(from);
                return Ok(());
            }
            (from_kind, MemoryKind::Gpu(ordinal)) if from_kind.is_host_accessible() => {
                let stream = self.stream(ordinal)?;
                // SAFETY: both regions are claims on live blocks of their lengths; the caller keeps them until a fence
                // is done, and no one else uses them while the claims live.
                unsafe { stream.copy_to_gpu(to.address() as u64, from.address() as *const u8, from.len())? };
            }
            (MemoryKind::Gpu(ordinal), to_kind) if to_kind.is_host_accessible() => {
                let stream = self.stream(ordinal)?;
                // SAFETY: as above.
                unsafe { stream.copy_to_host(to.address() as *mut u8, from.address() as u64, from.len())? };
            }
            (from_kind, to_kind) => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("no copy from {from_kind:?} to {to_kind:?} memory")));
            }
        }
        self.queued = true;
        Ok(())
    }

    /// The point after all copies so far.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn fence(&mut self) -> Result<Fence> {
        let (Some(gpu), Some(stream), true) = (&self.gpu, &self.stream, self.queued) else { return Ok(Fence::Done) };
        let event = self.events.take(gpu)?;
        stream.record(&event)?;
        self.queued = false;
        Ok(Fence::Event(event))
    }

    /// Whether what a fence stands for is done.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if one of its copies failed.
    pub fn is_done(&self, fence: &Fence) -> Result<bool> {
        match fence {
            Fence::Done => Ok(true),
            Fence::Event(event) => event.is_done(),
        }
    }

    /// Waits for a fence and takes it back.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if one of its copies failed.
    pub fn wait(&mut self, fence: Fence) -> Result<()> {
        if let Fence::Event(event) = fence {
            event.wait()?;
            self.events.give_back(event);
        }
        Ok(())
    }

    /// Waits for everything that was queued.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails. Then nothing is known of the copies, and their memory must never be
    /// freed.
    pub fn drain(&mut self) -> Result<()> {
        self.queued = false;
        self.stream.as_ref().map_or(Ok(()), Stream::synchronize)
    }

    fn stream(&mut self, ordinal: u32) -> Result<&Stream> {
        let Some(gpu) = self.gpu.as_ref().filter(|gpu| gpu.ordinal() == ordinal) else {
            return Err(Error::new(ErrorKind::InvalidInput, format!("memory of cuda:{ordinal} in a session of another device"))
                .with_hint("use a session built for that device"));
        };
        match &mut self.stream {
            Some(stream) => Ok(stream),
            none => Ok(none.insert(Stream::new(gpu)?)),
        }
    }
}
