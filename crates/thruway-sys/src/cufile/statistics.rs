//! cuFile's statistics of level 3, whose structure grew from version to version.
//!
//! ```text
//!            1.15 to 1.18   1.19, 1.20
//! level 1         0              0        totals; 1.19 added twelve words for vectored calls
//! level 2       512            624        two histograms of 32 words
//! GPUs         1024           1136        a 32-bit count
//! per GPU      1032           1144        16 × 248 bytes
//! end          5000           5112
//! ```
//! The library writes what *its* version has. A program with an older header gives it too little room, so the room here is
//! far more than any version has taken, and a version that nobody has looked at is refused.

use std::ffi::{c_int, c_void};

use super::types::CUfilePerGpuStats_t;

/// Room for the statistics of any version. Written by the library through [`as_mut_ptr`](Self::as_mut_ptr).
#[derive(Debug)]
pub struct StatsBuffer(Box<[u64; WORDS]>);

/// 64 KiB, thirteen times what 1.20 writes.
const WORDS: usize = 8192;

/// The most GPUs that a structure holds.
const GPUS_MAX: usize = 16;

/// Where the parts lie in one version's structure, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatsLayout {
    /// The count of GPUs.
    pub num_gpus_at: usize,
    /// The first GPU's statistics.
    pub per_gpu_at: usize,
}

impl StatsLayout {
    /// The layout of a version as [`cuFileGetVersion`](super::CuFile::cuFileGetVersion) gives it; `None` for one whose header
    /// nobody has read.
    pub const fn of_version(version: c_int) -> Option<Self> {
        match version {
            1150..1190 => Some(Self { num_gpus_at: 1024, per_gpu_at: 1032 }),
            1190..1210 => Some(Self { num_gpus_at: 1136, per_gpu_at: 1144 }),
            _ => None,
        }
    }
}

impl Default for StatsBuffer {
    fn default() -> Self {
        Self(Box::new([0; WORDS]))
    }
}

impl StatsBuffer {
    /// What `cuFileGetStatsL3` is given.
    pub fn as_mut_ptr(&mut self) -> *mut c_void {
        self.0.as_mut_ptr().cast()
    }

    /// What a library with this layout wrote about each GPU.
    pub fn per_gpu(&self, layout: StatsLayout) -> Vec<CUfilePerGpuStats_t> {
        let base = self.0.as_ptr().cast::<u8>();
        // SAFETY: the offset is one of the two above, far within the buffer, and any bits are a number.
        let count = unsafe { base.add(layout.num_gpus_at).cast::<u32>().read_unaligned() };
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(GPUS_MAX);
        let each = |index: usize| {
            let at = layout.per_gpu_at + index * size_of::<CUfilePerGpuStats_t>();
            // SAFETY: at most 16 × 248 bytes from an offset above, which is within the buffer; any bits are numbers.
            unsafe { base.add(at).cast::<CUfilePerGpuStats_t>().read_unaligned() }
        };
        (0..count).map(each).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_nobody_has_looked_at_have_no_layout() {
        for version in [0, 1140, 1210, 2000] {
            assert_eq!(StatsLayout::of_version(version), None, "{version}");
        }
        assert_ne!(StatsLayout::of_version(1150), StatsLayout::of_version(1200));
        assert_eq!(StatsLayout::of_version(1180), StatsLayout::of_version(1150));
    }

    #[test]
    fn a_count_beyond_the_structure_is_cut_to_it() {
        let layout = StatsLayout::of_version(1190).expect("known");
        let mut buffer = StatsBuffer::default();
        buffer.0.fill(u64::MAX);
        assert_eq!(buffer.per_gpu(layout).len(), GPUS_MAX);
        assert_eq!(buffer.per_gpu(layout)[15].reg_bytes, u64::MAX);
        assert_eq!(StatsBuffer::default().per_gpu(layout), []);
    }
}
