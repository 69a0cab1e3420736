//! NVIDIA's files under `/proc`, and what the CUDA driver says.

use super::{Version, field, value};

/// `/proc/driver/nvidia/version`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverVersion {
    /// The driver's version as it is written, such as 580.159.04.
    pub text: String,
    /// Its numbers.
    pub version: Version,
    /// Whether it is the open kernel module.
    pub is_open: bool,
}

/// Reads `/proc/driver/nvidia/version`. Its first line is
/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …`, without `Open` for the closed one.
pub fn driver_version(text: &str) -> Option<DriverVersion> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let text = line.split_whitespace().find(is_version)?.to_owned();
    let version = Version::parse(&text)?;
    Some(DriverVersion { text, version, is_open: line.contains("Open Kernel Module") })
}

/// The value of a name among registry words. The driver compares names without regard to case and reads values as C does
/// (`0x1`).
pub fn registry_value(words: &[String], name: &str) -> Option<u64> {
    let pairs = words.iter().filter_map(|word| word.split_once('='));
    let mut values = pairs.filter(|(have, _)| have.trim().eq_ignore_ascii_case(name)).map(|(_, value)| value.trim());
    let value = values.next()?;
    // Of two that differ nobody says which is taken.
    if values.any(|other| other != value) {
        return None;
    }
    match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => value.parse().ok(),
    }
}

/// The words of `RegistryDwords` in `/proc/driver/nvidia/params`, as `name=value`.
pub fn registry_words(text: &str) -> Vec<String> {
    let value = field(text, "RegistryDwords", ':').unwrap_or_default().trim_matches('"');
    value.split(';').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// What `/proc/driver/nvidia-fs/stats` says that a diagnosis needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Reads that were finished well, of those begun.
    pub reads: Option<(u64, u64)>,
    /// Writes likewise.
    pub writes: Option<(u64, u64)>,
    /// The counters of errors that are not 0, with their names.
    pub errors: Vec<(String, u64)>,
}

/// Reads `/proc/driver/nvidia-fs/stats`. Rows look like `Reads : n=5 ok=5 err=0 readMiB=1 io_state_err=0`.
pub fn statistics(text: &str) -> Statistics {
    let number = |row: &str, name: &str| {
        let words = row.split_whitespace().filter_map(|word| word.split_once('='));
        words.into_iter().find(|(have, _)| *have == name).and_then(|(_, value)| value.parse::<u64>().ok())
    };
    let done = |name: &str| {
        let row = field(text, name, ':')?;
        Some((number(row, "ok")?, number(row, "n")?))
    };
    let mut errors = Vec::new();
    for row in ["Reads", "Writes"] {
        let failed = field(text, row, ':').and_then(|row| number(row, "err")).unwrap_or(0);
        if failed > 0 {
            errors.push((format!("{} failed", row.to_ascii_lowercase()), failed));
        }
    }
    for word in field(text, "Error", ':').unwrap_or_default().split_whitespace() {
        if let Some((name, count)) = word.split_once('=')
            && let Ok(count @ 1..) = count.parse()
        {
            errors.push((name.to_owned(), count));
        }
    }
    Statistics { reads: done("Reads"), writes: done("Writes"), errors }
}

/// One GPU as the CUDA driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaGpu {
    /// Its PCI address.
    pub address: String,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// Its compute capability.
    pub capability: Option<Version>,
    /// Whether it shares the host's memory.
    pub is_integrated: bool,
    /// Whether other devices may reach its memory.
    pub has_peer_dma: Option<bool>,
    /// Whether it hands out its memory as a dma-buf.
    pub has_dma_buf: Option<bool>,
}

/// What the CUDA driver says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaSurvey {
    /// The newest CUDA that it serves, `(13, 0)`.
    pub version: Option<(u32, u32)>,
    /// Its GPUs, in the order of their ordinals.
    pub gpus: Vec<CudaGpu>,
}

/// Reads the answer of the call `cuda`.
pub fn survey(text: &str) -> CudaSurvey {
    let version = value(text, "cuda_version").and_then(|number| number.parse::<u32>().ok()).filter(|number| *number > 0);
    let gpus = text.lines().filter_map(|line| line.strip_prefix("gpu ")).filter_map(gpu).collect();
    CudaSurvey { version: version.map(|number| (number / 1000, number % 1000 / 10)), gpus }
}

fn gpu(line: &str) -> Option<CudaGpu> {
    let (words, name) = line.split_once(" name=")?;
    let (address, words) = words.split_once(' ').unwrap_or((words, ""));
    let word = |name: &str| {
        let pairs = words.split(' ').filter_map(|word| word.split_once('='));
        pairs.into_iter().find(|(have, _)| *have == name).map(|(_, value)| value)
    };
    Some(CudaGpu {
        address: address.to_owned(),
        name: name.trim().to_owned(),
        memory_bytes: word("memory").and_then(|bytes| bytes.parse().ok()),
        capability: word("capability").and_then(Version::parse),
        is_integrated: word("integrated") == Some("yes"),
        has_peer_dma: word("peer_dma").map(|word| word == "yes"),
        has_dma_buf: word("dma_buf").map(|word| word == "yes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_and_closed_drivers_are_told_apart() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\nGCC version:  gcc version 12\n";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n";
        let version = |text| driver_version(text).map(|driver| (driver.text, driver.is_open));
        assert_eq!(version(open), Some(("580.159.04".to_owned(), true)));
        assert_eq!(version(closed), Some(("550.54.14".to_owned(), false)));
        assert_eq!(version("garbage"), None);
    }

    #[test]
    fn registry_words_and_statistics_are_read() {
        let words = registry_words("EnableMSI: 1\nRegistryDwords: \"RMForceStaticBar1=1;RmForceDisableIomapWC=1;\"\n");
        assert_eq!(words, ["RMForceStaticBar1=1", "RmForceDisableIomapWC=1"]);
        let words = ["rmforcestaticbar1=0x2", "Other=x"].map(str::to_owned);
        assert_eq!((registry_value(&words, "RMForceStaticBar1"), registry_value(&words, "Other")), (Some(2), None));
        let twice = ["RMForceStaticBar1=1", "rmforcestaticbar1=0"].map(str::to_owned);
        assert_eq!(registry_value(&twice, "RMForceStaticBar1"), None);
        let text = "GDS Version: 1.16.0.49\nReads\t: n=10 ok=9 err=1 readMiB=40 io_state_err=0\n\
                    Writes : n=0 ok=0 err=0\nError : cpu-gpu-pages=0 sg-ext=2 dma-map=0 dma-ref=0\n";
        let statistics = statistics(text);
        assert_eq!(statistics.reads, Some((9, 10)));
        assert_eq!(statistics.errors, [("reads failed".to_owned(), 1), ("sg-ext".to_owned(), 2)]);
    }

    #[test]
    fn the_drivers_answer_is_read() {
        let text = "cuda_version 13010\ngpu 0000:41:00.0 memory=85520809984 capability=9.0 integrated=no peer_dma=yes dma_buf=yes name=NVIDIA H100 PCIe\n";
        let survey = survey(text);
        assert_eq!(survey.version, Some((13, 1)));
        assert_eq!((survey.gpus[0].name.as_str(), survey.gpus[0].has_peer_dma), ("NVIDIA H100 PCIe", Some(true)));
    }
}
