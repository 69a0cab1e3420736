//! libcufile, its settings, and what overrides them.

use super::{Context, why};
use crate::doctor::cufile::Settings;
use crate::doctor::facts::{FactsExt, Unseen};
use crate::doctor::report::{Finding, Route, Verdict};

const P2PDMA: [Route; 1] = [Route::CufileP2pdma];

/// Whether the library is there, and new enough.
pub(super) fn library(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let Some(library) = &context.machine.library else {
        let seen = "libcufile was found in none of the usual places";
        let finding = Finding::new("cufile.library", Verdict::Warning, seen, "libcufile.so.0");
        findings.push(
            finding.remedy("install it: package libcufile of the CUDA toolkit, or nvidia-cufile by pip").shuts(&Route::CUFILE),
        );
        return;
    };
    let version = library.version.as_ref().map_or_else(|| "of an unknown version".to_owned(), ToString::to_string);
    // 1.13 (CUDA 12.8) is the first that knows P2PDMA.
    if library.version.as_ref().is_some_and(|version| !version.at_least(&[1, 13])) {
        let seen = format!("libcufile {version}: before 1.13 it knows no P2PDMA");
        let finding = Finding::new("cufile.library", Verdict::Ok, seen, &library.path);
        findings.push(finding.remedy("for P2PDMA install CUDA 12.8 or newer").shuts(&P2PDMA));
    } else {
        findings.push(Finding::ok("cufile.library", format!("libcufile {version}"), &library.path));
    }
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
                        .remedy("write one: `thruway config write /etc/cufile.json`"),
                );
            }
        }
        Err(unseen) => {
            let verdict = if matches!(unseen, Unseen::Absent) { Verdict::Fault } else { Verdict::Unknown };
            let seen = format!("cufile.json cannot be read: {}", why(unseen));
            let remedy = if config.from_env { "correct CUFILE_ENV_PATH_JSON, which names it" } else { "look at the file" };
            findings.push(Finding::new("cufile.config", verdict, seen, &config.path).remedy(remedy));
        }
        Ok(Err(error)) => {
            let line = error.context("line").map(|line| format!(" (line {line})")).unwrap_or_default();
            let seen = format!("{}{line}: none of its settings is in force", error.message());
            findings.push(
                Finding::new("cufile.config", Verdict::Fault, seen, &config.path)
                    .remedy("correct it: `thruway config check` names the place")
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
    let default = Settings::default();
    let settings = config.audit().map_or(&default, |audit| &audit.settings);
    if config.audit().is_some() {
        findings.push(compatibility(settings, &config.path));
    }
    findings.extend(environment(context));
    findings.push(peers(context, settings));
}

/// What is to happen where the direct path cannot be had.
fn compatibility(settings: &Settings, path: &str) -> Finding {
    if settings.force_compat == Some(true) || settings.vanilla_posix == Some(true) {
        let name = if settings.force_compat == Some(true) { "force_compat_mode" } else { "vanilla_posix_io_mode" };
        return Finding::new(
            "cufile.compatibility",
            Verdict::Warning,
            format!("{name} is true: every byte goes through the host"),
            path,
        )
        .remedy(format!("set properties.{name} to false"))
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
    let is_on = |name: &str| {
        context.facts.env(name).is_some_and(|value| ["true", "1", "yes"].contains(&value.to_ascii_lowercase().as_str()))
    };
    let mut findings = Vec::new();
    if is_on("CUFILE_FORCE_COMPAT_MODE") {
        let seen = "CUFILE_FORCE_COMPAT_MODE is set: every byte goes through the host, whatever cufile.json says";
        let finding = Finding::new("cufile.environment", Verdict::Warning, seen, "environment").about("CUFILE_FORCE_COMPAT_MODE");
        findings.push(finding.remedy("unset CUFILE_FORCE_COMPAT_MODE").shuts(&Route::CUFILE));
    }
    if is_on("CUFILE_ALLOW_COMPAT_MODE") {
        let seen = "CUFILE_ALLOW_COMPAT_MODE is set: versions up to 1.15 fall back silently for it, later ones do not know it";
        let finding = Finding::new("cufile.environment", Verdict::Warning, seen, "environment").about("CUFILE_ALLOW_COMPAT_MODE");
        findings.push(finding.remedy("unset CUFILE_ALLOW_COMPAT_MODE"));
    }
    findings
}

/// Whether cuFile is told to use P2PDMA: two settings, or one variable.
fn peers(context: &Context<'_>, settings: &Settings) -> Finding {
    let path = &context.machine.config.path;
    let by_variable =
        context.facts.env("CUFILE_USE_PCIP2PDMA").is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1");
    if by_variable {
        return Finding::ok("cufile.p2pdma", "CUFILE_USE_PCIP2PDMA tells cuFile to use P2PDMA", "environment");
    }
    match (settings.use_p2pdma == Some(true), settings.nvme_p2pdma == Some(true)) {
        (true, true) => Finding::ok("cufile.p2pdma", "both settings tell cuFile to use P2PDMA", path),
        (false, false) => Finding::new("cufile.p2pdma", Verdict::Warning, "cuFile is not told to use P2PDMA", path)
            .remedy("set properties.use_pci_p2pdma and block.nvme.use_pci_p2pdma to true: `thruway config write --p2pdma`")
            .shuts(&P2PDMA),
        (one, _) => {
            let missing = if one { "block.nvme.use_pci_p2pdma" } else { "properties.use_pci_p2pdma" };
            Finding::new("cufile.p2pdma", Verdict::Warning, format!("{missing} is not true, and both are needed"), path)
                .remedy(format!("set {missing} to true"))
                .shuts(&P2PDMA)
        }
    }
}
