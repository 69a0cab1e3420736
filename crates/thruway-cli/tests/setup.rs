//! `thruway setup`: plans for captured machines, and steps carried out below a scratch root, with package managers that write
//! down how they were called. `setups/NAME.txt` is the whole plan, checked by hand against NVIDIA's guides.
//!
//! `THRUWAY_WRITE_EXPECTED=1 cargo test -p thruway-cli --test setup` writes them anew: read the difference.

mod common;
#[path = "setup/system.rs"]
mod system;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Run, run, run_command, scratch};
use system::{INSTALLS, REBUILDS, System, capture, failed_at_a_step, write};

fn plan(name: &str, rest: &[&str]) -> Run {
    let directory = scratch();
    let capture = capture(name);
    run(directory.path(), ["setup", "--from", capture.to_str().expect("UTF-8")].iter().chain(rest))
}

#[test]
fn each_machine_lacks_what_its_plan_says() {
    let mut differing = Vec::new();
    for (name, status) in [
        ("bare-ubuntu", 0),
        ("bare-debian", 0),
        ("bare-rhel", 0),
        ("bare-sles", 0),
        ("module-missing", 0),
        ("compatibility-allowed", 0),
        ("config-contradictory", 0),
        ("container-bare", 0),
        ("ext4-default", 0),
        ("nfs-rdma", 0),
        ("iommu-translates", 0),
        ("raid0-p2pdma", 3),
        ("closed-driver", 3),
        ("geforce", 3),
        ("no-gpu", 3),
        ("wsl", 3),
    ] {
        let plan = plan(name, &[]);
        assert_eq!(plan.status, Some(status), "{name}: {plan:?}");
        plan.assert_safe_for_terminals();
        let expected = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/setups/{name}.txt"));
        if std::env::var_os("THRUWAY_WRITE_EXPECTED").is_some() {
            std::fs::write(&expected, &plan.stdout).expect("write");
        } else if std::fs::read_to_string(&expected).ok().as_deref() != Some(&plan.stdout) {
            differing.push(format!("{name}:\n{}", plan.stdout));
        }
    }
    assert!(differing.is_empty(), "not planned as expected:\n{}", differing.join("\n"));
}

#[test]
fn a_plan_in_json_has_what_is_to_be_run_and_written() {
    let object = plan("bare-rhel", &["--json"]).json();
    let steps = object["plan"]["steps"].as_array().expect("list");
    assert_eq!(steps[0]["action"]["run"][0], "dnf", "{object}");
    let [.., config, last] = steps.as_slice() else { panic!("{object}") };
    assert_eq!((&config["action"]["set"]["path"], &object["applied"]), (&"/etc/cufile.json".into(), &false.into()));
    assert_eq!(last["action"]["run"], serde_json::json!(["modprobe", "nvidia-fs"]), "what has an effect at once comes last");
    plan("bare-rhel", &["--apply"]).assert_usage();
    let nothing_here = run(scratch().path(), ["setup", "--json"]);
    assert_eq!(nothing_here.status, Some(3), "no GPU: {nothing_here:?}");
}

#[test]
fn every_distribution_is_set_up_by_its_own_tools_and_the_second_time_nothing_changes() {
    let library = "libcufile-13-1";
    for (name, release, manager, calls) in [
        (
            "bare-ubuntu",
            "6.8.0-45-generic",
            "apt-get",
            vec!["apt-get update".to_owned(), format!("apt-get install -y {library}"), "update-initramfs -u -k all".to_owned()],
        ),
        (
            "bare-debian",
            "6.1.0-28-amd64",
            "apt-get",
            vec![
                "apt-get update".to_owned(),
                format!("apt-get install -y {library} linux-headers-6.1.0-28-amd64 nvidia-fs-dkms"),
            ],
        ),
        (
            "bare-rhel",
            "5.14.0-284.30.1.el9_2.x86_64",
            "dnf",
            vec![format!("dnf install -y {library} kernel-devel-5.14.0-284.30.1.el9_2.x86_64 nvidia-fs-dkms")],
        ),
        (
            "bare-sles",
            "6.4.0-150600.23.25-default",
            "zypper",
            vec![format!("zypper --non-interactive install {library}"), "dracut --force --regenerate-all".to_owned()],
        ),
    ] {
        let system = System::new(name);
        system.stub(manager, &INSTALLS.replace("RELEASE", release));
        if name == "bare-rhel" {
            let before = system.files();
            let refused = system.setup(&["/data", "--apply", "--yes"]).failed();
            assert!(refused.stderr.contains("enable EPEL") && refused.stdout.contains("add NVIDIA's package"), "{refused:?}");
            assert_eq!((system.files(), system.calls()), (before, vec![]));
            write(&system.root().join("etc/yum.repos.d/epel.repo"), "");
            write(&system.root().join("etc/yum.repos.d/cuda-rhel9.repo"), "");
        }
        let before = system.files();
        system.setup(&["/data"]).fine();
        assert_eq!((system.files(), system.calls()), (before, vec![]), "{name}: without --apply nothing is done");

        let done = system.setup(&["/data", "--apply", "--yes"]).fine();
        assert_eq!(system.calls(), calls, "{name}: {done:?}");
        let config = system.read("etc/cufile.json");
        assert!(config.contains("\"allow_compat_mode\": false"), "{name}: {config}");
        if calls.len() > 1 && name != "bare-debian" {
            assert!(system.read("etc/modprobe.d/nvidia-p2pdma.conf").contains("RMForceStaticBar1=1;"), "{name}");
            assert!(config.contains("\"use_pci_p2pdma\": true"), "{name}: {config}");
        } else {
            assert_eq!(system.read("etc/modules-load.d/nvidia-fs.conf"), "nvidia-fs\n", "{name}");
            assert!(!config.contains("use_pci_p2pdma"), "{name}: {config}");
        }
        let after = system.files();
        let again = system.setup(&["/data", "--apply", "--yes", "--json"]);
        assert_eq!((system.files(), system.calls()), (after, vec![]), "{name}: {again:?}");
        let object = again.json();
        assert_eq!((&object["applied"], &object["plan"]["steps"]), (&false.into(), &serde_json::json!([])), "{name}");
        assert!(object["after"]["conclusion"].as_str().is_some_and(|text| text.contains("/data")), "{object}");
    }
}

#[test]
fn an_edited_cufile_json_keeps_its_comments_and_the_old_one_stays_beside_it() {
    let system = System::new("module-missing");
    let old = "{\n    // ours, do not touch\n    \"properties\": {\n        \"io_batchsize\": 64, /* few */\n        \
               \"force_compat_mode\": true\n    },\n    \"execution\": {\"max_io_threads\": 12}\n}\n";
    let file = system.root().join("etc/cufile.json");
    write(&file, old);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("mode");
    let shown = system.setup(&["/data", "--json"]).json();
    let steps = shown["plan"]["steps"].as_array().expect("steps");
    let typed = steps.last().expect("the last")["command"].as_str().expect("text").to_owned();
    system.setup(&["/data", "--apply", "--yes"]).fine();
    let new = system.read("etc/cufile.json");
    for kept in ["// ours, do not touch", "/* few */", "\"io_batchsize\": 64", "\"max_io_threads\": 12"] {
        assert!(new.contains(kept), "{new}");
    }
    assert!(new.contains("\"force_compat_mode\": false") && new.contains("\"allow_compat_mode\": false"), "{new}");
    assert_eq!(system.read("etc/cufile.json.old"), old);
    assert_eq!(system.files()[&file].1 & 0o777, 0o640, "a file that replaces another has its permissions");

    // What a person would type comes to the same.
    let by_hand = scratch();
    write(&by_hand.path().join("cufile.json"), old);
    let words: Vec<&str> = typed.split(' ').skip_while(|word| *word != "config").collect();
    assert!(words[2].ends_with("root/etc/cufile.json"), "{typed}");
    run(by_hand.path(), ["config", "write", "cufile.json"].iter().chain(&words[3..])).fine();
    assert_eq!(std::fs::read_to_string(by_hand.path().join("cufile.json")).expect("read"), new, "{typed}");
}

#[test]
fn a_failure_at_any_step_leaves_every_file_as_it_was() {
    let fresh = || {
        let system = System::new("bare-ubuntu");
        write(&system.root().join("etc/cufile.json"), "{\n    // the old one\n}\n");
        write(&system.root().join("etc/cufile.json.old"), "{} // older still\n");
        write(&system.root().join("etc/modprobe.d/nvidia-p2pdma.conf"), "# begun by hand\n");
        system.rebuild();
        assert_eq!(system.read("boot/initrd.img"), "# begun by hand\n");
        system
    };
    // The manager fails at once, at its second call, or all is installed and the last command fails.
    for (program, body, step) in [
        ("apt-get", "exit 100", "1 of 6"),
        ("apt-get", "[ \"$1\" = update ] || exit 100", "2 of 6"),
        // Once it fails after it has done half of its work, then it works again.
        (
            "update-initramfs",
            "echo half >\"$ROOT/boot/initrd.img\"; [ -e \"$ROOT/../was\" ] || { touch \"$ROOT/../was\"; exit 3; }\nREBUILDS",
            "6 of 6",
        ),
    ] {
        let body = &body.replace("REBUILDS", REBUILDS);
        let system = fresh();
        let before = system.files();
        system.stub(program, body);
        let failed = failed_at_a_step(system.setup(&["/data", "--apply", "--yes"]));
        assert!(failed.stderr.contains(program) && failed.stderr.contains(step), "{failed:?}");
        assert_eq!(system.files(), before, "{program} {body}: {failed:?}");
        assert!(!failed.stdout.contains("output of"), "what commands say is not the plan: {failed:?}");
    }
    // The very last step cannot be done: a directory stands where the old settings are to be kept.
    let system = fresh();
    std::fs::remove_file(system.root().join("etc/cufile.json.old")).expect("remove");
    std::fs::create_dir(system.root().join("etc/cufile.json.old")).expect("create");
    let before = system.files();
    let failed = system.setup(&["/data", "--apply", "--yes", "--json"]);
    assert_eq!(failed.status, Some(1), "{failed:?}");
    assert_eq!(system.files(), before, "{failed:?}");
    let lines: Vec<&str> = failed.stdout.lines().collect();
    assert_eq!(lines.len(), 1, "one object, also of a failure: {failed:?}");
    assert!(lines[0].contains("\"restored\""), "{failed:?}");
    // With the cause gone it goes through.
    std::fs::remove_dir(system.root().join("etc/cufile.json.old")).expect("remove");
    system.setup(&["/data", "--apply", "--yes"]).fine();
    assert!(system.read("etc/modprobe.d/nvidia-p2pdma.conf.old").contains("begun by hand"));
    assert!(system.read("boot/initrd.img").contains("RMForceStaticBar1=1;"), "what was written is in the RAM disk");
}

#[test]
fn what_cannot_be_set_up_is_refused_before_anything_is_done() {
    let system = System::new("bare-ubuntu");
    let nobody = system.setup(&["/data", "--apply"]).failed();
    assert!(nobody.stderr.contains("nobody to ask") && nobody.stderr.contains("--yes"), "{nobody:?}");
    system.setup(&["/data", "--yes"]).assert_usage();

    write(&system.root().join("etc/os-release"), "ID=plan9\nPRETTY_NAME=\"Plan 9\"\n");
    let unknown = system.setup(&["/data", "--apply", "--yes"]).failed();
    assert!(unknown.stderr.contains("plan9") && unknown.stderr.contains("Ubuntu, Debian"), "{unknown:?}");
    std::fs::remove_file(system.root().join("etc/os-release")).expect("remove");
    system.setup(&["/data"]).failed();

    let container = System::new("container-bare");
    let refused = container.setup(&["/data", "--apply", "--yes"]);
    assert_eq!(refused.status, Some(1), "{refused:?}");
    assert!(refused.stdout.contains("on the host: ") && refused.stderr.contains("this is a container"), "{refused:?}");

    let outside = scratch();
    write(&outside.path().join("cufile.json"), "{} // somebody else's\n");
    let linked = System::new("module-missing");
    std::fs::remove_file(linked.root().join("etc/cufile.json")).expect("remove");
    std::os::unix::fs::symlink(outside.path().join("cufile.json"), linked.root().join("etc/cufile.json")).expect("link");
    let before = linked.files();
    let refused = failed_at_a_step(linked.setup(&["/data", "--apply", "--yes"]));
    assert!(refused.stderr.contains("leads out of") && refused.stderr.contains("etc/cufile.json"), "{refused:?}");
    assert_eq!((linked.files(), linked.calls()), (before, vec![]), "found before anything is done");
    assert_eq!(std::fs::read_to_string(outside.path().join("cufile.json")).expect("read"), "{} // somebody else's\n");
    for (system, name) in [(&system, "bare-ubuntu"), (&container, "container-bare")] {
        assert_eq!(system.calls(), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn the_first_original_stays_and_a_link_is_followed() {
    let system = System::new("module-missing");
    let file = system.root().join("etc/cufile.json");
    std::fs::remove_file(&file).expect("remove");
    write(&system.root().join("etc/gds/real.json"), "{} // first\n");
    std::os::unix::fs::symlink("gds/real.json", &file).expect("link");
    system.setup(&["/data", "--apply", "--yes"]).fine();
    assert_eq!(system.read("etc/gds/real.json.old"), "{} // first\n");
    assert!(std::fs::symlink_metadata(&file).expect("metadata").is_symlink(), "the link is still one");
    for text in ["{} // second\n", "{} // third\n", "{} // second\n"] {
        write(&system.root().join("etc/gds/real.json"), text);
        system.setup(&["/data", "--apply", "--yes"]).fine();
    }
    assert_eq!(system.read("etc/gds/real.json.old"), "{} // first\n");
    assert_eq!(system.read("etc/gds/real.json.old.2"), "{} // second\n");
    assert_eq!(system.read("etc/gds/real.json.old.3"), "{} // third\n");
    assert!(!system.root().join("etc/gds/real.json.old.4").exists(), "the same text is kept once");
}

#[test]
fn what_is_left_to_a_person_shows_in_the_status() {
    // The steps are done, and the IOMMU still shuts the route.
    let system = System::new("iommu-translates");
    let done = system.setup(&["/data", "--apply", "--yes"]);
    assert_eq!(done.status, Some(3), "{done:?}");
    let last = done.stdout.lines().last().expect("a line");
    assert!(last.contains("by hand") && last.contains("start that system"), "{last}");
    // No route at all: as without --apply.
    let none = System::new("no-gpu");
    assert_eq!(none.setup(&["/data"]).status, Some(3));
    assert_eq!(none.setup(&["/data", "--apply", "--yes"]).status, Some(3));
    let file = run(none.root().as_path(), ["setup", "--root", "facts"]).failed();
    assert!(file.stderr.contains("must be a directory"), "{file:?}");
}

#[test]
fn limits_that_a_file_sets_already_stay() {
    let system = System::new("nfs-rdma");
    let facts = system.read("facts").replace("memlock unlimited", "memlock 65536");
    write(&system.root().join("facts"), &facts);
    let limits = system.root().join("etc/security/limits.d/90-thruway.conf");
    let old = "* soft nofile 1048576\n* hard nofile 1048576\n";
    write(&limits, old);
    let status = system.setup(&["/data", "--apply", "--yes"]).status;
    assert!(matches!(status, Some(0 | 3)));
    assert_eq!(
        std::fs::read_to_string(&limits).expect("read"),
        format!("{old}* soft memlock unlimited\n* hard memlock unlimited\n")
    );
}

#[test]
fn other_places_that_set_the_driver_are_named_and_apptainer_is_a_container() {
    let system = System::new("bare-ubuntu");
    let setting = "NVreg_RegistryDwords=\"ForceP2P=0;\"";
    write(&system.root().join("usr/lib/modprobe.d/vendor.conf"), &format!("options nvidia {setting}\n"));
    write(&system.root().join("run/modprobe.d/image.conf"), &format!("options nvidia-current {setting}\n"));
    write(&system.root().join("proc/cmdline"), &format!("quiet nvidia.{setting}\n"));
    // One with the same name as one that comes before it does not count.
    write(&system.root().join("lib/modprobe.d/vendor.conf"), &format!("options nvidia {setting}\n"));
    let plan = system.setup(&["/data"]).fine();
    for place in
        ["out of /usr/lib/modprobe.d/vendor.conf", "out of /run/modprobe.d/image.conf", "out of the kernel's command line"]
    {
        assert!(plan.stdout.contains(place), "{place}: {plan:?}");
    }
    assert!(!plan.stdout.contains("out of /lib/modprobe.d"), "{plan:?}");

    std::fs::create_dir(system.root().join(".singularity.d")).expect("create");
    let inside = system.setup(&["/data", "--apply", "--yes"]).failed();
    assert!(inside.stderr.contains("this is a container"), "{inside:?}");
    assert_eq!(system.calls(), Vec::<String>::new());
}

#[test]
fn links_are_followed_neither_where_the_old_is_kept_nor_out_of_the_root() {
    let outside = scratch();
    let victim = outside.path().join("victim");
    let system = System::new("module-missing");
    write(&system.root().join("etc/cufile.json"), "{} // ours\n");
    for (text, name) in [(Some("the victim's\n"), "etc/cufile.json.old"), (None, "etc/cufile.json.old.2")] {
        let target = if text.is_some() { victim.clone() } else { outside.path().join("nothing") };
        text.into_iter().for_each(|text| write(&target, text));
        std::os::unix::fs::symlink(target, system.root().join(name)).expect("link");
    }
    system.setup(&["/data", "--apply", "--yes"]).fine();
    assert_eq!(std::fs::read_to_string(&victim).expect("read"), "the victim's\n");
    assert_eq!(std::fs::read_dir(outside.path()).expect("list").count(), 1, "nothing was made outside");
    assert_eq!(system.read("etc/cufile.json.old.3"), "{} // ours\n");

    // A directory on the way, of a file that comes last but one: the package manager is not even called.
    let system = System::new("bare-ubuntu");
    std::fs::create_dir_all(system.root().join("etc")).expect("create");
    let link = system.root().join("etc/modprobe.d");
    if link.exists() {
        std::fs::remove_dir_all(&link).expect("remove");
    }
    std::os::unix::fs::symlink(outside.path(), &link).expect("link");
    let before = system.files();
    let refused = failed_at_a_step(system.setup(&["/data", "--apply", "--yes"]));
    assert!(refused.stderr.contains("etc/modprobe.d") && refused.stderr.contains("a link: it leads out of"), "{refused:?}");
    assert_eq!((system.files(), system.calls()), (before, vec![]));
    assert_eq!(std::fs::read_dir(outside.path()).expect("list").count(), 1);
}

#[test]
fn signals_let_a_step_come_to_its_end_and_all_is_undone() {
    // Two that no process can take for one, while packages are installed.
    let system = System::new("bare-ubuntu");
    write(&system.root().join("etc/cufile.json"), "{} // ours\n");
    let before = system.files();
    let signals = "kill -TERM $PPID; kill -INT $PPID";
    system.stub("apt-get", &format!("[ \"$1\" = update ] || {{ {signals}; }}"));
    let stopped = system.setup(&["/data", "--apply", "--yes"]);
    assert_eq!(stopped.status, Some(130), "{stopped:?}");
    assert!(stopped.stderr.contains("stopped by a signal") && stopped.stderr.contains("what packages were installed stays"));
    assert_eq!(system.files(), before, "{stopped:?}");
    assert_eq!(system.calls().len(), 2, "no step was begun after it: {stopped:?}");

    // While what a failed step did is undone.
    let fails = format!("[ -e \"$ROOT/../was\" ] || {{ touch \"$ROOT/../was\"; exit 3; }}\n{signals}\n{REBUILDS}");
    system.stub("apt-get", "");
    system.stub("update-initramfs", &fails);
    let undone = system.setup(&["/data", "--apply", "--yes"]);
    assert_eq!(undone.status, Some(130), "{undone:?}");
    assert_eq!(system.files(), before, "{undone:?}");
    // With the last step: there is nothing to be undone any more.
    system.stub("update-initramfs", &format!("{signals}\n{REBUILDS}"));
    let done = system.setup(&["/data", "--apply", "--yes"]).fine();
    assert!(done.stderr.contains("nothing was undone"), "{done:?}");
    assert!(system.read("boot/initrd.img").contains("RMForceStaticBar1=1;"));
}

#[test]
fn an_interrupt_at_the_question_ends_it_at_once() {
    let system = System::new("bare-ubuntu");
    let before = system.files();
    // Somebody at a terminal: util-linux' script makes one. 3 is what Ctrl-C types.
    let mut script = std::process::Command::new("script");
    let line = format!("'{}' setup --root root /data --apply", env!("CARGO_BIN_EXE_thruway"));
    script
        .args(["-qefc", &line, "typescript"])
        .current_dir(system.directory.path())
        .env("PATH", format!("{}:{}", system.directory.path().join("bin").display(), std::env::var("PATH").expect("PATH")));
    let spawned = script.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let Ok(mut child) = spawned else {
        assert!(std::env::var_os("THRUWAY_REQUIRE_TEST_INPUTS").is_none(), "script(1) is needed");
        return eprintln!("skipped: there is no script(1)");
    };
    let shown = || std::fs::read(system.directory.path().join("typescript")).unwrap_or_default();
    let shows = |what: &str| String::from_utf8_lossy(&shown()).contains(what);
    until(|| shows("do it? [y/N]"));
    let mut terminal = child.stdin.take().expect("piped");
    std::io::Write::write_all(&mut terminal, &[3]).expect("typed");
    until(|| child.try_wait().expect("wait").is_some());
    assert_eq!(child.wait().expect("ended").code(), Some(130), "{}", String::from_utf8_lossy(&shown()));
    assert!(shows("stopped by a signal"), "{}", String::from_utf8_lossy(&shown()));
    assert_eq!((system.files(), system.calls()), (before, vec![]));
}

/// Waits until something is so.
fn until(mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never came to that");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn of_two_at_once_the_second_is_told_who_is_at_it() {
    let system = System::new("bare-debian");
    let go = system.directory.path().join("go");
    assert!(std::process::Command::new("mkfifo").arg(&go).status().expect("mkfifo").success());
    system.stub("apt-get", &format!("[ \"$1\" = update ] && cat '{}'; true", go.display()));
    write(&system.root().join("etc/apt/sources.list.d/cuda.list"), "");
    let mut first = system
        .command()
        .args(["setup", "--root", "root", "/data", "--apply", "--yes"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("start");
    let calls = system.directory.path().join("calls");
    until(|| std::fs::read_to_string(&calls).is_ok_and(|calls| calls.contains("update")));
    let before = system.files();
    let second = failed_at_a_step(system.setup(&["/data", "--apply", "--yes"]));
    assert!(second.stderr.contains("another process is setting this system up"), "{second:?}");
    assert!(second.stderr.contains(&format!("process {}", first.id())), "{}: {second:?}", first.id());
    assert_eq!(system.files(), before);
    std::fs::write(&go, "").expect("go on");
    assert_eq!(first.wait().expect("ended").code(), Some(0));
    assert_eq!(system.calls().len(), 2, "the second began nothing");
}

#[test]
fn what_a_package_brings_along_is_edited_and_not_written_over() {
    let system = System::new("bare-debian");
    write(&system.root().join("etc/apt/sources.list.d/cuda.list"), "");
    let brought = "{\n    // of the package\n    \"properties\": {\n        \"allow_compat_mode\": true\n    },\n    \
                   \"execution\": {\n        \"max_io_threads\": 8\n    }\n}";
    let body = format!(
        "{}\n[ \"$1\" = update ] || cat >\"$ROOT/etc/cufile.json\" <<'END'\n{brought}\nEND",
        INSTALLS.replace("RELEASE", "6.1.0-28-amd64")
    );
    system.stub("apt-get", &body);
    system.setup(&["/data", "--apply", "--yes"]).fine();
    let new = system.read("etc/cufile.json");
    assert!(
        new.contains("// of the package")
            && new.contains("\"max_io_threads\": 8")
            && new.contains("\"allow_compat_mode\": false"),
        "{new}"
    );
    assert_eq!(system.read("etc/cufile.json.old"), format!("{brought}\n"));
}

#[test]
fn a_file_that_each_program_looks_for_elsewhere_is_left_to_a_person_and_the_running_root_is_no_other_system() {
    let system = System::new("module-missing");
    write(&system.root().join("facts"), &format!("{}@ env CUFILE_ENV_PATH_JSON\nmine.json\n", system.read("facts")));
    let plan = system.setup(&["/data"]);
    assert!(plan.stdout.contains("give CUFILE_ENV_PATH_JSON a whole path: mine.json"), "{plan:?}");
    assert!(!plan.stdout.contains("config write"), "{plan:?}");

    let mut setup = System::new("module-missing");
    let mut with_env = setup.command();
    with_env.env("CUFILE_ENV_PATH_JSON", "/tmp/of-this-system.json");
    let plan = run_command(with_env, ["setup", "--root", "root", "/data"]);
    assert!(plan.stderr.contains("CUFILE_ENV_PATH_JSON is left out") && plan.stdout.contains("root/etc/cufile.json"), "{plan:?}");
    setup = System::new("no-gpu");
    let here = |arguments: &[&str]| run(setup.root().as_path(), ["setup", "--json", "."].iter().chain(arguments));
    assert_eq!(here(&["--root", "/"]).stdout, here(&[]).stdout);
}
