//! A save under way: copies into the pool first, then files, then the commit, on a thread of its own. Whoever has the handle sees how far
//! it is, and what became of it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Checkpoints;
use super::commit::{CheckpointOptions, Saved};
use super::plan::Plan;
use super::staging::{Filling, Marks, Staging, placed};
use super::tally::Tally;
use crate::base::{Error, ErrorKind, Extent, Result, parallel};
use crate::cuda::{CallerStream, Event, Gpu};
use crate::model::Writer;
use crate::transfer::{Batch, Move, Receipt, TransferOptions, Witness, run_batches};

/// How far a save is. Each level holds what those before it do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The copies into the pool are queued, or will be as it empties.
    Queued,
    /// Every byte lies in the pool: the tensors may change. A crash of the process loses the checkpoint.
    Staged,
    /// Every byte of every tensor is in the files. Nothing is committed.
    Written,
    /// The checkpoint is committed: it survives a power cut.
    Durable,
}

/// A save under way.
#[derive(Debug)]
pub(super) struct Flight {
    step: u64,
    begun: Instant,
    gpu: Option<Arc<Gpu>>,
    status: Mutex<Status>,
    changed: Condvar,
}

#[derive(Debug)]
struct Status {
    level: Level,
    /// Whether the copies of everything are queued, so that the marks are set.
    queued: bool,
    marks: Marks,
    staged_after: Option<Duration>,
    /// What became of it, once it has ended.
    ended: Option<Result<()>>,
    /// The checkpoint, until somebody asks for it.
    saved: Option<Saved>,
    /// Whether somebody has heard of the failure.
    told: bool,
}

/// What the thread of a save works with.
pub(super) struct Work {
    pub(super) checkpoints: Checkpoints,
    pub(super) plan: Plan,
    pub(super) options: CheckpointOptions,
    pub(super) staging: Staging,
    /// Blocks whose copies are queued, window by window.
    pub(super) ready: VecDeque<Vec<Filling>>,
}

impl Flight {
    pub(super) fn new(step: u64, gpu: Option<Arc<Gpu>>, begun: Instant) -> Arc<Self> {
        let status = Status {
            level: Level::Queued,
            queued: false,
            marks: Marks::default(),
            staged_after: None,
            ended: None,
            saved: None,
            told: false,
        };
        Arc::new(Self { step, begun, gpu, status: Mutex::new(status), changed: Condvar::new() })
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, done: impl Fn(&Status) -> bool) -> MutexGuard<'_, Status> {
        self.changed.wait_while(self.status(), |status| !done(status)).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn level(&self) -> Level {
        self.status().level
    }

    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Says that the copies of everything are queued.
    pub(super) fn set_queued(&self, marks: Marks) {
        let mut status = self.status();
        (status.queued, status.marks) = (true, marks);
        drop(status);
        self.changed.notify_all();
    }

    /// Waits until they are, or the save has failed.
    pub(super) fn wait_queued(&self) {
        drop(self.wait_until(|status| status.queued || status.ended.is_some()));
    }

    fn reach(&self, level: Level) {
        let mut status = self.status();
        if level >= Level::Staged && status.staged_after.is_none() {
            status.staged_after = Some(self.begun.elapsed());
        }
        status.level = level.max(status.level);
        drop(status);
        self.changed.notify_all();
    }

    /// Lets a stream wait for the copies: of everything, or of what is not guarded. They are queued when this is called, or the save has
    /// ended, and then nothing is left to wait for.
    pub(super) fn hold(&self, stream: CallerStream, only_unguarded: bool) -> Result<()> {
        let status = self.status();
        let first = status.marks.first.as_ref().filter(|_| only_unguarded);
        match (first.or(status.marks.all.as_ref()), &self.gpu) {
            (Some(mark), Some(gpu)) if status.level < Level::Staged && status.ended.is_none() => hold_until(stream, gpu, mark),
            _ => Ok(()),
        }
    }

    /// Waits until it has ended, so long at most; whether it has.
    pub(super) fn wait_ended(&self, at_most: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.status(), at_most, |status| status.ended.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.ended.is_some()
    }

    /// The failure of a save that has ended, if nobody has heard of it.
    pub(super) fn untold_failure(&self) -> Option<Error> {
        let mut status = self.status();
        if std::mem::replace(&mut status.told, true) {
            return None;
        }
        status.ended.as_ref()?.as_ref().err().map(|error| error.copied().with("step", self.step))
    }

    /// Carries the save out.
    pub(super) fn run(&self, work: Work) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.carry_out(work)));
        let outcome = outcome.unwrap_or_else(|_| Err(Error::new(ErrorKind::Io, "the thread that saved a checkpoint panicked")));
        let mut status = self.status();
        match outcome {
            Ok(saved) => {
                (status.level, status.saved, status.ended) = (Level::Durable, Some(saved), Some(Ok(())));
            }
            Err(error) => status.ended = Some(Err(error)),
        }
        drop(status);
        self.changed.notify_all();
    }

    fn carry_out(&self, work: Work) -> Result<Saved> {
        let Work { checkpoints, plan, options, staging, ready } = work;
        let _current = self.gpu.as_ref().map(|gpu| gpu.current()).transpose()?;
        let places = placed(&plan);
        // Dropped before anybody hears of a failure: then no copy is under way any more.
        checkpoints.commit(plan, &options, |writer, chunk_bytes, transfer| {
            let mut places: Vec<(usize, usize, Extent)> = (0..)
                .zip(&places)
                .flat_map(|(file, placed)| placed.iter().map(move |placed| (placed.tensor, file, placed.extent)))
                .collect();
            places.sort_unstable_by_key(|(tensor, _, _)| *tensor);
            let place = |(_, file, extent): &(usize, usize, Extent)| (writer.path(*file).to_owned(), *extent);
            let tally = Tally::new(chunk_bytes, places.iter().map(place));
            let receipt = self.write(&checkpoints, staging, ready, writer, &tally, transfer)?;
            self.reach(Level::Written);
            Ok((receipt, (0..places.len()).map(|tensor| tally.sums(tensor)).collect()))
        })
    }

    /// Writes block after block as it fills, and window after window.
    fn write(
        &self,
        checkpoints: &Checkpoints,
        staging: Staging,
        mut ready: VecDeque<Vec<Filling>>,
        writer: &Writer,
        tally: &Tally,
        transfer: &TransferOptions,
    ) -> Result<Receipt> {
        let staging = RefCell::new(staging);
        let mut receipt = Receipt::default();
        while let Some(window) = ready.pop_front() {
            let mut batches: Vec<Batch<'_>> = Vec::new();
            for Filling { stretches, block, mut fence, is_last } in window {
                let staging = &staging;
                batches.push(Box::new(move || {
                    staging.borrow_mut().wait(&mut fence)?;
                    if is_last {
                        self.reach(Level::Staged);
                    }
                    let mut moves: Vec<Move> = Vec::new();
                    for stretch in &stretches {
                        let item = writer.stretch(stretch.file, stretch.extent, block.source(stretch.range())?);
                        sum(tally, &item)?;
                        moves.push(item);
                    }
                    Ok(moves)
                }));
            }
            let before = receipt.bytes;
            let progress = transfer
                .progress
                .clone()
                .map(|progress| -> crate::transfer::Progress { Arc::new(move |bytes| progress(before + bytes)) });
            let options = TransferOptions { progress, ..transfer.clone() };
            receipt.merge(run_batches(&checkpoints.context, batches, &options)?);
            let mut staging = staging.borrow_mut();
            if !staging.is_queued() {
                let mut marks = Marks::default();
                ready.push_back(staging.queue(&mut marks)?);
                if staging.is_queued() {
                    self.set_queued(marks);
                }
            }
        }
        self.reach(Level::Staged);
        Ok(receipt)
    }
}

fn hold_until(stream: CallerStream, gpu: &Arc<Gpu>, mark: &Event) -> Result<()> {
    stream.hold_until(gpu, mark).map_err(|error| {
        error.with_hint("wait for the save to be staged (`wait_for`) before the tensors change: the stream could not be held")
    })
}

/// Sums what is about to be written, on a few processors: one might be slower than several drives.
fn sum(tally: &Tally, item: &Move) -> Result<()> {
    /// Below this a thread costs more than it saves.
    const PIECE_BYTES: usize = 4 << 20;
    const THREADS_MAX: usize = 4;
    let bytes = item.region.host_bytes()?;
    let pieces: Vec<&[u8]> = bytes.chunks(PIECE_BYTES).collect();
    parallel::each(pieces.len(), parallel::processors().min(THREADS_MAX), |at| {
        tally.passed(&item.file.path, item.extent.offset + (at * PIECE_BYTES) as u64, pieces[at]);
    });
    Ok(())
}

/// A save under way, as its caller has it. Dropping it changes nothing: the save goes on, and its failure is told to the next.
#[derive(Debug)]
pub struct Saving(pub(super) Arc<Flight>);

impl Saving {
    /// The step.
    pub fn step(&self) -> u64 {
        self.0.step
    }

    /// How far it is, or was when it failed.
    pub fn level(&self) -> Level {
        self.0.level()
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.0.status().ended.is_some()
    }

    /// Seconds from the call that began it until every byte lay in the pool; `None` before. A stream that was held, was held for no
    /// longer.
    pub fn staged_seconds(&self) -> Option<f64> {
        self.0.status().staged_after.map(|after| after.as_secs_f64())
    }

    /// Lets a stream wait, on the GPU, until the tensors are copied: for what comes next in it changes guarded ones. With a pool
    /// smaller than the state this waits on the processor until the last copies are queued.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails; then the stream is not held.
    pub fn hold(&self, stream: CallerStream) -> Result<()> {
        self.0.wait_queued();
        self.0.hold(stream, false)
    }

    /// Waits on the processor until it has reached a level.
    ///
    /// # Errors
    /// The failure of the save, if it came first.
    pub fn wait_for(&self, level: Level) -> Result<()> {
        while !self.wait_within(level, Duration::MAX)? {}
        Ok(())
    }

    /// The same, so long at most; whether it has.
    ///
    /// # Errors
    /// As [`wait_for`](Self::wait_for).
    pub fn wait_within(&self, level: Level, at_most: Duration) -> Result<bool> {
        let waiting = |status: &mut Status| status.level < level && status.ended.is_none();
        let waited = self.0.changed.wait_timeout_while(self.0.status(), at_most, waiting);
        let mut status = waited.unwrap_or_else(PoisonError::into_inner).0;
        if status.level >= level {
            return Ok(true);
        }
        match &status.ended {
            Some(Err(error)) => {
                let error = error.copied();
                status.told = true;
                Err(error)
            }
            _ => Ok(false),
        }
    }

    /// Waits until the checkpoint is committed.
    ///
    /// # Errors
    /// The failure of the save, as [`Checkpoints::save`] would give it.
    pub fn wait(self) -> Result<Saved> {
        self.take()
    }

    /// The same for whoever shares the handle: what the save did is given once.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), and [`InvalidInput`](ErrorKind::InvalidInput) for the second who asks.
    pub fn take(&self) -> Result<Saved> {
        self.wait_for(Level::Durable)?;
        self.0
            .status()
            .saved
            .take()
            .ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the save was asked for its result before"))
    }
}
