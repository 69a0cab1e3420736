//! The checksums of tensors whose bytes are seen in pieces, in any order, while they pass through the ring.
//!
//! ```text
//! a tensor's chunks   |           c0           |           c1           |  c2   |
//! pieces seen              [======][=====]   [====|===][==]          [====|====]
//! gaps, looked at in memory [====]          [====]      [   ]                    ..
//! ```
//! A piece that crosses from one chunk into the next is summed in two. What is not seen, because it went straight, is a gap: its
//! bytes are summed in memory afterwards, in a GPU's by the GPU.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::checksum::{Checksum, chunks, power_of_x};
use crate::base::{ByteSize, Error, ErrorKind, Extent, Result, parallel};
use crate::memory::Region;
use crate::transfer::{Receipt, TransferContext, Witness, look_at};

/// How much a GPU sums as one piece: so that a gigabyte keeps all of it busy.
const PIECE_BYTES: u64 = 256 << 10;

/// Tensors that lie in files, and the checksums of what was seen of them.
#[derive(Debug)]
pub(super) struct Tally {
    chunk_bytes: u64,
    /// The tensors of each file: where they lie, in order, and their numbers.
    files: HashMap<PathBuf, Vec<(Extent, usize)>>,
    tensors: Vec<Seen>,
}

/// What was seen of a tensor.
#[derive(Debug)]
struct Seen {
    bytes: u64,
    /// Stretches within one chunk each, in the order in which they came.
    parts: Mutex<Vec<Part>>,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    /// In bytes from the tensor's start.
    start: u64,
    bytes: u64,
    sum: Checksum,
}

impl Seen {
    fn parts(&self) -> MutexGuard<'_, Vec<Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tally {
    /// A tally of tensors that lie at these places; they are called by their numbers in this list.
    pub(super) fn new(chunk_bytes: u64, tensors: impl IntoIterator<Item = (PathBuf, Extent)>) -> Self {
        let mut tally = Self { chunk_bytes, files: HashMap::new(), tensors: Vec::new() };
        for (number, (file, extent)) in tensors.into_iter().enumerate() {
            tally.files.entry(file).or_default().push((extent, number));
            tally.tensors.push(Seen { bytes: extent.length, parts: Mutex::default() });
        }
        tally.files.values_mut().for_each(|list| list.sort_by_key(|(extent, _)| (extent.offset, extent.length)));
        tally
    }

    /// Adds a stretch of a tensor.
    fn add(&self, number: usize, start: u64, bytes: &[u8]) {
        let (mut start, mut rest) = (start, bytes);
        while !rest.is_empty() {
            let room = self.chunk_bytes - start % self.chunk_bytes;
            let (now, later) = rest.split_at(to_usize(room).min(rest.len()));
            let part = Part { start, bytes: now.len() as u64, sum: Checksum::of(now) };
            self.tensors[number].parts().push(part);
            (start, rest) = (start + part.bytes, later);
        }
    }

    /// What was not seen of a tensor, cut where chunks end. What was seen twice, or overlaps, counts once.
    fn gaps(&self, number: usize) -> Vec<Range<u64>> {
        let mut parts = self.tensors[number].parts();
        parts.sort_unstable_by_key(|part| part.start);
        let mut end = 0;
        parts.retain(|part| {
            let follows = part.start >= end;
            end = if follows { part.start + part.bytes } else { end };
            follows
        });
        let mut seen = parts.iter().peekable();
        let mut gaps = Vec::new();
        for chunk in chunks(self.tensors[number].bytes, self.chunk_bytes) {
            let mut at = chunk.start;
            while let Some(part) = seen.next_if(|part| part.start < chunk.end) {
                gaps.extend((at < part.start).then_some(at..part.start));
                at = part.start + part.bytes;
            }
            gaps.extend((at < chunk.end).then_some(at..chunk.end));
        }
        gaps
    }

    /// The checksums of the chunks of tensors: their numbers, and their memory, which holds the same bytes. What was not seen is
    /// looked at there; for a GPU's the receipt says how.
    ///
    /// # Errors
    /// As [`look_at`].
    pub(super) fn finish(
        &self,
        context: &TransferContext,
        tensors: &[(usize, Region)],
        receipt: &mut Receipt,
    ) -> Result<Vec<Vec<Checksum>>> {
        let (mut in_host, mut elsewhere) = (Vec::new(), Vec::new());
        for (number, region) in tensors {
            let (number, gaps) = (*number, self.gaps(*number));
            let list = if region.kind().is_host_accessible() { &mut in_host } else { &mut elsewhere };
            list.extend(gaps.into_iter().map(|gap| (number, gap.start, region.slice(to_usize(gap.start)..to_usize(gap.end)))));
        }
        let look = |(number, start, gap): &(usize, u64, Region)| {
            let mut at = *start;
            look_at(context, gap, |bytes| {
                self.add(*number, at, bytes);
                at += bytes.len() as u64;
            })
        };
        let looked = parallel::each(in_host.len(), parallel::processors(), |at| look(&in_host[at]));
        looked.into_iter().collect::<Result<Vec<()>>>()?;
        let bytes = ByteSize(elsewhere.iter().map(|(_, _, gap)| gap.len() as u64).sum());
        if let Err(error) = self.sum_on_gpu(context, &elsewhere) {
            // A GPU's copies go through one stream, whoever queues them.
            elsewhere.iter().try_for_each(look)?;
            let why = error.message();
            receipt.notes.push(format!("checksums of {bytes}: copied through the ring for the CPU, as the GPU cannot: {why}"));
        } else if bytes.0 > 0 {
            receipt.notes.push(format!("checksums of {bytes}: computed on the GPU"));
        }
        Ok(tensors.iter().map(|(number, _)| self.sums(*number)).collect())
    }

    /// Adds stretches of tensors, each within a chunk, that lie in a GPU's memory, which sums them: all of them or, if it cannot, none.
    fn sum_on_gpu(&self, context: &TransferContext, gaps: &[(usize, u64, Region)]) -> Result<()> {
        if gaps.is_empty() {
            return Ok(());
        }
        let streams = context.streams.as_ref().ok_or_else(|| Error::new(ErrorKind::Unsupported, "the session is for none"))?;
        let (mut places, mut pieces) = (Vec::new(), Vec::new());
        for (number, start, gap) in gaps {
            for piece in chunks(gap.len() as u64, PIECE_BYTES) {
                places.push((*number, start + piece.start));
                pieces.push(gap.slice(to_usize(piece.start)..to_usize(piece.end)));
            }
        }
        // Most pieces are of one length.
        let (mut length, mut zeros) = (0, Checksum::of_zeros(0));
        for ((number, start), (piece, remainder)) in places.into_iter().zip(pieces.iter().zip(streams.remainders(&pieces)?)) {
            let bytes = piece.len() as u64;
            if bytes != length {
                (length, zeros) = (bytes, Checksum::of_zeros(bytes));
            }
            self.tensors[number].parts().push(Part { start, bytes, sum: zeros.with_remainder(remainder) });
        }
        Ok(())
    }

    /// The checksums of a tensor's chunks, of which every byte was seen.
    pub(super) fn sums(&self, number: usize) -> Vec<Checksum> {
        debug_assert!(self.gaps(number).is_empty(), "some bytes were not seen");
        chunk_sums(&self.tensors[number], self.chunk_bytes)
    }
}

impl Witness for Tally {
    fn passed(&self, file: &Path, offset: u64, bytes: &[u8]) {
        let Some(tensors) = self.files.get(file) else { return };
        let end = offset + bytes.len() as u64;
        let first = tensors.partition_point(|(extent, _)| extent.end() <= offset);
        for (extent, number) in tensors[first..].iter().take_while(|(extent, _)| extent.offset < end) {
            let (from, to) = (extent.offset.max(offset), extent.end().min(end));
            if from < to {
                self.add(*number, from - extent.offset, &bytes[to_usize(from - offset)..to_usize(to - offset)]);
            }
        }
    }
}

/// The checksums of a tensor's chunks, of which every byte is there once.
fn chunk_sums(seen: &Seen, chunk_bytes: u64) -> Vec<Checksum> {
    let mut parts = std::mem::take(&mut *seen.parts());
    parts.sort_unstable_by_key(|part| part.start);
    let mut parts = parts.into_iter().peekable();
    // Most parts are of one length.
    let (mut length, mut shift) = (0, power_of_x(0));
    let sum_of = |chunk: Range<u64>| {
        let mut sum = Checksum::of(&[]);
        while let Some(part) = parts.next_if(|part| part.start < chunk.end) {
            if part.bytes != length {
                (length, shift) = (part.bytes, power_of_x(part.bytes));
            }
            sum = sum.shifted(shift, part.sum);
        }
        sum
    };
    chunks(seen.bytes, chunk_bytes).map(sum_of).collect()
}

/// Lengths of what lies in memory.
fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::checksum;
    use super::*;

    const CHUNK: u64 = 4096;

    fn data(length: usize) -> Vec<u8> {
        (0..length).map(|at| u8::try_from(at * 31 % 251).expect("less than 256")).collect()
    }

    /// Two neighbours in one file, and what a file holds in front of them.
    fn tally(first: u64, second: u64) -> Tally {
        let place = |offset, length| (PathBuf::from("f"), Extent::new(offset, length));
        Tally::new(CHUNK, [place(100, first), place(100 + first, second)])
    }

    fn sums(tally: &Tally) -> Vec<Vec<Checksum>> {
        tally.tensors.iter().map(|seen| chunk_sums(seen, CHUNK)).collect()
    }

    #[test]
    fn pieces_in_any_order_and_of_any_length_give_the_checksums_of_all_chunks() {
        for (first, second, piece) in [(9000, 5000, 700), (4096, 4096, 4096), (1, 20_000, 3000), (0, 10, 4), (12_288, 1, 100_000)]
        {
            let all = data(first + second);
            let tally = tally(first as u64, second as u64);
            let mut pieces: Vec<(usize, &[u8])> = all.chunks(piece).enumerate().map(|(at, bytes)| (at * piece, bytes)).collect();
            pieces.reverse();
            let middle = pieces.len() / 2;
            pieces.rotate_left(middle);
            pieces.iter().for_each(|(at, bytes)| tally.passed(Path::new("f"), 100 + *at as u64, bytes));
            tally.passed(Path::new("another"), 100, &all);
            assert!(tally.gaps(0).is_empty() && tally.gaps(1).is_empty());
            let (one, two) = all.split_at(first);
            assert_eq!(sums(&tally), checksum::of_all(&[one, two], CHUNK), "{first}, {second} by {piece}");
        }
    }

    #[test]
    fn what_was_not_seen_is_a_gap_cut_where_chunks_end_and_what_came_twice_counts_once() {
        let all = data(10_000);
        let tally = tally(10_000, 0);
        let see = |range: Range<usize>| tally.passed(Path::new("f"), 100 + range.start as u64, &all[range]);
        see(1000..2000);
        see(1500..1700);
        see(1000..2000);
        see(4000..4200);
        assert_eq!(tally.gaps(0), [0..1000, 2000..4000, 4200..8192, 8192..10_000]);
        for gap in tally.gaps(0) {
            tally.add(0, gap.start, &all[to_usize(gap.start)..to_usize(gap.end)]);
        }
        assert!(tally.gaps(0).is_empty());
        assert_eq!(sums(&tally)[0], checksum::of_all(&[&all], CHUNK)[0]);
    }
}
