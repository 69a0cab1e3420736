//! Files of settings: read in bounded time, replaced with their mode and owner, and the name under which an old one is kept.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thruway::doctor::cufile::BYTES_MAX;
use thruway::storage::Staging;
use thruway::storage::probe::{Prober, Unseen};
use thruway::{Error, ErrorKind, Result};

use crate::place::publish_as;

/// So many old versions of one file are kept.
const KEPT_MAX: usize = 100;
const PATIENCE: Duration = Duration::from_secs(2);

/// What the file holds; `None` if it is not there.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match Prober::new(PATIENCE).read(path, BYTES_MAX) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(Unseen::Absent) => Ok(None),
        Err(Unseen::Denied) => Err(Error::new(ErrorKind::PermissionDenied, "this user may not read the file").with_file(path)),
        Err(Unseen::Silent(_)) => Err(Error::new(ErrorKind::Io, "the file does not answer").with_file(path)),
        Err(Unseen::Failed(why)) => {
            Err(Error::new(ErrorKind::InvalidInput, format!("the file cannot be read: {why}")).with_file(path))
        }
    }
}

/// Where to keep `old`, the content of the file at `path`: `cufile.json.old`, beside the file that a link leads to. The first
/// original stays under that name for good; later ones are `.old.2` and so on. `None` if one of them holds this already.
///
/// # Errors
/// What is in the way of reading those that are there, and that there are too many.
pub(crate) fn beside(path: &Path, old: &[u8]) -> Result<Option<PathBuf>> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    for number in 1..=KEPT_MAX {
        let mut name: OsString = real.as_os_str().to_owned();
        name.push(if number == 1 { ".old".to_owned() } else { format!(".old.{number}") });
        let kept = PathBuf::from(name);
        match std::fs::symlink_metadata(&kept) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Some(kept)),
            Err(error) => return Err(Error::from_io("cannot look at the old file", error).with_file(&kept)),
            // Neither followed nor replaced: nobody knows who laid it, and it may lead anywhere.
            Ok(found) if found.is_symlink() => {}
            Ok(_) if read(&kept)?.as_deref() == Some(old) => return Ok(None),
            Ok(_) => {}
        }
    }
    let message = format!("{KEPT_MAX} old versions of it are kept already");
    Err(Error::new(ErrorKind::AlreadyExists, message).with_file(path).with_hint("remove those (.old.N) that nobody needs"))
}

/// Has changes of the files beside `path` wait for each other while the result lives. Where the filesystem has no locks, or the
/// directory may not be opened, nothing waits.
pub(crate) fn one_at_a_time(path: &Path) -> Option<File> {
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let parent = real.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = File::open(parent).ok()?;
    directory.lock().ok().map(|()| directory)
}

/// Writes what [`beside`] is to keep, with the mode and owner of the file `like`.
///
/// # Errors
/// Whatever storage reports. Then there is no such file.
pub(crate) fn keep(kept: &Path, old: &[u8], like: &Path) -> Result<()> {
    publish_as(kept, old, |staged| make_alike(staged, like), Staging::publish_new)
}

/// Gives a file this content. What was there before keeps its mode and owner; of a link it is what the link leads to.
///
/// # Errors
/// Whatever storage reports. Then the file is as it was.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<()> {
    if path.is_symlink() && !path.exists() {
        let error = Error::new(ErrorKind::NotFound, "it is a link that leads nowhere").with_file(path);
        return Err(error.with_hint("make what it names, or remove the link"));
    }
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    publish_as(&real, content, |staged| make_alike(staged, &real), Staging::publish)
}

/// Gives a file the mode and owner of another, if that is there.
fn make_alike(file: &Path, like: &Path) -> Result<()> {
    let failed = |error| Error::from_io("the file's owner and mode cannot be kept", error).with_file(like);
    let like = match std::fs::metadata(like) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        like => like.map_err(failed)?,
    };
    let now = std::fs::metadata(file).map_err(failed)?;
    if (now.uid(), now.gid()) != (like.uid(), like.gid()) {
        chown(file, Some(like.uid()), Some(like.gid())).map_err(failed)?;
    }
    // Last: a change of the owner may take some of the mode away.
    std::fs::set_permissions(file, Permissions::from_mode(like.mode() & 0o7777)).map_err(failed)
}
