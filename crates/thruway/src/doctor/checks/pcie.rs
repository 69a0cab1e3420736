//! Links that are slower than they could be, and what switches do with requests between peers.

use super::Context;
use crate::doctor::facts::FactsExt;
use crate::doctor::machine::{Link, PciDevice};
use crate::doctor::parse::pci;
use crate::doctor::report::{Finding, Route, Verdict};

const BRIDGES: &str = "/proc/driver/nvidia-fs/bridges";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    for gpu in &context.machine.gpus {
        // A GPU lowers the speed of its link while it is idle; the lanes stay.
        findings.extend(gpu.device.as_ref().map(|device| link(device, &gpu.label(), false)));
    }
    let mut seen: Vec<&str> = Vec::new();
    for drive in context.machine.targets.iter().flat_map(|target| &target.drives) {
        if let Some(device) = drive.device.as_ref().filter(|device| !seen.contains(&device.address.as_str())) {
            seen.push(&device.address);
            // The drives of virtual machines have no link.
            if device.link != Link::default() {
                findings.push(link(device, &drive.name, true));
            }
        }
    }
    findings.extend(access_control(context));
}

fn link(device: &PciDevice, label: &str, speed_counts: bool) -> Finding {
    let source = format!("/sys/bus/pci/devices/{}/current_link_width", device.address);
    let (now, most) = (device.link, device.link_max);
    let (Some(width), Some(width_max)) = (now.width, most.width) else {
        return Finding::new("pcie.link", Verdict::Unknown, "the link's width is unknown", source).about(label);
    };
    let rate = |speed: Option<u32>| speed.map(|speed| format!(" of {}.{} GT/s", speed / 10, speed % 10)).unwrap_or_default();
    let text = format!("{width} lanes{}", rate(now.speed));
    if now.is_below(most, speed_counts) {
        let seen = format!("its link has {text}, and could have {width_max}{}", rate(most.speed));
        return Finding::new("pcie.link", Verdict::Warning, seen, source).about(label).remedy(
            "seat it anew, use a slot with all lanes, and see the firmware's set-up; behind a narrower slot this is all there is",
        );
    }
    Finding::ok("pcie.link", format!("its link has {text}"), source).about(label)
}

/// Bridges that send requests between peers up to the root complex.
fn access_control(context: &Context<'_>) -> Option<Finding> {
    let facts = context.facts;
    let devices = context.machine.gpus.iter().filter_map(|gpu| gpu.device.as_ref());
    let devices = devices.chain(context.machine.targets.iter().flat_map(|target| target.devices()));
    let mut bridges: Vec<&str> = devices
        .flat_map(|device| {
            let mut above = pci::addresses(&device.path);
            above.pop();
            above
        })
        .collect();
    bridges.sort_unstable();
    bridges.dedup();
    if bridges.is_empty() {
        return None;
    }
    // The module tells it to everybody; configuration space beyond its head is the superuser's alone.
    let told =
        facts.file(BRIDGES).ok().filter(|text| text.lines().all(|line| pci::is_address(line.trim()) || line.trim().is_empty()));
    let redirects = |bridge: &&&str| match &told {
        Some(text) => Some(text.lines().any(|line| line.trim() == **bridge)),
        None => pci::redirects_upstream(&facts.bytes(&format!("/sys/bus/pci/devices/{bridge}/config")).ok()?),
    };
    let found: Vec<(&&str, Option<bool>)> = bridges.iter().map(|bridge| (bridge, redirects(&bridge))).collect();
    let source = if told.is_some() { BRIDGES } else { "/sys/bus/pci/devices/*/config" };
    let on: Vec<&str> = found.iter().filter(|(_, on)| *on == Some(true)).map(|(bridge, _)| **bridge).collect();
    if !on.is_empty() {
        let seen = format!("access control sends requests between peers through the root complex at {}", on.join(", "));
        return Some(
            Finding::new("pcie.acs", Verdict::Warning, seen, source)
                .remedy("start the kernel with pci=disable_acs_redir=pci:0:0, or switch ACS off in the firmware's set-up"),
        );
    }
    Some(if found.iter().all(|(_, on)| on.is_none()) {
        let finding = Finding::new("pcie.acs", Verdict::Unknown, "access control of the PCIe bridges cannot be seen", source);
        if context.machine.is_root == Some(true) { finding } else { finding.remedy("run as root to see it") }
    } else {
        Finding::ok("pcie.acs", "no bridge that shows it sends requests between peers through the root complex", source)
    })
}

/// Whether the processor is one between whose root ports the kernel lets peers talk: AMD from Zen on (family 17h), and
/// Intel's server processors. `None` where that cannot be known.
pub(super) fn crosses_root_ports(context: &Context<'_>) -> Option<bool> {
    const CPU: &str = "/proc/cpuinfo";
    let first = |word: &str| {
        let text = context.facts.lines(CPU, word).ok()?;
        Some(text.lines().next()?.split_once(':')?.1.trim().to_owned())
    };
    match first("vendor_id")?.as_str() {
        "AuthenticAMD" => Some(first("cpu family")?.parse::<u32>().ok()? >= 0x17),
        "GenuineIntel" => Some(first("model name")?.contains("Xeon")),
        _ => None,
    }
}

/// Says what lies between a place's drives and the nearest GPU.
pub(super) fn distance(context: &Context<'_>, target: &crate::doctor::machine::Target) -> Option<Finding> {
    let devices: Vec<&PciDevice> = target.devices().collect();
    let (gpu, distance) = super::super::route::nearest(context.machine, target)?;
    let source = format!("/sys/bus/pci/devices/{}", devices.first()?.address);
    let seen = format!("{} and the drives lie {}", gpu.label(), distance.describe());
    let finding = |verdict| Finding::new("path.distance", verdict, seen.clone(), source.clone()).about(&target.path);
    Some(match distance {
        pci::Distance::Switch => finding(Verdict::Ok),
        _ if crosses_root_ports(context) == Some(false) => finding(Verdict::Warning)
            .remedy("put both under one PCIe switch: between the root ports of this processor the kernel allows no P2PDMA")
            .rules_out(&Route::P2PDMA),
        pci::Distance::Sockets => finding(Verdict::Warning)
            .remedy("use a GPU and drives of one socket: the link between sockets is slow for peers, and some refuse it"),
        _ => finding(Verdict::Ok),
    })
}

/// Says what lies between a place's drives and the nearest device that offers its memory to programs, where there is one.
pub(super) fn pool_distance(context: &Context<'_>, target: &crate::doctor::machine::Target) -> Option<Finding> {
    let (pool, distance) = super::super::route::pool(context.machine, target)?;
    let source = format!("/sys/bus/pci/devices/{}", pool.address);
    let Some(distance) = distance else {
        let seen = format!("how far {} lies from the drives is unknown", pool.address);
        return Some(Finding::new("path.pool", Verdict::Unknown, seen, source).shuts(&[Route::KernelP2pdma]));
    };
    let seen = format!("{} and the drives lie {}", pool.address, distance.describe());
    // The processors that the kernel trusts are those between whose root ports peers may talk.
    Some(match (distance, crosses_root_ports(context)) {
        (pci::Distance::Switch, _) | (_, Some(true)) => Finding::ok("path.pool", seen, source),
        (_, Some(false)) => Finding::new("path.pool", Verdict::Warning, seen, source)
            .remedy("put both under one PCIe switch: between the root ports of this processor the kernel allows no P2PDMA")
            .rules_out(&[Route::KernelP2pdma]),
        (_, None) => {
            let seen = format!("{seen}, and whether peers may talk across this processor is unknown");
            Finding::new("path.pool", Verdict::Unknown, seen, source).shuts(&[Route::KernelP2pdma])
        }
    })
}
