//! `nvidia-fs`, the kernel module of GPUDirect Storage.

use super::Context;
use crate::doctor::facts::FactsExt;
use crate::doctor::machine::{DriveKind, is_loaded, nvidia_fs_is_installed};
use crate::doctor::parse::Version;
use crate::doctor::parse::nvidia::statistics;
use crate::doctor::report::{Finding, Route, Verdict};

const NVFS: [Route; 1] = [Route::NvidiaFs];
const MODULES: &str = "/proc/modules";
const REGISTERED: &str = "/proc/driver/nvidia-fs/modules";
const STATISTICS: &str = "/proc/driver/nvidia-fs/stats";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let facts = context.facts;
    if !is_loaded(facts, "nvidia_fs") {
        findings.push(absent(context));
        return;
    }
    let version = facts.line("/sys/module/nvidia_fs/version").ok().filter(|version| Version::parse(version).is_some());
    let shown = version.as_deref().unwrap_or("of an unknown version");
    findings.push(Finding::ok("nvidia_fs.module", format!("nvidia-fs {shown} is loaded"), MODULES));
    let version = version.as_deref().and_then(Version::parse);
    findings.extend(fitting(context, version.as_ref()));
    findings.push(nodes(context));
    findings.extend(registered(context));
    findings.extend(counters(context));
}

fn absent(context: &Context<'_>) -> Finding {
    let machine = context.machine;
    let is_installed = nvidia_fs_is_installed(context.facts, &machine.release);
    let finding = |seen, remedy| Finding::new("nvidia_fs.module", Verdict::Warning, seen, MODULES).remedy(remedy).shuts(&NVFS);
    match (machine.container, is_installed) {
        (Some(_), _) => finding("nvidia-fs is not loaded", "load it on the host: `sudo modprobe nvidia-fs`"),
        (_, true) => finding("nvidia-fs is installed and not loaded", "load it: `sudo modprobe nvidia-fs`"),
        _ => finding(
            "nvidia-fs is not loaded, and not installed for this kernel",
            "install the package nvidia-fs-dkms, then `sudo modprobe nvidia-fs`",
        ),
    }
}

/// Whether the module goes with the driver and the kernel.
fn fitting(context: &Context<'_>, version: Option<&Version>) -> Option<Finding> {
    let machine = context.machine;
    let closed = machine.driver.as_ref().is_ok_and(|driver| !driver.is_open);
    // From 2.17.5 on it uses what the closed module may not offer (GPL-only symbols).
    if closed && version.is_some_and(|version| version.at_least(&[2, 17, 5])) {
        let seen = "this nvidia-fs needs the open kernel module, and the closed one is loaded";
        let remedy = "install the open kernel module (package nvidia-open), or nvidia-fs 2.17.4 at most";
        return Some(
            Finding::new("nvidia_fs.version", Verdict::Fault, seen, "/proc/driver/nvidia/version").remedy(remedy).shuts(&NVFS),
        );
    }
    if machine.kernel_at_least(&[6, 17]) {
        let seen =
            "from Linux 6.17 on, drives that take scatter lists may hang with nvidia-fs unless the driver is DOCA 3.3 or newer";
        return Some(Finding::new("nvidia_fs.version", Verdict::Warning, seen, "uname").remedy("use PCI P2PDMA instead"));
    }
    None
}

fn nodes(context: &Context<'_>) -> Finding {
    const NODE: &str = "/dev/nvidia-fs0";
    if context.facts.exists(NODE) {
        return Finding::ok("nvidia_fs.nodes", "its device nodes are there", NODE);
    }
    let (verdict, remedy) = match context.machine.container {
        Some(_) => (Verdict::Warning, "start the container with `--device /dev/nvidia-fs0` and so on to 15"),
        None => (Verdict::Fault, "load the module anew: `sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs`"),
    };
    Finding::new("nvidia_fs.nodes", verdict, "the module is loaded and its device nodes are not there", NODE)
        .remedy(remedy)
        .shuts(&NVFS)
}

/// Whether the driver of local NVMe drives has registered itself: only patched ones do.
fn registered(context: &Context<'_>) -> Option<Finding> {
    let mut drives = context.machine.targets.iter().flat_map(|target| &target.drives);
    drives.find(|drive| matches!(&drive.kind, DriveKind::Nvme(transport) if transport == "pcie"))?;
    let Ok(text) = context.facts.file(REGISTERED) else {
        let seen = "it cannot be seen which storage drivers have registered with nvidia-fs";
        return Some(Finding::new("nvidia_fs.nvme", Verdict::Unknown, seen, REGISTERED));
    };
    Some(if text.lines().any(|line| line.trim_start().starts_with("nvme")) {
        Finding::ok("nvidia_fs.nvme", "the NVMe driver has registered with nvidia-fs", REGISTERED)
    } else {
        Finding::new("nvidia_fs.nvme", Verdict::Warning, "the NVMe driver has not registered with nvidia-fs", REGISTERED)
            .remedy(
                "install NVIDIA's NVMe driver (DOCA or MLNX_OFED with GDS, or Ubuntu's kernel linux-nvidia), or use PCI P2PDMA",
            )
            .shuts(&NVFS)
    })
}

fn counters(context: &Context<'_>) -> Option<Finding> {
    let statistics = statistics(&context.facts.file(STATISTICS).ok()?);
    if !statistics.errors.is_empty() {
        let errors: Vec<String> = statistics.errors.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let seen = format!("its counters of errors are not 0: {}", errors.join(", "));
        let remedy = "see `dmesg | grep nvidia-fs`; if they grow, requests fail";
        return Some(Finding::new("nvidia_fs.counters", Verdict::Warning, seen, STATISTICS).remedy(remedy));
    }
    if statistics.reads.is_none() {
        return Some(Finding::new("nvidia_fs.counters", Verdict::Unknown, "its counters cannot be read", STATISTICS));
    }
    let done = |row: Option<(u64, u64)>| row.map_or_else(|| "an unknown number of".to_owned(), |(done, _)| done.to_string());
    let seen = format!("{} reads and {} writes so far, none failed", done(statistics.reads), done(statistics.writes));
    Some(Finding::ok("nvidia_fs.counters", seen, STATISTICS))
}
