//! The commands on a machine with a GPU: here a driver in software, which a real one would stand in for.

mod common;

use common::{TENSORS, command_with_gpu, run, run_with_fast_gpu, run_with_gpu, save, save_sharded, scratch, tensor_bytes};
use serde_json::Value;

#[test]
fn a_load_to_the_gpu_brings_the_bytes_that_a_load_to_the_host_brings() {
    let directory = scratch();
    save_sharded(&directory.path().join("model"), &TENSORS, 1, 1 << 20);
    let host = run_with_gpu(directory.path(), ["load", "model", "--device", "host", "--digest", "--json"]).fine().json();
    assert_eq!((&host["device"], host["digests"].as_object().map(serde_json::Map::len)), (&"host".into(), Some(TENSORS.len())));
    for (device, path) in [("cuda:0", "auto"), ("cuda:0", "staged"), ("cuda:0", "cached"), ("auto", "auto")] {
        let arguments = ["load", "model", "--device", device, "--path", path, "--digest", "--repeat", "2", "--json"];
        let object = run_with_gpu(directory.path(), arguments).fine().json();
        assert_eq!(object["device"], "cuda:0");
        assert_eq!(object["digests"], host["digests"], "{device}, {path}");
        assert_eq!((&object["bytes"], object["runs"].as_array().map(Vec::len)), (&tensor_bytes().into(), Some(2)));
        assert!(object["device_reason"].as_str().is_some_and(|reason| reason.contains("Fake GPU")), "{object}");
        assert!(object["ring_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "bytes go to a GPU through the ring: {object}");
        for file in object["files"].as_array().expect("files") {
            let parts = file["parts"].as_array().expect("parts");
            assert!(parts.iter().all(|part| part["path"] == "staged" || part["path"] == "cached"), "{file}");
        }
    }
    let human = run_with_gpu(directory.path(), ["load", "model"]).fine();
    assert!(human.stdout.starts_with("4 tensors, 2.40 MB, to cuda:0 (the first GPU: Fake GPU)\n"), "{human:?}");
}

#[test]
fn a_gpu_too_many_is_an_error_that_says_how_many_there_are() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let refused = run_with_gpu(directory.path(), ["load", "m.safetensors", "--device", "cuda:9", "--json"]).failed();
    let error = &refused.json()["error"];
    assert_eq!(error["kind"], "unsupported");
    assert!(error["message"].as_str().is_some_and(|text| text.contains("cuda:9") && text.contains("one GPU")), "{error}");
    assert!(error["hint"].is_string());
}

#[test]
fn the_direct_path_to_a_gpu_is_refused_with_what_is_missing() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let arguments = ["load", "m.safetensors", "--device", "cuda:0", "--path", "direct", "--json"];
    let refused = run_with_gpu(directory.path(), arguments).failed();
    let error = &refused.json()["error"];
    assert_eq!(error["kind"], "path unavailable");
    assert!(error["message"].as_str().is_some_and(|text| text.contains("direct")), "{error}");
}

#[test]
fn commands_that_only_need_the_host_never_start_the_gpu() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let arguments: [&[&str]; 4] = [
        &["inspect", "m.safetensors"],
        &["verify", "m.safetensors"],
        &["copy", "m.safetensors", "copy.safetensors"],
        &["load", "m.safetensors", "--device", "host"],
    ];
    for arguments in arguments {
        // A driver that fails must not be noticed.
        let mut command = command_with_gpu(directory.path());
        let output = command.args(arguments).env("FAKE_CUDA_FAIL", "cuInit:*:UNKNOWN").output().expect("run");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        assert!(!String::from_utf8_lossy(&output.stdout).contains("cuInit"), "{arguments:?}: {output:?}");
    }
    let mut command = command_with_gpu(directory.path());
    let output = command.args(["load", "m.safetensors"]).env("FAKE_CUDA_FAIL", "cuInit:*:UNKNOWN").output().expect("run");
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("cuInit"), "where a GPU is wanted, the reason is told: {told}");
}

#[test]
fn the_demo_saves_from_the_gpu_and_loads_to_it() {
    let directory = scratch();
    let object = run_with_fast_gpu(directory.path(), ["demo", "--size", "4MB", "--json"]).fine().json();
    assert_eq!((&object["ok"], &object["device"]), (&true.into(), &"cuda:0".into()));
    let loads = object["loads"].as_array().expect("list");
    assert!(loads.iter().any(|load| load["available"] == true));
    let names: Vec<&str> = object["limits"].as_array().expect("list").iter().filter_map(|limit| limit["name"].as_str()).collect();
    assert!(names.contains(&"pinned host to GPU") && names.contains(&"both ways at once"), "{names:?}");
    assert!(object["verdict"].as_str().is_some_and(|text| text.contains("GPU")), "{object}");
    let host = run_with_fast_gpu(directory.path(), ["demo", "--size", "4MB", "--device", "host", "--json"]).fine().json();
    assert_eq!((&host["ok"], &host["device"]), (&true.into(), &"host".into()));
}

#[test]
fn the_bench_measures_the_link_and_says_what_bounds_each_path() {
    let directory = scratch();
    let object = run_with_fast_gpu(directory.path(), ["bench", "--size", "8MB", "--repeat", "2", "--json"]).fine().json();
    assert_eq!((&object["ok"], &object["device"]), (&true.into(), &"cuda:0".into()));
    let limit = |name: &str| {
        let limits = object["limits"].as_array().expect("list");
        let found = limits.iter().find(|limit| limit["name"] == name);
        found.and_then(|limit| limit["gb_per_s"].as_f64()).unwrap_or_else(|| panic!("{name}: {object}"))
    };
    for name in ["pinned host to GPU", "GPU to pinned host", "both ways at once", "pinned host to GPU, 64 KiB copies"] {
        assert!(limit(name) > 0.0, "{name}");
    }
    let results = object["results"].as_array().expect("list");
    let warm: &Value = results.iter().find(|result| result["name"] == "first load of a process, warm file, auto").expect("there");
    assert_eq!((&warm["available"], warm["runs_seconds"].as_array().map(Vec::len)), (&true.into(), Some(2)), "{warm}");
    assert!(results.iter().any(|result| result["name"] == "save from the GPU, synced, auto" && result["available"] == true));
    for roof in object["roofline"].as_array().expect("list") {
        assert!(roof["pcie_gb_per_s"].is_f64(), "{roof}");
        assert!(["disk", "memory", "PCIe"].iter().any(|bound| roof["bound_by"] == *bound), "{roof}");
    }
    let human = run_with_fast_gpu(directory.path(), ["bench", "--size", "2MB", "--repeat", "1"]).fine();
    assert!(human.stdout.contains("ROOFLINE") && human.stdout.contains("(the first GPU: Fake GPU)"), "{human:?}");
    let without = run(directory.path(), ["bench", "--size", "2MB", "--repeat", "1", "--device", "cuda:0"]).failed();
    assert!(without.stderr.contains("no CUDA driver"), "{without:?}");
}
