//! Steps carried out, and what they did to files taken back.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use thruway::doctor::setup::Action;
use thruway::{Error, ErrorKind, Result};

use crate::escape::{safe, safe_path};
use crate::settings_file::{beside, keep, read, replace};

/// What was done to files, in its order.
#[derive(Debug)]
pub(super) struct Journal {
    /// Nothing outside of this directory is written.
    root: PathBuf,
    /// Each file with what it held; `None` where it was not there.
    files: Vec<(PathBuf, Option<Vec<u8>>)>,
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
            Action::Run(words) => run(words, false).inspect(|()| self.has_run = true),
            Action::Rebuild(words) => {
                // One that fails may have done half of it.
                self.rebuilds.push(words.clone());
                run(words, true)
            }
            Action::Write { path, .. } | Action::Append { path, .. } | Action::Set { path, .. } => {
                self.change(Path::new(path), action)
            }
        }
    }

    /// Makes every file what it was, and then what was built from them.
    pub(super) fn take_back(self) -> TakenBack {
        let mut files = 0;
        let mut failed = Vec::new();
        for (path, old) in self.files.into_iter().rev() {
            let restored = match old {
                Some(old) => replace(&path, &old),
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
            failed.extend(run(&words, true).err().map(|error| (safe(&words.join(" ")), error)));
        }
        TakenBack { files, failed }
    }

    /// Gives a file its new content, the old one beside it.
    fn change(&mut self, path: &Path, action: &Action) -> Result<()> {
        self.ensure_inside(path)?;
        self.make_directories(path.parent().unwrap_or(Path::new("/")))?;
        let old = read(path)?;
        let new = action.content(old.as_deref()).map_err(|error| error.with_file(path))?;
        if old.as_ref() == Some(&new) {
            return Ok(());
        }
        if let Some(old) = &old
            && let Some(kept) = beside(path, old)?
        {
            self.write(&kept, None, |kept| keep(kept, old, path))?;
        }
        self.write(path, old, |path| replace(path, &new))
    }

    /// Refuses to follow a link out of the root: in a system that does not run, an absolute link means another file.
    pub(super) fn ensure_inside(&self, path: &Path) -> Result<()> {
        let refused = |at: &Path, why: String| {
            let error = Error::new(ErrorKind::InvalidInput, why).with_file(at).with("for", safe_path(path));
            Err(error.with_hint("put a file or a directory in the link's place"))
        };
        let out = || format!("it leads out of {}", safe_path(&self.root));
        let Ok(below) = path.strip_prefix(&self.root) else { return refused(path, out()) };
        let mut at = self.root.clone();
        for part in below.components() {
            if part == Component::ParentDir {
                return refused(path, out());
            }
            at.push(part);
            // Behind what is not there, directories are made.
            let Ok(found) = std::fs::symlink_metadata(&at) else { return Ok(()) };
            match found.is_symlink().then(|| std::fs::canonicalize(&at)) {
                Some(Ok(real)) if !real.starts_with(&self.root) => return refused(&at, format!("a link: {}", out())),
                Some(Err(error)) => return refused(&at, format!("a link that leads to nothing: {error}")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Writes a file, and notes what it held before.
    fn write(&mut self, path: &Path, before: Option<Vec<u8>>, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let result = write(path);
        // A failure behind the rename has changed the file, too.
        if result.is_ok() || read(path).ok().flatten() != before {
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

/// Runs a command to its end. What it says goes to standard error: standard output is for the plan. Ctrl-C of the terminal
/// reaches it unless it is `apart`: a package manager knows best how it ends well, half a RAM disk starts no machine.
fn run(words: &[String], apart: bool) -> Result<()> {
    let Some((program, arguments)) = words.split_first() else { return Ok(()) };
    let shown = safe(&words.join(" "));
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(std::io::stderr()).env("DEBIAN_FRONTEND", "noninteractive");
    if apart {
        command.process_group(0);
    }
    let status = command.status().map_err(|error| Error::from_io(format!("cannot run `{shown}`"), error))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Io, format!("`{shown}` ended with {status}")))
}

/// Keeps others from setting up the same system, until the value is dropped. The lock is the kernel's, of the root directory
/// itself, so that nothing is left of it.
pub(super) fn lock(root: &Path) -> Result<File> {
    let failed = |error| Error::from_io("cannot lock the system's root directory", error).with_file(root);
    let directory = File::open(root).map_err(failed)?;
    match directory.try_lock() {
        Ok(()) => Ok(directory),
        Err(TryLockError::Error(error)) => Err(failed(error)),
        Err(TryLockError::WouldBlock) => {
            let owner = holder(directory.metadata().map_err(failed)?.ino());
            let owner = owner.map_or_else(|| "unknown".to_owned(), |pid| format!("process {pid}"));
            let error = Error::new(ErrorKind::AlreadyExists, "another process is setting this system up").with_file(root);
            Err(error.with("owner", owner).with_hint("wait until it is done"))
        }
    }
}

/// The process that holds the lock of a file with this number, as the kernel lists it:
/// `1: FLOCK  ADVISORY  WRITE 4711 fd:01:2 0 EOF`.
fn holder(inode: u64) -> Option<u32> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let end = format!(":{inode}");
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_it = words.get(1) == Some(&"FLOCK") && words.get(5)?.ends_with(&end);
        is_it.then(|| words[4].parse().ok()).flatten()
    })
}
