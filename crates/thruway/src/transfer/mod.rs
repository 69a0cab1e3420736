//! Transfers: a batch of moves, planned, carried out and accounted for.
//!
//! ```text
//! moves ──policy──► spans (which way each range goes, and why)
//!       ──plan────► chunks (aligned requests; pure, no I/O)
//!       ──pipeline► engines, ring, copies; out of order, no barrier between files
//!       ──────────► receipt
//! ```

mod direct;
mod explain;
mod files;
mod lane;
mod pipeline;
pub mod plan;
mod queue;
mod receipt;
pub mod verify;
mod witness;

pub use explain::Explanation;
pub(crate) use explain::explain_batches;
pub(crate) use pipeline::{Batch, run_batches};
pub use pipeline::{Cancel, Peer, Progress, TransferContext, TransferOptions, run};
pub use receipt::{FileReceipt, Part, Receipt};
pub use witness::Witness;
pub(crate) use witness::look_at;

use std::path::PathBuf;
use std::sync::Arc;

use crate::base::Extent;
use crate::io::Direction;
use crate::memory::Region;
use crate::storage::Identity;

/// A file that moves refer to. It is opened when its turn comes, so a transfer may name thousands.
#[derive(Debug, PartialEq, Eq)]
pub struct FileRef {
    /// Where it is.
    pub path: PathBuf,
    /// Which file it must still be, in which state: what was read of it before is only valid with that.
    pub expected: Option<Identity>,
}

impl FileRef {
    /// A file in whatever state it is in when the transfer begins.
    pub fn new(path: impl Into<PathBuf>) -> Arc<Self> {
        Arc::new(Self { path: path.into(), expected: None })
    }
}

/// One extent of a file and one region of memory of the same length, and which way the bytes go.
#[derive(Debug, Clone)]
pub struct Move {
    /// The file.
    pub file: Arc<FileRef>,
    /// The range in the file.
    pub extent: Extent,
    /// The range in memory. A read needs a writable region, and the regions of all reads must not overlap.
    pub region: Region,
    /// Which way.
    pub direction: Direction,
}
