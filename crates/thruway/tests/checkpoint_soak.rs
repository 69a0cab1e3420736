//! Checkpoints in the long run: bits that flip anywhere are found, and a process that is killed at any moment loses nothing that
//! it was told is saved.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use thruway::checkpoint::{CheckpointOptions, Checkpoints, RestoreOptions, Retention, VerifyOptions};
use thruway::{ByteSize, Device, Session};
use thruway_testkit::fixtures::scratch_dir;
use thruway_testkit::random::Random;
use thruway_testkit::training::State;

/// How many bits are flipped.
const FLIPS: usize = 1000;
/// How often the child is killed, unless the environment names another number.
const KILLS: u64 = 10;
/// The variable that names it.
const KILLS_VARIABLE: &str = "THRUWAY_CHECKPOINT_KILLS";
/// The variable that makes a child of this program, and says where it saves.
const CHILD_VARIABLE: &str = "THRUWAY_CHECKPOINT_CHILD";

fn checkpoints(directory: &Path) -> Checkpoints {
    Session::builder().device(Device::Host).build().expect("session").checkpoints(directory)
}

fn options() -> CheckpointOptions {
    let retention = Retention { keep: Some(2), keep_every: None };
    CheckpointOptions::default().max_shard_size(ByteSize(40_000)).chunk_size(ByteSize(4096)).retention(retention)
}

#[test]
fn a_flipped_bit_anywhere_in_a_checkpoint_is_found_and_no_restore_gives_other_bytes() {
    let seed = 20_261_202;
    let scratch = scratch_dir();
    let checkpoints = checkpoints(scratch.path());
    let state = State::at(3);
    let saved = checkpoints.save(3, &state.groups(), &state.structure(), options()).expect("saved");
    let mut files: Vec<(std::path::PathBuf, Vec<u8>)> = std::fs::read_dir(&saved.path)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| (path.clone(), std::fs::read(path).expect("a file")))
        .collect();
    files.sort();
    let total: usize = files.iter().map(|(_, bytes)| bytes.len()).sum();
    let mut random = Random::new(seed);
    // Some in each file, however small, and the others wherever they fall.
    for flip in 0..FLIPS {
        let (file, at) = if flip < FLIPS / 4 {
            let file = flip % files.len();
            (file, random.below(files[file].1.len()))
        } else {
            let mut at = random.below(total);
            let file = files.iter().position(|(_, bytes)| {
                let here = at < bytes.len();
                at -= if here { 0 } else { bytes.len() };
                here
            });
            (file.expect("within the total"), at)
        };
        let (path, bytes) = &files[file];
        let bit = random.below(8);
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << bit;
        std::fs::write(path, damaged).expect("written");
        let when = format!("bit {bit} of byte {at} of {}, flip {flip}, seed {seed}", path.display());
        let found = checkpoints.verify(3, &VerifyOptions::default()).map_or(true, |found| !found.damage.is_empty());
        assert!(found, "{when}: not found");
        if let Ok(restored) = checkpoints.restore(&RestoreOptions::default()) {
            assert_eq!(state.difference(&restored), None, "{when}: restored all the same, and other than it was");
        }
        std::fs::write(path, bytes).expect("written");
    }
    assert_eq!(checkpoints.verify(3, &VerifyOptions::default()).expect("whole again").damage, []);
}

/// Not a test of its own: what the other one kills.
#[test]
fn child_that_saves_until_it_is_killed() {
    let Some(directory) = std::env::var_os(CHILD_VARIABLE) else { return };
    let checkpoints = checkpoints(Path::new(&directory));
    checkpoints.create().expect("a directory");
    let first = checkpoints.newest().expect("a list").map_or(0, |newest| newest + 1);
    for step in first.. {
        let state = State::at(step);
        // Every third save is made again in its own place.
        let times = if step % 3 == 0 { 2 } else { 1 };
        for _ in 0..times {
            let options = options().replace();
            let saved = checkpoints.save(step, &state.groups(), &state.structure(), options).expect("saved");
            assert!(saved.warnings.is_empty(), "{:?}", saved.warnings);
        }
        println!("\nsaved {step}");
    }
}

#[test]
fn a_process_killed_at_any_moment_has_lost_nothing_that_was_reported_saved() {
    let kills = std::env::var(KILLS_VARIABLE).map_or(KILLS, |text| text.parse().expect("a number"));
    let seed = u64::from(std::process::id());
    let mut random = Random::new(seed);
    let scratch = scratch_dir();
    let directory = scratch.path().join("run");
    let (mut reported_ever, mut interrupted) = (0, 0);
    for kill in 0..kills {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "child_that_saves_until_it_is_killed", "--nocapture"])
            .env(CHILD_VARIABLE, &directory)
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let reported = |line: std::io::Result<String>| line.ok()?.strip_prefix("saved ")?.parse::<u64>().ok();
        // It is at work; then any moment will do.
        let mut newest_reported = lines.by_ref().find_map(reported).expect("it saves");
        std::thread::sleep(Duration::from_micros(random.below(60_000) as u64));
        child.kill().expect("killed");
        child.wait().expect("it is gone");
        newest_reported = lines.filter_map(reported).last().unwrap_or(newest_reported);

        let when = format!("kill {kill}, seed {seed}");
        let checkpoints = checkpoints(&directory);
        let check = || {
            let restored = checkpoints.restore(&RestoreOptions::default()).unwrap_or_else(|error| panic!("{when}: {error}"));
            let step = restored.checkpoint.step();
            assert!(step >= newest_reported, "{when}: {newest_reported} was reported, and {step} is the newest");
            assert_eq!(State::at(step).difference(&restored), None, "{when}: step {step}");
            step
        };
        let before = check();
        interrupted += u32::from(!checkpoints.unfinished().expect("a list").is_empty());
        let recovered = checkpoints.recover().unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(recovered.warnings.is_empty(), "{when}: {:?}", recovered.warnings);
        assert_eq!(check(), before, "{when}: recovery changed the newest");
        for entry in std::fs::read_dir(&directory).expect("a directory") {
            let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
            let expected = name == ".thruway-lock" || (name.starts_with("step-") && !name.contains('.'));
            assert!(expected, "{when}: {name} is left over");
        }
        reported_ever = newest_reported.max(reported_ever);
    }
    println!("{kills} kills, {interrupted} of them within a save; {reported_ever} is the newest step");
}
