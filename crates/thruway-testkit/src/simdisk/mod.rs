//! A disk in memory that is as harsh as POSIX allows, for crash tests.
//!
//! Everything has two states: what a running program sees, and what is durable. A power cut leaves the durable state
//! and, of the rest, whatever a seed chooses:
//!
//! | what | durable after | a power cut before that may |
//! |---|---|---|
//! | bytes of a file | [`File::sync`] of the file | lose or keep each 512-byte sector of each write |
//! | its length | the same | lose or keep each change of it, apart from the bytes |
//! | a name: created, renamed, removed | [`Namespace::sync_directory`] of its directory | lose or keep each operation, in any combination; a rename is one operation |
//!
//! A file whose sync failed is *poisoned*, as on Linux: what was not yet durable can still be read, is never written,
//! and later syncs report success all the same.
//!
//! Every operation is counted, on names and on files alike, and any of them can be made to fail
//! ([`SimDisk::fail_at`]) or to be the one during which the power goes ([`SimDisk::power_cut_at`]).
//!
//! [`File::sync`]: thruway::storage::File::sync
//! [`Namespace::sync_directory`]: thruway::storage::Namespace::sync_directory

mod content;
mod file;
mod namespace;
mod power;
#[cfg(test)]
mod tests;
mod tree;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thruway::io::engine::InMemory;
use thruway::io::layer::{FaultPlan, Faulty};
use thruway::io::policy::Source;
use thruway::io::{EngineFactory, Made};
use thruway::storage::{DirectRules, Residency};

use content::Content;
use power::{Power, Survival, Verdict};
use tree::Tree;

/// What kind of disk it is.
#[derive(Clone, Copy, Debug)]
pub struct SimDiskSettings {
    /// What `O_DIRECT` demands; `None` refuses it. A file opened so refuses what is not aligned, with `EINVAL`.
    pub direct: Option<DirectRules>,
    /// What the page cache says it holds of any range.
    pub residency: Residency,
    /// How many bytes the files may have together.
    pub capacity_bytes: u64,
    /// What is reported as free, if not the truth.
    pub free_bytes: Option<u64>,
}

impl Default for SimDiskSettings {
    /// A disk without `O_DIRECT`, of 1 GiB.
    fn default() -> Self {
        Self { direct: None, residency: Residency::None, capacity_bytes: 1 << 30, free_bytes: None }
    }
}

/// A simulated disk. Clones are the same disk.
#[derive(Clone, Debug)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
    settings: SimDiskSettings,
}

struct State {
    tree: Tree,
    power: Power,
    locked: Vec<u64>,
    clock: i128,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({} operations)", self.power.trace.len())
    }
}

impl SimDisk {
    /// An empty disk.
    pub fn new(settings: SimDiskSettings) -> Self {
        Self::with_tree(Tree::new(), settings)
    }

    fn with_tree(tree: Tree, settings: SimDiskSettings) -> Self {
        let state = State { tree, power: Power::default(), locked: Vec::new(), clock: 0 };
        Self { state: Arc::new(Mutex::new(state)), settings }
    }

    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a durable file on the disk, with the directories above it. Not counted as an operation.
    ///
    /// # Panics
    /// If something stands there already.
    pub fn put(&self, path: impl AsRef<Path>, bytes: Vec<u8>) {
        let path = path.as_ref();
        if let Some(parent) = path.parent() {
            self.put_directory(parent);
        }
        let mut state = self.lock_state();
        let created = state.tree.create_file(path, Content::durable(bytes));
        assert!(created.is_ok(), "{} cannot be put there: {created:?}", path.display());
        state.sync_everything(path);
    }

    /// Puts a durable directory on the disk, with those above it; what exists stays. Not counted as an operation.
    pub fn put_directory(&self, path: impl AsRef<Path>) {
        let path = path.as_ref();
        let mut state = self.lock_state();
        let ancestors: Vec<&Path> = path.ancestors().collect();
        for directory in ancestors.into_iter().rev().filter(|directory| directory.file_name().is_some()) {
            if state.tree.create_directory(directory).is_ok() {
                state.sync_everything(directory);
            }
        }
    }

    /// What a file holds now. Not counted as an operation.
    pub fn contents(&self, path: impl AsRef<Path>) -> Option<Vec<u8>> {
        let state = self.lock_state();
        let id = state.tree.find(path.as_ref()).ok()?;
        Some(state.tree.file(id).ok()?.now().to_vec())
    }

    /// The names in a directory now, none if it does not exist. Not counted as an operation.
    pub fn names(&self, directory: impl AsRef<Path>) -> Vec<String> {
        let state = self.lock_state();
        let names = state.tree.find(directory.as_ref()).and_then(|id| state.tree.list(id)).unwrap_or_default();
        names.into_iter().map(|name| name.to_string_lossy().into_owned()).collect()
    }

    /// Makes the operation number `step` fail with `errno`, counted from 0 since the disk was made or rebooted.
    pub fn fail_at(&self, step: u64, errno: i32) {
        self.lock_state().power.faults.insert(step, errno);
    }

    /// Cuts the power during operation number `step`: that one may happen or not, and it and all later ones fail.
    pub fn power_cut_at(&self, step: u64) {
        self.lock_state().power.cut_at = Some(step);
    }

    /// How many operations there have been.
    pub fn operations(&self) -> u64 {
        self.lock_state().power.trace.len() as u64
    }

    /// What they were, in words: the name of the operation, a blank, the path.
    pub fn trace(&self) -> Vec<String> {
        self.lock_state().power.trace.clone()
    }

    /// Those that were made to fail.
    pub fn failed(&self) -> Vec<String> {
        self.lock_state().power.failed.clone()
    }

    /// The disk as it may be found after a power cut now: of what was not durable, what `seed` chooses.
    #[must_use]
    pub fn reboot(&self, seed: u64) -> Self {
        self.after_power_cut(&mut Survival::seeded(seed))
    }

    /// The disk after a power cut that spared all that was not durable, other than what a failed sync lost.
    #[must_use]
    pub fn reboot_all_kept(&self) -> Self {
        self.after_power_cut(&mut Survival::AllKept)
    }

    /// The disk after a power cut that spared only what was durable.
    #[must_use]
    pub fn reboot_all_lost(&self) -> Self {
        self.after_power_cut(&mut Survival::AllLost)
    }

    fn after_power_cut(&self, survival: &mut Survival) -> Self {
        let tree = self.lock_state().tree.after_power_cut(survival);
        Self::with_tree(tree, self.settings)
    }

    /// Counts an operation and carries it out, unless it is to fail.
    fn operate<T>(&self, what: &str, path: &Path, body: impl FnOnce(&mut State) -> Result<T, i32>) -> Result<T, i32> {
        let mut state = self.lock_state();
        state.clock += 1;
        match state.power.step(format!("{what} {}", path.display())) {
            Verdict::Goes => body(&mut state),
            Verdict::Fails(errno) => Err(errno),
            Verdict::Dies => {
                // Whether it succeeds or not, nobody will hear of it.
                drop(body(&mut state));
                Err(libc::EIO)
            }
            Verdict::Dead => Err(libc::EIO),
        }
    }

    /// Counts a sync. One during which the power goes leaves what it was to sync as undecided as it was.
    fn operate_sync(
        &self,
        what: &str,
        path: &Path,
        sync: impl FnOnce(&mut State) -> Result<(), i32>,
        fail: impl FnOnce(&mut State),
    ) -> Result<(), i32> {
        let mut state = self.lock_state();
        match state.power.step(format!("{what} {}", path.display())) {
            Verdict::Goes => sync(&mut state),
            Verdict::Fails(errno) => {
                fail(&mut state);
                Err(errno)
            }
            Verdict::Dies | Verdict::Dead => Err(libc::EIO),
        }
    }
}

impl State {
    /// Makes the name of something durable, in its directory.
    fn sync_everything(&mut self, path: &Path) {
        let parent = self.tree.find(path.parent().unwrap_or(Path::new("")));
        let synced = parent.and_then(|directory| self.tree.sync_directory(directory));
        assert!(synced.is_ok(), "the directory of {} was there a moment ago", path.display());
    }
}

/// Makes the engines of a session on a [`SimDisk`].
#[derive(Debug)]
pub struct SimEngines {
    depth: usize,
    seed: u64,
    faults: Option<FaultPlan>,
    made: AtomicU64,
}

impl SimEngines {
    /// Engines with `depth` requests in flight that complete in an order that `seed` decides.
    pub fn new(depth: usize, seed: u64) -> Self {
        Self { depth, seed, faults: None, made: AtomicU64::new(0) }
    }

    /// Lets the engines' requests fail as the plan says.
    #[must_use]
    pub fn with_faults(mut self, plan: FaultPlan) -> Self {
        self.faults = Some(plan);
        self
    }
}

impl EngineFactory for SimEngines {
    fn make(&self, _source: Source) -> thruway::Result<Made> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let engine = InMemory::new(self.depth, self.seed.wrapping_add(number));
        Ok(match &self.faults {
            Some(plan) => Made { engine: Box::new(Faulty::new(engine, plan.clone())), note: None },
            None => Made { engine: Box::new(engine), note: None },
        })
    }
}
