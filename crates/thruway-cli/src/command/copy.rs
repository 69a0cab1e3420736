//! `thruway copy`: a model laid out for fast loading, published at once.

use std::time::Instant;

use serde_json::json;
use thruway::{ByteSize, CopyOptions, Device, Result, Session};

use crate::args::CopyArgs;
use crate::escape::safe_path;
use crate::output::{Outcome, Output, counted, gb_per_s, receipt_fields, remark_notes};

pub(super) fn run(args: &CopyArgs, output: &Output) -> Result<Outcome> {
    // The bytes pass through the host, so a GPU is left alone.
    let session = Session::builder().device(Device::Host).path(args.path).build()?;
    let begun = Instant::now();
    let model = session.open(&args.source)?;
    remark_notes(output, &args.source, model.notes());
    let bar = output.bar("copying", model.bytes());
    let mut options = CopyOptions::default();
    if let Some(size) = args.max_shard_size {
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
        "notes": model.notes(),
    }))?;
    Ok(Outcome::Fine)
}
