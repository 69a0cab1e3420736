//! Many processes save one checkpoint: each writes files of its own into one staged directory, and the first commits them all.
//!
//! ```text
//! rank 0   lock, stage ─ "stage" → write, sync ─────────── waits for every part → manifest, commit ─ "outcome" →
//! others   wait for the stage ──→ write, sync ─ "part-3" → wait for the outcome ──────────────────────────────→
//! ```
//!
//! They speak by notes on a board that the caller provides, and look at it now and then: nobody is ever in the middle of an
//! operation that ends only when another process comes too. Whoever fails says so under [`FAILED`], which all see that wait; who says
//! nothing for too long has failed. After its part a rank says nothing more, so the first rank's decision is everybody's.
//! Who waits for the first rank waits twice as long as that does, which may be waiting for another.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::manifest::{FileRecord, GroupRecord, Json, Manifest, SaveId, World};
use crate::base::{Error, ErrorKind, Result};
use crate::transfer::Cancel;

/// The note of a rank that failed.
const FAILED: &str = "failed";

/// The fact of an error that leaves open whether the checkpoint was committed.
const COMMIT: &str = "commit";

/// How long a rank waits before it looks at the board again: at first, and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// Where the processes of one save leave notes for each other. Every save has one of its own.
pub trait Board: fmt::Debug + Send + Sync {
    /// Puts up a note under a name that nobody has used, or in the place of one's own.
    ///
    /// # Errors
    /// Whatever keeps others from seeing it.
    fn put(&self, name: &str, text: &str) -> Result<()>;

    /// The note with this name, if it is there. Does not wait.
    ///
    /// # Errors
    /// Whatever keeps this process from seeing it.
    fn get(&self, name: &str) -> Result<Option<String>>;
}

/// The processes that save one checkpoint together, as one of them sees them.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// Which of them this is, from 0 on.
    pub rank: u32,
    /// How many they are.
    pub count: u32,
    /// What their save is known by: the same on all.
    pub save_id: SaveId,
    /// How long the first waits for another. The others wait twice as long for it.
    pub timeout: Duration,
    /// Where they leave notes.
    pub board: Arc<dyn Board>,
}

/// Where the first rank stages, and for which step.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Stage {
    pub(super) step: u64,
    /// The name under which it is staged, beside the checkpoints.
    pub(super) staged: String,
    /// The name that it will have.
    pub(super) name: String,
    save_id: SaveId,
    chunk_bytes: u64,
}

/// What became of it.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Outcome {
    /// The checkpoint's name.
    pub(super) name: String,
    pub(super) removed: Vec<u64>,
}

/// What a rank wrote.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Part {
    files: Vec<FileRecord>,
    groups: Vec<GroupRecord>,
    structure: Json,
}

/// What a rank says that failed.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Failure {
    rank: u32,
    kind: String,
    message: String,
}

impl Ranks {
    /// Whether this is the first, which commits.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Tells the others of a failure of this rank, if they have not heard of one. Whoever cannot be told will notice. What may have been
    /// committed all the same is not told.
    pub fn fail(&self, error: &Error) {
        if error.context(COMMIT).is_some() {
            return;
        }
        let of = error.context("rank").and_then(|rank| rank.parse().ok()).unwrap_or(self.rank);
        let failure = Failure { rank: of, kind: error.kind().name().to_owned(), message: error.to_string() };
        if let (Ok(None), Ok(text)) = (self.board.get(FAILED), serde_json::to_string(&failure)) {
            drop(self.board.put(FAILED, &text));
        }
    }

    /// What made this rank fail: its own error, unless another rank failed first. Then that is why, and its own is a fact of it.
    pub(super) fn cause(&self, error: Error) -> Error {
        if error.context("rank").is_some() {
            return error;
        }
        match self.board.get(FAILED).ok().flatten().and_then(|text| read::<Failure>(&text).ok()) {
            Some(failure) if failure.rank != self.rank => heard(&failure).with("own", error),
            _ => error.with("rank", self.rank),
        }
    }

    /// Puts up a note.
    ///
    /// # Errors
    /// As [`Board::put`].
    pub fn put(&self, name: &str, text: &str) -> Result<()> {
        self.board.put(name, text)
    }

    /// Waits for a note of a rank.
    ///
    /// # Errors
    /// The failure of whichever rank failed, with the fact `rank`; [`LimitReached`](ErrorKind::LimitReached) if the rank says nothing for
    /// as long as the [timeout](Self::timeout), or twice that for the first; [`Cancelled`](ErrorKind::Cancelled).
    pub fn wait(&self, name: &str, rank: u32, cancel: &Cancel) -> Result<String> {
        self.wait_since(Instant::now(), name, rank, cancel)
    }

    fn wait_since(&self, begun: Instant, name: &str, rank: u32, cancel: &Cancel) -> Result<String> {
        let patience = if rank == 0 { self.timeout * 2 } else { self.timeout };
        let (mut pause, longest) = LOOKS;
        loop {
            // What is waited for first: who has decided is right, whatever others say of it.
            if let Some(text) = self.board.get(name)? {
                return Ok(text);
            }
            if let Some(failure) = self.board.get(FAILED)? {
                return Err(heard(&read(&failure)?));
            }
            if cancel.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "the wait for the other ranks was cancelled"));
            }
            if begun.elapsed() >= patience {
                let message = format!("rank {rank} said nothing for {} s", patience.as_secs_f64());
                return Err(Error::new(ErrorKind::LimitReached, message)
                    .with("rank", rank)
                    .with("note", name)
                    .with_hint("it may have died, or not have come here at all: see its log"));
            }
            std::thread::sleep(pause);
            pause = longest.min(pause * 2);
        }
    }

    /// Of the first rank: tells where to write.
    pub(super) fn open(&self, manifest: &Manifest, staged: String, name: String) -> Result<()> {
        let Manifest { step, save_id, chunk_bytes, .. } = *manifest;
        self.put("stage", &text_of(&Stage { step, staged, name, save_id, chunk_bytes })?)
    }

    /// Of the others: waits to be told.
    pub(super) fn stage(&self, manifest: &Manifest, cancel: &Cancel) -> Result<Stage> {
        let stage: Stage = read(&self.wait("stage", 0, cancel)?)?;
        if let Some(failure) = self.board.get(FAILED)? {
            // It is too late: nobody waits for this rank any more.
            return Err(heard(&read(&failure)?));
        }
        let differs = |what: &str, ours: &dyn fmt::Display, theirs: &dyn fmt::Display| {
            let message = format!("rank {} saves {what} {ours}, and rank 0 {what} {theirs}", self.rank);
            Err(Error::new(ErrorKind::InvalidInput, message).with_hint("all ranks save the same, in the same order"))
        };
        if stage.step != manifest.step {
            return differs("step", &manifest.step, &stage.step);
        }
        if stage.save_id != manifest.save_id {
            return differs("as", &manifest.save_id, &stage.save_id);
        }
        if stage.chunk_bytes != manifest.chunk_bytes {
            return differs("in chunks of", &manifest.chunk_bytes, &stage.chunk_bytes);
        }
        Ok(stage)
    }

    /// Of the others: tells what was written, and synced.
    pub(super) fn hand_in(&self, manifest: &Manifest) -> Result<()> {
        let Manifest { files, groups, structure, .. } = manifest.clone();
        self.put(&name_of_part(self.rank), &text_of(&Part { files, groups, structure })?)
    }

    /// Of the first: puts what all have written into one manifest. Its structure is a list of theirs.
    pub(super) fn gather(&self, manifest: &mut Manifest, cancel: &Cancel) -> Result<()> {
        let begun = Instant::now();
        let mut structures = vec![manifest.structure.clone()];
        for rank in 1..self.count {
            let part: Part = read(&self.wait_since(begun, &name_of_part(rank), rank, cancel)?)?;
            structures.push(part.structure.clone());
            add(manifest, part);
        }
        manifest.structure = Json::new(text_of(&structures)?)?;
        manifest.world = World { ranks: self.count, layout: manifest.world.layout.clone() };
        Ok(())
    }

    /// Of the first: tells that it is committed. It is, whether or not the others can hear it.
    pub(super) fn close(&self, name: String, removed: Vec<u64>) -> Result<()> {
        self.put("outcome", &text_of(&Outcome { name, removed })?)
    }

    /// Of the others: waits to be told.
    pub(super) fn outcome(&self, cancel: &Cancel) -> Result<Outcome> {
        match self.wait("outcome", 0, cancel) {
            Ok(text) => read(&text),
            Err(error) if matches!(error.kind(), ErrorKind::LimitReached | ErrorKind::Cancelled) => {
                Err(error.with(COMMIT, "unknown").with_hint("look whether the step is there: it may have been committed"))
            }
            Err(error) => Err(error),
        }
    }
}

/// Adds a rank's files and groups.
fn add(manifest: &mut Manifest, part: Part) {
    let first = manifest.files.len();
    manifest.files.extend(part.files);
    manifest.groups.extend(part.groups.into_iter().map(|mut group| {
        // A rank's numbers are its own. What is nonsense stays it, and is refused with the manifest.
        group.opens = group.opens.map(|file| file.saturating_add(first));
        group.tensors.iter_mut().for_each(|tensor| tensor.file = tensor.file.saturating_add(first));
        group
    }));
}

fn name_of_part(rank: u32) -> String {
    format!("part-{rank}")
}

/// Another rank's failure as an error of this one's.
fn heard(failure: &Failure) -> Error {
    let kind = ErrorKind::from_name(&failure.kind).unwrap_or(ErrorKind::Io);
    Error::new(kind, format!("rank {} failed: {}", failure.rank, failure.message))
        .with("rank", failure.rank)
        .with_hint("see what that rank says: nothing was committed, and what was there is as it was")
}

fn text_of(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::new(ErrorKind::InvalidInput, format!("a note to the other ranks cannot be written: {error}")))
}

fn read<T: serde::de::DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| {
        Error::new(ErrorKind::Malformed, format!("a note of another rank cannot be read: {error}"))
            .with_hint("all ranks must run the same version of thruway")
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    #[derive(Debug, Default)]
    struct Notes(Mutex<HashMap<String, String>>);

    impl Board for Notes {
        fn put(&self, name: &str, text: &str) -> Result<()> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), text.to_owned());
            Ok(())
        }

        fn get(&self, name: &str) -> Result<Option<String>> {
            Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned())
        }
    }

    fn two(timeout: Duration) -> [Ranks; 2] {
        let board: Arc<dyn Board> = Arc::new(Notes::default());
        let save_id = SaveId::random().expect("random bits");
        [0, 1].map(|rank| Ranks { rank, count: 2, save_id, timeout, board: Arc::clone(&board) })
    }

    #[test]
    fn the_failure_of_a_rank_is_heard_by_kind_and_number_and_the_first_one_stays() {
        let [first, second] = two(Duration::from_secs(60));
        second.fail(&Error::new(ErrorKind::NoSpace, "the drive is full").with("free", 0));
        second.fail(&Error::new(ErrorKind::Io, "and more"));
        let error = first.wait("part-1", 1, &Cancel::default()).expect_err("it failed");
        assert_eq!((error.kind(), error.context("rank")), (ErrorKind::NoSpace, Some("1")));
        assert!(error.message().contains("rank 1 failed: the drive is full (free 0)"), "{error}");
        // What it hears it does not tell as its own.
        first.fail(&error);
        assert_eq!(second.wait("outcome", 0, &Cancel::default()).expect_err("failed").context("rank"), Some("1"));
        // What happens to it because of that is no failure of its own.
        let because = first.cause(Error::new(ErrorKind::NotFound, "the stage is gone"));
        assert_eq!((because.kind(), because.context("own")), (ErrorKind::NoSpace, Some("the stage is gone")));
        let own = second.cause(Error::new(ErrorKind::NoSpace, "the drive is full"));
        assert_eq!((own.message(), own.context("rank")), ("the drive is full", Some("1")));
    }

    #[test]
    fn a_rank_that_says_nothing_is_named_and_what_was_decided_counts_whatever_else_is_said() {
        let [first, second] = two(Duration::from_millis(20));
        let error = first.wait("part-1", 1, &Cancel::default()).expect_err("nothing is said");
        assert_eq!((error.kind(), error.context("rank")), (ErrorKind::LimitReached, Some("1")));
        let unsure = second.outcome(&Cancel::default()).expect_err("nothing is said");
        assert_eq!(unsure.context(COMMIT), Some("unknown"));
        first.close("step-00000001".to_owned(), vec![7]).expect("put");
        second.fail(&unsure);
        assert_eq!(first.board.get(FAILED).expect("a board"), None);
        assert_eq!(second.outcome(&Cancel::default()).expect("it was decided").removed, [7]);
    }

    #[test]
    fn ranks_that_save_different_steps_are_told_so() {
        let [first, second] = two(Duration::from_secs(60));
        let manifest = |step| Manifest::new(first.save_id, step, 4096);
        first.open(&manifest(5), "staged".to_owned(), "name".to_owned()).expect("put");
        assert_eq!(second.stage(&manifest(5), &Cancel::default()).expect("the same").staged, "staged");
        let error = second.stage(&manifest(6), &Cancel::default()).expect_err("another step");
        assert!(error.message().contains("rank 1 saves step 6, and rank 0 step 5"), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}
