//! `thruway setup`: the steps that a machine lacks for a direct path, shown, or carried out.

mod carry_out;

use std::io::{IsTerminal, Write};
use std::path::Path;

use serde_json::json;
use thruway::doctor::examine;
use thruway::doctor::facts::{Facts, Tree};
use thruway::doctor::report::{Health, Report};
use thruway::doctor::setup::{Plan, Step};
use thruway::storage::runs_as_root;
use thruway::{Error, ErrorKind, Result};

use crate::args::SetupArgs;
use crate::escape::{safe, safe_lines};
use crate::facts::{absolute, as_text, captured, live};
use crate::output::{Outcome, Output, counted};
use crate::stop;
use carry_out::{Journal, lock};

pub(super) fn run(args: &SetupArgs, output: &Output) -> Result<Outcome> {
    // That of the system that runs is none other.
    let root = args.root.as_deref().map(directory).transpose()?.filter(|root| root != "/");
    if root.is_some() && std::env::var_os("CUFILE_ENV_PATH_JSON").is_some_and(|name| !name.is_empty()) {
        output.remark("note: CUFILE_ENV_PATH_JSON is left out: it names a file of this system, not of the one below --root");
    }
    let (facts, captured_paths) = facts(args, root.as_deref())?;
    let paths = match (args.paths.is_empty(), &args.from, &root) {
        (true, Some(_), _) => captured_paths,
        (true, None, Some(_)) => {
            output.remark("no PATH was named, so this is about / of that system; name where your data lies");
            vec!["/".to_owned()]
        }
        (true, None, None) => absolute(&[".".into()])?,
        (false, None, None) => absolute(&args.paths)?,
        (false, ..) => args.paths.iter().map(as_text).collect(),
    };
    let plan = Plan::draw(facts.as_ref(), &paths, root.as_deref())?;
    print(&plan, output)?;
    if !args.apply {
        if !plan.steps.is_empty() && plan.container.is_none() {
            output.line("nothing was changed; --apply carries the steps out, each after a question")?;
        }
        output.object(&object(&plan, false, None))?;
        return Ok(if plan.route.is_some() { Outcome::Fine } else { Outcome::Slower });
    }
    if plan.container.is_some() {
        let message = "this is a container: nothing was done";
        return Err(Error::new(ErrorKind::Unsupported, message).with_hint("run it on the host"));
    }
    if !plan.steps.is_empty() {
        may_begin(args, &plan, root.is_some())?;
        // What is asked about is on the screen before the question.
        output.flush()?;
        apply(args, root.as_deref(), &plan, output)?;
    }
    verify(args, root.as_deref(), &plan, &paths, output)
}

/// The directory that stands for the root, as text: commands are told it.
fn directory(root: &Path) -> Result<String> {
    let failed = |error| Error::from_io("cannot use the root directory", error).with_file(root);
    let real = std::fs::canonicalize(root).map_err(failed)?;
    if !real.is_dir() {
        let error = Error::new(ErrorKind::InvalidInput, "the root of a system must be a directory").with_file(root);
        return Err(error.with_hint("name the directory that holds its etc, usr and lib"));
    }
    let text = real.to_str().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the root directory's name is no text"));
    text.map(str::to_owned).map_err(|error| error.with_file(root))
}

fn facts(args: &SetupArgs, root: Option<&str>) -> Result<(Box<dyn Facts>, Vec<String>)> {
    match (&args.from, root) {
        (Some(from), _) => captured(from),
        (None, Some(root)) => Ok((Box::new(Tree::new(Path::new(root))?), Vec::new())),
        (None, None) => Ok((Box::new(live()), Vec::new())),
    }
}

fn print(plan: &Plan, output: &Output) -> Result<()> {
    if let Some(distribution) = &plan.distribution {
        output.line(format!("distribution  {}", safe(distribution)))?;
    }
    output.line(format!("route         {}", plan.route.map_or("none that set-up can open", |route| route.describe())))?;
    output.line("")?;
    if !plan.first.is_empty() {
        output.line("first, by hand:")?;
    }
    for what in &plan.first {
        output.line(format!("  - {}", safe(what)))?;
    }
    let wheres = if plan.container.is_some() { "on the host: " } else { "" };
    for (at, step) in plan.steps.iter().enumerate() {
        output.line(format!("{}. {wheres}{}", at + 1, safe(&step.why)))?;
        output.line(format!("     {}", safe(&step.command)))?;
    }
    if plan.steps.is_empty() && plan.route.is_some() && plan.container.is_none() {
        output.line("no step is missing")?;
    }
    if !plan.by_hand.is_empty() {
        output.line("by hand:")?;
    }
    for what in &plan.by_hand {
        output.line(format!("  - {}", safe(what)))?;
    }
    output.line("")
}

fn object(plan: &Plan, applied: bool, after: Option<&Report>) -> serde_json::Value {
    let after = after.map(|report| json!({"health": report.health, "conclusion": report.conclusion}));
    json!({"plan": plan, "applied": applied, "after": after})
}

/// Refuses, before the first step, what would end in the middle.
fn may_begin(args: &SetupArgs, plan: &Plan, has_root: bool) -> Result<()> {
    if let Some(what) = plan.first.first() {
        let error = Error::new(ErrorKind::Unsupported, format!("the steps cannot be begun: first {what}"));
        return Err(error.with_hint("do what stands under `first, by hand`, then run it again"));
    }
    if !has_root && !runs_as_root() {
        let error = Error::new(ErrorKind::PermissionDenied, "to set a machine up takes the superuser");
        return Err(error.with_hint("run `sudo thruway setup --apply`, or type the commands above yourself"));
    }
    if !args.yes && !std::io::stdin().is_terminal() {
        let error = Error::new(ErrorKind::InvalidInput, "each step is asked for, and there is nobody to ask");
        return Err(error.with_hint("add --yes, if you have read the steps"));
    }
    Ok(())
}

/// All steps, or every file as it was before, whatever signals come.
fn apply(args: &SetupArgs, root: Option<&str>, plan: &Plan, output: &Output) -> Result<()> {
    let root = Path::new(root.unwrap_or("/"));
    let _lock = lock(root)?;
    let mut journal = Journal::new(root);
    let mut files = plan.steps.iter().filter_map(|step| step.action.file());
    files.try_for_each(|file| journal.ensure_inside(Path::new(file)))?;
    let _until_done_or_undone = stop::hold();
    for (at, step) in plan.steps.iter().enumerate() {
        let number = at + 1;
        let done = stop::check().and_then(|()| {
            if !args.yes && !agreed(number, step)? {
                let so_far = if number == 1 { ": nothing was done" } else { "" };
                let message = format!("stopped before step {number}, as you said{so_far}");
                return Err(Error::new(ErrorKind::Cancelled, message));
            }
            output.flush()?;
            output.remark(format!("step {number}: {}", safe(&step.why)));
            journal.carry_out(&step.action)
        });
        if let Err(error) = done {
            return Err(taken_back(error, journal, number, plan.steps.len()));
        }
    }
    if stop::check().is_err() {
        output.remark("note: the signal came with the last step, which is done: nothing was undone");
    }
    Ok(())
}

fn agreed(number: usize, step: &Step) -> Result<bool> {
    let failed = |error| Error::from_io("cannot ask", error);
    let mut stderr = std::io::stderr();
    write!(stderr, "step {number}: {}\n     {}\ndo it? [y/N] ", safe(&step.why), safe(&step.command)).map_err(failed)?;
    stderr.flush().map_err(failed)?;
    let answer = stop::or_stopped(|| {
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer).map(|_| answer)
    });
    let answer = answer?.map_err(failed)?;
    Ok(["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()))
}

/// The error of a step, once every file is as it was before the first.
fn taken_back(error: Error, journal: Journal, number: usize, of: usize) -> Error {
    let has_run = journal.has_run;
    let is_wish = error.kind() == ErrorKind::Cancelled;
    let mut error = error.with("step", format!("{number} of {of}"));
    let back = journal.take_back();
    if back.files > 0 {
        error = error.with("restored", counted(back.files, "file"));
    }
    if let Some((what, failure)) = back.failed.first() {
        let others = if back.failed.len() > 1 { format!(", and {} more", back.failed.len() - 1) } else { String::new() };
        let hint = format!("{failure}: a file is to be put back from its .old, a command to be run again, by hand");
        return error.with("not restored", format!("{what}{others}")).with_hint(hint);
    }
    error.with_hint(match (is_wish, has_run) {
        (true, false) => "run it again when you want the steps, or type them yourself",
        (true, true) => "what packages were installed stays; run it again when you want the rest",
        (false, true) => "what packages were installed stays; see to the cause and run it again",
        (false, false) => "see to the cause and run it again",
    })
}

/// What the doctor says now.
fn verify(args: &SetupArgs, root: Option<&str>, plan: &Plan, paths: &[String], output: &Output) -> Result<Outcome> {
    let (facts, _) = facts(args, root)?;
    let report = examine(facts.as_ref(), paths);
    let done = plan.steps.len();
    output.line(if done == 0 { "nothing to do".to_owned() } else { format!("{} carried out", counted(done, "step")) })?;
    // What is not running has loaded nothing yet, so that what the doctor says is about the time before the restart.
    let has_to_start = plan.route.is_some() && (plan.needs_restart || root.is_some());
    if has_to_start {
        let what = if root.is_some() { "start that system" } else { "restart the machine" };
        let rest = if plan.is_shut_by_hand { "do what stands under `by hand`, then " } else { "" };
        output.line(format!("{rest}{what}, then see `thruway doctor`"))?;
    } else {
        output.line(safe_lines(&report.conclusion))?;
    }
    output.object(&object(plan, done > 0, Some(&report)))?;
    Ok(match report.health {
        _ if plan.route.is_none() => Outcome::Slower,
        _ if has_to_start && plan.is_shut_by_hand => Outcome::Slower,
        _ if has_to_start => Outcome::Fine,
        Health::Direct => Outcome::Fine,
        Health::Slower => Outcome::Slower,
        Health::Broken => Outcome::Fault,
    })
}
