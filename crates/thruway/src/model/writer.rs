//! Writing: any number of safetensors files, and what else belongs to them, staged beside a name and published under it at once.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::stripes::{self, Stripe};
use crate::base::parallel;
use crate::base::{ByteSize, Error, ErrorKind, Extent, Result};
use crate::format::safetensors::{self, Entry, Index, TensorSpec};
use crate::io::Direction;
use crate::io::policy::{Path as TransferPath, PathPolicy};
use crate::memory::{HostBuffer, Region};
use crate::storage::{self, Access, Buffering, File, Namespace, Staging};
use crate::transfer::{FileRef, Move, Receipt, TransferContext, TransferOptions, run};

/// One safetensors file to be written: its name in the directory, and what goes into it.
#[derive(Debug)]
pub(super) struct ShardPlan {
    pub(super) file_name: String,
    pub(super) specs: Vec<TensorSpec>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// One file to be written, laid out.
#[derive(Debug)]
pub(crate) struct FilePlan {
    /// Its name in the directory.
    pub(crate) name: String,
    /// Its length.
    pub(crate) bytes: u64,
    /// Its first bytes, those before the tensors; of a file without tensors all.
    pub(crate) head: Vec<u8>,
    /// Its tensors, by their place.
    pub(crate) entries: Vec<Entry>,
    /// Which set of tensors they are of: a name is unique within its set only.
    pub(crate) group: usize,
}

/// Lays out the files of one set of tensors: its shards and, where there are several, their index under its name.
///
/// # Errors
/// What [`safetensors::layout`] refuses.
pub(super) fn lay_out(shards: &[ShardPlan], index: Option<(String, Index)>, group: usize) -> Result<Vec<FilePlan>> {
    let shard = |shard: &ShardPlan| {
        let layout = safetensors::layout(&shard.specs, &shard.metadata)?;
        let (name, bytes) = (shard.file_name.clone(), layout.file_bytes);
        Ok(FilePlan { name, bytes, head: layout.head, entries: layout.entries, group })
    };
    let mut files = shards.iter().map(shard).collect::<Result<Vec<FilePlan>>>()?;
    files.extend(index.map(|(name, index)| {
        let head = index.to_json().into_bytes();
        FilePlan { name, bytes: head.len() as u64, head, entries: Vec::new(), group }
    }));
    Ok(files)
}

/// Whether one file is published or a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    File,
    Directory,
}

/// However many descriptors the process has left, a save keeps no more files open than this from their creation to their
/// sync.
const KEPT_OPEN_MAX: usize = 64;

/// How many files are synced at once: enough to keep a drive busy with several, and a network's delay hidden.
const SYNC_THREADS: usize = 8;

/// A file in the making.
#[derive(Debug)]
struct Staged {
    file: Arc<FileRef>,
    /// Where it will stand: for receipts and errors.
    target: PathBuf,
    /// The handle that created it. Only one that was open before the bytes were written is sure to be told by its sync
    /// that some of them were lost.
    created: Option<Arc<dyn File>>,
}

/// Files in the making: created, laid out and sized, not yet visible.
#[derive(Debug)]
pub(crate) struct Writer {
    namespace: Arc<dyn Namespace>,
    staging: Staging,
    stripes: HashMap<usize, Stripe>,
    files: Vec<Staged>,
    /// How many more handles may be kept.
    may_keep: usize,
    /// Of each group the file and the place of each tensor.
    places: Vec<HashMap<String, (usize, Extent)>>,
}

impl Writer {
    /// Creates the files, reserves their space and writes their heads.
    pub(crate) fn begin(
        context: &TransferContext,
        target: &Path,
        form: Form,
        files: Vec<FilePlan>,
        options: &TransferOptions,
    ) -> Result<(Self, Receipt)> {
        Self::begin_striped(context, (target, &[]), form, files, options)
    }

    /// As [`begin`](Self::begin), with the files of tensors spread over the target and a stripe in each of the directories.
    pub(super) fn begin_striped(
        context: &TransferContext,
        (target, directories): (&Path, &[PathBuf]),
        form: Form,
        files: Vec<FilePlan>,
        options: &TransferOptions,
    ) -> Result<(Self, Receipt)> {
        let spread = stripes::spread(&files, directories.len());
        let mut bytes = vec![0; 1 + directories.len()];
        files.iter().zip(&spread).for_each(|(file, to)| bytes[*to] += file.bytes);
        ensure_space(&*context.namespace, target, bytes[0])?;
        let stripes = stripes::begin(&context.namespace, target, form, directories, &bytes[1..])?;
        let namespace = Arc::clone(&context.namespace);
        let (staging, single) = match form {
            Form::File => Staging::file(Arc::clone(&namespace), target).map(|(staging, file)| (staging, Some(file)))?,
            Form::Directory => (Staging::directory(Arc::clone(&namespace), target)?, None),
        };
        Self::create(context, target, (staging, stripes, single), files.into_iter().zip(spread).collect(), options)
    }

    /// Creates the files, each in the target or a stripe, reserves their space and writes their heads.
    fn create(
        context: &TransferContext,
        target: &Path,
        (staging, stripes, mut single): (Staging, HashMap<usize, Stripe>, Option<Arc<dyn File>>),
        files: Vec<(FilePlan, usize)>,
        options: &TransferOptions,
    ) -> Result<(Self, Receipt)> {
        let namespace = Arc::clone(&context.namespace);
        // The transfers need descriptors too.
        let may_keep = storage::open_files_left().map_or(KEPT_OPEN_MAX, |left| KEPT_OPEN_MAX.min(left / 4));
        let mut writer = Self { namespace, staging, stripes, files: Vec::new(), may_keep, places: Vec::new() };
        let mut heads: Vec<(Arc<FileRef>, Vec<u8>)> = Vec::with_capacity(files.len());
        for (number, (FilePlan { name, bytes, head, entries, group }, to)) in files.into_iter().enumerate() {
            let file = match single.take() {
                Some(file) => writer.add(writer.staging.path().to_owned(), target.to_owned(), file, bytes)?,
                None => writer.add_member((target, to), &name, bytes)?,
            };
            heads.push((file, head));
            let groups = writer.places.len().max(group + 1);
            writer.places.resize_with(groups, HashMap::new);
            writer.places[group].extend(entries.into_iter().map(|entry| (entry.name, (number, entry.extent))));
        }
        let receipt = write_heads(context, heads, options).map_err(|error| writer.name_target(error))?;
        Ok((writer, receipt))
    }

    /// As [`begin`](Self::begin), in a directory that another process staged for `target` and will publish.
    pub(crate) fn join(
        context: &TransferContext,
        (staged, target): (&Path, &Path),
        files: Vec<FilePlan>,
        options: &TransferOptions,
    ) -> Result<(Self, Receipt)> {
        ensure_space(&*context.namespace, target, files.iter().map(|file| file.bytes).sum())?;
        let staging = Staging::join(Arc::clone(&context.namespace), staged, target)?;
        let placed = files.into_iter().map(|file| (file, 0)).collect();
        Self::create(context, target, (staging, HashMap::new(), None), placed, options)
    }

    /// Creates a file of a staged directory, or of the stripe with this number and the link to it.
    fn add_member(&mut self, (target, to): (&Path, usize), name: &str, bytes: u64) -> Result<Arc<FileRef>> {
        let (path, file) = match self.stripes.get_mut(&to) {
            Some(stripe) => {
                self.staging.link(name, &stripe.place_of(name))?;
                stripe.staging.member(name)?
            }
            None => self.staging.member(name)?,
        };
        self.add(path, target.join(name), file, bytes)
    }

    /// Reserves the space of a file that was created.
    fn add(&mut self, path: PathBuf, target: PathBuf, file: Arc<dyn File>, bytes: u64) -> Result<Arc<FileRef>> {
        file.allocate(bytes).map_err(|error| error.with("target", shown(&target)))?;
        let created = (self.may_keep > 0).then_some(file);
        self.may_keep = self.may_keep.saturating_sub(1);
        let file = FileRef::new(path);
        self.files.push(Staged { file: Arc::clone(&file), target, created });
        Ok(file)
    }

    /// The move that writes a part of a tensor of a group, `offset` bytes into it, from `region`.
    pub(crate) fn place(&self, group: usize, name: &str, offset: u64, region: Region) -> Result<Move> {
        let Some((file, extent)) = self.places.get(group).and_then(|places| places.get(name)) else {
            return Err(Error::new(ErrorKind::InvalidInput, "the tensor is not part of this save").with_tensor(name));
        };
        let extent = Extent::new(extent.offset + offset, region.len() as u64);
        Ok(Move { file: Arc::clone(&self.files[*file].file), extent, region, direction: Direction::Write })
    }

    /// Where all is staged.
    pub(crate) fn staged(&self) -> &Path {
        self.staging.path()
    }

    /// Where the file with this number is staged.
    pub(crate) fn path(&self, file: usize) -> &Path {
        &self.files[file].file.path
    }

    /// The move that writes a stretch of the file with this number from `region`.
    pub(crate) fn stretch(&self, file: usize, extent: Extent, region: Region) -> Move {
        Move { file: Arc::clone(&self.files[file].file), extent, region, direction: Direction::Write }
    }

    /// Names the tensor that lies at the offset of a failure, and the file by its final name.
    pub(crate) fn name_tensor(&self, error: Error) -> Error {
        let offset = error.context("offset").and_then(|offset| offset.parse::<u64>().ok());
        let number = self.number_of(&error);
        let hit = offset.zip(number).and_then(|(offset, file)| {
            let lies_there =
                |(number, extent): &(usize, Extent)| *number == file && extent.offset <= offset && offset < extent.end();
            self.places.iter().flatten().find(|(_, place)| lies_there(place))
        });
        let error = match hit {
            Some((name, _)) => error.with_tensor(name),
            None => error,
        };
        self.name_target(error)
    }

    /// Names the file of a failure by its final name: nobody knows the temporary one.
    fn name_target(&self, error: Error) -> Error {
        match self.number_of(&error) {
            Some(number) => error.with("target", shown(&self.files[number].target)),
            None => error,
        }
    }

    /// Which file an error is about.
    fn number_of(&self, error: &Error) -> Option<usize> {
        let file = error.context("file")?;
        self.files.iter().position(|known| shown(&known.file.path) == file)
    }

    /// Writes and syncs one more file of a staged directory: what can only be said when all others are written.
    pub(crate) fn add_synced(
        &mut self,
        context: &TransferContext,
        (target, name): (&Path, &str),
        bytes: Vec<u8>,
        options: &TransferOptions,
    ) -> Result<Receipt> {
        let file = self.add_member((target, 0), name, bytes.len() as u64)?;
        let receipt = write_heads(context, vec![(file, bytes)], options).map_err(|error| self.name_target(error))?;
        self.files.last().map_or(Ok(()), |staged| self.sync_one(staged))?;
        Ok(receipt)
    }

    /// Syncs every file and publishes them at once. The receipt's files get their final names.
    pub(super) fn finish(self, receipt: &mut Receipt) -> Result<()> {
        let started = std::time::Instant::now();
        self.sync()?;
        self.publish(receipt)?;
        receipt.seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Publishes what is synced. The receipt's files get their final names.
    pub(crate) fn publish(self, receipt: &mut Receipt) -> Result<()> {
        self.name_files(receipt);
        let Self { namespace, staging, stripes, .. } = self;
        stripes::publish(&*namespace, stripes.into_values(), || staging.publish())
    }

    /// Leaves what was written into a joined directory to the process that published it.
    pub(crate) fn leave(self, receipt: &mut Receipt) {
        self.name_files(receipt);
        self.staging.leave();
    }

    /// Gives a receipt's files their final names.
    fn name_files(&self, receipt: &mut Receipt) {
        let renamed: HashMap<&Path, &PathBuf> =
            self.files.iter().map(|staged| (staged.file.path.as_path(), &staged.target)).collect();
        for file in &mut receipt.files {
            if let Some(target) = renamed.get(file.file.as_path()) {
                file.file = (*target).clone();
            }
        }
    }

    /// Makes the files durable, several at once. After the first failure no further one is begun.
    pub(crate) fn sync(&self) -> Result<()> {
        let failed = AtomicBool::new(false);
        let one = |number: usize| {
            if failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            self.sync_one(&self.files[number]).inspect_err(|_| failed.store(true, Ordering::Relaxed))
        };
        parallel::each(self.files.len(), SYNC_THREADS, one).into_iter().collect()
    }

    fn sync_one(&self, staged: &Staged) -> Result<()> {
        let synced = match &staged.created {
            Some(file) => file.sync(),
            None => self.namespace.open(&staged.file.path, Access::Write, Buffering::PageCache).and_then(|file| file.sync()),
        };
        synced.map_err(|error| error.with("target", shown(&staged.target)))
    }
}

/// A path as it stands in errors.
fn shown(path: &Path) -> String {
    crate::base::error::escaped(&path.to_string_lossy())
}

fn write_heads(context: &TransferContext, heads: Vec<(Arc<FileRef>, Vec<u8>)>, options: &TransferOptions) -> Result<Receipt> {
    let mut moves = Vec::with_capacity(heads.len());
    for (file, bytes) in heads {
        let buffer = HostBuffer::from_vec(bytes);
        let region = buffer.source(0..buffer.len())?;
        moves.push(Move { file, extent: Extent::new(0, region.len() as u64), region, direction: Direction::Write });
    }
    // A head comes from the host, so it cannot go directly.
    let policy = match options.policy {
        PathPolicy::Require(TransferPath::Direct) => PathPolicy::Auto,
        policy => policy,
    };
    // Heads are small and must not count as progress.
    run(context, moves, &TransferOptions { progress: None, policy, ..options.clone() })
}

/// Says before the first byte that the target's filesystem has too little room.
pub(super) fn ensure_space(namespace: &dyn Namespace, target: &Path, bytes: u64) -> Result<()> {
    let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let free = namespace.free_bytes(directory).map_err(|error| error.with("target", shown(target)))?;
    if bytes > free {
        return Err(Error::new(
            ErrorKind::NoSpace,
            format!("this needs {} and the filesystem has {} free", ByteSize(bytes), ByteSize(free)),
        )
        .with_file(target)
        .with_hint("free space there, or write elsewhere"));
    }
    Ok(())
}
