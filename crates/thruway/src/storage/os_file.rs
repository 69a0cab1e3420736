//! A file of the operating system.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use super::file::{DirectRules, File, Identity};
use super::residency::{self, Residency};
use crate::base::{Alignment, Error, ErrorKind, Extent, Result};

/// An open regular file of the operating system. Closed when dropped.
#[derive(Debug)]
pub struct OsFile {
    fd: OwnedFd,
    path: PathBuf,
}

impl OsFile {
    /// Takes a descriptor that was opened from `path`, which errors name.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) unless it is a regular file: a FIFO would block, and a
    /// directory or a drive is no model.
    pub(super) fn new(fd: OwnedFd, path: &Path) -> Result<Self> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| failed("cannot examine", path, errno))?;
        let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
        if !kind.is_file() {
            let what = if kind.is_dir() {
                "a directory"
            } else if kind.is_fifo() {
                "a named pipe"
            } else {
                "a device or a socket"
            };
            return Err(Error::new(ErrorKind::InvalidInput, format!("this is {what}, not a regular file")).with_file(path));
        }
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Takes `O_NONBLOCK` from the flags with which the file was opened.
    pub(super) fn set_blocking(&self, opened_with: OFlags) -> Result<()> {
        let status = (opened_with - OFlags::NONBLOCK) & (OFlags::DIRECT | OFlags::APPEND);
        rustix::fs::fcntl_setfl(&self.fd, status).map_err(|errno| self.failed("cannot set the mode of", errno))
    }

    /// What the kernel says of `O_DIRECT` on this file; `None` if it says nothing.
    fn told(&self) -> Option<Statx> {
        let statx = rustix::fs::statx(&self.fd, c"", rustix::fs::AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        (statx.stx_mask & StatxFlags::DIOALIGN.bits() != 0).then_some(statx)
    }

    fn failed(&self, what: &str, errno: Errno) -> Error {
        failed(what, &self.path, errno)
    }
}

fn failed(what: &str, path: &Path, errno: Errno) -> Error {
    Error::from_io(what, errno.into()).with_file(path)
}

impl File for OsFile {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }

    fn identity(&self) -> Result<Identity> {
        let stat = rustix::fs::fstat(&self.fd).map_err(|errno| self.failed("cannot examine", errno))?;
        let length = u64::try_from(stat.st_size)
            .map_err(|_| Error::new(ErrorKind::Io, "the filesystem reports a negative length").with_file(&self.path))?;
        let modified_ns = i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec);
        Ok(Identity { device: stat.st_dev, inode: stat.st_ino, length, modified_ns })
    }

    fn direct_rules(&self) -> Option<DirectRules> {
        // No page of the page cache may be shared between a direct and a buffered transfer of one file.
        let page = Alignment::system_page();
        // `STATX_DIOALIGN` (Linux 6.1) tells the rules: all zero means that O_DIRECT is refused.
        match self.told() {
            Some(statx) => {
                let memory = Alignment::new(u64::from(statx.stx_dio_mem_align))?;
                let offset = Alignment::new(u64::from(statx.stx_dio_offset_align))?;
                Some(DirectRules { memory, offset: offset.max(page) })
            }
            // Where the kernel does not tell, a page suits every filesystem that accepts O_DIRECT at all, and opening the
            // file so is the test of that.
            _ => {
                let again = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
                let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
                rustix::fs::open(again, flags, Mode::empty()).ok().map(|_| DirectRules { memory: page, offset: page })
            }
        }
    }

    fn direct_rules_are_told(&self) -> bool {
        self.told().is_some()
    }

    fn filesystem(&self) -> Option<String> {
        // `f_fsid` of statfs(2): ext4, btrfs and tmpfs make it of the filesystem's UUID, xfs of the device's number.
        let told = rustix::fs::fstatvfs(&self.fd).ok().filter(|told| told.f_fsid != 0)?;
        let kind = rustix::fs::fstatfs(&self.fd).ok()?.f_type;
        Some(format!("{kind:x} {:016x}", told.f_fsid))
    }

    fn residency(&self, extent: Extent) -> Residency {
        residency::of(self.fd.as_fd(), extent)
    }

    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        Ok(rustix::io::pread(&self.fd, target, offset)?)
    }

    fn write_at(&self, source: &[u8], offset: u64) -> std::io::Result<usize> {
        Ok(rustix::io::pwrite(&self.fd, source, offset)?)
    }

    fn allocate(&self, length: u64) -> Result<()> {
        let retried = |call: &dyn Fn() -> rustix::io::Result<()>| loop {
            match call() {
                Err(Errno::INTR) => {}
                result => return result,
            }
        };
        if length > 0 {
            match retried(&|| rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), 0, length)) {
                Ok(()) => return Ok(()),
                // These say that the filesystem (or a seccomp profile) knows no such call, not that there is no room.
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM | Errno::INVAL) => {}
                Err(errno) => return Err(self.failed("cannot reserve space for", errno).with("length", length)),
            }
        }
        retried(&|| rustix::fs::ftruncate(&self.fd, length))
            .map_err(|errno| self.failed("cannot set the length of", errno).with("length", length))
    }

    fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.fd).map_err(|errno| {
            self.failed("cannot sync", errno)
                .with("op", "fsync")
                .with_hint("what was written to this file is lost or in doubt: write it anew, elsewhere if the drive fails")
        })
    }
}
