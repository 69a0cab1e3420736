//! What can be told of a save before anything is made: whether there is room for it, and how long it is likely to take.

use std::path::Path;

use super::Checkpoints;
use super::commit::{CheckpointOptions, Group};
use super::manifest::Json;
use super::open::read_manifest;
use super::plan::Plan;
use crate::base::{Error, ErrorKind, Result};
use crate::model::ensure_space;
use crate::storage::open_files_left;

/// How many descriptors a save needs at the least: two directories, the lock, and those of one lane.
const DESCRIPTORS_MIN: usize = 16;

/// What a save would write, and how long that is likely to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// How many files, the manifest among them.
    pub files: u64,
    /// Their bytes, without the manifest's.
    pub bytes: u64,
    /// The bytes that the filesystem has free; `u64::MAX` where it does not tell.
    pub free_bytes: u64,
    /// How long writing and syncing them takes at the rate at which the newest checkpoint here was written; `None` if there
    /// is none that tells.
    pub seconds: Option<f64>,
}

impl Forecast {
    /// The rate from which the seconds follow, in decimal gigabytes a second.
    #[expect(clippy::cast_precision_loss, reason = "the last digits of a rate mean nothing")]
    pub fn gb_per_s(&self) -> Option<f64> {
        self.seconds.filter(|seconds| *seconds > 0.0).map(|seconds| self.bytes as f64 / seconds / 1e9)
    }
}

impl Checkpoints {
    /// What a save of these groups would write, and how long that is likely to take. Touches nothing.
    ///
    /// With [`ranks`](CheckpointOptions::ranks) this is about the caller's part: all write at once, each at its share of the rate.
    ///
    /// # Errors
    /// What [`save`](Self::save) would fail with before it writes a byte: [`NoSpace`](ErrorKind::NoSpace),
    /// [`LimitReached`](ErrorKind::LimitReached), or [`InvalidInput`](ErrorKind::InvalidInput) for what cannot be saved. A quota is
    /// noticed only when space is reserved.
    #[expect(clippy::cast_precision_loss, reason = "the last digits of a rate mean nothing")]
    pub fn preflight(&self, groups: &[Group], structure: &Json, options: &CheckpointOptions) -> Result<Forecast> {
        self.ensure_reachable(groups)?;
        let plan = Plan::new(0, groups, structure, options)?;
        let seconds_a_byte = self.seconds_a_byte();
        let target = match self.context.namespace.metadata(&self.directory) {
            Ok(_) => self.directory.join("step"),
            Err(_) => self.directory.clone(),
        };
        let mut forecast = self.ensure_room(&target, &plan)?;
        let bytes = forecast.bytes as f64 * options.ranks.as_ref().map_or(1.0, |ranks| f64::from(ranks.count));
        forecast.seconds = seconds_a_byte.map(|each| each * bytes);
        Ok(forecast)
    }

    /// Whether the filesystem of what is to be made has room for the files, and the process for their descriptors. Blocks are
    /// reserved before the first tensor's byte moves, which finds out about quotas.
    pub(super) fn ensure_room(&self, target: &Path, plan: &Plan) -> Result<Forecast> {
        let namespace = &*self.context.namespace;
        let files = plan.files.len() as u64 + 1;
        let directory = target.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let free_files = namespace.free_files(directory)?;
        // And their directory.
        if free_files < files + 1 {
            let message = format!("the checkpoint has {files} files, and the filesystem has room for {free_files} more");
            return Err(Error::new(ErrorKind::NoSpace, message)
                .with_file(&self.directory)
                .with_hint("free inodes there (`df -i`), or make shards larger"));
        }
        let bytes = plan.files.iter().map(|file| file.bytes).sum();
        let free_bytes = ensure_space(namespace, target, bytes)?;
        match open_files_left() {
            Some(left) if left < DESCRIPTORS_MIN => Err(Error::new(
                ErrorKind::LimitReached,
                format!("the process may open {left} more files, and a save needs {DESCRIPTORS_MIN}"),
            )
            .with_hint("raise the limit of open files (`ulimit -n`)")),
            _ => Ok(Forecast { files, bytes, free_bytes, seconds: None }),
        }
    }

    /// How long a byte of the newest checkpoint took, if there is one that tells.
    #[expect(clippy::cast_precision_loss, reason = "the last digits of a rate mean nothing")]
    fn seconds_a_byte(&self) -> Option<f64> {
        // Nothing depends on it. What is wrong with that checkpoint is told to those who open it.
        let step = self.newest().ok().flatten()?;
        let manifest = read_manifest(&self.context, &self.directory_of(step).ok()?, step).ok()?;
        let bytes = manifest.file_bytes();
        (bytes > 0).then(|| manifest.written_in_ms as f64 / 1e3 / bytes as f64)
    }
}
