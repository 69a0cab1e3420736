//! Network cards, and what of them can do RDMA.

use super::pci::PciDevice;
use crate::doctor::facts::{Facts, FactsExt};
use crate::doctor::parse::pci;

/// So many ports of one card are looked at.
const PORTS_MAX: usize = 16;

/// A network card, or one function of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// Its device.
    pub device: PciDevice,
    /// The names of its network interfaces.
    pub interfaces: Vec<String>,
    /// Its ports that can do RDMA.
    pub ports: Vec<RdmaPort>,
}

/// A port that can do RDMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaPort {
    /// The name of its RDMA device and its number, such as `mlx5_0/1`.
    pub name: String,
    /// Whether it is active; `None` if that is unknown.
    pub is_active: Option<bool>,
    /// Its rate in the kernel's words, such as `400 Gb/sec (4X NDR)`; empty if it is unknown.
    pub rate: String,
    /// `InfiniBand`, or `Ethernet` (RoCE); empty if it is unknown.
    pub link_layer: String,
}

impl Nic {
    /// How people call it: the names of its interfaces and RDMA devices, or its address.
    pub fn label(&self) -> String {
        let mut names = self.interfaces.clone();
        names.extend(self.ports.iter().map(|port| port.name.clone()));
        if names.is_empty() { self.device.address.clone() } else { names.join(", ") }
    }

    /// Whether a port of it can do RDMA and is not known to be down.
    pub fn has_rdma(&self) -> bool {
        self.ports.iter().any(|port| port.is_active != Some(false))
    }
}

/// All network cards.
pub(super) fn all(facts: &dyn Facts, classes: &[(String, pci::Class)]) -> Vec<Nic> {
    let addresses = classes.iter().filter(|(_, class)| *class == pci::Class::Network).map(|(address, _)| address);
    let nic = |address: &String| {
        let device = PciDevice::examine(facts, address)?;
        let base = format!("/sys/bus/pci/devices/{address}");
        let rdma = facts.names(&format!("{base}/infiniband")).into_iter();
        let ports = rdma.flat_map(|name| ports(facts, &name)).take(PORTS_MAX).collect();
        Some(Nic { interfaces: facts.names(&format!("{base}/net")), ports, device })
    };
    addresses.filter_map(nic).collect()
}

/// The ports of an RDMA device.
fn ports(facts: &dyn Facts, name: &str) -> Vec<RdmaPort> {
    let base = format!("/sys/class/infiniband/{name}/ports");
    let port = |number: String| {
        let line = |file: &str| facts.line(&format!("{base}/{number}/{file}")).ok();
        RdmaPort {
            name: format!("{name}/{number}"),
            // `4: ACTIVE`
            is_active: line("state").filter(|state| state.contains(':')).map(|state| state.contains("ACTIVE")),
            rate: line("rate").unwrap_or_default(),
            link_layer: line("link_layer").unwrap_or_default(),
        }
    };
    facts.names(&base).into_iter().take(PORTS_MAX).map(port).collect()
}
