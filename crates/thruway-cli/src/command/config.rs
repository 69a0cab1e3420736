//! `thruway config`: `cufile.json`, checked, explained, written.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use thruway::doctor::cufile::edit::apply;
use thruway::doctor::cufile::jsonc::{Node, parse};
use thruway::doctor::cufile::schema::{KEYS, Shape, find, is_section};
use thruway::doctor::cufile::{Audit, DEFAULT_PATH, audit};
use thruway::{Error, ErrorKind, Result};

use crate::args::{ConfigAction, ConfigArgs, ConfigWriteArgs};
use crate::escape::{safe, safe_path};
use crate::facts::as_text;
use crate::output::{Outcome, Output, table};
use crate::settings_file::{beside, keep, one_at_a_time, read, replace};
use crate::stop;

pub(super) fn run(args: &ConfigArgs, output: &Output) -> Result<Outcome> {
    match &args.action {
        ConfigAction::Check(args) => check(&named(args.file.as_ref()), output),
        ConfigAction::Explain(args) => explain(&named(args.file.as_ref()), output),
        ConfigAction::Write(args) => write(args, output),
    }
}

/// The file that was named, or that the library would read.
fn named(file: Option<&PathBuf>) -> PathBuf {
    let by_environment = || std::env::var_os("CUFILE_ENV_PATH_JSON").filter(|name| !name.is_empty()).map(PathBuf::from);
    file.cloned().or_else(by_environment).unwrap_or_else(|| PathBuf::from(DEFAULT_PATH))
}

fn existing(path: &Path) -> Result<String> {
    let absent = || Error::new(ErrorKind::NotFound, "there is no such file").with_file(path);
    let content = stop::at_once(|| read(path))?.ok_or_else(|| absent().with_hint("write one with `thruway config write`"))?;
    Ok(text(&content))
}

/// The text of a file. What is no UTF-8 is told by what stands for it, as everywhere else where such a file is judged.
fn text(content: &[u8]) -> String {
    String::from_utf8_lossy(content).into_owned()
}

fn judged(path: &Path, text: &str) -> Result<Audit> {
    audit(text).map_err(|error| error.with_file(path))
}

fn check(path: &Path, output: &Output) -> Result<Outcome> {
    let audit = judged(path, &existing(path)?)?;
    for remark in &audit.remarks {
        let word = if remark.is_fault { "fault" } else { "warning" };
        let key = if remark.path.is_empty() { String::new() } else { format!("{}: ", safe(&remark.path)) };
        output.line(format!("{}:{}: {word}: {key}{}", safe_path(path), remark.line, safe(&remark.what)))?;
        output.line(format!("    remedy: {}", safe(&remark.remedy)))?;
    }
    if audit.remarks.is_empty() {
        output.line(format!("{}: every key is known, in its place and in its range", safe_path(path)))?;
    }
    let remarks: Vec<Json> = audit
        .remarks
        .iter()
        .map(|remark| {
            let verdict = if remark.is_fault { "fault" } else { "warning" };
            json!({"line": remark.line, "key": remark.path, "verdict": verdict, "what": remark.what, "remedy": remark.remedy})
        })
        .collect();
    output.object(&json!({"file": as_text(path), "ok": !audit.has_fault(), "remarks": remarks}))?;
    Ok(if audit.has_fault() { Outcome::Fault } else { Outcome::Fine })
}

fn explain(path: &Path, output: &Output) -> Result<Outcome> {
    let text = existing(path)?;
    let root = parse(&text).map_err(|error| error.with_file(path))?;
    let audit = judged(path, &text)?;
    let refused: Vec<&str> = audit.remarks.iter().filter(|remark| remark.is_fault).map(|remark| remark.path.as_str()).collect();
    let at = |key: &str| key.split('.').try_fold(&root, |node: &Node, part| node.get(part));
    let mut rows = vec![["KEY", "IN THE FILE", "NVIDIA'S TEMPLATE", "MEANING"].map(str::to_owned).to_vec()];
    let mut objects = Vec::new();
    for key in KEYS.iter().filter(|key| !is_section(key.path)) {
        // The older name of a section stands for it.
        let older = key.path.strip_prefix("denylist.").map(|rest| format!("blacklist.{rest}"));
        let node = at(key.path).or_else(|| at(older.as_deref()?));
        let here = node.and_then(|node| text.get(node.span.clone()));
        let template = if key.default.is_empty() { "not documented" } else { key.default };
        // What the library refuses is not in force, and what is not in the file is as it was built, which differs by version.
        let is_refused = refused.contains(&key.path) || older.as_deref().is_some_and(|older| refused.contains(&older));
        let shown = match here {
            Some(here) if is_refused => format!("{} (refused)", safe(here)),
            Some(here) => safe(here),
            None => "built in".to_owned(),
        };
        rows.push([key.path, &shown, template, key.meaning].map(str::to_owned).to_vec());
        objects.push(json!({
            "key": key.path, "here": here, "template": key.default, "refused": is_refused, "meaning": key.meaning,
        }));
    }
    for line in table(&rows, &[]) {
        output.line(line)?;
    }
    output.object(&json!({"file": as_text(path), "keys": objects}))?;
    Ok(Outcome::Fine)
}

fn write(args: &ConfigWriteArgs, output: &Output) -> Result<Outcome> {
    let path = &named(args.file.as_ref());
    // A dead server's directory is not waited for.
    stop::at_once(|| read(path))?;
    let _turn = stop::at_once(|| Ok(one_at_a_time(path)))?;
    let old = stop::at_once(|| read(path))?;
    let new = apply(old.as_deref().map(text).as_deref(), &changes(args)?).map_err(|error| error.with_file(path))?;
    if old.as_deref() == Some(new.as_bytes()) {
        output.line(format!("{}: nothing to change", safe_path(path)))?;
        output.object(&json!({"file": as_text(path), "changed": false, "old": null}))?;
        return Ok(Outcome::Fine);
    }
    let kept = old.as_deref().map(|old| beside(path, old)).transpose()?.flatten();
    if let (Some(kept), Some(old)) = (&kept, &old) {
        keep(kept, old, path)?;
    }
    if let Err(error) = replace(path, new.as_bytes()) {
        // Nothing was replaced, so nothing old is to be kept.
        kept.iter().for_each(|kept| drop(std::fs::remove_file(kept)));
        return Err(error);
    }
    if let Some(kept) = &kept {
        output.line(format!("kept the old file as {}", safe_path(kept)))?;
    }
    output.line(format!("wrote {}", safe_path(path)))?;
    let kept = kept.map(as_text);
    output.object(&json!({"file": as_text(path), "changed": true, "old": kept}))?;
    Ok(Outcome::Fine)
}

/// The keys to set, with their values in JSON.
fn changes(args: &ConfigWriteArgs) -> Result<Vec<(String, String)>> {
    let mut changes = vec![("properties.allow_compat_mode".to_owned(), "false".to_owned())];
    if args.p2pdma {
        changes.extend(["properties.use_pci_p2pdma", "block.nvme.use_pci_p2pdma"].map(|key| (key.to_owned(), "true".to_owned())));
    }
    for word in &args.set {
        let refuse = |why: &str| Error::new(ErrorKind::InvalidInput, format!("--set {} cannot be: {why}", safe(word)));
        let (key, value) = word.split_once('=').ok_or_else(|| refuse("there is no = in it"))?;
        let Some(known) = find(key) else {
            return Err(refuse("libcufile knows no such key").with_hint("name it with those above it: properties.io_batchsize"));
        };
        let is_text = matches!(known.shape, Shape::Text | Shape::OneOf(_));
        let value = match parse(value) {
            // Without what stands around it, such as a comment.
            Ok(node) => value[node.span].to_owned(),
            // A text without its quotes, which the shell takes off.
            Err(_) if is_text && !value.contains('"') => Json::from(value).to_string(),
            Err(_) => {
                let hint =
                    "write it as JSON: 64, true, '[\"/data\"]'; quotes within quotes, for the shell takes the outer ones off";
                return Err(refuse("its value is no JSON").with_hint(hint));
            }
        };
        changes.push((key.to_owned(), value));
    }
    Ok(changes)
}
