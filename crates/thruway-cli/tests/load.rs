//! `thruway load`.

mod common;

use common::{TENSORS, content, run, save, save_sharded, scratch, tensor_bytes};
use thruway::transfer::verify::Digest;

#[test]
fn json_tells_bytes_times_and_which_way_each_file_went() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let object = run(directory.path(), ["load", "m.safetensors", "--json"]).fine().json();
    assert_eq!(object["bytes"], tensor_bytes());
    assert_eq!(object["tensors"], TENSORS.len());
    for key in ["seconds", "gb_per_s", "cpu_seconds", "open_seconds"] {
        assert!(object[key].is_f64(), "{key}: {object}");
    }
    assert_eq!(object["device"], "host");
    assert!(object["retries"].is_u64() && object["notes"].as_array().is_some_and(Vec::is_empty));
    assert!(object.get("digests").is_none());
    let file = &object["files"][0];
    assert_eq!((&file["file"], &file["bytes"]), (&"m.safetensors".into(), &tensor_bytes().into()));
    let parts = file["parts"].as_array().expect("parts");
    assert_eq!(parts.iter().filter_map(|part| part["bytes"].as_u64()).sum::<u64>(), tensor_bytes() as u64);
    assert!(parts.iter().all(|part| part["path"].is_string() && part["engine"].is_string() && part["reason"].is_string()));
}

#[test]
fn digests_are_those_of_the_bytes_that_were_saved_in_both_forms() {
    let directory = scratch();
    save_sharded(&directory.path().join("model"), &TENSORS, 2, 1 << 20);
    let expected = |(name, length): &(&str, usize)| Digest::of(&content(name, *length, 2)).to_string();
    let object = run(directory.path(), ["load", "model", "--digest", "--json"]).fine().json();
    let mut lines = Vec::new();
    for tensor in &TENSORS {
        assert_eq!(object["digests"][tensor.0], expected(tensor), "{}", tensor.0);
        lines.push(format!("{}  {}", expected(tensor), tensor.0));
    }
    lines.sort_by_key(|line| line[line.rfind("  ").expect("two columns")..].to_owned());
    let human = run(directory.path(), ["load", "model", "--digest"]).fine();
    let printed: Vec<&str> = human.stdout.lines().collect();
    assert_eq!(printed, lines, "sorted by name");
    assert!(human.stderr.starts_with("4 tensors, 2.40 MB, to host memory: no CUDA driver here\n"), "{human:?}");
}

#[test]
fn a_required_path_is_taken_or_refused_with_the_missing_piece() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 3);
    let object = run(directory.path(), ["load", "m.safetensors", "--path", "cached", "--json"]).fine().json();
    assert!(object["files"][0]["parts"].as_array().expect("parts").iter().all(|part| part["path"] == "cached"));
    let refused = run(directory.path(), ["load", "m.safetensors", "--path", "direct", "--json"]).failed();
    assert_eq!(refused.json()["error"]["kind"], "path unavailable");
    assert!(refused.stderr.contains("\nhint: "), "{refused:?}");
}

#[test]
fn a_gpu_that_is_not_there_is_an_error_and_no_silent_fallback() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 3);
    let refused = run(directory.path(), ["load", "m.safetensors", "--device", "cuda:7"]).failed();
    assert!(refused.stderr.contains("no CUDA driver") && refused.stdout.is_empty(), "{refused:?}");
    let host = run(directory.path(), ["load", "m.safetensors", "--device", "host", "--json"]).fine().json();
    assert_eq!(host["device_reason"], "host memory was asked for");
}

#[test]
fn a_pci_device_is_named_in_full_and_must_be_there() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 3);
    for short in ["pci:03:00.0", "pci:", "pci:0000:03:00"] {
        let usage = run(directory.path(), ["load", "m.safetensors", "--device", short]);
        assert!(usage.status == Some(2) && usage.stderr.contains("no PCI address"), "{usage:?}");
    }
    let load = ["load", "m.safetensors", "--device", "pci:0000:03:00.0", "--json"];
    let output = common::command(directory.path()).args(load).env("THRUWAY_PCI_DEVICES", directory.path()).output();
    let output = output.expect("run");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("an object");
    assert_eq!((output.status.code(), object["error"]["kind"].as_str()), (Some(1), Some("unsupported")), "{object}");
    assert_eq!(object["error"]["context"]["device"], "pci:0000:03:00.0");
    let copy = run(directory.path(), ["copy", "m.safetensors", "c.safetensors", "--device", "cuda:0"]);
    assert!(copy.status == Some(2) && copy.stderr.contains("through a PCI device"), "{copy:?}");
}

#[test]
fn repeated_loads_are_told_one_by_one_and_the_first_stands_on_top() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 4);
    let object = run(directory.path(), ["load", "m.safetensors", "--repeat", "3", "--digest", "--json"]).fine().json();
    let runs = object["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 3);
    for key in ["seconds", "gb_per_s", "cpu_seconds", "open_seconds", "elapsed_seconds"] {
        assert!(runs.iter().all(|run| run[key].is_f64()), "{key}: {object}");
        assert_eq!(object[key], runs[0][key], "{key}");
    }
    assert!(runs[1]["elapsed_seconds"].as_f64() >= runs[1]["seconds"].as_f64());
    assert!(object["startup_seconds"].is_f64() && object["ring_bytes"].is_u64(), "{object}");
    let peak = object["peak_host_bytes"].as_u64().expect("Linux tells");
    assert!(peak >= tensor_bytes() as u64 / 2, "the tensors lie in host memory: {peak}");
    assert_eq!(object["digests"][TENSORS[0].0], Digest::of(&content(TENSORS[0].0, TENSORS[0].1, 4)).to_string());
    let human = run(directory.path(), ["load", "m.safetensors", "--repeat", "2"]).fine();
    assert!(human.stdout.contains("\nload 2: opened and loaded in "), "{human:?}");
}

#[test]
fn a_setting_of_the_environment_that_cannot_be_names_its_variable() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 3);
    let output =
        common::command(directory.path()).args(["load", "m.safetensors"]).env("THRUWAY_RING_SIZE", "lots").output().expect("run");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("THRUWAY_RING_SIZE"));
}
