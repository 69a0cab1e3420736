//! `thruway verify-direct`.

mod common;

use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{run, run_with_fast_gpu, scratch};

#[test]
fn every_path_brings_the_same_bytes_and_nothing_is_left_behind() {
    for with_gpu in [false, true] {
        let directory = scratch();
        let arguments = ["verify-direct", ".", "--size", "8MB", "--json"];
        let run = if with_gpu { run_with_fast_gpu(directory.path(), arguments) } else { run(directory.path(), arguments) };
        assert_eq!(run.status, Some(3), "nothing here has a direct path: {run:?}");
        let object = run.json();
        assert_eq!((&object["proven"], &object["ok"]), (&false.into(), &true.into()));
        let way =
            |name: &str| object["ways"].as_array().and_then(|ways| ways.iter().find(|way| way["asked_for"] == name)).expect(name);
        assert!(way("direct")["unavailable"].is_string(), "{object}");
        for name in ["auto", "cached"] {
            assert_eq!(way(name)["wrong"], serde_json::json!([]), "{name}: {object}");
            assert!(way(name)["read"]["bytes"].as_u64() >= Some(7_000_000), "{name}: {object}");
        }
        assert_eq!(way("cached")["read"]["files"][0]["parts"][0]["path"], "cached");
        assert_eq!(std::fs::read_dir(directory.path()).expect("list").count(), 0);
    }
}

#[test]
fn a_signal_leaves_nothing_behind() {
    let directory = scratch();
    let entries = || std::fs::read_dir(directory.path()).expect("list").count();
    let mut child = common::command(directory.path())
        .args(["verify-direct", ".", "--size", "512MB", "--device", "host"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start");
    let begun = Instant::now();
    while entries() == 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never began");
        std::thread::sleep(Duration::from_millis(2));
    }
    let sent = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
    assert_eq!(child.wait().expect("wait").code(), Some(130));
    assert_eq!(entries(), 0);
}

#[test]
fn what_a_killed_run_left_the_next_one_removes_and_nothing_else() {
    let directory = scratch();
    let names = || {
        let entries = std::fs::read_dir(directory.path()).expect("list");
        entries.map(|entry| entry.expect("entry").file_name().into_string().expect("text")).collect::<Vec<String>>()
    };
    let mut child = common::command(directory.path())
        .args(["verify-direct", ".", "--size", "512MB", "--device", "host"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start");
    let begun = Instant::now();
    while names().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never began");
        std::thread::sleep(Duration::from_millis(2));
    }
    // While it lives, what it made is its own.
    assert_eq!(run(directory.path(), ["verify-direct", ".", "--size", "1MB"]).status, Some(3));
    assert_eq!(names().len(), 1);
    child.kill().expect("kill");
    child.wait().expect("wait");
    assert_eq!(names().len(), 1, "nobody could clear it away");
    // A name of the same shape is not enough.
    for name in ["thruway-verify-notes", "thruway-demo-1-1", "thruway-verify-2024-01"] {
        std::fs::create_dir(directory.path().join(name)).expect("create");
        std::fs::write(directory.path().join(name).join("thesis"), "x").expect("write");
    }
    assert_eq!(run(directory.path(), ["verify-direct", ".", "--size", "1MB"]).status, Some(3));
    let mut left = names();
    left.sort_unstable();
    assert_eq!(left, ["thruway-demo-1-1", "thruway-verify-2024-01", "thruway-verify-notes"]);
}

#[test]
fn errors_name_the_place_and_options_that_there_are() {
    let directory = scratch();
    let nowhere = run(directory.path(), ["verify-direct", "nowhere"]).failed();
    assert!(nowhere.stderr.contains("nowhere") && nowhere.stderr.contains("PATH"), "{nowhere:?}");
    assert!(std::process::Command::new("mkfifo").arg(directory.path().join("fifo")).status().expect("mkfifo").success());
    let fifo = run(directory.path(), ["verify-direct", "fifo"]).failed();
    assert!(fifo.stderr.contains("neither a directory nor a file"), "{fifo:?}");
    let huge = run(directory.path(), ["verify-direct", ".", "--size", "900TB"]).failed();
    assert!(huge.stderr.contains("choose a smaller --size") && !huge.stderr.contains("--dir"), "{huge:?}");
}
