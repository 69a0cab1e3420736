//! Whether this machine has a direct path between its storage and its GPUs, and what is in the way.
//!
//! ```text
//! facts (the machine, or a capture)  →  parse  →  machine (values)  →  checks (findings)  →  route (the conclusion)
//! ```
//! Everything past the facts is pure. The doctor says what is *expected*: only bytes that were moved prove a path.

mod checks;
pub mod cufile;
pub mod facts;
pub mod machine;
mod opening;
pub mod parse;
mod quote;
pub mod report;
mod route;
pub mod setup;
pub mod topology;

use facts::{Facts, Kind};

pub use report::Report;

/// Examines the machine behind `facts`, and the places `paths` on it. Changes nothing, and takes bounded time.
pub fn examine(facts: &dyn Facts, paths: &[String]) -> Report {
    diagnose(facts, paths).1
}

/// The machine and what was found on it.
fn diagnose(facts: &dyn Facts, paths: &[String]) -> (machine::Machine, Report) {
    let machine = machine::Machine::examine(facts, paths);
    let findings = checks::all(facts, &machine);
    let report = route::conclude(facts, &machine, findings);
    (machine, report)
}

/// The places that a capture was made for, as many as anybody names.
pub fn captured_paths(capture: &facts::Capture) -> Vec<String> {
    const PLACES_MAX: usize = 256;
    let places = capture.questions().filter(|question| question.kind == Kind::Place);
    places.take(PLACES_MAX).map(|question| question.key.clone()).collect()
}
