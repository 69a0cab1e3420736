//! How much of a file the page cache holds.
//!
//! `cachestat(2)` (Linux 6.5) counts pages at once. The kernel refuses it for files that the caller neither
//! owns nor may write; then pages are sampled with `preadv2(RWF_NOWAIT)`, which reads a byte only if that
//! needs no disk. (`mincore` is no help there: to everyone but the owner it reports every page as resident.)
//! Sampling a cold page can start read-ahead, so the file is first told to expect random access.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{Advice, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::File;
use crate::base::{Error, Extent, Result};

/// How much of a range the page cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// Every page that was looked at.
    All,
    /// Some pages.
    Some,
    /// No page that was looked at.
    None,
    /// The kernel does not tell.
    Unknown,
}

/// How many pages of a range are sampled where they cannot be counted.
const SAMPLES: u64 = 16;

/// Makes the page cache forget a file, as far as the kernel is willing to, and gives what it still holds. What is not
/// on the drive yet cannot be forgotten, so the file is synced first. For measurements: nothing else gains by it.
///
/// # Errors
/// What the sync or the advice reports. A kernel that does not forget is no error: the result tells.
pub fn drop_from_page_cache(file: &dyn File) -> Result<Residency> {
    file.sync()?;
    if let Some(fd) = file.descriptor() {
        rustix::fs::fadvise(fd, 0, None, Advice::DontNeed)
            .map_err(|errno| Error::from_io("cannot advise the kernel on the page cache", errno.into()).with("op", "fadvise"))?;
    }
    Ok(file.residency(Extent::new(0, file.identity()?.length)))
}

/// Makes the page cache forget a range of a file, as far as it is willing to: not what is dirty or in use. Advice, so nothing
/// is told of its success.
pub fn forget(file: &dyn File, extent: Extent) {
    if let (Some(fd), Some(length)) = (file.descriptor(), std::num::NonZeroU64::new(extent.length)) {
        let _advice_only = rustix::fs::fadvise(fd, extent.offset, Some(length), Advice::DontNeed);
    }
}

/// The residency of `extent`, without a look that could change it; [`Unknown`](Residency::Unknown) rather than a sample.
pub fn exact_residency(file: &dyn File, extent: Extent) -> Residency {
    let exact = |fd| counted(fd, extent).or_else(|| mapped(fd, extent));
    file.descriptor().and_then(exact).unwrap_or(Residency::Unknown)
}

/// The kernel's page: 4 KiB on x86-64, 64 KiB on some Arm kernels.
fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// The residency of `extent` of the file behind `fd`.
pub(super) fn of(fd: BorrowedFd<'_>, extent: Extent) -> Residency {
    if extent.is_empty() {
        return Residency::All;
    }
    counted(fd, extent).unwrap_or_else(|| sampled(fd, extent))
}

/// `struct cachestat_range` and `struct cachestat` of linux/mman.h.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

#[repr(C)]
#[derive(Default)]
struct Counts {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Counts with `cachestat`; `None` if the kernel has no such call or refuses it.
fn counted(fd: BorrowedFd<'_>, extent: Extent) -> Option<Residency> {
    /// The same number on every architecture (it came after the tables were unified).
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = Range { offset: extent.offset, length: extent.length };
    let mut counts = Counts::default();
    // SAFETY: both structures have the kernel's layout and live through the call; flags must be 0.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const range, &raw mut counts, 0_u32) };
    if result != 0 {
        return None;
    }
    let pages = extent.end().div_ceil(page_bytes()) - extent.offset / page_bytes();
    Some(match counts.cached {
        0 => Residency::None,
        cached if cached >= pages => Residency::All,
        _ => Residency::Some,
    })
}

/// Counts with `mincore` on a mapping; `None` unless the process owns the file or has it open for writing: others are told
/// that every page is there.
fn mapped(fd: BorrowedFd<'_>, extent: Extent) -> Option<Residency> {
    let owned = rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw());
    let writable = rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::RDWR));
    if !owned && !writable {
        return None;
    }
    let start = extent.offset / page_bytes() * page_bytes();
    let length = usize::try_from(extent.end() - start).ok().filter(|length| *length > 0)?;
    let mut pages = vec![0_u8; length.div_ceil(rustix::param::page_size())];
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists; no byte of it is read. `pages`
    // has one byte for each page of the mapping.
    let told = unsafe {
        let (access, flags) = (ProtFlags::empty(), MapFlags::SHARED);
        let mapping = rustix::mm::mmap(std::ptr::null_mut(), length, access, flags, fd, start).ok()?;
        let told = libc::mincore(mapping, length, pages.as_mut_ptr()) == 0;
        let _unmapped = rustix::mm::munmap(mapping, length);
        told
    };
    let resident = pages.iter().filter(|page| **page & 1 != 0).count();
    told.then_some(match resident {
        0 => Residency::None,
        all if all == pages.len() => Residency::All,
        _ => Residency::Some,
    })
}

fn sampled(fd: BorrowedFd<'_>, extent: Extent) -> Residency {
    if rustix::fs::fadvise(fd, 0, None, Advice::Random).is_err() {
        return Residency::Unknown;
    }
    let pages = extent.length.div_ceil(page_bytes());
    let samples = pages.min(SAMPLES);
    let mut resident = 0;
    for sample in 0..samples {
        let offset = extent.offset + pages * sample / samples * page_bytes();
        let mut byte = [0];
        let target = &mut [std::io::IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(fd, target, offset.min(extent.end() - 1), ReadWriteFlags::NOWAIT) {
            Ok(_) => resident += 1,
            Err(Errno::AGAIN) => {}
            Err(_) => return Residency::Unknown,
        }
    }
    match resident {
        0 => Residency::None,
        all if all == samples => Residency::All,
        _ => Residency::Some,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_just_written_is_resident_both_counted_and_sampled() {
        let mut file = tempfile::tempfile().expect("temporary file");
        file.write_all(&[1; 100_000]).expect("write");
        let whole = Extent::new(0, 100_000);
        if let Some(counted) = counted(file.as_fd(), whole) {
            assert_eq!(counted, Residency::All);
        }
        // A filesystem may not know RWF_NOWAIT, but none may claim that these pages are absent.
        assert!(matches!(sampled(file.as_fd(), whole), Residency::All | Residency::Unknown));
    }

    #[test]
    fn a_file_dropped_from_the_page_cache_is_gone_from_it_or_reported_as_still_there() {
        use crate::storage::{Access, Buffering, Namespace, OsNamespace};
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("temporary file");
        file.write_all(&[1; 1 << 20]).expect("write");
        let file = OsNamespace.open(file.path(), Access::Read, Buffering::PageCache).expect("open");
        let left = drop_from_page_cache(&*file).expect("sync");
        assert_eq!(left, file.residency(Extent::new(0, 1 << 20)));
        // A filesystem in memory keeps its pages, and a new kernel always tells.
        assert!(matches!(left, Residency::None | Residency::All | Residency::Unknown), "{left:?}");
    }

    #[test]
    fn a_dropped_range_is_not_resident_beside_one_that_is() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("temporary file");
        file.write_all(&[1; 1 << 20]).expect("write");
        file.sync_all().expect("sync");
        rustix::fs::fadvise(&file, 0, std::num::NonZeroU64::new(1 << 19), Advice::DontNeed).expect("fadvise");
        let (dropped, kept) = (Extent::new(0, 1 << 19), Extent::new(1 << 19, 1 << 19));
        if counted(file.as_fd(), dropped).is_some() && of(file.as_fd(), dropped) != Residency::All {
            assert_eq!(of(file.as_fd(), dropped), Residency::None);
            assert_eq!(of(file.as_fd(), kept), Residency::All);
            assert_eq!(of(file.as_fd(), Extent::new(0, 1 << 20)), Residency::Some);
            for (extent, expected) in [(dropped, Residency::None), (kept, Residency::All)] {
                assert_eq!(mapped(file.as_fd(), extent), Some(expected), "the file is this process's own");
            }
            assert_eq!(mapped(file.as_fd(), Extent::new((1 << 19) - 1, 2)), Some(Residency::Some));
            assert_eq!(sampled(file.as_fd(), dropped), Residency::None);
        }
    }
}
