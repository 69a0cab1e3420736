//! Looking at bytes while they pass: who wants to compute something of what a transfer moves need not fetch it a second time.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::TransferContext;
use crate::base::Result;
use crate::memory::{Copies, Region};

/// Is shown the bytes that pass through slots of the ring, each of them once, in any order and by several threads at a time: of a
/// read while copy engines carry them on, of a write once they are in the file. What goes straight between storage and memory,
/// and what a drive's DMA brings into a device's memory, passes no slot and is not shown.
pub trait Witness: Send + Sync {
    /// These bytes lie in this file from `offset` on.
    fn passed(&self, file: &Path, offset: u64, bytes: &[u8]);
}

impl fmt::Debug for dyn Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Witness")
    }
}

/// Shows the bytes of a region that was not shown them as they passed: in order, all at once where the processor reaches them,
/// else in pieces that are copied through the ring.
///
/// # Errors
/// For a writable region of host memory, whose bytes may be changing, and whatever the GPU's driver reports.
pub(crate) fn look_at(context: &TransferContext, region: &Region, mut show: impl FnMut(&[u8])) -> Result<()> {
    if region.kind().is_host_accessible() {
        show(region.host_bytes()?);
        return Ok(());
    }
    let gpu = context.streams.as_ref().map(|streams| Arc::clone(streams.gpu()));
    let _current = gpu.as_ref().map(|gpu| gpu.current()).transpose()?;
    let mut copies = Copies::new(context.streams.clone());
    let piece_bytes = context.ring.slot_bytes();
    for start in (0..region.len()).step_by(piece_bytes) {
        let piece = region.slice(start..region.len().min(start + piece_bytes));
        let slot = context.ring.take(piece.len())?;
        let copied = copies.copy(&piece, &slot.region().slice(0..piece.len())).and_then(|()| copies.fence());
        match copied.and_then(|mut fence| copies.wait(&mut fence)) {
            Ok(()) => slot.look_at(0..piece.len(), &mut show),
            Err(error) => {
                if copies.drain().is_err() {
                    slot.lose();
                }
                return Err(error);
            }
        }
    }
    Ok(())
}
