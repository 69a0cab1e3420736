//! Driver calls in a few words, for tests of the fake driver. Each panics on an answer that the test did not ask about.

use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::time::{Duration, Instant};

use thruway_sys::cuda::*;
use thruway_testkit::fake_cuda::FakeCuda;

/// An opened driver with a device's primary context current on this thread.
pub(crate) struct Driver {
    pub(crate) cuda: Cuda,
    device: CUdevice,
}

fn done(answer: CUresult) {
    assert_eq!(answer, CUDA_SUCCESS);
}

fn result<T>(answer: CUresult, value: T) -> Result<T, CUresult> {
    if answer == CUDA_SUCCESS { Ok(value) } else { Err(answer) }
}

// Every call below passes pointers to local variables and handles that the fake itself checks: it refuses whatever is
// not alive, which is what these tests are about.
impl Driver {
    pub(crate) fn new(fake: &FakeCuda) -> Self {
        Self::on(fake, 0)
    }

    pub(crate) fn on(fake: &FakeCuda, device: CUdevice) -> Self {
        let cuda = Cuda::load(Some(fake.path())).expect("the fake is there and complete");
        let mut context = null_mut();
        // SAFETY: see the impl.
        unsafe {
            done((cuda.cuInit)(0));
            done((cuda.cuDevicePrimaryCtxRetain)(&raw mut context, device));
            done((cuda.cuCtxSetCurrent)(context));
        }
        Self { cuda, device }
    }

    pub(crate) fn close(&self) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuDevicePrimaryCtxRelease_v2)(self.device) });
    }

    pub(crate) fn try_alloc(&self, bytes: usize) -> Result<CUdeviceptr, CUresult> {
        let mut address = 0;
        // SAFETY: see the impl.
        result(unsafe { (self.cuda.cuMemAlloc_v2)(&raw mut address, bytes) }, ()).map(|()| address)
    }

    pub(crate) fn alloc(&self, bytes: usize) -> CUdeviceptr {
        self.try_alloc(bytes).expect("room on the device")
    }

    pub(crate) fn try_free(&self, address: CUdeviceptr) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuMemFree_v2)(address) }
    }

    pub(crate) fn free(&self, address: CUdeviceptr) {
        done(self.try_free(address));
    }

    pub(crate) fn alloc_async(&self, bytes: usize, stream: CUstream) -> CUdeviceptr {
        let mut address = 0;
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemAllocAsync)(&raw mut address, bytes, stream) });
        address
    }

    pub(crate) fn free_async(&self, address: CUdeviceptr, stream: CUstream) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemFreeAsync)(address, stream) });
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemGetInfo_v2)(&raw mut free, &raw mut total) });
        (free, total)
    }

    pub(crate) fn host_alloc(&self, bytes: usize) -> *mut c_void {
        let mut pointer = null_mut();
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemHostAlloc)(&raw mut pointer, bytes, 0) });
        pointer
    }

    pub(crate) fn host_free(&self, pointer: *mut c_void) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemFreeHost)(pointer) });
    }

    pub(crate) fn register(&self, pointer: *mut c_void, bytes: usize) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuMemHostRegister_v2)(pointer, bytes, CU_MEMHOSTREGISTER_PORTABLE) }
    }

    pub(crate) fn try_unregister(&self, pointer: *mut c_void) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuMemHostUnregister)(pointer) }
    }

    pub(crate) fn unregister(&self, mapping: &Mapping) {
        done(self.try_unregister(mapping.pointer()));
    }

    pub(crate) fn try_stream(&self, flags: u32) -> Result<CUstream, CUresult> {
        let mut stream = null_mut();
        // SAFETY: see the impl.
        result(unsafe { (self.cuda.cuStreamCreate)(&raw mut stream, flags) }, ()).map(|()| stream)
    }

    pub(crate) fn stream(&self, flags: u32) -> CUstream {
        self.try_stream(flags).expect("a stream")
    }

    pub(crate) fn destroy(&self, stream: CUstream) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuStreamDestroy_v2)(stream) });
    }

    pub(crate) fn sync(&self, stream: CUstream) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuStreamSynchronize)(stream) });
    }

    pub(crate) fn query(&self, stream: CUstream) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuStreamQuery)(stream) }
    }

    pub(crate) fn try_h2d(&self, to: CUdeviceptr, from: *mut c_void, bytes: usize, stream: CUstream) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuMemcpyHtoDAsync_v2)(to, from, bytes, stream) }
    }

    pub(crate) fn h2d(&self, to: CUdeviceptr, from: *mut c_void, bytes: usize, stream: CUstream) {
        done(self.try_h2d(to, from, bytes, stream));
    }

    pub(crate) fn d2h(&self, to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemcpyDtoHAsync_v2)(to, from, bytes, stream) });
    }

    pub(crate) fn d2d(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) });
    }

    pub(crate) fn try_fill(&self, to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuMemsetD8Async)(to, value, bytes, stream) }
    }

    pub(crate) fn fill(&self, to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) {
        done(self.try_fill(to, value, bytes, stream));
    }

    /// One batch of (destination, source, bytes) by the newest function, then nothing by the older one: both must agree
    /// on refusals.
    pub(crate) fn batch(&self, copies: &[(CUdeviceptr, CUdeviceptr, usize)], order: u32, stream: CUstream) -> CUresult {
        let mut to: Vec<_> = copies.iter().map(|copy| copy.0).collect();
        let mut from: Vec<_> = copies.iter().map(|copy| copy.1).collect();
        let mut sizes: Vec<_> = copies.iter().map(|copy| copy.2).collect();
        let mut attributes = CUmemcpyAttributes { src_access_order: order, ..Default::default() };
        let (mut start, mut wrong) = (0usize, 0usize);
        let (to, from, sizes, count) = (to.as_mut_ptr(), from.as_mut_ptr(), sizes.as_mut_ptr(), copies.len());
        let (newest, older) = (self.cuda.cuMemcpyBatchAsync_v2.expect("there"), self.cuda.cuMemcpyBatchAsync.expect("there"));
        // SAFETY: see the impl; the arrays have `count` entries and one.
        unsafe {
            let answer = newest(to, from, sizes, count, &raw mut attributes, &raw mut start, 1, stream);
            let again = older(to, from, sizes, count, &raw mut attributes, &raw mut start, 1, &raw mut wrong, stream);
            assert_eq!((answer, wrong), (again, usize::MAX));
            answer
        }
    }

    pub(crate) fn event(&self, flags: u32) -> CUevent {
        let mut event = null_mut();
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuEventCreate)(&raw mut event, flags) });
        event
    }

    pub(crate) fn record(&self, event: CUevent, stream: CUstream) {
        // SAFETY: see the impl.
        done(unsafe { (self.cuda.cuEventRecord)(event, stream) });
    }

    pub(crate) fn query_event(&self, event: CUevent) -> CUresult {
        // SAFETY: see the impl.
        unsafe { (self.cuda.cuEventQuery)(event) }
    }

    /// Milliseconds.
    pub(crate) fn elapsed(&self, start: CUevent, end: CUevent) -> Result<f32, CUresult> {
        let mut milliseconds = 0.0;
        // SAFETY: see the impl.
        result(unsafe { (self.cuda.cuEventElapsedTime)(&raw mut milliseconds, start, end) }, ()).map(|()| milliseconds)
    }

    /// An address's memory type and device.
    pub(crate) fn identify(&self, address: CUdeviceptr) -> (u32, c_int) {
        let (mut kind, mut device) = (u32::MAX, c_int::MAX);
        let mut attributes = [CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
        let mut data: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut device).cast()];
        // SAFETY: see the impl; each datum has its attribute's type.
        done(unsafe { (self.cuda.cuPointerGetAttributes)(2, attributes.as_mut_ptr(), data.as_mut_ptr(), address) });
        (kind, device)
    }
}

/// Memory of the process, page-aligned. Written and read through the kernel, since copies in flight may touch it too.
pub(crate) struct Mapping {
    pointer: NonNull<c_void>,
    bytes: usize,
}

impl Mapping {
    pub(crate) fn new(bytes: usize) -> Self {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that replaces none.
        let pointer = unsafe { libc::mmap(null_mut(), bytes, protection, flags, -1, 0) };
        assert_ne!(pointer, libc::MAP_FAILED);
        Self { pointer: NonNull::new(pointer).expect("mapped"), bytes }
    }

    pub(crate) fn registered(driver: &Driver, bytes: usize) -> Self {
        let mapping = Self::new(bytes);
        done(driver.register(mapping.pointer(), bytes));
        mapping
    }

    pub(crate) fn pointer(&self) -> *mut c_void {
        self.pointer.as_ptr()
    }

    /// Takes the memory away but keeps the addresses, so that no other thread's memory comes to lie there.
    pub(crate) fn vanish(&self) {
        // SAFETY: the mapping is ours and holds nothing that Rust knows of.
        assert_eq!(unsafe { libc::mprotect(self.pointer(), self.bytes, libc::PROT_NONE) }, 0);
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes);
        let (local, remote) = (span(bytes.as_ptr().cast_mut().cast(), bytes.len()), span(self.pointer(), bytes.len()));
        // SAFETY: both ranges are mapped and that long.
        let moved = unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        assert_eq!(usize::try_from(moved), Ok(bytes.len()));
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        let (local, remote) = (span(bytes.as_mut_ptr().cast(), self.bytes), span(self.pointer(), self.bytes));
        // SAFETY: both ranges are mapped and that long.
        let moved = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        assert_eq!(usize::try_from(moved), Ok(self.bytes));
        bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody uses it after the test.
        unsafe { libc::munmap(self.pointer(), self.bytes) };
    }
}

fn span(pointer: *mut c_void, bytes: usize) -> libc::iovec {
    libc::iovec { iov_base: pointer, iov_len: bytes }
}

/// Whether the CPU may read at an address.
pub(crate) fn is_readable(address: u64) -> bool {
    let mut byte = 0u8;
    let address = usize::try_from(address).expect("64 bits");
    let (local, remote) = (span((&raw mut byte).cast(), 1), span(std::ptr::without_provenance_mut(address), 1));
    // SAFETY: the kernel checks the remote range.
    unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) == 1 }
}

/// Waits for something that happens on another thread.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes that depend on their place and a seed.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes)
        .map(|index| index.to_le_bytes().iter().fold(seed, |state, byte| state.wrapping_mul(31).wrapping_add(*byte)))
        .collect()
}

/// Runs `body` in a forked child, and says what it said. The child has one thread, so `body` must neither lock nor
/// allocate.
pub(crate) fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls only `body` and `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let status = if body() { 0 } else { 1 };
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: our child; a writable number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}
