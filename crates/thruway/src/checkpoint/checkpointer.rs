//! Saving beside training: one save at a time goes on in the background, from a pool of host memory.
//!
//! [`save_async`](Checkpointer::save_async) queues the copies of the tensors into the pool, behind what the caller's stream has queued, and
//! returns; what the caller's stream is given next waits for them, on the GPU. So whatever the caller does next, what is saved are the
//! bytes of this moment.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::commit::{CheckpointOptions, Group, Saved};
use super::flight::{Flight, Level, Saving, Work};
use super::manifest::Json;
use super::plan::Plan;
use super::retention::Retention;
use super::staging::{Marks, Staging, Tensor};
use super::stale::Previous;
use super::{Checkpoints, Forecast, RestoreOptions, Restored};
use crate::base::{ByteSize, Error, ErrorKind, Result};
use crate::memory::{CopyStreams, HostSlabs, PinnedSlabs, StagingPool};
use crate::storage::available_host_bytes;

/// How long a save waits for the one before it, unless told otherwise: storage that takes longer is stuck.
const LAG_MAX: Duration = Duration::from_secs(1800);

/// Settings of a checkpointer.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointerOptions {
    retention: Retention,
    pool: Option<ByteSize>,
    lag: Duration,
}

impl Default for CheckpointerOptions {
    fn default() -> Self {
        Self { retention: Retention::default(), pool: None, lag: LAG_MAX }
    }
}

impl CheckpointerOptions {
    /// Which checkpoints stay.
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = retention;
        self
    }

    /// How much host memory saves beside training may take; pinned when the checkpointer is made, for a GPU's tensors. Less than the
    /// state works too: the rest is copied as what came before is written. Without this the first such save takes as much as its state has.
    #[must_use]
    pub fn pool(mut self, bytes: ByteSize) -> Self {
        self.pool = Some(bytes);
        self
    }

    /// How long a save waits for one that is still under way before it is refused. With nothing it is refused at once.
    #[must_use]
    pub fn lag(mut self, at_most: Duration) -> Self {
        self.lag = at_most;
        self
    }
}

/// For how long the caller's stream waits for the copies.
pub enum Hold<'a> {
    /// What it is given next waits for all of them.
    Now,
    /// It waits for those of tensors of which this (of a group's name and a tensor's) is false. Before guarded ones change, the caller
    /// calls [`Saving::hold`], or waits for [`Level::Staged`].
    Later(&'a dyn Fn(&str, &str) -> bool),
}

impl std::fmt::Debug for Hold<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Now) { "Now" } else { "Later" })
    }
}

/// The checkpoints of a training run, saved beside it. Dropping it waits for the save under way.
#[derive(Debug)]
pub struct Checkpointer {
    checkpoints: Checkpoints,
    options: CheckpointerOptions,
    streams: Option<Arc<CopyStreams>>,
    turn: Mutex<Turn>,
    previous: Previous,
}

/// What one save at a time has.
#[derive(Debug, Default)]
struct Turn {
    pool: Option<Arc<StagingPool>>,
    under_way: Option<(Arc<Flight>, JoinHandle<()>)>,
}

impl Checkpointer {
    /// The checkpoints of a directory, with a pool of the options' size, if they state one.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) or [`LimitReached`](ErrorKind::LimitReached) if so much cannot be had or pinned.
    pub fn new(checkpoints: Checkpoints, options: CheckpointerOptions) -> Result<Self> {
        // Copies of its own streams: a load's would wait behind gigabytes.
        let streams = checkpoints.context.streams.as_ref().map(|streams| CopyStreams::new(streams.gpu())).transpose()?;
        let checkpointer = Self { checkpoints, options, streams, turn: Mutex::default(), previous: Previous::default() };
        if let Some(bytes) = options.pool {
            let pool = checkpointer.make_pool(bytes.bytes())?;
            checkpointer.turn().pool = Some(pool);
        }
        Ok(checkpointer)
    }

    /// The directory's checkpoints, to be listed, opened and verified.
    pub fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// What a save would write and how long it is likely to take, as [`Checkpoints::preflight`] does.
    ///
    /// # Errors
    /// As there.
    pub fn preflight(&self, groups: &[Group], structure: &Json, options: &CheckpointOptions) -> Result<Forecast> {
        self.checkpoints.preflight(groups, structure, options)
    }

    /// Restores, as [`Checkpoints::restore`] does, when no save is under way.
    ///
    /// # Errors
    /// As there, and as [`wait`](Self::wait).
    pub fn restore(&self, options: &RestoreOptions) -> Result<Restored> {
        self.wait()?;
        self.checkpoints.restore(options)
    }

    /// Saves, as [`Checkpoints::save`] does, when no other save is under way: it is durable when this returns.
    ///
    /// # Errors
    /// As there; the failure of an earlier save that nobody has heard of; [`LimitReached`](ErrorKind::LimitReached) if an earlier
    /// save is still under way after the longest lag.
    pub fn save(&self, step: u64, groups: &[Group], structure: &Json, options: CheckpointOptions) -> Result<Saved> {
        let mut turn = self.turn();
        self.settle(&mut turn)?;
        self.checkpoints.save(step, groups, structure, self.own(options))
    }

    /// Begins a save that goes on in the background. The tensors are copied as what is in the stream of the options
    /// ([`after`](CheckpointOptions::after)) by now leaves them. Those in host memory are copied when this returns; those on the GPU are
    /// copied there, and the stream waits as `hold` says. Without a stream the caller waits for [`Level::Staged`]
    /// before a GPU's tensors change.
    ///
    /// With a pool smaller than the state this returns when the last copies are queued, unless all that is left is guarded.
    ///
    /// # Errors
    /// As [`save`](Self::save), as far as it can be told at once; then nothing is under way. What fails later is told by the handle, and
    /// by the next save if nobody has asked the handle.
    pub fn save_async(
        &self,
        step: u64,
        groups: &[Group],
        structure: &Json,
        options: CheckpointOptions,
        hold: &Hold<'_>,
    ) -> Result<Saving> {
        let mut turn = self.turn();
        self.settle(&mut turn)?;
        let begun = Instant::now();
        self.checkpoints.ensure_reachable(groups)?;
        let mut options = self.own(options);
        let stream = options.transfer.after.take();
        let plan = Plan::new(step, groups, structure, &options)?;
        let pool = match &turn.pool {
            Some(pool) => Arc::clone(pool),
            None => Arc::clone(turn.pool.insert(self.make_pool(Staging::bytes(&plan))?)),
        };
        let gpu = self.streams.as_ref().map(|streams| Arc::clone(streams.gpu()));
        let _current = gpu.as_ref().map(|gpu| gpu.current()).transpose()?;
        let mut staging = Staging::new(&plan, tensors(groups, hold), pool, self.streams.clone());
        if let (Some(stream), Some(streams)) = (stream, &self.streams) {
            staging.begin_after(stream, streams)?;
        }
        let (mut ready, mut marks) = (VecDeque::new(), Marks::default());
        while !staging.is_queued() && ready.len() < 2 {
            ready.push_back(staging.queue(&mut marks)?);
        }
        let flight = Flight::new(step, gpu.clone(), begun);
        let wait = !staging.is_queued() && (matches!(hold, Hold::Now) || staging.leaves_unguarded());
        if staging.is_queued() {
            flight.set_queued(marks);
        }
        let work = Work { checkpoints: self.checkpoints.clone(), plan, options, staging, ready };
        let its_flight = Arc::clone(&flight);
        let thread = std::thread::Builder::new()
            .name("thruway-checkpoint".to_owned())
            .spawn(move || its_flight.run(work))
            .map_err(|error| Error::from_io("cannot start the thread that saves", error))?;
        turn.under_way = Some((Arc::clone(&flight), thread));
        drop(turn);
        if wait {
            flight.wait_queued();
        }
        if let Some(stream) = stream {
            let saving = Saving(Arc::clone(&flight));
            if let Err(error) = flight.hold(stream, matches!(hold, Hold::Later(_))) {
                // The caller is about to change what it believes to be copied.
                saving.wait_for(Level::Staged)?;
                return Err(error.with("under_way", format_args!("the save of step {step} goes on")));
            }
        }
        Ok(Saving(flight))
    }

    /// Waits so long at most for the save under way, if there is one; whether none is left. Its failure is for [`wait`](Self::wait), or
    /// for the next save, to tell.
    pub fn wait_within(&self, at_most: Duration) -> bool {
        let flight = self.turn().under_way.as_ref().map(|(flight, _)| Arc::clone(flight));
        flight.is_none_or(|flight| flight.wait_ended(at_most))
    }

    /// How long a save waits for one that is under way.
    pub fn lag(&self) -> Duration {
        self.options.lag
    }

    /// Waits for the save under way, if there is one.
    ///
    /// # Errors
    /// Its failure, or that of an earlier one, if nobody has heard of it; [`LimitReached`](ErrorKind::LimitReached) if it is still
    /// under way after the longest lag.
    pub fn wait(&self) -> Result<()> {
        self.settle(&mut self.turn())
    }

    /// The options with what is the checkpointer's.
    fn own(&self, options: CheckpointOptions) -> CheckpointOptions {
        let mut options = options.retention(self.options.retention);
        options.previous = self.previous.clone();
        options
    }

    fn turn(&self) -> MutexGuard<'_, Turn> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make_pool(&self, bytes: u64) -> Result<Arc<StagingPool>> {
        // Linux gives memory that it does not have, and kills the trainer for it later.
        if let Some(available) = available_host_bytes().filter(|available| *available < bytes) {
            let message = format!("a pool of {} was asked for, and {} are available", ByteSize(bytes), ByteSize(available));
            return Err(Error::new(ErrorKind::OutOfMemory, message)
                .with_hint("give the checkpointer a smaller pool: it then works in windows"));
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let context = &self.checkpoints.context;
        let pool = match &context.streams {
            Some(streams) => StagingPool::new(&PinnedSlabs::new(Arc::clone(streams.gpu()), context.near.clone()), bytes),
            None => StagingPool::new(&HostSlabs, bytes),
        };
        pool.map(Arc::new).map_err(|error| error.with("pool", ByteSize(bytes as u64)))
    }

    /// Waits for the save under way, and tells its failure if nobody has.
    fn settle(&self, turn: &mut Turn) -> Result<()> {
        let Some((flight, thread)) = turn.under_way.take() else { return Ok(()) };
        if !flight.wait_ended(self.options.lag) {
            let message = format!("the save of step {} is still under way ({:?})", flight.step(), flight.level());
            turn.under_way = Some((flight, thread));
            return Err(Error::new(ErrorKind::LimitReached, message)
                .with_file(self.checkpoints.directory())
                .with("lag_seconds", self.options.lag.as_secs_f64())
                .with_hint("train on and try again later, save less often, or look at the storage: it may be stuck"));
        }
        // What it has to say stands in the flight.
        drop(thread.join());
        flight.untold_failure().map_or(Ok(()), Err)
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        let turn = self.turn.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, thread)) = turn.under_way.take() {
            // A failure has nobody left to be told to, but for the handle.
            drop(thread.join());
        }
    }
}

/// The tensors of all groups, in order, and which of them the caller guards.
fn tensors(groups: &[Group], hold: &Hold<'_>) -> Vec<Tensor> {
    let tensor = |group: &Group, source: &crate::model::Source| Tensor {
        region: source.region.clone(),
        guarded: match hold {
            Hold::Now => false,
            Hold::Later(guarded) => guarded(&group.name, &source.spec.name),
        },
    };
    groups.iter().flat_map(|group| group.tensors.iter().map(|source| tensor(group, source))).collect()
}
