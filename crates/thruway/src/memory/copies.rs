//! The second hop: copies between slots of the ring, or of a window in a GPU's own memory, and the memory that was asked for.
//!
//! To and from host memory a copy is done when the call returns. To and from a GPU it is queued on a stream and done when
//! a [`Fence`] says so; until then the fence holds both regions, so neither is freed under the copy engine.
//!
//! All lanes of a session queue their copies on the same two streams, one for each direction. A GPU has one copy engine
//! for each, and it idles for a moment when it changes from stream to stream.

use std::sync::{Arc, OnceLock};

use super::MemoryKind;
use super::region::Region;
use crate::base::{Error, ErrorKind, Result};
use crate::cuda::{Crc64, Event, Events, Gpu, Rows, Stream};

/// The streams on which a session's copies run, and the kernel that sums what is not copied.
#[derive(Debug)]
pub struct CopyStreams {
    gpu: Arc<Gpu>,
    to_gpu: Stream,
    to_host: Stream,
    /// Loaded when first asked for; why it could not be is kept, and given again.
    crc64: OnceLock<std::result::Result<Crc64, String>>,
}

impl CopyStreams {
    /// Streams of this GPU.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { gpu: Arc::clone(gpu), to_gpu: Stream::new(gpu)?, to_host: Stream::new(gpu)?, crc64: OnceLock::new() }))
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// What the register of CRC-64/NVME holds behind the bytes of each region, computed on the GPU, if it was zero before them.
    /// Transfers that fill the regions are done, and nobody writes to them meanwhile.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) if the kernel is not to be had here, [`Gpu`](ErrorKind::Gpu) if it fails,
    /// [`InvalidInput`](ErrorKind::InvalidInput) for memory that is not this GPU's.
    pub(crate) fn remainders(&self, regions: &[Region]) -> Result<Vec<u64>> {
        let kind = MemoryKind::Gpu(self.gpu.ordinal());
        if let Some(other) = regions.iter().find(|region| region.kind() != kind) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{other:?} is no memory of cuda:{}", self.gpu.ordinal())));
        }
        let crc64 = self.crc64.get_or_init(|| Crc64::load(&self.gpu).map_err(|error| error.message().to_owned()));
        let crc64 = crc64.as_ref().map_err(|why| Error::new(ErrorKind::Unsupported, why.clone()))?;
        let pieces: Vec<(u64, u64)> = regions.iter().map(|region| (region.address() as u64, region.len() as u64)).collect();
        // SAFETY: the regions are claims on live blocks of this GPU's memory, held through the call; while claims live, only their
        // holders use the memory, and these are done by the promise above.
        unsafe { crc64.remainders(&pieces) }
    }
}

/// The copies of one lane.
#[derive(Debug)]
pub struct Copies {
    streams: Option<Arc<CopyStreams>>,
    events: Events,
    /// What was queued since the last fence, in each direction.
    to_gpu: Vec<(Region, Region)>,
    to_host: Vec<(Region, Region)>,
}

/// A point after some copies. Dropped early, it waits for them.
#[derive(Debug, Default)]
pub struct Fence {
    pending: Vec<(Event, Vec<(Region, Region)>)>,
}

impl Fence {
    /// Whether there was nothing to wait for when it was made.
    pub fn is_trivial(&self) -> bool {
        self.pending.is_empty()
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        for (event, regions) in self.pending.drain(..) {
            if event.wait().is_err() {
                keep_for_ever(regions);
            }
        }
    }
}

/// For regions of which nobody knows whether the copy engine still uses them: leaking is the only safe thing left.
fn keep_for_ever(regions: Vec<(Region, Region)>) {
    Box::leak(Box::new(regions));
}

impl Copies {
    /// Copies for a lane; those that involve a GPU go through these streams.
    pub fn new(streams: Option<Arc<CopyStreams>>) -> Self {
        Self { streams, events: Events::default(), to_gpu: Vec::new(), to_host: Vec::new() }
    }

    /// Queues a copy of the whole of `from` to the start of `to`, one of them at least in a GPU's memory. It is done when a fence made
    /// afterwards is.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver refuses, [`InvalidInput`](ErrorKind::InvalidInput) for two regions of host
    /// memory, for memory of another GPU than this lane's, or a destination that is too short or read-only.
    pub fn copy(&mut self, from: &Region, to: &Region) -> Result<()> {
        if from.kind().is_host_accessible() && to.kind().is_host_accessible() {
            return Err(Error::new(ErrorKind::InvalidInput, "both regions lie in host memory"));
        }
        self.hop(from, to)
    }

    /// Copies in host memory, or queues a copy to or from a GPU's. For lanes: see the safety note within.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver refuses, [`InvalidInput`](ErrorKind::InvalidInput) for memory of another
    /// GPU than this lane's, or a destination that is too short or read-only.
    pub(crate) fn hop(&mut self, from: &Region, to: &Region) -> Result<()> {
        if from.len() > to.len() || to.access() != super::Access::Writable {
            return Err(Error::new(ErrorKind::InvalidInput, format!("no copy of {} bytes into {to:?}", from.len())));
        }
        match (from.kind(), to.kind()) {
            (from_kind, to_kind) if from_kind.is_host_accessible() && to_kind.is_host_accessible() => {
                // SAFETY: a lane copies between a slot, which is its own, and a part of its transfer's memory, which no other
                // part and no other transfer touches (see `Filling`); `copy` is for lanes alone.
                unsafe { to.copy_from_region(from) }
            }
            (from_kind, MemoryKind::Gpu(ordinal)) if from_kind.is_host_accessible() => {
                let streams = self.streams(ordinal)?;
                // SAFETY: both regions are claims on live blocks of their lengths. Copies of them are kept until a fence is
                // done, and no one else uses the memory while claims live.
                unsafe { streams.to_gpu.copy_to_gpu(to.address() as u64, from.address() as *const u8, from.len())? };
                self.to_gpu.push((from.clone(), to.clone()));
            }
            (MemoryKind::Gpu(ordinal), to_kind) if to_kind.is_host_accessible() => {
                let streams = self.streams(ordinal)?;
                // SAFETY: as above.
                unsafe { streams.to_host.copy_to_host(to.address() as *mut u8, from.address() as u64, from.len())? };
                self.to_host.push((from.clone(), to.clone()));
            }
            (MemoryKind::Gpu(ordinal), MemoryKind::Gpu(same)) if ordinal == same => {
                let streams = self.streams(ordinal)?;
                // Beside what goes to the GPU: both are on their way into its memory, and only one of them is under way.
                // SAFETY: as above.
                unsafe { streams.to_gpu.copy_within_gpu(to.address() as u64, from.address() as u64, from.len())? };
                self.to_gpu.push((from.clone(), to.clone()));
            }
            (from_kind, to_kind) => {
                return Err(Error::new(ErrorKind::InvalidInput, format!("no copy from {from_kind:?} to {to_kind:?} memory")));
            }
        }
        Ok(())
    }

    /// The same for rows of a matrix: `from` reaches from the first byte of the first to the last of the last, and in `to` they
    /// lie without gaps.
    ///
    /// # Errors
    /// As [`hop`](Self::hop).
    pub(crate) fn hop_rows(&mut self, from: &Region, to: &Region, rows: Rows) -> Result<()> {
        let (MemoryKind::Gpu(ordinal), true) = (to.kind(), from.kind().is_host_accessible()) else {
            return (0..rows.count).try_for_each(|row| {
                let (at, end) = (row * rows.pitch, row * rows.bytes);
                self.hop(&from.slice(at..at + rows.bytes), &to.slice(end..end + rows.bytes))
            });
        };
        let reaches = rows.count.saturating_sub(1).saturating_mul(rows.pitch).saturating_add(rows.bytes);
        let fits = rows.count > 0 && rows.pitch >= rows.bytes && reaches <= from.len();
        if !fits || rows.count.saturating_mul(rows.bytes) > to.len() || to.access() != super::Access::Writable {
            return Err(Error::new(ErrorKind::InvalidInput, format!("no copy of {rows:?} from {from:?} into {to:?}")));
        }
        let streams = self.streams(ordinal)?;
        // SAFETY: as in `hop`; all rows lie within the two regions, which was just checked.
        unsafe { streams.to_gpu.copy_rows_to_gpu(to.address() as u64, from.address() as *const u8, rows)? };
        self.to_gpu.push((from.clone(), to.clone()));
        Ok(())
    }

    /// Lets copies to the host that are queued from now on wait, on the GPU, for what the event marks.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub(crate) fn begin_after(&self, event: &Event) -> Result<()> {
        self.streams.as_ref().map_or(Ok(()), |streams| streams.to_host.wait_for(event))
    }

    /// Marks the end of all copies to the host so far, for other streams to wait for. `None` without a GPU.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub(crate) fn mark_to_host(&mut self) -> Result<Option<Event>> {
        let Some(streams) = &self.streams else { return Ok(None) };
        let event = self.events.take(&streams.gpu)?;
        streams.to_host.record(&event)?;
        Ok(Some(event))
    }

    /// The point after all copies so far.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails; the copies are then waited for when this value is dropped.
    pub fn fence(&mut self) -> Result<Fence> {
        let mut fence = Fence::default();
        let Some(streams) = &self.streams else { return Ok(fence) };
        for (stream, queued) in [(&streams.to_gpu, &mut self.to_gpu), (&streams.to_host, &mut self.to_host)] {
            if !queued.is_empty() {
                let event = self.events.take(&streams.gpu)?;
                stream.record(&event)?;
                fence.pending.push((event, std::mem::take(queued)));
            }
        }
        Ok(fence)
    }

    /// Whether a fence's copies are done; if so nothing is left to wait for, which saves a call into the driver.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn is_done(&mut self, fence: &mut Fence) -> Result<bool> {
        while let Some((event, _)) = fence.pending.last() {
            if !event.is_done()? {
                return Ok(false);
            }
            self.give_back(fence);
        }
        Ok(true)
    }

    /// Waits for a fence. After an error nothing is known of its copies, so what they touch must be kept; the fence keeps
    /// its regions.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if one of its copies failed.
    pub fn wait(&mut self, fence: &mut Fence) -> Result<()> {
        while let Some((event, _)) = fence.pending.last() {
            event.wait()?;
            self.give_back(fence);
        }
        Ok(())
    }

    /// Ends the last part of a fence, which is done.
    fn give_back(&mut self, fence: &mut Fence) {
        if let Some((event, _)) = fence.pending.pop() {
            self.events.give_back(event);
        }
    }

    /// Waits for everything that was queued on the streams, this lane's and others'.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails. Then nothing is known of the copies, and their regions are kept for ever.
    pub fn drain(&mut self) -> Result<()> {
        let Some(streams) = &self.streams else { return Ok(()) };
        let waited = streams.to_gpu.synchronize().and(streams.to_host.synchronize());
        let regions = [std::mem::take(&mut self.to_gpu), std::mem::take(&mut self.to_host)].concat();
        if waited.is_err() {
            keep_for_ever(regions);
        }
        waited
    }

    fn streams(&self, ordinal: u32) -> Result<&CopyStreams> {
        match &self.streams {
            Some(streams) if streams.gpu.ordinal() == ordinal => Ok(streams),
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("memory of cuda:{ordinal} in a session of another device"))
                .with_hint("use a session built for that device")),
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        if !(self.to_gpu.is_empty() && self.to_host.is_empty()) {
            // What cannot be waited for is kept for ever; a drop has nobody to tell.
            drop(self.drain());
        }
    }
}
