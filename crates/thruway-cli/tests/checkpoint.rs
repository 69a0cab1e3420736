//! `thruway checkpoint`.

mod common;

use std::path::Path;

use common::{run, scratch};
use serde_json::json;
use thruway::checkpoint::{CheckpointOptions, Checkpoints, Group, Json};
use thruway::{Device, Session};
use thruway_testkit::training::State;

fn checkpoints(directory: &Path) -> Checkpoints {
    Session::builder().device(Device::Host).build().expect("session").checkpoints(directory.join("run"))
}

fn save(directory: &Path, step: u64) {
    let state = State::at(step);
    let options = CheckpointOptions::default();
    checkpoints(directory).save(step, &state.groups(), &state.structure(), options).expect("saved");
}

/// Flips a bit of the last byte of a file.
fn damage(directory: &Path, step: u64, file: &str) {
    let path = checkpoints(directory).directory_of(step).expect("there").join(file);
    let mut bytes = std::fs::read(&path).expect("a file");
    *bytes.last_mut().expect("not empty") ^= 1;
    std::fs::write(path, bytes).expect("written");
}

fn leave_half_a_save(directory: &Path) {
    let left = directory.join("run/.step-00000009.thruway-1-2-3");
    std::fs::create_dir(&left).expect("a directory");
    std::fs::write(left.join("model.safetensors"), "half").expect("a file");
}

#[test]
fn list_tells_whole_ones_from_damaged_ones_and_names_what_is_unfinished() {
    let directory = scratch();
    let here = directory.path();
    save(here, 1000);
    save(here, 2000);
    leave_half_a_save(here);
    std::fs::remove_file(here.join("run/step-00002000/optimizer.safetensors")).expect("removed");
    let human = run(here, ["checkpoint", "list", "run"]).fine();
    let lines: Vec<&str> = human.stdout.lines().collect();
    assert!(lines[1].trim_start().starts_with("1000  20") && lines[1].ends_with("whole"), "{human:?}");
    assert!(lines[2].contains("optimizer.safetensors is missing"), "{human:?}");
    assert!(lines[3].contains(".step-00000009.thruway-1-2-3"), "{human:?}");
    let object = run(here, ["checkpoint", "list", "run", "--json"]).fine().json();
    assert_eq!((&object["checkpoints"][0]["whole"], &object["checkpoints"][1]["whole"]), (&json!(true), &json!(false)));
    assert_eq!(object["unfinished"], json!([".step-00000009.thruway-1-2-3"]));
}

#[test]
fn show_tells_what_a_checkpoint_holds() {
    let directory = scratch();
    save(directory.path(), 1000);
    save(directory.path(), 2000);
    let human = run(directory.path(), ["checkpoint", "show", "run"]).fine();
    assert!(human.stdout.starts_with("run/step-00002000: step 2000\n"), "{human:?}");
    assert!(human.stdout.contains("optimizer        2"), "{human:?}");
    let object = run(directory.path(), ["checkpoint", "show", "run", "1000", "--json"]).fine().json();
    assert_eq!(object["manifest"]["step"], 1000);
    assert_eq!(object["manifest"]["structure"]["rng"], json!([1, 2, 3]));
    assert_eq!(object["manifest"]["groups"][0]["name"], "model");
}

#[test]
fn verify_names_what_is_damaged_and_has_status_1() {
    let directory = scratch();
    let here = directory.path();
    save(here, 1000);
    save(here, 2000);
    let human = run(here, ["checkpoint", "verify", "run"]).fine();
    assert!(human.stdout.starts_with("step 2000: 8 tensors, "), "{human:?}");
    damage(here, 1000, "model.safetensors");
    let all = run(here, ["checkpoint", "verify", "run", "--all", "--json"]);
    assert_eq!(all.status, Some(1));
    let object = all.json();
    assert_eq!(object["ok"], false);
    assert_eq!(object["checkpoints"][0]["damage"][0]["file"], "model.safetensors");
    assert_eq!(object["checkpoints"][1]["ok"], true);
    let human = run(here, ["checkpoint", "verify", "run", "1000"]);
    assert_eq!(human.status, Some(1));
    assert!(human.stdout.contains("model.safetensors: tensor mask of model is damaged, in bytes "), "{human:?}");
    damage(here, 2000, "manifest.json");
    run(here, ["checkpoint", "verify", "run"]).failed();
    let all = run(here, ["checkpoint", "verify", "run", "--all"]);
    assert!(all.status == Some(1) && all.stdout.contains("step 2000: this is not the manifest"), "{all:?}");
}

#[test]
fn diff_names_the_tensors_that_changed() {
    let directory = scratch();
    save(directory.path(), 1000);
    save(directory.path(), 2000);
    let human = run(directory.path(), ["checkpoint", "diff", "run", "1000", "2000"]);
    assert_eq!(human.status, Some(1));
    assert!(human.stdout.contains("optimizer: embed has other bytes\n"), "{human:?}");
    assert!(human.stdout.ends_with("step 1000 and step 2000: 7 differences, 1 tensor the same\n"), "{human:?}");
    let object = run(directory.path(), ["checkpoint", "diff", "run", "1000", "1000", "--json"]).fine().json();
    assert_eq!((&object["differences"], &object["same"]), (&json!([]), &json!(8)));
}

#[test]
fn prune_removes_what_it_said_and_keeps_the_newest() {
    let directory = scratch();
    let here = directory.path();
    [100, 200, 300, 400].into_iter().for_each(|step| save(here, step));
    let dry =
        run(here, ["checkpoint", "prune", "run", "--keep", "1", "--keep-every", "200", "--dry-run", "--json"]).fine().json();
    assert_eq!(dry["removed"], json!([100, 300]));
    assert_eq!(checkpoints(here).steps().expect("steps"), [100, 200, 300, 400]);
    let human = run(here, ["checkpoint", "prune", "run", "--keep", "1", "--keep-every", "200"]).fine();
    assert_eq!(human.stdout, "removed step 100\nremoved step 300\nremoved 2 checkpoints\n");
    assert_eq!(checkpoints(here).steps().expect("steps"), [200, 400]);
    for wrong in [&["checkpoint", "prune", "run"][..], &["checkpoint", "prune", "run", "--keep", "0"], &["checkpoint"]] {
        assert_eq!(run(here, wrong).status, Some(2), "{wrong:?}");
    }
}

#[test]
fn recover_removes_what_the_dead_left_and_refuses_while_another_is_at_work() {
    use thruway::storage::{Namespace, OsNamespace};
    let directory = scratch();
    let here = directory.path();
    save(here, 1000);
    leave_half_a_save(here);
    let lock = OsNamespace.lock(&here.join("run/.thruway-lock")).expect("free");
    let refused = run(here, ["checkpoint", "recover", "run"]).failed();
    assert!(refused.stderr.contains(&format!("process {}", std::process::id())), "who holds it: {refused:?}");
    drop(lock);
    let human = run(here, ["checkpoint", "recover", "run"]).fine();
    assert_eq!(human.stdout, "removed .step-00000009.thruway-1-2-3\n");
    assert_eq!(run(here, ["checkpoint", "recover", "run"]).fine().stdout, "nothing is left over\n");
    assert_eq!(checkpoints(here).steps().expect("steps"), [1000]);
}

#[test]
fn what_is_not_there_is_an_error_and_makes_nothing() {
    let directory = scratch();
    for command in
        [&["list", "gone"][..], &["show", "gone"], &["verify", "gone"], &["recover", "gone"], &["diff", "gone", "1", "2"]]
    {
        run(directory.path(), [&["checkpoint"], command].concat()).failed();
    }
    assert_eq!(std::fs::read_dir(directory.path()).expect("a directory").count(), 0);
}

#[test]
fn names_that_a_terminal_could_obey_are_escaped() {
    let directory = scratch();
    let nasty = "\u{1b}[31m\u{202e}evil\nname";
    let state = State::at(1);
    let mut groups = vec![Group::new(nasty, state.model.sources())];
    groups[0].tensors[0].spec.name = nasty.to_owned();
    let options = || CheckpointOptions::default().metadata([(nasty.to_owned(), nasty.to_owned())].into());
    let here = checkpoints(directory.path());
    here.save(1, &groups, &Json::default(), options()).expect("saved");
    here.save(2, &[], &Json::default(), options()).expect("saved");
    for command in [&["show", "run", "1"][..], &["verify", "run", "1"], &["diff", "run", "1", "2"], &["list", "run"]] {
        for json in [&[][..], &["--json"]] {
            run(directory.path(), [&["checkpoint"], command, json].concat()).assert_safe_for_terminals();
        }
    }
}
