//! Memory of a PCI device that other devices reach by DMA, mapped into this process: a GPU's, or a drive's controller memory.
//!
//! Its bytes are reached by drives directly (docs/direct-path.md), and by the CPU too, but past its caches: writing is slow, and
//! reading slower by far. So nothing is staged in it, and it suits no work of the CPU's.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use super::region::{Claims, Region};
use super::{Memory, MemoryKind};
use crate::base::{ByteSize, Error, ErrorKind, PciAddress, Result};

/// Gives buffers of one device's memory.
#[derive(Debug)]
pub struct PeerMemory {
    address: PciAddress,
    /// The device's `p2pmem/allocate`: the kernel takes for each mapping what it maps.
    allocate: OwnedFd,
}

impl PeerMemory {
    /// The memory of the device at `address`, whose `allocate` file was opened for reading and writing.
    pub fn new(address: PciAddress, allocate: OwnedFd) -> Self {
        Self { address, allocate }
    }

    /// The device.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// A buffer of `len` bytes, page-aligned. Their content is whatever was there.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the device has no such piece left.
    pub fn allocate(self: &Arc<Self>, len: usize) -> Result<PeerBuffer> {
        let block = PeerBlock { memory: Arc::clone(self), address: self.map(len)?, len, claims: Claims::default() };
        Ok(PeerBuffer { block: Arc::new(block) })
    }

    fn map(&self, len: usize) -> Result<NonNull<u8>> {
        if len == 0 {
            return Ok(NonNull::dangling());
        }
        let (flags, access) = (MapFlags::SHARED, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, flags, &self.allocate, 0) };
        let refused = |source: std::io::Error| {
            Error::from_io(format!("the device has no {} of memory in one piece", ByteSize(len as u64)), source)
                .with("device", format_args!("pci:{}", self.address))
        };
        let base = mapped.map_err(|errno| match errno {
            rustix::io::Errno::NOMEM => {
                let error = Error::new(ErrorKind::OutOfMemory, refused(errno.into()).message());
                error
                    .with("device", format_args!("pci:{}", self.address))
                    .with_hint("load fewer tensors at a time, or end what else uses the device's memory")
            }
            _ => refused(errno.into()),
        })?;
        NonNull::new(base.cast()).ok_or_else(|| refused(std::io::Error::from_raw_os_error(libc::ENOMEM)))
    }
}

/// A mapped piece of a device's memory.
#[derive(Debug)]
struct PeerBlock {
    memory: Arc<PeerMemory>,
    address: NonNull<u8>,
    len: usize,
    claims: Claims,
}

// SAFETY: a block is an address range and its owner; all access to the bytes goes through `PeerBuffer` and `Region`, whose
// claim rules order it.
unsafe impl Send for PeerBlock {}
// SAFETY: as above; the counters are atomic and the rest never changes.
unsafe impl Sync for PeerBlock {}

// SAFETY: the mapping lives exactly as long as the block and never moves.
unsafe impl Memory for PeerBlock {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Peer(self.memory.address)
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

impl Drop for PeerBlock {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping was made by `map`, and with the last reference to the block goes the last claim.
            let result = unsafe { rustix::mm::munmap(self.address.as_ptr().cast::<c_void>(), self.len) };
            debug_assert!(result.is_ok(), "munmap of our own mapping failed: {result:?}");
        }
    }
}

/// A buffer in a PCI device's memory that transfers fill and drain.
#[derive(Debug)]
pub struct PeerBuffer {
    block: Arc<PeerBlock>,
}

impl PeerBuffer {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.block.len
    }

    /// Whether the buffer holds no byte.
    pub fn is_empty(&self) -> bool {
        self.block.len == 0
    }

    /// The address of the first byte in this process.
    pub fn address(&self) -> usize {
        self.block.address()
    }

    /// The device whose memory this is.
    pub fn device(&self) -> PciAddress {
        self.block.memory.address
    }

    /// Whether nothing claims any of the memory.
    pub(crate) fn is_free(&self) -> bool {
        !self.block.claims.any_at_all()
    }

    /// A writable claim on `range`: the destination of a read from storage.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the buffer, or if a transfer still
    /// reads from the buffer.
    pub fn region(&mut self, range: Range<usize>) -> Result<Region> {
        Region::destination(self.block.clone(), range)
    }

    /// A read-only claim on `range`: the source of a write to storage.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the buffer, or if a transfer still
    /// writes to the buffer.
    pub fn source(&self, range: Range<usize>) -> Result<Region> {
        Region::source(self.block.clone(), range)
    }

    /// Copies `range` to the host, by the CPU and slowly.
    ///
    /// # Errors
    /// As [`source`](Self::source).
    pub fn copy_to_host(&self, range: Range<usize>, target: &mut [u8]) -> Result<()> {
        let source = self.source(range)?;
        if source.len() != target.len() {
            let (have, need) = (target.len(), source.len());
            return Err(Error::new(ErrorKind::InvalidInput, format!("the target holds {have} bytes and the range {need}")));
        }
        // SAFETY: the claim keeps everybody in this process from writing these bytes until the call returns.
        unsafe { source.copy_to_host(target) }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of a device that is none: a file is mapped in its place.
    fn memory(bytes: usize) -> Arc<PeerMemory> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(bytes as u64).expect("room");
        Arc::new(PeerMemory::new("0000:03:00.0".parse().expect("an address"), file.into()))
    }

    #[test]
    fn its_bytes_come_and_go_by_claims_as_those_of_other_memory() {
        let mut buffer = memory(8192).allocate(8192).expect("mapped");
        assert_eq!((buffer.len(), buffer.address() % 4096), (8192, 0));
        let region = buffer.region(100..104).expect("in range");
        assert_eq!(region.kind(), MemoryKind::Peer("0000:03:00.0".parse().expect("an address")));
        assert!(region.kind().is_host_accessible() && !region.kind().is_host());
        // SAFETY: this thread is the only one.
        unsafe { region.copy_from_host(&[1, 2, 3, 4]) };
        assert_eq!(buffer.copy_to_host(100..104, &mut [0; 4]).expect_err("being filled").kind(), ErrorKind::InvalidInput);
        assert!(!buffer.is_free());
        drop(region);
        let mut back = [0; 4];
        buffer.copy_to_host(100..104, &mut back).expect("free");
        assert_eq!(back, [1, 2, 3, 4]);
        assert_eq!(buffer.copy_to_host(0..4, &mut [0; 3]).expect_err("too short").kind(), ErrorKind::InvalidInput);
        assert_eq!(buffer.copy_to_host(8190..8194, &mut back).expect_err("outside").kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_buffer_without_a_byte_maps_nothing_and_an_impossible_one_is_an_error() {
        let memory = memory(4096);
        assert!(memory.allocate(0).expect("nothing to map").is_empty());
        let error = memory.allocate(usize::MAX / 2).expect_err("no address space holds it");
        assert_eq!((error.kind(), error.context("device")), (ErrorKind::OutOfMemory, Some("pci:0000:03:00.0")));
        assert!(error.hint().is_some());
    }
}
