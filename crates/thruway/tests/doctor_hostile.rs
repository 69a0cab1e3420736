//! Facts that somebody made up to hold the doctor up, or that are not what they should be.

use std::path::Path;
use std::time::{Duration, Instant};

use thruway::doctor::facts::{Capture, FactsExt, Live, Tree, Unseen};
use thruway::doctor::machine::Machine;
use thruway::doctor::topology::Topology;
use thruway::doctor::{captured_paths, examine};

/// None of these takes a tenth of it.
const PATIENCE: Duration = Duration::from_secs(20);

fn capture(facts: &str) -> Capture {
    Capture::parse(&format!("thruway-facts 1\n{facts}@ rest absent\n")).expect("a capture")
}

/// A place on a device-mapper device, and so many of these, each of which lies on `below` of it.
fn mapper(devices: usize, below: impl Fn(usize) -> Vec<usize>) -> Capture {
    let mut facts = "@ file /proc/self/mountinfo\n1 1 253:0 / / rw - ext4 /dev/dm-0 rw\n@ place /\nreal /\n".to_owned();
    facts.push_str("@ link /sys/dev/block/253:0\n/sys/devices/virtual/block/dm-0\n");
    for device in 0..devices {
        let slaves: String = below(device).into_iter().map(|slave| format!("dm-{slave}\n")).collect();
        facts.push_str(&format!("@ list /sys/devices/virtual/block/dm-{device}/slaves\n{slaves}"));
        facts.push_str(&format!("@ link /sys/class/block/dm-{device}\n/sys/devices/virtual/block/dm-{device}\n"));
    }
    capture(&facts)
}

#[test]
fn block_devices_that_lie_on_each_other_are_looked_at_once() {
    let layers = |facts: &Capture| {
        let machine = Machine::examine(facts, &["/".to_owned()]);
        machine.targets[0].layers.iter().map(|layer| layer.name.clone()).collect::<Vec<String>>()
    };
    assert_eq!(layers(&mapper(2, |device| vec![1 - device])), ["dm-0", "dm-1"], "a circle");
    assert_eq!(layers(&mapper(1, |_| vec![0])), ["dm-0"], "on itself");
    assert_eq!(layers(&mapper(4, |device| if device == 0 { vec![1, 2] } else { vec![3] })), ["dm-0", "dm-1", "dm-3", "dm-2"]);
    let begun = Instant::now();
    assert!(layers(&mapper(200, |_| (0..200).collect())).len() < 200, "each on each");
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}

#[test]
fn huge_captures_are_diagnosed_in_bounded_time() {
    let address =
        |number: usize| format!("{:04x}:{:02x}:{:02x}.{}", number >> 16, number >> 8 & 255, number >> 3 & 31, number & 7);
    let devices = |class: &str| {
        let list: String = (0..19_000).map(|number| address(number) + "\n").collect();
        let facts = (0..19_000).map(address).map(|at| {
            let base = format!("/sys/bus/pci/devices/{at}");
            format!("@ file {base}/class\n{class}\n@ file {base}/vendor\n0x10de\n@ link {base}\n/sys/devices/pci0000:00/{at}\n")
        });
        format!("@ list /sys/bus/pci/devices\n{list}{}@ place /data\nreal /data\n", facts.collect::<String>())
    };
    let places = |count| (0..count).map(|number| format!("@ place /m{number}/a\nreal /m{number}/a\n")).collect::<String>();
    let mounts: String =
        (0..50_000).map(|number| format!("{number} 1 0:{number} / /m{number} rw - ext4 /dev/x{number} rw\n")).collect();
    let options = "a,".repeat(1_900_000);
    for (name, facts) in [
        ("GPUs", devices("0x030200")),
        ("network cards", devices("0x020000")),
        ("mounts", format!("@ file /proc/self/mountinfo\n{mounts}{}", places(40_000))),
        ("options", format!("@ file /proc/self/mountinfo\n1 1 0:1 / / rw,{options} - ext4 /dev/x rw\n{}", places(20_000))),
    ] {
        let facts = capture(&facts);
        let begun = Instant::now();
        drop(examine(&facts, &captured_paths(&facts)));
        drop(Topology::examine(&facts, &[]));
        assert!(begun.elapsed() < PATIENCE, "{name}: {:?}", begun.elapsed());
    }
}

#[test]
fn answers_of_a_capture_are_no_longer_than_those_of_a_machine() {
    let long = "x".repeat(5 << 20);
    let names = "n\n".repeat(20_001);
    let facts = capture(&format!("@ file /f\n{long}\n@ file /l\n{}\nx\n@ link /k\n{long}\n@ list /d\n{names}", &long[..20_000]));
    for answer in [facts.file("/f"), facts.line("/f"), facts.line("/l"), facts.link("/k")] {
        assert!(matches!(&answer, Err(Unseen::Failed(why)) if why.contains("longer than")), "{answer:?}");
    }
    assert!(matches!(facts.list("/d"), Err(Unseen::Failed(_))));
    assert_eq!(facts.names("/d").len(), 0);
}

#[test]
fn what_is_no_file_where_one_should_be_is_unknown_to_the_machine_and_to_a_tree() {
    let directory = tempfile::tempdir().expect("directory");
    let at = |name: &str| directory.path().join(name);
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("mkfifo");
    std::fs::File::create(at("huge")).expect("create").set_len(1 << 30).expect("sparse");
    std::fs::create_dir(at("directory")).expect("create");
    std::fs::create_dir_all(at("proc/self")).expect("create");
    for name in ["garbage", "proc/self/mountinfo"] {
        std::fs::write(at(name), b"\xff\0\n").expect("write");
    }
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("bind");
    let (live, tree) = (Live::new(None), Tree::new(directory.path()).expect("a tree"));
    let begun = Instant::now();
    let refused =
        |answer: Result<String, Unseen>, what: &str| assert!(matches!(answer, Err(Unseen::Failed(_))), "{what}: {answer:?}");
    for name in ["fifo", "huge", "directory", "socket"] {
        refused(live.file(at(name).to_str().expect("text")), name);
        refused(tree.file(&format!("/{name}")), name);
    }
    refused(live.file("/dev/zero"), "a device");
    // To make a device takes the superuser.
    let zero = rustix::fs::makedev(1, 5);
    if rustix::fs::mknodat(rustix::fs::CWD, at("zero"), rustix::fs::FileType::CharacterDevice, 0o600.into(), zero).is_ok() {
        refused(tree.file("/zero"), "a device");
    }
    assert_eq!(tree.file("/garbage").as_deref(), Ok("\u{fffd}\0\n"));
    assert_eq!(tree.file("/proc/self/mountinfo").as_deref(), Ok("\\xff\0\n"), "whose names are asked for again");
    assert!(live.list(at("fifo").to_str().expect("text")).is_err() && tree.list("/fifo").is_err());
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[test]
fn a_deep_nest_of_directories_is_too_long_a_path_and_not_a_hang() {
    let directory = tempfile::tempdir().expect("directory");
    let deep: String = (0..200).map(|_| "/d").collect();
    std::fs::create_dir_all(directory.path().join(&deep[1..])).expect("create");
    std::fs::create_dir(directory.path().join("etc")).expect("create");
    let tree = Tree::new(directory.path()).expect("a tree");
    assert_eq!(tree.link(&deep).as_deref(), Ok(deep.as_str()));
    assert!(tree.link(&"/d".repeat(4000)).is_err());
    assert!(Path::new(&deep).components().count() > 200);
}
