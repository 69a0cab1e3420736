//! Restoring: tensors through the way of every load, and then held against their checksums.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::Checkpoints;
use super::checksum::{Checksum, Running, chunks};
use super::manifest::{Manifest, TensorRecord};
use super::open::Checkpoint;
use crate::base::{Error, ErrorKind, Result, parallel};
use crate::io::policy::PathPolicy;
use crate::memory::Device;
use crate::model::{LoadOptions, Tensor, Tensors};
use crate::transfer::{Cancel, Receipt};

/// How much of a tensor in GPU memory is copied to the host at a time to be checked.
const WINDOW_BYTES: usize = 16 << 20;

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
        let (tensors, receipt) = model.load(options)?;
        let known: HashMap<&str, &TensorRecord> = record.tensors.iter().map(|record| (record.name.as_str(), record)).collect();
        let (mut whole, mut unverified) = (Vec::new(), Vec::new());
        for tensor in tensors.iter() {
            match known.get(tensor.name()) {
                Some(record) if record.shape == tensor.shape() => whole.push((tensor, *record)),
                _ => unverified.push(tensor.name().to_owned()),
            }
        }
        self.check(&whole)?;
        Ok(Loaded { tensors, receipt, unverified })
    }

    /// Holds tensors in memory against their checksums. Of those in host memory the chunks are computed on every processor.
    fn check(&self, tensors: &[(&Tensor, &TensorRecord)]) -> Result<()> {
        let chunk_bytes = self.manifest.chunk_bytes;
        let mut in_host: Vec<(&[u8], &TensorRecord, usize)> = Vec::new();
        for (tensor, record) in tensors {
            if tensor.device() == Device::Host {
                let bytes = tensor.bytes()?;
                let ranges = chunks(record.bytes, chunk_bytes).map(to_usize);
                in_host.extend((0..).zip(ranges).map(|(number, range)| (&bytes[range], *record, number)));
            } else {
                // A kernel on the GPU, or the ring while the bytes pass through it, would do this faster.
                let mut running = Running::new(chunk_bytes);
                tensor.read_by(WINDOW_BYTES, |bytes| running.update(bytes))?;
                if let Some(number) = first_difference(&running.finish(), record.chunk_sums()) {
                    return Err(self.mismatch(record, number));
                }
            }
        }
        let matches = parallel::each(in_host.len(), parallel::processors(), |at| {
            let (bytes, record, number) = in_host[at];
            Checksum::of(bytes) == record.chunk_sums()[number]
        });
        match matches.iter().position(|matches| !matches) {
            Some(at) => Err(self.mismatch(in_host[at].1, in_host[at].2)),
            None => Ok(()),
        }
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

fn to_usize(range: Range<u64>) -> Range<usize> {
    let bound = |value| usize::try_from(value).unwrap_or(usize::MAX);
    bound(range.start)..bound(range.end)
}
