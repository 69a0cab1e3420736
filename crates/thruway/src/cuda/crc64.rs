//! CRC-64/NVME of a GPU's memory, computed by the GPU: for bytes that no processor of the host sees.
//!
//! The kernel is `crc64.cu`; what the driver gets, and compiles for the GPU at hand, is the PTX that `scripts/build-ptx` makes of it.
//! It is tried out on known bytes before it is believed: a wrong checksum in a manifest would make a good checkpoint a damaged one.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use crc_fast::CrcAlgorithm::Crc64Nvme;
use thruway_sys::cuda::{CUfunction, CUmodule};

use super::gpu::Gpu;
use super::stream::Stream;
use crate::base::{Error, ErrorKind, Result};

/// The driver wants a zero at the end.
const PTX: &str = concat!(include_str!("crc64.ptx"), "\0");
const ENTRY: &CStr = c"thruway_crc64";
/// `THREADS` in crc64.cu.
const THREADS: u32 = 256;
/// Four for each multiprocessor of the largest GPUs, more than which would only make more tables.
const BLOCKS_MAX: usize = 512;
/// How many pieces one launch takes: their descriptions, 384 KiB, stay allocated.
const PIECES_MAX: usize = 16 << 10;

/// `Piece` in crc64.cu.
#[repr(C)]
struct Piece {
    address: u64,
    bytes: u64,
    remainder: u64,
}

/// The kernel on a GPU, loaded and found to be right.
#[derive(Debug)]
pub struct Crc64 {
    stream: Stream,
    module: CUmodule,
    function: CUfunction,
    /// Room for the descriptions of pieces in the GPU's memory; whoever has the lock uses it.
    room: Mutex<u64>,
}

// SAFETY: handles of modules and kernels may be used from any thread; the driver does its own locking.
unsafe impl Send for Crc64 {}
// SAFETY: as above.
unsafe impl Sync for Crc64 {}

impl Crc64 {
    /// Loads the kernel, which the driver compiles the first time, and tries it out.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) or [`OutOfMemory`](ErrorKind::OutOfMemory) if the driver refuses, [`Mismatch`](ErrorKind::Mismatch) if
    /// the kernel computes something else here.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let _current = gpu.current()?;
        let stream = Stream::new(gpu)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the text ends in a zero, the pointer is to a local that lives through the call, and a context is current.
        let code = unsafe { (gpu.cuda().cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()) };
        gpu.driver().check(code, "cuModuleLoadData")?;
        let mut kernel = Self { stream, module, function: std::ptr::null_mut(), room: Mutex::new(0) };
        // SAFETY: as above; the module is alive.
        let code = unsafe { (gpu.cuda().cuModuleGetFunction)(&raw mut kernel.function, module, ENTRY.as_ptr()) };
        gpu.driver().check(code, "cuModuleGetFunction")?;
        *kernel.room.get_mut().unwrap_or_else(PoisonError::into_inner) = gpu.allocate(PIECES_MAX * size_of::<Piece>())?;
        kernel.try_out()?;
        Ok(kernel)
    }

    /// Sums known bytes, for which there is room behind the descriptions of a few pieces.
    fn try_out(&self) -> Result<()> {
        const BEHIND: u64 = 4096;
        let bytes: Vec<u8> = (0..70_000_u32).map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
        let ranges = [0..bytes.len(), 0..4096, 3..9, 5..2061, 16_383..69_998];
        let room = *self.room.lock().unwrap_or_else(PoisonError::into_inner) + BEHIND;
        // SAFETY: the room has as many bytes, and nobody else knows of this value yet; the copy is waited for.
        unsafe { self.stream.copy_to_gpu(room, bytes.as_ptr(), bytes.len()) }.and_then(|()| self.stream.synchronize())?;
        let pieces: Vec<(u64, u64)> = ranges.iter().map(|range| (room + range.start as u64, range.len() as u64)).collect();
        // SAFETY: the pieces lie in the room, beyond the few descriptions that a launch puts there.
        let found = unsafe { self.remainders(&pieces) }?;
        let crc = |bytes: &[u8]| crc_fast::checksum(Crc64Nvme, bytes);
        let expected = ranges.map(|range| crc(&bytes[range.clone()]) ^ crc(&vec![0; range.len()]));
        if found != expected {
            return Err(Error::new(ErrorKind::Mismatch, "the GPU computes wrong checksums of known bytes"));
        }
        Ok(())
    }

    /// The remainders of pieces of the GPU's memory, by addresses and lengths: what the CRC's register holds behind a piece if it
    /// was zero before it, and nothing is inverted.
    ///
    /// # Safety
    /// The pieces are valid memory of this GPU. Nothing writes to them until this returns, and what did is done.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver fails.
    pub unsafe fn remainders(&self, pieces: &[(u64, u64)]) -> Result<Vec<u64>> {
        let _current = self.stream.gpu().current()?;
        let room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let mut remainders = Vec::with_capacity(pieces.len());
        for pieces in pieces.chunks(PIECES_MAX) {
            let mut list: Vec<Piece> = pieces.iter().map(|&(address, bytes)| Piece { address, bytes, remainder: 0 }).collect();
            // SAFETY: the caller's promise; the room is for as many, and the lock is held.
            let queued = unsafe { self.queue(*room, &mut list) };
            if let Err(error) = self.stream.synchronize() {
                // Nobody knows whether the copies are still under way.
                list.leak();
                return Err(error);
            }
            queued?;
            remainders.extend(list.iter().map(|piece| piece.remainder));
        }
        Ok(remainders)
    }

    /// Queues the copy of the list to the GPU, the kernel, and the copy back.
    ///
    /// # Safety
    /// As [`remainders`](Self::remainders); `room` is memory for the list that nobody else uses, and the list stays until the stream
    /// was waited for, whatever this returns.
    unsafe fn queue(&self, room: u64, list: &mut [Piece]) -> Result<()> {
        let (gpu, bytes) = (self.stream.gpu(), size_of_val(list));
        // SAFETY: the caller's promise.
        unsafe { self.stream.copy_to_gpu(room, list.as_ptr().cast(), bytes)? };
        let (mut address, mut count) = (room, list.len() as u64);
        let mut parameters: [*mut c_void; 2] = [(&raw mut address).cast(), (&raw mut count).cast()];
        let blocks = u32::try_from(list.len().min(BLOCKS_MAX)).unwrap_or(1);
        // SAFETY: the kernel takes a pointer and a number of 64 bits, which are read before the call returns; it touches the pieces and
        // their descriptions alone. Module, function and stream are alive, and of one context.
        let code = unsafe {
            (gpu.cuda().cuLaunchKernel)(
                self.function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream.handle(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        gpu.driver().check(code, "cuLaunchKernel")?;
        // SAFETY: the caller's promise; a list of numbers may hold any bytes.
        unsafe { self.stream.copy_to_host(list.as_mut_ptr().cast(), room, bytes) }
    }
}

impl Drop for Crc64 {
    fn drop(&mut self) {
        let gpu = self.stream.gpu();
        let Ok(_current) = gpu.current() else { return };
        let room = *self.room.get_mut().unwrap_or_else(PoisonError::into_inner);
        if room != 0 {
            // SAFETY: nothing of ours is under way: whoever queued something waited for it, or else the context is lost.
            let _shutting_down = unsafe { gpu.free(room) };
        }
        // SAFETY: the module is alive, and as above.
        let _shutting_down = unsafe { (gpu.cuda().cuModuleUnload)(self.module) };
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::{PTX, THREADS};

    #[test]
    fn the_ptx_was_made_of_the_source_beside_it() {
        let digest = Sha256::digest(include_bytes!("crc64.cu")).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert!(PTX.contains(&digest), "crc64.cu has changed since crc64.ptx was made: run scripts/build-ptx");
        assert!(PTX.contains(&format!(".maxntid {THREADS}, 1, 1")), "another number of threads");
    }
}
