//! What a save and a copy leave at their target: which targets are refused before a byte is written, which names the
//! files get, and what an error says of a target that has changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use thruway::format::safetensors::Dtype;
use thruway::storage::{Access, Buffering, DirectRules, Directory, File, Identity, Lock, Metadata, Namespace, Residency};
use thruway::{ByteSize, CopyOptions, ErrorKind, Extent, HostBuffer, LoadOptions, Model, Result, SaveOptions, Session, Source};
use thruway_testkit::fixtures::{KnownModel, model};
use thruway_testkit::simdisk::{SimDisk, SimDiskSettings, SimEngines};

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

fn session() -> Session {
    Session::builder().build().expect("session")
}

fn opened(path: &Path) -> Model {
    session().open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// One tensor of two bytes for each name, with metadata.
fn shard(tensors: &[(&str, u8)], metadata: &[(&str, &str)]) -> Vec<u8> {
    let specs: Vec<(&str, Dtype, &[u64])> = tensors.iter().map(|(name, _)| (*name, Dtype::U8, &[2_u64][..])).collect();
    let mut known = model(1, &specs);
    for (tensor, (_, value)) in known.tensors.iter_mut().zip(tensors) {
        tensor.bytes.fill(*value);
    }
    known.metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    known.to_safetensors()
}

fn put(path: PathBuf, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
    std::fs::write(path, bytes).expect("write");
}

fn put_index(path: PathBuf, metadata: &serde_json::Value, pairs: &[(&str, &str)]) {
    let map: BTreeMap<&str, &str> = pairs.iter().copied().collect();
    put(path, serde_json::json!({"metadata": metadata, "weight_map": map}).to_string());
}

fn loads(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let (tensors, _) = opened(path).load(LoadOptions::all()).expect("load");
    tensors.iter().map(|tensor| (tensor.name().to_owned(), tensor.bytes().expect("done").to_vec())).collect()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("list");
    let mut names: Vec<String> = entries.map(|entry| entry.expect("entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn index_of(directory: &Path) -> serde_json::Value {
    let text = std::fs::read(directory.join("model.safetensors.index.json")).expect("an index");
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn a_copy_renames_files_whose_names_would_hide_the_others() {
    let directory = scratch();
    let cases: [&[(&str, &str)]; 3] = [
        &[("a", "model.safetensors"), ("b", "extra.safetensors")],
        &[("a", "x/part.safetensors"), ("b", "y/part.safetensors")],
        &[("a", "model.safetensors.index.json"), ("b", "extra.safetensors")],
    ];
    for (number, pairs) in cases.into_iter().enumerate() {
        let source = directory.path().join(format!("source{number}"));
        for ((name, file), value) in pairs.iter().zip([1, 2]) {
            put(source.join(file), shard(&[(name, value)], &[]));
        }
        put_index(source.join("all.safetensors.index.json"), &serde_json::json!({"total_size": 4}), pairs);
        let target = directory.path().join(format!("target{number}"));
        opened(&source.join("all.safetensors.index.json")).copy_to(&target, CopyOptions::default()).expect("copy");
        assert_eq!(loads(&target), [("a".to_owned(), vec![1; 2]), ("b".to_owned(), vec![2; 2])].into(), "{pairs:?}");
        let counted = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        assert_eq!(names(&target), [counted[0], counted[1], "model.safetensors.index.json"], "{pairs:?}");
        assert_eq!(opened(&target).notes(), [""; 0], "{pairs:?}");
    }
}

#[test]
fn a_copy_keeps_names_that_hide_nothing_and_the_notes_of_the_index() {
    let directory = scratch();
    let source = directory.path().join("source");
    put(source.join("one.safetensors"), shard(&[("a", 1)], &[("k", "1")]));
    put(source.join("two.safetensors"), shard(&[("b", 2)], &[("k", "2"), ("l", "3")]));
    let notes = serde_json::json!({"total_size": 999, "format": "pt", "mixed": [1, null]});
    put_index(source.join("model.safetensors.index.json"), &notes, &[("a", "one.safetensors"), ("b", "two.safetensors")]);
    let (same, cut) = (directory.path().join("same"), directory.path().join("cut"));
    opened(&source).copy_to(&same, CopyOptions::default()).expect("copy");
    opened(&source).copy_to(&cut, CopyOptions::default().max_shard_size(ByteSize(2))).expect("copy");
    let expected = serde_json::json!({"total_size": 4, "format": "pt", "mixed": [1, null]});
    assert_eq!((&index_of(&same)["metadata"], &index_of(&cut)["metadata"]), (&expected, &expected));
    assert_eq!(names(&same), names(&source));
    let metadata = |path: &Path| -> Vec<BTreeMap<String, String>> {
        let model = opened(path);
        (0..2).map(|file| model.metadata(file).cloned().unwrap_or_default()).collect()
    };
    assert_eq!(metadata(&same), metadata(&source));
    let together: BTreeMap<String, String> = [("k", "1"), ("l", "3")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    assert_eq!(metadata(&cut), [together.clone(), together], "the first value of each key");
}

#[test]
fn a_copy_of_one_indexed_file_is_found_by_its_index() {
    let directory = scratch();
    let source = directory.path().join("source");
    put(source.join("model.safetensors"), shard(&[("a", 1), ("unlisted", 2)], &[]));
    let index = source.join("model.safetensors.index.json");
    put_index(index.clone(), &serde_json::json!({"note": "kept"}), &[("a", "model.safetensors")]);
    let target = directory.path().join("target");
    opened(&index).copy_to(&target, CopyOptions::default()).expect("copy");
    assert_eq!(loads(&target), [("a".to_owned(), vec![1; 2])].into());
    assert_eq!((opened(&target).notes(), &index_of(&target)["metadata"]["note"]), (&[][..], &"kept".into()));
}

#[test]
fn a_single_file_that_hides_an_index_or_shards_leaves_a_note() {
    let directory = scratch();
    let alone = directory.path().join("alone");
    put(alone.join("model.safetensors"), shard(&[("a", 1)], &[]));
    put(alone.join("extra.safetensors"), shard(&[("b", 2)], &[]));
    assert_eq!(opened(&alone).notes(), [""; 0], "files of whatever other name are no part of a set");
    for (case, beside) in [("index", "model.safetensors.index.json"), ("shards", "model-00001-of-00001.safetensors")] {
        let case = directory.path().join(case);
        put(case.join("model.safetensors"), shard(&[("a", 1)], &[]));
        put(case.join(beside), shard(&[("b", 2)], &[]));
        let model = opened(&case);
        assert_eq!(model.entries().len(), 1);
        assert!(matches!(model.notes(), [note] if note.contains("model.safetensors alone")), "{:?}", model.notes());
    }
}

/// Saves one tensor, as a file or as a directory. Not even the first byte may be written to a target that is refused.
fn save_to(target: &Path, as_directory: bool) -> Result<()> {
    let buffer = HostBuffer::from_vec(vec![7; 4]);
    let source = Source::new("new", Dtype::U8, [4], buffer.source(0..4).expect("free"));
    let moved = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&moved);
    let progress = Arc::new(move |bytes| counter.store(bytes, Ordering::Relaxed));
    let mut options = SaveOptions::default().progress(progress);
    if as_directory {
        options = options.max_shard_size(ByteSize(100));
    }
    let outcome = session().save(&[source], target, options).map(drop);
    assert_eq!(moved.load(Ordering::Relaxed) > 0, outcome.is_ok(), "a refusal comes before the first byte");
    outcome
}

#[test]
fn a_link_at_the_target_is_replaced_by_a_file_and_refused_for_a_directory() {
    let directory = scratch();
    let root = directory.path();
    std::fs::create_dir(root.join("empty")).expect("directory");
    std::fs::write(root.join("file"), b"others read this").expect("write");
    for (name, to) in [("to_directory", "empty"), ("dangling", "nowhere"), ("to_file", "file")] {
        std::os::unix::fs::symlink(to, root.join(name)).expect("link");
    }
    let before = names(root);
    for name in ["to_directory", "dangling", "to_file", "to_directory/"] {
        let error = save_to(&root.join(name), true).expect_err("no directory can take a link's place");
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{name}: {error}");
        assert!(error.message().contains("link") && error.hint().is_some(), "{name}: {error:?}");
        assert_eq!(names(root), before, "{name}");
    }
    let error = save_to(&root.join("to_directory"), false).expect_err("it stands for a directory");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("to_directory/model.safetensors")), "{error:?}");
    for name in ["dangling", "to_file"] {
        save_to(&root.join(name), false).expect("a link is replaced");
        assert!(!root.join(name).is_symlink(), "{name}");
        assert_eq!(loads(&root.join(name)), [("new".to_owned(), vec![7; 4])].into());
    }
    assert_eq!(names(root), before);
    assert_eq!(std::fs::read(root.join("file")).expect("it is still there"), b"others read this");
    assert_eq!(names(&root.join("empty")), [""; 0]);
}

#[test]
fn a_slash_after_the_target_names_a_directory() {
    let directory = scratch();
    let error = save_to(&directory.path().join("out/"), false).expect_err("no file has such a name");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(names(directory.path()), [""; 0]);
    save_to(&directory.path().join("out/"), true).expect("a directory has");
    assert_eq!(loads(&directory.path().join("out")), [("new".to_owned(), vec![7; 4])].into());
}

#[test]
fn a_buffer_for_a_tensor_that_is_not_loaded_or_has_one_is_refused_by_name() {
    let directory = scratch();
    let path = directory.path().join("two.safetensors");
    put(path.clone(), shard(&[("a", 1), ("b", 2)], &[]));
    let model = opened(&path);
    let buffer = || HostBuffer::new(2).expect("memory");
    let refused = |options: LoadOptions| {
        let error = model.load(options).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        (error.context("tensor").unwrap_or_default().to_owned(), error.message().to_owned())
    };
    let (tensor, message) = refused(LoadOptions::all().into("a", buffer()).into("a", buffer()));
    assert!(tensor == "a" && message.contains("two buffers"), "{message}");
    let (tensor, message) = refused(LoadOptions::all().select(["b"]).into("a", buffer()));
    assert!(tensor == "a" && message.contains("not among those"), "{message}");
    let (tensor, message) = refused(LoadOptions::all().into("c", buffer()));
    assert!(tensor == "c" && message.contains("no such tensor"), "{message}");
    let (tensor, message) = refused(LoadOptions::all().into("b", HostBuffer::new(3).expect("memory")));
    assert!(tensor == "b" && message.contains("3 bytes"), "{message}");
    model.load(LoadOptions::all().into("b", buffer()).into("a", buffer())).expect("each has its own");
}

const DIRECTORY: &str = "/models";
const TARGET: &str = "/models/target";

fn disk() -> SimDisk {
    let disk = SimDisk::new(SimDiskSettings::default());
    disk.put_directory(DIRECTORY);
    disk
}

fn session_on(namespace: Arc<dyn Namespace>) -> Session {
    Session::builder().namespace(namespace).engines(Box::new(SimEngines::new(4, 7))).build().expect("session")
}

/// `count` tensors, each of which fills a shard.
fn shards(count: u8) -> KnownModel {
    let names: Vec<String> = (0..count).map(|number| format!("t{number}")).collect();
    let specs: Vec<(&str, Dtype, &[u64])> = names.iter().map(|name| (name.as_str(), Dtype::U8, &[64_u64][..])).collect();
    model(5, &specs)
}

fn save_on(namespace: Arc<dyn Namespace>, model: &KnownModel) -> Result<()> {
    session_on(namespace).save(&model.sources(), TARGET, SaveOptions::default().max_shard_size(ByteSize(64))).map(drop)
}

#[test]
fn a_publication_that_may_not_last_says_that_it_is_published() {
    for (errno, old) in [(libc::EIO, false), (libc::ENOSPC, true), (libc::EINVAL, true)] {
        let disk = disk();
        let (before, after) = (model(1, &[("t", Dtype::U8, &[9])]), model(2, &[("t", Dtype::U8, &[9])]));
        if old {
            disk.put(TARGET, before.to_safetensors());
        }
        let save =
            |disk: &SimDisk| session_on(Arc::new(disk.clone())).save(&after.sources(), TARGET, SaveOptions::default()).map(drop);
        let trial = disk.reboot_all_kept();
        save(&trial).expect("nothing is in the way");
        let steps = trial.trace();
        assert_eq!(steps.last().map(String::as_str), Some("sync_directory /models"));
        disk.fail_at(steps.len() as u64 - 1, errno);
        let error = save(&disk).expect_err("the directory could not be synced");
        assert_eq!((error.context("published"), error.context("target")), (Some("yes"), Some(TARGET)), "{error}");
        assert_eq!(error.os_error(), Some(errno));
        assert!(error.message().contains("in place") && error.hint().is_some(), "{error:?}");
        let (tensors, _) =
            session_on(Arc::new(disk.clone())).open(TARGET).and_then(|model| model.load(LoadOptions::all())).expect("whole");
        assert_eq!(after.difference(&tensors), None);
        // Every other failure leaves what was there, and does not say otherwise.
        for step in 0..steps.len() as u64 - 1 {
            let disk = trial.reboot_all_lost();
            disk.fail_at(step, libc::EIO);
            if let Err(error) = save(&disk) {
                assert_eq!(error.context("published"), None, "step {step}: {error}");
            }
        }
    }
}

#[test]
fn a_directory_that_cannot_be_synced_is_found_out_before_anything_is_written() {
    let disk = disk();
    let model = shards(2);
    let trial = disk.reboot_all_kept();
    save_on(Arc::new(trial.clone()), &model).expect("nothing is in the way");
    let at = trial.trace().iter().position(|step| step == "open_directory /models").expect("it is opened");
    disk.fail_at(at as u64, libc::EACCES);
    let error = save_on(Arc::new(disk.clone()), &model).expect_err("refused");
    assert_eq!((error.kind(), error.context("target")), (ErrorKind::PermissionDenied, Some(TARGET)));
    assert!(!disk.trace().iter().any(|step| step.starts_with("create")), "{:?}", disk.trace());
}

#[test]
fn every_failure_on_a_temporary_file_names_the_file_that_it_would_have_become() {
    let model = shards(3);
    let trial = disk();
    save_on(Arc::new(trial.clone()), &model).expect("nothing is in the way");
    let mut tried = 0;
    for (step, what) in trial.trace().iter().enumerate().filter(|(_, what)| what.contains(".thruway-")) {
        let disk = disk();
        disk.fail_at(step as u64, libc::EIO);
        // Some operations are not needed for success.
        if let Err(error) = save_on(Arc::new(disk.clone()), &model) {
            let target = error.context("target").unwrap_or_else(|| panic!("no target after {:?}: {error}", disk.failed()));
            assert!(target.starts_with(TARGET) && !target.contains(".thruway-"), "{what}: {error}");
            // Files are synced side by side, so the step that failed may be another than in the trial.
            let failed = disk.failed().first().cloned().expect("the save failed at it");
            let file = failed.rsplit_once('/').map_or("", |(_, name)| name);
            assert!(!file.ends_with("ors") || target.ends_with("ors"), "{failed}: {error}");
            tried += 1;
        }
    }
    assert!(tried > 15, "only {tried} steps could fail");
}

/// A disk that watches how files are synced, and may have lost what was written.
#[derive(Clone, Debug)]
struct Watched {
    disk: SimDisk,
    seen: Arc<Mutex<Seen>>,
    /// Only handles that were open before the bytes were lost are told, as on Linux when another has been told since.
    loses_writes: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    by_creator: u32,
    by_another: u32,
    running: u32,
    running_max: u32,
}

impl Watched {
    fn new(loses_writes: bool) -> Self {
        Self { disk: disk(), seen: Arc::default(), loses_writes }
    }

    fn watch(&self, file: Arc<dyn File>, created: bool) -> Arc<dyn File> {
        Arc::new(WatchedFile { file, created, by: self.clone() })
    }

    fn seen(&self) -> Seen {
        *self.seen.lock().expect("no panic")
    }
}

impl Namespace for Watched {
    fn open(&self, path: &Path, access: Access, buffering: Buffering) -> Result<Arc<dyn File>> {
        Ok(self.watch(self.disk.open(path, access, buffering)?, false))
    }
    fn create(&self, path: &Path, permissions: Option<u32>) -> Result<Arc<dyn File>> {
        Ok(self.watch(self.disk.create(path, permissions)?, true))
    }
    fn metadata(&self, path: &Path) -> Result<Metadata> {
        self.disk.metadata(path)
    }
    fn own_metadata(&self, path: &Path) -> Result<Metadata> {
        self.disk.own_metadata(path)
    }
    fn list(&self, directory: &Path) -> Result<Vec<std::ffi::OsString>> {
        self.disk.list(directory)
    }
    fn create_directory(&self, path: &Path) -> Result<()> {
        self.disk.create_directory(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.disk.rename(from, to)
    }
    fn rename_new(&self, from: &Path, to: &Path) -> Result<()> {
        self.disk.rename_new(from, to)
    }
    fn remove(&self, path: &Path) -> Result<()> {
        self.disk.remove(path)
    }
    fn remove_directory(&self, path: &Path) -> Result<()> {
        self.disk.remove_directory(path)
    }
    fn open_directory(&self, path: &Path) -> Result<Box<dyn Directory>> {
        self.disk.open_directory(path)
    }
    fn lock(&self, path: &Path) -> Result<Box<dyn Lock>> {
        self.disk.lock(path)
    }
    fn free_bytes(&self, directory: &Path) -> Result<u64> {
        self.disk.free_bytes(directory)
    }
}

#[derive(Debug)]
struct WatchedFile {
    file: Arc<dyn File>,
    created: bool,
    by: Watched,
}

impl File for WatchedFile {
    fn descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.file.descriptor()
    }
    fn identity(&self) -> Result<Identity> {
        self.file.identity()
    }
    fn direct_rules(&self) -> Option<DirectRules> {
        self.file.direct_rules()
    }
    fn residency(&self, extent: Extent) -> Residency {
        self.file.residency(extent)
    }
    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.file.read_at(target, offset)
    }
    fn write_at(&self, source: &[u8], offset: u64) -> std::io::Result<usize> {
        self.file.write_at(source, offset)
    }
    fn allocate(&self, length: u64) -> Result<()> {
        self.file.allocate(length)
    }
    fn sync(&self) -> Result<()> {
        let count = |change: fn(&mut Seen)| change(&mut self.by.seen.lock().expect("no panic"));
        count(|seen| {
            seen.running += 1;
            seen.running_max = seen.running_max.max(seen.running);
        });
        // A drive takes its time, in which others can be synced.
        std::thread::sleep(std::time::Duration::from_millis(5));
        count(if self.created { |seen| seen.by_creator += 1 } else { |seen| seen.by_another += 1 });
        count(|seen| seen.running -= 1);
        if self.by.loses_writes && self.created {
            let lost = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(thruway::Error::from_io("cannot sync", lost).with_file(Path::new("some file")));
        }
        self.file.sync()
    }
}

#[test]
fn the_files_of_a_save_are_synced_several_at_once_by_the_handles_that_saw_the_writes() {
    let watched = Watched::new(false);
    save_on(Arc::new(watched.clone()), &shards(12)).expect("nothing is in the way");
    let seen = watched.seen();
    assert_eq!((seen.by_creator, seen.by_another), (13, 0), "twelve shards and an index");
    assert!((2..=8).contains(&seen.running_max), "{seen:?}");
}

#[test]
fn a_save_of_many_files_syncs_each_and_keeps_few_open() {
    let watched = Watched::new(false);
    save_on(Arc::new(watched.clone()), &shards(80)).expect("nothing is in the way");
    let seen = watched.seen();
    assert_eq!(seen.by_creator + seen.by_another, 81, "{seen:?}");
    assert!((1..=64).contains(&seen.by_creator), "{seen:?}");
}

#[test]
fn what_only_the_handle_of_the_writer_is_told_keeps_a_save_from_being_published() {
    let watched = Watched::new(true);
    let error = save_on(Arc::new(watched.clone()), &shards(12)).expect_err("writes were lost");
    assert_eq!((error.kind(), error.context("published")), (ErrorKind::Io, None), "{error}");
    assert_eq!(watched.disk.names(DIRECTORY), [""; 0]);
    assert!(watched.seen().by_creator <= 8, "after a failure no further file is synced: {:?}", watched.seen());
}

/// How often each file was read while a model was opened.
fn reads(disk: &SimDisk, path: &str) -> Vec<usize> {
    let before = disk.trace().len();
    let model = session_on(Arc::new(disk.clone())).open(path).expect("it opens");
    let files: Vec<String> = model.files().map(|file| format!("read_at {}", file.display())).collect();
    let trace = disk.trace().split_off(before);
    files.iter().map(|file| trace.iter().filter(|step| *step == file).count()).collect()
}

#[test]
fn opening_reads_a_file_once_and_again_only_if_its_header_is_long() {
    let disk = disk();
    let known = shards(4);
    disk.put("/models/short", known.to_safetensors());
    disk.put("/models/long", known.to_safetensors_padded(100_000));
    assert_eq!(reads(&disk, "/models/short"), [1]);
    assert_eq!(reads(&disk, "/models/long"), [2]);
    for (number, spaces) in [0, 100_000, 200_000].into_iter().enumerate() {
        let mut one = shards(1);
        one.tensors[0].spec.name = format!("t{number}");
        disk.put(format!("/models/all/{number}.safetensors"), one.to_safetensors_padded(spaces));
    }
    assert_eq!(reads(&disk, "/models/all"), [1, 2, 2]);
    let names: Vec<String> = session_on(Arc::new(disk))
        .open("/models/all")
        .expect("it opens")
        .entries()
        .iter()
        .map(|entry| entry.name.clone())
        .collect();
    assert_eq!(names, ["t0", "t1", "t2"]);
}

#[test]
fn a_file_that_replaces_another_has_its_permissions_and_a_new_one_those_of_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    let mode = || std::fs::metadata(&path).expect("there").permissions().mode() & 0o777;
    put(directory.path().join("other"), "");
    let ordinary = std::fs::metadata(directory.path().join("other")).expect("there").permissions().mode() & 0o777;
    let source = HostBuffer::from_vec(vec![7; 2]);
    let save = || {
        let region = source.source(0..2).expect("idle");
        let spec = thruway::format::safetensors::TensorSpec { name: "a".to_owned(), dtype: Dtype::U8, shape: vec![2] };
        session().save(&[Source { spec, region }], &path, SaveOptions::default()).expect("saved");
    };
    save();
    assert_eq!(mode(), ordinary);
    for permissions in [0o600, 0o664, 0o640] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(permissions)).expect("ours");
        save();
        assert_eq!(mode(), permissions);
    }
}
