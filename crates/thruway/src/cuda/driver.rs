//! The driver's library, and its codes as errors.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use thruway_sys::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUresult, Cuda};

use crate::base::{Error, ErrorKind, Result};

/// The driver, opened and started.
pub struct Driver {
    pub(super) cuda: Cuda,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({})", self.cuda.library().display())
    }
}

impl Driver {
    /// Opens the driver's library (that at `path`, or the system's) and starts the driver. A library that has been
    /// opened stays open, and is given again.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) if there is no driver or it cannot start; the error says why.
    pub fn load(path: Option<&Path>) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<(Option<PathBuf>, Arc<Driver>)>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let known = open.iter().find(|(known, _)| known.as_deref() == path).map(|(_, driver)| Arc::clone(driver));
        let is_new = known.is_none();
        let driver = match known {
            Some(driver) => driver,
            None => Arc::new(Self {
                cuda: Cuda::load(path).map_err(|error| {
                    Error::new(ErrorKind::Unsupported, format!("there is no CUDA driver here: {error}"))
                        .with_hint("install the NVIDIA driver, or in a container pass the GPU in (`--gpus all`)")
                })?,
            }),
        };
        // Starting a started driver does nothing, and tells a forked child that it has none.
        // SAFETY: `cuInit` takes no pointer, and the flags must be 0.
        let started = unsafe { (driver.cuda.cuInit)(0) };
        driver.check(started, "cuInit").map_err(|error| {
            Error::new(ErrorKind::Unsupported, format!("the CUDA driver does not start: {}", error.message()))
                .with("code", started.0)
                .with_hint("`nvidia-smi` tells more; a child of a process that used CUDA cannot use it after a fork")
        })?;
        if is_new {
            open.push((path.map(Path::to_owned), Arc::clone(&driver)));
        }
        Ok(driver)
    }

    /// How many GPUs this process may use.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the pointer is to a local that lives through the call.
        let code = unsafe { (self.cuda.cuDeviceGetCount)(&raw mut count) };
        self.check(code, "cuDeviceGetCount")?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// A code as a result. `call` is the function that gave it.
    pub(crate) fn check(&self, code: CUresult, call: &'static str) -> Result<()> {
        if code == CUDA_SUCCESS { Ok(()) } else { Err(self.error(code, call)) }
    }

    /// The error for a code that is no success.
    pub(crate) fn error(&self, code: CUresult, call: &'static str) -> Error {
        let kind = if code == CUDA_ERROR_OUT_OF_MEMORY { ErrorKind::OutOfMemory } else { ErrorKind::Gpu };
        let error = Error::new(kind, format!("{call} failed: {}", self.describe(code))).with("code", code.0);
        match (kind, call) {
            // Host memory, and pages that may be locked.
            (ErrorKind::OutOfMemory, "cuMemHostRegister") => error.with_hint(
                "raise the limit of locked memory (`ulimit -l`), or pin less: a smaller pool, or a lower THRUWAY_RING_SIZE",
            ),
            (ErrorKind::OutOfMemory, _) => {
                error.with_hint("free GPU memory (`nvidia-smi` shows who holds it), or load fewer tensors at a time")
            }
            _ => error,
        }
    }

    /// The name and the sentence that the driver has for a code; unknown codes keep their number.
    fn describe(&self, code: CUresult) -> String {
        let text = |get: unsafe extern "C" fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
            let mut pointer = std::ptr::null();
            // SAFETY: the pointer is to a local; the driver sets it to a static string, or to null.
            let code = unsafe { get(code, &raw mut pointer) };
            if code != CUDA_SUCCESS || pointer.is_null() {
                return None;
            }
            // SAFETY: not null, and a static string of the driver's.
            Some(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
        };
        match (text(self.cuda.cuGetErrorName), text(self.cuda.cuGetErrorString)) {
            (Some(name), Some(sentence)) => format!("{name}, {sentence}"),
            (Some(name), None) => name,
            _ => format!("code {}", code.0),
        }
    }
}

/// The newest CUDA version that the system's driver serves, as `(major, minor)`; `None` without a driver.
pub fn driver_version() -> Option<(u32, u32)> {
    let cuda = Cuda::load(None).ok()?;
    let mut version = 0;
    // SAFETY: the pointer is to a local that lives through the call, which needs no `cuInit`.
    let code = unsafe { (cuda.cuDriverGetVersion)(&raw mut version) };
    let version = u32::try_from(version).ok().filter(|_| code == CUDA_SUCCESS)?;
    Some((version / 1000, version % 1000 / 10))
}
