//! The steps for each part of a machine.

use super::distribution::{Distribution, is_nvidia_kernel};
use super::settings;
use super::{Action, Plan, Step};
use crate::base::{Error, ErrorKind, Result};
use crate::doctor::cufile::edit::apply;
use crate::doctor::facts::{Facts, FactsExt, Unseen};
use crate::doctor::machine::{Machine, is_loaded, nvidia_fs_is_installed};
use crate::doctor::parse::nvidia::registry_words;
use crate::doctor::quote::quoted;
use crate::doctor::report::{Report, Route, Verdict};

const MODULES_LOAD: &str = "/etc/modules-load.d/nvidia-fs.conf";
const REGISTRY: &str = "/etc/modprobe.d/nvidia-p2pdma.conf";
const MULTIPATH: &str = "/etc/modprobe.d/nvme-no-multipath.conf";
const LIMITS: &str = "/etc/security/limits.d/90-thruway.conf";
/// Where modprobe reads settings, the first counting most: of two files with one name it takes the first (modprobe.d(5)).
const MODPROBE: [&str; 5] =
    ["/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"];
/// So many files of each are looked at.
const MODPROBE_FILES_MAX: usize = 256;
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

    /// What a file holds; `None` where there is none.
    fn old(&self, path: &str) -> Result<Option<String>> {
        match self.facts.file(path) {
            Ok(old) => Ok(Some(old)),
            Err(Unseen::Absent) => Ok(None),
            Err(unseen) => {
                let why = super::super::checks::why(&unseen);
                Err(Error::new(ErrorKind::Io, format!("what the file holds cannot be read: {why}")).with("file", path))
            }
        }
    }

    /// A step that gives a file its content; none if it has it.
    fn file(&self, path: &str, text: &str, why: &str) -> Result<Option<Step>> {
        let old = self.old(path)?;
        if old.as_deref() == Some(text) {
            return Ok(None);
        }
        let (sudo, place) = (self.sudo(), self.place(path));
        let typed = quoted(&place);
        // An older .old keeps its content under a numbered name.
        let keep = old.map(|_| format!("{sudo}cp -p --backup=numbered {typed} {typed}.old && ")).unwrap_or_default();
        let lines = text.lines().map(quoted).collect::<Vec<String>>().join(" ");
        let command = format!("{keep}printf '%s\\n' {lines} | {sudo}tee {typed}");
        Ok(Some(Step { why: why.to_owned(), command, action: Action::Write { path: place, text: text.to_owned() } }))
    }
}

/// The steps on a machine, or on a container's host.
pub(super) fn of_host(context: &Context<'_>, distribution: &Distribution, plan: &mut Plan) -> Result<()> {
    packages(context, distribution, plan);
    let in_force = match context.route {
        Route::NvidiaFs => module(context, distribution, plan)?,
        _ => peers(context, distribution, plan)?,
    };
    limits(context, plan)?;
    cufile(context, plan)?;
    // Last: what brings the files into force, so that whatever fails before it leaves nothing in force.
    plan.steps.extend(in_force);
    Ok(())
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
        let module = distribution.module(&machine.release, has_headers);
        let needs_dkms = module.iter().any(|package| package.ends_with("-dkms"));
        plan.first.extend((needs_dkms && distribution.lacks_dkms(facts)).then(|| {
            "enable EPEL: DKMS, which builds nvidia-fs, is in that repository \
             (https://docs.fedoraproject.org/en-US/epel/getting-started)"
                .to_owned()
        }));
        packages.extend(module);
        let is_signed = is_nvidia_kernel(&machine.release) && distribution.family == super::Family::Ubuntu;
        if context.report.findings.iter().any(|finding| finding.id == "host.secure_boot") && !is_signed {
            plan.by_hand.push(
                "Secure Boot is on: enrol the key that DKMS signs with (`mokutil --import /var/lib/dkms/mok.pub`, then restart), \
                 or the kernel refuses nvidia-fs"
                    .to_owned(),
            );
            plan.is_shut_by_hand = true;
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
        plan.first.push(format!(
            "add NVIDIA's package repository: no file in {sources} has its name (cuda, nvidia) \
             (https://docs.nvidia.com/cuda/cuda-installation-guide-linux; from CUDA 13.4 on nvidia-fs has one of its own, \
             https://developer.nvidia.com/nvidia-fs-downloads); or install {} from where you have them",
            packages.join(", ")
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

/// nvidia-fs is loaded at every start; gives the step that loads it now.
fn module(context: &Context<'_>, distribution: &Distribution, plan: &mut Plan) -> Result<Option<Step>> {
    plan.steps.extend(context.file(MODULES_LOAD, "nvidia-fs\n", "load nvidia-fs at every start")?);
    if is_loaded(context.facts, "nvidia_fs") {
        return Ok(None);
    }
    let may_load = || modprobe_lines(context.facts, "allow_unsupported_modules ").iter().any(|(_, line)| line.ends_with(" 1"));
    if distribution.family == super::Family::Suse && !may_load() {
        plan.first.push(
            "write `allow_unsupported_modules 1` into /etc/modprobe.d/10-unsupported-modules.conf: SLES loads no module that SUSE \
             does not support, and nvidia-fs is none of its"
                .to_owned(),
        );
    }
    let words = ["modprobe", "nvidia-fs"].map(str::to_owned).to_vec();
    Ok(context.root.is_none().then(|| context.run(words, "load nvidia-fs".to_owned())))
}

/// The settings of the drivers that PCI P2PDMA needs on x86; gives the step that brings them into force at the next start.
fn peers(context: &Context<'_>, distribution: &Distribution, plan: &mut Plan) -> Result<Option<Step>> {
    if context.machine.is_grace() {
        return Ok(None);
    }
    let before = plan.steps.len();
    // A pool that is not there may come with the first CUDA program; an empty one is the settings' doing.
    let has_empty_pool =
        context.report.findings.iter().any(|finding| finding.id == "p2pdma.memory" && finding.verdict == Verdict::Warning);
    if context.has("p2pdma.parameters") || has_empty_pool {
        // What the driver was loaded with for other reasons stays.
        let names = REGISTRY_WORDS.map(|word| word.split('=').next().unwrap_or(word));
        let loaded = registry_words(&context.facts.file("/proc/driver/nvidia/params").unwrap_or_default());
        let others = loaded.into_iter().filter(|word| {
            let own = word.split('=').next().unwrap_or_default().trim();
            names.iter().all(|name| !own.eq_ignore_ascii_case(name))
        });
        let words: String = REGISTRY_WORDS.iter().map(|word| (*word).to_owned()).chain(others).map(|word| word + ";").collect();
        // Debian's own package calls the module otherwise; options for a module that is not there do no harm.
        let modules =
            ["nvidia", "nvidia-current"].into_iter().take(1 + usize::from(distribution.family == super::Family::Debian));
        let text: String = modules.map(|module| format!("options {module} NVreg_RegistryDwords=\"{words}\"\n")).collect();
        plan.steps.extend(context.file(REGISTRY, &text, "have NVIDIA's driver offer the GPU's memory to its peers")?);
        let rivals = rivals(context.facts);
        plan.is_shut_by_hand |= !rivals.is_empty();
        plan.by_hand.extend(rivals);
        plan.needs_restart = true;
    }
    if context.has("p2pdma.multipath") {
        const BUILT_IN: &str = "kernel/drivers/nvme/host/nvme-core.ko";
        let table = format!("/lib/modules/{}/modules.builtin", context.machine.release);
        if context.facts.lines(&table, BUILT_IN).is_ok_and(|lines| !lines.is_empty()) {
            let what = "start the kernel with nvme_core.multipath=N: its NVMe driver is no module, so no file sets it";
            plan.by_hand.push(what.to_owned());
            plan.is_shut_by_hand = true;
        } else {
            let text = "options nvme_core multipath=N\n";
            plan.steps.extend(context.file(MULTIPATH, text, "have the NVMe driver join no ways to a drive")?);
        }
        plan.needs_restart = true;
    }
    if plan.needs_restart {
        let restart = "restart the machine: drivers read these settings when they are loaded";
        let is_written = plan.steps.len() == before;
        let again = distribution.rebuild_ram_disk().join(" ");
        plan.by_hand.push(if is_written {
            format!("{restart}; if they are not in force then, build the initial RAM disk anew first: `{again}`")
        } else {
            restart.to_owned()
        });
    }
    let why = "put the settings of the drivers into the initial RAM disk, from which they are loaded";
    Ok((plan.steps.len() > before).then(|| {
        let step = context.run(distribution.rebuild_ram_disk(), why.to_owned());
        match step.action {
            Action::Run(words) => Step { action: Action::Rebuild(words), ..step },
            action => Step { action, ..step },
        }
    }))
}

/// Where else the driver is given the same setting: of two it takes the last.
fn rivals(facts: &dyn Facts) -> Vec<String> {
    const SETTING: &str = "NVreg_RegistryDwords";
    let files = ["options nvidia ", "options nvidia-current ", "options nvidia_current "];
    let lines = files.into_iter().flat_map(|word| modprobe_lines(facts, word));
    let mut places: Vec<String> =
        lines.filter(|(path, line)| path != REGISTRY && line.contains(SETTING)).map(|(path, _)| path).collect();
    let command = facts.file("/proc/cmdline").unwrap_or_default();
    let is_set =
        |word: &str| word.split_once('.').is_some_and(|(module, rest)| module.starts_with("nvidia") && rest.starts_with(SETTING));
    places.extend(command.split_whitespace().any(is_set).then(|| "the kernel's command line".to_owned()));
    places.sort();
    places.dedup();
    places
        .into_iter()
        .map(|place| format!("take {SETTING} out of {place}: it is set in {REGISTRY} now, and one place must"))
        .collect()
}

/// The lines that begin with `word` in the files that modprobe reads, each with its file.
fn modprobe_lines(facts: &dyn Facts, word: &str) -> Vec<(String, String)> {
    let mut seen = Vec::new();
    let mut found = Vec::new();
    for directory in MODPROBE {
        for name in facts.names(directory).into_iter().filter(|name| name.ends_with(".conf")).take(MODPROBE_FILES_MAX) {
            if seen.contains(&name) {
                continue;
            }
            let path = format!("{directory}/{name}");
            let lines = facts.lines(&path, word).unwrap_or_default();
            found.extend(lines.lines().map(|line| (path.clone(), line.trim().to_owned())));
            seen.push(name);
        }
    }
    found
}

/// The limits of processes. What the file says already stays, whether it is in force yet or not.
fn limits(context: &Context<'_>, plan: &mut Plan) -> Result<()> {
    let due = [("limits.memlock", "memlock", "unlimited"), ("limits.files", "nofile", "1048576")];
    let due = due.into_iter().filter(|(id, ..)| context.has(id));
    let lines: Vec<String> =
        due.flat_map(|(_, item, value)| ["soft", "hard"].map(|kind| format!("* {kind} {item} {value}"))).collect();
    if lines.is_empty() {
        return Ok(());
    }
    let old = context.old(LIMITS)?.unwrap_or_default();
    let text = String::from_utf8_lossy(&super::appended(old.as_bytes(), &lines)).into_owned();
    if let Some(step) = context.file(LIMITS, &text, "raise the limits of processes")? {
        plan.steps.push(Step { action: Action::Append { path: context.place(LIMITS), lines }, ..step });
    }
    plan.by_hand.push("sign in anew: limits are set at sign-in; services have LimitMEMLOCK and LimitNOFILE".to_owned());
    Ok(())
}

fn cufile(context: &Context<'_>, plan: &mut Plan) -> Result<()> {
    let config = &context.machine.config;
    if !config.path.starts_with('/') {
        // Below another root, and for a service, that is another directory than this one.
        plan.by_hand.push(format!(
            "give CUFILE_ENV_PATH_JSON a whole path: {} is looked for in the directory of each program, so that nobody can say \
             which file it is; set-up writes none",
            config.path
        ));
        plan.is_shut_by_hand = true;
        return Ok(());
    }
    let old = context.old(&config.path)?;
    let keys = settings::wanted(context.machine, context.route);
    let due = settings::due(old.as_deref(), &keys);
    let text = match apply(old.as_deref(), &due) {
        Ok(text) => text,
        Err(error) => {
            let line = error.context("line").map(|line| format!(", line {line}")).unwrap_or_default();
            let what = format!("correct {}, which is left as it is: {}{line}", config.path, error.message());
            plan.by_hand.push(what);
            plan.is_shut_by_hand = true;
            return Ok(());
        }
    };
    if old.as_deref() == Some(&text) {
        return Ok(());
    }
    let sets = due.iter().filter(|(key, _)| *key != "properties.allow_compat_mode");
    let sets: Vec<String> = sets.map(|(key, value)| format!("--set {key}={value}")).collect();
    let place = context.place(&config.path);
    plan.steps.push(Step {
        why: "make what cannot go directly an error, and name the sizes for this machine; comments stay".to_owned(),
        command: format!("{}thruway config write {} {}", context.sudo(), quoted(&place), sets.join(" ")),
        action: Action::Set { path: place, keys },
    });
    Ok(())
}
