//! The facts of the machine that stand beside measurements.

use std::path::Path;

use serde_json::{Value, json};
use thruway::ByteSize;
use thruway::io::engine::Uring;

use crate::measure::processors;

/// What a measurement depends on.
#[derive(Debug)]
pub(crate) struct Machine {
    cpu: Option<String>,
    cores: usize,
    memory_bytes: Option<u64>,
    kernel: Option<String>,
    filesystem: Option<Mount>,
    /// Why io_uring cannot be used, if it cannot.
    no_io_uring: Option<String>,
}

/// The mount that a directory lies on.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    point: String,
    kind: String,
    source: String,
    /// `major:minor` of its device.
    device: String,
}

impl Machine {
    /// Looks at this machine, and at the filesystem of `directory`.
    pub(crate) fn examine(directory: &Path) -> Self {
        let text = |path: &str| std::fs::read_to_string(path).ok();
        let absolute = std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        Self {
            cpu: text("/proc/cpuinfo").and_then(|info| field(&info, "model name")),
            cores: processors(),
            memory_bytes: text("/proc/meminfo").and_then(|info| kilobytes(&field(&info, "MemTotal")?)),
            kernel: text("/proc/sys/kernel/osrelease").map(|release| release.trim().to_owned()),
            filesystem: text("/proc/self/mountinfo").and_then(|table| mount_of(&table, &absolute)),
            no_io_uring: Uring::new(1).err().map(|refused| refused.to_string()),
        }
    }

    /// The facts as JSON; what cannot be found out is null.
    pub(crate) fn to_json(&self) -> Value {
        let mount = self.filesystem.as_ref();
        json!({
            "cpu": self.cpu,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "kernel": self.kernel,
            "filesystem": mount.map(|mount| &mount.kind),
            "mount_point": mount.map(|mount| &mount.point),
            "block_device": mount.map(|mount| &mount.source),
            "block_device_model": mount.and_then(|mount| drive_model(&mount.device)),
            "io_uring": {"available": self.no_io_uring.is_none(), "reason": self.no_io_uring},
        })
    }

    /// The facts in one line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        let unknown = || "unknown".to_owned();
        let memory = self.memory_bytes.map_or_else(unknown, |bytes| ByteSize(bytes).to_string());
        let storage = self.filesystem.as_ref().map_or_else(unknown, |mount| {
            let model = drive_model(&mount.device).map(|model| format!(" ({model})")).unwrap_or_default();
            format!("{} on {}{model}", mount.kind, mount.source)
        });
        vec![
            format!("CPU      {}, {} cores, {memory} of memory", self.cpu.clone().unwrap_or_else(unknown), self.cores),
            format!("kernel   {}", self.kernel.clone().unwrap_or_else(unknown)),
            format!("storage  {storage}"),
            format!("io_uring {}", self.no_io_uring.as_deref().unwrap_or("available")),
        ]
    }
}

/// How much host memory this process comes to hold, from a moment on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeakMemory {
    before: u64,
}

impl PeakMemory {
    /// From now on; `None` where the kernel does not tell.
    pub(crate) fn begin() -> Option<Self> {
        // Makes the kernel forget the peak so far, such as that of CUDA's start-up. Where it does not, the peak that is
        // told is too high rather than too low.
        let _peak_so_far_stays = std::fs::write("/proc/self/clear_refs", "5");
        Some(Self { before: own_memory("VmRSS")? })
    }

    /// The most bytes held at once since, beyond those held before.
    pub(crate) fn grown(self) -> Option<u64> {
        Some(own_memory("VmHWM")?.saturating_sub(self.before))
    }
}

fn own_memory(key: &str) -> Option<u64> {
    kilobytes(&own_status(key)?)
}

/// What the kernel says of this process under `key` of `/proc/self/status`.
pub(crate) fn own_status(key: &str) -> Option<String> {
    field(&std::fs::read_to_string("/proc/self/status").ok()?, key)
}

/// The value of the first `key : value` line.
fn field(text: &str, key: &str) -> Option<String> {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.into_iter().find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
}

fn kilobytes(value: &str) -> Option<u64> {
    value.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The mount with the longest mount point above `path`; of two at one point the later, which covers the other.
fn mount_of(table: &str, path: &Path) -> Option<Mount> {
    let mut best: Option<Mount> = None;
    for line in table.lines() {
        // 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        let ([_, _, device, _, point, ..], [kind, source, ..]) = (left.as_slice(), right.as_slice()) else { continue };
        let point = unescaped(point);
        if path.starts_with(&point) && best.as_ref().is_none_or(|best| best.point.len() <= point.len()) {
            let source = unescaped(source);
            best = Some(Mount { point, kind: (*kind).to_owned(), source, device: (*device).to_owned() });
        }
    }
    best
}

/// The kernel writes blanks in names as octal.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (octal, plain)| text.replace(octal, plain))
}

/// What the drive calls itself, of a disk or of the disk of a partition.
fn drive_model(device: &str) -> Option<String> {
    let base = format!("/sys/dev/block/{device}");
    let read = |name: &str| std::fs::read_to_string(format!("{base}/{name}")).ok();
    let model = read("device/model").or_else(|| read("../device/model"))?;
    Some(model.trim().to_owned()).filter(|model| !model.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_counts() {
        let table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 259:0 / /mnt/a\\040b rw shared:1 - xfs /dev/nvme0n1 rw\nnonsense\n";
        let mount = mount_of(table, Path::new("/mnt/a b/c")).expect("found");
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("xfs", "/dev/nvme0n1"));
        assert_eq!(mount_of(table, Path::new("/mnt/a")).expect("found").kind, "ext4");
    }

    #[test]
    fn fields_are_found_and_missing_ones_are_no_trouble() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nMemTotal:       1024 kB\n";
        assert_eq!(field(text, "model name").as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(field(text, "MemTotal").and_then(|value| kilobytes(&value)), Some(1 << 20));
        assert_eq!(field("", "model name"), None);
    }
}
