//! What proves that bytes went directly.
//!
//! A successful call proves nothing, and neither do the driver's properties: both are the same in cuFile's compatibility mode.
//! Two things count. cuFile keeps statistics for each GPU (from 1.15 on): bytes, and requests by the way that they went: the
//! kernel's peer-to-peer DMA, nvidia-fs, or `posix`, which is host memory. And nvidia-fs counts what passes it, for the whole
//! machine and in MiB. Bytes are called direct if, between two readings, the first moved by them and no request went another
//! way; or, where there are no such statistics, if the second moved by them.
//!
//! The statistics are of the process: another user of cuFile on the same GPU can only spoil a proof (a request through host
//! memory at the same time), or hide in it bytes of ours that were not counted at all while all of its were. The second would
//! take a library that counts some requests and not others.

use std::sync::Arc;

use thruway_sys::cufile::CUfilePerGpuStats_t;

use super::driver::Driver;
use crate::io::direct::Verdict;

/// What cuFile has counted for a GPU, reads and writes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    bytes: u64,
    requests: u64,
    direct: u64,
    posix: u64,
}

impl From<&CUfilePerGpuStats_t> for Counted {
    fn from(gpu: &CUfilePerGpuStats_t) -> Self {
        let sum = |numbers: &[u64]| numbers.iter().fold(0, |sum: u64, number| sum.wrapping_add(*number));
        Self {
            bytes: sum(&[gpu.read_bytes, gpu.writes_bytes]),
            requests: sum(&[gpu.n_total_reads, gpu.n_total_writes]),
            direct: sum(&[gpu.n_p2p_reads, gpu.n_nvfs_reads, gpu.n_p2p_writes, gpu.n_nvfs_writes]),
            posix: sum(&[gpu.n_posix_reads, gpu.n_posix_writes]),
        }
    }
}

/// What nvidia-fs has counted for the whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NvidiaFsCounted {
    requests: u64,
    mebibytes: u64,
}

impl NvidiaFsCounted {
    /// Reads `/proc/driver/nvidia-fs/stats`; `None` if it has not the two lines.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let number = |line: &str, key: &str| {
            line.split_whitespace().find_map(|word| word.strip_prefix(key)).and_then(|number| number.parse::<u64>().ok())
        };
        let line = |name: &str, key: &str| {
            let of_name = |line: &&str| line.split(':').next().is_some_and(|head| head.trim() == name);
            text.lines().filter(of_name).find_map(|line| Some((number(line, "ok=")?, number(line, key)?)))
        };
        let ((reads, read), (writes, written)) = (line("Reads", "readMiB=")?, line("Writes", "writeMiB=")?);
        Some(Self { requests: reads.wrapping_add(writes), mebibytes: read.wrapping_add(written) })
    }
}

/// The counters at one moment.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    cufile: Result<Counted, String>,
    nvidia_fs: Option<NvidiaFsCounted>,
}

impl Reading {
    /// The counters of a GPU now.
    pub(super) fn now(driver: &Driver, uuid: &[u8; 16]) -> Self {
        Self { cufile: driver.counted(uuid), nvidia_fs: driver.nvidia_fs_counted() }
    }

    /// The counters when the library was opened.
    pub(super) fn at_opening(driver: &Driver, uuid: &[u8; 16]) -> Self {
        let (cufile, nvidia_fs) = driver.at_opening();
        Self { cufile: cufile.map_or_else(|| driver.counted(uuid).map(|_| Counted::default()), Ok), nvidia_fs }
    }

    /// Whether `bytes` bytes, moved between this reading and a later one, went directly.
    pub(super) fn verdict(&self, later: &Self, bytes: u64) -> Verdict {
        match judge(self, later, bytes) {
            Ok(()) => Verdict::Proven,
            Err(why) => Verdict::Unproven(Arc::from(why)),
        }
    }
}

fn judge(before: &Reading, after: &Reading, bytes: u64) -> Result<(), String> {
    match (&before.cufile, &after.cufile) {
        (Ok(before), Ok(after)) => judge_cufile(*before, *after, bytes),
        (Err(why), _) | (_, Err(why)) => match (before.nvidia_fs, after.nvidia_fs) {
            (Some(before), Some(after)) => judge_nvidia_fs(before, after, bytes).map_err(|also| format!("{why}; {also}")),
            _ => Err(why.clone()),
        },
    }
}

/// What is said of bytes of which it is known that they did not go directly.
pub(super) const THROUGH_HOST: &str = "went through host memory";

fn judge_cufile(before: Counted, after: Counted, bytes: u64) -> Result<(), String> {
    let moved = |now: u64, then: u64| now.checked_sub(then).ok_or("cuFile's counters were set back meanwhile");
    let (requests, direct) = (moved(after.requests, before.requests)?, moved(after.direct, before.direct)?);
    let (posix, counted) = (moved(after.posix, before.posix)?, moved(after.bytes, before.bytes)?);
    if posix > 0 {
        return Err(format!("cuFile's counters say that {posix} of {requests} requests {THROUGH_HOST}"));
    }
    if direct == 0 {
        return Err("cuFile's counters of direct requests did not move".to_owned());
    }
    if direct < requests {
        return Err(format!("cuFile's counters call {direct} of {requests} requests direct"));
    }
    if counted < bytes {
        return Err(format!("cuFile's counters moved by {counted} of the {bytes} bytes"));
    }
    Ok(())
}

fn judge_nvidia_fs(before: NvidiaFsCounted, after: NvidiaFsCounted, bytes: u64) -> Result<(), String> {
    let moved = |now: u64, then: u64| now.checked_sub(then).ok_or("nvidia-fs' counters were set back meanwhile");
    let (requests, mebibytes) = (moved(after.requests, before.requests)?, moved(after.mebibytes, before.mebibytes)?);
    if requests == 0 || mebibytes < bytes >> 20 {
        return Err(format!("nvidia-fs' counters moved by {requests} requests and {mebibytes} MiB"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(bytes: u64, requests: u64, direct: u64, posix: u64) -> Counted {
        Counted { bytes, requests, direct, posix }
    }

    #[test]
    fn only_counters_that_moved_by_the_bytes_and_by_no_other_way_prove_anything() {
        let before = counted(1000, 10, 8, 2);
        judge_cufile(before, counted(9192, 12, 10, 2), 8192).expect("two direct requests of 4 KiB");
        judge_cufile(before, counted(99_192, 50, 48, 2), 8192).expect("others moved more, all of it directly");
        for (after, why) in [
            (counted(9192, 12, 9, 3), "through host memory"),
            (counted(1000, 10, 8, 2), "did not move"),
            (counted(9192, 12, 8, 2), "did not move"),
            (counted(9192, 12, 9, 2), "call 1 of 2"),
            (counted(5096, 12, 10, 2), "moved by 4096 of the 8192 bytes"),
            (counted(0, 0, 0, 0), "set back"),
        ] {
            let found = judge_cufile(before, after, 8192).expect_err(why);
            assert!(found.contains(why), "{found}");
        }
    }

    #[test]
    fn nvidia_fs_counts_where_cufile_does_not() {
        let text = |ok, mib| {
            format!(
                "Reads\t\t: n={ok} ok={ok} err=0 readMiB={mib} io_state_err=0\nReads\t: Bandwidth(MiB/s)=1 Avg-Latency(usec)=1\n\
                     Sparse Reads\t: n=0 io=0 holes=0 pages=0\nWrites\t: n=3 ok=3 err=0 writeMiB=2 io_state_err=0 pg-cache=0\n"
            )
        };
        let parse = |ok, mib| NvidiaFsCounted::parse(&text(ok, mib)).expect("both lines are there");
        assert_eq!(parse(5, 7), NvidiaFsCounted { requests: 8, mebibytes: 9 });
        assert_eq!(NvidiaFsCounted::parse("Reads : n=1\n"), None);
        let reading = |ok, mib| Reading { cufile: Err("too old".to_owned()), nvidia_fs: Some(parse(ok, mib)) };
        assert_eq!(reading(5, 7).verdict(&reading(6, 7), 4096), Verdict::Proven);
        assert_eq!(reading(5, 7).verdict(&reading(9, 11), 4 << 20), Verdict::Proven);
        for (ok, mib) in [(5, 7), (9, 10), (4, 11)] {
            let verdict = reading(5, 7).verdict(&reading(ok, mib), 4 << 20);
            assert!(matches!(&verdict, Verdict::Unproven(why) if why.contains("too old")), "{ok} {mib}: {verdict:?}");
        }
        let nothing = Reading { cufile: Err("too old".to_owned()), nvidia_fs: None };
        assert_eq!(nothing.verdict(&nothing, 1), Verdict::Unproven("too old".into()));
    }
}
