//! A system to be set up: below a scratch root, with programs that write down how they were called.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::common::{Run, command, run_command, scratch};

pub(super) fn capture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../thruway/tests/machines/{name}.facts"))
}

/// A system below a scratch root: a captured machine's facts, its files of `/etc` and `/lib` real.
pub(super) struct System {
    pub(super) directory: tempfile::TempDir,
}

impl System {
    /// Files below `/etc` and `/lib` become real ones, which the steps can change; the rest stays in the capture.
    pub(super) fn new(name: &str) -> Self {
        let directory = scratch();
        let root = directory.path().join("root");
        for directory in ["etc", "usr"] {
            std::fs::create_dir_all(root.join(directory)).expect("create");
        }
        std::fs::create_dir(directory.path().join("bin")).expect("create");
        let text = std::fs::read_to_string(capture(name)).expect("capture");
        let mut rest = String::new();
        for fact in text.split("\n@ ") {
            let (head, body) = fact.split_once('\n').unwrap_or((fact, ""));
            match head.split_once(' ') {
                Some(("file", path)) if path.starts_with("/etc/") => write(&root.join(&path[1..]), &format!("{body}\n")),
                Some(("list", path)) if path.starts_with("/etc/") || path.starts_with("/lib/") => {
                    for name in body.lines() {
                        write(&root.join(&path[1..]).join(name), "");
                    }
                }
                // What is not listed is looked for below the root.
                Some(("rest", _)) => {}
                Some(("file" | "bytes", path)) if path.starts_with("/sys/") => {
                    // Where it would be, so that what is not there beside it is known not to be.
                    let directory = Path::new(&path[1..]).parent().expect("a directory");
                    std::fs::create_dir_all(root.join(directory)).expect("create");
                    rest.push_str(&format!("@ {fact}\n"));
                }
                _ => rest.push_str(&format!("{}{fact}\n", if rest.is_empty() { "" } else { "@ " })),
            }
        }
        write(&root.join("facts"), &rest);
        let system = Self { directory };
        // Below a root, commands are run by way of chroot.
        system.stub("chroot", "shift\nexec \"$@\"");
        for program in ["apt-get", "dnf", "zypper"] {
            system.stub(program, "");
        }
        for program in ["update-initramfs", "dracut"] {
            system.stub(program, REBUILDS);
        }
        write(&root.join("boot/initrd.img"), "");
        system.rebuild();
        system
    }

    /// Rebuilds the RAM disk from the files as they are.
    pub(super) fn rebuild(&self) {
        let program = self.directory.path().join("bin/update-initramfs");
        assert!(std::process::Command::new(program).stdout(std::process::Stdio::null()).status().expect("run").success());
        drop(self.calls());
    }

    pub(super) fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    /// A program that writes down how it was called, and then does `body`; `$ROOT` is the root.
    pub(super) fn stub(&self, name: &str, body: &str) {
        let file = self.directory.path().join("bin").join(name);
        let calls = self.directory.path().join("calls");
        let record = if name == "chroot" { String::new() } else { format!("echo \"{name} $*\" >>'{}'", calls.display()) };
        write(&file, &format!("#!/bin/sh\nROOT='{}'\n{record}\necho output of {name}\n{body}\n", self.root().display()));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("executable");
    }

    /// The calls since the last time.
    pub(super) fn calls(&self) -> Vec<String> {
        let file = self.directory.path().join("calls");
        let calls = std::fs::read_to_string(&file).unwrap_or_default();
        std::fs::write(&file, "").expect("write");
        calls.lines().map(str::to_owned).collect()
    }

    pub(super) fn setup(&self, arguments: &[&str]) -> Run {
        run_command(self.command(), ["setup", "--root", "root"].iter().chain(arguments))
    }

    /// The command, which finds the stubs.
    pub(super) fn command(&self) -> std::process::Command {
        let mut command = command(self.directory.path());
        let path = std::env::var("PATH").expect("PATH");
        command.env("PATH", format!("{}:{path}", self.directory.path().join("bin").display()));
        command
    }

    /// Every file below the root, with its content and mode.
    pub(super) fn files(&self) -> BTreeMap<PathBuf, (String, u32)> {
        fn walk(directory: &Path, files: &mut BTreeMap<PathBuf, (String, u32)>) {
            for entry in std::fs::read_dir(directory).expect("list") {
                let path = entry.expect("entry").path();
                let metadata = std::fs::symlink_metadata(&path).expect("metadata");
                if metadata.is_dir() {
                    files.insert(path.clone(), (String::new(), 0));
                    walk(&path, files);
                } else {
                    let content = std::fs::read_to_string(&path).unwrap_or_default();
                    files.insert(path, (content, metadata.permissions().mode()));
                }
            }
        }
        let mut files = BTreeMap::new();
        walk(&self.root(), &mut files);
        files
    }

    pub(super) fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }
}

/// The run, which must have failed at a step, with one line of error and a hint behind what the steps said.
pub(super) fn failed_at_a_step(run: Run) -> Run {
    assert_eq!(run.status, Some(1), "{run:?}");
    let lines: Vec<&str> = run.stderr.lines().collect();
    assert!(matches!(lines[..], [.., error, hint] if error.starts_with("error: ") && hint.starts_with("hint: ")), "{run:?}");
    run
}

pub(super) fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("create");
    std::fs::write(path, text).expect("write");
}

/// A RAM disk that holds the settings of the modules.
pub(super) const REBUILDS: &str = "mkdir -p \"$ROOT/etc/modprobe.d\"\n\
                        cat \"$ROOT\"/etc/modprobe.d/*.conf >\"$ROOT/boot/initrd.img\" 2>/dev/null || true";

/// A package manager that puts the files in place by which the packages are known.
pub(super) const INSTALLS: &str = "mkdir -p \"$ROOT/usr/lib64\" \"$ROOT/lib/modules/RELEASE/updates/dkms\"\n\
                        touch \"$ROOT/usr/lib64/libcufile.so.1.16.0\" \"$ROOT/lib/modules/RELEASE/updates/dkms/nvidia-fs.ko\"\n\
                        ln -sf libcufile.so.1.16.0 \"$ROOT/usr/lib64/libcufile.so.0\"";
