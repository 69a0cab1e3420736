//! The facts of this machine or of a captured one, for the commands that diagnose.

use std::path::{Path, PathBuf};

use thruway::base::settings::CUDA_LIBRARY;
use thruway::doctor::captured_paths;
use thruway::doctor::facts::{Capture, Facts, Live, Tree};
use thruway::storage::Staging;
use thruway::{Error, ErrorKind, Result};

use crate::place::publish_as;

/// The longest capture that is read.
const CAPTURE_BYTES_MAX: u64 = 64 << 20;

/// This machine.
pub(crate) fn live() -> Live {
    Live::new(std::env::var_os(CUDA_LIBRARY).map(PathBuf::from))
}

/// Another machine, whose facts lie in a file or a directory, and the places that they were captured for.
pub(crate) fn captured(from: &Path) -> Result<(Box<dyn Facts>, Vec<String>)> {
    let failed = |error| Error::from_io("cannot read the capture", error).with_file(from);
    let metadata = std::fs::metadata(from).map_err(failed)?;
    if metadata.is_dir() {
        return Ok((Box::new(Tree::new(from)?), vec!["/".to_owned()]));
    }
    if !metadata.is_file() || metadata.len() > CAPTURE_BYTES_MAX {
        return Err(Error::new(ErrorKind::InvalidInput, "this is no capture: it is no regular file, or too long").with_file(from));
    }
    let text = std::fs::read(from).map_err(failed)?;
    let capture = Capture::parse(&String::from_utf8_lossy(&text)).map_err(|error| error.with_file(from))?;
    let paths = captured_paths(&capture);
    Ok((Box::new(capture), paths))
}

/// Paths as they are seen from the root, so that mounts can be told apart. Nothing is looked at.
pub(crate) fn absolute(paths: &[PathBuf]) -> Result<Vec<String>> {
    let one = |path: &PathBuf| {
        let absolute = std::path::absolute(path).map_err(|error| Error::from_io("cannot name", error).with_file(path))?;
        Ok(absolute.to_string_lossy().into_owned())
    };
    paths.iter().map(one).collect()
}

/// Writes all of a file that is not there yet, or nothing.
pub(crate) fn write_new(file: &Path, text: &str) -> Result<()> {
    if std::fs::symlink_metadata(file).is_ok() {
        let error = Error::new(ErrorKind::AlreadyExists, "there is something of this name already").with_file(file);
        return Err(error.with_hint("name another file, or remove this one first"));
    }
    publish_as(file, text.as_bytes(), |_| Ok(()), Staging::publish_new)
}
