//! Regions: byte ranges of a block, each a counted claim on it.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{Memory, MemoryKind};
use crate::base::{Error, ErrorKind, Result};

/// What the holder of a region may do to the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read it: the source of a write to storage.
    ReadOnly,
    /// Change it: the destination of a read from storage.
    Writable,
}

/// How many claims of each kind live on a block, and which of its bytes transfers are filling.
#[derive(Debug, Default)]
pub struct Claims {
    read_only: AtomicUsize,
    writable: AtomicUsize,
    /// Ranges that do not overlap: start to end, in bytes from the block's start.
    filling: Mutex<BTreeMap<usize, usize>>,
    /// What makes the block known to drives, or that it cannot be made known; empty while nobody has asked.
    registration: OnceLock<Option<Registration>>,
}

/// What makes a block known to drives, whose DMA engines may then fill it. Dropping it makes the block unknown again.
pub type Registration = Box<dyn Any + Send + Sync>;

impl Claims {
    fn counter(&self, access: Access) -> &AtomicUsize {
        match access {
            Access::ReadOnly => &self.read_only,
            Access::Writable => &self.writable,
        }
    }

    fn filling(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.filling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a claim of this kind lives. Acquire: whoever sees none also sees what its holders wrote.
    pub fn any(&self, access: Access) -> bool {
        self.counter(access).load(Ordering::Acquire) != 0
    }

    /// Ends the block's registration, before its memory is freed.
    pub(super) fn unregister(&mut self) {
        drop(self.registration.take());
    }

    /// Whether a claim of either kind lives.
    pub fn any_at_all(&self) -> bool {
        self.any(Access::Writable) || self.any(Access::ReadOnly)
    }
}

/// Bytes of a block that one transfer fills. While it lives no other transfer may fill any of them, so that no two threads
/// ever write the same memory.
#[derive(Debug)]
pub(crate) struct Filling {
    memory: Arc<dyn Memory>,
    starts: Vec<usize>,
}

impl Filling {
    /// Begins filling `regions`, which are of one block and do not overlap.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if another transfer is filling some of their bytes.
    fn begin(regions: &[&Region]) -> Result<Option<Self>> {
        let Some(first) = regions.first() else { return Ok(None) };
        let mut begun = Self { memory: Arc::clone(&first.memory), starts: Vec::with_capacity(regions.len()) };
        let mut ranges = first.memory.claims().filling();
        for region in regions {
            let (start, end) = (region.start, region.start + region.len);
            if ranges.range(..end).next_back().is_some_and(|(_, other_end)| *other_end > start) {
                drop(ranges);
                return Err(Error::new(ErrorKind::InvalidInput, "another transfer is filling the same memory")
                    .with_hint("wait for it, or give each transfer memory of its own"));
            }
            ranges.insert(start, end);
            begun.starts.push(start);
        }
        drop(ranges);
        Ok(Some(begun))
    }

    /// Begins filling all of `regions`, which do not overlap.
    ///
    /// # Errors
    /// As [`begin`](Self::begin); then nothing is being filled.
    pub(crate) fn begin_all<'a>(regions: impl Iterator<Item = &'a Region>) -> Result<Vec<Self>> {
        let mut by_block: HashMap<*const (), Vec<&Region>> = HashMap::new();
        for region in regions.filter(|region| !region.is_empty()) {
            by_block.entry(Arc::as_ptr(&region.memory).cast()).or_default().push(region);
        }
        let begun = by_block.values().map(|regions| Self::begin(regions)).collect::<Result<Vec<Option<Self>>>>()?;
        Ok(begun.into_iter().flatten().collect())
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let mut ranges = self.memory.claims().filling();
        for start in &self.starts {
            ranges.remove(start);
        }
    }
}

/// A byte range of a block of memory, and a claim on it that lasts until the region is dropped.
///
/// Offsets and lengths are in bytes. Cloning or slicing a region claims again.
pub struct Region {
    memory: Arc<dyn Memory>,
    start: usize,
    len: usize,
    access: Access,
}

impl Region {
    /// Claims `range` of `memory`.
    ///
    /// Only owners of blocks call this, because the claim rules (see the module's doc) are theirs to keep.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the block.
    pub(crate) fn claim(memory: Arc<dyn Memory>, range: Range<usize>, access: Access) -> Result<Self> {
        if range.start > range.end || range.end > memory.len() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("bytes {}..{} do not lie within a buffer of {} bytes", range.start, range.end, memory.len()),
            ));
        }
        memory.claims().counter(access).fetch_add(1, Ordering::Relaxed);
        Ok(Self { start: range.start, len: range.len(), memory, access })
    }

    /// A writable claim on `range` of `memory`: the destination of a read from storage.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the block, or while a read-only claim
    /// lives.
    pub(super) fn destination(memory: Arc<dyn Memory>, range: Range<usize>) -> Result<Self> {
        if memory.claims().any(Access::ReadOnly) {
            return Err(busy("is being written to storage"));
        }
        Self::claim(memory, range, Access::Writable)
    }

    /// A read-only claim on `range` of `memory`: the source of a write to storage.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the block, or while a writable claim
    /// lives.
    pub(super) fn source(memory: Arc<dyn Memory>, range: Range<usize>) -> Result<Self> {
        if memory.claims().any(Access::Writable) {
            return Err(busy("is being filled from storage"));
        }
        Self::claim(memory, range, Access::ReadOnly)
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Which memory the region lies in.
    pub fn kind(&self) -> MemoryKind {
        self.memory.kind()
    }

    /// What may be done to it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The address of its first byte, in the address space of its kind.
    pub fn address(&self) -> usize {
        self.memory.address() + self.start
    }

    /// The address of the first byte of the region's block.
    pub fn block_address(&self) -> usize {
        self.memory.address()
    }

    /// Makes the region's block known to drives, if nobody has tried before: `make` is given its address and length, and gives
    /// `None` if that cannot be. What a caller lent is never made known, because nobody can say how it was allocated. Whether
    /// the block is known.
    pub(crate) fn register(&self, make: impl FnOnce(usize, usize) -> Option<Registration>) -> bool {
        let (address, len) = (self.memory.address(), self.memory.len());
        self.memory.is_owned() && self.memory.claims().registration.get_or_init(|| make(address, len)).is_some()
    }

    /// Whether the region's block is known to drives.
    pub fn is_registered(&self) -> bool {
        self.memory.claims().registration.get().is_some_and(Option::is_some)
    }

    /// The part of the region that `range` names, in bytes from the region's start.
    ///
    /// # Panics
    /// If the range does not lie within the region: a planner's mistake, never a file's or a caller's.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of a region of {} bytes", self.len);
        self.memory.claims().counter(self.access).fetch_add(1, Ordering::Relaxed);
        Self { memory: Arc::clone(&self.memory), start: self.start + range.start, len: range.len(), access: self.access }
    }

    /// Whether `next` begins where this region ends, in the same block.
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.access == next.access && Arc::ptr_eq(&self.memory, &next.memory) && self.start + self.len == next.start
    }

    /// This region made longer by one that [follows](Self::is_followed_by) it.
    pub(crate) fn joined_with(mut self, next: &Self) -> Self {
        assert!(self.is_followed_by(next), "only neighbours can be joined");
        self.len += next.len;
        self
    }

    /// The bytes, for whoever wants to look at what is about to be written.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) for memory that the processor does not reach, and for a writable region, whose
    /// bytes may be changing.
    pub fn host_bytes(&self) -> Result<&[u8]> {
        if !self.kind().is_host_accessible() {
            return Err(
                Error::new(ErrorKind::InvalidInput, "the tensor lies in GPU memory").with_hint("copy it to the host first")
            );
        }
        if self.access != Access::ReadOnly {
            return Err(busy("may be being filled"));
        }
        if self.is_empty() {
            return Ok(&[]);
        }
        // SAFETY: the block is valid for reads of `len` bytes from `address` (contract of `Memory`), and while this read-only
        // claim lives its owner gives out no writable one (see the module's doc) and no `&mut` to the bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.address() as *const u8, self.len) })
    }

    /// Asks the kernel for the region's pages now, so that whoever writes to them does not wait for each. Where the kernel
    /// cannot (before Linux 5.14), or the memory is no mapping of ordinary pages, nothing happens.
    pub fn prefault(&self) {
        if self.access == Access::Writable && self.memory.kind() == MemoryKind::Host {
            // SAFETY: the range lies within the block, which is valid for writes (contract of `Memory`).
            unsafe { super::host::prefault(self.address(), self.len) }
        }
    }

    /// Copies `source` to the start of the region.
    ///
    /// # Panics
    /// If the region is not host-accessible and writable, or shorter than `source`.
    ///
    /// # Safety
    /// No other thread touches these bytes meanwhile.
    pub(crate) unsafe fn copy_from_host(&self, source: &[u8]) {
        assert!(self.kind().is_host_accessible() && self.access == Access::Writable && source.len() <= self.len);
        // SAFETY: the block is valid for writes of `len` bytes from `address` (contract of `Memory`), no Rust reference
        // reaches it while this writable claim lives, and the caller promises that nobody else does.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), self.address() as *mut u8, source.len()) }
    }

    /// Copies the start of the region into `target`.
    ///
    /// # Panics
    /// If the region is not host-accessible, or shorter than `target`.
    ///
    /// # Safety
    /// No other thread writes these bytes meanwhile.
    pub(crate) unsafe fn copy_to_host(&self, target: &mut [u8]) {
        assert!(self.kind().is_host_accessible() && target.len() <= self.len);
        // SAFETY: the block is valid for reads of `len` bytes from `address` (contract of `Memory`); `target` is
        // exclusively borrowed, so it cannot be a view of the block while this claim lives.
        unsafe { std::ptr::copy_nonoverlapping(self.address() as *const u8, target.as_mut_ptr(), target.len()) }
    }

    /// Copies the whole of `source` to the start of this region, host memory to host memory.
    ///
    /// # Panics
    /// If either is not host-accessible, if this region is not writable, or if it is shorter than `source`.
    ///
    /// # Safety
    /// No other thread touches these bytes of this region, or writes those of `source`, meanwhile.
    pub(crate) unsafe fn copy_from_region(&self, source: &Self) {
        assert!(self.kind().is_host_accessible() && source.kind().is_host_accessible());
        assert!(self.access == Access::Writable && source.len <= self.len);
        // SAFETY: both blocks are valid for their lengths (contract of `Memory`), no Rust reference reaches them against
        // their claims, and the caller promises that nobody else does. `copy` allows the two to overlap.
        unsafe { std::ptr::copy(source.address() as *const u8, self.address() as *mut u8, source.len) }
    }
}

impl Clone for Region {
    fn clone(&self) -> Self {
        self.slice(0..self.len)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Release: what was written through the claim is seen by whoever then finds no claim.
        self.memory.claims().counter(self.access).fetch_sub(1, Ordering::Release);
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?} {:?} {:#x}+{})", self.kind(), self.access, self.address(), self.len)
    }
}

/// The refusal of what would disturb a transfer.
pub(super) fn busy(what: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("the buffer {what}")).with_hint("wait for the transfer, or drop its regions")
}
