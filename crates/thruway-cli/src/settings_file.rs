//! Files of settings: read in bounded time, replaced with their mode and owner, and the name under which an old one is kept.

use std::ffi::OsString;
use std::fs::{Metadata, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thruway::storage::probe::{Prober, Unseen};
use thruway::{Error, ErrorKind, Result};

use crate::place::publish;

/// So many old versions of one file are kept.
const KEPT_MAX: usize = 100;
/// No file of settings comes near it.
const BYTES_MAX: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(2);

/// The text of the file; `None` if it is not there.
pub(crate) fn read(path: &Path) -> Result<Option<String>> {
    match Prober::new(PATIENCE).read(path, BYTES_MAX) {
        Ok(bytes) => String::from_utf8(bytes)
            .map(Some)
            .map_err(|_| Error::new(ErrorKind::Malformed, "the file is no UTF-8 text").with_file(path)),
        Err(Unseen::Absent) => Ok(None),
        Err(Unseen::Denied) => Err(Error::new(ErrorKind::PermissionDenied, "this user may not read the file").with_file(path)),
        Err(Unseen::Silent(_)) => Err(Error::new(ErrorKind::Io, "the file does not answer").with_file(path)),
        Err(Unseen::Failed(why)) => {
            Err(Error::new(ErrorKind::InvalidInput, format!("the file cannot be read: {why}")).with_file(path))
        }
    }
}

/// Where to keep `old`, the text of the file at `path`: `cufile.json.old`, beside the file that a link leads to. The first
/// original stays under that name for good; later ones are `.old.2` and so on. `None` if one of them holds this text already.
///
/// # Errors
/// What is in the way of reading those that are there, and that there are too many.
pub(crate) fn beside(path: &Path, old: &str) -> Result<Option<PathBuf>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    for number in 1..=KEPT_MAX {
        let mut name: OsString = real.as_os_str().to_owned();
        name.push(if number == 1 { ".old".to_owned() } else { format!(".old.{number}") });
        let kept = PathBuf::from(name);
        match read(&kept)? {
            Some(text) if text == old => return Ok(None),
            Some(_) => {}
            None => return Ok(Some(kept)),
        }
    }
    let message = format!("{KEPT_MAX} old versions of it are kept already");
    Err(Error::new(ErrorKind::AlreadyExists, message).with_file(path).with_hint("remove those (.old.N) that nobody needs"))
}

/// Gives a file this text, and the mode and owner of the file `like`, which may be itself, if that is there.
///
/// # Errors
/// Whatever storage reports; that the file cannot have that owner, once it is written.
pub(crate) fn replace(path: &Path, text: &str, like: &Path) -> Result<()> {
    let like = std::fs::metadata(like).ok();
    publish(path, text)?;
    like.map_or(Ok(()), |like| make_alike(path, &like))
}

fn make_alike(path: &Path, like: &Metadata) -> Result<()> {
    let failed = |error| Error::from_io("the file is written, but its owner and mode cannot be kept", error).with_file(path);
    let now = std::fs::metadata(path).map_err(failed)?;
    if (now.uid(), now.gid()) != (like.uid(), like.gid()) {
        chown(path, Some(like.uid()), Some(like.gid())).map_err(failed)?;
    }
    if now.mode() & 0o7777 != like.mode() & 0o7777 {
        std::fs::set_permissions(path, Permissions::from_mode(like.mode() & 0o7777)).map_err(failed)?;
    }
    Ok(())
}
