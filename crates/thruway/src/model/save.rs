//! Saving: tensors from memory into safetensors files, published at once.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::{ByteSize, Error, ErrorKind, Extent, Result};
use crate::format::safetensors::{self, Dtype, Index, Layout, TensorSpec};
use crate::io::Direction;
use crate::io::policy::PathPolicy;
use crate::memory::{HostBuffer, Region};
use crate::storage::{Namespace, Staging};
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
    /// Text pairs for the files' `__metadata__`.
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

/// Files in the making: created, laid out and sized, not yet visible.
#[derive(Debug)]
pub(super) struct Writer {
    namespace: Arc<dyn Namespace>,
    staging: Staging,
    files: Vec<Arc<FileRef>>,
    /// Final paths, for receipts.
    finals: Vec<PathBuf>,
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
        let namespace = Arc::clone(&context.namespace);
        ensure_space(&*namespace, target, layouts.iter().map(|layout| layout.file_bytes).sum())?;
        let mut heads: Vec<(Arc<FileRef>, Vec<u8>)> = Vec::new();
        let (mut files, mut finals, mut places) = (Vec::new(), Vec::new(), HashMap::new());
        let staging = match form {
            Form::File => {
                let (staging, file) = Staging::file(Arc::clone(&namespace), target)?;
                file.allocate(layouts.iter().map(|layout| layout.file_bytes).sum())?;
                files.push(FileRef::new(staging.path()));
                finals.push(target.to_owned());
                staging
            }
            Form::Directory => {
                let mut staging = Staging::directory(Arc::clone(&namespace), target)?;
                for (shard, layout) in shards.iter().zip(&layouts) {
                    let (path, file) = staging.member(&shard.file_name)?;
                    file.allocate(layout.file_bytes)?;
                    files.push(FileRef::new(path));
                    finals.push(target.join(&shard.file_name));
                }
                staging
            }
        };
        for (number, layout) in layouts.into_iter().enumerate() {
            places.extend(layout.entries.into_iter().map(|entry| (entry.name, (number, entry.extent))));
            heads.push((Arc::clone(&files[number]), layout.head));
        }
        let mut writer = Self { namespace, staging, files, finals, places };
        if let Some(index) = index {
            let (path, file) = writer.staging.member("model.safetensors.index.json")?;
            let text = index.to_json().into_bytes();
            file.allocate(text.len() as u64)?;
            let file = FileRef::new(path);
            writer.files.push(Arc::clone(&file));
            writer.finals.push(target.join("model.safetensors.index.json"));
            heads.push((file, text));
        }
        let receipt = write_heads(context, heads, options)?;
        Ok((writer, receipt))
    }

    /// The moves that write a part of a tensor, `offset` bytes into it, from `region`.
    pub(super) fn place(&self, name: &str, offset: u64, region: Region) -> Result<Move> {
        let Some((file, extent)) = self.places.get(name) else {
            return Err(Error::new(ErrorKind::InvalidInput, "the tensor is not part of this save").with_tensor(name));
        };
        let extent = Extent::new(extent.offset + offset, region.len() as u64);
        Ok(Move { file: Arc::clone(&self.files[*file]), extent, region, direction: Direction::Write })
    }

    /// Names the tensor that lies at the offset of a failure, and the file by its final name.
    pub(super) fn name_tensor(&self, error: Error) -> Error {
        let offset = error.context("offset").and_then(|offset| offset.parse::<u64>().ok());
        let file = error.context("file").map(str::to_owned);
        let Some((offset, file)) = offset.zip(file) else { return error };
        let printed = |path: &Path| crate::base::error::printable(&path.to_string_lossy());
        let hit = self.places.iter().find(|(_, (number, extent))| {
            printed(&self.files[*number].path) == file && extent.offset <= offset && offset < extent.end()
        });
        let target = self.files.iter().position(|known| printed(&known.path) == file).map(|number| &self.finals[number]);
        let error = match hit {
            Some((name, _)) => error.with_tensor(name),
            None => error,
        };
        match target {
            Some(target) => error.with("target", printed(target)),
            None => error,
        }
    }

    /// Syncs every file and publishes them at once. The receipt's files get their final names.
    pub(super) fn finish(self, receipt: &mut Receipt) -> Result<()> {
        let started = std::time::Instant::now();
        for file in &self.files {
            let handle = self.namespace.open(&file.path, crate::storage::Access::Write, crate::storage::Buffering::PageCache)?;
            handle.sync()?;
        }
        let renamed: HashMap<&Path, &PathBuf> =
            std::iter::zip(self.files.iter().map(|file| file.path.as_path()), &self.finals).collect();
        for file in &mut receipt.files {
            if let Some(target) = renamed.get(file.file.as_path()) {
                file.file = (*target).clone();
            }
        }
        self.staging.publish()?;
        receipt.seconds += started.elapsed().as_secs_f64();
        Ok(())
    }
}

fn write_heads(context: &TransferContext, heads: Vec<(Arc<FileRef>, Vec<u8>)>, options: &TransferOptions) -> Result<Receipt> {
    let mut moves = Vec::with_capacity(heads.len());
    for (file, bytes) in heads {
        let buffer = HostBuffer::from_vec(bytes);
        let region = buffer.source(0..buffer.len())?;
        moves.push(Move { file, extent: Extent::new(0, region.len() as u64), region, direction: Direction::Write });
    }
    // Heads are small and must not count as progress.
    run(context, moves, &TransferOptions { progress: None, ..options.clone() })
}

/// Says before the first byte that the target's filesystem has too little room.
fn ensure_space(namespace: &dyn Namespace, target: &Path, bytes: u64) -> Result<()> {
    let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let free = namespace.free_bytes(directory)?;
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
        let bytes = spec.dtype.byte_count(&spec.shape).map_err(|error| error.with_tensor(&spec.name))?;
        if bytes != region.len() as u64 {
            let have = region.len();
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("its shape needs {bytes} bytes and its memory holds {have}"),
            )
            .with_tensor(&spec.name));
        }
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
        return Ok((
            Form::File,
            vec![ShardPlan { file_name: "model.safetensors".to_owned(), specs, metadata: metadata.clone() }],
            None,
        ));
    };
    if max_shard_bytes == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "a shard cannot hold 0 bytes").with_hint("choose a size such as 5GB"));
    }
    let groups = safetensors::split_into_shards(sizes, max_shard_bytes);
    let count =
        u32::try_from(groups.len()).map_err(|_| Error::new(ErrorKind::InvalidInput, "more shards than names for them"))?;
    if count <= 1 {
        let shard = ShardPlan { file_name: "model.safetensors".to_owned(), specs, metadata: metadata.clone() };
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
