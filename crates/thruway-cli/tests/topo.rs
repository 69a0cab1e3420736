//! `thruway topo` on captured machines. `machines/NAME.txt` is the whole picture, looked at by hand.
//!
//! `THRUWAY_WRITE_EXPECTED=1 cargo test -p thruway-cli --test topo` draws them anew: read the difference.

mod common;

use std::path::{Path, PathBuf};

use common::{run, scratch};

/// The captured machines of the library's tests.
fn capture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../thruway/tests/machines/{name}.facts"))
}

fn captures() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../thruway/tests/machines");
    let paths = std::fs::read_dir(directory).expect("the machines").map(|entry| entry.expect("entry").path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "facts")).collect()
}

fn draw(capture: &Path, rest: &[&str]) -> common::Run {
    let directory = scratch();
    let capture = capture.to_str().expect("UTF-8");
    run(directory.path(), ["topo", "--from", capture].iter().chain(rest)).fine()
}

#[test]
fn each_machine_is_drawn_as_it_is() {
    let mut differing = Vec::new();
    for (name, places) in [
        ("nvidia-fs", &[][..]),
        ("across-root-ports", &[]),
        ("two-sockets", &[]),
        ("dgx-two-sockets", &["/raid", "/scratch", "/fast", "/nfs"]),
        ("raid0-nvidia-fs", &[]),
        ("no-gpu", &[]),
        ("wsl", &["/data"]),
        ("virtual-h200", &["/data"]),
        ("nfs-rdma", &["/data"]),
    ] {
        let drawn = draw(&capture(name), places);
        drawn.assert_safe_for_terminals();
        let expected = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/machines/{name}.txt"));
        if std::env::var_os("THRUWAY_WRITE_EXPECTED").is_some() {
            std::fs::write(&expected, &drawn.stdout).expect("write");
        } else if std::fs::read_to_string(&expected).ok().as_deref() != Some(&drawn.stdout) {
            differing.push(format!("{name}:\n{}", drawn.stdout));
        }
    }
    assert!(differing.is_empty(), "not drawn as expected:\n{}", differing.join("\n"));
}

#[test]
fn json_names_the_best_gpu_and_the_links_that_are_below_what_they_could_be() {
    let object = draw(&capture("dgx-two-sockets"), &["--json"]).json();
    let mounts = object["mounts"].as_array().expect("list");
    let of = |path: &str| mounts.iter().find(|mount| mount["path"] == path).unwrap_or_else(|| panic!("{path}: {object}"));
    assert!(of("/scratch")["gpu"].as_str().is_some_and(|gpu| gpu.starts_with("cuda:4")), "{object}");
    assert_eq!(of("/raid")["ways"].as_array().map(Vec::len), Some(8));
    let text = object["nodes"].to_string();
    assert_eq!(text.matches("\"is_below\":true").count(), 2, "a drive and a switch: {text}");
}

#[test]
fn pictures_are_well_formed_whatever_the_machine() {
    for path in captures() {
        let directory = scratch();
        let run = run(directory.path(), ["topo", "--svg", "machine.svg", "--from", path.to_str().expect("UTF-8")]).fine();
        let text = std::fs::read_to_string(directory.path().join("machine.svg")).expect("written");
        let picture = roxmltree::Document::parse(&text).unwrap_or_else(|error| panic!("{path:?}: {error}\n{text}"));
        let size = |name| picture.root_element().attribute(name).and_then(|size| size.parse::<f64>().ok()).expect("a size");
        let (width, height) = (size("width"), size("height"));
        for node in picture.descendants().filter(|node| node.has_tag_name("rect")) {
            let of = |name| node.attribute(name).map_or(0.0, |number| number.parse::<f64>().expect("a number"));
            assert!(of("x") + of("width") <= width && of("y") + of("height") <= height, "{path:?}: a box sticks out\n{text}");
        }
        for heading in run.stdout.lines().filter(|line| line.starts_with("the best place")) {
            let has_gpu = run.stdout.contains("GPU  ");
            assert!(!has_gpu || picture.descendants().any(|node| node.text() == Some(heading)), "{path:?}: {heading}\n{text}");
        }
        // The same words as in the lines.
        for line in run.stdout.lines().filter(|line| line.contains("GPU ")) {
            let name = line.split("GPU  ").nth(1).and_then(|rest| rest.split("  ").next());
            let is_there = |name: &str| picture.descendants().any(|node| node.text().is_some_and(|text| text.contains(name)));
            assert!(name.is_none_or(is_there), "{path:?}: {line}\n{text}");
        }
    }
}

#[test]
fn this_machine_is_drawn_and_no_file_is_overwritten() {
    let directory = scratch();
    let drawn = run(directory.path(), ["topo", ".", "--svg", "here.svg"]).fine();
    assert!(drawn.stdout.contains("the best GPU for each place"), "{drawn:?}");
    run(directory.path(), ["topo", ".", "--svg", "here.svg"]).failed();
    let captured = run(directory.path(), ["doctor", ".", "--capture", "machine.txt"]);
    assert_eq!(captured.status, Some(3), "{captured:?}");
    let here = run(directory.path(), ["topo", ".", "--json"]).fine().json();
    assert_eq!(run(directory.path(), ["topo", "--from", "machine.txt", "--json"]).fine().json(), here, "a capture is enough");
}

#[test]
fn places_are_those_of_the_capture_and_what_is_not_there_is_an_error() {
    // Over the network, and nothing named.
    let drawn = draw(&capture("nfs-rdma"), &[]);
    assert!(drawn.stdout.contains("/data  nfs"), "{drawn:?}");
    let directory = scratch();
    let nfs = capture("nfs-rdma");
    let strange = run(directory.path(), ["topo", "/elsewhere", "--from", nfs.to_str().expect("UTF-8")]).failed();
    assert!(strange.stderr.contains("/elsewhere") && strange.stderr.contains("/data"), "{strange:?}");
    let nowhere = run(directory.path(), ["topo", "nowhere"]).failed();
    assert!(nowhere.stderr.contains("nowhere"), "{nowhere:?}");

    // A directory of another machine's files: its mounts, those of servers among them; a virtual card has its name.
    let root = directory.path().join("tree");
    let write = |path: &str, text: &str| {
        let file = root.join(path);
        std::fs::create_dir_all(file.parent().expect("a parent")).expect("create");
        std::fs::write(file, text).expect("write");
    };
    write("proc/self/mountinfo", "40 24 0:60 / /mnt rw - nfs4 server:/export rw,proto=rdma\n");
    write("sys/devices/pci0000:00/0000:00:03.0/class", "0x020000\n");
    write("sys/devices/pci0000:00/0000:00:03.0/virtio2/net/eth7/address", "\n");
    std::fs::create_dir_all(root.join("sys/bus/pci/devices")).expect("create");
    std::os::unix::fs::symlink("../../../devices/pci0000:00/0000:00:03.0", root.join("sys/bus/pci/devices/0000:00:03.0"))
        .expect("link");
    let drawn = run(directory.path(), ["topo", "--from", "tree"]).fine();
    assert!(drawn.stdout.contains("network  eth7") && drawn.stdout.contains("/mnt  nfs4"), "{drawn:?}");
}
