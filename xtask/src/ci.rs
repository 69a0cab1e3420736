//! `cargo xtask ci`: exactly what CI runs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{asan, p2pdma, tidy};

/// One thing to check.
struct Step {
    name: &'static str,
    action: Action,
}

enum Action {
    /// A program and its arguments; it fails by its exit status.
    Program(PathBuf, Vec<&'static str>),
    /// A command of this very program.
    Own(&'static str, fn(&Path) -> Result<(), String>),
    /// Nothing: why not.
    Skip(String),
}

/// Runs the steps in order, each timed; the first failure ends it.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    let begun = Instant::now();
    let mut times: Vec<(&str, Result<Duration, String>)> = Vec::new();
    for step in steps(root) {
        let step_begun = Instant::now();
        let outcome = perform(root, &step);
        let elapsed = step_begun.elapsed();
        match outcome {
            Ok(None) => {
                println!("ci: {} passed in {}", step.name, seconds(elapsed));
                times.push((step.name, Ok(elapsed)));
            }
            Ok(Some(reason)) => {
                println!("ci: {} skipped: {reason}", step.name);
                times.push((step.name, Err(reason)));
            }
            Err(message) => return Err(format!("ci: {} failed after {}: {message}", step.name, seconds(elapsed))),
        }
    }
    println!("\nci: all steps passed in {}", seconds(begun.elapsed()));
    for (name, outcome) in times {
        match outcome {
            Ok(elapsed) => println!("  {name:<12} {:>9}", seconds(elapsed)),
            Err(reason) => println!("  {name:<12}   skipped ({reason})"),
        }
    }
    Ok(())
}

/// What CI checks: first what fails fast, last what takes long.
fn steps(root: &Path) -> Vec<Step> {
    let cargo = |name, arguments: &[&'static str]| Step { name, action: Action::Program(cargo_program(), arguments.to_vec()) };
    let ruff = |name, arguments: &[&'static str]| Step {
        name,
        action: Action::Program(environment_program(root, "ruff"), arguments.to_vec()),
    };
    let python = |name, program, arguments: &[&'static str]| Step {
        name,
        action: Action::Program(environment_program(root, program), arguments.to_vec()),
    };
    let fuzz = if root.join("fuzz/Cargo.toml").exists() {
        cargo("fuzz", &["check", "--manifest-path", "fuzz/Cargo.toml", "--locked"])
    } else {
        Step { name: "fuzz", action: Action::Skip("there are no fuzz targets".to_owned()) }
    };
    let asan = match asan::missing() {
        // On a machine of one's own the toolchain is what it is; CI must not lose a check without a word.
        Some(reason) if std::env::var_os("CI").is_none() => Step { name: "asan", action: Action::Skip(reason) },
        _ => Step { name: "asan", action: Action::Own("cargo xtask asan", asan::run) },
    };
    let p2pdma = match p2pdma::missing() {
        Some(reason) if std::env::var_os("CI").is_none() => Step { name: "p2pdma", action: Action::Skip(reason) },
        _ => Step { name: "p2pdma", action: Action::Own("cargo xtask p2pdma", p2pdma::run) },
    };
    vec![
        cargo("fmt", &["fmt", "--all", "--check"]),
        ruff("ruff", &["check", "."]),
        ruff("ruff format", &["format", "--check", "."]),
        Step { name: "tidy", action: Action::Own("cargo xtask tidy", tidy::run) },
        cargo("clippy", &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]),
        cargo("deny", &["deny", "--locked", "check", "bans", "licenses", "sources"]),
        python("wheel", "maturin", &["develop", "--quiet", "--locked", "--manifest-path", "python/Cargo.toml"]),
        python("mypy", "mypy", &["--strict", "python/thruway"]),
        python("pytest", "pytest", &["python"]),
        cargo("tests", &["nextest", "run", "--workspace", "--locked", "--profile", "ci"]),
        cargo("doctests", &["test", "--doc", "--workspace", "--locked"]),
        Step { name: "doc", action: Action::Own("cargo doc, warnings denied", doc) },
        fuzz,
        p2pdma,
        asan,
    ]
}

/// Carries out a step; gives the reason if there was nothing to do.
fn perform(root: &Path, step: &Step) -> Result<Option<String>, String> {
    match &step.action {
        Action::Program(program, arguments) => {
            announce(&format!("{} {}", program.file_name().unwrap_or_default().display(), arguments.join(" ")));
            let mut command = Command::new(program);
            command.args(arguments).current_dir(root);
            // A plain build is what users have; the nightly switch belongs to the sanitizer's step alone.
            command.env_remove("RUSTC_BOOTSTRAP");
            // Where maturin installs to.
            command.env("VIRTUAL_ENV", root.join(".venv"));
            let status = command.status().map_err(|error| format!("cannot run {}: {error}{HINT}", program.display()))?;
            if status.success() { Ok(None) } else { Err(format!("{} ended with {status}", program.display())) }
        }
        Action::Own(name, function) => {
            announce(name);
            function(root).map(|()| None)
        }
        Action::Skip(reason) => Ok(Some(reason.clone())),
    }
}

/// The documentation of the workspace builds without a warning.
fn doc(root: &Path) -> Result<(), String> {
    let mut command = Command::new(cargo_program());
    command.args(["doc", "--no-deps", "--workspace", "--locked"]).env("RUSTDOCFLAGS", "-Dwarnings").current_dir(root);
    command.env_remove("RUSTC_BOOTSTRAP");
    let status = command.status().map_err(|error| format!("cannot run cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("cargo doc ended with {status}")) }
}

const HINT: &str = "\nhint: scripts/setup-tests installs what the checks need";

/// Says what runs next, so that a step can be repeated by hand.
pub(crate) fn announce(command: &str) {
    println!("\n==> {command}");
}

/// The cargo that runs this program, which knows its toolchain, rather than whichever comes first on the search path.
pub(crate) fn cargo_program() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// A program of the test environment, where versions are pinned, or the machine's.
fn environment_program(root: &Path, name: &str) -> PathBuf {
    let pinned = root.join(".venv/bin").join(name);
    if pinned.exists() { pinned } else { PathBuf::from(name) }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
