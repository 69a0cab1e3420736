//! `thruway doctor`: whether there is a direct path, and what is in the way.

use std::path::{Path, PathBuf};

use thruway::base::settings::CUDA_LIBRARY;
use thruway::doctor::facts::{Capture, Facts, Live, Recorder, Tree};
use thruway::doctor::report::{Finding, Health, Report, Verdict};
use thruway::doctor::{captured_paths, examine};
use thruway::{Error, ErrorKind, Result};

use crate::args::DoctorArgs;
use crate::escape::{safe, safe_path};
use crate::output::{Outcome, Output, counted};

/// The longest capture that is read.
const CAPTURE_BYTES_MAX: u64 = 64 << 20;

pub(super) fn run(args: &DoctorArgs, output: &Output) -> Result<Outcome> {
    let report = match &args.from {
        Some(from) => elsewhere(from, &args.paths)?,
        None => here(args, output)?,
    };
    print(&report, args.all, output)?;
    output.object(&report)?;
    Ok(match report.health {
        Health::Direct => Outcome::Fine,
        Health::Slower => Outcome::Slower,
        Health::Broken => Outcome::Fault,
    })
}

/// This machine.
fn here(args: &DoctorArgs, output: &Output) -> Result<Report> {
    let live = Live::new(std::env::var_os(CUDA_LIBRARY).map(PathBuf::from));
    let current = [PathBuf::from(".")];
    let paths = absolute(if args.paths.is_empty() { &current } else { &args.paths })?;
    let Some(file) = &args.capture else { return Ok(examine(&live, &paths)) };
    let recorder = Recorder::new(live);
    let report = examine(&recorder, &paths);
    write_new(file, &recorder.capture().to_text())?;
    output.remark(format!("wrote {}: read it before you send it", safe_path(file)));
    Ok(report)
}

/// Another machine, whose facts lie in a file or a directory.
fn elsewhere(from: &Path, paths: &[PathBuf]) -> Result<Report> {
    let named: Vec<String> = paths.iter().map(|path| path.to_string_lossy().into_owned()).collect();
    let failed = |error| Error::from_io("cannot read the capture", error).with_file(from);
    let metadata = std::fs::metadata(from).map_err(failed)?;
    if metadata.is_dir() {
        let named = if named.is_empty() { vec!["/".to_owned()] } else { named };
        return Ok(examine(&Tree::new(from)? as &dyn Facts, &named));
    }
    if !metadata.is_file() || metadata.len() > CAPTURE_BYTES_MAX {
        return Err(Error::new(ErrorKind::InvalidInput, "this is no capture: it is no regular file, or too long").with_file(from));
    }
    let text = std::fs::read(from).map_err(failed)?;
    let capture = Capture::parse(&String::from_utf8_lossy(&text)).map_err(|error| error.with_file(from))?;
    let named = if named.is_empty() { captured_paths(&capture) } else { named };
    Ok(examine(&capture, &named))
}

/// Paths as they are seen from the root, so that mounts can be told apart. Nothing is looked at.
fn absolute(paths: &[PathBuf]) -> Result<Vec<String>> {
    let one = |path: &PathBuf| {
        let absolute = std::path::absolute(path).map_err(|error| Error::from_io("cannot name", error).with_file(path))?;
        Ok(absolute.to_string_lossy().into_owned())
    };
    paths.iter().map(one).collect()
}

fn write_new(file: &Path, text: &str) -> Result<()> {
    use std::io::Write;
    let failed = |error| Error::from_io("cannot write the capture", error).with_file(file);
    let mut target = std::fs::File::create_new(file).map_err(failed)?;
    target.write_all(text.as_bytes()).map_err(failed)
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
        for shut in &path.shut {
            let how = if shut.can_be_opened { "shut" } else { "not to be had" };
            output.line(format!("  {}: {how} ({})", shut.route.describe(), shut.by.join(", ")))?;
        }
    }
    output.line("")?;
    output.line(safe(&report.conclusion))
}
