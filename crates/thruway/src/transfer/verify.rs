//! Digests of tensors, computed on every processor.

use sha2::{Digest as _, Sha256};

use crate::base::parallel;

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

impl std::fmt::Display for Digest {
    /// `sha256:` and 64 hexadecimal digits.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// A digest in the making, for bytes that arrive piece by piece.
#[derive(Clone, Debug, Default)]
pub struct Digester(Sha256);

impl Digester {
    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes taken.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// The digest of each slice, computed on as many threads as there are processors.
pub fn digests(slices: &[&[u8]]) -> Vec<Digest> {
    parallel::each(slices.len(), parallel::processors(), |index| Digest::of(slices[index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_come_in_the_order_of_their_slices_and_equal_the_piecewise_one() {
        let data: Vec<Vec<u8>> = (0..50_u8).map(|i| vec![i; usize::from(i) * 100]).collect();
        let slices: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        for (slice, digest) in slices.iter().zip(digests(&slices)) {
            let mut digester = Digester::default();
            slice.chunks(7).for_each(|piece| digester.update(piece));
            assert_eq!(digester.finish(), digest);
        }
        assert!(digests(&[]).is_empty());
    }

    #[test]
    fn it_is_the_sha_256_that_everyone_else_computes() {
        let known = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), known);
    }
}
