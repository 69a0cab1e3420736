//! Which direct route is to be opened on a machine: the doctor names it, and set-up opens it.
//!
//! A route is fit if nothing shuts it but what set-up can put right, or what a person can beside it. Of two that are fit, that
//! which opens more places wins, then that with less to do by hand, then that which is open or begun already; then PCI P2PDMA,
//! which needs no module of its own and no patched NVMe driver (docs/decisions/0014).

use super::facts::Facts;
use super::machine::{Machine, has_patched_nvme, is_loaded, nvidia_fs_is_installed};
use super::report::{Expected, PathReport, Route, Shut};

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

/// Whether a check's finding stays for a person to put right.
pub(super) fn is_by_hand(id: &str) -> bool {
    BY_HAND.contains(&id)
}

/// The route to open, if there is one that can be.
pub(super) fn choose(facts: &dyn Facts, machine: &Machine, paths: &[PathReport]) -> Option<Route> {
    let is_begun = |route: Route| match route {
        Route::NvidiaFs => is_loaded(facts, "nvidia_fs") || nvidia_fs_is_installed(facts, &machine.release),
        _ => machine.config.audit().is_some_and(|audit| audit.settings.use_p2pdma == Some(true)),
    };
    let rank = |route: Route| {
        let fit: Vec<usize> = paths.iter().filter_map(|path| by_hand(facts, machine, path, route)).collect();
        let open = paths.iter().filter(|path| path.route == Some(route)).count();
        let left: usize = fit.iter().sum();
        (fit.len(), std::cmp::Reverse(left), open, is_begun(route), route == Route::CufileP2pdma)
    };
    let ranked = Route::CUFILE.into_iter().map(|route| (rank(route), route)).filter(|((fit, ..), _)| *fit > 0);
    ranked.max_by_key(|(rank, _)| *rank).map(|(_, route)| route)
}

/// Whether set-up has something to do for a place on the way to a route: nothing is in the way that it or a person beside it
/// cannot put right. In a container it does nothing, and what could not be seen is to be found out first.
pub(super) fn can_set_up(facts: &dyn Facts, machine: &Machine, path: &PathReport, route: Route) -> bool {
    let has_work = |shut: &Shut| shut.route == route && shut.by.iter().any(|id| OURS.contains(id));
    let is_due = machine.container.is_none() && path.route.is_none() && !path.may_be_direct();
    is_due && path.shut.iter().any(has_work) && by_hand(facts, machine, path, route).is_some()
}

/// How much a person has to do for a place before a route is open; `None` if it is not fit for it.
fn by_hand(facts: &dyn Facts, machine: &Machine, path: &PathReport, route: Route) -> Option<usize> {
    if path.route == Some(route) {
        return Some(0);
    }
    // A route that nothing shuts and that is not taken lacks a GPU, or the place cannot be used.
    if path.gpu.is_none() || path.expected == Expected::None {
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
/// is not loaded.
pub(super) fn lacks_patched_driver(facts: &dyn Facts, machine: &Machine, path: &PathReport) -> bool {
    let target = machine.targets.iter().find(|target| target.path == path.path);
    let is_local = target.is_some_and(super::machine::Target::is_on_local_nvme);
    is_local && !has_patched_nvme(facts, &machine.release) && !is_loaded(facts, "nvidia_fs")
}
