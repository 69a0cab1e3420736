//! Settings: every number that a user may turn, its default, and the environment variable that overrides it.
//!
//! | variable | meaning | unit | default |
//! |---|---|---|---|
//! | `THRUWAY_ENGINE` | engine past the page cache: `auto`, `uring` or `posix` | | `auto` |
//! | `THRUWAY_QUEUE_DEPTH` | requests that it keeps in flight | requests | 32 |
//! | `THRUWAY_THREADS` | threads that copy out of the page cache | threads | processors, at most 12 |
//! | `THRUWAY_CHUNK_SIZE` | the largest request through the page cache | bytes (`4MiB`) | 4 MiB |
//! | `THRUWAY_DRIVE_CHUNK_SIZE` | the largest request past the page cache | bytes (`1MiB`) | 512 KiB |
//! | `THRUWAY_CUDA_LIB` | the CUDA driver's library | path | as the system finds it |
//! | `THRUWAY_PCI_DEVICES` | the directory of PCI devices, for tests | path | `/sys/bus/pci/devices` |
//! | `THRUWAY_CUFILE` | cuFile: `auto`, `off`, or `compat` (its compatibility mode too, through host memory) | | `auto` |
//! | `THRUWAY_CUFILE_LIB` | cuFile's library | path | as it is found |
//! | `THRUWAY_PROFILE` | measured rates that the choice of path follows ([`io::profile`](crate::io::profile)) | path | none |
//! | `THRUWAY_RING_SIZE` | the most staging memory | bytes (`256MiB`) | 256 MiB |

use super::error::{Error, ErrorKind, Result, printable};
use super::units::{Alignment, ByteSize};

/// The environment variable that names the CUDA driver's library.
pub const CUDA_LIBRARY: &str = "THRUWAY_CUDA_LIB";

/// The environment variable that names the directory of PCI devices.
pub const PCI_DEVICES: &str = "THRUWAY_PCI_DEVICES";

/// The environment variable that names cuFile's library.
pub const CUFILE_LIBRARY: &str = "THRUWAY_CUFILE_LIB";

/// The environment variable that names the file of measured rates.
pub const PROFILE: &str = "THRUWAY_PROFILE";

/// Whether cuFile is used between drives and GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CuFileChoice {
    /// Where it has a direct path, and only that: what cannot go directly goes by engines of this library, which are faster
    /// through host memory and say that they do.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Also in cuFile's own compatibility mode, through host memory: for comparisons and for tests. Never called direct.
    Compat,
}

/// Which engine moves bytes past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring, or threads where the kernel does not allow it.
    #[default]
    Auto,
    /// io_uring, or an error that says why not.
    Uring,
    /// Threads.
    Posix,
}

/// What a session can be tuned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which engine moves bytes past the page cache.
    pub engine: EngineChoice,
    /// How many requests that engine keeps in flight; to or from a GPU half as many, because their slots should stay in the
    /// caches. So many of 512 KiB keep any drive measured at its best (4 MiB in flight are 14 GB/s at 0.3 ms); storage
    /// that takes a millisecond for a request wants more.
    pub queue_depth: usize,
    /// How many threads copy out of the page cache. One moves 4 to 11 GB/s, by machine and by what else it does; 8 to 12
    /// fill a PCIe link.
    pub threads: usize,
    /// The largest request through the page cache, in bytes. A multiple of a page. A PCIe copy engine reaches 0.96 of its
    /// limit at 4 MiB.
    pub chunk_bytes: usize,
    /// The largest request past the page cache, in bytes. A multiple of a page. A drive works on several requests at once,
    /// and what it brings last is copied on when it has finished: virtual drives gave less at 1 MiB, and at 4 MiB less still
    /// (docs/decisions/0005-requests-to-a-drive.md).
    pub drive_chunk_bytes: usize,
    /// The most staging memory, in bytes.
    pub ring_bytes: usize,
    /// Whether cuFile is used.
    pub cufile: CuFileChoice,
}

impl Default for Settings {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            engine: EngineChoice::Auto,
            queue_depth: 32,
            threads: processors.clamp(1, 12),
            chunk_bytes: 4 << 20,
            drive_chunk_bytes: 512 << 10,
            ring_bytes: 256 << 20,
            cufile: CuFileChoice::Auto,
        }
    }
}

impl Settings {
    /// The defaults, overridden by the environment.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) for a value that cannot be; it names the variable.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(&|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Refuses what no session can work with.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput), naming the setting.
    pub fn validate(&self) -> Result<()> {
        let page = |bytes: usize| bytes > 0 && Alignment::PAGE.divides(bytes as u64) && bytes <= 1 << 40;
        let chunk = |bytes: usize| page(bytes) && bytes <= 1 << 30;
        let bad = [
            (self.queue_depth == 0, "queue_depth must not be 0"),
            (self.threads == 0, "threads must not be 0"),
            (!chunk(self.chunk_bytes), "chunk_bytes must be a multiple of 4096, 1 GiB at most"),
            (!chunk(self.drive_chunk_bytes), "drive_chunk_bytes must be a multiple of 4096, 1 GiB at most"),
            (!page(self.ring_bytes), "ring_bytes must be a multiple of 4096, 1 TiB at most"),
        ];
        match bad.iter().find(|(is_bad, _)| *is_bad) {
            Some((_, what)) => Err(Error::new(ErrorKind::InvalidInput, format!("this setting cannot be used: {what}"))),
            None => Ok(()),
        }
    }

    fn from_lookup(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let mut settings = Self::default();
        let refuse = |name: &str, value: &str, hint: &str| {
            Err(Error::new(ErrorKind::InvalidInput, format!("{name}={} cannot be used", printable(value))).with_hint(hint))
        };
        if let Some(value) = lookup("THRUWAY_ENGINE") {
            settings.engine = match value.as_str() {
                "auto" => EngineChoice::Auto,
                "uring" => EngineChoice::Uring,
                "posix" => EngineChoice::Posix,
                _ => return refuse("THRUWAY_ENGINE", &value, "set it to auto, uring or posix"),
            };
        }
        if let Some(value) = lookup("THRUWAY_CUFILE") {
            settings.cufile = match value.as_str() {
                "auto" => CuFileChoice::Auto,
                "off" => CuFileChoice::Off,
                "compat" => CuFileChoice::Compat,
                _ => return refuse("THRUWAY_CUFILE", &value, "set it to auto, off or compat"),
            };
        }
        let counts = [("THRUWAY_QUEUE_DEPTH", 1024, &mut settings.queue_depth), ("THRUWAY_THREADS", 256, &mut settings.threads)];
        for (name, max, setting) in counts {
            if let Some(value) = lookup(name) {
                match value.parse() {
                    Ok(count) if (1..=max).contains(&count) => *setting = count,
                    _ => return refuse(name, &value, &format!("set it to a number from 1 to {max}")),
                }
            }
        }
        // A chunk up to 1 GiB fits every engine's request.
        let sizes = [
            ("THRUWAY_CHUNK_SIZE", 1_u64 << 30, "1GiB", &mut settings.chunk_bytes),
            ("THRUWAY_DRIVE_CHUNK_SIZE", 1 << 30, "1GiB", &mut settings.drive_chunk_bytes),
            ("THRUWAY_RING_SIZE", 1 << 40, "1TiB", &mut settings.ring_bytes),
        ];
        for (name, max, max_text, setting) in sizes {
            if let Some(value) = lookup(name) {
                let bytes = value.parse::<ByteSize>().ok().map(ByteSize::bytes);
                match bytes.filter(|bytes| (4096..=max).contains(bytes) && Alignment::PAGE.divides(*bytes)) {
                    Some(bytes) => *setting = usize::try_from(bytes).unwrap_or(usize::MAX),
                    None => return refuse(name, &value, &format!("set it to a multiple of 4096 from 4KiB to {max_text}")),
                }
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Settings> {
        Settings::from_lookup(&|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_environment_overrides_the_defaults() {
        let settings =
            from(&[("THRUWAY_ENGINE", "posix"), ("THRUWAY_RING_SIZE", "64MiB"), ("THRUWAY_THREADS", "3")]).expect("valid");
        assert_eq!((settings.engine, settings.ring_bytes, settings.threads), (EngineChoice::Posix, 64 << 20, 3));
        assert_eq!(from(&[]).expect("defaults"), Settings::default());
    }

    #[test]
    fn settings_made_by_hand_are_checked_too() {
        let good = Settings::default();
        good.validate().expect("the defaults");
        for bad in [
            Settings { chunk_bytes: 0, ..good },
            Settings { chunk_bytes: 5000, ..good },
            Settings { drive_chunk_bytes: 2 << 30, ..good },
            Settings { ring_bytes: 0, ..good },
            Settings { threads: 0, ..good },
            Settings { queue_depth: 0, ..good },
        ] {
            assert_eq!(bad.validate().expect_err("refused").kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn nonsense_names_its_variable() {
        for (name, value) in [
            ("THRUWAY_ENGINE", "aio"),
            ("THRUWAY_CUFILE", "on"),
            ("THRUWAY_QUEUE_DEPTH", "0"),
            ("THRUWAY_THREADS", "many"),
            ("THRUWAY_CHUNK_SIZE", "5000"),
            ("THRUWAY_CHUNK_SIZE", "2GiB"),
            ("THRUWAY_DRIVE_CHUNK_SIZE", "0"),
            ("THRUWAY_RING_SIZE", "-1"),
        ] {
            let error = from(&[(name, value)]).expect_err(value);
            assert!(error.message().contains(name), "{error}");
            assert!(error.hint().is_some());
        }
    }
}
