//! `preadv(2)` and `pwritev(2)` on the thread that drives the engine: works everywhere, and is the way to copy out of
//! the page cache.
//!
//! Such a copy is work for a CPU, about 6 to 11 GB/s a core, so it wants several threads, and a transfer runs several
//! lanes with such an engine each. Nothing is handed from thread to thread: what was read is copied on by the thread that
//! read it, with its bytes still in that core's cache, and no thread has to be woken for each request.

use std::os::fd::AsRawFd;

use crate::base::Result;
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};

/// `UIO_MAXIOV` of the kernel: the most buffers of one vectored call.
pub(super) const IOV_MAX: usize = 1024;
/// `MAX_RW_COUNT` of the kernel: a single call moves at most 2 GiB less a page.
pub(super) const RW_BYTES_MAX: usize = 0x7fff_f000;

/// An engine of plain system calls, one at a time.
#[derive(Debug)]
pub struct Posix {
    accepted: Option<Request>,
    lanes: usize,
}

impl Posix {
    /// An engine of which `lanes` work best side by side.
    pub fn new(lanes: usize) -> Self {
        Self { accepted: None, lanes: lanes.max(1) }
    }
}

impl Engine for Posix {
    fn name(&self) -> EngineName {
        EngineName::Posix
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { depth: 1, lanes: self.lanes, segments_max: IOV_MAX, request_bytes_max: RW_BYTES_MAX }
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        if self.accepted.is_some() {
            return Err(Box::new(request));
        }
        self.accepted = Some(request);
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        if wait == Wait::ForOne
            && let Some(request) = self.accepted.take()
        {
            let result = transfer_once(&request);
            done.push(Completion { request, result });
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        usize::from(self.accepted.is_some())
    }
}

/// The segments as the kernel wants them. The pointers are good for as long as the request is.
pub(super) fn io_vectors(request: &Request) -> Vec<libc::iovec> {
    let segments = request.segments.iter().filter(|segment| !segment.is_empty());
    segments.map(|segment| libc::iovec { iov_base: segment.address() as *mut libc::c_void, iov_len: segment.len() }).collect()
}

/// One vectored call.
fn transfer_once(request: &Request) -> std::io::Result<u64> {
    let Some(descriptor) = request.file.descriptor() else {
        return Err(std::io::Error::from_raw_os_error(libc::EBADF));
    };
    let vectors = io_vectors(request);
    let count = libc::c_int::try_from(vectors.len()).map_err(|_| std::io::Error::from_raw_os_error(libc::EINVAL))?;
    let offset = libc::off_t::try_from(request.offset).map_err(|_| std::io::Error::from_raw_os_error(libc::EINVAL))?;
    let fd = descriptor.as_raw_fd();
    // SAFETY: each vector is a region that the request holds, valid for its length (contract of `Memory`), and
    // writable where it is read into (checked by the planner, which makes only writable regions destinations).
    let result = unsafe {
        match request.direction {
            Direction::Read => libc::preadv(fd, vectors.as_ptr(), count, offset),
            Direction::Write => libc::pwritev(fd, vectors.as_ptr(), count, offset),
        }
    };
    u64::try_from(result).map_err(|_| std::io::Error::last_os_error())
}
