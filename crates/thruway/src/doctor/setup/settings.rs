//! What `cufile.json` is to say on a machine.

use super::{Route, Setting};
use crate::doctor::cufile::jsonc::{Node, parse};
use crate::doctor::machine::{LayerKind, Machine};

/// GPU memory that libcufile registers at most without being told otherwise, and of it the cache for bounce buffers: the
/// template of libcufile 1.15 to 1.19.
const PINNED_KB: u64 = 33_554_432;
const CACHE_KB: u64 = 131_072;

/// The keys to set. What forbids the way through the host is set whatever stands there; sizes only where nobody has chosen one.
pub(super) fn wanted(machine: &Machine, route: Route) -> Vec<Setting> {
    let set = |key, value: &str| Setting { key, value: value.to_owned(), yields: false };
    let settings = machine.config.audit().map(|audit| &audit.settings);
    let mut wanted = vec![set("properties.allow_compat_mode", "false")];
    for (key, is_on) in [
        ("properties.force_compat_mode", settings.and_then(|settings| settings.force_compat)),
        ("properties.vanilla_posix_io_mode", settings.and_then(|settings| settings.vanilla_posix)),
    ] {
        wanted.extend((is_on == Some(true)).then(|| set(key, "false")));
    }
    if route == Route::CufileP2pdma {
        wanted.extend(["properties.use_pci_p2pdma", "block.nvme.use_pci_p2pdma"].map(|key| set(key, "true")));
        let layers = machine.targets.iter().flat_map(|target| &target.layers);
        let has_raid = layers.into_iter().any(|layer| layer.kind == LayerKind::Raid("raid0".to_owned()));
        wanted.extend(has_raid.then(|| set("block.raid.use_pci_p2pdma", "true")));
    }
    wanted.extend(sizes(machine).into_iter().map(|(key, value)| Setting { key, value, yields: true }));
    wanted
}

/// Those keys, with their values, that are to be set in a file as it is.
pub(super) fn due<'a>(old: Option<&str>, wanted: &'a [Setting]) -> Vec<(&'static str, &'a str)> {
    let root = old.and_then(|text| parse(text).ok());
    let is_there =
        |path: &str| root.as_ref().is_some_and(|root| path.split('.').try_fold(root, |node: &Node, key| node.get(key)).is_some());
    let due = wanted.iter().filter(|setting| !setting.yields || !is_there(setting.key));
    due.map(|setting| (setting.key, setting.value.as_str())).collect()
}

/// Sizes fit for a machine.
fn sizes(machine: &Machine) -> Vec<(&'static str, String)> {
    // 1.15 with a file that does not name these has no threads, and then no stream functions; 1.19 has others than its
    // template says. Requests of 16 MiB are what the release notes of 1.19 ask to set.
    let mut sizes = vec![
        ("execution.parallel_io", "true".to_owned()),
        ("execution.max_io_threads", "4".to_owned()),
        ("properties.max_direct_io_size_kb", "16384".to_owned()),
    ];
    // A program may register all memory of a GPU: with less it fails with 5016.
    let memory = machine.gpus.iter().filter_map(|gpu| gpu.memory_bytes).max().unwrap_or(0);
    let needed = memory.div_ceil(1 << 20).saturating_mul(1 << 10).saturating_add(CACHE_KB);
    if needed > PINNED_KB {
        sizes.push(("properties.max_device_pinned_mem_size_kb", needed.to_string()));
    }
    sizes
}
