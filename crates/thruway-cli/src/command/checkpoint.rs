//! `thruway checkpoint`: what checkpoints there are, whether they are sound, and clearing up.

use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value, json};
use thruway::base::error::printable;
use thruway::checkpoint::{Checkpoint, Checkpoints, Damage, Retention, Verification, VerifyOptions};
use thruway::{ByteSize, Device, Error, ErrorKind, PathPolicy, Result, Session};

use crate::args::checkpoint::{CheckpointArgs, CheckpointCommand, DiffArgs, DirectoryArgs, PruneArgs, ShowArgs, VerifyStepArgs};
use crate::escape::{safe, safe_path};
use crate::output::{Outcome, Output, counted, receipt_fields, table};
use crate::stop;

pub(super) fn run(args: &CheckpointArgs, output: &Output) -> Result<Outcome> {
    match &args.command {
        CheckpointCommand::List(args) => list(args, output),
        CheckpointCommand::Show(args) => show(args, output),
        CheckpointCommand::Verify(args) => verify(args, output),
        CheckpointCommand::Diff(args) => diff(args, output),
        CheckpointCommand::Prune(args) => prune(args, output),
        CheckpointCommand::Recover(args) => recover(args, output),
    }
}

/// The bytes pass through the host, so a GPU is left alone.
fn checkpoints(directory: &Path, policy: PathPolicy) -> Result<Checkpoints> {
    Ok(Session::builder().device(Device::Host).path(policy).build()?.checkpoints(directory))
}

/// The step that was named, or the newest.
fn step_or_newest(checkpoints: &Checkpoints, step: Option<u64>) -> Result<u64> {
    let newest = || {
        checkpoints.newest()?.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "there is no checkpoint here").with("file", safe_path(checkpoints.directory()))
        })
    };
    step.map_or_else(newest, Ok)
}

fn list(args: &DirectoryArgs, output: &Output) -> Result<Outcome> {
    let checkpoints = checkpoints(&args.directory, PathPolicy::Auto)?;
    let mut rows = vec![["STEP", "SAVED", "TENSORS", "SIZE", "STATE"].map(str::to_owned).to_vec()];
    let mut objects = Vec::new();
    for step in checkpoints.steps()? {
        match checkpoints.open(step) {
            Ok(checkpoint) => {
                let manifest = checkpoint.manifest();
                let tensors: usize = manifest.groups.iter().map(|group| group.tensors.len()).sum();
                let size = ByteSize(manifest.file_bytes()).to_string();
                rows.push(vec![step.to_string(), utc(manifest.saved_at), tensors.to_string(), size, "whole".to_owned()]);
                objects.push(json!({
                    "step": step, "path": checkpoint.path().to_string_lossy(), "whole": true, "error": null,
                    "save_id": manifest.save_id.to_string(), "saved_at": manifest.saved_at, "tensors": tensors,
                    "bytes": manifest.file_bytes(),
                }));
            }
            Err(error) => {
                let state = format!("damaged: {}", safe(error.message()));
                rows.push(vec![step.to_string(), String::new(), String::new(), String::new(), state]);
                let path = checkpoints.directory_of(step).ok().map(|path| path.to_string_lossy().into_owned());
                objects.push(json!({"step": step, "path": path, "whole": false, "error": error.to_string()}));
            }
        }
    }
    let unfinished = checkpoints.unfinished()?;
    if objects.is_empty() {
        output.line(format!("no checkpoints in {}", safe_path(&args.directory)))?;
    } else {
        table(&rows, &[0, 2, 3]).into_iter().try_for_each(|line| output.line(line))?;
    }
    if !unfinished.is_empty() {
        output.line(format!(
            "{} unfinished or left over; `thruway checkpoint recover` removes what nobody works on: {}",
            unfinished.len(),
            unfinished.iter().map(|name| safe(name)).collect::<Vec<_>>().join(", ")
        ))?;
    }
    output.object(&json!({
        "directory": args.directory.to_string_lossy(), "checkpoints": objects, "unfinished": unfinished,
    }))?;
    Ok(Outcome::Fine)
}

fn show(args: &ShowArgs, output: &Output) -> Result<Outcome> {
    let checkpoints = checkpoints(&args.directory, PathPolicy::Auto)?;
    let checkpoint = checkpoints.open(step_or_newest(&checkpoints, args.step)?)?;
    if output.is_json() {
        output.object(&json!({"path": checkpoint.path().to_string_lossy(), "manifest": checkpoint.manifest()}))?;
        return Ok(Outcome::Fine);
    }
    print(&checkpoint, output)?;
    Ok(Outcome::Fine)
}

fn print(checkpoint: &Checkpoint, output: &Output) -> Result<()> {
    let manifest = checkpoint.manifest();
    output.line(format!("{}: step {}", safe_path(checkpoint.path()), manifest.step))?;
    output.line(format!(
        "saved {} by {} in {:.1} s, save {}",
        utc(manifest.saved_at),
        safe(&manifest.writer),
        Duration::from_millis(manifest.written_in_ms).as_secs_f64(),
        manifest.save_id
    ))?;
    output.line(format!("{} saved together", counted(manifest.world.ranks as usize, "rank")))?;
    output.line("")?;
    let mut rows = vec![["GROUP", "TENSORS", "SIZE", "FILES"].map(str::to_owned).to_vec()];
    for group in &manifest.groups {
        let bytes = group.tensors.iter().map(|tensor| tensor.bytes).sum();
        let mut files: Vec<usize> = group.tensors.iter().map(|tensor| tensor.file).chain(group.opens).collect();
        files.sort_unstable();
        files.dedup();
        let cells =
            [printable(&group.name), group.tensors.len().to_string(), ByteSize(bytes).to_string(), files.len().to_string()];
        rows.push(cells.to_vec());
    }
    table(&rows, &[1, 2, 3]).into_iter().try_for_each(|line| output.line(line))?;
    output.line("")?;
    let files = counted(manifest.files.len(), "file");
    output.line(format!("{} of data, {} in {files}", ByteSize(manifest.tensor_bytes()), ByteSize(manifest.file_bytes())))?;
    output.line(format!("structure: {} of JSON", ByteSize(manifest.structure.text().len() as u64)))?;
    for (key, value) in &manifest.metadata {
        output.line(format!("metadata {}: {}", safe(key), safe(value)))?;
    }
    Ok(())
}

fn verify(args: &VerifyStepArgs, output: &Output) -> Result<Outcome> {
    let checkpoints = checkpoints(&args.directory, args.path)?;
    let steps = if args.all { checkpoints.steps()? } else { vec![step_or_newest(&checkpoints, args.step)?] };
    let (mut objects, mut sound) = (Vec::new(), true);
    for step in steps {
        // One that cannot be opened is an error, or, among all, one finding of several.
        let (object, fine) = match verify_one(&checkpoints, step, output) {
            Ok((checkpoint, found)) => report(&checkpoint, &found, output)?,
            Err(error) if args.all && error.kind() != ErrorKind::Cancelled => {
                output.line(format!("step {step}: {}", safe(&error.to_string())))?;
                (json!({"step": step, "ok": false, "error": error.to_string(), "damage": []}), false)
            }
            Err(error) => return Err(error),
        };
        objects.push(object);
        sound &= fine;
    }
    output.object(&json!({"directory": args.directory.to_string_lossy(), "ok": sound, "checkpoints": objects}))?;
    Ok(if sound { Outcome::Fine } else { Outcome::Fault })
}

fn verify_one(checkpoints: &Checkpoints, step: u64, output: &Output) -> Result<(Checkpoint, Verification)> {
    let checkpoint = checkpoints.open(step)?;
    let bar = output.bar("verifying", checkpoint.manifest().tensor_bytes());
    let mut options = VerifyOptions::default().cancel(stop::cancel());
    if let Some(progress) = bar.progress() {
        options = options.progress(progress);
    }
    let found = checkpoint.verify(&options)?;
    Ok((checkpoint, found))
}

fn report(checkpoint: &Checkpoint, found: &Verification, output: &Output) -> Result<(Value, bool)> {
    let step = checkpoint.step();
    for damage in &found.damage {
        let Damage { file, tensor, extent } = damage;
        let what = tensor.as_ref().map_or_else(
            || "its head".to_owned(),
            |(group, tensor)| format!("tensor {} of {}", printable(tensor), printable(group)),
        );
        output.line(format!("step {step}: {file}: {what} is damaged, in bytes {} to {}", extent.offset, extent.end()))?;
    }
    let tensors: usize = checkpoint.manifest().groups.iter().map(|group| group.tensors.len()).sum();
    let verdict = match found.damage.len() {
        0 => "every byte is what was saved".to_owned(),
        count => format!("{count} damaged"),
    };
    output.line(format!("step {step}: {}, {}: {verdict}", counted(tensors, "tensor"), ByteSize(found.receipt.bytes)))?;
    output.line(format!("read {}", found.receipt))?;
    let damage: Vec<Value> = found
        .damage
        .iter()
        .map(|Damage { file, tensor, extent }| {
            let (group, tensor) = tensor.clone().unzip();
            json!({"file": file, "group": group, "tensor": tensor, "offset": extent.offset, "length": extent.length})
        })
        .collect();
    let mut object: Map<String, Value> = receipt_fields(&found.receipt);
    let fine = found.damage.is_empty();
    object.extend([
        ("step".to_owned(), step.into()),
        ("ok".to_owned(), fine.into()),
        ("error".to_owned(), Value::Null),
        ("damage".to_owned(), damage.into()),
    ]);
    Ok((object.into(), fine))
}

fn diff(args: &DiffArgs, output: &Output) -> Result<Outcome> {
    let checkpoints = checkpoints(&args.directory, PathPolicy::Auto)?;
    let (one, other) = (checkpoints.open(args.one)?, checkpoints.open(args.other)?);
    let (differences, same) = one.manifest().compare(other.manifest());
    let structure = one.manifest().structure != other.manifest().structure;
    for found in &differences {
        output.line(format!("{}: {} {}", printable(&found.group), printable(&found.tensor), found.difference.describe()))?;
    }
    if structure {
        output.line("the structure beside the tensors differs")?;
    }
    let (count, tensors) = (counted(differences.len(), "difference"), counted(same, "tensor"));
    output.line(format!("step {} and step {}: {count}, {tensors} the same", args.one, args.other))?;
    let listed: Vec<Value> = differences
        .iter()
        .map(|found| json!({"group": found.group, "tensor": found.tensor, "difference": found.difference.describe()}))
        .collect();
    output.object(&json!({
        "directory": args.directory.to_string_lossy(), "step": args.one, "other": args.other, "differences": listed, "same": same,
        "structure_differs": structure,
    }))?;
    Ok(if differences.is_empty() && !structure { Outcome::Fine } else { Outcome::Fault })
}

fn prune(args: &PruneArgs, output: &Output) -> Result<Outcome> {
    let checkpoints = checkpoints(&args.directory, PathPolicy::Auto)?;
    let keep = usize::try_from(args.keep).unwrap_or(usize::MAX);
    let pruned = checkpoints.prune(Retention { keep: Some(keep), keep_every: args.keep_every }, args.dry_run)?;
    let verb = if args.dry_run { "would remove" } else { "removed" };
    for step in &pruned.removed {
        output.line(format!("{verb} step {step}"))?;
    }
    output.line(format!("{verb} {}", counted(pruned.removed.len(), "checkpoint")))?;
    let warnings = warned(&pruned.warnings, output);
    output.object(&json!({
        "directory": args.directory.to_string_lossy(), "removed": pruned.removed, "dry_run": args.dry_run, "warnings": warnings,
    }))?;
    Ok(if warnings.is_empty() { Outcome::Fine } else { Outcome::Fault })
}

fn recover(args: &DirectoryArgs, output: &Output) -> Result<Outcome> {
    let checkpoints = checkpoints(&args.directory, PathPolicy::Auto)?;
    // A lock would be made even where there is nothing to recover.
    checkpoints.steps()?;
    let recovered = checkpoints.recover()?;
    for name in &recovered.removed {
        output.line(format!("removed {}", safe(name)))?;
    }
    for step in &recovered.settled {
        output.line(format!("step {step}: the replacement is in place"))?;
    }
    if recovered.removed.is_empty() && recovered.settled.is_empty() && recovered.warnings.is_empty() {
        output.line("nothing is left over")?;
    }
    let warnings = warned(&recovered.warnings, output);
    output.object(&json!({
        "directory": args.directory.to_string_lossy(), "removed": recovered.removed, "settled": recovered.settled,
        "warnings": warnings,
    }))?;
    Ok(if warnings.is_empty() { Outcome::Fine } else { Outcome::Fault })
}

/// Says what could not be done, and gives it for JSON.
fn warned(warnings: &[Error], output: &Output) -> Vec<String> {
    warnings.iter().for_each(|warning| output.warn(safe(&warning.to_string())));
    warnings.iter().map(Error::to_string).collect()
}

/// Seconds since 1970 as a date and a time, in UTC.
fn utc(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years always have as many days; what remains is counted out.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year:04}-{month:02}-{:02} {:02}:{:02}:{:02} UTC", days + 1, rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (1_798_761_599, "2026-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), expected);
        }
        assert!(utc(u64::MAX).ends_with("UTC"), "a manifest may say anything");
    }
}
