//! The files of a transfer: opened when their turn comes, closed when the last request on them is done, never
//! more at once than the process may have.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::FileRef;
use crate::base::{Error, ErrorKind, Extent, Result};
use crate::io::policy::Source;
use crate::storage::{Access, Buffering, DirectRules, File, Identity, Namespace, Residency};

/// However many descriptors the process has left, a transfer gains nothing from more open files than this.
const OPEN_MAX: usize = 64;

/// How many files a transfer may hold open, shared by its lanes.
#[derive(Debug)]
struct Permits {
    free: Mutex<Free>,
    returned: Condvar,
}

#[derive(Debug)]
struct Free {
    count: usize,
    /// Whether the transfer has failed, so that waiting is in vain.
    stopped: bool,
}

/// A permit, returned when dropped.
#[derive(Debug)]
struct Permit(Arc<Permits>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.free.lock().unwrap_or_else(PoisonError::into_inner).count += 1;
        self.0.returned.notify_one();
    }
}

/// Opens the files of one transfer.
#[derive(Debug)]
pub(super) struct OpenFiles<'a> {
    namespace: &'a dyn Namespace,
    permits: Arc<Permits>,
    /// What is open now: lanes that work on one file share its descriptor.
    open: Mutex<HashMap<Key, Weak<Counted>>>,
}

/// Which file of the transfer, and how it is open.
type Key = (usize, Access, Source);

impl<'a> OpenFiles<'a> {
    /// Half of the descriptors that are left may be used: others in the process need some too.
    pub(super) fn new(namespace: &'a dyn Namespace) -> Self {
        let left = crate::storage::open_files_left().unwrap_or(usize::MAX);
        let permits =
            Permits { free: Mutex::new(Free { count: (left / 2).clamp(1, OPEN_MAX), stopped: false }), returned: Condvar::new() };
        Self { namespace, permits: Arc::new(permits), open: Mutex::default() }
    }

    /// Opens the transfer's file with this number for requests on one storage side; `None` if no descriptor is to be had before one of the
    /// caller's own is returned. A caller that holds none says so with `may_wait`.
    pub(super) fn open(
        &self,
        number: usize,
        file: &FileRef,
        access: Access,
        source: Source,
        may_wait: bool,
    ) -> Result<Option<Arc<dyn File>>> {
        let key = (number, access, source);
        let open = |map: &HashMap<Key, Weak<Counted>>| map.get(&key).and_then(Weak::upgrade);
        if let Some(handle) = open(&self.map()) {
            return Ok(Some(handle));
        }
        let Some(permit) = self.permit(may_wait) else { return Ok(None) };
        let buffering = if source == Source::PageCache { Buffering::PageCache } else { Buffering::Direct };
        let inner = match self.namespace.open(&file.path, access, buffering) {
            Ok(inner) => inner,
            // Someone else in the process took the last one. Ours come back, if there are any.
            Err(error) if error.kind() == ErrorKind::LimitReached && !may_wait => return Ok(None),
            Err(error) => return Err(error),
        };
        if let Some(expected) = file.expected {
            ensure_same(file, expected, inner.identity()?)?;
        }
        let handle = Arc::new(Counted { inner, _permit: permit });
        self.map().insert(key, Arc::downgrade(&handle));
        Ok(Some(handle))
    }

    /// Wakes whoever waits for a descriptor: the transfer has failed.
    pub(super) fn stop(&self) {
        self.permits.free.lock().unwrap_or_else(PoisonError::into_inner).stopped = true;
        self.permits.returned.notify_all();
    }

    fn map(&self) -> MutexGuard<'_, HashMap<Key, Weak<Counted>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn permit(&self, may_wait: bool) -> Option<Permit> {
        let mut free = self.permits.free.lock().unwrap_or_else(PoisonError::into_inner);
        while free.count == 0 {
            if !may_wait || free.stopped {
                return None;
            }
            free = self.permits.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        free.count -= 1;
        Some(Permit(Arc::clone(&self.permits)))
    }
}

/// Refuses a file that is not what it was.
///
/// # Errors
/// [`UnexpectedEof`](ErrorKind::UnexpectedEof) if it became shorter, else [`Changed`](ErrorKind::Changed).
pub(super) fn ensure_same(file: &FileRef, expected: Identity, found: Identity) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let (kind, what) = if (expected.device, expected.inode) != (found.device, found.inode) {
        (ErrorKind::Changed, "the file was replaced while it was being read".to_owned())
    } else if found.length < expected.length {
        let (was, is) = (expected.length, found.length);
        (ErrorKind::UnexpectedEof, format!("the file was cut from {was} to {is} bytes while it was being read"))
    } else {
        (ErrorKind::Changed, "the file was written to while it was being read".to_owned())
    };
    Err(Error::new(kind, what).with_file(&file.path).with_hint("load it again when its writer is done"))
}

/// A file that holds a permit.
#[derive(Debug)]
struct Counted {
    inner: Arc<dyn File>,
    _permit: Permit,
}

impl File for Counted {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn identity(&self) -> Result<Identity> {
        self.inner.identity()
    }

    fn direct_rules(&self) -> Option<DirectRules> {
        self.inner.direct_rules()
    }

    fn direct_rules_are_told(&self) -> bool {
        self.inner.direct_rules_are_told()
    }

    fn filesystem(&self) -> Option<String> {
        self.inner.filesystem()
    }

    fn residency(&self, extent: Extent) -> Residency {
        self.inner.residency(extent)
    }

    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.inner.read_at(target, offset)
    }

    fn write_at(&self, source: &[u8], offset: u64) -> std::io::Result<usize> {
        self.inner.write_at(source, offset)
    }

    fn allocate(&self, length: u64) -> Result<()> {
        self.inner.allocate(length)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }
}
