//! Opening: headers in, one set of tensors out. A model that opens is whole: every file has exactly the length
//! that its header says.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::entry::ModelEntry;
use super::resolve::{self, Resolved};
use crate::base::error::printable;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::format::safetensors::{self, Header, Index};
use crate::io::Direction;
use crate::io::policy::PathPolicy;
use crate::memory::HostBuffer;
use crate::storage::Identity;
use crate::transfer::{FileRef, Move, Receipt, TransferContext, run};

/// What is read of a file at first: enough for the whole header of most, one page-cache read-ahead.
const FIRST_BYTES: u64 = 64 << 10;
/// How many files' headers are read in one transfer, which bounds the memory for them.
const BATCH_FILES: usize = 128;

/// One file of a model.
#[derive(Debug)]
pub(super) struct ModelFile {
    /// The file, in the state in which its header was read.
    pub(super) file: Arc<FileRef>,
    /// The header's `__metadata__`.
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Its length.
    pub(super) bytes: u64,
}

/// An opened model: what its headers say. Cheap to keep; holds no file open.
#[derive(Debug)]
pub struct Model {
    pub(super) context: Arc<TransferContext>,
    pub(super) policy: PathPolicy,
    pub(super) path: PathBuf,
    pub(super) files: Vec<ModelFile>,
    pub(super) entries: Vec<ModelEntry>,
    pub(super) by_name: HashMap<String, usize>,
    pub(super) index: Option<Index>,
    notes: Vec<String>,
    opening: Receipt,
}

impl Model {
    pub(crate) fn open(context: Arc<TransferContext>, policy: PathPolicy, path: &Path) -> Result<Self> {
        let Resolved { files: paths, index, receipt: mut opening } = resolve::resolve(&context, path)?;
        let mut model = Self {
            context,
            policy,
            path: path.to_owned(),
            files: Vec::with_capacity(paths.len()),
            entries: Vec::new(),
            by_name: HashMap::new(),
            index,
            notes: Vec::new(),
            opening: Receipt::default(),
        };
        for batch in paths.chunks(BATCH_FILES) {
            for (opened, name) in read_headers(&model.context, batch, &mut opening)?.into_iter().zip(batch) {
                model.add(opened, &name.1)?;
            }
        }
        model.opening = opening;
        model.check_against_index()?;
        Ok(model)
    }

    fn add(&mut self, (path, bytes, identity, header): Opened<'_>, name_in_index: &str) -> Result<()> {
        let file = self.files.len();
        let mut left_out = 0_usize;
        for entry in header.entries {
            // Of a tensor that stands in several files, the index says which counts; what it does not name at all
            // is not part of the model.
            if let Some(index) = &self.index
                && index.weight_map.get(&entry.name).is_none_or(|listed| listed != name_in_index)
            {
                left_out += 1;
                continue;
            }
            if let Some(before) = self.by_name.insert(entry.name.clone(), self.entries.len()) {
                let other = &self.files[self.entries[before].file].file.path;
                return Err(Error::new(
                    ErrorKind::Malformed,
                    format!("the tensor also stands in {}", printable(&other.to_string_lossy())),
                )
                .with_file(path)
                .with_tensor(&entry.name)
                .with_hint("name one file, or add an index that says which of the two counts"));
            }
            let safetensors::Entry { name, dtype, shape, extent } = entry;
            self.entries.push(ModelEntry { name, dtype, shape, file, extent });
        }
        if left_out > 0 {
            let tensors = if left_out == 1 { "tensor" } else { "tensors" };
            self.notes.push(format!(
                "{left_out} {tensors} of {} left out: the index does not list them there",
                printable(name_in_index)
            ));
        }
        let file = Arc::new(FileRef { path: path.to_owned(), expected: Some(identity) });
        self.files.push(ModelFile { file, metadata: header.metadata, bytes });
        Ok(())
    }

    fn check_against_index(&mut self) -> Result<()> {
        let Some(index) = &self.index else { return Ok(()) };
        for (name, file) in &index.weight_map {
            if !self.by_name.contains_key(name) {
                return Err(Error::new(
                    ErrorKind::Malformed,
                    format!("the index places the tensor in {}, which does not hold it", printable(file)),
                )
                .with_file(&self.path)
                .with_tensor(name));
            }
        }
        let total: u64 = self.entries.iter().map(|entry| entry.extent.length).sum();
        if let Some(claimed) = index.total_size.filter(|claimed| *claimed != total) {
            self.notes.push(format!("the index gives a total size of {claimed} bytes, and its tensors have {total}"));
        }
        Ok(())
    }

    /// The tensors, file by file in the order of their bytes.
    pub fn entries(&self) -> &[ModelEntry] {
        &self.entries
    }

    /// The tensor with this name.
    pub fn entry(&self, name: &str) -> Option<&ModelEntry> {
        self.by_name.get(name).map(|index| &self.entries[*index])
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that hold the tensors; [`ModelEntry::file`] counts into them.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.file.path.as_path())
    }

    /// The `__metadata__` of one of the files; `None` if its header has none.
    pub fn metadata(&self, file: usize) -> Option<&BTreeMap<String, String>> {
        self.files.get(file)?.metadata.as_ref()
    }

    /// The bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.extent.length).sum()
    }

    /// The bytes of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// What is odd about the model and harmless.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What opening it took.
    pub fn opening(&self) -> &Receipt {
        &self.opening
    }

    pub(super) fn unknown_tensor(&self, name: &str) -> Error {
        Error::new(ErrorKind::InvalidInput, "the model has no such tensor")
            .with_tensor(name)
            .with_file(&self.path)
            .with_hint("`thruway inspect` lists the tensors")
    }
}

type Opened<'a> = (&'a Path, u64, Identity, Header);

/// Reads and parses the headers of some files: one small read of each, and a second of those whose header is longer.
fn read_headers<'a>(context: &TransferContext, paths: &'a [(PathBuf, String)], opening: &mut Receipt) -> Result<Vec<Opened<'a>>> {
    let lengths = paths.iter().map(|(path, _)| resolve::length_of(&*context.namespace, path)).collect::<Result<Vec<u64>>>()?;
    let refs: Vec<Arc<FileRef>> = paths.iter().map(|(path, _)| FileRef::new(path)).collect();
    let firsts: Vec<Extent> = lengths.iter().map(|length| Extent::new(0, FIRST_BYTES.min(*length))).collect();
    let (buffers, receipt) = read_extents(context, &refs, &firsts)?;
    let identities: Vec<Option<Identity>> = receipt.files.iter().map(|file| file.identity).collect();
    opening.merge(receipt);
    let mut rests = vec![Extent::new(0, 0); paths.len()];
    for (index, (path, _)) in paths.iter().enumerate() {
        let header_end =
            8 + safetensors::header_length(buffers[index].bytes()?, lengths[index]).map_err(|error| error.with_file(path))?;
        if header_end > firsts[index].length {
            rests[index] = Extent::new(firsts[index].length, header_end - firsts[index].length);
        }
    }
    let expected: Vec<Arc<FileRef>> = std::iter::zip(&refs, &identities)
        .map(|(file, identity)| Arc::new(FileRef { path: file.path.clone(), expected: *identity }))
        .collect();
    let (more, receipt) = read_extents(context, &expected, &rests)?;
    opening.merge(receipt);
    let mut opened = Vec::with_capacity(paths.len());
    for (index, (path, _)) in paths.iter().enumerate() {
        let named = |error: Error| error.with_file(path);
        let first = buffers[index].bytes()?;
        let end = 8 + usize::try_from(safetensors::header_length(first, lengths[index]).map_err(named)?).unwrap_or(usize::MAX);
        let header = if rests[index].is_empty() {
            safetensors::parse(&first[8..end], lengths[index])
        } else {
            safetensors::parse(&[&first[8..], more[index].bytes()?].concat(), lengths[index])
        };
        let Some(identity) = identities[index] else {
            return Err(Error::new(ErrorKind::Changed, "the file vanished while its header was read").with_file(path));
        };
        if identity.length != lengths[index] {
            return Err(Error::new(ErrorKind::Changed, "the file's length changed while its header was read").with_file(path));
        }
        opened.push((path.as_path(), lengths[index], identity, header.map_err(named)?));
    }
    Ok(opened)
}

/// Reads one extent of each file into a buffer of its own; empty extents cost nothing.
fn read_extents(context: &TransferContext, files: &[Arc<FileRef>], extents: &[Extent]) -> Result<(Vec<HostBuffer>, Receipt)> {
    let (mut buffers, mut moves) = (Vec::new(), Vec::new());
    let all_first = extents.iter().all(|extent| extent.offset == 0);
    for (file, extent) in files.iter().zip(extents) {
        let mut buffer = HostBuffer::new(usize::try_from(extent.length).unwrap_or(usize::MAX))?;
        // Of an empty file too the first read tells which file it was.
        if !extent.is_empty() || all_first {
            let region = buffer.region(0..buffer.len())?;
            moves.push(Move { file: Arc::clone(file), extent: *extent, region, direction: Direction::Read });
        }
        buffers.push(buffer);
    }
    let receipt = run(context, moves, &resolve::through_page_cache())?;
    Ok((buffers, receipt))
}
