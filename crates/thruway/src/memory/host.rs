//! Host memory: owned and page-aligned, or lent by a caller.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::region::{Access, Claims, Region, busy};
use super::{Memory, MemoryKind};
use crate::base::{Alignment, ByteSize, Error, Result};

/// A huge page on x86-64 and, with 4 KiB base pages, on Arm.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Who frees a block's bytes.
enum Owner {
    /// A private anonymous mapping: its base and whole length, which huge-page alignment makes larger than the block.
    Mapping { base: NonNull<c_void>, len: usize },
    /// A value that the caller lent; dropping it ends the loan.
    Lent { _keep_alive: Box<dyn Any + Send + Sync> },
    /// No byte at all.
    Nothing,
}

/// A stretch of host memory.
pub(crate) struct HostBlock {
    address: NonNull<u8>,
    len: usize,
    owner: Owner,
    claims: Claims,
}

// SAFETY: a block is an address range and its owner; all access to the bytes goes through `HostBuffer` and
// `Region`, whose claim rules order it.
unsafe impl Send for HostBlock {}
// SAFETY: as above; the counters are atomic and the rest never changes.
unsafe impl Sync for HostBlock {}

// SAFETY: the mapping or the lent value lives exactly as long as the block and never moves.
unsafe impl Memory for HostBlock {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn address(&self) -> usize {
        self.address.as_ptr() as usize
    }

    fn len(&self) -> usize {
        self.len
    }

    fn claims(&self) -> &Claims {
        &self.claims
    }
}

impl HostBlock {
    /// Maps `len` zeroed bytes, page-aligned; from 4 MiB on aligned to huge pages, which the kernel is then
    /// asked to use: the first touch of fresh memory is what bounds a load into it, and costs 512 times fewer
    /// page faults so.
    pub(crate) fn map(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self { address: NonNull::dangling(), len, owner: Owner::Nothing, claims: Claims::default() });
        }
        let huge = len >= 2 * HUGE_PAGE_BYTES;
        let refused =
            |source: std::io::Error| Error::from_io(format!("cannot allocate {} of host memory", ByteSize(len as u64)), source);
        let mapped = if huge { len.checked_add(HUGE_PAGE_BYTES) } else { Some(len) }
            .ok_or_else(|| refused(std::io::Error::from_raw_os_error(libc::ENOMEM)))?;
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(|errno| refused(errno.into()))?;
        let base = NonNull::new(base).ok_or_else(|| refused(std::io::Error::from_raw_os_error(libc::ENOMEM)))?;
        let mut skip = 0;
        if huge {
            skip = base.as_ptr().cast::<u8>().align_offset(HUGE_PAGE_BYTES);
            // SAFETY: the advised range lies within the mapping just made. Advice that is refused (a kernel
            // without huge pages) changes nothing, so its result does not matter.
            let _advice_only = unsafe { rustix::mm::madvise(base.as_ptr().byte_add(skip), len, Advice::LinuxHugepage) };
        }
        // SAFETY: `skip` is below the huge page size, by which the mapping is larger than the block.
        let address = unsafe { base.cast::<u8>().add(skip) };
        Ok(Self { address, len, owner: Owner::Mapping { base, len: mapped }, claims: Claims::default() })
    }
}

/// Asks the kernel for the pages that lie wholly within a range, so that whoever writes there does not wait for each. Where
/// the kernel cannot (before Linux 5.14), or the memory is no mapping of ordinary pages, nothing happens.
///
/// # Safety
/// The range is valid for writes.
pub(super) unsafe fn prefault(address: usize, len: usize) {
    let page = 4096;
    let (start, end) = (address.next_multiple_of(page), (address + len) / page * page);
    if start < end {
        // SAFETY: promised by the caller; populating changes no byte.
        let _advice_only = unsafe { rustix::mm::madvise(start as *mut c_void, end - start, Advice::LinuxPopulateWrite) };
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Owner::Mapping { base, len } = self.owner {
            // SAFETY: the mapping was made by `map`, and with the last reference to the block goes the last claim.
            let result = unsafe { rustix::mm::munmap(base.as_ptr(), len) };
            debug_assert!(result.is_ok(), "munmap of our own mapping failed: {result:?}");
        }
    }
}

impl fmt::Debug for HostBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBlock({:#x}+{})", self.address(), self.len)
    }
}

/// A buffer of host memory that transfers fill and drain.
///
/// Owned buffers are zeroed and page-aligned, so that O_DIRECT can use them as they are. Use it for the
/// destination of a load and the source of a save; not for staging, which the [`Ring`](super::Ring) does.
#[derive(Debug)]
pub struct HostBuffer {
    block: Arc<HostBlock>,
}

impl HostBuffer {
    /// `len` zeroed bytes, page-aligned.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if the system refuses.
    pub fn new(len: usize) -> Result<Self> {
        Ok(Self { block: Arc::new(HostBlock::map(len)?) })
    }

    /// The buffer that `bytes` already is, in place. Its alignment is whatever the vector's is.
    pub fn from_vec(mut bytes: Vec<u8>) -> Self {
        let len = bytes.len();
        let address = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
        let block = HostBlock { address, len, owner: Owner::Lent { _keep_alive: Box::new(bytes) }, claims: Claims::default() };
        Self { block: Arc::new(block) }
    }

    /// Memory that the caller lends: `keep_alive` is dropped when the buffer and its last region are gone.
    ///
    /// # Safety
    /// The `len` bytes from `address` are initialised and valid for reads and writes until `keep_alive` is dropped, do not
    /// move, and are not touched by anyone else while a [`Region`] of this buffer or a borrow from
    /// [`bytes`](Self::bytes) or [`bytes_mut`](Self::bytes_mut) lives.
    pub unsafe fn lent(address: NonNull<u8>, len: usize, keep_alive: Box<dyn Any + Send + Sync>) -> Self {
        let block = HostBlock { address, len, owner: Owner::Lent { _keep_alive: keep_alive }, claims: Claims::default() };
        Self { block: Arc::new(block) }
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.block.len
    }

    /// Whether the buffer holds no byte.
    pub fn is_empty(&self) -> bool {
        self.block.len == 0
    }

    /// The address of the first byte.
    pub fn address(&self) -> usize {
        self.block.address()
    }

    /// Whether the address is a multiple of `alignment`.
    pub fn is_aligned(&self, alignment: Alignment) -> bool {
        alignment.divides(self.block.address() as u64)
    }

    /// Whether the memory is this buffer's own, and nothing claims any of it.
    pub(crate) fn is_owned_and_free(&self) -> bool {
        matches!(self.block.owner, Owner::Mapping { .. }) && !self.block.claims.any_at_all()
    }

    /// A writable claim on `range`: the destination of a read from storage.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) if the range does not lie within the buffer, or if a transfer
    /// still reads from the buffer.
    pub fn region(&mut self, range: Range<usize>) -> Result<Region> {
        Region::destination(self.block.clone(), range)
    }

    /// A read-only claim on `range`: the source of a write to storage.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) if the range does not lie within the buffer, or if a transfer
    /// still writes to the buffer.
    pub fn source(&self, range: Range<usize>) -> Result<Region> {
        Region::source(self.block.clone(), range)
    }

    /// The bytes.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) while a writable claim on the buffer lives.
    pub fn bytes(&self) -> Result<&[u8]> {
        if self.block.claims.any(Access::Writable) {
            return Err(busy("is being filled from storage"));
        }
        // SAFETY: the block is valid for reads (contract of `Memory`). No writable claim lives, and a new one
        // needs `&mut self`, which this borrow prevents.
        Ok(unsafe { std::slice::from_raw_parts(self.block.address.as_ptr(), self.block.len) })
    }

    /// The bytes, to be changed.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) while any claim on the buffer lives.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.block.claims.any_at_all() {
            return Err(busy("is in use by a transfer"));
        }
        // SAFETY: the block is valid for writes (contract of `Memory`), no claim lives, and a new one needs a
        // borrow of the buffer, which `&mut self` prevents.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.block.address.as_ptr(), self.block.len) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn owned_buffers_are_zeroed_and_aligned_at_every_size() {
        for len in [1, 4095, 4096, 4097, (4 << 20) - 1, 4 << 20, (4 << 20) + 1] {
            let buffer = HostBuffer::new(len).expect("memory");
            assert!(buffer.is_aligned(Alignment::PAGE), "{len}");
            assert!(buffer.bytes().expect("no claim").iter().all(|byte| *byte == 0));
        }
        assert!(HostBuffer::new(0).expect("nothing").bytes().expect("no claim").is_empty());
    }

    #[test]
    fn an_impossible_size_is_an_error_and_no_abort() {
        for len in [usize::MAX, usize::MAX - HUGE_PAGE_BYTES, 1 << 60] {
            assert_eq!(HostBuffer::new(len).expect_err("no machine has it").kind(), ErrorKind::OutOfMemory);
        }
    }

    #[test]
    fn bytes_are_out_of_reach_while_a_claim_could_change_them() {
        let mut buffer = HostBuffer::from_vec(vec![7; 10]);
        let region = buffer.region(2..5).expect("in range");
        assert_eq!(buffer.bytes().expect_err("being filled").kind(), ErrorKind::InvalidInput);
        assert!(buffer.source(0..1).is_err());
        // SAFETY: this thread is the only one.
        unsafe { region.copy_from_host(&[1, 2, 3]) };
        drop(region);
        assert_eq!(buffer.bytes().expect("free"), [7, 7, 1, 2, 3, 7, 7, 7, 7, 7]);
        let source = buffer.source(0..10).expect("free");
        assert!(buffer.bytes().is_ok(), "reading beside a reader is fine");
        assert!(buffer.bytes_mut().is_err());
        assert!(buffer.region(0..1).is_err());
        drop(source);
        assert!(buffer.bytes_mut().is_ok());
    }

    #[test]
    fn a_region_outlives_its_buffer() {
        let mut buffer = HostBuffer::from_vec(vec![0; 4]);
        let region = buffer.region(0..4).expect("in range");
        drop(buffer);
        let mut back = [0; 4];
        // SAFETY: this thread is the only one.
        unsafe {
            region.copy_from_host(&[1, 2, 3, 4]);
            region.copy_to_host(&mut back);
        }
        assert_eq!(back, [1, 2, 3, 4]);
    }

    #[test]
    #[expect(clippy::reversed_empty_ranges, reason = "a range that runs backwards is one of the cases")]
    fn ranges_outside_the_buffer_are_refused() {
        let mut buffer = HostBuffer::from_vec(vec![0; 4]);
        for range in [0..5, 5..5, 3..2] {
            assert_eq!(buffer.region(range).expect_err("outside").kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_lent_buffer_returns_its_owner_when_the_last_region_goes() {
        let mut bytes = vec![5_u8; 3].into_boxed_slice();
        let address = NonNull::new(bytes.as_mut_ptr()).expect("not null");
        let owner = Arc::new(std::sync::Mutex::new(bytes));
        // SAFETY: the box lives as long as the Arc that is lent along, and nothing else touches it.
        let buffer = unsafe { HostBuffer::lent(address, 3, Box::new(Arc::clone(&owner))) };
        let source = buffer.source(1..3).expect("in range");
        drop(buffer);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(source);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
