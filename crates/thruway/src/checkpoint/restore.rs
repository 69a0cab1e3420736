//! Restoring: tensors through the way of every load, their checksums computed while their bytes pass through the ring, and of what
//! goes straight to its place, from there.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Checkpoints;
use super::checksum::Checksum;
use super::manifest::{Manifest, TensorRecord};
use super::open::Checkpoint;
use super::tally::Tally;
use crate::base::{Error, ErrorKind, Result};
use crate::io::policy::PathPolicy;
use crate::model::{LoadOptions, Tensors};
use crate::transfer::{Cancel, Receipt};

/// Tensors of one group.
#[derive(Debug)]
pub struct Loaded {
    /// The tensors.
    pub tensors: Tensors,
    /// How they came.
    pub receipt: Receipt,
    /// Those that were loaded in part, which no checksum is of.
    pub unverified: Vec<String>,
}

/// What to restore, and how.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    step: Option<u64>,
    groups: Option<Vec<String>>,
    fallback: bool,
    policy: Option<PathPolicy>,
    cancel: Cancel,
}

impl RestoreOptions {
    /// This step, instead of the newest.
    #[must_use]
    pub fn step(mut self, step: u64) -> Self {
        self.step = Some(step);
        self
    }

    /// Only these groups.
    #[must_use]
    pub fn groups<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.groups.get_or_insert_default().extend(names.into_iter().map(Into::into));
        self
    }

    /// Takes the one before it if a checkpoint is damaged, and so on. Without this a damaged one is an error.
    #[must_use]
    pub fn fallback(mut self) -> Self {
        self.fallback = true;
        self
    }

    /// Which path, instead of the session's.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Stops it.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }
}

/// A restored checkpoint.
#[derive(Debug)]
pub struct Restored {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The tensors of each group.
    pub groups: BTreeMap<String, Loaded>,
    /// The newer ones that were damaged, and how: only with [`RestoreOptions::fallback`].
    pub passed_over: Vec<(u64, Error)>,
}

impl Checkpoints {
    /// Restores the newest checkpoint, or the one that the options name: every tensor is held against its checksum.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if there is none; what is missing or has the wrong size, all of it at once and before
    /// memory is taken; [`Mismatch`](ErrorKind::Mismatch) for bytes that are not those that were saved, with `tensor`, `file`
    /// and `offset` as facts.
    pub fn restore(&self, options: &RestoreOptions) -> Result<Restored> {
        let mut steps = self.steps()?;
        if let Some(step) = options.step {
            steps.retain(|found| *found <= step);
            if steps.last() != Some(&step) {
                return Err(self.no_such_step(step));
            }
        }
        let mut passed_over = Vec::new();
        while let Some(step) = steps.pop() {
            match self.restore_one(step, options) {
                Ok((checkpoint, groups)) => return Ok(Restored { checkpoint, groups, passed_over }),
                Err(error) if options.fallback && is_damage(&error) && !steps.is_empty() => passed_over.push((step, error)),
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(ErrorKind::NotFound, "there is no checkpoint here").with_file(self.directory()))
    }

    fn restore_one(&self, step: u64, options: &RestoreOptions) -> Result<(Checkpoint, BTreeMap<String, Loaded>)> {
        let checkpoint = self.open(step)?;
        let names = match &options.groups {
            Some(names) => names.clone(),
            None => checkpoint.manifest.groups.iter().map(|group| group.name.clone()).collect(),
        };
        let mut groups = BTreeMap::new();
        for name in names {
            let mut load = LoadOptions::all().cancel(options.cancel.clone());
            if let Some(policy) = options.policy {
                load = load.path(policy);
            }
            let loaded = checkpoint.load(&name, load)?;
            groups.insert(name, loaded);
        }
        Ok((checkpoint, groups))
    }
}

/// Whether an error is about this checkpoint, so that another may be better.
fn is_damage(error: &Error) -> bool {
    use ErrorKind::{Changed, Io, Malformed, Mismatch, NotFound, UnexpectedEof, Unsupported};
    matches!(error.kind(), NotFound | Malformed | UnexpectedEof | Changed | Mismatch | Io | Unsupported)
}

impl Checkpoint {
    /// Loads tensors of a group, as [`Model::load`](crate::Model::load) does, and holds those that are loaded whole against
    /// their checksums.
    ///
    /// # Errors
    /// As there; and [`Mismatch`](ErrorKind::Mismatch) for bytes that are not those that were saved, with `tensor`, `file` and
    /// `offset` as facts.
    pub fn load(&self, group: &str, options: LoadOptions) -> Result<Loaded> {
        let (record, model) = self.find(group)?;
        let Some(model) = model else {
            return Ok(Loaded { tensors: Tensors::default(), receipt: Receipt::default(), unverified: Vec::new() });
        };
        let place = |record: &TensorRecord| (self.path.join(&self.manifest.files[record.file].name), record.extent());
        let tally = Arc::new(Tally::new(self.manifest.chunk_bytes, record.tensors.iter().map(place)));
        let (tensors, mut receipt) = model.load(options.witness(tally.clone()))?;
        let known: HashMap<&str, usize> =
            record.tensors.iter().enumerate().map(|(number, record)| (record.name.as_str(), number)).collect();
        let (mut whole, mut unverified) = (Vec::new(), Vec::new());
        for tensor in tensors.iter() {
            match known.get(tensor.name()) {
                Some(number) if record.tensors[*number].shape == tensor.shape() => whole.push((*number, tensor.region()?)),
                _ => unverified.push(tensor.name().to_owned()),
            }
        }
        for ((number, _), sums) in whole.iter().zip(tally.finish(&self.context, &whole, &mut receipt)?) {
            let record = &record.tensors[*number];
            if let Some(chunk) = first_difference(&sums, record.chunk_sums()) {
                return Err(self.mismatch(record, chunk));
            }
        }
        Ok(Loaded { tensors, receipt, unverified })
    }

    /// The error for a chunk that is not what was saved.
    fn mismatch(&self, record: &TensorRecord, chunk: usize) -> Error {
        let Manifest { chunk_bytes, files, .. } = &self.manifest;
        let from = chunk as u64 * chunk_bytes;
        Error::new(ErrorKind::Mismatch, "the tensor's bytes are not those that were saved")
            .with_tensor(&record.name)
            .with_file(&self.path.join(&files[record.file].name))
            .with("offset", record.offset + from)
            .with("length", (record.bytes - from).min(*chunk_bytes))
            .with_hint("restore another step; `thruway checkpoint verify` lists every damaged tensor")
    }
}

/// The first place at which two lists of the same length differ.
pub(super) fn first_difference(found: &[Checksum], expected: &[Checksum]) -> Option<usize> {
    (0..found.len().max(expected.len())).find(|at| found.get(*at) != expected.get(*at))
}
