//! Pinned host memory: page-aligned, registered with the CUDA driver, so that a GPU's copy engine reads and writes it
//! by itself and beside the CPU.
//!
//! Use it for staging, small and reused: pinning costs up to 0.45 s a GiB of fresh memory. Do not use it for
//! tensors. It is ordinary cached memory (never write-combined, which would be slow to read back), and it comes from
//! our own mapping rather than from the driver's allocator, whose blocks begin anywhere and would not suit `O_DIRECT`.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::host::{HostBlock, prefault};
use super::region::Claims;
use super::{Memory, MemoryKind, SlabSource};
use crate::base::{ByteSize, Error, Processors, Result};
use crate::cuda::Gpu;

/// A registered block.
#[derive(Debug)]
struct PinnedBlock {
    /// Unmapped only once the driver has let go of it.
    block: ManuallyDrop<HostBlock>,
    gpu: Arc<Gpu>,
}

impl PinnedBlock {
    fn new(gpu: &Arc<Gpu>, near: Option<&Processors>, len: usize) -> Result<Self> {
        let block = HostBlock::map(len)?;
        // Fetching the pages is nearly all of what pinning fresh memory costs, and while the driver does it, the copies of
        // other threads seem to wait: first loads were some per cent slower so. Here nobody waits for it.
        // SAFETY: the block was made by `map`, valid for writes.
        let fetch = || unsafe { prefault(block.address(), len) };
        match near {
            Some(near) => near.run(fetch),
            None => fetch(),
        }
        // SAFETY: the range is a mapping of our own, which is unmapped only once it is unpinned.
        let pinned = unsafe { gpu.pin(block.address(), len) };
        pinned.map_err(|error: Error| {
            error.with("bytes", ByteSize(len as u64)).with_hint(
                "raise the limit of locked memory (`ulimit -l`), or pin less: a smaller pool, or a lower THRUWAY_RING_SIZE",
            )
        })?;
        Ok(Self { block: ManuallyDrop::new(block), gpu: Arc::clone(gpu) })
    }
}

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        // While the driver holds the pages, their addresses must not be given to anyone else, so if it does not let go,
        // the mapping stays.
        // SAFETY: no region of the block is left, so no copy over it is in flight.
        if unsafe { self.gpu.unpin(self.block.address()) }.is_ok() {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.block) }
        }
    }
}

// SAFETY: the mapping inside lives as long as the block and never moves.
unsafe impl Memory for PinnedBlock {
    fn kind(&self) -> MemoryKind {
        MemoryKind::Pinned
    }

    fn address(&self) -> usize {
        self.block.address()
    }

    fn len(&self) -> usize {
        self.block.len()
    }

    fn claims(&self) -> &Claims {
        self.block.claims()
    }
}

/// Slabs of pinned memory: what staging to and from a GPU needs.
#[derive(Debug)]
pub struct PinnedSlabs {
    gpu: Arc<Gpu>,
    near: Option<Processors>,
}

impl PinnedSlabs {
    /// Slabs that this GPU's driver knows, in the memory beside the processors near it, where some are nearer than others.
    /// (Registered portably: every GPU of the process may use them.)
    pub fn new(gpu: Arc<Gpu>, near: Option<Processors>) -> Self {
        Self { gpu, near }
    }
}

impl SlabSource for PinnedSlabs {
    fn allocate(&self, len: usize) -> Result<Arc<dyn Memory>> {
        Ok(Arc::new(PinnedBlock::new(&self.gpu, self.near.as_ref(), len)?))
    }
}
