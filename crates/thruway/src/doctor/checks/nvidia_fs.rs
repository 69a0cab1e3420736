//! `nvidia-fs`, the kernel module of GPUDirect Storage.

use super::{Context, find_out, why};
use crate::doctor::facts::{FactsExt, Unseen};
use crate::doctor::machine::{REGISTER, Target, exported_symbols, has_patched_nvme, nvidia_fs_is_installed};
use crate::doctor::parse::Version;
use crate::doctor::parse::mounts::Mount;
use crate::doctor::parse::nvidia::statistics;
use crate::doctor::report::{Finding, Route, Verdict};

const NVFS: [Route; 1] = [Route::NvidiaFs];
const MODULES: &str = "/proc/modules";
const REGISTERED: &str = "/proc/driver/nvidia-fs/modules";
const VERSION: &str = "/sys/module/nvidia_fs/version";
const STATISTICS: &str = "/proc/driver/nvidia-fs/stats";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let facts = context.facts;
    match facts.lines(MODULES, "nvidia_fs ") {
        Ok(lines) if !lines.is_empty() => {}
        Ok(_) | Err(Unseen::Absent) => {
            // Without such a driver the module would be for nothing, so that comes first.
            findings.extend(context.machine.targets.iter().filter_map(|target| unpatched(context, target)));
            findings.push(absent(context));
            findings.extend(hang(context));
            return;
        }
        Err(unseen) => {
            let seen = format!("whether nvidia-fs is loaded cannot be seen: {}", why(&unseen));
            let finding = Finding::new("nvidia_fs.module", Verdict::Unknown, seen, MODULES).shuts(&NVFS);
            findings.push(finding.remedy(find_out(&unseen, "whether nvidia-fs is loaded", "grep nvidia_fs /proc/modules")));
            return;
        }
    }
    let version = facts.line(VERSION).ok().filter(|version| Version::parse(version).is_some());
    let shown = version.as_deref().unwrap_or("of an unknown version");
    findings.push(Finding::ok("nvidia_fs.module", format!("nvidia-fs {shown} is loaded"), MODULES));
    let version = version.as_deref().and_then(Version::parse);
    findings.extend(fitting(context, version.as_ref()).or_else(|| hang(context)));
    if let Some(unwanted) = unwanted(context) {
        findings.push(unwanted);
        return;
    }
    findings.push(nodes(context));
    findings.extend(context.machine.targets.iter().filter_map(|target| registered(context, target)));
    findings.extend(counters(context));
}

fn absent(context: &Context<'_>) -> Finding {
    let machine = context.machine;
    let is_installed = nvidia_fs_is_installed(context.facts, &machine.release);
    let finding = |seen, remedy| Finding::new("nvidia_fs.module", Verdict::Warning, seen, MODULES).remedy(remedy).shuts(&NVFS);
    match (machine.container, is_installed) {
        (Some(_), _) => finding("nvidia-fs is not loaded", "load nvidia-fs on the host: `sudo modprobe nvidia-fs`"),
        (_, true) => finding(
            "nvidia-fs is installed and not loaded",
            "load nvidia-fs: `sudo modprobe nvidia-fs`; if the driver was updated since (to 580.82.05 or newer), build it anew first",
        ),
        _ => finding(
            "nvidia-fs is not loaded, and not installed for this kernel",
            "install the package nvidia-fs-dkms, then `sudo modprobe nvidia-fs`",
        ),
    }
}

/// From Linux 6.17 on drives may hang with nvidia-fs (release notes of GPUDirect Storage): nobody is sent there.
fn hang(context: &Context<'_>) -> Option<Finding> {
    if !context.machine.kernel_at_least(&[6, 17]) {
        return None;
    }
    let has_doca = context.facts.link("/sys/module/mlx_compat").is_ok();
    let (verdict, remedy) = if has_doca {
        (Verdict::Unknown, "find out whether DOCA is 3.3 or newer (`ofed_info -s`); else do not use nvidia-fs: use PCI P2PDMA")
    } else {
        (Verdict::Warning, "do not use nvidia-fs here: use PCI P2PDMA, or DOCA 3.3 or newer")
    };
    let seen =
        "from Linux 6.17 on drives that take scatter lists may hang with nvidia-fs, unless their driver is DOCA 3.3 or newer";
    Some(Finding::new("nvidia_fs.version", verdict, seen, "uname").remedy(remedy).shuts(&NVFS))
}

/// On the DGX Spark, whose GPU shares the host's memory, NVIDIA says not to load it.
fn unwanted(context: &Context<'_>) -> Option<Finding> {
    let is_spark = context.machine.gpus.iter().any(|gpu| gpu.name.split_whitespace().any(|word| word == "GB10"));
    let seen = "nvidia-fs is loaded beside a GB10, where NVIDIA says not to load it";
    let finding = Finding::new("nvidia_fs.unwanted", Verdict::Warning, seen, MODULES);
    is_spark.then(|| finding.remedy("unload nvidia-fs: `sudo modprobe -r nvidia-fs`"))
}

/// Whether the module goes with the driver and the library.
fn fitting(context: &Context<'_>, version: Option<&Version>) -> Option<Finding> {
    let machine = context.machine;
    let closed = machine.driver.as_ref().is_ok_and(|driver| !driver.is_open);
    let library = machine.library.as_ref().ok().and_then(|library| library.version.as_ref());
    // gdscheck of 1.16 names its least version; older libraries name none.
    let has_least = library.is_some_and(|library| library.at_least(&[1, 16]));
    let Some(version) = version else {
        let seen = "the version of nvidia-fs cannot be seen, so whether it goes with the driver and libcufile is unknown";
        let finding = Finding::new("nvidia_fs.version", Verdict::Unknown, seen, VERSION).shuts(&NVFS);
        return (closed || has_least)
            .then(|| finding.remedy("find out the version of nvidia-fs: `modinfo -F version nvidia-fs`"));
    };
    // From 2.17.5 on it uses what the closed module may not offer (GPL-only symbols).
    if closed && version.at_least(&[2, 17, 5]) {
        let seen = "this nvidia-fs needs the open kernel module, and the closed one is loaded";
        let remedy = "install the open kernel module (package nvidia-open), or nvidia-fs 2.17.4 at most";
        let finding = Finding::new("nvidia_fs.version", Verdict::Fault, seen, "/proc/driver/nvidia/version");
        return Some(finding.remedy(remedy).shuts(&NVFS));
    }
    if has_least && !version.at_least(&[2, 12]) {
        let seen = format!("nvidia-fs {version} is too old for this libcufile, which asks for 2.12 at least (5004)");
        let finding = Finding::new("nvidia_fs.version", Verdict::Fault, seen, VERSION);
        return Some(finding.remedy("install a newer nvidia-fs (package nvidia-fs-dkms)").shuts(&NVFS));
    }
    None
}

fn nodes(context: &Context<'_>) -> Finding {
    const NODE: &str = "/dev/nvidia-fs0";
    let finding = |verdict, seen: String| Finding::new("nvidia_fs.nodes", verdict, seen, NODE).shuts(&NVFS);
    match (context.facts.link(NODE), context.machine.container) {
        (Ok(_), _) => Finding::ok("nvidia_fs.nodes", "its device nodes are there", NODE),
        (Err(Unseen::Absent), Some(_)) => {
            finding(Verdict::Warning, "the module is loaded and its device nodes are not there".to_owned())
                .remedy("start the container with `--device /dev/nvidia-fs0` and so on to 15")
        }
        (Err(Unseen::Absent), None) => {
            finding(Verdict::Fault, "the module is loaded and its device nodes are not there".to_owned())
                .remedy("load nvidia-fs anew: `sudo modprobe -r nvidia-fs && sudo modprobe nvidia-fs`")
        }
        (Err(unseen), _) => finding(Verdict::Unknown, format!("the device nodes of nvidia-fs cannot be seen: {}", why(&unseen)))
            .remedy(find_out(&unseen, "whether the device nodes of nvidia-fs are there", "ls /dev/nvidia-fs*")),
    }
}

/// The driver of a place's storage that has to register itself with nvidia-fs, as `/proc/driver/nvidia-fs/modules` names it
/// (nvfs-dma.h of nvidia-fs 2.28), and what brings one that does. What moves its bytes from user space needs none.
fn storage_driver(target: &Target) -> Option<(&'static str, &'static str)> {
    const NVME: &str =
        "install an NVMe driver that knows nvidia-fs (DOCA or MLNX_OFED with GDS, or Ubuntu's kernel linux-nvidia)";
    const OFED: &str = "install DOCA or MLNX_OFED with GDS (`--with-nvmf --with-nfsrdma --enable-gds`)";
    let kind = target.mount.as_ref().map(|mount| mount.kind.as_str()).unwrap_or_default();
    match kind {
        // What goes over TCP is not theirs.
        _ if target.mount.as_ref().and_then(Mount::is_over_rdma) == Some(false) => None,
        "nfs" | "nfs4" => Some(("rpcrdma", OFED)),
        "lustre" => Some(("lnet", "install a Lustre client with GPUDirect Storage (DDN EXAScaler)")),
        "beegfs" => Some(("beegfs", "build the BeeGFS client with NVIDIA's support (`NVFS_INCLUDE_PATH`)")),
        "scatefs" => Some(("scatefs", "install a ScaTeFS client with GPUDirect Storage")),
        _ if target.is_on_local_nvme() => Some(("nvme", NVME)),
        _ if target.is_on_remote_nvme() => Some(("nvme_rdma", OFED)),
        _ => None,
    }
}

/// Whether the driver of a place's storage has registered itself: only patched ones do.
fn registered(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let (driver, remedy) = storage_driver(target)?;
    let text = match context.facts.file(REGISTERED) {
        Ok(text) => text,
        Err(unseen) => {
            let seen = format!("which storage drivers have registered with nvidia-fs cannot be seen: {}", why(&unseen));
            let finding = Finding::new("nvidia_fs.storage", Verdict::Unknown, seen, REGISTERED).about(&target.path).shuts(&NVFS);
            return Some(finding.remedy(find_out(&unseen, "which have", &format!("cat {REGISTERED}"))));
        }
    };
    let is_there = text.lines().any(|line| line.split(':').next().is_some_and(|name| name.trim() == driver));
    Some(if is_there {
        Finding::ok("nvidia_fs.storage", format!("its driver {driver} has registered with nvidia-fs"), REGISTERED)
            .about(&target.path)
    } else {
        let seen = format!("its driver {driver} has not registered with nvidia-fs");
        if driver == "nvme" && has_library_that_fails(context) {
            let seen = format!("{seen}, and libcufile 1.16.0 fails there from the second file on while nvidia-fs is loaded");
            let finding = Finding::new("nvidia_fs.storage", Verdict::Fault, seen, REGISTERED).about(&target.path);
            return Some(
                finding
                    .remedy("unload nvidia-fs (`sudo modprobe -r nvidia-fs`), or install another libcufile")
                    .shuts(&Route::CUFILE),
            );
        }
        Finding::new("nvidia_fs.storage", Verdict::Warning, seen, REGISTERED).about(&target.path).remedy(remedy).shuts(&NVFS)
    })
}

/// A known issue of libcufile 1.16.0.
fn has_library_that_fails(context: &Context<'_>) -> bool {
    let library = context.machine.library.as_ref().ok().and_then(|library| library.version.as_ref());
    library.is_some_and(|version| version.0.starts_with(&[1, 16, 0]))
}

/// The same while nvidia-fs is not loaded: without a patched driver of the drives it would move nothing.
fn unpatched(context: &Context<'_>, target: &Target) -> Option<Finding> {
    const OFED: &str = "/sys/module/mlx_compat";
    if !target.is_on_local_nvme() || has_patched_nvme(context.facts, &context.machine.release) {
        return None;
    }
    let (driver, remedy) = storage_driver(target)?;
    let table = exported_symbols(&context.machine.release);
    let is_told = context.facts.lines(&table, &format!("alias symbol:{}", REGISTER[0])).is_ok();
    let source = if is_told { table } else { OFED.to_owned() };
    let finding =
        |verdict, seen: String| Finding::new("nvidia_fs.storage", verdict, seen, &source).about(&target.path).shuts(&NVFS);
    Some(match context.facts.link(OFED) {
        Err(unseen) if unseen != Unseen::Absent => {
            finding(Verdict::Unknown, format!("whether its driver {driver} knows nvidia-fs cannot be seen: {}", why(&unseen)))
                .remedy(find_out(&unseen, "whether DOCA or MLNX_OFED is installed", "ofed_info -s"))
        }
        _ => {
            let seen = format!(
                "as far as can be seen its driver {driver} does not know nvidia-fs, which moves nothing without one that does"
            );
            finding(Verdict::Warning, seen).remedy(remedy)
        }
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
