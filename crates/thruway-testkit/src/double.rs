//! Test doubles that are shared libraries: where they are, and the functions that each has for tests.

use std::collections::HashMap;
use std::ffi::{CString, OsStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use thruway_sys::loader::Library;

/// Where a double's shared library is. `name` is that of its folder in this crate, with a hyphen.
///
/// Cargo builds it beside this crate, which depends on it, so that it is there and up to date whenever a test runs that
/// uses the testkit. Where it is not found beside the test's executable (a documentation test, another folder layout) it
/// is built by a cargo of its own. `THRUWAY_FAKE_…` names another file.
///
/// # Panics
/// If it can be neither found nor built.
pub(crate) fn path_of(name: &'static str) -> PathBuf {
    static FOUND: Mutex<Option<HashMap<&'static str, PathBuf>>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    let find = || {
        let file = format!("lib{}.so", name.replace('-', "_"));
        let named = std::env::var_os(format!("THRUWAY_{}", name.replace('-', "_").to_uppercase())).map(PathBuf::from);
        named.or_else(|| beside_executable(&file)).unwrap_or_else(|| build(name, &file))
    };
    found.get_or_insert_default().entry(name).or_insert_with(find).clone()
}

/// A test's executable is in `target/<profile>/deps`, an example's in `…/examples`, a program's in `target/<profile>`. The
/// library that goes with it is in `deps`; the one above is the newest that was asked for by name, maybe older.
fn beside_executable(file: &str) -> Option<PathBuf> {
    let executable = std::env::current_exe().ok()?;
    let folders = executable.ancestors().skip(1).take(3);
    let candidates = folders.flat_map(|folder| [folder.join("deps").join(file), folder.join(file)]);
    candidates.into_iter().find(|candidate| candidate.is_file())
}

fn build(name: &str, file: &str) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join(name).join("Cargo.toml");
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
    paths
        .find(|path| path.file_name() == Some(OsStr::new(file)))
        .unwrap_or_else(|| panic!("cargo did not build {file} ({}): {}", built.status, String::from_utf8_lossy(&built.stderr)))
}

/// One misuse that a double saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What kind: `use_after_free`, `source_changed`, …
    pub kind: String,
    /// Which addresses or handles.
    pub detail: String,
}

/// The control functions that every double has, in C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Controls {
    report: unsafe extern "C" fn(*mut c_char, usize) -> usize,
    reset: unsafe extern "C" fn(*const c_char) -> c_int,
    hold: unsafe extern "C" fn(c_int),
}

impl Controls {
    /// Those of the library whose functions begin with `prefix`.
    pub(crate) fn load(library: &Library, prefix: &str) -> Self {
        const EXPLAIN: &str = "the double has its control functions";
        // SAFETY: the types are those of the functions in each double's `control` module.
        unsafe {
            Self {
                report: library.function(&format!("{prefix}_report")).expect(EXPLAIN),
                reset: library.function(&format!("{prefix}_reset")).expect(EXPLAIN),
                hold: library.function(&format!("{prefix}_hold")).expect(EXPLAIN),
            }
        }
    }

    /// Begins anew with these settings.
    pub(crate) fn reset(self, settings: &str) {
        let text = CString::new(settings).unwrap_or_else(|_| panic!("settings with a NUL: {settings:?}"));
        // SAFETY: a C string.
        let answer = unsafe { (self.reset)(text.as_ptr()) };
        assert_eq!(answer, 0, "the double refuses the settings {settings:?}");
    }

    /// Keeps work from completing, or lets it complete.
    pub(crate) fn hold(self, held: bool) {
        // SAFETY: any number is allowed.
        unsafe { (self.hold)(c_int::from(held)) };
    }

    /// The double's state.
    pub(crate) fn report(self) -> Value {
        // SAFETY: a null buffer is allowed.
        let mut size = unsafe { (self.report)(std::ptr::null_mut(), 0) } + 1;
        loop {
            let mut text = vec![0u8; size];
            // SAFETY: the buffer has `size` bytes.
            let length = unsafe { (self.report)(text.as_mut_ptr().cast(), size) };
            if length < size {
                text.truncate(length);
                return serde_json::from_slice(&text).unwrap_or_else(|error| panic!("a report that is no JSON: {error}"));
            }
            // It grew between the two calls.
            size = length + 1;
        }
    }

    /// The misuses seen so far.
    pub(crate) fn faults(self) -> Vec<Fault> {
        let report = self.report();
        let text = |fault: &Value, field: &str| fault[field].as_str().unwrap_or_default().to_owned();
        let faults = report["faults"].as_array().map_or(&[][..], Vec::as_slice);
        faults.iter().map(|fault| Fault { kind: text(fault, "kind"), detail: text(fault, "detail") }).collect()
    }

    /// How often a function was called, by its exported name.
    pub(crate) fn calls(self, symbol: &str) -> u64 {
        self.report()["calls"].get(symbol).and_then(Value::as_u64).unwrap_or(0)
    }
}

/// Work does not complete while this lives.
#[derive(Debug)]
pub struct Held {
    controls: Controls,
}

impl Held {
    pub(crate) fn new(controls: Controls) -> Self {
        controls.hold(true);
        Self { controls }
    }

    /// Lets work complete after a while, from a thread of its own.
    pub fn release_after(self, pause: std::time::Duration) {
        std::thread::spawn(move || {
            std::thread::sleep(pause);
            drop(self);
        });
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.controls.hold(false);
    }
}
