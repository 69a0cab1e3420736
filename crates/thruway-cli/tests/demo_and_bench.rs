//! `thruway demo` and `thruway bench`, small.

mod common;

use common::{TENSORS, run, save, scratch};

fn is_empty(directory: &std::path::Path) -> bool {
    std::fs::read_dir(directory).expect("list").next().is_none()
}

#[test]
fn the_demo_ends_with_a_verdict_and_leaves_nothing() {
    let directory = scratch();
    let human = run(directory.path(), ["demo", "--size", "4MB"]).fine();
    let last = human.stdout.lines().last().expect("a verdict");
    assert!(last.starts_with("All 4.00 MB are right, read back ") && last.contains("loads here"), "{last}");
    assert!(human.stdout.starts_with("device   host memory: no CUDA driver here"), "{human:?}");
    assert!(is_empty(directory.path()));
}

#[test]
fn the_demo_in_json_has_every_way_with_its_receipt_and_the_limits() {
    let directory = scratch();
    let object = run(directory.path(), ["demo", "--size", "4MB", "--json"]).fine().json();
    assert_eq!((&object["ok"], &object["model"]["bytes"]), (&true.into(), &4_000_000.into()));
    assert_eq!(object["save"]["bytes"].as_u64().map(|bytes| bytes >= 4_000_000), Some(true));
    let loads = object["loads"].as_array().expect("list");
    let policies: Vec<&str> = loads.iter().filter_map(|load| load["policy"].as_str()).collect();
    assert_eq!(policies, ["auto", "cached", "staged"]);
    for load in loads {
        if load["available"] == true {
            assert_eq!((&load["bytes"], &load["wrong"]), (&4_000_000.into(), &serde_json::json!([])));
            assert!(load["ratio"].is_f64() || load["limit"] == "O_DIRECT read, best", "{load}");
        } else {
            assert!(load["reason"].is_string(), "{load}");
        }
    }
    assert!(object["limits"].as_array().is_some_and(|limits| limits.len() >= 8), "{object}");
    assert!(is_empty(directory.path()));
}

#[test]
fn the_demo_takes_a_model_and_keeps_its_copy_if_told_to() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    std::fs::create_dir(directory.path().join("kept")).expect("create");
    let object = run(directory.path(), ["demo", "--model", "m.safetensors", "--dir", "kept", "--keep", "--json"]).fine().json();
    let copy = object["model"]["file"].as_str().expect("file");
    run(directory.path(), ["verify", copy, "--against", "m.safetensors"]).fine();
    let names: Vec<_> = std::fs::read_dir(std::path::Path::new(&directory.path().join(copy)).parent().expect("parent"))
        .expect("list")
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(names, ["model.safetensors"], "only the model is kept");
}

#[test]
fn work_that_cannot_fit_is_refused_before_it_begins() {
    let directory = scratch();
    for command in ["demo", "bench"] {
        let object = run(directory.path(), [command, "--size", "9000TB", "--json"]).failed().json();
        let kind = &object["error"]["kind"];
        assert!(kind == "out of memory" || kind == "no space", "{object}");
        let missing = run(directory.path(), [command, "--size", "4MB", "--dir", "missing", "--json"]).failed().json();
        assert_eq!(missing["error"]["kind"], "not found");
        assert!(is_empty(directory.path()));
    }
}

#[test]
fn the_bench_measures_limits_and_paths_and_leaves_nothing() {
    let directory = scratch();
    let object = run(directory.path(), ["bench", "--size", "4MB", "--repeat", "2", "--json"]).fine().json();
    assert_eq!((&object["ok"], &object["bytes"], &object["repeat"]), (&true.into(), &4_000_000.into(), &2.into()));
    for key in ["cpu", "cores", "memory_bytes", "kernel", "filesystem", "block_device", "io_uring"] {
        assert!(object["machine"].get(key).is_some(), "{key}");
    }
    for limit in object["limits"].as_array().expect("list") {
        assert!(limit["name"].is_string() && limit["how"].is_string() && limit.get("gb_per_s").is_some(), "{limit}");
    }
    let results = object["results"].as_array().expect("list");
    assert!(results.iter().any(|result| result["name"] == "save, synced, auto" && result["available"] == true));
    for result in results {
        if result["available"] == true {
            assert_eq!(result["runs_seconds"].as_array().map(Vec::len), Some(2), "{result}");
            assert!(result["gb_per_s"].is_f64() && result["path"].is_string(), "{result}");
        } else {
            assert!(result["reason"].is_string(), "{result}");
        }
    }
    let roofs = object["roofline"].as_array().expect("list");
    assert_eq!(roofs.len(), results.len());
    assert!(
        roofs.iter().all(|roof| ["disk", "memory"].iter().any(|bound| roof["bound_by"] == *bound) || roof["bound_by"].is_null())
    );
    assert!(is_empty(directory.path()));
}

#[test]
fn the_bench_prints_tables_for_people() {
    let directory = scratch();
    let human = run(directory.path(), ["bench", "--size", "2MB", "--repeat", "1"]).fine();
    for heading in ["CPU ", "LIMIT OF THIS MACHINE", "THRUWAY", "memory copy, one thread", "load, warm file, cached", "ROOFLINE"]
    {
        assert!(human.stdout.contains(heading), "{heading}: {human:?}");
    }
    assert!(is_empty(directory.path()));
}
