//! cuFile for machines without it: where its library is, and a handle to inspect it.
//!
//! The library is the crate `thruway-fake-cufile`, whose documentation says how it behaves and what can be set. It works on the
//! memory of the fake CUDA driver, so it is begun with one:
//!
//! ```no_run
//! use thruway_testkit::fake_cuda::FakeCuda;
//! use thruway_testkit::fake_cufile::FakeCuFile;
//!
//! let cuda = FakeCuda::start("");
//! let cufile = FakeCuFile::start(&cuda, "WAY=p2p; SHORT=4096");
//! // … what opens `cuda.path()` and `cufile.path()` …
//! cufile.assert_clean();
//! ```

use std::path::{Path, PathBuf};

use serde_json::Value;
use thruway_sys::cufile::{CODES, CU_FILE_SUCCESS};
use thruway_sys::loader::Library;

use crate::double::{Controls, Fault, Held, path_of};
use crate::fake_cuda::FakeCuda;

/// Where the fake cuFile's shared library is; `THRUWAY_FAKE_CUFILE` names another file.
///
/// # Panics
/// If it can be neither found nor built.
pub fn fake_cufile_path() -> PathBuf {
    path_of("fake-cufile")
}

/// Every code by which a function of cuFile's may fail, and its name.
pub fn failure_codes() -> impl Iterator<Item = (i32, &'static str)> {
    CODES.iter().filter(|(code, ..)| *code != CU_FILE_SUCCESS).map(|(code, name, _)| (code.0, *name))
}

/// The fake cuFile, freshly begun, beside the fake driver whose memory it works on.
#[derive(Debug)]
pub struct FakeCuFile<'a> {
    controls: Controls,
    path: PathBuf,
    _cuda: &'a FakeCuda,
}

impl<'a> FakeCuFile<'a> {
    /// Begins anew. `settings` are `KEY=value` pairs separated by semicolons, without the prefix `FAKE_CUFILE_`; what they
    /// leave out is as the environment says.
    ///
    /// # Panics
    /// If a setting is wrong, or the library is not to be had.
    pub fn start(cuda: &'a FakeCuda, settings: &str) -> Self {
        let path = fake_cufile_path();
        let library = Library::open([path.as_os_str()]).expect("the fake cuFile loads");
        let controls = Controls::load(&library, "fake_cufile");
        controls.reset(settings);
        Self { controls, path, _cuda: cuda }
    }

    /// The library, for whatever loads one.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Keeps all reads and writes, and the opening, from ending until the value is dropped.
    #[must_use = "dropping it lets work complete"]
    pub fn hold(&self) -> Held {
        Held::new(self.controls)
    }

    /// The library's state. The fake's `control` module lists the fields.
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

    /// How often a function was called, by its exported name.
    pub fn calls(&self, symbol: &str) -> u64 {
        self.controls.calls(symbol)
    }

    /// The misuses seen so far.
    pub fn faults(&self) -> Vec<Fault> {
        self.controls.faults()
    }

    /// Checks that nothing was misused and nothing is left: no registered file, no registered memory, nothing in flight.
    ///
    /// # Panics
    /// If that is not so, with the report.
    pub fn assert_clean(&self) {
        let report = self.report();
        assert_eq!(self.faults(), [], "cuFile was misused");
        for field in ["handles", "buffers", "in_flight"] {
            assert_eq!(report[field], 0, "{field} are left: {report:#}");
        }
    }
}
