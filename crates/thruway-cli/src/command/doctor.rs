//! `thruway doctor`: whether there is a direct path, and what is in the way.

use std::path::{Path, PathBuf};

use thruway::Result;
use thruway::doctor::examine;
use thruway::doctor::facts::{Capture, Recorder};
use thruway::doctor::report::{Finding, Health, Report, Verdict};
use thruway::doctor::setup::Plan;
use thruway::doctor::topology::Topology;

use crate::args::DoctorArgs;
use crate::escape::{safe, safe_lines, safe_path};
use crate::facts::{absolute, captured, chosen, live, write_new};
use crate::output::{Outcome, Output, counted};
use crate::stop;

pub(super) fn run(args: &DoctorArgs, output: &Output) -> Result<Outcome> {
    let (report, capture) = stop::at_once(|| match &args.from {
        Some(from) => elsewhere(from, &args.paths).map(|report| (report, None)),
        None => here(args),
    })?;
    if let Some((file, capture)) = args.capture.as_ref().zip(capture) {
        write_new(file, &capture.to_text())?;
        output.remark(format!("wrote {}: read it before you send it", safe_path(file)));
    }
    print(&report, args.all, output)?;
    output.object(&report)?;
    Ok(match report.health {
        Health::Direct => Outcome::Fine,
        Health::Slower => Outcome::Slower,
        Health::Broken => Outcome::Fault,
    })
}

/// This machine, and what was asked of it, if that is to be kept.
fn here(args: &DoctorArgs) -> Result<(Report, Option<Capture>)> {
    let live = live();
    let current = [PathBuf::from(".")];
    let paths = absolute(if args.paths.is_empty() { &current } else { &args.paths })?;
    if args.capture.is_none() {
        return Ok((examine(&live, &paths), None));
    }
    let recorder = Recorder::new(live);
    let report = examine(&recorder, &paths);
    // A capture serves `topo` and `setup` as well.
    drop(Topology::examine(&recorder, &[]));
    drop(Plan::draw(&recorder, &paths, None));
    let mut capture = recorder.capture();
    capture.keep_places(&paths);
    Ok((report, Some(capture)))
}

/// Another machine, whose facts lie in a file or a directory.
fn elsewhere(from: &Path, paths: &[PathBuf]) -> Result<Report> {
    let (facts, captured) = captured(from)?;
    Ok(examine(facts.as_ref(), &chosen(from, paths, captured)?))
}

fn print(report: &Report, all: bool, output: &Output) -> Result<()> {
    let is_shown = |finding: &&Finding| all || !matches!(finding.verdict, Verdict::Ok | Verdict::NotApplicable);
    let shown: Vec<&Finding> = report.findings.iter().filter(is_shown).collect();
    let width = shown.iter().map(|finding| finding.id.len()).max().unwrap_or(0);
    for finding in &shown {
        let subject = if finding.subject.is_empty() { String::new() } else { format!("{}: ", safe(&finding.subject)) };
        output.line(format!("{:<14}  {:<width$}  {subject}{}", finding.verdict.name(), finding.id, safe(&finding.seen)))?;
        let indent = " ".repeat(18 + width);
        output.line(format!("{indent}seen in {}", safe(&finding.source)))?;
        if let Some(remedy) = &finding.remedy {
            output.line(format!("{indent}remedy: {}", safe(remedy)))?;
        }
    }
    let hidden = report.findings.len() - shown.len();
    if hidden > 0 {
        output.line(format!("{} well or not applicable; --all shows them", counted(hidden, "check")))?;
    }
    output.line("")?;
    for path in &report.paths {
        output.line(format!("{}  {}: {}", safe(&path.path), safe(&path.storage), path.expected.name()))?;
        if let Some(route) = path.route {
            output.line(format!("  {}: open, for no check shuts it", route.describe()))?;
        }
        for shut in &path.shut {
            let how = match (shut.may_be_open, shut.can_be_opened) {
                (true, _) => "unknown",
                (_, true) => "shut",
                _ => "not to be had",
            };
            output.line(format!("  {}: {how} ({})", shut.route.describe(), shut.by.join(", ")))?;
        }
    }
    output.line("")?;
    output.line(safe_lines(&report.conclusion))
}
