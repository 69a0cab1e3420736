//! `preadv(2)` and `pwritev(2)` on threads: works everywhere, and is the way to copy out of the page cache.
//!
//! A copy from the page cache is work for a CPU, about 8 to 11 GB/s a core, so it wants several threads;
//! io_uring would do such copies one after another on the submitting thread.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::base::{Error, Result};
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};

/// `UIO_MAXIOV` of the kernel: the most buffers of one vectored call.
pub(super) const IOV_MAX: usize = 1024;
/// `MAX_RW_COUNT` of the kernel: a single call moves at most 2 GiB less a page.
pub(super) const RW_BYTES_MAX: usize = 0x7fff_f000;

/// An engine of worker threads.
#[derive(Debug)]
pub struct Posix {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    in_flight: usize,
    depth: usize,
}

#[derive(Debug, Default)]
struct Shared {
    queues: Mutex<Queues>,
    work: Condvar,
    finished: Condvar,
}

#[derive(Debug, Default)]
struct Queues {
    todo: VecDeque<Request>,
    done: Vec<Completion>,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Posix {
    /// An engine of `threads` workers, at least one.
    ///
    /// # Errors
    /// [`LimitReached`](crate::ErrorKind::LimitReached) or [`Io`](crate::ErrorKind::Io) if no thread can be
    /// started. Fewer than asked for is no error.
    pub fn new(threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let mut workers = Vec::new();
        for index in 0..threads.max(1) {
            let for_worker = Arc::clone(&shared);
            match std::thread::Builder::new().name(format!("thruway-posix-{index}")).spawn(move || work(&for_worker)) {
                Ok(handle) => workers.push(handle),
                Err(_) if !workers.is_empty() => break,
                Err(source) => return Err(Error::from_io("cannot start an I/O thread", source).with("engine", "posix")),
            }
        }
        // Two in flight a worker: the next request is there when one is done.
        let depth = workers.len() * 2;
        Ok(Self { shared, workers, in_flight: 0, depth })
    }
}

impl Engine for Posix {
    fn name(&self) -> EngineName {
        EngineName::Posix
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { depth: self.depth, segments_max: IOV_MAX, request_bytes_max: RW_BYTES_MAX }
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        if self.in_flight == self.depth {
            return Err(Box::new(request));
        }
        self.in_flight += 1;
        self.shared.lock().todo.push_back(request);
        self.shared.work.notify_one();
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        let mut queues = self.shared.lock();
        while queues.done.is_empty() && wait == Wait::ForOne && self.in_flight > 0 {
            queues = self.shared.finished.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
        self.in_flight -= queues.done.len();
        done.append(&mut queues.done);
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Posix {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker cannot panic: it makes one system call after another. If one did, its request is lost with it.
            drop(worker.join());
        }
    }
}

fn work(shared: &Shared) {
    let mut queues = shared.lock();
    loop {
        if let Some(request) = queues.todo.pop_front() {
            drop(queues);
            let result = transfer_once(&request);
            queues = shared.lock();
            queues.done.push(Completion { request, result });
            shared.finished.notify_one();
        } else if queues.stop {
            return;
        } else {
            queues = shared.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
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
