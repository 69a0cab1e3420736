//! Looking at a machine without being held up by it.
//!
//! A named pipe where a file should be, a drive that has gone, a network filesystem whose server does not answer: to open,
//! list or examine such a thing may wait for ever. Each look is therefore done by a helper thread and given up after a
//! time ([`Prober`]); reads are limited in size, and what is no regular file is not opened. Nothing is ever changed.

use std::fs::Metadata;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Access, OFlags, StatVfsMountFlags};

use super::namespace::{Namespace, OsNamespace};
use super::{Buffering, DirectRules};

/// Why something could not be seen.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// What is known of a place that a user named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its path with all links resolved.
    pub real: PathBuf,
    /// Whether it is a directory.
    pub is_directory: bool,
    /// Whether it is neither a directory nor a regular file.
    pub is_special: bool,
    /// `major:minor` of the filesystem's device.
    pub device: (u32, u32),
    /// The kernel's number for the kind of filesystem, as `statfs` gives it.
    pub magic: u64,
    /// Bytes of the filesystem, and those free to this user; `None` where the filesystem does not tell.
    pub room: Option<Room>,
    /// Whether the filesystem is mounted for reading only.
    pub is_read_only: bool,
    /// Whether this user may read it.
    pub may_read: bool,
    /// Whether this user may write to it.
    pub may_write: bool,
    /// What `O_DIRECT` demands of the first regular file that could be opened there.
    pub direct: DirectAnswer,
}

/// Bytes of a filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// All.
    pub total_bytes: u64,
    /// Those free to this user.
    pub free_bytes: u64,
}

/// Whether a filesystem takes `O_DIRECT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectAnswer {
    /// It does, with these rules.
    Accepted(DirectRules),
    /// It does not.
    Refused,
    /// There is no file to try it on.
    Unknown,
}

/// Looks at files and directories, and never for long.
#[derive(Debug)]
pub struct Prober {
    patience: Duration,
    worker: Mutex<Option<SyncSender<Job>>>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Prober {
    /// One that gives up each look after `patience`.
    pub fn new(patience: Duration) -> Self {
        Self { patience, worker: Mutex::new(None) }
    }

    /// Does `work` on the helper thread.
    ///
    /// # Errors
    /// [`Silent`](Unseen::Silent) if it takes longer than the patience of this prober. The helper is then left to its
    /// fate, and a new one does what comes next.
    pub fn within<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Unseen> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let (answer, wait) = sync_channel(1);
        // Nobody waits any more for an answer that comes too late.
        let job: Job = Box::new(move || drop(answer.send(work())));
        let jobs = match worker.take() {
            Some(jobs) => jobs,
            None => start()?,
        };
        jobs.send(job).map_err(|_| Unseen::Failed("the helper thread has ended".to_owned()))?;
        match wait.recv_timeout(self.patience) {
            Ok(result) => {
                *worker = Some(jobs);
                Ok(result)
            }
            Err(RecvTimeoutError::Timeout) => Err(Unseen::Silent(self.patience)),
            Err(RecvTimeoutError::Disconnected) => Err(Unseen::Failed("the helper thread has ended".to_owned())),
        }
    }

    /// The bytes of a regular file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// [`Unseen`], also for what is longer and for what is no regular file.
    pub fn read(&self, path: &Path, bytes_max: usize) -> Result<Vec<u8>, Unseen> {
        let path = path.to_owned();
        self.within(move || read(&path, bytes_max))?
    }

    /// The names in a directory of at most `names_max`, sorted.
    ///
    /// # Errors
    /// [`Unseen`], also for a longer one.
    pub fn list(&self, path: &Path, names_max: usize) -> Result<Vec<String>, Unseen> {
        let path = path.to_owned();
        self.within(move || list(&path, names_max))?
    }

    /// A path with all links resolved.
    ///
    /// # Errors
    /// [`Unseen`].
    pub fn resolve(&self, path: &Path) -> Result<PathBuf, Unseen> {
        let path = path.to_owned();
        self.within(move || std::fs::canonicalize(&path).map_err(|error| unseen(&error)))?
    }

    /// What there is to know of a place.
    ///
    /// # Errors
    /// [`Unseen`].
    pub fn place(&self, path: &Path) -> Result<Place, Unseen> {
        let path = path.to_owned();
        self.within(move || place(&path))?
    }
}

/// A thread that does jobs until nobody can send it any.
fn start() -> Result<SyncSender<Job>, Unseen> {
    let (jobs, to_do) = sync_channel::<Job>(1);
    let work = move || to_do.into_iter().for_each(|job| job());
    let started = std::thread::Builder::new().name("thruway-prober".to_owned()).spawn(work);
    started.map(|_| jobs).map_err(|error| Unseen::Failed(format!("no thread could be started: {error}")))
}

fn unseen(error: &std::io::Error) -> Unseen {
    match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => Unseen::Absent,
        std::io::ErrorKind::PermissionDenied => Unseen::Denied,
        _ => Unseen::Failed(error.to_string()),
    }
}

fn refused(metadata: &Metadata) -> Option<Unseen> {
    let kind = metadata.file_type();
    let what = match kind {
        kind if kind.is_file() => return None,
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Some(Unseen::Failed(format!("this is {what}, not a regular file")))
}

fn read(path: &Path, bytes_max: usize) -> Result<Vec<u8>, Unseen> {
    // Looked at before it is opened: to open some devices does something.
    if let Some(refused) = refused(&std::fs::metadata(path).map_err(|error| unseen(&error))?) {
        return Err(refused);
    }
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| unseen(&error))?;
    // And again: it may have been replaced meanwhile.
    if let Some(refused) = refused(&file.metadata().map_err(|error| unseen(&error))?) {
        return Err(refused);
    }
    let mut bytes = Vec::new();
    file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(|error| unseen(&error))?;
    if bytes.len() > bytes_max {
        return Err(Unseen::Failed(format!("it is longer than {bytes_max} bytes")));
    }
    Ok(bytes)
}

fn list(path: &Path, names_max: usize) -> Result<Vec<String>, Unseen> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|error| unseen(&error))? {
        if names.len() == names_max {
            return Err(Unseen::Failed(format!("it holds more than {names_max} names")));
        }
        names.push(entry.map_err(|error| unseen(&error))?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

fn place(path: &Path) -> Result<Place, Unseen> {
    let failed = |errno: rustix::io::Errno| unseen(&errno.into());
    let real = std::fs::canonicalize(path).map_err(|error| unseen(&error))?;
    let stat = rustix::fs::stat(&real).map_err(failed)?;
    let kind = rustix::fs::FileType::from_raw_mode(stat.st_mode);
    let magic = rustix::fs::statfs(&real).map_err(failed)?.f_type;
    let filesystem = rustix::fs::statvfs(&real).map_err(failed)?;
    let room = (filesystem.f_blocks > 0).then(|| Room {
        total_bytes: filesystem.f_blocks.saturating_mul(filesystem.f_frsize),
        free_bytes: filesystem.f_bavail.saturating_mul(filesystem.f_frsize),
    });
    let direct = if kind.is_file() { try_direct(&real) } else { try_direct_below(&real) };
    Ok(Place {
        is_directory: kind.is_dir(),
        is_special: !kind.is_dir() && !kind.is_file(),
        device: (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)),
        magic: magic.cast_unsigned(),
        room,
        is_read_only: filesystem.f_flag.contains(StatVfsMountFlags::RDONLY),
        may_read: rustix::fs::access(&real, Access::READ_OK).is_ok(),
        may_write: rustix::fs::access(&real, Access::WRITE_OK).is_ok(),
        direct,
        real,
    })
}

/// The answer of the first regular file in a directory that can be opened; nothing is created for the question's sake.
fn try_direct_below(directory: &Path) -> DirectAnswer {
    const FILES_MAX: usize = 64;
    let Ok(entries) = std::fs::read_dir(directory) else { return DirectAnswer::Unknown };
    let is_file = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let answers = entries.take(FILES_MAX).flatten().filter(is_file).map(|entry| try_direct(&entry.path()));
    answers.into_iter().find(|answer| *answer != DirectAnswer::Unknown).unwrap_or(DirectAnswer::Unknown)
}

fn try_direct(path: &Path) -> DirectAnswer {
    match OsNamespace.open(path, super::Access::Read, Buffering::PageCache) {
        Ok(file) => file.direct_rules().map_or(DirectAnswer::Refused, DirectAnswer::Accepted),
        Err(_) => DirectAnswer::Unknown,
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
        let prober = Prober::new(Duration::from_millis(50));
        let (release, blocked) = sync_channel::<()>(1);
        let begun = Instant::now();
        // Ends when the test does: what a dead mount would never do.
        let answer = prober.within(move || blocked.recv().is_ok());
        assert_eq!(answer, Err(Unseen::Silent(Duration::from_millis(50))));
        assert_eq!(prober.within(|| 7), Ok(7));
        assert!(begun.elapsed() < Duration::from_secs(5));
        drop(release);
    }

    #[test]
    fn a_place_is_known_with_its_room() {
        let directory = tempfile::tempdir().expect("directory");
        std::fs::write(directory.path().join("a"), b"x").expect("write");
        let prober = Prober::new(PATIENCE);
        let place = prober.place(directory.path()).expect("it is there");
        assert!(place.is_directory && place.may_write && !place.is_special);
        assert!(place.room.is_some_and(|room| room.free_bytes <= room.total_bytes));
        assert_ne!(place.direct, DirectAnswer::Unknown);
        assert_eq!(prober.place(&directory.path().join("none")), Err(Unseen::Absent));
    }
}
