//! The pipeline: keeps engines, ring and copies busy at once.
//!
//! Each storage side that a transfer uses has one or several [lanes](super::lane): threads that each drive one engine and
//! the copies that go with it, and that take their chunks from one queue. There is no barrier between files. The first error stops all lanes; each then waits for what it has
//! under way, so that nothing moves any more when the caller hears of it.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Instant;

use super::files::{OpenFiles, ensure_same};
use super::lane::{Lane, Queue};
use super::plan::{self, Chunk, Limits};
use super::receipt::{FileReceipt, Part, Receipt};
use super::{FileRef, Move};
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::cuda::Gpu;
use crate::io::policy::{self, FileFacts, Path, PathPolicy, Source, Span};
use crate::io::{Direction, EngineName, EnginePool};
use crate::memory::{Copies, Region, Ring};
use crate::storage::{Access, Buffering, Identity, Namespace};

/// What transfers work with: the parts that a session owns and all its transfers share.
#[derive(Debug)]
pub struct TransferContext {
    /// Where files are opened.
    pub namespace: Arc<dyn Namespace>,
    /// Where engines come from.
    pub engines: EnginePool,
    /// Where staging slots come from.
    pub ring: Ring,
    /// The GPU whose memory transfers may fill and drain.
    pub gpu: Option<Arc<Gpu>>,
    /// Streams and events of earlier lanes, to be used again.
    pub copies: Mutex<Vec<Copies>>,
    /// How requests are cut.
    pub limits: Limits,
}

/// Called with the bytes moved so far, from the lanes' threads.
pub type Progress = Arc<dyn Fn(u64) + Send + Sync>;

/// Stops a transfer from another thread. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks every transfer that was given this to stop. What is in flight is waited for.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether [`cancel`](Self::cancel) was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What the caller wants of a transfer beside its moves.
#[derive(Clone, Default)]
pub struct TransferOptions {
    /// Which path.
    pub policy: PathPolicy,
    /// Told how far it is.
    pub progress: Option<Progress>,
    /// Stops it.
    pub cancel: Cancel,
}

impl fmt::Debug for TransferOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransferOptions({:?})", self.policy)
    }
}

/// A file of the transfer, as found when it began.
pub(super) struct Known {
    pub(super) file: Arc<FileRef>,
    /// What it must still be at the end, if it is read.
    pub(super) identity: Option<Identity>,
}

/// Carries out a batch of moves and accounts for it. Returns when nothing moves any more.
///
/// # Errors
/// The first failure, naming file and offset. What has been moved by then stays in memory or in the file.
pub fn run(context: &TransferContext, moves: Vec<Move>, options: &TransferOptions) -> Result<Receipt> {
    let (started, cpu_started) = (Instant::now(), crate::storage::process_cpu_seconds());
    plan::check(&moves)?;
    for kind in moves.iter().map(|item| item.region.kind()) {
        policy::check(options.policy, kind)?;
    }
    let (files, chunks) = plan_all(context, moves, options)?;
    let open = OpenFiles::new(&*context.namespace);
    let shared = Shared { context, options, files: &files, open: &open, stop: AtomicBool::new(false), moved: AtomicU64::new(0) };
    let mut outcome = run_lanes(&shared, chunks)?;
    if !outcome.refused.is_empty() {
        let again = plan_refused(&files, std::mem::take(&mut outcome.refused), bounded(context));
        outcome.add(run_lanes(&shared, again)?);
    }
    for known in &files {
        verify_unchanged(&*context.namespace, known)?;
    }
    let mut receipt = Receipt { retries: outcome.retries, ..Receipt::default() };
    for (known, parts) in files.iter().zip(outcome.into_parts(files.len())) {
        let mut file = FileReceipt { file: known.file.path.clone(), identity: known.identity, bytes: 0, parts: Vec::new() };
        parts.into_iter().for_each(|part| file.add(part));
        receipt.bytes += file.bytes;
        receipt.files.push(file);
    }
    receipt.seconds = started.elapsed().as_secs_f64();
    receipt.cpu_seconds = crate::storage::process_cpu_seconds() - cpu_started;
    Ok(receipt)
}

/// Groups the moves by file and direction, looks at each file, and plans it.
fn plan_all(context: &TransferContext, moves: Vec<Move>, options: &TransferOptions) -> Result<(Vec<Known>, Vec<Chunk>)> {
    type Batch = (Arc<FileRef>, Direction, Vec<(Extent, Region)>);
    let mut batches: Vec<Batch> = Vec::new();
    let mut index: HashMap<(PathBuf, Direction), usize> = HashMap::new();
    let mut last: Option<usize> = None;
    for item in moves {
        let same = |at: &usize| Arc::ptr_eq(&batches[*at].0, &item.file) && batches[*at].1 == item.direction;
        let at = last.filter(same).unwrap_or_else(|| {
            *index.entry((item.file.path.clone(), item.direction)).or_insert_with(|| {
                batches.push((Arc::clone(&item.file), item.direction, Vec::new()));
                batches.len() - 1
            })
        });
        batches[at].2.push((item.extent, item.region));
        last = Some(at);
    }
    let limits = bounded(context);
    let (mut files, mut chunks) = (Vec::new(), Vec::new());
    for (file, direction, moves) in batches {
        if options.cancel.is_cancelled() {
            return Err(cancelled());
        }
        let (facts, spans, identity) = examine(&*context.namespace, &file, direction, &moves, options.policy)?;
        chunks.extend(plan::plan_file(files.len(), direction, facts, &spans, moves, limits));
        files.push(Known { file, identity });
    }
    Ok((files, chunks))
}

/// Chunks never exceed a slot.
fn bounded(context: &TransferContext) -> Limits {
    let chunk_bytes = context.limits.chunk_bytes.min(context.ring.slot_bytes() as u64);
    Limits { chunk_bytes, ..context.limits }
}

/// The facts of a file, the ways its ranges go, and its identity if it is read.
fn examine(
    namespace: &dyn Namespace,
    file: &FileRef,
    direction: Direction,
    moves: &[(Extent, Region)],
    policy: PathPolicy,
) -> Result<(FileFacts, Vec<Span>, Option<Identity>)> {
    let access = if direction == Direction::Read { Access::Read } else { Access::Write };
    let handle = namespace.open(&file.path, access, Buffering::PageCache)?;
    let identity = handle.identity()?;
    let facts = FileFacts { length: identity.length, direct: handle.direct_rules() };
    let start = moves.iter().map(|(extent, _)| extent.offset).min().unwrap_or(0);
    let end = moves.iter().map(|(extent, _)| extent.end()).max().unwrap_or(0);
    let whole = Extent::new(start, end - start);
    let named = |error: Error| error.with_file(&file.path);
    if direction == Direction::Write {
        return Ok((facts, vec![policy::write_span(facts, whole, policy).map_err(named)?], None));
    }
    if let Some(expected) = file.expected {
        ensure_same(file, expected, identity)?;
    }
    if end > facts.length {
        let what = format!("the file holds {} bytes, and bytes up to {end} were asked for", facts.length);
        return Err(named(Error::new(ErrorKind::UnexpectedEof, what)));
    }
    let spans = policy::read_spans(facts, whole, policy, &|extent| handle.residency(extent)).map_err(named)?;
    Ok((facts, spans, Some(identity)))
}

/// What a filesystem refused past the page cache, planned again through it.
fn plan_refused(files: &[Known], refused: Vec<Chunk>, limits: Limits) -> Vec<Chunk> {
    let reason: Arc<str> = "the filesystem accepted O_DIRECT and then refused the transfer".into();
    let mut chunks = Vec::new();
    for chunk in refused {
        let span = Span { extent: chunk.extent, source: Source::PageCache, ring_only: false, reason: Arc::clone(&reason) };
        let length = files[chunk.file].identity.map_or(chunk.extent.end(), |identity| identity.length);
        let facts = FileFacts { length, direct: None };
        chunks.extend(plan::plan_file(chunk.file, chunk.direction, facts, &[span], chunk.wanted_pieces(), limits));
    }
    chunks
}

/// A file that was read must still be what it was when its reading began: else bytes of two states are mixed.
fn verify_unchanged(namespace: &dyn Namespace, known: &Known) -> Result<()> {
    let Some(before) = known.identity else { return Ok(()) };
    match namespace.open(&known.file.path, Access::Read, Buffering::PageCache) {
        Ok(handle) => {
            let now = handle.identity()?;
            // Another file under the name is no harm: what was read came from the one that was open.
            let replaced = (before.device, before.inode) != (now.device, now.inode);
            if replaced { Ok(()) } else { ensure_same(&known.file, before, now) }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

pub(super) fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the transfer was cancelled")
}

/// What all lanes of a transfer share.
pub(super) struct Shared<'a> {
    pub(super) context: &'a TransferContext,
    pub(super) options: &'a TransferOptions,
    pub(super) files: &'a [Known],
    pub(super) open: &'a OpenFiles<'a>,
    pub(super) stop: AtomicBool,
    pub(super) moved: AtomicU64,
}

/// What a lane did.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) parts: HashMap<(usize, Path, EngineName, Arc<str>), u64>,
    pub(super) refused: Vec<Chunk>,
    pub(super) retries: u64,
}

impl Outcome {
    fn add(&mut self, other: Self) {
        for (key, bytes) in other.parts {
            *self.parts.entry(key).or_default() += bytes;
        }
        self.refused.extend(other.refused);
        self.retries += other.retries;
    }

    /// The parts of each file, the largest first.
    fn into_parts(self, files: usize) -> Vec<Vec<Part>> {
        let mut by_file = Vec::new();
        by_file.resize_with(files, Vec::new);
        for ((file, path, engine, reason), bytes) in self.parts {
            by_file[file].push(Part { path, engine, bytes, reason });
        }
        for parts in &mut by_file {
            parts.sort_by(|a: &Part, b: &Part| (b.bytes, a.path, &a.reason).cmp(&(a.bytes, b.path, &b.reason)));
        }
        by_file
    }
}

/// Runs the chunks of each storage side in as many lanes as its engine works best with. One lane runs on the caller's
/// thread, so a small transfer starts none.
fn run_lanes(shared: &Shared<'_>, chunks: Vec<Chunk>) -> Result<Outcome> {
    let (drive, cache): (Vec<Chunk>, Vec<Chunk>) = chunks.into_iter().partition(|chunk| chunk.source == Source::Drive);
    let sides = [(Source::Drive, drive), (Source::PageCache, cache)];
    let sides: Vec<(Source, Queue)> =
        sides.into_iter().filter(|(_, chunks)| !chunks.is_empty()).map(|(source, chunks)| (source, Queue::new(chunks))).collect();
    let (mut firsts, mut others) = (Vec::new(), Vec::new());
    for (source, queue) in &sides {
        let engine = shared.context.engines.take(*source)?;
        let lanes = engine.capabilities().lanes.min(queue.len());
        firsts.push(Lane::new(shared, *source, engine, queue));
        for _ in 1..lanes {
            // More lanes are faster and not needed, so what cannot be had is done without.
            let Ok(engine) = shared.context.engines.take(*source) else { break };
            others.push(Lane::new(shared, *source, engine, queue));
        }
    }
    let Some(here) = firsts.pop() else { return Ok(Outcome::default()) };
    std::thread::scope(|scope| {
        let (mut running, mut results) = (Vec::new(), Vec::new());
        for lane in firsts {
            match start(scope, lane) {
                Ok(handle) => running.push(handle),
                Err(source) => {
                    shared.stop.store(true, Ordering::Relaxed);
                    results.push(Err(Error::from_io("cannot start an I/O thread", source)));
                }
            }
        }
        running.extend(others.into_iter().map_while(|lane| start(scope, lane).ok()));
        results.push(here.run());
        results.extend(running.into_iter().map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))));
        first_failure(results)
    })
}

/// Runs a lane on a thread of its own.
fn start<'scope, 'env, 'a: 'scope, 'b: 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    lane: Lane<'a, 'b>,
) -> std::io::Result<ScopedJoinHandle<'scope, Result<Outcome>>> {
    std::thread::Builder::new().name("thruway-lane".to_owned()).spawn_scoped(scope, move || lane.run())
}

/// What all lanes did together, or the failure that stopped them.
fn first_failure(results: Vec<Result<Outcome>>) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut first: Option<Error> = None;
    for result in results {
        match result {
            Ok(lane) => outcome.add(lane),
            // A lane that was stopped by another's failure says so only if there is nothing better to say.
            Err(error) if first.as_ref().is_none_or(|have| have.kind() == ErrorKind::Cancelled) => first = Some(error),
            Err(_) => {}
        }
    }
    first.map_or(Ok(outcome), Err)
}
