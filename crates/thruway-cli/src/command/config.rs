//! `thruway config`: `cufile.json`, checked, explained, written.

use std::path::Path;

use serde_json::{Value as Json, json};
use thruway::doctor::cufile::edit::apply;
use thruway::doctor::cufile::jsonc::{Node, Value, parse};
use thruway::doctor::cufile::schema::{KEYS, find};
use thruway::doctor::cufile::{Audit, audit};
use thruway::{Error, ErrorKind, Result};

use crate::args::{ConfigAction, ConfigArgs, ConfigWriteArgs};
use crate::escape::{safe, safe_path};
use crate::output::{Outcome, Output, table};
use crate::settings_file::{beside, read, replace};

pub(super) fn run(args: &ConfigArgs, output: &Output) -> Result<Outcome> {
    match &args.action {
        ConfigAction::Check(args) => check(&args.file, output),
        ConfigAction::Explain(args) => explain(&args.file, output),
        ConfigAction::Write(args) => write(args, output),
    }
}

fn existing(path: &Path) -> Result<String> {
    let absent = || Error::new(ErrorKind::NotFound, "there is no such file").with_file(path);
    read(path)?.ok_or_else(|| absent().with_hint("write one with `thruway config write`"))
}

fn judged(path: &Path, text: &str) -> Result<Audit> {
    audit(text).map_err(|error| error.with_file(path))
}

fn check(path: &Path, output: &Output) -> Result<Outcome> {
    let audit = judged(path, &existing(path)?)?;
    for remark in &audit.remarks {
        let word = if remark.is_fault { "fault" } else { "warning" };
        output.line(format!("{}:{}: {word}: {}: {}", safe_path(path), remark.line, safe(&remark.path), safe(&remark.what)))?;
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
    output.object(&json!({"file": path.to_string_lossy(), "ok": !audit.has_fault(), "remarks": remarks}))?;
    Ok(if audit.has_fault() { Outcome::Fault } else { Outcome::Fine })
}

fn explain(path: &Path, output: &Output) -> Result<Outcome> {
    let text = existing(path)?;
    let root = parse(&text).map_err(|error| error.with_file(path))?;
    let at = |key: &str| key.split('.').try_fold(&root, |node: &Node, part| node.get(part));
    let mut rows = vec![["KEY", "HERE", "DEFAULT", "MEANING"].map(str::to_owned).to_vec()];
    let mut objects = Vec::new();
    for key in KEYS {
        let Some(node) = at(key.path).filter(|node| !matches!(node.value, Value::Object(_))) else { continue };
        let here = text.get(node.span.clone()).unwrap_or_default();
        rows.push(vec![key.path.to_owned(), safe(here), key.default.to_owned(), key.meaning.to_owned()]);
        objects.push(json!({"key": key.path, "here": here, "default": key.default, "meaning": key.meaning}));
    }
    for line in table(&rows, &[]) {
        output.line(line)?;
    }
    output.object(&json!({"file": path.to_string_lossy(), "keys": objects}))?;
    Ok(Outcome::Fine)
}

fn write(args: &ConfigWriteArgs, output: &Output) -> Result<Outcome> {
    let path = &args.file;
    let old = read(path)?;
    let text = apply(old.as_deref(), &changes(args)?).map_err(|error| error.with_file(path))?;
    if old.as_deref() == Some(&text) {
        output.line(format!("{}: nothing to change", safe_path(path)))?;
        output.object(&json!({"file": path.to_string_lossy(), "changed": false, "old": null}))?;
        return Ok(Outcome::Fine);
    }
    let kept = old.as_deref().map(|old| beside(path, old)).transpose()?.flatten();
    if let (Some(kept), Some(old)) = (&kept, &old) {
        replace(kept, old, path)?;
        output.line(format!("kept the old file as {}", safe_path(kept)))?;
    }
    replace(path, &text, path)?;
    output.line(format!("wrote {}", safe_path(path)))?;
    let kept = kept.map(|kept| kept.to_string_lossy().into_owned());
    output.object(&json!({"file": path.to_string_lossy(), "changed": true, "old": kept}))?;
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
        if find(key).is_none() {
            return Err(refuse("libcufile knows no such key").with_hint("name it with those above it: properties.io_batchsize"));
        }
        parse(value).map_err(|_| refuse("its value is no JSON"))?;
        changes.push((key.to_owned(), value.to_owned()));
    }
    Ok(changes)
}
