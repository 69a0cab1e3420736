//! Which of the machine's processors, and so which of its memory, are near a device.

use super::namespace::read_small_text;
use crate::base::Processors;

/// The processors of the NUMA node that a PCI device belongs to, by its address. `None` where the machine has one node, and
/// where the kernel does not know (virtual machines, often).
pub fn processors_near(pci_address: &str) -> Option<Processors> {
    near(pci_address, &read_small_text)
}

fn near(pci_address: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<Processors> {
    let nodes = Processors::parse(&read("/sys/devices/system/node/online")?)?;
    if nodes.count() < 2 {
        return None;
    }
    // The kernel writes addresses in small letters, the CUDA driver in capitals. A device of no node has -1.
    let node = read(&format!("/sys/bus/pci/devices/{}/numa_node", pci_address.to_ascii_lowercase()))?;
    let node: u32 = node.trim().parse().ok()?;
    Processors::parse(&read(&format!("/sys/devices/system/node/node{node}/cpulist"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(nodes: &'static str, node_of_gpu: &'static str) -> impl Fn(&str) -> Option<String> {
        move |path| {
            let text = match path {
                "/sys/devices/system/node/online" => nodes,
                "/sys/bus/pci/devices/0000:af:00.0/numa_node" => node_of_gpu,
                "/sys/devices/system/node/node0/cpulist" => "0-31,64-95\n",
                "/sys/devices/system/node/node1/cpulist" => "32-63,96-127\n",
                // A node that has memory and no processors.
                "/sys/devices/system/node/node2/cpulist" => "\n",
                _ => return None,
            };
            Some(text.to_owned())
        }
    }

    #[test]
    fn the_processors_are_those_of_the_device_s_node() {
        let near = |nodes, node| near("0000:AF:00.0", &machine(nodes, node));
        assert_eq!(near("0-1\n", "1\n"), Processors::parse("32-63,96-127"));
        assert_eq!(near("0-1\n", "0\n"), Processors::parse("0-31,64-95"));
        assert_eq!(near("0\n", "0\n"), None, "one node: all are equally near");
        assert_eq!(near("0-1\n", "-1\n"), None, "the kernel does not know");
        assert_eq!(near("0-2\n", "2\n"), None, "memory without processors");
        assert_eq!(near("0-1\n", "what"), None);
    }

    #[test]
    fn an_unknown_device_is_near_nothing() {
        assert_eq!(near("0000:01:00.0", &machine("0-1", "0")), None);
        assert_eq!(near("../../..", &machine("0-1", "0")), None);
        assert_eq!(near("0000:af:00.0", &|_: &str| None), None);
    }
}
