//! `thruway demo`: the main job end to end. A model is saved, read back every way that there is, checked byte by byte,
//! and each figure stands beside the machine's limit, measured in the same run.

use std::collections::BTreeMap;
use std::path::{Path as FilePath, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use thruway::storage::ensure_host_bytes;
use thruway::transfer::verify::{Digest, digests};
use thruway::{
    ByteSize, Error, ErrorKind, LoadOptions, Path, PathPolicy, Receipt, Result, SaveOptions, Session, Source, Tensors,
};

use crate::args::DemoArgs;
use crate::escape::{safe, safe_path};
use crate::link;
use crate::measure::{self, Effort, Limit, limit};
use crate::output::{Outcome, Output, counted, gb_per_s, receipt_fields, table};
use crate::roofline::bound;
use crate::scratch::{BY_DIR, Scratch, ensure_disk};
use crate::synthetic::Synthetic;

/// The scratch file on which the drive's limits are measured is not larger than this.
const LIMIT_BYTES_MAX: u64 = 1 << 30;
/// Beside the model on disk: its header.
const DISK_BESIDE: u64 = 16 << 20;

/// What was saved: enough to check what is read back, without its bytes.
struct Saved {
    path: PathBuf,
    origin: String,
    bytes: u64,
    digests: BTreeMap<String, Digest>,
    receipt: Receipt,
    seconds: f64,
}

/// What was measured.
struct Figures {
    ways: Vec<Way>,
    limits: Vec<Limit>,
    /// Whether the page cache can let go of the file, so that a load may find it cold.
    can_be_cold: bool,
}

/// One way of reading the model back.
struct Way {
    name: &'static str,
    policy: PathPolicy,
    result: Result<Loaded, String>,
}

struct Loaded {
    receipt: Receipt,
    seconds: f64,
    /// Tensors that are missing, too many or different.
    wrong: Vec<String>,
}

pub(super) fn run(args: &DemoArgs, output: &Output) -> Result<Outcome> {
    let session = Session::builder().device(args.device).build()?;
    let given = args.model.as_ref().map(|path| crate::place::open(&session, path)).transpose()?;
    let bytes = given.as_ref().map_or(args.size.bytes(), thruway::Model::bytes);
    ensure_host_bytes(measure::memory_needed(bytes))?;
    ensure_disk(&args.dir, bytes.saturating_add(bytes.min(LIMIT_BYTES_MAX)).saturating_add(DISK_BESIDE), BY_DIR)?;
    let scratch = Scratch::new(&args.dir, "demo", args.keep, output)?;
    output.line(format!("device   {}", crate::place::memory(&session)))?;
    output.flush()?;

    let target = scratch.path().join("model.safetensors");
    let saved = match &given {
        Some(model) => save_given(&session, model, &target, output)?,
        None => save_synthetic(&session, bytes, &target, output)?,
    };
    output.line(format!("model    {}, {}", counted(saved.digests.len(), "tensor"), saved.origin))?;
    output.line(format!("saved    {}\n         {}", safe_path(&saved.path), indented(&saved.receipt)))?;
    output.flush()?;
    let Figures { ways, limits, can_be_cold } = measure_ways(&session, &saved, &scratch, output)?;
    print_comparison(&session, &saved, &ways, &limits, output)?;
    let wrong = ways.iter().any(|way| way.result.as_ref().is_ok_and(|loaded| !loaded.wrong.is_empty()));
    let verdict = verdict(&session, &saved, &ways, can_be_cold);
    output.line(format!("\n{verdict}"))?;
    if args.keep {
        output.line(format!("kept: {}", safe_path(scratch.path())))?;
    }
    output.object(&json!({
        "ok": !wrong,
        "verdict": verdict,
        "device": session.device().to_string(),
        "device_reason": session.device_reason(),
        "model": {"origin": saved.origin, "tensors": saved.digests.len(), "bytes": saved.bytes, "file": saved.path.to_string_lossy()},
        "kept": args.keep,
        "save": row_object(&saved.receipt, saved.seconds, saved.bytes, limit_of_save(&session, &limits)),
        "loads": ways.iter().map(|way| way_object(&session, way, saved.bytes, &limits)).collect::<Vec<Value>>(),
        "limits": limits.iter().map(Limit::to_json).collect::<Vec<Value>>(),
    }))?;
    Ok(if wrong { Outcome::Fault } else { Outcome::Fine })
}

fn save_synthetic(session: &Session, bytes: u64, target: &FilePath, output: &Output) -> Result<Saved> {
    output.remark(format!("making a model of {} …", ByteSize(bytes)));
    let model = Synthetic::new(bytes)?;
    let tensors = model.tensors()?;
    let slices: Vec<&[u8]> = tensors.iter().map(|(_, bytes)| *bytes).collect();
    let names = tensors.iter().map(|(name, _)| (*name).to_owned());
    let digests = names.zip(digests(&slices)).collect();
    let total: u64 = slices.iter().map(|slice| slice.len() as u64).sum();
    let origin = format!("{} of pseudo-random bytes in the sizes of a llama-like model", ByteSize(total));
    let model = match session.gpu() {
        Some(gpu) => model.into_gpu(gpu)?,
        None => model,
    };
    save(session, &model.sources()?, target, Described { origin, digests, bytes: total }, output)
}

fn save_given(session: &Session, model: &thruway::Model, target: &FilePath, output: &Output) -> Result<Saved> {
    let bar = output.bar("loading", model.bytes());
    let options = bar.progress().into_iter().fold(LoadOptions::all().cancel(crate::stop::cancel()), LoadOptions::progress);
    let (tensors, _) = model.load(options)?;
    drop(bar);
    let sources = tensors
        .iter()
        .map(|tensor| Ok(Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region()?)))
        .collect::<Result<Vec<Source>>>()?;
    let digests = tensors.iter().map(|tensor| tensor.name().to_owned()).zip(tensors.digests()?).collect();
    let origin = format!("{} from {}", ByteSize(model.bytes()), safe_path(model.path()));
    save(session, &sources, target, Described { origin, digests, bytes: model.bytes() }, output)
}

/// A model in words and digests.
struct Described {
    origin: String,
    digests: BTreeMap<String, Digest>,
    bytes: u64,
}

fn save(session: &Session, sources: &[Source], target: &FilePath, model: Described, output: &Output) -> Result<Saved> {
    let bar = output.bar("saving", model.bytes);
    let options = bar.progress().into_iter().fold(SaveOptions::default().cancel(crate::stop::cancel()), SaveOptions::progress);
    let begun = Instant::now();
    let receipt = session.save(sources, target, options)?;
    let Described { origin, digests, bytes } = model;
    Ok(Saved { path: target.to_owned(), origin, bytes, digests, receipt, seconds: begun.elapsed().as_secs_f64() })
}

/// Reads the model back every way, and measures the machine's limits beside it.
fn measure_ways(session: &Session, saved: &Saved, scratch: &Scratch<'_>, output: &Output) -> Result<Figures> {
    let mut ways = vec![load(session, saved, "as it is found", PathPolicy::Auto, output)?];
    let mut limits = measure::memory_copy(saved.bytes, Effort::QUICK.repeat)?;
    // This brings the file into the page cache, where the next way wants it.
    limits.extend(measure::page_cache(&saved.path, Effort::QUICK.repeat)?);
    ways.push(load(session, saved, "page cache, warm", PathPolicy::Require(Path::Cached), output)?);
    let chilled = measure::chill(&saved.path)?;
    if let Err(reason) = chilled {
        output.remark(format!("note: {reason}"));
    }
    ways.push(load(session, saved, "past the page cache", PathPolicy::Require(Path::Staged), output)?);
    output.remark("measuring the drive …");
    let file = scratch.path().join("limits");
    limits.extend(measure::drive(&file, saved.bytes.min(LIMIT_BYTES_MAX), Effort::QUICK)?);
    if let Some(gpu) = session.gpu() {
        output.remark("measuring the link to the GPU …");
        limits.extend(link::limits(gpu, saved.bytes, Effort::QUICK.repeat)?);
    }
    // The directory would be removed anyway; the model may be kept, and this not.
    std::fs::remove_file(&file).map_err(|error| Error::from_io("cannot remove", error).with_file(&file))?;
    Ok(Figures { ways, limits, can_be_cold: chilled.is_ok() })
}

fn load(session: &Session, saved: &Saved, name: &'static str, policy: PathPolicy, output: &Output) -> Result<Way> {
    let model = session.open(&saved.path)?;
    let bar = output.bar("loading", saved.bytes);
    let options =
        bar.progress().into_iter().fold(LoadOptions::all().cancel(crate::stop::cancel()).path(policy), LoadOptions::progress);
    let begun = Instant::now();
    let loaded = model.load(options);
    let seconds = begun.elapsed().as_secs_f64();
    drop(bar);
    let result = match loaded {
        Ok((tensors, receipt)) => Ok(Loaded { wrong: wrong_tensors(&tensors, saved)?, receipt, seconds }),
        Err(error) if matches!(error.kind(), ErrorKind::PathUnavailable | ErrorKind::Unsupported) => {
            Err(error.message().to_owned())
        }
        Err(error) => return Err(error),
    };
    let told = match &result {
        Ok(loaded) => indented(&loaded.receipt),
        Err(reason) => format!("not possible: {reason}"),
    };
    output.line(format!("loaded   {name}\n         {told}"))?;
    if let Ok(loaded) = &result {
        for name in &loaded.wrong {
            output.line(format!("         WRONG: {}", safe(name)))?;
        }
    }
    output.flush()?;
    Ok(Way { name, policy, result })
}

fn wrong_tensors(tensors: &Tensors, saved: &Saved) -> Result<Vec<String>> {
    let found: BTreeMap<&str, Digest> = tensors.iter().map(thruway::Tensor::name).zip(tensors.digests()?).collect();
    let missing_or_different = saved.digests.iter().filter(|(name, digest)| found.get(name.as_str()) != Some(digest));
    let mut wrong: Vec<String> = missing_or_different.map(|(name, _)| name.clone()).collect();
    wrong.extend(found.keys().filter(|name| !saved.digests.contains_key(**name)).map(|name| (*name).to_owned()));
    Ok(wrong)
}

/// The limit that a save is held against.
fn limit_of_save<'a>(session: &Session, limits: &'a [Limit]) -> Option<&'a Limit> {
    let met: &[&str] = if session.gpu().is_some() { &[limit::WRITE, limit::FROM_GPU] } else { &[limit::WRITE] };
    bound(met, limits).map(|(limit, _)| limit)
}

/// The limit that a way of loading is held against: the lowest on the path that most bytes took.
fn limit_for<'a>(session: &Session, receipt: &Receipt, limits: &'a [Limit]) -> Option<&'a Limit> {
    let through_cache = receipt.bytes_by(Path::Cached) * 2 > receipt.bytes;
    let met: &[&str] = match (through_cache, session.gpu().is_some()) {
        (true, true) => &[limit::CACHE_ALL_SMALL, limit::TO_GPU],
        (true, false) => &[limit::CACHE_ALL_FRESH],
        (false, true) => &[limit::READ, limit::TO_GPU],
        (false, false) => &[limit::READ],
    };
    bound(met, limits).map(|(limit, _)| limit)
}

fn ratio(rate: f64, limit: Option<&Limit>) -> Option<f64> {
    let limit = limit?.rate.as_ref().ok()?.gb_per_s;
    (limit > 0.0).then(|| rate / limit)
}

fn print_comparison(session: &Session, saved: &Saved, ways: &[Way], limits: &[Limit], output: &Output) -> Result<()> {
    let mut rows = vec![["THRUWAY", "GB/s", "CPU s", "RATIO", "TO THE LIMIT"].map(str::to_owned).to_vec()];
    let mut row = |name: String, receipt: &Receipt, seconds: f64, limit: Option<&Limit>| {
        let rate = gb_per_s(saved.bytes, seconds);
        let ratio = ratio(rate, limit).map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
        let limit = limit.map_or("", |limit| limit.name).to_owned();
        rows.push(vec![name, format!("{rate:.2}"), format!("{:.2}", receipt.cpu_seconds), ratio, limit]);
    };
    row("save, synced".to_owned(), &saved.receipt, saved.seconds, limit_of_save(session, limits));
    for way in ways {
        if let Ok(loaded) = &way.result {
            row(format!("load, {}", way.name), &loaded.receipt, loaded.seconds, limit_for(session, &loaded.receipt, limits));
        }
    }
    output.line("")?;
    table(&rows, &[1, 2, 3]).into_iter().try_for_each(|line| output.line(line))?;
    output.line("")?;
    limit_table(limits).into_iter().try_for_each(|line| output.line(line))
}

/// The limits for people.
pub(super) fn limit_table(limits: &[Limit]) -> Vec<String> {
    let mut rows = vec![["LIMIT OF THIS MACHINE", "GB/s", "HOW"].map(str::to_owned).to_vec()];
    for limit in limits {
        let (rate, how) = match &limit.rate {
            Ok(rate) => (format!("{:.2}", rate.gb_per_s), rate.how.clone()),
            Err(reason) => ("–".to_owned(), reason.clone()),
        };
        rows.push(vec![limit.name.to_owned(), rate, how]);
    }
    table(&rows, &[1])
}

/// One sentence: whether all bytes are right, and which path loads will take.
fn verdict(session: &Session, saved: &Saved, ways: &[Way], can_be_cold: bool) -> String {
    let done: Vec<&Loaded> = ways.iter().filter_map(|way| way.result.as_ref().ok()).collect();
    let wrong: usize = done.iter().map(|loaded| loaded.wrong.len()).sum();
    let bytes = if wrong == 0 {
        format!("All {} are right, read back {} ways", ByteSize(saved.bytes), done.len())
    } else {
        format!("WRONG BYTES: {} came back wrong", counted(wrong, "tensor"))
    };
    let past_cache = ways.iter().any(|way| way.policy == PathPolicy::Require(Path::Staged) && way.result.is_ok());
    let path = match (past_cache && can_be_cold, session.gpu().is_some()) {
        (true, true) => {
            "loads here go past the page cache and through pinned memory to the GPU (staged), and copy from the page cache \
             through pinned memory (cached) what it already holds"
        }
        (true, false) => {
            "loads here go past the page cache straight into memory (plain), and copy from it (cached) what it already holds"
        }
        (false, true) => "loads here go through the page cache and pinned memory to the GPU (cached)",
        (false, false) => "loads here go through the page cache (cached)",
    };
    format!("{bytes}; {path}.")
}

fn row_object(receipt: &Receipt, seconds: f64, bytes: u64, limit: Option<&Limit>) -> Value {
    let mut object = receipt_fields(receipt);
    let ratio = ratio(gb_per_s(bytes, seconds), limit);
    object.insert("elapsed_seconds".to_owned(), seconds.into());
    object.insert("limit".to_owned(), json!(limit.map(|limit| limit.name)));
    object.insert("ratio".to_owned(), json!(ratio));
    object.into()
}

fn way_object(session: &Session, way: &Way, bytes: u64, limits: &[Limit]) -> Value {
    let mut object = match &way.result {
        Ok(loaded) => row_object(&loaded.receipt, loaded.seconds, bytes, limit_for(session, &loaded.receipt, limits)),
        Err(_) => json!({}),
    };
    let required = match way.policy {
        PathPolicy::Auto => "auto",
        PathPolicy::Require(path) => path.as_str(),
    };
    object["way"] = way.name.into();
    object["policy"] = required.into();
    object["available"] = way.result.is_ok().into();
    object["reason"] = json!(way.result.as_ref().err());
    object["wrong"] = json!(way.result.as_ref().map_or(&[][..], |loaded| &loaded.wrong));
    object
}

fn indented(receipt: &Receipt) -> String {
    receipt.to_string().replace('\n', "\n         ")
}
