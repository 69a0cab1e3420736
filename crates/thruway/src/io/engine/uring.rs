//! io_uring: many requests in flight from one thread, with hardly any CPU. The way to a drive past the page
//! cache.
//!
//! Neither registered files nor registered buffers are used: at the size of our requests their gain is lost in the
//! noise (see `docs/decisions/0003-uring-without-registration.md`), and registering charges locked memory.

use std::fmt;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, squeue, types};

use super::posix::{IOV_MAX, RW_BYTES_MAX, io_vectors};
use crate::base::{Error, Result};
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};

/// Why the kernel gives this process no io_uring.
#[derive(Debug)]
pub struct UringRefused(std::io::Error);

impl UringRefused {
    /// For tests and layers that stand in for a refusing kernel.
    pub fn from_os_error(errno: i32) -> Self {
        Self(std::io::Error::from_raw_os_error(errno))
    }
}

impl fmt::Display for UringRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => match crate::storage::io_uring_disabled() {
                Some(value) if value != 0 => write!(f, "io_uring is switched off (sysctl kernel.io_uring_disabled = {value})"),
                _ => write!(f, "io_uring is blocked for this process (a container's seccomp profile or a security module)"),
            },
            Some(libc::ENOSYS) => write!(f, "the kernel has no io_uring"),
            Some(libc::ENOMEM) => write!(f, "no locked memory for io_uring (raise `ulimit -l`)"),
            Some(libc::EMFILE | libc::ENFILE) => write!(f, "no descriptor left for io_uring (raise `ulimit -n`)"),
            _ => write!(f, "io_uring cannot be used: {}", self.0),
        }
    }
}

/// What the kernel holds for one request in flight. The vectors are on the heap and never move.
struct Flight {
    request: Request,
    _vectors: Vec<libc::iovec>,
}

/// An engine over one io_uring.
pub struct Uring {
    ring: IoUring,
    flights: Vec<Option<Flight>>,
    free: Vec<usize>,
}

// SAFETY: the raw pointers in a flight's vectors point into regions that the same flight holds; the ring is used by
// whoever owns the engine, one thread at a time.
unsafe impl Send for Uring {}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Uring({} of {} in flight)", self.in_flight(), self.flights.len())
    }
}

impl Uring {
    /// A ring with room for `depth` requests, at least one.
    ///
    /// # Errors
    /// [`UringRefused`] if the kernel or a seccomp profile does not allow it.
    pub fn new(depth: u32) -> std::result::Result<Self, UringRefused> {
        let depth = depth.clamp(1, 4096);
        let ring = match IoUring::builder().dontfork().setup_coop_taskrun().build(depth) {
            // Before Linux 5.19. What it spares is being interrupted at each completion: a lane enters the kernel often enough.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().dontfork().build(depth),
            ring => ring,
        };
        let ring = ring.map_err(UringRefused)?;
        // A profile may allow the set-up and block the rest, so try one operation that does nothing.
        let mut engine = Self { ring, flights: Vec::new(), free: (0..depth as usize).rev().collect() };
        engine.flights.resize_with(depth as usize, || None);
        // SAFETY: a no-operation refers to no memory.
        if unsafe { engine.ring.submission().push(&opcode::Nop::new().build()) }.is_err() {
            return Err(UringRefused::from_os_error(libc::ENOMEM));
        }
        engine.enter(1).map_err(UringRefused)?;
        engine.ring.completion().for_each(drop);
        Ok(engine)
    }

    /// Hands the kernel what it has not taken yet, and waits for `want` completions.
    fn enter(&mut self, want: usize) -> std::io::Result<()> {
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The completion queue is full, or the kernel is short of memory for a moment: what is done must be
                // taken first, and then the rest is submitted by the next call.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) && self.has_completions() => {
                    return Ok(());
                }
                // Nothing is done yet either: wait for what is under way without submitting more.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) && self.is_under_way() => {
                    return if want == 0 { Ok(()) } else { self.wait_for_one() };
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the kernel has requests that are not done.
    fn is_under_way(&mut self) -> bool {
        let untaken = self.ring.submission().len();
        self.in_flight() > untaken
    }

    /// Waits for a completion and submits nothing.
    fn wait_for_one(&mut self) -> std::io::Result<()> {
        /// `IORING_ENTER_GETEVENTS` of linux/io_uring.h.
        const GETEVENTS: u32 = 1;
        loop {
            // SAFETY: no argument is passed, so no memory is referred to.
            match unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, GETEVENTS, None) } {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
            let index = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            let Some(flight) = self.flights.get_mut(index).and_then(Option::take) else { continue };
            self.free.push(index);
            // A negative result is the error number with its sign turned.
            let result = u64::try_from(entry.result()).map_err(|_| std::io::Error::from_raw_os_error(-entry.result()));
            done.push(Completion { request: flight.request, result });
        }
    }

    fn entry(request: &Request, vectors: &[libc::iovec], index: usize) -> Option<squeue::Entry> {
        let fd = types::Fd(request.file.descriptor()?.as_raw_fd());
        let entry = match vectors {
            [single] => {
                let (base, length) = (single.iov_base.cast::<u8>(), u32::try_from(single.iov_len).ok()?);
                match request.direction {
                    Direction::Read => opcode::Read::new(fd, base, length).offset(request.offset).build(),
                    Direction::Write => opcode::Write::new(fd, base, length).offset(request.offset).build(),
                }
            }
            many => {
                let count = u32::try_from(many.len()).ok()?;
                match request.direction {
                    Direction::Read => opcode::Readv::new(fd, many.as_ptr(), count).offset(request.offset).build(),
                    Direction::Write => opcode::Writev::new(fd, many.as_ptr(), count).offset(request.offset).build(),
                }
            }
        };
        Some(entry.user_data(index as u64))
    }
}

impl Engine for Uring {
    fn name(&self) -> EngineName {
        EngineName::Uring
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { depth: self.flights.len(), lanes: 1, segments_max: IOV_MAX, request_bytes_max: RW_BYTES_MAX }
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        let Some(index) = self.free.pop() else { return Err(Box::new(request)) };
        let vectors = io_vectors(&request);
        // A request that cannot be expressed (no descriptor) becomes an operation on a bad descriptor, and so comes
        // back with the kernel's EBADF like any other failure.
        let entry = Self::entry(&request, &vectors, index)
            .unwrap_or_else(|| opcode::Fsync::new(types::Fd(-1)).build().user_data(index as u64));
        // SAFETY: the entry points into the vectors and, through them, into the regions of a request in `flights`, where both
        // stay until the completion is reaped, or for ever if it never comes.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.free.push(index);
            return Err(Box::new(request));
        }
        self.flights[index] = Some(Flight { request, _vectors: vectors });
        // At once and one by one: of a batch the kernel holds back every request until it has prepared the last, and an
        // idle drive would wait for that (docs/decisions/0005-requests-to-a-drive.md). What the kernel does not take now, it
        // is offered again by `complete`, which reports failures.
        let _taken_now = self.ring.submit();
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        if self.in_flight() == 0 {
            return Ok(());
        }
        let before = done.len();
        loop {
            let want = usize::from(wait == Wait::ForOne && !self.has_completions());
            if want == 0 && self.ring.submission().is_empty() {
                self.reap(done);
                return Ok(());
            }
            self.enter(want).map_err(|source| Error::from_io("io_uring failed", source).with("engine", "uring"))?;
            self.reap(done);
            // A call that submitted something reports that, even if a signal then ended its waiting.
            if wait == Wait::No || done.len() > before {
                return Ok(());
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.flights.len() - self.free.len()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight() > 0 {
            if self.enter(1).is_err() {
                break;
            }
            self.reap(&mut done);
        }
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            // The kernel may still write here and can no longer be asked. Leaking is the only safe thing left.
            Box::leak(Box::new(flight));
        }
    }
}
