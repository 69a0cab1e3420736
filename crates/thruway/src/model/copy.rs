//! Copying a model: to one file, to other shards, or as it is; through two windows of memory whatever its size.
//! The copy is laid out for direct I/O, and complete and durable before it is visible.

use std::collections::BTreeMap;
use std::path::Path;

use super::open::Model;
use super::save::{Form, ShardPlan, Writer, index_of, plan_shards};
use super::stream::{StreamWindow, stream};
use crate::base::{ByteSize, Error, ErrorKind, Result};
use crate::format::safetensors::{Index, TensorSpec, shard_file_name};
use crate::io::policy::PathPolicy;
use crate::transfer::{Cancel, Move, Progress, Receipt, TransferOptions, run};

/// How to copy.
#[derive(Debug, Default)]
pub struct CopyOptions {
    max_shard_bytes: Option<u64>,
    read_policy: Option<PathPolicy>,
    transfer: TransferOptions,
}

impl CopyOptions {
    /// Writes a directory of shards of at most this size with an index, whatever the source's shards are.
    #[must_use]
    pub fn max_shard_size(mut self, size: ByteSize) -> Self {
        self.max_shard_bytes = Some(size.bytes());
        self
    }

    /// Which path the source is read by, instead of the session's.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.read_policy = Some(policy);
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

impl Model {
    /// Copies the model to `target`: a file if it lies in one file and no shard size is given, else a directory
    /// that must not exist yet (or be empty). Names, dtypes, shapes, bytes and metadata are kept.
    ///
    /// # Errors
    /// The first byte that cannot be read or written, with file and tensor. Then nothing at `target` has changed.
    pub fn copy_to(&self, target: &Path, options: CopyOptions) -> Result<(Receipt, Receipt)> {
        let (form, shards, index) = self.copy_plan(options.max_shard_bytes)?;
        if form == Form::File
            && let Ok(existing) = self.context.namespace.metadata(target)
            && existing.kind == crate::storage::EntryKind::Directory
        {
            return Err(Error::new(ErrorKind::InvalidInput, "the target is a directory and the model is one file")
                .with_file(target)
                .with_hint(format!(
                    "name the file: {}",
                    crate::base::error::printable(&target.join("model.safetensors").to_string_lossy())
                )));
        }
        let write = TransferOptions { policy: PathPolicy::Auto, progress: None, cancel: options.transfer.cancel.clone() };
        let read = TransferOptions { policy: options.read_policy.unwrap_or(self.policy), ..write.clone() };
        let (writer, mut written) = Writer::begin(&self.context, target, form, shards, index, &write)?;
        let mut moved = 0;
        let read = stream(self, &read, |StreamWindow { buffer, parts }| {
            let mut moves: Vec<Move> = Vec::with_capacity(parts.len());
            for part in &parts {
                let region = buffer.source(part.at..part.at + part.length)?;
                moves.push(writer.place(&self.entries[part.entry].name, part.offset, region)?);
            }
            let step = run(&self.context, moves, &write).map_err(|error| writer.name_tensor(error))?;
            moved += step.bytes;
            written.merge(step);
            if let Some(progress) = &options.transfer.progress {
                progress(moved);
            }
            Ok(buffer)
        })?;
        writer.finish(&mut written)?;
        Ok((read, written))
    }

    /// The files of the copy: as the source's, or cut anew.
    fn copy_plan(&self, max_shard_bytes: Option<u64>) -> Result<(Form, Vec<ShardPlan>, Option<Index>)> {
        let spec =
            |entry: &super::ModelEntry| TensorSpec { name: entry.name.clone(), dtype: entry.dtype, shape: entry.shape.clone() };
        if max_shard_bytes.is_some() || (self.files.len() == 1 && self.index.is_none()) {
            let sizes: Vec<u64> = self.entries.iter().map(|entry| entry.extent.length).collect();
            return plan_shards(self.entries.iter().map(spec).collect(), &sizes, max_shard_bytes, &self.common_metadata());
        }
        let mut shards: Vec<ShardPlan> = Vec::with_capacity(self.files.len());
        for (number, file) in (1..).zip(&self.files) {
            let metadata = file.metadata.clone().unwrap_or_default();
            shards.push(ShardPlan { file_name: self.shard_name(file, number)?, specs: Vec::new(), metadata });
        }
        let mut weight_map = BTreeMap::new();
        for entry in &self.entries {
            weight_map.insert(entry.name.clone(), shards[entry.file].file_name.clone());
            shards[entry.file].specs.push(spec(entry));
        }
        Ok((Form::Directory, shards, Some(index_of(weight_map, self.bytes()))))
    }

    /// A file's own name, unless two files in different directories share it: then one that counts them.
    fn shard_name(&self, file: &super::open::ModelFile, number: u32) -> Result<String> {
        let own = file.file.path.file_name();
        let clashes = self.files.iter().filter(|other| other.file.path.file_name() == own).count() > 1;
        match own.and_then(|name| name.to_str()) {
            Some(name) if !clashes => Ok(name.to_owned()),
            _ => {
                let count = u32::try_from(self.files.len())
                    .map_err(|_| Error::new(ErrorKind::InvalidInput, "more files than names for them"))?;
                Ok(shard_file_name("model", number, count))
            }
        }
    }

    /// The metadata of all files together. Where two files give one key different values, the first counts.
    fn common_metadata(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for (key, value) in self.files.iter().filter_map(|file| file.metadata.as_ref()).flatten() {
            all.entry(key.clone()).or_insert_with(|| value.clone());
        }
        all
    }
}
