//! The steps for each part of a machine.

use super::distribution::{Distribution, is_nvidia_kernel};
use super::settings;
use super::{Action, Plan, Step};
use crate::base::{Error, ErrorKind, Result};
use crate::doctor::cufile::edit::apply;
use crate::doctor::facts::{Facts, FactsExt, Unseen};
use crate::doctor::machine::{Machine, is_loaded, nvidia_fs_is_installed};
use crate::doctor::parse::nvidia::registry_words;
use crate::doctor::report::{Report, Route, Verdict};

const MODULES_LOAD: &str = "/etc/modules-load.d/nvidia-fs.conf";
const REGISTRY: &str = "/etc/modprobe.d/nvidia-p2pdma.conf";
const MULTIPATH: &str = "/etc/modprobe.d/nvme-no-multipath.conf";
const LIMITS: &str = "/etc/security/limits.d/90-thruway.conf";
/// What NVIDIA's driver needs to offer all of a GPU's memory to its peers.
const REGISTRY_WORDS: [&str; 2] = ["RMForceStaticBar1=1", "RmForceDisableIomapWC=1"];

/// What the steps go by.
pub(super) struct Context<'a> {
    pub(super) facts: &'a dyn Facts,
    pub(super) machine: &'a Machine,
    pub(super) report: &'a Report,
    pub(super) route: Route,
    pub(super) root: Option<&'a str>,
}

impl Context<'_> {
    /// Whether a check found something to put right.
    fn has(&self, id: &str) -> bool {
        let is_it = |finding: &&crate::doctor::report::Finding| {
            finding.id == id && (finding.bar(self.route).is_some() || finding.verdict == Verdict::Warning)
        };
        self.report.findings.iter().any(|finding| is_it(&finding))
    }

    /// What a person who is not the superuser types before a command.
    fn sudo(&self) -> &'static str {
        if self.machine.is_root == Some(true) { "" } else { "sudo " }
    }

    /// Where a file of the machine lies.
    fn place(&self, path: &str) -> String {
        format!("{}{path}", self.root.unwrap_or_default().trim_end_matches('/'))
    }

    /// A step that runs a command.
    fn run(&self, words: Vec<String>, why: String) -> Step {
        let below = self.root.map(|root| vec!["chroot".to_owned(), root.to_owned()]).unwrap_or_default();
        let words: Vec<String> = below.into_iter().chain(words).collect();
        let typed = words.iter().map(|word| quoted(word)).collect::<Vec<String>>().join(" ");
        Step { why, command: format!("{}{typed}", self.sudo()), action: Action::Run(words) }
    }

    /// A step that gives a file its content; none if it has it.
    fn file(&self, path: &str, text: &str, why: &str) -> Result<Option<Step>> {
        let old = match self.facts.file(path) {
            Ok(old) => Some(old),
            Err(Unseen::Absent) => None,
            Err(unseen) => return Err(unreadable(path, &unseen)),
        };
        if old.as_deref() == Some(text) {
            return Ok(None);
        }
        let (sudo, place) = (self.sudo(), self.place(path));
        let typed = quoted(&place);
        let keep = old.map(|_| format!("{sudo}cp -p {typed} {typed}.old && ")).unwrap_or_default();
        let lines = text.lines().map(quoted).collect::<Vec<String>>().join(" ");
        let command = format!("{keep}printf '%s\\n' {lines} | {sudo}tee {typed}");
        Ok(Some(Step { why: why.to_owned(), command, action: Action::Write { path: place, text: text.to_owned() } }))
    }
}

/// The steps on a machine, or on a container's host.
pub(super) fn of_host(context: &Context<'_>, distribution: &Distribution, plan: &mut Plan) -> Result<()> {
    packages(context, distribution, plan);
    match context.route {
        Route::NvidiaFs => module(context, plan)?,
        _ => peers(context, distribution, plan)?,
    }
    limits(context, plan)?;
    // Last, so that whatever fails before it leaves the settings alone.
    cufile(context, plan)
}

/// What a container must be given.
pub(super) fn of_container(facts: &dyn Facts, machine: &Machine, route: Route) -> Vec<String> {
    let mut given = vec![
        "this is a container: the steps belong on its host, whose packages may have other names, and nothing is done here"
            .to_owned(),
    ];
    if !facts.exists("/run/udev") {
        given.push("start the container with `--volume /run/udev:/run/udev:ro`".to_owned());
    }
    if route == Route::NvidiaFs && !facts.exists("/dev/nvidia-fs0") {
        given.push("start the container with `--device /dev/nvidia-fs0` and so on to 15".to_owned());
    }
    if machine.config.audit.as_ref().is_err_and(|unseen| *unseen == Unseen::Absent) {
        given.push(format!("give the container the host's settings: `--volume {0}:{0}:ro`", machine.config.path));
    }
    given
}

fn packages(context: &Context<'_>, distribution: &Distribution, plan: &mut Plan) {
    let (facts, machine) = (context.facts, context.machine);
    let mut packages = Vec::new();
    if context.has("cufile.library") {
        let cuda = machine.cuda.as_ref().ok().and_then(|survey| survey.version);
        packages.push(Distribution::library(cuda));
    }
    let lacks_module =
        context.route == Route::NvidiaFs && !is_loaded(facts, "nvidia_fs") && !nvidia_fs_is_installed(facts, &machine.release);
    if lacks_module {
        let has_headers = facts.exists(&format!("/lib/modules/{}/build", machine.release));
        packages.extend(distribution.module(&machine.release, has_headers));
        let is_signed = is_nvidia_kernel(&machine.release) && distribution.family == super::Family::Ubuntu;
        if context.report.findings.iter().any(|finding| finding.id == "host.secure_boot") && !is_signed {
            plan.by_hand.push(
                "Secure Boot is on: enrol the key that DKMS signs with (`mokutil --import /var/lib/dkms/mok.pub`, then restart), \
                 or the kernel refuses nvidia-fs"
                    .to_owned(),
            );
        }
    }
    if packages.is_empty() {
        return;
    }
    let sources = distribution.sources();
    let is_nvidias = |name: &String| name.contains("cuda") || name.contains("nvidia");
    let lacks_sources = match facts.list(sources) {
        Ok(names) => !names.iter().any(is_nvidias),
        Err(unseen) => unseen == Unseen::Absent,
    };
    if lacks_sources {
        plan.by_hand.push(format!(
            "first add NVIDIA's package repository: none is named in {sources} \
             (https://docs.nvidia.com/cuda/cuda-installation-guide-linux; from CUDA 13.4 on nvidia-fs has one of its own, \
             https://developer.nvidia.com/nvidia-fs-downloads)"
        ));
    }
    for words in distribution.install(&packages) {
        let why = if words.last().is_some_and(|word| word == "update") {
            "learn which packages there are".to_owned()
        } else {
            format!("install {}", packages.join(", "))
        };
        plan.steps.push(context.run(words, why));
    }
}

/// nvidia-fs is loaded, now and at every start.
fn module(context: &Context<'_>, plan: &mut Plan) -> Result<()> {
    if !is_loaded(context.facts, "nvidia_fs") && context.root.is_none() {
        let words = ["modprobe", "nvidia-fs"].map(str::to_owned).to_vec();
        plan.steps.push(context.run(words, "load nvidia-fs".to_owned()));
    }
    plan.steps.extend(context.file(MODULES_LOAD, "nvidia-fs\n", "load nvidia-fs at every start")?);
    Ok(())
}

/// The settings of the drivers that PCI P2PDMA needs on x86.
fn peers(context: &Context<'_>, distribution: &Distribution, plan: &mut Plan) -> Result<()> {
    if !context.machine.is_x86() {
        return Ok(());
    }
    let before = plan.steps.len();
    if context.has("p2pdma.parameters") || context.has("p2pdma.memory") {
        // What the driver was loaded with for other reasons stays.
        let names = REGISTRY_WORDS.map(|word| word.split('=').next().unwrap_or(word));
        let loaded = registry_words(&context.facts.file("/proc/driver/nvidia/params").unwrap_or_default());
        let others = loaded.into_iter().filter(|word| names.iter().all(|name| word.split('=').next() != Some(name)));
        let words: String = REGISTRY_WORDS.iter().map(|word| (*word).to_owned()).chain(others).map(|word| word + ";").collect();
        let text = format!("options nvidia NVreg_RegistryDwords=\"{words}\"\n");
        plan.steps.extend(context.file(REGISTRY, &text, "have NVIDIA's driver offer the GPU's memory to its peers")?);
        plan.by_hand.extend(rivals(context.facts));
        plan.needs_restart = true;
    }
    if context.has("p2pdma.multipath") {
        const BUILT_IN: &str = "kernel/drivers/nvme/host/nvme-core.ko";
        let table = format!("/lib/modules/{}/modules.builtin", context.machine.release);
        if context.facts.lines(&table, BUILT_IN).is_ok_and(|lines| !lines.is_empty()) {
            let what = "start the kernel with nvme_core.multipath=N: its NVMe driver is no module, so no file sets it";
            plan.by_hand.push(what.to_owned());
        } else {
            let text = "options nvme_core multipath=N\n";
            plan.steps.extend(context.file(MULTIPATH, text, "have the NVMe driver join no ways to a drive")?);
        }
        plan.needs_restart = true;
    }
    if plan.steps.len() > before {
        let why = "put these settings into the initial RAM disk, from which the drivers are loaded";
        plan.steps.push(context.run(distribution.rebuild_ram_disk(), why.to_owned()));
    }
    if plan.needs_restart {
        plan.by_hand.push("restart the machine: drivers read these settings when they are loaded".to_owned());
    }
    Ok(())
}

/// Other files that give the driver the same setting: of two the kernel takes the last.
fn rivals(facts: &dyn Facts) -> Vec<String> {
    const DIRECTORY: &str = "/etc/modprobe.d";
    const FILES_MAX: usize = 256;
    let paths = facts.names(DIRECTORY).into_iter().take(FILES_MAX).map(|name| format!("{DIRECTORY}/{name}"));
    let sets = |path: &String| {
        let is_ours = path == REGISTRY || !path.ends_with(".conf");
        !is_ours && facts.lines(path, "options nvidia ").is_ok_and(|lines| lines.contains("NVreg_RegistryDwords"))
    };
    let rivals = paths.filter(sets);
    rivals
        .map(|path| format!("take NVreg_RegistryDwords out of {path}: it is set in {REGISTRY} now, and one file must"))
        .collect()
}

fn limits(context: &Context<'_>, plan: &mut Plan) -> Result<()> {
    let mut text = String::new();
    for (id, item, value) in [("limits.memlock", "memlock", "unlimited"), ("limits.files", "nofile", "1048576")] {
        if context.has(id) {
            text.push_str(&format!("* soft {item} {value}\n* hard {item} {value}\n"));
        }
    }
    if !text.is_empty() {
        plan.steps.extend(context.file(LIMITS, &text, "raise the limits of processes")?);
        plan.by_hand.push("sign in anew: limits are set at sign-in; services have LimitMEMLOCK and LimitNOFILE".to_owned());
    }
    Ok(())
}

fn cufile(context: &Context<'_>, plan: &mut Plan) -> Result<()> {
    let config = &context.machine.config;
    let old = match context.facts.file(&config.path) {
        Ok(text) => Some(text),
        Err(Unseen::Absent) => None,
        Err(unseen) => return Err(unreadable(&config.path, &unseen)),
    };
    let wanted = settings::wanted(context.machine, context.route, old.as_deref());
    let text = match apply(old.as_deref(), &wanted) {
        Ok(text) => text,
        Err(error) => {
            let line = error.context("line").map(|line| format!(", line {line}")).unwrap_or_default();
            let what = format!("correct {}, which is left as it is: {}{line}", config.path, error.message());
            plan.by_hand.push(what);
            return Ok(());
        }
    };
    if old.as_deref() == Some(&text) {
        return Ok(());
    }
    let sets = wanted.iter().filter(|(key, _)| *key != "properties.allow_compat_mode");
    let sets: Vec<String> = sets.map(|(key, value)| format!("--set {key}={value}")).collect();
    let place = context.place(&config.path);
    plan.steps.push(Step {
        why: "make what cannot go directly an error, and name the sizes for this machine; comments stay".to_owned(),
        command: format!("{}thruway config write {} {}", context.sudo(), quoted(&place), sets.join(" ")),
        action: Action::Write { path: place, text },
    });
    Ok(())
}

/// A word for the shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

fn unreadable(path: &str, unseen: &Unseen) -> Error {
    let why = super::super::checks::why(unseen);
    Error::new(ErrorKind::Io, format!("what the file holds cannot be read: {why}")).with("file", path)
}
