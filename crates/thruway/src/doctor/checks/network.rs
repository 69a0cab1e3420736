//! Network cards, where a place lies on another machine.

use super::Context;
use crate::doctor::machine::Target;
use crate::doctor::report::{Finding, Route, Verdict};

const SEE: &str = "see the cable and the switch of the port, and `ibstat`; InfiniBand needs a subnet manager";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let machine = context.machine;
    if machine.gpus.is_empty() || !machine.targets.iter().any(|target| target.is_remote() || target.is_on_remote_nvme()) {
        return;
    }
    let ports: Vec<_> = machine.nics.iter().flat_map(|nic| &nic.ports).collect();
    let shut = |verdict, seen: &str, source: &str, remedy: &str| {
        let places = machine.targets.iter().filter(|target| target.is_remote() || target.is_on_remote_nvme());
        let finding = |target: &Target| Finding::new("path.network", verdict, seen, source).about(&target.path);
        places.map(|target| finding(target).remedy(remedy).shuts(&Route::CUFILE)).collect::<Vec<Finding>>()
    };
    if ports.is_empty() {
        let seen = "no network card here shows a port that can do RDMA";
        let remedy = "find out whether a card can do RDMA: `ls /sys/class/infiniband`, `ibstat`";
        findings.extend(shut(Verdict::Unknown, seen, "/sys/bus/pci/devices/*/infiniband", remedy));
        return;
    }
    if ports.iter().all(|port| port.is_active != Some(true)) {
        let is_down = ports.iter().all(|port| port.is_active == Some(false));
        let (verdict, seen, remedy) = if is_down {
            (Verdict::Warning, "every port that can do RDMA is down", SEE)
        } else {
            let remedy = "find out in which state they are: `cat /sys/class/infiniband/*/ports/*/state`";
            (Verdict::Unknown, "no port that can do RDMA is known to be active", remedy)
        };
        findings.extend(shut(verdict, seen, "/sys/class/infiniband/*/ports/*/state", remedy));
    }
    let has_other = ports.iter().any(|port| port.is_active == Some(true));
    for port in ports {
        let source = format!("/sys/class/infiniband/{}", port.name.replace('/', "/ports/"));
        // RDMA over Ethernet is RoCE.
        let kind = if port.link_layer == "Ethernet" { "RoCE" } else { port.link_layer.as_str() };
        let words: Vec<&str> = [kind, port.rate.as_str()].into_iter().filter(|word| !word.is_empty()).collect();
        let (verdict, state) = match port.is_active {
            Some(true) => (Verdict::Ok, "active"),
            // One that is not plugged in is no harm where another does the work.
            Some(false) if has_other => (Verdict::Ok, "down"),
            Some(false) => (Verdict::Warning, "down"),
            None => (Verdict::Unknown, "in an unknown state"),
        };
        let finding = Finding::new("network.rdma", verdict, format!("{state} ({})", words.join(", ")), source).about(&port.name);
        findings.push(match verdict {
            Verdict::Warning => finding.remedy(SEE),
            _ => finding,
        });
    }
}
