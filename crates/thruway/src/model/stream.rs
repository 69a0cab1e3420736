//! Streaming a whole model through two windows of memory: while one is used, the next is read.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::home::Home;
use super::open::Model;
use crate::base::{Alignment, Extent, Result};
use crate::io::Direction;
use crate::memory::Buffer;
use crate::storage::{available_host_bytes, ensure_host_bytes};
use crate::transfer::{Move, Progress, Receipt, TransferOptions, run};

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
    pub(super) buffer: Buffer,
    /// What they are, in the order of the entries.
    pub(super) parts: Vec<StreamPart>,
}

/// How a model is streamed.
#[derive(Debug)]
pub(super) struct StreamOptions {
    /// How each window is read. Progress counts from the first window's first byte to the last one's last.
    pub(super) transfer: TransferOptions,
    /// The bytes of each of the two windows: [`WINDOW_BYTES`], or fewer to test with.
    pub(super) window_bytes: u64,
    /// Whether the windows lie in host memory whatever the session's is: the CPU is to look at the bytes.
    pub(super) in_host_memory: bool,
}

/// Cuts the model's tensors into windows. Empty tensors are parts too.
fn windows(model: &Model, window_bytes: u64) -> Vec<Vec<StreamPart>> {
    // A window in which no whole block has room would never be filled.
    let window_bytes = window_bytes.max(8192);
    let mut all: Vec<Vec<StreamPart>> = Vec::new();
    let mut current: Vec<StreamPart> = Vec::new();
    let mut at = 0_u64;
    for (entry, item) in model.entries.iter().enumerate() {
        let mut offset = 0;
        loop {
            // The same distance from a block as in the file, so that whole blocks can be read straight.
            let start = at + (item.extent.offset + offset + 4096 - at % 4096) % 4096;
            let room = window_bytes.saturating_sub(start);
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

/// How large each of the two windows may be, where memory is short.
///
/// # Errors
/// [`OutOfMemory`](crate::ErrorKind::OutOfMemory) if there is no room for small ones either.
fn affordable_window_bytes(model: &Model, home: Home<'_>) -> Result<u64> {
    const LEAST: u64 = 1 << 20;
    if let Home::Peer(peer) = home {
        peer.published.ensure_bytes(2 * LEAST)?;
        return Ok(Alignment::PAGE.down(peer.published.available_bytes()? / 2));
    }
    let Some(available) = available_host_bytes() else { return Ok(WINDOW_BYTES) };
    // As much again as the windows take is left to whoever is handed them, and to the files that are written.
    let window = available.saturating_sub(model.context.staging_bytes) / 4;
    if window < LEAST {
        ensure_host_bytes(model.context.staging_bytes + 4 * LEAST)?;
    }
    Ok(window.max(LEAST))
}

/// Reads every tensor of the model, window by window in the order of the entries, and hands each window to `take`,
/// which gives the buffer back. Uses two windows of memory whatever the model's size.
pub(super) fn stream(
    model: &Model,
    options: &StreamOptions,
    mut take: impl FnMut(StreamWindow) -> Result<Buffer>,
) -> Result<Receipt> {
    let home = match Home::of(&model.context) {
        Home::Peer(peer) if !options.in_host_memory => Home::Peer(peer),
        // What passes through a GPU on its way from file to file only takes the GPU's time.
        _ => Home::Host,
    };
    let plan = windows(model, options.window_bytes.min(affordable_window_bytes(model, home)?));
    let window_bytes = plan.iter().flatten().map(|part| part.at + part.length).max().unwrap_or(0);
    std::thread::scope(|scope| {
        // Both of the consumer's ends are dropped when this closure is left, by whichever way: the reader, which the
        // scope then waits for, hears of it wherever it waits.
        let (to_consumer, filled) = sync_channel::<Result<(StreamWindow, Receipt)>>(1);
        let (give_back, empty) = sync_channel::<Buffer>(2);
        for _ in 0..2.min(plan.len()) {
            if give_back.send(home.allocate(window_bytes)?).is_err() {
                unreachable!("the receiving end is still here");
            }
        }
        let mut receipt = Receipt::default();
        let for_reader = plan.clone();
        let read = move || read_windows(model, &options.transfer, for_reader, &empty, &to_consumer);
        if std::thread::Builder::new().name("thruway-reader".to_owned()).spawn_scoped(scope, read).is_err() {
            // Without a thread that reads ahead, this one does both in turn.
            let (mut buffer, mut before) = (home.allocate(window_bytes)?, 0);
            for parts in plan {
                let (window, read) = fill(model, &options.transfer, &mut before, buffer, parts)?;
                receipt.merge(read);
                buffer = take(window)?;
            }
            return Ok(receipt);
        }
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

/// The reader: fills empty buffers until there is nothing more to read or nobody to read for.
fn read_windows(
    model: &Model,
    options: &TransferOptions,
    plan: Vec<Vec<StreamPart>>,
    empty: &Receiver<Buffer>,
    to_consumer: &SyncSender<Result<(StreamWindow, Receipt)>>,
) {
    let mut before = 0;
    for parts in plan {
        // Either end is gone only when the consumer has failed and left.
        let Ok(buffer) = empty.recv() else { return };
        let result = fill(model, options, &mut before, buffer, parts);
        let failed = result.is_err();
        if to_consumer.send(result).is_err() || failed {
            return;
        }
    }
}

/// Reports the bytes of a piece of work that begins when `before` bytes are done.
pub(super) fn after(progress: Option<&Progress>, before: u64) -> Option<Progress> {
    let progress = Arc::clone(progress?);
    Some(Arc::new(move |moved| progress(before + moved)))
}

/// Reads one window, which follows `before` bytes that were read.
fn fill(
    model: &Model,
    options: &TransferOptions,
    before: &mut u64,
    mut buffer: Buffer,
    parts: Vec<StreamPart>,
) -> Result<(StreamWindow, Receipt)> {
    let options = TransferOptions { progress: after(options.progress.as_ref(), *before), ..options.clone() };
    *before += parts.iter().map(|part| part.length as u64).sum::<u64>();
    let extent_of = |part: &StreamPart| Extent::new(model.entries[part.entry].extent.offset + part.offset, part.length as u64);
    let mut moves = Vec::with_capacity(parts.len());
    for part in &parts {
        let file = Arc::clone(&model.files[model.entries[part.entry].file].file);
        let region = buffer.region(part.at..part.at + part.length)?;
        moves.push(Move { file, extent: extent_of(part), region, direction: Direction::Read });
    }
    let wanted = || parts.iter().map(|part| (&model.entries[part.entry], extent_of(part)));
    let receipt = run(&model.context, moves, &options).map_err(|error| model.name_tensor(error, wanted()))?;
    Ok((StreamWindow { buffer, parts }, receipt))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::{Error, ErrorKind};
    use crate::format::safetensors::Dtype;
    use crate::memory::HostBuffer;
    use crate::model::{SaveOptions, Source};
    use crate::session::Session;

    const TENSOR_BYTES: usize = 50_000;
    const OPTIONS: fn() -> StreamOptions =
        || StreamOptions { transfer: TransferOptions::default(), window_bytes: 20_000, in_host_memory: true };

    /// A model of two tensors, which fill at least four windows, and the directory that holds it.
    fn model() -> (tempfile::TempDir, Model) {
        let directory = tempfile::tempdir_in(std::env::temp_dir()).expect("a directory");
        let path = directory.path().join("model.safetensors");
        let session = Session::builder().build().expect("session");
        let buffers = [1, 2].map(|value| HostBuffer::from_vec(vec![value; TENSOR_BYTES]));
        let source = |(name, buffer): (&str, &HostBuffer)| {
            Source::new(name, Dtype::U8, [TENSOR_BYTES as u64], buffer.source(0..TENSOR_BYTES).expect("free"))
        };
        let sources: Vec<Source> = ["a", "b"].into_iter().zip(&buffers).map(source).collect();
        session.save(&sources, &path, SaveOptions::default()).expect("save");
        (directory, session.open(&path).expect("open"))
    }

    /// Fails the test if `work` takes long: what is tested here used to hang.
    fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, waiting) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(work()));
        waiting.recv_timeout(Duration::from_secs(60)).expect("it hangs")
    }

    #[test]
    fn every_byte_arrives_once_and_in_order() {
        let (_directory, model) = model();
        let mut bytes = vec![Vec::new(); 2];
        let receipt = stream(&model, &OPTIONS(), |StreamWindow { buffer, parts }| {
            for part in &parts {
                assert_eq!(part.offset, bytes[part.entry].len() as u64);
                bytes[part.entry].extend_from_slice(&buffer.bytes()?[part.at..part.at + part.length]);
            }
            Ok(buffer)
        });
        assert_eq!(receipt.expect("nothing is in the way").bytes, 2 * TENSOR_BYTES as u64);
        assert_eq!(bytes, [vec![1; TENSOR_BYTES], vec![2; TENSOR_BYTES]]);
    }

    #[test]
    fn a_consumer_that_fails_at_any_window_ends_the_stream_at_once() {
        let (_directory, model) = model();
        let model = Arc::new(model);
        let count = windows(&model, OPTIONS().window_bytes).len();
        assert!(count >= 4, "{count} windows");
        for fails_at in 0..count {
            let model = Arc::clone(&model);
            let (error, taken) = in_time(move || {
                let mut taken = 0;
                let outcome = stream(&model, &OPTIONS(), |window| {
                    taken += 1;
                    match taken > fails_at {
                        true => Err(Error::new(ErrorKind::NoSpace, "the consumer failed")),
                        false => Ok(window.buffer),
                    }
                });
                (outcome.expect_err("the consumer failed"), taken)
            });
            assert_eq!((error.kind(), taken), (ErrorKind::NoSpace, fails_at + 1));
        }
    }
}
