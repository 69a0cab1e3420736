//! What is missing for a direct path, as steps that a person would take: which packages, which modules, which settings.
//!
//! ```text
//! facts  →  the doctor's report  →  the route to open  →  steps, each a command or a file
//! ```
//! Pure: who carries the steps out is the command's business. A step that is done already is not in the plan, so that the
//! plan of a machine that was set up is empty.

mod distribution;
mod settings;
mod steps;
mod way;

use serde::Serialize;

use super::cufile::edit::apply;
use super::diagnose;
use super::facts::Facts;
use super::machine::Machine;
use super::report::{Finding, PathReport, Report, Route, Verdict};
use crate::base::Result;

pub use distribution::{Distribution, Family};

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Runs a command: its name and its arguments.
    Run(Vec<String>),
    /// Runs a command that carries files over into another, where they come into force. Once files are taken back it is run
    /// again.
    Rebuild(Vec<String>),
    /// Gives a file this content.
    Write {
        /// The file.
        path: String,
        /// All of its new content.
        text: String,
    },
    /// Gives a file the lines that it lacks.
    Append {
        /// The file.
        path: String,
        /// The lines.
        lines: Vec<String>,
    },
    /// Gives keys of a `cufile.json` their values.
    Set {
        /// The file.
        path: String,
        /// The keys.
        keys: Vec<Setting>,
    },
}

/// A key of `cufile.json` that is to have a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The key, with those above it.
    pub key: &'static str,
    /// Its value in JSON.
    pub value: String,
    /// Whether a value that stands there stays.
    pub yields: bool,
}

impl Action {
    /// The file that it changes. What that held before is kept beside it, under its name with `.old` behind, or with `.old.2`
    /// and so on where there is one.
    pub fn file(&self) -> Option<&str> {
        match self {
            Self::Run(_) | Self::Rebuild(_) => None,
            Self::Write { path, .. } | Self::Append { path, .. } | Self::Set { path, .. } => Some(path),
        }
    }

    /// What the file is to hold, of what it holds when the step is carried out: a step before it, such as the installation of a
    /// package, may have written it.
    ///
    /// # Errors
    /// What [`apply`] gives.
    pub fn content(&self, old: Option<&[u8]>) -> Result<Vec<u8>> {
        Ok(match self {
            Self::Run(_) | Self::Rebuild(_) => old.unwrap_or_default().to_vec(),
            Self::Write { text, .. } => text.clone().into_bytes(),
            Self::Append { lines, .. } => appended(old.unwrap_or_default(), lines),
            // What is no UTF-8 is refused, so that nothing of it is lost.
            Self::Set { keys, .. } => {
                let old = old.map(String::from_utf8_lossy);
                let due = settings::due(old.as_deref(), keys);
                apply(old.as_deref(), &due)?.into_bytes()
            }
        })
    }
}

/// The content with the lines that it lacks behind it.
fn appended(old: &[u8], lines: &[String]) -> Vec<u8> {
    let text = String::from_utf8_lossy(old);
    let has = |wanted: &String| text.lines().any(|line| line.split_whitespace().eq(wanted.split_whitespace()));
    let mut content = old.to_vec();
    for line in lines.iter().filter(|line| !has(line)) {
        if content.last().is_some_and(|last| *last != b'\n') {
            content.push(b'\n');
        }
        content.extend_from_slice(line.as_bytes());
        content.push(b'\n');
    }
    content
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Why it is taken.
    pub why: String,
    /// What a person would type to the same end.
    pub command: String,
    /// What it does.
    pub action: Action,
}

/// The plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The distribution; `None` where there is nothing to do on it.
    pub distribution: Option<String>,
    /// What shows that this is a container, if anything does: the steps are for its host then.
    pub container: Option<&'static str>,
    /// The route that the steps open; `None` if none can be opened.
    pub route: Option<Route>,
    /// What a person has to see to before the first step, without which a step fails.
    pub first: Vec<String>,
    /// The steps, in their order.
    pub steps: Vec<Step>,
    /// What a person has to do, or to know.
    pub by_hand: Vec<String>,
    /// Whether the route stays shut until something of that is done.
    pub is_shut_by_hand: bool,
    /// Whether the machine has to be started anew before the steps have their effect.
    pub needs_restart: bool,
    /// What the doctor says of the machine as it is.
    pub conclusion: String,
}

impl Plan {
    /// Draws up the plan for the machine behind `facts`, for the places `paths` on it. `root` is where that machine's files lie
    /// if it is not the one that runs: its commands run below it then, and no module is loaded.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a distribution that is not known, and what is in the way of reading a
    /// file that is to be changed.
    pub fn draw(facts: &dyn Facts, paths: &[String], root: Option<&str>) -> Result<Self> {
        let (machine, report) = diagnose(facts, paths);
        let mut plan = Self {
            distribution: None,
            container: machine.container,
            route: way::choose(facts, &machine, &report),
            first: Vec::new(),
            steps: Vec::new(),
            by_hand: Vec::new(),
            is_shut_by_hand: false,
            needs_restart: false,
            conclusion: report.conclusion.clone(),
        };
        let Some(route) = plan.route else {
            plan.by_hand.extend(instead(facts, &machine, &report));
            return Ok(plan);
        };
        // In a container nothing is installed, whatever it was made from.
        let distribution = match Distribution::examine(facts) {
            Ok(distribution) => Some(distribution),
            Err(_) if plan.container.is_some() => None,
            Err(error) => return Err(error),
        };
        if plan.container.is_some() {
            plan.by_hand.extend(steps::of_container(facts, &machine, route));
        }
        let context = steps::Context { facts, machine: &machine, report: &report, route, root };
        if let Some(distribution) = &distribution {
            steps::of_host(&context, distribution, &mut plan)?;
            plan.distribution = Some(distribution.name.clone());
        }
        left(&report, route, &mut plan);
        Ok(plan)
    }
}

/// What is to be done where set-up can open no route.
fn instead(facts: &dyn Facts, machine: &Machine, report: &Report) -> Vec<String> {
    if machine.may_have_gpu() {
        return vec!["first see what kept the doctor from seeing a GPU: `thruway doctor --all`".to_owned()];
    }
    if machine.gpus.is_empty() {
        return vec!["nothing: there is no NVIDIA GPU".to_owned()];
    }
    let next = |path: &PathReport| {
        let by_module = path.shut.iter().any(|shut| shut.route == Route::NvidiaFs && shut.can_be_opened);
        let what = match path.next.as_str() {
            "nothing" => "nothing, no direct path is to be had there",
            _ if by_module && way::lacks_patched_driver(facts, machine, path) => {
                "first install an NVMe driver that knows nvidia-fs (DOCA or MLNX_OFED with GDS, or Ubuntu's kernel linux-nvidia)"
            }
            next => next,
        };
        format!("{}: {what}", path.path)
    };
    report.paths.iter().map(next).collect()
}

/// What set-up leaves to a person: findings in the way of the route, and risks, that it does not put right.
fn left(report: &Report, route: Route, plan: &mut Plan) {
    let is_bar = |finding: &Finding| way::is_by_hand(finding.id) && finding.bar(route).is_some();
    let is_risk =
        |finding: &Finding| ["pcie.acs", "nvidia_fs.version"].contains(&finding.id) && finding.verdict == Verdict::Warning;
    // What a container must be given has been said.
    let is_said = |finding: &Finding| plan.container.is_some() && finding.id == "container.udev";
    let text = |finding: &Finding| {
        let subject = if finding.subject.is_empty() { String::new() } else { format!("{}: ", finding.subject) };
        let remedy = finding.remedy.as_deref().map(|remedy| format!(": {remedy}")).unwrap_or_default();
        format!("{subject}{}{remedy}", finding.seen)
    };
    let findings = report.findings.iter().filter(|finding| (is_bar(finding) || is_risk(finding)) && !is_said(finding));
    let mut left: Vec<String> = findings.map(text).collect();
    if left.iter().any(|text| text.contains("data=ordered")) {
        left.push(
            "ext4 refuses another data= on a remount: unmount it and mount it anew; for the root filesystem write \
             rootflags=data=ordered on the kernel's command line and restart"
                .to_owned(),
        );
    }
    if report.findings.iter().any(is_bar) {
        left.push("until that is done, programs that use cuFile get an error where bytes cannot go directly".to_owned());
        plan.is_shut_by_hand = true;
    }
    plan.by_hand.extend(left);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_changed_as_it_is_when_its_step_comes() {
        let path = "/etc/x".to_owned();
        let action =
            Action::Append { path: path.clone(), lines: vec!["* soft nofile 1".to_owned(), "* hard nofile 1".to_owned()] };
        let old = b"# caf\xe9\n*  soft\tnofile 1\n@ours - nofile 7";
        let new = action.content(Some(old)).expect("always");
        assert_eq!(new, [old.as_slice(), b"\n* hard nofile 1\n"].concat(), "no line of the user's is lost, whatever its letters");
        assert_eq!(action.content(Some(&new)).expect("always"), new);

        let setting = |key, value: &str, yields| Setting { key, value: value.to_owned(), yields };
        let keys = vec![setting("properties.allow_compat_mode", "false", false), setting("execution.max_io_threads", "4", true)];
        let action = Action::Set { path, keys };
        let brought =
            "{ // by the package\n\"properties\": {\"allow_compat_mode\": true},\n\"execution\": {\"max_io_threads\": 8}}";
        let new = String::from_utf8(action.content(Some(brought.as_bytes())).expect("valid")).expect("text");
        assert_eq!(new, brought.replace("true", "false"), "what forbids is set, what is chosen stays");
        assert!(String::from_utf8(action.content(None).expect("a new one")).expect("text").contains("\"max_io_threads\": 4"));
        action.content(Some(b"{ // caf\xe9\n}")).expect_err("its bytes would be lost");
    }
}
