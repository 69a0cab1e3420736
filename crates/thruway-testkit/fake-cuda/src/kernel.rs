//! Device code: the one kernel that the product has, done by the CPU, and modules of PTX that are looked at for its name.

use std::ptr::without_provenance_mut;

use crc_fast::CrcAlgorithm::Crc64Nvme;
use thruway_sys::cuda::{CUDA_ERROR_INVALID_HANDLE, CUfunction, CUmodule, CUresult};

use crate::fault::FaultKind;
use crate::world::{Answer, World, address};

/// The kernel, whose parameters are the address of its pieces and their number.
pub(crate) const ENTRY: &str = "thruway_crc64";

const HANDLE_BASE: u64 = 0x4d4f_0000_0000;
const HANDLE_STRIDE: u64 = 0x100;

/// A loaded module.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) context: usize,
    /// Its PTX.
    pub(crate) text: String,
}

impl Module {
    /// Whether it has an entry of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.text.lines().any(|line| line.trim_start_matches(".visible ").strip_prefix(".entry ") == Some(&format!("{name}(")))
    }

    /// How many threads a block of its kernel has: what it was compiled for.
    pub(crate) fn threads(&self) -> Option<u32> {
        let sizes = self.text.lines().find_map(|line| line.strip_prefix(".maxntid "))?;
        sizes.split(',').next()?.trim().parse().ok()
    }
}

/// A launch of the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) pieces: usize,
    pub(crate) count: usize,
}

/// Address, length and remainder.
pub(crate) const PIECE_BYTES: usize = 24;

impl World {
    /// The handle of a module, and of its kernel.
    pub(crate) fn module_handle(id: u64) -> CUmodule {
        without_provenance_mut(address(HANDLE_BASE + id * HANDLE_STRIDE))
    }

    /// The number of the module that a handle means, or whose kernel it means.
    pub(crate) fn module(&mut self, handle: CUmodule) -> Result<u64, CUresult> {
        self.ready()?;
        let id = (handle.addr() as u64).wrapping_sub(HANDLE_BASE) / HANDLE_STRIDE;
        if self.modules.contains_key(&id) && Self::module_handle(id) == handle {
            return Ok(id);
        }
        self.refuse(FaultKind::StaleHandle, format!("module {handle:?}"), CUDA_ERROR_INVALID_HANDLE)
    }

    /// The handle of a module's kernel.
    pub(crate) fn kernel_handle(id: u64) -> CUfunction {
        Self::module_handle(id).cast()
    }

    /// Does what the kernel does: adds to the remainder of each piece that of its bytes.
    pub(crate) fn launch(&mut self, launch: Launch) -> Answer {
        let wrong = u64::from(self.config.wrong_sums);
        for number in 0..launch.count {
            let own = self.view(launch.pieces + number * PIECE_BYTES, PIECE_BYTES)?.cast::<u64>();
            // SAFETY: `view` checked that one live allocation holds the piece's description; its bytes are ours under the lock.
            let [start, length, remainder] =
                unsafe { [own.read_unaligned(), own.add(1).read_unaligned(), own.add(2).read_unaligned()] };
            let length = address(length);
            if length > 0 {
                let view = self.view(address(start), length)?;
                // SAFETY: as above, of the piece.
                let bytes = unsafe { std::slice::from_raw_parts(view, length) };
                let crc = |bytes: &[u8]| crc_fast::checksum(Crc64Nvme, bytes);
                let found = crc(bytes) ^ crc(&vec![0; length]) ^ wrong;
                // SAFETY: as above, of the description.
                unsafe { own.add(2).write_unaligned(remainder ^ found) };
            }
        }
        Ok(())
    }
}
