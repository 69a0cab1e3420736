//! Devices on the PCI bus.

use crate::doctor::facts::{Facts, FactsExt, Unseen};
use crate::doctor::parse::pci;

/// The directory of all devices.
pub(super) const DEVICES: &str = "/sys/bus/pci/devices";
/// So many devices of one kind are looked at.
const DEVICES_MAX: usize = 4096;

/// A link's speed in tenths of GT/s and its width in lanes; `None` where the kernel does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Tenths of GT/s: 320 for PCIe 5.0.
    pub speed: Option<u32>,
    /// Lanes.
    pub width: Option<u32>,
}

impl Link {
    /// The generation of PCI Express that has this speed, such as `5.0`.
    pub fn generation(self) -> Option<&'static str> {
        let known = [(25, "1.0"), (50, "2.0"), (80, "3.0"), (160, "4.0"), (320, "5.0"), (640, "6.0"), (1280, "7.0")];
        known.into_iter().find(|(speed, _)| Some(*speed) == self.speed).map(|(_, name)| name)
    }

    /// Gigabytes that the link carries each way in a second, what encodes them taken off (8 of 10 bits up to 2.0, 128 of 130
    /// up to 5.0, 242 of 256 bytes from 6.0 on) and packets' heads not.
    pub fn gb_per_s(self) -> Option<f64> {
        let (speed, width) = self.speed.zip(self.width)?;
        let share = match speed {
            ..=50 => 8.0 / 10.0,
            51..=320 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        };
        Some(f64::from(speed) / 10.0 * f64::from(width) * share / 8.0)
    }

    /// What both ends of a link can do, as far as it is known.
    pub fn common(self, other: Self) -> Self {
        let least = |one: Option<u32>, other: Option<u32>| one.into_iter().chain(other).min();
        Self { speed: least(self.speed, other.speed), width: least(self.width, other.width) }
    }

    /// Whether it has fewer lanes than `most`, or, if that counts, less speed.
    pub fn is_below(self, most: Self, speed_counts: bool) -> bool {
        let less = |now: Option<u32>, most: Option<u32>| now.zip(most).is_some_and(|(now, most)| now < most);
        less(self.width, most.width) || speed_counts && less(self.speed, most.speed)
    }
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// Its address, such as `0000:41:00.0`.
    pub address: String,
    /// Where sysfs has it, links resolved: the way from the root complex down.
    pub path: String,
    /// Its NUMA node; `None` where there is only one.
    pub node: Option<u32>,
    /// The link as it is.
    pub link: Link,
    /// The link as it could be.
    pub link_max: Link,
    /// What the IOMMU does with its requests: `identity`, `DMA`, `DMA-FQ`; absent without an IOMMU.
    pub iommu: Result<String, Unseen>,
    /// Its base address registers.
    pub registers: Vec<pci::Register>,
    /// Bytes of its memory that the kernel offers for peer-to-peer DMA; `None` if it offers none.
    pub peer_bytes: Option<u64>,
}

impl PciDevice {
    /// The device at an address; `None` if the bus does not show it.
    pub fn examine(facts: &dyn Facts, address: &str) -> Option<Self> {
        let base = format!("/sys/bus/pci/devices/{address}");
        let path = facts.link(&base).ok()?;
        let line = |name: &str| facts.line(&format!("{base}/{name}")).ok();
        let (link, link_max) = links(facts, address);
        Some(Self {
            address: address.to_owned(),
            node: line("numa_node").and_then(|node| node.parse().ok()),
            link,
            link_max,
            iommu: facts.line(&format!("{base}/iommu_group/type")),
            registers: facts.file(&format!("{base}/resource")).map(|text| pci::registers(&text)).unwrap_or_default(),
            peer_bytes: line("p2pmem/size").and_then(|bytes| bytes.parse().ok()),
            path,
        })
    }

    /// How far another device lies.
    pub fn distance(&self, other: &Self) -> Option<pci::Distance> {
        pci::distance((&self.path, self.node), (&other.path, other.node))
    }
}

/// The link of the device at an address as it is, and as it could be.
pub fn links(facts: &dyn Facts, address: &str) -> (Link, Link) {
    let line = |name: &str| facts.line(&format!("/sys/bus/pci/devices/{address}/{name}")).ok();
    let link = |speed: &str, width: &str| Link {
        speed: line(speed).as_deref().and_then(pci::speed),
        width: line(width).and_then(|width| width.parse().ok()).filter(|width| (1..=32).contains(width)),
    };
    (link("current_link_speed", "current_link_width"), link("max_link_speed", "max_link_width"))
}

/// The addresses of all devices with their classes, as far as those are known.
pub(super) fn classes(facts: &dyn Facts) -> Vec<(String, pci::Class)> {
    let addresses = facts.names(DEVICES).into_iter().filter(|name| pci::is_address(name)).take(DEVICES_MAX);
    let with_class = |address: String| {
        let class = facts.line(&format!("/sys/bus/pci/devices/{address}/class")).ok().as_deref().and_then(pci::class)?;
        Some((address, class))
    };
    addresses.filter_map(with_class).collect()
}

/// Whether NVIDIA made the device at an address.
pub(super) fn is_of_nvidia(facts: &dyn Facts, address: &str) -> bool {
    facts.line(&format!("/sys/bus/pci/devices/{address}/vendor")).as_deref() == Ok("0x10de")
}

/// The controller of NVMe drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Its name, such as `nvme0`.
    pub name: String,
    /// Its device.
    pub device: PciDevice,
}

/// The NVMe controllers on the bus.
pub(super) fn controllers(facts: &dyn Facts) -> Vec<Controller> {
    let names = facts.names("/sys/class/nvme").into_iter().take(DEVICES_MAX);
    let controller = |name: String| {
        let path = facts.link(&format!("/sys/class/nvme/{name}")).ok()?;
        Some(Controller { name, device: PciDevice::examine(facts, pci::addresses(&path).last()?)? })
    };
    names.filter_map(controller).collect()
}
