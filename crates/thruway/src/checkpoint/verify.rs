//! Verifying: every byte of a checkpoint is read and held against the manifest. Memory use does not depend on its size.

use std::collections::{BTreeMap, HashMap};

use super::checksum::{Checksum, Running};
use super::manifest::{GroupRecord, Manifest, TensorRecord};
use super::open::{Checkpoint, read};
use super::restore::first_difference;
use crate::base::{Extent, Result};
use crate::io::policy::PathPolicy;
use crate::model::{Difference, Model};
use crate::transfer::{Cancel, Progress, Receipt, TransferOptions};

/// How to verify a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct VerifyOptions {
    policy: Option<PathPolicy>,
    transfer: TransferOptions,
}

impl VerifyOptions {
    /// Which path the bytes are read by, instead of the session's.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Told the bytes of tensors read so far.
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

/// Bytes that are not those that were saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// The group and the tensor; `None` for what comes before the tensors, and for an index.
    pub tensor: Option<(String, String)>,
    /// Which bytes of the file hold the damage: a chunk of a tensor, or a head.
    pub extent: Extent,
}

/// What verifying found.
#[derive(Debug)]
pub struct Verification {
    /// All damage, group by group.
    pub damage: Vec<Damage>,
    /// What reading the tensors took.
    pub receipt: Receipt,
}

impl Checkpoint {
    /// Reads every byte and holds it against the manifest.
    ///
    /// # Errors
    /// The first byte that cannot be read. Damage is no error: it stands in the result.
    pub fn verify(&self, options: &VerifyOptions) -> Result<Verification> {
        let mut found = Verification { damage: self.damaged_heads()?, receipt: Receipt::default() };
        let mut before = 0;
        for (group, model) in self.manifest.groups.iter().zip(&self.models) {
            let Some(model) = model else { continue };
            let progress = options
                .transfer
                .progress
                .clone()
                .map(|progress| -> Progress { std::sync::Arc::new(move |bytes| progress(before + bytes)) });
            let policy = options.policy.unwrap_or(self.policy);
            let transfer = TransferOptions { progress, policy, ..options.transfer.clone() };
            found.receipt.merge(self.verify_group(group, model, &transfer, &mut found.damage)?);
            before += model.bytes();
        }
        Ok(found)
    }

    fn damaged_heads(&self) -> Result<Vec<Damage>> {
        let mut damage = Vec::new();
        for file in &self.manifest.files {
            let extent = Extent::new(0, file.head_bytes);
            let head = read(&self.context, &self.path.join(&file.name), extent)?;
            if Checksum::of(head.bytes()?) != file.head_checksum {
                damage.push(Damage { file: file.name.clone(), tensor: None, extent });
            }
        }
        Ok(damage)
    }

    fn verify_group(
        &self,
        group: &GroupRecord,
        model: &Model,
        transfer: &TransferOptions,
        damage: &mut Vec<Damage>,
    ) -> Result<Receipt> {
        let Manifest { chunk_bytes, files, .. } = &self.manifest;
        let records: HashMap<&str, &TensorRecord> = group.tensors.iter().map(|record| (record.name.as_str(), record)).collect();
        let mut finish = |entry: usize, running: Running| {
            let record = records[model.entries()[entry].name.as_str()];
            let Some(chunk) = first_difference(&running.finish(), record.chunk_sums()) else { return };
            let from = chunk as u64 * chunk_bytes;
            let extent = Extent::new(record.offset + from, (record.bytes - from).min(*chunk_bytes));
            let tensor = Some((group.name.clone(), record.name.clone()));
            damage.push(Damage { file: files[record.file].name.clone(), tensor, extent });
        };
        let mut present: Option<(usize, Running)> = None;
        let receipt = model.read_all(transfer, |entry, bytes| {
            if present.as_ref().is_none_or(|(open, _)| *open != entry)
                && let Some((entry, running)) = present.replace((entry, Running::new(*chunk_bytes)))
            {
                finish(entry, running);
            }
            if let Some((_, running)) = &mut present {
                running.update(bytes);
            }
        })?;
        if let Some((entry, running)) = present {
            finish(entry, running);
        }
        Ok(receipt)
    }
}

/// How a tensor of one checkpoint differs from that of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDifference {
    /// Its group.
    pub group: String,
    /// Its name.
    pub tensor: String,
    /// What is different.
    pub difference: Difference,
}

impl Manifest {
    /// The tensors that differ from those of another checkpoint, by their checksums alone: no tensor is read. And how many are
    /// the same.
    pub fn compare(&self, other: &Self) -> (Vec<TensorDifference>, usize) {
        type Tensors<'a> = BTreeMap<(&'a str, &'a str), &'a TensorRecord>;
        fn tensors(manifest: &Manifest) -> Tensors<'_> {
            let all = manifest.groups.iter();
            all.flat_map(|group| group.tensors.iter().map(move |tensor| ((group.name.as_str(), tensor.name.as_str()), tensor)))
                .collect()
        }
        let (here, mut there) = (tensors(self), tensors(other));
        let (mut differences, mut same) = (Vec::new(), 0);
        let mut differs = |(group, tensor): (&str, &str), difference| {
            differences.push(TensorDifference { group: group.to_owned(), tensor: tensor.to_owned(), difference });
        };
        for (name, one) in here {
            match there.remove(&name) {
                None => differs(name, Difference::OnlyHere),
                Some(two) if (one.dtype, &one.shape) != (two.dtype, &two.shape) => differs(name, Difference::Kind),
                Some(two) if one.checksum != two.checksum => differs(name, Difference::Bytes),
                Some(_) => same += 1,
            }
        }
        there.into_keys().for_each(|name| differs(name, Difference::OnlyThere));
        (differences, same)
    }
}
