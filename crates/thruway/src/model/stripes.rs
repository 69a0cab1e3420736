//! Stripes: the shards of one model spread over directories on several drives.
//!
//! The primary directory is the model, and holds a link for each shard that lies elsewhere. A stripe is a directory whose name is
//! made up for this one model, so nothing that stands on those drives is in its way, and none is replaced. Stripes are made
//! visible before the primary, whose rename is the commit (docs/decisions/0010-stripes.md).

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::writer::{FilePlan, Form, ensure_space};
use crate::base::{Error, ErrorKind, Result};
use crate::storage::{Namespace, Staging};

/// A stripe in the making: where it will stand, and what is staged of it.
#[derive(Debug)]
pub(super) struct Stripe {
    target: PathBuf,
    pub(super) staging: Staging,
}

impl Stripe {
    /// Where its file of this name will stand: what the primary's link points to.
    pub(super) fn place_of(&self, name: &str) -> PathBuf {
        self.target.join(name)
    }
}

/// Which directory each file goes to, 0 being the primary and 1 the first stripe: the one with the fewest bytes so far, and the
/// primary for what holds no tensors.
pub(super) fn spread(files: &[FilePlan], stripes: usize) -> Vec<usize> {
    let mut bytes = vec![0_u64; 1 + stripes];
    let place = |file: &FilePlan| {
        if file.entries.is_empty() {
            return 0;
        }
        let fewest = (0..bytes.len()).min_by_key(|at| bytes[*at]).unwrap_or(0);
        bytes[fewest] += file.bytes;
        fewest
    };
    files.iter().map(place).collect()
}

/// Begins a stripe of the model at `target` in each of the directories to which something goes, with room for it: by the number of
/// the directory.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput) for a model of one file, [`NoSpace`](ErrorKind::NoSpace), and what
/// [`Staging::directory`] gives.
pub(super) fn begin(
    namespace: &Arc<dyn Namespace>,
    target: &Path,
    form: Form,
    directories: &[PathBuf],
    bytes: &[u64],
) -> Result<HashMap<usize, Stripe>> {
    if directories.is_empty() {
        return Ok(HashMap::new());
    }
    if form == Form::File {
        let message = "one file cannot be spread over several drives";
        return Err(Error::new(ErrorKind::InvalidInput, message).with_file(target).with_hint("set a size of shards"));
    }
    let name = target.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let stripe = |(number, (directory, bytes)): (usize, (&PathBuf, &u64))| {
        // A link is read from wherever its reader stands.
        let directory = std::path::absolute(directory)
            .map_err(|error| Error::from_io("cannot make the path absolute", error).with_file(directory))?;
        let target = directory.join(format!("{name}.stripe-{:016x}", random()?));
        ensure_space(&**namespace, &target, *bytes)?;
        let staging = Staging::directory(Arc::clone(namespace), &target)?;
        Ok((number, Stripe { target, staging }))
    };
    // No file is empty.
    (1..).zip(directories.iter().zip(bytes)).filter(|(_, (_, bytes))| **bytes > 0).map(stripe).collect()
}

/// 64 bits that no other stripe's name has.
fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => Ok(u64::from_le_bytes(bytes)),
        Ok(_) => Err(Error::new(ErrorKind::Io, "the system gave too few random bits for a stripe's name")),
        Err(errno) => Err(Error::from_io("cannot get random bits for a stripe's name", errno.into())),
    }
}

/// Makes the stripes visible, and then does `commit`, which makes the primary visible. If that fails, they are removed again,
/// unless the primary is in place all the same (the fact `published`).
pub(super) fn publish(
    namespace: &dyn Namespace,
    stripes: impl Iterator<Item = Stripe>,
    commit: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut visible: Vec<PathBuf> = Vec::new();
    let all = || {
        for Stripe { target, staging } in stripes {
            // One whose directory could not be synced stands there too.
            visible.push(target);
            staging.publish()?;
        }
        Ok(())
    };
    let outcome = all().map_err(|error: Error| without_published(&error)).and_then(|()| commit());
    let Err(error) = outcome else { return Ok(()) };
    if error.context("published").is_some() {
        return Err(error);
    }
    let left: Vec<&PathBuf> = visible.iter().filter(|stripe| remove(namespace, stripe).is_err()).collect();
    Err(match left.first() {
        Some(stripe) => error.with("left", crate::base::error::escaped(&stripe.to_string_lossy())),
        None => error,
    })
}

/// A stripe's failure: that its directory is in place is not that the model is.
fn without_published(error: &Error) -> Error {
    let facts = error.contexts().filter(|(key, _)| *key != "published");
    let source = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
    let plain = Error::new(error.kind(), format!("a stripe cannot be published: {}{source}", error.message()));
    let plain = facts.fold(plain, |plain, (key, value)| plain.with(key, value));
    match error.hint() {
        Some(hint) => plain.with_hint(hint),
        None => plain,
    }
}

fn remove(namespace: &dyn Namespace, stripe: &Path) -> Result<()> {
    let names = match namespace.list(stripe) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        names => names?,
    };
    names.iter().try_for_each(|name| namespace.remove(&stripe.join(name)))?;
    namespace.remove_directory(stripe)
}
