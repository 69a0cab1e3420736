//! `thruway bench`: the machine's limits, and Thruway on each path beside them.

use std::path::{Path as FilePath, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use thruway::storage::{Namespace, OsNamespace, ensure_host_bytes};
use thruway::transfer::verify::{Digest, digests};
use thruway::{
    ByteSize, Direction, ErrorKind, Extent, FileRef, HostBuffer, LoadOptions, Move, Path, PathPolicy, Receipt, Result,
    SaveOptions, Session, TransferOptions,
};

use super::demo::limit_table;
use crate::args::BenchArgs;
use crate::machine::Machine;
use crate::measure::{self, Effort, Limit, median, to_usize};
use crate::output::{Outcome, Output, gb_per_s, table};
use crate::scratch::{Scratch, ensure_disk};
use crate::synthetic::Synthetic;

/// Beside one model's bytes on disk: its header.
const DISK_BESIDE: u64 = 16 << 20;

/// Whether the page cache holds the file when a load begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cache {
    Cold,
    Warm,
}

/// Something to measure.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    work: Work,
    policy: PathPolicy,
    cache: Cache,
    limit: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Save,
    /// Into memory that was never touched, as applications load.
    Load,
    /// Into memory that was touched: the mechanism without the kernel's clearing of fresh pages.
    TransferWarm,
}

const READ: &str = "O_DIRECT read, best";
const WRITE: &str = "O_DIRECT write, best";
const FRESH: &str = "page cache read, all threads, fresh memory";
const WARM: &str = "page cache read, all threads, warm memory";
const STAGED: PathPolicy = PathPolicy::Require(Path::Staged);
const CACHED: PathPolicy = PathPolicy::Require(Path::Cached);

const fn case(name: &'static str, work: Work, policy: PathPolicy, cache: Cache, limit: &'static str) -> Case {
    Case { name, work, policy, cache, limit }
}

/// Saving comes first: the others read what it leaves.
const CASES: [Case; 8] = [
    case("save, synced, auto", Work::Save, PathPolicy::Auto, Cache::Cold, WRITE),
    case("load, cold file, auto", Work::Load, PathPolicy::Auto, Cache::Cold, READ),
    case("load, cold file, staged", Work::Load, STAGED, Cache::Cold, READ),
    case("load, cold file, cached", Work::Load, CACHED, Cache::Cold, READ),
    case("load, warm file, auto", Work::Load, PathPolicy::Auto, Cache::Warm, FRESH),
    case("load, warm file, cached", Work::Load, CACHED, Cache::Warm, FRESH),
    case("transfer, warm file, cached, warm memory", Work::TransferWarm, CACHED, Cache::Warm, WARM),
    case("transfer, cold file, auto, warm memory", Work::TransferWarm, PathPolicy::Auto, Cache::Cold, READ),
];

/// What came of a case.
#[derive(Debug)]
struct Measured {
    case: Case,
    bytes: u64,
    /// Seconds of each run, or why there is none.
    runs: Result<Vec<f64>, String>,
    /// CPU seconds of each run.
    cpu_runs: Vec<f64>,
    /// Of the last run.
    receipt: Receipt,
}

impl Measured {
    fn seconds(&self) -> Option<f64> {
        Some(median(self.runs.as_ref().ok()?))
    }

    fn cpu_seconds(&self) -> Option<f64> {
        self.runs.is_ok().then(|| median(&self.cpu_runs))
    }

    fn rate(&self) -> Option<f64> {
        Some(gb_per_s(self.bytes, self.seconds()?))
    }

    fn ratio(&self, limits: &[Limit]) -> Option<f64> {
        let limit = limits.iter().find(|limit| limit.name == self.case.limit)?.rate.as_ref().ok()?.gb_per_s;
        (limit > 0.0).then_some(self.rate()? / limit)
    }

    /// The path that most bytes took, its engine and the reason.
    fn way(&self) -> Option<(&'static str, &'static str, String)> {
        let part = self.receipt.files.iter().flat_map(|file| &file.parts).max_by_key(|part| part.bytes)?;
        Some((part.path.as_str(), part.engine.as_str(), part.reason.to_string()))
    }
}

/// What the cases work on.
struct Bench<'a> {
    session: Session,
    model: Option<Synthetic>,
    digests: Vec<(String, Digest)>,
    path: PathBuf,
    bytes: u64,
    repeat: u32,
    output: &'a Output,
}

pub(super) fn run(args: &BenchArgs, output: &Output) -> Result<Outcome> {
    let bytes = args.size.bytes();
    let session = Session::builder().build()?;
    ensure_host_bytes(measure::memory_needed(bytes))?;
    ensure_disk(&args.dir, bytes.saturating_add(DISK_BESIDE))?;
    let scratch = Scratch::new(&args.dir, "bench", false, output)?;
    let machine = Machine::examine(scratch.path());
    machine.lines().iter().try_for_each(|line| output.line(crate::escape::safe(line)))?;
    output.line(format!("device   {}\n", super::describe_device(thruway::Device::Auto, session.device())))?;
    output.flush()?;

    output.remark("measuring memory and drive …");
    let mut limits = measure::memory_copy(bytes, args.repeat)?;
    let raw = scratch.path().join("limits");
    limits.extend(measure::drive(&raw, bytes, Effort::thorough(args.repeat))?);
    OsNamespace.remove(&raw)?;
    let mut bench = Bench::new(session, scratch.path(), args, output)?;
    let mut results = vec![bench.measure(CASES[0])?];
    // The loads need its memory.
    bench.model = None;
    output.remark("measuring the page cache …");
    limits.extend(measure::page_cache(&bench.path, args.repeat)?);
    for case in &CASES[1..] {
        results.push(bench.measure(*case)?);
    }
    let wrong = bench.check()?;

    limit_table(&limits).into_iter().try_for_each(|line| output.line(line))?;
    output.line("")?;
    result_table(&results, &limits).into_iter().try_for_each(|line| output.line(line))?;
    for name in &wrong {
        output.line(format!("WRONG BYTES: {}", crate::escape::safe(name)))?;
    }
    output.object(&json!({
        "ok": wrong.is_empty(),
        "machine": machine.to_json(),
        "device": bench.session.device().to_string(),
        "bytes": bench.bytes,
        "repeat": args.repeat,
        "limits": limits.iter().map(Limit::to_json).collect::<Vec<Value>>(),
        "results": results.iter().map(|result| object(result, &limits)).collect::<Vec<Value>>(),
        "wrong": wrong,
    }))?;
    Ok(if wrong.is_empty() { Outcome::Fine } else { Outcome::Fault })
}

impl<'a> Bench<'a> {
    fn new(session: Session, directory: &FilePath, args: &BenchArgs, output: &'a Output) -> Result<Self> {
        let model = Synthetic::new(args.size.bytes())?;
        let tensors = model.tensors()?;
        let slices: Vec<&[u8]> = tensors.iter().map(|(_, bytes)| *bytes).collect();
        let bytes = slices.iter().map(|slice| slice.len() as u64).sum();
        let digests = tensors.iter().map(|(name, _)| (*name).to_owned()).zip(digests(&slices)).collect();
        let path = directory.join("model.safetensors");
        Ok(Self { session, digests, path, bytes, repeat: args.repeat, output, model: Some(model) })
    }

    fn measure(&mut self, case: Case) -> Result<Measured> {
        self.output.remark(format!("measuring: {} …", case.name));
        let mut measured =
            Measured { case, bytes: self.bytes, runs: Ok(Vec::new()), cpu_runs: Vec::new(), receipt: Receipt::default() };
        for _ in 0..self.repeat {
            match self.once(case)? {
                Ok((seconds, receipt)) => {
                    measured.bytes = receipt.bytes.max(self.bytes);
                    measured.cpu_runs.push(receipt.cpu_seconds);
                    measured.receipt = receipt;
                    if let Ok(runs) = &mut measured.runs {
                        runs.push(seconds);
                    }
                }
                Err(reason) => {
                    measured.runs = Err(reason);
                    break;
                }
            }
        }
        Ok(measured)
    }

    /// One run. The inner `Err` says why this case cannot be had here.
    fn once(&self, case: Case) -> Result<Result<(f64, Receipt), String>> {
        let prepared = match (case.work, case.cache) {
            (Work::Save, _) => self.remove_saved().map(Ok)?,
            (_, Cache::Cold) => measure::chill(&self.path)?,
            (_, Cache::Warm) => measure::warm(&self.path).map(Ok)?,
        };
        if let Err(reason) = prepared {
            return Ok(Err(format!("no cold file to be had: {reason}")));
        }
        let done = match case.work {
            Work::Save => self.save(case.policy),
            Work::Load => self.load(case.policy),
            Work::TransferWarm => self.transfer(case.policy),
        };
        match done {
            Ok(done) => Ok(Ok(done)),
            Err(error) if matches!(error.kind(), ErrorKind::PathUnavailable | ErrorKind::Unsupported) => {
                Ok(Err(error.message().to_owned()))
            }
            Err(error) => Err(error),
        }
    }

    /// Every save writes a new file into free space.
    fn remove_saved(&self) -> Result<()> {
        match OsNamespace.remove(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn save(&self, policy: PathPolicy) -> Result<(f64, Receipt)> {
        let sources = self.model.as_ref().map_or_else(|| Ok(Vec::new()), Synthetic::sources)?;
        let begun = Instant::now();
        let receipt = self.session.save(&sources, &self.path, SaveOptions::default().path(policy))?;
        Ok((begun.elapsed().as_secs_f64(), receipt))
    }

    fn load(&self, policy: PathPolicy) -> Result<(f64, Receipt)> {
        let model = self.session.open(&self.path)?;
        let begun = Instant::now();
        let (tensors, receipt) = model.load(LoadOptions::all().path(policy))?;
        let seconds = begun.elapsed().as_secs_f64();
        drop(tensors);
        Ok((seconds, receipt))
    }

    /// The whole file by one move.
    fn transfer(&self, policy: PathPolicy) -> Result<(f64, Receipt)> {
        let length = OsNamespace.metadata(&self.path)?.length;
        let mut buffer = HostBuffer::new(to_usize(length))?;
        buffer.bytes_mut()?.fill(1);
        let region = buffer.region(0..buffer.len())?;
        let file = FileRef::new(&self.path);
        let moves = vec![Move { file, extent: Extent::new(0, length), region, direction: Direction::Read }];
        let begun = Instant::now();
        let receipt = self.session.transfer(moves, &TransferOptions { policy, ..TransferOptions::default() })?;
        Ok((begun.elapsed().as_secs_f64(), receipt))
    }

    /// The tensors that come back other than they were saved, on any path that there is.
    fn check(&self) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for policy in [PathPolicy::Auto, STAGED, CACHED] {
            let model = self.session.open(&self.path)?;
            let tensors = match model.load(LoadOptions::all().path(policy)) {
                Ok((tensors, _)) => tensors,
                Err(error) if error.kind() == ErrorKind::PathUnavailable => continue,
                Err(error) => return Err(error),
            };
            let found: std::collections::HashMap<&str, Digest> =
                tensors.iter().map(thruway::Tensor::name).zip(tensors.digests()?).collect();
            let different = self.digests.iter().filter(|(name, digest)| found.get(name.as_str()) != Some(digest));
            wrong.extend(different.map(|(name, _)| name.clone()));
        }
        Ok(wrong)
    }
}

fn result_table(results: &[Measured], limits: &[Limit]) -> Vec<String> {
    let mut rows = vec![["THRUWAY", "GB/s", "CPU s", "RATIO", "TO THE LIMIT", "PATH"].map(str::to_owned).to_vec()];
    for result in results {
        let figure = |figure: Option<f64>| figure.map_or_else(|| "–".to_owned(), |figure| format!("{figure:.2}"));
        let cpu = result.cpu_seconds();
        let way = match (&result.runs, result.way()) {
            (Err(reason), _) => reason.clone(),
            (_, Some((path, engine, _))) => format!("{path} ({engine})"),
            (_, None) => String::new(),
        };
        let (name, limit) = (result.case.name.to_owned(), result.case.limit.to_owned());
        rows.push(vec![name, figure(result.rate()), figure(cpu), figure(result.ratio(limits)), limit, way]);
    }
    rows.push(vec![format!("({} a run)", ByteSize(results.first().map_or(0, |result| result.bytes)))]);
    table(&rows, &[1, 2, 3])
}

fn object(result: &Measured, limits: &[Limit]) -> Value {
    let way = result.way();
    let reason = match (&result.runs, &way) {
        (Err(reason), _) => Some(reason),
        (_, Some((.., reason))) => Some(reason),
        _ => None,
    };
    json!({
        "name": result.case.name,
        "bytes": result.bytes,
        "available": result.runs.is_ok(),
        "seconds": result.seconds(),
        "gb_per_s": result.rate(),
        "runs_seconds": result.runs.clone().unwrap_or_default(),
        "cpu_seconds": result.cpu_seconds(),
        "retries": result.receipt.retries,
        "path": way.as_ref().map(|(path, ..)| path),
        "engine": way.as_ref().map(|(_, engine, _)| engine),
        "reason": reason,
        "limit": result.case.limit,
        "ratio": result.ratio(limits),
    })
}
