//! `thruway bench`: the machine's limits, and Thruway on each path beside them.

mod child;
mod profile;

use std::ffi::OsString;
use std::path::{Path as FilePath, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};
use thruway::storage::{Namespace, OsNamespace};
use thruway::transfer::verify::{Digest, digests};
use thruway::{
    ByteSize, Direction, ErrorKind, Extent, FileRef, HostBuffer, LoadOptions, Move, Path, PathPolicy, Receipt, Result,
    SaveOptions, Session, TransferOptions,
};

use super::demo::limit_table;
use crate::args::BenchArgs;
use crate::link;
use crate::machine::Machine;
use crate::measure::{self, Effort, Limit, limit, median, to_usize};
use crate::output::{Outcome, Output, gb_per_s, table};
use crate::roofline::{Roof, bound, roofline};
use crate::scratch::{BY_DIR, Scratch, ensure_disk, ensure_memory};
use crate::synthetic::Synthetic;

/// Beside the bytes of models on disk: their headers.
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
    /// The limits that its bytes meet on their way; the lowest bounds it.
    met: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Save,
    /// Into memory that was never touched, as applications load.
    Load,
    /// As the first thing that a process does: the ring and the threads are made on the way.
    LoadInNewProcess,
    /// Into memory that was touched: the mechanism without the kernel's clearing of fresh pages.
    TransferWarm,
}

const STAGED: PathPolicy = PathPolicy::Require(Path::Staged);
const CACHED: PathPolicy = PathPolicy::Require(Path::Cached);
const AUTO: PathPolicy = PathPolicy::Auto;
const READ: &[&str] = &[limit::READ];
const FRESH: &[&str] = &[limit::CACHE_ALL_FRESH];
const WARM: &[&str] = &[limit::CACHE_ALL_WARM];
const READ_TO_GPU: &[&str] = &[limit::READ, limit::TO_GPU];
const WARM_TO_GPU: &[&str] = &[limit::CACHE_ALL_SMALL, limit::TO_GPU];

const fn case(name: &'static str, work: Work, policy: PathPolicy, cache: Cache, met: &'static [&'static str]) -> Case {
    Case { name, work, policy, cache, met }
}

/// To and from host memory. Saving comes first: the others read what it leaves.
const HOST_CASES: [Case; 8] = [
    case("save, synced, auto", Work::Save, AUTO, Cache::Cold, &[limit::WRITE]),
    case("load, cold file, auto", Work::Load, AUTO, Cache::Cold, READ),
    case("load, cold file, staged", Work::Load, STAGED, Cache::Cold, READ),
    case("load, cold file, cached", Work::Load, CACHED, Cache::Cold, READ),
    case("load, warm file, auto", Work::Load, AUTO, Cache::Warm, FRESH),
    case("load, warm file, cached", Work::Load, CACHED, Cache::Warm, FRESH),
    case("transfer, warm file, cached, warm memory", Work::TransferWarm, CACHED, Cache::Warm, WARM),
    case("transfer, cold file, auto, warm memory", Work::TransferWarm, AUTO, Cache::Cold, READ),
];

/// To and from a GPU's memory, likewise.
const GPU_CASES: [Case; 5] = [
    case("save from the GPU, synced, auto", Work::Save, AUTO, Cache::Cold, &[limit::WRITE, limit::FROM_GPU]),
    case("first load of a process, cold file, auto", Work::LoadInNewProcess, AUTO, Cache::Cold, READ_TO_GPU),
    case("load, cold file, staged", Work::Load, STAGED, Cache::Cold, READ_TO_GPU),
    case("first load of a process, warm file, auto", Work::LoadInNewProcess, AUTO, Cache::Warm, WARM_TO_GPU),
    case("load, warm file, cached", Work::Load, CACHED, Cache::Warm, WARM_TO_GPU),
];

/// One run of a case.
#[derive(Debug)]
struct Run {
    bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
    retries: u64,
    way: Option<Way>,
    /// The pass of the drive's limit that was measured right before.
    pass: Option<usize>,
}

/// The path that most bytes took, its engine and the reason.
#[derive(Clone, Debug)]
struct Way {
    path: String,
    engine: String,
    reason: String,
}

impl Run {
    fn new(seconds: f64, receipt: &Receipt) -> Self {
        let part = receipt.files.iter().flat_map(|file| &file.parts).max_by_key(|part| part.bytes);
        let way = part.map(|part| Way {
            path: part.path.to_string(),
            engine: part.engine.to_string(),
            reason: part.reason.to_string(),
        });
        Self { bytes: receipt.bytes, seconds, cpu_seconds: receipt.cpu_seconds, retries: receipt.retries, way, pass: None }
    }
}

/// What came of a case.
#[derive(Debug)]
struct Measured {
    case: Case,
    bytes: u64,
    /// The runs, or why there is none.
    runs: Result<Vec<Run>, String>,
}

impl Measured {
    fn median(&self, figure: impl Fn(&Run) -> f64) -> Option<f64> {
        Some(median(&self.runs.as_ref().ok()?.iter().map(figure).collect::<Vec<f64>>()))
    }

    fn seconds(&self) -> Option<f64> {
        self.median(|run| run.seconds)
    }

    fn cpu_seconds(&self) -> Option<f64> {
        self.median(|run| run.cpu_seconds)
    }

    fn rate(&self) -> Option<f64> {
        Some(gb_per_s(self.bytes, self.seconds()?))
    }

    /// How near the runs came to the limit that bounds them. A drive's was measured beside each, so then it is the median
    /// of what each run reached of it.
    fn ratio(&self, limits: &[Limit]) -> Option<f64> {
        let (limit, bound) = bound(self.case.met, limits)?;
        let of_pass = |run: &Run| Some(gb_per_s(self.bytes, run.seconds) / limit.of_pass(run.pass?)?);
        let beside: Option<Vec<f64>> = self.runs.as_ref().ok()?.iter().map(of_pass).collect();
        beside.filter(|ratios| !ratios.is_empty()).map(|ratios| median(&ratios)).or_else(|| Some(self.rate()? / bound))
    }

    fn roof(&self, limits: &[Limit]) -> Roof<'_> {
        Roof { name: self.case.name, met: self.case.met, gb_per_s: self.rate(), ratio: self.ratio(limits) }
    }

    fn last(&self) -> Option<&Run> {
        self.runs.as_ref().ok()?.last()
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
    limits: Vec<Limit>,
    output: &'a Output,
    /// What starts this program anew.
    again: &'a [OsString],
}

pub(super) fn run(args: &BenchArgs, output: &Output, again: &[OsString]) -> Result<Outcome> {
    // What is measured is the rules; a profile follows from it.
    let session = Session::builder().device(args.device).profile(None).build()?;
    let begun = args.save_profile.as_deref().map(|path| Ok((path, profile::begin(path, &session)?))).transpose()?;
    let bytes = args.size.bytes();
    ensure_memory(measure::memory_needed(bytes))?;
    // The model, and beside it the file on which the drive's limit is measured.
    ensure_disk(&args.dir, bytes.saturating_mul(2).saturating_add(DISK_BESIDE), BY_DIR)?;
    let scratch = Scratch::new(&args.dir, "bench", false, output)?;
    scratch.reclaim("bench");
    let machine = Machine::examine(scratch.path());
    machine.lines().iter().try_for_each(|line| output.line(crate::escape::safe(line)))?;
    output.line(format!("device   {}\n", crate::place::memory(&session)))?;
    output.flush()?;

    let cases: &[Case] = if session.gpu().is_some() { &GPU_CASES } else { &HOST_CASES };
    let mut bench = Bench::new(session, scratch.path(), args, output, again)?;
    let results = bench.measure_all(cases)?;
    let wrong = bench.check()?;
    let limits = &bench.limits;
    let roofs: Vec<Roof<'_>> = results.iter().map(|result| result.roof(limits)).collect();
    limit_table(limits).into_iter().try_for_each(|line| output.line(line))?;
    output.line("")?;
    result_table(&results, limits).into_iter().try_for_each(|line| output.line(line))?;
    output.line("")?;
    roofline(&roofs, limits).into_iter().try_for_each(|line| output.line(line))?;
    let (session, work) = (&bench.session, (bench.bytes, args.repeat));
    let saved = begun.map(|begun| profile::save(begun, session, scratch.path(), work, output)).transpose()?;
    for name in &wrong {
        output.line(format!("WRONG BYTES: {}", crate::escape::safe(name)))?;
    }
    output.object(&json!({
        "ok": wrong.is_empty(),
        "machine": machine.to_json(),
        "device": bench.session.device().to_string(),
        "device_reason": bench.session.device_reason(),
        "bytes": bench.bytes,
        "repeat": args.repeat,
        "limits": limits.iter().map(Limit::to_json).collect::<Vec<Value>>(),
        "results": results.iter().map(|result| object(result, limits)).collect::<Vec<Value>>(),
        "roofline": roofs.iter().map(|roof| roof.to_json(limits)).collect::<Vec<Value>>(),
        "wrong": wrong,
        "profile": saved,
    }))?;
    Ok(if wrong.is_empty() { Outcome::Fine } else { Outcome::Fault })
}

impl<'a> Bench<'a> {
    /// Measures memory and drive, and then makes the model, which must not be in memory before.
    fn new(session: Session, directory: &FilePath, args: &BenchArgs, output: &'a Output, again: &'a [OsString]) -> Result<Self> {
        output.remark("measuring memory and drive …");
        let mut limits = measure::memory_copy(args.size.bytes(), args.repeat)?;
        let raw = directory.join("limits");
        limits.extend(measure::drive(&raw, args.size.bytes(), Effort::thorough(args.repeat))?);
        OsNamespace.remove(&raw)?;
        if let Some(gpu) = session.gpu() {
            output.remark("measuring the link to the GPU …");
            limits.extend(link::limits(gpu, args.size.bytes(), args.repeat)?);
        }
        let model = Synthetic::new(args.size.bytes())?;
        let tensors = model.tensors()?;
        let slices: Vec<&[u8]> = tensors.iter().map(|(_, bytes)| *bytes).collect();
        let bytes = slices.iter().map(|slice| slice.len() as u64).sum();
        let digests = tensors.iter().map(|(name, _)| (*name).to_owned()).zip(digests(&slices)).collect();
        let model = match session.gpu() {
            Some(gpu) => model.into_gpu(gpu)?,
            None => model,
        };
        let path = directory.join("model.safetensors");
        Ok(Self { session, digests, path, bytes, repeat: args.repeat, limits, output, again, model: Some(model) })
    }

    fn measure_all(&mut self, cases: &[Case]) -> Result<Vec<Measured>> {
        let mut results = Vec::new();
        for case in cases {
            if case.work != Work::Save && self.model.take().is_some() {
                // The loads need its memory.
                self.output.remark("measuring the page cache …");
                self.limits.extend(measure::page_cache(&self.path, self.repeat)?);
            }
            results.push(self.measure(*case)?);
        }
        Ok(results)
    }

    fn measure(&mut self, case: Case) -> Result<Measured> {
        self.output.remark(format!("measuring: {} …", case.name));
        if case.work == Work::Load && self.session.gpu().is_some() {
            // So that none of the runs is the first of this process.
            self.once(case)?.ok();
        }
        let mut runs = Ok(Vec::new());
        for _ in 0..self.repeat {
            let pass = self.measure_limit_again(case)?;
            match (self.once(case)?, &mut runs) {
                (Ok(run), Ok(runs)) => runs.push(Run { pass, ..run }),
                (Err(reason), _) => {
                    runs = Err(reason);
                    break;
                }
                (Ok(_), Err(_)) => {}
            }
        }
        let bytes = runs.iter().flatten().map(|run: &Run| run.bytes).fold(self.bytes, u64::max);
        Ok(Measured { case, bytes, runs })
    }

    /// Drives are not equally fast at all times, so their limit is measured again beside each run that it bounds. Gives the
    /// number of the pass.
    fn measure_limit_again(&mut self, case: Case) -> Result<Option<usize>> {
        let mut pass = None;
        for limit in self.limits.iter_mut().filter(|limit| case.met.contains(&limit.name)) {
            match limit.name {
                limit::READ => pass = measure::read_again(limit, &self.path)?,
                limit::WRITE => pass = measure::write_again(limit, &self.path.with_extension("limit"), self.bytes)?,
                _ => {}
            }
        }
        Ok(pass)
    }

    /// One run. The inner `Err` says why this case cannot be had here.
    fn once(&self, case: Case) -> Result<Result<Run, String>> {
        crate::stop::check()?;
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
            Work::LoadInNewProcess => child::load(self.again, &self.path, self.session.device(), case.policy),
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

    fn save(&self, policy: PathPolicy) -> Result<Run> {
        let sources = self.model.as_ref().map_or_else(|| Ok(Vec::new()), Synthetic::sources)?;
        let begun = Instant::now();
        let receipt =
            self.session.save(&sources, &self.path, SaveOptions::default().cancel(crate::stop::cancel()).path(policy))?;
        Ok(Run::new(begun.elapsed().as_secs_f64(), &receipt))
    }

    fn load(&self, policy: PathPolicy) -> Result<Run> {
        let begun = Instant::now();
        let (tensors, receipt) =
            self.session.open(&self.path)?.load(LoadOptions::all().cancel(crate::stop::cancel()).path(policy))?;
        let seconds = begun.elapsed().as_secs_f64();
        drop(tensors);
        Ok(Run::new(seconds, &receipt))
    }

    /// The whole file by one move.
    fn transfer(&self, policy: PathPolicy) -> Result<Run> {
        let length = OsNamespace.metadata(&self.path)?.length;
        let mut buffer = HostBuffer::new(to_usize(length))?;
        buffer.bytes_mut()?.fill(1);
        let region = buffer.region(0..buffer.len())?;
        let file = FileRef::new(&self.path);
        let moves = vec![Move { file, extent: Extent::new(0, length), region, direction: Direction::Read }];
        let begun = Instant::now();
        let receipt = self
            .session
            .transfer(moves, &TransferOptions { policy, cancel: crate::stop::cancel(), ..TransferOptions::default() })?;
        Ok(Run::new(begun.elapsed().as_secs_f64(), &receipt))
    }

    /// The tensors that come back other than they were saved, on any path that there is.
    fn check(&self) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for policy in [PathPolicy::Auto, STAGED, CACHED] {
            let model = self.session.open(&self.path)?;
            let tensors = match model.load(LoadOptions::all().cancel(crate::stop::cancel()).path(policy)) {
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
        let way = match (&result.runs, result.last().and_then(|run| run.way.as_ref())) {
            (Err(reason), _) => reason.clone(),
            (_, Some(way)) => format!("{} ({})", way.path, way.engine),
            (_, None) => String::new(),
        };
        let bound = bound(result.case.met, limits);
        let limit = bound.map_or("–", |(limit, _)| limit.name).to_owned();
        let ratio = result.ratio(limits);
        let name = result.case.name.to_owned();
        rows.push(vec![name, figure(result.rate()), figure(result.cpu_seconds()), figure(ratio), limit, way]);
    }
    rows.push(vec![format!("({} a run)", ByteSize(results.first().map_or(0, |result| result.bytes)))]);
    table(&rows, &[1, 2, 3])
}

fn object(result: &Measured, limits: &[Limit]) -> Value {
    let run = result.last();
    let way = run.and_then(|run| run.way.as_ref());
    let bound = bound(result.case.met, limits);
    json!({
        "name": result.case.name,
        "bytes": result.bytes,
        "available": result.runs.is_ok(),
        "seconds": result.seconds(),
        "gb_per_s": result.rate(),
        "runs_seconds": result.runs.iter().flatten().map(|run| run.seconds).collect::<Vec<f64>>(),
        "cpu_seconds": result.cpu_seconds(),
        "retries": run.map(|run| run.retries),
        "path": way.map(|way| &way.path),
        "engine": way.map(|way| &way.engine),
        "reason": result.runs.as_ref().err().or(way.map(|way| &way.reason)),
        "limit": bound.map(|(limit, _)| limit.name),
        "ratio": result.ratio(limits),
    })
}
