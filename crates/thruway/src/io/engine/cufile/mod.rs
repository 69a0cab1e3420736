//! cuFile: NVIDIA's library for DMA between drives and GPU memory.
//!
//! ```text
//! path        whether the drive below a file reaches this GPU, tried out; what is proven afterwards
//! conditions  whether cuFile may be opened here at all, from facts
//! driver      cuFile, opened once in a process
//! files       registered files            evidence   counters, and what they prove
//! failure     codes as errors             (here)     the engine
//! ```
//!
//! The engine has threads that each wait in one `cuFileRead` or `cuFileWrite`. cuFile's batches are not used: they are direct on
//! some filesystems only, and in compatibility mode a batch larger than a pool of the library's never ends. Its stream calls
//! are not either: with no configuration file 1.15 refuses them, and an error arrives where nobody waits.
//!
//! Requests to memory that is [registered](crate::memory::Region::is_registered) name its block and an offset, which is what
//! makes cuFile move the bytes in place. Host memory is taken too; cuFile moves that through the page cache or past it.

mod conditions;
mod driver;
mod evidence;
mod failure;
mod files;
mod path;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use thruway_sys::cufile::{IoReturn, off_t};

pub use path::{CuFileOptions, CuFilePath};

use self::driver::Driver;
use self::failure::check_io;
use self::files::Files;
use super::posix::RW_BYTES_MAX;
use crate::base::Result;
use crate::cuda::Gpu;
use crate::io::{Capabilities, Completion, Direction, Engine, EngineName, Request, Wait};
use crate::memory::Region;

/// The most requests in flight, which is the most threads.
const DEPTH_MAX: usize = 64;
/// Regions of one request are moved one after another, so more of them gain nothing.
const SEGMENTS_MAX: usize = 16;

/// An engine over cuFile.
struct CuFile {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
    in_flight: usize,
}

/// What the threads share.
struct Shared {
    driver: Arc<Driver>,
    gpu: Arc<Gpu>,
    files: Arc<Files>,
    state: Mutex<State>,
    /// There is something to do, or nothing ever again.
    work: Condvar,
    /// Something is done.
    done: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Request>,
    done: Vec<Completion>,
    /// How many threads wait for work.
    idle: usize,
    closing: bool,
}

impl std::fmt::Debug for CuFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CuFile({} of {} in flight)", self.in_flight, self.depth)
    }
}

impl CuFile {
    /// An engine with room for `depth` requests, at least one. Threads are started as they are needed.
    fn new(driver: &Arc<Driver>, gpu: &Arc<Gpu>, files: &Arc<Files>, depth: usize) -> Self {
        let shared = Shared {
            driver: Arc::clone(driver),
            gpu: Arc::clone(gpu),
            files: Arc::clone(files),
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        };
        Self { shared: Arc::new(shared), threads: Vec::new(), depth: depth.clamp(1, DEPTH_MAX), in_flight: 0 }
    }
}

impl Engine for CuFile {
    fn name(&self) -> EngineName {
        EngineName::CuFile
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { depth: self.depth, lanes: 1, segments_max: SEGMENTS_MAX, request_bytes_max: RW_BYTES_MAX }
    }

    fn submit(&mut self, request: Request) -> Result<(), Box<Request>> {
        if self.in_flight == self.depth {
            return Err(Box::new(request));
        }
        self.in_flight += 1;
        let mut state = self.shared.lock();
        state.queue.push_back(request);
        if state.queue.len() > state.idle && self.threads.len() < self.depth {
            let shared = Arc::clone(&self.shared);
            match std::thread::Builder::new().name("thruway-cufile".to_owned()).spawn(move || shared.serve()) {
                Ok(thread) => self.threads.push(thread),
                // Fewer threads are slower; none at all is a failure of what was just asked for.
                Err(source) if self.threads.is_empty() => {
                    let requests = std::mem::take(&mut state.queue);
                    let errno = source.raw_os_error().unwrap_or(libc::EAGAIN);
                    let failed = |request| Completion { request, result: Err(std::io::Error::from_raw_os_error(errno)) };
                    state.done.extend(requests.into_iter().map(failed));
                }
                Err(_) => {}
            }
        }
        self.shared.work.notify_one();
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<Completion>, wait: Wait) -> Result<()> {
        let mut state = self.shared.lock();
        while wait == Wait::ForOne && state.done.is_empty() && self.in_flight > 0 {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.in_flight -= state.done.len();
        done.append(&mut state.done);
        drop(state);
        if self.in_flight == 0 {
            self.shared.files.settle();
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended as well.
            let _ended = thread.join();
        }
        self.shared.files.settle();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One thread's work: requests, one after another, until the engine is dropped and none is left.
    fn serve(&self) {
        let current = self.gpu.current();
        let mut state = self.lock();
        loop {
            let Some(request) = state.queue.pop_front() else {
                if state.closing {
                    return;
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            let result = match &current {
                Ok(_) => self.perform(&request),
                Err(error) => Err(crate::base::Error::new(error.kind(), error.message()).into_io()),
            };
            state = self.lock();
            state.done.push(Completion { request, result });
            self.done.notify_one();
        }
    }

    /// Moves a request's regions, one after another, until one comes up short.
    fn perform(&self, request: &Request) -> std::io::Result<u64> {
        let bad = |errno| Err(std::io::Error::from_raw_os_error(errno));
        let Some(descriptor) = request.file.descriptor() else { return bad(libc::EBADF) };
        if request.length() == 0 {
            return Ok(0);
        }
        let handle = self.files.get(&self.driver, descriptor.as_fd()).map_err(crate::base::Error::into_io)?;
        let mut total = 0;
        for segment in request.segments.iter().filter(|segment| !segment.is_empty()) {
            let Ok(offset) = off_t::try_from(request.offset + total) else { return bad(libc::EINVAL) };
            match self.transfer(&handle, request.direction, segment, offset) {
                Ok(moved) => {
                    total += moved;
                    if moved < segment.len() as u64 {
                        break;
                    }
                }
                // What was moved before is moved. The failure comes back when the rest is asked for.
                Err(_) if total > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    /// One call.
    fn transfer(&self, handle: &files::Handle, direction: Direction, segment: &Region, offset: off_t) -> std::io::Result<u64> {
        let start = if segment.is_registered() { segment.block_address() } else { segment.address() };
        let within = off_t::try_from(segment.address() - start).unwrap_or(off_t::MAX);
        let base = std::ptr::with_exposed_provenance_mut::<c_void>(start);
        let table = &self.driver.table;
        // SAFETY: the request holds the region, so its memory is valid for the length until this returns; a read's region is
        // writable (checked by the planner); the handle is registered while it is held.
        let returned = unsafe {
            match direction {
                Direction::Read => (table.cuFileRead)(handle.raw(), base, segment.len(), offset, within),
                Direction::Write => (table.cuFileWrite)(handle.raw(), base.cast_const(), segment.len(), offset, within),
            }
        };
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        let call = if direction == Direction::Read { "cuFileRead" } else { "cuFileWrite" };
        check_io(IoReturn::decode(returned, errno), call)
    }
}
