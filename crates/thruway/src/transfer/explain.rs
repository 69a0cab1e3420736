//! Explaining: which way the bytes of a transfer would go, and why, found out as the transfer itself finds it out.
//!
//! The batches are made, checked and planned by the code that carries them out; only then nothing is carried out. Whether a drive
//! reaches a device's memory is tried with one block, as a transfer tries it, because nothing else can tell. What is not known
//! before the bytes move: a request that a drive or a library refuses on the way, and counters that say something else of the
//! whole than they said of that block.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::files::OpenFiles;
use super::pipeline::{Batch, Outcome, Shared, plan_batch};
use super::receipt::FileReceipt;
use super::{TransferContext, TransferOptions};
use crate::base::error::escaped;
use crate::base::{ByteSize, Result};
use crate::io::EngineName;
use crate::io::policy::{Path, Source};

/// Which way the bytes of each file would go.
#[derive(Clone, Debug, Default)]
pub struct Explanation {
    /// The files, as a [`Receipt`](super::Receipt) would have them: what it calls moved would be.
    pub files: Vec<FileReceipt>,
}

impl Explanation {
    /// The bytes that would be moved.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// The bytes that would go this way.
    pub fn bytes_by(&self, path: Path) -> u64 {
        self.files.iter().map(|file| file.bytes_by(path)).sum()
    }
}

impl fmt::Display for Explanation {
    /// Each file in a line, and below it one for each way that its bytes would go.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, FileReceipt { file, bytes, parts, .. }) in self.files.iter().enumerate() {
            let line = if number == 0 { "" } else { "\n" };
            write!(f, "{line}{}: {}", escaped(&file.to_string_lossy()), ByteSize(*bytes))?;
            parts.iter().try_for_each(|part| write!(f, "\n  {part}"))?;
        }
        Ok(())
    }
}

/// What a transfer of these batches would do, with nothing of it done. Their memory is let go of as soon as it is planned, so no
/// more is held than for one of them.
///
/// # Errors
/// Those of the transfer that it meets before its bytes move: a path that is required and not to be had, moves that contradict
/// themselves, files that cannot be opened.
pub(crate) fn explain_batches(
    context: &TransferContext,
    batches: Vec<Batch<'_>>,
    options: &TransferOptions,
) -> Result<Explanation> {
    let open = OpenFiles::new(&*context.namespace);
    let shared = Shared::new(context, options, &open);
    let (mut outcome, mut engines) = (Outcome::default(), Vec::new());
    for batch in batches {
        for chunk in plan_batch(&shared, batch()?)? {
            let (engine, note) = engine_of(context, chunk.source, &mut engines)?;
            outcome.count(&chunk, engine, note.as_deref());
        }
        shared.fill_nothing();
    }
    // The counters speak of the whole transfer: where a part of it would not move them, none of it is proven.
    let unproven = shared.unproven.load(Ordering::Relaxed);
    let mut files = outcome.of_files(shared);
    for part in files.iter_mut().flat_map(|file| &mut file.parts).filter(|part| part.path == Path::Direct && unproven) {
        part.path = Path::Unverified;
    }
    Ok(Explanation { files })
}

type Engine = (EngineName, Option<Arc<str>>);

/// The engine that carries out chunks of one storage side, and why it is not another. Made as for a transfer, which finds it in
/// the pool.
fn engine_of(context: &TransferContext, source: Source, known: &mut Vec<(Source, Engine)>) -> Result<Engine> {
    if let Some((_, engine)) = known.iter().find(|(of, _)| *of == source) {
        return Ok(engine.clone());
    }
    let taken = context.engines.take(source)?;
    let engine = (taken.name(), taken.note());
    known.push((source, engine.clone()));
    Ok(engine)
}
