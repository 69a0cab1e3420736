//! Devices on the PCI bus.

use crate::doctor::facts::{Facts, FactsExt};
use crate::doctor::parse::pci;

/// A link's speed in tenths of GT/s and its width in lanes; `None` where the kernel does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Tenths of GT/s: 320 for PCIe 5.0.
    pub speed: Option<u32>,
    /// Lanes.
    pub width: Option<u32>,
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
    /// What the IOMMU does with its requests: `identity`, `DMA`, `DMA-FQ`; `None` without an IOMMU.
    pub iommu: Option<String>,
    /// Bytes of its base address registers.
    pub bars: Vec<u64>,
    /// Bytes of its memory that the kernel offers for peer-to-peer DMA; `None` if it offers none.
    pub peer_bytes: Option<u64>,
}

impl PciDevice {
    /// The device at an address; `None` if the bus does not show it.
    pub fn examine(facts: &dyn Facts, address: &str) -> Option<Self> {
        let base = format!("/sys/bus/pci/devices/{address}");
        let path = facts.link(&base).ok()?;
        let line = |name: &str| facts.line(&format!("{base}/{name}")).ok();
        let link = |speed: &str, width: &str| Link {
            speed: line(speed).as_deref().and_then(pci::speed),
            width: line(width).and_then(|width| width.parse().ok()).filter(|width| (1..=32).contains(width)),
        };
        Some(Self {
            address: address.to_owned(),
            node: line("numa_node").and_then(|node| node.parse().ok()),
            link: link("current_link_speed", "current_link_width"),
            link_max: link("max_link_speed", "max_link_width"),
            iommu: line("iommu_group/type"),
            bars: facts.file(&format!("{base}/resource")).map(|text| pci::bars(&text)).unwrap_or_default(),
            peer_bytes: line("p2pmem/size").and_then(|bytes| bytes.parse().ok()),
            path,
        })
    }

    /// How far another device lies.
    pub fn distance(&self, other: &Self) -> Option<pci::Distance> {
        pci::distance((&self.path, self.node), (&other.path, other.node))
    }
}

/// The addresses of all NVIDIA devices of the display class.
pub(super) fn nvidia_displays(facts: &dyn Facts) -> Vec<String> {
    const NVIDIA: &str = "0x10de";
    let is_gpu = |address: &String| {
        let line = |name: &str| facts.line(&format!("/sys/bus/pci/devices/{address}/{name}")).ok();
        line("vendor").as_deref() == Some(NVIDIA) && line("class").as_deref().and_then(pci::class) == Some(pci::Class::Display)
    };
    let addresses = facts.names("/sys/bus/pci/devices").into_iter().filter(|name| pci::is_address(name));
    addresses.filter(is_gpu).collect()
}

/// The NVMe controllers that offer memory to their peers.
pub(super) fn pools(facts: &dyn Facts) -> Vec<PciDevice> {
    let controllers = facts.names("/sys/class/nvme").into_iter();
    let paths = controllers.filter_map(|name| facts.link(&format!("/sys/class/nvme/{name}")).ok());
    let devices = paths.filter_map(|path| PciDevice::examine(facts, pci::addresses(&path).last()?));
    devices.filter(|device| device.peer_bytes.is_some_and(|bytes| bytes > 0)).collect()
}
