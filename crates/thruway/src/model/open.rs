//! Opening: headers in, one set of tensors out. A model that opens is whole: every file has exactly the length
//! that its header says.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::entry::ModelEntry;
use super::resolve::{self, Resolved, START_BYTES, Start};
use crate::base::error::printable;
use crate::base::parallel;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::format::safetensors::{self, Header, Index};
use crate::io::Direction;
use crate::io::policy::PathPolicy;
use crate::memory::HostBuffer;
use crate::storage::Identity;
use crate::transfer::{FileRef, Move, Receipt, TransferContext, run};

/// How many files' starts are read in one transfer.
const BATCH_FILES: usize = 128;
/// How many bytes of long headers are in memory at once, or one header that is longer. They may have 100 MB each, and
/// there may be thousands.
const BATCH_BYTES: u64 = 256 << 20;

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
        let Resolved { files: paths, index, receipt: mut opening, mut start, notes } = resolve::resolve(&context, path)?;
        let mut model = Self {
            context,
            policy,
            path: path.to_owned(),
            files: Vec::with_capacity(paths.len()),
            entries: Vec::new(),
            by_name: HashMap::new(),
            index,
            notes,
            opening: Receipt::default(),
        };
        for batch in paths.chunks(BATCH_FILES) {
            let starts = match start.take() {
                Some(start) => vec![start],
                None => read_starts(&model.context, batch, &mut opening)?,
            };
            for (opened, name) in read_headers(&model.context, batch, starts, &mut opening)?.into_iter().zip(batch) {
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

    /// Which file one of the files was, and in which state, when its header was read: what a caller who reads it in ways of its
    /// own has to find again. `None` if there is no such file.
    pub fn identity(&self, file: usize) -> Option<Identity> {
        self.files.get(file)?.file.expected
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

/// Reads the first bytes of each file, in one transfer.
fn read_starts(context: &TransferContext, paths: &[(PathBuf, String)], opening: &mut Receipt) -> Result<Vec<Start>> {
    let (mut starts, mut moves) = (Vec::with_capacity(paths.len()), Vec::with_capacity(paths.len()));
    for (path, _) in paths {
        let file_bytes = resolve::length_of(&*context.namespace, path)?;
        let length = file_bytes.min(START_BYTES);
        let mut buffer = HostBuffer::new(usize::try_from(length).unwrap_or(usize::MAX))?;
        let region = buffer.region(0..buffer.len())?;
        // Of an empty file too: the read tells which file it was.
        moves.push(Move { file: FileRef::new(path), extent: Extent::new(0, length), region, direction: Direction::Read });
        starts.push(Start { buffer, identity: None, file_bytes });
    }
    let receipt = run(context, moves, &resolve::through_page_cache())?;
    for (start, file) in starts.iter_mut().zip(&receipt.files) {
        start.identity = file.identity;
    }
    opening.merge(receipt);
    Ok(starts)
}

/// The headers of some files, of which the starts have been read: long ones are read to their end.
fn read_headers<'a>(
    context: &TransferContext,
    paths: &'a [(PathBuf, String)],
    starts: Vec<Start>,
    opening: &mut Receipt,
) -> Result<Vec<Opened<'a>>> {
    let mut texts = Vec::with_capacity(starts.len());
    for ((path, _), start) in paths.iter().zip(starts) {
        texts.push(HeaderText::new(path, start)?);
    }
    let mut opened: Vec<Opened<'a>> = Vec::with_capacity(texts.len());
    let mut texts = texts.into_iter().peekable();
    while texts.peek().is_some() {
        let (mut batch, mut long_bytes) = (Vec::new(), 0);
        while let Some(text) = texts.next_if(|next| batch.is_empty() || long_bytes + next.missing_bytes() <= BATCH_BYTES) {
            long_bytes += text.missing_bytes();
            batch.push(text);
        }
        if long_bytes > 0 {
            read_rests(context, &mut batch, opening)?;
        }
        let parsed = parallel::each(batch.len(), parallel::processors(), |index| batch[index].parse());
        for (text, header) in batch.iter().zip(parsed) {
            opened.push((text.path, text.file_bytes, text.identity, header?));
        }
    }
    Ok(opened)
}

/// A file's header as text, whole or in part.
struct HeaderText<'a> {
    path: &'a Path,
    /// The file's length and state.
    file_bytes: u64,
    identity: Identity,
    /// The file's bytes from its first one on.
    buffer: HostBuffer,
    /// Where the header ends: in the file, and in the buffer once that is long enough.
    end: usize,
}

impl<'a> HeaderText<'a> {
    fn new(path: &'a Path, start: Start) -> Result<Self> {
        let Start { buffer, identity, file_bytes } = start;
        let refuse = |what: &str| Err(Error::new(ErrorKind::Changed, what).with_file(path));
        let Some(identity) = identity else {
            return refuse("the file vanished while its header was read");
        };
        if identity.length != file_bytes {
            return refuse("the file's length changed while its header was read");
        }
        let header_bytes = safetensors::header_length(buffer.bytes()?, file_bytes).map_err(|error| error.with_file(path))?;
        let end = usize::try_from(8 + header_bytes).unwrap_or(usize::MAX);
        Ok(Self { path, file_bytes, identity, buffer, end })
    }

    /// How much of the header has not been read.
    fn missing_bytes(&self) -> u64 {
        self.end.saturating_sub(self.buffer.len()) as u64
    }

    /// Makes room for the rest of the header, and gives the read that fills it.
    fn rest(&mut self) -> Result<Move> {
        let have = self.buffer.len();
        let mut whole = HostBuffer::new(self.end)?;
        whole.bytes_mut()?[..have].copy_from_slice(self.buffer.bytes()?);
        self.buffer = whole;
        let region = self.buffer.region(have..self.end)?;
        let file = Arc::new(FileRef { path: self.path.to_owned(), expected: Some(self.identity) });
        Ok(Move { file, extent: Extent::new(have as u64, (self.end - have) as u64), region, direction: Direction::Read })
    }

    fn parse(&self) -> Result<Header> {
        safetensors::parse(&self.buffer.bytes()?[8..self.end], self.file_bytes).map_err(|error| error.with_file(self.path))
    }
}

/// Reads what is missing of long headers, in one transfer.
fn read_rests(context: &TransferContext, texts: &mut [HeaderText<'_>], opening: &mut Receipt) -> Result<()> {
    let long = texts.iter_mut().filter(|text| text.missing_bytes() > 0);
    let moves = long.map(HeaderText::rest).collect::<Result<Vec<Move>>>()?;
    opening.merge(run(context, moves, &resolve::through_page_cache())?);
    Ok(())
}
