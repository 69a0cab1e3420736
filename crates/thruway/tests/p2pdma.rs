//! What the emulated machine of `cargo xtask p2pdma` shows: one drive fills and empties another PCI device's memory, and where it
//! cannot, the library says so. Each module is for one make of the machine; elsewhere all of it is skipped.
//!
//! The machine has an ext4 filesystem on a drive, from which this program was started, and beside it the `thruway` command.
//! Lines that begin with `guest:` are for the program outside.

#![expect(clippy::print_stdout, reason = "the program outside reads it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;

use serde_json::Value;
use thruway::base::Extent;
use thruway::io::engine::{P2pDma, Uring};
use thruway::memory::PeerMemory;
use thruway::storage::{
    Access, Buffering, Drive, Namespace, OsNamespace, PCI_DEVICES, PublishedMemory, Residency, Traffic, drive_traffic,
    exact_residency,
};
use thruway::transfer::verify::Digest;
use thruway::{Device, Dtype, HostBuffer, LoadOptions, Path as Way, PathPolicy, PciAddress, SaveOptions, Session, Source};
use thruway_testkit::conformance::{Layering, OsFiles, run_in};
use thruway_testkit::fixtures::{KnownModel, model, scratch_dir};

const BYTES: u64 = 1 << 20;

/// Tensors of whole blocks: a file of ours has no ends that must be staged.
fn blocks() -> KnownModel {
    model(1, &[("a", Dtype::F32, &[1024, 2048]), ("b", Dtype::BF16, &[4096, 512]), ("c", Dtype::U8, &[4096])])
}

/// Tensors as they come, one of them smaller than a block.
fn uneven() -> KnownModel {
    model(2, &[("large", Dtype::F32, &[1000, 1001]), ("tiny", Dtype::F64, &[3]), ("odd", Dtype::U8, &[700_003])])
}

fn bytes_of(known: &KnownModel) -> u64 {
    known.tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum()
}

/// The device that publishes memory; the first other one with a drive if none does.
fn device() -> PciAddress {
    let devices = std::fs::read_dir(PCI_DEVICES).expect("it is there").flatten();
    let mut addresses: Vec<PciAddress> = devices.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    addresses.sort_unstable();
    let publishes = |address: &&PciAddress| PublishedMemory::of(Path::new(PCI_DEVICES), **address).is_ok();
    addresses.iter().find(publishes).or(addresses.first()).copied().expect("a device")
}

/// The number of the filesystem that the tests work on.
fn filesystem() -> u64 {
    let program = std::env::current_exe().expect("known");
    OsNamespace.open(&program, Access::Read, Buffering::PageCache).expect("opened").identity().expect("known").device
}

fn drive() -> Drive {
    Drive::below(filesystem()).expect("the filesystem lies on a drive")
}

/// Runs the command and gives its exit status and its object.
fn thruway(arguments: &[&str]) -> (Option<i32>, Value) {
    let output = Command::new("/bin/thruway").args(arguments).arg("--json").output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let object = serde_json::from_str(&text);
    (output.status.code(), object.unwrap_or_else(|error| panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr))))
}

fn fine(arguments: &[&str]) -> Value {
    let (status, object) = thruway(arguments);
    assert_eq!(status, Some(0), "{arguments:?}: {object}");
    object
}

/// Every part of an object's files: path, bytes, reason.
fn parts(receipt: &Value) -> Vec<(String, u64, String)> {
    let files = receipt["files"].as_array().expect("files");
    let parts = files.iter().flat_map(|file| file["parts"].as_array().expect("parts"));
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    parts.map(|part| (text(&part["path"]), part["bytes"].as_u64().expect("a number"), text(&part["reason"]))).collect()
}

fn bytes_by(receipt: &Value, path: &str) -> u64 {
    parts(receipt).iter().filter(|(way, ..)| way == path).map(|(_, bytes, _)| bytes).sum()
}

fn assert_digests(known: &KnownModel, loaded: &Value) {
    for tensor in &known.tensors {
        assert_eq!(loaded["digests"][&tensor.spec.name], Digest::of(&tensor.bytes).to_string(), "{}", tensor.spec.name);
    }
}

/// A model on the drive and nowhere else: neither the page cache nor this process holds it.
fn on_the_drive(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, bytes).expect("written");
    forget_everything();
    path
}

/// Writes what is dirty and empties the page cache.
fn forget_everything() {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("root may");
}

/// A file that our own writer laid out.
fn ours(directory: &Path, known: &KnownModel) -> PathBuf {
    let path = directory.join("ours.safetensors");
    let session = Session::builder().device(Device::Host).build().expect("a session");
    session.save(&known.sources(), &path, SaveOptions::default()).expect("saved");
    forget_everything();
    path
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// What the machine counts, taken before and after.
struct Counts {
    traffic: Traffic,
    cached_bytes: u64,
}

impl Counts {
    fn now() -> Self {
        let meminfo = std::fs::read_to_string("/proc/meminfo").expect("readable");
        let line = meminfo.lines().find_map(|line| line.strip_prefix("Cached:")).expect("a line");
        let cached_kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
        Self { traffic: drive_traffic(filesystem()).expect("counted"), cached_bytes: cached_kib * 1024 }
    }

    /// What was moved since, and by how much the page cache has grown.
    fn since(&self) -> (Traffic, u64) {
        let now = Self::now();
        (now.traffic.since(self.traffic), now.cached_bytes.saturating_sub(self.cached_bytes))
    }
}

/// How much of a file's data the page cache holds.
fn residency(path: &Path) -> Residency {
    let file = OsNamespace.open(path, Access::Read, Buffering::PageCache).expect("opened");
    let length = file.identity().expect("known").length;
    // What lies before is the header, which is read through the page cache, and read ahead of.
    let start = (512 << 10).min(length / 2);
    exact_residency(&*file, Extent::new(start, length - start))
}

mod one_switch {
    use super::*;

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn the_command_loads_a_file_of_ours_directly_and_no_memory_of_the_host_carries_it() {
        let directory = scratch_dir();
        let known = blocks();
        let path = ours(directory.path(), &known);
        let before = Counts::now();
        let device = Device::Pci(device()).to_string();
        let loaded = fine(&["load", text(&path), "--device", &device, "--path", "direct", "--digest"]);
        let (traffic, grown) = before.since();
        assert_digests(&known, &loaded);
        assert_eq!(bytes_by(&loaded, "direct"), bytes_of(&known), "{loaded}");
        assert_eq!(loaded["ring_bytes"], 0, "no slot of the ring was ever made");
        assert!(traffic.read_bytes >= bytes_of(&known), "the drive read it: {traffic:?}");
        assert!(grown < BYTES, "the page cache grew by {grown}");
        assert_eq!(residency(&path), Residency::None, "and holds none of it");
        println!("guest: direct-bytes {}", bytes_of(&known));
        println!("guest: a file of ours to {device}: {} bytes direct, all digests right", bytes_of(&known));
        println!("guest:   the drive read {}, the page cache grew by {grown}, the ring has 0", traffic.read_bytes);
    }

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn of_another_writers_file_all_but_the_ends_goes_directly() {
        let directory = scratch_dir();
        let known = uneven();
        let path = on_the_drive(directory.path(), "foreign.safetensors", &known.to_safetensors());
        let before = Counts::now();
        let device = Device::Pci(device()).to_string();
        for policy in ["direct", "auto"] {
            let explained = fine(&["explain", text(&path), "--device", &device, "--path", policy]);
            let loaded = fine(&["load", text(&path), "--device", &device, "--path", policy, "--digest"]);
            assert_eq!(explained["files"], loaded["files"], "explained and loaded");
            assert_digests(&known, &loaded);
            let direct = bytes_by(&loaded, "direct");
            assert!(bytes_of(&known) - direct < 2 * 4096, "{loaded}");
            assert!(parts(&loaded).iter().all(|(way, _, why)| way == "direct" || why == "fills no whole block"), "{loaded}");
            println!("guest: direct-bytes {direct}");
            println!("guest: another writer's file, {policy}: {direct} of {} bytes direct", bytes_of(&known));
        }
        let (_, grown) = before.since();
        assert!(grown < BYTES, "the page cache grew by {grown}");
        assert_eq!(residency(&path), Residency::None);
    }

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn a_copy_passes_through_the_device_there_and_back() {
        let directory = scratch_dir();
        let known = blocks();
        let (path, target) = (ours(directory.path(), &known), directory.path().join("copy.safetensors"));
        let before = Counts::now();
        let device = Device::Pci(device()).to_string();
        let copied = fine(&["copy", text(&path), text(&target), "--device", &device, "--path", "direct"]);
        let (traffic, grown) = before.since();
        for side in ["read", "written"] {
            assert_eq!(bytes_by(&copied[side], "direct"), bytes_of(&known), "{copied}");
        }
        assert!(traffic.read_bytes >= bytes_of(&known) && traffic.written_bytes >= bytes_of(&known), "{traffic:?}");
        assert!(grown < BYTES, "the page cache grew by {grown}");
        assert_eq!(residency(&target), Residency::None);
        forget_everything();
        fine(&["verify", text(&target), "--against", text(&path)]);
        println!("guest: direct-bytes {}", 2 * bytes_of(&known));
        println!("guest: a copy through {device}: {} bytes direct each way, the copy is the same", bytes_of(&known));
    }

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn tensors_are_saved_from_the_device_directly() {
        let directory = scratch_dir();
        let known = blocks();
        let path = ours(directory.path(), &known);
        let direct = PathPolicy::Require(Way::Direct);
        let session = Session::builder().device(Device::Pci(device())).path(direct).build().expect("a session");
        let (tensors, _) = session.open(&path).expect("opened").load(LoadOptions::all()).expect("loaded");
        known.assert_loaded(&tensors);
        let source = |tensor: &thruway::Tensor| {
            Source::new(tensor.name(), tensor.dtype(), tensor.shape().to_vec(), tensor.region().expect("free"))
        };
        let sources: Vec<Source> = tensors.iter().map(source).collect();
        let target = directory.path().join("saved.safetensors");
        let receipt = session.save(&sources, &target, SaveOptions::default()).expect("saved");
        assert_eq!(receipt.bytes_by(Way::Direct), bytes_of(&known), "{receipt}");
        forget_everything();
        let host = Session::builder().device(Device::Host).build().expect("a session");
        known.assert_loaded(&host.open(&target).expect("opened").load(LoadOptions::all()).expect("loaded").0);
        println!("guest: direct-bytes {}", 2 * bytes_of(&known));
        println!("guest: a save from the device: {} bytes direct, read back right", bytes_of(&known));
    }

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn the_engine_keeps_its_contract_on_the_devices_memory_under_every_layer() {
        let published = PublishedMemory::of(Path::new(PCI_DEVICES), device()).expect("published");
        let memory = Arc::new(PeerMemory::new(published.address(), published.open().expect("root may")));
        for layering in Layering::ALL {
            let memory = Arc::clone(&memory);
            let source = Box::new(move |len: usize| {
                let buffer = memory.allocate(len).expect("the device has room");
                let address = NonNull::new(buffer.address() as *mut u8).expect("no mapping lies at 0");
                // SAFETY: the mapping is fresh, as long as `len`, and belongs to the buffer that is lent along.
                let mut lent = unsafe {
                    std::ptr::write_bytes(address.as_ptr(), 0, len);
                    HostBuffer::lent(address, len, Box::new(buffer))
                };
                assert_eq!(lent.bytes_mut().expect("free").len(), len);
                lent
            });
            let make = || -> Box<dyn thruway::io::Engine> { Box::new(P2pDma::new(Uring::new(8).expect("io_uring"))) };
            run_in(source, &make, &OsFiles::new(), layering);
        }
        println!("guest: the conformance suite on the device's memory: passed under {} layerings", Layering::ALL.len());
    }
}

mod apart {
    use super::*;

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn the_direct_path_is_refused_with_the_pair_named_before_anything_moves() {
        let directory = scratch_dir();
        let known = blocks();
        let path = ours(directory.path(), &known);
        let (device, drive) = (device(), drive());
        let before = Counts::now();
        let device_name = Device::Pci(device).to_string();
        let (status, object) = thruway(&["load", text(&path), "--device", &device_name, "--path", "direct"]);
        let (traffic, _) = before.since();
        let explained = thruway(&["explain", text(&path), "--device", &device_name, "--path", "direct"]);
        assert_eq!(explained, (status, object.clone()), "explained and loaded");
        let error = &object["error"];
        assert_eq!((status, error["kind"].as_str()), (Some(1), Some("path unavailable")), "{object}");
        let message = error["message"].as_str().expect("text");
        for named in [&device.to_string(), &drive.to_string(), "EREMOTEIO"] {
            assert!(message.contains(named), "{message}");
        }
        assert!(error["hint"].is_string(), "{object}");
        assert!(traffic.read_bytes < BYTES, "no more than the header was read: {traffic:?}");
        println!("guest: direct is refused: {message}");
    }

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn auto_brings_the_right_bytes_there_and_back_another_way_and_says_why() {
        let directory = scratch_dir();
        let device = Device::Pci(device()).to_string();
        for (name, known) in [("blocks", blocks()), ("uneven", uneven())] {
            let path = on_the_drive(directory.path(), &format!("{name}.safetensors"), &known.to_safetensors());
            let explained = fine(&["explain", text(&path), "--device", &device]);
            let loaded = fine(&["load", text(&path), "--device", &device, "--digest"]);
            assert_eq!(explained["files"], loaded["files"], "explained and loaded");
            assert_digests(&known, &loaded);
            let target = directory.path().join(format!("{name}-copy.safetensors"));
            let copied = fine(&["copy", text(&path), text(&target), "--device", &device]);
            for receipt in [&loaded, &copied["read"], &copied["written"]] {
                assert_eq!(bytes_by(receipt, "direct") + bytes_by(receipt, "unverified"), 0, "{receipt}");
                assert!(
                    parts(receipt).iter().any(|(_, _, why)| why.contains("not direct: the kernel allows no DMA between")),
                    "{receipt}"
                );
            }
            forget_everything();
            fine(&["verify", text(&target), "--against", text(&path)]);
            let (way, bytes, why) = parts(&loaded).swap_remove(0);
            println!("guest: auto, {name}: right, {bytes} bytes {way}: {why}");
        }
    }
}

mod unpublished {
    use super::*;

    #[test]
    #[ignore = "for the emulated machine of `cargo xtask p2pdma`"]
    fn a_device_without_such_memory_is_refused_by_name_and_the_host_still_loads() {
        let directory = scratch_dir();
        let known = blocks();
        let path = ours(directory.path(), &known);
        let drive = drive().pci.expect("it sits somewhere");
        for policy in ["direct", "auto"] {
            let device = Device::Pci(drive).to_string();
            let (status, object) = thruway(&["load", text(&path), "--device", &device, "--path", policy]);
            let error = &object["error"];
            assert_eq!((status, error["kind"].as_str()), (Some(1), Some("unsupported")), "{object}");
            assert!(error["message"].as_str().is_some_and(|text| text.contains("publishes no memory")), "{object}");
            assert_eq!(error["context"]["device"], device.as_str());
        }
        let (status, object) = thruway(&["load", text(&path), "--device", "host", "--path", "direct"]);
        assert_eq!((status, object["error"]["kind"].as_str()), (Some(1), Some("path unavailable")), "{object}");
        assert_digests(&known, &fine(&["load", text(&path), "--device", "host", "--digest"]));
        println!("guest: without published memory: refused by name, and the host loads the right bytes");
    }
}
