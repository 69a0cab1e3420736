//! Links that are slower than they could be, and what switches do with requests between peers.

use std::collections::BTreeSet;

use super::{Context, peers};
use crate::doctor::machine::{Link, PciDevice, links};
use crate::doctor::parse::pci;
use crate::doctor::report::{Finding, Verdict};

pub(super) const ACCESS_CONTROL_OFF: &str =
    "start the kernel with pci=disable_acs_redir=pci:0:0, or switch ACS off in the firmware's set-up";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    for gpu in &context.machine.gpus {
        // A GPU lowers the speed of its link while it is idle; the lanes stay.
        findings.extend(gpu.device.as_ref().map(|device| link(context, device, &gpu.label(), false)));
    }
    let mut seen: Vec<&str> = Vec::new();
    for drive in context.machine.targets.iter().flat_map(|target| &target.drives) {
        if let Some(device) = drive.device.as_ref().filter(|device| !seen.contains(&device.address.as_str())) {
            seen.push(&device.address);
            // The drives of virtual machines have no link.
            if device.link != Link::default() {
                findings.push(link(context, device, &drive.name, true));
            }
        }
    }
    findings.extend(access_control(context));
}

fn link(context: &Context<'_>, device: &PciDevice, label: &str, speed_counts: bool) -> Finding {
    let source = format!("/sys/bus/pci/devices/{}/current_link_width", device.address);
    let (now, most) = (device.link, device.link_max);
    let (Some(width), Some(width_max)) = (now.width, most.width) else {
        return Finding::new("pcie.link", Verdict::Unknown, "the link's width is unknown", source).about(label);
    };
    let rate = |speed: Option<u32>| speed.map(|speed| format!(" of {}.{} GT/s", speed / 10, speed % 10)).unwrap_or_default();
    let text = format!("{width} lanes{}", rate(now.speed));
    // A link is as good as both of its ends allow.
    let above = pci::addresses(&device.path).iter().rev().nth(1).map(|port| links(context.facts, port).1).unwrap_or_default();
    let could = most.common(above);
    if now.is_below(could, speed_counts) {
        let seen = format!("its link has {text}, and could have {}{}", could.width.unwrap_or(width_max), rate(could.speed));
        return Finding::new("pcie.link", Verdict::Warning, seen, source)
            .about(label)
            .remedy("seat the device anew, and see the firmware's set-up");
    }
    if above.is_below(most, true) {
        let seen =
            format!("its link has {text}, all that its slot allows, and the device could have {width_max}{}", rate(most.speed));
        return Finding::new("pcie.slot", Verdict::Warning, seen, source)
            .about(label)
            .remedy("move the device to a slot with more lanes or speed, if there is one");
    }
    Finding::ok("pcie.link", format!("its link has {text}"), source).about(label)
}

/// Bridges between a GPU and the drives or network cards that send requests between peers up to the root complex.
fn access_control(context: &Context<'_>) -> Option<Finding> {
    let machine = context.machine;
    let is_remote = machine.targets.iter().any(|target| target.is_remote() || target.is_on_remote_nvme());
    let cards = machine.nics.iter().filter(|nic| is_remote && nic.has_rdma()).map(|nic| &nic.device);
    // One drive may lie below many places.
    let sources: BTreeSet<&str> =
        machine.targets.iter().flat_map(|target| target.devices()).chain(cards).map(|device| device.path.as_str()).collect();
    let gpus = machine.usable_gpus().filter_map(|gpu| gpu.device.as_ref());
    let memories: BTreeSet<&str> = gpus.chain(&machine.pools).map(|device| device.path.as_str()).collect();
    // What lies above both has no part in it: a root port may send up what it will.
    let pairs = memories.into_iter().flat_map(|memory| sources.iter().map(move |source| (memory, *source)));
    let bridges: BTreeSet<&str> = pairs.flat_map(|(memory, source)| pci::bridges_between(memory, source)).collect();
    if bridges.is_empty() {
        return None;
    }
    let told = peers::told(context);
    let found: Vec<(&&str, Option<bool>)> =
        bridges.iter().map(|bridge| (bridge, peers::redirects(context, told.as_deref(), bridge))).collect();
    let source = peers::source(told.as_deref());
    let on: Vec<&str> = found.iter().filter(|(_, on)| *on == Some(true)).map(|(bridge, _)| **bridge).collect();
    if !on.is_empty() {
        let seen = format!("access control sends requests between peers through the root complex at {}", on.join(", "));
        return Some(Finding::new("pcie.acs", Verdict::Warning, seen, source).remedy(ACCESS_CONTROL_OFF));
    }
    Some(if found.iter().all(|(_, on)| on.is_none()) {
        let finding = Finding::new("pcie.acs", Verdict::Unknown, "access control of the PCIe bridges cannot be seen", source);
        if context.machine.is_root == Some(true) { finding } else { finding.remedy("ask as root: `sudo thruway doctor`") }
    } else {
        Finding::ok("pcie.acs", "no bridge that shows it sends requests between peers through the root complex", source)
    })
}
