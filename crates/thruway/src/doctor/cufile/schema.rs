//! Every key of `cufile.json`, its type, its range and what it does. From the comments of NVIDIA's template, the GPUDirect
//! Storage configuration guide, the bounds that libcufile 1.15 and 1.19 report (`cuFileGetParameterMinMaxValue`), and the names of
//! keys in the libraries 1.15 to 1.20.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

/// What a value must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// `true` or `false`.
    Bool,
    /// A whole number within bounds, a multiple of the third number.
    Number(i64, i64, i64),
    /// Any text.
    Text,
    /// One of these words; case does not matter.
    OneOf(&'static [&'static str]),
    /// A list of texts.
    Texts,
    /// A list of whole numbers above 0.
    Numbers,
    /// An object or a list whose content is the user's own.
    Free,
    /// A list of texts or numbers.
    List,
    /// Anything: the library has the key, and nobody documents what it takes.
    Any,
}

/// One key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Where it belongs: the keys above it and its own, with dots between.
    pub path: &'static str,
    /// What its value must be.
    pub shape: Shape,
    /// What is in force without it, as in NVIDIA's template.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

const fn key(path: &'static str, shape: Shape, default: &'static str, meaning: &'static str) -> Key {
    Key { path, shape, default, meaning }
}

const fn count(least: i64, most: i64) -> Shape {
    Shape::Number(least, most, 1)
}

/// A number of kilobytes may be so large; the library takes what memory there is for its bound.
const KB_MAX: i64 = 1 << 40;
const LEVELS: Shape = Shape::OneOf(&["ERROR", "NOTICE", "WARN", "INFO", "DEBUG", "TRACE"]);
const POLICIES: Shape = Shape::OneOf(&["RoundRobin", "FirstFit", "MaxMinFit", "RoundRobinMaxMin", "Randomized"]);
const OFF: &str = "false";
const P2P: &str = "let this kind of storage use PCI P2PDMA";

/// No path of a key is longer, or has more parts.
const PATH_BYTES_MAX: usize = 128;
const DEPTH_MAX: usize = 4;

/// All keys.
pub const KEYS: &[Key] = &[
    key("logging.dir", Shape::Text, "current directory", "where cufile.log is written"),
    key("logging.level", LEVELS, "ERROR", "how much is logged"),
    key("logging.max_file_size_mb", count(-1, 4096), "32", "size at which the log is begun anew"),
    key("profile.nvtx", Shape::Bool, OFF, "marks for NVIDIA's profilers (gone in 1.19)"),
    key("profile.cufile_stats", count(0, 3), "0", "statistics: 3 counts per GPU which way bytes went"),
    key("execution.max_io_queue_depth", count(1, 256), "128", "requests that may wait"),
    key("execution.max_io_threads", count(0, 128), "4", "threads for each GPU; 0 switches the stream functions off"),
    key("execution.parallel_io", Shape::Bool, "true", "cut large requests and do the parts side by side"),
    key("execution.min_io_threshold_size_kb", Shape::Number(4, KB_MAX, 1), "8192", "requests from this size on are cut"),
    key("execution.max_request_parallelism", count(0, 8), "4", "parts of one request under way"),
    key("properties.max_direct_io_size_kb", Shape::Number(64, 16_384, 64), "16384", "largest request to the driver"),
    key("properties.max_device_cache_size_kb", count(0, KB_MAX), "131072", "GPU memory for bounce buffers"),
    key("properties.per_buffer_cache_size_kb", Shape::Number(64, 16_384, 64), "1024", "one bounce buffer"),
    key("properties.max_device_pinned_mem_size_kb", count(0, KB_MAX), "33554432", "GPU memory that may be registered"),
    key("properties.gpu_bounce_buffer_slab_config", Shape::Free, "built in", "sizes of bounce buffers (1.17 on)"),
    key("properties.gpu_bounce_buffer_slab_config.slab_size_kb", Shape::Numbers, "1024 8192 16384 65536", "their sizes"),
    key("properties.gpu_bounce_buffer_slab_config.slab_count", Shape::Numbers, "128 8 4 2", "how many of each"),
    key("properties.posix_pool_slab_size_kb", Shape::Numbers, "4 1024 16384", "host buffers of the compatibility mode"),
    key("properties.posix_pool_slab_count", Shape::Numbers, "128 64 64", "how many of each; a batch that needs more hangs"),
    key("properties.use_poll_mode", Shape::Bool, OFF, "wait for small requests by polling"),
    key("properties.poll_mode_max_size_kb", Shape::Number(4, KB_MAX, 1), "4", "requests up to this size are polled for"),
    key("properties.io_batchsize", count(1, 256), "128", "requests in one batch"),
    key("properties.max_batch_io_timeout_msecs", count(1, 1000), "5", "how long a batch waits"),
    key("properties.io_priority", Shape::OneOf(&["default", "low", "med", "high"]), "default", "priority of requests"),
    key("properties.allow_compat_mode", Shape::Bool, "true", "fall back to the host's memory, silently"),
    key("properties.force_compat_mode", Shape::Bool, OFF, "always go through the host's memory"),
    key("properties.vanilla_posix_io_mode", Shape::Bool, OFF, "plain reads and writes instead"),
    key("properties.gds_fallback_io", Shape::Bool, OFF, "repeat what failed on the direct path through the host"),
    key("properties.use_pci_p2pdma", Shape::Bool, OFF, "use the kernel's PCI P2PDMA instead of nvidia-fs"),
    key("properties.gds_rdma_write_support", Shape::Bool, "true", "write over RDMA"),
    key("properties.force_odirect_mode", Shape::Bool, OFF, "treat every file as opened with O_DIRECT"),
    key("properties.prefer_iouring", Shape::Bool, OFF, "io_uring in the compatibility mode"),
    key("properties.allow_system_memory", Shape::Bool, "true", "take host memory as a buffer"),
    key("properties.compat_odirect_unaligned_read_split", Shape::Bool, OFF, "split unaligned reads"),
    key("properties.compat_odirect_unaligned_read_split_min_size_kb", count(4, KB_MAX), "128", "from this size on"),
    key("properties.sparse.p2p_compat_enable", Shape::Bool, "true", "holes of sparse files under P2PDMA (1.19)"),
    key("properties.sparse.min_p2pdma_threshold_kb", count(0, KB_MAX), "8", "their least size (1.19)"),
    key("properties.rdma_dev_addr_list", Shape::Texts, "[]", "addresses of the network cards for storage"),
    key("properties.rdma_peer_type", Shape::OneOf(&["peer_mem", "dmabuf"]), "", "how network cards reach GPU memory"),
    key("properties.rdma_load_balancing_policy", POLICIES, "RoundRobin", "which network card serves which request"),
    key("properties.rdma_topN_ranks", count(1, 64), "1", "how many of the nearest network cards"),
    key("properties.rdma_dynamic_routing", Shape::Bool, OFF, "go by another GPU where the way is shorter"),
    key("properties.rdma_dynamic_routing_order", Shape::Texts, "", "in which order ways are tried"),
    key("properties.rdma_dc_key", Shape::Text, "", "key of the RDMA transport"),
    key("properties.rdma_access_mask", Shape::Text, "", "rights of the RDMA transport"),
    key("properties.rdma_service_level", count(0, 15), "", "service level of the RDMA transport"),
    key("properties.rdma_transport_type", Shape::OneOf(&["DC_V1", "EXT_RC_V1"]), "DC_V1", "RDMA transport (1.19)"),
    key("properties.allow_rdma_token_reset", Shape::Bool, OFF, "reset tokens of RDMA storage"),
    key("properties.rdma_multipath_enabled", Shape::Bool, OFF, "several RDMA ways at once (1.19)"),
    key("properties.rdma_max_backup_devices", count(0, 64), "", "network cards to fall back to (1.19)"),
    key("properties.rdma_io_retry_count", count(0, KB_MAX), "", "how often an RDMA request is repeated (1.19)"),
    key("properties.rdma_io_retry_delay_ms", count(0, KB_MAX), "", "the time between (1.19)"),
    key("properties.rdma_failback_enabled", Shape::Bool, "", "go back to the first card once it is well (1.19)"),
    key("properties.rdma_failback_delay_ms", count(0, KB_MAX), "", "how long it must be well before (1.19)"),
    key("properties.rdma_health_check_interval_ms", count(0, KB_MAX), "", "how often cards are looked at (1.19)"),
    key("properties.rdma_async_event_monitoring", Shape::Bool, "", "hear from a card when it fails (1.19)"),
    key("properties.rdma_unhealthy_threshold", count(0, KB_MAX), "", "failures before a card counts as unwell (1.19)"),
    key("fs.generic.posix_unaligned_writes", Shape::Bool, OFF, "unaligned writes through the host"),
    key("fs.lustre.posix_gds_min_kb", count(0, KB_MAX), "0", "smaller requests go through the host"),
    key("fs.lustre.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for Lustre"),
    key("fs.lustre.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.lustre.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("fs.beegfs.posix_gds_min_kb", count(0, KB_MAX), "0", "smaller requests go through the host"),
    key("fs.beegfs.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for BeeGFS"),
    key("fs.beegfs.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.beegfs.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("fs.scatefs.posix_gds_min_kb", count(0, KB_MAX), "0", "smaller requests go through the host"),
    key("fs.scatefs.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for ScaTeFS"),
    key("fs.scatefs.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.scatefs.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("fs.nfs.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for NFS"),
    key("fs.nfs.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.nfs.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("fs.gpfs.gds_write_support", Shape::Bool, OFF, "write to Spectrum Scale directly"),
    key("fs.gpfs.gds_async_support", Shape::Bool, "true", "asynchronous requests to Spectrum Scale"),
    key("fs.gpfs.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for Spectrum Scale"),
    key("fs.gpfs.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.gpfs.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("fs.weka.rdma_write_support", Shape::Bool, OFF, "write to WekaFS directly"),
    key("fs.weka.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for WekaFS"),
    key("fs.weka.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.panfs.rdma_dev_addr_list", Shape::Texts, "[]", "network cards for PanFS"),
    key("fs.panfs.mount_table", Shape::Free, "", "network cards for each mount"),
    key("fs.panfs.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("fs.virtiofs.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("block.nvme.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("block.nvmeof.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("block.raid.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("block.raid1.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("block.raid10.use_pci_p2pdma", Shape::Bool, OFF, P2P),
    key("denylist.drivers", Shape::Texts, "[]", "drivers that go through the host"),
    key("denylist.devices", Shape::Texts, "[]", "devices that go through the host"),
    key("denylist.mounts", Shape::Texts, "[]", "mounts that go through the host"),
    key("denylist.fsids", Shape::List, "[]", "filesystems that go through the host, by number"),
    key("denylist.filesystems", Shape::Texts, "[]", "filesystems that go through the host"),
    key("miscellaneous.api_check_aggressive", Shape::Bool, OFF, "check more of what programs ask"),
    key("miscellaneous.skip_topology_detection", Shape::Bool, OFF, "do not look at the PCIe tree"),
    key("miscellaneous.stream_memops_bypass", Shape::Bool, OFF, "order streams another way"),
    key("miscellaneous.enable_static_routing", Shape::Bool, OFF, "ways from a file"),
    key("miscellaneous.static_routing_filepath", Shape::Text, "/etc/topology.json", "that file"),
    key("miscellaneous.rcu_library_used", Shape::Any, "", "which RCU library is loaded"),
    key("miscellaneous.enable_static_config", Shape::Bool, OFF, "settings from a file (1.20)"),
    key("miscellaneous.static_config_filepath", Shape::Text, "", "that file (1.20)"),
    key("miscellaneous.rdma_token_reset_timeout_secs", count(0, 86_400), "30", "how long a reset of tokens may take"),
];

/// The key that is meant by a name which libcufile prints, `gdscheck` shows, and no file is read for.
pub fn meant_by_label(path: &str) -> Option<&'static str> {
    match path {
        "properties.use_compat_mode" => Some("properties.allow_compat_mode"),
        "properties.rdma_peer_affinity_policy" => Some("properties.rdma_load_balancing_policy"),
        _ => None,
    }
}

/// The keys by the last part of their paths: a file of the longest kind names a hundred thousand.
static BY_NAME: LazyLock<HashMap<&str, Vec<&Key>>> = LazyLock::new(|| {
    let mut by_name = HashMap::<&str, Vec<&Key>>::new();
    KEYS.iter().for_each(|key| by_name.entry(name(key.path)).or_default().push(key));
    by_name
});

/// The paths of all objects with known keys below them.
static SECTIONS: LazyLock<HashSet<&str>> = LazyLock::new(|| {
    let above = KEYS.iter().flat_map(|key| key.path.match_indices('.').map(|(at, _)| &key.path[..at]));
    above.chain(["blacklist"]).collect()
});

/// The last part of a path.
fn name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// The key at a path. `blacklist` is the older name of `denylist`.
pub fn find(path: &str) -> Option<&'static Key> {
    let named = BY_NAME.get(name(path))?.iter();
    let is_it = |key: &Key| match path.strip_prefix("blacklist.") {
        Some(rest) => key.path.strip_prefix("denylist.") == Some(rest),
        None => key.path == path,
    };
    named.copied().find(|key| is_it(key))
}

/// Whether a path is that of an object with known keys below it.
pub fn is_section(path: &str) -> bool {
    SECTIONS.contains(path)
}

/// All places of keys with the last name of a path, those of single filesystems last.
pub fn places(path: &str) -> Vec<&'static str> {
    let mut places: Vec<&str> = BY_NAME.get(name(path)).into_iter().flatten().map(|key| key.path).collect();
    places.sort_by_key(|place| place.starts_with("fs."));
    places
}

/// Where a key belongs that was found at a wrong path: the known path that ends in the longest part of it. One word
/// alone must be the end of one path only, or nobody knows which was meant.
pub fn right_place(path: &str) -> Option<&'static str> {
    let named = BY_NAME.get(name(path))?;
    // However long the path, no known one is longer or deeper.
    let from = path.floor_char_boundary(path.len().saturating_sub(PATH_BYTES_MAX));
    let dots = path[from..].rmatch_indices('.').map(|(at, _)| from + at + 1);
    let mut starts: Vec<usize> = dots.chain((from == 0).then_some(0)).take(DEPTH_MAX).collect();
    starts.reverse();
    starts.into_iter().find_map(|start| {
        let end = &path[start..];
        let ends = |key: &&Key| key.path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        let mut known = named.iter().copied().filter(ends);
        let first = known.next()?;
        (known.next().is_none() || first.path == end).then_some(first.path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_and_misplaced_ones_are_known() {
        assert!(find("properties.allow_compat_mode").is_some() && find("blacklist.mounts").is_some());
        assert!(is_section("properties") && is_section("fs.nfs") && !is_section("properties.allow_compat_mode"));
        assert_eq!(right_place("fs.block.nvme.use_pci_p2pdma"), Some("block.nvme.use_pci_p2pdma"));
        assert_eq!(right_place("allow_compat_mode"), Some("properties.allow_compat_mode"));
        assert_eq!(right_place("execution.use_pci_p2pdma"), None, "several have this name");
        assert_eq!(right_place("nonsense"), None);
    }

    #[test]
    fn no_key_stands_twice() {
        let mut paths: Vec<&str> = KEYS.iter().map(|key| key.path).collect();
        paths.sort_unstable();
        paths.dedup();
        assert_eq!(paths.len(), KEYS.len());
        assert!(paths.iter().all(|path| path.len() < PATH_BYTES_MAX && path.split('.').count() <= DEPTH_MAX));
    }
}
