//! What goes wrong, and how it is said.

mod common;

use std::process::{Command, Stdio};

use common::{TENSORS, command, run, save, scratch};

/// Each command that reads a model, with that model named `x`.
const READERS: [&[&str]; 5] =
    [&["load", "x"], &["copy", "x", "copy"], &["inspect", "x"], &["verify", "x"], &["demo", "--model", "x"]];

fn refused_by_every_reader(directory: &std::path::Path, kind: &str) {
    for arguments in READERS {
        let human = run(directory, arguments).failed();
        assert!(human.stderr.contains('x'), "the file is named: {human:?}");
        assert_eq!(human.stdout, "");
        let json = run(directory, arguments.iter().chain(&["--json"])).failed();
        let object = json.json();
        assert_eq!(object["error"]["kind"], kind, "{arguments:?} {object}");
        assert!(object["error"]["message"].is_string() && object["error"]["context"]["file"].is_string(), "{object}");
        assert!(object["error"].get("hint").is_some());
        assert!(!directory.join("copy").exists());
    }
    let left: Vec<_> = std::fs::read_dir(directory).expect("list").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| name == "x"), "{left:?}");
}

#[test]
fn a_missing_file_is_not_found() {
    refused_by_every_reader(scratch().path(), "not found");
}

#[test]
fn a_directory_without_a_model_is_not_found() {
    let directory = scratch();
    std::fs::create_dir(directory.path().join("x")).expect("create");
    refused_by_every_reader(directory.path(), "not found");
}

#[test]
fn a_named_pipe_is_refused_and_never_waited_for() {
    let directory = scratch();
    let made = Command::new("mkfifo").arg(directory.path().join("x")).status().expect("mkfifo");
    assert!(made.success());
    refused_by_every_reader(directory.path(), "invalid input");
}

#[test]
fn a_limit_on_the_length_of_files_is_an_error_and_leaves_nothing() {
    let directory = scratch();
    save(&directory.path().join("x"), &TENSORS, 1);
    let limited = r#"ulimit -f 8; exec "$0" "$@""#;
    let thruway = env!("CARGO_BIN_EXE_thruway");
    let done = Command::new("sh").args(["-c", limited, thruway, "copy", "x", "copy"]).current_dir(directory.path()).output();
    let done = done.expect("run");
    let told = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{told}");
    assert!(told.contains("File too large"), "{told}");
    let left: Vec<_> = std::fs::read_dir(directory.path()).expect("list").flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["x"]);
}

#[test]
fn a_malformed_file_is_called_so() {
    let directory = scratch();
    std::fs::write(directory.path().join("x"), b"\x08\0\0\0\0\0\0\0{\"a\":1} ").expect("write");
    refused_by_every_reader(directory.path(), "malformed");
}

#[test]
fn a_file_cut_short_is_refused_before_anything_is_loaded() {
    let directory = scratch();
    let path = directory.path().join("x");
    save(&path, &TENSORS, 1);
    let length = std::fs::metadata(&path).expect("length").len();
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(length - 1)).expect("cut");
    let object = run(directory.path(), ["load", "x", "--json"]).failed().json();
    assert!(["malformed", "unexpected end of file"].iter().any(|kind| object["error"]["kind"] == *kind), "{object}");
}

#[test]
fn a_command_line_without_sense_has_status_2_and_says_what_is_wrong() {
    let directory = scratch();
    let senseless: [&[&str]; 9] = [
        &[],
        &["fly"],
        &["load"],
        &["load", "a", "b"],
        &["load", "a", "--path", "plain"],
        &["load", "a", "--device", "tpu"],
        &["copy", "a", "b", "--max-shard-size", "0"],
        &["bench", "--repeat", "0"],
        &["demo", "--size", "1 parsec"],
    ];
    for arguments in senseless {
        let human = run(directory.path(), arguments);
        assert_eq!((human.status, human.stdout.as_str()), (Some(2), ""), "{arguments:?}: {human:?}");
        assert!(!human.stderr.is_empty());
        if !arguments.is_empty() {
            let json = run(directory.path(), arguments.iter().chain(&["--json"]));
            assert_eq!(json.status, Some(2));
            assert_eq!(json.json()["error"]["kind"], "usage");
        }
    }
}

#[test]
fn help_explains_itself_on_standard_output() {
    let directory = scratch();
    for arguments in [&["--help"][..], &["load", "--help"], &["bench", "-h"], &["help", "copy"]] {
        let help = run(directory.path(), arguments).fine();
        assert!(help.stdout.contains("Usage: thruway") && help.stdout.contains("Examples:"), "{help:?}");
        assert_eq!(help.stderr, "");
    }
    let version = run(directory.path(), ["--version"]).fine();
    assert_eq!(version.stdout, format!("thruway {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_reader_that_is_gone_ends_the_command_quietly_with_the_status_of_its_work() {
    let directory = scratch();
    let many: Vec<String> = (0..3000).map(|number| format!("layer.{number}.some.long.name.of.a.tensor.weight")).collect();
    let tensors: Vec<(&str, usize)> = many.iter().map(|name| (name.as_str(), 1)).collect();
    save(&directory.path().join("a"), &tensors, 1);
    save(&directory.path().join("b"), &tensors, 2);
    let cases: [(&[&str], i32); 5] = [
        (&["inspect", "a"], 0),
        (&["inspect", "a", "--json"], 0),
        (&["load", "a"], 0),
        (&["verify", "a", "--against", "b"], 1),
        (&["--help"], 0),
    ];
    for (arguments, status) in cases {
        let (reader, writer) = std::io::pipe().expect("pipe");
        drop(reader);
        let child = command(directory.path()).args(arguments).stdout(writer).stderr(Stdio::piped()).spawn().expect("start");
        let output = child.wait_with_output().expect("wait");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let directory = scratch();
    save(&directory.path().join("a"), &TENSORS, 1);
    let full = std::fs::File::options().write(true).open("/dev/full").expect("open");
    let output = command(directory.path()).args(["inspect", "a"]).stdout(full).output().expect("run");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: cannot write the output"));
}
