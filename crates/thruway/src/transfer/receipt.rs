//! Receipts: what happened, which way, and why.

use std::collections::HashMap;
use std::ffi::OsStr;
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
    /// What else is to be known: where checksums were computed, and why there.
    pub notes: Vec<String>,
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
        let new = later.notes.into_iter().filter(|note| !self.notes.contains(note));
        let new: Vec<String> = new.collect();
        self.notes.extend(new);
        let places = self.places_of(&later.files);
        for (file, place) in std::iter::zip(later.files, places) {
            match place {
                Some(index) => file.parts.into_iter().for_each(|part| self.files[index].add(part)),
                None => self.files.push(file),
            }
        }
    }

    /// Which of this receipt's files each of these is, if it is there. A model is streamed window by window, thousands of
    /// them, and nearly every window goes on in the file in which the last one ended: that is looked at first.
    fn places_of(&self, files: &[FileReceipt]) -> Vec<Option<usize>> {
        let Some(last) = self.files.len().checked_sub(1) else { return vec![None; files.len()] };
        if let [file] = files
            && file.file.as_os_str() == self.files[last].file.as_os_str()
        {
            return vec![Some(last)];
        }
        let known: HashMap<&OsStr, usize> = self.files.iter().map(|file| file.file.as_os_str()).zip(0..).collect();
        files.iter().map(|file| known.get(file.file.as_os_str()).copied()).collect()
    }

    /// The bytes that went this way.
    pub fn bytes_by(&self, path: Path) -> u64 {
        self.files.iter().map(|file| file.bytes_by(path)).sum()
    }
}

impl FileReceipt {
    /// The bytes that went this way.
    pub fn bytes_by(&self, path: Path) -> u64 {
        self.parts.iter().filter(|part| part.path == path).map(|part| part.bytes).sum()
    }

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
        total.parts.iter().try_for_each(|part| write!(f, "\n  {part}"))?;
        self.notes.iter().try_for_each(|note| write!(f, "\n  {note}"))
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, engine, bytes, reason } = self;
        write!(f, "{path} ({engine}): {} · {reason}", ByteSize(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receipt(files: &[(&str, u64)]) -> Receipt {
        let part = |bytes| Part { path: Path::Cached, engine: EngineName::Posix, bytes, reason: "a test".into() };
        let file = |(name, bytes): &(&str, u64)| FileReceipt {
            file: PathBuf::from(name),
            identity: None,
            bytes: *bytes,
            parts: vec![part(*bytes)],
        };
        let bytes = files.iter().map(|(_, bytes)| bytes).sum();
        Receipt { bytes, files: files.iter().map(file).collect(), ..Receipt::default() }
    }

    #[test]
    fn a_merged_receipt_has_each_file_once_in_the_order_in_which_they_came() {
        let mut all = receipt(&[]);
        for step in [&[("a", 1)][..], &[("a", 2)], &[("a", 3), ("b", 4)], &[("b", 5)], &[("c", 6)], &[("a", 7)], &[]] {
            all.merge(receipt(step));
        }
        let found: Vec<(&str, u64, usize)> =
            all.files.iter().map(|file| (file.file.to_str().expect("text"), file.bytes, file.parts.len())).collect();
        assert_eq!(found, [("a", 13, 1), ("b", 9, 1), ("c", 6, 1)]);
        assert_eq!(all.bytes, 28);
    }
}
