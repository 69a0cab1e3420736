//! The planner: moves in, aligned requests out. Pure: it sees no file, no clock and no engine, so its rules
//! can be tested against a naive copy with random input.
//!
//! A *chunk* is one request. On the page cache's side any byte can be asked for, so neighbours are joined and
//! cut at the chunk size. On the drive's side offsets, lengths and addresses must be aligned:
//!
//! ```text
//! blocks        |       |       |       |       |       |
//! a tensor          [==============================]          wanted
//! its core              [=======================]             straight to its place (if that is aligned too)
//! head, tail        [===]                       [==]          whole blocks into a ring slot, then copied on
//! ```
//!
//! Many small tensors beside one another are read as one range into a slot and copied to their places; when
//! writing they are gathered in one, and what fills no block at either end is written through the page cache.

mod check;
mod planner;
mod wanted;

pub use check::{check, check_direct};

use std::sync::Arc;

use self::planner::Planner;
use self::wanted::{Wanted, by_span, layers};
use crate::base::{Alignment, Extent};
use crate::io::Direction;
use crate::io::policy::{FileFacts, Path, Source, Span};
use crate::memory::Region;

/// How large requests may be, and where the ring pays.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most bytes of one request through the page cache; a multiple of a page.
    pub chunk_bytes: u64,
    /// The same past the page cache.
    pub drive_chunk_bytes: u64,
    /// The most regions of one request.
    pub segments_max: usize,
    /// From this size on a tensor's core goes straight to its place. Below, an extra request for head and tail
    /// would cost more than copying the whole.
    pub straight_bytes_min: u64,
    /// Wanted ranges with at most this many unwanted bytes between them are read as one, through the ring.
    pub gap_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            chunk_bytes: 4 << 20,
            drive_chunk_bytes: 512 << 10,
            segments_max: 256,
            straight_bytes_min: 256 << 10,
            gap_bytes_max: 64 << 10,
        }
    }
}

impl Limits {
    /// These limits with requests of at most so many bytes.
    #[must_use]
    pub fn at_most(self, bytes: u64) -> Self {
        let (chunk_bytes, drive_chunk_bytes) = (self.chunk_bytes.min(bytes), self.drive_chunk_bytes.min(bytes));
        Self { chunk_bytes, drive_chunk_bytes, ..self }
    }
}

/// One request to an engine.
#[derive(Debug)]
pub struct Chunk {
    /// Which of the transfer's files.
    pub file: usize,
    /// Which way.
    pub direction: Direction,
    /// The storage side of the path.
    pub source: Source,
    /// The range that is asked for.
    pub extent: Extent,
    /// How many of its bytes must arrive: fewer than the range holds where the file ends in its last block.
    pub needed: u64,
    /// How many of its bytes were wanted.
    pub wanted: u64,
    /// What offset and length are multiples of.
    pub alignment: Alignment,
    /// The memory side of the path.
    pub placement: Placement,
    /// Why this way.
    pub reason: Arc<str>,
}

/// The memory side of a chunk.
#[derive(Debug)]
pub enum Placement {
    /// The engine moves the bytes straight between the file and these regions, in file order.
    Straight(Vec<Region>),
    /// The bytes pass through a slot of the ring.
    ThroughRing(Vec<Piece>),
}

/// A part of a chunk that passes through the ring.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Where it begins in the slot, in bytes.
    pub at: usize,
    /// Its place in memory.
    pub region: Region,
}

/// Pieces of a chunk, in order, dealt into those that one copy can move: equally long, equally far apart in the slot, and without
/// gaps in memory, as the rows of a slice are.
pub fn rows(pieces: &[Piece]) -> impl Iterator<Item = &[Piece]> {
    let mut rest = pieces;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let pitch = rest.get(1).map_or(0, |second| second.at - first.at);
        let belongs = |pair: &&[Piece]| {
            let [before, after] = pair else { return false };
            after.region.len() == first.region.len()
                && after.at - before.at == pitch
                && before.region.is_followed_by(&after.region)
        };
        let (together, others) = rest.split_at(1 + rest.windows(2).take_while(belongs).count());
        rest = others;
        Some(together)
    })
}

impl Chunk {
    /// How its bytes travel. That the drive's own DMA moved them is yet to be proven.
    pub fn path(&self) -> Path {
        match (self.source, &self.placement) {
            (Source::PageCache, _) => Path::Cached,
            (Source::Direct, _) => Path::Direct,
            (Source::Drive, Placement::Straight(_)) => Path::Plain,
            (Source::Drive, Placement::ThroughRing(_)) => Path::Staged,
        }
    }

    /// Whether some of its bytes pass through the ring on their way to or from memory that only a copy engine reaches.
    pub fn is_staged_for_gpu(&self) -> bool {
        let gpu = |piece: &Piece| !piece.region.kind().is_host_accessible();
        matches!(&self.placement, Placement::ThroughRing(pieces) if pieces.iter().any(gpu))
    }

    /// The same bytes as moves, to be planned again another way.
    pub fn wanted_pieces(&self) -> Vec<(Extent, Region)> {
        let (mut offset, mut pieces) = (self.extent.offset, Vec::new());
        match &self.placement {
            Placement::Straight(regions) => {
                for region in regions {
                    pieces.push((Extent::new(offset, region.len() as u64), region.clone()));
                    offset += region.len() as u64;
                }
            }
            Placement::ThroughRing(through) => {
                for Piece { at, region } in through {
                    pieces.push((Extent::new(self.extent.offset + *at as u64, region.len() as u64), region.clone()));
                }
            }
        }
        pieces
    }
}

/// The chunks of one file's moves in one direction. `spans` cover every move, in order and without gaps.
pub fn plan_file(
    file: usize,
    direction: Direction,
    facts: FileFacts,
    spans: &[Span],
    moves: Vec<(Extent, Region)>,
    limits: Limits,
) -> Vec<Chunk> {
    let mut wanted: Vec<Wanted> = moves.into_iter().map(|(extent, region)| Wanted { extent, region }).collect();
    wanted.retain(|item| !item.extent.is_empty());
    wanted.sort_by_key(|item| item.extent.offset);
    let mut chunks = Vec::new();
    let limits = aligned(limits, facts);
    let drive_limits = Limits { chunk_bytes: limits.drive_chunk_bytes, ..limits };
    for layer in layers(wanted) {
        for (span, inside) in spans.iter().zip(by_span(&layer, spans)) {
            let limits = if span.source == Source::PageCache { limits } else { drive_limits };
            let planner = Planner { file, direction, facts, span, limits };
            match span.source {
                _ if inside.is_empty() => {}
                // A request that holds no whole block cannot go past the page cache.
                Source::Drive | Source::Direct if limits.chunk_bytes == 0 => {
                    let limits = Limits { chunk_bytes: 4096, ..limits };
                    Planner { limits, ..planner }.page_cache(&inside, &mut chunks);
                }
                Source::PageCache => planner.page_cache(&inside, &mut chunks),
                Source::Drive => planner.drive(&inside, &mut chunks),
                Source::Direct => planner.direct(&inside, &mut chunks),
            }
        }
    }
    chunks.sort_by_key(|chunk| chunk.extent.offset);
    chunks
}

/// Limits whose chunks past the page cache are whole blocks of the file.
fn aligned(limits: Limits, facts: FileFacts) -> Limits {
    let rules = facts.direct.into_iter().chain(facts.peer);
    let alignment = rules.map(|rules| rules.offset).max().unwrap_or(Alignment::ONE);
    let drive_chunk_bytes = alignment.down(limits.drive_chunk_bytes);
    Limits { drive_chunk_bytes, segments_max: limits.segments_max.max(1), ..limits }
}

#[cfg(test)]
mod tests;
