//! GPU memory: owned, or lent by a framework.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::region::{Claims, Region};
use super::{Memory, MemoryKind, SlabSource};
use crate::base::{ByteSize, Error, ErrorKind, Result};
use crate::cuda::Gpu;

/// Who frees a block's bytes.
enum Owner {
    /// Allocated here, freed here: the address that the driver gave, which the block may begin a little behind.
    Owned { allocation: u64 },
    /// A value that the caller lent; dropping it ends the loan.
    Lent { _keep_alive: Box<dyn Any + Send + Sync> },
}

/// A stretch of GPU memory.
struct GpuBlock {
    gpu: Arc<Gpu>,
    address: u64,
    len: usize,
    owner: Owner,
    claims: Claims,
}

impl fmt::Debug for GpuBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuBlock(cuda:{} {:#x}+{})", self.gpu.ordinal(), self.address, self.len)
    }
}

// SAFETY: the allocation or the lent value lives exactly as long as the block and never moves.
unsafe impl Memory for GpuBlock {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Gpu(self.gpu.ordinal())
    }

    fn address(&self) -> usize {
        // Device addresses have as many bits as pointers on every machine that CUDA supports.
        usize::try_from(self.address).unwrap_or(usize::MAX)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn is_owned(&self) -> bool {
        matches!(self.owner, Owner::Owned { .. }) && self.len > 0
    }

    fn claims(&self) -> &Claims {
        &self.claims
    }
}

impl Drop for GpuBlock {
    fn drop(&mut self) {
        // Before the memory goes: whoever frees memory that a drive may still write to has lost it, or waits for ever.
        self.claims.unregister();
        if let Owner::Owned { allocation } = self.owner
            && self.len > 0
        {
            // SAFETY: allocated by `GpuBuffer::new`, and no region of the block is left. If the call fails, the context is
            // gone and with it the memory, so there is nothing left to do.
            drop(unsafe { self.gpu.free(allocation) });
        }
    }
}

/// Slabs of a GPU's own memory: a window through which drives reach memory that they cannot reach in place.
#[derive(Debug)]
pub struct GpuSlabs {
    gpu: Arc<Gpu>,
}

impl GpuSlabs {
    /// Slabs on this GPU.
    pub fn new(gpu: Arc<Gpu>) -> Self {
        Self { gpu }
    }
}

impl SlabSource for GpuSlabs {
    fn allocate(&self, len: usize) -> Result<Arc<dyn Memory>> {
        Ok(GpuBuffer::on_a_page(&self.gpu, len)?.block)
    }
}

/// A buffer of GPU memory that transfers fill and drain. Its bytes are reached by transfers and kernels, not by the CPU.
#[derive(Debug)]
pub struct GpuBuffer {
    block: Arc<GpuBlock>,
}

impl GpuBuffer {
    /// `len` bytes, aligned to 256 at least. Their content is whatever was there.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if the GPU has no room, with what it has.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let mut address = 0;
        if len > 0 {
            address = gpu.allocate(len).map_err(|error| {
                let error = error.with("device", format_args!("cuda:{}", gpu.ordinal())).with("bytes", ByteSize(len as u64));
                match gpu.free_bytes() {
                    Ok(free) => error.with("free", ByteSize(free)),
                    Err(_) => error,
                }
            })?;
        }
        let block = GpuBlock {
            gpu: Arc::clone(gpu),
            address,
            len,
            owner: Owner::Owned { allocation: address },
            claims: Claims::default(),
        };
        Ok(Self { block: Arc::new(block) })
    }

    /// The same, beginning on a page. The driver aligns large allocations so by itself, and promises 256 bytes.
    fn on_a_page(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        const PAGE: usize = 4096;
        let exact = Self::new(gpu, len)?;
        if exact.block.address.is_multiple_of(PAGE as u64) {
            return Ok(exact);
        }
        drop(exact);
        let mut larger = Self::new(gpu, len + PAGE)?;
        if let Some(block) = Arc::get_mut(&mut larger.block) {
            (block.address, block.len) = (block.address.next_multiple_of(PAGE as u64), len);
        }
        Ok(larger)
    }

    /// Memory that the caller lends: `keep_alive` is dropped when the buffer and its last region are gone.
    ///
    /// # Safety
    /// The `len` bytes from `address` are memory of this GPU, valid until `keep_alive` is dropped, and not touched by
    /// anyone else, on the CPU or on any stream, while a [`Region`] of this buffer lives.
    pub unsafe fn lent(gpu: &Arc<Gpu>, address: u64, len: usize, keep_alive: Box<dyn Any + Send + Sync>) -> Self {
        let owner = Owner::Lent { _keep_alive: keep_alive };
        Self { block: Arc::new(GpuBlock { gpu: Arc::clone(gpu), address, len, owner, claims: Claims::default() }) }
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.block.len
    }

    /// Whether the buffer holds no byte.
    pub fn is_empty(&self) -> bool {
        self.block.len == 0
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.block.address
    }

    /// The GPU whose memory this is.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.block.gpu
    }

    /// Whether the memory is this buffer's own, and nothing claims any of it.
    pub(crate) fn is_owned_and_free(&self) -> bool {
        matches!(self.block.owner, Owner::Owned { .. }) && !self.block.claims.any_at_all()
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

    /// Copies `range` to the host and waits for it.
    ///
    /// # Errors
    /// As [`source`](Self::source), and [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn copy_to_host(&self, range: Range<usize>, target: &mut [u8]) -> Result<()> {
        let source = self.source(range)?;
        if source.len() != target.len() {
            let (have, need) = (target.len(), source.len());
            return Err(Error::new(ErrorKind::InvalidInput, format!("the target holds {have} bytes and the range {need}")));
        }
        if target.is_empty() {
            return Ok(());
        }
        // SAFETY: the source is claimed for the length through this synchronous call.
        unsafe { self.block.gpu.copy_to_host(target, source.address() as u64) }
    }
}
