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

use std::ffi::{CString, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use serde_json::Value;
use thruway_sys::cuda::{CUDA_SUCCESS, Cuda};
use thruway_sys::loader::Library;

/// Names the library, for tests that run where cargo did not put it.
const OVERRIDE: &str = "THRUWAY_FAKE_CUDA";
const FILE_NAME: &str = "libfake_cuda.so";

/// Where the fake driver's shared library is.
///
/// Cargo builds it beside this crate, which depends on it, so that it is there and up to date whenever a test runs that
/// uses the testkit. Where it is not found beside the test's executable (a documentation test, another folder layout) it
/// is built by a cargo of its own. `THRUWAY_FAKE_CUDA` names another file.
///
/// # Panics
/// If it can be neither found nor built.
pub fn fake_cuda_path() -> PathBuf {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| named().or_else(beside_executable).unwrap_or_else(build)).clone()
}

fn named() -> Option<PathBuf> {
    std::env::var_os(OVERRIDE).map(PathBuf::from)
}

/// A test's executable is in `target/<profile>/deps`, an example's in `…/examples`, a program's in `target/<profile>`. The
/// library that goes with it is in `deps`; the one above is the newest that was asked for by name, maybe older.
fn beside_executable() -> Option<PathBuf> {
    let executable = std::env::current_exe().ok()?;
    let folders = executable.ancestors().skip(1).take(3);
    let candidates = folders.flat_map(|folder| [folder.join("deps").join(FILE_NAME), folder.join(FILE_NAME)]);
    candidates.into_iter().find(|candidate| candidate.is_file())
}

fn build() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("fake-cuda/Cargo.toml");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--message-format=json", "--manifest-path"])
        .arg(&manifest)
        .output()
        .unwrap_or_else(|error| panic!("cannot run cargo to build {}: {error}", manifest.display()));
    // Cargo says in JSON, a line for each artifact, which files it made.
    let lines = String::from_utf8_lossy(&built.stdout);
    let messages = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let files = messages.filter_map(|message| message.get("filenames").and_then(Value::as_array).cloned()).flatten();
    let mut paths = files.filter_map(|file| file.as_str().map(PathBuf::from));
    paths.find(|path| path.file_name() == Some(OsStr::new(FILE_NAME))).unwrap_or_else(|| {
        panic!("cargo did not build {FILE_NAME} ({}): {}", built.status, String::from_utf8_lossy(&built.stderr))
    })
}

/// One misuse that the fake driver saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What kind: `use_after_free`, `source_changed`, …
    pub kind: String,
    /// Which addresses or handles.
    pub detail: String,
}

/// The control functions, in C.
#[derive(Clone, Copy, Debug)]
struct Controls {
    report: unsafe extern "C" fn(*mut c_char, usize) -> usize,
    reset: unsafe extern "C" fn(*const c_char) -> c_int,
    read: unsafe extern "C" fn(u64, *mut c_void, usize) -> c_int,
    hold: unsafe extern "C" fn(c_int),
}

impl Controls {
    fn load(path: &Path) -> Self {
        const EXPLAIN: &str = "the fake driver loads and has its control functions";
        let library = Library::open([path.as_os_str()]).expect(EXPLAIN);
        // SAFETY: the types are those of the functions in the fake's `control` module.
        unsafe {
            Self {
                report: library.function("fake_cuda_report").expect(EXPLAIN),
                reset: library.function("fake_cuda_reset").expect(EXPLAIN),
                hold: library.function("fake_cuda_hold").expect(EXPLAIN),
                read: library.function("fake_cuda_read").expect(EXPLAIN),
            }
        }
    }
}

/// The fake driver, freshly begun, for as long as this value lives.
#[derive(Debug)]
pub struct FakeCuda {
    controls: Controls,
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
        let controls = Controls::load(&path);
        let text = CString::new(settings).unwrap_or_else(|_| panic!("settings with a NUL: {settings:?}"));
        // SAFETY: a C string.
        let answer = unsafe { (controls.reset)(text.as_ptr()) };
        assert_eq!(answer, 0, "the fake driver refuses the settings {settings:?}");
        Self { controls, path, _turn: turn }
    }

    /// The library, for whatever loads a driver.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps all work from completing until the value is dropped: what is submitted meanwhile is surely in flight. A call
    /// that waits for work waits for the release too, which must then come from elsewhere: [`Held::release_after`].
    #[must_use = "dropping it lets work complete"]
    pub fn hold(&self) -> Held {
        // SAFETY: any number is allowed.
        unsafe { (self.controls.hold)(1) };
        Held { controls: self.controls }
    }

    /// The driver's state. The fake's `control` module lists the fields.
    pub fn report(&self) -> Value {
        // SAFETY: a null buffer is allowed.
        let mut size = unsafe { (self.controls.report)(std::ptr::null_mut(), 0) } + 1;
        loop {
            let mut text = vec![0u8; size];
            // SAFETY: the buffer has `size` bytes.
            let length = unsafe { (self.controls.report)(text.as_mut_ptr().cast(), size) };
            if length < size {
                text.truncate(length);
                return serde_json::from_slice(&text).unwrap_or_else(|error| panic!("a report that is no JSON: {error}"));
            }
            // It grew between the two calls.
            size = length + 1;
        }
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
        self.report()["calls"].get(symbol).and_then(Value::as_u64).unwrap_or(0)
    }

    /// The misuses seen so far.
    pub fn faults(&self) -> Vec<Fault> {
        let report = self.report();
        let text = |fault: &Value, field: &str| fault[field].as_str().unwrap_or_default().to_owned();
        let faults = report["faults"].as_array().map_or(&[][..], Vec::as_slice);
        faults.iter().map(|fault| Fault { kind: text(fault, "kind"), detail: text(fault, "detail") }).collect()
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
        for field in ["live_allocations", "pinned_ranges", "live_streams", "live_events", "in_flight_operations"] {
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
        let answer = unsafe { (self.controls.read)(address, read.as_mut_ptr().cast(), bytes) };
        assert_eq!(answer, 0, "{bytes} bytes at {address:#x} are not device memory");
        read
    }
}

/// Work does not complete while this lives.
#[derive(Debug)]
pub struct Held {
    controls: Controls,
}

impl Held {
    /// Lets work complete after a while, from a thread of its own.
    pub fn release_after(self, pause: Duration) {
        std::thread::spawn(move || {
            std::thread::sleep(pause);
            drop(self);
        });
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: any number is allowed.
        unsafe { (self.controls.hold)(0) };
    }
}
