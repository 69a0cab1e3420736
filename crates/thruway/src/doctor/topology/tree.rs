//! The tree of the PCI buses, from the paths of devices in sysfs.

use super::{Kind, Node, Part, Root, link_view, places_on};
use crate::doctor::facts::{Facts, FactsExt};
use crate::doctor::machine::{Controller, Drive, DriveKind, Gpu, Link, Machine, Nic, PciDevice, links};
use crate::doctor::parse::pci;

/// Bridges above a device are followed so far. Real machines have seven at most.
const DEPTH_MAX: usize = 16;

/// Everything on the buses by NUMA node, and what no bus shows.
pub(super) fn grow(facts: &dyn Facts, machine: &Machine) -> (Vec<Node>, Vec<Part>) {
    let mut nodes: Vec<Node> = Vec::new();
    let mut elsewhere = Vec::new();
    for (device, part) in leaves(facts, machine) {
        let Some((device, root)) = device.and_then(|device| Some((device, pci::root_of(&device.path)?))) else {
            elsewhere.push(part);
            continue;
        };
        let node = node_of(facts, &mut nodes, device.node);
        let root = match node.roots.iter().position(|have| have.name == root) {
            Some(at) => &mut node.roots[at],
            None => {
                node.roots.push(Root { name: root.to_owned(), parts: Vec::new() });
                let last = node.roots.len() - 1;
                &mut node.roots[last]
            }
        };
        let mut above = pci::addresses(&device.path);
        above.pop();
        above.truncate(DEPTH_MAX);
        plant(facts, &mut root.parts, &above, 0, part);
    }
    nodes.sort_by_key(|node| (node.node.is_none(), node.node));
    for root in nodes.iter_mut().flat_map(|node| &mut node.roots) {
        sort(&mut root.parts);
    }
    for node in &mut nodes {
        node.roots.sort_by(|one, other| one.name.cmp(&other.name));
    }
    (nodes, elsewhere)
}

fn node_of<'a>(facts: &dyn Facts, nodes: &'a mut Vec<Node>, number: Option<u32>) -> &'a mut Node {
    let at = nodes.iter().position(|node| node.node == number).unwrap_or_else(|| {
        let processors = number.and_then(|number| facts.line(&format!("/sys/devices/system/node/node{number}/cpulist")).ok());
        let first = processors.as_deref().and_then(|list| crate::doctor::parse::ranges(list, 1).first().copied());
        let socket = first.and_then(|cpu| {
            let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id");
            facts.line(&file).ok()?.parse().ok()
        });
        let processors = processors.filter(|list| !list.is_empty());
        nodes.push(Node { node: number, socket, processors, roots: Vec::new() });
        nodes.len() - 1
    });
    &mut nodes[at]
}

/// Puts a part below the bridges at `above`, making those that are not there yet.
fn plant(facts: &dyn Facts, parts: &mut Vec<Part>, above: &[&str], depth: usize, part: Part) {
    let Some((bridge, below)) = above.split_first() else {
        parts.push(part);
        return;
    };
    let at = parts.iter().position(|have| have.address == *bridge).unwrap_or_else(|| {
        let (now, most) = links(facts, bridge);
        // Ports of the root complex and of switches take turns. A port may be wider than what is plugged into it; the upper end
        // of a switch may not.
        let is_switch = depth % 2 == 1;
        parts.push(Part {
            kind: if is_switch { Kind::Switch } else { Kind::Port },
            label: (*bridge).to_owned(),
            address: (*bridge).to_owned(),
            link: link_view(now, if is_switch { most } else { Link::default() }, true),
            notes: Vec::new(),
            places: Vec::new(),
            parts: Vec::new(),
        });
        parts.len() - 1
    });
    plant(facts, &mut parts[at].parts, below, depth + 1, part);
}

fn sort(parts: &mut [Part]) {
    parts.sort_by(|one, other| one.address.cmp(&other.address));
    for part in parts {
        sort(&mut part.parts);
    }
}

/// What the tree bears, each thing once.
fn leaves<'a>(facts: &dyn Facts, machine: &'a Machine) -> Vec<(Option<&'a PciDevice>, Part)> {
    let mut leaves: Vec<(Option<&'a PciDevice>, Part)> =
        machine.gpus.iter().map(|gpu| (gpu.device.as_ref(), gpu_part(gpu))).collect();
    leaves.extend(machine.controllers.iter().map(|controller| (Some(&controller.device), nvme_part(machine, controller))));
    leaves.extend(machine.nics.iter().map(|nic| (Some(&nic.device), nic_part(facts, nic))));
    for drive in machine.targets.iter().flat_map(|target| &target.drives) {
        let is_drawn = leaves.iter().any(|(device, part)| match (&drive.device, device) {
            (Some(drive), Some(device)) => drive.address == device.address,
            (None, None) => part.label == drive.name,
            _ => false,
        });
        if !is_drawn {
            leaves.push((drive.device.as_ref(), drive_part(machine, drive)));
        }
    }
    leaves
}

fn leaf(kind: Kind, label: String, device: Option<&PciDevice>, speed_counts: bool) -> Part {
    Part {
        kind,
        label,
        address: device.map(|device| device.address.clone()).unwrap_or_default(),
        link: device.and_then(|device| link_view(device.link, device.link_max, speed_counts)),
        notes: Vec::new(),
        places: Vec::new(),
        parts: Vec::new(),
    }
}

fn gpu_part(gpu: &Gpu) -> Part {
    leaf(Kind::Gpu, gpu.label(), gpu.device.as_ref(), false)
}

fn nvme_part(machine: &Machine, controller: &Controller) -> Part {
    let address = &controller.device.address;
    let drives = machine.targets.iter().flat_map(|target| &target.drives);
    let on_it = drives.filter(|drive| drive.device.as_ref().is_some_and(|device| device.address == *address));
    let mut names: Vec<&str> = on_it.map(|drive| drive.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let label = if names.is_empty() { controller.name.clone() } else { names.join(", ") };
    Part { places: places_on(machine, address), ..leaf(Kind::Nvme, label, Some(&controller.device), true) }
}

fn nic_part(facts: &dyn Facts, nic: &Nic) -> Part {
    let note = |port: &crate::doctor::machine::RdmaPort| {
        let words = [port.link_layer.as_str(), port.rate.as_str()];
        let words = words.into_iter().filter(|word| !word.is_empty());
        let words = words.chain((port.is_active == Some(false)).then_some("down"));
        format!("{}: {}", port.name, words.collect::<Vec<&str>>().join(", "))
    };
    let notes = nic.ports.iter().map(note).collect();
    let mut interfaces = nic.interfaces.clone();
    if interfaces.is_empty() {
        // Those of a virtual card lie a level deeper.
        let base = format!("/sys/bus/pci/devices/{}", nic.device.address);
        let virtio = facts.names(&base).into_iter().filter(|name| name.starts_with("virtio"));
        interfaces.extend(virtio.flat_map(|name| facts.names(&format!("{base}/{name}/net"))));
    }
    let label = if interfaces.is_empty() { nic.label() } else { interfaces.join(", ") };
    Part { notes, ..leaf(Kind::Network, label, Some(&nic.device), true) }
}

fn drive_part(machine: &Machine, drive: &Drive) -> Part {
    let kind = if matches!(drive.kind, DriveKind::Nvme(_)) { Kind::Nvme } else { Kind::Drive };
    let part = leaf(kind, drive.name.clone(), drive.device.as_ref(), true);
    let places = match &drive.device {
        Some(device) => places_on(machine, &device.address),
        None => {
            let has = |target: &&crate::doctor::machine::Target| target.drives.iter().any(|have| have.name == drive.name);
            machine.targets.iter().filter(has).map(|target| target.path.clone()).collect()
        }
    };
    Part { places, ..part }
}
