//! The direct path by cuFile: tried out on each filesystem before it is taken, judged by counters afterwards.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::CuFile;
use super::conditions::mechanism;
use super::driver::Driver;
use super::evidence::Reading;
use super::files::Files;
use crate::base::settings::CuFileChoice;
use crate::base::{Alignment, Error, ErrorKind, Result};
use crate::cuda::Gpu;
use crate::io::direct::{DirectPath, Reach, Refusal, Trial, Verdict, Watch};
use crate::io::{Direction, Engine, EngineName, Made, Request, Wait};
use crate::memory::{GpuSlabs, Memory, Region, Ring, RingSettings, SlabSource};
use crate::storage::{DirectRules, SystemFacts};

/// From this size on a block of ours is made known to drives when it is first used. Below, what that costs (a system call that
/// pins and maps every page) is more than a copy from the window.
const REGISTERED_BYTES_MIN: usize = 1 << 20;

/// How long opening may take, unless told otherwise. It reads the machine's topology, which takes seconds on large ones.
const PATIENCE: Duration = Duration::from_secs(30);

/// How cuFile is used.
#[derive(Clone, Debug)]
pub struct CuFileOptions {
    /// Whether it is.
    pub choice: CuFileChoice,
    /// Its library, if it is not to be looked for.
    pub library: Option<PathBuf>,
    /// Where the system's facts are read.
    pub facts: SystemFacts,
    /// How many requests an engine keeps in flight.
    pub depth: usize,
    /// The window of GPU memory through which goes what cannot go in place.
    pub window: RingSettings,
    /// How long its opening may take.
    pub patience: Duration,
}

impl Default for CuFileOptions {
    fn default() -> Self {
        let (choice, library, facts, window) = Default::default();
        Self { choice, library, facts, depth: 1, window, patience: PATIENCE }
    }
}

/// The direct path between drives and one GPU by cuFile.
#[derive(Debug)]
pub struct CuFilePath {
    gpu: Arc<Gpu>,
    options: CuFileOptions,
    files: Arc<Files>,
    opened: OnceLock<Result<Opened, Refusal>>,
    /// What was found out of each filesystem, in each direction.
    known: Mutex<HashMap<(u64, Direction), Reach>>,
}

/// What there is once cuFile is open.
#[derive(Debug)]
struct Opened {
    window: Ring,
    driver: Arc<Driver>,
}

/// Slabs of GPU memory that drives know.
#[derive(Debug)]
struct RegisteredSlabs {
    slabs: GpuSlabs,
    driver: Arc<Driver>,
    gpu: Arc<Gpu>,
}

impl SlabSource for RegisteredSlabs {
    fn allocate(&self, len: usize) -> Result<Arc<dyn Memory>> {
        let block = self.slabs.allocate(len)?;
        let mut failed = None;
        let region = Region::claim(Arc::clone(&block), 0..0, crate::memory::Access::Writable)?;
        let known = region.register(|address, len| {
            // SAFETY: the block is one allocation, and ends its registration before it is freed.
            unsafe { self.driver.register(&self.gpu, address, len) }.map_err(|error| failed = Some(error)).ok()
        });
        let unknown = || Error::new(ErrorKind::PathUnavailable, "a window of GPU memory cannot be registered with cuFile");
        if known { Ok(block) } else { Err(failed.unwrap_or_else(unknown)) }
    }
}

impl CuFilePath {
    /// The path to this GPU's memory. Opens nothing yet.
    pub fn new(gpu: Arc<Gpu>, options: CuFileOptions) -> Self {
        Self { gpu, options, files: Arc::default(), opened: OnceLock::new(), known: Mutex::default() }
    }

    /// cuFile, opened at the first call.
    fn opened(&self) -> Result<&Opened, Refusal> {
        self.opened.get_or_init(|| self.open()).as_ref().map_err(Clone::clone)
    }

    fn open(&self) -> Result<Opened, Refusal> {
        let CuFileOptions { choice, library, facts, window, patience, .. } = &self.options;
        let mechanism = mechanism(facts, &self.gpu.facts().pci_address, *choice, false)?;
        let driver =
            Driver::open(&self.gpu, library.as_deref(), mechanism, (facts, *patience)).map_err(|error| refusal_of(&error))?;
        let slabs = GpuSlabs::new(Arc::clone(&self.gpu));
        let slabs = RegisteredSlabs { slabs, driver: Arc::clone(&driver), gpu: Arc::clone(&self.gpu) };
        Ok(Opened { window: Ring::with_source(*window, Box::new(slabs)), driver })
    }

    /// Moves one block between the file and the window, and asks the counters which way it went. A failure that speaks of the
    /// path comes back as a verdict, others as errors.
    fn canary(&self, opened: &Opened, trial: &Trial<'_>) -> Result<Result<Verdict, Refusal>> {
        let length = usize::try_from(trial.block.length).unwrap_or(usize::MAX);
        let slot = match opened.window.take(length) {
            Ok(slot) => slot,
            Err(error) => return refused_or_failed(error).map(Err),
        };
        // What was in the GPU's memory before is nothing for a file.
        // SAFETY: the slot is GPU memory of ours, of this length at least, and nothing else uses it.
        unsafe { self.gpu.copy_from_host(slot.region().address() as u64, &vec![0; length]) }?;
        let mut engine = CuFile::new(&opened.driver, &self.gpu, &self.files, 1);
        let uuid = &self.gpu.facts().uuid;
        let before = Reading::now(&opened.driver, uuid);
        let segments = vec![slot.region().slice(0..length)];
        let (file, offset, alignment) = ((trial.open)()?, trial.block.offset, trial.rules.offset);
        let direction = trial.direction;
        let request = Request { token: 0, direction, file, offset, segments, needed: trial.block.length, alignment };
        let mut done = Vec::new();
        if engine.submit(request).is_ok() {
            engine.complete(&mut done, Wait::ForOne)?;
        }
        let Some(completion) = done.pop() else {
            return Err(Error::new(ErrorKind::Io, "an engine lost a request").with("engine", EngineName::CuFile));
        };
        let moved = match completion.result {
            Ok(moved) => moved,
            Err(source) => {
                return match refusal_of_io(&source) {
                    Some(refusal) => Ok(Err(refusal)),
                    None => Err(Error::from_io("a trial of the direct path failed", source).with("offset", offset)),
                };
            }
        };
        Ok(Ok(before.verdict(&Reading::now(&opened.driver, uuid), moved)))
    }

    /// What a trial comes to.
    fn judged(&self, opened: &Opened, trial: &Trial<'_>) -> Result<Reach> {
        let name = opened.driver.describe();
        Ok(match self.canary(opened, trial)? {
            Err(refusal) => Reach::Refused(refusal),
            Ok(Verdict::Proven) => direct(trial, true, &format!("{name}, tried here and proven by counters")),
            Ok(Verdict::Unproven(why)) if opened.driver.is_compat() => {
                direct(trial, false, &format!("{name}, as THRUWAY_CUFILE=compat asks: {why}"))
            }
            Ok(Verdict::Unproven(why)) if why.contains(super::evidence::THROUGH_HOST) => {
                let reason = format!("{name} does not reach this filesystem's drive: {why}");
                let hint = "look at cufile.log, and at cufile.json for what is denied; see docs/direct-path.md";
                Reach::Refused(Refusal { reason: reason.into(), hint: hint.into() })
            }
            Ok(Verdict::Unproven(why)) => direct(trial, false, &format!("{name}, and nothing proves it: {why}")),
        })
    }
}

impl DirectPath for CuFilePath {
    fn name(&self) -> EngineName {
        EngineName::CuFile
    }

    fn make(&self) -> Result<Made> {
        let opened = self.opened().map_err(|refusal| refusal.to_error())?;
        let engine = CuFile::new(&opened.driver, &self.gpu, &self.files, self.options.depth);
        Ok(Made { engine: Box::new(engine), note: None })
    }

    fn reach(&self, trial: &Trial<'_>) -> Result<Reach> {
        let opened = match self.opened() {
            Ok(opened) => opened,
            Err(refusal) if trial.required => {
                // The caller takes no other way, and may wait for a fuller reason.
                let CuFileOptions { choice, facts, .. } = &self.options;
                let fuller = mechanism(facts, &self.gpu.facts().pci_address, *choice, true);
                return Ok(Reach::Refused(fuller.err().unwrap_or(refusal)));
            }
            Err(refusal) => return Ok(Reach::Refused(refusal)),
        };
        let key = (trial.device, trial.direction);
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        // What must be proven is proven each time.
        if let Some(known) = known.filter(|_| !trial.required) {
            return Ok(known);
        }
        let found = self.judged(opened, trial)?;
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(key, found.clone());
        match &found {
            Reach::Direct { reason, is_proven: false, .. } if trial.required => Ok(Reach::Refused(Refusal {
                reason: Arc::clone(reason),
                hint: "use auto: its receipt says what is known of each part; see docs/direct-path.md for what proves it".into(),
            })),
            _ => Ok(found),
        }
    }

    fn refusal(&self, error: &std::io::Error, device: u64) -> Option<Refusal> {
        let refusal = refusal_of_io(error)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for direction in [Direction::Read, Direction::Write] {
            known.insert((device, direction), Reach::Refused(refusal.clone()));
        }
        Some(refusal)
    }

    fn watch(&self) -> Box<dyn Watch + '_> {
        let uuid = &self.gpu.facts().uuid;
        let before = self.opened.get().and_then(|opened| opened.as_ref().ok());
        Box::new(CuFileWatch { path: self, before: before.map(|opened| Reading::now(&opened.driver, uuid)) })
    }

    fn window(&self) -> Option<&Ring> {
        self.opened.get().and_then(|opened| opened.as_ref().ok()).map(|opened| &opened.window)
    }

    fn has_window(&self) -> bool {
        true
    }

    fn register(&self, region: &Region) {
        let Some(Ok(opened)) = self.opened.get() else { return };
        if !region.kind().is_host() {
            region.register(|address, len| {
                // What is not known to drives goes through the window, so no failure is told.
                // SAFETY: the block is one allocation of ours, and ends its registration before it is freed.
                let register = || unsafe { opened.driver.register(&self.gpu, address, len) }.ok();
                if len < REGISTERED_BYTES_MIN { None } else { register() }
            });
        }
    }
}

/// Observes the counters through a transfer.
struct CuFileWatch<'a> {
    path: &'a CuFilePath,
    /// None where cuFile was not open yet.
    before: Option<Reading>,
}

impl Watch for CuFileWatch<'_> {
    fn verdict(self: Box<Self>, bytes: u64) -> Verdict {
        let Ok(opened) = self.path.opened() else { return Verdict::Unproven("cuFile is not open".into()) };
        let uuid = &self.path.gpu.facts().uuid;
        let before = self.before.unwrap_or_else(|| Reading::at_opening(&opened.driver, uuid));
        before.verdict(&Reading::now(&opened.driver, uuid), bytes)
    }
}

fn direct(trial: &Trial<'_>, is_proven: bool, reason: &str) -> Reach {
    // A page is what nvidia-fs and the kernel's peer-to-peer DMA want of addresses in GPU memory.
    let rules = DirectRules { memory: trial.rules.memory.max(Alignment::PAGE), ..trial.rules };
    Reach::Direct { rules, beats_cache: false, is_proven, reason: reason.into() }
}

/// What an error says of the path.
fn refusal_of(error: &Error) -> Refusal {
    let hint = error.hint().unwrap_or("see docs/direct-path.md");
    let code = error.context("cuda_code").map(|code| format!(" (CUDA's code {code})"));
    Refusal { reason: format!("{}{}", error.message(), code.unwrap_or_default()).into(), hint: hint.into() }
}

/// A refusal, if the error speaks of the path.
fn refused_or_failed(error: Error) -> Result<Refusal> {
    if error.kind() == ErrorKind::PathUnavailable { Ok(refusal_of(&error)) } else { Err(error) }
}

/// A refusal, if a request's error speaks of the path: a code of cuFile's, or a number by which the kernel says that it cannot.
fn refusal_of_io(error: &std::io::Error) -> Option<Refusal> {
    if let Some(own) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        return (own.kind() == ErrorKind::PathUnavailable).then(|| refusal_of(own));
    }
    let refused = matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EREMOTEIO | libc::EINVAL));
    refused.then(|| Refusal {
        reason: format!("cuFile's request was refused by the kernel: {error}").into(),
        hint: "see `dmesg` and docs/direct-path.md".into(),
    })
}
