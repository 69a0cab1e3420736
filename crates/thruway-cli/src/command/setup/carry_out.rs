//! Steps carried out, and what they did to files taken back.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thruway::doctor::setup::Action;
use thruway::{Error, ErrorKind, Result};

use crate::escape::{safe, safe_path};
use crate::place::publish;
use crate::settings_file::{beside, read};

/// What was done to files, in its order.
#[derive(Debug)]
pub(super) struct Journal {
    /// Nothing outside of this directory is written.
    root: PathBuf,
    /// Each file with what it held; `None` where it was not there.
    files: Vec<(PathBuf, Option<String>)>,
    /// Directories that were made.
    directories: Vec<PathBuf>,
}

impl Journal {
    /// An empty one, for a system whose files lie below `root`.
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), files: Vec::new(), directories: Vec::new() }
    }

    /// Carries a step out.
    pub(super) fn carry_out(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::Run(words) => run(words),
            Action::Write { path, text } => self.replace(Path::new(path), text),
        }
    }

    /// Makes every file what it was. Gives how many there were.
    ///
    /// # Errors
    /// The file that could not be made what it was, and why. The others are.
    pub(super) fn take_back(self) -> Result<usize, (PathBuf, Error)> {
        let count = self.files.len();
        let mut failed = None;
        for (path, old) in self.files.into_iter().rev() {
            let restored = match old {
                Some(text) => publish(&path, &text),
                None => std::fs::remove_file(&path).map_err(|error| Error::from_io("cannot remove", error)),
            };
            if let Err(error) = restored {
                failed.get_or_insert((path, error));
            }
        }
        for directory in self.directories.into_iter().rev() {
            // What a command has put there meanwhile stays.
            drop(std::fs::remove_dir(directory));
        }
        failed.map_or(Ok(count), Err)
    }

    /// Gives a file its new content, the old one beside it.
    fn replace(&mut self, path: &Path, text: &str) -> Result<()> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        self.make_directories(directory)?;
        self.ensure_inside(directory)?;
        if std::fs::symlink_metadata(path).is_ok() {
            self.ensure_inside(path)?;
        }
        let old = read(path)?;
        if let Some(old) = &old {
            let kept = beside(path);
            let before = read(&kept)?;
            self.write(&kept, before, old)?;
        }
        self.write(path, old, text)
    }

    /// Refuses to follow a link out of the root: in a system that does not run, an absolute link means another file.
    fn ensure_inside(&self, path: &Path) -> Result<()> {
        let real = std::fs::canonicalize(path).map_err(|error| Error::from_io("cannot find", error).with_file(path))?;
        if real.starts_with(&self.root) {
            return Ok(());
        }
        let message = format!("a link leads out of {}", safe_path(&self.root));
        Err(Error::new(ErrorKind::InvalidInput, message).with_file(path).with_hint("put a file in the link's place"))
    }

    fn write(&mut self, path: &Path, before: Option<String>, text: &str) -> Result<()> {
        if before.as_deref() == Some(text) {
            return Ok(());
        }
        let result = publish(path, text);
        // A failure behind the rename has changed the file, too.
        let is_changed = result.is_ok() || read(path).ok().flatten() != before;
        if is_changed {
            self.files.push((path.to_owned(), before));
        }
        result
    }

    fn make_directories(&mut self, directory: &Path) -> Result<()> {
        if directory.is_dir() {
            return Ok(());
        }
        if let Some(parent) = directory.parent() {
            self.make_directories(parent)?;
        }
        std::fs::create_dir(directory).map_err(|error| Error::from_io("cannot make", error).with_file(directory))?;
        self.directories.push(directory.to_owned());
        Ok(())
    }
}

/// Runs a command to its end. What it says goes to standard error: standard output is for the plan.
fn run(words: &[String]) -> Result<()> {
    let Some((program, arguments)) = words.split_first() else { return Ok(()) };
    let shown = safe(&words.join(" "));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(std::io::stderr()).env("DEBIAN_FRONTEND", "noninteractive");
    let status = command.status().map_err(|error| Error::from_io(format!("cannot run `{shown}`"), error))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Io, format!("`{shown}` ended with {status}")))
}
