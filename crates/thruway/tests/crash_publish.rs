//! Publishing under fire: the power is cut at every step of a save or a copy, and every step is made to fail. What
//! stands at the target afterwards is the whole old model or the whole new one.

use std::path::Path;
use std::sync::Arc;

use thruway::base::settings::Settings;
use thruway::format::safetensors::Dtype;
use thruway::io::policy::Path as TransferPath;
use thruway::storage::{DirectRules, Residency};
use thruway::{Alignment, ByteSize, CopyOptions, ErrorKind, LoadOptions, Result, SaveOptions, Session};
use thruway_testkit::fixtures::{KnownModel, model};
use thruway_testkit::simdisk::{SimDisk, SimDiskSettings, SimEngines};

/// How many power cuts are tried at each step, beside the two extremes.
const SEEDS: u64 = 12;
const DIRECTORY: &str = "/models";

/// One publication.
struct Case {
    /// A disk with whatever stands there before.
    disk: SimDisk,
    /// Where the new model is to stand.
    target: &'static str,
    /// What stands there before.
    old: Option<KnownModel>,
    /// What is to stand there.
    new: KnownModel,
    /// Names beside the target that stay.
    others: &'static [&'static str],
    publish: fn(&Session, &KnownModel) -> Result<()>,
}

/// What is found at the target.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Old,
    New,
}

fn session(disk: &SimDisk) -> Session {
    // Small requests, so that there are many steps to fail at; the largest tensors still go straight to the drive.
    let settings = Settings { chunk_bytes: 256 << 10, drive_chunk_bytes: 256 << 10, ring_bytes: 1 << 20, ..Settings::default() };
    let engines = Box::new(SimEngines::new(4, 7));
    Session::builder().settings(settings).namespace(Arc::new(disk.clone())).engines(engines).build().expect("valid settings")
}

fn loaded(disk: &SimDisk, path: &str) -> Result<thruway::Tensors> {
    Ok(session(disk).open(path)?.load(LoadOptions::all())?.0)
}

impl Case {
    fn publish(&self, disk: &SimDisk) -> Result<()> {
        (self.publish)(&session(disk), &self.new)
    }

    /// Runs it undisturbed and gives the steps that it took.
    fn steps(&self) -> Vec<String> {
        let disk = self.disk.reboot_all_kept();
        self.publish(&disk).expect("nothing is in the way");
        let steps = disk.trace();
        assert_eq!(self.look(&disk, "undisturbed"), Found::New);
        assert_eq!(self.leftovers(&disk), [""; 0]);
        steps
    }

    /// What stands at the target; fails unless it is one of the two, whole.
    fn look(&self, disk: &SimDisk, when: &str) -> Found {
        match (loaded(disk, self.target), &self.old) {
            (Ok(tensors), Some(old)) if old.difference(&tensors).is_none() => Found::Old,
            (Ok(tensors), _) => match self.new.difference(&tensors) {
                None => Found::New,
                Some(difference) => panic!("{when}: neither the old nor the new model stands there: {difference}"),
            },
            (Err(error), None) if error.kind() == ErrorKind::NotFound => Found::Old,
            (Err(error), _) => panic!("{when}: what stands there cannot be read: {error}"),
        }
    }

    /// The names beside the target that were not there before.
    fn leftovers(&self, disk: &SimDisk) -> Vec<String> {
        let own = Path::new(self.target).file_name().and_then(|name| name.to_str());
        let is_left = |name: &String| Some(name.as_str()) != own && !self.others.contains(&name.as_str());
        disk.names(DIRECTORY).into_iter().filter(is_left).collect()
    }

    /// Cuts the power during every step and looks at what the disk may be afterwards.
    fn cut_power_everywhere(&self) {
        let steps = self.steps();
        let (mut old, mut new) = (0, 0);
        // One more than there are: the power goes right after the call has returned.
        for step in 0..=steps.len() as u64 {
            let disk = self.disk.reboot_all_kept();
            disk.power_cut_at(step);
            let outcome = self.publish(&disk);
            let seeds = (1..=SEEDS).map(|count| count * 1000 + step);
            let seeded = seeds.map(|seed| (format!("seed {seed}"), disk.reboot(seed)));
            let extremes = [("all lost".to_owned(), disk.reboot_all_lost()), ("all kept".to_owned(), disk.reboot_all_kept())];
            for (how, survivor) in extremes.into_iter().chain(seeded) {
                let when = format!("power cut in step {step} ({:?}), {how}", disk.failed().first());
                let found = self.look(&survivor, &when);
                if outcome.is_ok() {
                    assert_eq!(found, Found::New, "{when}: it was reported as published");
                }
                for name in self.leftovers(&survivor) {
                    let recognisable = name.starts_with('.') && name.contains(".thruway-");
                    assert!(recognisable, "{when}: nobody can tell that {name} is left over");
                }
                *if found == Found::Old { &mut old } else { &mut new } += 1;
            }
        }
        println!("{} steps, {old} times the old model, {new} times the new one", steps.len());
        assert!(old > 0 && new > 0, "the power was cut before and after the publication");
    }

    /// Makes every step fail in turn, with each of these errors.
    fn fail_everywhere(&self, errors: &[i32]) {
        let steps = self.steps();
        for (step, errno) in (0..steps.len() as u64).flat_map(|step| errors.iter().map(move |errno| (step, *errno))) {
            let disk = self.disk.reboot_all_kept();
            disk.fail_at(step, errno);
            let outcome = self.publish(&disk);
            let failed = disk.failed().join(", ");
            let when = format!("error {errno} in step {step} ({failed})");
            // Nothing is wrong with the disk any more: what is seen now, with all that a power cut now might take.
            for survivor in [disk.reboot_all_kept(), disk.reboot_all_lost()] {
                let found = self.look(&survivor, &when);
                if outcome.is_ok() {
                    assert_eq!(found, Found::New, "{when}: it was reported as published");
                    assert!(!failed.starts_with("sync"), "{when}: a failed sync was reported as success");
                }
            }
            if let Err(error) = outcome {
                assert!(error.context("file").is_some(), "{when}: which file? {error}");
                assert_eq!(error.os_error(), Some(errno), "{when}: {error}");
            }
            self.look(&disk, &when);
            assert_eq!(self.leftovers(&disk), [""; 0], "{when}: a failed call cleans up");
        }
    }
}

/// A disk with `O_DIRECT`, on which what is read is said to lie in the page cache or not.
fn disk(direct: bool) -> SimDisk {
    let rules = DirectRules { memory: Alignment::PAGE, offset: Alignment::PAGE };
    let disk = SimDisk::new(SimDiskSettings {
        direct: direct.then_some(rules),
        residency: Residency::None,
        capacity_bytes: 64 << 20,
        free_bytes: None,
    });
    disk.put_directory(DIRECTORY);
    disk
}

fn small(seed: u64) -> KnownModel {
    model(seed, &[("a.weight", Dtype::F32, &[7, 11]), ("b", Dtype::U8, &[13]), ("empty", Dtype::F16, &[0, 4])])
}

/// More than 1 MiB: laid out for direct I/O, with tensors that go straight, small ones that are gathered, and odd ones
/// at the end.
fn large(seed: u64) -> KnownModel {
    model(
        seed,
        &[
            ("z.odd", Dtype::U8, &[70_001]),
            ("layers.0", Dtype::F32, &[300, 512]),
            ("layers.1", Dtype::BF16, &[400, 512]),
            ("norm.0", Dtype::F32, &[1024]),
            ("norm.1", Dtype::F32, &[1024]),
            ("bias", Dtype::F16, &[333]),
            ("scale", Dtype::F64, &[]),
        ],
    )
}

const FILE: &str = "/models/target.safetensors";
const SHARDED: &str = "/models/target";
const SOURCE: &str = "/models/source";
const SHARD_BYTES: u64 = 500_000;

fn save_file(session: &Session, new: &KnownModel) -> Result<()> {
    session.save(&new.sources(), FILE, SaveOptions::default()).map(drop)
}

fn save_sharded(session: &Session, new: &KnownModel) -> Result<()> {
    let options = SaveOptions::default().max_shard_size(ByteSize(SHARD_BYTES));
    session.save(&new.sources(), SHARDED, options).map(drop)
}

fn copy_file(session: &Session, _new: &KnownModel) -> Result<()> {
    session.open(SOURCE)?.copy_to(Path::new(FILE), CopyOptions::default()).map(drop)
}

fn copy_as_it_is(session: &Session, _new: &KnownModel) -> Result<()> {
    session.open(SOURCE)?.copy_to(Path::new(SHARDED), CopyOptions::default()).map(drop)
}

fn copy_sharded(session: &Session, _new: &KnownModel) -> Result<()> {
    let options = CopyOptions::default().max_shard_size(ByteSize(SHARD_BYTES));
    session.open(SOURCE)?.copy_to(Path::new(SHARDED), options).map(drop)
}

fn new_file() -> Case {
    Case { disk: disk(false), target: FILE, old: None, new: small(11), others: &[], publish: save_file }
}

fn new_file_directly() -> Case {
    Case { disk: disk(true), target: FILE, old: None, new: large(12), others: &[], publish: save_file }
}

fn over_an_old_file() -> Case {
    let (disk, old) = (disk(false), small(21));
    disk.put(FILE, old.to_safetensors());
    Case { disk, target: FILE, old: Some(old), new: small(22), others: &[], publish: save_file }
}

fn over_an_old_file_directly() -> Case {
    let (disk, old) = (disk(true), large(23));
    disk.put(FILE, old.to_safetensors());
    Case { disk, target: FILE, old: Some(old), new: large(24), others: &[], publish: save_file }
}

fn new_directory() -> Case {
    Case { disk: disk(true), target: SHARDED, old: None, new: large(31), others: &[], publish: save_sharded }
}

fn over_an_empty_directory() -> Case {
    let disk = disk(false);
    disk.put_directory(SHARDED);
    Case { disk, target: SHARDED, old: None, new: large(32), others: &[], publish: save_sharded }
}

fn copy_over_an_old_file() -> Case {
    let (disk, old, new) = (disk(true), large(41), large(42));
    disk.put(FILE, old.to_safetensors());
    disk.put(SOURCE, new.to_safetensors_padded(3));
    Case { disk, target: FILE, old: Some(old), new, others: &["source"], publish: copy_file }
}

fn copy_of_shards() -> Case {
    let (disk, new) = (disk(true), large(51));
    new.to_shards(3).into_iter().for_each(|(name, bytes)| disk.put(format!("{SOURCE}/{name}"), bytes));
    Case { disk, target: SHARDED, old: None, new, others: &["source"], publish: copy_as_it_is }
}

fn copy_into_shards() -> Case {
    let (disk, new) = (disk(true), large(52));
    disk.put(SOURCE, new.to_safetensors());
    Case { disk, target: SHARDED, old: None, new, others: &["source"], publish: copy_sharded }
}

macro_rules! crash_tests {
    ($($case:ident)+) => {
        $(mod $case {
            #[test]
            fn a_power_cut_at_any_step_leaves_the_old_or_the_new_model() {
                super::$case().cut_power_everywhere();
            }

            #[test]
            fn an_error_at_any_step_is_reported_and_leaves_the_old_or_the_new_model() {
                super::$case().fail_everywhere(&[libc::EIO, libc::ENOSPC]);
            }

            #[test]
            fn an_error_that_has_a_way_round_leaves_the_old_or_the_new_model() {
                // Some operations are tried again after the first, some another way after the second.
                super::$case().fail_everywhere(&[libc::EINTR, libc::EINVAL]);
            }
        })+
    };
}

crash_tests! {
    new_file
    new_file_directly
    over_an_old_file
    over_an_old_file_directly
    new_directory
    over_an_empty_directory
    copy_over_an_old_file
    copy_of_shards
    copy_into_shards
}

/// What the other tests fail at must be there: else they would prove less than they seem to.
#[test]
fn the_large_model_is_written_by_every_path() {
    let case = new_file_directly();
    let disk = case.disk.reboot_all_kept();
    let receipt = session(&disk).save(&case.new.sources(), FILE, SaveOptions::default()).expect("nothing is in the way");
    let parts: Vec<_> = receipt.files.iter().flat_map(|file| &file.parts).collect();
    for (path, what) in [
        (TransferPath::Plain, "tensors that go straight to the drive"),
        (TransferPath::Staged, "tensors that are gathered into blocks"),
        (TransferPath::Cached, "the end of the file, which fills no block"),
    ] {
        assert!(parts.iter().any(|part| part.path == path), "{what}: {parts:?}");
    }
}

/// The reserve is checked before the first byte, but another writer can take the room after that.
#[test]
fn a_disk_that_is_full_after_all_keeps_the_old_model() {
    let old = large(61);
    let bytes = old.to_safetensors();
    let new = large(62);
    let room = bytes.len() as u64;
    for tenths in 0..=11 {
        let settings = SimDiskSettings {
            capacity_bytes: room + room * tenths / 10,
            free_bytes: Some(u64::MAX),
            ..SimDiskSettings::default()
        };
        let disk = SimDisk::new(settings);
        disk.put(FILE, bytes.clone());
        let case =
            Case { disk: disk.clone(), target: FILE, old: Some(old.clone()), new: new.clone(), others: &[], publish: save_file };
        let outcome = case.publish(&disk);
        let when = format!("room for {tenths} tenths of the new model");
        let found = case.look(&disk, &when);
        match outcome {
            Ok(()) => assert_eq!((found, tenths > 10), (Found::New, true), "{when}"),
            Err(error) => {
                assert_eq!((error.kind(), found), (ErrorKind::NoSpace, Found::Old), "{when}: {error}");
                assert!(error.hint().is_some() && error.context("file").is_some(), "{when}: {error}");
            }
        }
        assert_eq!(case.leftovers(&disk), [""; 0], "{when}");
    }
}
