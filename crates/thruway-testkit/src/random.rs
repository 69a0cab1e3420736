//! Random numbers that a seed decides, the same on every machine.

/// A SplitMix64 generator: small, fast, and good enough to choose cases. Print the seed when a test fails.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX);
        usize::try_from(self.next_u64() % bound).unwrap_or(usize::MAX)
    }

    /// True with a chance of `of_8` in 8.
    pub fn chance(&mut self, of_8: u64) -> bool {
        self.next_u64() % 8 < of_8
    }

    /// Random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
        while bytes.len() < len {
            bytes.extend(self.next_u64().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}
