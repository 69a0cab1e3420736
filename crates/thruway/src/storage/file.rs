//! What a file is to the layers above.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use super::residency::Residency;
use crate::base::{Alignment, Extent, Result};

/// What an open file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Only reading; nothing on the filesystem changes, not even a lock file.
    Read,
    /// Writing to a file that exists.
    Write,
}

/// Whether transfers go through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Buffering {
    /// Through the page cache.
    PageCache,
    /// Past it (`O_DIRECT`): offsets, lengths and addresses must be aligned as [`DirectRules`] say.
    Direct,
}

/// What `O_DIRECT` demands of a file's filesystem and drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectRules {
    /// What the memory's address must be a multiple of.
    pub memory: Alignment,
    /// What offsets and lengths in the file are made multiples of. Never below a page, so that no page of
    /// the page cache is shared between a direct and a buffered transfer of one file.
    pub offset: Alignment,
}

/// Which file this is and in which state: equal before and after a read, or the file was changed meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The filesystem's device number.
    pub device: u64,
    /// The inode number.
    pub inode: u64,
    /// The length in bytes.
    pub length: u64,
    /// When the content last changed, in nanoseconds since 1970.
    pub modified_ns: i128,
}

/// An open regular file.
pub trait File: Send + Sync + Debug {
    /// The descriptor, for engines that hand it to the kernel; `None` in a simulation.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Which file this is, and its length, now.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn identity(&self) -> Result<Identity>;

    /// What `O_DIRECT` demands here; `None` where the filesystem refuses it.
    fn direct_rules(&self) -> Option<DirectRules>;

    /// Whether those rules are the kernel's word for this very file, and not found out by opening it: then the filesystem does
    /// not go through the page cache after all. Wrappers pass it on.
    fn direct_rules_are_told(&self) -> bool {
        false
    }

    /// What the file's filesystem is known again by, after a restart too: its kind and its number, as far as it has one of its
    /// own. `None` where it has none. Wrappers pass it on.
    fn filesystem(&self) -> Option<String> {
        None
    }

    /// How much of `extent` the page cache holds.
    fn residency(&self, extent: Extent) -> Residency;

    /// Reads into `target` from `offset`; may read less, and reads nothing at the end of the file.
    ///
    /// # Errors
    /// The operating system's, unchanged: engines pass it on.
    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize>;

    /// Writes from `source` at `offset`; may write less.
    ///
    /// # Errors
    /// The operating system's, unchanged: engines pass it on.
    fn write_at(&self, source: &[u8], offset: u64) -> std::io::Result<usize>;

    /// Reserves the file's blocks up to `length` bytes and makes it that long. Where the filesystem cannot
    /// reserve, the file is only made that long.
    ///
    /// # Errors
    /// [`NoSpace`](crate::ErrorKind::NoSpace) if the blocks are not to be had.
    fn allocate(&self, length: u64) -> Result<()>;

    /// Makes content and length durable. After a failure nothing that was written can be trusted.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn sync(&self) -> Result<()>;
}
