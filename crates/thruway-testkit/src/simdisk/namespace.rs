//! The names of a simulated disk.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thruway::storage::{Access, Buffering, Directory, EntryKind, File, Lock, Metadata, Namespace};
use thruway::{Error, ErrorKind, Result};

use super::content::Content;
use super::file::{SimFile, failed};
use super::{SimDisk, State};

impl SimDisk {
    fn handle(&self, id: u64, path: &Path, access: Access, buffering: Buffering) -> Arc<dyn File> {
        let enforced = if buffering == Buffering::Direct { self.settings.direct } else { None };
        Arc::new(SimFile { disk: self.clone(), id, path: path.to_owned(), writable: access == Access::Write, enforced })
    }

    fn named<T>(
        &self,
        operation: &str,
        what: &str,
        path: &Path,
        body: impl FnOnce(&mut State) -> std::result::Result<T, i32>,
    ) -> Result<T> {
        self.operate(operation, path, body).map_err(|errno| failed(what, path, errno))
    }
}

impl Namespace for SimDisk {
    fn open(&self, path: &Path, access: Access, buffering: Buffering) -> Result<Arc<dyn File>> {
        let (id, is_directory) = self.named("open", "cannot open", path, |state| {
            let id = state.tree.find(path)?;
            Ok((id, state.tree.is_directory(id)))
        })?;
        if is_directory {
            return Err(Error::new(ErrorKind::InvalidInput, "this is a directory, not a regular file").with_file(path));
        }
        if buffering == Buffering::Direct && self.settings.direct.is_none() {
            return Err(Error::new(ErrorKind::Unsupported, "the filesystem refuses O_DIRECT").with_file(path));
        }
        Ok(self.handle(id, path, access, buffering))
    }

    fn create(&self, path: &Path, _permissions: Option<u32>) -> Result<Arc<dyn File>> {
        let id =
            self.named("create", "cannot create", path, |state| state.tree.create_file(path, Content::empty(state.clock)))?;
        Ok(self.handle(id, path, Access::Write, Buffering::PageCache))
    }

    fn metadata(&self, path: &Path) -> Result<Metadata> {
        self.named("metadata", "cannot find", path, |state| {
            let id = state.tree.find(path)?;
            Ok(match state.tree.file(id) {
                Ok(content) => Metadata { kind: EntryKind::File, length: content.now().len() as u64, permissions: 0o644 },
                Err(_) => Metadata { kind: EntryKind::Directory, length: 0, permissions: 0o755 },
            })
        })
    }

    /// There are no links here.
    fn own_metadata(&self, path: &Path) -> Result<Metadata> {
        self.metadata(path)
    }

    fn list(&self, directory: &Path) -> Result<Vec<OsString>> {
        self.named("list", "cannot list", directory, |state| {
            let id = state.tree.find(directory)?;
            state.tree.list(id)
        })
    }

    fn create_directory(&self, path: &Path) -> Result<()> {
        self.named("create_directory", "cannot create the directory", path, |state| state.tree.create_directory(path).map(drop))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.named("rename", "cannot rename", from, |state| state.tree.rename(from, to, true))
            .map_err(|error| error.with("to", to.display()))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        match self.operate("rename_new", from, |state| state.tree.rename(from, to, false)) {
            Ok(()) => Ok(()),
            Err(libc::EEXIST) => Err(Error::new(ErrorKind::AlreadyExists, "something already stands there").with_file(to)),
            Err(errno) => Err(failed("cannot rename", from, errno).with("to", to.display())),
        }
    }

    fn remove(&self, path: &Path) -> Result<()> {
        self.named("remove", "cannot remove", path, |state| state.tree.remove(path, false))
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        self.named("remove_directory", "cannot remove the directory", path, |state| state.tree.remove(path, true))
    }

    fn open_directory(&self, path: &Path) -> Result<Box<dyn Directory>> {
        let id = self.named("open_directory", "cannot open the directory", path, |state| {
            let id = state.tree.find(path)?;
            if state.tree.is_directory(id) { Ok(id) } else { Err(libc::ENOTDIR) }
        })?;
        Ok(Box::new(SimDirectory { disk: self.clone(), id, path: path.to_owned() }))
    }

    fn lock(&self, path: &Path) -> Result<Box<dyn Lock>> {
        let taken = self.operate("lock", path, |state| {
            let id = match state.tree.find(path) {
                Err(libc::ENOENT) => state.tree.create_file(path, Content::empty(state.clock))?,
                found => found?,
            };
            if state.locked.contains(&id) {
                return Err(libc::EWOULDBLOCK);
            }
            state.locked.push(id);
            Ok(id)
        });
        match taken {
            Ok(id) => Ok(Box::new(SimLock { disk: self.clone(), id })),
            Err(libc::EWOULDBLOCK) => Err(Error::new(ErrorKind::AlreadyExists, "another process holds the lock").with_file(path)),
            Err(errno) => Err(failed("cannot lock", path, errno)),
        }
    }

    fn free_bytes(&self, directory: &Path) -> Result<u64> {
        self.named("free_bytes", "cannot examine the filesystem of", directory, |state| {
            state.tree.find(directory)?;
            let free = self.settings.capacity_bytes.saturating_sub(state.tree.used_bytes());
            Ok(self.settings.free_bytes.unwrap_or(free))
        })
    }
}

/// An open directory.
#[derive(Debug)]
struct SimDirectory {
    disk: SimDisk,
    id: u64,
    path: PathBuf,
}

impl Directory for SimDirectory {
    fn sync(&self) -> Result<()> {
        self.disk
            .operate_sync("sync_directory", &self.path, |state| state.tree.sync_directory(self.id), |_| {})
            .map_err(|errno| failed("cannot sync the directory", &self.path, errno).with("op", "fsync"))
    }
}

/// A held lock.
#[derive(Debug)]
struct SimLock {
    disk: SimDisk,
    id: u64,
}

impl Lock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.disk.lock_state().locked.retain(|id| *id != self.id);
    }
}
