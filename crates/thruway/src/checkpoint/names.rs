//! The names in a directory of checkpoints.
//!
//! | name | what |
//! |---|---|
//! | `step-00001000` | the checkpoint of step 1000 |
//! | `step-00001000.r1` | one that replaces it: the highest number counts. Soon takes the plain name |
//! | `.step-00001000.thruway-…` | being written or being removed, or left over from that |
//! | `.thruway-lock` | who changes the directory |

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use crate::base::Result;
use crate::storage::{Namespace, name_of_temporary};

/// The lock's name.
pub(super) const LOCK: &str = ".thruway-lock";

/// What a checkpoint's directory is called: its step, and the how manieth of this step it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DirectoryName {
    pub(super) step: u64,
    /// 0 for the first, or the only one.
    pub(super) replacement: u32,
}

impl DirectoryName {
    /// Reads a name. Only the one that [`Display`](std::fmt::Display) gives is one.
    fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_prefix("step-")?;
        let (step, replacement) = match rest.split_once(".r") {
            Some((step, replacement)) => (step, replacement.parse().ok().filter(|number| *number > 0)?),
            None => (rest, 0),
        };
        let parsed = Self { step: step.parse().ok()?, replacement };
        (parsed.to_string() == name).then_some(parsed)
    }
}

impl std::fmt::Display for DirectoryName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "step-{:08}", self.step)?;
        match self.replacement {
            0 => Ok(()),
            number => write!(f, ".r{number}"),
        }
    }
}

/// What a directory holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Listing {
    /// Of each step the directories, the one that counts last.
    pub(super) steps: BTreeMap<u64, Vec<DirectoryName>>,
    /// What is being written or removed, or was left over from that, by name.
    pub(super) unfinished: Vec<String>,
}

impl Listing {
    /// Looks into a directory. Names of others are passed over.
    pub(super) fn read(namespace: &dyn Namespace, directory: &Path) -> Result<Self> {
        let names = namespace.list(directory)?;
        Ok(Self::of(names.iter().map(std::ffi::OsString::as_os_str)))
    }

    fn of<'a>(names: impl Iterator<Item = &'a OsStr>) -> Self {
        let mut listing = Self::default();
        for name in names {
            if let Some(found) = name.to_str().and_then(DirectoryName::parse) {
                listing.steps.entry(found.step).or_default().push(found);
            } else if name_of_temporary(name).and_then(DirectoryName::parse).is_some() {
                listing.unfinished.extend(name.to_str().map(str::to_owned));
            }
        }
        listing.steps.values_mut().for_each(|names| names.sort_unstable());
        listing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_are_found_whatever_stands_beside_them() {
        let names = [
            "step-00001000",
            "step-00001000.r1",
            "step-00001000.r10",
            "step-00001000.r2",
            "step-123456789012",
            ".step-00000007.thruway-12-0-3f",
            ".thruway-lock",
            ".step-00000007",
            "step-7",
            "step-00000007.r0",
            "step-000000007",
            "step-00000007.r01",
            "step-+0000007",
            "latest",
            ".model.thruway-1-2-3",
            "step-00000007.bak",
        ];
        let listing = Listing::of(names.iter().map(OsStr::new));
        let found: Vec<String> = listing.steps.values().flatten().map(ToString::to_string).collect();
        assert_eq!(found, ["step-00001000", "step-00001000.r1", "step-00001000.r2", "step-00001000.r10", "step-123456789012"]);
        assert_eq!(listing.unfinished, [".step-00000007.thruway-12-0-3f"]);
    }
}
