//! Which process somebody is, and whether that one still lives.

use serde::{Deserialize, Serialize};

use super::namespace::{read_link_text, read_small_text};

/// A process, so that it can be told from every other one, on whatever machine and whenever.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// The machine's name, for people.
    pub host: String,
    /// Which run of which machine: the kernel's random name for it. Containers of one machine share it.
    pub boot: String,
    /// In which namespace the number counts: the same number may be two processes of two containers.
    pub pid_namespace: String,
    /// The process's number.
    pub pid: u32,
    /// When it started, in the kernel's ticks since the machine did: numbers are given anew.
    pub started: u64,
}

impl Process {
    /// This process.
    pub fn this() -> Self {
        let pid = std::process::id();
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot: boot(),
            pid_namespace: pid_namespace(),
            pid,
            started: started(pid).unwrap_or(0),
        }
    }

    /// Whether it is known to be gone. Of a process of another machine or container nothing is known.
    pub fn is_gone(&self) -> bool {
        let same_world = !self.boot.is_empty()
            && !self.pid_namespace.is_empty()
            && (self.boot.as_str(), self.pid_namespace.as_str()) == (boot().as_str(), pid_namespace().as_str());
        // A zombie holds nothing any more, but its start time is still to be read: it counts as alive until it is reaped.
        same_world && started(self.pid) != Some(self.started)
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} on {}", self.pid, crate::base::error::printable(&self.host))
    }
}

fn boot() -> String {
    read_small_text("/proc/sys/kernel/random/boot_id").map(|text| text.trim().to_owned()).unwrap_or_default()
}

fn pid_namespace() -> String {
    read_link_text("/proc/self/ns/pid").unwrap_or_default()
}

/// The start time of a process that is there; `None` for one that is not.
fn started(pid: u32) -> Option<u64> {
    started_of(&read_small_text(&format!("/proc/{pid}/stat"))?)
}

/// Field 22 of `/proc/<pid>/stat`. The second is the program's name in brackets, which may hold anything.
fn started_of(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_there_until_it_is_gone_and_its_number_given_anew_is_another() {
        let this = Process::this();
        assert!(!this.is_gone() && this.started > 0, "{this:?}");
        assert!(Process { started: this.started + 1, ..this.clone() }.is_gone(), "another one has its number");
        let mut child = std::process::Command::new("true").spawn().expect("a program that ends at once");
        let gone = Process { pid: child.id(), started: started(child.id()).expect("not reaped yet"), ..this };
        child.wait().expect("it ends");
        assert!(gone.is_gone());
    }

    #[test]
    fn nothing_is_known_of_other_machines_and_containers() {
        let far = Process { boot: "another".to_owned(), pid: u32::MAX, ..Process::this() };
        assert!(!far.is_gone());
        let beside = Process { pid_namespace: "pid:[1]".to_owned(), pid: u32::MAX, ..Process::this() };
        assert!(!beside.is_gone());
    }

    #[test]
    fn a_program_may_be_called_anything() {
        let stat = "7 (a) b) 1 2) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1 1";
        assert_eq!(started_of(stat), Some(4242));
    }
}
