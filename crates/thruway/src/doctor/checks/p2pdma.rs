//! PCI P2PDMA, the kernel's own way from a drive into a GPU: the way of GPUDirect Storage from CUDA 12.8 on where
//! nvidia-fs is not used.

use super::{Context, find_out, why};
use crate::base::ByteSize;
use crate::doctor::facts::{FactsExt, Unseen, calls};
use crate::doctor::machine::{Gpu, Line, Machine, PciDevice, Target};
use crate::doctor::parse::nvidia::{registry_value, registry_words};
use crate::doctor::parse::{field, value};
use crate::doctor::report::{Finding, Route, Verdict};

const CUFILE: [Route; 1] = [Route::CufileP2pdma];
const KERNEL: [Route; 1] = [Route::KernelP2pdma];
const PARAMETERS: &str = "/proc/driver/nvidia/params";
const MULTIPATH: &str = "/sys/module/nvme_core/parameters/multipath";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    findings.push(kernel(context));
    findings.extend(driver(context));
    if !context.machine.is_grace() {
        findings.extend(parameters(context));
        findings.extend(multipath(context));
    }
    for gpu in &context.machine.gpus {
        findings.push(memory(gpu));
        findings.push(iommu(context.machine, gpu.device.as_ref(), &gpu.label()).about(gpu.label()));
    }
}

/// Devices other than GPUs whose memory a program may take from the kernel's pool (`p2pmem/allocate`): controller memory
/// buffers of NVMe drives.
pub(super) fn pools(context: &Context<'_>, findings: &mut Vec<Finding>) {
    for pool in &context.machine.pools {
        let bytes = ByteSize(pool.peer_bytes.unwrap_or(0));
        let source = format!("/sys/bus/pci/devices/{}/p2pmem/size", pool.address);
        findings
            .push(Finding::ok("p2pdma.pool", format!("it offers {bytes} to programs and peers"), source).about(&pool.address));
    }
}

fn kernel(context: &Context<'_>) -> Finding {
    let machine = context.machine;
    if machine.kernel.is_some() && !machine.kernel_at_least(&[6, 2]) && !is_carried_back(machine) {
        return Finding::new(
            "p2pdma.kernel",
            Verdict::Warning,
            "the kernel is older than 6.2, the first to take O_DIRECT into peers",
            "uname",
        )
        .remedy("use Linux 6.2 or newer (Ubuntu 24.04, RHEL 9.4)")
        .shuts(&Route::P2PDMA);
    }
    let is_published = |device: &PciDevice| device.peer_bytes.is_some();
    let gpus = machine.gpus.iter().filter_map(|gpu| gpu.device.as_ref());
    if gpus.chain(&machine.pools).any(is_published) {
        return Finding::ok("p2pdma.kernel", "the kernel has PCI P2PDMA", "/sys/bus/pci/devices/*/p2pmem");
    }
    let files = [format!("/boot/config-{}", machine.release), format!("/lib/modules/{}/config", machine.release)];
    let asked: Vec<_> = files.iter().map(|file| (file.as_str(), context.facts.lines(file, "CONFIG_PCI_P2PDMA="))).collect();
    let is_denied = asked.iter().any(|(_, lines)| *lines == Err(Unseen::Denied));
    let configured = asked.into_iter().find_map(|(file, lines)| Some((file, lines.ok()?.trim() == "CONFIG_PCI_P2PDMA=y")));
    match configured.or_else(|| Some(("/proc/kallsyms", has_functions(context)?))) {
        Some((source, true)) => Finding::ok("p2pdma.kernel", "the kernel has PCI P2PDMA", source),
        Some((source, false)) => {
            Finding::new("p2pdma.kernel", Verdict::Warning, "the kernel was built without PCI P2PDMA", source)
                .remedy("use a kernel with CONFIG_PCI_P2PDMA=y, such as those of Ubuntu and RHEL")
                .shuts(&Route::P2PDMA)
        }
        None => {
            let seen = "whether the kernel has PCI P2PDMA cannot be seen";
            let what = "whether the kernel has PCI P2PDMA, which it has with `y`";
            let unseen = if is_denied { Unseen::Denied } else { Unseen::Absent };
            Finding::new("p2pdma.kernel", Verdict::Unknown, seen, &files[0])
                .remedy(find_out(&unseen, what, "zgrep CONFIG_PCI_P2PDMA= /proc/config.gz"))
                .shuts(&Route::P2PDMA)
        }
    }
}

/// Whether Red Hat carried it back to this kernel: to 5.14 in RHEL 9.4 and newer, but for 9.5 on x86 (NVIDIA's support table).
fn is_carried_back(machine: &Machine) -> bool {
    let minor =
        machine.release.split_once("el9_").map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
    minor.and_then(|minor| minor.parse::<u32>().ok()).is_some_and(|minor| minor >= 4 && !(minor == 5 && machine.is_x86()))
}

/// Whether the functions of PCI P2PDMA are among the running kernel's. They are part of it, never of a module.
fn has_functions(context: &Context<'_>) -> Option<bool> {
    match value(&context.facts.call(calls::FUNCTIONS).ok()?, "p2pdma") {
        Some("yes") => Some(true),
        Some("no") => Some(false),
        _ => None,
    }
}

fn driver(context: &Context<'_>) -> Option<Finding> {
    let machine = context.machine;
    let driver = machine.driver.as_ref().ok().filter(|driver| driver.is_open)?;
    let source = "/proc/driver/nvidia/version";
    let shut = |seen: &str, remedy: &str| {
        Some(Finding::new("p2pdma.driver", Verdict::Warning, seen, source).remedy(remedy).shuts(&Route::P2PDMA))
    };
    let version = &driver.version;
    if !version.at_least(&[565, 47]) {
        return shut("drivers before 565.47 know no P2PDMA", "install driver 570 or newer");
    }
    if machine.kernel_at_least(&[6, 15]) && version.at_least(&[580]) && !version.at_least(&[595, 71, 5]) {
        return shut(
            "this driver fails to offer its memory from Linux 6.15 on (CUDA error 1)",
            "install driver 595.71.05 or newer",
        );
    }
    if version.0.starts_with(&[610, 57]) {
        return shut("this driver offers an empty pool (seen with 610.57.04)", "install another driver");
    }
    Some(Finding::ok("p2pdma.driver", format!("driver {} knows P2PDMA", driver.text), source))
}

fn parameters(context: &Context<'_>) -> Option<Finding> {
    // Without the driver its settings are not the question.
    if context.machine.driver == Err(Unseen::Absent) {
        return None;
    }
    let strange = || Unseen::Failed("it has no RegistryDwords".to_owned());
    let has_words = |text: &String| field(text, "RegistryDwords", ':').is_some();
    let text = match context.facts.file(PARAMETERS).and_then(|text| Some(text).filter(has_words).ok_or_else(strange)) {
        Ok(text) => text,
        Err(unseen) => {
            let seen = format!("with which settings the driver was loaded cannot be seen: {}", why(&unseen));
            let finding = Finding::new("p2pdma.parameters", Verdict::Unknown, seen, PARAMETERS).shuts(&CUFILE);
            let command = format!("grep RegistryDwords {PARAMETERS}");
            return Some(finding.remedy(find_out(&unseen, "with which settings the driver was loaded", &command)));
        }
    };
    let words = registry_words(&text);
    let missing: Vec<&str> = [("RMForceStaticBar1", &[1, 2][..]), ("RmForceDisableIomapWC", &[1][..])]
        .iter()
        .filter(|(name, values)| registry_value(&words, name).is_none_or(|value| !values.contains(&value)))
        .map(|(name, _)| *name)
        .collect();
    if missing.is_empty() {
        return Some(Finding::ok("p2pdma.parameters", "the driver was loaded with both settings that P2PDMA needs", PARAMETERS));
    }
    let remedy = "put `options nvidia NVreg_RegistryDwords=\"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"` into \
                  /etc/modprobe.d/nvidia-p2pdma.conf, build the initial RAM disk anew, restart";
    let seen = format!("the driver was loaded without {} (CUDA error 801)", missing.join(" and "));
    Some(Finding::new("p2pdma.parameters", Verdict::Warning, seen, PARAMETERS).remedy(remedy).shuts(&CUFILE))
}

fn multipath(context: &Context<'_>) -> Option<Finding> {
    let value = match context.facts.line(MULTIPATH) {
        // A kernel that cannot join ways has no such setting.
        Err(Unseen::Absent) => return None,
        value => value,
    };
    let unseen = value.as_ref().err().cloned().unwrap_or_else(|| Unseen::Failed(String::new()));
    Some(match value.as_deref().unwrap_or_default() {
        "N" | "0" => Finding::ok("p2pdma.multipath", "the NVMe driver joins no ways to a drive", MULTIPATH),
        "Y" | "1" => Finding::new(
            "p2pdma.multipath",
            Verdict::Warning,
            "the NVMe driver joins several ways to a drive, and refuses peers",
            MULTIPATH,
        )
        .remedy("start the kernel with nvme_core.multipath=N")
        .shuts(&Route::P2PDMA),
        _ => {
            let seen = "whether the NVMe driver joins several ways to a drive cannot be seen";
            Finding::new("p2pdma.multipath", Verdict::Unknown, seen, MULTIPATH)
                .remedy(find_out(&unseen, "whether the NVMe driver joins ways to a drive", &format!("cat {MULTIPATH}")))
                .shuts(&Route::P2PDMA)
        }
    })
}

fn memory(gpu: &Gpu) -> Finding {
    let source = format!("/sys/bus/pci/devices/{}/p2pmem/size", gpu.address);
    let finding = |verdict, seen: String| Finding::new("p2pdma.memory", verdict, seen, source.clone()).about(gpu.label());
    match gpu.device.as_ref().and_then(|device| device.peer_bytes) {
        // What CUDA has not allocated is not a program's to take from the pool, so the kernel's own way is not open.
        Some(bytes @ 1..) => {
            finding(Verdict::Ok, format!("it offers {} to its peers, by way of CUDA", ByteSize(bytes))).rules_out(&KERNEL)
        }
        Some(_) => finding(Verdict::Warning, "its pool of memory for peers is empty".to_owned())
            .remedy("load the driver with RMForceStaticBar1=1, and switch on resizable BAR")
            .shuts(&CUFILE)
            .rules_out(&KERNEL),
        None if gpu.line == Line::Integrated => {
            finding(Verdict::NotApplicable, "it shares the host's memory, and has no pool".to_owned()).rules_out(&KERNEL)
        }
        None if gpu.is_on_grace() => {
            finding(Verdict::NotApplicable, "cuFile goes by the link to the processor (C2C), which needs no pool".to_owned())
                .rules_out(&KERNEL)
        }
        // The driver makes it when CUDA starts, so a machine that has just started may have none yet.
        None => finding(Verdict::Unknown, "it offers no memory through the kernel's pools, or not yet".to_owned())
            .remedy("find out whether the GPU offers any once a CUDA program runs: `thruway verify-direct`, then ask again")
            .shuts(&CUFILE)
            .rules_out(&KERNEL),
    }
}

/// What the IOMMU does with a device's requests. NVIDIA's driver offers no memory to peers where it translates on x86, and with
/// nvidia-fs NVIDIA warrants neither that it works nor that it is fast; the kernel's own P2PDMA maps peers for it. The SMMU of Arm servers, which is always on, does not stop cuFile's way there.
fn iommu(machine: &Machine, device: Option<&PciDevice>, name: &str) -> Finding {
    const REMEDY: &str = "start the kernel with iommu=pt, or switch the IOMMU off in the firmware's set-up";
    let address = device.map_or("*", |device| &device.address);
    let source = format!("/sys/bus/pci/devices/{address}/iommu_group/type");
    let finding = |verdict, seen: String| Finding::new("p2pdma.iommu", verdict, seen, source.clone());
    let kind = device.map_or(Err(&Unseen::Absent), |device| device.iommu.as_ref());
    match kind.map(String::as_str) {
        Err(Unseen::Absent) if device.is_some() => finding(Verdict::Ok, format!("no IOMMU lies between {name} and its peers")),
        Ok("identity") => finding(Verdict::Ok, format!("the IOMMU passes the requests of {name} through")),
        Ok(kind) if !machine.is_x86() => finding(Verdict::Ok, format!("the SMMU handles the requests of {name} ({kind})")),
        Ok(kind) if kind.starts_with("DMA") => {
            let seen = format!(
                "the IOMMU translates the requests of {name} ({kind}): P2PDMA refuses them, and nvidia-fs is not warranted to work"
            );
            finding(Verdict::Warning, seen).remedy(REMEDY).shuts(&Route::CUFILE)
        }
        kind => {
            let unseen = kind.err().cloned().unwrap_or_else(|| Unseen::Failed(String::new()));
            let what = format!("what the IOMMU does with the requests of {name}");
            finding(Verdict::Unknown, format!("{what} cannot be seen"))
                .remedy(find_out(&unseen, &format!("{what} (identity is well)"), &format!("cat {source}")))
                .shuts(&Route::CUFILE)
        }
    }
}

/// The same for the drives of a place: what speaks for all of them.
pub(super) fn drives_iommu(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let machine = context.machine;
    if machine.gpus.is_empty() && machine.pools.is_empty() || !target.is_on_local_nvme() {
        return None;
    }
    let findings = target.drives.iter().map(|drive| iommu(machine, drive.device.as_ref(), &drive.name));
    findings.max_by_key(|finding| (finding.verdict != Verdict::Ok, finding.verdict))
}
