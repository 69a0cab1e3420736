//! The looks themselves. Each may take as long as it pleases: whoever waits for it has a watch.

use std::fmt;
use std::fs::Metadata;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, OFlags, StatVfsMountFlags};

use super::{Unseen, text_of};
use crate::storage::namespace::{Namespace, OsNamespace};
use crate::storage::{Buffering, DirectRules};

/// What is known of a place that a user named.
struct Place {
    /// Its path with all links resolved.
    real: PathBuf,
    kind: rustix::fs::FileType,
    /// `major:minor` of the filesystem's device.
    device: (u32, u32),
    /// The kernel's number for the kind of filesystem, as `statfs` gives it.
    magic: u64,
    /// All bytes of the filesystem, and those free to this user; `None` where the filesystem does not tell.
    room: Option<(u64, u64)>,
    is_read_only: bool,
    may_read: bool,
    may_write: bool,
    direct: DirectAnswer,
}

/// What `O_DIRECT` demands of the first regular file that could be opened there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DirectAnswer {
    Accepted(DirectRules),
    Refused,
    /// There is no file to try it on.
    Unknown,
}

/// One `name value` a line.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |is_so| if is_so { "yes" } else { "no" };
        let kind = match (self.kind.is_dir(), self.kind.is_file()) {
            (true, _) => "directory",
            (_, true) => "file",
            _ => "special",
        };
        writeln!(f, "real {}\nkind {kind}", text_of(self.real.as_os_str().as_bytes()))?;
        writeln!(f, "device {}:{}\nmagic {:#x}", self.device.0, self.device.1, self.magic)?;
        if let Some((total_bytes, free_bytes)) = self.room {
            writeln!(f, "total_bytes {total_bytes}\nfree_bytes {free_bytes}")?;
        }
        writeln!(f, "read_only {}", yes(self.is_read_only))?;
        writeln!(f, "may_read {}\nmay_write {}", yes(self.may_read), yes(self.may_write))?;
        match self.direct {
            DirectAnswer::Accepted(rules) => {
                writeln!(f, "direct yes\nmemory_alignment {}\noffset_alignment {}", rules.memory.bytes(), rules.offset.bytes())
            }
            DirectAnswer::Refused => writeln!(f, "direct no"),
            DirectAnswer::Unknown => writeln!(f, "direct unknown"),
        }
    }
}

fn unseen(error: &std::io::Error) -> Unseen {
    match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Unseen::Absent,
        // Nothing can be there: a name that is too long, or links that lead in a circle.
        std::io::ErrorKind::InvalidFilename => Unseen::Absent,
        _ if error.raw_os_error() == Some(libc::ELOOP) => Unseen::Absent,
        std::io::ErrorKind::PermissionDenied => Unseen::Denied,
        _ => Unseen::Failed(error.to_string()),
    }
}

fn refused(metadata: &Metadata) -> Option<Unseen> {
    let kind = metadata.file_type();
    let what = match kind {
        kind if kind.is_file() => return None,
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Some(Unseen::Failed(format!("this is {what}, not a regular file")))
}

/// The bytes of a regular file.
pub(super) fn read(path: &Path, bytes_max: usize) -> Result<Vec<u8>, Unseen> {
    // Looked at before it is opened: to open some devices does something.
    if let Some(refused) = refused(&std::fs::metadata(path).map_err(|error| unseen(&error))?) {
        return Err(refused);
    }
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| unseen(&error))?;
    // And again: it may have been replaced meanwhile.
    if let Some(refused) = refused(&file.metadata().map_err(|error| unseen(&error))?) {
        return Err(refused);
    }
    let mut bytes = Vec::new();
    file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(|error| unseen(&error))?;
    if bytes.len() > bytes_max {
        return Err(Unseen::Failed(format!("it is longer than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// The names in a directory, sorted, as text, one a line.
pub(super) fn list(path: &Path, names_max: usize) -> Result<Vec<u8>, Unseen> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|error| unseen(&error))? {
        if names.len() == names_max {
            return Err(Unseen::Failed(format!("it holds more than {names_max} names")));
        }
        names.push(text_of(entry.map_err(|error| unseen(&error))?.file_name().as_bytes()) + "\n");
    }
    names.sort_unstable();
    Ok(names.concat().into_bytes())
}

/// A path with all links resolved.
pub(super) fn resolve(path: &Path) -> Result<Vec<u8>, Unseen> {
    std::fs::canonicalize(path).map(path_bytes).map_err(|error| unseen(&error))
}

/// Where the link at a path leads to.
pub(super) fn link(path: &Path) -> Result<Vec<u8>, Unseen> {
    std::fs::read_link(path).map(path_bytes).map_err(|error| unseen(&error))
}

fn path_bytes(path: PathBuf) -> Vec<u8> {
    path.into_os_string().into_vec()
}

/// What there is to know of a place, one `name value` a line.
pub(super) fn place(path: &Path) -> Result<Vec<u8>, Unseen> {
    let failed = |errno: rustix::io::Errno| unseen(&errno.into());
    let real = std::fs::canonicalize(path).map_err(|error| unseen(&error))?;
    let stat = rustix::fs::stat(&real).map_err(failed)?;
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    let magic = rustix::fs::statfs(&real).map_err(failed)?.f_type;
    let filesystem = rustix::fs::statvfs(&real).map_err(failed)?;
    let bytes = |blocks: u64| blocks.saturating_mul(filesystem.f_frsize);
    let place = Place {
        kind,
        device: (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)),
        magic: magic.cast_unsigned(),
        room: (filesystem.f_blocks > 0).then(|| (bytes(filesystem.f_blocks), bytes(filesystem.f_bavail))),
        is_read_only: filesystem.f_flag.contains(StatVfsMountFlags::RDONLY),
        may_read: rustix::fs::access(&real, Access::READ_OK).is_ok(),
        may_write: rustix::fs::access(&real, Access::WRITE_OK).is_ok(),
        direct: if kind.is_file() { try_direct(&real) } else { try_direct_below(&real) },
        real,
    };
    Ok(place.to_string().into_bytes())
}

/// The answer of the first regular file in a directory that can be opened; nothing is created for the question's sake.
fn try_direct_below(directory: &Path) -> DirectAnswer {
    const FILES_MAX: usize = 64;
    let Ok(entries) = std::fs::read_dir(directory) else { return DirectAnswer::Unknown };
    let is_file = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let answers = entries.take(FILES_MAX).flatten().filter(is_file).map(|entry| try_direct(&entry.path()));
    answers.into_iter().find(|answer| *answer != DirectAnswer::Unknown).unwrap_or(DirectAnswer::Unknown)
}

fn try_direct(path: &Path) -> DirectAnswer {
    match OsNamespace.open(path, crate::storage::Access::Read, Buffering::PageCache) {
        Ok(file) => file.direct_rules().map_or(DirectAnswer::Refused, DirectAnswer::Accepted),
        Err(_) => DirectAnswer::Unknown,
    }
}
