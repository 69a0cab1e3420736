//! What lies between two devices, and whether the kernel lets them talk to each other there: the rules of its
//! `drivers/pci/p2pdma.c`.
//!
//! Below one bridge peers talk straight, unless access control (ACS) sends their requests up; what goes through the root complex
//! is allowed on AMD processors from Zen on, and between the host bridges of a list.

use super::Context;
use crate::doctor::facts::FactsExt;
use crate::doctor::machine::{PciDevice, Target};
use crate::doctor::parse::pci::{self, Distance};
use crate::doctor::quote::quoted;
use crate::doctor::report::{Finding, Route, Verdict};

const BRIDGES: &str = "/proc/driver/nvidia-fs/bridges";
const INTEL: u32 = 0x8086;
/// Host bridges of Intel through which the kernel lets peers talk (`pci_p2pdma_whitelist`): Xeon E5, E5 v3 and E7 v3, within one
/// host bridge only; Skylake-SP and Cascade Lake (their root ports stand for the bridge); Ice Lake-SP and newer.
const WITHIN_ONE: [u32; 4] = [0x3c00, 0x3c01, 0x2f00, 0x2f01];
const ACROSS: [u32; 6] = [0x2030, 0x2031, 0x2032, 0x2033, 0x2020, 0x09a2];

/// What the kernel makes of two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Peers {
    /// They may talk.
    Allowed,
    /// It cannot be seen whether they may.
    Unknown,
    /// Access control sends their requests through a root complex that peers must not pass.
    Redirected,
    /// A root complex lies between them that peers must not pass.
    Refused,
}

/// Says what lies between a place's drives and the nearest GPU.
pub(super) fn distance(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let machine = context.machine;
    if machine.gpus.is_empty() || !target.is_on_local_nvme() {
        return None;
    }
    let unknown = |seen: String, source: &str| {
        Finding::new("path.distance", Verdict::Unknown, seen, source)
            .remedy("find out what lies between them: `thruway topo`, `lspci -tv`")
            .shuts(&[Route::CufileP2pdma])
    };
    let devices: Vec<&PciDevice> = target.devices().collect();
    let nearest = super::super::route::nearest(machine, target).filter(|_| devices.len() == target.drives.len());
    let Some((gpu, distance)) = nearest else {
        return Some(unknown("how far the GPU and the drives lie from each other is unknown".to_owned(), "/sys/bus/pci/devices"));
    };
    let source = devices.first().map(|device| format!("/sys/bus/pci/devices/{}", device.address)).unwrap_or_default();
    let seen = format!("{} and the drives lie {}", gpu.label(), distance.describe());
    let finding = |verdict| Finding::new("path.distance", verdict, seen.clone(), source.clone());
    if gpu.is_on_grace() && !machine.is_x86() {
        return Some(Finding::ok("path.distance", format!("{seen}; cuFile goes by the link to the processor (C2C)"), source));
    }
    let gpu_device = gpu.device.as_ref()?;
    let told = told(context);
    let peers = devices.iter().map(|drive| between(context, told.as_deref(), gpu_device, drive)).max()?;
    Some(match (peers, distance) {
        (Peers::Allowed, Distance::Sockets) => finding(Verdict::Warning).remedy("use a GPU and drives of one socket"),
        (Peers::Allowed, _) => finding(Verdict::Ok),
        (Peers::Unknown, _) => unknown(format!("{seen}, and whether the kernel lets peers talk there cannot be seen"), &source),
        (Peers::Redirected, _) => {
            let seen = format!("{seen}, and access control sends what goes between them through a root complex that refuses it");
            Finding::new("path.distance", Verdict::Warning, seen, source.clone())
                .remedy(super::pcie::ACCESS_CONTROL_OFF)
                .shuts(&[Route::CufileP2pdma])
        }
        (Peers::Refused, _) => finding(Verdict::Warning)
            .remedy("put GPU and drives under one PCIe switch: through this root complex the kernel allows no P2PDMA")
            .rules_out(&[Route::CufileP2pdma]),
    })
}

/// Between sockets cuFile with nvidia-fs was seen to refuse files, and is not said to: only I/O tells.
pub(super) fn sockets(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let is_on_pcie = context.machine.is_x86() && target.is_on_local_nvme();
    let (gpu, distance) = super::super::route::nearest(context.machine, target).filter(|_| is_on_pcie)?;
    let seen = format!(
        "{} and the drives lie {}: cuFile with nvidia-fs was seen to refuse files there (5008)",
        gpu.label(),
        distance.describe()
    );
    let source = format!("/sys/bus/pci/devices/{}", gpu.address);
    let finding = Finding::new("path.sockets", Verdict::Unknown, seen, source).shuts(&[Route::NvidiaFs]);
    let remedy =
        format!("find out by I/O: `thruway verify-direct {}`; or use a GPU and drives of one socket", quoted(&target.path));
    (distance == Distance::Sockets).then(|| finding.remedy(remedy))
}

/// Says what lies between a place's drives and the nearest device that offers its memory to programs, where there is one.
pub(super) fn pool_distance(context: &Context<'_>, target: &Target) -> Option<Finding> {
    const KERNEL: [Route; 1] = [Route::KernelP2pdma];
    let (pool, distance) = super::super::route::pool(context.machine, target)?;
    let source = format!("/sys/bus/pci/devices/{}", pool.address);
    let Some(distance) = distance else {
        let seen = format!("how far {} lies from the drives is unknown", pool.address);
        let finding = Finding::new("path.pool", Verdict::Unknown, seen, source).shuts(&KERNEL);
        return Some(finding.remedy("find out what lies between them: `thruway topo`, `lspci -tv`"));
    };
    let seen = format!("{} and the drives lie {}", pool.address, distance.describe());
    let told = told(context);
    let peers = target.devices().map(|drive| between(context, told.as_deref(), pool, drive)).max()?;
    Some(match peers {
        Peers::Allowed => Finding::ok("path.pool", seen, source),
        Peers::Unknown => {
            let seen = format!("{seen}, and whether the kernel lets peers talk there cannot be seen");
            Finding::new("path.pool", Verdict::Unknown, seen, source)
                .remedy("find out by I/O: `thruway verify-direct`")
                .shuts(&KERNEL)
        }
        Peers::Redirected => {
            Finding::new("path.pool", Verdict::Warning, seen, source).remedy(super::pcie::ACCESS_CONTROL_OFF).shuts(&KERNEL)
        }
        Peers::Refused => Finding::new("path.pool", Verdict::Warning, seen, source)
            .remedy("put both under one PCIe switch: through this root complex the kernel allows no P2PDMA")
            .rules_out(&KERNEL),
    })
}

fn between(context: &Context<'_>, told: Option<&str>, one: &PciDevice, other: &PciDevice) -> Peers {
    let bridges = pci::bridges_between(&one.path, &other.path);
    let found: Vec<Option<bool>> = bridges.iter().map(|bridge| redirects(context, told, bridge)).collect();
    // Of several bridges one that sends requests up is enough.
    let is_redirected = if found.contains(&Some(true)) { Some(true) } else { (!found.contains(&None)).then_some(false) };
    let is_under_one = !bridges.is_empty();
    if is_under_one && is_redirected == Some(false) {
        return Peers::Allowed;
    }
    match (passes_root(context, one, other), is_under_one, is_redirected) {
        (Some(true), ..) => Peers::Allowed,
        (None, ..) | (_, true, None) => Peers::Unknown,
        (Some(false), true, _) => Peers::Redirected,
        (Some(false), false, _) => Peers::Refused,
    }
}

/// The bridges that send requests between peers up, as nvidia-fs tells everybody; configuration space beyond its head is the
/// superuser's alone.
pub(super) fn told(context: &Context<'_>) -> Option<String> {
    let is_list = |text: &String| text.lines().all(|line| pci::is_address(line.trim()) || line.trim().is_empty());
    context.facts.file(BRIDGES).ok().filter(is_list)
}

/// Where what is known of a bridge comes from.
pub(super) const fn source(told: Option<&str>) -> &'static str {
    if told.is_some() { BRIDGES } else { "/sys/bus/pci/devices/*/config" }
}

/// Whether a bridge sends requests between peers up.
pub(super) fn redirects(context: &Context<'_>, told: Option<&str>, bridge: &str) -> Option<bool> {
    match told {
        Some(text) => Some(text.lines().any(|line| line.trim() == bridge)),
        None => pci::redirects_upstream(&context.facts.bytes(&format!("/sys/bus/pci/devices/{bridge}/config")).ok()?),
    }
}

/// Whether the kernel lets two devices talk through the root complex; `None` where that cannot be seen.
fn passes_root(context: &Context<'_>, one: &PciDevice, other: &PciDevice) -> Option<bool> {
    const CPU: &str = "/proc/cpuinfo";
    if context.machine.is_x86() {
        let first = |word: &str| {
            let text = context.facts.lines(CPU, word).ok()?;
            Some(text.lines().next()?.split_once(':')?.1.trim().to_owned())
        };
        let vendor = first("vendor_id")?;
        if vendor == "AuthenticAMD" && first("cpu family")?.parse::<u32>().ok()? >= 0x17 {
            return Some(true);
        }
    }
    let (root, other_root) = (pci::root_of(&one.path)?, pci::root_of(&other.path)?);
    let is_one = root == other_root;
    let passes = |root: &str| {
        let (vendor, device) = host_bridge(context, root)?;
        Some(vendor == INTEL && (ACROSS.contains(&device) || is_one && WITHIN_ONE.contains(&device)))
    };
    match (passes(root), passes(other_root)) {
        (Some(true), Some(true)) => Some(true),
        (Some(false), _) | (_, Some(false)) => Some(false),
        _ => None,
    }
}

/// The vendor and device of a root complex: those of the first device on its bus, if that is in the first slot or a root port
/// (as behind Intel's VMD). One with neither is `(0, 0)`, which no list has.
fn host_bridge(context: &Context<'_>, root: &str) -> Option<(u32, u32)> {
    let bus = format!("{}:", root.strip_prefix("pci")?);
    let names = context.facts.list("/sys/bus/pci/devices").ok()?;
    let first = names.iter().filter(|name| name.starts_with(&bus)).min()?;
    let file = |name: &str| {
        let text = context.facts.line(&format!("/sys/bus/pci/devices/{first}/{name}")).ok()?;
        u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
    };
    let is_first_slot = first.ends_with(":00.0");
    if !is_first_slot && pci::class(&format!("{:#x}", file("class")?)) != Some(pci::Class::Bridge) {
        return Some((0, 0));
    }
    Some((file("vendor")?, file("device")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::Capture;
    use crate::doctor::machine::Machine;

    /// Two devices below two root ports, of one host bridge or of two.
    fn verdict(cpu: &str, bridges: [&str; 2], same: bool) -> Peers {
        let mut text = format!("thruway-facts 1\n@ call kernel\nrelease 6.8.0\nmachine x86_64\n{cpu}");
        let buses = ["0000:00", if same { "0000:00" } else { "0000:80" }];
        for (at, (bus, id)) in buses.iter().zip(bridges).enumerate() {
            let device = format!("0000:{}1:00.0", at + 1);
            text.push_str(&format!("@ link /sys/bus/pci/devices/{device}\n/sys/devices/pci{bus}/{bus}:0{at}.1/{device}\n"));
            if let Some((vendor, number)) = id.split_once(':') {
                text.push_str(&format!("@ file /sys/bus/pci/devices/{bus}:00.0/vendor\n0x{vendor}\n"));
                text.push_str(&format!("@ file /sys/bus/pci/devices/{bus}:00.0/device\n0x{number}\n"));
            }
        }
        text.push_str("@ list /sys/bus/pci/devices\n0000:00:00.0\n0000:80:00.0\n@ rest absent\n");
        let facts = Capture::parse(&text).expect("a capture");
        let machine = Machine::examine(&facts, &[]);
        let device = |address: &str| PciDevice::examine(&facts, address).expect("a device");
        let context = Context { facts: &facts, machine: &machine };
        between(&context, None, &device("0000:11:00.0"), &device("0000:21:00.0"))
    }

    #[test]
    fn root_complexes_are_judged_as_the_kernel_judges_them() {
        let cpu = |vendor: &str, family: u32| {
            format!(
                "@ lines vendor_id /proc/cpuinfo\nvendor_id : {vendor}\n@ lines cpu family /proc/cpuinfo\ncpu family : {family}\n"
            )
        };
        let (zen, older, intel) = (cpu("AuthenticAMD", 0x19), cpu("AuthenticAMD", 0x15), cpu("GenuineIntel", 6));
        for (cpu, bridges, same, expected) in [
            (&zen, ["", ""], false, Peers::Allowed),
            (&older, ["1022:1480", "1022:1480"], true, Peers::Refused),
            // Ice Lake-SP; Xeon E5 within one host bridge only; a desktop; a Q35 machine, whatever its processor is called
            (&intel, ["8086:09a2", "8086:09a2"], false, Peers::Allowed),
            (&intel, ["8086:2f00", "8086:2f00"], true, Peers::Allowed),
            (&intel, ["8086:2f00", "8086:2f00"], false, Peers::Refused),
            (&intel, ["8086:a700", "8086:a700"], true, Peers::Refused),
            (&intel, ["8086:29c0", "8086:29c0"], true, Peers::Refused),
            (&intel, ["8086:09a2", "8086:a700"], false, Peers::Refused),
            (&intel, ["8086:09a2", ""], false, Peers::Unknown),
            (&String::new(), ["8086:29c0", "8086:29c0"], true, Peers::Unknown),
        ] {
            assert_eq!(verdict(cpu, bridges, same), expected, "{cpu} {bridges:?} {same}");
        }
    }
}
