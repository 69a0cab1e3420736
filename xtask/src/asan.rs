//! `cargo xtask asan`: the library's tests under AddressSanitizer.
//!
//! The sanitizer is an unstable switch of the compiler. `RUSTC_BOOTSTRAP=1` opens it on a stable toolchain, in a target
//! folder of its own, so that nothing else is built that way. That the sanitizer is really on is not taken on trust: a
//! canary test reads freed memory first, and has to be caught.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::ci::{announce, cargo_program};

/// Reports begin with this.
const REPORT: &str = "AddressSanitizer: heap-use-after-free";

/// The second flag lets the test doubles, libraries that tests open at run time, find the sanitizer's functions in the test
/// program: rustc links the runtime into programs only and does not export it.
const FLAGS: &str = "-Zsanitizer=address -Clink-arg=-Wl,--export-dynamic-symbol=__asan_*";

/// What the toolchain lacks for this step, if anything.
pub(crate) fn missing() -> Option<String> {
    let Some((library, host)) = toolchain() else { return Some("rustc cannot say where its libraries are".to_owned()) };
    let folder = library.join("rustlib").join(&host).join("lib");
    let has_runtime = std::fs::read_dir(folder).is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().ends_with("_rt.asan.a")))
    });
    (!has_runtime).then(|| format!("this toolchain has no AddressSanitizer runtime for {host}; rustup's have"))
}

/// Runs the canary, then the tests.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    if let Some(reason) = missing() {
        return Err(reason);
    }
    let (_, host) = toolchain().ok_or("rustc cannot say what it compiles for")?;
    canary(root, &host)?;
    let arguments = ["nextest", "run", "-p", "thruway", "--lib", "--tests", "--locked", "--profile", "ci", "--target", &host];
    announce(&format!("cargo {} (under AddressSanitizer)", arguments.join(" ")));
    let status = cargo(root, &arguments).status().map_err(|error| format!("cannot run cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("tests under AddressSanitizer ended with {status}")) }
}

/// Runs a test that reads freed memory and demands that the sanitizer kills it.
fn canary(root: &Path, host: &str) -> Result<(), String> {
    let arguments = ["test", "-p", "thruway-testkit", "--test", "asan_canary", "--locked", "--target", host, "--", "--ignored"];
    announce(&format!("cargo {} (a canary: must be caught)", arguments.join(" ")));
    let output = cargo(root, &arguments).output().map_err(|error| format!("cannot run cargo: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && errors.contains(REPORT) {
        println!("the canary was caught: AddressSanitizer is on");
        return Ok(());
    }
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{errors}");
    Err("the canary test was not caught, so AddressSanitizer is not on".to_owned())
}

/// Cargo, set up to build everything for the target with the sanitizer.
fn cargo(root: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(cargo_program());
    command.current_dir(root).args(arguments);
    command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", root.join("target/asan"));
    // Leaks are not looked for: the detector stops the process with ptrace, which containers often forbid, and then fails
    // for that alone. What is used after it was freed is the question here.
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    command
}

/// Where the compiler's libraries lie, and the target that it compiles for unless told otherwise.
fn toolchain() -> Option<(PathBuf, String)> {
    let ask = |arguments: &[&str]| {
        let output = Command::new("rustc").args(arguments).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let version = ask(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "))?;
    let root = ask(&["--print", "sysroot"])?;
    Some((Path::new(root.trim()).join("lib"), host.to_owned()))
}
