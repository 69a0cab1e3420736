//! A directory to work in that is removed at the end, whatever the end is.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use thruway::storage::{Namespace, OsNamespace, ensure_host_bytes};
use thruway::{ByteSize, Error, ErrorKind, Result};

use crate::escape::safe_path;
use crate::output::Output;

/// In every directory that is to be removed, and in none of a user's own: what is called like one is not enough.
const MARK: &str = ".thruway-scratch";

/// A fresh directory, removed with all that is in it when dropped, unless kept.
#[derive(Debug)]
pub(crate) struct Scratch<'a> {
    path: PathBuf,
    keep: bool,
    output: &'a Output,
    /// Locked while the process lives: what is not, was left behind. `None` where the filesystem has no locks.
    _lock: Option<File>,
}

impl<'a> Scratch<'a> {
    /// Makes a directory with a name of its own in `parent`.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    pub(crate) fn new(parent: &Path, purpose: &str, keep: bool, output: &'a Output) -> Result<Self> {
        loop {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let nanos = since.map_or(0, |since| since.as_nanos());
            let path = parent.join(format!("thruway-{purpose}-{}-{nanos:x}", std::process::id()));
            OsNamespace.create_directory(&path)?;
            let lock = match File::open(&path).map(|lock| lock.try_lock().map(|()| lock)) {
                Ok(Ok(lock)) => Some(lock),
                Ok(Err(TryLockError::Error(_))) => None,
                // Before it was locked, another run took it for one that was left behind.
                Ok(Err(TryLockError::WouldBlock)) => continue,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(Error::from_io("cannot open the directory", error).with_file(&path)),
            };
            if !path.is_dir() {
                continue;
            }
            let scratch = Self { path, keep, output, _lock: lock };
            if !keep {
                let mark = scratch.path.join(MARK);
                File::create(&mark).map_err(|error| Error::from_io("cannot write", error).with_file(&mark))?;
            }
            return Ok(scratch);
        }
    }

    /// Removes what runs for this purpose that were killed have left beside it.
    pub(crate) fn reclaim(&self, purpose: &str) {
        let (Some(parent), Ok(own)) = (self.path.parent(), std::fs::metadata(&self.path)) else { return };
        let Ok(entries) = std::fs::read_dir(parent) else { return };
        let is_left = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()?.strip_prefix(&format!("thruway-{purpose}-")));
            let is_name = name.and_then(|name| name.split_once('-')).is_some_and(|(pid, nanos)| {
                pid.bytes().all(|byte| byte.is_ascii_digit()) && nanos.bytes().all(|byte| byte.is_ascii_hexdigit())
            });
            // Of this very user, and no link.
            let is_ours = std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == own.uid());
            is_name && is_ours && *path != self.path
        };
        let is_marked =
            |path: &Path| std::fs::symlink_metadata(path.join(MARK)).is_ok_and(|mark| mark.is_file() && mark.len() == 0);
        for path in entries.flatten().map(|entry| entry.path()).filter(is_left) {
            let Ok(lock) = File::open(&path) else { continue };
            if lock.try_lock().is_err() {
                continue;
            }
            // Killed before it was marked, it is empty; and what is not empty stays.
            if !is_marked(&path) {
                drop(std::fs::remove_dir(&path));
            } else if let Err(error) = std::fs::remove_dir_all(&path) {
                self.output.warn(format!("cannot remove {}, which another run left: {error}", safe_path(&path)));
            }
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            self.output.warn(format!("cannot remove {}: {error}", safe_path(&self.path)));
        }
    }
}

/// Refuses work that needs more memory than is free, where `--size` says how much work it is.
///
/// # Errors
/// [`OutOfMemory`](ErrorKind::OutOfMemory) with both numbers.
pub(crate) fn ensure_memory(bytes: u64) -> Result<()> {
    let hint = "choose a smaller --size, or raise the container's memory limit";
    ensure_host_bytes(bytes).map_err(|error| Error::new(error.kind(), error.message()).with_hint(hint))
}

/// Refuses work that needs more disk than is free. `elsewhere` says how another directory is named: `another PATH`.
///
/// # Errors
/// [`NoSpace`](ErrorKind::NoSpace) with both numbers.
pub(crate) fn ensure_disk(directory: &Path, bytes: u64, elsewhere: &str) -> Result<()> {
    crate::place::ensure_directory(directory)?;
    let free = OsNamespace.free_bytes(directory)?;
    if bytes > free {
        let message = format!("this needs {} of disk and {} are free", ByteSize(bytes), ByteSize(free));
        return Err(Error::new(ErrorKind::NoSpace, message)
            .with_file(directory)
            .with_hint(format!("choose a smaller --size, or {elsewhere}")));
    }
    Ok(())
}

/// How `demo` and `bench` are told another directory.
pub(crate) const BY_DIR: &str = "another directory with --dir";
