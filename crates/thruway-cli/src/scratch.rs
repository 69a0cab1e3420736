//! A directory to work in that is removed at the end, whatever the end is.

use std::path::{Path, PathBuf};

use thruway::storage::{Namespace, OsNamespace};
use thruway::{ByteSize, Error, ErrorKind, Result};

use crate::escape::safe_path;
use crate::output::Output;

/// A fresh directory, removed with all that is in it when dropped, unless kept.
#[derive(Debug)]
pub(crate) struct Scratch<'a> {
    path: PathBuf,
    keep: bool,
    output: &'a Output,
}

impl<'a> Scratch<'a> {
    /// Makes a directory with a name of its own in `parent`.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    pub(crate) fn new(parent: &Path, purpose: &str, keep: bool, output: &'a Output) -> Result<Self> {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = since.map_or(0, |since| since.as_nanos());
        let path = parent.join(format!("thruway-{purpose}-{}-{nanos:x}", std::process::id()));
        OsNamespace.create_directory(&path)?;
        Ok(Self { path, keep, output })
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

/// Refuses work that needs more disk than is free.
///
/// # Errors
/// [`NoSpace`](ErrorKind::NoSpace) with both numbers.
pub(crate) fn ensure_disk(directory: &Path, bytes: u64) -> Result<()> {
    crate::place::ensure_directory(directory)?;
    let free = OsNamespace.free_bytes(directory)?;
    if bytes > free {
        let message = format!("this needs {} of disk and {} are free", ByteSize(bytes), ByteSize(free));
        return Err(Error::new(ErrorKind::NoSpace, message)
            .with_file(directory)
            .with_hint("choose a smaller --size, or another directory with --dir"));
    }
    Ok(())
}
