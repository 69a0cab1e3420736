//! Saving: what is visible under a step's name is whole and durable, and everything before it stays until then.
//!
//! ```text
//! lock → clear what the dead left → room? → stage beside → write ∥ checksums → sync the files → manifest, synced
//!      → sync the staged directory → rename to its name → sync the parent │ committed
//!      → retire what it replaces → retire what retention lets go → unlock
//! ```
//!
//! A step that is there already is refused, unless it is to be replaced. Then the new one is committed under a name of its own
//! (`step-00001000.r1`), which counts from its rename on; only then is the old one taken away, and the new one given the plain
//! name. No filesystem can rename a directory over one that is not empty, and not all can exchange two; this needs neither.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checksum::{self, Checksum};
use super::manifest::{Json, MANIFEST, Manifest, SaveId, World};
use super::names::{DirectoryName, Listing};
use super::open::ensure_whole;
use super::plan::Plan;
use super::ranks::Ranks;
use super::retention::Retention;
use super::stale::{Name, Previous};
use super::tally::Tally;
use super::{Checkpoints, lock, recover};
use crate::base::{ByteSize, Error, ErrorKind, Result};
use crate::cuda::CallerStream;
use crate::io::policy::{Path as TransferPath, PathPolicy};
use crate::memory::{MemoryKind, Region};
use crate::model::{Form, Source, Writer};
use crate::transfer::{Cancel, Move, Progress, Receipt, TransferOptions, run};

/// A set of tensors that belong together: a model's, an optimizer's, …
#[derive(Clone, Debug)]
pub struct Group {
    /// Its name: any text.
    pub name: String,
    /// The tensors, in host memory or in that of the session's GPU. Names are unique within a group.
    pub tensors: Vec<Source>,
    /// Text pairs for the `__metadata__` of its files.
    pub metadata: BTreeMap<String, String>,
}

impl Group {
    /// A group of these tensors.
    pub fn new(name: impl Into<String>, tensors: Vec<Source>) -> Self {
        Self { name: name.into(), tensors, metadata: BTreeMap::new() }
    }
}

/// How to save a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct CheckpointOptions {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) world: World,
    pub(super) max_shard_bytes: Option<u64>,
    pub(super) chunk_bytes: Option<u64>,
    pub(super) ranks: Option<Ranks>,
    replace: bool,
    pub(super) retention: Retention,
    pub(super) trained: HashSet<Name>,
    /// What the trained tensors were before.
    pub(super) previous: Previous,
    policy: Option<PathPolicy>,
    pub(super) transfer: TransferOptions,
}

impl CheckpointOptions {
    /// Text pairs of the user's, for the manifest.
    #[must_use]
    pub fn metadata(mut self, metadata: BTreeMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }

    /// Who saves: for the manifest.
    #[must_use]
    pub fn world(mut self, world: World) -> Self {
        self.world = world;
        self
    }

    /// Saves one checkpoint together with other processes: all of them call, each with groups of its own, whose names no other uses.
    /// The first commits what all have written; its metadata, layout of the world and retention count. The manifest's structure is a
    /// list of theirs, by rank. Who fails before it calls tells the others by [`Ranks::fail`].
    #[must_use]
    pub fn ranks(mut self, ranks: Ranks) -> Self {
        self.ranks = Some(ranks);
        self
    }

    /// The size of a shard, 5 GB unless told otherwise. A larger tensor gets one of its own.
    #[must_use]
    pub fn max_shard_size(mut self, size: ByteSize) -> Self {
        self.max_shard_bytes = Some(size.bytes());
        self
    }

    /// How much of a tensor has a checksum of its own, a multiple of 4 KiB; 16 MiB unless told otherwise.
    #[must_use]
    pub fn chunk_size(mut self, size: ByteSize) -> Self {
        self.chunk_bytes = Some(size.bytes());
        self
    }

    /// Replaces a checkpoint of the same step, which stays until the new one is committed.
    #[must_use]
    pub fn replace(mut self) -> Self {
        self.replace = true;
        self
    }

    /// Which checkpoints stay when this one is committed.
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// Tensors that every step changes, by the names of their groups and their own. Those that a [`Checkpointer`](super::Checkpointer)
    /// finds to have the very bytes of the checkpoint that it saved before are warned about.
    #[must_use]
    pub fn trained(mut self, names: impl IntoIterator<Item = (String, String)>) -> Self {
        self.trained.extend(names);
        self
    }

    /// Which path, instead of the session's.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Told the bytes written so far.
    #[must_use]
    pub fn progress(mut self, progress: Progress) -> Self {
        self.transfer.progress = Some(progress);
        self
    }

    /// Begins when what is in this stream by now is done.
    #[must_use]
    pub fn after(mut self, stream: CallerStream) -> Self {
        self.transfer.after = Some(stream);
        self
    }

    /// Stops it; then nothing has changed.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.transfer.cancel = cancel;
        self
    }
}

/// A committed checkpoint.
#[derive(Debug)]
pub struct Saved {
    /// Its step.
    pub step: u64,
    /// Where it lies.
    pub path: PathBuf,
    /// What it is known by.
    pub save_id: SaveId,
    /// How it was written.
    pub receipt: Receipt,
    /// The steps that retention let go.
    pub removed: Vec<u64>,
    /// What went wrong around it, the checkpoint itself being whole and durable: an old one that could not be removed, …
    pub warnings: Vec<Error>,
}

/// What wrote the tensors, and the checksums of their chunks.
pub(super) type Filled = Result<(Receipt, Vec<Vec<Checksum>>)>;

impl Checkpoints {
    /// Saves a checkpoint. When this returns it is whole and durable, and nothing but a damaged drive can lose it.
    ///
    /// The tensors must not change meanwhile. `structure` is whatever the caller keeps beside the tensors.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists) if the step is there and not to be replaced, or if another process changes
    /// the directory (the fact `owner` says which); [`NoSpace`](ErrorKind::NoSpace) and
    /// [`LimitReached`](ErrorKind::LimitReached) before a byte is written, as far as can be told; and whatever storage
    /// reports. Then every checkpoint that was there is as it was, and what was written is removed or, after a kill,
    /// recognisable by its name. With the fact `published` the new one is in place and whole, and only a power cut might
    /// still undo it.
    ///
    /// With [`ranks`](CheckpointOptions::ranks) the failure of any of them is everybody's, with the fact `rank`;
    /// [`LimitReached`](ErrorKind::LimitReached) for one that says nothing.
    pub fn save(&self, step: u64, groups: &[Group], structure: &Json, options: CheckpointOptions) -> Result<Saved> {
        self.ensure_reachable(groups)?;
        let plan = Plan::new(step, groups, structure, &options)?;
        if let (Some(after), Some(streams)) = (options.transfer.after, &self.context.streams) {
            // Before anybody looks at the bytes, and the transfer is not the first to.
            after.wait(streams.gpu())?;
        }
        self.commit(plan, &options, |writer, chunk_bytes, transfer| self.move_and_sum(groups, writer, chunk_bytes, transfer))
    }

    /// Saves what is planned. `fill` writes the tensors' bytes into the staged files, and gives the checksums of their chunks, in the
    /// order of the caller's groups.
    pub(super) fn commit(
        &self,
        plan: Plan,
        options: &CheckpointOptions,
        fill: impl FnOnce(&Writer, u64, &TransferOptions) -> Filled,
    ) -> Result<Saved> {
        let Some(ranks) = &options.ranks else { return self.commit_whole(plan, options, fill) };
        let saved = match ranks.is_first() {
            true => self.commit_whole(plan, options, fill),
            false => self.write_part(plan, options, ranks, fill),
        };
        saved.map_err(|error| ranks.cause(error)).inspect_err(|error| ranks.fail(error))
    }

    /// Saves all, but for what other ranks write.
    fn commit_whole(
        &self,
        plan: Plan,
        options: &CheckpointOptions,
        fill: impl FnOnce(&Writer, u64, &TransferOptions) -> Filled,
    ) -> Result<Saved> {
        let step = plan.manifest.step;
        self.create()?;
        let _lock = lock::take(&*self.context.namespace, &self.directory)?;
        let mut warnings = recover::sweep(self)?.warnings;
        let found = Listing::read(&*self.context.namespace, &self.directory)?;
        let name = match found.steps.get(&step).and_then(|names| names.last()) {
            None => DirectoryName { step, replacement: 0 },
            Some(last) if options.replace => DirectoryName { step, replacement: last.replacement.saturating_add(1) },
            Some(last) => {
                return Err(Error::new(ErrorKind::AlreadyExists, format!("step {step} is already saved here"))
                    .with_file(&self.directory.join(last.to_string()))
                    .with_hint("ask for it to be replaced, or remove it"));
            }
        };
        let target = self.directory.join(name.to_string());
        self.ensure_room(&target, &plan)?;
        let save_id = plan.manifest.save_id;
        let written = self.write(plan, &target, options, fill);
        if written.is_err() && options.ranks.is_some() {
            // What the others wrote. What is left of it now is cleared by the next save.
            drop(recover::sweep(self));
        }
        let (receipt, manifest) = written?;
        // Committed: from here on nothing can fail it.
        warnings.extend(options.previous.compare(&manifest, &options.trained));
        if name.replacement > 0 {
            warnings.extend(recover::settle(self, step).err());
        }
        let removed = match self.retire_superseded(options.retention) {
            Ok((removed, failed)) => {
                warnings.extend(failed);
                removed
            }
            Err(error) => {
                warnings.push(error);
                Vec::new()
            }
        };
        let path = self.directory_of(step).unwrap_or_else(|_| self.directory.join(name.to_string()));
        if let Some(ranks) = &options.ranks {
            let name = path.file_name().map_or_else(|| name.to_string(), |name| name.to_string_lossy().into_owned());
            warnings.extend(ranks.close(name, removed.clone()).err());
        }
        Ok(Saved { step, path, save_id, receipt, removed, warnings })
    }

    /// Stages, writes, syncs and publishes.
    fn write(
        &self,
        plan: Plan,
        target: &Path,
        options: &CheckpointOptions,
        fill: impl FnOnce(&Writer, u64, &TransferOptions) -> Filled,
    ) -> Result<(Receipt, Manifest)> {
        let begun = std::time::Instant::now();
        let transfer = &self.transfer(options);
        let Plan { files, mut manifest, sources } = plan;
        let (mut writer, mut receipt) = Writer::begin(&self.context, target, Form::Directory, files, transfer)?;
        if let Some(ranks) = &options.ranks {
            ranks.open(&manifest, name_of(writer.staged()), name_of(target))?;
        }
        let (moved, sums) = fill(&writer, manifest.chunk_bytes, transfer).map_err(|error| writer.name_tensor(error))?;
        receipt.merge(moved);
        fill_in(&mut manifest, &sources, sums);
        writer.sync()?;
        if let Some(ranks) = &options.ranks {
            ranks.gather(&mut manifest, &transfer.cancel)?;
            ensure_whole(&*self.context.namespace, writer.staged(), &manifest).map_err(|error| unseen(&error))?;
        }
        if transfer.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the save was cancelled"));
        }
        // Rounded up: no time at all would be no rate.
        manifest.written_in_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1);
        let text = manifest.to_text()?.into_bytes();
        receipt.merge(writer.add_synced(&self.context, (target, MANIFEST), text, transfer)?);
        writer.publish(&mut receipt)?;
        receipt.seconds = begun.elapsed().as_secs_f64();
        Ok((receipt, manifest))
    }

    /// Writes what is this rank's into the directory that the first rank staged, and waits until that has committed it.
    fn write_part(
        &self,
        plan: Plan,
        options: &CheckpointOptions,
        ranks: &Ranks,
        fill: impl FnOnce(&Writer, u64, &TransferOptions) -> Filled,
    ) -> Result<Saved> {
        let transfer = &self.transfer(options);
        let Plan { files, mut manifest, sources } = plan;
        let stage = ranks.stage(&manifest, &transfer.cancel)?;
        let begun = std::time::Instant::now();
        let (staged, target) = (self.directory.join(&stage.staged), self.directory.join(&stage.name));
        let (writer, mut receipt) =
            Writer::join(&self.context, (&staged, &target), files, transfer).map_err(|error| match error.kind() {
                ErrorKind::NotFound => error.with_hint("all ranks save into one directory, on a filesystem that they share"),
                _ => error,
            })?;
        let (moved, sums) = fill(&writer, manifest.chunk_bytes, transfer).map_err(|error| writer.name_tensor(error))?;
        receipt.merge(moved);
        fill_in(&mut manifest, &sources, sums);
        writer.sync()?;
        self.context.namespace.sync_directory(&staged)?;
        if transfer.cancel.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "the save was cancelled"));
        }
        // From here on the files are the first rank's, which may be committing them however long this one waits.
        writer.leave(&mut receipt);
        ranks.hand_in(&manifest)?;
        let outcome = ranks.outcome(&transfer.cancel)?;
        receipt.seconds = begun.elapsed().as_secs_f64();
        let (step, save_id) = (manifest.step, manifest.save_id);
        let warnings = options.previous.compare(&manifest, &options.trained).into_iter().collect();
        Ok(Saved { step, path: self.directory.join(outcome.name), save_id, receipt, removed: outcome.removed, warnings })
    }

    fn transfer(&self, options: &CheckpointOptions) -> TransferOptions {
        TransferOptions { policy: options.policy.unwrap_or(self.policy), after: None, ..options.transfer.clone() }
    }

    /// Writes the tensors from where they lie, and computes the checksums of their chunks on the way: while the bytes lie in
    /// the ring, or, of what goes straight from host memory, there, since the processors have little to do while the drive writes.
    fn move_and_sum(&self, groups: &[Group], writer: &Writer, chunk_bytes: u64, transfer: &TransferOptions) -> Filled {
        let tensors: Vec<&Source> = groups.iter().flat_map(|group| &group.tensors).collect();
        let mut moves: Vec<Move> = Vec::new();
        for (number, group) in groups.iter().enumerate() {
            for source in &group.tensors {
                moves.push(writer.place(number, &source.spec.name, 0, source.region.clone())?);
            }
        }
        let (straight, through): (Vec<usize>, Vec<usize>) =
            (0..tensors.len()).partition(|at| self.goes_straight(&tensors[*at].region, transfer.policy));
        let place = |at: &usize| (moves[*at].file.path.clone(), moves[*at].extent);
        let tally = Arc::new(Tally::new(chunk_bytes, through.iter().map(place)));
        let transfer = TransferOptions { witness: Some(tally.clone()), ..transfer.clone() };
        let bytes = straight.iter().map(|at| tensors[*at].region.host_bytes()).collect::<Result<Vec<&[u8]>>>()?;
        let (moved, beside) = std::thread::scope(|scope| {
            let summing = || checksum::of_all(&bytes, chunk_bytes);
            let beside = std::thread::Builder::new().name("thruway-checksums".to_owned()).spawn_scoped(scope, summing);
            let moved = run(&self.context, moves, &transfer);
            let beside = match beside {
                Ok(beside) => beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => checksum::of_all(&bytes, chunk_bytes),
            };
            (moved, beside)
        });
        let mut receipt = moved?;
        let numbered: Vec<(usize, Region)> =
            through.iter().enumerate().map(|(number, at)| (number, tensors[*at].region.clone())).collect();
        let seen = tally.finish(&self.context, &numbered, &mut receipt)?;
        let mut sums = vec![Vec::new(); tensors.len()];
        for (at, sum) in straight.into_iter().zip(beside).chain(through.into_iter().zip(seen)) {
            sums[at] = sum;
        }
        Ok((receipt, sums))
    }

    /// Whether nearly all of a tensor goes past the ring.
    fn goes_straight(&self, region: &Region, policy: PathPolicy) -> bool {
        let large = region.len() as u64 >= self.context.limits.straight_bytes_min;
        region.kind().is_host_accessible() && large && policy != PathPolicy::Require(TransferPath::Staged)
    }

    /// Refuses tensors that this session cannot read, before anything is made.
    pub(super) fn ensure_reachable(&self, groups: &[Group]) -> Result<()> {
        let gpu = self.context.streams.as_ref().map(|streams| MemoryKind::Gpu(streams.gpu().ordinal()));
        for source in groups.iter().flat_map(|group| &group.tensors) {
            let kind = source.region.kind();
            if kind.is_host_accessible() {
                source.region.host_bytes().map_err(|error| error.with_tensor(&source.spec.name))?;
            } else if gpu != Some(kind) {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "the tensor lies in a GPU's memory that this session is not for",
                )
                .with_tensor(&source.spec.name)
                .with_hint("use a session built for that device"));
            }
        }
        Ok(())
    }
}

fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// What another rank says that it has written, and this one does not see.
fn unseen(error: &Error) -> Error {
    Error::new(error.kind(), format!("rank 0 does not see what the other ranks wrote: {}", error.message()))
        .with_hint("save to a filesystem that all ranks share")
}

/// Puts the checksums, which stand in the caller's order, into the manifest.
fn fill_in(manifest: &mut Manifest, sources: &[Vec<usize>], mut sums: Vec<Vec<Checksum>>) {
    let chunk_bytes = manifest.chunk_bytes;
    let mut first = 0;
    for (group, sources) in manifest.groups.iter_mut().zip(sources) {
        for (tensor, source) in group.tensors.iter_mut().zip(sources) {
            tensor.set_chunk_sums(std::mem::take(&mut sums[first + source]), chunk_bytes);
        }
        first += sources.len();
    }
}
