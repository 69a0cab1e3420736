//! Names of tensors and of files that are anything but plain.

mod common;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use common::{TENSORS, run, save, save_sharded, save_with, scratch};
use thruway::SaveOptions;

#[test]
fn no_name_and_no_metadata_can_give_orders_to_a_terminal() {
    let directory = scratch();
    let names = ["\u{1b}[31mred", "bell\u{7}\0", "line\nbreak\ttab", "c1\u{9b}31m\u{7f}", "rtl\u{202e}txt", "权重 😀", ""];
    let tensors: Vec<(&str, usize)> = names.iter().map(|name| (*name, 10)).collect();
    let metadata = [("\u{1b}]0;title\u{7}".to_owned(), "\u{9b}2J\n".to_owned())].into();
    save_with(&directory.path().join("a"), &tensors, 1, SaveOptions::default().metadata(metadata));
    save(&directory.path().join("b"), &[("\u{1b}[32mgreen", 1)], 1);
    for arguments in
        [&["inspect", "a"][..], &["load", "a", "--digest"], &["verify", "a", "--against", "b"], &["demo", "--model", "a"]]
    {
        run(directory.path(), arguments).assert_safe_for_terminals();
        run(directory.path(), arguments.iter().chain(&["--json"])).assert_safe_for_terminals();
    }
    let object = run(directory.path(), ["inspect", "a", "--json"]).fine().json();
    let mut found: Vec<&str> =
        object["tensors"].as_array().expect("list").iter().filter_map(|item| item["name"].as_str()).collect();
    found.sort_unstable();
    let mut expected = names.to_vec();
    expected.sort_unstable();
    assert_eq!(found, expected, "JSON gives the names themselves");
    let digests = run(directory.path(), ["load", "a", "--digest", "--json"]).fine().json();
    assert_eq!(digests["digests"].as_object().map(serde_json::Map::len), Some(names.len()));
}

#[test]
fn every_path_that_the_filesystem_takes_works_for_every_command() {
    let deep: PathBuf = std::iter::repeat_n("a-long-name-of-a-directory", 40).collect();
    let names: [OsString; 7] = [
        "with spaces".into(),
        "new\nline \u{1b}[31m".into(),
        "emoji 😀.safetensors".into(),
        OsStr::from_bytes(b"not \xff\xfe utf-8").to_owned(),
        "x".repeat(255).into(),
        "-dash.safetensors".into(),
        deep.join("m").into(),
    ];
    for name in names {
        let directory = scratch();
        let path = directory.path().join(&name);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("create");
        save(&path, &TENSORS, 1);
        let lists: [&[&str]; 3] = [&["load", "--json"], &["inspect", "--json"], &["verify", "--json"]];
        for arguments in lists {
            let arguments = arguments.iter().map(|argument| OsStr::new(*argument)).chain([OsStr::new("--"), &name]);
            let done = run(directory.path(), arguments).fine();
            done.assert_safe_for_terminals();
            done.json();
        }
        let human = run(directory.path(), [OsStr::new("inspect"), OsStr::new("--"), &name]).fine();
        human.assert_safe_for_terminals();
        let copied = run(directory.path(), [OsStr::new("copy"), OsStr::new("--"), &name, OsStr::new("-copy")]).fine();
        copied.assert_safe_for_terminals();
        let back = run(directory.path(), [OsStr::new("copy"), OsStr::new("--"), OsStr::new("-copy"), &name]).fine();
        back.assert_safe_for_terminals();
        let against = [OsStr::new("verify"), OsStr::new("--against=-copy"), OsStr::new("--"), &name];
        run(directory.path(), against).fine();
    }
}

#[test]
fn odd_paths_are_safe_to_print_in_errors_too() {
    let directory = scratch();
    for name in [OsStr::from_bytes(b"gone \xff \x1b[31m\n"), OsStr::new("gone\u{202e}\u{7}")] {
        let missing = run(directory.path(), [OsStr::new("load"), name]).failed();
        missing.assert_safe_for_terminals();
        let missing = run(directory.path(), [OsStr::new("load"), OsStr::new("--json"), name]).failed();
        missing.assert_safe_for_terminals();
        missing.json();
        let unknown = run(directory.path(), [OsStr::new("load"), OsStr::new("a"), name]);
        assert_eq!(unknown.status, Some(2));
        unknown.assert_safe_for_terminals();
    }
}

#[test]
fn a_directory_of_shards_may_have_an_odd_name() {
    let directory = scratch();
    let name = OsStr::from_bytes(b"model \xff\n");
    save_sharded(&directory.path().join(name), &TENSORS, 1, 1 << 20);
    run(directory.path(), [OsStr::new("inspect"), name]).fine().assert_safe_for_terminals();
    run(directory.path(), [OsStr::new("load"), name, OsStr::new("--json")]).fine().json();
}
