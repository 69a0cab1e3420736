//! Looking at a machine without being held up by it.
//!
//! A named pipe where a file should be, a drive that has gone, a network filesystem whose server does not answer: to open,
//! list or examine such a thing may wait for ever. Each look is therefore done by somebody else and given up after a time
//! ([`Prober`]); reads are limited in size, and what is no regular file is not opened. Nothing is ever changed.
//!
//! Who waits for a dead server often cannot be killed, and a process with such a thread cannot end. So a program says how it
//! is started as a helper ([`look_through`]), whose main function then is [`serve`]. The helper does all looks; if one takes too
//! long, it is killed, or left behind if it cannot be, and a new one does what comes next.
//!
//! ```text
//! caller  ─ look ─►  thread of this process  ─ one line of JSON ─►  helper
//!         ◄ answer ─                         ◄ the same, and bytes ─
//! ```
//! A program that names no helper, or cannot start it, does the looks on that thread: all is as bounded, but for its own end.

mod helper;
mod look;
mod text;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::process::Child;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use helper::Helper;

pub use helper::{look_through, serve};
pub use text::{bytes_of, octal, text_of};

/// How long a helper may take to start. It may be an interpreter, from a cold disk.
const START: Duration = Duration::from_secs(10);
/// So much waiting in vain is borne in all. After it a look has a twentieth of its time: a machine on which hundreds of files
/// do not answer is diagnosed in bounded time.
const WAITS_MAX: Duration = Duration::from_secs(5);
/// As many links as the kernel follows in one path.
const LINKS_MAX: usize = 40;
const MOUNTS: &str = "/proc/self/mountinfo";
const MOUNTS_BYTES_MAX: usize = 4 << 20;

/// How it is said that there is nobody to look, for want of processes or memory.
pub const NO_THREAD: &str = "no thread could be started";

/// Why something could not be seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unseen {
    /// It is not there.
    Absent,
    /// The system does not let this user see it.
    Denied,
    /// No answer came within this time: a dead drive or server, as far as one can tell.
    Silent(Duration),
    /// It is there, or may be, and this is what was in the way.
    Failed(String),
}

/// One look. Paths are written as [`text_of`] does.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Look {
    Read {
        path: String,
        bytes_max: usize,
    },
    List {
        path: String,
        names_max: usize,
    },
    Resolve {
        path: String,
    },
    Link {
        path: String,
    },
    Place {
        path: String,
    },
    Call {
        name: String,
        argument: Option<String>,
    },
    /// Nothing: whether there is somebody to ask.
    Nothing,
}

/// What is seen.
type Seen = Result<Vec<u8>, Unseen>;

/// Answers what no file tells: what is asked, and a path that may belong to it.
pub type Call = fn(&str, Option<&Path>) -> Result<String, Unseen>;

impl Look {
    fn at(&self, call: Call) -> Seen {
        match self {
            Self::Read { path, bytes_max } => look::read(&path_of(path), *bytes_max),
            Self::List { path, names_max } => look::list(&path_of(path), *names_max),
            Self::Resolve { path } => look::resolve(&path_of(path)),
            Self::Link { path } => look::link(&path_of(path)),
            Self::Place { path } => look::place(&path_of(path)),
            Self::Call { name, argument } => call(name, argument.as_deref().map(path_of).as_deref()).map(String::into_bytes),
            Self::Nothing => Ok(Vec::new()),
        }
    }
}

/// The path that [`text_of`] wrote.
pub fn path_of(text: &str) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes_of(text)))
}

/// Looks at files and directories, and never for long.
#[derive(Debug)]
pub struct Prober {
    patience: Duration,
    call: Call,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    worker: Option<Worker>,
    /// Whether no helper is to be had.
    is_alone: bool,
    /// How long was waited in vain.
    waited: Duration,
    /// Mount points, read when they are first needed.
    mounts: Option<Arc<[PathBuf]>>,
    /// Those of them that did not answer. They are not asked again.
    silent: Vec<PathBuf>,
}

impl Prober {
    /// One that gives up each look after `patience`.
    pub fn new(patience: Duration) -> Self {
        Self::with_calls(patience, |_, _| Err(Unseen::Absent))
    }

    /// The same, for one who makes calls as well. The helper makes those that it was told of in [`serve`].
    pub fn with_calls(patience: Duration, call: Call) -> Self {
        Self { patience, call, state: Mutex::default() }
    }

    /// The bytes of a regular file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// [`Unseen`], also for what is longer and for what is no regular file.
    pub fn read(&self, path: &Path, bytes_max: usize) -> Result<Vec<u8>, Unseen> {
        self.look_at(path, |path| Look::Read { path, bytes_max })
    }

    /// The names in a directory of at most `names_max`, sorted, written as [`text_of`] does.
    ///
    /// # Errors
    /// [`Unseen`], also for a longer one.
    pub fn list(&self, path: &Path, names_max: usize) -> Result<Vec<String>, Unseen> {
        let names = self.look_at(path, |path| Look::List { path, names_max })?;
        Ok(String::from_utf8_lossy(&names).lines().map(str::to_owned).collect())
    }

    /// A path with all links resolved.
    ///
    /// # Errors
    /// [`Unseen`].
    pub fn resolve(&self, path: &Path) -> Result<PathBuf, Unseen> {
        let real = self.look_at(path, |path| Look::Resolve { path })?;
        Ok(PathBuf::from(OsString::from_vec(real)))
    }

    /// What there is to know of a place that a user named, one `name value` a line.
    ///
    /// # Errors
    /// [`Unseen`].
    pub fn place(&self, path: &Path) -> Result<String, Unseen> {
        // Asked step by step first, so that a dead mount is known for one at the first time.
        if self.ends_on_silent_mount(path) {
            return Err(Unseen::Silent(self.patience));
        }
        let place = self.look_at(path, |path| Look::Place { path })?;
        Ok(String::from_utf8_lossy(&place).into_owned())
    }

    /// The answer of a call, which may take this long.
    ///
    /// # Errors
    /// [`Unseen`].
    pub fn call(&self, name: &str, argument: Option<&Path>, patience: Duration) -> Result<String, Unseen> {
        let argument = argument.map(|path| text_of(path.as_os_str().as_bytes()));
        let answer = self.ask(Look::Call { name: name.to_owned(), argument }, patience)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// One look at a path. A mount that did not answer once is not asked again: it would take its time for each path on it.
    fn look_at(&self, path: &Path, look: impl FnOnce(String) -> Look) -> Seen {
        let is_suspicious = !self.state().silent.is_empty();
        if is_suspicious && self.ends_on_silent_mount(path) {
            return Err(Unseen::Silent(self.patience));
        }
        let seen = self.ask(look(text_of(path.as_os_str().as_bytes())), self.patience);
        if matches!(seen, Err(Unseen::Silent(_))) {
            self.ends_on_silent_mount(path);
        }
        seen
    }

    /// Whether a path leads to a mount that does not answer, or has not before. It is followed step by step, so that the mount
    /// is known at which it ends. The root is never blamed, nor are the kernel's own files: there one file says nothing of the
    /// next.
    fn ends_on_silent_mount(&self, path: &Path) -> bool {
        let Ok(path) = std::path::absolute(path) else { return false };
        if path.starts_with("/proc") || path.starts_with("/sys") {
            return false;
        }
        let mut rest: Vec<OsString> = parts(&path);
        let (mut at, mut links) = (PathBuf::from("/"), 0);
        while let Some(part) = rest.pop() {
            if part == ".." {
                at.pop();
                continue;
            }
            at.push(part);
            let mount = self.mount_of(&at);
            if self.state().silent.iter().any(|silent| Some(silent) == mount.as_ref()) {
                return true;
            }
            match self.ask(Look::Link { path: text_of(at.as_os_str().as_bytes()) }, self.patience) {
                Ok(target) if links < LINKS_MAX => {
                    links += 1;
                    at.pop();
                    let target = PathBuf::from(OsString::from_vec(target));
                    if target.is_absolute() {
                        at = PathBuf::from("/");
                    }
                    rest.extend(parts(&target));
                }
                Err(Unseen::Silent(_)) => {
                    self.state().silent.extend(mount);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    /// The mount point that holds a path in which no link is left; `None` for the root.
    fn mount_of(&self, path: &Path) -> Option<PathBuf> {
        let known = self.state().mounts.clone();
        let mounts = known.unwrap_or_else(|| {
            let table = self.ask(Look::Read { path: MOUNTS.to_owned(), bytes_max: MOUNTS_BYTES_MAX }, self.patience);
            let mounts: Arc<[PathBuf]> = mount_points(&table.unwrap_or_default()).into();
            self.state().mounts = Some(Arc::clone(&mounts));
            mounts
        });
        mounts.iter().filter(|point| path.starts_with(point)).max_by_key(|point| point.as_os_str().len()).cloned()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a look done.
    fn ask(&self, look: Look, patience: Duration) -> Seen {
        let mut state = self.state();
        let worker = match state.worker.take() {
            Some(worker) => worker,
            None => self.start(&mut state)?,
        };
        let patience = if state.waited < WAITS_MAX { patience } else { patience / 20 };
        match worker.ask(look, patience) {
            Some(Err(Unseen::Silent(time))) => {
                state.waited += time;
                worker.abandon();
                Err(Unseen::Silent(time))
            }
            Some(seen) => {
                state.worker = Some(worker);
                seen
            }
            None => Err(Unseen::Failed("the helper process has ended".to_owned())),
        }
    }

    /// Somebody to ask: a helper, or else a thread of this process.
    fn start(&self, state: &mut State) -> Result<Worker, Unseen> {
        if !state.is_alone && helper::is_named() {
            let worker = Worker::start(self.call, true)?;
            if matches!(worker.ask(Look::Nothing, START), Some(Ok(_))) {
                return Ok(worker);
            }
            worker.abandon();
            state.is_alone = true;
        }
        Worker::start(self.call, false)
    }
}

/// The parts of a path, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let part = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().filter_map(part).rev().collect()
}

/// The mount points in a mount table but for the root, and but for automatic mounts: what does not answer there is a mount yet
/// to come, and says nothing of its neighbours.
fn mount_points(table: &[u8]) -> Vec<PathBuf> {
    let point = |line: &[u8]| {
        let mut words = line.split(|byte| *byte == b' ');
        let point = words.nth(4)?;
        let kind = words.skip_while(|word| *word != b"-").nth(1)?;
        (point != b"/" && kind != b"autofs").then(|| PathBuf::from(OsStr::from_bytes(&octal(point))))
    };
    table.split(|byte| *byte == b'\n').filter_map(point).collect()
}

type Job = (Look, SyncSender<Option<Seen>>);

/// A thread that has looks done, one after the other, until nobody can send it any.
#[derive(Debug)]
struct Worker {
    jobs: SyncSender<Job>,
    /// Its helper, once it has started.
    process: Arc<Mutex<Option<Child>>>,
}

impl Worker {
    fn start(call: Call, with_helper: bool) -> Result<Self, Unseen> {
        let (jobs, to_do) = sync_channel::<Job>(1);
        let process = Arc::new(Mutex::new(None));
        let shared = Arc::clone(&process);
        let work = move || if with_helper { through_helper(&to_do, &shared) } else { alone(&to_do, call) };
        let started = std::thread::Builder::new().name("thruway-prober".to_owned()).spawn(work);
        match started {
            Ok(_) => Ok(Self { jobs, process }),
            Err(error) => Err(Unseen::Failed(format!("{NO_THREAD}: {error}"))),
        }
    }

    /// What is seen; `None` if there is nobody who looks any more.
    fn ask(&self, look: Look, patience: Duration) -> Option<Seen> {
        let (answer, wait) = sync_channel(1);
        self.jobs.send((look, answer)).ok()?;
        match wait.recv_timeout(patience) {
            Ok(seen) => seen,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Some(Err(Unseen::Silent(patience))),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
        }
    }

    /// Leaves it to its fate. A helper that cannot be killed now ends as soon as what it waits for lets it.
    fn abandon(self) {
        if let Some(process) = self.process.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // It fails only for one that has ended.
            drop(process.kill());
        }
    }
}

fn alone(to_do: &Receiver<Job>, call: Call) {
    // Nobody waits any more for an answer that comes too late.
    to_do.iter().for_each(|(look, answer)| drop(answer.send(Some(look.at(call)))));
}

fn through_helper(to_do: &Receiver<Job>, process: &Mutex<Option<Child>>) {
    let lock = || process.lock().unwrap_or_else(PoisonError::into_inner);
    if let Ok((mut helper, child)) = Helper::start() {
        *lock() = Some(child);
        for (look, answer) in to_do {
            let seen = helper.ask(&look).ok();
            let is_over = seen.is_none();
            drop(answer.send(seen));
            if is_over {
                break;
            }
        }
    }
    // It ends when it is asked no more, and is not left as a zombie.
    let child = lock().take();
    if let Some(mut child) = child {
        drop(child.wait());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(500);

    #[test]
    fn what_is_no_small_regular_file_is_refused_in_bounded_time() {
        let directory = tempfile::tempdir().expect("directory");
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("mkfifo");
        let huge = directory.path().join("huge");
        std::fs::File::create(&huge).expect("create").set_len(1 << 30).expect("sparse");
        let prober = Prober::new(PATIENCE);
        let begun = Instant::now();
        for (path, why) in [
            (fifo.as_path(), "a named pipe"),
            (directory.path(), "a directory"),
            (Path::new("/dev/zero"), "a device"),
            (huge.as_path(), "longer than 4096"),
        ] {
            let Err(Unseen::Failed(message)) = prober.read(path, 4096) else { panic!("{path:?} was read") };
            assert!(message.contains(why), "{message}");
        }
        assert_eq!(prober.read(&directory.path().join("none"), 1), Err(Unseen::Absent));
        assert!(begun.elapsed() < PATIENCE, "nothing there makes anybody wait");
    }

    #[test]
    fn a_look_that_takes_too_long_is_given_up_and_the_next_one_is_not_held_up() {
        // The test ends long before it: what a dead mount would never do.
        let slow: Call = |name, _| {
            if name == "slow" {
                std::thread::sleep(Duration::from_secs(3600));
            }
            Ok(name.to_owned())
        };
        let prober = Prober::with_calls(PATIENCE, slow);
        let begun = Instant::now();
        let short = Duration::from_millis(50);
        assert_eq!(prober.call("slow", None, short), Err(Unseen::Silent(short)));
        assert_eq!(prober.call("quick", None, PATIENCE).as_deref(), Ok("quick"));
        assert!(begun.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn a_place_is_known_with_its_room() {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::write(directory.path().join("a"), b"x").expect("write");
        let prober = Prober::new(PATIENCE);
        let place = prober.place(directory.path()).expect("it is there");
        for line in ["kind directory", "may_write yes", "total_bytes ", "free_bytes "] {
            assert!(place.contains(line), "{place}");
        }
        assert!(!place.contains("direct unknown"), "{place}");
        assert_eq!(prober.place(&directory.path().join("none")), Err(Unseen::Absent));
    }

    #[test]
    fn mounts_are_known_but_for_the_root_and_for_those_to_come() {
        let table = b"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:9 / /mnt/a\\040b\xff rw shared:1 - fuse x rw\n\
                      3 1 0:8 / /net rw - autofs y rw\nnonsense";
        assert_eq!(mount_points(table), [PathBuf::from(OsStr::from_bytes(b"/mnt/a b\xff"))]);
    }
}
