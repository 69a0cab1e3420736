//! A load under way. Python allocates what a GPU's tensors need, some at a time, and makes tensors of it while bytes move.
//!
//! ```text
//! this thread   next ─► [what to allocate] ─► give ─► block: makes tensors, until it asks again ─► next ─► … ─► next: None
//! the load's         ─────── waits ───────►  moves bytes into them  ───►  …     ─► the receipt
//! ```

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread::JoinHandle;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use thruway::checkpoint::Checkpoint;
use thruway::cuda::{CallerStream, Gpu};
use thruway::model::{Allocation, ModelEntry, Place};
use thruway::{Buffer, Cancel, Error, ErrorKind, GpuBuffer, LoadOptions, PathPolicy, Session, Tensor, Tensors};

use crate::error::OrRaise;
use crate::memory::{self, Bytes};
use crate::receipt::Receipt;
use crate::{process, running};

/// What is to be loaded, and how.
pub(crate) struct Wanted {
    /// The tensors, or all.
    pub(crate) select: Option<Vec<String>>,
    /// Parts: name, dimension, start, end.
    pub(crate) slices: Vec<(String, usize, u64, u64)>,
    /// Tensors whose memory is there already.
    pub(crate) into: Vec<(String, Bytes)>,
    /// Which way.
    pub(crate) way: PathPolicy,
    /// How much tensors may share an allocation of.
    pub(crate) shared_bytes: Option<u64>,
    /// The caller's stream, which the load comes after.
    pub(crate) stream: Option<u64>,
    /// Called with the bytes moved so far.
    pub(crate) progress: Option<Py<PyAny>>,
}

/// What tensors are loaded from.
#[derive(Clone)]
pub(crate) enum Origin {
    Model(Arc<thruway::Model>),
    /// A group of a checkpoint.
    Group(Arc<Checkpoint>, String),
}

impl Origin {
    fn entries(&self) -> &[ModelEntry] {
        match self {
            Self::Model(model) => model.entries(),
            // A group without tensors wants no memory.
            Self::Group(checkpoint, group) => checkpoint.model(group).ok().flatten().map_or(&[], thruway::Model::entries),
        }
    }

    fn load(&self, options: LoadOptions) -> thruway::Result<(Tensors, thruway::Receipt)> {
        match self {
            Self::Model(model) => model.load(options),
            Self::Group(checkpoint, group) => checkpoint.load(group, options).map(|loaded| (loaded.tensors, loaded.receipt)),
        }
    }
}

/// What the load's thread says.
enum Event {
    Allocate(Vec<Allocation>),
    Done(thruway::Result<(Tensors, thruway::Receipt)>),
}

/// Tensors of one dtype and shape that follow one another in a block: dtype, shape, bytes of each, names, offsets. Columns,
/// since an object for each of many tensors would set the interpreter's garbage collection to work.
type Run = (&'static str, Vec<u64>, usize, Vec<String>, Vec<usize>);

struct State {
    events: Receiver<Event>,
    /// What the load's thread has said and nobody has heard.
    unheard: Option<Event>,
    /// Takes the memory that was asked for; gone when no more is wanted.
    give: Option<SyncSender<Vec<Buffer>>>,
    /// The allocations that were asked for.
    asked: Vec<Allocation>,
    /// Those that were given, each with what was given, until it is asked which tensors lie there.
    given: VecDeque<(Py<PyAny>, Allocation)>,
    /// The tensors that have memory.
    placed: usize,
    thread: Option<JoinHandle<()>>,
    done: Option<(Tensors, thruway::Receipt)>,
    failed: Option<PyErr>,
}

/// A load that has begun. Dropped early, it is cancelled.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct Loading {
    origin: Origin,
    gpu: Option<Arc<Gpu>>,
    cancel: Cancel,
    moved: Arc<AtomicU64>,
    progress: Option<Py<PyAny>>,
    process: u32,
    state: Mutex<State>,
}

impl Loading {
    pub(crate) fn begin(origin: Origin, session: &Session, wanted: Wanted) -> thruway::Result<Self> {
        let (cancel, moved) = (Cancel::default(), Arc::new(AtomicU64::new(0)));
        let mut options = LoadOptions::all().path(wanted.way).cancel(cancel.clone());
        if let Some(names) = wanted.select {
            options = options.select(names);
        }
        for (name, dimension, start, end) in wanted.slices {
            options = options.slice(name, dimension, start..end);
        }
        for (name, bytes) in wanted.into {
            let buffer = memory::lent(session, bytes).map_err(|error| error.with_tensor(&name))?;
            options = options.into(name, buffer);
        }
        if let Some(bytes) = wanted.shared_bytes {
            options = options.shared_bytes(bytes);
        }
        if wanted.progress.is_some() {
            let moved = Arc::clone(&moved);
            options = options.progress(Arc::new(move |bytes| moved.store(bytes, Ordering::Relaxed)));
        }
        let (tell, events) = sync_channel(1);
        let mut give = None;
        if session.gpu().is_some() {
            let (sender, given) = sync_channel(1);
            give = Some(sender);
            let ask = tell.clone();
            let gone = || Error::new(ErrorKind::Cancelled, "the load was given up");
            options = options.allocator(Box::new(move |wanted: &[Allocation]| {
                ask.send(Event::Allocate(wanted.to_vec())).map_err(|_| gone())?;
                given.recv().map_err(|_| gone())
            }));
            if let Some(stream) = wanted.stream {
                // SAFETY: the package passes the handle of torch's current stream on this GPU, which torch keeps for as
                // long as the process lives.
                options = options.after(unsafe { CallerStream::from_handle(stream) });
            }
        }
        let its_origin = origin.clone();
        // Nobody may be left to hear of it.
        let thread = running::start(move || drop(tell.send(Event::Done(its_origin.load(options)))))?;
        let state = State {
            events,
            unheard: None,
            give,
            asked: Vec::new(),
            given: VecDeque::new(),
            placed: 0,
            thread: Some(thread),
            done: None,
            failed: None,
        };
        Ok(Self {
            origin,
            gpu: session.gpu().cloned(),
            cancel,
            moved,
            progress: wanted.progress,
            process: std::process::id(),
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> PyResult<MutexGuard<'_, State>> {
        if self.process != std::process::id() {
            return Err(PyRuntimeError::new_err("this load belongs to the process that this one was forked from"));
        }
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::Poisoned(state)) => Ok(state.into_inner()),
            Err(TryLockError::WouldBlock) => Err(PyRuntimeError::new_err("another thread waits for this load")),
        }
    }
}

#[pymethods]
impl Loading {
    /// Waits until memory is wanted, and says how many bytes of it for each allocation; `None` when the load is done. Raises
    /// its failure.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Vec<usize>>> {
        let _inside = process::enter(py)?;
        let mut state = self.state()?;
        if state.done.is_some() {
            return Ok(None);
        }
        if let Some(failed) = &state.failed {
            return Err(failed.clone_ref(py));
        }
        let tick = |py: Python<'_>| running::tell_progress(py, self.progress.as_ref(), self.moved.load(Ordering::Relaxed));
        let event = match state.unheard.take() {
            Some(event) => Ok(event),
            None => running::receive(py, &mut state.events, tick),
        };
        if let Ok(Event::Allocate(wanted)) = event {
            state.asked = wanted;
            return Ok(Some(state.asked.iter().map(|allocation| allocation.bytes).collect()));
        }
        state.end(py, &self.cancel);
        let result = event.and_then(|event| match event {
            Event::Done(result) => result.or_raise(py),
            Event::Allocate(_) => unreachable!("it was answered above"),
        });
        match result {
            Ok(done) => state.done = Some(done),
            Err(raised) => {
                state.failed = Some(raised.clone_ref(py));
                return Err(raised);
            }
        }
        tick(py)?;
        Ok(None)
    }

    /// Whether [`next`](Self::next) would not have to wait: the load may be waiting for memory.
    fn asks(&self) -> PyResult<bool> {
        let mut state = self.state()?;
        if state.unheard.is_none() {
            state.unheard = state.events.try_recv().ok();
        }
        Ok(state.unheard.is_some())
    }

    /// How many tensors have memory.
    #[getter]
    fn placed(&self) -> PyResult<usize> {
        Ok(self.state()?.placed)
    }

    /// The next of the blocks of memory that were given, and the tensors that lie in it; their bytes may be on the way.
    fn block(&self) -> PyResult<Option<(Py<PyAny>, Vec<Run>)>> {
        let Some((memory, allocation)) = self.state()?.given.pop_front() else { return Ok(None) };
        let entries = self.origin.entries();
        let mut runs: Vec<Run> = Vec::new();
        for Place { entry, shape, range } in allocation.places {
            let ModelEntry { name, dtype, .. } = &entries[entry];
            match runs.last_mut() {
                Some((code, lengths, bytes, names, offsets))
                    if (*code, &*lengths, *bytes) == (dtype.name(), &shape, range.len()) =>
                {
                    names.push(name.clone());
                    offsets.push(range.start);
                }
                _ => runs.push((dtype.name(), shape, range.len(), vec![name.clone()], vec![range.start])),
            }
        }
        Ok(Some((memory, runs)))
    }

    /// Hands over the GPU memory that [`next`](Self::next) asked for: of each allocation its address and what keeps it.
    fn give(&self, py: Python<'_>, memory: Vec<(u64, Py<PyAny>)>) -> PyResult<()> {
        let mut guard = self.state()?;
        let state = &mut *guard;
        if state.asked.len() != memory.len() {
            return Err(PyValueError::new_err(format!("{} allocations are wanted, not {}", state.asked.len(), memory.len())));
        }
        let (Some(gpu), Some(give)) = (&self.gpu, &state.give) else {
            return Err(PyRuntimeError::new_err("this load wants no memory"));
        };
        let mut buffers = Vec::with_capacity(memory.len());
        for ((address, keep), allocation) in memory.into_iter().zip(state.asked.drain(..)) {
            state.placed += allocation.places.len();
            let kept = Box::new(keep.clone_ref(py));
            // SAFETY: the package passes the address of a tensor of just these bytes that it has allocated on this GPU for
            // this load, and the tensor itself; nobody else has it before the load is done.
            buffers.push(unsafe { GpuBuffer::lent(gpu, address, allocation.bytes, kept) }.into());
            state.given.push_back((keep, allocation));
        }
        // There is room for what was asked for. The load may have failed meanwhile: `next` tells.
        drop(give.try_send(buffers));
        Ok(())
    }

    /// The tensors of a load to host memory that is done, in the order of their bytes.
    fn tensors(&self) -> PyResult<Vec<HostTensor>> {
        let state = self.state()?;
        let (tensors, _) = state.done.as_ref().ok_or_else(|| PyRuntimeError::new_err("the load is not done"))?;
        Ok(tensors.iter().map(|tensor| HostTensor { tensor: tensor.clone() }).collect())
    }

    /// The receipt of a load that is done.
    #[getter]
    fn receipt(&self) -> PyResult<Receipt> {
        let state = self.state()?;
        let (_, receipt) = state.done.as_ref().ok_or_else(|| PyRuntimeError::new_err("the load is not done"))?;
        Ok(Receipt::new(receipt.clone()))
    }

    /// Stops the load and waits until nothing moves any more. A thread that waits in [`next`](Self::next) is told instead.
    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.cancel.cancel();
        let _inside = process::enter(py)?;
        if let Ok(mut state) = self.state() {
            state.end(py, &self.cancel);
            state.given.clear();
        }
        Ok(())
    }
}

impl State {
    /// Ends the load's thread, which is done or is given up, with the interpreter released.
    fn end(&mut self, py: Python<'_>, cancel: &Cancel) {
        py.detach(move || self.join(cancel));
    }

    fn join(&mut self, cancel: &Cancel) {
        let Some(thread) = self.thread.take() else { return };
        cancel.cancel();
        self.give = None;
        self.unheard = None;
        // It may wait for its last word to be heard.
        while self.events.recv().is_ok() {}
        // A panic there was told by what it did not say.
        drop(thread.join());
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.process != std::process::id() {
            // The thread is the parent's.
            let _never_joined = state.thread.take().map(std::mem::ManuallyDrop::new);
            return;
        }
        // Without an interpreter to release, the process ends and the thread with it.
        Python::try_attach(|py| match process::enter(py) {
            Ok(_inside) => state.end(py, &self.cancel),
            // This thread would not come back to the interpreter. The load's does not need it.
            Err(_ending) => state.join(&self.cancel),
        });
    }
}

/// A tensor in host memory, which lives as long as this does.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct HostTensor {
    tensor: Tensor,
}

#[pymethods]
impl HostTensor {
    /// The name.
    #[getter]
    fn name(&self) -> &str {
        self.tensor.name()
    }

    /// The dtype, as the format calls it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.tensor.dtype().name()
    }

    /// The length of each dimension.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.tensor.shape().to_vec()
    }

    /// The address of its first byte.
    #[getter]
    fn address(&self) -> u64 {
        self.tensor.address()
    }

    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> usize {
        self.tensor.byte_count()
    }
}
