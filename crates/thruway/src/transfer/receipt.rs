//! Receipts: what happened, which way, and why.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::base::ByteSize;
use crate::io::EngineName;
use crate::io::policy::Path;
use crate::storage::Identity;

/// What a transfer did.
#[derive(Clone, Debug, Default)]
pub struct Receipt {
    /// The bytes that were asked for and moved; what alignment added is not counted.
    pub bytes: u64,
    /// The time from the call to its return.
    pub seconds: f64,
    /// The CPU time that the whole process used meanwhile, other threads of its included.
    pub cpu_seconds: f64,
    /// How often an operation was tried again: short I/O, `EINTR`, `EAGAIN`.
    pub retries: u64,
    /// What was moved of each file, in the order in which the files were first named.
    pub files: Vec<FileReceipt>,
}

/// What was moved of one file.
#[derive(Clone, Debug)]
pub struct FileReceipt {
    /// The file.
    pub file: PathBuf,
    /// Which file it was, in which state, when its reading began; `None` if it was written.
    pub identity: Option<Identity>,
    /// The bytes moved.
    pub bytes: u64,
    /// The same bytes by the way they went.
    pub parts: Vec<Part>,
}

/// The bytes of a file that went one way for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The way.
    pub path: Path,
    /// The engine.
    pub engine: EngineName,
    /// How many bytes.
    pub bytes: u64,
    /// Why this way.
    pub reason: Arc<str>,
}

impl Receipt {
    /// Decimal gigabytes a second; 0 where no time passed.
    pub fn gb_per_s(&self) -> f64 {
        // Above 2^53 bytes the last digits are lost, which a rate does not show.
        #[expect(clippy::cast_precision_loss, reason = "a rate needs three digits")]
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds / 1e9 } else { 0.0 }
    }

    /// Adds what a later transfer of the same piece of work did. Times are added: the two ran one after another.
    pub fn merge(&mut self, later: Self) {
        self.seconds += later.seconds;
        self.cpu_seconds += later.cpu_seconds;
        self.retries += later.retries;
        self.bytes += later.bytes;
        let known: HashMap<PathBuf, usize> = self.files.iter().enumerate().map(|(i, file)| (file.file.clone(), i)).collect();
        for file in later.files {
            match known.get(&file.file) {
                Some(index) => file.parts.into_iter().for_each(|part| self.files[*index].add(part)),
                None => self.files.push(file),
            }
        }
    }

    /// The bytes that went this way.
    pub fn bytes_by(&self, path: Path) -> u64 {
        self.files.iter().flat_map(|file| &file.parts).filter(|part| part.path == path).map(|part| part.bytes).sum()
    }
}

impl FileReceipt {
    pub(super) fn add(&mut self, part: Part) {
        self.bytes += part.bytes;
        let same = |have: &&mut Part| (have.path, have.engine, &have.reason) == (part.path, part.engine, &part.reason);
        match self.parts.iter_mut().find(same) {
            Some(have) => have.bytes += part.bytes,
            None => self.parts.push(part),
        }
    }
}

impl fmt::Display for Receipt {
    /// One line for the whole, and one for each way that bytes went.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} in {:.3} s: {:.2} GB/s, {:.3} CPU s",
            ByteSize(self.bytes),
            self.seconds,
            self.gb_per_s(),
            self.cpu_seconds
        )?;
        if self.retries > 0 {
            write!(f, ", {} retries", self.retries)?;
        }
        let mut total = FileReceipt { file: PathBuf::new(), identity: None, bytes: 0, parts: Vec::new() };
        self.files.iter().flat_map(|file| &file.parts).for_each(|part| total.add(part.clone()));
        for Part { path, engine, bytes, reason } in &total.parts {
            write!(f, "\n  {path} ({engine}): {} · {reason}", ByteSize(*bytes))?;
        }
        Ok(())
    }
}
