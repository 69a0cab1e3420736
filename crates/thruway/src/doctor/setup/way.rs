//! Which direct route is to be opened on a machine.
//!
//! A route is fit if nothing shuts it but what set-up can put right, or what a person can beside it. Of two that are fit, that
//! which opens more places wins, then that with less to do by hand, then that which is open or begun already; then PCI P2PDMA,
//! which needs no module of its own and no patched NVMe driver (docs/decisions/0009).

use super::distribution::is_nvidia_kernel;
use crate::doctor::facts::{Facts, FactsExt};
use crate::doctor::machine::{DriveKind, Machine, is_loaded, nvidia_fs_is_installed};
use crate::doctor::report::{PathReport, Report, Route};

/// What set-up puts right.
const OURS: [&str; 8] = [
    "nvidia_fs.module",
    "cufile.library",
    "cufile.config",
    "cufile.compatibility",
    "cufile.p2pdma",
    "p2pdma.parameters",
    "p2pdma.multipath",
    "p2pdma.memory",
];
/// What a person has to do beside it.
const BY_HAND: [&str; 7] =
    ["path.filesystem", "path.denied", "cufile.environment", "container.udev", "nvidia_fs.nodes", "p2pdma.iommu", "gpu.bar1"];

/// By which a patched NVMe driver lets nvidia-fs register.
const REGISTER: [&str; 2] = ["nvme_v1_register_nvfs_dma_ops", "nvme_v2_register_nvfs_dma_ops"];

/// Whether a check's finding stays for a person to put right.
pub(super) fn is_by_hand(id: &str) -> bool {
    BY_HAND.contains(&id)
}

/// The route to open, if there is one that can be.
pub(super) fn choose(facts: &dyn Facts, machine: &Machine, report: &Report) -> Option<Route> {
    let is_begun = |route: Route| match route {
        Route::NvidiaFs => is_loaded(facts, "nvidia_fs") || nvidia_fs_is_installed(facts, &machine.release),
        _ => machine.config.audit().is_some_and(|audit| audit.settings.use_p2pdma == Some(true)),
    };
    let rank = |route: Route| {
        let fit: Vec<usize> = report.paths.iter().filter_map(|path| by_hand(facts, machine, path, route)).collect();
        let open = report.paths.iter().filter(|path| path.route == Some(route)).count();
        let left: usize = fit.iter().sum();
        (fit.len(), std::cmp::Reverse(left), open, is_begun(route), route == Route::CufileP2pdma)
    };
    let ranked = Route::CUFILE.into_iter().map(|route| (rank(route), route)).filter(|((fit, ..), _)| *fit > 0);
    ranked.max_by_key(|(rank, _)| *rank).map(|(_, route)| route)
}

/// How much a person has to do for a place before a route is open; `None` if it is not fit for it.
fn by_hand(facts: &dyn Facts, machine: &Machine, path: &PathReport, route: Route) -> Option<usize> {
    if path.route == Some(route) {
        return Some(0);
    }
    // A route that nothing shuts and that is not taken lacks a GPU, or the place cannot be used.
    if path.gpu.is_none() || path.expected == crate::doctor::report::Expected::None {
        return None;
    }
    let ids = match path.shut.iter().find(|shut| shut.route == route) {
        Some(shut) if !shut.can_be_opened => return None,
        Some(shut) => shut.by.as_slice(),
        None => &[],
    };
    let is_known = |id: &&&str| OURS.contains(*id) || is_by_hand(id);
    if !ids.iter().all(|id| is_known(&id)) || route == Route::NvidiaFs && !may_load(facts, machine, path) {
        return None;
    }
    Some(ids.iter().filter(|id| is_by_hand(id)).count())
}

/// Whether nvidia-fs, once it is there, would work: the open driver, a kernel that does not hang with it, and, for local NVMe
/// drives, an NVMe driver that knows it. While the module is not loaded, nothing else tells.
fn may_load(facts: &dyn Facts, machine: &Machine, path: &PathReport) -> bool {
    let is_open = machine.driver.as_ref().is_ok_and(|driver| driver.is_open);
    is_loaded(facts, "nvidia_fs") || is_open && !machine.kernel_at_least(&[6, 17]) && !lacks_patched_driver(facts, machine, path)
}

/// Whether a place lies on local NVMe drives whose driver does not know nvidia-fs, as far as that can be seen while the module
/// is not loaded. Ubuntu's kernels `linux-nvidia` have a patched driver. One that DOCA or MLNX_OFED brought exports the function
/// by which nvidia-fs registers; that `mlx_compat` is loaded shows network drivers of theirs, no NVMe driver.
pub(super) fn lacks_patched_driver(facts: &dyn Facts, machine: &Machine, path: &PathReport) -> bool {
    let target = machine.targets.iter().find(|target| target.path == path.path);
    let mut drives = target.into_iter().flat_map(|target| &target.drives);
    let is_local = drives.any(|drive| matches!(&drive.kind, DriveKind::Nvme(transport) if transport == "pcie"));
    // depmod's table of what modules export.
    let table = format!("/lib/modules/{}/modules.symbols", machine.release);
    let exports = |symbol: &str| facts.lines(&table, &format!("alias symbol:{symbol}")).is_ok_and(|lines| !lines.is_empty());
    let is_patched = is_nvidia_kernel(&machine.release) || REGISTER.iter().any(|symbol| exports(symbol));
    is_local && !is_patched && !is_loaded(facts, "nvidia_fs")
}
