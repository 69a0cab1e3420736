//! Staging: the bytes of a state, as they are at one moment, into a pool of host memory, from where they are written while training
//! goes on.
//!
//! ```text
//! the caller's stream ── what it has queued ──●──────────── waits ──────────────●── what changes the tensors …
//!                                              ╲ event                    event ╱
//! our stream                                    ╲─ copies, piece by piece ─────╱
//! pool                                               [block][block][block] ─► files
//! ```
//! A pool that holds the whole is filled at once. A smaller one is filled by halves: while one is written, the other fills.

use std::ops::Range;
use std::sync::Arc;

use super::layout::{self, Piece, Placed, Stretch};
use super::plan::Plan;
use crate::base::Result;
use crate::cuda::{CallerStream, Event};
use crate::memory::{Copies, CopyStreams, Fence, PoolBlock, Region, StagingPool, copy_to_pool};

/// How much is copied at a time: what others queue on the same copy engine waits for one piece at most. A copy engine is at 0.96 of its
/// limit there.
const PIECE_BYTES: usize = 4 << 20;

/// A tensor to be staged.
#[derive(Debug)]
pub(super) struct Tensor {
    pub(super) region: Region,
    /// Whether the caller lets it be for longer than the others.
    pub(super) guarded: bool,
}

/// A block whose copies are queued.
#[derive(Debug)]
pub(super) struct Filling {
    pub(super) stretches: Vec<Stretch>,
    pub(super) block: PoolBlock,
    /// Done when the block is full.
    pub(super) fence: Fence,
    /// Whether all others are full by then.
    pub(super) is_last: bool,
}

/// A state on its way into the pool.
#[derive(Debug)]
pub(super) struct Staging {
    /// By the caller's numbers; let go when the last copies are queued.
    tensors: Vec<Tensor>,
    /// What is to lie in each block that is not yet queued.
    blocks: std::vec::IntoIter<Vec<Stretch>>,
    /// How many blocks are filled at a time.
    window: usize,
    /// Whether the caller lets some of a GPU's tensors be for longer than others.
    some_guarded: bool,
    pool: Arc<StagingPool>,
    copies: Copies,
}

/// Marks in our stream, for the caller's to wait for.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Behind the copies of what is not guarded, if something is.
    pub(super) first: Option<Event>,
    /// Behind all.
    pub(super) all: Option<Event>,
}

impl Staging {
    /// Lays out the state. Nothing is queued yet.
    pub(super) fn new(plan: &Plan, tensors: Vec<Tensor>, pool: Arc<StagingPool>, streams: Option<Arc<CopyStreams>>) -> Self {
        let blocks = layout::blocks(&placed(plan), pool.block_bytes());
        let window = if blocks.len() <= pool.blocks() { blocks.len() } else { pool.blocks() / 2 };
        let some_guarded = tensors.iter().any(|tensor| tensor.guarded && !tensor.region.kind().is_host_accessible());
        let copies = Copies::new(streams);
        Self { tensors, blocks: blocks.into_iter(), window: window.max(1), some_guarded, pool, copies }
    }

    /// How many bytes of a pool the state takes.
    pub(super) fn bytes(plan: &Plan) -> u64 {
        placed(plan).iter().flatten().map(|placed| placed.extent.length).sum()
    }

    /// Copies are made of what the stream's work leaves behind that is in it by now.
    pub(super) fn begin_after(&self, stream: CallerStream, streams: &CopyStreams) -> Result<()> {
        let mark = stream.mark(streams.gpu())?;
        self.copies.begin_after(&mark)
    }

    /// Whether the copies of everything are queued.
    pub(super) fn is_queued(&self) -> bool {
        self.blocks.len() == 0
    }

    /// Whether some of what is not queued is the caller's to change at once: host memory, and what is not guarded.
    pub(super) fn leaves_unguarded(&self) -> bool {
        let mut left = self.blocks.as_slice().iter().flatten().flat_map(|stretch| &stretch.pieces);
        left.any(|piece| {
            let Tensor { region, guarded } = &self.tensors[piece.tensor];
            !guarded || region.kind().is_host_accessible()
        })
    }

    /// Queues the copies that fill the next blocks: those of a GPU's tensors that are not guarded, then the others. Tensors in host memory
    /// are copied when this returns. Marks are set when everything is queued.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if the driver refuses, [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if blocks were lost in
    /// earlier failures. What was queued is waited for when this value and the blocks are dropped.
    pub(super) fn queue(&mut self, marks: &mut Marks) -> Result<Vec<Filling>> {
        let mut taken: Vec<(Vec<Stretch>, PoolBlock)> = Vec::new();
        for stretches in self.blocks.by_ref().take(self.window) {
            taken.push((stretches, self.pool.take()?));
        }
        let is_last = self.is_queued();
        let mut in_host = Vec::new();
        for (stretches, block) in &mut taken {
            for piece in stretches.iter().flat_map(|stretch| &stretch.pieces) {
                let Tensor { region, guarded } = &self.tensors[piece.tensor];
                if region.kind().is_host_accessible() {
                    in_host.extend(cut(piece, region, block)?);
                } else if self.some_guarded && !guarded {
                    cut(piece, region, block)?.iter().try_for_each(|(from, to)| self.copies.copy(from, to))?;
                }
            }
        }
        if is_last && self.some_guarded {
            marks.first = self.copies.mark_to_host()?;
        }
        let mut filling: Vec<Filling> = Vec::new();
        for (stretches, mut block) in taken {
            for piece in stretches.iter().flat_map(|stretch| &stretch.pieces) {
                let Tensor { region, guarded } = &self.tensors[piece.tensor];
                if !region.kind().is_host_accessible() && (*guarded || !self.some_guarded) {
                    cut(piece, region, &mut block)?.iter().try_for_each(|(from, to)| self.copies.copy(from, to))?;
                }
            }
            filling.push(Filling { stretches, block, fence: self.copies.fence()?, is_last: false });
        }
        if is_last {
            marks.all = self.copies.mark_to_host()?;
            filling.iter_mut().next_back().into_iter().for_each(|last| last.is_last = true);
        }
        // The copy engine works meanwhile.
        copy_to_pool(&in_host)?;
        if is_last {
            self.tensors.clear();
        }
        Ok(filling)
    }

    /// Waits until a block is full.
    ///
    /// # Errors
    /// [`Gpu`](crate::ErrorKind::Gpu) if a copy failed.
    pub(super) fn wait(&mut self, fence: &mut Fence) -> Result<()> {
        self.copies.wait(fence)
    }
}

/// A piece as pairs of regions that are copied at a time.
fn cut(piece: &Piece, tensor: &Region, block: &mut PoolBlock) -> Result<Vec<(Region, Region)>> {
    let Range { start, end } = piece.range;
    let pair = |from: usize| {
        let to = end.min(from + PIECE_BYTES);
        let at = piece.at + (from - start);
        Ok((tensor.slice(from..to), block.region(at..at + (to - from))?))
    };
    (start..end).step_by(PIECE_BYTES).map(pair).collect()
}

/// Where each tensor lies, in each file, under the caller's number for it.
pub(super) fn placed(plan: &Plan) -> Vec<Vec<Placed>> {
    let mut files: Vec<Vec<Placed>> = Vec::new();
    files.resize_with(plan.manifest.files.len(), Vec::new);
    let mut first = 0;
    for (group, sources) in plan.manifest.groups.iter().zip(&plan.sources) {
        for (record, source) in group.tensors.iter().zip(sources) {
            files[record.file].push(Placed { tensor: first + source, extent: record.extent() });
        }
        first += sources.len();
    }
    files
}
