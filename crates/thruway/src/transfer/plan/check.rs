//! What is refused before anything is planned: moves that contradict themselves, and memory that a required direct path cannot
//! reach.

use super::super::Move;
use super::wanted::{Wanted, address_of};
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::io::Direction;
use crate::memory::{Access, Region};
use crate::storage::DirectRules;

/// Refuses moves that contradict themselves, before a byte is moved.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput): lengths that differ, a read into read-only memory, two moves of
/// one destination.
pub fn check(moves: &[Move]) -> Result<()> {
    let invalid = |what: &str, item: &Move| {
        let Extent { offset, length } = item.extent;
        Err(Error::new(ErrorKind::InvalidInput, what).with_file(&item.file.path).with("offset", offset).with("length", length))
    };
    for item in moves {
        if item.extent.length != item.region.len() as u64 {
            return invalid("the extent and the region of a move differ in length", item);
        }
        if item.extent.offset.checked_add(item.extent.length).is_none() {
            return invalid("the extent of a move ends beyond any length a file can have", item);
        }
        if item.direction == Direction::Write && item.region.access() != Access::ReadOnly {
            return invalid("a write needs a read-only region, which a buffer's `source` gives", item);
        }
        if item.direction == Direction::Read && item.region.access() != Access::Writable {
            return invalid("a read needs a writable region", item);
        }
    }
    let mut reads: Vec<&Move> =
        moves.iter().filter(|item| item.direction == Direction::Read && !item.region.is_empty()).collect();
    reads.sort_unstable_by_key(|item| item.region.address());
    for pair in reads.windows(2) {
        if pair[0].region.address() + pair[0].region.len() > pair[1].region.address() {
            return invalid("two reads have overlapping destinations", pair[1]);
        }
    }
    let mut writes: Vec<&Move> =
        moves.iter().filter(|item| item.direction == Direction::Write && !item.region.is_empty()).collect();
    writes.sort_by(|a, b| (&a.file.path, a.extent.offset).cmp(&(&b.file.path, b.extent.offset)));
    for pair in writes.windows(2) {
        if pair[0].file.path == pair[1].file.path && pair[0].extent.end() > pair[1].extent.offset {
            return invalid("two writes have overlapping extents", pair[1]);
        }
    }
    Ok(())
}

/// Refuses moves of a device's memory whose whole blocks cannot go directly.
///
/// # Errors
/// [`PathUnavailable`](ErrorKind::PathUnavailable), naming the first.
pub fn check_direct(moves: &[(Extent, Region)], rules: DirectRules) -> Result<()> {
    for (extent, region) in moves {
        let item = Wanted { extent: *extent, region: region.clone() };
        let Some(core) = extent.aligned_core(rules.offset) else { continue };
        let address = address_of(&item, core);
        if !rules.memory.divides(address) {
            let least = rules.memory.bytes();
            let what = format!("the direct path is not to be had: the drive's DMA begins at multiples of {least} only");
            return Err(Error::new(ErrorKind::PathUnavailable, what)
                .with("offset", core.offset)
                .with("length", core.length)
                .with("address", format_args!("{address:#x}"))
                .with_hint("give such memory, let the load allocate, or use auto"));
        }
    }
    Ok(())
}
