//! What a file holds: now, for whoever reads it, and durably, for whoever reads it after a power cut.

use super::power::Survival;

/// What a drive writes whole or not at all.
const SECTOR_BYTES: usize = 512;

/// One thing that happened to a file and is not durable yet.
#[derive(Clone, Debug)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    Length(usize),
}

/// A file's bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// From `durable` to `now`, unless a sync has failed in between.
    log: Vec<Change>,
    /// When it was last changed, by the disk's clock.
    pub(super) modified: i128,
}

impl Content {
    /// A file that is durable as it is.
    pub(super) fn durable(bytes: Vec<u8>) -> Self {
        Self { now: bytes.clone(), durable: bytes, log: Vec::new(), modified: 0 }
    }

    /// A file just created.
    pub(super) fn empty(modified: i128) -> Self {
        Self { modified, ..Self::default() }
    }

    pub(super) fn now(&self) -> &[u8] {
        &self.now
    }

    pub(super) fn write(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if end > self.now.len() {
            self.set_length(end);
        }
        self.now[offset..end].copy_from_slice(bytes);
        self.log.push(Change::Write { offset, bytes: bytes.to_vec() });
    }

    pub(super) fn set_length(&mut self, length: usize) {
        if length != self.now.len() {
            self.now.resize(length, 0);
            self.log.push(Change::Length(length));
        }
    }

    /// What was written and not lost becomes durable.
    pub(super) fn sync(&mut self) {
        let log = std::mem::take(&mut self.log);
        apply(&mut self.durable, &log, &mut Survival::AllKept);
    }

    /// A sync has failed. Linux marks the pages clean all the same: they can still be read, and no later sync writes
    /// them, so it reports success over bytes that are lost.
    pub(super) fn fail_sync(&mut self) {
        self.log.clear();
    }

    /// What is left after a power cut: of all that was not durable, each sector of each write and each length as
    /// `survival` decides.
    pub(super) fn after_power_cut(&self, survival: &mut Survival) -> Self {
        let mut bytes = self.durable.clone();
        apply(&mut bytes, &self.log, survival);
        Self { modified: self.modified, ..Self::durable(bytes) }
    }
}

/// Applies what survives of `log`, in order.
fn apply(bytes: &mut Vec<u8>, log: &[Change], survival: &mut Survival) {
    // Sectors may reach the drive before the length that makes them part of the file, so the length is kept apart.
    let mut length = bytes.len();
    for change in log {
        match change {
            Change::Length(new) if survival.keeps() => {
                if *new < length {
                    bytes.truncate(*new);
                }
                length = *new;
            }
            Change::Length(_) => {}
            Change::Write { offset, bytes: written } => {
                let mut at = 0;
                while at < written.len() {
                    let start = offset + at;
                    let take = (SECTOR_BYTES - start % SECTOR_BYTES).min(written.len() - at);
                    if survival.keeps() {
                        let end = start + take;
                        if end > bytes.len() {
                            bytes.resize(end, 0);
                        }
                        bytes[start..end].copy_from_slice(&written[at..at + take]);
                    }
                    at += take;
                }
            }
        }
    }
    bytes.resize(length, 0);
}
