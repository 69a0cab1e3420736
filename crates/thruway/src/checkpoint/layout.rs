//! How the bytes of a checkpoint's files lie in the blocks of a pool. Pure.
//!
//! A file's tensors follow one another without gaps, so what a block holds is a stretch of a file as it will lie there, at the same
//! distance from a page boundary: one request's worth for a drive, however many tensors it is made of.
//!
//! ```text
//! file a   head |=== t0 ===|== t1 ==|===== t2 =====|        file b   head |= t3 =|
//! block 0       [=== t0 ===|== t1 ==|=== t2 =]
//! block 1                                    [= t2 ==] . [= t3 =]
//! ```

use std::ops::Range;

use crate::base::{Alignment, Extent};

/// A tensor's place in its file. `tensor` is the caller's number for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    pub(super) tensor: usize,
    pub(super) extent: Extent,
}

/// A stretch of a file that lies in a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// Which file.
    pub(super) file: usize,
    /// Where in the file.
    pub(super) extent: Extent,
    /// Where in the block it begins, in bytes.
    pub(super) at: usize,
    /// What it is made of, in order.
    pub(super) pieces: Vec<Piece>,
}

/// A part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Which tensor.
    pub(super) tensor: usize,
    /// Which of its bytes.
    pub(super) range: Range<usize>,
    /// Where in the block they lie, in bytes.
    pub(super) at: usize,
}

impl Stretch {
    /// Its place in the block.
    pub(super) fn range(&self) -> Range<usize> {
        self.at..self.at + to_usize(self.extent.length)
    }
}

/// What lies in each block, for files whose tensors are given in the order of their offsets. A block is a multiple of a page, and of two
/// at least.
pub(super) fn blocks(files: &[Vec<Placed>], block_bytes: usize) -> Vec<Vec<Stretch>> {
    let page = to_usize(Alignment::PAGE.bytes());
    let mut blocks: Vec<Vec<Stretch>> = Vec::new();
    let mut cursor = block_bytes;
    for (file, tensors) in files.iter().enumerate() {
        let (Some(first), Some(last)) = (tensors.first(), tensors.last()) else { continue };
        let (mut offset, end) = (first.extent.offset, last.extent.end());
        let mut next = 0;
        while offset < end {
            let phase = to_usize(offset % Alignment::PAGE.bytes());
            let mut at = cursor + (phase + page - cursor % page) % page;
            if at >= block_bytes || blocks.is_empty() {
                blocks.push(Vec::new());
                at = phase;
            }
            let extent = Extent::new(offset, (end - offset).min((block_bytes - at) as u64));
            let pieces = pieces(tensors, &mut next, extent, at);
            if let Some(block) = blocks.last_mut() {
                block.push(Stretch { file, extent, at, pieces });
            }
            cursor = at + to_usize(extent.length);
            offset = extent.end();
        }
    }
    blocks
}

/// The parts of a file's tensors that lie in `extent`. `next` is the first that may, and is moved on.
fn pieces(tensors: &[Placed], next: &mut usize, extent: Extent, at: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    while let Some(Placed { tensor, extent: own }) = tensors.get(*next) {
        let (start, end) = (own.offset.max(extent.offset), own.end().min(extent.end()));
        if own.offset >= extent.end() && !own.is_empty() {
            break;
        }
        if start < end {
            let range = to_usize(start - own.offset)..to_usize(end - own.offset);
            pieces.push(Piece { tensor: *tensor, range, at: at + to_usize(start - extent.offset) });
        }
        if own.end() > extent.end() {
            break;
        }
        *next += 1;
    }
    pieces
}

/// Lengths of what lies in memory.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files whose tensors have these lengths, the first at an offset.
    fn files(lengths: &[(u64, &[u64])]) -> Vec<Vec<Placed>> {
        let mut tensor = 0;
        let file = |(offset, lengths): &(u64, &[u64])| {
            let mut offset = *offset;
            let place = |length: &u64| {
                let placed = Placed { tensor, extent: Extent::new(offset, *length) };
                (offset, tensor) = (offset + length, tensor + 1);
                placed
            };
            lengths.iter().map(place).collect()
        };
        lengths.iter().map(file).collect()
    }

    #[test]
    fn every_byte_lies_in_one_place_at_its_distance_from_a_page_boundary() {
        let cases: [&[(u64, &[u64])]; 5] = [
            &[(4096, &[8192, 4096, 100, 1])],
            &[(96, &[10, 0, 50]), (4096, &[100_000]), (808, &[8, 8, 8])],
            &[(4096, &[0, 0]), (8, &[])],
            &[(4096, &[1; 5000])],
            &[(4095, &[1, 1, 8191, 0, 3])],
        ];
        for (case, lengths) in cases.into_iter().enumerate() {
            let files = files(lengths);
            let wanted: u64 = files.iter().flatten().map(|placed| placed.extent.length).sum();
            for block_bytes in [8192, 12_288, 1 << 20] {
                let blocks = blocks(&files, block_bytes);
                let mut seen: Vec<Vec<bool>> =
                    files.iter().flatten().map(|placed| vec![false; to_usize(placed.extent.length)]).collect();
                let mut staged = 0;
                for block in &blocks {
                    let mut end = 0;
                    for stretch in block {
                        assert!(stretch.at >= end && stretch.range().end <= block_bytes, "case {case}: {stretch:?}");
                        assert_eq!(stretch.at as u64 % 4096, stretch.extent.offset % 4096);
                        end = stretch.at;
                        for piece in &stretch.pieces {
                            assert_eq!(piece.at, end, "no gaps");
                            end += piece.range.len();
                            let placed = files[stretch.file].iter().find(|placed| placed.tensor == piece.tensor).expect("there");
                            let offset = placed.extent.offset + piece.range.start as u64;
                            assert_eq!(offset - stretch.extent.offset, (piece.at - stretch.at) as u64);
                            let bytes = &mut seen[piece.tensor][piece.range.clone()];
                            assert!(bytes.iter().all(|byte| !byte));
                            bytes.fill(true);
                        }
                        assert_eq!(end, stretch.range().end);
                        staged += stretch.extent.length;
                    }
                }
                assert!(seen.iter().flatten().all(|byte| *byte), "case {case}");
                assert_eq!(staged, wanted);
            }
        }
    }

    #[test]
    fn small_files_share_a_block() {
        let blocks = blocks(&files(&[(100, &[10]), (200, &[10]), (4096, &[10])]), 1 << 20);
        assert_eq!(blocks.len(), 1);
        assert_eq!(blocks[0].iter().map(|stretch| stretch.at).collect::<Vec<usize>>(), [100, 200, 4096]);
    }
}
