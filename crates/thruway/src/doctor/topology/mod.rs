//! The picture of a machine: what lies where on its PCI buses, and which GPU and which mount belong together.
//!
//! ```text
//! NUMA node → root complex → ports and switches → GPUs, NVMe drives, network cards
//! ```
//! All of it comes from the doctor's facts, so that it can be drawn of a captured machine too. The shortest way is not the
//! only thing that counts: the doctor's verdict on each mount stands beside it.

mod advice;
mod tree;

use serde::Serialize;

use super::diagnose;
use super::facts::{Facts, FactsExt};
use super::machine::{Link, Machine};
use super::parse::mounts;

pub use advice::{GpuAdvice, MountAdvice};

/// So many mounts are looked at where none is named.
const MOUNTS_MAX: usize = 64;
/// And so many of servers: each that does not answer takes its time.
const REMOTE_MOUNTS_MAX: usize = 8;

/// Filesystems of servers that can have a direct path.
const REMOTE: [&str; 8] = ["nfs", "nfs4", "lustre", "beegfs", "gpfs", "wekafs", "scatefs", "panfs"];

/// What kind of thing is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A port of the root complex, or a lower port of a switch.
    Port,
    /// The upper end of a switch.
    Switch,
    /// A GPU.
    Gpu,
    /// An NVMe drive.
    Nvme,
    /// Another drive: a virtual one, or the controller of a RAID or of SATA drives.
    Drive,
    /// A network card.
    Network,
}

/// A link as it is drawn.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkView {
    /// The link as it is: `PCIe 4.0 x4`.
    pub now: String,
    /// Gigabytes a second each way.
    pub gb_per_s: Option<f64>,
    /// The link as it could be, where that is more.
    pub most: Option<String>,
    /// Whether it is below what it could be. A GPU lowers its speed while it is idle, so of a GPU the lanes alone count.
    pub is_below: bool,
}

/// One thing on the bus, and what lies below it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// What it is.
    pub kind: Kind,
    /// How people call it.
    pub label: String,
    /// Its PCI address; empty for what is not on the bus.
    pub address: String,
    /// Its link to what lies above it.
    pub link: Option<LinkView>,
    /// More about it, such as the rate of a network port.
    pub notes: Vec<String>,
    /// The places whose bytes lie there.
    pub places: Vec<String>,
    /// What lies below it.
    pub parts: Vec<Part>,
}

/// A root complex.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Root {
    /// Its name, such as `pci0000:40`.
    pub name: String,
    /// What lies below it.
    pub parts: Vec<Part>,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Node {
    /// Its number; `None` for all devices of a machine that tells no nodes.
    pub node: Option<u32>,
    /// The socket that its processors sit in.
    pub socket: Option<u32>,
    /// Its processors, such as `0-63`.
    pub processors: Option<String>,
    /// Its root complexes.
    pub roots: Vec<Root>,
}

/// The picture.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Topology {
    /// What is on the PCI buses, by NUMA node.
    pub nodes: Vec<Node>,
    /// What the PCI buses do not show.
    pub elsewhere: Vec<Part>,
    /// The best GPU for each place.
    pub mounts: Vec<MountAdvice>,
    /// The best place for each GPU.
    pub gpus: Vec<GpuAdvice>,
}

impl Topology {
    /// Draws the machine behind `facts`, and the places `paths` on it; without any the mounts of its block devices and of
    /// servers. Changes nothing, and takes bounded time.
    pub fn examine(facts: &dyn Facts, paths: &[String]) -> Self {
        let named = if paths.is_empty() { mount_points(facts) } else { paths.to_vec() };
        let (mut machine, mut report) = diagnose(facts, &named);
        if paths.is_empty() {
            // Of what nobody named, only what lies on a drive that can be drawn, or on a server.
            machine.targets.retain(|target| target.is_remote() || target.devices().next().is_some());
            report.paths.retain(|path| machine.targets.iter().any(|target| target.path == path.path));
        }
        let (nodes, elsewhere) = tree::grow(facts, &machine);
        Self { nodes, elsewhere, mounts: advice::of_mounts(&machine), gpus: advice::of_gpus(&machine, &report.paths) }
    }

    /// Whether there is anything to draw.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.elsewhere.is_empty()
    }
}

/// The mounts of block devices and of servers, each device once.
fn mount_points(facts: &dyn Facts) -> Vec<String> {
    let table = facts.file("/proc/self/mountinfo").unwrap_or_default();
    let mut seen: Vec<String> = Vec::new();
    let mut points = Vec::new();
    let mut remote = 0;
    for mount in mounts::parse(&table) {
        let is_drive = mount.source.starts_with("/dev/") && mount.kind != "squashfs";
        let is_remote = REMOTE.contains(&mount.kind.as_str()) && remote < REMOTE_MOUNTS_MAX;
        if (is_drive || is_remote) && !seen.contains(&mount.device) && points.len() < MOUNTS_MAX {
            remote += usize::from(is_remote);
            seen.push(mount.device);
            points.push(mount.point);
        }
    }
    points
}

/// A link in words; `None` where the kernel tells nothing of it.
fn link_view(now: Link, most: Link, speed_counts: bool) -> Option<LinkView> {
    let text = |link: Link| {
        let speed = match (link.generation(), link.speed) {
            (Some(generation), _) => format!("PCIe {generation}"),
            (None, Some(speed)) => format!("{}.{} GT/s", speed / 10, speed % 10),
            (None, None) => "PCIe".to_owned(),
        };
        link.width.map_or_else(|| speed.clone(), |width| format!("{speed} x{width}"))
    };
    if now == Link::default() {
        return None;
    }
    let most_text = (most != Link::default() && now.is_below(most, true)).then(|| text(most));
    Some(LinkView { now: text(now), gb_per_s: now.gb_per_s(), most: most_text, is_below: now.is_below(most, speed_counts) })
}

/// Places on the drive with this address.
fn places_on(machine: &Machine, address: &str) -> Vec<String> {
    let holds =
        |target: &&super::machine::Target| !address.is_empty() && target.devices().any(|device| device.address == address);
    machine.targets.iter().filter(holds).map(|target| target.path.clone()).collect()
}
