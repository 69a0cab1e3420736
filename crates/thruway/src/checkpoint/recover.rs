//! What failed and killed saves left behind, and taking checkpoints away. All of it under the lock: whatever is unfinished then
//! belongs to nobody who lives.
//!
//! A checkpoint is taken away by one rename to a hidden name, made durable before the first of its files goes: at no moment does
//! a part of it stand under a step's name.

use std::path::Path;

use super::names::{DirectoryName, Listing};
use super::open::{ensure_whole, read_manifest};
use super::retention::Retention;
use super::{Checkpoints, lock};
use crate::base::{Error, ErrorKind, Result};
use crate::storage::{EntryKind, Namespace, temporary_name};

/// What was cleared up.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The hidden names that were removed.
    pub removed: Vec<String>,
    /// The steps whose replacement was committed and is now in the place of the old one.
    pub settled: Vec<u64>,
    /// What could not be done.
    pub warnings: Vec<Error>,
}

/// What went, or would go.
#[derive(Debug, Default)]
pub struct Pruned {
    /// The steps that went.
    pub removed: Vec<u64>,
    /// What could not be removed.
    pub warnings: Vec<Error>,
}

impl Checkpoints {
    /// Removes what failed and killed saves left behind, and ends what a kill interrupted. Never touches what is committed.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists) if a process that may live changes the directory (the fact `owner` says
    /// which), and whatever storage reports. What could not be removed is a warning.
    pub fn recover(&self) -> Result<Recovered> {
        let _lock = lock::take(&*self.context.namespace, &self.directory)?;
        sweep(self)
    }

    /// What [`recover`](Self::recover) would remove, if nobody who lives is at work on it: by name.
    ///
    /// # Errors
    /// Whatever storage reports.
    pub fn unfinished(&self) -> Result<Vec<String>> {
        Ok(Listing::read(&*self.context.namespace, &self.directory)?.unfinished)
    }

    /// Removes the checkpoints that retention lets go. Those that are not whole are neither counted nor removed, and the newest
    /// whole one always stays. With `dry_run` it only says which.
    ///
    /// # Errors
    /// As [`recover`](Self::recover); with `dry_run` no lock is needed.
    pub fn prune(&self, retention: Retention, dry_run: bool) -> Result<Pruned> {
        if dry_run {
            return Ok(Pruned { removed: retention.superseded(&self.whole_steps()?), warnings: Vec::new() });
        }
        let _lock = lock::take(&*self.context.namespace, &self.directory)?;
        let (removed, warnings) = self.retire_superseded(retention)?;
        Ok(Pruned { removed, warnings })
    }

    /// The steps whose files are all there, at their sizes.
    fn whole_steps(&self) -> Result<Vec<u64>> {
        let listing = Listing::read(&*self.context.namespace, &self.directory)?;
        let mut whole = Vec::new();
        for (step, names) in &listing.steps {
            if names.last().map_or(Ok(false), |last| is_whole(self, *last))? {
                whole.push(*step);
            }
        }
        Ok(whole)
    }

    /// Takes away what retention lets go: the steps that went, and what could not be done.
    pub(super) fn retire_superseded(&self, retention: Retention) -> Result<(Vec<u64>, Vec<Error>)> {
        if retention.keep.is_none() {
            return Ok(Default::default());
        }
        let (mut removed, mut failed) = (Vec::new(), Vec::new());
        let listing = Listing::read(&*self.context.namespace, &self.directory)?;
        for step in retention.superseded(&self.whole_steps()?) {
            // Those that are replaced first: the step is there until the last one goes.
            let names = listing.steps.get(&step).into_iter().flatten();
            match names.into_iter().try_for_each(|name| retire(self, *name)) {
                Ok(()) => removed.push(step),
                Err(error) => failed.push(error),
            }
        }
        Ok((removed, failed))
    }
}

/// Clears up. The lock is held.
pub(super) fn sweep(checkpoints: &Checkpoints) -> Result<Recovered> {
    let namespace = &*checkpoints.context.namespace;
    let directory = &checkpoints.directory;
    let listing = Listing::read(namespace, directory)?;
    let mut recovered = Recovered::default();
    for (step, names) in &listing.steps {
        if names.iter().all(|name| name.replacement == 0) {
            continue;
        }
        match settle(checkpoints, *step) {
            Ok(true) => recovered.settled.push(*step),
            Ok(false) => {}
            Err(error) => recovered.warnings.push(error),
        }
    }
    for name in listing.unfinished {
        match remove_all(namespace, &directory.join(&name)) {
            Ok(()) => recovered.removed.push(name),
            Err(error) => recovered.warnings.push(error),
        }
    }
    if !recovered.removed.is_empty() {
        recovered.warnings.extend(namespace.sync_directory(directory).err());
    }
    Ok(recovered)
}

/// Puts the newest checkpoint of a step in the place of those before it. Does nothing, and says so, if it is not whole: then it
/// may be that an older one is still needed. The lock is held.
pub(super) fn settle(checkpoints: &Checkpoints, step: u64) -> Result<bool> {
    let namespace = &*checkpoints.context.namespace;
    let directory = &checkpoints.directory;
    let listing = Listing::read(namespace, directory)?;
    let Some((newest, older)) = listing.steps.get(&step).and_then(|names| names.split_last()) else { return Ok(false) };
    if newest.replacement == 0 || !is_whole(checkpoints, *newest)? {
        return Ok(false);
    }
    // Its own name may not be durable yet: whoever published it may have died before that.
    namespace.sync_directory(directory)?;
    for name in older {
        retire(checkpoints, *name)?;
    }
    let plain = DirectoryName { step, replacement: 0 };
    namespace.rename_new(&directory.join(newest.to_string()), &directory.join(plain.to_string()))?;
    namespace.sync_directory(directory)?;
    Ok(true)
}

/// Whether all files of a checkpoint are there at their sizes. That it cannot be found out is an error, not an answer.
fn is_whole(checkpoints: &Checkpoints, name: DirectoryName) -> Result<bool> {
    use ErrorKind::{Malformed, Mismatch, NotFound, UnexpectedEof, Unsupported};
    let path = checkpoints.directory.join(name.to_string());
    let manifest = read_manifest(&checkpoints.context, &path, name.step);
    match manifest.and_then(|manifest| ensure_whole(&*checkpoints.context.namespace, &path, &manifest)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), NotFound | Malformed | UnexpectedEof | Mismatch | Unsupported) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes a checkpoint away.
fn retire(checkpoints: &Checkpoints, name: DirectoryName) -> Result<()> {
    let namespace = &*checkpoints.context.namespace;
    let path = checkpoints.directory.join(name.to_string());
    let hidden = temporary_name(&path)?;
    namespace.rename_new(&path, &hidden)?;
    namespace.sync_directory(&checkpoints.directory)?;
    remove_all(namespace, &hidden)
}

/// Removes a directory with all that is in it, or a file. Links are removed, never followed.
fn remove_all(namespace: &dyn Namespace, path: &Path) -> Result<()> {
    let found = match namespace.own_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if found.kind != EntryKind::Directory {
        return namespace.remove(path);
    }
    for name in namespace.list(path)? {
        remove_all(namespace, &path.join(name))?;
    }
    namespace.remove_directory(path)
}
