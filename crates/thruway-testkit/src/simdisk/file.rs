//! An open file of a simulated disk.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use thruway::storage::{DirectRules, File, Identity, Residency};
use thruway::{Error, Extent, Result};

use super::{SimDisk, State};

/// An open file. It stays readable when its name is gone.
#[derive(Debug)]
pub(super) struct SimFile {
    pub(super) disk: SimDisk,
    pub(super) id: u64,
    pub(super) path: PathBuf,
    pub(super) writable: bool,
    /// The rules that this handle enforces: it was opened past the page cache.
    pub(super) enforced: Option<DirectRules>,
}

impl SimFile {
    fn check_alignment(&self, offset: u64, length: usize) -> std::result::Result<(), i32> {
        match self.enforced {
            Some(rules) if !rules.offset.divides(offset) || !rules.offset.divides(length as u64) => Err(libc::EINVAL),
            _ => Ok(()),
        }
    }

    /// How far the file may grow, given what the disk has left.
    fn grown(&self, state: &State, length: usize) -> std::result::Result<usize, i32> {
        let have = state.tree.file(self.id)?.now().len();
        let used = state.tree.used_bytes();
        let left = usize::try_from(self.disk.settings.capacity_bytes.saturating_sub(used)).unwrap_or(usize::MAX);
        Ok(length.min(have.saturating_add(left)))
    }
}

/// An error as the operating system would have given it.
pub(super) fn failed(what: &str, path: &Path, errno: i32) -> Error {
    Error::from_io(what, std::io::Error::from_raw_os_error(errno)).with_file(path)
}

fn to_usize(value: u64) -> std::result::Result<usize, i32> {
    usize::try_from(value).map_err(|_| libc::EFBIG)
}

impl File for SimFile {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn identity(&self) -> Result<Identity> {
        let found = self.disk.operate("identity", &self.path, |state| {
            let content = state.tree.file(self.id)?;
            Ok(Identity { device: 1, inode: self.id, length: content.now().len() as u64, modified_ns: content.modified })
        });
        found.map_err(|errno| failed("cannot examine", &self.path, errno))
    }

    fn direct_rules(&self) -> Option<DirectRules> {
        self.disk.settings.direct
    }

    fn residency(&self, _extent: Extent) -> Residency {
        self.disk.settings.residency
    }

    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let read = self.disk.operate("read_at", &self.path, |state| {
            self.check_alignment(offset, target.len())?;
            let bytes = state.tree.file(self.id)?.now();
            let rest = bytes.get(to_usize(offset)?..).unwrap_or_default();
            let count = rest.len().min(target.len());
            target[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        });
        read.map_err(std::io::Error::from_raw_os_error)
    }

    fn write_at(&self, source: &[u8], offset: u64) -> std::io::Result<usize> {
        let written = self.disk.operate("write_at", &self.path, |state| {
            if !self.writable {
                return Err(libc::EBADF);
            }
            self.check_alignment(offset, source.len())?;
            let start = to_usize(offset)?;
            let end = start.checked_add(source.len()).ok_or(libc::EFBIG)?;
            let count = self.grown(state, end)?.saturating_sub(start).min(source.len());
            if count == 0 && !source.is_empty() {
                return Err(libc::ENOSPC);
            }
            let clock = state.clock;
            let content = state.tree.file_mut(self.id)?;
            content.write(start, &source[..count]);
            content.modified = clock;
            Ok(count)
        });
        written.map_err(std::io::Error::from_raw_os_error)
    }

    fn allocate(&self, length: u64) -> Result<()> {
        let allocated = self.disk.operate("allocate", &self.path, |state| {
            let length = to_usize(length)?;
            if self.grown(state, length)? < length {
                return Err(libc::ENOSPC);
            }
            let clock = state.clock;
            let content = state.tree.file_mut(self.id)?;
            content.set_length(length);
            content.modified = clock;
            Ok(())
        });
        allocated.map_err(|errno| failed("cannot reserve space for", &self.path, errno).with("length", length))
    }

    fn sync(&self) -> Result<()> {
        let file = self.id;
        let synced = self.disk.operate_sync(
            "sync",
            &self.path,
            |state| {
                state.tree.file_mut(file)?.sync();
                Ok(())
            },
            |state| {
                if let Ok(content) = state.tree.file_mut(file) {
                    content.fail_sync();
                }
            },
        );
        synced.map_err(|errno| failed("cannot sync", &self.path, errno).with("op", "fsync"))
    }
}
