//! `thruway doctor` and `thruway config`.

mod common;

use std::time::{Duration, Instant};

use common::{run, run_with_gpu, scratch};

#[test]
fn without_a_gpu_it_says_so_with_status_3_at_once_and_changes_nothing() {
    let directory = scratch();
    std::fs::write(directory.path().join("file"), "x").expect("write");
    let begun = Instant::now();
    let human = run(directory.path(), ["doctor"]);
    assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
    assert_eq!(human.status, Some(3), "{human:?}");
    human.assert_safe_for_terminals();
    let object = run(directory.path(), ["doctor", ".", "--json"]).json();
    assert_eq!(object["health"], "slower");
    assert!(["plain", "cached"].iter().any(|path| object["paths"][0]["expected"] == **path), "{object}");
    for finding in object["findings"].as_array().expect("list") {
        for key in ["id", "verdict", "seen", "source"] {
            assert!(finding[key].as_str().is_some_and(|text| !text.is_empty()), "{key}: {finding}");
        }
    }
    let last = human.stdout.lines().last().expect("a sentence");
    assert_eq!(last, object["conclusion"].as_str().expect("a sentence"));
    assert_eq!(std::fs::read_dir(directory.path()).expect("list").count(), 1);
}

#[test]
fn a_driver_without_a_gpu_is_nothing_broken() {
    let directory = scratch();
    let mut doctor = common::command_with_gpu(directory.path());
    doctor.env("FAKE_CUDA_DEVICES", "0");
    let told = common::run_command(doctor, ["doctor", ".", "--json"]);
    assert_eq!(told.status, Some(3), "{told:?}");
    let object = told.json();
    let cuda = object["findings"].as_array().expect("list").iter().find(|finding| finding["id"] == "driver.cuda");
    assert_eq!(cuda.map(|finding| &finding["verdict"]), Some(&"ok".into()), "{object}");
}

#[test]
fn a_capture_has_the_same_verdict_elsewhere_and_no_file_is_overwritten() {
    let directory = scratch();
    let here = run(directory.path(), ["doctor", ".", "--json", "--capture", "machine.txt"]);
    assert_eq!(here.status, Some(3), "{here:?}");
    let there = run(directory.path(), ["doctor", "--from", "machine.txt", "--json"]);
    assert_eq!(there.json(), here.json());
    let again = run(directory.path(), ["doctor", ".", "--capture", "machine.txt"]).failed();
    assert!(again.stderr.contains("there is something of this name already"), "{again:?}");
    let none = run(directory.path(), ["doctor", "--from", "none"]).failed();
    assert!(none.stderr.contains("none"), "{none:?}");
    std::fs::write(directory.path().join("stranger"), "hello").expect("write");
    run(directory.path(), ["doctor", "--from", "stranger"]).failed();
}

#[test]
fn a_directory_of_another_machines_files_is_diagnosed() {
    let directory = scratch();
    let etc = directory.path().join("tree/etc");
    std::fs::create_dir_all(&etc).expect("create");
    std::fs::write(etc.join("cufile.json"), "{").expect("write");
    let object = run(directory.path(), ["doctor", "--from", "tree", "/data", "--json"]);
    assert_eq!(object.status, Some(1), "a malformed cufile.json is a fault: {object:?}");
    assert!(object.stdout.contains("cufile.config"));
}

#[test]
fn a_place_that_is_not_there_is_a_fault_and_a_gpu_is_named() {
    let directory = scratch();
    let run = run_with_gpu(directory.path(), ["doctor", "nowhere", ".", "--json"]);
    assert_eq!(run.status, Some(1), "{run:?}");
    let object = run.json();
    assert_eq!((&object["health"], &object["paths"][0]["expected"]), (&"broken".into(), &"none".into()));
    assert!(object["paths"][1]["gpu"].as_str().is_some_and(|gpu| gpu.starts_with("cuda:0")), "{object}");
    assert_ne!(object["paths"][1]["expected"], "direct", "this driver is no GPU");
}

#[test]
fn what_is_no_file_where_a_setting_should_be_is_unknown_in_bounded_time() {
    let directory = scratch();
    let fifo = directory.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let huge = directory.path().join("huge");
    std::fs::File::create(&huge).expect("create").set_len(1 << 30).expect("sparse");
    for path in [fifo.as_path(), huge.as_path(), directory.path()] {
        let begun = Instant::now();
        let output = common::command(directory.path())
            .args(["doctor", "/", "--json"])
            .env("CUFILE_ENV_PATH_JSON", path)
            .output()
            .expect("run");
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let findings = object["findings"].as_array().expect("list");
        let config = findings.iter().find(|finding| finding["id"] == "cufile.config").expect("the finding");
        assert_eq!(config["verdict"], "unknown", "{path:?}: {config}");
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    }
}

#[test]
fn what_is_no_capture_is_refused_in_bounded_time() {
    let directory = scratch();
    let fifo = directory.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo").success());
    let huge = directory.path().join("huge");
    std::fs::File::create(&huge).expect("create").set_len(1 << 30).expect("sparse");
    // The kernel's messages are a regular file, and to read it waits for the next one.
    for path in [fifo.as_path(), huge.as_path(), "/dev/zero".as_ref(), "/proc/kmsg".as_ref()] {
        let begun = Instant::now();
        let refused = run(directory.path(), ["doctor".as_ref(), "--from".as_ref(), path.as_os_str()]).failed();
        assert!(refused.stderr.contains("cannot read the capture"), "{refused:?}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

#[test]
fn a_name_that_is_no_text_is_seen_and_told_apart() {
    use std::os::unix::ffi::OsStrExt;
    let directory = scratch();
    let name = std::ffi::OsStr::from_bytes(b"a\xff\n\\xff");
    std::fs::create_dir(directory.path().join(name)).expect("create");
    let arguments = ["doctor".as_ref(), "--json".as_ref(), name, "a\u{fffd}\n\\xff".as_ref()];
    let object = run(directory.path(), arguments).json();
    let path = |at: usize| object["paths"][at]["path"].as_str().expect("text").rsplit('/').next().expect("a name").to_owned();
    let expected = |at: usize| object["paths"][at]["expected"].as_str().expect("text");
    assert_eq!((path(0).as_str(), path(1).as_str()), ("a\\xff\\x0a\\x5cxff", "a\u{fffd}\\x0a\\x5cxff"));
    assert_ne!(expected(0), "none", "{object}");
    assert_eq!(expected(1), "none", "it is not there: {object}");
}

#[test]
fn settings_are_checked_explained_and_written_with_their_comments() {
    let directory = scratch();
    let file = directory.path().join("cufile.json");
    let text = "{\n    // ours\n    \"properties\": {\"allow_compat_mode\": true},\n    \"fs\": {\"block\": {\"nvme\": {\"use_pci_p2pdma\": true}}}\n}\n";
    std::fs::write(&file, text).expect("write");
    let check = run(directory.path(), ["config", "check", "cufile.json", "--json"]);
    assert_eq!((check.status, &check.json()["remarks"][0]["line"]), (Some(1), &4.into()), "{check:?}");
    let refused = run(directory.path(), ["config", "write", "cufile.json"]).failed();
    assert!(refused.stderr.contains("has faults, and would still have them"), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&file).expect("read"), text, "what is not understood stays as it is");

    std::fs::write(&file, text.replace("\"fs\": {\"block\"", "\"fs\": {}, \"block\"").replace("}}}\n}", "}}\n}")).expect("write");
    let arguments = ["config", "write", "cufile.json", "--p2pdma", "--set", "properties.io_batchsize=64"];
    run(directory.path(), arguments).fine();
    let written = std::fs::read_to_string(&file).expect("read");
    assert!(written.contains("// ours") && written.contains("\"allow_compat_mode\": false"), "{written}");
    assert!(std::fs::read_to_string(directory.path().join("cufile.json.old")).expect("kept").contains("true"));
    run(directory.path(), ["config", "check", "cufile.json"]).fine();
    let again = run(directory.path(), arguments).fine();
    assert!(again.stdout.contains("nothing to change"), "{again:?}");
    let explained = run(directory.path(), ["config", "explain", "cufile.json"]).fine();
    assert!(explained.stdout.contains("properties.io_batchsize"), "{explained:?}");
    run(directory.path(), ["config", "write", "new.json"]).fine();
    run(directory.path(), ["config", "check", "new.json"]).fine();
    run(directory.path(), ["config", "write", "new.json", "--set", "properties.colour=1"]).failed();
}

#[test]
fn changes_of_one_file_at_once_are_all_made_and_a_link_that_leads_nowhere_stays() {
    let directory = scratch();
    std::fs::write(directory.path().join("c"), "{}").expect("write");
    let sets = ["properties.io_batchsize=3", "execution.max_io_threads=5", "profile.cufile_stats=1", "logging.level=INFO"];
    std::thread::scope(|scope| {
        for set in sets {
            scope.spawn(|| run(directory.path(), ["config", "write", "c", "--set", set]).fine());
        }
    });
    let text = std::fs::read_to_string(directory.path().join("c")).expect("read");
    for set in sets {
        let (key, value) = set.split_once('=').expect("a pair");
        let name = key.rsplit('.').next().expect("a name");
        assert!(text.contains(&format!("\"{name}\"")) && text.contains(value), "{set}: {text}");
    }
    std::os::unix::fs::symlink("nowhere", directory.path().join("link")).expect("link");
    let refused = run(directory.path(), ["config", "write", "link"]).failed();
    assert!(refused.stderr.contains("leads nowhere"), "{refused:?}");
    assert!(directory.path().join("link").is_symlink() && !directory.path().join("nowhere").exists());
    // A name that is known in several places, and in none of them here.
    std::fs::write(directory.path().join("lost"), r#"{"use_pci_p2pdma": true}"#).expect("write");
    let lost = run(directory.path(), ["config", "check", "lost"]);
    assert_eq!(lost.status, Some(1), "{lost:?}");
    assert!(lost.stdout.contains("properties.use_pci_p2pdma") && lost.stdout.contains("block.nvme.use_pci_p2pdma"), "{lost:?}");
    // What is refused is not in force.
    std::fs::write(directory.path().join("bad"), r#"{"properties": {"io_batchsize": 0}}"#).expect("write");
    let explained = run(directory.path(), ["config", "explain", "bad"]).fine();
    assert!(explained.stdout.contains("0 (refused)"), "{explained:?}");
}

#[test]
fn what_cannot_be_there_is_a_fault_and_what_a_capture_does_not_know_an_error() {
    let directory = scratch();
    std::os::unix::fs::symlink("loop", directory.path().join("loop")).expect("link");
    let long = "x".repeat(5000);
    for path in ["loop", &long] {
        let told = run(directory.path(), ["doctor", path]);
        assert_eq!(told.status, Some(1), "{told:?}");
        assert!(told.stdout.contains("cannot be used"), "{told:?}");
    }
    run(directory.path(), ["doctor", ".", "--capture", "machine.txt"]);
    let strange = run(directory.path(), ["doctor", "--from", "machine.txt", "/nope"]).failed();
    assert!(strange.stderr.contains("was not made for /nope"), "{strange:?}");
    let text = std::fs::read_to_string(directory.path().join("machine.txt")).expect("read");
    let cut: String = text.lines().filter(|line| !line.starts_with("may_read")).map(|line| format!("{line}\n")).collect();
    std::fs::write(directory.path().join("cut.txt"), cut).expect("write");
    let object = run(directory.path(), ["doctor", "--from", "cut.txt", "--json"]).json();
    let access = object["findings"].as_array().expect("list").iter().find(|finding| finding["id"] == "path.access");
    assert_eq!(access.map(|finding| &finding["verdict"]), Some(&"unknown".into()), "{object}");
}

#[test]
fn a_capture_tells_neither_users_nor_keys() {
    let directory = scratch();
    let config = directory.path().join("home/alice/cufile.json");
    std::fs::create_dir_all(config.parent().expect("a parent")).expect("create");
    let text = "{\"properties\": {\"rdma_dc_key\": \"0xdeadbeef\", \"allow_compat_mode\": false}, // alice's\n\
                \"fs\": {\"nfs\": {\"mount_table\": {\"host17.corp:/x\": {\"rdma_dev_addr_list\": [\"10.1.2.3\"]}}}}}\n";
    std::fs::write(&config, text).expect("write");
    let doctor = |arguments: &[&str]| {
        let mut doctor = common::command(directory.path());
        doctor.env("CUFILE_ENV_PATH_JSON", &config).env("VIRTUAL_ENV", "/home/alice/venv").env("container", "alices-box");
        common::run_command(doctor, ["doctor", "home/alice", "--json"].iter().chain(arguments))
    };
    let here = doctor(&["--capture", "machine.txt"]).json();
    let capture = std::fs::read_to_string(directory.path().join("machine.txt")).expect("written");
    for private in ["alice", "deadbeef", "host17", "10.1.2.3"] {
        assert!(!capture.contains(private), "{private}: {capture}");
    }
    let there = run(directory.path(), ["doctor", "--from", "machine.txt", "--json"]).json();
    let verdicts = |object: &serde_json::Value| {
        let findings = object["findings"].as_array().expect("list").iter();
        findings.map(|finding| format!("{} {}", finding["id"], finding["verdict"])).collect::<Vec<String>>()
    };
    assert_eq!((verdicts(&there), &there["health"]), (verdicts(&here), &here["health"]), "the diagnosis stays what it was");
    assert_eq!(there["paths"][0]["expected"], here["paths"][0]["expected"]);
}

#[test]
fn settings_are_those_that_the_library_would_read() {
    let directory = scratch();
    std::fs::write(directory.path().join("k.json"), "[]\n").expect("write");
    let config = |arguments: &[&str]| {
        let mut config = common::command(directory.path());
        config.env("CUFILE_ENV_PATH_JSON", "k.json");
        common::run_command(config, ["config"].iter().chain(arguments))
    };
    let check = config(&["check"]);
    assert_eq!(check.status, Some(1), "{check:?}");
    assert!(check.stdout.starts_with("k.json:1: fault: the file is no object\n"), "{check:?}");
    std::fs::write(directory.path().join("k.json"), "{\n  \"properties\": {\n    \"io_batchsize\": 64\n  }\n}\n").expect("write");
    let explained = config(&["explain", "--json"]).fine().json();
    let keys = explained["keys"].as_array().expect("list");
    let of = |name: &str| keys.iter().find(|key| key["key"] == name).unwrap_or_else(|| panic!("{name}"));
    assert_eq!(of("properties.io_batchsize")["here"], "64");
    assert_eq!(
        (&of("execution.max_io_queue_depth")["template"], &of("execution.max_io_queue_depth")["here"]),
        (&"128".into(), &().into())
    );
    // A word is a text, and what is added looks like the rest.
    config(&["write", "k.json", "--set", "logging.level=DEBUG"]).fine();
    let written = std::fs::read_to_string(directory.path().join("k.json")).expect("read");
    assert!(written.contains("  \"logging\": {\n    \"level\": \"DEBUG\"\n  }"), "{written}");
    assert!(written.contains("    \"allow_compat_mode\": false,\n    \"io_batchsize\": 64"), "{written}");
    let refused = config(&["write", "k.json", "--set", "properties.io_batchsize=few"]).failed();
    assert!(refused.stderr.contains("write it as JSON"), "{refused:?}");
    let refused = config(&["write", "k.json", "--set", "properties.io_batchsize=0"]).failed();
    assert!(refused.stderr.contains("from 1 to 256") && !refused.stderr.contains("would still"), "{refused:?}");
    // As the superuser: the file keeps its owner, and the old one has it too.
    let file = directory.path().join("k.json");
    if std::os::unix::fs::chown(&file, Some(12), Some(34)).is_ok() {
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o640)).expect("mode");
        config(&["write", "k.json", "--set", "logging.level=INFO"]).fine();
        for name in ["k.json", "k.json.old.2"] {
            let found = std::fs::metadata(directory.path().join(name)).expect("there");
            use std::os::unix::fs::MetadataExt;
            assert_eq!((found.uid(), found.gid(), found.mode() & 0o777), (12, 34, 0o640), "{name}");
        }
    }
}

/// The command where no file may grow, as on a full disk.
fn on_a_full_disk(directory: &std::path::Path, arguments: &[&str]) -> common::Run {
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "ulimit -f 0; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_thruway")]);
    shell.current_dir(directory).env("THRUWAY_CUDA_LIB", "/nonexistent/libcuda.so.1");
    common::run_command(shell, arguments)
}

#[test]
fn a_full_disk_takes_no_file_away_and_leaves_no_half_one() {
    let directory = scratch();
    for (name, text) in [("k.json", "{} // new\n"), ("k.json.old", "{} // first\n")] {
        std::fs::write(directory.path().join(name), text).expect("write");
    }
    for arguments in [
        ["config", "write", "k.json"].as_slice(),
        &["doctor", ".", "--capture", "machine.txt"],
        &["topo", ".", "--svg", "machine.svg"],
    ] {
        let full = on_a_full_disk(directory.path(), arguments);
        assert_eq!(full.status, Some(1), "{arguments:?}: {full:?}");
        assert!(full.stderr.contains("cannot write"), "{arguments:?}: {full:?}");
    }
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).expect("still there");
    assert_eq!((read("k.json"), read("k.json.old")), ("{} // new\n".to_owned(), "{} // first\n".to_owned()));
    assert_eq!(std::fs::read_dir(directory.path()).expect("list").count(), 2);
}

#[test]
fn a_file_that_is_no_utf8_or_too_long_is_judged_alike_by_all() {
    let directory = scratch();
    let file = directory.path().join("tree/etc/cufile.json");
    std::fs::create_dir_all(file.parent().expect("a parent")).expect("create");
    let long = [b"{}".as_slice(), &vec![b' '; 1 << 20]].concat();
    for (content, said) in [(b"{\n// caf\xe9\n}\n".as_slice(), "save it as UTF-8"), (&long, "longer than")] {
        std::fs::write(&file, content).expect("write");
        for arguments in [
            ["config", "check", "tree/etc/cufile.json"].as_slice(),
            &["config", "explain", "tree/etc/cufile.json"],
            &["config", "write", "tree/etc/cufile.json"],
            &["doctor", "--from", "tree", "/data"],
        ] {
            let judged = run(directory.path(), arguments);
            assert_eq!(judged.status, Some(1), "{arguments:?}: {judged:?}");
            assert!(format!("{}{}", judged.stdout, judged.stderr).contains(said), "{arguments:?}: {judged:?}");
        }
        assert_eq!(std::fs::read(&file).expect("read"), content);
    }
}

#[test]
fn what_is_written_without_a_name_is_what_the_library_reads() {
    let directory = scratch();
    let mut config = common::command(directory.path());
    config.env("CUFILE_ENV_PATH_JSON", "mine.json");
    common::run_command(config, ["config", "write", "--set", "properties.io_batchsize=64 // few"]).fine();
    let written = std::fs::read_to_string(directory.path().join("mine.json")).expect("written");
    assert!(written.contains("\"io_batchsize\": 64") && !written.contains("few"), "{written}");
}
