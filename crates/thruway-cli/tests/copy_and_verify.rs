//! `thruway copy` and `thruway verify`.

mod common;

use common::{TENSORS, run, save, save_sharded, scratch, tensor_bytes};

#[test]
fn a_copy_in_shards_holds_the_same_tensors_and_verify_says_so() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let copied = run(directory.path(), ["copy", "m.safetensors", "shards", "--max-shard-size", "1MB", "--json"]).fine().json();
    assert_eq!(copied["bytes"], tensor_bytes());
    assert_eq!(copied["tensors"], TENSORS.len());
    assert_eq!(copied["read"]["bytes"], tensor_bytes());
    assert!(copied["written"]["files"].as_array().expect("files").len() >= 3, "shards and their index: {copied}");
    assert!(directory.path().join("shards/model.safetensors.index.json").exists());
    let same = run(directory.path(), ["verify", "shards", "--against", "m.safetensors", "--json"]).fine().json();
    assert_eq!((&same["ok"], &same["tensors"], &same["bytes"]), (&true.into(), &TENSORS.len().into(), &tensor_bytes().into()));
    assert_eq!(same["differences"], serde_json::json!([]));
    assert_eq!(same["bytes_read"], 2 * tensor_bytes());
    assert!(same["seconds"].is_f64() && same["files"].is_array() && same["retries"].is_u64());
    let human = run(directory.path(), ["verify", "shards", "--against", "m.safetensors"]).fine();
    assert!(human.stdout.contains("4 tensors, 2.40 MB: the same as m.safetensors\n"), "{human:?}");
}

#[test]
fn a_copy_of_shards_is_shards_and_of_a_file_a_file() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    save_sharded(&directory.path().join("model"), &TENSORS, 1, 1 << 20);
    let file = run(directory.path(), ["copy", "m.safetensors", "copy.safetensors"]).fine();
    assert!(file.stdout.starts_with("4 tensors, 2.40 MB, to copy.safetensors in "), "{file:?}");
    assert!(directory.path().join("copy.safetensors").is_file());
    run(directory.path(), ["copy", "model", "copied", "--path", "cached"]).fine();
    assert!(directory.path().join("copied").is_dir());
    run(directory.path(), ["verify", "copied", "--against", "copy.safetensors"]).fine();
}

#[test]
fn verify_without_another_model_reads_everything() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let human = run(directory.path(), ["verify", "m.safetensors"]).fine();
    assert!(human.stdout.contains("every byte can be read"), "{human:?}");
    let object = run(directory.path(), ["verify", "m.safetensors", "--json"]).fine().json();
    assert_eq!((&object["ok"], &object["against"]), (&true.into(), &serde_json::Value::Null));
    assert_eq!(object["bytes_read"], tensor_bytes());
}

#[test]
fn differences_are_listed_by_tensor_and_make_the_exit_status_1() {
    let directory = scratch();
    save(&directory.path().join("a.safetensors"), &[("same", 100), ("kind", 10), ("bytes", 5000), ("here", 1)], 1);
    save(&directory.path().join("b.safetensors"), &[("same", 100), ("kind", 11), ("bytes", 5000), ("there", 1)], 1);
    let mut file = std::fs::read(directory.path().join("b.safetensors")).expect("read");
    let needle = common::content("bytes", 5000, 1);
    let at = file.windows(needle.len()).position(|window| window == needle).expect("in the file");
    file[at + 4999] ^= 1;
    std::fs::write(directory.path().join("b.safetensors"), file).expect("write");

    let found = run(directory.path(), ["verify", "a.safetensors", "--against", "b.safetensors", "--json"]);
    assert_eq!(found.status, Some(1));
    assert_eq!(found.stderr, "", "a fault that a check found is no failure of the check");
    let object = found.json();
    assert_eq!(object["ok"], false);
    let mut names: Vec<&str> =
        object["differences"].as_array().expect("list").iter().filter_map(|item| item["tensor"].as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["bytes", "here", "kind", "there"]);
    assert!(object["differences"][0]["difference"].is_string());
    let human = run(directory.path(), ["verify", "a.safetensors", "--against", "b.safetensors"]);
    assert_eq!(human.status, Some(1));
    assert!(human.stdout.contains("bytes has other bytes\n") && human.stdout.contains("4 differences from"), "{human:?}");
}

#[test]
fn a_copy_never_goes_into_a_directory_that_holds_something() {
    let directory = scratch();
    save_sharded(&directory.path().join("model"), &TENSORS, 1, 1 << 20);
    std::fs::create_dir(directory.path().join("full")).expect("create");
    std::fs::write(directory.path().join("full/precious"), b"x").expect("write");
    let refused = run(directory.path(), ["copy", "model", "full", "--json"]).failed();
    assert_eq!(refused.json()["error"]["kind"], "already exists");
    assert_eq!(std::fs::read_dir(directory.path().join("full")).expect("list").count(), 1);
    assert_eq!(std::fs::read_dir(directory.path()).expect("list").count(), 2, "nothing is left beside it");
}

#[test]
fn a_slash_or_an_empty_directory_makes_a_directory_and_a_file_name_refuses_shards() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    save_sharded(&directory.path().join("model"), &TENSORS, 1, 1 << 20);
    std::fs::create_dir(directory.path().join("empty")).expect("create");
    for target in ["new/", "empty"] {
        run(directory.path(), ["copy", "m.safetensors", target]).fine();
        assert!(directory.path().join(target).join("model.safetensors").is_file(), "{target}");
        run(directory.path(), ["verify", target, "--against", "m.safetensors"]).fine();
    }
    for arguments in
        [&["copy", "model", "x.safetensors"][..], &["copy", "m.safetensors", "x.safetensors", "--max-shard-size", "1MB"]]
    {
        let refused = run(directory.path(), arguments).failed();
        assert!(refused.stderr.contains("\nhint: name a directory"), "{refused:?}");
        assert!(!directory.path().join("x.safetensors").exists());
    }
    let refused = run(directory.path(), ["copy", "model", "gone/copy"]).failed();
    assert!(refused.stderr.contains("the directory gone does not exist"), "{refused:?}");
}

#[test]
fn a_tensor_larger_than_a_shard_is_noted() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &[("large", 3000), ("small", 10)], 1);
    let copied = run(directory.path(), ["copy", "m.safetensors", "shards", "--max-shard-size", "1kB"]).fine();
    assert!(copied.stderr.contains("note: large has ") && !copied.stderr.contains("small"), "{copied:?}");
}

#[test]
fn a_copy_is_spread_over_several_directories_and_is_the_same_model() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    std::fs::create_dir(directory.path().join("other-drive")).expect("create");
    let stripes = || std::fs::read_dir(directory.path().join("other-drive")).expect("list").count();
    let spread = ["copy", "m.safetensors", "spread", "--max-shard-size", "1MB", "--stripe", "other-drive"];
    let object = run(directory.path(), spread.iter().chain(&["--json"])).fine().json();
    assert!(object["written"]["files"].as_array().is_some_and(|files| files.len() > 2), "{object}");
    assert_eq!(stripes(), 1);
    run(directory.path(), ["verify", "spread", "--against", "m.safetensors"]).fine();
    run(directory.path(), ["copy", "m.safetensors", "whole/", "--stripe", "other-drive"]).fine();
    assert_eq!(stripes(), 1, "nothing went there, so there is no stripe");
    let refused = run(directory.path(), ["copy", "m.safetensors", "one.safetensors", "--stripe", "other-drive"]).failed();
    assert!(refused.stderr.contains("\nhint: set a size of shards"), "{refused:?}");
    let refused = run(directory.path(), ["copy", "spread", "again", "--stripe", "gone"]).failed();
    assert!(refused.stderr.contains("gone") && !directory.path().join("again").exists(), "{refused:?}");
}
