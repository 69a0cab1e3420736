//! The machine's limits, measured with as little between the clock and the hardware as there can be: copies in memory,
//! reads from the page cache, and raw requests to the drive through the engines' contract.
//!
//! A limit is the best of its runs: it says what the machine can do, not what it did on average. Only a drive that others use
//! too can do more at one time than at another: its limit is the median of the shape of requests that does best, measured
//! beside whatever is held against it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};
use thruway::io::engine::{Posix, Uring};
use thruway::io::layer::Exact;
use thruway::io::{Completion, Engine, Request, Wait};
use thruway::storage::{Access, Buffering, File, Namespace, OsNamespace, Residency, drop_from_page_cache};
use thruway::{Alignment, Direction, Error, ErrorKind, HostBuffer, Result};

use crate::output::{counted, gb_per_s};
use crate::synthetic::fill;

/// One call of the plain single-threaded references.
const PLAIN_BYTES: usize = 4 << 20;
/// What one thread gets from a drive is slow to measure and nobody's limit.
const PLAIN_RUNS_MAX: u32 = 2;
/// Copies in memory are of at least this much, so that no processor's cache holds it.
const COPY_BYTES_MIN: usize = 128 << 20;
/// More would measure nothing new.
const COPY_BYTES_MAX: usize = 512 << 20;
/// So much of a file is read from the page cache.
const CACHE_BYTES_MAX: u64 = 1 << 30;
/// A drive shows its rate on so much.
const DRIVE_BYTES_MAX: u64 = 4 << 30;
/// The ring of a session, the buffers of requests to the drive, and the process itself.
const MEMORY_BESIDE: u64 = 512 << 20;
/// The first touch of fresh memory varies (a virtual machine may have to fetch it from its host), so one run is no limit.
const CACHE_RUNS_MIN: u32 = 3;

/// The names of the limits, by which results refer to them.
pub(crate) mod limit {
    /// Memory to memory.
    pub(crate) const COPY_ONE: &str = "memory copy, one thread";
    /// Likewise.
    pub(crate) const COPY_ALL: &str = "memory copy, all threads";
    /// Memory that was never touched: what a load into new host memory meets.
    pub(crate) const CACHE_ONE_FRESH: &str = "page cache read, one thread, fresh memory";
    /// Memory that was touched.
    pub(crate) const CACHE_ONE_WARM: &str = "page cache read, one thread, warm memory";
    /// As with one thread.
    pub(crate) const CACHE_ALL_FRESH: &str = "page cache read, all threads, fresh memory";
    /// As with one thread.
    pub(crate) const CACHE_ALL_WARM: &str = "page cache read, all threads, warm memory";
    /// Into a few buffers that are used again and again: what reading into the ring meets.
    pub(crate) const CACHE_ALL_SMALL: &str = "page cache read, all threads, small buffers";
    /// Into fresh files with reserved blocks, synced: what a save does.
    pub(crate) const WRITE: &str = "O_DIRECT write, fresh file, best";
    /// Beside it; no save can do that.
    pub(crate) const REWRITE: &str = "O_DIRECT write, over existing blocks";
    /// As `dd` writes.
    pub(crate) const WRITE_PLAINLY: &str = "O_DIRECT write, one at a time";
    /// The drive's best.
    pub(crate) const READ: &str = "O_DIRECT read, best";
    /// As `dd` reads.
    pub(crate) const READ_PLAINLY: &str = "O_DIRECT read, one at a time";
    /// From pinned memory to a GPU.
    pub(crate) const TO_GPU: &str = "pinned host to GPU";
    /// From a GPU to pinned memory.
    pub(crate) const FROM_GPU: &str = "GPU to pinned host";
    /// Each way on a stream of its own; the sum of both.
    pub(crate) const BOTH_WAYS: &str = "both ways at once";
}

/// A rate, and how it was reached.
#[derive(Clone, Debug)]
pub(crate) struct Rate {
    /// Decimal gigabytes a second.
    pub(crate) gb_per_s: f64,
    /// The engine, depth and size of requests, or the number of threads.
    pub(crate) how: String,
    /// The best shapes of requests, if it is a drive's rate, and what each pass of each reached: equally many of all.
    tried: Vec<Tried>,
}

/// A shape of requests, and what its passes reached.
#[derive(Clone, Debug)]
struct Tried {
    shape: Shape,
    how: String,
    gb_per_s: Vec<f64>,
}

impl Rate {
    fn new(gb_per_s: f64, how: impl Into<String>) -> Self {
        Self { gb_per_s, how: how.into(), tried: Vec::new() }
    }

    /// The rate of the shape whose median is best.
    fn of_best(mut tried: Vec<Tried>) -> Option<Self> {
        tried.sort_by(|one, other| median(&other.gb_per_s).total_cmp(&median(&one.gb_per_s)));
        let best = tried.first()?;
        Some(Self { gb_per_s: median(&best.gb_per_s), how: best.how.clone(), tried })
    }
}

/// One limit of the machine.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    /// The name by which results refer to it.
    pub(crate) name: &'static str,
    /// The rate, or why there is none.
    pub(crate) rate: Result<Rate, String>,
}

impl Limit {
    pub(crate) fn known(name: &'static str, gb_per_s: f64, how: impl Into<String>) -> Self {
        Self { name, rate: Ok(Rate::new(gb_per_s, how)) }
    }

    /// Measures one pass more in each shape. Gives the number of the pass.
    fn again(&mut self, bytes: u64, pass: &mut Pass<'_>) -> Result<Option<usize>> {
        let Ok(rate) = &mut self.rate else { return Ok(None) };
        if bytes == 0 || rate.tried.is_empty() {
            return Ok(None);
        }
        for tried in &mut rate.tried {
            let mut engine = engine(tried.shape.depth)?;
            tried.gb_per_s.push(best(1, bytes, || pass(&mut engine, tried.shape))?);
        }
        if let Some(best) = Rate::of_best(std::mem::take(&mut rate.tried)) {
            *rate = best;
        }
        Ok(rate.tried.first().map(|tried| tried.gb_per_s.len() - 1))
    }

    /// What a pass reached in the shape that is best of all passes.
    pub(crate) fn of_pass(&self, number: usize) -> Option<f64> {
        let rate = self.rate.as_ref().ok()?;
        rate.tried.first()?.gb_per_s.get(number).copied()
    }

    /// The limit as JSON.
    pub(crate) fn to_json(&self) -> Value {
        let (rate, how) = match &self.rate {
            Ok(rate) => (Some(rate.gb_per_s), &rate.how),
            Err(reason) => (None, reason),
        };
        json!({"name": self.name, "gb_per_s": rate, "how": how})
    }
}

/// How much is tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Runs of each measurement.
    pub(crate) repeat: u32,
    /// The depths and sizes of requests that are tried on the drive.
    pub(crate) shapes: &'static [Shape],
}

/// How many requests are in flight, and how large they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    depth: usize,
    chunk_bytes: usize,
}

const fn shape(depth: usize, chunk_bytes: usize) -> Shape {
    Shape { depth, chunk_bytes }
}

impl Shape {
    fn describe(self, engine: &dyn Engine) -> String {
        format!("{}, {} × {} KiB in flight", engine.name(), self.depth, self.chunk_bytes >> 10)
    }
}

impl Effort {
    /// Enough to compare with.
    pub(crate) const QUICK: Self = Self { repeat: 1, shapes: &[shape(8, 4 << 20), shape(32, 1 << 20), shape(16, 512 << 10)] };

    /// A search for the drive's best.
    pub(crate) const fn thorough(repeat: u32) -> Self {
        const SHAPES: &[Shape] = &[
            shape(32, 4 << 20),
            shape(8, 4 << 20),
            shape(32, 1 << 20),
            shape(8, 1 << 20),
            shape(16, 512 << 10),
            shape(8, 512 << 10),
            shape(64, 256 << 10),
        ];
        Self { repeat, shapes: SHAPES }
    }
}

/// The number of processors that this process may use.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Does the jobs at once, each on a thread of its own, one of them on the caller's; where the system refuses threads, one
/// after the other. Gives their results in any order.
pub(crate) fn at_once<T: Send, F: FnOnce() -> T + Send>(jobs: impl Iterator<Item = F>) -> Vec<T> {
    let jobs: Vec<F> = jobs.collect();
    let helpers = jobs.len().saturating_sub(1);
    let left = Mutex::new(jobs);
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let work = || std::iter::from_fn(|| next().map(|job| job())).collect::<Vec<T>>();
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (0..helpers).map_while(|_| std::thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mut done = work();
        for helper in helpers {
            done.extend(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    })
}

/// A number of bytes as an index; saturating, so that what does not fit is refused by whoever allocates.
pub(crate) fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Runs `once` so many times and gives the best rate. `once` gives its own seconds.
fn best(repeat: u32, bytes: u64, mut once: impl FnMut() -> Result<f64>) -> Result<f64> {
    let mut best = 0.0_f64;
    for _ in 0..repeat {
        crate::stop::check()?;
        best = best.max(gb_per_s(bytes, once()?));
    }
    Ok(best)
}

/// The most memory that measuring with a model of `bytes` takes, the model itself included.
pub(crate) fn memory_needed(bytes: u64) -> u64 {
    let copies = 2 * COPY_BYTES_MIN.max(to_usize(bytes).min(COPY_BYTES_MAX)) as u64;
    bytes.max(copies).max(2 * bytes.min(CACHE_BYTES_MAX)).saturating_add(MEMORY_BESIDE)
}

pub(crate) fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Copies from memory to memory, with one thread and with all. Each byte copied counts once.
pub(crate) fn memory_copy(bytes: u64, repeat: u32) -> Result<Vec<Limit>> {
    let bytes = to_usize(bytes).clamp(COPY_BYTES_MIN, COPY_BYTES_MAX);
    let (mut from, mut to) = (HostBuffer::new(bytes)?, HostBuffer::new(bytes)?);
    fill(from.bytes_mut()?);
    to.bytes_mut()?.fill(1);
    let (from, to) = (from.bytes()?, to.bytes_mut()?);
    let mut copy = |threads: usize| {
        let stripe = bytes.div_ceil(threads);
        best(repeat.max(2), bytes as u64, || {
            timed(|| {
                at_once(to.chunks_mut(stripe).zip(from.chunks(stripe)).map(|(to, from)| || to.copy_from_slice(from)));
                Ok(())
            })
        })
    };
    let threads = processors();
    Ok(vec![
        Limit::known(limit::COPY_ONE, copy(1)?, "memcpy, 1 thread"),
        Limit::known(limit::COPY_ALL, copy(threads)?, format!("memcpy, {}", counted(threads, "thread"))),
    ])
}

/// Reads a file that the page cache holds: with one thread and with all, into memory that was never touched (as a load
/// does) and into memory that was. The file is brought into the page cache first, all of it.
pub(crate) fn page_cache(path: &Path, repeat: u32) -> Result<Vec<Limit>> {
    let repeat = repeat.max(CACHE_RUNS_MIN);
    warm(path)?;
    let file = OsNamespace.open(path, Access::Read, Buffering::PageCache)?;
    let bytes = file.identity()?.length.min(CACHE_BYTES_MAX);
    let mut warm = HostBuffer::new(to_usize(bytes))?;
    warm.bytes_mut()?.fill(1);
    let mut limits = Vec::new();
    let names =
        [(limit::CACHE_ONE_FRESH, limit::CACHE_ONE_WARM, 1), (limit::CACHE_ALL_FRESH, limit::CACHE_ALL_WARM, processors())];
    for (fresh_name, warm_name, threads) in names {
        let how = format!("pread of {} MiB, {}", PLAIN_BYTES >> 20, counted(threads, "thread"));
        let rate = best(repeat, bytes, || {
            let mut fresh = HostBuffer::new(to_usize(bytes))?;
            timed(|| read_striped(&*file, fresh.bytes_mut()?, threads))
        })?;
        limits.push(Limit::known(fresh_name, rate, how.clone()));
        let rate = best(repeat, bytes, || timed(|| read_striped(&*file, warm.bytes_mut()?, threads)))?;
        limits.push(Limit::known(warm_name, rate, how));
    }
    let threads = processors();
    let how = format!("pread of {} MiB into {}", PLAIN_BYTES >> 20, counted(threads, "buffer"));
    let rate = best(repeat, bytes, || timed(|| read_and_forget(&*file, &mut warm, bytes, threads)))?;
    limits.push(Limit::known(limit::CACHE_ALL_SMALL, rate, how));
    Ok(limits)
}

/// Reads the first `bytes` of the file, each thread its own stripe, over and over into the same piece of `target`.
fn read_and_forget(file: &dyn File, target: &mut HostBuffer, bytes: u64, threads: usize) -> Result<()> {
    let stripe = bytes.div_ceil(threads as u64).next_multiple_of(PLAIN_BYTES as u64);
    let pieces = target.bytes_mut()?.chunks_mut(PLAIN_BYTES);
    let starts = (0..bytes).step_by(to_usize(stripe));
    let readers = std::iter::zip(starts, pieces).map(|(start, piece)| {
        move || {
            let end = (start + stripe).min(bytes);
            (start..end).step_by(PLAIN_BYTES).try_for_each(|offset| read_plainly(file, piece, offset))
        }
    });
    at_once(readers).into_iter().collect()
}

/// Fills `target` from the file's start, each thread its own stripe.
fn read_striped(file: &dyn File, target: &mut [u8], threads: usize) -> Result<()> {
    let stripe = target.len().div_ceil(threads).max(1);
    let stripes = target.chunks_mut(stripe).enumerate();
    at_once(stripes.map(|(number, target)| move || read_plainly(file, target, (number * stripe) as u64))).into_iter().collect()
}

/// Call after call, as `dd` does it. Stops at the end of the file.
fn read_plainly(file: &dyn File, target: &mut [u8], mut offset: u64) -> Result<()> {
    for piece in target.chunks_mut(PLAIN_BYTES) {
        let mut done = 0;
        while done < piece.len() {
            match file.read_at(&mut piece[done..], offset) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    done += count;
                    offset += count as u64;
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::from_io("cannot read the scratch file", error).with("offset", offset)),
            }
        }
    }
    Ok(())
}

/// What the drive gives past the page cache: the best over several shapes of requests, and what a plain single thread
/// gets. Uses a scratch file of `bytes` at `path`, which it leaves there.
///
/// Writes count until they are synced, and go into fresh files whose blocks were reserved before: what a save does. Going
/// over blocks that a file already has costs the filesystem less; that figure stands beside it and is no limit of a save.
pub(crate) fn drive(path: &Path, bytes: u64, effort: Effort) -> Result<Vec<Limit>> {
    let bytes = whole_requests(bytes.clamp(PLAIN_BYTES as u64, DRIVE_BYTES_MAX));
    OsNamespace.create(path, None)?.allocate(bytes)?;
    let names = [limit::WRITE, limit::REWRITE, limit::WRITE_PLAINLY, limit::READ, limit::READ_PLAINLY];
    if let Err(reason) = direct_file(path, Access::Write) {
        return Ok(names.map(|name| Limit { name, rate: Err(reason.clone()) }).into());
    }
    let fresh = best_shape(bytes, effort, &mut |engine, shape| fresh_pass(engine, path, bytes, shape));
    let file = match direct_file(path, Access::Write) {
        Ok(file) => file,
        Err(reason) => return Err(Error::new(ErrorKind::Io, reason).with_file(path)),
    };
    let shape = fresh.as_ref().ok().and_then(|rate| Some(rate.tried.first()?.shape)).unwrap_or(effort.shapes[0]);
    let rewrite = tried(bytes, effort.repeat, shape, &mut |engine, shape| pass(engine, &file, bytes, Direction::Write, shape));
    let rewrite = rewrite.and_then(|tried| Rate::of_best(vec![tried]).ok_or_else(nothing_tried));
    let plainly = |direction| {
        let rate = best(effort.repeat.min(PLAIN_RUNS_MAX), bytes, || timed(|| plain_pass(&*file, bytes, direction)));
        let where_to = if direction == Direction::Write { ", over existing blocks" } else { "" };
        let how = format!("1 thread, {} MiB{where_to}", PLAIN_BYTES >> 20);
        told(rate.map(|gb_per_s| Rate::new(gb_per_s, how)))
    };
    let write_plainly = plainly(Direction::Write);
    let read = best_shape(bytes, effort, &mut |engine, shape| pass(engine, &file, bytes, Direction::Read, shape));
    let read_plainly = plainly(Direction::Read);
    crate::stop::check()?;
    let rates = [fresh, rewrite, write_plainly, read.map(|best| faster(best, &read_plainly)), read_plainly];
    Ok(std::iter::zip(names, rates).map(|(name, rate)| Limit { name, rate }).collect())
}

/// The best of a drive is the best of all that was tried, one request at a time included.
fn faster(best: Rate, plain: &Result<Rate, String>) -> Rate {
    match plain {
        Ok(plain) if plain.gb_per_s > best.gb_per_s => plain.clone(),
        _ => best,
    }
}

/// Reads a file once more past the page cache, in the shapes that were best: so that a limit and what is held against it are
/// measured at the same time, on the same blocks. Gives the number of the pass, by which [`Limit::of_pass`] knows it.
pub(crate) fn read_again(limit: &mut Limit, path: &Path) -> Result<Option<usize>> {
    let bytes = whole_requests(OsNamespace.metadata(path)?.length);
    let Ok(file) = direct_file(path, Access::Read) else { return Ok(None) };
    limit.again(bytes, &mut |engine, shape| pass(engine, &file, bytes, Direction::Read, shape))
}

/// As [`read_again`], writing a fresh file of `bytes` at `path`, which is removed.
pub(crate) fn write_again(limit: &mut Limit, path: &Path, bytes: u64) -> Result<Option<usize>> {
    let bytes = whole_requests(bytes);
    OsNamespace.create(path, None)?;
    let number = limit.again(bytes, &mut |engine, shape| fresh_pass(engine, path, bytes, shape));
    OsNamespace.remove(path)?;
    number
}

/// So many bytes as whole requests of every shape make up.
fn whole_requests(bytes: u64) -> u64 {
    bytes / PLAIN_BYTES as u64 * PLAIN_BYTES as u64
}

/// Replaces the file at `path` by one whose blocks are only just reserved, and fills it. Gives the seconds of the latter.
fn fresh_pass(engine: &mut dyn Engine, path: &Path, bytes: u64, shape: Shape) -> Result<f64> {
    OsNamespace.remove(path)?;
    OsNamespace.create(path, None)?.allocate(bytes)?;
    let file = OsNamespace.open(path, Access::Write, Buffering::Direct)?;
    pass(engine, &file, bytes, Direction::Write, shape)
}

/// The file opened past the page cache, or why that cannot be.
fn direct_file(path: &Path, access: Access) -> Result<Arc<dyn File>, String> {
    let file = told(OsNamespace.open(path, access, Buffering::Direct))?;
    match file.direct_rules() {
        Some(rules) if rules.offset.bytes() <= 64 << 10 => Ok(file),
        _ => Err("the filesystem refuses O_DIRECT".to_owned()),
    }
}

/// A limit that cannot be measured is no failure of the whole: the reason stands in its place.
fn told<T>(result: Result<T>) -> Result<T, String> {
    result.map_err(|error| crate::escape::safe(&error.to_string()))
}

fn plain_pass(file: &dyn File, bytes: u64, direction: Direction) -> Result<()> {
    let mut buffer = HostBuffer::new(PLAIN_BYTES)?;
    let buffer = buffer.bytes_mut()?;
    fill(buffer);
    for offset in (0..bytes).step_by(PLAIN_BYTES) {
        match direction {
            Direction::Read => read_plainly(file, buffer, offset)?,
            Direction::Write => {
                let count = file.write_at(buffer, offset).map_err(|error| Error::from_io("cannot write", error))?;
                if count != buffer.len() {
                    return Err(Error::new(ErrorKind::Io, "a plain write was cut short"));
                }
            }
        }
    }
    if direction == Direction::Write { file.sync() } else { Ok(()) }
}

/// One pass of requests of a shape; gives its seconds.
type Pass<'a> = dyn FnMut(&mut dyn Engine, Shape) -> Result<f64> + 'a;

/// The best rate of all shapes. Each is tried once, and the best of them as often as the effort says.
fn best_shape(bytes: u64, effort: Effort, pass: &mut Pass<'_>) -> Result<Rate, String> {
    /// So many are not told apart by one pass on a drive whose rate varies.
    const SHAPES_KEPT: usize = 3;
    let mut found = Vec::new();
    for shape in effort.shapes {
        found.push(tried(bytes, 1, *shape, pass)?);
    }
    let mut found = Rate::of_best(found).ok_or_else(nothing_tried)?.tried;
    found.truncate(SHAPES_KEPT);
    for one in &mut found {
        one.gb_per_s.extend(tried(bytes, effort.repeat - 1, one.shape, pass)?.gb_per_s);
    }
    Rate::of_best(found).ok_or_else(nothing_tried)
}

fn nothing_tried() -> String {
    "no shape of requests was tried".to_owned()
}

fn tried(bytes: u64, passes: u32, shape: Shape, pass: &mut Pass<'_>) -> Result<Tried, String> {
    let mut engine = told(engine(shape.depth))?;
    let rates: Result<Vec<f64>> = (0..passes).map(|_| best(1, bytes, || pass(&mut engine, shape))).collect();
    Ok(Tried { shape, how: shape.describe(&engine), gb_per_s: told(rates)? })
}

/// io_uring, or threads where the kernel does not allow it.
fn engine(depth: usize) -> Result<Exact<Box<dyn Engine>>> {
    let engine: Box<dyn Engine> = match Uring::new(u32::try_from(depth).unwrap_or(u32::MAX)) {
        Ok(uring) => Box::new(uring),
        Err(_) => Box::new(Posix::new(depth)),
    };
    Ok(Exact::new(engine))
}

/// Moves `bytes` between the file and a few buffers, always with as many requests in flight as the shape says. Gives
/// the seconds.
fn pass(engine: &mut dyn Engine, file: &Arc<dyn File>, bytes: u64, direction: Direction, shape: Shape) -> Result<f64> {
    let mut buffer = HostBuffer::new(shape.depth * shape.chunk_bytes)?;
    fill(buffer.bytes_mut()?);
    timed(|| {
        let chunk = shape.chunk_bytes as u64;
        let mut offsets = (0..bytes / chunk).map(|number| number * chunk);
        let mut free: Vec<usize> = (0..shape.depth).collect();
        let mut done: Vec<Completion> = Vec::new();
        loop {
            while let Some(slot) = free.pop() {
                let Some(offset) = offsets.next() else { break };
                let range = slot * shape.chunk_bytes..(slot + 1) * shape.chunk_bytes;
                let region = if direction == Direction::Read { buffer.region(range)? } else { buffer.source(range)? };
                let file = Arc::clone(file);
                let segments = vec![region];
                let request =
                    Request { token: slot, direction, file, offset, segments, needed: chunk, alignment: Alignment::PAGE };
                engine.submit(request).map_err(|_| Error::new(ErrorKind::Io, "the engine takes fewer requests than it says"))?;
            }
            if engine.in_flight() == 0 {
                break;
            }
            engine.complete(&mut done, Wait::ForOne)?;
            for Completion { request, result } in done.drain(..) {
                result.map_err(|error| Error::from_io("the drive failed", error).with("offset", request.offset))?;
                free.push(request.token);
            }
        }
        if direction == Direction::Write { file.sync() } else { Ok(()) }
    })
}

/// Makes the page cache forget a file. `Err` says why it still holds some of it.
///
/// # Errors
/// Whatever the filesystem reports.
pub(crate) fn chill(path: &Path) -> Result<Result<(), &'static str>> {
    let file = OsNamespace.open(path, Access::Read, Buffering::PageCache)?;
    // Another process's reads or the kernel's own batches may keep a page for a moment.
    let mut left = drop_from_page_cache(&*file)?;
    for _ in 0..3 {
        if left == Residency::None {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        left = drop_from_page_cache(&*file)?;
    }
    Ok(match left {
        Residency::None => Ok(()),
        Residency::All => Err("the page cache keeps the file (a filesystem in memory, or a lock on its pages)"),
        Residency::Some => Err("the page cache keeps some of the file"),
        Residency::Unknown => Err("the kernel does not tell what the page cache holds"),
    })
}

/// Brings a file into the page cache, all of it if there is room.
///
/// # Errors
/// Whatever the filesystem reports.
pub(crate) fn warm(path: &Path) -> Result<()> {
    let file = OsNamespace.open(path, Access::Read, Buffering::PageCache)?;
    let length = file.identity()?.length;
    let mut buffer = HostBuffer::new(PLAIN_BYTES)?;
    for offset in (0..length).step_by(PLAIN_BYTES) {
        read_plainly(&*file, buffer.bytes_mut()?, offset)?;
    }
    Ok(())
}

/// The middle of some figures; of an even number the lower of the two.
pub(crate) fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_figures() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.0);
        assert_eq!(median(&[]), 0.0);
    }
}
