//! Opening a checkpoint: its manifest, and then everything that can be wrong without reading a tensor, all of it at once and
//! before any memory is taken for tensors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::manifest::{GroupRecord, MANIFEST, MANIFEST_BYTES_MAX, Manifest, TensorRecord};
use super::names::DirectoryName;
use crate::base::error::printable;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::io::Direction;
use crate::io::policy::{Path as TransferPath, PathPolicy};
use crate::memory::HostBuffer;
use crate::model::Model;
use crate::storage::Namespace;
use crate::transfer::{FileRef, Move, TransferContext, TransferOptions, run};

/// What stands in every shard's `__metadata__`: which save wrote it.
pub(super) const SAVE_ID: &str = "thruway.save_id";

/// How many faults a message names.
const FAULTS_SHOWN: usize = 20;

/// An opened checkpoint: committed, its files all there at their sizes, its shards all of one save. Its tensors' bytes have not
/// been read. Holds no file open.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) context: Arc<TransferContext>,
    pub(super) policy: PathPolicy,
    pub(super) path: PathBuf,
    pub(super) manifest: Manifest,
    /// The groups of the manifest as models; `None` for one without tensors.
    pub(super) models: Vec<Option<Model>>,
}

impl Checkpoint {
    pub(super) fn open(
        context: &Arc<TransferContext>,
        policy: PathPolicy,
        directory: &Path,
        name: DirectoryName,
    ) -> Result<Self> {
        let path = directory.join(name.to_string());
        let manifest = read_manifest(context, &path, name.step)?;
        ensure_whole(&*context.namespace, &path, &manifest)?;
        let mut checkpoint = Self { context: Arc::clone(context), policy, path, manifest, models: Vec::new() };
        for group in &checkpoint.manifest.groups {
            let model = checkpoint.open_group(group)?;
            checkpoint.models.push(model);
        }
        Ok(checkpoint)
    }

    /// The step of training.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All that is known of it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The tensors of a group as a model; `None` if it has none.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if there is no such group.
    pub fn model(&self, group: &str) -> Result<Option<&Model>> {
        self.find(group).map(|(_, model)| model)
    }

    /// A group and its place in the manifest.
    pub(super) fn find(&self, group: &str) -> Result<(&GroupRecord, Option<&Model>)> {
        let found = self.manifest.groups.iter().zip(&self.models).find(|(record, _)| record.name == group);
        found.map(|(record, model)| (record, model.as_ref())).ok_or_else(|| {
            let names: Vec<String> = self.manifest.groups.iter().map(|group| printable(&group.name)).collect();
            Error::new(ErrorKind::InvalidInput, format!("the checkpoint has no group {}", printable(group)))
                .with_file(&self.path)
                .with_hint(format!("its groups are: {}", names.join(", ")))
        })
    }

    /// Opens a group's files, and holds what they say against the manifest.
    fn open_group(&self, group: &GroupRecord) -> Result<Option<Model>> {
        let Some(opens) = group.opens else { return Ok(None) };
        let name = &self.manifest.files[opens].name;
        let model = Model::open(Arc::clone(&self.context), self.policy, &self.path.join(name))?;
        let expected = self.manifest.save_id.to_string();
        for (number, file) in model.files().enumerate() {
            let found = model.metadata(number).and_then(|metadata| metadata.get(SAVE_ID));
            if found != Some(&expected) {
                let found = found.map_or_else(|| "of no save".to_owned(), |found| format!("of save {}", printable(found)));
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!("the shard is {found}, and the manifest of save {expected}"),
                )
                .with_file(file)
                .with_hint("files of two checkpoints were mixed: restore another step"));
            }
        }
        let files: Vec<&Path> = model.files().collect();
        let mut known: HashMap<&str, &TensorRecord> = group.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        for entry in model.entries() {
            let same = known.remove(entry.name.as_str()).is_some_and(|record| {
                let path = self.path.join(&self.manifest.files[record.file].name);
                (record.dtype, &record.shape, record.extent()) == (entry.dtype, &entry.shape, entry.extent)
                    && path == files[entry.file]
            });
            if !same {
                return Err(contradiction(files[entry.file], &entry.name));
            }
        }
        match known.values().next() {
            Some(missing) => Err(contradiction(&self.path.join(name), &missing.name)),
            None => Ok(Some(model)),
        }
    }
}

fn contradiction(file: &Path, tensor: &str) -> Error {
    Error::new(ErrorKind::Mismatch, "the file says of the tensor something else than the manifest")
        .with_file(file)
        .with_tensor(tensor)
        .with_hint("one of the two was damaged or changed: restore another step")
}

/// Reads the manifest of the checkpoint in this directory, and no more.
pub(super) fn read_manifest(context: &TransferContext, directory: &Path, step: u64) -> Result<Manifest> {
    let path = directory.join(MANIFEST);
    let length = context.namespace.metadata(&path)?.length;
    if length > MANIFEST_BYTES_MAX {
        let message = format!("the manifest has {length} bytes, and {MANIFEST_BYTES_MAX} are the limit");
        return Err(Error::new(ErrorKind::Malformed, message).with_file(&path));
    }
    let buffer = read(context, &path, Extent::new(0, length))?;
    let manifest = Manifest::parse(buffer.bytes()?).map_err(|error| error.with_file(&path))?;
    if manifest.step != step {
        let message = format!("the directory is of step {step}, and the manifest of step {}", manifest.step);
        return Err(Error::new(ErrorKind::Mismatch, message).with_file(&path).with_hint("a checkpoint's directory was renamed"));
    }
    Ok(manifest)
}

/// A small part of a file.
pub(super) fn read(context: &TransferContext, path: &Path, extent: Extent) -> Result<HostBuffer> {
    let mut buffer = HostBuffer::new(usize::try_from(extent.length).unwrap_or(usize::MAX))?;
    let region = buffer.region(0..buffer.len())?;
    let item = Move { file: FileRef::new(path), extent, region, direction: Direction::Read };
    let policy = PathPolicy::Require(TransferPath::Cached);
    run(context, vec![item], &TransferOptions { policy, ..TransferOptions::default() })?;
    Ok(buffer)
}

/// Refuses a checkpoint of which a file is missing or has another size, naming all such.
pub(super) fn ensure_whole(namespace: &dyn Namespace, directory: &Path, manifest: &Manifest) -> Result<()> {
    let mut faults = Vec::new();
    let mut kind = ErrorKind::Malformed;
    for file in &manifest.files {
        match namespace.metadata(&directory.join(&file.name)) {
            Ok(found) if found.length == file.bytes => {}
            Ok(found) => {
                if found.length < file.bytes && kind == ErrorKind::Malformed {
                    kind = ErrorKind::UnexpectedEof;
                }
                faults.push(format!("{} has {} bytes instead of {}", file.name, found.length, file.bytes));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                kind = ErrorKind::NotFound;
                faults.push(format!("{} is missing", file.name));
            }
            Err(error) => return Err(error),
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    let more = faults.len().saturating_sub(FAULTS_SHOWN);
    let shown = faults[..faults.len() - more].join(", ");
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    Err(Error::new(kind, format!("the checkpoint is not whole: {shown}{more}"))
        .with_file(directory)
        .with_hint("restore another step"))
}
