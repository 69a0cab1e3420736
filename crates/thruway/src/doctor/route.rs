//! The conclusion: for each place, which routes the findings leave open.

use super::facts::Unseen;
use super::machine::{Direct, Gpu, Machine, PciDevice, Target};
use super::parse::pci::Distance;
use super::report::{Bar, Expected, Finding, Health, PathReport, Report, Route, Shut, Verdict};

/// Draws the conclusions from the findings.
pub(super) fn conclude(machine: &Machine, mut findings: Vec<Finding>) -> Report {
    let mut paths: Vec<PathReport> = machine.targets.iter().map(|target| path(machine, target, &findings)).collect();
    let all_direct = !paths.is_empty() && paths.iter().all(|path| path.expected == Expected::Direct);
    for finding in &mut findings {
        settle(machine, finding, &paths, all_direct);
    }
    findings.extend(paths.iter().filter_map(|path| strict(machine, path)));
    let fault = findings.iter().find(|finding| finding.verdict == Verdict::Fault);
    if let Some(fault) = fault {
        let remedy = fault.remedy.clone().unwrap_or_else(|| fault.seen.clone());
        for path in &mut paths {
            path.next.clone_from(&remedy);
        }
    }
    for path in &mut paths {
        path.conclusion = sentence(machine, path);
    }
    let health = match (fault.is_some(), all_direct) {
        (true, _) => Health::Broken,
        (_, true) => Health::Direct,
        _ => Health::Slower,
    };
    let conclusion = paths.iter().map(|path| path.conclusion.as_str()).collect::<Vec<&str>>().join(" ");
    Report { health, conclusion, paths, findings }
}

/// The GPU that lies nearest to a place's drives, and how far it is from the farthest of them.
pub(super) fn nearest<'a>(machine: &'a Machine, target: &Target) -> Option<(&'a Gpu, Distance)> {
    let far = |gpu: &'a Gpu| {
        let device = gpu.device.as_ref()?;
        let farthest = target.devices().filter_map(|drive| device.distance(drive)).max()?;
        Some((gpu, farthest))
    };
    // The first of several at one distance.
    machine.gpus.iter().filter_map(far).min_by_key(|(_, distance)| *distance)
}

/// The nearest device that offers memory to the drives of a place, and is none of them, and how far it is from the farthest.
pub(super) fn pool<'a>(machine: &'a Machine, target: &Target) -> Option<(&'a PciDevice, Option<Distance>)> {
    let is_other = |pool: &&PciDevice| target.devices().all(|drive| drive.address != pool.address);
    target.devices().next()?;
    let far = |pool: &'a PciDevice| (pool, target.devices().filter_map(|drive| pool.distance(drive)).max());
    machine.pools.iter().filter(is_other).map(far).min_by_key(|(_, distance)| (distance.is_none(), *distance))
}

fn path(machine: &Machine, target: &Target, findings: &[Finding]) -> PathReport {
    let gpu = nearest(machine, target).map(|(gpu, _)| gpu).or(machine.gpus.first());
    let label = gpu.map(Gpu::label);
    let is_of_this_path = |finding: &&Finding| {
        let is_of_path = machine.targets.iter().any(|target| target.path == finding.subject);
        !is_of_path || finding.subject == target.path
    };
    let relevant: Vec<&Finding> = findings.iter().filter(is_of_this_path).collect();
    let is_other_gpu = |finding: &Finding| {
        machine.gpus.iter().any(|gpu| gpu.label() == finding.subject) && Some(&finding.subject) != label.as_ref()
    };
    // One GPU that cannot do it shuts cuFile's P2PDMA for all ("Not all GPUs support PCIP2PDMA"); else the nearest counts.
    let bars = |route: Route| -> Vec<(&Finding, Bar)> {
        let counting = relevant.iter().filter(|finding| route == Route::CufileP2pdma || !is_other_gpu(finding));
        counting.filter_map(|finding| Some((*finding, finding.bar(route)?))).collect()
    };
    // Of a place that could not be examined the other facts may still tell.
    let usable = match &target.place {
        Ok(place) => place.may_read && !place.is_special,
        Err(unseen) => matches!(unseen, Unseen::Failed(_)),
    };
    let has_memory = |route: Route| match route {
        Route::KernelP2pdma => pool(machine, target).is_some(),
        _ => gpu.is_some(),
    };
    let open = Route::ALL.into_iter().find(|route| usable && has_memory(*route) && bars(*route).is_empty());
    let shut = |route: Route| {
        let bars = bars(route);
        let mut by: Vec<&'static str> = bars.iter().map(|(finding, _)| finding.id).collect();
        by.dedup();
        let can_be_opened = bars.iter().all(|(_, bar)| *bar == Bar::Liftable);
        (!by.is_empty()).then_some(Shut { route, can_be_opened, by })
    };
    // Of the routes that can be opened, that with the least to do, and of two that which was begun; what is in its way, in
    // the order of the checks.
    let easiest = Route::ALL.into_iter().filter(|route| *route != Route::KernelP2pdma || gpu.is_none());
    let easiest = easiest.map(|route| (route, bars(route))).min_by_key(|(route, bars)| {
        let begins_with = if *route == Route::NvidiaFs { "nvidia_fs.module" } else { "cufile.p2pdma" };
        let is_begun = bars.iter().all(|(finding, _)| finding.id != begins_with);
        (bars.iter().any(|(_, bar)| *bar == Bar::Final), bars.len(), !is_begun)
    });
    let in_the_way = easiest.map_or_else(Vec::new, |(_, bars)| bars);
    let expected = expected(target, gpu.is_some(), usable, open);
    let next = match expected {
        Expected::Direct => format!("prove it: `thruway verify-direct {}`", target.path),
        Expected::Plain => "nothing: without a GPU this is the shortest path".to_owned(),
        _ => first_remedy(in_the_way),
    };
    PathReport {
        path: target.path.clone(),
        storage: target.describe(),
        gpu: match open {
            Some(Route::KernelP2pdma) => {
                pool(machine, target).map(|(device, _)| format!("{} (its memory buffer)", device.address))
            }
            _ => gpu.map(Gpu::label),
        },
        expected,
        route: open,
        shut: Route::ALL.into_iter().filter_map(shut).collect(),
        next,
        conclusion: String::new(),
    }
}

/// What to do first of all that is in the way of a route.
fn first_remedy(mut in_the_way: Vec<(&Finding, Bar)>) -> String {
    // What is final comes first: where it stays, the rest is for nothing.
    in_the_way.sort_by_key(|(_, bar)| *bar == Bar::Liftable);
    if let Some(remedy) = in_the_way.iter().find_map(|(finding, _)| finding.remedy.clone()) {
        return remedy;
    }
    let blind = in_the_way.iter().filter(|(finding, _)| finding.verdict == Verdict::Unknown);
    let unseen: Vec<&str> = blind.map(|(finding, _)| finding.id).collect();
    if unseen.is_empty() { "nothing".to_owned() } else { format!("find out what could not be seen ({})", unseen.join(", ")) }
}

fn expected(target: &Target, has_gpu: bool, usable: bool, open: Option<Route>) -> Expected {
    let direct = target.place.as_ref().map_or(Direct::Unknown, |place| place.direct);
    match (usable, open, direct, has_gpu) {
        (false, ..) => Expected::None,
        (_, Some(_), ..) => Expected::Direct,
        (_, _, Direct::Refused, _) => Expected::Cached,
        (_, _, _, true) => Expected::Staged,
        (_, _, _, false) => Expected::Plain,
    }
}

/// What is not needed for the way that bytes take is nothing to warn of.
fn settle(machine: &Machine, finding: &mut Finding, paths: &[PathReport], all_direct: bool) {
    let taken: Vec<Route> = paths.iter().filter_map(|path| path.route).collect();
    let is_of_others = !finding.bars.is_empty() && taken.iter().all(|route| finding.bar(*route).is_none());
    // Without anything for a drive to reach, it does not matter what keeps it from it.
    let is_idle = machine.gpus.is_empty() && machine.pools.is_empty() && finding.id.starts_with("path.");
    let is_idle = is_idle && !finding.bars.is_empty() && finding.id != "path.direct_io";
    // Nor what keeps it from a route that is not to be had here anyway; the driver matters for more than that.
    let is_hopeless =
        |route: Route| paths.iter().all(|path| path.shut.iter().any(|shut| shut.route == route && !shut.can_be_opened));
    let is_vain = !paths.is_empty() && !finding.bars.is_empty() && !finding.id.starts_with("driver.");
    let is_vain = is_vain && finding.bars.iter().all(|(route, bar)| *bar == Bar::Liftable && is_hopeless(*route));
    // To forbid the way through the host where there is no other only breaks programs.
    let is_of_settings = ["cufile.compatibility", "cufile.config"].contains(&finding.id) && finding.bars.is_empty();
    let is_vain = is_vain || is_of_settings && !paths.is_empty() && Route::CUFILE.into_iter().all(is_hopeless);
    if (all_direct && is_of_others || is_idle || is_vain) && finding.verdict == Verdict::Warning {
        finding.verdict = Verdict::NotApplicable;
        finding.remedy = None;
    }
}

/// Forbidding the way through the host where there is no other breaks every program that uses cuFile.
fn strict(machine: &Machine, path: &PathReport) -> Option<Finding> {
    let settings = &machine.config.audit()?.settings;
    let is_strict = settings.allow_compat == Some(false) && settings.force_compat != Some(true);
    let is_shut = path.gpu.is_some() && !matches!(path.expected, Expected::Direct | Expected::None);
    if !is_strict || !is_shut || machine.library.is_none() {
        return None;
    }
    let seen = "allow_compat_mode is false and no direct path is open: programs that use cuFile fail here (5001, 5008)";
    let remedy = match path.next.as_str() {
        "nothing" => "set properties.allow_compat_mode to true".to_owned(),
        next => next.to_owned(),
    };
    Some(Finding::new("cufile.strict", Verdict::Fault, seen, &machine.config.path).about(&path.path).remedy(remedy))
}

fn sentence(machine: &Machine, path: &PathReport) -> String {
    let gpu = path.gpu.as_deref().unwrap_or("host memory");
    let between = format!("Between {} and {gpu}", path.path);
    let next = &path.next;
    match path.expected {
        Expected::Direct => {
            let route = path.route.map_or("", Route::describe);
            format!("{between} bytes are expected to go directly, by {route}; next: {next}.")
        }
        Expected::Staged => format!("{between} bytes take the staged path, through pinned host memory; next: {next}."),
        Expected::Cached => format!("{between} bytes take the cached path, through the page cache; next: {next}."),
        Expected::Plain if machine.gpus.is_empty() => {
            format!("There is no GPU: bytes of {} go to host memory, past the page cache; next: {next}.", path.path)
        }
        Expected::Plain => format!("{between} bytes go past the page cache; next: {next}."),
        Expected::None => format!("{} cannot be used; next: {next}.", path.path),
    }
}
