//! Steps carried out, and what they did to files taken back.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use thruway::doctor::setup::Action;
use thruway::{Error, ErrorKind, Result};

use crate::escape::{safe, safe_path};
use crate::settings_file::{beside, read, replace};

/// What was done to files, in its order.
#[derive(Debug)]
pub(super) struct Journal {
    /// Nothing outside of this directory is written.
    root: PathBuf,
    /// Each file with what it held; `None` where it was not there.
    files: Vec<(PathBuf, Option<String>)>,
    /// Directories that were made.
    directories: Vec<PathBuf>,
    /// Commands that carried files over into another, or began to.
    rebuilds: Vec<Vec<String>>,
    /// Whether a command came to its end.
    pub(super) has_run: bool,
}

/// What was taken back.
#[derive(Debug)]
pub(super) struct TakenBack {
    /// The files that are what they were.
    pub(super) files: usize,
    /// What could not be taken back, and why.
    pub(super) failed: Vec<(String, Error)>,
}

impl Journal {
    /// An empty one, for a system whose files lie below `root`.
    pub(super) fn new(root: &Path) -> Self {
        let (files, directories, rebuilds) = (Vec::new(), Vec::new(), Vec::new());
        Self { root: root.to_owned(), files, directories, rebuilds, has_run: false }
    }

    /// Carries a step out.
    pub(super) fn carry_out(&mut self, action: &Action) -> Result<()> {
        match action {
            Action::Run(words) => run(words).inspect(|()| self.has_run = true),
            Action::Rebuild(words) => {
                // One that fails may have done half of it.
                self.rebuilds.push(words.clone());
                run(words)
            }
            Action::Write { path, text } => self.replace(Path::new(path), text),
        }
    }

    /// Makes every file what it was, and then what was built from them.
    pub(super) fn take_back(self) -> TakenBack {
        let mut files = 0;
        let mut failed = Vec::new();
        for (path, old) in self.files.into_iter().rev() {
            let restored = match old {
                Some(text) => replace(&path, &text, &path),
                None => std::fs::remove_file(&path).map_err(|error| Error::from_io("cannot remove", error)),
            };
            match restored {
                Ok(()) => files += 1,
                Err(error) => failed.push((safe_path(&path), error)),
            }
        }
        for directory in self.directories.into_iter().rev() {
            // What a command has put there meanwhile stays.
            drop(std::fs::remove_dir(directory));
        }
        for words in self.rebuilds {
            failed.extend(run(&words).err().map(|error| (safe(&words.join(" ")), error)));
        }
        TakenBack { files, failed }
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
        if let Some(old) = &old
            && let Some(kept) = beside(path, old)?
        {
            self.write(&kept, None, old, path)?;
        }
        self.write(path, old, text, path)
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

    /// Writes a file with the mode and owner of `like`.
    fn write(&mut self, path: &Path, before: Option<String>, text: &str, like: &Path) -> Result<()> {
        if before.as_deref() == Some(text) {
            return Ok(());
        }
        let result = replace(path, text, like);
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
