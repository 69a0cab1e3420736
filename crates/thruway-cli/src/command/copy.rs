//! `thruway copy`: a model laid out for fast loading, published at once.

use std::time::Instant;

use serde_json::json;
use thruway::{ByteSize, CopyOptions, Error, ErrorKind, Model, Result, Session};

use crate::args::CopyArgs;
use crate::escape::{safe, safe_path};
use crate::output::{Outcome, Output, counted, gb_per_s, receipt_fields, remark_notes};
use crate::{place, stop};

pub(super) fn run(args: &CopyArgs, output: &Output) -> Result<Outcome> {
    let session = Session::builder().device(args.device).path(args.path).build()?;
    let begun = Instant::now();
    let model = place::open(&session, &args.source)?;
    remark_notes(output, &args.source, model.notes());
    let shard_size = shard_size(args, &model)?;
    if let Some(size) = args.max_shard_size {
        for entry in model.entries().iter().filter(|entry| entry.extent.length > size.bytes()) {
            let bytes = ByteSize(entry.extent.length);
            output.remark(format!("note: {} has {bytes}, more than {size}, and gets a shard of its own", safe(&entry.name)));
        }
    }
    let bar = output.bar("copying", model.bytes());
    let mut options = CopyOptions::default().cancel(stop::cancel()).stripes(args.stripe.iter().cloned());
    if let Some(size) = shard_size {
        options = options.max_shard_size(size);
    }
    if let Some(progress) = bar.progress() {
        options = options.progress(progress);
    }
    let (read, written) = model.copy_to(&args.target, options)?;
    drop(bar);
    let seconds = begun.elapsed().as_secs_f64();
    let rate = gb_per_s(model.bytes(), seconds);
    let files = written.files.len();

    output.line(format!(
        "{}, {}, to {} in {seconds:.3} s: {rate:.2} GB/s",
        counted(model.entries().len(), "tensor"),
        ByteSize(model.bytes()),
        safe_path(&args.target)
    ))?;
    output.line(format!("read {read}"))?;
    output.line(format!("wrote {}, {written}", counted(files, "file")))?;
    output.object(&json!({
        "source": args.source.to_string_lossy(),
        "target": args.target.to_string_lossy(),
        "tensors": model.entries().len(),
        "bytes": model.bytes(),
        "seconds": seconds,
        "gb_per_s": rate,
        "read": receipt_fields(&read),
        "written": receipt_fields(&written),
        "device": session.device().to_string(),
        "ring_bytes": session.ring_bytes(),
        "notes": model.notes(),
    }))?;
    Ok(Outcome::Fine)
}

/// Decides before anything is written whether the target is a file or a directory. A size of shards makes a directory
/// of it; one that no model reaches makes it a directory with one file.
fn shard_size(args: &CopyArgs, model: &Model) -> Result<Option<ByteSize>> {
    if let Some(parent) = args.target.parent() {
        place::ensure_directory(parent)?;
    }
    let is_named_as_directory = args.target.as_os_str().as_encoded_bytes().ends_with(b"/") || args.target.is_dir();
    let is_one_file = args.max_shard_size.is_none() && model.files().len() == 1;
    if is_one_file {
        return Ok(is_named_as_directory.then_some(ByteSize(u64::MAX)));
    }
    if !is_named_as_directory && args.target.extension().is_some_and(|extension| extension == "safetensors") {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "a copy of several files needs a directory, and the target is named as a file",
        )
        .with_file(&args.target)
        .with_hint("name a directory, such as copy/"));
    }
    Ok(args.max_shard_size)
}
