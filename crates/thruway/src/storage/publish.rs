//! Publishing: what a reader finds under a name is complete and durable, or is not there.
//!
//! ```text
//! open the directory  →  create  .name.thruway-<unique>  →  write  →  sync the file  →  rename to name  →  sync the directory
//! ```
//!
//! A failure, a kill or a power cut at any step before the last leaves the old file as it was, and at most one temporary
//! file, which anyone can recognise by its name and remove. What the last step needs is therefore had before the first:
//! a directory that cannot be opened cannot be synced. If it fails all the same, the new file is in place and only its
//! durability is in doubt, and the error says so by the fact `published`. Every publication in this library goes
//! through here.
//!
//! A file that replaces another has its permissions. A link at the target is the target: a file replaces the link itself, never what it points to, and a directory is
//! refused, since no rename puts one in a link's place.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Directory, EntryKind, File, Metadata, Namespace};
use crate::base::error::{escaped, printable};
use crate::base::{Error, ErrorKind, Result};

/// A file or directory in the making, beside the name under which it will be published. Dropped without
/// [`publish`](Self::publish), it removes itself.
#[derive(Debug)]
pub struct Staging {
    namespace: Arc<dyn Namespace>,
    target: PathBuf,
    temporary: PathBuf,
    /// Where both names stand, open from the start.
    parent: Box<dyn Directory>,
    /// The files made in a staged directory, for removal; empty for a single file.
    members: Vec<PathBuf>,
    is_directory: bool,
    /// Whether another process made the directory, which publishes or removes it.
    is_joined: bool,
    /// Whether there is something under the temporary name.
    is_there: bool,
}

impl Staging {
    /// Starts a file that will replace whatever file or link stands at `target`. What a link points to stays as it is.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if `target` is a directory, or a link to one, or has no file name;
    /// and what [`Namespace::open_directory`] and [`Namespace::create`] give.
    pub fn file(namespace: Arc<dyn Namespace>, target: &Path) -> Result<(Self, Arc<dyn File>)> {
        let permissions = ensure_file_may_stand(&*namespace, target)?;
        let mut staging = Self::begin(namespace, target, false)?;
        let file = staging.namespace.create(&staging.temporary, permissions).map_err(|error| at_target(error, target))?;
        staging.is_there = true;
        Ok((staging, file))
    }

    /// Starts a directory that will be published under `target`, where nothing but an empty directory may stand.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists) if there is something at `target`, be it a link to an empty directory
    /// or to nothing, and what [`Namespace::open_directory`] and [`Namespace::create_directory`] give.
    pub fn directory(namespace: Arc<dyn Namespace>, target: &Path) -> Result<Self> {
        let mut staging = Self::begin(namespace, target, true)?;
        ensure_directory_may_stand(&*staging.namespace, &staging.target)?;
        staging.namespace.create_directory(&staging.temporary).map_err(|error| at_target(error, target))?;
        staging.is_there = true;
        Ok(staging)
    }

    /// Takes part in a directory that another process staged for `target`: makes files in it, and removes no others. That process
    /// publishes it.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if it is not there, and what [`Namespace::open_directory`] gives.
    pub fn join(namespace: Arc<dyn Namespace>, staged: &Path, target: &Path) -> Result<Self> {
        let parent = namespace.open_directory(staged).map_err(|error| at_target(error, target))?;
        let (target, temporary, members) = (target.to_owned(), staged.to_owned(), Vec::new());
        Ok(Self { namespace, target, temporary, parent, members, is_directory: true, is_joined: true, is_there: true })
    }

    /// Leaves a joined directory as it is: what was made there is now another's.
    pub fn leave(mut self) {
        self.is_there = false;
    }

    /// Opens what publishing will need. Creates nothing yet.
    fn begin(namespace: Arc<dyn Namespace>, target: &Path, is_directory: bool) -> Result<Self> {
        let temporary = temporary_name(target)?;
        let directory = parent(target);
        let parent = namespace.open_directory(directory).map_err(|error| at_target(error, target))?;
        // Without whatever slashes follow the name: with them the system would look behind a link.
        let target = target.file_name().map_or_else(|| target.to_owned(), |name| directory.join(name));
        Ok(Self { namespace, target, temporary, parent, members: Vec::new(), is_directory, is_joined: false, is_there: false })
    }

    /// The temporary path that is being written.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Creates a file in a staged directory. Its name must be a plain file name.
    ///
    /// # Errors
    /// What [`Namespace::create`] gives.
    pub fn member(&mut self, name: &str) -> Result<(PathBuf, Arc<dyn File>)> {
        let path = self.path_of_member(name)?;
        let file = self.namespace.create(&path, None).map_err(|error| at_target(error, &self.target.join(name)))?;
        self.members.push(path.clone());
        Ok((path, file))
    }

    /// Creates a symbolic link in a staged directory, under a plain file name.
    ///
    /// # Errors
    /// What [`Namespace::create_link`] gives.
    pub fn link(&mut self, name: &str, target: &Path) -> Result<()> {
        let path = self.path_of_member(name)?;
        self.namespace.create_link(&path, target).map_err(|error| at_target(error, &self.target.join(name)))?;
        self.members.push(path);
        Ok(())
    }

    fn path_of_member(&self, name: &str) -> Result<PathBuf> {
        if !self.is_directory || name.contains('/') || name == ".." || name == "." || name.is_empty() {
            let message = format!("'{}' cannot be a file of the staged directory", printable(name));
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(self.temporary.join(name))
    }

    /// Makes everything durable and visible under the target's name, in that order. The files themselves must
    /// have been synced by whoever wrote them ([`File::sync`]).
    ///
    /// # Errors
    /// Whatever fails. Before the rename nothing has changed; after it, the new content is visible and only
    /// its durability is in doubt, and the error says so: it has the fact `published`.
    pub fn publish(mut self) -> Result<()> {
        self.rename().map_err(|error| at_target(error, &self.target))?;
        self.is_there = false;
        self.parent.sync().map_err(|error| published(&error, &self.target))
    }

    /// As [`publish`](Self::publish), of a file in whose place nothing may stand.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists) if something stands there, and what [`publish`](Self::publish) gives.
    pub fn publish_new(mut self) -> Result<()> {
        self.namespace.rename_new(&self.temporary, &self.target).map_err(|error| at_target(error, &self.target))?;
        self.is_there = false;
        self.parent.sync().map_err(|error| published(&error, &self.target))
    }

    fn rename(&self) -> Result<()> {
        if !self.is_directory {
            return self.namespace.rename(&self.temporary, &self.target);
        }
        self.namespace.sync_directory(&self.temporary)?;
        if existing(&*self.namespace, &self.target)?.is_some() {
            // Only an empty directory may stand here, and renaming over anything else fails.
            self.namespace.rename(&self.temporary, &self.target)
        } else {
            self.namespace.rename_new(&self.temporary, &self.target)
        }
    }

    /// Removes what was staged. Errors are returned here; a drop can only ignore them.
    ///
    /// # Errors
    /// Whatever the filesystem reports; the temporary name is in the error.
    pub fn discard(mut self) -> Result<()> {
        self.remove()
    }

    fn remove(&mut self) -> Result<()> {
        self.is_there = false;
        if self.is_directory {
            for member in &self.members {
                self.namespace.remove(member)?;
            }
            if self.is_joined { Ok(()) } else { self.namespace.remove_directory(&self.temporary) }
        } else {
            self.namespace.remove(&self.temporary)
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.is_there {
            // A drop has nobody to report to; what stays behind is recognisable by its name.
            drop(self.remove());
        }
    }
}

/// Refuses, before a byte is written, a target that no file can take. Gives the permissions of the file that is there.
fn ensure_file_may_stand(namespace: &dyn Namespace, target: &Path) -> Result<Option<u32>> {
    let found = existing(namespace, target)?;
    let kind = match found.map(|found| found.kind) {
        // A link is replaced, whatever it points to; but one to a directory stands for the directory wherever people use it.
        Some(EntryKind::Link) => match namespace.metadata(target) {
            Ok(found) if found.kind == EntryKind::Directory => Some(EntryKind::Directory),
            _ => return Ok(None),
        },
        kind => kind,
    };
    let names_a_directory = target.as_os_str().as_bytes().ends_with(b"/");
    match kind {
        None | Some(EntryKind::File) if !names_a_directory => Ok(found.map(|found| found.permissions)),
        Some(EntryKind::Directory) | None => {
            let file = escaped(&target.join("model.safetensors").to_string_lossy());
            Err(Error::new(ErrorKind::InvalidInput, "the target names a directory, and one file is to be written")
                .with_file(target)
                .with_hint(format!("name the file: {file}")))
        }
        Some(_) => Err(Error::new(ErrorKind::InvalidInput, "the target is not a regular file").with_file(target)),
    }
}

/// Refuses, before a byte is written, a target whose place no directory can take.
fn ensure_directory_may_stand(namespace: &dyn Namespace, target: &Path) -> Result<()> {
    let (what, hint) = match existing(namespace, target)?.map(|found| found.kind) {
        None => return Ok(()),
        Some(EntryKind::Directory) if namespace.list(target)?.is_empty() => return Ok(()),
        Some(EntryKind::Link) => (
            "the target is a link, whose place no directory can take",
            "name the directory that it points to, or remove the link",
        ),
        Some(_) => ("the target exists and is not an empty directory", "choose another name, or remove it first"),
    };
    Err(Error::new(ErrorKind::AlreadyExists, what).with_file(target).with_hint(hint))
}

/// What stands at `path`, links not followed. That it cannot be found out is an error, not an absence.
fn existing(namespace: &dyn Namespace, path: &Path) -> Result<Option<Metadata>> {
    match namespace.own_metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Adds what was to be published: the file that the error names may be a temporary one, which nobody knows.
fn at_target(error: Error, target: &Path) -> Error {
    error.with("target", escaped(&target.to_string_lossy()))
}

/// The failure to make a publication durable: what is in place must not be taken for unchanged.
fn published(error: &Error, target: &Path) -> Error {
    let message = format!("the new content is in place and complete, but a power cut might still undo it: {}", error.message());
    // From the error's own source, which the caller may ask for.
    let mut marked = match error.os_error() {
        Some(code) => Error::from_io(message, std::io::Error::from_raw_os_error(code)),
        None => Error::new(error.kind(), message),
    };
    marked = error.contexts().fold(marked, |marked, (key, value)| marked.with(key, value)).with("published", "yes");
    at_target(marked, target).with_hint("sync the directory and look at the target, or write it again")
}

/// The directory that holds `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// What follows the name in that of a temporary file or directory.
const TEMPORARY: &str = ".thruway-";

/// The name for which this one is temporary: where something is being written, or was left behind. `None` for other names.
pub(crate) fn name_of_temporary(name: &OsStr) -> Option<&str> {
    let (target, unique) = name.to_str()?.strip_prefix('.')?.rsplit_once(TEMPORARY)?;
    let is_unique = unique.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    (is_unique && !target.is_empty() && !unique.is_empty()).then_some(target)
}

/// `.<name>.thruway-<process>-<count>-<time>` beside `target`. A long name is cut so that the whole stays within the
/// 255 bytes that filesystems allow.
pub(crate) fn temporary_name(target: &Path) -> Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name =
        target.file_name().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the target has no file name").with_file(target))?;
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
    let suffix = format!("{TEMPORARY}{}-{}-{nanos:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let bytes = name.as_bytes();
    let keep = bytes.len().min(254 - suffix.len());
    let mut temporary = OsString::from(".");
    temporary.push(OsStr::from_bytes(&bytes[..keep]));
    temporary.push(suffix);
    Ok(parent(target).join(temporary))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_name_tells_what_it_is_for_and_no_other_name_does() {
        let temporary = temporary_name(Path::new("d/step-00001000")).expect("a name");
        assert_eq!(name_of_temporary(temporary.file_name().expect("a name")), Some("step-00001000"));
        for other in ["step-00001000", ".step-00001000", ".thruway-lock", ".x.thruway-", ".x.thruway-notes", "x.thruway-1-2-3"] {
            assert_eq!(name_of_temporary(OsStr::new(other)), None, "{other}");
        }
    }
}
