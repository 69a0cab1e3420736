//! Limits of this process and of the kernel.

use super::{Context, why};
use crate::base::error::printable;
use crate::doctor::facts::{FactsExt, calls};
use crate::doctor::machine::Target;
use crate::doctor::parse::mounts::Mount;
use crate::doctor::parse::value;
use crate::doctor::report::{Finding, Verdict};

/// A model of 300 shards, and what else a program has open.
const FILES_MIN: u64 = 1024;

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    match context.facts.call(calls::LIMITS) {
        Ok(text) => limits(context, &text, findings),
        Err(unseen) => {
            let seen = format!("the limits of this process are unknown: {}", why(&unseen));
            findings.push(Finding::new("limits.files", Verdict::Unknown, seen, "getrlimit"));
        }
    }
    findings.push(io_uring(context));
    findings.extend(huge_pages(context));
}

/// Whether the ring and large buffers in host memory may lie on huge pages, which are pinned and registered sooner.
fn huge_pages(context: &Context<'_>) -> Option<Finding> {
    const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = context.facts.line(SWITCH).ok()?;
    // `always [madvise] never`: the word in brackets is in force.
    let word = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))?;
    let seen = format!("transparent huge pages: {}", printable(word));
    Some(if word == "never" {
        let remedy = "allow huge pages to those who ask: `echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`";
        Finding::new("limits.huge_pages", Verdict::Warning, seen, SWITCH).remedy(remedy)
    } else {
        Finding::ok("limits.huge_pages", seen, SWITCH)
    })
}

fn limits(context: &Context<'_>, text: &str, findings: &mut Vec<Finding>) {
    let files = value(text, "nofile").unwrap_or("unknown");
    let seen = format!("{files} files may be open");
    findings.push(if files.parse::<u64>().is_ok_and(|files| files < FILES_MIN) {
        let remedy = "raise the limit of open files: `ulimit -n 65536`, or LimitNOFILE of the service";
        Finding::new("limits.files", Verdict::Warning, seen, "getrlimit").remedy(remedy)
    } else {
        Finding::ok("limits.files", seen, "getrlimit")
    });
    // Only RDMA counts against it: CUDA pins by its driver, and Thruway registers no buffers with io_uring.
    let locked = value(text, "memlock").unwrap_or("unknown");
    let is_over_tcp = |target: &Target| target.mount.as_ref().and_then(Mount::is_over_rdma) == Some(false);
    let is_over_network = |target: &Target| target.is_remote() || target.is_on_remote_nvme();
    let has_rdma = context.machine.targets.iter().any(|target| is_over_network(target) && !is_over_tcp(target));
    let count = if locked.parse::<u64>().is_ok() { format!("{locked} bytes") } else { format!("an {locked} number of bytes") };
    if !["unlimited", "unknown"].contains(&locked) && has_rdma {
        let seen = format!("{count} may be locked, and RDMA locks what it moves");
        let remedy = "raise the limit of locked memory: `ulimit -l unlimited`, or LimitMEMLOCK of the service";
        findings.push(Finding::new("limits.memlock", Verdict::Warning, seen, "getrlimit").remedy(remedy));
    } else {
        let verdict = if locked == "unknown" { Verdict::Unknown } else { Verdict::Ok };
        findings.push(Finding::new("limits.memlock", verdict, format!("{count} may be locked"), "getrlimit"));
    }
}

fn io_uring(context: &Context<'_>) -> Finding {
    const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";
    let refused = match context.facts.call(calls::IO_URING) {
        Ok(text) if text.starts_with("available") => {
            return Finding::ok("limits.io_uring", "io_uring is available", "io_uring_setup");
        }
        Ok(text) => printable(text.trim_start_matches("refused").trim()),
        Err(unseen) => {
            let seen = format!("whether io_uring works is unknown: {}", why(&unseen));
            return Finding::new("limits.io_uring", Verdict::Unknown, seen, "io_uring_setup");
        }
    };
    let seen = format!("io_uring is refused ({refused}): threads do its work, with more processor time");
    let switched_off = context.facts.line(SWITCH).is_ok_and(|value| value != "0");
    let (source, remedy) = if switched_off {
        (SWITCH, "allow io_uring: `sudo sysctl kernel.io_uring_disabled=0`")
    } else {
        ("io_uring_setup", "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile")
    };
    Finding::new("limits.io_uring", Verdict::Warning, seen, source).remedy(remedy)
}
