//! The simulated disk must be harsh, or crash tests prove nothing.

use std::collections::BTreeSet;
use std::path::Path;

use thruway::storage::{Access, Buffering, DirectRules, Namespace};
use thruway::{Alignment, ErrorKind};

use super::{SimDisk, SimDiskSettings};

fn disk() -> SimDisk {
    let disk = SimDisk::new(SimDiskSettings::default());
    disk.put("/d/old", vec![1; 2000]);
    disk
}

const NEW: &str = "/d/new";

fn write_new(disk: &SimDisk, sync: bool) {
    let file = disk.create(Path::new(NEW), None).expect("room");
    assert_eq!(file.write_at(&[2; 2000], 0).expect("room"), 2000);
    if sync {
        file.sync().expect("no fault");
    }
}

#[test]
fn what_is_synced_survives_whatever_else_is_lost() {
    let disk = disk();
    write_new(&disk, true);
    disk.sync_directory(Path::new("/d")).expect("no fault");
    for survivor in [disk.reboot_all_lost(), disk.reboot(1), disk.reboot(2)] {
        assert_eq!(survivor.contents(NEW), Some(vec![2; 2000]));
        assert_eq!(survivor.contents("/d/old"), Some(vec![1; 2000]));
    }
}

#[test]
fn a_synced_file_without_a_synced_directory_may_lose_its_name() {
    let disk = disk();
    write_new(&disk, true);
    assert_eq!(disk.reboot_all_lost().contents(NEW), None);
    assert_eq!(disk.reboot_all_kept().contents(NEW), Some(vec![2; 2000]));
}

#[test]
fn a_name_that_is_synced_before_its_bytes_shows_every_mixture_of_sectors() {
    let disk = disk();
    write_new(&disk, false);
    disk.sync_directory(Path::new("/d")).expect("no fault");
    assert_eq!(disk.reboot_all_lost().contents(NEW), Some(Vec::new()), "the name is there and nothing else");
    let found: BTreeSet<Vec<u8>> = (0..1000).filter_map(|seed| disk.reboot(seed).contents(NEW)).collect();
    // Four sectors, the length apart: sixteen mixtures of full length, and the empty file.
    assert_eq!(found.len(), 17);
    assert!(found.contains(&vec![2; 2000]));
}

#[test]
fn a_rename_shows_the_old_or_the_new_and_both_happen() {
    let disk = disk();
    write_new(&disk, true);
    disk.rename(Path::new(NEW), Path::new("/d/old")).expect("no fault");
    let found: BTreeSet<(Option<Vec<u8>>, bool)> =
        (0..50).map(|seed| disk.reboot(seed)).map(|disk| (disk.contents("/d/old"), disk.contents(NEW).is_some())).collect();
    let (old, new) = (Some(vec![1; 2000]), Some(vec![2; 2000]));
    assert_eq!(found, BTreeSet::from([(old.clone(), false), (old, true), (new, false)]));
}

#[test]
fn after_a_failed_sync_later_ones_lie() {
    let disk = disk();
    let file = disk.open(Path::new("/d/old"), Access::Write, Buffering::PageCache).expect("it is there");
    file.write_at(&[9; 600], 0).expect("room");
    disk.fail_at(disk.operations(), libc::EIO);
    assert_eq!(file.sync().expect_err("it was told to fail").kind(), ErrorKind::Io);
    file.sync().expect("Linux reports a failure once");
    assert_eq!(disk.contents("/d/old").map(|bytes| bytes[0]), Some(9), "the page cache still has it");
    assert_eq!(disk.reboot_all_kept().contents("/d/old"), Some(vec![1; 2000]), "and the drive never gets it");
}

#[test]
fn the_power_goes_during_an_operation_and_stays_away() {
    let disk = disk();
    disk.power_cut_at(0);
    disk.create(Path::new(NEW), None).expect_err("the power went");
    disk.metadata(Path::new("/d/old")).expect_err("and is away");
    assert_eq!(disk.reboot_all_lost().contents(NEW), None);
    assert_eq!(disk.reboot_all_kept().contents(NEW), Some(Vec::new()), "the operation may have been carried out");
}

#[test]
fn a_direct_handle_refuses_what_is_not_aligned() {
    let rules = DirectRules { memory: Alignment::PAGE, offset: Alignment::PAGE };
    let disk = SimDisk::new(SimDiskSettings { direct: Some(rules), ..SimDiskSettings::default() });
    disk.put("/f", vec![3; 5000]);
    let file = disk.open(Path::new("/f"), Access::Read, Buffering::Direct).expect("it is there");
    let mut block = [0; 4096];
    assert_eq!(file.read_at(&mut block, 4096).expect("aligned"), 904);
    assert_eq!(file.read_at(&mut block, 1).expect_err("no block begins there").raw_os_error(), Some(libc::EINVAL));
    assert_eq!(file.read_at(&mut block[..100], 0).expect_err("no block").raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn a_full_disk_takes_what_fits_and_then_nothing() {
    let disk = SimDisk::new(SimDiskSettings { capacity_bytes: 1000, ..SimDiskSettings::default() });
    let file = disk.create(Path::new("/f"), None).expect("a name takes no room");
    assert_eq!(disk.free_bytes(Path::new("/")).expect("no fault"), 1000);
    assert_eq!(file.allocate(1001).expect_err("too large").kind(), ErrorKind::NoSpace);
    assert_eq!(file.write_at(&[1; 1500], 0).expect("some fits"), 1000);
    assert_eq!(file.write_at(&[1; 1], 1000).expect_err("nothing fits").raw_os_error(), Some(libc::ENOSPC));
    disk.remove(Path::new("/f")).expect("it is there");
    assert_eq!(disk.free_bytes(Path::new("/")).expect("no fault"), 1000);
}

#[test]
fn a_lock_has_one_holder() {
    let disk = disk();
    let lock = disk.lock(Path::new("/d/lock")).expect("free");
    assert_eq!(disk.lock(Path::new("/d/lock")).expect_err("held").kind(), ErrorKind::AlreadyExists);
    drop(lock);
    disk.lock(Path::new("/d/lock")).expect("free again");
}
