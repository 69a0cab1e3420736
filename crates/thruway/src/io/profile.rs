//! Profiles: rates that were measured on this machine, for the choice between paths.
//!
//! The rules of [`policy`](super::policy) are right for most machines and not for all: the direct path may be slower for small
//! reads, or below a switch that is shared. `thruway bench --save-profile` measures each path to and from a GPU on a
//! filesystem, in both directions and for three sizes, and writes what it found. A session that is given the file follows it
//! where it knows the ways that are possible, and says so in every reason. A measurement is of one GPU, one filesystem, one kernel and
//! one driver, and of no use for another: what does not fit is ignored, and the reason says why.
//!
//! The file is JSON, and holds a measurement for each GPU and filesystem:
//!
//! ```text
//! {"format": "thruway profile", "version": 1, "measurements": [
//!   {"machine": {"gpu": "<uuid>", "gpu_name": "…", "driver": "13.0", "kernel": "6.18.0"}, "filesystem": "ef53 92a672ea556a113c",
//!    "measured_unix_s": 1796000000, "rates": [{"direction": "read", "size": "256MiB", "path": "direct", "gb_per_s": 12.5}, …]}]}
//! ```
//!
//! `direct` is the rate of the engine for the direct path, proven or not; `cached` that of reads which the page cache holds, and
//! of writes through it, synced.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Direction;
use super::policy::Path;
use crate::base::{Error, ErrorKind, Result};
use crate::cuda::Gpu;
use crate::storage::kernel_release;

/// What a profile says it is.
const FORMAT: &str = "thruway profile";

/// The version that is written, and the only one that is read.
const VERSION: u32 = 1;

/// The longest profile that is read, in bytes: thousands of measurements.
pub const PROFILE_BYTES_MAX: u64 = 4 << 20;

/// An older measurement is stale: drives fill and age, and machines are rebuilt. Half a year.
const AGE_MAX_S: u64 = 183 * 24 * 3600;

/// By how much another path must have been faster than that of the rules to be taken instead: below it, it is noise.
const FASTER_MIN: f64 = 1.05;

/// The paths that are measured.
pub const MEASURED: [Path; 3] = [Path::Direct, Path::Staged, Path::Cached];

/// How much is moved of a file at a time, roughly. Measured is what each is called after.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SizeClass {
    /// Less than 4 MiB.
    #[serde(rename = "1MiB")]
    Small,
    /// From 4 MiB to less than 64 MiB.
    #[serde(rename = "16MiB")]
    Medium,
    /// From 64 MiB on.
    #[serde(rename = "256MiB")]
    Large,
}

impl SizeClass {
    /// All, the smallest first.
    pub const ALL: [Self; 3] = [Self::Small, Self::Medium, Self::Large];

    /// That of so many bytes.
    pub const fn of(bytes: u64) -> Self {
        match bytes {
            0..0x40_0000 => Self::Small,
            0x40_0000..0x400_0000 => Self::Medium,
            _ => Self::Large,
        }
    }

    /// The bytes with which it is measured.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Small => 1 << 20,
            Self::Medium => 16 << 20,
            Self::Large => 256 << 20,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Small => "1MiB",
            Self::Medium => "16MiB",
            Self::Large => "256MiB",
        }
    }
}

impl fmt::Display for SizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A GPU and what moves bytes to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The GPU's UUID, in hexadecimal digits.
    pub gpu: String,
    /// Its name, for people.
    pub gpu_name: String,
    /// The CUDA version that its driver serves.
    pub driver: String,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// This machine with this GPU.
    ///
    /// # Errors
    /// [`Gpu`](ErrorKind::Gpu) if the driver does not tell its version.
    pub fn of(gpu: &Gpu) -> Result<Self> {
        let (major, minor) = gpu.driver_version()?;
        Ok(Self {
            gpu: gpu.facts().uuid.iter().map(|byte| format!("{byte:02x}")).collect(),
            gpu_name: gpu.facts().name.clone(),
            driver: format!("{major}.{minor}"),
            kernel: kernel_release().0,
        })
    }
}

/// One measured rate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Which way.
    #[serde(with = "direction")]
    pub direction: Direction,
    /// How much at a time.
    pub size: SizeClass,
    /// The path: one of [`MEASURED`].
    #[serde(with = "path")]
    pub path: Path,
    /// Decimal gigabytes a second.
    pub gb_per_s: f64,
}

/// What was measured between a GPU and a filesystem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// Where.
    pub machine: Machine,
    /// The filesystem, as [`File::filesystem`](crate::storage::File::filesystem) names it.
    pub filesystem: String,
    /// When, in seconds since 1970.
    pub measured_unix_s: u64,
    /// What was found.
    pub rates: Vec<Rate>,
}

/// A file of measurements.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    measurements: Vec<Measurement>,
}

#[derive(Serialize, Deserialize)]
struct Frame {
    format: String,
    version: u32,
    measurements: Vec<Measurement>,
}

impl Profile {
    /// Reads a profile's text.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed), saying what is wrong with it.
    pub fn parse(text: &str) -> Result<Self> {
        let malformed = |what: String| Err(Error::new(ErrorKind::Malformed, what));
        let frame: Frame = match serde_json::from_str(text) {
            Ok(frame) => frame,
            Err(error) => return malformed(format!("this is no profile: {error}")),
        };
        if frame.format != FORMAT || frame.version != VERSION {
            return malformed(format!("this is no profile of version {VERSION}"));
        }
        let rates = frame.measurements.iter().flat_map(|measurement| &measurement.rates);
        if rates.into_iter().any(|rate| !(rate.gb_per_s.is_finite() && rate.gb_per_s > 0.0)) {
            return malformed("a rate of the profile is no rate".to_owned());
        }
        Ok(Self { measurements: frame.measurements })
    }

    /// The profile's text.
    pub fn to_json(&self) -> String {
        let frame = Frame { format: FORMAT.to_owned(), version: VERSION, measurements: self.measurements.clone() };
        // Names, numbers and lists always make JSON.
        serde_json::to_string_pretty(&frame).unwrap_or_default() + "\n"
    }

    /// Takes a measurement in, instead of an older one of the same GPU and filesystem.
    pub fn put(&mut self, new: Measurement) {
        self.measurements.retain(|old| (&old.machine.gpu, &old.filesystem) != (&new.machine.gpu, &new.filesystem));
        self.measurements.push(new);
    }

    /// What it says of transfers between this machine's GPU and a filesystem, at this time; or why nothing.
    fn rates(&self, here: &Machine, filesystem: Option<&str>, now_unix_s: u64) -> Result<&[Rate], String> {
        let of_gpu: Vec<&Measurement> = self.measurements.iter().filter(|one| one.machine.gpu == here.gpu).collect();
        if of_gpu.is_empty() {
            return Err(format!("it was measured with another GPU than this {}", here.gpu_name));
        }
        let Some(filesystem) = filesystem else { return Err("the filesystem has nothing by which it is known again".to_owned()) };
        let Some(found) = of_gpu.into_iter().find(|one| one.filesystem == filesystem) else {
            return Err("it was measured on another filesystem".to_owned());
        };
        let Machine { driver, kernel, .. } = &found.machine;
        if *kernel != here.kernel {
            return Err(format!("it is stale: measured under kernel {kernel}, and this is {}", here.kernel));
        }
        if *driver != here.driver {
            return Err(format!("it is stale: measured with a driver of CUDA {driver}, and this is {}", here.driver));
        }
        match now_unix_s.checked_sub(found.measured_unix_s) {
            Some(age) if age <= AGE_MAX_S => Ok(&found.rates),
            Some(age) => Err(format!("it is stale: measured {} days ago", age / (24 * 3600))),
            None => Err("it was measured in the future, as this machine's clock has it".to_owned()),
        }
    }
}

/// A session's profile.
#[derive(Debug)]
pub struct Advisor {
    name: Arc<str>,
    /// What it holds, or why it cannot be used at all.
    profile: Result<Profile, String>,
    here: Machine,
}

impl Advisor {
    /// A profile for this machine. `name` is what reasons call it, `text` its content, or why that cannot be read.
    pub fn new(name: impl Into<Arc<str>>, text: Result<String>, here: Machine) -> Self {
        let profile = text.and_then(|text| Profile::parse(&text)).map_err(|error| error.message().to_owned());
        Self { name: name.into(), profile, here }
    }

    /// What it says of a transfer of so many bytes between the GPU and a file of this filesystem, at this time.
    pub fn advice(&self, filesystem: Option<&str>, direction: Direction, bytes: u64, now_unix_s: u64) -> Advice {
        let rates = match &self.profile {
            Ok(profile) => profile.rates(&self.here, filesystem, now_unix_s),
            Err(why) => Err(why.clone()),
        };
        let rates = match rates {
            Ok(rates) => rates,
            Err(why) => return Advice::Ignored(format!("the profile {} is ignored: {why}", self.name).into()),
        };
        let size = SizeClass::of(bytes);
        let fits = |rate: &&Rate| rate.direction == direction && rate.size == size;
        let known = rates.iter().filter(fits).map(|rate| (rate.path, rate.gb_per_s)).collect();
        Advice::Measured { name: Arc::clone(&self.name), size, known }
    }
}

/// What a session's profile says of one file.
#[derive(Clone, Debug)]
pub enum Advice {
    /// There is no profile, or the choice is not its matter.
    None,
    /// It does not speak of this, and this is why.
    Ignored(Arc<str>),
    /// What was measured.
    Measured {
        /// What the profile is called.
        name: Arc<str>,
        /// The class of sizes.
        size: SizeClass,
        /// The rates of paths, in decimal gigabytes a second.
        known: Vec<(Path, f64)>,
    },
}

impl Advice {
    /// The path to take of those that are possible, where the rules would take `by_rule`, and what there is to say of it.
    pub fn choose(&self, by_rule: Path, possible: &[Path]) -> (Path, Option<String>) {
        let (name, size, known) = match self {
            Self::None => return (by_rule, None),
            Self::Ignored(why) => return (by_rule, Some(why.to_string())),
            Self::Measured { name, size, known } => (name, size, known),
        };
        let mut rates: Vec<(Path, f64)> = known.iter().filter(|(path, _)| possible.contains(path)).copied().collect();
        rates.sort_by(|a, b| b.1.total_cmp(&a.1));
        let Some((_, of_rule)) = rates.iter().find(|(path, _)| *path == by_rule).copied() else {
            return (by_rule, Some(format!("the profile {name} has no rate of '{by_rule}' for {size} at a time")));
        };
        let best = rates.first().filter(|(_, rate)| *rate > of_rule * FASTER_MIN).map_or(by_rule, |(path, _)| *path);
        let told: Vec<String> = rates.iter().map(|(path, rate)| format!("{path} {rate:.2}")).collect();
        (best, Some(format!("by the profile {name}: {} GB/s", told.join(", "))))
    }
}

mod direction {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::Direction;

    pub(super) fn serialize<S: Serializer>(direction: &Direction, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(if *direction == Direction::Read { "read" } else { "write" })
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Direction, D::Error> {
        match String::deserialize(from)?.as_str() {
            "read" => Ok(Direction::Read),
            "write" => Ok(Direction::Write),
            _ => Err(D::Error::custom("a direction is read or write")),
        }
    }
}

mod path {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::{MEASURED, Path};

    pub(super) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(path.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Path, D::Error> {
        let text = String::deserialize(from)?;
        let known = MEASURED.into_iter().find(|path| path.as_str() == text);
        known.ok_or_else(|| D::Error::custom("a path is direct, staged or cached"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let [gpu, gpu_name, driver, kernel] = ["ab", "A GPU", "13.0", "6.18"].map(str::to_owned);
        Machine { gpu, gpu_name, driver, kernel }
    }

    const NOW: u64 = 1_800_000_000;

    fn measurement() -> Measurement {
        let rate = |direction, size, path, gb_per_s| Rate { direction, size, path, gb_per_s };
        let rates = vec![
            rate(Direction::Read, SizeClass::Small, Path::Direct, 1.0),
            rate(Direction::Read, SizeClass::Small, Path::Staged, 2.0),
            rate(Direction::Read, SizeClass::Small, Path::Cached, 9.0),
            rate(Direction::Read, SizeClass::Large, Path::Direct, 12.0),
            rate(Direction::Read, SizeClass::Large, Path::Staged, 12.2),
            rate(Direction::Write, SizeClass::Large, Path::Staged, 5.0),
        ];
        Measurement { machine: machine(), filesystem: "ef53 1".to_owned(), measured_unix_s: NOW - 1000, rates }
    }

    fn advisor(change: impl FnOnce(&mut Measurement)) -> Advisor {
        let (mut profile, mut one) = (Profile::default(), measurement());
        change(&mut one);
        profile.put(one);
        Advisor::new("p.json", Ok(profile.to_json()), machine())
    }

    #[test]
    fn what_was_measured_faster_is_taken_and_named_with_its_rates() {
        let advisor = advisor(|_| ());
        let choose = |direction, bytes, by_rule, possible: &[Path]| {
            advisor.advice(Some("ef53 1"), direction, bytes, NOW).choose(by_rule, possible)
        };
        let (path, why) = choose(Direction::Read, 3 << 20, Path::Direct, &[Path::Direct, Path::Staged]);
        assert_eq!((path, why.as_deref()), (Path::Staged, Some("by the profile p.json: staged 2.00, direct 1.00 GB/s")));
        assert_eq!(choose(Direction::Read, 10, Path::Cached, &MEASURED).0, Path::Cached);
        assert_eq!(choose(Direction::Read, 1 << 30, Path::Direct, &[Path::Direct, Path::Staged]).0, Path::Direct, "as good as");
        for (direction, bytes) in [(Direction::Read, 16 << 20), (Direction::Write, 1 << 30)] {
            let (path, why) = choose(direction, bytes, Path::Direct, &[Path::Direct, Path::Staged]);
            assert!(path == Path::Direct && why.is_some_and(|why| why.contains("has no rate of 'direct'")));
        }
    }

    #[test]
    fn what_is_foreign_or_stale_is_ignored_with_the_reason() {
        type Change = fn(&mut Measurement);
        let cases: [(Change, &str); 5] = [
            (|one| one.machine.gpu = "cd".to_owned(), "another GPU than this A GPU"),
            (|one| one.filesystem = "ef53 2".to_owned(), "another filesystem"),
            (|one| one.machine.kernel = "6.1".to_owned(), "stale: measured under kernel 6.1, and this is 6.18"),
            (|one| one.machine.driver = "12.8".to_owned(), "stale: measured with a driver of CUDA 12.8"),
            (|one| one.measured_unix_s = NOW - 200 * 24 * 3600, "stale: measured 200 days ago"),
        ];
        for (change, why) in cases {
            let advice = advisor(change).advice(Some("ef53 1"), Direction::Read, 1, NOW);
            let (path, told) = advice.choose(Path::Direct, &[Path::Direct, Path::Staged]);
            assert!(path == Path::Direct && told.as_ref().is_some_and(|told| told.contains(why)), "{told:?}");
        }
        let future = advisor(|one| one.measured_unix_s = NOW + 1).advice(Some("ef53 1"), Direction::Read, 1, NOW);
        assert!(matches!(&future, Advice::Ignored(why) if why.contains("in the future")));
        let nameless = advisor(|_| ()).advice(None, Direction::Read, 1, NOW);
        assert!(matches!(&nameless, Advice::Ignored(why) if why.contains("known again")));
    }

    #[test]
    fn what_is_no_profile_is_ignored_with_the_reason() {
        let whole = advisor(|_| ()).profile.expect("read back").to_json();
        assert_eq!(Profile::parse(&whole).expect("well formed").measurements, [measurement()]);
        let replaced = |from: &str, to: &str| whole.replacen(from, to, 1);
        for text in [
            String::new(),
            "{}".to_owned(),
            whole[..whole.len() / 2].to_owned(),
            replaced("\"version\": 1", "\"version\": 2"),
            replaced("thruway profile", "another"),
            replaced("\"read\"", "\"sideways\""),
            replaced("\"direct\"", "\"plain\""),
            replaced("12.2", "-1"),
            replaced("12.2", "1e999"),
            replaced("256MiB", "255MiB"),
        ] {
            assert_eq!(Profile::parse(&text).expect_err(&text).kind(), ErrorKind::Malformed);
            let advice = Advisor::new("p.json", Ok(text), machine()).advice(Some("ef53 1"), Direction::Read, 1, NOW);
            assert!(matches!(&advice, Advice::Ignored(why) if why.starts_with("the profile p.json is ignored: ")));
        }
        let gone = Err(Error::new(ErrorKind::NotFound, "there is no such file"));
        let advice = Advisor::new("p.json", gone, machine()).advice(Some("ef53 1"), Direction::Read, 1, NOW);
        assert!(matches!(&advice, Advice::Ignored(why) if why.ends_with("ignored: there is no such file")));
    }

    #[test]
    fn a_new_measurement_takes_the_place_of_an_old_one_of_the_same_place_alone() {
        let mut profile = Profile::default();
        let elsewhere = Measurement { filesystem: "6969 7".to_owned(), ..measurement() };
        for one in [measurement(), elsewhere.clone(), Measurement { measured_unix_s: NOW, ..measurement() }] {
            profile.put(one);
        }
        assert_eq!(profile.measurements, [elsewhere, Measurement { measured_unix_s: NOW, ..measurement() }]);
    }
}
