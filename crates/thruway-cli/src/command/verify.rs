//! `thruway verify`: every byte read, and compared.

use std::time::Instant;

use serde_json::{Value, json};
use thruway::{ByteSize, Device, Result, Session, VerifyOptions};

use crate::args::VerifyArgs;
use crate::escape::{safe, safe_path};
use crate::output::{Outcome, Output, counted, receipt_fields, remark_notes};
use crate::{place, stop};

pub(super) fn run(args: &VerifyArgs, output: &Output) -> Result<Outcome> {
    // The bytes pass through the host, so a GPU is left alone.
    let session = Session::builder().device(Device::Host).path(args.path).build()?;
    let begun = Instant::now();
    let model = place::open(&session, &args.model)?;
    remark_notes(output, &args.model, model.notes());
    let other = args.against.as_ref().map(|path| place::open(&session, path)).transpose()?;
    if let (Some(path), Some(other)) = (&args.against, &other) {
        remark_notes(output, path, other.notes());
    }
    let bar = output.bar("verifying", model.bytes() + other.as_ref().map_or(0, thruway::Model::bytes));
    let mut options = VerifyOptions::default().cancel(stop::cancel());
    if let Some(progress) = bar.progress() {
        options = options.progress(progress);
    }
    let verdict = model.verify(other.as_ref(), &options)?;
    drop(bar);
    let ok = verdict.differences.is_empty();

    for (tensor, difference) in &verdict.differences {
        output.line(format!("{} {}", safe(tensor), difference.describe()))?;
    }
    let what = format!("{}, {}", counted(model.entries().len(), "tensor"), ByteSize(model.bytes()));
    output.line(match (&args.against, verdict.differences.len()) {
        (None, _) => format!("{what}: every byte can be read"),
        (Some(other), 0) => format!("{what}: the same as {}", safe_path(other)),
        (Some(other), count) => format!("{what}: {} from {}", counted(count, "difference"), safe_path(other)),
    })?;
    output.line(format!("read {}", verdict.receipt))?;
    let mut object = receipt_fields(&verdict.receipt);
    let differences: Vec<Value> = verdict
        .differences
        .iter()
        .map(|(tensor, difference)| json!({"tensor": tensor, "difference": difference.describe()}))
        .collect();
    object.insert("ok".to_owned(), ok.into());
    object.insert("path".to_owned(), args.model.to_string_lossy().into());
    object.insert("against".to_owned(), json!(args.against.as_ref().map(|path| path.to_string_lossy())));
    object.insert("tensors".to_owned(), model.entries().len().into());
    // The receipt counts the other model's bytes too.
    object.insert("bytes_read".to_owned(), verdict.receipt.bytes.into());
    object.insert("bytes".to_owned(), model.bytes().into());
    object.insert("differences".to_owned(), differences.into());
    object.insert("elapsed_seconds".to_owned(), begun.elapsed().as_secs_f64().into());
    object.insert("notes".to_owned(), json!(model.notes()));
    output.object(&object)?;
    Ok(if ok { Outcome::Fine } else { Outcome::Fault })
}
