//! One device's memory.
//!
//! ```text
//! device addresses   base ├──── allocation ────┤gap├─ allocation ─┤ …        PROT_NONE: the CPU may not touch them
//!                         │ same offsets │
//! alias              view ├──── the bytes ─────┤   ├─ the bytes ──┤ …        a memfd, mapped elsewhere
//! ```
//! Addresses are handed out upwards and used again only when the range (four times the device's memory) is exhausted, so
//! that a stale address is recognised as freed for as long as possible. A gap after each allocation keeps a copy that
//! runs over the end from landing in a neighbour.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};

/// What a real driver aligns allocations to (256 is promised).
const ALIGNMENT: usize = 512;
/// Where the first device's addresses begin, if the kernel lets us: easy to recognise in a debugger.
const BASE: usize = 0x2000_0000_0000;
/// How far apart the devices' addresses begin.
const DEVICE_STRIDE: usize = 1 << 40;
/// New memory holds this, not zeros: who forgets to fill it shall see. Only the first bytes, for very large ones.
const FRESH: u8 = 0xcd;
const FRESH_BYTES_MAX: usize = 64 << 20;
const PAGE: usize = 4096;

/// How far an allocation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// Its stream has not come to the allocation yet.
    Ordered,
    /// It may be used.
    Live,
}

/// One allocation.
#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    /// As asked for.
    pub(crate) bytes: usize,
    /// Never used twice.
    pub(crate) id: u64,
    /// From `cuMemAllocAsync`.
    pub(crate) pooled: bool,
    /// Whether its stream has come to it.
    pub(crate) life: Life,
    /// `cuMemFreeAsync` was called: no new work may name it, though work before it in the stream may still run.
    pub(crate) free_issued: bool,
}

/// What lies at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The whole range is in the allocation that begins here.
    Inside(usize),
    /// The range begins in memory that was freed.
    Freed,
    /// The range leaves its allocation, or never was in one.
    Outside,
}

/// One device's memory.
#[derive(Debug)]
pub(crate) struct Arena {
    base: usize,
    span: usize,
    view: NonNull<u8>,
    file: OwnedFd,
    total: usize,
    used: usize,
    next: usize,
    live: BTreeMap<usize, Allocation>,
    freed: BTreeMap<usize, usize>,
    /// The most that was ever allocated at once.
    pub(crate) peak: usize,
}

// SAFETY: `view` is a mapping that the arena owns; nothing about it belongs to a thread.
unsafe impl Send for Arena {}

impl Arena {
    /// Reserves addresses and backing for a device with `total` bytes. Neither costs memory until it is used.
    pub(crate) fn new(ordinal: usize, total: usize) -> std::io::Result<Self> {
        let span = total.saturating_mul(4).clamp(PAGE, DEVICE_STRIDE).next_multiple_of(2 << 20);
        // SAFETY: the name is a C string; the result is checked.
        let fd = unsafe { libc::memfd_create(c"fake-cuda-device".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and ours.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let length = libc::off_t::try_from(span).unwrap_or(libc::off_t::MAX);
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(file.as_raw_fd(), length) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let view = map(0, span, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd())?;
        let wanted = BASE + ordinal * DEVICE_STRIDE;
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let base = map(wanted, span, libc::PROT_NONE, reserve | libc::MAP_FIXED_NOREPLACE, -1)
            .or_else(|_| map(0, span, libc::PROT_NONE, reserve, -1));
        let base = match base {
            Ok(base) => base.as_ptr().expose_provenance(),
            Err(error) => {
                unmap(view.as_ptr(), span);
                return Err(error);
            }
        };
        let (live, freed) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { base, span, view, file, total, used: 0, next: 0, live, freed, peak: 0 })
    }

    /// Whether an address is one of this device's, allocated or not.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.base..self.base + self.span).contains(&address)
    }

    /// Makes an allocation, if the device has room for it; aligned to this or to 512 bytes, whichever is more.
    pub(crate) fn allocate(&mut self, bytes: usize, id: u64, pooled: bool, alignment: usize) -> Option<usize> {
        let size = bytes.checked_next_multiple_of(ALIGNMENT)?;
        if self.used.checked_add(size)? > self.total {
            return None;
        }
        let offset = self.place(size + ALIGNMENT + alignment.saturating_sub(ALIGNMENT))?;
        let offset = offset.next_multiple_of(alignment.max(ALIGNMENT));
        let address = self.base + offset;
        self.next = self.next.max(offset + size + ALIGNMENT);
        self.used += size;
        self.peak = self.peak.max(self.used);
        self.freed.retain(|start, length| *start + *length <= address || *start >= address + size);
        let life = if pooled { Life::Ordered } else { Life::Live };
        self.live.insert(address, Allocation { bytes, id, pooled, life, free_issued: false });
        // SAFETY: the allocation lies inside the view, and nobody else has it.
        unsafe { self.view.as_ptr().add(offset).write_bytes(FRESH, bytes.min(FRESH_BYTES_MAX)) };
        Some(address)
    }

    /// The offset of a free place of `size` bytes: beyond all others while there is room, then the first gap.
    fn place(&self, size: usize) -> Option<usize> {
        if size <= self.span - self.next {
            return Some(self.next);
        }
        let mut start = self.base;
        for (address, allocation) in &self.live {
            if address - start >= size {
                break;
            }
            start = address + allocation.bytes.next_multiple_of(ALIGNMENT) + ALIGNMENT;
        }
        (start + size <= self.base + self.span).then(|| start - self.base)
    }

    /// Ends an allocation. False if none begins there.
    pub(crate) fn release(&mut self, address: usize) -> bool {
        let Some(allocation) = self.live.remove(&address) else { return false };
        let size = allocation.bytes.next_multiple_of(ALIGNMENT);
        self.used -= size;
        self.freed.insert(address, size);
        self.punch(address - self.base, size);
        true
    }

    /// Gives the memory of whole pages back to the system.
    fn punch(&self, offset: usize, size: usize) {
        let (start, end) = (offset.next_multiple_of(PAGE), (offset + size) / PAGE * PAGE);
        let length = end.saturating_sub(start);
        let (Ok(at), Ok(length)) = (libc::off_t::try_from(start), libc::off_t::try_from(length)) else { return };
        if length > 0 {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: the descriptor is open; the range lies in the file. A failure costs memory, nothing else.
            unsafe { libc::fallocate(self.file.as_raw_fd(), mode, at, length) };
        }
    }

    /// What lies in a range.
    pub(crate) fn find(&self, address: usize, bytes: usize) -> Found {
        if let Some((start, allocation)) = self.live.range(..=address).next_back()
            && address < start + allocation.bytes.max(1)
        {
            let fits = bytes <= start + allocation.bytes - address;
            return if fits { Found::Inside(*start) } else { Found::Outside };
        }
        match self.freed.range(..=address).next_back() {
            Some((start, length)) if address < start + length => Found::Freed,
            _ => Found::Outside,
        }
    }

    /// The allocation that begins at an address.
    pub(crate) fn get(&self, start: usize) -> Option<&Allocation> {
        self.live.get(&start)
    }

    /// The allocation that begins at an address.
    pub(crate) fn get_mut(&mut self, start: usize) -> Option<&mut Allocation> {
        self.live.get_mut(&start)
    }

    /// Where the CPU finds the byte at a device address of this arena. Good for as long as the arena is; reading or
    /// writing there is sound within one allocation.
    pub(crate) fn view(&self, address: usize) -> *mut u8 {
        debug_assert!(self.contains(address));
        self.view.as_ptr().wrapping_add(address - self.base)
    }

    /// How many allocations there are.
    pub(crate) fn count(&self) -> usize {
        self.live.len()
    }

    /// How many bytes were asked for by those that there are.
    pub(crate) fn live_bytes(&self) -> usize {
        self.live.values().map(|allocation| allocation.bytes).sum()
    }

    /// Bytes that may still be allocated.
    pub(crate) fn free_bytes(&self) -> usize {
        self.total - self.used
    }

    /// Ends every allocation, as the end of a context does.
    pub(crate) fn clear(&mut self) {
        for address in self.live.keys().copied().collect::<Vec<_>>() {
            self.release(address);
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        unmap(self.view.as_ptr(), self.span);
        unmap(with_exposed_provenance_mut(self.base), self.span);
    }
}

/// Maps memory. `address` 0 leaves the place to the kernel.
fn map(address: usize, bytes: usize, protection: i32, flags: i32, fd: i32) -> std::io::Result<NonNull<u8>> {
    let hint = if address == 0 { null_mut() } else { std::ptr::without_provenance_mut(address) };
    // SAFETY: a new mapping, which replaces none: `MAP_FIXED` is not among the flags.
    let mapped = unsafe { libc::mmap(hint, bytes, protection, flags, fd, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    let Some(pointer) = NonNull::new(mapped.cast::<u8>()) else { return Err(std::io::Error::other("mapped at null")) };
    // A kernel before 4.17 takes MAP_FIXED_NOREPLACE for a hint.
    if address != 0 && pointer.as_ptr().addr() != address {
        unmap(pointer.as_ptr(), bytes);
        return Err(std::io::Error::other("mapped elsewhere"));
    }
    Ok(pointer)
}

/// Unmaps what [`map`] mapped.
fn unmap(pointer: *mut u8, bytes: usize) {
    // SAFETY: every caller owns this mapping and is done with it.
    unsafe { libc::munmap(pointer.cast(), bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_aligned_apart_and_remembered_after_they_are_freed() {
        let mut arena = Arena::new(40, 1 << 20).expect("a memfd");
        let a = arena.allocate(100, 1, false, 0).expect("room");
        let b = arena.allocate(700, 2, false, 0).expect("room");
        assert_eq!((a % ALIGNMENT, b % ALIGNMENT), (0, 0));
        assert!(b >= a + 512 + ALIGNMENT, "no gap between {a:x} and {b:x}");
        assert_eq!(arena.find(a + 99, 1), Found::Inside(a));
        assert_eq!(arena.find(a + 99, 2), Found::Outside);
        assert!(arena.release(a));
        assert!(!arena.release(a));
        assert_eq!(arena.find(a, 1), Found::Freed);
        assert_eq!(arena.live_bytes(), 700);
    }

    #[test]
    fn memory_is_bounded_and_reused_when_the_addresses_run_out() {
        let mut arena = Arena::new(41, 1 << 20).expect("a memfd");
        assert!(arena.allocate((1 << 20) + 1, 1, false, 0).is_none());
        for round in 0..20 {
            let address = arena.allocate(1 << 20, round, false, 0).expect("the device is empty");
            assert!(arena.allocate(1, 99, false, 0).is_none(), "round {round}");
            assert!(arena.release(address));
        }
    }
}
