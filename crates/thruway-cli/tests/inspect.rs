//! `thruway inspect`.

mod common;

use std::collections::BTreeMap;

use common::{TENSORS, run, save, save_sharded, save_with, scratch, tensor_bytes};
use thruway::SaveOptions;

#[test]
fn json_has_every_tensor_with_its_place() {
    let directory = scratch();
    let path = directory.path().join("m.safetensors");
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save_with(&path, &TENSORS, 1, SaveOptions::default().metadata(metadata));
    let object = run(directory.path(), ["inspect", "m.safetensors", "--json"]).fine().json();
    let tensors = object["tensors"].as_array().expect("list");
    assert_eq!(tensors.len(), TENSORS.len());
    let file = std::fs::read(&path).expect("read");
    for (name, length) in TENSORS {
        let tensor = tensors.iter().find(|tensor| tensor["name"] == name).expect(name);
        assert_eq!((&tensor["dtype"], &tensor["shape"]), (&"U8".into(), &serde_json::json!([length])));
        assert_eq!((&tensor["file"], &tensor["bytes"]), (&"m.safetensors".into(), &length.into()));
        let offset = usize::try_from(tensor["offset"].as_u64().expect("offset")).expect("small");
        assert!(file[offset..offset + length] == common::content(name, length, 1)[..], "{name}");
    }
    assert_eq!(object["metadata"], serde_json::json!({"format": "pt"}));
    assert_eq!(object["bytes"], tensor_bytes());
    assert_eq!(
        object["files"],
        serde_json::json!([{"file": "m.safetensors", "bytes": file.len(), "metadata": {"format": "pt"}}])
    );
    assert_eq!(object["notes"], serde_json::json!([]));
}

#[test]
fn people_get_one_aligned_line_for_each_tensor_and_a_total() {
    let directory = scratch();
    save(&directory.path().join("m.safetensors"), &TENSORS, 1);
    let human = run(directory.path(), ["inspect", "m.safetensors"]).fine();
    let lines: Vec<&str> = human.stdout.lines().collect();
    let column = lines[0].find("DTYPE").expect("a heading");
    for (name, _) in TENSORS {
        let line = lines.iter().find(|line| line.starts_with(name)).expect(name);
        assert!(line[column..].starts_with("U8") && line.ends_with("m.safetensors"), "{line}");
    }
    assert!(human.stdout.contains("4 tensors, 2.40 MB of data, "), "{human:?}");
}

#[test]
fn of_shards_each_tensor_names_its_file() {
    let directory = scratch();
    save_sharded(&directory.path().join("model"), &TENSORS, 1, 1 << 20);
    for path in ["model", "model/model.safetensors.index.json"] {
        let object = run(directory.path(), ["inspect", path, "--json"]).fine().json();
        let files: Vec<&str> =
            object["files"].as_array().expect("list").iter().filter_map(|file| file["file"].as_str()).collect();
        assert!(files.len() > 1, "{object}");
        assert!(
            object["tensors"].as_array().expect("list").iter().all(|tensor| files.iter().any(|file| tensor["file"] == *file))
        );
        assert!(object["metadata"].is_object());
    }
}

#[test]
fn what_is_odd_and_harmless_is_noted() {
    let directory = scratch();
    save_sharded(&directory.path().join("model"), &TENSORS, 1, 1 << 20);
    let index = directory.path().join("model/model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).expect("read").replace(&format!("{}", tensor_bytes()), "17");
    std::fs::write(&index, text).expect("write");
    let object = run(directory.path(), ["inspect", "model", "--json"]).fine().json();
    assert_eq!(object["notes"].as_array().map(Vec::len), Some(1), "{object}");
    let human = run(directory.path(), ["inspect", "model"]).fine();
    assert!(human.stderr.starts_with("note: model: "), "{human:?}");
}
