//! Checkpoints of a training run: a directory with one directory for each saved step.
//!
//! ```text
//! DIR/
//!   step-00001000/
//!     model-00001-of-00002.safetensors …      one set of shards for each group of tensors,
//!     model.safetensors.index.json            each with its Hugging Face index: any reader opens them
//!     optimizer.safetensors
//!     manifest.json                           what belongs to it, and the checksums
//!   step-00002000/
//!   .thruway-lock
//! ```
//!
//! | what | where |
//! |---|---|
//! | what a manifest says, and its rules (pure) | `manifest` |
//! | checksums by chunk (pure), and of what passes in pieces | `checksum`, `tally` |
//! | which checkpoints stay (pure) | `retention` |
//! | names in the directory | `names` |
//! | one at a time | `lock` |
//! | what a save will write | `plan` |
//! | save: stage, write, sync, rename | `commit` |
//! | … with many processes, each of which writes a part | `ranks` |
//! | save beside training: what lies where in the pool (pure) | `layout` |
//! | … copies into the pool, a save under way, and whose turn it is | `staging`, `flight`, `checkpointer` |
//! | whether weights are trained at all | `stale` |
//! | what failed saves left, and taking checkpoints away | `recover` |
//! | open, restore, verify | `open`, `restore`, `verify` |

mod checkpointer;
mod checksum;
mod commit;
mod flight;
mod layout;
mod lock;
mod manifest;
mod names;
mod open;
mod plan;
mod ranks;
mod recover;
mod restore;
mod retention;
mod staging;
mod stale;
mod tally;
mod verify;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use checkpointer::{Checkpointer, CheckpointerOptions, Hold};
pub use checksum::Checksum;
pub use commit::{CheckpointOptions, Group, Saved};
pub use flight::{Level, Saving};
pub use manifest::{FileRecord, GroupRecord, Json, MANIFEST, MANIFEST_BYTES_MAX, Manifest, SaveId, TensorRecord, World};
pub use open::Checkpoint;
pub use ranks::{Board, Ranks};
pub use recover::{Pruned, Recovered};
pub use restore::{Loaded, RestoreOptions, Restored};
pub use retention::Retention;
pub use verify::{Damage, TensorDifference, Verification, VerifyOptions};

use crate::base::{Error, ErrorKind, Result};
use crate::io::policy::PathPolicy;
use crate::storage::Namespace;
use crate::transfer::TransferContext;
use names::{DirectoryName, Listing};

/// The checkpoints in a directory. Cloning is cheap. Reading needs no lock and disturbs nobody; whatever changes the directory
/// holds its lock for as long as that takes.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    context: Arc<TransferContext>,
    policy: PathPolicy,
    directory: PathBuf,
}

impl Checkpoints {
    pub(crate) fn new(context: Arc<TransferContext>, policy: PathPolicy, directory: &Path) -> Self {
        Self { context, policy, directory: directory.to_owned() }
    }

    /// Where they lie.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes the directory, if it is not there; that above it must be. [`save`](Self::save) does so too.
    ///
    /// # Errors
    /// Whatever storage reports.
    pub fn create(&self) -> Result<()> {
        let namespace = &*self.context.namespace;
        match namespace.create_directory(&self.directory) {
            Ok(()) => {
                let above = self.directory.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
                namespace.sync_directory(above)
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The committed steps, oldest first. Whether all of their files are still there is for [`open`](Self::open) to say.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if the directory is not there: an unmounted drive must not look like a run that has
    /// not begun. And whatever storage reports.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let namespace = &*self.context.namespace;
        let mut steps = Vec::new();
        for (step, names) in Listing::read(namespace, &self.directory)?.steps {
            if committed(namespace, &self.directory, &names)?.is_some() {
                steps.push(step);
            }
        }
        Ok(steps)
    }

    /// The newest committed step.
    ///
    /// # Errors
    /// As [`steps`](Self::steps).
    pub fn newest(&self) -> Result<Option<u64>> {
        Ok(self.steps()?.pop())
    }

    /// Opens the checkpoint of a step: reads its manifest and the headers of its shards.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if there is none; all files that are missing or have the wrong size, at once;
    /// [`Mismatch`](ErrorKind::Mismatch) for a shard of another save, or one that contradicts the manifest.
    pub fn open(&self, step: u64) -> Result<Checkpoint> {
        Checkpoint::open(&self.context, self.policy, &self.directory, self.name_of(step)?)
    }

    /// Reads every byte of the checkpoint of a step and holds it against the manifest.
    ///
    /// # Errors
    /// As [`open`](Self::open), and the first byte that cannot be read. Damage is no error: it stands in the result.
    pub fn verify(&self, step: u64, options: &VerifyOptions) -> Result<Verification> {
        self.open(step)?.verify(options)
    }

    /// The directory of a step's checkpoint.
    ///
    /// # Errors
    /// As [`open`](Self::open), if there is none.
    pub fn directory_of(&self, step: u64) -> Result<PathBuf> {
        Ok(self.directory.join(self.name_of(step)?.to_string()))
    }

    fn name_of(&self, step: u64) -> Result<DirectoryName> {
        let namespace = &*self.context.namespace;
        let listing = Listing::read(namespace, &self.directory)?;
        let names = listing.steps.get(&step).map_or(&[][..], Vec::as_slice);
        committed(namespace, &self.directory, names)?.ok_or_else(|| self.no_such_step(step))
    }

    fn no_such_step(&self, step: u64) -> Error {
        Error::new(ErrorKind::NotFound, format!("there is no checkpoint of step {step}"))
            .with_file(&self.directory)
            .with_hint("`thruway checkpoint list` shows those that there are")
    }
}

/// The directory that counts among those of a step: the newest that holds a manifest, without which it is no checkpoint.
fn committed(namespace: &dyn Namespace, directory: &Path, names: &[DirectoryName]) -> Result<Option<DirectoryName>> {
    for name in names.iter().rev() {
        match namespace.metadata(&directory.join(name.to_string()).join(MANIFEST)) {
            Ok(_) => return Ok(Some(*name)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}
