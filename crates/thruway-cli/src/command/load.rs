//! `thruway load`: a model into memory, and how it went.

use std::time::Instant;

use serde_json::{Map, Value, json};
use thruway::{ByteSize, LoadOptions, Result, Session};

use super::describe_device;
use crate::args::LoadArgs;
use crate::escape::{safe, safe_path};
use crate::output::{Outcome, Output, counted, receipt_fields, remark_notes};

pub(super) fn run(args: &LoadArgs, output: &Output) -> Result<Outcome> {
    let session = Session::builder().device(args.device).path(args.path).build()?;
    let begun = Instant::now();
    let model = session.open(&args.model)?;
    let open_seconds = begun.elapsed().as_secs_f64();
    remark_notes(output, &args.model, model.notes());
    let bar = output.bar("loading", model.bytes());
    let mut options = LoadOptions::all();
    if let Some(progress) = bar.progress() {
        options = options.progress(progress);
    }
    let (tensors, receipt) = model.load(options)?;
    drop(bar);
    let mut digests: Vec<(&str, String)> = Vec::new();
    if args.digest {
        let names = tensors.iter().map(thruway::Tensor::name);
        digests = names.zip(tensors.digests()?).map(|(name, digest)| (name, digest.to_string())).collect();
        digests.sort_unstable();
    }

    let why = describe_device(args.device, session.device());
    output.line(format!("{}, {}, to {} ({why})", counted(tensors.len(), "tensor"), ByteSize(model.bytes()), session.device()))?;
    output.line(&receipt)?;
    output.line(format!("opened {} in {open_seconds:.3} s", counted(model.files().len(), "file")))?;
    for (name, digest) in &digests {
        output.line(format!("{digest}  {}", safe(name)))?;
    }
    let mut object = receipt_fields(&receipt);
    object.insert("path".to_owned(), args.model.to_string_lossy().into());
    object.insert("tensors".to_owned(), tensors.len().into());
    object.insert("open_seconds".to_owned(), open_seconds.into());
    object.insert("device".to_owned(), session.device().to_string().into());
    object.insert("device_reason".to_owned(), why.into());
    object.insert("notes".to_owned(), json!(model.notes()));
    if args.digest {
        let digests: Map<String, Value> = digests.into_iter().map(|(name, digest)| (name.to_owned(), digest.into())).collect();
        object.insert("digests".to_owned(), digests.into());
    }
    output.object(&object.into())?;
    if model.bytes() == 0 {
        output.remark(format!("note: {} holds no byte of data", safe_path(&args.model)));
    }
    Ok(Outcome::Fine)
}
