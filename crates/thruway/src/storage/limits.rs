//! The limits of this process: host memory (the machine's, or its container's) and open files.
//!
//! Linux hands out memory that it does not have and kills whoever touches it, so a large allocation is
//! checked beforehand, against `/proc/meminfo` and every memory cgroup above the process. File cache counts
//! as free, because the kernel gives it up.

use crate::base::{ByteSize, Error, ErrorKind, Result};

use super::namespace::read_small_text;

/// The bytes that this process may still allocate, as far as can be seen; `None` where nothing tells.
pub fn available_host_bytes() -> Option<u64> {
    let machine = read_small_text("/proc/meminfo").and_then(|text| meminfo_available(&text));
    let cgroups = read_small_text("/proc/self/cgroup").map(|text| cgroup_available(&text, &|path| read_small_text(path)));
    [machine, cgroups.flatten()].into_iter().flatten().min()
}

/// Refuses an allocation of `bytes` that could only end in the process being killed.
///
/// # Errors
/// [`OutOfMemory`](ErrorKind::OutOfMemory), with both numbers.
pub fn ensure_host_bytes(bytes: u64) -> Result<()> {
    match available_host_bytes() {
        Some(available) if bytes > available => Err(Error::new(
            ErrorKind::OutOfMemory,
            format!("this needs {} of host memory and {} are available", ByteSize(bytes), ByteSize(available)),
        )
        .with_hint("load fewer tensors at a time, or raise the container's memory limit")),
        _ => Ok(()),
    }
}

/// How many more files this process may open: its limit (`ulimit -n`) less the descriptors in use; `None`
/// where there is no limit.
pub fn open_files_left() -> Option<usize> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
    let used = super::namespace::count_entries("/proc/self/fd").unwrap_or(0);
    Some(usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(used))
}

/// The most bytes that this process may lock into memory (`ulimit -l`); `None` where there is no limit.
pub fn limit_of_locked_memory() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// The most files that this process may have open (`ulimit -n`); `None` where there is no limit.
pub fn limit_of_open_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Whether this process runs as the superuser.
pub fn runs_as_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The kernel's release and the machine's architecture, as `uname` gives them.
pub fn kernel_release() -> (String, String) {
    let names = rustix::system::uname();
    (names.release().to_string_lossy().into_owned(), names.machine().to_string_lossy().into_owned())
}

/// The CPU time that this process has used, all threads together, in seconds.
pub fn process_cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    std::time::Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0)).as_secs_f64()
}

/// The value of the sysctl that switches io_uring off; `None` on kernels without it.
pub fn io_uring_disabled() -> Option<u32> {
    read_small_text("/proc/sys/kernel/io_uring_disabled")?.trim().parse().ok()
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least room in any memory cgroup named by `/proc/self/cgroup` or above it, in bytes.
fn cgroup_available(cgroup: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let version_2 = controllers.is_empty();
        if !version_2 && !controllers.split(',').any(|name| name == "memory") {
            continue;
        }
        // Inside a container the path may be the host's, and the root of the mount is then the container's own.
        let mut path = path.trim_end_matches('/');
        loop {
            let room = if version_2 { room_v2(path, read) } else { room_v1(path, read) };
            least = [least, room].into_iter().flatten().min();
            match path.rfind('/') {
                Some(cut) => path = &path[..cut],
                None => break,
            }
        }
    }
    least
}

fn room_v2(path: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let file = |name: &str| read(&format!("/sys/fs/cgroup{path}/{name}"));
    room(&file("memory.max")?, &file("memory.current")?, &file("memory.stat")?, &["inactive_file", "active_file"])
}

fn room_v1(path: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let file = |name: &str| read(&format!("/sys/fs/cgroup/memory{path}/{name}"));
    let keys = ["total_inactive_file", "total_active_file"];
    room(&file("memory.limit_in_bytes")?, &file("memory.usage_in_bytes")?, &file("memory.stat")?, &keys)
}

fn room(limit: &str, usage: &str, stat: &str, cache_keys: &[&str]) -> Option<u64> {
    // "max" (version 2) does not parse: no limit. Version 1 writes a number near 2^63 instead, which is harmless.
    let limit: u64 = limit.trim().parse().ok()?;
    let usage: u64 = usage.trim().parse().ok()?;
    let cache: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(key, _)| cache_keys.contains(key))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum();
    Some(limit.saturating_sub(usage.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        assert_eq!(meminfo_available("MemTotal: 10 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        assert_eq!(meminfo_available("MemTotal: 10 kB\n"), None);
    }

    #[test]
    fn the_tightest_cgroup_above_the_process_counts_and_file_cache_is_free() {
        let read = |path: &str| {
            let text = match path {
                "/sys/fs/cgroup/a/b/memory.max" => "max",
                "/sys/fs/cgroup/a/memory.max" => "1000",
                "/sys/fs/cgroup/a/memory.current" | "/sys/fs/cgroup/a/b/memory.current" => "900",
                "/sys/fs/cgroup/a/memory.stat" | "/sys/fs/cgroup/a/b/memory.stat" => {
                    "anon 5\ninactive_file 300\nactive_file 100\n"
                }
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(cgroup_available("0::/a/b\n", &read), Some(500));
    }

    #[test]
    fn version_1_reads_the_hierarchical_counters() {
        let read = |path: &str| {
            let text = match path {
                "/sys/fs/cgroup/memory/t/memory.limit_in_bytes" => "4096",
                "/sys/fs/cgroup/memory/t/memory.usage_in_bytes" => "1096",
                "/sys/fs/cgroup/memory/t/memory.stat" => "cache 9\ntotal_inactive_file 96\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(cgroup_available("5:cpu:/\n4:memory:/t\n", &read), Some(3096));
    }

    #[test]
    fn more_than_any_machine_has_is_refused_with_both_numbers() {
        let error = ensure_host_bytes(u64::MAX).expect_err("no machine has it");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        ensure_host_bytes(1).expect("a byte is always to be had");
    }
}
