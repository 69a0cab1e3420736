//! What a container must be given.

use super::{Context, find_out, why};
use crate::doctor::facts::{FactsExt, Unseen};
use crate::doctor::report::{Finding, Route, Verdict};

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let machine = context.machine;
    if let Some(sign) = machine.container {
        findings.push(Finding::ok("container.kind", "this is a container: modules and drivers belong on its host", sign));
    }
    // libcufile asks udev what a drive is, and fails without it: with 5030 in reports, with 5027 where 1.15 was tried.
    if machine.gpus.is_empty() {
        return;
    }
    let udev = context.facts.link("/run/udev");
    findings.push(if udev.is_ok() {
        Finding::ok("container.udev", "udev's database is there", "/run/udev")
    } else if let Err(unseen) = udev.as_ref()
        && *unseen != Unseen::Absent
    {
        let seen = format!("udev's database cannot be seen: {}", why(unseen));
        Finding::new("container.udev", Verdict::Unknown, seen, "/run/udev")
            .remedy(find_out(unseen, "whether udev runs", "ls /run/udev/data"))
            .shuts(&Route::CUFILE)
    } else {
        let remedy = if machine.container.is_some() {
            "start the container with `--volume /run/udev:/run/udev:ro`"
        } else {
            "run udev (systemd-udevd)"
        };
        let seen = "udev's database is not there: cuFile cannot register a file (code 5030 or 5027)";
        Finding::new("container.udev", Verdict::Warning, seen, "/run/udev").remedy(remedy).shuts(&Route::CUFILE)
    });
}
