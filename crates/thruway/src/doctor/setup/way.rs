//! Which direct route is to be opened on a machine: the doctor's own judgement, so that both name the same.

use crate::doctor::facts::Facts;
use crate::doctor::machine::Machine;
use crate::doctor::opening;
use crate::doctor::report::{Report, Route};

pub(super) use opening::{is_by_hand, lacks_patched_driver};

/// The route to open, if there is one that can be.
pub(super) fn choose(facts: &dyn Facts, machine: &Machine, report: &Report) -> Option<Route> {
    opening::choose(facts, machine, &report.paths)
}
