//! What is counted, and how each version writes it.

use std::ffi::c_void;

use thruway_sys::cufile::{CUfilePerGpuStats_t, StatsLayout};

use crate::config::Way;

/// The most GPUs of the structure.
pub(crate) const GPUS: usize = 16;

/// Counts an operation of `bytes` bytes.
pub(crate) fn count(gpu: &mut CUfilePerGpuStats_t, is_read: bool, way: Way, bytes: u64) {
    let (total, p2p, nvfs, posix, all) = if is_read {
        (&mut gpu.n_total_reads, &mut gpu.n_p2p_reads, &mut gpu.n_nvfs_reads, &mut gpu.n_posix_reads, &mut gpu.read_bytes)
    } else {
        (&mut gpu.n_total_writes, &mut gpu.n_p2p_writes, &mut gpu.n_nvfs_writes, &mut gpu.n_posix_writes, &mut gpu.writes_bytes)
    };
    *total += 1;
    *all += bytes;
    match way {
        Way::P2p => *p2p += 1,
        Way::Nvfs => *nvfs += 1,
        Way::Posix => *posix += 1,
    }
}

/// Writes the structure of level 3 in a version's layout, from its first byte to its last.
///
/// # Safety
/// `out` has room for that version's structure.
pub(crate) unsafe fn write(out: *mut c_void, layout: StatsLayout, gpus: &[CUfilePerGpuStats_t]) {
    let each = size_of::<CUfilePerGpuStats_t>();
    let out = out.cast::<u8>();
    // SAFETY: the caller's promise: the structure ends after the sixteenth GPU.
    unsafe {
        out.write_bytes(0, layout.per_gpu_at + GPUS * each);
        out.add(layout.num_gpus_at).cast::<u32>().write_unaligned(u32::try_from(gpus.len()).unwrap_or(0));
        for (index, gpu) in gpus.iter().take(GPUS).enumerate() {
            out.add(layout.per_gpu_at + index * each).cast::<CUfilePerGpuStats_t>().write_unaligned(*gpu);
        }
    }
}

/// What nvidia-fs has moved in all.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NvfsTotals {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    pub(crate) writes: u64,
    pub(crate) write_bytes: u64,
}

impl NvfsTotals {
    /// The text of `/proc/driver/nvidia-fs/stats`, as far as anybody reads it.
    pub(crate) fn text(self) -> String {
        let Self { reads, read_bytes, writes, write_bytes } = self;
        let (read_mib, write_mib) = (read_bytes >> 20, write_bytes >> 20);
        format!(
            "GDS Version: 1.15.0.0\nNVFS statistics(ver: 4.0)\nNVFS Driver(version: 2.28.4)\n\
             Mellanox PeerDirect Supported: False\nIO stats: Enabled, peer IO stats: Disabled\nLogging level: info\n\n\
             Active Shadow-Buffer (MiB): 0\nActive Process: 1\n\
             Batches\t\t\t\t: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0\n\
             Reads\t\t\t\t: n={reads} ok={reads} err=0 readMiB={read_mib} io_state_err=0\n\
             Reads\t\t\t\t: Bandwidth(MiB/s)=1 Avg-Latency(usec)=1\n\
             Sparse Reads\t\t\t: n=0 io=0 holes=0 pages=0\n\
             Writes\t\t\t\t: n={writes} ok={writes} err=0 writeMiB={write_mib} io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0\n\
             Writes\t\t\t\t: Bandwidth(MiB/s)=1 Avg-Latency(usec)=1\n"
        )
    }
}
