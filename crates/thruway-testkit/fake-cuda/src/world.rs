//! All state of the fake behind one lock, and how a call enters it.
//!
//! One lock for everything is deliberate: each call and each completed copy is one step, no two of which interleave, so a
//! check ("is this memory alive?") still holds when the bytes move.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use thruway_sys::cuda::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_UNKNOWN,
    CUDA_SUCCESS, CUresult,
};

use crate::arena::Arena;
use crate::capture;
use crate::config::Config;
use crate::context::Context;
use crate::fault::{Fault, FaultKind};
use crate::host::PinnedTable;
use crate::inject::{Calls, Rule};
use crate::kernel::Module;
use crate::stream::{Event, EventId, Mark, Stream, StreamId};

/// What a call's body comes to: success, or the code to answer.
pub(crate) type Answer = Result<(), CUresult>;

/// The locked state.
pub(crate) type Guard = MutexGuard<'static, World>;

/// Bytes that went each way, and how many copies had to be staged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) host_to_device_bytes: u64,
    pub(crate) device_to_host_bytes: u64,
    pub(crate) device_to_device_bytes: u64,
    pub(crate) fill_bytes: u64,
    pub(crate) copies: u64,
    /// Copies from or to memory that is not pinned: correct, and slow on real hardware.
    pub(crate) pageable_copies: u64,
}

/// Everything.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: Config,
    /// Why the settings could not be read; `cuInit` fails for it.
    pub(crate) config_error: Option<String>,
    /// `cuInit` has succeeded.
    pub(crate) initialised: bool,
    /// Counts resets: what threads remember from before one is void.
    pub(crate) epoch: u64,
    pub(crate) contexts: Vec<Context>,
    pub(crate) arenas: Vec<Arena>,
    pub(crate) pinned: PinnedTable,
    pub(crate) streams: BTreeMap<StreamId, Stream>,
    pub(crate) events: HashMap<EventId, Event>,
    pub(crate) modules: HashMap<u64, Module>,
    pub(crate) calls: Calls,
    pub(crate) faults: Vec<Fault>,
    pub(crate) totals: Totals,
    /// Nothing completes.
    pub(crate) held: bool,
    /// The code with which the work of the call under way is to fail.
    pub(crate) late: Option<CUresult>,
    next_id: u64,
}

impl World {
    /// A driver that nobody has called yet.
    pub(crate) fn new(config: Result<Config, String>, epoch: u64) -> Self {
        let (config, config_error) = match config {
            Ok(config) => (config, None),
            Err(error) => (Config::default(), Some(error)),
        };
        Self {
            config,
            config_error,
            initialised: false,
            epoch,
            contexts: Vec::new(),
            arenas: Vec::new(),
            pinned: PinnedTable::default(),
            streams: BTreeMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            calls: Calls::default(),
            faults: Vec::new(),
            totals: Totals::default(),
            held: false,
            late: None,
            next_id: 1,
        }
    }

    /// A number that nothing else has. From 1 after each reset, so that delays repeat.
    pub(crate) fn fresh_id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Writes a misuse down.
    pub(crate) fn fault(&mut self, kind: FaultKind, detail: String) {
        self.faults.push(Fault { kind, detail });
    }

    /// Writes a misuse down and answers with a code.
    pub(crate) fn refuse<T>(&mut self, kind: FaultKind, detail: String, code: CUresult) -> Result<T, CUresult> {
        self.fault(kind, detail);
        Err(code)
    }

    /// The arena that an address belongs to.
    pub(crate) fn arena_of(&self, address: usize) -> Option<usize> {
        self.arenas.iter().position(|arena| arena.contains(address))
    }

    /// Fails unless `cuInit` has succeeded.
    pub(crate) fn ready(&self) -> Answer {
        if self.initialised { Ok(()) } else { Err(CUDA_ERROR_NOT_INITIALIZED) }
    }
}

/// The state, and the two things that happen to it.
pub(crate) struct Shared {
    world: Mutex<World>,
    /// Work was submitted: for the engine.
    pub(crate) work: Condvar,
    /// Work was completed: for callers that wait.
    pub(crate) done: Condvar,
}

pub(crate) static SHARED: LazyLock<Shared> =
    LazyLock::new(|| Shared { world: Mutex::new(World::new(Config::read(""), 0)), work: Condvar::new(), done: Condvar::new() });

/// The process that initialised the driver; 0 before. A forked child has a copy of the memory but not the engine's
/// thread, and the lock may have been held at the fork: it must not come near either.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Makes this process the driver's owner.
pub(crate) fn own() {
    OWNER.store(process(), Ordering::Release);
}

/// Whether this process was forked from the driver's owner.
pub(crate) fn is_forked() -> bool {
    let owner = OWNER.load(Ordering::Acquire);
    owner != 0 && owner != process()
}

fn process() -> i32 {
    // SAFETY: has no preconditions.
    unsafe { libc::getpid() }
}

/// Locks the state. A panic of an earlier call does not spread: its fault is written down.
pub(crate) fn lock() -> Guard {
    SHARED.world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until all of `marks` are done.
pub(crate) fn wait(world: Guard, marks: &[Mark]) -> Guard {
    let pending = |world: &mut World| marks.iter().any(|mark| !world.is_done(*mark));
    SHARED.done.wait_while(world, pending).unwrap_or_else(PoisonError::into_inner)
}

/// One call of an exported function: counted, failed if a rule says so, and kept from unwinding into C.
pub(crate) fn call(symbol: &'static str, body: impl FnOnce(Guard) -> Answer) -> CUresult {
    if is_forked() {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    let answer = catch_unwind(AssertUnwindSafe(|| {
        let mut world = lock();
        let nth = world.calls.count(symbol);
        if let Some(code) = Rule::find(&world.config.fail, symbol, nth) {
            return Err(code);
        }
        if world.config.capturing && !capture::may_call(symbol) {
            let refused = world.refuse(FaultKind::BreaksCapture, symbol.to_owned(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            return refused;
        }
        world.late = Rule::find(&world.config.fail_late, symbol, nth);
        body(world)
    }));
    match answer {
        Ok(Ok(())) => CUDA_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => {
            lock().fault(FaultKind::Internal, format!("{symbol} panicked"));
            CUDA_ERROR_UNKNOWN
        }
    }
}

/// Writes a result where the caller wants it.
///
/// # Safety
/// `out` is null or valid for writing a `T`, aligned or not.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// A device address as the fake counts them; no address of ours is that large if it does not fit.
pub(crate) fn address(device: u64) -> usize {
    usize::try_from(device).unwrap_or(usize::MAX)
}
