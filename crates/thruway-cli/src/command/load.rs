//! `thruway load`: a model into memory, and how it went.

use std::time::Instant;

use serde_json::{Map, Value, json};
use thruway::{ByteSize, LoadOptions, Model, Receipt, Result, Session, Tensors};

use crate::args::LoadArgs;
use crate::escape::{safe, safe_path};
use crate::machine::PeakMemory;
use crate::output::{Outcome, Output, counted, gb_per_s, receipt_fields, remark_notes};

/// One load of the model, from opening it to the last byte in place.
struct Run {
    receipt: Receipt,
    open_seconds: f64,
    /// Opening and loading.
    elapsed_seconds: f64,
}

impl Run {
    fn object(&self) -> Value {
        json!({
            "seconds": self.receipt.seconds,
            "gb_per_s": self.receipt.gb_per_s(),
            "cpu_seconds": self.receipt.cpu_seconds,
            "open_seconds": self.open_seconds,
            "elapsed_seconds": self.elapsed_seconds,
        })
    }
}

/// What all the loads left.
struct Loaded {
    model: Model,
    tensors: Tensors,
    /// The first load in this process comes first: it makes the ring and starts the threads.
    first: Run,
    later: Vec<Run>,
}

/// What the process needed beside the loads themselves.
struct Needs {
    /// To build the session; with a GPU, CUDA's own start-up.
    startup_seconds: f64,
    /// The most host memory that the loads held at once; `None` where the kernel does not tell.
    peak_host_bytes: Option<u64>,
}

pub(super) fn run(args: &LoadArgs, output: &Output) -> Result<Outcome> {
    let begun = Instant::now();
    let session = crate::place::session(args.device, args.path, args.profile.as_ref())?;
    let startup_seconds = begun.elapsed().as_secs_f64();
    let memory = PeakMemory::begin();
    let loaded = load(&session, args, output)?;
    let needs = Needs { startup_seconds, peak_host_bytes: memory.and_then(|memory| memory.grown()) };
    let mut digests: Vec<(&str, String)> = Vec::new();
    if args.digest {
        let names = loaded.tensors.iter().map(thruway::Tensor::name);
        digests = names.zip(loaded.tensors.digests()?).map(|(name, digest)| (name, digest.to_string())).collect();
        digests.sort_unstable();
    }
    print(&session, &loaded, args.digest, output)?;
    digests.iter().try_for_each(|(name, digest)| output.line(format!("{digest}  {}", safe(name))))?;
    output.object(&object(args, &session, &loaded, &needs, digests))?;
    if loaded.model.bytes() == 0 {
        output.remark(format!("note: {} holds no byte of data", safe_path(&args.model)));
    }
    Ok(Outcome::Fine)
}

fn load(session: &Session, args: &LoadArgs, output: &Output) -> Result<Loaded> {
    let (model, mut tensors, first) = once(session, args, Tensors::default(), output)?;
    remark_notes(output, &args.model, model.notes());
    let mut loaded = Vec::new();
    for _ in 1..args.repeat {
        // A later load fills the memory of the one before.
        let (_, again, run) = once(session, args, std::mem::take(&mut tensors), output)?;
        tensors = again;
        loaded.push(run);
    }
    Ok(Loaded { model, tensors, first, later: loaded })
}

fn once(session: &Session, args: &LoadArgs, before: Tensors, output: &Output) -> Result<(Model, Tensors, Run)> {
    let begun = Instant::now();
    let model = crate::place::open(session, &args.model)?;
    let open_seconds = begun.elapsed().as_secs_f64();
    let bar = output.bar("loading", model.bytes());
    let options = LoadOptions::all().reusing(before).cancel(crate::stop::cancel());
    let options = bar.progress().into_iter().fold(options, LoadOptions::progress);
    let (tensors, receipt) = model.load(options)?;
    let elapsed_seconds = begun.elapsed().as_secs_f64();
    Ok((model, tensors, Run { receipt, open_seconds, elapsed_seconds }))
}

/// How it went. Beside digests, which are to be compared with others, it goes to standard error.
fn print(session: &Session, loaded: &Loaded, beside_digests: bool, output: &Output) -> Result<()> {
    let tell = |line: String| {
        if beside_digests {
            output.remark(line);
            return Ok(());
        }
        output.line(line)
    };
    let Loaded { model, tensors, first, later } = loaded;
    let (count, bytes) = (counted(tensors.len(), "tensor"), ByteSize(model.bytes()));
    tell(format!("{count}, {bytes}, to {}", crate::place::memory(session)))?;
    tell(first.receipt.to_string())?;
    tell(format!("opened {} in {:.3} s", counted(model.files().len(), "file"), first.open_seconds))?;
    for (number, run) in (2..).zip(later) {
        let rate = gb_per_s(model.bytes(), run.elapsed_seconds);
        tell(format!("load {number}: opened and loaded in {:.3} s: {rate:.2} GB/s", run.elapsed_seconds))?;
    }
    Ok(())
}

fn object(args: &LoadArgs, session: &Session, loaded: &Loaded, needs: &Needs, digests: Vec<(&str, String)>) -> Value {
    let Loaded { model, tensors, first, later } = loaded;
    let mut object = receipt_fields(&first.receipt);
    let fields = json!({
        "path": args.model.to_string_lossy(),
        "tensors": tensors.len(),
        "open_seconds": first.open_seconds,
        "elapsed_seconds": first.elapsed_seconds,
        "runs": std::iter::once(first).chain(later).map(Run::object).collect::<Vec<Value>>(),
        "device": session.device().to_string(),
        "device_reason": session.device_reason(),
        "startup_seconds": needs.startup_seconds,
        "ring_bytes": session.ring_bytes(),
        "peak_host_bytes": needs.peak_host_bytes,
        "notes": model.notes(),
    });
    object.extend(fields.as_object().cloned().unwrap_or_default());
    if args.digest {
        let digests: Map<String, Value> = digests.into_iter().map(|(name, digest)| (name.to_owned(), digest.into())).collect();
        object.insert("digests".to_owned(), digests.into());
    }
    object.into()
}
