//! `thruway verify-direct`: scratch bytes written and read by every path that there is, and whether any of them went directly.
//!
//! The doctor says what is expected. This moves bytes, compares every one of them, and reads in the receipts which way
//! they went. *Proven* means that a receipt says `direct` of all of them, which it does on evidence alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thruway::storage::probe::{Prober, Unseen};
use thruway::transfer::verify::{Digest, digests};
use thruway::{ByteSize, Error, ErrorKind, LoadOptions, Path, PathPolicy, Receipt, Result, SaveOptions, Session};

use crate::args::VerifyDirectArgs;
use crate::escape::{safe, safe_path};
use crate::facts::as_text;
use crate::measure;
use crate::output::{Outcome, Output, gb_per_s, receipt_fields, table};
use crate::scratch::{Scratch, ensure_disk, ensure_memory};
use crate::stop;
use crate::synthetic::Synthetic;

/// In the names of its directories.
const PURPOSE: &str = "verify";
/// How long the place may take to answer at all.
const PATIENCE: Duration = Duration::from_secs(5);
/// Beside the bytes on disk: the header.
const DISK_BESIDE: u64 = 16 << 20;
/// The paths that are tried, and what each is called.
const WAYS: [(&str, PathPolicy); 4] = [
    ("auto", PathPolicy::Auto),
    ("direct", PathPolicy::Require(Path::Direct)),
    ("staged", PathPolicy::Require(Path::Staged)),
    ("cached", PathPolicy::Require(Path::Cached)),
];

/// One direction of one way.
struct Moved {
    receipt: Receipt,
    seconds: f64,
}

/// How one way went.
struct Way {
    name: &'static str,
    /// The write and the read, or why the way is not to be had.
    result: Result<(Moved, Moved), String>,
    /// Tensors whose bytes came back different.
    wrong: Vec<String>,
}

impl Way {
    /// Whether every byte went directly, both ways.
    fn is_direct(&self) -> bool {
        let all_direct = |moved: &Moved| moved.receipt.bytes > 0 && moved.receipt.bytes_by(Path::Direct) == moved.receipt.bytes;
        self.wrong.is_empty() && self.result.as_ref().is_ok_and(|(write, read)| all_direct(write) && all_direct(read))
    }
}

pub(super) fn run(args: &VerifyDirectArgs, output: &Output) -> Result<Outcome> {
    let directory = directory(&args.path)?;
    let session = Session::builder().device(args.device).build()?;
    let bytes = args.size.bytes();
    ensure_memory(measure::memory_needed(bytes))?;
    ensure_disk(&directory, bytes.saturating_add(DISK_BESIDE), "another PATH")?;
    let model = Synthetic::new(bytes)?;
    let tensors = model.tensors()?;
    let slices: Vec<&[u8]> = tensors.iter().map(|(_, bytes)| *bytes).collect();
    let expected: BTreeMap<String, Digest> = tensors.iter().map(|(name, _)| (*name).to_owned()).zip(digests(&slices)).collect();
    let model = match session.gpu() {
        Some(gpu) => model.into_gpu(gpu)?,
        None => model,
    };
    // Removed when this ends, however it ends.
    let scratch = Scratch::new(&directory, PURPOSE, false, output)?;
    scratch.reclaim(PURPOSE);
    output.line(format!("device  {}", crate::place::memory(&session)))?;
    let mut ways = Vec::new();
    for (name, policy) in WAYS {
        stop::check()?;
        ways.push(attempt(&session, &model, &expected, &scratch, (name, policy))?);
    }
    drop(scratch);
    report(args, &ways, output)
}

/// The directory to work in. A place that does not answer is told in bounded time.
fn directory(path: &std::path::Path) -> Result<PathBuf> {
    let error = match Prober::new(PATIENCE).place(path) {
        Ok(place) if place.contains("\nkind directory\n") => return Ok(path.to_owned()),
        Ok(place) if !place.contains("\nkind special\n") => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            return Ok(parent.unwrap_or(std::path::Path::new(".")).to_owned());
        }
        Ok(_) => Error::new(ErrorKind::InvalidInput, "this is neither a directory nor a file"),
        Err(Unseen::Absent) => Error::new(ErrorKind::NotFound, "there is nothing of this name"),
        Err(Unseen::Denied) => Error::new(ErrorKind::PermissionDenied, "this user may not look at it"),
        Err(Unseen::Silent(patience)) => {
            let message = format!("it does not answer within {} s: a dead drive or server", patience.as_secs());
            let hint = "see `thruway doctor` of the same PATH, or name another PATH";
            return Err(Error::new(ErrorKind::Io, message).with_file(path).with_hint(hint));
        }
        Err(Unseen::Failed(why)) => Error::new(ErrorKind::Io, format!("it cannot be looked at: {}", safe(&why))),
    };
    Err(error.with_file(path).with_hint("name a directory on the storage in question as PATH"))
}

fn attempt(
    session: &Session,
    model: &Synthetic,
    expected: &BTreeMap<String, Digest>,
    scratch: &Scratch<'_>,
    (name, policy): (&'static str, PathPolicy),
) -> Result<Way> {
    let file = scratch.path().join(format!("{name}.safetensors"));
    let result = there_and_back(session, model, &file, policy);
    let (result, wrong) = match result {
        Ok((write, read, found)) => {
            let wrong = expected.iter().filter(|(name, digest)| found.get(*name) != Some(digest)).map(|(name, _)| name.clone());
            let wrong = wrong.collect();
            std::fs::remove_file(&file).map_err(|error| Error::from_io("cannot remove", error).with_file(&file))?;
            (Ok((write, read)), wrong)
        }
        Err(error) if matches!(error.kind(), ErrorKind::PathUnavailable | ErrorKind::Unsupported) => {
            (Err(error.message().to_owned()), Vec::new())
        }
        Err(error) => return Err(error),
    };
    Ok(Way { name, result, wrong })
}

type ThereAndBack = (Moved, Moved, BTreeMap<String, Digest>);

fn there_and_back(session: &Session, model: &Synthetic, file: &std::path::Path, policy: PathPolicy) -> Result<ThereAndBack> {
    let begun = Instant::now();
    let receipt = session.save(&model.sources()?, file, SaveOptions::default().path(policy).cancel(stop::cancel()))?;
    let write = Moved { receipt, seconds: begun.elapsed().as_secs_f64() };
    // What was just written may lie in the page cache, where `auto` would find it.
    if matches!(policy, PathPolicy::Auto) {
        let _as_cold_as_the_kernel_allows = measure::chill(file)?;
    }
    let begun = Instant::now();
    let (tensors, receipt) = session.open(file)?.load(LoadOptions::all().path(policy).cancel(stop::cancel()))?;
    let read = Moved { receipt, seconds: begun.elapsed().as_secs_f64() };
    let found = tensors.iter().map(|tensor| tensor.name().to_owned()).zip(tensors.digests()?).collect();
    Ok((write, read, found))
}

fn report(args: &VerifyDirectArgs, ways: &[Way], output: &Output) -> Result<Outcome> {
    let proven = ways.iter().any(Way::is_direct);
    let differs = ways.iter().any(|way| !way.wrong.is_empty());
    print(ways, output)?;
    let reason = ways.iter().find(|way| way.name == "direct").and_then(|way| way.result.as_ref().err());
    let place = safe_path(&args.path);
    let verdict = match (differs, proven, reason) {
        (true, ..) => format!("{place}: bytes came back different: do not trust this storage or this path"),
        (_, true, _) => format!("{place}: the direct path is proven: {} went that way, both ways", ByteSize(args.size.bytes())),
        (_, _, Some(reason)) => format!("{place}: no direct path is proven: {}", safe(reason)),
        _ => format!("{place}: no direct path is proven: the receipts name other ways"),
    };
    output.line(format!("\n{verdict}"))?;
    let objects: Vec<Value> = ways.iter().map(object).collect();
    output.object(&json!({
        "path": as_text(&args.path), "bytes": args.size.bytes(), "proven": proven, "ok": !differs,
        "verdict": verdict, "ways": objects,
    }))?;
    Ok(match (differs, proven) {
        (true, _) => Outcome::Fault,
        (_, true) => Outcome::Fine,
        _ => Outcome::Slower,
    })
}

fn print(ways: &[Way], output: &Output) -> Result<()> {
    let mut rows = vec![["ASKED FOR", "WRITE GB/s", "READ GB/s", "BYTES", "READ BY"].map(str::to_owned).to_vec()];
    for way in ways {
        rows.push(match &way.result {
            Ok((write, read)) => {
                let rate = |moved: &Moved| format!("{:.2}", gb_per_s(moved.receipt.bytes, moved.seconds));
                let same = if way.wrong.is_empty() { "the same" } else { "DIFFERENT" };
                let parts = read.receipt.files.iter().flat_map(|file| &file.parts);
                let mut taken: Vec<&str> = parts.map(|part| part.path.as_str()).collect();
                taken.sort_unstable();
                taken.dedup();
                vec![way.name.to_owned(), rate(write), rate(read), same.to_owned(), taken.join(" + ")]
            }
            Err(reason) => vec![way.name.to_owned(), "–".to_owned(), "–".to_owned(), "–".to_owned(), safe(reason)],
        });
    }
    for line in table(&rows, &[1, 2]) {
        output.line(line)?;
    }
    Ok(())
}

fn object(way: &Way) -> Value {
    let moved = |moved: &Moved| {
        let mut fields = receipt_fields(&moved.receipt);
        fields.insert("elapsed_seconds".to_owned(), moved.seconds.into());
        fields
    };
    match &way.result {
        Ok((write, read)) => json!({"asked_for": way.name, "write": moved(write), "read": moved(read), "wrong": way.wrong}),
        Err(reason) => json!({"asked_for": way.name, "unavailable": reason}),
    }
}
