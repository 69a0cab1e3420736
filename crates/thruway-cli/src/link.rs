//! The limits of the link to a GPU: copies between pinned host memory and the GPU's, with nothing else going on.
//!
//! Figures are medians: a copy engine's rate hardly varies, and its best run would be luck.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use thruway::cuda::Gpu;
use thruway::memory::{Copies, CopyStreams, PinnedSlabs, Ring, RingSettings, Slot};
use thruway::{Error, ErrorKind, GpuBuffer, Result};

use crate::measure::{Limit, limit, median, to_usize};
use crate::output::gb_per_s;

/// A piece of pinned memory. A copy of this size runs at the link's own rate.
const SLOT_BYTES: usize = 64 << 20;
/// Pieces for each direction.
const SLOTS: usize = 2;
/// The sizes of copies beside the largest, as a pipeline may cut a load.
const CHUNKS: [(&str, usize); 5] = [
    ("pinned host to GPU, 64 KiB copies", 64 << 10),
    ("pinned host to GPU, 256 KiB copies", 256 << 10),
    ("pinned host to GPU, 1 MiB copies", 1 << 20),
    ("pinned host to GPU, 4 MiB copies", 4 << 20),
    ("pinned host to GPU, 16 MiB copies", 16 << 20),
];
/// A run moves at least this much, and at most that.
const RUN_BYTES: std::ops::RangeInclusive<u64> = 64 << 20..=4 << 30;
/// Small copies take long, and show their rate on less.
const COPIES_MAX: usize = 4096;
const RUNS_MIN: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    ToGpu,
    FromGpu,
}

/// One direction's memory at both ends.
struct End {
    slots: Vec<Slot>,
    buffer: GpuBuffer,
}

impl End {
    fn new(gpu: &Arc<Gpu>, ring: &Ring) -> Result<Self> {
        // Not `take`, which would wait for what this very caller holds.
        let none = || Error::new(ErrorKind::OutOfMemory, "no pinned memory is left to measure the link to the GPU with");
        let slot = || ring.try_take(SLOT_BYTES)?.ok_or_else(none);
        let slots = (0..SLOTS).map(|_| slot()).collect::<Result<Vec<Slot>>>()?;
        Ok(Self { slots, buffer: GpuBuffer::new(gpu, SLOTS * SLOT_BYTES)? })
    }

    /// Queues copies of `chunk` bytes until `bytes` are on their way, and waits for the last.
    fn run(&mut self, copies: &mut Copies, way: Way, bytes: usize, chunk: usize) -> Result<()> {
        let places = SLOT_BYTES / chunk;
        let mut queue = || {
            for number in 0..bytes / chunk {
                let slot = number / places % SLOTS;
                let at = number % places * chunk;
                let host = self.slots[slot].region().slice(at..at + chunk);
                let start = slot * SLOT_BYTES + at;
                match way {
                    Way::ToGpu => copies.copy(&host, &self.buffer.region(start..start + chunk)?)?,
                    Way::FromGpu => copies.copy(&self.buffer.source(start..start + chunk)?, &host)?,
                }
            }
            Ok(())
        };
        let queued: Result<()> = queue();
        // Whatever was queued must have ended before the memory may go.
        copies.drain()?;
        queued
    }
}

/// The limits of the link to `gpu`, measured for a model of `bytes`: with more of them, since a run of a few copies would show
/// how long the first and the last take.
pub(crate) fn limits(gpu: &Arc<Gpu>, bytes: u64, repeat: u32) -> Result<Vec<Limit>> {
    let repeat = repeat.max(RUNS_MIN);
    let bytes = bytes.saturating_mul(16).clamp(*RUN_BYTES.start(), *RUN_BYTES.end());
    let bytes = to_usize(bytes) / SLOT_BYTES * SLOT_BYTES;
    let settings = RingSettings { slot_bytes: SLOT_BYTES, slab_bytes: SLOT_BYTES, bytes_max: 2 * SLOTS * SLOT_BYTES };
    let near = thruway::storage::processors_near(&gpu.facts().pci_address);
    let ring = Ring::with_source(settings, Box::new(PinnedSlabs::new(Arc::clone(gpu), near)));
    let (mut there, mut back) = (End::new(gpu, &ring)?, End::new(gpu, &ring)?);
    let mut copies = Copies::new(Some(CopyStreams::new(gpu)?));
    let mut one_way = |end: &mut End, way, bytes: usize, chunk| -> Result<f64> {
        // The first pass touches what was never touched.
        end.run(&mut copies, way, SLOTS * SLOT_BYTES.min(bytes), chunk)?;
        let mut rates = Vec::new();
        for _ in 0..repeat {
            let begun = Instant::now();
            end.run(&mut copies, way, bytes, chunk)?;
            rates.push(gb_per_s(bytes as u64, begun.elapsed().as_secs_f64()));
        }
        Ok(median(&rates))
    };
    let how = format!("{} MiB copies on one stream, median of {repeat}", SLOT_BYTES >> 20);
    let mut limits = vec![
        Limit::known(limit::TO_GPU, one_way(&mut there, Way::ToGpu, bytes, SLOT_BYTES)?, how.clone()),
        Limit::known(limit::FROM_GPU, one_way(&mut back, Way::FromGpu, bytes, SLOT_BYTES)?, how.clone()),
    ];
    for (name, chunk) in CHUNKS {
        let bytes = bytes.min(COPIES_MAX * chunk);
        limits.push(Limit::known(
            name,
            one_way(&mut there, Way::ToGpu, bytes, chunk)?,
            format!("one stream, median of {repeat}"),
        ));
    }
    let rates = (0..repeat).map(|_| both_ways(gpu, &mut there, &mut back, bytes)).collect::<Result<Vec<f64>>>()?;
    limits.insert(2, Limit::known(limit::BOTH_WAYS, median(&rates), format!("sum of both; {how}")));
    Ok(limits)
}

/// Both directions at once, each on a thread and a stream of its own: the sum of their bytes over the longer time.
fn both_ways(gpu: &Arc<Gpu>, there: &mut End, back: &mut End, bytes: usize) -> Result<f64> {
    let start = Barrier::new(2);
    let lane = |end: &mut End, way| {
        let mut copies = Copies::new(Some(CopyStreams::new(gpu)?));
        // Makes the stream, before the clock runs.
        let ready = end.run(&mut copies, way, SLOT_BYTES, SLOT_BYTES);
        start.wait();
        let begun = Instant::now();
        ready.and_then(|()| end.run(&mut copies, way, bytes, SLOT_BYTES))?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let (up, down): (Result<f64>, Result<f64>) = std::thread::scope(|scope| {
        let up = std::thread::Builder::new().spawn_scoped(scope, || lane(there, Way::ToGpu));
        let up = match up {
            Ok(up) => up,
            Err(error) => {
                return (Err(Error::from_io("no thread is to be had to measure both ways at once with", error)), Ok(0.0));
            }
        };
        let down = lane(back, Way::FromGpu);
        (up.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), down)
    });
    let seconds = f64::max(up?, down?);
    Ok(gb_per_s(2 * bytes as u64, seconds))
}
