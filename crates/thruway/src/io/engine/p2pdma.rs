//! The kernel's peer-to-peer DMA: a drive reads and writes the memory of another PCI device, and neither the CPU nor the
//! host's memory takes part. No vendor's library is needed, only `O_DIRECT` on memory that the device's driver publishes.
//!
//! Its requests are those of the engine for drives; only the memory differs. What makes a transfer direct is decided by the
//! kernel, which takes such memory in two places and refuses it everywhere else with `EREMOTEIO`:
//!
//! - `O_DIRECT` collects the pages of a buffer. It gets those of a device only where the drive's queue declares that it can
//!   do peer-to-peer DMA (`FOLL_PCI_P2PDMA` in mm/gup.c, `BLK_FEAT_PCI_P2PDMA`): never through device mapper, MD or a network.
//! - The drive's driver maps them for DMA. The kernel looks at the way between the two devices (drivers/pci/p2pdma.c)
//!   and refuses a pair without one; it never bounces such pages through host memory (kernel/dma/direct.c returns
//!   an error where it would have to).
//!
//! So a request that past the page cache succeeded was not bounced. What is left is a filesystem that silently does not go
//! past it: ext4 does so for some files (and says so in `STATX_DIOALIGN`, which `File::direct_rules` heeds). Therefore the
//! path is tried with one block, and it counts only if the drive's own count of bytes rose and the page cache did not
//! gain the block; and after each transfer the drive must have counted as many bytes as went by this engine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{Alignment, ByteSize, Error, ErrorKind, Extent, Result};
use crate::io::direct::{DirectPath, Reach, Refusal, Trial, Verdict, Watch};
use crate::io::layer::Exact;
use crate::io::policy::Source;
use crate::io::{Capabilities, Completion, Direction, Engine, EngineFactory, EngineName, Made, OsEngines, Request, Wait};
use crate::memory::{PeerBuffer, PeerMemory};
use crate::storage::{DirectRules, Drive, File, Residency, Traffic, drive_traffic, exact_residency, forget};

/// The engine for drives, on a device's memory.
#[derive(Debug)]
pub struct P2pDma<E>(E);

impl<E: Engine> P2pDma<E> {
    /// Wraps an engine that reads and writes past the page cache.
    pub fn new(inner: E) -> Self {
        Self(inner)
    }
}

impl<E: Engine> Engine for P2pDma<E> {
    fn name(&self) -> EngineName {
        EngineName::P2pDma
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        self.0.submit(request)
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        self.0.complete(done, wait)
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn retries(&self) -> u64 {
        self.0.retries()
    }
}

/// What addresses in the device's memory must be a multiple of, whatever less the drive asks for: the smallest block of any.
/// NVMe allows multiples of 4. But QEMU 7.2, which emulates drives for our tests, then wrote wrong bytes (it drops the wrong
/// part of a piece that is no whole number of blocks), and no load gains anything by it.
const MEMORY_ALIGNMENT: Alignment = match Alignment::new(512) {
    Some(alignment) => alignment,
    None => Alignment::PAGE,
};

/// The way of drives into the memory of one PCI device.
#[derive(Debug)]
pub struct PeerPath {
    memory: Arc<PeerMemory>,
    engines: OsEngines,
    /// A page of the memory, for trials.
    block: Mutex<PeerBuffer>,
    /// What was found out of each filesystem, by its device number.
    known: Mutex<HashMap<(u64, Direction), Found>>,
}

/// What a trial found.
#[derive(Clone, Debug)]
struct Found {
    reach: Reach,
    /// What the drive had moved before the trial, if that is counted.
    before: Option<Traffic>,
}

impl PeerPath {
    /// The way into `memory`, by the engine that these make for drives. Takes a page of the memory.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if the device has no page left.
    pub fn new(memory: &Arc<PeerMemory>, engines: OsEngines) -> Result<Self> {
        let page = Alignment::system_page().bytes();
        let block = Mutex::new(memory.allocate(usize::try_from(page).unwrap_or(usize::MAX))?);
        Ok(Self { memory: Arc::clone(memory), engines, block, known: Mutex::default() })
    }

    fn known(&self) -> MutexGuard<'_, HashMap<(u64, Direction), Found>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves one block between a file and the device, and looks at what moved.
    fn attempt(&self, trial: &Trial<'_>) -> Result<Found> {
        let before = drive_traffic(trial.device);
        let refused = |reason: &str| {
            let hint = "use ext4 or xfs on a single drive, with `queue/iostats` of the drive set to 1";
            Reach::Refused(Refusal { reason: reason.into(), hint: hint.into() })
        };
        if before.is_none() {
            let reason = "the filesystem lies on no single drive whose traffic the kernel counts, so nothing would prove it";
            return Ok(Found { reach: refused(reason), before });
        }
        if !trial.buffered.direct_rules_are_told() {
            let reason = "the kernel does not tell whether this filesystem goes past the page cache, so nothing would prove it";
            return Ok(Found { reach: refused(reason), before });
        }
        let file = (trial.open)()?;
        forget(trial.buffered, trial.block);
        let counted = self.counted(trial, &file)?;
        let reach = match (counted, exact_residency(trial.buffered, trial.block)) {
            (Counted::Refused(refusal), _) => Reach::Refused(refusal),
            (Counted::Nothing, _) => refused("a trial block arrived, and the drive did not count it"),
            (Counted::Block, Residency::None) => self.proven(trial),
            // Others keep it there, or it comes back by read-ahead. But a copy from there the drive would not count.
            (Counted::Block, Residency::All) if trial.direction == Direction::Read => match self.counted(trial, &file)? {
                Counted::Block => self.proven(trial),
                _ => refused("a trial block came out of the page cache"),
            },
            (Counted::Block, Residency::Unknown) => refused("the kernel does not tell whether a trial block was cached"),
            (Counted::Block, _) => refused("a trial block went through the page cache"),
        };
        Ok(Found { reach, before })
    }

    fn proven(&self, trial: &Trial<'_>) -> Reach {
        let (drive, device) = (named(trial.device), self.memory.address());
        let reason = format!("{drive} reaches {device}: proven by a trial block and the drive's count");
        let rules = DirectRules { memory: trial.rules.memory.max(MEMORY_ALIGNMENT), ..trial.rules };
        // The CPU reaches the device's memory only past its own caches, so no copy of its is faster.
        Reach::Direct { rules, beats_cache: true, is_proven: true, reason: reason.into() }
    }

    /// Moves the trial's block, and gives what the drive counted meanwhile.
    fn counted(&self, trial: &Trial<'_>, file: &Arc<dyn File>) -> Result<Counted> {
        let before = drive_traffic(trial.device).unwrap_or_default();
        if let Err(source) = self.perform(trial, file)? {
            return self.refusal(&source, trial.device).map(Counted::Refused).ok_or_else(|| {
                let Extent { offset, length } = trial.block;
                let error = Error::from_io("cannot try the direct path", source);
                error.with("offset", offset).with("length", length).with("engine", self.name())
            });
        }
        let risen = drive_traffic(trial.device).unwrap_or_default().since(before);
        let moved = if trial.direction == Direction::Read { risen.read_bytes } else { risen.written_bytes };
        Ok(if moved < trial.block.length { Counted::Nothing } else { Counted::Block })
    }

    /// One request for the trial's block.
    fn perform(&self, trial: &Trial<'_>, file: &Arc<dyn File>) -> Result<std::io::Result<u64>> {
        let mut kept = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let len = usize::try_from(trial.block.length).unwrap_or(usize::MAX);
        if kept.len() < len {
            *kept = self.memory.allocate(len)?;
        }
        let fill = kept.region(0..len)?;
        // What was in the device's memory before is nothing for a file.
        // SAFETY: the memory is this path's own, and the lock keeps other trials away.
        unsafe { fill.copy_from_host(&vec![0; len]) };
        let region = match trial.direction {
            Direction::Read => fill,
            Direction::Write => {
                drop(fill);
                kept.source(0..len)?
            }
        };
        let request = Request {
            token: 0,
            direction: trial.direction,
            file: Arc::clone(file),
            offset: trial.block.offset,
            segments: vec![region],
            needed: trial.block.length,
            alignment: trial.rules.offset,
        };
        let mut engine = Exact::new(self.make()?.engine);
        let mut done = Vec::new();
        if engine.submit(request).is_err() {
            return Err(Error::new(ErrorKind::Io, "a new engine refused a request").with("engine", self.name()));
        }
        while done.is_empty() {
            engine.complete(&mut done, Wait::ForOne)?;
        }
        Ok(done.remove(0).result)
    }
}

/// What the drive counted of a trial.
enum Counted {
    /// The whole block.
    Block,
    /// Less.
    Nothing,
    /// The kernel refused.
    Refused(Refusal),
}

/// The drive below a filesystem, for people.
fn named(device: u64) -> String {
    Drive::below(device).map_or_else(|| "the drive".to_owned(), |drive| drive.to_string())
}

impl DirectPath for PeerPath {
    fn name(&self) -> EngineName {
        EngineName::P2pDma
    }

    fn make(&self) -> Result<Made> {
        let Made { engine, note } = self.engines.make(Source::Drive)?;
        Ok(Made { engine: Box::new(P2pDma::new(engine)), note })
    }

    fn reach(&self, trial: &Trial<'_>) -> Result<Reach> {
        // Held through the trial: others wait for its answer rather than make their own.
        let mut known = self.known();
        let key = (trial.device, trial.direction);
        if let Some(found) = known.get(&key) {
            return Ok(found.reach.clone());
        }
        let found = self.attempt(trial)?;
        Ok(known.entry(key).or_insert(found).reach.clone())
    }

    fn refusal(&self, error: &std::io::Error, device: u64) -> Option<Refusal> {
        // `EREMOTEIO` is the kernel's word for it. Newer drivers say `EINVAL`, and older kernels cannot collect the pages.
        let said = match error.raw_os_error() {
            Some(libc::EREMOTEIO) => "EREMOTEIO",
            Some(libc::EINVAL) => "EINVAL",
            Some(libc::EOPNOTSUPP) => "EOPNOTSUPP",
            Some(libc::EFAULT) => "EFAULT",
            _ => return None,
        };
        let reason = format!("the kernel allows no DMA between {} and {} ({said})", named(device), self.memory.address());
        let hint = "put both below one PCIe switch, or on a host bridge that the kernel trusts, with no LVM, RAID or \
                    encryption between drive and file: see docs/direct-path.md";
        Some(Refusal { reason: reason.into(), hint: hint.into() })
    }

    fn watch(&self) -> Box<dyn Watch + '_> {
        let devices: Vec<u64> = self.known().keys().map(|(device, _)| *device).collect();
        let began = devices.into_iter().filter_map(|device| Some((device, drive_traffic(device)?))).collect();
        Box::new(PeerWatch { path: self, began })
    }
}

/// Compares what the drives counted with what the engine moved.
struct PeerWatch<'a> {
    path: &'a PeerPath,
    /// What the drives that were known at the beginning had moved by then.
    began: HashMap<u64, Traffic>,
}

impl Watch for PeerWatch<'_> {
    fn verdict(self: Box<Self>, bytes: u64) -> Verdict {
        let mut since = self.began;
        for ((device, _), found) in self.path.known().iter() {
            // A drive that was first met in this transfer was counted before its trial.
            since.entry(*device).or_insert(found.before.unwrap_or_default());
        }
        let risen = |(device, before): (&u64, &Traffic)| {
            let Traffic { read_bytes, written_bytes } = drive_traffic(*device).unwrap_or_default().since(*before);
            read_bytes.saturating_add(written_bytes)
        };
        let counted = since.iter().map(risen).fold(0, u64::saturating_add);
        if counted >= bytes {
            return Verdict::Proven;
        }
        let (counted, bytes) = (ByteSize(counted), ByteSize(bytes));
        Verdict::Unproven(format!("the drives counted {counted} of {bytes}").into())
    }
}
