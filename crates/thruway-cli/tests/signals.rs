//! What a signal leaves: nothing.

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{command, scratch};

#[test]
fn a_signal_ends_the_command_with_130_and_removes_what_it_made() {
    for signal in ["-INT", "-TERM", "-HUP"] {
        let directory = scratch();
        let entries = || std::fs::read_dir(directory.path()).expect("list").count();
        let mut child = command(directory.path())
            .args(["bench", "--size", "256MB", "--repeat", "100", "--device", "host"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("start");
        let begun = Instant::now();
        while entries() == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never began");
            std::thread::sleep(Duration::from_millis(5));
        }
        let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
        assert_eq!(child.wait().expect("wait").code(), Some(130), "{signal}");
        assert_eq!(entries(), 0, "{signal}");
    }
}
