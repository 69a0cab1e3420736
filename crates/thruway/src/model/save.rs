//! Saving: tensors from memory into safetensors files, published at once.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::resolve::{INDEX, SINGLE};
use crate::base::parallel;
use crate::base::{ByteSize, Error, ErrorKind, Extent, Result};
use crate::cuda::CallerStream;
use crate::format::safetensors::{self, Dtype, Index, Layout, TensorSpec};
use crate::io::Direction;
use crate::io::policy::{Path as TransferPath, PathPolicy};
use crate::memory::{HostBuffer, Region};
use crate::storage::{self, Access, Buffering, File, Namespace, Staging};
use crate::transfer::{Cancel, FileRef, Move, Progress, Receipt, TransferContext, TransferOptions, run};

/// A tensor to be saved: its description and its bytes.
#[derive(Debug, Clone)]
pub struct Source {
    /// The name, dtype and shape.
    pub spec: TensorSpec,
    /// The bytes: little-endian, row-major, packed.
    pub region: Region,
}

impl Source {
    /// A tensor of these bytes.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<u64>>, region: Region) -> Self {
        Self { spec: TensorSpec { name: name.into(), dtype, shape: shape.into() }, region }
    }
}

/// How to save.
#[derive(Debug, Default)]
pub struct SaveOptions {
    metadata: BTreeMap<String, String>,
    max_shard_bytes: Option<u64>,
    policy: Option<PathPolicy>,
    transfer: TransferOptions,
}

impl SaveOptions {
    /// Text pairs for the `__metadata__` of the file, or of each of several.
    #[must_use]
    pub fn metadata(mut self, metadata: BTreeMap<String, String>) -> Self {
        self.metadata = metadata;
        self
    }

    /// Writes a directory of shards of at most this size (a larger tensor gets one of its own) with an index.
    #[must_use]
    pub fn max_shard_size(mut self, size: ByteSize) -> Self {
        self.max_shard_bytes = Some(size.bytes());
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

    /// Begins when what is in this stream by now is done: the kernels that write the tensors.
    #[must_use]
    pub fn after(mut self, stream: CallerStream) -> Self {
        self.transfer.after = Some(stream);
        self
    }

    /// Stops it; then nothing at the target has changed.
    #[must_use]
    pub fn cancel(mut self, cancel: Cancel) -> Self {
        self.transfer.cancel = cancel;
        self
    }
}

/// One file to be written: its name in the directory, and what goes into it.
#[derive(Debug)]
pub(super) struct ShardPlan {
    pub(super) file_name: String,
    pub(super) specs: Vec<TensorSpec>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Whether one file is published or a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
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
pub(super) struct Writer {
    namespace: Arc<dyn Namespace>,
    staging: Staging,
    files: Vec<Staged>,
    /// How many more handles may be kept.
    may_keep: usize,
    places: HashMap<String, (usize, Extent)>,
}

impl Writer {
    /// Creates the files, reserves their space and writes their heads and, of several, the index.
    pub(super) fn begin(
        context: &TransferContext,
        target: &Path,
        form: Form,
        shards: Vec<ShardPlan>,
        index: Option<Index>,
        options: &TransferOptions,
    ) -> Result<(Self, Receipt)> {
        let layouts =
            shards.iter().map(|shard| safetensors::layout(&shard.specs, &shard.metadata)).collect::<Result<Vec<Layout>>>()?;
        ensure_space(&*context.namespace, target, layouts.iter().map(|layout| layout.file_bytes).sum())?;
        let namespace = Arc::clone(&context.namespace);
        let (staging, single) = match form {
            Form::File => Staging::file(Arc::clone(&namespace), target).map(|(staging, file)| (staging, Some(file)))?,
            Form::Directory => (Staging::directory(Arc::clone(&namespace), target)?, None),
        };
        // The transfers need descriptors too.
        let may_keep = storage::open_files_left().map_or(KEPT_OPEN_MAX, |left| KEPT_OPEN_MAX.min(left / 4));
        let mut writer = Self { namespace, staging, files: Vec::new(), may_keep, places: HashMap::new() };
        if let Some(file) = single {
            writer.add(
                writer.staging.path().to_owned(),
                target.to_owned(),
                file,
                layouts.iter().map(|all| all.file_bytes).sum(),
            )?;
        } else {
            for (shard, layout) in shards.iter().zip(&layouts) {
                writer.add_member(target, &shard.file_name, layout.file_bytes)?;
            }
        }
        let mut heads: Vec<(Arc<FileRef>, Vec<u8>)> = Vec::new();
        for (number, layout) in layouts.into_iter().enumerate() {
            writer.places.extend(layout.entries.into_iter().map(|entry| (entry.name, (number, entry.extent))));
            heads.push((Arc::clone(&writer.files[number].file), layout.head));
        }
        if let Some(index) = index {
            let text = index.to_json().into_bytes();
            heads.push((writer.add_member(target, INDEX, text.len() as u64)?, text));
        }
        let receipt = write_heads(context, heads, options).map_err(|error| writer.name_target(error))?;
        Ok((writer, receipt))
    }

    /// Creates a file of a staged directory.
    fn add_member(&mut self, target: &Path, name: &str, bytes: u64) -> Result<Arc<FileRef>> {
        let (path, file) = self.staging.member(name)?;
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

    /// The moves that write a part of a tensor, `offset` bytes into it, from `region`.
    pub(super) fn place(&self, name: &str, offset: u64, region: Region) -> Result<Move> {
        let Some((file, extent)) = self.places.get(name) else {
            return Err(Error::new(ErrorKind::InvalidInput, "the tensor is not part of this save").with_tensor(name));
        };
        let extent = Extent::new(extent.offset + offset, region.len() as u64);
        Ok(Move { file: Arc::clone(&self.files[*file].file), extent, region, direction: Direction::Write })
    }

    /// Names the tensor that lies at the offset of a failure, and the file by its final name.
    pub(super) fn name_tensor(&self, error: Error) -> Error {
        let offset = error.context("offset").and_then(|offset| offset.parse::<u64>().ok());
        let number = self.number_of(&error);
        let hit = offset.zip(number).and_then(|(offset, file)| {
            let lies_there =
                |(number, extent): &(usize, Extent)| *number == file && extent.offset <= offset && offset < extent.end();
            self.places.iter().find(|(_, place)| lies_there(place))
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

    /// Syncs every file and publishes them at once. The receipt's files get their final names.
    pub(super) fn finish(self, receipt: &mut Receipt) -> Result<()> {
        let started = std::time::Instant::now();
        self.sync()?;
        let renamed: HashMap<&Path, &PathBuf> =
            self.files.iter().map(|staged| (staged.file.path.as_path(), &staged.target)).collect();
        for file in &mut receipt.files {
            if let Some(target) = renamed.get(file.file.as_path()) {
                file.file = (*target).clone();
            }
        }
        self.staging.publish()?;
        receipt.seconds += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Makes the files durable, several at once. After the first failure no further one is begun.
    fn sync(&self) -> Result<()> {
        let failed = AtomicBool::new(false);
        let sync = |staged: &Staged| match &staged.created {
            Some(file) => file.sync(),
            None => self.namespace.open(&staged.file.path, Access::Write, Buffering::PageCache)?.sync(),
        };
        let one = |number: usize| {
            if failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let staged = &self.files[number];
            sync(staged).map_err(|error| {
                failed.store(true, Ordering::Relaxed);
                error.with("target", shown(&staged.target))
            })
        };
        parallel::each(self.files.len(), SYNC_THREADS, one).into_iter().collect()
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
fn ensure_space(namespace: &dyn Namespace, target: &Path, bytes: u64) -> Result<()> {
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

/// Saves tensors; see [`Session::save`](crate::Session::save).
///
/// # Errors
/// As there.
pub fn save(
    context: &TransferContext,
    policy: PathPolicy,
    tensors: &[Source],
    target: &Path,
    options: SaveOptions,
) -> Result<Receipt> {
    for Source { spec, region } in tensors {
        spec.check_bytes(region.len() as u64)?;
    }
    let transfer = TransferOptions { policy: options.policy.unwrap_or(policy), ..options.transfer };
    let sizes: Vec<u64> = tensors.iter().map(|tensor| tensor.region.len() as u64).collect();
    let specs = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
    let (form, shards, index) = plan_shards(specs, &sizes, options.max_shard_bytes, &options.metadata)?;
    let (writer, mut receipt) = Writer::begin(context, target, form, shards, index, &transfer)?;
    let moves = tensors
        .iter()
        .map(|Source { spec, region }| writer.place(&spec.name, 0, region.clone()))
        .collect::<Result<Vec<Move>>>()?;
    receipt.merge(run(context, moves, &transfer).map_err(|error| writer.name_tensor(error))?);
    writer.finish(&mut receipt)?;
    Ok(receipt)
}

/// One file, or as many shards as the size demands, with their index.
pub(super) fn plan_shards(
    specs: Vec<TensorSpec>,
    sizes: &[u64],
    max_shard_bytes: Option<u64>,
    metadata: &BTreeMap<String, String>,
) -> Result<(Form, Vec<ShardPlan>, Option<Index>)> {
    let Some(max_shard_bytes) = max_shard_bytes else {
        return Ok((Form::File, vec![ShardPlan { file_name: SINGLE.to_owned(), specs, metadata: metadata.clone() }], None));
    };
    if max_shard_bytes == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "a shard cannot hold 0 bytes").with_hint("choose a size such as 5GB"));
    }
    let groups = safetensors::split_into_shards(sizes, max_shard_bytes);
    let count =
        u32::try_from(groups.len()).map_err(|_| Error::new(ErrorKind::InvalidInput, "more shards than names for them"))?;
    if count <= 1 {
        let shard = ShardPlan { file_name: SINGLE.to_owned(), specs, metadata: metadata.clone() };
        return Ok((Form::Directory, vec![shard], None));
    }
    let mut weight_map = BTreeMap::new();
    let mut shards = Vec::new();
    let mut specs: Vec<Option<TensorSpec>> = specs.into_iter().map(Some).collect();
    for (number, group) in (1..).zip(groups) {
        let file_name = safetensors::shard_file_name("model", number, count);
        let members: Vec<TensorSpec> = group.into_iter().filter_map(|index| specs[index].take()).collect();
        for spec in &members {
            if weight_map.insert(spec.name.clone(), file_name.clone()).is_some() {
                return Err(Error::new(ErrorKind::InvalidInput, "two tensors have this name").with_tensor(&spec.name));
            }
        }
        shards.push(ShardPlan { file_name, specs: members, metadata: metadata.clone() });
    }
    Ok((Form::Directory, shards, Some(index_of(weight_map, sizes.iter().sum()))))
}

/// An index with the total size in its metadata, as the Hugging Face hub writes it.
pub(super) fn index_of(weight_map: BTreeMap<String, String>, total_size: u64) -> Index {
    Index { weight_map, total_size: Some(total_size), metadata: serde_json::Map::new() }
}
