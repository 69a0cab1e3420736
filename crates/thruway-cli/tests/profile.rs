//! Measured rates: `bench --save-profile` writes them, `auto` follows them and says so, and what does not fit is ignored with
//! the reason.

mod common;

use std::path::Path;

use common::{CuFileMachine, TENSORS, run, save, scratch, tensor_bytes};
use serde_json::{Value, json};
use thruway::storage::{Access, Buffering, Namespace, OsNamespace};

fn chill(directory: &Path) {
    let file = OsNamespace.open(&directory.join("m.safetensors"), Access::Write, Buffering::PageCache).expect("it is there");
    thruway::storage::drop_from_page_cache(&*file).expect("dropped");
}

fn bench(machine: &CuFileMachine, directory: &Path, file: &str) -> common::Run {
    // The driver in software does not look at every byte, or this would take minutes.
    let fast = [("FAKE_CUDA_CHECK", "0"), ("FAKE_CUDA_DELAY_US", "0..5"), ("FAKE_CUFILE_DELAY_US", "0..5")];
    machine.run(directory, &fast, ["bench", "--size", "2MB", "--repeat", "1", "--save-profile", file, "--json"])
}

/// The paths of a load's parts, and all that was said.
fn load(machine: &CuFileMachine, directory: &Path, settings: &[(&str, &str)], options: &[&str]) -> (Vec<String>, String) {
    chill(directory);
    let arguments = ["load", "m.safetensors", "--device", "cuda:0", "--json"];
    let object = machine.run(directory, settings, arguments.iter().chain(options)).fine().json();
    let explained = {
        chill(directory);
        let arguments = ["explain", "m.safetensors", "--device", "cuda:0", "--json"];
        machine.run(directory, settings, arguments.iter().chain(options)).fine().json()
    };
    assert_eq!(explained["files"], object["files"], "explained and loaded");
    let parts = object["files"][0]["parts"].as_array().expect("parts");
    assert_eq!(parts.iter().filter_map(|part| part["bytes"].as_u64()).sum::<u64>(), tensor_bytes() as u64);
    let paths = parts.iter().map(|part| part["path"].as_str().expect("text").to_owned()).collect();
    (paths, parts[0]["reason"].as_str().expect("text").to_owned())
}

#[test]
fn a_saved_profile_decides_and_is_named_and_one_that_does_not_fit_is_ignored_with_the_reason() {
    let directory = scratch();
    let directory = directory.path();
    save(&directory.join("m.safetensors"), &TENSORS, 6);
    let machine = CuFileMachine::new(true);
    let object = bench(&machine, directory, "rates.json").fine().json();
    let rates = object["profile"]["rates"].as_array().expect("rates");
    for direction in ["read", "write"] {
        for path in ["direct", "staged", "cached"] {
            let fits = |rate: &&Value| rate["direction"] == direction && rate["path"] == path && rate["size"] == "1MiB";
            let found = rates.iter().find(fits).unwrap_or_else(|| panic!("{direction} {path}: {object}"));
            assert!(found["gb_per_s"].as_f64() > Some(0.0), "{found}");
        }
    }
    let read_profile = || -> Value {
        serde_json::from_str(&std::fs::read_to_string(directory.join("rates.json")).expect("written")).expect("JSON")
    };
    let write_profile = |profile: &Value| std::fs::write(directory.join("rates.json"), profile.to_string()).expect("written");
    let measured = read_profile();
    assert_eq!(measured["measurements"][0]["rates"], object["profile"]["rates"]);
    let (_, reason) = load(&machine, directory, &[], &["--profile", "rates.json"]);
    assert!(reason.contains("; by the profile rates.json: "), "{reason}");

    // What it has measured, it decides.
    let with = |change: &dyn Fn(&mut Value)| {
        let mut profile = measured.clone();
        change(&mut profile["measurements"][0]);
        write_profile(&profile);
        load(&machine, directory, &[("THRUWAY_PROFILE", "rates.json")], &[])
    };
    let faster = |path: &'static str| {
        move |one: &mut Value| {
            for rate in one["rates"].as_array_mut().expect("rates") {
                rate["gb_per_s"] = if rate["path"] == path { json!(500.0) } else { json!(1.5) };
            }
        }
    };
    let (paths, reason) = with(&faster("staged"));
    let rates = "; by the profile rates.json: staged 500.00, direct 1.50 GB/s";
    assert!(paths == ["staged"] && reason.ends_with(rates), "{paths:?} {reason}");
    let (paths, reason) = with(&faster("direct"));
    assert!(paths.iter().all(|path| path == "direct") && reason.contains("direct 500.00, staged 1.50"), "{reason}");

    // What is foreign, stale or malformed leaves the rules, and says why.
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 5] = [
        (|one| one["machine"]["gpu"] = json!("00"), "measured with another GPU"),
        (|one| one["filesystem"] = json!("ef53 0000000000000001"), "measured on another filesystem"),
        (|one| one["machine"]["kernel"] = json!("2.6.32"), "stale: measured under kernel 2.6.32"),
        (|one| one["measured_unix_s"] = json!(1), "stale: measured "),
        (|one| one["rates"] = json!("many"), "this is no profile: "),
    ];
    for (change, why) in cases {
        let (paths, reason) = with(&change);
        assert!(paths.iter().all(|path| path == "direct"), "the rules: {paths:?}");
        assert!(reason.contains("; the profile rates.json is ignored: ") && reason.contains(why), "{reason}");
    }
    let (_, reason) = load(&machine, directory, &[("THRUWAY_PROFILE", "gone.json")], &[]);
    assert!(reason.contains("the profile gone.json is ignored: "), "{reason}");
    let (_, reason) = load(&machine, directory, &[], &[]);
    assert!(!reason.contains("profile"), "{reason}");

    // Another measurement of the same place replaces the first, and what is no profile is not written over.
    write_profile(&measured);
    bench(&machine, directory, "rates.json").fine();
    assert_eq!(read_profile()["measurements"].as_array().map(Vec::len), Some(1));
    std::fs::write(directory.join("notes.txt"), "mine").expect("written");
    let refused = bench(&machine, directory, "notes.txt").failed();
    assert_eq!(refused.json()["error"]["kind"], "malformed");
    assert_eq!(std::fs::read_to_string(directory.join("notes.txt")).expect("still there"), "mine");
}

#[test]
fn a_profile_needs_a_gpu() {
    let directory = scratch();
    let refused = run(directory.path(), ["bench", "--size", "1MB", "--save-profile", "rates.json", "--json"]).failed();
    assert_eq!(refused.json()["error"]["kind"], "unsupported");
    assert!(!directory.path().join("rates.json").exists());
}
