//! Checksums of tensors: CRC-64/NVME, the checksum that NVMe drives and S3 use, chunk by chunk.
//!
//! Checksums of neighbours combine into that of the whole, so chunks are computed on every processor, in any order, by
//! whoever has the bytes at hand, and a mismatch is found to the chunk.

use std::fmt;
use std::ops::Range;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use serde::de::{Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::base::parallel;

/// How much of a tensor has a checksum of its own, in bytes: long enough that a 140 GB checkpoint has some nine thousand, short
/// enough that a few processors share one tensor.
pub(super) const CHUNK_BYTES: u64 = 16 << 20;

/// A CRC-64/NVME.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Checksum(u64);

impl Checksum {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(crc_fast::checksum(Crc64Nvme, bytes))
    }

    /// The checksum of so many zeros: all that the register's ones at the beginning and its inversion in the end add to that of as
    /// many other bytes.
    pub(super) fn of_zeros(bytes: u64) -> Self {
        Self(!multiplied(!0, power_of_x(bytes)))
    }

    /// That of zeros becomes that of as many bytes behind which the register would hold this, had it been zero before them.
    pub(super) fn with_remainder(self, remainder: u64) -> Self {
        Self(self.0 ^ remainder)
    }

    /// The checksum of these bytes and, behind them, `next_bytes` others.
    #[must_use]
    pub fn followed_by(self, next: Self, next_bytes: u64) -> Self {
        self.shifted(power_of_x(next_bytes), next)
    }

    /// The checksum of these bytes and those of `next` behind them: `shift` is the [`power_of_x`] for their length.
    pub(super) fn shifted(self, shift: u64, next: Self) -> Self {
        Self(multiplied(self.0, shift) ^ next.0)
    }

    /// Reads 16 hexadecimal digits, the letters small: one text for each value.
    pub fn parse(text: &str) -> Option<Self> {
        let plain = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        plain.then(|| u64::from_str_radix(text, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for Checksum {
    /// 16 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "crc64nvme:{self}")
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Digits)
    }
}

struct Digits;

impl Visitor<'_> for Digits {
    type Value = Checksum;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("16 hexadecimal digits in small letters")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Checksum, E> {
        Checksum::parse(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
    }
}

/// The ranges of the chunks of so many bytes. Nothing has one chunk, which is empty.
pub(super) fn chunks(bytes: u64, chunk_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let count = bytes.div_ceil(chunk_bytes).max(1);
    (0..count).map(move |number| number * chunk_bytes..((number + 1) * chunk_bytes).min(bytes))
}

/// The checksum of the whole, of its chunks'.
pub(super) fn combined(sums: &[Checksum], bytes: u64, chunk_bytes: u64) -> Checksum {
    let Some((first, others)) = sums.split_first() else { return Checksum::of(&[]) };
    let Some((last, between)) = others.split_last() else { return *first };
    // All but the last are of one length. Crates compute what follows anew for each, at some hundred times the cost.
    let shift = power_of_x(chunk_bytes);
    let before = between.iter().fold(*first, |before, sum| before.shifted(shift, *sum));
    before.followed_by(*last, bytes - chunk_bytes * (sums.len() as u64 - 1))
}

/// The CRC's polynomial, its terms in the order of the checksum's bits: that of x^0 is the highest. (NVM Express, 64b CRC.)
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// The product of two polynomials, modulo the CRC's.
fn multiplied(one: u64, mut other: u64) -> u64 {
    let mut product = 0;
    for term in (0..64).rev() {
        if one >> term & 1 == 1 {
            product ^= other;
        }
        // Times x.
        other = (other >> 1) ^ if other & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    product
}

/// x to the power of so many bytes' bits, modulo the CRC's polynomial.
pub(super) fn power_of_x(mut bytes: u64) -> u64 {
    // x^8, then its square, the square of that, …
    let (mut power, mut square) = (1 << 63, 1 << 55);
    while bytes > 0 {
        if bytes & 1 == 1 {
            power = multiplied(power, square);
        }
        square = multiplied(square, square);
        bytes >>= 1;
    }
    power
}

/// The checksums of the chunks of each slice, computed on every processor.
pub(super) fn of_all(slices: &[&[u8]], chunk_bytes: u64) -> Vec<Vec<Checksum>> {
    let to_usize = |range: Range<u64>| {
        let bound = |value| usize::try_from(value).unwrap_or(usize::MAX);
        bound(range.start)..bound(range.end)
    };
    let pieces: Vec<(usize, &[u8])> = (0..)
        .zip(slices)
        .flat_map(|(slice, bytes)| chunks(bytes.len() as u64, chunk_bytes).map(move |range| (slice, &bytes[to_usize(range)])))
        .collect();
    let sums = parallel::each(pieces.len(), parallel::processors(), |piece| Checksum::of(pieces[piece].1));
    let mut all: Vec<Vec<Checksum>> = vec![Vec::new(); slices.len()];
    for ((slice, _), sum) in pieces.into_iter().zip(sums) {
        all[slice].push(sum);
    }
    all
}

/// The checksums of the chunks of bytes that arrive piece by piece, in order.
#[derive(Clone, Debug)]
pub(super) struct Running {
    chunk_bytes: u64,
    /// How much of the present chunk has come, and what it gives so far.
    filled: u64,
    present: crc_fast::Digest,
    done: Vec<Checksum>,
}

impl Running {
    /// Before the first byte.
    pub(super) fn new(chunk_bytes: u64) -> Self {
        Self { chunk_bytes, filled: 0, present: crc_fast::Digest::new(Crc64Nvme), done: Vec::new() }
    }

    /// Takes the next bytes.
    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.filled == self.chunk_bytes {
                self.done.push(Checksum(self.present.finalize_reset()));
                self.filled = 0;
            }
            let room = usize::try_from(self.chunk_bytes - self.filled).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.present.update(now);
            self.filled += now.len() as u64;
            bytes = later;
        }
    }

    /// The checksums of all chunks.
    pub(super) fn finish(mut self) -> Vec<Checksum> {
        self.done.push(Checksum(self.present.finalize()));
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|at| u8::try_from(at * 31 % 251).expect("less than 256")).collect()
    }

    #[test]
    fn it_is_the_checksum_that_drives_and_s3_compute() {
        // The check value of the NVM Express specification, and of the catalogue of CRC algorithms.
        assert_eq!(Checksum::of(b"123456789").to_string(), "ae8b14860a799888");
        assert_eq!(Checksum::of(&[]).to_string(), "0000000000000000");
    }

    #[test]
    fn chunks_combine_into_the_whole_however_they_are_cut_and_however_they_arrive() {
        let all = bytes(50_000);
        for (length, chunk) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 4096), (50_000, 4096), (50_000, 50_000), (9, 1)] {
            let data = &all[..length];
            let sums = of_all(&[data], chunk).remove(0);
            assert_eq!(combined(&sums, length as u64, chunk), Checksum::of(data), "{length} by {chunk}");
            for piece in [1, 7, 4096, 60_000] {
                let mut running = Running::new(chunk);
                data.chunks(piece).for_each(|piece| running.update(piece));
                assert_eq!(running.finish(), sums, "{length} by {chunk} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn two_combine_as_others_combine_them_whatever_their_lengths() {
        let all = bytes(9000);
        for (first, second) in [(0, 0), (0, 5), (5, 0), (1, 1), (4096, 4904), (8999, 1), (17, 255)] {
            let (one, two) = (&all[..first], &all[first..first + second]);
            let both = Checksum::of(one).followed_by(Checksum::of(two), second as u64);
            assert_eq!(both, Checksum::of(&all[..first + second]), "{first} and {second}");
        }
        for length in [1, 1 << 24, (1 << 40) + 12_345] {
            let (one, two) = (Checksum::of(b"one"), Checksum::of(b"two"));
            let theirs = crc_fast::checksum_combine(Crc64Nvme, one.0, two.0, length);
            assert_eq!(one.followed_by(two, length).0, theirs, "{length}");
        }
    }

    #[test]
    fn what_a_register_of_zeros_is_after_bytes_tells_their_checksum() {
        for length in [0, 1, 7, 8, 9, 4096, 5001] {
            let (mut register, data) = (0, bytes(length));
            for byte in &data {
                register ^= u64::from(*byte);
                (0..8).for_each(|_| register = register >> 1 ^ if register & 1 == 1 { POLYNOMIAL } else { 0 });
            }
            assert_eq!(Checksum::of_zeros(length as u64).with_remainder(register), Checksum::of(&data), "{length}");
        }
    }

    #[test]
    fn every_single_flipped_bit_changes_it() {
        let mut data = bytes(600);
        let sum = Checksum::of(&data);
        for bit in 0..data.len() * 8 {
            data[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Checksum::of(&data), sum, "bit {bit}");
            data[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn only_one_text_stands_for_a_value() {
        let sum = Checksum::of(b"abc");
        assert_eq!(Checksum::parse(&sum.to_string()), Some(sum));
        for wrong in ["", "0", "AE8B14860A799888", "+e8b14860a799888", "ae8b14860a7998880"] {
            assert_eq!(Checksum::parse(wrong), None, "{wrong}");
        }
    }
}
