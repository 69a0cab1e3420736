//! Network cards, where a place lies on another machine.

use super::Context;
use crate::doctor::machine::Target;
use crate::doctor::report::{Finding, Route, Verdict};

const SEE: &str = "see its cable and its switch, and `ibstat`; InfiniBand needs a subnet manager";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let machine = context.machine;
    if machine.gpus.is_empty() || !machine.targets.iter().any(Target::is_remote) {
        return;
    }
    let ports: Vec<_> = machine.nics.iter().flat_map(|nic| &nic.ports).collect();
    if ports.is_empty() {
        let seen = "no network card here shows a port that can do RDMA";
        findings.push(Finding::new("network.rdma", Verdict::Unknown, seen, "/sys/bus/pci/devices/*/infiniband"));
        return;
    }
    if ports.iter().all(|port| port.is_active == Some(false)) {
        let seen = "every port that can do RDMA is down";
        let shut = |target: &Target| {
            let source = "/sys/class/infiniband/*/ports/*/state";
            let finding = Finding::new("path.network", Verdict::Warning, seen, source).about(&target.path).remedy(SEE);
            finding.shuts(&[Route::NvidiaFs])
        };
        findings.extend(machine.targets.iter().filter(|target| target.is_remote()).map(shut));
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
