//! Host memory: which of it is pinned, and how the engine reads and writes it.
//!
//! The engine copies host memory through the kernel (`process_vm_readv` on this very process), as a device's DMA engine
//! would: no Rust reference is made to memory that the product may be writing at that moment, and a range that was unmapped
//! under a copy is an error, not a crash.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::without_provenance_mut;

/// How host memory came to be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `cuMemHostRegister_v2`.
    Registered,
    /// `cuMemHostAlloc`: the mapping that must be unmapped, as address and length.
    Allocated(usize, usize),
}

/// A pinned range.
#[derive(Clone, Debug)]
pub(crate) struct Pinned {
    pub(crate) bytes: usize,
    pub(crate) origin: Origin,
    pub(crate) context: usize,
    /// Never used twice.
    pub(crate) id: u64,
}

/// What a host range is to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostRange {
    /// Wholly inside the pinned range that begins here.
    Pinned(usize),
    /// Wholly outside every pinned range.
    Pageable,
    /// Partly inside one. A driver refuses it.
    Crosses,
}

/// Every pinned range of the process.
#[derive(Debug, Default)]
pub(crate) struct PinnedTable {
    ranges: BTreeMap<usize, Pinned>,
    /// The most that was ever pinned at once.
    pub(crate) peak: usize,
}

impl PinnedTable {
    /// The pinned range that shares bytes with a range, if any.
    pub(crate) fn overlap(&self, start: usize, bytes: usize) -> Option<(usize, &Pinned)> {
        let end = start.saturating_add(bytes);
        let (have, pinned) = self.ranges.range(..end).next_back()?;
        (have + pinned.bytes > start).then_some((*have, pinned))
    }

    /// Adds a range, which overlaps none.
    pub(crate) fn insert(&mut self, start: usize, pinned: Pinned) {
        self.ranges.insert(start, pinned);
        self.peak = self.peak.max(self.bytes());
    }

    /// The range that begins at an address.
    pub(crate) fn get(&self, start: usize) -> Option<&Pinned> {
        self.ranges.get(&start)
    }

    /// Takes a range out.
    pub(crate) fn remove(&mut self, start: usize) -> Option<Pinned> {
        self.ranges.remove(&start)
    }

    /// What a range is to the driver.
    pub(crate) fn classify(&self, start: usize, bytes: usize) -> HostRange {
        match self.overlap(start, bytes) {
            None => HostRange::Pageable,
            Some((have, pinned)) if have <= start && start + bytes <= have + pinned.bytes => HostRange::Pinned(have),
            Some(_) => HostRange::Crosses,
        }
    }

    /// Takes out everything pinned in a context, and says how much there was.
    pub(crate) fn clear(&mut self, context: usize) -> usize {
        let before = self.ranges.len();
        self.ranges.retain(|_, pinned| pinned.context != context);
        before - self.ranges.len()
    }

    /// How many ranges there are.
    pub(crate) fn count(&self) -> usize {
        self.ranges.len()
    }

    /// How many bytes they have.
    pub(crate) fn bytes(&self) -> usize {
        self.ranges.values().map(|pinned| pinned.bytes).sum()
    }
}

/// A host range is not mapped (any more).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unmapped;

/// Which way bytes go between host memory and a buffer of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    FromHost,
    ToHost,
}

/// Reads host memory at `from` into `to`.
///
/// # Safety
/// `to` must be valid for writing `bytes` bytes.
pub(crate) unsafe fn read(from: usize, to: *mut u8, bytes: usize) -> Result<(), Unmapped> {
    // SAFETY: the caller's promise about `to`.
    unsafe { transfer(Way::FromHost, from, to, bytes) }
}

/// Writes `bytes` bytes at `from` into host memory at `to`.
///
/// # Safety
/// `from` must be valid for reading `bytes` bytes.
pub(crate) unsafe fn write(to: usize, from: *const u8, bytes: usize) -> Result<(), Unmapped> {
    // SAFETY: the caller's promise about `from`, which is only read in this direction.
    unsafe { transfer(Way::ToHost, to, from.cast_mut(), bytes) }
}

/// # Safety
/// `own` must be valid for `bytes` bytes: for writing from the host, for reading to it.
unsafe fn transfer(way: Way, host: usize, own: *mut u8, bytes: usize) -> Result<(), Unmapped> {
    let mut done = 0;
    while done < bytes {
        let local = libc::iovec { iov_base: own.wrapping_add(done).cast(), iov_len: bytes - done };
        let remote = libc::iovec { iov_base: without_provenance_mut::<c_void>(host + done), iov_len: bytes - done };
        // SAFETY: the kernel checks the host range and answers EFAULT where it is not mapped; the local range is valid by
        // the caller's promise; both descriptions live through the call.
        let moved = unsafe {
            match way {
                Way::FromHost => libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0),
                Way::ToHost => libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(Unmapped),
            Ok(moved) => done += moved,
            Err(_) if std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR) => {}
            Err(_) => return Err(Unmapped),
        }
    }
    Ok(())
}

/// A copy of a host range.
pub(crate) fn snapshot(from: usize, bytes: usize) -> Result<Vec<u8>, Unmapped> {
    let mut copy = vec![0; bytes];
    // SAFETY: the vector has `bytes` bytes.
    unsafe { read(from, copy.as_mut_ptr(), bytes) }?;
    Ok(copy)
}

/// A number that tells whether bytes have changed. Not proof against an adversary, and fast.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut words = bytes.chunks_exact(8);
    let mut state = bytes.len() as u64;
    for word in &mut words {
        let mut value = [0; 8];
        value.copy_from_slice(word);
        state = (state ^ u64::from_le_bytes(value)).wrapping_mul(FACTOR).rotate_left(29);
    }
    for byte in words.remainder() {
        state = (state ^ u64::from(*byte)).wrapping_mul(FACTOR).rotate_left(29);
    }
    state
}

/// The digest of a host range.
pub(crate) fn digest_of(from: usize, bytes: usize) -> Result<u64, Unmapped> {
    snapshot(from, bytes).map(|copy| digest(&copy))
}

/// Whether every page of a range is mapped.
pub(crate) fn is_mapped(start: usize, bytes: usize) -> bool {
    const PAGE: usize = 4096;
    let first = start / PAGE * PAGE;
    let Some(end) = start.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(PAGE)) else { return false };
    let mut resident = vec![0u8; (end - first) / PAGE];
    // SAFETY: `mincore` reads no memory of the range; the vector has one byte a page.
    unsafe { libc::mincore(without_provenance_mut(first), end - first, resident.as_mut_ptr()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(bytes: usize) -> Pinned {
        Pinned { bytes, origin: Origin::Registered, context: 0, id: 1 }
    }

    #[test]
    fn a_range_is_inside_outside_or_across() {
        let mut table = PinnedTable::default();
        table.insert(1000, range(100));
        table.insert(1100, range(100));
        assert_eq!(table.classify(1000, 100), HostRange::Pinned(1000));
        assert_eq!(table.classify(1150, 50), HostRange::Pinned(1100));
        // Neighbours are two ranges, also where they touch.
        assert_eq!(table.classify(1050, 100), HostRange::Crosses);
        assert_eq!(table.classify(900, 101), HostRange::Crosses);
        assert_eq!(table.classify(900, 100), HostRange::Pageable);
        assert_eq!(table.classify(1200, 1), HostRange::Pageable);
    }

    #[test]
    fn unmapped_memory_is_an_answer_and_not_a_crash() {
        assert_eq!(snapshot(0x1000, 8), Err(Unmapped));
        assert!(!is_mapped(0x1000, 8));
        let bytes = [7u8; 100];
        assert_eq!(snapshot(bytes.as_ptr().addr(), 100).as_deref(), Ok(bytes.as_slice()));
        assert!(is_mapped(bytes.as_ptr().addr(), 100));
    }

    #[test]
    fn the_digest_sees_each_byte() {
        let bytes: Vec<u8> = (0..37).collect();
        for index in 0..bytes.len() {
            let mut other = bytes.clone();
            other[index] ^= 1;
            assert_ne!(digest(&bytes), digest(&other), "byte {index}");
        }
    }
}
