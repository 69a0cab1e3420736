//! `thruway explain`: which path a load would take, file by file, and why.

use serde_json::json;
use thruway::{ByteSize, LoadOptions, Result};

use crate::args::ExplainArgs;
use crate::escape::safe_lines;
use crate::output::{Outcome, Output, counted, files_object, remark_notes};

pub(super) fn run(args: &ExplainArgs, output: &Output) -> Result<Outcome> {
    let session = crate::place::session(args.device, args.path, args.profile.as_ref())?;
    let model = crate::place::open(&session, &args.model)?;
    remark_notes(output, &args.model, model.notes());
    let explanation = model.explain(LoadOptions::all())?;
    let (count, bytes) = (counted(model.entries().len(), "tensor"), ByteSize(explanation.bytes()));
    output.line(format!("{count}, {bytes}, would go to {}", crate::place::memory(&session)))?;
    output.line(safe_lines(&explanation.to_string()))?;
    output.object(&json!({
        "path": args.model.to_string_lossy(),
        "tensors": model.entries().len(),
        "bytes": explanation.bytes(),
        "device": session.device().to_string(),
        "device_reason": session.device_reason(),
        "files": files_object(&explanation.files),
        "notes": model.notes(),
    }))?;
    Ok(Outcome::Fine)
}
