//! The commands that diagnose, on mounts whose server is dead: those who look at one sleep where no signal reaches them.
//!
//! The mounts are real, of a FUSE server that takes all requests and answers none. Where this user may not mount such, the tests
//! say so and pass.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{command, run, scratch};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A mount that is dead. When it is dropped its server is gone, and all who wait are let go.
struct DeadMount {
    point: PathBuf,
    device: File,
    requests: Receiver<u32>,
}

impl DeadMount {
    /// One below `directory`; `None` if there can be none.
    fn new(directory: &Path, name: &str) -> Option<Self> {
        let point = directory.join(name);
        std::fs::create_dir(&point).expect("create");
        let made = File::options().read(true).write(true).open("/dev/fuse").and_then(|device| {
            let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
            let options = std::ffi::CString::new(options).expect("no NUL");
            mount("dead", &point, "fuse", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str()))?;
            Ok(device)
        });
        match made {
            Ok(device) => {
                let (seen, requests) = channel();
                let server = device.try_clone().expect("a descriptor");
                std::thread::spawn(move || take_requests(server, |operation| seen.send(operation).is_ok()));
                Some(Self { point, device, requests })
            }
            Err(error) => {
                eprintln!("skipped: no FUSE filesystem can be mounted here: {error}");
                None
            }
        }
    }

    fn path(&self, name: &str) -> String {
        self.point.join(name).to_str().expect("text").to_owned()
    }
}

impl Drop for DeadMount {
    fn drop(&mut self) {
        // Ends the connection, and with it all who wait for an answer, the server among them.
        let minor = std::fs::read_dir("/sys/fs/fuse/connections").into_iter().flatten().flatten();
        let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let ours =
            table.lines().find(|line| line.contains(self.point.to_str().expect("text"))).and_then(|line| line.split(' ').nth(2));
        let number = ours.and_then(|device| device.split(':').nth(1)).expect("our mount").to_owned();
        for connection in minor.filter(|entry| *entry.file_name() == *number) {
            drop(std::fs::write(connection.path().join("abort"), "1"));
        }
        unmount(&self.point, UnmountFlags::DETACH).expect("unmounted");
        drop(self.device.flush());
    }
}

/// Answers the first request, which begins the connection, and no other one.
fn take_requests(mut device: File, seen: impl Fn(u32) -> bool) {
    const INIT: u32 = 26;
    let mut request = vec![0; 1 << 21];
    while let Ok(40..) = device.read(&mut request) {
        let operation = u32::from_le_bytes(request[4..8].try_into().expect("four bytes"));
        if operation == INIT {
            let unique: [u8; 8] = request[8..16].try_into().expect("eight bytes");
            let mut answer = [0; 80];
            answer[0..4].copy_from_slice(&80_u32.to_le_bytes());
            answer[8..16].copy_from_slice(&unique);
            // Version 7.31, writes of 4096 bytes.
            for (at, value) in [(16, 7_u32), (20, 31), (36, 4096)] {
                answer[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            device.write_all(&answer).expect("accepted");
        } else if !seen(operation) {
            return;
        }
    }
}

#[test]
fn commands_end_in_time_whatever_of_theirs_lies_on_a_dead_mount() {
    let directory = scratch();
    let Some(dead) = DeadMount::new(directory.path(), "dead") else { return };
    std::os::unix::fs::symlink(&dead.point, directory.path().join("link")).expect("link");
    let in_time = |arguments: &[&str], limit: u64| {
        let begun = Instant::now();
        let run = run(directory.path(), arguments);
        assert!(begun.elapsed() < Duration::from_millis(limit), "{arguments:?}: {:?}", begun.elapsed());
        run
    };
    // Many paths of one mount wait once.
    let paths: Vec<String> = (0..20).map(|number| dead.path(&number.to_string())).collect();
    let mut arguments = vec!["doctor", "--json", "link/a", "link/b"];
    arguments.extend(paths.iter().map(String::as_str));
    arguments.push(".");
    let report = in_time(&arguments, 2000);
    assert_eq!(report.status, Some(1), "{report:?}");
    let report = report.json();
    let findings = report["findings"].as_array().expect("list");
    let silent = |path: &str| {
        let is_it = |finding: &&serde_json::Value| finding["id"] == "path.access" && finding["subject"].as_str() == Some(path);
        findings.iter().find(is_it).is_some_and(|finding| finding["seen"].as_str().is_some_and(|seen| seen.contains("no answer")))
    };
    assert!(paths.iter().all(|path| silent(path)), "{report}");
    assert!(!silent(directory.path().to_str().expect("text")), "what lies beside it is seen: {report}");

    in_time(&["topo", &dead.path("a")], 2000);
    for arguments in [
        &["doctor", "--from", &dead.path("a")][..],
        &["doctor", "--from", dead.point.to_str().expect("text")],
        &["doctor", ".", "--capture", &dead.path("new")],
        &["topo", "--svg", &dead.path("new.svg")],
        &["config", "check", &dead.path("cufile.json")],
        &["config", "write", &dead.path("cufile.json")],
    ] {
        let refused = in_time(arguments, 5000).failed();
        assert!(refused.stderr.contains("not answer"), "{refused:?}");
    }
}

#[test]
fn a_signal_ends_what_waits() {
    let directory = scratch();
    for signal in ["-INT", "-TERM"] {
        let mounts: Vec<DeadMount> =
            (0..12).map_while(|number| DeadMount::new(directory.path(), &format!("{signal}{number}"))).collect();
        let [first, second, ..] = mounts.as_slice() else { return };
        // To wait for all of them would take the doctor four seconds more, and `config` three and a half.
        let doctor: Vec<String> =
            std::iter::once("doctor".to_owned()).chain(mounts.iter().map(|mount| mount.path("a"))).collect();
        let config = ["config", "check", &second.path("a")].map(str::to_owned).to_vec();
        for (mount, arguments) in [(first, doctor), (second, config)] {
            let mut child = command(directory.path());
            let mut child = child.args(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start");
            mount.requests.recv_timeout(Duration::from_secs(60)).expect("it looks");
            let begun = Instant::now();
            let sent = std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
            assert!(sent.success());
            assert_eq!(child.wait().expect("wait").code(), Some(130), "{signal} {arguments:?}");
            assert!(begun.elapsed() < Duration::from_secs(2), "{arguments:?}: {:?}", begun.elapsed());
        }
    }
}

/// What looks at a dead mount outlives the command, and must not hold what the command was started with: a job server's pipe,
/// or the one that a script reads its output from.
#[test]
fn nothing_of_the_caller_is_held_by_what_was_left_behind() {
    let directory = scratch();
    let Some(dead) = DeadMount::new(directory.path(), "dead") else { return };
    let mut caller = std::process::Command::new("sh");
    caller.args(["-c", "exec 9>&1; exec \"$0\" doctor \"$1\" >/dev/null", env!("CARGO_BIN_EXE_thruway"), &dead.path("a")]);
    caller.env("THRUWAY_CUDA_LIB", "/nonexistent/libcuda.so.1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = caller.spawn().expect("start");
    let mut pipe = child.stdout.take().expect("piped");
    assert_eq!(child.wait().expect("wait").code(), Some(1));
    let (ended, end) = channel();
    std::thread::spawn(move || drop(ended.send(pipe.read_to_end(&mut Vec::new()))));
    end.recv_timeout(Duration::from_secs(10)).expect("the pipe ends with the command").expect("read");
}
