//! The facts of this machine or of a captured one, for the commands that diagnose.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thruway::base::settings::CUDA_LIBRARY;
use thruway::doctor::captured_paths;
use thruway::doctor::facts::{Capture, Facts, Kind, Live, Question, Tree, Unseen};
use thruway::storage::Staging;
use thruway::storage::probe::{self, Prober, text_of};
use thruway::{Error, ErrorKind, Result};

use crate::escape::safe;
use crate::place::publish_as;

/// The longest capture that is read.
const CAPTURE_BYTES_MAX: usize = 64 << 20;
/// How long that may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// The hidden command that does all looks in a process of its own, so that this one can always end.
pub(crate) const HELPER: &str = "look-for-parent";

/// Has all looks done by this program, which `again` starts.
pub(crate) fn look_through(again: &[OsString]) {
    if !again.is_empty() {
        probe::look_through(again.iter().cloned().chain([HELPER.into()]).collect());
    }
}

/// This machine.
pub(crate) fn live() -> Live {
    Live::new(std::env::var_os(CUDA_LIBRARY).map(PathBuf::from))
}

/// Another machine, whose facts lie in a file or a directory, and the places that they were captured for.
pub(crate) fn captured(from: &Path) -> Result<(Box<dyn Facts>, Vec<String>)> {
    let failed = |kind, why: &str| Err(Error::new(kind, format!("cannot read the capture: {why}")).with_file(from));
    let prober = Prober::new(PATIENCE);
    let text = match prober.place(from) {
        Ok(place) if place.contains("kind directory\n") => return Ok((Box::new(Tree::new(from)?), vec!["/".to_owned()])),
        // Read even if it is no regular file: that tells what it is.
        Ok(_) => prober.read(from, CAPTURE_BYTES_MAX),
        Err(unseen) => Err(unseen),
    };
    let text = match text {
        Ok(text) => text,
        Err(Unseen::Absent) => return failed(ErrorKind::NotFound, "there is no such file"),
        Err(Unseen::Denied) => return failed(ErrorKind::PermissionDenied, "this user may not read it"),
        Err(Unseen::Silent(_)) => return failed(ErrorKind::Io, "it does not answer"),
        Err(Unseen::Failed(why)) => return failed(ErrorKind::InvalidInput, &why),
    };
    let capture = Capture::parse(&String::from_utf8_lossy(&text)).map_err(|error| error.with_file(from))?;
    let paths = captured_paths(&capture);
    Ok((Box::new(capture), paths))
}

/// The places of a capture that are asked about: those that were named, or all. What it was not made for it cannot tell.
pub(crate) fn chosen(from: &Path, paths: &[PathBuf], captured: Vec<String>) -> Result<Vec<String>> {
    let named: Vec<String> = paths.iter().map(as_text).collect();
    if named.is_empty() {
        return Ok(captured);
    }
    match named.iter().find(|path| !from.is_dir() && !captured.contains(path)) {
        Some(strange) => {
            let error = Error::new(ErrorKind::NotFound, format!("the capture was not made for {}", safe(strange)));
            Err(error.with_file(from).with_hint(format!("it was made for {}", safe(&captured.join(", ")))))
        }
        None => Ok(named),
    }
}

/// Paths as they are seen from the root, so that mounts can be told apart. Nothing is looked at.
pub(crate) fn absolute(paths: &[PathBuf]) -> Result<Vec<String>> {
    let one = |path: &PathBuf| {
        let absolute = std::path::absolute(path).map_err(|error| Error::from_io("cannot name", error).with_file(path))?;
        Ok(as_text(&absolute))
    };
    paths.iter().map(one).collect()
}

/// The path as text from which it can be had again.
pub(crate) fn as_text(path: impl AsRef<Path>) -> String {
    text_of(path.as_ref().as_os_str().as_bytes())
}

/// Writes all of a file that is not there yet, or nothing.
pub(crate) fn write_new(file: &Path, text: &str) -> Result<()> {
    let directory = absolute(&[file.to_owned()])?.concat();
    let directory = directory.rsplit_once('/').map_or("/", |(directory, _)| directory);
    if matches!(live().look(&Question::new(Kind::Place, directory)), Err(Unseen::Silent(_))) {
        return Err(Error::new(ErrorKind::Io, "cannot write the file: its directory does not answer").with_file(file));
    }
    if std::fs::symlink_metadata(file).is_ok() {
        let error = Error::new(ErrorKind::AlreadyExists, "there is something of this name already").with_file(file);
        return Err(error.with_hint("name another file, or remove this one first"));
    }
    publish_as(file, text.as_bytes(), |_| Ok(()), Staging::publish_new)
}
