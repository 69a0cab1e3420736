//! All state of the fake behind one lock. Bytes move outside of it, so that requests run side by side.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use thruway_sys::cuda::CUresult;
use thruway_sys::cufile::{CUfileError_t, CUfileOpError, CUfilePerGpuStats_t};

use crate::config::{Config, Rule};
use crate::cuda::Driver;
use crate::stats::NvfsTotals;

/// A registered file.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) fd: c_int,
    /// Which file it was, when it was registered.
    pub(crate) file: (u64, u64),
    pub(crate) in_flight: usize,
}

/// Registered memory.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) bytes: usize,
    pub(crate) in_flight: usize,
}

/// Everything.
pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) open: bool,
    pub(crate) handles: BTreeMap<usize, Handle>,
    pub(crate) buffers: BTreeMap<u64, Buffer>,
    pub(crate) switches: HashMap<u32, bool>,
    pub(crate) level: c_int,
    pub(crate) counting: bool,
    pub(crate) gpus: Vec<CUfilePerGpuStats_t>,
    pub(crate) nvfs: NvfsTotals,
    /// Reads and writes do not end.
    pub(crate) held: bool,
    pub(crate) in_flight: usize,
    pub(crate) in_flight_peak: usize,
    pub(crate) moved: u64,
    faults: Vec<(&'static str, String)>,
    calls: BTreeMap<&'static str, u64>,
    next_handle: usize,
}

/// The state, and the end of a hold.
pub(crate) struct Shared {
    world: Mutex<World>,
    pub(crate) released: Condvar,
}

pub(crate) static SHARED: LazyLock<Shared> = LazyLock::new(|| {
    let config = Config::read("").unwrap_or_else(|error| {
        eprintln!("fake-cufile: {error}");
        Config::default()
    });
    Shared { world: Mutex::new(World::new(config)), released: Condvar::new() }
});

/// Locks the state.
pub(crate) fn lock() -> MutexGuard<'static, World> {
    SHARED.world.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The outcome of a function that answers a structure.
pub(crate) type Answer = Result<(), CUfileOpError>;

impl World {
    /// A library that nobody has called yet.
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            open: false,
            handles: BTreeMap::new(),
            buffers: BTreeMap::new(),
            switches: HashMap::new(),
            level: 0,
            counting: false,
            gpus: Vec::new(),
            nvfs: NvfsTotals::default(),
            held: false,
            in_flight: 0,
            in_flight_peak: 0,
            moved: 0,
            faults: Vec::new(),
            calls: BTreeMap::new(),
            next_handle: 0x1000,
        }
    }

    /// Counts a call; the rule by which it fails, if there is one.
    pub(crate) fn count(&mut self, symbol: &'static str) -> Option<Rule> {
        let nth = self.calls.entry(symbol).or_default();
        *nth += 1;
        Rule::find(&self.config.fail, symbol, *nth).cloned()
    }

    /// A number that no other handle has had.
    pub(crate) fn fresh_handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    /// Writes a misuse down.
    pub(crate) fn fault(&mut self, kind: &'static str, detail: String) {
        self.faults.push((kind, detail));
    }

    /// The driver, which must be there before anything of weight is called.
    pub(crate) fn driver(&mut self, symbol: &str) -> Option<Driver> {
        let driver = Driver::find();
        if driver.is_none() {
            self.fault("called_without_cuda", format!("{symbol}: a real library may never return from it"));
        }
        driver
    }

    /// The state in JSON.
    pub(crate) fn report(&self) -> Value {
        let faults: Vec<Value> = self.faults.iter().map(|(kind, detail)| json!({ "kind": kind, "detail": detail })).collect();
        let calls: serde_json::Map<String, Value> =
            self.calls.iter().map(|(symbol, count)| ((*symbol).to_owned(), (*count).into())).collect();
        json!({
            "open": self.open,
            "handles": self.handles.len(),
            "buffers": self.buffers.len(),
            "registered_bytes": self.buffers.values().map(|buffer| buffer.bytes).sum::<usize>(),
            "in_flight": self.in_flight,
            "in_flight_peak": self.in_flight_peak,
            "moved": self.moved,
            "faults": faults,
            "calls": calls,
        })
    }
}

/// One call of a function that answers a structure: counted, failed if a rule says so.
pub(crate) fn call(symbol: &'static str, body: impl FnOnce(&mut World) -> Answer) -> CUfileError_t {
    let mut world = lock();
    let answer = match world.count(symbol) {
        Some(rule) => Err(CUfileOpError(rule.code)),
        None => body(&mut world),
    };
    CUfileError_t { err: answer.err().unwrap_or(CUfileOpError(0)), cu_err: CUresult(world.config.cu_err) }
}
