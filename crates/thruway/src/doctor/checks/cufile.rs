//! libcufile, its settings, and what overrides them.

use super::{Context, find_out, why};
use crate::base::error::printable;
use crate::doctor::cufile::Settings;
use crate::doctor::facts::{FactsExt, Unseen};
use crate::doctor::machine::{LayerKind, Target};
use crate::doctor::parse::Version;
use crate::doctor::quote::quoted;
use crate::doctor::report::{Finding, Route, Verdict};

const P2PDMA: [Route; 1] = [Route::CufileP2pdma];
pub(in crate::doctor) const FORCE: &str = "CUFILE_FORCE_COMPAT_MODE";
const ALLOW: &str = "CUFILE_ALLOW_COMPAT_MODE";
const PEERS: &str = "CUFILE_USE_PCIP2PDMA";

/// Whether the library is there, and new enough.
pub(super) fn library(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let finding = |verdict, seen: String| Finding::new("cufile.library", verdict, seen, "libcufile.so.0").shuts(&Route::CUFILE);
    let library = match &context.machine.library {
        Ok(library) => library,
        Err(Unseen::Absent) => {
            let finding = finding(Verdict::Warning, "libcufile was found in none of the usual places".to_owned());
            findings.push(finding.remedy("install libcufile: its package of the CUDA toolkit, or nvidia-cufile by pip"));
            return;
        }
        Err(unseen) => {
            let finding = finding(Verdict::Unknown, format!("whether libcufile is there cannot be seen: {}", why(unseen)));
            findings.push(finding.remedy(find_out(unseen, "where libcufile lies", "ldconfig -p")));
            return;
        }
    };
    let version = library.version.as_ref().map_or_else(|| "of an unknown version".to_owned(), ToString::to_string);
    // 1.13 (CUDA 12.8) is the first that knows P2PDMA.
    findings.push(match &library.version {
        None => Finding::new("cufile.library", Verdict::Unknown, format!("libcufile {version}"), &library.path)
            .remedy(format!("find out the version of libcufile: `readlink -f {}`", library.path))
            .shuts(&P2PDMA),
        Some(known) if needs_newer_driver(context, known) => {
            let seen = format!("libcufile {version} is of a newer CUDA than the driver serves");
            Finding::new("cufile.library", Verdict::Warning, seen, &library.path)
                .remedy("install a newer driver, or the libcufile of the driver's CUDA")
                .shuts(&Route::CUFILE)
        }
        Some(known) if !known.at_least(&[1, 13]) => {
            let seen = format!("libcufile {version}: before 1.13 it knows no P2PDMA");
            let finding = Finding::new("cufile.library", Verdict::Ok, seen, &library.path);
            finding.remedy("for P2PDMA install CUDA 12.8 or newer").shuts(&P2PDMA)
        }
        _ => Finding::ok("cufile.library", format!("libcufile {version}"), &library.path),
    });
}

/// Whether a library is of a CUDA whose first number the driver does not reach: within one, newer libraries go with older
/// drivers (CUDA's minor version compatibility). libcufile 1.4 to 1.14 are of CUDA 11.8 to 12.9, 1.15 and newer of 13.
fn needs_newer_driver(context: &Context<'_>, library: &Version) -> bool {
    let Some((major, _)) = context.machine.cuda.as_ref().ok().and_then(|survey| survey.version) else { return false };
    let needed = match library {
        version if version.at_least(&[1, 15]) => 13,
        version if version.at_least(&[1, 5]) => 12,
        _ => 11,
    };
    major < needed
}

/// The settings, and what the environment makes of them.
pub(super) fn config(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let (machine, config) = (context.machine, &context.machine.config);
    match &config.audit {
        Err(Unseen::Absent) if !config.from_env => {
            if !machine.gpus.is_empty() {
                let seen = "there is no cufile.json, so what is built into libcufile is in force";
                findings.push(
                    Finding::new("cufile.config", Verdict::Warning, seen, &config.path)
                        .remedy("write a cufile.json: `thruway config write /etc/cufile.json`"),
                );
            }
        }
        Err(unseen) => {
            let verdict = if matches!(unseen, Unseen::Absent) { Verdict::Fault } else { Verdict::Unknown };
            let seen = format!("cufile.json cannot be read: {}", why(unseen));
            let remedy = match (config.from_env, verdict) {
                (true, Verdict::Fault) => format!("correct CUFILE_ENV_PATH_JSON, which names {}", config.path),
                _ => find_out(
                    unseen,
                    &format!("what {} says, which those who use cuFile must be able to read", config.path),
                    &format!("cat {}", quoted(&config.path)),
                ),
            };
            findings.push(Finding::new("cufile.config", verdict, seen, &config.path).remedy(remedy).shuts(&Route::CUFILE));
        }
        Ok(Err(error)) => {
            let line = error.context("line").map(|line| format!(" (line {line})")).unwrap_or_default();
            let seen = format!("{}{line}: none of its settings is in force", error.message());
            findings.push(
                Finding::new("cufile.config", Verdict::Fault, seen, &config.path)
                    .remedy(format!("correct {}: `thruway config check {}` names the place", config.path, quoted(&config.path)))
                    .shuts(&Route::CUFILE),
            );
        }
        Ok(Ok(audit)) => {
            findings.push(Finding::ok("cufile.config", "cufile.json was read", &config.path));
            for remark in &audit.remarks {
                let verdict = if remark.is_fault { Verdict::Fault } else { Verdict::Warning };
                let source = format!("{}:{}", config.path, remark.line);
                findings
                    .push(Finding::new("cufile.key", verdict, &remark.what, source).about(&remark.path).remedy(&remark.remedy));
            }
        }
    }
    if machine.gpus.is_empty() {
        return;
    }
    // What a file says that could not be read is unknown, not the default.
    if config.audit.as_ref().is_err_and(|unseen| *unseen != Unseen::Absent) {
        findings.extend(environment(context));
        return;
    }
    let default = Settings::default();
    let settings = config.audit().map_or(&default, |audit| &audit.settings);
    if config.audit().is_some() {
        findings.push(compatibility(context, settings, &config.path));
    }
    findings.extend(environment(context));
    findings.push(peers(context, settings));
    findings.extend(machine.targets.iter().filter_map(|target| peers_of(context, target)));
}

/// What a variable of the environment says, which counts for more than the file; an error if it is neither yes nor no.
fn variable(context: &Context<'_>, name: &str) -> Option<Result<bool, String>> {
    let value = context.facts.env(name)?;
    Some(match value.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err(value),
    })
}

/// What is to happen where the direct path cannot be had.
fn compatibility(context: &Context<'_>, settings: &Settings, path: &str) -> Finding {
    let is_forced = settings.force_compat == Some(true) && variable(context, FORCE) != Some(Ok(false));
    if is_forced || settings.vanilla_posix == Some(true) {
        let name = if is_forced { "force_compat_mode" } else { "vanilla_posix_io_mode" };
        return Finding::new(
            "cufile.compatibility",
            Verdict::Warning,
            format!("{name} is true: every byte goes through the host"),
            path,
        )
        .remedy(format!("set properties.{name} to false in {path}"))
        .shuts(&Route::CUFILE);
    }
    if settings.allow_compat == Some(false) {
        return Finding::ok("cufile.compatibility", "allow_compat_mode is false: what cannot go directly is an error", path);
    }
    Finding::new(
        "cufile.compatibility",
        Verdict::Warning,
        "allow_compat_mode is not false: what cannot go directly goes through the host, silently",
        path,
    )
    .remedy("set properties.allow_compat_mode to false, so that a fall-back is an error: `thruway config write`")
}

/// Variables of the environment that defeat the settings.
fn environment(context: &Context<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (name, routes) in [(FORCE, &Route::CUFILE[..]), (PEERS, &P2PDMA[..])] {
        if let Some(Err(value)) = variable(context, name) {
            let seen = format!("{name} is `{}`: what libcufile makes of that is unknown", printable(&value));
            let finding = Finding::new("cufile.environment", Verdict::Unknown, seen, "environment").about(name).shuts(routes);
            findings.push(finding.remedy(format!("set {name} to true or false, or unset it")));
        }
    }
    if variable(context, FORCE) == Some(Ok(true)) {
        let seen = format!("{FORCE} is set: every byte goes through the host, whatever cufile.json says");
        let finding = Finding::new("cufile.environment", Verdict::Warning, seen, "environment").about(FORCE);
        findings.push(finding.remedy(format!("unset {FORCE}")).shuts(&Route::CUFILE));
    }
    // 1.15 knows it, 1.19 does not.
    let library = context.machine.library.as_ref().ok().and_then(|library| library.version.as_ref());
    if variable(context, ALLOW) == Some(Ok(true)) && !library.is_some_and(|version| version.at_least(&[1, 19])) {
        let seen = format!("{ALLOW} is set: libcufile up to 1.15 falls back silently for it, 1.19 does not know it");
        let finding = Finding::new("cufile.environment", Verdict::Warning, seen, "environment").about(ALLOW);
        findings.push(finding.remedy(format!("unset {ALLOW}")));
    }
    if variable(context, PEERS) == Some(Ok(false)) {
        let seen = format!("{PEERS} forbids cuFile P2PDMA, whatever cufile.json says");
        let finding = Finding::new("cufile.environment", Verdict::Warning, seen, "environment").about(PEERS);
        findings.push(finding.remedy(format!("unset {PEERS}")).shuts(&P2PDMA));
    }
    findings
}

/// Whether cuFile is told to use P2PDMA: two settings, or one variable.
fn peers(context: &Context<'_>, settings: &Settings) -> Finding {
    let path = &context.machine.config.path;
    if variable(context, PEERS) == Some(Ok(true)) {
        return Finding::ok("cufile.p2pdma", format!("{PEERS} tells cuFile to use P2PDMA"), "environment");
    }
    // What does not lie on local NVMe drives has a setting of its own beside the first.
    let mut targets = context.machine.targets.iter();
    let has_local = context.machine.targets.is_empty() || targets.any(|target| setting_of(target).is_none());
    match (settings.use_p2pdma == Some(true), settings.nvme_p2pdma == Some(true) || !has_local) {
        (true, true) if has_local => Finding::ok("cufile.p2pdma", "both settings tell cuFile to use P2PDMA", path),
        (true, true) => Finding::ok("cufile.p2pdma", "properties.use_pci_p2pdma tells cuFile to use P2PDMA", path),
        (false, is_told) if !is_told || !has_local => {
            Finding::new("cufile.p2pdma", Verdict::Warning, "cuFile is not told to use P2PDMA", path)
                .remedy("set properties.use_pci_p2pdma and block.nvme.use_pci_p2pdma to true: `thruway config write --p2pdma`")
                .shuts(&P2PDMA)
        }
        (one, _) => {
            let missing = if one { "block.nvme.use_pci_p2pdma" } else { "properties.use_pci_p2pdma" };
            Finding::new("cufile.p2pdma", Verdict::Warning, format!("{missing} is not true, and both are needed"), path)
                .remedy(format!("set {missing} to true in {path}"))
                .shuts(&P2PDMA)
        }
    }
}

/// The setting for a place that does not lie on local NVMe drives.
fn setting_of(target: &Target) -> Option<&'static str> {
    let kind = target.mount.as_ref().map(|mount| mount.kind.as_str());
    match kind {
        Some("virtiofs") => Some("fs.virtiofs.use_pci_p2pdma"),
        _ if target.is_on_remote_nvme() => Some("block.nvmeof.use_pci_p2pdma"),
        _ => None,
    }
}

/// Whether cuFile is told to use P2PDMA for a place that has a setting of its own, beside or instead of that of NVMe drives.
fn peers_of(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let config = &context.machine.config;
    let is_raid = target.layers.iter().any(|layer| layer.kind == LayerKind::Raid("raid0".to_owned()));
    let (id, setting) = match setting_of(target) {
        Some(setting) => ("path.setting", setting),
        None if is_raid => ("cufile.p2pdma", "block.raid.use_pci_p2pdma"),
        None => return None,
    };
    Some(if config.is_on(setting) == Some(true) {
        Finding::ok(id, format!("{setting} is true"), &config.path).about(&target.path)
    } else {
        Finding::new(id, Verdict::Warning, format!("{setting} is not true, and is needed there over P2PDMA"), &config.path)
            .about(&target.path)
            .remedy(format!("set {setting} to true in {}", config.path))
            .shuts(&P2PDMA)
    })
}
