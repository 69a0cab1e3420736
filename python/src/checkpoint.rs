//! Checkpoints of a training run: saved, beside training too, and opened.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use thruway::checkpoint::{
    CheckpointOptions, CheckpointerOptions, Group, Hold, Json, Level, Retention, SaveId, Saved, TensorRecord, VerifyOptions,
    World,
};
use thruway::cuda::CallerStream;
use thruway::{ByteSize, Cancel, Device, Error, ErrorKind, Session, Source};

use crate::error::{OrRaise, exception};
use crate::loading::{Loading, Origin, Wanted};
use crate::memory::Bytes;
use crate::ranks::Ranks;
use crate::receipt::Receipt;
use crate::save::{Spec, source};
use crate::{process, running};

/// A group of tensors: its name, its tensors, and text pairs for its files.
type Tensors = (String, Vec<(Spec, Bytes)>, BTreeMap<String, String>);

/// Group and name of a tensor.
type Name = (String, String);

/// What a save did: step, place, identity, receipt, the steps that were let go, and what went wrong around it.
type Told = (u64, PathBuf, String, Receipt, Vec<u64>, Vec<Py<PyAny>>);

/// Damage: the file, group and tensor if it is a tensor's, offset and length in the file.
type Damage = (String, Option<Name>, u64, u64);

/// How often signals are looked for while something is waited for.
const TICK: Duration = Duration::from_millis(50);

/// A directory of checkpoints, and the pool of those that are saved beside training.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct Checkpointer {
    inner: Option<Arc<thruway::checkpoint::Checkpointer>>,
    session: Session,
    process: u32,
}

/// What a save is given beside the tensors.
#[derive(FromPyObject)]
struct Order {
    #[pyo3(item)]
    step: u64,
    #[pyo3(item)]
    structure: String,
    #[pyo3(item)]
    metadata: BTreeMap<String, String>,
    #[pyo3(item)]
    replace: bool,
    #[pyo3(item)]
    max_shard_bytes: Option<u64>,
    #[pyo3(item)]
    trained: Vec<Name>,
    #[pyo3(item)]
    stream: Option<u64>,
    /// The ranks that save together, and the layout for the manifest.
    #[pyo3(item)]
    ranks: Option<(Py<Ranks>, String)>,
}

impl Order {
    fn options(&self, cancel: &Cancel) -> thruway::Result<CheckpointOptions> {
        let mut options = CheckpointOptions::default()
            .metadata(self.metadata.clone())
            .trained(self.trained.iter().cloned())
            .cancel(cancel.clone());
        if self.replace {
            options = options.replace();
        }
        if let Some(bytes) = self.max_shard_bytes {
            options = options.max_shard_size(ByteSize(bytes));
        }
        if let Some(stream) = self.stream {
            options = options.after(caller_stream(stream));
        }
        if let Some((ranks, layout)) = &self.ranks {
            let ranks = ranks.get().inner();
            options = options.world(World { ranks: ranks.count, layout: Json::new(layout)? }).ranks(ranks);
        }
        Ok(options)
    }
}

fn caller_stream(handle: u64) -> CallerStream {
    // SAFETY: the package passes the handle of torch's current stream on this GPU, which torch keeps for as long as the process
    // lives.
    unsafe { CallerStream::from_handle(handle) }
}

fn groups_of(session: &Session, groups: Vec<Tensors>) -> thruway::Result<Vec<Group>> {
    let group = |(name, tensors, metadata): Tensors| {
        let sources = tensors.into_iter().map(|(spec, bytes)| source(session, spec, bytes));
        Ok(Group { name, tensors: sources.collect::<thruway::Result<Vec<Source>>>()?, metadata })
    };
    groups.into_iter().map(group).collect()
}

impl Checkpointer {
    fn inner(&self, py: Python<'_>) -> PyResult<&Arc<thruway::checkpoint::Checkpointer>> {
        match &self.inner {
            Some(inner) if self.process == std::process::id() => Ok(inner),
            _ => Err(process::forked()).or_raise(py),
        }
    }

    /// Waits for the save under way, so that a signal ends the waiting.
    fn await_turn(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        let begun = Instant::now();
        while !py.detach(|| inner.wait_within(TICK)) {
            if process::is_closed() {
                return Err(process::ending()).or_raise(py);
            }
            py.check_signals()?;
            if begun.elapsed() >= inner.lag() {
                // The library has the words for it.
                break;
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Checkpointer {
    /// Touches nothing on storage yet. Pins the pool, if its size is given.
    #[new]
    #[pyo3(signature = (directory, *, device, keep, keep_every, pool_bytes, lag_seconds))]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        device: &str,
        keep: Option<usize>,
        keep_every: Option<u64>,
        pool_bytes: Option<u64>,
        lag_seconds: f64,
    ) -> PyResult<Self> {
        let _inside = process::enter(py)?;
        let device: Device = device.parse().or_raise(py)?;
        let lag = Duration::try_from_secs_f64(lag_seconds)
            .map_err(|_| Error::new(ErrorKind::InvalidInput, "the longest lag is no number of seconds"))
            .or_raise(py)?;
        let mut options = CheckpointerOptions::default().retention(Retention { keep, keep_every }).lag(lag);
        if let Some(bytes) = pool_bytes {
            options = options.pool(ByteSize(bytes));
        }
        let made = py.detach(|| {
            let session = process::session(device)?;
            let inner = session.checkpointer(directory, options)?;
            Ok((session, inner))
        });
        let (session, inner) = made.or_raise(py)?;
        Ok(Self { inner: Some(Arc::new(inner)), session, process: std::process::id() })
    }

    /// Saves, and is done when it is durable.
    fn save(&self, py: Python<'_>, groups: Vec<Tensors>, order: Order) -> PyResult<Told> {
        let _inside = process::enter(py)?;
        self.await_turn(py)?;
        let (inner, session, cancel) = (Arc::clone(self.inner(py)?), self.session.clone(), Cancel::default());
        let options = order.options(&cancel).or_raise(py)?;
        let work = move || {
            let groups = groups_of(&session, groups)?;
            inner.save(order.step, &groups, &Json::new(&order.structure)?, options)
        };
        let saved = running::run(py, &cancel, |_| Ok(()), work)?;
        Ok(told(py, saved))
    }

    /// Begins a save that goes on in the background. With `guarded` the stream waits for the copies of the other tensors alone.
    fn begin(&self, py: Python<'_>, groups: Vec<Tensors>, order: Order, guarded: Option<HashSet<Name>>) -> PyResult<Saving> {
        let _inside = process::enter(py)?;
        self.await_turn(py)?;
        let (inner, session, cancel) = (Arc::clone(self.inner(py)?), self.session.clone(), Cancel::default());
        let options = order.options(&cancel).or_raise(py)?;
        let work = move || {
            let groups = groups_of(&session, groups)?;
            let is_guarded = |group: &str, name: &str| {
                let name = (group.to_owned(), name.to_owned());
                guarded.as_ref().is_some_and(|guarded| guarded.contains(&name))
            };
            let hold = if guarded.is_some() { Hold::Later(&is_guarded) } else { Hold::Now };
            inner.save_async(order.step, &groups, &Json::new(&order.structure)?, options, &hold)
        };
        let saving = running::run(py, &cancel, |_| Ok(()), work)?;
        Ok(Saving { inner: saving, process: self.process })
    }

    /// Waits for the save under way. Raises its failure, if nobody has heard of it.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let _inside = process::enter(py)?;
        self.await_turn(py)?;
        let inner = self.inner(py)?;
        py.detach(|| inner.wait()).or_raise(py)
    }

    /// The committed steps, oldest first.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let _inside = process::enter(py)?;
        let inner = self.inner(py)?;
        py.detach(|| inner.checkpoints().steps()).or_raise(py)
    }

    /// Opens the checkpoint of a step for loads to `device`.
    fn open(&self, py: Python<'_>, step: u64, device: &str) -> PyResult<Checkpoint> {
        let _inside = process::enter(py)?;
        let inner = self.inner(py)?;
        let device: Device = device.parse().or_raise(py)?;
        let opened = py.detach(|| {
            let session = process::session(device)?;
            let checkpoint = session.checkpoints(inner.checkpoints().directory()).open(step)?;
            Ok((session, checkpoint))
        });
        let (session, checkpoint) = opened.or_raise(py)?;
        Ok(Checkpoint { checkpoint: Arc::new(checkpoint), session, process: self.process })
    }

    /// Reads every byte of the checkpoint of a step and holds it against its checksums: what is damaged.
    fn verify(&self, py: Python<'_>, step: u64) -> PyResult<Vec<Damage>> {
        let _inside = process::enter(py)?;
        let (inner, cancel) = (Arc::clone(self.inner(py)?), Cancel::default());
        let options = VerifyOptions::default().cancel(cancel.clone());
        let found = running::run(py, &cancel, |_| Ok(()), move || inner.checkpoints().verify(step, &options))?;
        let damage = |one: thruway::checkpoint::Damage| (one.file, one.tensor, one.extent.offset, one.extent.length);
        Ok(found.damage.into_iter().map(damage).collect())
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        if self.process != std::process::id() {
            // Its threads are the parent's.
            let _never_joined = std::mem::ManuallyDrop::new(inner);
            return;
        }
        // It waits for the save under way, whose thread lets go of what Python lent it.
        Python::try_attach(|py| match process::enter(py) {
            Ok(_inside) => py.detach(|| drop(inner)),
            // This thread would not come back to the interpreter. The save's does not need it.
            Err(_ending) => drop(inner),
        });
    }
}

fn told(py: Python<'_>, saved: Saved) -> Told {
    let warnings = saved.warnings.iter().map(|warning| exception(py, warning).into_value(py).into_any()).collect();
    (saved.step, saved.path, SaveId::to_string(&saved.save_id), Receipt::new(saved.receipt), saved.removed, warnings)
}

/// A save under way.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct Saving {
    inner: thruway::checkpoint::Saving,
    process: u32,
}

impl Saving {
    fn inner(&self, py: Python<'_>) -> PyResult<&thruway::checkpoint::Saving> {
        if self.process != std::process::id() {
            return Err(process::forked()).or_raise(py);
        }
        Ok(&self.inner)
    }

    fn wait_until(&self, py: Python<'_>, level: Level, seconds: Option<f64>) -> PyResult<bool> {
        let _inside = process::enter(py)?;
        let inner = self.inner(py)?;
        let until = seconds.map(|seconds| Instant::now() + Duration::try_from_secs_f64(seconds).unwrap_or_default());
        loop {
            if py.detach(|| inner.wait_within(level, TICK)).or_raise(py)? {
                return Ok(true);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
            if process::is_closed() {
                return Err(process::ending()).or_raise(py);
            }
            py.check_signals()?;
        }
    }
}

fn level_of(py: Python<'_>, name: &str) -> PyResult<Level> {
    let levels = [("queued", Level::Queued), ("staged", Level::Staged), ("written", Level::Written), ("durable", Level::Durable)];
    let found = levels.into_iter().find(|(known, _)| *known == name).map(|(_, level)| level);
    found.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a level is staged, written or durable")).or_raise(py)
}

#[pymethods]
impl Saving {
    /// How far it is: "queued", "staged", "written" or "durable".
    fn level(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.inner(py)?.level() {
            Level::Queued => "queued",
            Level::Staged => "staged",
            Level::Written => "written",
            Level::Durable => "durable",
        })
    }

    /// Whether it has ended, well or not.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.inner(py)?.is_done())
    }

    /// Seconds from its beginning until all was staged.
    fn staged_seconds(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        Ok(self.inner(py)?.staged_seconds())
    }

    /// Lets a stream wait for the copies.
    fn hold(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let _inside = process::enter(py)?;
        let inner = self.inner(py)?;
        let stream = caller_stream(stream);
        py.detach(|| inner.hold(stream)).or_raise(py)
    }

    /// Waits until it has reached a level, so many seconds at most; whether it has. Raises its failure.
    fn wait_for(&self, py: Python<'_>, level: &str, seconds: Option<f64>) -> PyResult<bool> {
        self.wait_until(py, level_of(py, level)?, seconds)
    }

    /// Waits until it is durable. What it did is given once.
    fn wait(&self, py: Python<'_>) -> PyResult<Told> {
        self.wait_until(py, Level::Durable, None)?;
        let inner = self.inner(py)?;
        let saved = py.detach(|| inner.take()).or_raise(py)?;
        Ok(told(py, saved))
    }
}

/// An opened checkpoint.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct Checkpoint {
    checkpoint: Arc<thruway::checkpoint::Checkpoint>,
    session: Session,
    process: u32,
}

#[pymethods]
impl Checkpoint {
    /// The step.
    #[getter]
    fn step(&self) -> u64 {
        self.checkpoint.step()
    }

    /// Where it lies.
    #[getter]
    fn path(&self) -> PathBuf {
        self.checkpoint.path().to_owned()
    }

    /// The caller's structure, as JSON.
    #[getter]
    fn structure(&self) -> &str {
        self.checkpoint.manifest().structure.text()
    }

    /// How many ranks saved together.
    #[getter]
    fn ranks(&self) -> u32 {
        self.checkpoint.manifest().world.ranks
    }

    /// How the state was spread over them, as JSON.
    #[getter]
    fn layout(&self) -> &str {
        self.checkpoint.manifest().world.layout.text()
    }

    /// The caller's text pairs.
    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        self.checkpoint.manifest().metadata.clone()
    }

    /// Of each group the names of its tensors.
    fn groups(&self) -> BTreeMap<String, Vec<String>> {
        let groups = self.checkpoint.manifest().groups.iter();
        groups.map(|group| (group.name.clone(), group.tensors.iter().map(|tensor| tensor.name.clone()).collect())).collect()
    }

    /// Name, dtype and shape of each tensor of a group.
    fn entries(&self, group: &str) -> Vec<(String, &'static str, Vec<u64>)> {
        let groups = self.checkpoint.manifest().groups.iter().filter(|known| known.name == group);
        let entry = |tensor: &TensorRecord| (tensor.name.clone(), tensor.dtype.name(), tensor.shape.clone());
        groups.flat_map(|group| group.tensors.iter().map(entry)).collect()
    }

    /// Begins to load tensors of a group; they are held against their checksums.
    #[pyo3(signature = (group, *, select, into, shared_bytes, stream))]
    fn load(
        &self,
        py: Python<'_>,
        group: String,
        select: Vec<String>,
        into: Vec<(String, Bytes)>,
        shared_bytes: Option<u64>,
        stream: Option<u64>,
    ) -> PyResult<Loading> {
        if self.process != std::process::id() {
            return Err(process::forked()).or_raise(py);
        }
        let _inside = process::enter(py)?;
        let (select, way) = (Some(select), self.session.policy());
        let wanted = Wanted { select, slices: Vec::new(), into, way, shared_bytes, stream, progress: None };
        Loading::begin(Origin::Group(Arc::clone(&self.checkpoint), group), &self.session, wanted).or_raise(py)
    }
}
