//! cuFile, opened once in a process and closed when its last user is gone.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use thruway_sys::cufile::{
    CU_FILE_DRIVER_ALREADY_OPEN, CUFILE_PARAM_FORCE_COMPAT_MODE, CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE,
    CUFILE_PARAM_USE_PCIP2PDMA, CUfileDrvProps_t, CuFile, StatsBuffer, StatsLayout,
};

use super::conditions::Mechanism;
use super::evidence::{Counted, NvidiaFsCounted};
use super::failure::check;
use crate::base::{Error, ErrorKind, Result};
use crate::cuda::Gpu;
use crate::memory::Registration;
use crate::storage::SystemFacts;

/// cuFile, open in this process.
pub(super) struct Driver {
    pub(super) table: CuFile,
    gpu: Arc<Gpu>,
    facts: SystemFacts,
    /// As `cuFileGetVersion` gives it; `None` before 1.8.
    version: Option<c_int>,
    properties: CUfileDrvProps_t,
    /// Whether it was opened here. What somebody else in the process opened is theirs to close.
    is_ours: bool,
    mechanism: Mechanism,
    /// What was counted for a GPU before anything was moved here: others may have used the library before.
    at_opening: Option<Counted>,
    nvidia_fs_at_opening: Option<NvidiaFsCounted>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CuFile({} {:?})", self.table.library().display(), self.version)
    }
}

/// The driver that is open, by its library; it stands here until it is closed.
static OPEN: Mutex<Option<(Option<PathBuf>, Weak<Driver>)>> = Mutex::new(None);
/// It was closed.
static CLOSED: Condvar = Condvar::new();

impl Driver {
    /// Opens the library at `path` (or where it is found) and starts it, or gives the one that is open. The GPU is what keeps
    /// a CUDA driver alive, without which the library must not be called.
    ///
    /// # Errors
    /// [`PathUnavailable`](ErrorKind::PathUnavailable) with the missing piece.
    pub(super) fn open(
        gpu: &Arc<Gpu>,
        path: Option<&Path>,
        mechanism: Mechanism,
        (facts, patience): (&SystemFacts, Duration),
    ) -> Result<Arc<Self>> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((known, driver)) = &*open {
            match driver.upgrade() {
                Some(driver) if known.as_deref() == path => return Ok(driver),
                Some(_) => {
                    let message = "another libcufile is open in this process";
                    return Err(Error::new(ErrorKind::PathUnavailable, message).with_hint("use one library for all sessions"));
                }
                // Its last user is gone, and it is being closed.
                None => open = CLOSED.wait(open).unwrap_or_else(PoisonError::into_inner),
            }
        }
        let table = CuFile::load(path).map_err(|error| {
            Error::new(ErrorKind::PathUnavailable, format!("there is no usable libcufile here: {error}"))
                .with_hint("install libcufile (CUDA's packages, or `pip install nvidia-cufile`), or set THRUWAY_CUFILE_LIB")
        })?;
        let version = version(&table);
        configure(&table, mechanism)?;
        let is_ours = start(&table, gpu, patience)?;
        let mut properties = CUfileDrvProps_t::default();
        // SAFETY: the pointer is to a local that lives through the call, of the size that every version writes.
        let answer = unsafe { (table.cuFileDriverGetProperties)(&raw mut properties) };
        // They describe; nothing depends on them.
        let properties = check(answer, "cuFileDriverGetProperties").map_or_else(|_| CUfileDrvProps_t::default(), |()| properties);
        let (gpu, facts) = (Arc::clone(gpu), facts.clone());
        let mut driver =
            Self { table, gpu, facts, version, properties, is_ours, mechanism, at_opening: None, nvidia_fs_at_opening: None };
        driver.begin_counting();
        let driver = Arc::new(driver);
        *open = Some((path.map(Path::to_owned), Arc::downgrade(&driver)));
        Ok(driver)
    }

    /// Starts the statistics, and takes down what they are. Without them nothing can be proven, which verdicts will say.
    fn begin_counting(&mut self) {
        if let Some(begin) = self.table.cuFileStatsStart {
            // SAFETY: it takes nothing.
            let _verdicts_say_it = check(unsafe { begin() }, "cuFileStatsStart");
        }
        self.at_opening = self.counted(&self.gpu.facts().uuid).ok();
        self.nvidia_fs_at_opening = self.nvidia_fs_counted();
    }

    /// What the library and the machine are, for receipts.
    pub(super) fn describe(&self) -> String {
        let name = match self.version {
            Some(version) => format!("cuFile {}.{}", version / 1000, version % 1000 / 10),
            None => "cuFile".to_owned(),
        };
        let nvfs = &self.properties.nvfs;
        match self.mechanism {
            Mechanism::NvidiaFs => format!("{name} over nvidia-fs {}.{}", nvfs.major_version, nvfs.minor_version),
            Mechanism::P2pDma => format!("{name} over the kernel's peer-to-peer DMA"),
            Mechanism::Compat => format!("{name} in its compatibility mode"),
        }
    }

    /// Whether the library was opened for its compatibility mode, which was asked for.
    pub(super) fn is_compat(&self) -> bool {
        self.mechanism == Mechanism::Compat
    }

    /// The counters of a GPU, or why there are none.
    pub(super) fn counted(&self, uuid: &[u8; 16]) -> std::result::Result<Counted, String> {
        let (Some(version), Some(read)) = (self.version, self.table.cuFileGetStatsL3) else {
            return Err("this libcufile has no statistics (they came with 1.15)".to_owned());
        };
        let Some(layout) = StatsLayout::of_version(version) else {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("nobody has looked at the layout of cuFile {major}.{minor}'s statistics"));
        };
        let mut buffer = StatsBuffer::default();
        // SAFETY: the buffer has several times the room that any known version writes, and this version is known.
        check(unsafe { read(buffer.as_mut_ptr()) }, "cuFileGetStatsL3").map_err(|error| error.message().to_owned())?;
        let found = buffer.per_gpu(layout).into_iter().find(|gpu| gpu.uuid == *uuid);
        found.map(|gpu| Counted::from(&gpu)).ok_or_else(|| "cuFile's statistics do not have this GPU".to_owned())
    }

    /// nvidia-fs' own counters, which are the whole machine's.
    pub(super) fn nvidia_fs_counted(&self) -> Option<NvidiaFsCounted> {
        self.facts.nvidia_fs_statistics().and_then(|text| NvidiaFsCounted::parse(&text))
    }

    /// The counters when the library was opened.
    pub(super) fn at_opening(&self) -> (Option<Counted>, Option<NvidiaFsCounted>) {
        (self.at_opening, self.nvidia_fs_at_opening)
    }

    /// Makes GPU memory known to drives, until the value is dropped.
    ///
    /// # Safety
    /// The range is one allocation or lies in one, and stays until the registration has been dropped.
    ///
    /// # Errors
    /// What the library says.
    pub(super) unsafe fn register(self: &Arc<Self>, gpu: &Arc<Gpu>, address: usize, len: usize) -> Result<Registration> {
        let _current = gpu.current()?;
        let base = std::ptr::without_provenance::<c_void>(address);
        // SAFETY: the caller's promise; a context is current.
        let answer = unsafe { (self.table.cuFileBufRegister)(base, len, 0) };
        check(answer, "cuFileBufRegister").map_err(|error| error.with("bytes", len))?;
        Ok(Box::new(Range { driver: Arc::clone(self), gpu: Arc::clone(gpu), address }))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Nobody may open it again before it is closed.
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_ours {
            let _current = self.gpu.current();
            if let Some(stop) = self.table.cuFileStatsStop {
                // SAFETY: it takes nothing.
                let _closing_anyway = check(unsafe { stop() }, "cuFileStatsStop");
            }
            // SAFETY: it takes nothing; files and ranges that are registered keep this value, so none is left.
            let _nothing_to_do = check(unsafe { (self.table.cuFileDriverClose_v2)() }, "cuFileDriverClose");
        }
        *open = None;
        CLOSED.notify_all();
    }
}

/// A registered range.
struct Range {
    driver: Arc<Driver>,
    gpu: Arc<Gpu>,
    address: usize,
}

impl Drop for Range {
    fn drop(&mut self) {
        let _current = self.gpu.current();
        let base = std::ptr::without_provenance::<c_void>(self.address);
        // SAFETY: registered with this address, and no region of the block is left, so no request uses it. A failure leaves
        // the range registered, for which there is no remedy.
        let _no_remedy = check(unsafe { (self.driver.table.cuFileBufDeregister)(base) }, "cuFileBufDeregister");
    }
}

fn version(table: &CuFile) -> Option<c_int> {
    let (read, mut version) = (table.cuFileGetVersion?, 0);
    // SAFETY: the pointer is to a local that lives through the call, which may be made at any time.
    check(unsafe { read(&raw mut version) }, "cuFileGetVersion").ok().map(|()| version)
}

/// Sets up what must be set before the opening: that nothing goes through host memory unasked, and that everything is counted.
/// What is set here counts more than the environment and the configuration file. Versions before 1.14 have no such calls, and
/// only the counters can tell there.
fn configure(table: &CuFile, mechanism: Mechanism) -> Result<()> {
    let switches = [
        (CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE, mechanism == Mechanism::Compat),
        (CUFILE_PARAM_FORCE_COMPAT_MODE, mechanism == Mechanism::Compat),
        (CUFILE_PARAM_USE_PCIP2PDMA, mechanism == Mechanism::P2pDma),
    ];
    if let Some(set) = table.cuFileSetParameterBool {
        for (switch, value) in switches {
            // SAFETY: it takes two numbers.
            let answer = unsafe { set(switch, value) };
            // Somebody else in the process has opened the library: it is as they want it.
            if answer.err != CU_FILE_DRIVER_ALREADY_OPEN {
                check(answer, "cuFileSetParameterBool")?;
            }
        }
    }
    if let Some(set) = table.cuFileSetStatsLevel {
        const PER_GPU: c_int = 3;
        // SAFETY: it takes a number.
        let _verdicts_say_it = check(unsafe { set(PER_GPU) }, "cuFileSetStatsLevel");
    }
    Ok(())
}

/// Opens the library's driver on a thread of its own and waits for it, but not for ever. Whether it was opened here.
fn start(table: &CuFile, gpu: &Arc<Gpu>, patience: Duration) -> Result<bool> {
    let (open, gpu) = (table.cuFileDriverOpen, Arc::clone(gpu));
    let (sender, receiver) = channel();
    let work = move || {
        let answer = gpu.current().map(|_current| {
            // SAFETY: a CUDA driver is there and a context of it is current, which is what the call needs.
            unsafe { open() }
        });
        // Whoever waited may have given up.
        let _given_up = sender.send(answer);
    };
    std::thread::Builder::new()
        .name("thruway-cufile-open".to_owned())
        .spawn(work)
        .map_err(|source| Error::from_io("no thread can be started to open cuFile", source))?;
    match receiver.recv_timeout(patience) {
        Ok(Ok(answer)) if answer.err == CU_FILE_DRIVER_ALREADY_OPEN => Ok(false),
        Ok(Ok(answer)) => check(answer, "cuFileDriverOpen").map(|()| true),
        Ok(Err(error)) => Err(error),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            let message = format!("cuFileDriverOpen did not return within {patience:?}");
            Err(Error::new(ErrorKind::PathUnavailable, message)
                .with_hint("set THRUWAY_CUFILE=off, and look at cufile.log; a thread of this process may be spinning in it"))
        }
    }
}
