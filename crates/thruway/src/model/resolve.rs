//! From a path to the files of a model.
//!
//! A file is recognised by its content, not by its name (the Hugging Face cache names files by their hash). In a
//! directory, in this order: `model.safetensors`, alone; the one index; shards whose names count themselves
//! (`…-00001-of-00003.safetensors`), which must be complete; every `*.safetensors` there is.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::base::{Error, ErrorKind, Extent, Result};
use crate::format::safetensors::{FileKind, INDEX_BYTES_MAX, Index, parse_shard_name, sniff};
use crate::io::Direction;
use crate::io::policy::{Path as TransferPath, PathPolicy};
use crate::memory::HostBuffer;
use crate::storage::{EntryKind, Identity, Namespace};
use crate::transfer::{FileRef, Move, Receipt, TransferContext, TransferOptions, run};

/// The files of a model.
#[derive(Debug)]
pub(super) struct Resolved {
    /// The files that hold tensors, in the order of their names, each with the name that an index has for it.
    pub(super) files: Vec<(PathBuf, String)>,
    /// The index, where one says which file holds which tensor.
    pub(super) index: Option<Index>,
    /// What was read to find that out.
    pub(super) receipt: Receipt,
    /// The start of the file, if it is one that was looked into.
    pub(super) start: Option<Start>,
    /// What is odd about the directory and harmless.
    pub(super) notes: Vec<String>,
}

/// The first bytes of a file.
#[derive(Debug)]
pub(super) struct Start {
    /// The bytes: all of the file, or [`START_BYTES`].
    pub(super) buffer: HostBuffer,
    /// The file, in the state in which they were read; `None` if nobody can tell.
    pub(super) identity: Option<Identity>,
    /// The file's length, as its name said before it was opened.
    pub(super) file_bytes: u64,
}

impl Resolved {
    fn files(files: Vec<(PathBuf, String)>) -> Self {
        Self { files, index: None, receipt: Receipt::default(), start: None, notes: Vec::new() }
    }
}

/// What is read of a file at first: enough for the whole header of most, one page-cache read-ahead.
pub(super) const START_BYTES: u64 = 64 << 10;

/// The file that is the whole model wherever it stands.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index's usual name.
pub(super) const INDEX: &str = "model.safetensors.index.json";
const SUFFIX: &str = ".safetensors";
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Finds the files of the model at `path`.
pub(super) fn resolve(context: &TransferContext, path: &Path) -> Result<Resolved> {
    let found = context.namespace.metadata(path)?;
    if found.kind == EntryKind::Directory {
        return in_directory(context, path);
    }
    // Whatever is no regular file is refused by opening it, with a message that says what it is.
    let (buffer, receipt) = read(context, path, found.length.min(START_BYTES))?;
    if sniff(buffer.bytes()?) == FileKind::Index {
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        return by_index(context, directory, path);
    }
    let identity = receipt.files.first().and_then(|file| file.identity);
    let start = Some(Start { buffer, identity, file_bytes: found.length });
    Ok(Resolved { receipt, start, ..Resolved::files(vec![named(path)]) })
}

fn in_directory(context: &TransferContext, directory: &Path) -> Result<Resolved> {
    let names = context.namespace.list(directory)?;
    let ends_in = |name: &OsStr, suffix: &str| name.as_encoded_bytes().ends_with(suffix.as_bytes());
    let visible = |name: &&std::ffi::OsString| !name.as_encoded_bytes().starts_with(b".");
    let single = OsStr::new(SINGLE);
    if names.iter().any(|name| name == single) {
        let notes = shadowed(names.iter().filter(visible).filter_map(|name| name.to_str())).into_iter().collect();
        return Ok(Resolved { notes, ..Resolved::files(vec![named(&directory.join(single))]) });
    }
    let indexes: Vec<&std::ffi::OsString> = names.iter().filter(visible).filter(|name| ends_in(name, INDEX_SUFFIX)).collect();
    let usual = indexes.iter().find(|name| **name == INDEX);
    match (usual, indexes.as_slice()) {
        (Some(index), _) | (None, [index]) => return by_index(context, directory, &directory.join(index)),
        (None, []) => {}
        (None, several) => {
            let several: Vec<String> = several.iter().map(|name| name.to_string_lossy().into_owned()).collect();
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!("the directory holds several indexes: {}", several.join(", ")),
            )
            .with_file(directory)
            .with_hint("name the one to load"));
        }
    }
    let files: Vec<&std::ffi::OsString> = names.iter().filter(visible).filter(|name| ends_in(name, SUFFIX)).collect();
    if files.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, "the directory holds no safetensors file")
            .with_file(directory)
            .with_hint("name a .safetensors file, a directory that holds some, or a model.safetensors.index.json"));
    }
    ensure_complete(directory, &files)?;
    let files = files.into_iter().map(|name| named(&directory.join(name))).collect();
    Ok(Resolved::files(files))
}

/// What stands beside `model.safetensors` and looks as if it belonged to the model, in words.
fn shadowed<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    let (mut indexes, mut shards) = (0, 0);
    for name in names {
        indexes += usize::from(name.ends_with(INDEX_SUFFIX));
        shards += usize::from(parse_shard_name(name).is_some());
    }
    let what = match (indexes, shards) {
        (0, 0) => return None,
        (_, 0) => "an index".to_owned(),
        (0, 1) => "a numbered shard".to_owned(),
        (0, _) => format!("{shards} numbered shards"),
        _ => format!("an index and numbered shards ({shards})"),
    };
    Some(format!("{SINGLE} alone is read as the model, though the directory also holds {what}"))
}

/// A file with its own name.
fn named(path: &Path) -> (PathBuf, String) {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    (path.to_owned(), name)
}

/// Refuses a set of shards that counts itself and is not complete.
fn ensure_complete(directory: &Path, files: &[&std::ffi::OsString]) -> Result<()> {
    let mut sets: BTreeMap<(&str, u32), Vec<u32>> = BTreeMap::new();
    for name in files.iter().filter_map(|name| name.to_str()) {
        if let Some((stem, number, of)) = parse_shard_name(name) {
            sets.entry((stem, of)).or_default().push(number);
        }
    }
    let mut missing = Vec::new();
    for ((stem, of), have) in sets {
        let have: std::collections::HashSet<u32> = have.into_iter().collect();
        // A name may claim four thousand million shards; the message needs no more than the first.
        let absent = (1..=of).filter(|number| !have.contains(number)).take(1000 + have.len());
        missing.extend(absent.take(1000).map(|number| format!("{stem}-{number:05}-of-{of:05}{SUFFIX}")));
    }
    refuse_missing(directory, &missing)
}

fn by_index(context: &TransferContext, directory: &Path, path: &Path) -> Result<Resolved> {
    let length = context.namespace.metadata(path)?.length;
    let (text, receipt) = read(context, path, length.min(INDEX_BYTES_MAX + 1))?;
    let index = Index::parse(text.bytes()?).map_err(|error| error.with_file(path))?;
    let files = index.files();
    let absent = |name: &&&str| {
        let found = context.namespace.metadata(&directory.join(name));
        found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
    };
    let missing: Vec<String> = files.iter().filter(absent).map(|name| (*name).to_owned()).collect();
    refuse_missing(directory, &missing)?;
    let files = files.into_iter().map(|name| (directory.join(name), name.to_owned())).collect();
    Ok(Resolved { index: Some(index), receipt, ..Resolved::files(files) })
}

fn refuse_missing(directory: &Path, missing: &[String]) -> Result<()> {
    if missing.is_empty() {
        return Ok(());
    }
    let shown: Vec<String> = missing.iter().take(20).map(|name| crate::base::error::printable(name)).collect();
    let more = if missing.len() > shown.len() { format!(" and {} more", missing.len() - shown.len()) } else { String::new() };
    let count = missing.len();
    let files = if count == 1 { "file of the model is" } else { "files of the model are" };
    Err(Error::new(ErrorKind::NotFound, format!("{count} {files} missing: {}{more}", shown.join(", ")))
        .with_file(directory)
        .with_hint("fetch the model again; a download may have been cut short"))
}

/// The first bytes of a file.
fn read(context: &TransferContext, path: &Path, length: u64) -> Result<(HostBuffer, Receipt)> {
    let mut buffer = HostBuffer::new(usize::try_from(length).unwrap_or(usize::MAX))?;
    let region = buffer.region(0..buffer.len())?;
    let item = Move { file: FileRef::new(path), extent: Extent::new(0, length), region, direction: Direction::Read };
    let receipt = run(context, vec![item], &through_page_cache())?;
    Ok((buffer, receipt))
}

/// Small reads of headers: they are read again soon (by the next process, or the next rank) and must not each
/// cost a drive access.
pub(super) fn through_page_cache() -> TransferOptions {
    TransferOptions { policy: PathPolicy::Require(TransferPath::Cached), ..TransferOptions::default() }
}

/// The length of a file, by its name.
pub(super) fn length_of(namespace: &dyn Namespace, path: &Path) -> Result<u64> {
    Ok(namespace.metadata(path)?.length)
}
