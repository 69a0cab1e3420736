//! The direct path to a GPU from the command line, over doubles of the CUDA driver and of cuFile: what is called direct is what
//! counters prove, what must be direct is refused before a tensor's byte moves, and `auto` says which other way it took.

mod common;

use std::path::Path;

use common::{CuFileMachine, Run, TENSORS, save, scratch, tensor_bytes};
use serde_json::Value;
use thruway::storage::{Access, Buffering, Namespace, OsNamespace};

/// A setting with which the library goes through host memory without a word, although nothing allows it to.
const SILENTLY_COMPAT: [(&str, &str); 3] =
    [("FAKE_CUFILE_WAY", "posix"), ("FAKE_CUFILE_ALLOW_COMPAT", "1"), ("FAKE_CUFILE_FAIL", "cuFileSetParameterBool:*:5026")];

fn model(directory: &Path) {
    save(&directory.join("m.safetensors"), &TENSORS, 5);
    chill(directory);
}

fn chill(directory: &Path) {
    let file = OsNamespace.open(&directory.join("m.safetensors"), Access::Write, Buffering::PageCache).expect("it is there");
    thruway::storage::drop_from_page_cache(&*file).expect("dropped");
}

const fn load(path: &str) -> [&str; 8] {
    ["load", "m.safetensors", "--device", "cuda:0", "--path", path, "--digest", "--json"]
}

/// The parts of the only file.
fn parts(object: &Value) -> &[Value] {
    object["files"][0]["parts"].as_array().expect("parts")
}

fn bytes_by(object: &Value, path: &str) -> u64 {
    parts(object).iter().filter(|part| part["path"] == path).filter_map(|part| part["bytes"].as_u64()).sum()
}

fn digests(directory: &Path) -> Value {
    common::run(directory, ["load", "m.safetensors", "--digest", "--json"]).fine().json()["digests"].take()
}

/// Fails unless cuFile was used without a fault and has nothing left.
fn assert_clean(report: &Value) {
    assert_eq!(report["faults"], serde_json::json!([]), "{report}");
    assert_eq!((&report["handles"], &report["buffers"], &report["in_flight"]), (&0.into(), &0.into(), &0.into()), "{report}");
}

/// The error of a load that had to be direct: refused by name, with what to do.
fn assert_refused(run: Run, reason: &str) {
    let object = run.failed().json();
    let error = &object["error"];
    assert_eq!(error["kind"], "path unavailable", "{error}");
    assert!(error["message"].as_str().is_some_and(|text| text.contains("direct") && text.contains(reason)), "{error}");
    assert!(error["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{error}");
}

#[test]
fn a_load_is_called_direct_where_counters_moved_by_its_bytes() {
    let directory = scratch();
    model(directory.path());
    let expected = digests(directory.path());
    let machine = CuFileMachine::new(true);
    for path in ["direct", "auto"] {
        chill(directory.path());
        let object = machine.run(directory.path(), &[], load(path)).fine().json();
        assert_eq!(bytes_by(&object, "direct"), tensor_bytes() as u64, "{path}: {object}");
        assert!(parts(&object).iter().all(|part| part["engine"] == "cufile"), "{object}");
        assert!(parts(&object)[0]["reason"].as_str().is_some_and(|reason| reason.contains("proven by counters")), "{object}");
        assert_eq!(object["digests"], expected);
        let report = machine.report().expect("cuFile was used");
        assert!(report["moved"].as_u64() >= Some(tensor_bytes() as u64), "the drive moved every byte: {report}");
        assert_eq!(object["ring_bytes"], 0, "no byte passed through the host's memory");
        assert_clean(&report);
    }
    let human = machine.run(directory.path(), &[], ["load", "m.safetensors", "--path", "direct"]).fine();
    assert!(human.stdout.contains("\n  direct (cufile): "), "{human:?}");
}

#[test]
fn a_library_in_its_compatibility_mode_is_refused_where_direct_is_required_and_not_used_by_auto() {
    let directory = scratch();
    model(directory.path());
    let expected = digests(directory.path());
    let machine = CuFileMachine::new(true);
    chill(directory.path());
    assert_refused(machine.run(directory.path(), &SILENTLY_COMPAT, load("direct")), "through host memory");
    let report = machine.report().expect("cuFile was tried");
    assert_eq!((&report["moved"], &report["calls"]["cuFileRead"]), (&4096.into(), &1.into()), "the trial's block alone");
    assert_clean(&report);
    chill(directory.path());
    let object = machine.run(directory.path(), &SILENTLY_COMPAT, load("auto")).fine().json();
    assert_eq!((bytes_by(&object, "staged"), &object["digests"]), (tensor_bytes() as u64, &expected), "{object}");
    let reason = parts(&object)[0]["reason"].as_str().expect("text");
    assert!(reason.contains("not direct: ") && reason.contains("through host memory"), "{reason}");
    assert_clean(&machine.report().expect("cuFile was tried"));
}

#[test]
fn compatibility_mode_that_was_asked_for_is_unverified_and_never_direct() {
    let directory = scratch();
    model(directory.path());
    let expected = digests(directory.path());
    let machine = CuFileMachine::new(false);
    let compat = [("THRUWAY_CUFILE", "compat"), ("FAKE_CUFILE_WAY", "posix")];
    chill(directory.path());
    assert_refused(machine.run(directory.path(), &compat, load("direct")), "through host memory");
    assert_eq!(machine.report().expect("cuFile was tried")["moved"], 4096, "the trial's block alone");
    chill(directory.path());
    let object = machine.run(directory.path(), &compat, load("auto")).fine().json();
    assert_eq!((bytes_by(&object, "unverified"), &object["digests"]), (tensor_bytes() as u64, &expected), "{object}");
    assert_clean(&machine.report().expect("cuFile was used"));
}

#[test]
fn without_counters_that_move_the_bytes_are_unverified() {
    let directory = scratch();
    model(directory.path());
    let expected = digests(directory.path());
    let machine = CuFileMachine::new(true);
    for counters in ["still", "half", "other"] {
        let settings = [("FAKE_CUFILE_COUNTERS", counters)];
        chill(directory.path());
        assert_refused(machine.run(directory.path(), &settings, load("direct")), "counters");
        assert_eq!(machine.report().expect("cuFile was tried")["moved"], 4096, "{counters}: the trial's block alone");
        chill(directory.path());
        let object = machine.run(directory.path(), &settings, load("auto")).fine().json();
        assert_eq!((bytes_by(&object, "unverified"), bytes_by(&object, "direct")), (tensor_bytes() as u64, 0), "{object}");
        assert!(parts(&object)[0]["reason"].as_str().is_some_and(|reason| reason.contains("unproven: ")), "{object}");
        assert_eq!(object["digests"], expected);
    }
}

#[test]
fn where_nothing_can_be_direct_cufile_is_left_alone() {
    let directory = scratch();
    model(directory.path());
    let machine = CuFileMachine::new(false);
    // Opening it here would damage descriptor 0.
    let settings = [("FAKE_CUFILE_DAMAGE", "1")];
    chill(directory.path());
    assert_refused(machine.run(directory.path(), &settings, load("direct")), "nvidia-fs is not loaded");
    let object = machine.run(directory.path(), &settings, load("auto")).fine().json();
    assert!(parts(&object)[0]["reason"].as_str().is_some_and(|reason| reason.contains("nvidia-fs is not loaded")), "{object}");
    assert_eq!(machine.report(), None, "cuFile was never opened");
}

#[test]
fn explain_says_what_the_load_then_does_and_refuses_what_it_refuses() {
    let directory = scratch();
    model(directory.path());
    for (direct, settings) in [(true, &[][..]), (true, &SILENTLY_COMPAT), (false, &[])] {
        let machine = CuFileMachine::new(direct);
        for path in ["auto", "direct", "staged", "cached"] {
            let arguments = ["explain", "m.safetensors", "--device", "cuda:0", "--path", path, "--json"];
            chill(directory.path());
            let explained = machine.run(directory.path(), settings, arguments);
            let moved = machine.report().map_or(0, |report| report["moved"].as_u64().expect("a number"));
            assert!(moved <= 4096, "{path}: {moved} bytes moved to explain");
            chill(directory.path());
            let loaded = machine.run(directory.path(), settings, load(path));
            assert_eq!(explained.status, loaded.status, "{path}: {explained:?}");
            let (explained, loaded) = (explained.json(), loaded.json());
            assert_eq!((&explained["files"], &explained["error"]), (&loaded["files"], &loaded["error"]), "{path}");
            assert_eq!((&explained["bytes"], &explained["device"]), (&loaded["bytes"], &loaded["device"]), "{path}");
        }
    }
    let human = common::run(directory.path(), ["explain", "m.safetensors"]).fine();
    assert!(human.stdout.starts_with("4 tensors, 2.40 MB, would go to host memory: no CUDA driver here\n"), "{human:?}");
    assert!(human.stdout.contains("\nm.safetensors: 2.40 MB\n  "), "{human:?}");
    let missing = common::run(directory.path(), ["explain", "nothing.safetensors", "--json"]).failed();
    assert_eq!(missing.json()["error"]["kind"], "not found");
}
