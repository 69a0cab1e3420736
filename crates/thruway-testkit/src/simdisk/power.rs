//! Faults, power cuts, and what survives them.

use std::collections::BTreeMap;

use crate::random::Random;

/// Decides what survives of that which was never synced.
#[derive(Debug)]
pub(super) enum Survival {
    /// Everything: the drive was quick.
    AllKept,
    /// Nothing: the drive had not begun.
    AllLost,
    /// This or that, each kept with so many chances in 8.
    Seeded { random: Random, of_8: u64 },
}

impl Survival {
    /// What the seed chooses, the odds included: some power cuts spare much and some little.
    pub(super) fn seeded(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let of_8 = [1, 4, 4, 7][random.below(4)];
        Self::Seeded { random, of_8 }
    }

    pub(super) fn keeps(&mut self) -> bool {
        match self {
            Self::AllKept => true,
            Self::AllLost => false,
            Self::Seeded { random, of_8 } => random.chance(*of_8),
        }
    }
}

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is carried out.
    Goes,
    /// It fails with this error number and changes nothing.
    Fails(i32),
    /// The power goes while it runs: it may have been carried out, and the caller does not learn it.
    Dies,
    /// There is no power.
    Dead,
}

/// Counts the operations of a disk, and knows which of them fail.
#[derive(Debug, Default)]
pub(super) struct Power {
    pub(super) trace: Vec<String>,
    pub(super) failed: Vec<String>,
    pub(super) faults: BTreeMap<u64, i32>,
    pub(super) cut_at: Option<u64>,
}

impl Power {
    /// Counts one operation and says what becomes of it.
    pub(super) fn step(&mut self, what: String) -> Verdict {
        let at = self.trace.len() as u64;
        let verdict = match (self.cut_at, self.faults.get(&at)) {
            (Some(cut), _) if at == cut => Verdict::Dies,
            (Some(cut), _) if at > cut => Verdict::Dead,
            (_, Some(errno)) => Verdict::Fails(*errno),
            _ => Verdict::Goes,
        };
        if verdict != Verdict::Goes {
            self.failed.push(what.clone());
        }
        self.trace.push(what);
        verdict
    }
}
