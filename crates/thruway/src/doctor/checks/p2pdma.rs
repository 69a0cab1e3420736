//! PCI P2PDMA, the kernel's own way from a drive into a GPU: the way of GPUDirect Storage from CUDA 12.8 on where
//! nvidia-fs is not used.

use super::Context;
use crate::base::ByteSize;
use crate::doctor::facts::FactsExt;
use crate::doctor::machine::Gpu;
use crate::doctor::parse::field;
use crate::doctor::parse::nvidia::registry_words;
use crate::doctor::report::{Finding, Route, Verdict};

const CUFILE: [Route; 1] = [Route::CufileP2pdma];
const KERNEL: [Route; 1] = [Route::KernelP2pdma];
const PARAMETERS: &str = "/proc/driver/nvidia/params";
const MULTIPATH: &str = "/sys/module/nvme_core/parameters/multipath";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    findings.push(kernel(context));
    findings.extend(driver(context));
    if context.machine.is_x86() {
        findings.extend(parameters(context));
        findings.extend(multipath(context));
    }
    for gpu in &context.machine.gpus {
        findings.push(memory(gpu));
        findings.push(iommu(gpu));
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
    // Red Hat carried it back to 5.14 in RHEL 9.4 (NVIDIA's support table).
    let is_rhel = ["el9_4", "el9_6"].iter().any(|mark| machine.release.contains(mark));
    if machine.kernel.is_some() && !machine.kernel_at_least(&[6, 2]) && !is_rhel {
        return Finding::new(
            "p2pdma.kernel",
            Verdict::Warning,
            "the kernel is older than 6.2, the first to take O_DIRECT into peers",
            "uname",
        )
        .remedy("use Linux 6.2 or newer (Ubuntu 24.04, RHEL 9.4)")
        .shuts(&Route::P2PDMA);
    }
    let path = format!("/boot/config-{}", machine.release);
    let has_memory = machine.gpus.iter().any(|gpu| gpu.device.as_ref().is_some_and(|device| device.peer_bytes.is_some()));
    match context.facts.lines(&path, "CONFIG_PCI_P2PDMA=") {
        Ok(lines) if lines.trim() == "CONFIG_PCI_P2PDMA=y" => Finding::ok("p2pdma.kernel", "the kernel has PCI P2PDMA", path),
        Ok(_) => Finding::new("p2pdma.kernel", Verdict::Warning, "the kernel was built without PCI P2PDMA", path)
            .remedy("use a kernel with CONFIG_PCI_P2PDMA=y, such as those of Ubuntu and RHEL")
            .shuts(&Route::P2PDMA),
        Err(_) if has_memory => Finding::ok("p2pdma.kernel", "the kernel has PCI P2PDMA", "/sys/bus/pci/devices/*/p2pmem"),
        Err(_) => Finding::new("p2pdma.kernel", Verdict::Unknown, "it cannot be seen whether the kernel has PCI P2PDMA", path),
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
    if !version.at_least(&[570]) {
        return shut("drivers before 570 know no P2PDMA", "install driver 570 or newer");
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
    let text = context.facts.file(PARAMETERS).ok()?;
    if field(&text, "RegistryDwords", ':').is_none() {
        let seen = "with which settings the driver was loaded cannot be seen";
        return Some(Finding::new("p2pdma.parameters", Verdict::Unknown, seen, PARAMETERS).shuts(&CUFILE));
    }
    let words = registry_words(&text);
    let has = |name: &str, values: &[&str]| {
        words.iter().filter_map(|word| word.split_once('=')).any(|(key, value)| key == name && values.contains(&value))
    };
    let missing: Vec<&str> = [("RMForceStaticBar1", &["1", "2"][..]), ("RmForceDisableIomapWC", &["1"][..])]
        .iter()
        .filter(|(name, values)| !has(name, values))
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
    let value = context.facts.line(MULTIPATH).ok()?;
    Some(match value.as_str() {
        "N" | "0" => Finding::ok("p2pdma.multipath", "the NVMe driver joins no ways to a drive", MULTIPATH),
        "Y" | "1" => Finding::new(
            "p2pdma.multipath",
            Verdict::Warning,
            "the NVMe driver joins several ways to a drive, and refuses peers",
            MULTIPATH,
        )
        .remedy("start the kernel with nvme_core.multipath=N")
        .shuts(&Route::P2PDMA),
        _ => Finding::new("p2pdma.multipath", Verdict::Unknown, "its value is neither Y nor N", MULTIPATH).shuts(&Route::P2PDMA),
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
        // cuFile makes the pages itself, by way of the driver; the kernel's own way needs the pool.
        None => finding(Verdict::NotApplicable, "it offers no memory through the kernel's pools".to_owned()).rules_out(&KERNEL),
    }
}

/// What the IOMMU does with the GPU's requests. Translated ones are refused between peers.
fn iommu(gpu: &Gpu) -> Finding {
    let source = format!("/sys/bus/pci/devices/{}/iommu_group/type", gpu.address);
    let kind = gpu.device.as_ref().and_then(|device| device.iommu.as_deref());
    match kind {
        None => Finding::ok("p2pdma.iommu", "no IOMMU lies between it and its peers", source).about(gpu.label()),
        Some("identity") => Finding::ok("p2pdma.iommu", "the IOMMU passes its requests through", source).about(gpu.label()),
        Some(kind) if !kind.starts_with("DMA") => {
            Finding::new("p2pdma.iommu", Verdict::Unknown, "what the IOMMU does with its requests is unknown", source)
                .about(gpu.label())
                .shuts(&Route::P2PDMA)
        }
        Some(kind) => Finding::new(
            "p2pdma.iommu",
            Verdict::Warning,
            format!("the IOMMU translates its requests ({kind})"),
            source,
        )
        .about(gpu.label())
        .remedy("start the kernel with iommu=pt (or the IOMMU off in the firmware's set-up): it slows nvidia-fs and stops P2PDMA")
        .shuts(&Route::P2PDMA),
    }
}
