//! Verifying: every byte of a model is read, and compared with another model if one is given. Memory use does not
//! depend on the model's size.

use super::open::Model;
use super::stream::{StreamOptions, StreamWindow, WINDOW_BYTES, after, stream};
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

    /// Told the bytes read so far; of two models that are compared, those of both.
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
        self.digests_by(&StreamOptions { transfer, window_bytes: WINDOW_BYTES, in_host_memory: true })
    }

    /// Reads every byte, and hands them to `take`: which entry, and the next bytes of it. Entries are in order.
    pub(crate) fn read_all(&self, options: &TransferOptions, mut take: impl FnMut(usize, &[u8])) -> Result<Receipt> {
        let options = StreamOptions { transfer: options.clone(), window_bytes: WINDOW_BYTES, in_host_memory: true };
        stream(self, &options, |StreamWindow { buffer, parts }| {
            let bytes = buffer.bytes()?;
            parts.iter().for_each(|part| take(part.entry, &bytes[part.at..part.at + part.length]));
            Ok(buffer)
        })
    }

    fn digests_by(&self, options: &StreamOptions) -> Result<(Vec<Digest>, Receipt)> {
        let mut digesters = vec![None::<Digester>; self.entries.len()];
        let mut digests = vec![Digest::of(&[]); self.entries.len()];
        let receipt = stream(self, options, |StreamWindow { buffer, parts }| {
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
            let progress = after(options.transfer.progress.as_ref(), self.bytes());
            let transfer = TransferOptions { progress, ..options.transfer.clone() };
            let (other_digests, other_receipt) = other.digests(&VerifyOptions { transfer, policy: options.policy })?;
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::model::{SaveOptions, Source};
    use crate::session::Session;

    #[test]
    fn progress_counts_on_from_window_to_window_and_from_model_to_model() {
        let directory = tempfile::tempdir_in(std::env::temp_dir()).expect("a directory");
        let path = directory.path().join("model.safetensors");
        let session = Session::builder().build().expect("session");
        let buffer = crate::memory::HostBuffer::from_vec(vec![7; 100_000]);
        let source = Source::new("t", crate::format::safetensors::Dtype::U8, [100_000], buffer.source(0..100_000).expect("free"));
        session.save(&[source], &path, SaveOptions::default()).expect("save");
        let model = session.open(&path).expect("open");
        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        let progress = |seen: &Arc<Mutex<Vec<u64>>>| -> Progress {
            let seen = Arc::clone(seen);
            Arc::new(move |bytes| seen.lock().expect("no panic").push(bytes))
        };
        let transfer = TransferOptions { progress: Some(progress(&seen)), ..TransferOptions::default() };
        let (digests, _) =
            model.digests_by(&StreamOptions { transfer, window_bytes: 20_000, in_host_memory: true }).expect("digests");
        assert_eq!(digests, [Digest::of(&[7; 100_000])]);
        let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        assert!(seen.len() >= 5 && seen.iter().max() == Some(&100_000), "{seen:?}");

        let seen: Arc<Mutex<Vec<u64>>> = Arc::default();
        model.verify(Some(&model), &VerifyOptions::default().progress(progress(&seen))).expect("verify");
        let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        assert!(seen.contains(&100_000) && seen.iter().max() == Some(&200_000), "{seen:?}");
    }
}
