//! The picture as lines of text.

use thruway::doctor::topology::{MountAdvice, Node, Part, Topology};

use super::{drawn, link, word};
use crate::escape::safe;
use crate::output::table;

/// The heading of the places.
pub(super) const BEST_GPU: &str = "the best GPU for each place";
/// The heading of the GPUs.
pub(super) const BEST_PLACE: &str = "the best place for each GPU";

/// All lines, safe for terminals.
pub(super) fn lines(topology: &Topology) -> Vec<String> {
    let mut lines = Vec::new();
    for node in &topology.nodes {
        lines.push(heading(node));
        for (at, root) in node.roots.iter().enumerate() {
            let is_last = at + 1 == node.roots.len();
            lines.push(format!("{}{}", if is_last { "└─ " } else { "├─ " }, safe(&root.name)));
            branch(&root.parts, false, if is_last { "   " } else { "│  " }, &mut lines);
        }
        lines.push(String::new());
    }
    if !topology.elsewhere.is_empty() {
        lines.push("not on a PCI bus that shows".to_owned());
        let parts: Vec<&Part> = topology.elsewhere.iter().collect();
        branches(&parts, "", &mut lines);
        lines.push(String::new());
    }
    if topology.is_empty() {
        lines.extend(["nothing to draw: no GPU, NVMe drive or network card is to be seen".to_owned(), String::new()]);
    }
    lines.push(BEST_GPU.to_owned());
    lines.extend(mounts(topology));
    lines.push(BEST_PLACE.to_owned());
    lines.extend(gpus(topology));
    lines
}

/// The line above a NUMA node.
pub(super) fn heading(node: &Node) -> String {
    let number = node.node.map_or_else(|| "one NUMA node, or none told".to_owned(), |number| format!("NUMA node {number}"));
    let socket = node.socket.map(|socket| format!(", socket {socket}")).unwrap_or_default();
    let processors = node.processors.as_ref().map(|list| format!(", processors {}", safe(list))).unwrap_or_default();
    format!("{number}{socket}{processors}")
}

/// What stands beside a part: what it is, its name and address, its link, what lies on it.
pub(super) fn words(part: &Part) -> Vec<String> {
    let mut words = vec![word(part.kind).to_owned(), safe(&part.label)];
    if !part.address.is_empty() && !part.label.contains(&part.address) {
        words.push(safe(&part.address));
    }
    words.extend(part.link.as_ref().map(link));
    words.extend(part.notes.iter().map(|note| safe(note)));
    words.extend(part.places.iter().map(|place| format!("[{}]", safe(place))));
    words
}

fn branch(parts: &[Part], below_bridge: bool, indent: &str, lines: &mut Vec<String>) {
    let mut shown = Vec::new();
    drawn(parts, below_bridge, &mut shown);
    branches(&shown, indent, lines);
}

fn branches(shown: &[&Part], indent: &str, lines: &mut Vec<String>) {
    for (at, part) in shown.iter().enumerate() {
        let is_last = at + 1 == shown.len();
        lines.push(format!("{indent}{}{}", if is_last { "└─ " } else { "├─ " }, words(part).join("  ")));
        branch(&part.parts, true, &format!("{indent}{}", if is_last { "   " } else { "│  " }), lines);
    }
}

fn mounts(topology: &Topology) -> Vec<String> {
    if topology.mounts.is_empty() {
        return vec!["  no mount lies on a drive that the PCI bus shows".to_owned(), String::new()];
    }
    let mut rows = Vec::new();
    for mount in &topology.mounts {
        let gpu = mount.gpu.as_ref().map_or_else(|| "none".to_owned(), |gpu| safe(gpu));
        rows.push(vec![format!("  {}", safe(&mount.path)), safe(&mount.storage), gpu, safe(&mount.reason)]);
    }
    let mut lines = table(&rows, &[]);
    for mount in topology.mounts.iter().filter(|mount| mount.ways.len() > 1) {
        lines.push(format!("  {}: {}", safe(&mount.path), distances(mount)));
    }
    lines.push(String::new());
    lines
}

/// The GPUs by their distance, in the words of `nvidia-smi topo`.
fn distances(mount: &MountAdvice) -> String {
    let of = |word: &str| {
        let ways = mount.ways.iter().filter(|way| way.distance == word);
        // Without its model: `cuda:0`.
        let names: Vec<String> = ways.map(|way| safe(way.gpu.split(" (").next().unwrap_or_default())).collect();
        (!names.is_empty()).then(|| format!("{word} {}", names.join(" ")))
    };
    ["PIX", "PXB", "PHB", "NODE", "NODE?", "SYS"].into_iter().filter_map(of).collect::<Vec<String>>().join(", ")
}

fn gpus(topology: &Topology) -> Vec<String> {
    if topology.gpus.is_empty() {
        return vec!["  there is no GPU".to_owned()];
    }
    let place = |path: &Option<String>| path.as_ref().map_or_else(|| "none".to_owned(), |path| safe(path));
    let rows: Vec<Vec<String>> =
        topology.gpus.iter().map(|gpu| vec![format!("  {}", safe(&gpu.gpu)), place(&gpu.path), safe(&gpu.reason)]).collect();
    table(&rows, &[])
}
