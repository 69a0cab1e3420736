//! `thruway inspect`: what a model's headers say.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use thruway::base::error::printable;
use thruway::storage::{Namespace, OsNamespace};
use thruway::{ByteSize, Device, Model, Result, Session};

use crate::args::InspectArgs;
use crate::escape::safe;
use crate::output::{Outcome, Output, counted, remark_notes, table};

/// Dimensions shown to people; a hostile header may hold millions.
const DIMENSIONS_MAX: usize = 12;

/// One file of the model.
struct FileFacts<'a> {
    path: &'a Path,
    bytes: u64,
    metadata: Option<&'a BTreeMap<String, String>>,
}

pub(super) fn run(args: &InspectArgs, output: &Output) -> Result<Outcome> {
    let session = Session::builder().device(Device::Host).build()?;
    let model = crate::place::open(&session, &args.model)?;
    let files = model
        .files()
        .enumerate()
        .map(|(number, path)| {
            let bytes = OsNamespace.metadata(path)?.length;
            Ok(FileFacts { path, bytes, metadata: model.metadata(number) })
        })
        .collect::<Result<Vec<FileFacts<'_>>>>()?;
    if output.is_json() {
        write_json(&model, &files, output)?;
    } else {
        remark_notes(output, &args.model, model.notes());
        print(&model, &files, output)?;
    }
    Ok(Outcome::Fine)
}

/// The metadata of all files together. Where two files give one key different values, the first counts.
fn merged<'a>(files: &[FileFacts<'a>]) -> BTreeMap<&'a str, &'a str> {
    let mut all = BTreeMap::new();
    for (key, value) in files.iter().filter_map(|file| file.metadata).flatten() {
        all.entry(key.as_str()).or_insert(value.as_str());
    }
    all
}

/// The answer as JSON. It borrows: a header may name millions of tensors, and a tree of JSON values would take ten times
/// its memory.
#[derive(Serialize)]
struct Report<'a> {
    path: Cow<'a, str>,
    tensors: Vec<TensorFacts<'a>>,
    metadata: BTreeMap<&'a str, &'a str>,
    files: Vec<ListedFile<'a>>,
    bytes: u64,
    file_bytes: u64,
    notes: &'a [String],
}

#[derive(Serialize)]
struct TensorFacts<'a> {
    name: &'a str,
    dtype: &'a str,
    shape: &'a [u64],
    file: &'a str,
    offset: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct ListedFile<'a> {
    file: &'a str,
    bytes: u64,
    metadata: Option<&'a BTreeMap<String, String>>,
}

fn write_json(model: &Model, files: &[FileFacts<'_>], output: &Output) -> Result<()> {
    let paths: Vec<Cow<'_, str>> = files.iter().map(|file| file.path.to_string_lossy()).collect();
    let tensors = model.entries().iter().map(|entry| TensorFacts {
        name: &entry.name,
        dtype: entry.dtype.name(),
        shape: &entry.shape,
        file: &paths[entry.file],
        offset: entry.extent.offset,
        bytes: entry.extent.length,
    });
    let listed =
        files.iter().zip(&paths).map(|(file, path)| ListedFile { file: path, bytes: file.bytes, metadata: file.metadata });
    output.object(&Report {
        path: model.path().to_string_lossy(),
        tensors: tensors.collect(),
        metadata: merged(files),
        files: listed.collect(),
        bytes: model.bytes(),
        file_bytes: model.file_bytes(),
        notes: model.notes(),
    })
}

fn print(model: &Model, files: &[FileFacts<'_>], output: &Output) -> Result<()> {
    let file_name = |path: &Path| printable(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy());
    let mut rows = vec![["NAME", "DTYPE", "SHAPE", "SIZE", "FILE"].map(str::to_owned).to_vec()];
    for entry in model.entries() {
        let size = ByteSize(entry.extent.length).to_string();
        let dtype = entry.dtype.name().to_owned();
        rows.push(vec![printable(&entry.name), dtype, shape(&entry.shape), size, file_name(files[entry.file].path)]);
    }
    for line in table(&rows, &[3]) {
        output.line(line)?;
    }
    output.line("")?;
    output.line(format!(
        "{}, {} of data, {} in {}",
        counted(model.entries().len(), "tensor"),
        ByteSize(model.bytes()),
        ByteSize(model.file_bytes()),
        counted(files.len(), "file")
    ))?;
    for (key, value) in merged(files) {
        output.line(format!("metadata {}: {}", safe(key), safe(value)))?;
    }
    Ok(())
}

fn shape(shape: &[u64]) -> String {
    let dimensions: Vec<String> = shape.iter().take(DIMENSIONS_MAX).map(u64::to_string).collect();
    let more = if shape.len() > DIMENSIONS_MAX { ", …" } else { "" };
    format!("[{}{more}]", dimensions.join(", "))
}
