//! What a save will write, worked out before anything is touched: files, places, and the manifest but for the checksums.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::checksum::{CHUNK_BYTES, Checksum};
use super::commit::{CheckpointOptions, Group};
use super::manifest::{FileRecord, GroupRecord, Json, Manifest, SaveId, TensorRecord, is_plain_name};
use super::open::SAVE_ID;
use crate::base::error::printable;
use crate::base::{Error, ErrorKind, Result};
use crate::format::safetensors::{TensorSpec, parse_shard_name};
use crate::model::{FilePlan, plan_group};

/// A shard's size, unless told otherwise: what the Hugging Face libraries used for years, in bytes.
const SHARD_BYTES: u64 = 5_000_000_000;

/// The longest name of a group that names its files, in bytes.
const STEM_BYTES_MAX: usize = 64;

/// A save to be.
#[derive(Debug)]
pub(super) struct Plan {
    /// The files, laid out.
    pub(super) files: Vec<FilePlan>,
    /// The manifest, each tensor with the checksum of nothing.
    pub(super) manifest: Manifest,
    /// Of each tensor of each group in the manifest, which of the caller's it is.
    pub(super) sources: Vec<Vec<usize>>,
}

impl Plan {
    pub(super) fn new(step: u64, groups: &[Group], structure: &Json, options: &CheckpointOptions) -> Result<Self> {
        let ranks = options.ranks.as_ref();
        let save_id = ranks.map_or_else(SaveId::random, |ranks| Ok(ranks.save_id))?;
        let chunk_bytes = options.chunk_bytes.unwrap_or(CHUNK_BYTES);
        let mut plan = Self { files: Vec::new(), manifest: Manifest::new(save_id, step, chunk_bytes), sources: Vec::new() };
        plan.manifest.structure = structure.clone();
        plan.manifest.metadata.clone_from(&options.metadata);
        plan.manifest.world = options.world.clone();
        for ((number, group), stem) in groups.iter().enumerate().zip(stems(groups, ranks.map(|ranks| ranks.rank))?) {
            plan.add(number, group, &stem, options)?;
        }
        Ok(plan)
    }

    fn add(&mut self, number: usize, group: &Group, stem: &str, options: &CheckpointOptions) -> Result<()> {
        for source in &group.tensors {
            source.spec.check_bytes(source.region.len() as u64)?;
        }
        if group.metadata.contains_key(SAVE_ID) {
            return Err(Error::new(ErrorKind::InvalidInput, format!("{SAVE_ID} is a key that the checkpoint itself gives")));
        }
        let mut record = GroupRecord { name: group.name.clone(), opens: None, tensors: Vec::new() };
        let mut sources = Vec::new();
        if !group.tensors.is_empty() {
            let sizes: Vec<u64> = group.tensors.iter().map(|source| source.region.len() as u64).collect();
            let specs: Vec<TensorSpec> = group.tensors.iter().map(|source| source.spec.clone()).collect();
            let by_name: HashMap<&str, usize> =
                group.tensors.iter().enumerate().map(|(at, source)| (source.spec.name.as_str(), at)).collect();
            let own = [(SAVE_ID.to_owned(), self.manifest.save_id.to_string())];
            let metadata: BTreeMap<String, String> = group.metadata.clone().into_iter().chain(own).collect();
            let shard_bytes = options.max_shard_bytes.unwrap_or(SHARD_BYTES);
            for file in plan_group((stem, number), specs, &sizes, Some(shard_bytes), &metadata)? {
                let at = self.files.len();
                for entry in &file.entries {
                    record.tensors.push(TensorRecord {
                        name: entry.name.clone(),
                        dtype: entry.dtype,
                        shape: entry.shape.clone(),
                        file: at,
                        offset: entry.extent.offset,
                        bytes: entry.extent.length,
                        checksum: Checksum::of(&[]),
                        chunks: Vec::new(),
                    });
                    sources.push(by_name[entry.name.as_str()]);
                }
                self.manifest.files.push(FileRecord {
                    name: file.name.clone(),
                    bytes: file.bytes,
                    head_bytes: file.head.len() as u64,
                    head_checksum: Checksum::of(&file.head),
                });
                self.files.push(file);
            }
            // The only file, or the index, which is the last.
            record.opens = self.files.len().checked_sub(1);
        }
        self.manifest.groups.push(record);
        self.sources.push(sources);
        Ok(())
    }
}

/// What the names of each group's files begin with: the group's own name if any filesystem takes it and nothing can be taken for
/// something else, or else a number; with the rank, where several save, so that no two ranks' files have one name.
fn stems(groups: &[Group], rank: Option<u32>) -> Result<Vec<String>> {
    let mut names = HashSet::new();
    if let Some(twice) = groups.iter().find(|group| !names.insert(group.name.as_str())) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("two groups are called {}", printable(&twice.name))));
    }
    let is_stem = |name: &str| {
        let numbered = parse_shard_name(&format!("{name}.safetensors")).is_some();
        is_plain_name(name) && name.len() <= STEM_BYTES_MAX && !name.contains('.') && !numbered && !name.starts_with("group-")
    };
    // Some filesystems take "Model" and "model" for one name.
    let mut taken = HashSet::new();
    let stem = |(number, group): (usize, &Group)| match is_stem(&group.name) && taken.insert(group.name.to_lowercase()) {
        true => group.name.clone(),
        false => rank.map_or_else(String::new, |rank| format!("rank-{rank:05}-")) + &format!("group-{number}"),
    };
    Ok(groups.iter().enumerate().map(stem).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_groups_become_names_of_files_only_where_nothing_can_go_wrong() {
        let names = [
            "model",
            "optimizer",
            "Model",
            "../up",
            "a/b",
            "",
            ".hidden",
            "权重",
            "model-00001-of-00002",
            "group-0",
            "x.y",
            "-rf",
            &"l".repeat(300),
        ];
        let groups: Vec<Group> = names.iter().map(|name| Group::new(*name, Vec::new())).collect();
        let stems = stems(&groups, None).expect("no name stands twice");
        let own: Vec<&str> = stems.iter().map(String::as_str).filter(|stem| names.contains(stem)).collect();
        assert_eq!(own, ["model", "optimizer"], "{stems:?}");
        assert_eq!(stems.iter().collect::<HashSet<_>>().len(), names.len());
        assert!(stems.iter().all(|stem| is_plain_name(stem)));
        assert!(super::stems(&[Group::new("a", Vec::new()), Group::new("a", Vec::new())], None).is_err());
        let of_a_rank = super::stems(&groups, Some(3)).expect("the same");
        assert!(of_a_rank.contains(&"rank-00003-group-3".to_owned()) && of_a_rank.contains(&"model".to_owned()), "{of_a_rank:?}");
    }
}
