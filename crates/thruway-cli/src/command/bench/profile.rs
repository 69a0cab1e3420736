//! `--save-profile`: the rate of each path between the GPU and a filesystem, for the choice between them.

use std::path::Path as FilePath;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use thruway::io::profile::{Machine, Measurement, PROFILE_BYTES_MAX, Profile, Rate, SizeClass};
use thruway::storage::{Access, Buffering, Namespace, OsNamespace, read_text};
use thruway::{Direction, Error, ErrorKind, LoadOptions, Path, PathPolicy, Receipt, Result, SaveOptions, Session, Tensors};

use super::{AUTO, CACHED, STAGED};
use crate::escape::{safe, safe_path};
use crate::measure::{self, median};
use crate::output::{Output, table};
use crate::stop;
use crate::synthetic::Synthetic;

/// The paths, and the policy by which a transfer takes each if it can: with the file not in the page cache, `auto` goes directly
/// wherever a drive reaches the GPU. (A required direct path would be proven anew each time, which small transfers would feel.)
const WAYS: [(Path, PathPolicy); 3] = [(Path::Direct, AUTO), (Path::Staged, STAGED), (Path::Cached, CACHED)];

/// The profile to add to: what stands in the file, or nothing yet.
///
/// # Errors
/// [`Malformed`](ErrorKind::Malformed) for a file that is something else, which is not written over.
pub(super) fn begin(path: &FilePath, session: &Session) -> Result<Profile> {
    if session.gpu().is_none() {
        let message = "a profile is of the ways to a GPU, and this machine has none that can be used";
        return Err(
            Error::new(ErrorKind::Unsupported, message).with_hint("leave --save-profile out, or name a GPU with --device")
        );
    }
    match read_text(&OsNamespace, path, PROFILE_BYTES_MAX) {
        Ok(text) => Profile::parse(&text)
            .map_err(|error| error.with_file(path).with_hint("name another file: what stands there is not written over")),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Profile::default()),
        Err(error) => Err(error),
    }
}

/// Measures, and writes the profile. Gives what was found, in JSON.
///
/// # Errors
/// What the transfers report, and storage.
pub(super) fn save(
    (path, mut profile): (&FilePath, Profile),
    session: &Session,
    directory: &FilePath,
    (bytes_max, repeat): (u64, u32),
    output: &Output,
) -> Result<Value> {
    let Some(gpu) = session.gpu() else { return Ok(Value::Null) };
    let model = directory.join("profile.safetensors");
    let mut rates = Vec::new();
    for size in SizeClass::ALL.into_iter().filter(|size| *size == SizeClass::Small || size.bytes() <= bytes_max) {
        output.remark(format!("measuring for the profile: {size} at a time …"));
        let sources = Synthetic::new(size.bytes())?.into_gpu(gpu)?;
        let mut add = |direction, path, rate: Option<f64>| {
            rates.extend(rate.map(|gb_per_s| Rate { direction, size, path, gb_per_s }));
        };
        for (path, policy) in WAYS {
            add(Direction::Write, path, rate(path, repeat, &mut || write(session, &sources, &model, policy))?);
        }
        for (path, policy) in WAYS {
            let mut tensors = Tensors::default();
            add(Direction::Read, path, rate(path, repeat, &mut || read(session, &mut tensors, &model, policy))?);
        }
    }
    let filesystem = OsNamespace.open(&model, Access::Read, Buffering::PageCache)?.filesystem().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the filesystem has nothing by which a profile would know it again").with_file(&model)
    })?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let measured_unix_s = since.map_or(0, |since| since.as_secs());
    profile.put(Measurement { machine: Machine::of(gpu)?, filesystem, measured_unix_s, rates: rates.clone() });
    crate::place::publish(path, &profile.to_json())?;
    tell(path, &rates, output)?;
    Ok(json!({"file": path.to_string_lossy(), "rates": rates}))
}

/// The middle rate of some transfers that go this way; `None` where they do not.
fn rate(path: Path, repeat: u32, transfer: &mut dyn FnMut() -> Result<Option<Receipt>>) -> Result<Option<f64>> {
    let mut found = Vec::new();
    // The first makes what the others find.
    for number in 0..=repeat {
        stop::check()?;
        let receipt = match transfer() {
            Ok(Some(receipt)) => receipt,
            Ok(None) => return Ok(None),
            Err(error) if matches!(error.kind(), ErrorKind::PathUnavailable | ErrorKind::Unsupported) => return Ok(None),
            Err(error) => return Err(error),
        };
        let unproven = if path == Path::Direct { receipt.bytes_by(Path::Unverified) } else { 0 };
        if (receipt.bytes_by(path) + unproven) * 2 <= receipt.bytes {
            return Ok(None);
        }
        if number > 0 {
            found.push(receipt.gb_per_s());
        }
    }
    Ok(Some(median(&found)).filter(|rate| *rate > 0.0))
}

/// Saves a model, durably, as a new file.
fn write(session: &Session, model: &Synthetic, path: &FilePath, policy: PathPolicy) -> Result<Option<Receipt>> {
    match OsNamespace.remove(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    session.save(&model.sources()?, path, SaveOptions::default().path(policy).cancel(stop::cancel())).map(Some)
}

/// Loads the model into the memory of the load before: past the page cache, or out of it; `None` where the file cannot be had so.
fn read(session: &Session, tensors: &mut Tensors, path: &FilePath, policy: PathPolicy) -> Result<Option<Receipt>> {
    if policy == CACHED {
        measure::warm(path)?;
    } else if measure::chill(path)?.is_err() {
        return Ok(None);
    }
    let options = LoadOptions::all().path(policy).reusing(std::mem::take(tensors)).cancel(stop::cancel());
    let (loaded, receipt) = session.open(path)?.load(options)?;
    *tensors = loaded;
    Ok(Some(receipt))
}

fn tell(path: &FilePath, rates: &[Rate], output: &Output) -> Result<()> {
    let mut rows = vec![["PROFILE", "AT A TIME", "PATH", "GB/s"].map(str::to_owned).to_vec()];
    for Rate { direction, size, path, gb_per_s } in rates {
        let direction = if *direction == Direction::Read { "read" } else { "write" };
        rows.push(vec![direction.to_owned(), size.to_string(), path.to_string(), format!("{gb_per_s:.2}")]);
    }
    output.line("")?;
    table(&rows, &[3]).into_iter().try_for_each(|line| output.line(safe(&line)))?;
    output.line(format!("wrote {}", safe_path(path)))
}
