//! Files that cuFile knows.
//!
//! Registering a file asks the kernel for its filesystem, its drive and their place in the machine, so it is done once for each
//! open file and not for each request. cuFile's handle needs a descriptor that outlives it, and the caller's ends with the
//! transfer: a duplicate is kept here. What was registered for reading is kept for later transfers, the last few of it; what
//! was registered for writing goes when its engine has nothing more to do, and so does what has been deleted, because an open
//! descriptor keeps its blocks on the drive.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use thruway_sys::cufile::{CUfileDescr_t, CUfileHandle_t};

use super::driver::Driver;
use super::failure::check;
use crate::base::{Error, Result};

/// How many files are kept that no request uses. Each costs a descriptor, and some more inside cuFile.
const KEPT_MAX: usize = 64;

/// Which open file: two descriptors with the same are interchangeable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    device: libc::dev_t,
    inode: libc::ino_t,
    flags: libc::c_int,
}

/// A registered file.
pub(super) struct Handle {
    driver: Arc<Driver>,
    raw: CUfileHandle_t,
    /// Closed after the handle is gone.
    descriptor: OwnedFd,
}

// SAFETY: a handle is a number to us; cuFile's functions may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// What cuFile calls the file.
    pub(super) fn raw(&self) -> CUfileHandle_t {
        self.raw
    }

    fn is_deleted(&self) -> bool {
        stat(self.descriptor.as_raw_fd()).is_none_or(|stat| stat.st_nlink == 0)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: registered by `Files::get`, and whoever used it held this value. The descriptor is closed after this.
        unsafe { (self.driver.table.cuFileHandleDeregister)(self.raw) }
    }
}

/// The registered files of a session, the last used last.
#[derive(Default)]
pub(super) struct Files(Mutex<Vec<(Key, Arc<Handle>)>>);

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Files({})", self.0.lock().unwrap_or_else(PoisonError::into_inner).len())
    }
}

impl Files {
    /// The handle of an open file, registered if it is not yet.
    ///
    /// # Errors
    /// What the system or the library says.
    pub(super) fn get(&self, driver: &Arc<Driver>, descriptor: BorrowedFd<'_>) -> Result<Arc<Handle>> {
        let failed = |what: &str| Error::from_io(what, std::io::Error::last_os_error());
        let stat = stat(descriptor.as_raw_fd()).ok_or_else(|| failed("the file cannot be looked at"))?;
        // SAFETY: no pointer is passed.
        let flags = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFL) };
        let key = Key { device: stat.st_dev, inode: stat.st_ino, flags };
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = files.iter().position(|(known, _)| *known == key) {
            let found = files.remove(at);
            let handle = Arc::clone(&found.1);
            files.push(found);
            return Ok(handle);
        }
        let descriptor = descriptor.try_clone_to_owned().map_err(|source| Error::from_io("no descriptor for cuFile", source))?;
        let mut description = CUfileDescr_t::of_descriptor(descriptor.as_raw_fd());
        let mut raw = std::ptr::null_mut();
        // SAFETY: both pointers are to locals that live through the call; the descriptor is open and stays so as long as the handle.
        let answer = unsafe { (driver.table.cuFileHandleRegister)(&raw mut raw, &raw mut description) };
        check(answer, "cuFileHandleRegister")?;
        let handle = Arc::new(Handle { driver: Arc::clone(driver), raw, descriptor });
        files.push((key, Arc::clone(&handle)));
        let surplus = files.len().saturating_sub(KEPT_MAX);
        let mut kept = 0;
        files.retain(|(_, handle)| {
            kept += 1;
            let is_idle = Arc::strong_count(handle) == 1;
            !(is_idle && (kept <= surplus || handle.is_deleted()))
        });
        Ok(handle)
    }

    /// Lets go of what was registered for writing, or has been deleted, and is not in use.
    pub(super) fn settle(&self) {
        let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|(key, handle)| {
            let is_read = key.flags & libc::O_ACCMODE == libc::O_RDONLY;
            Arc::strong_count(handle) > 1 || (is_read && !handle.is_deleted())
        });
    }
}

fn stat(descriptor: libc::c_int) -> Option<libc::stat> {
    // SAFETY: a structure of numbers, which may all be 0.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a local that lives through the call.
    (unsafe { libc::fstat(descriptor, &raw mut stat) } == 0).then_some(stat)
}
