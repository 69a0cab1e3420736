//! One model on several drives: every file standard, the primary's appearance the only one that counts, and all drives at work.

mod common;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{World, scratch};
use thruway::base::settings::CuFileChoice;
use thruway::storage::{Access, Buffering, Directory, File, Lock, Metadata, Namespace, OsNamespace};
use thruway::{
    ByteSize, CopyOptions, Device, Dtype, Error, ErrorKind, HostBuffer, LoadOptions, Result, SaveOptions, Session, Source,
    VerifyOptions,
};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::random::Random;

const LENGTHS: [usize; 7] = [700_000, 650_001, 12, 800_000, 0, 500_000, 600_000];

fn tensors() -> Vec<(String, Vec<u8>)> {
    let mut random = Random::new(90);
    LENGTHS.iter().enumerate().map(|(number, length)| (format!("t{number}"), random.bytes(*length))).collect()
}

/// The operating system's filesystem, one of whose changes fails.
#[derive(Debug, Default)]
struct Failing {
    /// Which change, from 1; 0 for none.
    at: u64,
    made: AtomicU64,
}

impl Failing {
    fn change<T>(&self, path: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.made.fetch_add(1, Ordering::Relaxed) + 1 == self.at {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(Error::from_io("the drive fails, as this test wants it", error).with_file(path));
        }
        work()
    }
}

/// A directory that is synced as the filesystem is told.
#[derive(Debug)]
struct FailingDirectory(Arc<Failing>, PathBuf);

impl Directory for FailingDirectory {
    fn sync(&self) -> Result<()> {
        self.0.change(&self.1, || OsNamespace.sync_directory(&self.1))
    }
}

#[derive(Debug)]
struct FailingNamespace(Arc<Failing>);

impl Namespace for FailingNamespace {
    fn open(&self, path: &Path, access: Access, buffering: Buffering) -> Result<Arc<dyn File>> {
        OsNamespace.open(path, access, buffering)
    }

    fn create(&self, path: &Path, permissions: Option<u32>) -> Result<Arc<dyn File>> {
        self.0.change(path, || OsNamespace.create(path, permissions))
    }

    fn metadata(&self, path: &Path) -> Result<Metadata> {
        OsNamespace.metadata(path)
    }

    fn own_metadata(&self, path: &Path) -> Result<Metadata> {
        OsNamespace.own_metadata(path)
    }

    fn list(&self, directory: &Path) -> Result<Vec<OsString>> {
        OsNamespace.list(directory)
    }

    fn create_directory(&self, path: &Path) -> Result<()> {
        self.0.change(path, || OsNamespace.create_directory(path))
    }

    fn create_link(&self, path: &Path, target: &Path) -> Result<()> {
        self.0.change(path, || OsNamespace.create_link(path, target))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.0.change(from, || OsNamespace.rename(from, to))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        self.0.change(from, || OsNamespace.rename_new(from, to))
    }

    fn remove(&self, path: &Path) -> Result<()> {
        OsNamespace.remove(path)
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        OsNamespace.remove_directory(path)
    }

    fn open_directory(&self, path: &Path) -> Result<Box<dyn Directory>> {
        OsNamespace.open_directory(path)?;
        Ok(Box::new(FailingDirectory(Arc::clone(&self.0), path.to_owned())))
    }

    fn lock(&self, path: &Path) -> Result<Box<dyn Lock>> {
        OsNamespace.lock(path)
    }

    fn free_bytes(&self, directory: &Path) -> Result<u64> {
        OsNamespace.free_bytes(directory)
    }
}

fn host() -> Session {
    Session::builder().device(Device::Host).build().expect("a session")
}

fn save(session: &Session, target: &Path, stripes: &[&Path]) -> Result<thruway::Receipt> {
    let buffers: Vec<(String, HostBuffer)> =
        tensors().into_iter().map(|(name, bytes)| (name, HostBuffer::from_vec(bytes))).collect();
    let source = |(name, buffer): &(String, HostBuffer)| {
        Source::new(name.clone(), Dtype::U8, vec![buffer.len() as u64], buffer.source(0..buffer.len()).expect("free"))
    };
    let sources: Vec<Source> = buffers.iter().map(source).collect();
    let options = SaveOptions::default().max_shard_size(ByteSize(900_000)).stripes(stripes.iter().map(|path| path.to_path_buf()));
    session.save(&sources, target, options)
}

fn assert_right(session: &Session, model: &Path) {
    let (loaded, _) = session.open(model).expect("a model").load(LoadOptions::all()).expect("loaded");
    for (name, bytes) in tensors() {
        assert!(loaded.get(&name).expect("loaded").to_host().expect("readable") == bytes, "{name} has other bytes");
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A second directory: on a filesystem of its own where there is one.
fn elsewhere() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| scratch())
}

#[test]
fn shards_are_spread_over_the_drives_and_the_primary_opens_as_any_model_does() {
    let (first, second, third) = (scratch(), elsewhere(), scratch());
    let target = first.path().join("model");
    let receipt = save(&host(), &target, &[second.path(), third.path()]).expect("saved");
    assert_eq!(receipt.bytes, receipt.files.iter().map(|file| file.bytes).sum::<u64>());
    assert!(receipt.files.iter().all(|file| file.file.starts_with(&target)), "files are called by the names that count");
    let mut found = [0, 0, 0];
    for name in names(&target) {
        let path = target.join(&name);
        let real = std::fs::canonicalize(&path).expect("no link leads nowhere");
        let at = [first.path(), second.path(), third.path()]
            .iter()
            .position(|directory| real.starts_with(std::fs::canonicalize(directory).expect("there")))
            .expect("in one of the three");
        assert_eq!(std::fs::symlink_metadata(&path).expect("there").is_symlink(), at > 0, "{name}");
        found[at] += usize::from(!name.ends_with(".json"));
        let bytes = std::fs::read(&path).expect("any reader follows it");
        assert!(name.ends_with(".json") || bytes.len() as u64 > u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")));
    }
    assert!(found.iter().all(|shards| *shards > 0), "every drive has some: {found:?}");
    assert!(target.join("model.safetensors.index.json").symlink_metadata().expect("there").is_file());
    let of_stripe = |directory: &Path| names(directory).into_iter().all(|name| name.starts_with("model.stripe-"));
    assert!(of_stripe(second.path()) && of_stripe(third.path()));
    assert_right(&host(), &target);
    let fake = FakeCuda::start("DELAY_US=0..50; ALIGNMENT=65536");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    assert_right(&session, &target);
    let explanation = session.explain(&target, LoadOptions::all()).expect("explained");
    assert_eq!(explanation.bytes(), LENGTHS.iter().map(|length| *length as u64).sum::<u64>());
    drop(session);
    world.assert_clean();
}

#[test]
fn a_copy_is_striped_and_is_the_same_model() {
    let (first, second) = (scratch(), elsewhere());
    let (source, target) = (first.path().join("source"), first.path().join("target"));
    save(&host(), &source, &[]).expect("saved");
    let session = host();
    let model = session.open(&source).expect("a model");
    let options = || CopyOptions::default().stripes([second.path().to_owned()]);
    model.copy_to(&target, options()).expect("copied");
    let linked = names(&target).iter().filter(|name| target.join(name).is_symlink()).count();
    assert!(linked > 0 && linked < names(&target).len(), "{:?}", names(&target));
    assert_right(&session, &target);
    let verdict = session.open(&target).expect("a model").verify(Some(&model), &VerifyOptions::default()).expect("read");
    assert_eq!(verdict.differences, []);
    // A stripe never stands in the way of another model's.
    let again = first.path().join("again/target");
    std::fs::create_dir(first.path().join("again")).expect("made");
    model.copy_to(&again, options()).expect("copied");
    assert_eq!(names(second.path()).len(), 2);
    assert_right(&session, &again);
}

#[test]
fn what_cannot_be_spread_is_refused_and_leaves_nothing() {
    let (first, second) = (scratch(), elsewhere());
    let target = first.path().join("model.safetensors");
    let buffer = HostBuffer::from_vec(vec![1; 100]);
    let source = Source::new("t", Dtype::U8, vec![100], buffer.source(0..100).expect("free"));
    let options = SaveOptions::default().stripes([second.path().to_owned()]);
    let error = host().save(std::slice::from_ref(&source), &target, options).expect_err("one file");
    assert!(error.kind() == ErrorKind::InvalidInput && error.hint().is_some_and(|hint| hint.contains("shards")), "{error:?}");
    let gone = second.path().join("gone");
    let error = save(&host(), &first.path().join("model"), &[second.path(), &gone]).expect_err("no such directory");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}");
    assert_eq!((names(first.path()).len(), names(second.path()).len()), (0, 0));
}

#[test]
fn whatever_change_fails_there_is_the_whole_model_or_nothing_of_it() {
    let mut published = 0;
    for at in 1.. {
        let (first, second) = (scratch(), elsewhere());
        let target = first.path().join("model");
        let failing = Arc::new(Failing { at, made: AtomicU64::new(0) });
        let namespace = Arc::new(FailingNamespace(Arc::clone(&failing)));
        let session = Session::builder().device(Device::Host).namespace(namespace).build().expect("a session");
        match save(&session, &target, &[second.path()]) {
            Ok(_) => {
                assert!(failing.made.load(Ordering::Relaxed) < at, "change {at} failed and nobody said so");
                assert_right(&host(), &target);
                assert!(at > 15, "only {at} changes were tried");
                break;
            }
            Err(error) if error.context("published").is_some() => {
                published += 1;
                assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
                assert_right(&host(), &target);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Io, "{error:?}");
                let left = (names(first.path()), names(second.path()));
                assert_eq!(left, (Vec::new(), Vec::new()), "change {at} of {error:?}");
            }
        }
    }
    assert_eq!(published, 1, "the sync after the primary's rename, and nothing of the stripes");
}
