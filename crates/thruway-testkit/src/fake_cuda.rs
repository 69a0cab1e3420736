//! The CUDA driver for machines without a GPU: where its library is, and a handle to inspect it.
//!
//! The library is the crate `thruway-fake-cuda`, whose documentation says how it behaves and what can be set. A test opens
//! it where the product would open `libcuda.so.1`:
//!
//! ```no_run
//! use thruway_testkit::fake_cuda::FakeCuda;
//!
//! let fake = FakeCuda::start("DEVICES=2; DELAY_US=100..2000");
//! let cuda = thruway_sys::cuda::Cuda::load(Some(fake.path())).expect("the library is there");
//! // … use `cuda` …
//! fake.assert_clean();
//! ```
//!
//! # One at a time
//! The library's state is the process's. [`FakeCuda::start`] takes a lock that the value holds, so tests of one process
//! follow one another, each with a fresh driver. Do not hold two in one thread.

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use thruway_sys::cuda::{CUDA_SUCCESS, Cuda};
use thruway_sys::loader::Library;

use crate::double::{Controls, path_of};
pub use crate::double::{Fault, Held};

/// Where the fake driver's shared library is; `THRUWAY_FAKE_CUDA` names another file.
///
/// # Panics
/// If it can be neither found nor built.
pub fn fake_cuda_path() -> PathBuf {
    path_of("fake-cuda")
}

/// The fake driver, freshly begun, for as long as this value lives.
#[derive(Debug)]
pub struct FakeCuda {
    controls: Controls,
    read: unsafe extern "C" fn(u64, *mut c_void, usize) -> c_int,
    path: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl FakeCuda {
    /// Waits for the other tests of this process and begins anew. `settings` are `KEY=value` pairs separated by
    /// semicolons, without the prefix `FAKE_CUDA_`; what they leave out is as the environment says.
    ///
    /// # Panics
    /// If a setting is wrong, or the library is not to be had.
    pub fn start(settings: &str) -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        // A test that failed left nothing behind: the reset clears it.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let path = fake_cuda_path();
        let library = Library::open([path.as_os_str()]).expect("the fake driver loads");
        let controls = Controls::load(&library, "fake_cuda");
        // SAFETY: the type is that of the function in the fake's `control` module.
        let read = unsafe { library.function("fake_cuda_read") }.expect("the fake driver has its control functions");
        controls.reset(settings);
        Self { controls, read, path, _turn: turn }
    }

    /// The library, for whatever loads a driver.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps all work from completing until the value is dropped: what is submitted meanwhile is surely in flight. A call
    /// that waits for work waits for the release too, which must then come from elsewhere: [`Held::release_after`].
    #[must_use = "dropping it lets work complete"]
    pub fn hold(&self) -> Held {
        Held::new(self.controls)
    }

    /// The driver's state. The fake's `control` module lists the fields.
    pub fn report(&self) -> Value {
        self.controls.report()
    }

    /// One number of the report.
    ///
    /// # Panics
    /// If it has no such field.
    pub fn count(&self, field: &str) -> u64 {
        self.report().get(field).and_then(Value::as_u64).unwrap_or_else(|| panic!("the report has no number {field}"))
    }

    /// How often a driver function was called, by its exported name.
    pub fn calls(&self, symbol: &str) -> u64 {
        self.controls.calls(symbol)
    }

    /// The misuses seen so far.
    pub fn faults(&self) -> Vec<Fault> {
        self.controls.faults()
    }

    /// Whether a misuse of a kind was seen.
    pub fn saw(&self, kind: &str) -> bool {
        self.faults().iter().any(|fault| fault.kind == kind)
    }

    /// Checks that nothing was misused and nothing is left: no memory, no pinned range, no stream, no event.
    ///
    /// # Panics
    /// If that is not so, with the report.
    pub fn assert_clean(&self) {
        let report = self.report();
        assert_eq!(self.faults(), [], "the driver was misused");
        for field in ["live_allocations", "pinned_ranges", "live_streams", "live_events", "live_modules", "in_flight_operations"]
        {
            assert_eq!(report[field], 0, "{field} are left: {report:#}");
        }
    }

    /// What queues `times` fills of device memory on the default stream of the current context, as a program does that
    /// works with memory before it hands it on. It panics if no live allocation holds the range.
    pub fn filler(&self, times: usize) -> impl Fn(u64, usize) + Send + use<> {
        const VALUE: u8 = 0xee;
        let cuda = Cuda::load(Some(&self.path)).expect("the library is there");
        move |address, bytes| {
            for _ in 0..times {
                // SAFETY: the driver checks the range itself; the default stream is always there.
                let code = unsafe { (cuda.cuMemsetD8Async)(address, VALUE, bytes, std::ptr::null_mut()) };
                assert_eq!(code, CUDA_SUCCESS, "{bytes} bytes at {address:#x} cannot be filled");
            }
        }
    }

    /// The bytes of device memory, without a copy.
    ///
    /// # Panics
    /// If no live allocation holds the range.
    pub fn device_bytes(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0u8; bytes];
        // SAFETY: the vector has that many bytes.
        let answer = unsafe { (self.read)(address, read.as_mut_ptr().cast(), bytes) };
        assert_eq!(answer, 0, "{bytes} bytes at {address:#x} are not device memory");
        read
    }
}
