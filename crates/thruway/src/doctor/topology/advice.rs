//! Which GPU is the best for a place, and which place for a GPU.
//!
//! Near is better than far, and of several drives below one place the farthest counts: a RAID is as fast as its slowest
//! member. Among the places for a GPU, those that the doctor expects a direct path for come before all others, and of
//! those at one distance that whose links carry more. What a server gives is not known here, so drives of this machine come
//! before it.

use serde::Serialize;

use crate::doctor::machine::{Gpu, Machine, PciDevice, Target};
use crate::doctor::parse::pci::{self, Distance};
use crate::doctor::report::{Expected, PathReport, Route};

/// How far a GPU lies from a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Way {
    /// The GPU.
    pub gpu: String,
    /// The word of `nvidia-smi topo`: `PIX`, `PXB`, `PHB`, `NODE`, `SYS`; `NODE?` where the kernel names no NUMA nodes, so
    /// that nobody knows which of the last two it is.
    pub distance: &'static str,
}

/// How far two devices lie from each other, the nearer the less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Reach {
    distance: Distance,
    /// Whether the way leads through more than one switch.
    by_switches: bool,
    /// Whether the NUMA nodes that decide it are unknown.
    is_guess: bool,
}

impl Reach {
    fn between(one: &PciDevice, other: &PciDevice) -> Option<Self> {
        let distance = one.distance(other)?;
        let (ours, theirs) = (pci::addresses(&one.path), pci::addresses(&other.path));
        let shared = ours.iter().zip(&theirs).take_while(|(one, other)| one == other).count();
        // Below the upper end of the switch that they share: its port, and the device.
        let by_switches = distance == Distance::Switch && ours.len().max(theirs.len()) > shared + 2;
        let is_guess = distance == Distance::Node && (one.node.is_none() || other.node.is_none());
        Some(Self { distance, by_switches, is_guess })
    }

    fn word(self) -> &'static str {
        match (self.by_switches, self.is_guess) {
            (true, _) => "PXB",
            (_, true) => "NODE?",
            _ => self.distance.word(),
        }
    }

    fn describe(self) -> &'static str {
        match (self.by_switches, self.is_guess) {
            (true, _) => "under several PCIe switches below one port",
            (_, true) => "under two root complexes, whose NUMA nodes are not told",
            _ => self.distance.describe(),
        }
    }

    /// Where a GPU lies as seen from `what`.
    fn beside(self, what: &str) -> String {
        match self.distance {
            Distance::Switch if self.by_switches => format!("several PCIe switches away from {what}"),
            Distance::Switch => format!("under one PCIe switch with {what}"),
            Distance::Root => format!("under one root complex with {what}"),
            Distance::Node if self.is_guess => format!("under another root complex than {what}, on a NUMA node that is not told"),
            Distance::Node => format!("under another root complex than {what}, on the same NUMA node"),
            Distance::Sockets => format!("on another socket than {what}"),
        }
    }
}

/// The best GPU for a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MountAdvice {
    /// The place.
    pub path: String,
    /// Its filesystem, what lies below it, and its drives.
    pub storage: String,
    /// The GPU; `None` if none is better than another.
    pub gpu: Option<String>,
    /// Why.
    pub reason: String,
    /// How far each GPU lies.
    pub ways: Vec<Way>,
}

/// The best place for a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuAdvice {
    /// The GPU.
    pub gpu: String,
    /// The place; `None` if none is better than another.
    pub path: Option<String>,
    /// Why.
    pub reason: String,
}

/// The devices that a place's bytes come from: its drives, or the network cards that can do RDMA where it lies on another
/// machine.
fn sources<'a>(machine: &'a Machine, target: &'a Target) -> Vec<&'a PciDevice> {
    if target.is_remote() {
        return machine.nics.iter().filter(|nic| nic.has_rdma()).map(|nic| &nic.device).collect();
    }
    target.devices().collect()
}

/// The distance between a GPU and a place: that of the farthest drive, or of the nearest network card.
fn distance(machine: &Machine, gpu: &Gpu, target: &Target) -> Option<Reach> {
    let device = gpu.device.as_ref()?;
    let distances = sources(machine, target).into_iter().filter_map(|source| Reach::between(device, source));
    if target.is_remote() { distances.min() } else { distances.max() }
}

/// What the links carry that a place's bytes come by, in GB/s; 0 where the kernel does not tell.
fn rate(machine: &Machine, gpu: &Gpu, target: &Target) -> f64 {
    let Some(device) = &gpu.device else { return 0.0 };
    let sources = sources(machine, target);
    let rates =
        |sources: &mut dyn Iterator<Item = &&PciDevice>| -> f64 { sources.filter_map(|source| source.link.gb_per_s()).sum() };
    if target.is_remote() {
        // One card serves a GPU: the nearest.
        return rates(&mut sources.iter().min_by_key(|source| Reach::between(device, source)).into_iter());
    }
    rates(&mut sources.iter())
}

/// The best GPU for each place.
pub(super) fn of_mounts(machine: &Machine) -> Vec<MountAdvice> {
    machine.targets.iter().map(|target| of_mount(machine, target)).collect()
}

fn of_mount(machine: &Machine, target: &Target) -> MountAdvice {
    let ways: Vec<(&Gpu, Reach)> = machine.usable_gpus().filter_map(|gpu| Some((gpu, distance(machine, gpu, target)?))).collect();
    let best = ways.iter().min_by_key(|(_, distance)| *distance);
    let reason = match best {
        None => why_none(machine, target).to_owned(),
        Some((_, nearest)) => {
            let as_near = ways.iter().filter(|(_, distance)| distance == nearest).count();
            let others = match (as_near, ways.len()) {
                (_, 1) => "the only GPU".to_owned(),
                (1, _) => "the nearest".to_owned(),
                (all, of) if all == of => format!("as are all {of} GPUs"),
                (some, of) => format!("as are {some} of {of} GPUs"),
            };
            let what = match (target.is_remote(), sources(machine, target).len()) {
                (true, _) => "a network card that can do RDMA",
                (false, 1) => "the drive",
                _ => "the farthest of its drives",
            };
            format!("{}, {others}", nearest.beside(what))
        }
    };
    MountAdvice {
        path: target.path.clone(),
        storage: target.describe(),
        gpu: best.map(|(gpu, _)| gpu.label()),
        reason,
        ways: ways.iter().map(|(gpu, distance)| Way { gpu: gpu.label(), distance: distance.word() }).collect(),
    }
}

fn why_none(machine: &Machine, target: &Target) -> &'static str {
    if machine.may_have_gpu() {
        "no GPU could be seen"
    } else if machine.gpus.is_empty() {
        "there is no GPU"
    } else if target.is_remote() && sources(machine, target).is_empty() {
        "it lies on another machine, and no network card that can do RDMA is to be seen, so all GPUs are equal to it"
    } else if sources(machine, target).is_empty() {
        "what it lies on is not to be seen on the PCI bus, so all GPUs are equal to it"
    } else {
        "the PCI bus does not show where the GPUs are"
    }
}

/// The best place for each GPU.
pub(super) fn of_gpus(machine: &Machine, reports: &[PathReport]) -> Vec<GpuAdvice> {
    machine.usable_gpus().map(|gpu| of_gpu(machine, reports, gpu)).collect()
}

fn of_gpu(machine: &Machine, reports: &[PathReport], gpu: &Gpu) -> GpuAdvice {
    let is_direct = |target: &Target| reports.iter().any(|path| path.path == target.path && path.expected == Expected::Direct);
    let is_usable = |target: &Target| reports.iter().all(|path| path.path != target.path || path.expected != Expected::None);
    let reachable = machine.targets.iter().filter(|target| is_usable(target));
    let ways = reachable.filter_map(|target| Some((target, distance(machine, gpu, target)?)));
    let best = ways.min_by(|(one, near), (other, far)| {
        let rank = |target: &Target, distance| (!is_direct(target), target.is_remote(), distance);
        let by_distance = rank(one, near).cmp(&rank(other, far));
        by_distance.then_with(|| rate(machine, gpu, other).total_cmp(&rate(machine, gpu, one)))
    });
    let Some((target, distance)) = best else {
        let reason = if machine.targets.is_empty() {
            "no place lies on a drive that the PCI bus shows"
        } else if gpu.device.is_none() {
            "the PCI bus does not show where it is"
        } else {
            "no place can be used whose drives the PCI bus shows"
        };
        return GpuAdvice { gpu: gpu.label(), path: None, reason: reason.to_owned() };
    };
    let route = reports.iter().find(|path| path.path == target.path).and_then(|path| path.route).map(Route::describe);
    let way = match route.filter(|_| is_direct(target)) {
        Some(route) => format!("directly by {route}"),
        None if reports.iter().any(PathReport::may_be_direct) => {
            "through the host, as far as can be told: `thruway doctor` says which direct path may be open".to_owned()
        }
        None => "through the host: no place here has a direct path".to_owned(),
    };
    let rate = rate(machine, gpu, target);
    let links = if rate > 0.0 { format!(", links of {rate:.1} GB/s") } else { String::new() };
    GpuAdvice { gpu: gpu.label(), path: Some(target.path.clone()), reason: format!("{}{links}; {way}", distance.describe()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::machine::Link;

    #[test]
    fn one_switch_is_told_from_several_and_an_unknown_node_from_a_known_one() {
        let device = |path: &str, node| PciDevice {
            address: String::new(),
            path: format!("/sys/devices/{path}"),
            node,
            link: Link::default(),
            link_max: Link::default(),
            iommu: Err(crate::doctor::facts::Unseen::Absent),
            registers: Vec::new(),
            peer_bytes: None,
        };
        let gpu = device("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0/0000:43:00.0", Some(0));
        let word = |other: &PciDevice| Reach::between(&gpu, other).map(Reach::word);
        assert_eq!(word(&device("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:01.0/0000:44:00.0", Some(0))), Some("PIX"));
        let behind_another = "pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:01.0/0000:44:00.0/0000:45:00.0/0000:46:00.0";
        assert_eq!(word(&device(behind_another, Some(0))), Some("PXB"));
        assert_eq!(word(&device("pci0000:40/0000:40:03.1/0000:48:00.0", Some(0))), Some("PHB"));
        let far = "pci0000:c0/0000:c0:01.1/0000:c1:00.0";
        let words = [Some(0), None, Some(1)].map(|node| word(&device(far, node)));
        assert_eq!(words, [Some("NODE"), Some("NODE?"), Some("SYS")]);
    }
}
