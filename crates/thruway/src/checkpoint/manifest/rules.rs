//! What a manifest must be, beyond its types. A writer is held to it as a reader is.

use std::collections::{BTreeSet, HashSet};

use super::{FileRecord, GroupRecord, MANIFEST, Manifest, TensorRecord};
use crate::base::error::printable;
use crate::checkpoint::checksum::combined;

/// The longest name that filesystems allow, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// The fault of a manifest, in words.
type Fault = String;

/// Checks everything; memory in proportion to the manifest.
pub(super) fn check(manifest: &Manifest) -> Result<(), Fault> {
    let Manifest { chunk_bytes, files, groups, .. } = manifest;
    if !(4096..=1 << 30).contains(chunk_bytes) || !chunk_bytes.is_multiple_of(4096) {
        return Err(format!("chunks of {chunk_bytes} bytes: a multiple of 4096 up to 1 GiB is what they can have"));
    }
    let mut names = HashSet::new();
    for file in files {
        check_file(file)?;
        if !names.insert(file.name.as_str()) {
            return Err(format!("the file {} is listed twice", printable(&file.name)));
        }
    }
    // Which group a file is of.
    let mut owners: Vec<Option<usize>> = vec![None; files.len()];
    let mut group_names = HashSet::new();
    for (number, group) in groups.iter().enumerate() {
        if !group_names.insert(group.name.as_str()) {
            return Err(format!("two groups are called {}", printable(&group.name)));
        }
        check_group(manifest, number, group, &mut owners)?;
    }
    if let Some(file) = owners.iter().position(Option::is_none) {
        return Err(format!("the file {} belongs to no group", printable(&files[file].name)));
    }
    check_coverage(manifest)
}

/// Whether it is a name that any filesystem takes, that leads nowhere, and that is not hidden.
pub(in crate::checkpoint) fn is_plain_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with(['.', '-']) && name.bytes().all(plain)
}

fn check_file(file: &FileRecord) -> Result<(), Fault> {
    if !is_plain_name(&file.name) || file.name.eq_ignore_ascii_case(MANIFEST) {
        return Err(format!("{} is no name for a file of a checkpoint", printable(&file.name)));
    }
    if file.head_bytes == 0 || file.head_bytes > file.bytes {
        return Err(format!("{}: a head of {} bytes in a file of {}", file.name, file.head_bytes, file.bytes));
    }
    Ok(())
}

fn check_group(manifest: &Manifest, number: usize, group: &GroupRecord, owners: &mut [Option<usize>]) -> Result<(), Fault> {
    let at = |what: String| format!("the group {}: {what}", printable(&group.name));
    let mut names = HashSet::new();
    let mut shards = BTreeSet::new();
    for tensor in &group.tensors {
        let fault = |what: String| at(format!("the tensor {}: {what}", printable(&tensor.name)));
        if !names.insert(tensor.name.as_str()) {
            return Err(fault("is listed twice".to_owned()));
        }
        check_tensor(manifest, tensor).map_err(fault)?;
        shards.insert(tensor.file);
    }
    let opens_right = match (group.opens, shards.len()) {
        (None, 0) => true,
        (Some(file), 1) => shards.contains(&file),
        // An index, which holds no tensor.
        (Some(file), 2..) => {
            manifest.files.get(file).is_some_and(|index| !shards.contains(&file) && index.head_bytes == index.bytes)
        }
        _ => false,
    };
    if !opens_right {
        return Err(at("the file that stands for it is none of its own".to_owned()));
    }
    for file in shards.into_iter().chain(group.opens) {
        if owners[file].replace(number).is_some_and(|other| other != number) {
            return Err(at(format!("another group has the file {} too", manifest.files[file].name)));
        }
    }
    Ok(())
}

fn check_tensor(manifest: &Manifest, tensor: &TensorRecord) -> Result<(), Fault> {
    let Some(file) = manifest.files.get(tensor.file) else {
        return Err(format!("lies in file {} of {}", tensor.file, manifest.files.len()));
    };
    let needs = tensor.dtype.byte_count(&tensor.shape).map_err(|error| error.message().to_owned())?;
    if needs != tensor.bytes {
        return Err(format!("its shape needs {needs} bytes and it has {}", tensor.bytes));
    }
    if tensor.offset < file.head_bytes || tensor.offset.checked_add(tensor.bytes).is_none_or(|end| end > file.bytes) {
        return Err(format!("{} bytes from {} on do not lie in {}", tensor.bytes, tensor.offset, file.name));
    }
    let count = tensor.bytes.div_ceil(manifest.chunk_bytes).max(1);
    let has = tensor.chunk_sums().len() as u64;
    if has != count || tensor.chunks.len() == 1 {
        return Err(format!("{has} checksums for {count} chunks"));
    }
    if combined(tensor.chunk_sums(), tensor.bytes, manifest.chunk_bytes) != tensor.checksum {
        return Err("its checksum is not that of its chunks".to_owned());
    }
    Ok(())
}

/// Each file is its head and then its tensors, without gap or overlap, to its last byte.
fn check_coverage(manifest: &Manifest) -> Result<(), Fault> {
    let mut tensors: Vec<(usize, u64, u64)> = Vec::new();
    for tensor in manifest.groups.iter().flat_map(|group| &group.tensors) {
        tensors.push((tensor.file, tensor.offset, tensor.bytes));
    }
    tensors.sort_unstable();
    let mut reached: Vec<u64> = manifest.files.iter().map(|file| file.head_bytes).collect();
    for (file, offset, bytes) in tensors {
        if offset != reached[file] {
            return Err(format!("{}: a tensor begins at {offset}, not at {}", manifest.files[file].name, reached[file]));
        }
        reached[file] += bytes;
    }
    match manifest.files.iter().zip(&reached).find(|(file, reached)| file.bytes != **reached) {
        Some((file, reached)) => Err(format!("{}: what lies from {reached} to {} is no tensor", file.name, file.bytes)),
        None => Ok(()),
    }
}
