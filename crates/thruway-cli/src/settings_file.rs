//! Files of settings: read in bounded time, and the name under which an old one is kept.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thruway::storage::probe::{Prober, Unseen};
use thruway::{Error, ErrorKind, Result};

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

/// `cufile.json.old`
pub(crate) fn beside(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".old");
    PathBuf::from(name)
}
