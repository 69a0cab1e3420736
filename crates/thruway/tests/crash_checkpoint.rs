//! Checkpoints under fire: the power is cut at every step of a save, a replacement, a prune and a recovery, and every step is
//! made to fail. Whatever is found afterwards under a step's name is whole, and what is not is removed by `recover`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use thruway::base::settings::Settings;
use thruway::checkpoint::{
    CheckpointOptions, Checkpointer, CheckpointerOptions, Checkpoints, Hold, RestoreOptions, Retention, VerifyOptions,
};
use thruway::io::layer::{Fault, FaultPlan};
use thruway::storage::{DirectRules, Namespace, Residency};
use thruway::{Alignment, ByteSize, ErrorKind, Result, Session};
use thruway_testkit::simdisk::{SimDisk, SimDiskSettings, SimEngines};
use thruway_testkit::training::State;

/// How many power cuts are tried at each step, beside the two extremes.
const SEEDS: u64 = 4;
const ROOT: &str = "/runs";
const DIRECTORY: &str = "/runs/one";

/// What a directory holds: of each step, which state.
type Found = BTreeMap<u64, u64>;

/// One change of a directory of checkpoints.
struct Case {
    /// The disk before.
    disk: SimDisk,
    before: Found,
    after: Found,
    change: fn(&Checkpoints) -> Result<()>,
}

fn on(disk: &SimDisk, engines: SimEngines) -> Checkpoints {
    let settings = Settings { chunk_bytes: 64 << 10, drive_chunk_bytes: 64 << 10, ring_bytes: 1 << 20, ..Settings::default() };
    let builder = Session::builder().settings(settings).namespace(Arc::new(disk.clone())).engines(Box::new(engines));
    builder.build().expect("valid settings").checkpoints(DIRECTORY)
}

fn checkpoints(disk: &SimDisk) -> Checkpoints {
    on(disk, SimEngines::new(4, 7))
}

fn options() -> CheckpointOptions {
    CheckpointOptions::default().max_shard_size(ByteSize(8000)).chunk_size(ByteSize(4096))
}

fn save(into: &Checkpoints, step: u64, state: u64, options: CheckpointOptions) -> Result<()> {
    let state = State::tiny(state);
    into.save(step, &state.groups(), &state.structure(), options).map(drop)
}

/// What stands there: every step that is listed must restore, bit by bit, as one of the states that it may have.
fn look(disk: &SimDisk, may_be: &[&Found], when: &str) -> Found {
    let checkpoints = checkpoints(disk);
    let steps = match checkpoints.steps() {
        Ok(steps) => steps,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => panic!("{when}: {error}"),
    };
    let state_of = |step: u64| {
        let restored = checkpoints.restore(&RestoreOptions::default().step(step));
        let restored = restored.unwrap_or_else(|error| panic!("{when}: step {step} is listed and not whole: {error}"));
        let states = may_be.iter().filter_map(|found| found.get(&step));
        let state = states.copied().find(|state| State::tiny(*state).difference(&restored).is_none());
        state.unwrap_or_else(|| panic!("{when}: step {step} is none of the states that it may be"))
    };
    steps.into_iter().map(|step| (step, state_of(step))).collect()
}

impl Case {
    fn new(disk: &SimDisk, before: &[(u64, u64)], after: &[(u64, u64)], change: fn(&Checkpoints) -> Result<()>) -> Self {
        let (before, after) = (before.iter().copied().collect(), after.iter().copied().collect());
        Self { disk: disk.reboot_all_kept(), before, after, change }
    }

    /// Runs it undisturbed and gives the steps that it took.
    fn steps(&self) -> Vec<String> {
        let disk = self.disk.reboot_all_kept();
        assert_eq!(look(&disk, &[&self.before], "before"), self.before);
        let from = usize::try_from(disk.operations()).expect("few");
        (self.change)(&checkpoints(&disk)).expect("nothing is in the way");
        let steps = disk.trace().split_off(from);
        assert_eq!(look(&disk, &[&self.after], "undisturbed"), self.after);
        self.assert_clean(&disk, "undisturbed");
        steps
    }

    /// What is found must be what was there, or what should be, or on the way from one to the other; never less than both have.
    fn check(&self, disk: &SimDisk, when: &str, done: bool) {
        let found = look(disk, &[&self.before, &self.after], when);
        if done {
            assert_eq!(found, self.after, "{when}: it was reported as done");
        }
        for (step, state) in &self.after {
            if self.before.get(step) == Some(state) {
                assert_eq!(found.get(step), Some(state), "{when}: step {step} was to stay");
            }
        }
        let newest = |found: &Found| found.last_key_value().map(|(step, _)| *step);
        assert!(
            [newest(&self.before), newest(&self.after)].contains(&newest(&found)),
            "{when}: the newest is {:?}",
            newest(&found)
        );
        // What is left over is recognised and removed, and what was found is still there.
        if disk.names(ROOT).is_empty() {
            return;
        }
        let recovered = checkpoints(disk).recover().unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(recovered.warnings.is_empty(), "{when}: {:?}", recovered.warnings);
        assert_eq!(look(disk, &[&found], when), found, "{when}: recovery changed what was there");
        self.assert_clean(disk, when);
        for step in found.keys() {
            let verified = checkpoints(disk).verify(*step, &VerifyOptions::default()).expect("it was restored");
            assert_eq!(verified.damage, [], "{when}");
        }
    }

    /// Nothing but the lock and whole checkpoints, each under its plain name.
    fn assert_clean(&self, disk: &SimDisk, when: &str) {
        let is_left = |name: &&String| name.as_str() != ".thruway-lock" && (!name.starts_with("step-") || name.contains('.'));
        let names = disk.names(DIRECTORY);
        assert_eq!(names.iter().filter(is_left).collect::<Vec<_>>(), [""; 0], "{when}: this is left over");
    }

    /// Cuts the power during every step and looks at what the disk may be afterwards.
    fn cut_power_everywhere(&self) {
        let steps = self.steps();
        // One more than there are: the power goes right after the call has returned.
        for step in 0..=steps.len() as u64 {
            let disk = self.disk.reboot_all_kept();
            disk.power_cut_at(step);
            let outcome = (self.change)(&checkpoints(&disk));
            let seeds = (1..=SEEDS).map(|count| count * 1000 + step);
            let seeded = seeds.map(|seed| (format!("seed {seed}"), disk.reboot(seed)));
            let extremes = [("all lost".to_owned(), disk.reboot_all_lost()), ("all kept".to_owned(), disk.reboot_all_kept())];
            for (how, survivor) in extremes.into_iter().chain(seeded) {
                let when = format!("power cut in step {step} ({:?}), {how}", disk.failed().first());
                // A warning is no failure: what was to be taken away may still be there.
                self.check(&survivor, &when, outcome.is_ok() && disk.failed().is_empty());
                if outcome.is_ok() {
                    let newest = look(&survivor, &[&self.before, &self.after], &when);
                    assert_eq!(newest.last_key_value(), self.after.last_key_value(), "{when}: it was reported as saved");
                }
            }
        }
        println!("{} steps", steps.len());
    }

    /// Makes every step fail in turn, with each of these errors.
    fn fail_everywhere(&self, errors: &[i32]) {
        let (steps, mut not_met) = (self.steps(), 0);
        for (step, errno) in (0..steps.len() as u64).flat_map(|step| errors.iter().map(move |errno| (step, *errno))) {
            let disk = self.disk.reboot_all_kept();
            disk.fail_at(step, errno);
            let outcome = (self.change)(&checkpoints(&disk));
            if outcome.is_ok() && disk.failed().is_empty() {
                // Where threads take turns, one run has a step or two more than another.
                not_met += 1;
                continue;
            }
            let when = format!("error {errno} in step {step} ({})", disk.failed().join(", "));
            for survivor in [disk.reboot_all_kept(), disk.reboot_all_lost()] {
                self.check(&survivor, &when, false);
            }
            if outcome.is_ok() {
                let found = look(&disk.reboot_all_lost(), &[&self.before, &self.after], &when);
                assert_eq!(found.last_key_value(), self.after.last_key_value(), "{when}: it was reported as saved");
            }
            if let Err(error) = &outcome {
                assert!(error.context("file").is_some(), "{when}: which file? {error}");
                assert_eq!(error.os_error(), Some(errno), "{when}: {error}");
            }
            // The trouble is over: the same again does what it should, unless it was done and only in doubt.
            match (self.change)(&checkpoints(&disk)) {
                Ok(()) => {
                    assert_eq!(look(&disk, &[&self.before, &self.after], &when), self.after, "{when}, and then again");
                    self.check(&disk, &when, true);
                }
                Err(error) => {
                    let was_done = outcome.map_or_else(|first| first.context("published").is_some(), |()| true);
                    assert!(error.kind() == ErrorKind::AlreadyExists && was_done, "{when}, again: {error}");
                    self.check(&disk, &when, false);
                }
            }
        }
        assert!(not_met <= steps.len() * errors.len() / 8, "{not_met} errors of {} steps were not met", steps.len());
    }
}

fn disk(direct: bool) -> SimDisk {
    let rules = DirectRules { memory: Alignment::PAGE, offset: Alignment::PAGE };
    let disk = SimDisk::new(SimDiskSettings {
        direct: direct.then_some(rules),
        residency: Residency::None,
        capacity_bytes: 64 << 20,
        free_bytes: None,
    });
    disk.put_directory(ROOT);
    disk
}

/// A disk with these steps, each of the state of its own number.
fn disk_with(direct: bool, steps: &[u64]) -> SimDisk {
    let disk = disk(direct);
    for step in steps {
        save(&checkpoints(&disk), *step, *step, options()).expect("nothing is in the way");
    }
    disk
}

/// What a killed save left.
fn leave_half_a_save(disk: &SimDisk) {
    for name in ["model-00001-of-00002.safetensors", "manifest.json"] {
        disk.put(format!("{DIRECTORY}/.step-00000009.thruway-77-0-ff/{name}"), b"half".to_vec());
    }
}

fn the_first_save() -> Case {
    let disk = disk(false);
    Case::new(&disk, &[], &[(1, 1)], |here| save(here, 1, 1, options()))
}

fn one_save_more() -> Case {
    let disk = disk_with(true, &[1]);
    Case::new(&disk, &[(1, 1)], &[(1, 1), (2, 2)], |here| save(here, 2, 2, options()))
}

fn a_save_that_lets_the_oldest_go_after_one_that_was_killed() -> Case {
    let disk = disk_with(false, &[1, 2]);
    leave_half_a_save(&disk);
    let keep = |here: &Checkpoints| save(here, 3, 3, options().retention(Retention { keep: Some(2), keep_every: None }));
    Case::new(&disk, &[(1, 1), (2, 2)], &[(2, 2), (3, 3)], keep)
}

fn a_save_in_the_place_of_another() -> Case {
    let disk = disk_with(false, &[1, 2]);
    Case::new(&disk, &[(1, 1), (2, 2)], &[(1, 1), (2, 7)], |here| save(here, 2, 7, options().replace()))
}

fn a_prune() -> Case {
    let disk = disk_with(false, &[1, 2, 3]);
    let prune = |here: &Checkpoints| here.prune(Retention { keep: Some(1), keep_every: None }, false).map(drop);
    Case::new(&disk, &[(1, 1), (2, 2), (3, 3)], &[(3, 3)], prune)
}

fn a_recovery() -> Case {
    let disk = disk_with(false, &[1, 2]);
    leave_half_a_save(&disk);
    // A replacement that was committed, and then the power went.
    let other = disk_with(false, &[]);
    save(&checkpoints(&other), 2, 7, options()).expect("nothing is in the way");
    for name in other.names(format!("{DIRECTORY}/step-00000002")) {
        let bytes = other.contents(format!("{DIRECTORY}/step-00000002/{name}")).expect("it was listed");
        disk.put(format!("{DIRECTORY}/step-00000002.r1/{name}"), bytes);
    }
    Case::new(&disk, &[(1, 1), (2, 7)], &[(1, 1), (2, 7)], |here| here.recover().map(drop))
}

/// A save in the background, and its end.
fn save_beside(into: &Checkpoints, step: u64, options: CheckpointerOptions) -> Result<()> {
    let (state, here) = (State::tiny(step), Checkpointer::new(into.clone(), options)?);
    here.save_async(step, &state.groups(), &state.structure(), self::options(), &Hold::Now)?.wait().map(drop)
}

fn a_save_beside_training() -> Case {
    let disk = disk_with(true, &[1]);
    let save = |here: &Checkpoints| save_beside(here, 2, CheckpointerOptions::default());
    Case::new(&disk, &[(1, 1)], &[(1, 1), (2, 2)], save)
}

fn a_save_beside_training_window_by_window() -> Case {
    let disk = disk_with(false, &[1, 2]);
    let save = |here: &Checkpoints| {
        let retention = Retention { keep: Some(2), keep_every: None };
        // Three blocks of 8 KiB, filled one by one.
        save_beside(here, 3, CheckpointerOptions::default().pool(ByteSize(9000)).retention(retention))
    };
    Case::new(&disk, &[(1, 1), (2, 2)], &[(2, 2), (3, 3)], save)
}

macro_rules! crash_tests {
    ($($case:ident)+) => {
        $(mod $case {
            #[test]
            fn a_power_cut_at_any_step_leaves_whole_checkpoints_and_what_recover_removes() {
                super::$case().cut_power_everywhere();
            }

            #[test]
            fn an_error_at_any_step_leaves_whole_checkpoints_and_the_same_again_succeeds() {
                super::$case().fail_everywhere(&[libc::EIO, libc::ENOSPC]);
            }
        })+
    };
}

crash_tests! {
    the_first_save
    one_save_more
    a_save_that_lets_the_oldest_go_after_one_that_was_killed
    a_save_in_the_place_of_another
    a_prune
    a_recovery
    a_save_beside_training
    a_save_beside_training_window_by_window
}

/// The engine's operations, one after the other: short ones are resumed, failed ones fail the save.
#[test]
fn short_and_failed_writes_in_every_request_leave_what_was_there_or_all_of_the_new() {
    let case = one_save_more();
    let run = |plan: &FaultPlan| {
        let disk = case.disk.reboot_all_kept();
        let here = on(&disk, SimEngines::new(4, 7).with_faults(plan.clone()));
        let outcome = (case.change)(&here);
        (disk, outcome)
    };
    let counting = FaultPlan::default();
    run(&counting).1.expect("nothing is in the way");
    assert!(counting.operations() > 5, "{} requests", counting.operations());
    for at in 0..counting.operations() {
        for fault in [Fault::Short(1), Fault::Short(4096), Fault::Errno(libc::EINTR), Fault::Errno(libc::EAGAIN)] {
            let when = format!("{fault:?} in request {at}");
            let (disk, outcome) = run(&FaultPlan::single(at, fault));
            outcome.unwrap_or_else(|error| panic!("{when}: {error}"));
            assert_eq!(look(&disk, &[&case.after], &when), case.after);
        }
        for errno in [libc::EIO, libc::ENOSPC, libc::EDQUOT] {
            let when = format!("error {errno} in request {at}");
            let (disk, outcome) = run(&FaultPlan::single(at, Fault::Errno(errno)));
            let error = outcome.expect_err(&when);
            assert!(error.os_error() == Some(errno) && error.context("file").is_some(), "{when}: {error}");
            assert_eq!(look(&disk, &[&case.before], &when), case.before);
            case.assert_clean(&disk, &when);
        }
    }
}

/// The room is checked before the first byte, but another writer can take it after that.
#[test]
fn a_disk_that_is_full_after_all_keeps_what_was_there_and_is_cleaned() {
    let used: usize = {
        let disk = disk_with(false, &[1]);
        let names = disk.names(format!("{DIRECTORY}/step-00000001"));
        names.iter().map(|name| disk.contents(format!("{DIRECTORY}/step-00000001/{name}")).expect("listed").len()).sum()
    };
    let used = used as u64;
    for tenths in 0..=12 {
        // The lock's record takes 1024 bytes.
        let capacity_bytes = used + 1024 + 64 + used * tenths / 10;
        let disk = SimDisk::new(SimDiskSettings { capacity_bytes, free_bytes: Some(u64::MAX), ..SimDiskSettings::default() });
        disk.put_directory(ROOT);
        save(&checkpoints(&disk), 1, 1, options()).expect("there is room for one");
        let when = format!("room for {tenths} tenths of another");
        let before = BTreeMap::from([(1, 1)]);
        match save(&checkpoints(&disk), 2, 2, options()) {
            Ok(()) => assert!(tenths >= 10, "{when}"),
            Err(error) => {
                assert_eq!((error.kind(), tenths < 10), (ErrorKind::NoSpace, true), "{when}: {error}");
                assert_eq!(look(&disk, &[&before], &when), before);
            }
        }
        let names = disk.names(DIRECTORY);
        assert!(names.iter().all(|name| name == ".thruway-lock" || name.starts_with("step-")), "{when}: {names:?}");
    }
}

#[test]
fn too_little_room_is_said_before_anything_is_made() {
    let disk = SimDisk::new(SimDiskSettings { free_bytes: Some(1000), ..SimDiskSettings::default() });
    disk.put_directory(DIRECTORY);
    let error = save(&checkpoints(&disk), 1, 1, options()).expect_err("there is no room");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(!disk.trace().iter().any(|step| step.starts_with("create_directory /runs/one/")), "{:?}", disk.trace());
    let state = State::at(1);
    let error = checkpoints(&disk).preflight(&state.groups(), &state.structure(), &options()).expect_err("there is no room");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
}

#[test]
fn nobody_else_can_change_the_directory_during_a_save_but_everybody_can_read_it() {
    let disk = disk_with(false, &[1, 2]);
    let lock = disk.lock(Path::new("/runs/one/.thruway-lock")).expect("free");
    let here = checkpoints(&disk);
    let retention = Retention { keep: Some(1), keep_every: None };
    let refused: [Result<()>; 3] =
        [save(&here, 3, 3, options()), here.recover().map(drop), here.prune(retention, false).map(drop)];
    for outcome in refused {
        let error = outcome.expect_err("another holds the lock");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert!(error.context("owner").is_some() && error.hint().is_some(), "{error}");
    }
    assert_eq!(here.prune(retention, true).expect("it only looks").removed, [1]);
    assert_eq!(here.steps().expect("it only looks"), [1, 2]);
    here.restore(&RestoreOptions::default()).expect("it only reads");
    drop(lock);
    save(&here, 3, 3, options()).expect("free again");
}

/// A replacement whose name could not be made durable counts all the same. Before the old one goes, the name must be made so.
#[test]
fn a_replacement_in_doubt_is_made_durable_before_the_old_one_goes() {
    let case = a_save_in_the_place_of_another();
    let steps = case.steps();
    let in_doubt = |step: u64| {
        let disk = case.disk.reboot_all_kept();
        disk.fail_at(step, libc::EIO);
        let outcome = (case.change)(&checkpoints(&disk));
        outcome.is_err_and(|error| error.context("published").is_some()).then_some(disk)
    };
    let publication = (0..steps.len() as u64).find(|step| in_doubt(*step).is_some()).expect("the parent is synced");
    let begun = in_doubt(publication).expect("as before").operations();
    let recovered_by = |cut: u64| {
        let disk = in_doubt(publication).expect("as before");
        disk.power_cut_at(begun + cut);
        (checkpoints(&disk).recover().is_ok(), disk)
    };
    let mut cut = 0;
    loop {
        let (done, disk) = recovered_by(cut);
        for seed in 0..40 {
            let when = format!("power cut in step {cut} of the recovery ({:?}), seed {seed}", disk.failed().get(1));
            let survivor = disk.reboot(seed);
            let found = look(&survivor, &[&case.before, &case.after], &when);
            assert_eq!(found.keys().collect::<Vec<_>>(), [&1, &2], "{when}");
        }
        if done && disk.failed().len() == 1 {
            break;
        }
        cut += 1;
    }
    assert!(cut > 10, "the recovery took {cut} steps");
}
