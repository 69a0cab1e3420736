//! The filesystem's names: opening, creating, renaming, removing, locking, syncing.

use std::ffi::OsString;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::file::{Access, Buffering, File};
use super::os_file::OsFile;
use crate::base::{Error, ErrorKind, Result};

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link; only where links are not followed.
    Link,
    /// A pipe, socket or device.
    Other,
}

/// What is known of a name without opening it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// What it stands for.
    pub kind: EntryKind,
    /// The length in bytes, of a regular file.
    pub length: u64,
    /// Who may read, write and execute it: the last nine bits of its mode.
    pub permissions: u32,
}

/// A held lock; dropping it releases the lock.
pub trait Lock: Send + Sync + Debug {}

/// A directory that is open for syncing.
pub trait Directory: Send + Sync + Debug {
    /// Makes the names in it durable.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn sync(&self) -> Result<()>;
}

/// The operations on names that this library uses, and nothing else touches the filesystem.
///
/// What they change may be lost in a power cut until the directory is synced. Errors name the file.
pub trait Namespace: Send + Sync + Debug {
    /// Opens a regular file that exists. Never blocks on a pipe.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), [`PermissionDenied`](ErrorKind::PermissionDenied),
    /// [`InvalidInput`](ErrorKind::InvalidInput) for what is no regular file,
    /// [`Unsupported`](ErrorKind::Unsupported) if the filesystem refuses direct access,
    /// [`LimitReached`](ErrorKind::LimitReached) if no more files may be open.
    fn open(&self, path: &Path, access: Access, buffering: Buffering) -> Result<Arc<dyn File>>;

    /// Creates a file that must not exist, for writing through the page cache, with these permissions, or with those that
    /// the process's umask gives ordinary files.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists), and what [`open`](Self::open) gives.
    fn create(&self, path: &Path, permissions: Option<u32>) -> Result<Arc<dyn File>>;

    /// What a name stands for, links followed.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound); for a broken link it says where the link points.
    fn metadata(&self, path: &Path) -> Result<Metadata>;

    /// What a name itself is: a link is a [`Link`](EntryKind::Link), wherever it points.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), and whatever the filesystem reports.
    fn own_metadata(&self, path: &Path) -> Result<Metadata>;

    /// The names in a directory, sorted.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn list(&self, directory: &Path) -> Result<Vec<OsString>>;

    /// Creates a directory that must not exist.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists), and whatever the filesystem reports.
    fn create_directory(&self, path: &Path) -> Result<()>;

    /// Creates a symbolic link that points to `target`, where nothing may stand.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists), [`Unsupported`](ErrorKind::Unsupported) where there are no links, and
    /// whatever the filesystem reports.
    fn create_link(&self, path: &Path, _target: &Path) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "the filesystem has no symbolic links").with_file(path))
    }

    /// Renames a file over whatever file is there, or a directory over an empty one, atomically.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;

    /// Renames only if nothing stands at `to`, atomically where the filesystem can.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists), and whatever the filesystem reports.
    fn rename_new(&self, from: &Path, to: &Path) -> Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn remove(&self, path: &Path) -> Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn remove_directory(&self, path: &Path) -> Result<()>;

    /// Opens a directory for syncing. Whoever will have to sync it opens it before anything is changed there, and so
    /// learns in time that it cannot be.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), [`PermissionDenied`](ErrorKind::PermissionDenied) for a directory that may
    /// not be read, and whatever the filesystem reports.
    fn open_directory(&self, path: &Path) -> Result<Box<dyn Directory>>;

    /// Makes the names in a directory durable.
    ///
    /// # Errors
    /// What [`open_directory`](Self::open_directory) and [`Directory::sync`] give.
    fn sync_directory(&self, path: &Path) -> Result<()> {
        self.open_directory(path)?.sync()
    }

    /// Locks a file against other processes, without waiting. It is created if it is not there. The lock is of the file that
    /// has the name when this returns: whoever removes the file takes it from its holder.
    ///
    /// # Errors
    /// [`AlreadyExists`](ErrorKind::AlreadyExists) if another holds the lock, [`Unsupported`](ErrorKind::Unsupported) if the
    /// filesystem has no locks.
    fn lock(&self, path: &Path) -> Result<Box<dyn Lock>>;

    /// The bytes free to this user on the filesystem of a directory; `u64::MAX` where it does not tell.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn free_bytes(&self, directory: &Path) -> Result<u64>;

    /// How many more files the filesystem of a directory can hold; `u64::MAX` where it does not tell.
    ///
    /// # Errors
    /// Whatever the filesystem reports.
    fn free_files(&self, _directory: &Path) -> Result<u64> {
        Ok(u64::MAX)
    }
}

/// The operating system's filesystem.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsNamespace;

impl Namespace for OsNamespace {
    fn open(&self, path: &Path, access: Access, buffering: Buffering) -> Result<Arc<dyn File>> {
        // NONBLOCK: a pipe opened for reading would otherwise wait for its writer.
        let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        flags |= if access == Access::Read { OFlags::RDONLY } else { OFlags::RDWR };
        if buffering == Buffering::Direct {
            flags |= OFlags::DIRECT;
        }
        let fd = opened(path, flags, Mode::empty()).map_err(|errno| match (errno, buffering) {
            (Errno::INVAL, Buffering::Direct) => {
                Error::new(ErrorKind::Unsupported, "the filesystem refuses O_DIRECT").with_file(path)
            }
            _ => failed("cannot open", path, errno),
        })?;
        let file = OsFile::new(fd, path)?;
        // It is no pipe, then; and io_uring takes the flag for a wish to fail rather than to wait.
        file.set_blocking(flags)?;
        Ok(Arc::new(file))
    }

    fn create(&self, path: &Path, permissions: Option<u32>) -> Result<Arc<dyn File>> {
        let flags = OFlags::CLOEXEC | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOCTTY;
        // Nobody else gets at a file that is to be private, at no moment.
        let mode = Mode::from_raw_mode(permissions.map_or(0o666, |permissions| permissions & 0o600));
        let fd = opened(path, flags, mode).map_err(|errno| failed("cannot create", path, errno))?;
        if let Some(permissions) = permissions {
            let set = || match rustix::fs::fstat(&fd)? {
                // Some filesystems give all files the same, and allow no change.
                stat if metadata_of(&stat).permissions == permissions => Ok(()),
                _ => rustix::fs::fchmod(&fd, Mode::from_raw_mode(permissions)),
            };
            set().map_err(|errno| failed("cannot set the permissions", path, errno))?;
        }
        Ok(Arc::new(OsFile::new(fd, path)?))
    }

    fn metadata(&self, path: &Path) -> Result<Metadata> {
        rustix::fs::stat(path).map(|stat| metadata_of(&stat)).map_err(|errno| failed("cannot find", path, errno))
    }

    fn own_metadata(&self, path: &Path) -> Result<Metadata> {
        rustix::fs::lstat(path).map(|stat| metadata_of(&stat)).map_err(|errno| failed("cannot find", path, errno))
    }

    fn list(&self, directory: &Path) -> Result<Vec<OsString>> {
        let unreadable = |errno| failed("cannot list", directory, errno);
        let fd = opened(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(unreadable)?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(fd).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name.to_vec()));
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn create_directory(&self, path: &Path) -> Result<()> {
        rustix::fs::mkdir(path, Mode::from_raw_mode(0o777)).map_err(|errno| failed("cannot create the directory", path, errno))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        rustix::fs::rename(from, to).map_err(|errno| failed("cannot rename", from, errno).with("to", to.display()))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        let exists = || Error::new(ErrorKind::AlreadyExists, "something already stands there").with_file(to);
        match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST | Errno::NOTEMPTY) => Err(exists()),
            // The filesystem, the kernel or a seccomp profile does not know the flag: look first instead. Two
            // writers of one name could then both pass, which is why the flag comes first.
            Err(Errno::INVAL | Errno::NOSYS | Errno::PERM) => match rustix::fs::lstat(to) {
                Ok(_) => Err(exists()),
                Err(_) => self.rename(from, to),
            },
            Err(errno) => Err(failed("cannot rename", from, errno).with("to", to.display())),
        }
    }

    fn remove(&self, path: &Path) -> Result<()> {
        rustix::fs::unlink(path).map_err(|errno| failed("cannot remove", path, errno))
    }

    fn create_link(&self, path: &Path, target: &Path) -> Result<()> {
        rustix::fs::symlink(target, path).map_err(|errno| failed("cannot create the link", path, errno))
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        rustix::fs::unlinkat(rustix::fs::CWD, path, AtFlags::REMOVEDIR)
            .map_err(|errno| failed("cannot remove the directory", path, errno))
    }

    fn open_directory(&self, path: &Path) -> Result<Box<dyn Directory>> {
        let fd = opened(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed("cannot open the directory", path, errno))?;
        Ok(Box::new(OsDirectory { fd, path: path.to_owned() }))
    }

    fn lock(&self, path: &Path) -> Result<Box<dyn Lock>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        loop {
            let fd =
                opened(path, flags, Mode::from_raw_mode(0o666)).map_err(|errno| failed("cannot open the lock", path, errno))?;
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => {
                    return Err(Error::new(ErrorKind::AlreadyExists, "another process holds the lock").with_file(path));
                }
                Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => {
                    return Err(Error::new(ErrorKind::Unsupported, "the filesystem has no locks")
                        .with_file(path)
                        .with_hint("mount it with locks (Lustre: `-o flock`)"));
                }
                Err(errno) => return Err(failed("cannot lock", path, errno)),
            }
            let lock = OsLock { fd };
            let locked = rustix::fs::fstat(&lock.fd).map_err(|errno| failed("cannot examine the lock", path, errno))?;
            // Between opening and locking somebody may have removed it, and a third made and locked another.
            match rustix::fs::stat(path) {
                Ok(named) if (named.st_dev, named.st_ino) == (locked.st_dev, locked.st_ino) => return Ok(Box::new(lock)),
                Ok(_) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(failed("cannot examine the lock", path, errno)),
            }
        }
    }

    fn free_bytes(&self, directory: &Path) -> Result<u64> {
        let stat =
            rustix::fs::statvfs(directory).map_err(|errno| failed("cannot examine the filesystem of", directory, errno))?;
        Ok(free_of(stat.f_blocks, stat.f_bavail, stat.f_frsize))
    }

    fn free_files(&self, directory: &Path) -> Result<u64> {
        let stat =
            rustix::fs::statvfs(directory).map_err(|errno| failed("cannot examine the filesystem of", directory, errno))?;
        // Some (btrfs) make inodes as they need them, and report none at all.
        Ok(free_of(stat.f_files, stat.f_favail, 1))
    }
}

/// The free bytes that a filesystem reports. One of no blocks at all (some on networks, some in user space) knows
/// nothing of its room, and whatever it calls free says nothing.
fn free_of(blocks: u64, available: u64, block_bytes: u64) -> u64 {
    if blocks == 0 { u64::MAX } else { available.saturating_mul(block_bytes) }
}

fn metadata_of(stat: &rustix::fs::Stat) -> Metadata {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => EntryKind::Link,
        _ => EntryKind::Other,
    };
    let permissions = Mode::from_raw_mode(stat.st_mode).bits() & 0o777;
    Metadata { kind, length: u64::try_from(stat.st_size).unwrap_or(0), permissions }
}

/// An open directory of the operating system.
#[derive(Debug)]
struct OsDirectory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory for OsDirectory {
    fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).map_err(|errno| failed("cannot sync the directory", &self.path, errno).with("op", "fsync"))
    }
}

#[derive(Debug)]
struct OsLock {
    fd: OwnedFd,
}

impl Lock for OsLock {}

impl Drop for OsLock {
    fn drop(&mut self) {
        // Closing would do, were it not for children of a fork, which share the lock and may live on. If it fails, closing is
        // all that is left.
        rustix::fs::flock(&self.fd, FlockOperation::Unlock).ok();
    }
}

/// Opens with EINTR retried: a signal during the opening of a file on a network says nothing about the file.
fn opened(path: &Path, flags: OFlags, mode: Mode) -> rustix::io::Result<OwnedFd> {
    loop {
        match rustix::fs::open(path, flags, mode) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// An error that names the file and, if the name is a link whose target is missing, where it points.
fn failed(what: &str, path: &Path, errno: Errno) -> Error {
    let error = Error::from_io(what, errno.into()).with_file(path);
    match rustix::fs::readlink(path, Vec::new()) {
        Ok(target) if errno == Errno::NOENT => {
            let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
            error
                .with("link to", crate::base::error::printable(&target.to_string_lossy()))
                .with_hint("the link's target is missing")
        }
        _ => error,
    }
}

/// The text of a regular file of at most so many bytes.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput) for a longer one, [`Malformed`](ErrorKind::Malformed) for what is no UTF-8, and what
/// [`Namespace::open`] gives.
pub fn read_text(namespace: &dyn Namespace, path: &Path, bytes_max: u64) -> Result<String> {
    let file = namespace.open(path, Access::Read, Buffering::PageCache)?;
    let length = file.identity()?.length;
    if length > bytes_max {
        let message = format!("the file is longer than the {bytes_max} bytes that such a file may have");
        return Err(Error::new(ErrorKind::InvalidInput, message).with_file(path));
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], done as u64) {
            Ok(0) => bytes.truncate(done),
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::from_io("cannot read", error).with_file(path)),
        }
    }
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::Malformed, "the file is no text").with_file(path))
}

/// The text of a small file of the kernel's (/proc, /sys).
pub(super) fn read_small(path: &Path) -> std::io::Result<String> {
    std::fs::read_to_string(path)
}

/// The same; `None` if it cannot be read.
pub(super) fn read_small_text(path: &str) -> Option<String> {
    read_small(Path::new(path)).ok()
}

/// Where a symbolic link of the kernel's leads; `None` if there is none.
pub(super) fn link_target(path: &str) -> Option<PathBuf> {
    std::fs::read_link(path).ok()
}

/// Where a link of the kernel's (/proc) points; `None` if it cannot be read.
pub(super) fn read_link_text(path: &str) -> Option<String> {
    Some(std::fs::read_link(path).ok()?.to_string_lossy().into_owned())
}

/// How many names a directory holds; `None` if it cannot be read.
pub(super) fn count_entries(path: &str) -> Option<usize> {
    Some(std::fs::read_dir(path).ok()?.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_without_blocks_has_unknown_room_and_refuses_nothing() {
        assert_eq!(free_of(0, 0, 4096), u64::MAX);
        assert_eq!(free_of(100, 0, 4096), 0, "a full one is full");
        assert_eq!(free_of(100, 7, 4096), 7 * 4096);
    }
}
