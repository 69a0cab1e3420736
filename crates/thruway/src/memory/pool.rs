//! The pool of a checkpoint that is saved beside training: blocks of staging memory of which the caller states the whole. All of
//! them are allocated, and for a GPU pinned, when the pool is made; a block that was taken is back when its last claim goes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::region::{Claims, Region};
use super::{Memory, MemoryKind, SlabSource};
use crate::base::{Error, ErrorKind, Result, parallel};

/// The largest block: large enough that a drive is kept busy by one, small enough that the first is soon full.
const BLOCK_BYTES_MAX: usize = 32 << 20;

/// Into how many blocks a pool is cut at the least, unless that makes them shorter than two pages.
const BLOCKS_MIN: usize = 64;

const PAGE_BYTES: usize = 4096;

/// Blocks of staging memory.
#[derive(Debug)]
pub struct StagingPool {
    shared: Arc<Shared>,
    block_bytes: usize,
    blocks: usize,
}

#[derive(Debug)]
struct Shared {
    free: Mutex<Vec<Arc<dyn Memory>>>,
}

impl Shared {
    fn free(&self) -> MutexGuard<'_, Vec<Arc<dyn Memory>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StagingPool {
    /// A pool of so many bytes, and one block more: so a state of just so many bytes fits, although every file of it begins
    /// where its place on storage asks for.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) or [`LimitReached`](ErrorKind::LimitReached) if there is not so much memory, or not
    /// so much that may be pinned.
    pub fn new(slabs: &dyn SlabSource, bytes: usize) -> Result<Self> {
        let block_bytes = (bytes / BLOCKS_MIN).next_multiple_of(PAGE_BYTES).clamp(2 * PAGE_BYTES, BLOCK_BYTES_MAX);
        let blocks = bytes.div_ceil(block_bytes) + 1;
        let free = (0..blocks)
            .map(|_| slabs.allocate(block_bytes))
            .collect::<Result<Vec<_>>>()
            .map_err(|error| error.with_hint("give the checkpointer a smaller pool: it then works in windows"))?;
        Ok(Self { shared: Arc::new(Shared { free: Mutex::new(free) }), block_bytes, blocks })
    }

    /// The bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// A free block.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if all are taken.
    pub fn take(&self) -> Result<PoolBlock> {
        let block = self.shared.free().pop().ok_or_else(|| {
            Error::new(ErrorKind::OutOfMemory, "the checkpointer's pool was lost in earlier failures of the GPU")
                .with_hint("make a new checkpointer; the GPU may still use the old one's memory")
        })?;
        let shared = Arc::clone(&self.shared);
        Ok(PoolBlock { memory: Arc::new(Taken { block, shared, claims: Claims::default() }) })
    }
}

/// A block that was taken, for as long as it or a claim on it lives.
#[derive(Debug)]
struct Taken {
    block: Arc<dyn Memory>,
    shared: Arc<Shared>,
    claims: Claims,
}

// SAFETY: the block inside is alive and unmoved for as long as this value, and given to one such value at a time.
unsafe impl Memory for Taken {
    fn kind(&self) -> MemoryKind {
        self.block.kind()
    }

    fn address(&self) -> usize {
        self.block.address()
    }

    fn len(&self) -> usize {
        self.block.len()
    }

    fn claims(&self) -> &Claims {
        &self.claims
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.shared.free().push(Arc::clone(&self.block));
    }
}

/// A block of the pool.
#[derive(Debug)]
pub struct PoolBlock {
    memory: Arc<Taken>,
}

impl PoolBlock {
    /// A writable claim on `range`.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the block, or while it is read.
    pub fn region(&mut self, range: std::ops::Range<usize>) -> Result<Region> {
        Region::destination(self.memory.clone(), range)
    }

    /// A read-only claim on `range`.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the block, or while it is filled.
    pub fn source(&self, range: std::ops::Range<usize>) -> Result<Region> {
        Region::source(self.memory.clone(), range)
    }
}

/// Copies regions of host memory to regions of a pool's, on several processors. The pairs are equally long.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput) for memory that the processor does not reach, or of which something may be changing.
pub(crate) fn copy_to_pool(pairs: &[(Region, Region)]) -> Result<()> {
    /// More gain nothing where one already takes a good part of what the memory gives.
    const THREADS_MAX: usize = 8;
    let copy = |at: usize| {
        let (from, to) = &pairs[at];
        let bytes = from.host_bytes()?;
        // SAFETY: `to` is a part of a pool's block that one save has taken; nothing else has a claim on these bytes of it.
        unsafe { to.copy_from_host(bytes) };
        Ok(())
    };
    parallel::each(pairs.len(), parallel::processors().min(THREADS_MAX), copy).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::super::HostSlabs;
    use super::*;

    #[test]
    fn a_block_is_back_when_its_last_claim_goes_and_no_sooner() {
        let pool = StagingPool::new(&HostSlabs, 10_000).expect("memory");
        assert_eq!((pool.block_bytes(), pool.blocks()), (8192, 3));
        let mut taken: Vec<PoolBlock> = (0..3).map(|_| pool.take().expect("free")).collect();
        let mut first = taken.remove(0);
        let region = first.region(0..100).expect("free");
        assert!(first.source(0..10).is_err(), "it is being filled");
        drop(first);
        assert_eq!(pool.take().expect_err("a claim lives").kind(), ErrorKind::OutOfMemory);
        drop(region);
        pool.take().expect("the claim is gone");
    }

    #[test]
    fn a_pool_is_as_large_as_was_asked_for_and_one_block_whatever_the_size() {
        for bytes in [1, 4096, 1 << 20, 100 << 20] {
            let pool = StagingPool::new(&HostSlabs, bytes).expect("memory");
            let all = pool.blocks() * pool.block_bytes();
            assert!(all >= bytes + pool.block_bytes() && all < bytes + 2 * pool.block_bytes(), "{bytes}: {all}");
        }
    }

    #[test]
    fn host_memory_is_copied_byte_by_byte() {
        let pool = StagingPool::new(&HostSlabs, 4096).expect("memory");
        let mut block = pool.take().expect("free");
        let source = super::super::HostBuffer::from_vec((0..200).collect());
        let pairs: Vec<(Region, Region)> = [0..50, 50..200]
            .map(|range| (source.source(range.clone()).expect("free"), block.region(range).expect("free")))
            .into();
        copy_to_pool(&pairs).expect("copied");
        drop(pairs);
        assert_eq!(block.source(0..200).expect("free").host_bytes().expect("host"), source.bytes().expect("host"));
    }
}
