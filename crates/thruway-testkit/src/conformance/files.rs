//! The files that the suite works on: real ones for engines of the operating system, simulated ones for the rest.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tempfile::TempDir;
use thruway::io::{Direction, EngineName};
use thruway::storage::{Access, Buffering, DirectRules, File, Identity, Namespace, OsNamespace, Residency};
use thruway::{Alignment, Error, ErrorKind, Extent, Result};

use crate::fixtures::scratch_dir;
use crate::simdisk::{SimDisk, SimDiskSettings};

/// A file whose reads wait until they are released.
pub struct SlowFile {
    /// The file. A read of [`SlowFile::BYTES`] bytes from its start gives [`SlowFile::FILL`] throughout.
    pub file: Arc<dyn File>,
    /// Lets the read go on.
    pub release: Box<dyn FnOnce() + Send>,
}

impl SlowFile {
    /// How many bytes it holds.
    pub const BYTES: usize = 4096;
    /// What each of them is.
    pub const FILL: u8 = 0x5a;
}

/// A request that the system must refuse.
pub struct Refused {
    /// What is wrong with it.
    pub what: &'static str,
    /// The file.
    pub file: Arc<dyn File>,
    /// Which way.
    pub direction: Direction,
    /// The error number that it must give.
    pub errno: i32,
}

/// Where the suite gets its files from.
pub trait TestFiles {
    /// A new file with these bytes, open for reading and writing through the page cache.
    fn with_bytes(&self, bytes: &[u8]) -> Arc<dyn File>;

    /// A new file with these bytes, open for reading and writing past the page cache; `None` where that is refused.
    fn direct(&self, bytes: &[u8]) -> Option<(Arc<dyn File>, DirectRules)>;

    /// Requests that cannot succeed, and with which error.
    fn refused(&self) -> Vec<Refused>;

    /// A file that an engine of this name has to wait for; `None` if none can be made.
    fn slow(&self, engine: EngineName) -> Option<SlowFile>;
}

/// Files of the operating system, in a directory that is removed with this value.
#[derive(Debug)]
pub struct OsFiles {
    directory: TempDir,
    count: AtomicU64,
}

impl OsFiles {
    /// Files on the disk that holds the build output.
    pub fn new() -> Self {
        Self { directory: scratch_dir(), count: AtomicU64::new(0) }
    }

    fn fresh(&self, bytes: &[u8]) -> PathBuf {
        let path = self.directory.path().join(self.count.fetch_add(1, Ordering::Relaxed).to_string());
        std::fs::write(&path, bytes).expect("the scratch directory can be written to");
        path
    }
}

impl Default for OsFiles {
    fn default() -> Self {
        Self::new()
    }
}

impl TestFiles for OsFiles {
    fn with_bytes(&self, bytes: &[u8]) -> Arc<dyn File> {
        OsNamespace.open(&self.fresh(bytes), Access::Write, Buffering::PageCache).expect("a file just made opens")
    }

    fn direct(&self, bytes: &[u8]) -> Option<(Arc<dyn File>, DirectRules)> {
        let file = OsNamespace.open(&self.fresh(bytes), Access::Write, Buffering::Direct).ok()?;
        let rules = file.direct_rules()?;
        Some((file, rules))
    }

    fn refused(&self) -> Vec<Refused> {
        let path = self.fresh(&[1; 4096]);
        let opened = |options: &mut OpenOptions, path: &Path| RawFile::new(options.open(path).expect("it can be opened").into());
        let refused = |what, file: RawFile, direction, errno| Refused { what, file: Arc::new(file), direction, errno };
        let write_only = opened(OpenOptions::new().write(true), &path);
        let read_only = opened(OpenOptions::new().read(true), &path);
        let directory = opened(OpenOptions::new().read(true), self.directory.path());
        let full = opened(OpenOptions::new().write(true), Path::new("/dev/full"));
        vec![
            refused("a read from a descriptor for writing", write_only, Direction::Read, libc::EBADF),
            refused("a write to a descriptor for reading", read_only, Direction::Write, libc::EBADF),
            refused("a read from a directory", directory, Direction::Read, libc::EISDIR),
            refused("a write to a full device", full, Direction::Write, libc::ENOSPC),
            Refused {
                what: "a file without a descriptor",
                file: SimFiles::default().with_bytes(&[1; 4096]),
                direction: Direction::Read,
                errno: libc::EBADF,
            },
        ]
    }

    fn slow(&self, engine: EngineName) -> Option<SlowFile> {
        match engine {
            EngineName::Uring | EngineName::P2pDma => {
                let (reader, mut writer) = std::io::pipe().expect("a pipe");
                let release = move || writer.write_all(&[SlowFile::FILL; SlowFile::BYTES]).expect("the reader is there");
                Some(SlowFile { file: Arc::new(RawFile::new(reader.into())), release: Box::new(release) })
            }
            // `preadv` refuses pipes. Its thread asks the file for the descriptor first, and there it can wait as well.
            EngineName::Posix | EngineName::CuFile => {
                let path = self.fresh(&[SlowFile::FILL; SlowFile::BYTES]);
                let gate = Arc::new(Gate::default());
                let fd = std::fs::File::open(path).expect("a file just made opens").into();
                let file = Arc::new(RawFile { fd, gate: Some(Arc::clone(&gate)) });
                Some(SlowFile { file, release: Box::new(move || gate.open()) })
            }
            EngineName::InMemory => None,
        }
    }
}

/// Files of a simulated disk with the rules of a real one.
#[derive(Debug)]
pub struct SimFiles {
    disk: SimDisk,
    count: AtomicU64,
}

impl Default for SimFiles {
    fn default() -> Self {
        let rules = DirectRules { memory: Alignment::PAGE, offset: Alignment::PAGE };
        let disk = SimDisk::new(SimDiskSettings { direct: Some(rules), ..SimDiskSettings::default() });
        Self { disk, count: AtomicU64::new(0) }
    }
}

impl SimFiles {
    fn opened(&self, bytes: &[u8], access: Access, buffering: Buffering) -> Arc<dyn File> {
        let path = PathBuf::from(format!("/{}", self.count.fetch_add(1, Ordering::Relaxed)));
        self.disk.put(&path, bytes.to_vec());
        self.disk.open(&path, access, buffering).expect("a file just made opens")
    }
}

impl TestFiles for SimFiles {
    fn with_bytes(&self, bytes: &[u8]) -> Arc<dyn File> {
        self.opened(bytes, Access::Write, Buffering::PageCache)
    }

    fn direct(&self, bytes: &[u8]) -> Option<(Arc<dyn File>, DirectRules)> {
        let file = self.opened(bytes, Access::Write, Buffering::Direct);
        let rules = file.direct_rules()?;
        Some((file, rules))
    }

    fn refused(&self) -> Vec<Refused> {
        let read_only = self.opened(&[1; 4096], Access::Read, Buffering::PageCache);
        let full = SimDisk::new(SimDiskSettings { capacity_bytes: 0, ..SimDiskSettings::default() });
        let full = full.create(Path::new("/full"), None).expect("a name takes no room");
        vec![
            Refused {
                what: "a write to a file opened for reading",
                file: read_only,
                direction: Direction::Write,
                errno: libc::EBADF,
            },
            Refused { what: "a write to a full disk", file: full, direction: Direction::Write, errno: libc::ENOSPC },
        ]
    }

    fn slow(&self, _engine: EngineName) -> Option<SlowFile> {
        None
    }
}

/// Closed until it is opened, once and for all.
#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    fn wait(&self) {
        let mut is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_open {
            is_open = self.opened.wait(is_open).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Any descriptor as a file, be it a pipe or a directory, which [`OsNamespace`] would refuse.
#[derive(Debug)]
struct RawFile {
    fd: OwnedFd,
    gate: Option<Arc<Gate>>,
}

impl RawFile {
    fn new(fd: OwnedFd) -> Self {
        Self { fd, gate: None }
    }
}

fn unsupported() -> Error {
    Error::new(ErrorKind::Unsupported, "an engine needs nothing but the descriptor")
}

impl File for RawFile {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        if let Some(gate) = &self.gate {
            gate.wait();
        }
        Some(self.fd.as_fd())
    }

    fn identity(&self) -> Result<Identity> {
        Err(unsupported())
    }

    fn direct_rules(&self) -> Option<DirectRules> {
        None
    }

    fn residency(&self, _extent: Extent) -> Residency {
        Residency::Unknown
    }

    fn read_at(&self, _target: &mut [u8], _offset: u64) -> std::io::Result<usize> {
        Err(std::io::Error::from_raw_os_error(libc::ENOTSUP))
    }

    fn write_at(&self, _source: &[u8], _offset: u64) -> std::io::Result<usize> {
        Err(std::io::Error::from_raw_os_error(libc::ENOTSUP))
    }

    fn allocate(&self, _length: u64) -> Result<()> {
        Err(unsupported())
    }

    fn sync(&self) -> Result<()> {
        Err(unsupported())
    }
}
