//! The checks, one file a subject. Each is a pure function from facts and the machine to findings.

mod container;
mod cufile;
mod driver;
mod filesystem;
mod gpu;
mod host;
mod limits;
mod network;
mod nvidia_fs;
mod p2pdma;
mod pcie;
mod peers;

pub(super) use cufile::FORCE;

use super::facts::{Facts, Unseen};
use super::machine::Machine;
use super::report::Finding;

/// What a check looks at.
pub(super) struct Context<'a> {
    pub(super) facts: &'a dyn Facts,
    pub(super) machine: &'a Machine,
}

/// All findings, in the order in which things depend on each other: what comes first must be put right first.
pub(super) fn all(facts: &dyn Facts, machine: &Machine) -> Vec<Finding> {
    let context = Context { facts, machine };
    let mut findings = Vec::new();
    host::check(&context, &mut findings);
    container::check(&context, &mut findings);
    driver::check(&context, &mut findings);
    gpu::check(&context, &mut findings);
    // Without a GPU there is nothing for the others to be right or wrong for.
    if !machine.gpus.is_empty() {
        nvidia_fs::check(&context, &mut findings);
        p2pdma::check(&context, &mut findings);
        cufile::library(&context, &mut findings);
        pcie::check(&context, &mut findings);
    }
    p2pdma::pools(&context, &mut findings);
    cufile::config(&context, &mut findings);
    filesystem::check(&context, &mut findings);
    network::check(&context, &mut findings);
    limits::check(&context, &mut findings);
    findings
}

/// How to find out what was not seen.
pub(super) fn find_out(unseen: &Unseen, what: &str, command: &str) -> String {
    match unseen {
        Unseen::Denied => format!("ask as root: `sudo thruway doctor`; or find out {what}: `sudo {command}`"),
        _ => format!("find out {what}: `{command}`"),
    }
}

/// Why something was not seen, in words.
pub(super) fn why(unseen: &Unseen) -> String {
    match unseen {
        Unseen::Absent => "it is not there".to_owned(),
        Unseen::Denied => "this user may not see it".to_owned(),
        Unseen::Silent(time) => format!("no answer within {} ms", time.as_millis()),
        Unseen::Failed(why) => why.clone(),
    }
}
