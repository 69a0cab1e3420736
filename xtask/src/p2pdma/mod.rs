//! `cargo xtask p2pdma`: the direct path, proven in an emulated machine.
//!
//! QEMU emulates two NVMe drives. The memory of the controller of one of them stands for a GPU's; the other has a filesystem with
//! models on it. A kernel with peer-to-peer DMA boots there and runs `crates/thruway/tests/p2pdma.rs` and the `thruway`
//! command: once where the pair is possible, once where the kernel refuses it, and once where no memory is published.
//! Beside what the tests themselves find, the emulator's own trace must show that as many bytes as were called direct went
//! between the drive and the device's memory, and none where none may.
//!
//! No root and no KVM are needed. The kernel is built once, from Debian's source (see [`kernel`]).

mod guest;
mod kernel;
mod machine;

use std::path::{Path, PathBuf};
use std::process::Command;

use machine::{Machine, Topology};

/// The machines, each with the module of tests that it is for.
const MACHINES: [Machine; 3] = [
    Machine { tests: "one_switch", count: 5, cpu: "EPYC", topology: Topology::Switch, publishes: true },
    // This processor is none whose host bridges the kernel trusts with such transfers.
    Machine { tests: "apart", count: 2, cpu: "qemu64", topology: Topology::RootPorts, publishes: true },
    Machine { tests: "unpublished", count: 1, cpu: "EPYC", topology: Topology::Switch, publishes: false },
];

/// What this needs beyond a Rust toolchain: a program, and the Debian package that has it.
const PROGRAMS: [(&str, &str); 6] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("gzip", "gzip"),
    ("strip", "binutils"),
    ("mke2fs", "e2fsprogs"),
];

/// What is missing for this step, if anything.
pub(crate) fn missing() -> Option<String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Some("the emulated machine runs x86-64 Linux programs of this one".to_owned());
    }
    absent(&PROGRAMS).or_else(kernel::missing)
}

/// Names the packages of the programs that are not there.
fn absent(programs: &[(&str, &str)]) -> Option<String> {
    let lacking: Vec<&str> = programs.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect();
    (!lacking.is_empty()).then(|| format!("these packages are missing: {}", lacking.join(" ")))
}

/// Whether the shell finds a program; those of system administrators lie where an ordinary user does not look.
fn is_there(program: &str) -> bool {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&search).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    directories.into_iter().any(|directory| directory.join(program).is_file())
}

/// Boots every machine, and judges what it says.
pub(crate) fn run(root: &Path) -> Result<(), String> {
    if let Some(reason) = missing() {
        return Err(reason);
    }
    let folder = folder(root)?;
    let kernel = kernel::image(root, &folder)?;
    let initramfs = guest::initramfs(root, &folder)?;
    for machine in MACHINES {
        println!("\n{machine}");
        let drive = guest::drive(&folder)?;
        machine.boot(&folder, &kernel, &initramfs, &drive)?;
    }
    println!("\np2pdma: the direct path is proven where it exists, and refused by name where it does not");
    Ok(())
}

/// Where what is made is kept: beside cargo's own output.
fn folder(root: &Path) -> Result<PathBuf, String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |target| root.join(target));
    let folder = target.join("p2pdma");
    std::fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    Ok(folder)
}

/// Runs a program to its end; what it prints is shown only if it fails.
fn quietly(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = command.env("PATH", path).output().map_err(|error| format!("cannot run {name}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let tail: Vec<&str> = said.lines().rev().take(40).collect();
    Err(format!("{name} ended with {}:\n{}", output.status, tail.into_iter().rev().collect::<Vec<&str>>().join("\n")))
}
