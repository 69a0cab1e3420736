//! The conclusion: for each place, which routes the findings leave open.

use super::facts::{Facts, Unseen};
use super::machine::{Direct, Gpu, Machine, PciDevice, Target};
use super::opening;
use super::parse::pci::Distance;
use super::quote::quoted;
use super::report::{Bar, Expected, Finding, Health, PathReport, Report, Route, Shut, Verdict};

/// Draws the conclusions from the findings.
pub(super) fn conclude(facts: &dyn Facts, machine: &Machine, mut findings: Vec<Finding>) -> Report {
    forget_hidden(machine, &mut findings);
    let draft: Vec<PathReport> = machine.targets.iter().map(|target| path(machine, target, &findings, None)).collect();
    // The route that set-up would open is the one to name; it is judged by what is in the way for all places.
    let opening = opening::choose(facts, machine, &draft);
    let mut paths: Vec<PathReport> = machine.targets.iter().map(|target| path(machine, target, &findings, opening)).collect();
    if let Some(route) = opening {
        for path in paths.iter_mut().filter(|path| opening::can_set_up(facts, machine, path, route)) {
            path.next = with_set_up(machine, path, route, &findings);
        }
    }
    let all_direct = !paths.is_empty() && paths.iter().all(|path| path.expected == Expected::Direct);
    for finding in &mut findings {
        settle(machine, finding, &paths, all_direct);
    }
    for path in &mut paths {
        let faults = || findings.iter().filter(|finding| finding.verdict == Verdict::Fault && finding.id != STRICT);
        // What is broken about a place comes before what is broken about the machine; what is about another place is not its.
        let own = faults().find(|fault| fault.subject == path.path);
        if let Some(fault) = own.or_else(|| faults().find(|fault| concerns(machine, fault, &path.path))) {
            path.next = fault.remedy.clone().unwrap_or_else(|| fault.seen.clone());
        }
        if let Some(strict) = strict(machine, path, &findings) {
            path.next.clone_from(strict.remedy.as_ref().unwrap_or(&strict.seen));
            findings.push(strict);
        }
        path.conclusion = sentence(machine, path);
    }
    let health = match (findings.iter().any(|finding| finding.verdict == Verdict::Fault), all_direct) {
        (true, _) => Health::Broken,
        (_, true) => Health::Direct,
        _ => Health::Slower,
    };
    let conclusion = match paths.as_slice() {
        [] => "No PATH was named, so none was judged; next: `thruway doctor PATH`.".to_owned(),
        paths => paths.iter().map(|path| path.conclusion.as_str()).collect::<Vec<&str>>().join("\n"),
    };
    Report { health, conclusion, paths, findings }
}

/// The bus shows all GPUs of a machine, also to those who may use only some: to containers, jobs, and under
/// `CUDA_VISIBLE_DEVICES`. The others are in nobody's way.
fn forget_hidden(machine: &Machine, findings: &mut [Finding]) {
    let hidden: Vec<String> = machine
        .gpus
        .iter()
        .filter(|gpu| machine.usable_gpus().all(|usable| usable.address != gpu.address))
        .map(Gpu::label)
        .collect();
    for finding in findings.iter_mut().filter(|finding| hidden.contains(&finding.subject)) {
        finding.bars.clear();
        finding.remedy = None;
        finding.seen.push_str("; CUDA does not show this GPU to programs here");
        if finding.verdict != Verdict::Ok {
            finding.verdict = Verdict::NotApplicable;
        }
    }
}

/// Whether a finding is about a place, or about no other.
fn concerns(machine: &Machine, finding: &Finding, path: &str) -> bool {
    finding.subject == path || !machine.is_place(&finding.subject)
}

/// What to do where set-up opens the route: it, and before it what it leaves to a person.
fn with_set_up(machine: &Machine, path: &PathReport, route: Route, findings: &[Finding]) -> String {
    let set_up = format!("`thruway setup {}`", quoted(&path.path));
    let is_left = |finding: &&Finding| {
        opening::is_by_hand(finding.id) && finding.bar(route).is_some() && concerns(machine, finding, &path.path)
    };
    match findings.iter().find(is_left).and_then(|finding| finding.remedy.as_ref()) {
        Some(remedy) => format!("{remedy}; then {set_up}"),
        None => set_up,
    }
}

/// The GPU that lies nearest to a place's drives, and how far it is from the farthest of them.
pub(super) fn nearest<'a>(machine: &'a Machine, target: &Target) -> Option<(&'a Gpu, Distance)> {
    let far = |gpu: &'a Gpu| {
        let device = gpu.device.as_ref()?;
        let farthest = target.devices().filter_map(|drive| device.distance(drive)).max()?;
        Some((gpu, farthest))
    };
    // The first of several at one distance.
    machine.usable_gpus().filter_map(far).min_by_key(|(_, distance)| *distance)
}

/// The nearest device that offers memory to the drives of a place, and is none of them, and how far it is from the farthest.
pub(super) fn pool<'a>(machine: &'a Machine, target: &Target) -> Option<(&'a PciDevice, Option<Distance>)> {
    let is_other = |pool: &&PciDevice| target.devices().all(|drive| drive.address != pool.address);
    target.devices().next()?;
    let far = |pool: &'a PciDevice| (pool, target.devices().filter_map(|drive| pool.distance(drive)).max());
    machine.pools.iter().filter(is_other).map(far).min_by_key(|(_, distance)| (distance.is_none(), *distance))
}

/// What is to be expected of a place, and what to do first; `opening` is the route to open, if one has been chosen.
fn path(machine: &Machine, target: &Target, findings: &[Finding], opening: Option<Route>) -> PathReport {
    let gpu = nearest(machine, target).map(|(gpu, _)| gpu).or_else(|| machine.usable_gpus().next());
    let label = gpu.map(Gpu::label);
    let relevant: Vec<&Finding> = findings.iter().filter(|finding| concerns(machine, finding, &target.path)).collect();
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
        let can_be_opened = bars.iter().all(|(_, bar)| *bar == Bar::Liftable);
        // Where a route is not to be had, what could be opened does not matter.
        let counting = bars.iter().filter(|(_, bar)| can_be_opened != (*bar == Bar::Final));
        let mut by: Vec<&'static str> = Vec::new();
        for (finding, _) in counting {
            if !by.contains(&finding.id) {
                by.push(finding.id);
            }
        }
        let may_be_open = can_be_opened && is_unseen(&bars);
        (!by.is_empty()).then_some(Shut { route, can_be_opened, may_be_open, by })
    };
    // Of the routes that can be opened, that which may be open; else the chosen one; else that with the least to do, and of
    // two that which was begun. What is in its way, in the order of the checks.
    let easiest = Route::ALL.into_iter().filter(|route| *route != Route::KernelP2pdma || gpu.is_none());
    let easiest = easiest.map(|route| (route, bars(route))).min_by_key(|(route, bars)| {
        let begins_with = if *route == Route::NvidiaFs { "nvidia_fs.module" } else { "cufile.p2pdma" };
        let is_begun = bars.iter().all(|(finding, _)| finding.id != begins_with);
        let is_final = bars.iter().any(|(_, bar)| *bar == Bar::Final);
        (is_final, !is_unseen(bars), opening.is_some_and(|chosen| chosen != *route), bars.len(), !is_begun)
    });
    let in_the_way = easiest.map_or_else(Vec::new, |(_, bars)| bars);
    let expected = expected(target, gpu.is_some(), usable, open);
    let next = match expected {
        Expected::Direct => proof(target),
        Expected::Plain if !machine.may_have_gpu() => "nothing: without a GPU this is the shortest path".to_owned(),
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

/// How a direct path is proven.
fn proof(target: &Target) -> String {
    if target.place.as_ref().is_ok_and(|place| place.may_write) {
        format!("prove it: `thruway verify-direct {}`", quoted(&target.path))
    } else {
        "prove it where one may write on the same drive: `thruway verify-direct PATH`".to_owned()
    }
}

/// Whether all that shuts a route is that facts could not be seen.
fn is_unseen(bars: &[(&Finding, Bar)]) -> bool {
    bars.iter().all(|(finding, _)| finding.verdict == Verdict::Unknown)
}

/// What to do first of all that is in the way of a route.
fn first_remedy(mut in_the_way: Vec<(&Finding, Bar)>) -> String {
    // What is broken comes first; then what is final: where it stays, the rest is for nothing. What is known to be in the way
    // comes before what may be.
    in_the_way.sort_by_key(|(finding, bar)| {
        let is_unknown = finding.verdict == Verdict::Unknown;
        (finding.verdict != Verdict::Fault, *bar == Bar::Liftable, is_unknown)
    });
    in_the_way.iter().find_map(|(finding, _)| finding.remedy.clone()).unwrap_or_else(|| "nothing".to_owned())
}

fn expected(target: &Target, has_gpu: bool, usable: bool, open: Option<Route>) -> Expected {
    let direct = target.place.as_ref().map_or(Direct::Unknown, |place| place.direct);
    match (usable, open, direct, has_gpu) {
        (false, ..) => Expected::None,
        (_, Some(_), ..) => Expected::Direct,
        (_, _, Direct::Refused, _) => Expected::Cached,
        // What lies in the page cache alone has no way past it, though it takes O_DIRECT.
        _ if target.mount.as_ref().is_some_and(|mount| ["tmpfs", "ramfs", "devtmpfs"].contains(&mount.kind.as_str())) => {
            Expected::Cached
        }
        (_, _, _, true) => Expected::Staged,
        (_, _, _, false) => Expected::Plain,
    }
}

/// What is not needed for the way that bytes take is nothing to warn of, or to find out.
fn settle(machine: &Machine, finding: &mut Finding, paths: &[PathReport], all_direct: bool) {
    let taken: Vec<Route> = paths.iter().filter_map(|path| path.route).collect();
    let is_of_others = !finding.bars.is_empty() && taken.iter().all(|route| finding.bar(*route).is_none());
    // Without anything for a drive to reach, it does not matter what keeps it from it.
    let is_idle = machine.gpus.is_empty() && machine.pools.is_empty() && finding.id.starts_with("path.");
    let is_idle = is_idle && !finding.bars.is_empty() && !["path.access", "path.direct_io"].contains(&finding.id);
    // Nor what keeps it from a route that is not to be had here anyway; the driver matters for more than that, and a GPU's
    // memory is never in the kernel's own pool.
    let is_hopeless =
        |route: Route| paths.iter().all(|path| path.shut.iter().any(|shut| shut.route == route && !shut.can_be_opened));
    let is_of_gpus = |route: Route| route == Route::KernelP2pdma && !machine.gpus.is_empty();
    let is_vain =
        !paths.is_empty() && !finding.bars.is_empty() && !finding.id.starts_with("driver.") && finding.id != "path.access";
    let mut bars = finding.bars.iter();
    let is_vain = is_vain && bars.all(|(route, bar)| is_of_gpus(*route) || *bar == Bar::Liftable && is_hopeless(*route));
    // To forbid the way through the host where there is no other only breaks programs.
    let is_of_settings = ["cufile.compatibility", "cufile.config"].contains(&finding.id) && finding.bars.is_empty();
    let is_vain = is_vain || is_of_settings && !paths.is_empty() && Route::CUFILE.into_iter().all(is_hopeless);
    let is_needless = all_direct && is_of_others || is_idle || is_vain;
    // Settings that cannot be read stay so, whatever they would be for.
    let is_unread = finding.id == "cufile.config" && finding.verdict == Verdict::Unknown;
    if is_needless && !is_unread && matches!(finding.verdict, Verdict::Warning | Verdict::Unknown) {
        finding.verdict = Verdict::NotApplicable;
        finding.remedy = None;
    }
}

const STRICT: &str = "cufile.strict";

/// Forbidding the way through the host where there is no other breaks every program that uses cuFile.
fn strict(machine: &Machine, path: &PathReport, findings: &[Finding]) -> Option<Finding> {
    let settings = &machine.config.audit()?.settings;
    // Where every byte is told to go through the host, nothing fails.
    let is_forced = findings.iter().any(|finding| finding.subject == super::checks::FORCE);
    let is_strict = settings.allow_compat == Some(false) && settings.force_compat != Some(true) && !is_forced;
    let is_shut = path.gpu.is_some() && !matches!(path.expected, Expected::Direct | Expected::None) && !path.may_be_direct();
    // Where CUDA shows no GPU, no program uses cuFile.
    let shows_none = machine.cuda.as_ref().is_ok_and(|survey| survey.gpus.is_empty());
    if !is_strict || !is_shut || shows_none || machine.library.is_err() {
        return None;
    }
    let seen = "allow_compat_mode is false and no direct path is open: programs that use cuFile fail here (5001, 5008)";
    let remedy = match path.next.as_str() {
        "nothing" => "set properties.allow_compat_mode to true",
        next => next,
    };
    Some(Finding::new(STRICT, Verdict::Fault, seen, &machine.config.path).about(&path.path).remedy(remedy))
}

fn sentence(machine: &Machine, path: &PathReport) -> String {
    let gpu = path.gpu.as_deref().unwrap_or("host memory");
    let between = format!("Between {} and {gpu}", path.path);
    let next = &path.next;
    let otherwise = match path.expected {
        Expected::Direct => {
            let route = path.route.map_or("", Route::describe);
            return format!("{between} bytes are expected to go directly, by {route}; next: {next}.");
        }
        Expected::None => return format!("{} cannot be used; next: {next}.", path.path),
        Expected::Plain if machine.gpus.is_empty() => {
            let gpu = if machine.may_have_gpu() { "No GPU could be seen" } else { "There is no GPU" };
            return format!("{gpu}: bytes of {} go to host memory, past the page cache; next: {next}.", path.path);
        }
        Expected::Staged => "bytes take the staged path, through pinned host memory",
        Expected::Cached => "bytes take the cached path, through the page cache",
        Expected::Plain => "bytes go past the page cache",
    };
    match path.shut.iter().find(|shut| shut.may_be_open) {
        Some(shut) => {
            let unseen = shut.by.join(", ");
            format!("{between} a direct path may be open (unknown: {unseen}), and if none is, {otherwise}; next: {next}.")
        }
        None => format!("{between} {otherwise}; next: {next}."),
    }
}
