//! Saving: tensors from memory into safetensors files, published at once.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::writer::{FilePlan, Form, ShardPlan, Writer, lay_out};
use crate::base::{ByteSize, Error, ErrorKind, Result};
use crate::cuda::CallerStream;
use crate::format::safetensors::{self, Dtype, Index, TensorSpec};
use crate::io::policy::PathPolicy;
use crate::memory::Region;
use crate::transfer::{Cancel, Move, Progress, Receipt, TransferContext, TransferOptions, run};

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
    stripes: Vec<PathBuf>,
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

    /// Spreads the shards over the target and these directories, best on other drives, which must exist. The target holds links
    /// to what lies there, and its appearance is what counts. Takes a size of shards.
    #[must_use]
    pub fn stripes(mut self, directories: impl IntoIterator<Item = PathBuf>) -> Self {
        self.stripes.extend(directories);
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
    let form = if options.max_shard_bytes.is_some() { Form::Directory } else { Form::File };
    let files = plan_group(("model", 0), specs, &sizes, options.max_shard_bytes, &options.metadata)?;
    let (writer, mut receipt) = Writer::begin_striped(context, (target, &options.stripes), form, files, &transfer)?;
    let moves = tensors
        .iter()
        .map(|Source { spec, region }| writer.place(0, &spec.name, 0, region.clone()))
        .collect::<Result<Vec<Move>>>()?;
    receipt.merge(run(context, moves, &transfer).map_err(|error| writer.name_tensor(error))?);
    writer.finish(&mut receipt)?;
    Ok(receipt)
}

/// The files of one set of tensors, laid out: one, or as many shards as the size demands, with their index. Their names begin
/// with the stem; the number says which set it is.
pub(crate) fn plan_group(
    (stem, group): (&str, usize),
    specs: Vec<TensorSpec>,
    sizes: &[u64],
    max_shard_bytes: Option<u64>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<FilePlan>> {
    let (shards, index) = plan_shards(stem, specs, sizes, max_shard_bytes, metadata)?;
    lay_out(&shards, index.map(|index| (index_file_name(stem), index)), group)
}

/// The name of the index of shards whose names begin with `stem`.
fn index_file_name(stem: &str) -> String {
    format!("{stem}.safetensors.index.json")
}

/// One file, or as many shards as the size demands, with their index.
pub(super) fn plan_shards(
    stem: &str,
    specs: Vec<TensorSpec>,
    sizes: &[u64],
    max_shard_bytes: Option<u64>,
    metadata: &BTreeMap<String, String>,
) -> Result<(Vec<ShardPlan>, Option<Index>)> {
    let single = |specs| {
        let file_name = safetensors::shard_file_name(stem, 1, 1);
        Ok((vec![ShardPlan { file_name, specs, metadata: metadata.clone() }], None))
    };
    let Some(max_shard_bytes) = max_shard_bytes else { return single(specs) };
    if max_shard_bytes == 0 {
        return Err(Error::new(ErrorKind::InvalidInput, "a shard cannot hold 0 bytes").with_hint("choose a size such as 5GB"));
    }
    let groups = safetensors::split_into_shards(sizes, max_shard_bytes);
    let count =
        u32::try_from(groups.len()).map_err(|_| Error::new(ErrorKind::InvalidInput, "more shards than names for them"))?;
    if count <= 1 {
        return single(specs);
    }
    let mut weight_map = BTreeMap::new();
    let mut shards = Vec::new();
    let mut specs: Vec<Option<TensorSpec>> = specs.into_iter().map(Some).collect();
    for (number, group) in (1..).zip(groups) {
        let file_name = safetensors::shard_file_name(stem, number, count);
        let members: Vec<TensorSpec> = group.into_iter().filter_map(|index| specs[index].take()).collect();
        for spec in &members {
            if weight_map.insert(spec.name.clone(), file_name.clone()).is_some() {
                return Err(Error::new(ErrorKind::InvalidInput, "two tensors have this name").with_tensor(&spec.name));
            }
        }
        shards.push(ShardPlan { file_name, specs: members, metadata: metadata.clone() });
    }
    Ok((shards, Some(index_of(weight_map, sizes.iter().sum()))))
}

/// An index with the total size in its metadata, as the Hugging Face hub writes it.
pub(super) fn index_of(weight_map: BTreeMap<String, String>, total_size: u64) -> Index {
    Index { weight_map, total_size: Some(total_size), metadata: serde_json::Map::new() }
}
