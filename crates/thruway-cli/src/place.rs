//! Places that the user names, and what to say of one that is not there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thruway::storage::{Namespace, OsNamespace, Staging};
use thruway::{Device, Error, ErrorKind, Model, PathPolicy, Result, Session};

use crate::escape::safe_path;

/// Opens the model at `path`.
///
/// # Errors
/// What [`Session::open`] gives, with a hint where the path looks like the name of something elsewhere.
pub(crate) fn open(session: &Session, path: &Path) -> Result<Model> {
    session.open(path).map_err(|error| {
        if error.kind() == ErrorKind::NotFound && is_elsewhere(path) {
            error.with_hint("Thruway reads local paths: fetch the model first, and name the file or the directory")
        } else {
            error
        }
    })
}

/// Whether it looks like a URL, or like `owner/name` of a hub with no such directory here.
fn is_elsewhere(path: &Path) -> bool {
    let Some(text) = path.to_str() else { return false };
    let mut parts = text.split('/');
    let is_id = match (parts.next(), parts.next(), parts.next()) {
        (Some(owner), Some(name), None) => {
            !owner.is_empty() && !owner.starts_with(['.', '~']) && !name.is_empty() && !name.ends_with(".safetensors")
        }
        _ => false,
    };
    text.contains("://") || (is_id && path.parent().is_some_and(|owner| !owner.exists()))
}

/// Refuses a directory that is not there.
///
/// # Errors
/// [`NotFound`](ErrorKind::NotFound) with its name.
pub(crate) fn ensure_directory(directory: &Path) -> Result<()> {
    if directory.as_os_str().is_empty() || directory.try_exists().unwrap_or(true) {
        return Ok(());
    }
    let message = format!("the directory {} does not exist", safe_path(directory));
    Err(Error::new(ErrorKind::NotFound, message).with_hint("make it first, or name another"))
}

/// A session for loads, with the profile that was named, if one was.
///
/// # Errors
/// What [`SessionBuilder::build`](thruway::SessionBuilder::build) gives.
pub(crate) fn session(device: Device, path: PathPolicy, profile: Option<&PathBuf>) -> Result<Session> {
    let builder = Session::builder().device(device).path(path);
    profile.cloned().into_iter().fold(builder, |builder, profile| builder.profile(Some(profile))).build()
}

/// All of the text in a file of this name, or what was there before.
///
/// # Errors
/// Whatever storage reports.
pub(crate) fn publish(path: &Path, text: &str) -> Result<()> {
    // What a link points to is the file that is meant.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    publish_as(&path, text.as_bytes(), |_| Ok(()), Staging::publish)
}

/// All of the bytes in a file of this name, or what was there before. `ready` sees the file before it has its name, and
/// `publish` gives it that.
///
/// # Errors
/// Whatever storage reports, and what `ready` gives.
pub(crate) fn publish_as(
    path: &Path,
    bytes: &[u8],
    ready: impl FnOnce(&Path) -> Result<()>,
    publish: fn(Staging) -> Result<()>,
) -> Result<()> {
    let namespace: Arc<dyn Namespace> = Arc::new(OsNamespace);
    let (staging, file) = Staging::file(namespace, path)?;
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], done as u64) {
            Ok(written) => done += written,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::from_io("cannot write", error).with_file(path)),
        }
    }
    ready(staging.path())?;
    file.sync()?;
    publish(staging)
}

/// The memory of a session, for people.
pub(crate) fn memory(session: &Session) -> String {
    let reason = session.device_reason();
    // The whole reason lists every library that was tried; it stands in the JSON.
    let reason = if reason.contains("no CUDA driver") { "no CUDA driver here" } else { reason };
    let reason = crate::escape::safe(reason);
    match session.device() {
        Device::Cuda(_) => format!("{} ({reason})", session.device()),
        Device::Pci(_) => format!("the memory of {}", session.device()),
        Device::Auto | Device::Host => format!("host memory: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_things_elsewhere_are_recognised() {
        for name in ["https://example.org/m.safetensors", "hf://a/b", "no-such-owner/Model-7B"] {
            assert!(is_elsewhere(Path::new(name)), "{name}");
        }
        for name in ["model", "./a/b", "/a/b", "src/nothing", "a/b/c", "gone/m.safetensors"] {
            assert!(!is_elsewhere(Path::new(name)), "{name}");
        }
    }
}
