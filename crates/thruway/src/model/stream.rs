//! Streaming a whole model through two windows of memory: while one is used, the next is read.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use super::open::Model;
use crate::base::{Extent, Result};
use crate::io::Direction;
use crate::memory::HostBuffer;
use crate::transfer::{Move, Receipt, TransferOptions, run};

/// Each of the two windows. Large enough that the pause between two reads does not show.
pub(super) const WINDOW_BYTES: u64 = 64 << 20;

/// A part of a tensor, and where it lies in the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamPart {
    /// Which of the model's entries.
    pub(super) entry: usize,
    /// Where the part begins in the tensor, in bytes.
    pub(super) offset: u64,
    /// Where it begins in the window.
    pub(super) at: usize,
    /// Its length.
    pub(super) length: usize,
}

/// Some bytes of a model.
#[derive(Debug)]
pub(super) struct StreamWindow {
    /// The bytes.
    pub(super) buffer: HostBuffer,
    /// What they are, in the order of the entries.
    pub(super) parts: Vec<StreamPart>,
}

/// Cuts the model's tensors into windows. Empty tensors are parts too.
fn windows(model: &Model) -> Vec<Vec<StreamPart>> {
    let mut all: Vec<Vec<StreamPart>> = Vec::new();
    let mut current: Vec<StreamPart> = Vec::new();
    let mut at = 0_u64;
    for (entry, item) in model.entries.iter().enumerate() {
        let mut offset = 0;
        loop {
            // The same distance from a block as in the file, so that whole blocks can be read straight.
            let start = at + (item.extent.offset + offset + 4096 - at % 4096) % 4096;
            let room = WINDOW_BYTES.saturating_sub(start);
            if room == 0 && !item.extent.is_empty() {
                all.push(std::mem::take(&mut current));
                at = 0;
                continue;
            }
            let length = room.min(item.extent.length - offset);
            let to_usize = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
            current.push(StreamPart { entry, offset, at: to_usize(start), length: to_usize(length) });
            at = start + length;
            offset += length;
            if offset == item.extent.length {
                break;
            }
        }
    }
    if !current.is_empty() {
        all.push(current);
    }
    all
}

/// Reads every tensor of the model, window by window in the order of the entries, and hands each window to `take`,
/// which gives the buffer back. Uses two windows of memory whatever the model's size.
pub(super) fn stream(
    model: &Model,
    options: &TransferOptions,
    mut take: impl FnMut(StreamWindow) -> Result<HostBuffer>,
) -> Result<Receipt> {
    let plan = windows(model);
    let window_bytes = plan.iter().flatten().map(|part| part.at + part.length).max().unwrap_or(0);
    let (to_consumer, filled) = sync_channel::<Result<(StreamWindow, Receipt)>>(1);
    let (give_back, empty) = sync_channel::<HostBuffer>(2);
    std::thread::scope(|scope| {
        for _ in 0..2.min(plan.len()) {
            if give_back.send(HostBuffer::new(window_bytes)?).is_err() {
                unreachable!("the receiving end is still here");
            }
        }
        scope.spawn(move || {
            for parts in plan {
                // Either end is gone only when the consumer has failed and left.
                let Ok(buffer) = empty.recv() else { return };
                let result = fill(model, options, buffer, parts);
                let failed = result.is_err();
                if to_consumer.send(result).is_err() || failed {
                    return;
                }
            }
        });
        let mut receipt = Receipt::default();
        while let Ok(result) = filled.recv() {
            let (window, read) = result?;
            receipt.merge(read);
            let buffer = take(window)?;
            // The reader is done with the last windows before the consumer is, so nobody may be there to take it.
            drop(give_back.send(buffer));
        }
        Ok(receipt)
    })
}

fn fill(
    model: &Model,
    options: &TransferOptions,
    mut buffer: HostBuffer,
    parts: Vec<StreamPart>,
) -> Result<(StreamWindow, Receipt)> {
    let mut moves = Vec::with_capacity(parts.len());
    for part in &parts {
        let entry = &model.entries[part.entry];
        let extent = Extent::new(entry.extent.offset + part.offset, part.length as u64);
        let region = buffer.region(part.at..part.at + part.length)?;
        moves.push(Move { file: Arc::clone(&model.files[entry.file].file), extent, region, direction: Direction::Read });
    }
    let receipt = run(&model.context, moves, options).map_err(|error| model.name_tensor(error))?;
    Ok((StreamWindow { buffer, parts }, receipt))
}
