//! Publishing: what a reader finds under a name is complete and durable, or is not there.
//!
//! ```text
//! create  .name.thruway-<unique>   →  write  →  sync the file  →  rename to name  →  sync the directory
//! ```
//!
//! A failure, a kill or a power cut at any step leaves the old file as it was, and at most one temporary file,
//! which anyone can recognise by its name and remove. Every publication in this library goes through here.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{File, Metadata, Namespace};
use crate::base::{Error, ErrorKind, Result};

/// A file or directory in the making, beside the name under which it will be published. Dropped without
/// [`publish`](Self::publish), it removes itself.
#[derive(Debug)]
pub struct Staging {
    namespace: Arc<dyn Namespace>,
    target: PathBuf,
    temporary: PathBuf,
    /// The files made in a staged directory, for syncing and removal; empty for a single file.
    members: Vec<PathBuf>,
    is_directory: bool,
    published: bool,
}

impl Staging {
    /// Starts a file that will replace whatever file stands at `target`. A link there is replaced, not followed.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if `target` is a directory or has no file name, and what
    /// [`Namespace::create`] gives.
    pub fn file(namespace: Arc<dyn Namespace>, target: &Path) -> Result<(Self, Arc<dyn File>)> {
        if let Ok(existing) = namespace.metadata(target)
            && existing.kind != super::EntryKind::File
        {
            return Err(Error::new(ErrorKind::InvalidInput, "the target is not a regular file").with_file(target));
        }
        let temporary = temporary_name(target)?;
        let file = namespace.create(&temporary)?;
        let staging =
            Self { namespace, target: target.to_owned(), temporary, members: Vec::new(), is_directory: false, published: false };
        Ok((staging, file))
    }

    /// Starts a directory that will be published under `target`, where nothing but an empty directory may stand.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists) if there is something at `target`, and what
    /// [`Namespace::create_directory`] gives.
    pub fn directory(namespace: Arc<dyn Namespace>, target: &Path) -> Result<Self> {
        let occupied = match existing(&*namespace, target)? {
            Some(found) if found.kind == super::EntryKind::Directory => !namespace.list(target)?.is_empty(),
            found => found.is_some(),
        };
        if occupied {
            return Err(Error::new(ErrorKind::AlreadyExists, "the target exists and is not an empty directory")
                .with_file(target)
                .with_hint("choose another name, or remove it first"));
        }
        let temporary = temporary_name(target)?;
        namespace.create_directory(&temporary)?;
        Ok(Self { namespace, target: target.to_owned(), temporary, members: Vec::new(), is_directory: true, published: false })
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
        if !self.is_directory || name.contains('/') || name == ".." || name == "." || name.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, format!("'{name}' cannot be a file of the staged directory")));
        }
        let path = self.temporary.join(name);
        let file = self.namespace.create(&path)?;
        self.members.push(path.clone());
        Ok((path, file))
    }

    /// Makes everything durable and visible under the target's name, in that order. The files themselves must
    /// have been synced by whoever wrote them ([`File::sync`]).
    ///
    /// # Errors
    /// Whatever fails. Before the rename nothing has changed; after it, the new content is visible and only
    /// its durability is in doubt, and the error says so.
    pub fn publish(mut self) -> Result<()> {
        if self.is_directory {
            self.namespace.sync_directory(&self.temporary)?;
            if existing(&*self.namespace, &self.target)?.is_some() {
                // Only an empty directory may stand here, and renaming over anything else fails.
                self.namespace.rename(&self.temporary, &self.target)?;
            } else {
                self.namespace.rename_new(&self.temporary, &self.target)?;
            }
        } else {
            self.namespace.rename(&self.temporary, &self.target)?;
        }
        self.published = true;
        self.namespace
            .sync_directory(parent(&self.target))
            .map_err(|error| error.with_hint("the new content is in place, but a power cut might still undo it: sync and check"))
    }

    /// Removes what was staged. Errors are returned here; a drop can only ignore them.
    ///
    /// # Errors
    /// Whatever the filesystem reports; the temporary name is in the error.
    pub fn discard(mut self) -> Result<()> {
        self.remove()
    }

    fn remove(&mut self) -> Result<()> {
        self.published = true;
        if self.is_directory {
            for member in &self.members {
                self.namespace.remove(member)?;
            }
            self.namespace.remove_directory(&self.temporary)
        } else {
            self.namespace.remove(&self.temporary)
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            // A drop has nobody to report to; what stays behind is recognisable by its name.
            drop(self.remove());
        }
    }
}

/// What stands at `path`, if anything. That it cannot be found out is an error, not an absence.
fn existing(namespace: &dyn Namespace, path: &Path) -> Result<Option<Metadata>> {
    match namespace.metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The directory that holds `path`.
fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// `.<name>.thruway-<process>-<count>` beside `target`. A long name is cut so that the whole stays within the
/// 255 bytes that filesystems allow.
fn temporary_name(target: &Path) -> Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name =
        target.file_name().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the target has no file name").with_file(target))?;
    let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
    let suffix = format!(".thruway-{}-{}-{nanos:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let bytes = name.as_bytes();
    let keep = bytes.len().min(254 - suffix.len());
    let mut temporary = OsString::from(".");
    temporary.push(OsStr::from_bytes(&bytes[..keep]));
    temporary.push(suffix);
    Ok(parent(target).join(temporary))
}
