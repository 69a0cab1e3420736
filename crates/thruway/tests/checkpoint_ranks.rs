//! Ranks that save one checkpoint: here threads, each with a session of its own, and a board in memory.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thruway::checkpoint::{Board, CheckpointOptions, Checkpoints, Group, Json, RestoreOptions, SaveId, Saved, VerifyOptions};
use thruway::{ByteSize, Device, ErrorKind, Result, Session};
use thruway_testkit::fixtures::scratch_dir;
use thruway_testkit::training::State;

const RANKS: u32 = 3;

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

fn checkpoints(directory: &Path) -> Checkpoints {
    Session::builder().device(Device::Host).build().expect("session").checkpoints(directory)
}

fn state(rank: u32, step: u64) -> State {
    State::at(step * 10 + u64::from(rank))
}

/// The groups of a rank, under names that no other uses and that name files or do not.
fn groups(rank: u32, step: u64) -> Vec<Group> {
    let mut groups = state(rank, step).groups();
    groups.iter_mut().for_each(|group| group.name = format!("{}/{rank}", group.name));
    groups
}

/// Saves on all ranks at once, each into the directory that `place` gives.
fn save(step: u64, place: impl Fn(u32) -> std::path::PathBuf + Sync) -> Vec<Result<Saved>> {
    let board: Arc<dyn Board> = Arc::new(Notes::default());
    let save_id = SaveId::random().expect("random bits");
    let one = |rank| {
        let timeout = Duration::from_secs(60);
        let ranks = thruway::checkpoint::Ranks { rank, count: RANKS, save_id, timeout, board: Arc::clone(&board) };
        let options =
            CheckpointOptions::default().max_shard_size(ByteSize(40_000)).chunk_size(ByteSize(4096)).replace().ranks(ranks);
        checkpoints(&place(rank)).save(step, &groups(rank, step), &Json::new(rank.to_string())?, options)
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn what_the_ranks_save_is_one_checkpoint() {
    let scratch = scratch_dir();
    let run = scratch.path().join("run");
    for _ in ["new", "replaced"] {
        let saved: Vec<Saved> = save(7, |_| run.clone()).into_iter().map(|one| one.expect("saved")).collect();
        assert!(saved.iter().all(|one| one.path == run.join("step-00000007") && one.save_id == saved[0].save_id));
        assert!(saved.iter().all(|one| one.receipt.bytes > 0 && one.warnings.is_empty()));
    }
    let checkpoints = checkpoints(&run);
    let restored = checkpoints.restore(&RestoreOptions::default()).expect("restored");
    assert_eq!(restored.checkpoint.manifest().structure.text(), "[0,1,2]");
    assert_eq!(restored.checkpoint.manifest().world.ranks, RANKS);
    for rank in 0..RANKS {
        state(rank, 7).model.assert_loaded(&restored.groups[&format!("model/{rank}")].tensors);
        state(rank, 7).optimizer.assert_loaded(&restored.groups[&format!("optimizer/{rank}")].tensors);
    }
    assert!(checkpoints.verify(7, &VerifyOptions::default()).expect("read").damage.is_empty());
    assert_eq!(checkpoints.unfinished().expect("a list"), [""; 0]);
}

#[test]
fn one_that_saves_elsewhere_fails_all_and_leaves_nothing() {
    let scratch = scratch_dir();
    let run = scratch.path().join("run");
    save(7, |_| run.clone()).into_iter().for_each(|one| drop(one.expect("saved")));
    let failures = save(8, |rank| if rank == 2 { scratch.path().join("elsewhere") } else { run.clone() });
    for failure in failures {
        let error = failure.expect_err("rank 2 cannot");
        assert_eq!((error.kind(), error.context("rank")), (ErrorKind::NotFound, Some("2")), "{error}");
    }
    let checkpoints = checkpoints(&run);
    assert_eq!(checkpoints.steps().expect("a list"), [7]);
    drop(checkpoints.recover().expect("cleared"));
    assert_eq!(std::fs::read_dir(&run).expect("a directory").count(), 2, "the step and the lock");
}
