//! Verifying: every byte of a model is read, and compared with another model if one is given. Memory use does not
//! depend on the model's size.

use super::open::Model;
use super::stream::{StreamWindow, stream};
use crate::base::Result;
use crate::io::policy::PathPolicy;
use crate::transfer::verify::{Digest, Digester};
use crate::transfer::{Cancel, Progress, Receipt, TransferOptions};

/// How to verify.
#[derive(Debug, Default)]
pub struct VerifyOptions {
    transfer: TransferOptions,
    policy: Option<PathPolicy>,
}

impl VerifyOptions {
    /// Which path, instead of the session's.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Told the bytes read so far of the current window; windows are of 64 MiB.
    #[must_use]
    pub fn progress(mut self, progress: Progress) -> Self {
        self.transfer.progress = Some(progress);
        self
    }

    /// Stops it.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.transfer.cancel = cancel;
        self
    }
}

/// How a tensor differs between two models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Only the verified model has it.
    OnlyHere,
    /// Only the other model has it.
    OnlyThere,
    /// The dtypes or the shapes differ.
    Kind,
    /// The bytes differ.
    Bytes,
}

impl Difference {
    /// The difference in words.
    pub const fn describe(&self) -> &'static str {
        match self {
            Self::OnlyHere => "is missing in the other",
            Self::OnlyThere => "is only in the other",
            Self::Kind => "has another dtype or shape",
            Self::Bytes => "has other bytes",
        }
    }
}

/// What verifying found.
#[derive(Debug)]
pub struct Verdict {
    /// The digest of each tensor, in the order of the entries.
    pub digests: Vec<Digest>,
    /// The tensors that differ from the other model, by name.
    pub differences: Vec<(String, Difference)>,
    /// What reading took.
    pub receipt: Receipt,
}

impl Model {
    /// Reads every byte and gives the digest of each tensor.
    ///
    /// # Errors
    /// The first byte that cannot be read, with file, tensor and offset.
    pub fn digests(&self, options: &VerifyOptions) -> Result<(Vec<Digest>, Receipt)> {
        let policy = options.policy.unwrap_or(self.policy);
        let transfer = TransferOptions { policy, ..options.transfer.clone() };
        let mut digesters = vec![None::<Digester>; self.entries.len()];
        let mut digests = vec![Digest::of(&[]); self.entries.len()];
        let receipt = stream(self, &transfer, |StreamWindow { buffer, parts }| {
            let bytes = buffer.bytes()?;
            digest_parts(self, bytes, &parts, &mut digesters, &mut digests);
            Ok(buffer)
        })?;
        Ok((digests, receipt))
    }

    /// Reads every byte, and compares with another model: names, dtypes, shapes and bytes, wherever in whichever
    /// files they lie.
    ///
    /// # Errors
    /// The first byte of either that cannot be read. Differences are no error: they stand in the verdict.
    pub fn verify(&self, against: Option<&Self>, options: &VerifyOptions) -> Result<Verdict> {
        let (digests, receipt) = self.digests(options)?;
        let mut differences = Vec::new();
        let mut receipt = receipt;
        if let Some(other) = against {
            let (other_digests, other_receipt) = other.digests(options)?;
            receipt.merge(other_receipt);
            for (entry, digest) in self.entries.iter().zip(&digests) {
                let difference = match other.by_name.get(&entry.name) {
                    None => Some(Difference::OnlyHere),
                    Some(index) => {
                        let there = &other.entries[*index];
                        if (there.dtype, &there.shape) != (entry.dtype, &entry.shape) {
                            Some(Difference::Kind)
                        } else {
                            (other_digests[*index] != *digest).then_some(Difference::Bytes)
                        }
                    }
                };
                differences.extend(difference.map(|difference| (entry.name.clone(), difference)));
            }
            let only_there = other.entries.iter().filter(|entry| !self.by_name.contains_key(&entry.name));
            differences.extend(only_there.map(|entry| (entry.name.clone(), Difference::OnlyThere)));
        }
        Ok(Verdict { digests, differences, receipt })
    }
}

/// Digests the parts of one window: those of different tensors beside one another, those of one tensor in order.
fn digest_parts(
    model: &Model,
    bytes: &[u8],
    parts: &[super::stream::StreamPart],
    unfinished: &mut [Option<Digester>],
    finished: &mut [Digest],
) {
    let (mut whole, mut whole_of) = (Vec::new(), Vec::new());
    for part in parts {
        let slice = &bytes[part.at..part.at + part.length];
        let total = model.entries[part.entry].extent.length;
        if slice.len() as u64 == total {
            whole.push(slice);
            whole_of.push(part.entry);
        } else {
            let digester = unfinished[part.entry].get_or_insert_default();
            digester.update(slice);
            if part.offset + slice.len() as u64 == total
                && let Some(digester) = unfinished[part.entry].take()
            {
                finished[part.entry] = digester.finish();
            }
        }
    }
    for (entry, digest) in whole_of.into_iter().zip(crate::transfer::verify::digests(&whole)) {
        finished[entry] = digest;
    }
}
