//! The pipeline: keeps engines, ring and copies busy at once.
//!
//! Each storage side that a transfer uses has one or several [lanes](super::lane): threads that each drive one engine and
//! the copies that go with it, and that take their chunks from one queue. There is no barrier between files. The first error
//! stops all lanes; each then waits for what it has under way, so that nothing moves any more when the caller hears of it.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use super::direct;
use super::files::{OpenFiles, ensure_same};
use super::lane::Lane;
use super::plan::{self, Chunk, Limits, Placement};
use super::queue::Queue;
use super::receipt::{FileReceipt, Part, Receipt};
use super::{FileRef, Move, Witness};
use crate::base::{Alignment, Error, ErrorKind, Extent, Processors, Result};
use crate::cuda::CallerStream;
use crate::io::direct::{DirectPath, Reach};
use crate::io::policy::{self, FileFacts, Path, PathPolicy, Source, Span};
use crate::io::profile::{Advice, Advisor};
use crate::io::{Direction, EngineName, EnginePool};
use crate::memory::{Copies, CopyStreams, Filling, MemoryKind, PeerMemory, Region, Ring};
use crate::storage::{Access, Buffering, DirectRules, File, Identity, Namespace, PublishedMemory};

/// What transfers work with: the parts that a session owns and all its transfers share.
#[derive(Debug)]
pub struct TransferContext {
    /// Where files are opened.
    pub namespace: Arc<dyn Namespace>,
    /// Where engines come from.
    pub engines: EnginePool,
    /// Where staging slots come from.
    pub ring: Ring,
    /// How drives reach the memory of the session's device without the host, if this session knows a way.
    pub direct: Option<Arc<dyn DirectPath>>,
    /// The measured rates that the choice of path follows, if the session was given some.
    pub advisor: Option<Advisor>,
    /// The PCI device whose memory the session allocates.
    pub peer: Option<Peer>,
    /// The streams of the GPU whose memory transfers may fill and drain.
    pub streams: Option<Arc<CopyStreams>>,
    /// The processors near that GPU, on which lanes run, where some are nearer than others.
    pub near: Option<Processors>,
    /// Copies of earlier lanes, whose events can be used again.
    pub copies: Mutex<Vec<Copies>>,
    /// How requests are cut.
    pub limits: Limits,
    /// The most bytes of the ring that reads past the page cache take: those in flight, and as many being copied on.
    pub staging_bytes: u64,
}

/// A PCI device's memory, and what its driver tells of it.
#[derive(Debug)]
pub struct Peer {
    /// Where buffers come from.
    pub memory: Arc<PeerMemory>,
    /// How much there is.
    pub published: PublishedMemory,
}

impl Peer {
    /// Opens the device's memory.
    ///
    /// # Errors
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) for users who may not.
    pub fn new(published: PublishedMemory) -> Result<Self> {
        let memory = Arc::new(PeerMemory::new(published.address(), published.open()?));
        Ok(Self { memory, published })
    }
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
    /// A stream of the caller's on the session's GPU. What is in it when a batch of moves is begun is done before any of that
    /// batch's bytes are moved: kernels that still use the memory, or that write what is to be saved. Without one the caller
    /// has waited for such work.
    pub after: Option<CallerStream>,
    /// Shown what passes through the ring.
    pub witness: Option<Arc<dyn Witness>>,
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
    /// The number of the device that it lies on.
    pub(super) device: u64,
}

/// Moves that are made when their turn comes: what comes before them is under way by then.
pub(crate) type Batch<'a> = Box<dyn FnOnce() -> Result<Vec<Move>> + 'a>;

/// Carries out a batch of moves and accounts for it. Returns when nothing moves any more.
///
/// # Errors
/// The first failure, naming file and offset. What has been moved by then stays in memory or in the file.
pub fn run(context: &TransferContext, moves: Vec<Move>, options: &TransferOptions) -> Result<Receipt> {
    run_batches(context, vec![Box::new(|| Ok(moves))], options)
}

/// Carries out batches of moves as one transfer: while the first move, the next are made. So the time that it takes to
/// allocate destinations is hidden behind the transfer.
pub(crate) fn run_batches(context: &TransferContext, batches: Vec<Batch<'_>>, options: &TransferOptions) -> Result<Receipt> {
    let (started, cpu_started) = (Instant::now(), crate::storage::process_cpu_seconds());
    let open = OpenFiles::new(&*context.namespace);
    let shared = Shared::new(context, options, &open);
    let watch = context.direct.as_deref().map(DirectPath::watch);
    let mut outcome = run_lanes(&shared, batches)?;
    if let Some(watch) = watch {
        direct::judge(&mut outcome, watch, options.policy)?;
    }
    while !outcome.refused.is_empty() {
        let again = plan_refused(&shared, std::mem::take(&mut outcome.refused));
        let batch = move |_: &Shared<'_>| Ok(again);
        outcome.add(run_planned(&shared, vec![Box::new(batch)])?);
    }
    let retries = outcome.retries;
    let files = outcome.of_files(shared);
    Ok(Receipt {
        bytes: files.iter().map(|file| file.bytes).sum(),
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: crate::storage::process_cpu_seconds() - cpu_started,
        retries,
        files,
        notes: Vec::new(),
    })
}

/// Checks and plans a batch: groups its moves by file and direction, and looks at each file.
pub(super) fn plan_batch(shared: &Shared<'_>, moves: Vec<Move>) -> Result<Vec<Chunk>> {
    plan::check(&moves)?;
    let destinations = moves.iter().filter(|item| item.direction == Direction::Read).map(|item| &item.region);
    let filling = Filling::begin_all(destinations)?;
    shared.filling.lock().unwrap_or_else(PoisonError::into_inner).extend(filling);
    for kind in moves.iter().map(|item| item.region.kind()) {
        policy::check(shared.options.policy, kind, shared.context.direct.is_some())?;
    }
    let wanted: u64 = moves.iter().map(|item| item.extent.length).sum();
    let limits = proportioned(bounded(shared.context), wanted);
    let mut chunks = Vec::new();
    for (file, direction, moves) in by_file(moves)? {
        if shared.options.cancel.is_cancelled() {
            return Err(cancelled());
        }
        // A file that an earlier batch read is the same file still, or it was changed.
        let before = if direction == Direction::Read { shared.read_before(&file.path) } else { None };
        let expected = FileRef { path: file.path.clone(), expected: before.or(file.expected) };
        let (facts, spans, identity) = examine(shared, &expected, direction, &moves)?;
        let number = shared.number(file, direction, identity);
        chunks.extend(plan::plan_file(number, direction, facts, &spans, moves, limits));
    }
    Ok(chunks)
}

type FileMoves = (Arc<FileRef>, Direction, Vec<(Extent, Region)>);

/// The moves of each file in each direction, in the order in which the files are first named.
fn by_file(moves: Vec<Move>) -> Result<Vec<FileMoves>> {
    let mut files: Vec<FileMoves> = Vec::new();
    let mut index: HashMap<(PathBuf, Direction), usize> = HashMap::new();
    let mut last: Option<usize> = None;
    for item in moves {
        let same = |at: &usize| Arc::ptr_eq(&files[*at].0, &item.file) && files[*at].1 == item.direction;
        let at = last.filter(same).unwrap_or_else(|| {
            *index.entry((item.file.path.clone(), item.direction)).or_insert_with(|| {
                files.push((Arc::clone(&item.file), item.direction, Vec::new()));
                files.len() - 1
            })
        });
        if !Arc::ptr_eq(&files[at].0, &item.file) && files[at].0.expected != item.file.expected {
            // One of the two may expect nothing, and then the other counts.
            match (files[at].0.expected, item.file.expected) {
                (Some(_), Some(_)) => {
                    let message = "two moves expect the same file to be in two states";
                    return Err(Error::new(ErrorKind::InvalidInput, message).with_file(&item.file.path));
                }
                (None, Some(_)) => files[at].0 = Arc::clone(&item.file),
                (_, None) => {}
            }
        }
        files[at].2.push((item.extent, item.region));
        last = Some(at);
    }
    Ok(files)
}

/// Smaller chunks for a small transfer: enough of them for a drive and for several lanes, and no more fresh staging memory
/// than that needs.
fn proportioned(limits: Limits, wanted: u64) -> Limits {
    const CHUNKS_MIN: u64 = 64;
    const CHUNK_BYTES_MIN: u64 = 512 << 10;
    limits.at_most(Alignment::PAGE.up(wanted / CHUNKS_MIN).max(CHUNK_BYTES_MIN))
}

/// Chunks never exceed a slot.
fn bounded(context: &TransferContext) -> Limits {
    context.limits.at_most(context.ring.slot_bytes() as u64)
}

/// The facts of a file, the ways its ranges go, and its identity.
fn examine(
    shared: &Shared<'_>,
    file: &FileRef,
    direction: Direction,
    moves: &[(Extent, Region)],
) -> Result<(FileFacts, Vec<Span>, Identity)> {
    let policy = shared.options.policy;
    let access = if direction == Direction::Read { Access::Read } else { Access::Write };
    let handle = shared.context.namespace.open(&file.path, access, Buffering::PageCache)?;
    let identity = handle.identity()?;
    let mut facts = FileFacts { length: identity.length, direct: handle.direct_rules(), peer: None, window: false };
    let start = moves.iter().map(|(extent, _)| extent.offset).min().unwrap_or(0);
    let end = moves.iter().map(|(extent, _)| extent.end()).max().unwrap_or(0);
    let whole = Extent::new(start, end - start);
    let named = |error: Error| error.with_file(&file.path);
    if direction == Direction::Read {
        if let Some(expected) = file.expected {
            ensure_same(file, expected, identity)?;
        }
        if end > facts.length {
            let what = format!("the file holds {} bytes, and bytes up to {end} were asked for", facts.length);
            return Err(named(Error::new(ErrorKind::UnexpectedEof, what)));
        }
    }
    let reach = direct::reach(shared, file, direction, moves, (&*handle, identity.device)).map_err(named)?;
    if let Reach::Direct { rules, .. } = reach {
        facts.peer = Some(rules);
        facts.window = shared.context.direct.as_deref().and_then(DirectPath::window).is_some();
    }
    let advice = advice(shared, &*handle, direction, moves);
    if direction == Direction::Write {
        return Ok((facts, vec![policy::write_span(facts, whole, policy, (&reach, &advice)).map_err(named)?], identity));
    }
    let residency = |extent| handle.residency(extent);
    let spans = policy::read_spans(facts, whole, policy, (&reach, &advice), &residency).map_err(named)?;
    Ok((facts, spans, identity))
}

/// What the session's measured rates say of moves between a file and the GPU, where there is a choice.
fn advice(shared: &Shared<'_>, file: &dyn File, direction: Direction, moves: &[(Extent, Region)]) -> Advice {
    let of_gpu = moves.iter().filter(|(_, region)| matches!(region.kind(), MemoryKind::Gpu(_)));
    let bytes: u64 = of_gpu.map(|(extent, _)| extent.length).sum();
    match &shared.context.advisor {
        Some(advisor) if bytes > 0 && shared.options.policy == PathPolicy::Auto => {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            advisor.advice(file.filesystem().as_deref(), direction, bytes, since.map_or(0, |since| since.as_secs()))
        }
        _ => Advice::None,
    }
}

/// What was refused on its way, planned again by the next longer one: of the direct path past the page cache, else through it.
fn plan_refused(shared: &Shared<'_>, refused: Vec<(Chunk, Arc<str>)>) -> Vec<Chunk> {
    let limits = bounded(shared.context);
    let mut chunks = Vec::new();
    for (chunk, reason) in refused {
        let rules = DirectRules { memory: chunk.alignment, offset: chunk.alignment };
        let (source, direct) =
            if chunk.source == Source::Direct { (Source::Drive, Some(rules)) } else { (Source::PageCache, None) };
        let span = Span { extent: chunk.extent, source, ring_only: false, reason };
        let length = shared.file(chunk.file).identity.map_or(chunk.extent.end(), |identity| identity.length);
        let facts = FileFacts { length, direct, peer: None, window: false };
        chunks.extend(plan::plan_file(chunk.file, chunk.direction, facts, &[span], chunk.wanted_pieces(), limits));
    }
    chunks
}

pub(super) fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the transfer was cancelled")
}

/// Every file of a transfer, by number and by path. Grows with each batch.
#[derive(Default)]
struct Files {
    list: Vec<Arc<Known>>,
    by_path: HashMap<(PathBuf, Direction), usize>,
}

/// What all lanes of a transfer share.
pub(super) struct Shared<'a> {
    pub(super) context: &'a TransferContext,
    pub(super) options: &'a TransferOptions,
    files: RwLock<Files>,
    pub(super) open: &'a OpenFiles<'a>,
    /// What this transfer fills: no other may fill it meanwhile.
    filling: Mutex<Vec<Filling>>,
    pub(super) stop: AtomicBool,
    pub(super) moved: AtomicU64,
    /// Whether a direct path is taken whose trial nothing proved.
    pub(super) unproven: AtomicBool,
}

impl<'a> Shared<'a> {
    /// Of a transfer that begins.
    pub(super) fn new(context: &'a TransferContext, options: &'a TransferOptions, open: &'a OpenFiles<'a>) -> Self {
        Self {
            context,
            options,
            files: RwLock::default(),
            open,
            filling: Mutex::default(),
            stop: AtomicBool::new(false),
            moved: AtomicU64::new(0),
            unproven: AtomicBool::new(false),
        }
    }

    /// Lets go of what was to be filled.
    pub(super) fn fill_nothing(&self) {
        self.filling.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Stops all lanes, those that wait for a descriptor too.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.open.stop();
    }

    /// The file with this number.
    pub(super) fn file(&self, number: usize) -> Arc<Known> {
        Arc::clone(&self.files.read().unwrap_or_else(PoisonError::into_inner).list[number])
    }

    /// An error with the place in storage of the chunk that met it.
    pub(super) fn of_chunk(&self, error: Error, chunk: &Chunk) -> Error {
        let Extent { offset, length } = chunk.extent;
        error.with_file(&self.file(chunk.file).file.path).with("offset", offset).with("length", length)
    }

    /// What a file that an earlier batch reads was found to be.
    fn read_before(&self, path: &std::path::Path) -> Option<Identity> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let number = files.by_path.get(&(path.to_owned(), Direction::Read))?;
        files.list[*number].identity
    }

    /// The number of a file that was examined: that of an earlier batch, or a new one.
    fn number(&self, file: Arc<FileRef>, direction: Direction, found: Identity) -> usize {
        let identity = (direction == Direction::Read).then_some(found);
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        let next = files.list.len();
        let number = *files.by_path.entry((file.path.clone(), direction)).or_insert(next);
        if number == next {
            files.list.push(Arc::new(Known { file, identity, device: found.device }));
        }
        number
    }
}

/// What a lane did.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) parts: HashMap<(usize, Path, EngineName, Arc<str>), u64>,
    /// What was refused on its way, and why.
    pub(super) refused: Vec<(Chunk, Arc<str>)>,
    pub(super) retries: u64,
}

impl Outcome {
    /// Accounts for a chunk that an engine moves, or would. `note` says why it is not the engine that was wanted.
    pub(super) fn count(&mut self, chunk: &Chunk, engine: EngineName, note: Option<&str>) {
        let reason = note.map_or_else(|| Arc::clone(&chunk.reason), |note| format!("{}; {note}", chunk.reason).into());
        *self.parts.entry((chunk.file, chunk.path(), engine, reason)).or_default() += chunk.wanted;
    }

    fn add(&mut self, other: Self) {
        for (key, bytes) in other.parts {
            *self.parts.entry(key).or_default() += bytes;
        }
        self.refused.extend(other.refused);
        self.retries += other.retries;
    }

    /// What was moved of each file, its largest part first.
    pub(super) fn of_files(self, shared: Shared<'_>) -> Vec<FileReceipt> {
        let known = shared.files.into_inner().unwrap_or_else(PoisonError::into_inner).list;
        let empty = |known: &Arc<Known>| FileReceipt {
            file: known.file.path.clone(),
            identity: known.identity,
            bytes: 0,
            parts: Vec::new(),
        };
        let mut files: Vec<FileReceipt> = known.iter().map(empty).collect();
        for ((file, path, engine, reason), bytes) in self.parts {
            files[file].add(Part { path, engine, bytes, reason });
        }
        for file in &mut files {
            file.parts.sort_by(|a, b| (b.bytes, a.path, &a.reason).cmp(&(a.bytes, b.path, &b.reason)));
        }
        files
    }
}

/// Chunks that are planned when their turn comes.
type PlannedBatch<'a> = Box<dyn FnOnce(&Shared<'_>) -> Result<Vec<Chunk>> + 'a>;

fn run_lanes(shared: &Shared<'_>, batches: Vec<Batch<'_>>) -> Result<Outcome> {
    run_planned(shared, batches.into_iter().map(planned).collect())
}

/// The batch's moves, planned.
fn planned(batch: Batch<'_>) -> PlannedBatch<'_> {
    Box::new(move |shared: &Shared<'_>| {
        let moves = batch()?;
        if let (Some(after), Some(streams)) = (shared.options.after, &shared.context.streams) {
            // Here, and not on the streams of the copies: other transfers have those too.
            after.wait(streams.gpu())?;
        }
        plan_batch(shared, moves)
    })
}

/// A lane out of the page cache that finds fewer chunks than this costs a small transfer more, in threads and staging
/// memory, than it gains.
const CHUNKS_A_LANE_MIN: usize = 8;

/// Runs the chunks of each storage side in as many lanes as its engine works best with. Of a single batch one lane runs
/// on the caller's thread, so a small transfer starts none; of several the caller's thread makes the next ones.
fn run_planned(shared: &Shared<'_>, batches: Vec<PlannedBatch<'_>>) -> Result<Outcome> {
    let queues = [Source::Direct, Source::Drive, Source::PageCache].map(|source| (source, Queue::default()));
    let alone = batches.len() == 1;
    std::thread::scope(|scope| {
        let (mut running, mut results, mut here) = (Vec::new(), Vec::new(), Vec::new());
        let closing = Closing(&queues);
        let mut started = [false; 3];
        for batch in batches {
            if shared.stop.load(Ordering::Relaxed) {
                break;
            }
            let feed = batch(shared).and_then(|mut left| {
                for ((source, queue), started) in queues.iter().zip(&mut started) {
                    let chunks: Vec<Chunk> = left.extract_if(.., |chunk| chunk.source == *source).collect();
                    if chunks.is_empty() {
                        continue;
                    }
                    // A lane that copies out of the page cache is for many chunks; one at a drive may be for a single one.
                    let few = alone && *source == Source::PageCache;
                    let lanes_max = if few { chunks.len().div_ceil(CHUNKS_A_LANE_MIN) } else { usize::MAX };
                    prefault(scope, shared, &chunks);
                    queue.add(chunks.into_iter().map(|chunk| (shared.file(chunk.file).device, chunk)));
                    if !std::mem::replace(started, true) {
                        let mut lanes = lanes_of(shared, *source, queue, lanes_max)?;
                        let mut has_lane = alone && here.is_empty();
                        if has_lane {
                            here.extend(lanes.pop());
                        }
                        for lane in lanes {
                            match start(scope, lane) {
                                Ok(handle) => running.push(handle),
                                // More lanes are faster and not needed, so what cannot be had is done without; a first
                                // one waits for its turn on this thread.
                                Err(_) if has_lane => break,
                                Err(_) => here.extend(lanes_of(shared, *source, queue, 1)?),
                            }
                            has_lane = true;
                        }
                    }
                }
                Ok(())
            });
            if let Err(error) = feed {
                shared.stop();
                results.push(Err(error));
                break;
            }
        }
        drop(closing);
        results.extend(here.into_iter().map(Lane::run));
        results.extend(running.into_iter().map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))));
        first_failure(results)
    })
}

/// Closes the queues on every way out: a lane waits at an open one for as long as it is open.
struct Closing<'a>(&'a [(Source, Queue)]);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, queue)| queue.close());
    }
}

/// The lanes of one storage side, at least one.
fn lanes_of<'a, 'b>(shared: &'a Shared<'b>, source: Source, queue: &'a Queue, lanes_max: usize) -> Result<Vec<Lane<'a, 'b>>> {
    let engine = shared.context.engines.take(source)?;
    let wanted = engine.capabilities().lanes.min(lanes_max);
    let mut lanes = vec![Lane::new(shared, source, engine, queue)];
    for _ in 1..wanted {
        let Ok(engine) = shared.context.engines.take(source) else { break };
        lanes.push(Lane::new(shared, source, engine, queue));
    }
    Ok(lanes)
}

/// Asks, on a thread of its own, for the pages that the drive will fill. Else the lane that submits such reads would wait
/// for each of them: fresh memory comes at 2.5 to 5 GB/s in a virtual machine, which is a drive's speed. What passes through
/// the ring is not asked for: there the lane's copy meets the pages while the drive works, and asking as well only made both
/// wait for the lock of the address space.
fn prefault<'scope>(scope: &'scope Scope<'scope, '_>, shared: &'scope Shared<'_>, chunks: &[Chunk]) {
    /// Below this a call costs more than the faults that it saves.
    const REGION_BYTES_MIN: usize = 64 << 10;
    let straight = |chunk: &Chunk| {
        let regions = match &chunk.placement {
            Placement::Straight(regions) if chunk.source == Source::Drive && chunk.direction == Direction::Read => {
                regions.clone()
            }
            _ => Vec::new(),
        };
        regions.into_iter().filter(|region| region.kind() == MemoryKind::Host && region.len() >= REGION_BYTES_MIN)
    };
    let regions: Vec<Region> = chunks.iter().flat_map(straight).collect();
    if regions.len() > 1 {
        let work = move || {
            regions.iter().take_while(|_| !shared.stop.load(Ordering::Relaxed)).for_each(Region::prefault);
        };
        // Without the thread the lane does the waiting itself.
        drop(std::thread::Builder::new().name("thruway-prefault".to_owned()).spawn_scoped(scope, work));
    }
}

/// Runs a lane on a thread of its own.
fn start<'scope, 'env, 'a: 'scope, 'b: 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    lane: Lane<'a, 'b>,
) -> std::io::Result<ScopedJoinHandle<'scope, Result<Outcome>>> {
    let run = move || match lane.near() {
        Some(near) => near.run(|| lane.run()),
        None => lane.run(),
    };
    std::thread::Builder::new().name("thruway-lane".to_owned()).spawn_scoped(scope, run)
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
