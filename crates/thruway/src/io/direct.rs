//! The direct path: a drive's DMA engine reads and writes a device's memory, and no host memory lies in between.
//!
//! Each mechanism for it is an engine like every other, and a [`DirectPath`] that knows what an engine does not: whether the
//! drive below a certain file reaches the device, and whether bytes that arrived did go that way. A successful call proves
//! nothing, because libraries and filesystems fall back to copies without a word. So
//! the path is tried out with a small transfer before it is taken ([`DirectPath::reach`]), and what it did is judged
//! afterwards ([`Watch::verdict`]).

use std::fmt;
use std::sync::Arc;

use super::{Direction, EngineName, Made};
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::memory::{Region, Ring};
use crate::storage::{DirectRules, File};

/// A mechanism by which drives reach the memory of a session's device.
pub trait DirectPath: Send + Sync + fmt::Debug {
    /// Its engine's name.
    fn name(&self) -> EngineName;

    /// A bare engine.
    ///
    /// # Errors
    /// If the mechanism cannot be had after all.
    fn make(&self) -> Result<Made>;

    /// Finds out, with a small transfer of its own if it does not know yet, whether the drive below a file reaches the
    /// device's memory.
    ///
    /// # Errors
    /// What has nothing to do with the path: a file that cannot be opened, a drive that fails.
    fn reach(&self, trial: &Trial<'_>) -> Result<Reach>;

    /// What a request's error says of the path, for a file of the filesystem with this device number: `Some` if the path was
    /// refused and the bytes may go another way.
    fn refusal(&self, error: &std::io::Error, device: u64) -> Option<Refusal>;

    /// Memory of the device that the path reaches whatever the place: what cannot go where it belongs passes through it, and is
    /// copied on within the device. `None` where there is none, or while the path is not open yet.
    fn window(&self) -> Option<&Ring> {
        None
    }

    /// Whether the path will have a [window](Self::window), so that it reaches part of a block as well.
    fn has_window(&self) -> bool {
        false
    }

    /// Makes the region's block known to drives, if that is needed and can be: then its bytes go in place.
    fn register(&self, region: &Region) {
        let _known_without = region;
    }

    /// Begins to observe a transfer.
    fn watch(&self) -> Box<dyn Watch + '_>;
}

/// What the path is tried out on.
pub struct Trial<'a> {
    /// Which way.
    pub direction: Direction,
    /// A block that the caller's bytes are about to be read from or written to: a trial may write there.
    pub block: Extent,
    /// The device number of the file's filesystem: the answer for one of its files is good for all.
    pub device: u64,
    /// What `O_DIRECT` demands of the file.
    pub rules: DirectRules,
    /// The file, open through the page cache: to see what that holds.
    pub buffered: &'a dyn File,
    /// Whether the caller takes no other way: then the path is refused unless it is proven here and now.
    pub required: bool,
    /// Opens the file past the page cache, for the trial's direction.
    pub open: &'a dyn Fn() -> Result<Arc<dyn File>>,
}

/// Whether the drive below a file moves bytes into or out of a device's memory by itself.
#[derive(Clone, Debug)]
pub enum Reach {
    /// The question does not arise: the memory is the host's, or no whole block is wanted, or this session knows no way.
    Moot,
    /// It does.
    Direct {
        /// What requests must keep.
        rules: DirectRules,
        /// Whether it is faster even than a copy of what the page cache holds.
        beats_cache: bool,
        /// Whether the trial was proven. If not, what goes this way will be called unverified.
        is_proven: bool,
        /// How it is known.
        reason: Arc<str>,
    },
    /// It does not.
    Refused(Refusal),
}

/// Why a direct path is not to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The missing piece.
    pub reason: Arc<str>,
    /// What to do about it.
    pub hint: Arc<str>,
}

impl Refusal {
    /// For a caller who demands the path.
    pub fn to_error(&self) -> Error {
        Error::new(ErrorKind::PathUnavailable, format!("the direct path is not to be had: {}", self.reason))
            .with_hint(&*self.hint)
    }
}

/// Observes a transfer.
pub trait Watch {
    /// Whether the `bytes` that the path's engine moved since this was made did go directly.
    fn verdict(self: Box<Self>, bytes: u64) -> Verdict;
}

/// What is known of bytes that an engine for the direct path has moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They went directly.
    Proven,
    /// Nobody knows: why not.
    Unproven(Arc<str>),
}
