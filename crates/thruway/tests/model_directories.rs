//! What counts as a model, and which models are refused: directories, indexes, links, odd names, few descriptors.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use thruway::format::safetensors::Dtype;
use thruway::{
    ByteSize, CopyOptions, ErrorKind, HostBuffer, LoadOptions, PathPolicy, SaveOptions, Session, Source, VerifyOptions,
};

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

fn session() -> Session {
    Session::builder().build().expect("session")
}

/// One tensor's bytes as a file, written without our own writer.
fn shard(tensors: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, bytes) in tensors {
        let entry =
            serde_json::json!({"dtype": "U8", "shape": [bytes.len()], "data_offsets": [data.len(), data.len() + bytes.len()]});
        header.insert((*name).to_owned(), entry);
        data.extend_from_slice(bytes);
    }
    let text = serde_json::Value::Object(header).to_string().into_bytes();
    let mut file = (text.len() as u64).to_le_bytes().to_vec();
    file.extend(text);
    file.extend(data);
    file
}

fn put(path: &Path, bytes: &[u8]) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
    std::fs::write(path, bytes).expect("write");
}

fn index(pairs: &[(&str, &str)]) -> Vec<u8> {
    let map: BTreeMap<&str, &str> = pairs.iter().copied().collect();
    serde_json::json!({"metadata": {"total_size": 6}, "weight_map": map}).to_string().into_bytes()
}

const NAMES: [&str; 3] =
    ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"];

/// Three shards of one tensor each, less those to skip, with or without an index.
fn sharded(directory: &Path, skip: &[usize], with_index: bool) {
    std::fs::create_dir_all(directory).expect("directory");
    for (number, name) in NAMES.iter().enumerate().filter(|(number, _)| !skip.contains(number)) {
        put(&directory.join(name), &shard(&[(["a", "b", "c"][number], &[u8::try_from(number).expect("small"); 2])]));
    }
    if with_index {
        put(&directory.join("model.safetensors.index.json"), &index(&[("a", NAMES[0]), ("b", NAMES[1]), ("c", NAMES[2])]));
    }
}

fn loads(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let model = session().open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (tensors, _) = model.load(LoadOptions::all()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    tensors.iter().map(|tensor| (tensor.name().to_owned(), tensor.bytes().expect("done").to_vec())).collect()
}

fn refused(path: &Path) -> thruway::Error {
    session().open(path).err().unwrap_or_else(|| panic!("{} was accepted", path.display()))
}

fn abc() -> BTreeMap<String, Vec<u8>> {
    [("a", 0), ("b", 1), ("c", 2)].map(|(name, value)| (name.to_owned(), vec![value; 2])).into()
}

#[test]
fn a_whole_set_of_shards_loads_with_and_without_its_index_and_by_the_index_itself() {
    let directory = scratch();
    sharded(&directory.path().join("indexed"), &[], true);
    sharded(&directory.path().join("plain"), &[], false);
    for path in ["indexed", "plain", "indexed/model.safetensors.index.json"] {
        assert_eq!(loads(&directory.path().join(path)), abc(), "{path}");
    }
}

#[test]
fn every_missing_shard_is_named_at_once() {
    let directory = scratch();
    for (skip, with_index) in [(vec![1], true), (vec![0, 2], true), (vec![1], false), (vec![0, 1, 2], true)] {
        let case = directory.path().join(format!("{skip:?}{with_index}"));
        sharded(&case, &skip, with_index);
        let error = refused(&case);
        assert_eq!(error.kind(), ErrorKind::NotFound);
        skip.iter().for_each(|number| assert!(error.to_string().contains(NAMES[*number]), "{error}"));
    }
}

#[test]
fn a_cut_or_empty_shard_and_an_empty_directory_are_refused() {
    let directory = scratch();
    for (case, length) in [("cut", 60), ("empty", 0)] {
        let case = directory.path().join(case);
        sharded(&case, &[], true);
        std::fs::File::options().write(true).open(case.join(NAMES[2])).and_then(|file| file.set_len(length)).expect("cut");
        let error = refused(&case);
        assert!(error.to_string().contains(NAMES[2]), "{error}");
    }
    let empty = directory.path().join("nothing");
    std::fs::create_dir(&empty).expect("directory");
    assert_eq!(refused(&empty).kind(), ErrorKind::NotFound);
    assert_eq!(refused(&directory.path().join("absent")).kind(), ErrorKind::NotFound);
}

#[test]
fn an_index_that_contradicts_its_shards_is_refused_and_one_that_says_less_leaves_a_note() {
    let directory = scratch();
    let case = directory.path().join("wrong");
    sharded(&case, &[], true);
    put(&case.join("model.safetensors.index.json"), &index(&[("a", NAMES[0]), ("b", NAMES[2])]));
    let error = refused(&case);
    assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::Malformed, Some("b")));
    put(&case.join("model.safetensors.index.json"), &index(&[("a", NAMES[0]), ("c", NAMES[2])]));
    let model = session().open(&case).expect("a subset is a model");
    assert_eq!(model.entries().len(), 2);
    put(&case.join(NAMES[0]), &shard(&[("a", &[0; 2]), ("unlisted", &[9; 3])]));
    let model = session().open(&case).expect("an unlisted tensor is left out");
    assert!(model.entry("unlisted").is_none());
    assert!(model.notes().iter().any(|note| note.contains("left out")), "{:?}", model.notes());
}

#[test]
fn of_a_tensor_in_two_shards_the_index_decides_and_without_one_it_is_refused() {
    let directory = scratch();
    put(&directory.path().join("x.safetensors"), &shard(&[("t", &[1])]));
    put(&directory.path().join("y.safetensors"), &shard(&[("t", &[2])]));
    let error = refused(directory.path());
    assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::Malformed, Some("t")));
    put(&directory.path().join("model.safetensors.index.json"), &index(&[("t", "y.safetensors")]));
    assert_eq!(loads(directory.path()), [("t".to_owned(), vec![2])].into());
}

#[test]
fn an_index_cannot_lead_out_of_its_directory() {
    let directory = scratch();
    put(&directory.path().join("secret.safetensors"), &shard(&[("t", &[1])]));
    for name in ["../secret.safetensors", "/etc/passwd", "sub/../../secret.safetensors", ""] {
        put(&directory.path().join("m/model.safetensors.index.json"), &index(&[("t", name)]));
        assert_eq!(refused(&directory.path().join("m")).kind(), ErrorKind::Malformed, "{name}");
    }
}

#[test]
fn the_hugging_face_cache_of_links_to_blobs_loads_and_a_broken_link_names_its_target() {
    let directory = scratch();
    let root = directory.path();
    let snapshot = root.join("models--o--n/snapshots/0123");
    std::fs::create_dir_all(&snapshot).expect("directory");
    let link = |from: &Path, to: &str| std::os::unix::fs::symlink(to, from).expect("link");
    for (number, name) in NAMES.iter().enumerate() {
        let blob = format!("models--o--n/blobs/{number:064x}");
        put(&root.join(&blob), &shard(&[(["a", "b", "c"][number], &[u8::try_from(number).expect("small"); 2])]));
        link(&snapshot.join(name), &format!("../../blobs/{number:064x}"));
    }
    let index_blob = index(&[("a", NAMES[0]), ("b", NAMES[1]), ("c", NAMES[2])]);
    put(&root.join("models--o--n/blobs/ffff"), &index_blob);
    link(&snapshot.join("model.safetensors.index.json"), "../../blobs/ffff");
    link(&root.join("by_link"), "models--o--n/snapshots/0123");
    link(&root.join("link_to_link"), "by_link");
    for path in [snapshot.clone(), root.join("by_link"), root.join("link_to_link")] {
        assert_eq!(loads(&path), abc());
    }
    assert_eq!(loads(&snapshot.join(NAMES[1])), [("b".to_owned(), vec![1; 2])].into());

    std::fs::create_dir(root.join("broken")).expect("directory");
    link(&root.join("broken/model.safetensors"), "../models--o--n/blobs/gone");
    let error = refused(&root.join("broken"));
    assert!(error.to_string().contains("broken/model.safetensors") && error.to_string().contains("blobs/gone"), "{error}");

    // Saving over a link replaces the link and never the blob that others share.
    let shared = std::fs::read(root.join(format!("models--o--n/blobs/{:064x}", 0))).expect("blob");
    let buffer = HostBuffer::from_vec(vec![7; 4]);
    let source = Source::new("new", Dtype::U8, [4], buffer.source(0..4).expect("all"));
    session().save(&[source], snapshot.join(NAMES[0]), SaveOptions::default()).expect("save");
    assert_eq!(std::fs::read(root.join(format!("models--o--n/blobs/{:064x}", 0))).expect("blob"), shared);
    assert_eq!(loads(&snapshot.join(NAMES[0])), [("new".to_owned(), vec![7; 4])].into());
}

#[test]
fn odd_paths_and_endings_load_and_are_saved_into() {
    let directory = scratch();
    let deep = vec!["d".repeat(100); 30].join("/");
    let long = "n".repeat(255);
    let names: [&[u8]; 14] = [
        b"with space",
        b"[[x],[y]]",
        b"star*and?mark",
        b"percent%20%2F",
        "caf\u{e9}".as_bytes(),
        "模型 😀".as_bytes(),
        b"-dash",
        b"line\nbreak",
        b"quote'\"quote",
        b"dollar$HOME",
        b"~",
        b".hidden",
        b"latin1_\xe9_not_utf8",
        long.as_bytes(),
    ];
    let mut paths: Vec<PathBuf> = names.iter().map(|name| directory.path().join(OsStr::from_bytes(name))).collect();
    paths.push(directory.path().join(deep));
    for path in paths {
        sharded(&path, &[], true);
        assert_eq!(loads(&path), abc(), "{}", path.display());
        assert_eq!(loads(&path.join(NAMES[0])).len(), 1);
        session().open(&path).and_then(|model| model.copy_to(&path.join("copy"), CopyOptions::default())).expect("copy");
        assert_eq!(loads(&path.join("copy")), abc(), "{}", path.display());
    }
    for name in ["model.SAFETENSORS", "model", "model.safetensors.bak", "model.safetensors "] {
        let path = directory.path().join("files").join(name);
        put(&path, &shard(&[("t", &[1, 2])]));
        assert_eq!(loads(&path), [("t".to_owned(), vec![1, 2])].into(), "{name}");
    }
}

#[test]
fn what_is_no_regular_file_is_refused_without_hanging() {
    let directory = scratch();
    let fifo = directory.path().join("model.safetensors");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("fifo");
    for path in [fifo.as_path(), directory.path(), Path::new("/dev/null")] {
        let error = refused(path);
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
}

#[test]
fn files_of_another_kind_are_called_by_their_name() {
    let directory = scratch();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n";
    for (name, bytes, word) in [("lfs", pointer.as_slice(), "Git LFS"), ("zip", b"PK\x03\x04aaaaaaaaaaaaa".as_slice(), "zip")] {
        let path = directory.path().join(name);
        put(&path, bytes);
        let error = refused(&path);
        assert!(format!("{error:?}").contains(word), "{error:?}");
    }
}

/// Sets the limit of open files for this process; each test runs in a process of its own.
fn limit_open_files(limit: u64) {
    let new = rustix::process::Rlimit { current: Some(limit), maximum: Some(limit) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, new).expect("lower the limit");
}

#[test]
fn three_hundred_shards_load_with_twenty_four_descriptors_and_none_is_left_open() {
    let directory = scratch();
    let count = 300;
    let mut pairs = Vec::new();
    for number in 1..=count {
        let name = format!("model-{number:05}-of-{count:05}.safetensors");
        put(
            &directory.path().join(&name),
            &shard(&[(&format!("t{number}"), &[u8::try_from(number % 251).expect("small"); 5000])]),
        );
        pairs.push((format!("t{number}"), name));
    }
    let pairs: Vec<(&str, &str)> = pairs.iter().map(|(tensor, file)| (tensor.as_str(), file.as_str())).collect();
    put(&directory.path().join("model.safetensors.index.json"), &index(&pairs));
    let open = || std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    limit_open_files(24);
    let session = session();
    // The first load past the page cache makes the session's io_uring, which is a descriptor that stays.
    load_shards(&session, directory.path(), "staged");
    let before = open();
    for policy in ["auto", "staged", "cached"].iter().cycle().take(9) {
        load_shards(&session, directory.path(), policy);
    }
    assert_eq!(open(), before, "descriptors leak");
}

#[test]
fn a_copy_of_a_hundred_shards_needs_few_descriptors() {
    let directory = scratch();
    let source = directory.path().join("source");
    for number in 1..=100_u8 {
        put(&source.join(format!("model-{number:05}-of-00100.safetensors")), &shard(&[(&format!("t{number}"), &[number; 100])]));
    }
    limit_open_files(24);
    let target = directory.path().join("target");
    session().open(&source).and_then(|model| model.copy_to(&target, CopyOptions::default())).expect("copy");
    assert_eq!(loads(&target), loads(&source));
}

fn load_shards(session: &Session, directory: &Path, policy: &str) {
    let model = session.open(directory).expect("few descriptors are enough");
    let policy: PathPolicy = policy.parse().expect("known");
    let (tensors, receipt) = model.load(LoadOptions::all().path(policy)).expect("few descriptors are enough");
    assert_eq!((tensors.len(), receipt.files.len()), (300, 300));
    for tensor in &tensors {
        let number: usize = tensor.name()[1..].parse().expect("a number");
        assert!(tensor.bytes().expect("done").iter().all(|byte| usize::from(*byte) == number % 251));
    }
}

#[test]
fn a_hundred_thousand_tensors_in_one_file_load() {
    let directory = scratch();
    let names: Vec<String> = (0..100_000).map(|number| format!("layer.{number}.weight")).collect();
    let values: Vec<[u8; 3]> = (0..100_000_u32)
        .map(|number| {
            let [a, b, c, _] = number.to_le_bytes();
            [a, b, c]
        })
        .collect();
    let tensors: Vec<(&str, &[u8])> = names.iter().zip(&values).map(|(name, value)| (name.as_str(), value.as_slice())).collect();
    let path = directory.path().join("many.safetensors");
    put(&path, &shard(&tensors));
    for policy in ["staged", "cached"] {
        let model = session().open(&path).expect("open");
        let (loaded, _) = model.load(LoadOptions::all().path(policy.parse().expect("known"))).expect("load");
        assert_eq!(loaded.len(), 100_000);
        assert!(
            names.iter().zip(&values).all(|(name, value)| loaded.get(name).is_some_and(|t| t.bytes().expect("done") == value))
        );
    }
}

#[test]
fn one_tensor_over_four_gibibytes_loads_from_a_sparse_file() {
    let directory = scratch();
    let path = directory.path().join("huge.safetensors");
    let bytes: u64 = (4 << 30) + 12_345;
    let header = serde_json::json!({"huge": {"dtype": "U8", "shape": [bytes], "data_offsets": [0, bytes]}}).to_string();
    put(&path, &[&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat());
    let file = std::fs::File::options().write(true).open(&path).expect("open");
    let start = 8 + header.len() as u64;
    file.set_len(start + bytes).expect("a sparse file");
    let marks: Vec<u64> = vec![0, 1 << 31, (1 << 32) - 1, 1 << 32, bytes - 1];
    for mark in &marks {
        std::os::unix::fs::FileExt::write_all_at(&file, &[0xA5], start + mark).expect("write");
    }
    let model = session().open(&path).expect("open");
    // Only what surrounds each mark, so that the test needs little memory; then all of it as a digest.
    for mark in &marks {
        let range = mark.saturating_sub(2)..(mark + 3).min(bytes);
        let options = LoadOptions::all().select(Vec::<String>::new()).slice("huge", 0, range.clone());
        let (tensors, _) = model.load(options).expect("slice");
        let found = tensors.get("huge").expect("loaded").bytes().expect("done").to_vec();
        let expected: Vec<u8> = range.map(|at| if marks.contains(&at) { 0xA5 } else { 0 }).collect();
        assert_eq!(found, expected, "around {mark}");
    }
}

#[test]
fn a_model_saved_over_the_file_it_was_loaded_from_is_whole_in_memory_and_on_disk() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    put(&path, &shard(&[("a", &[1; 300_000]), ("b", &[2; 7])]));
    let session = session();
    let model = session.open(&path).expect("open");
    let (tensors, _) = model.load(LoadOptions::all()).expect("load");
    let sources: Vec<Source> = tensors
        .iter()
        .map(|tensor| Source::new(tensor.name(), tensor.dtype(), tensor.shape(), tensor.region().expect("free")))
        .collect();
    session.save(&sources, &path, SaveOptions::default()).expect("save over itself");
    model.copy_to(&path, CopyOptions::default()).expect_err("the model was replaced, and an opened model says so");
    let again = session.open(&path).expect("open");
    again.copy_to(&path, CopyOptions::default()).expect("copy over itself");
    for tensor in &tensors {
        assert_eq!(loads(&path)[tensor.name()], tensor.bytes().expect("free"));
    }
}

#[test]
fn shards_split_by_size_hold_the_same_tensors_and_an_index_that_others_read() {
    let directory = scratch();
    let path = directory.path().join("model.safetensors");
    let data: Vec<(String, Vec<u8>)> = (0..20_u8).map(|i| (format!("t{i:02}"), vec![i; 1000 * usize::from(i)])).collect();
    let tensors: Vec<(&str, &[u8])> = data.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    put(&path, &shard(&tensors));
    let target = directory.path().join("sharded");
    let model = session().open(&path).expect("open");
    model.copy_to(&target, CopyOptions::default().max_shard_size(ByteSize(40_000))).expect("copy");
    assert_eq!(loads(&target), loads(&path));
    let verdict = session().open(&target).and_then(|copy| model.verify(Some(&copy), &VerifyOptions::default())).expect("verify");
    assert!(verdict.differences.is_empty());
    let text = std::fs::read_to_string(target.join("model.safetensors.index.json")).expect("index");
    let index: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(index["metadata"]["total_size"], 190_000);
    assert_eq!(index["weight_map"].as_object().map(serde_json::Map::len), Some(20));
    let error = model.copy_to(&target, CopyOptions::default().max_shard_size(ByteSize(1000))).expect_err("occupied");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

#[test]
fn slices_on_every_dimension_equal_the_same_slices_of_the_whole() {
    let directory = scratch();
    let path = directory.path().join("cube.safetensors");
    let shape = [7_usize, 11, 13];
    let values: Vec<u16> = (0..1001).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let header = serde_json::json!({"t": {"dtype": "U16", "shape": shape, "data_offsets": [0, bytes.len()]}}).to_string();
    put(&path, &[&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes].concat());
    for policy in ["staged", "cached"] {
        let model = session().open(&path).expect("open");
        for dimension in 0..3 {
            for (start, end) in [(0, shape[dimension]), (2, 5), (6, 7), (3, 3)] {
                let options =
                    LoadOptions::all().slice("t", dimension, start as u64..end as u64).path(policy.parse().expect("known"));
                let (tensors, _) = model.load(options).expect("slice");
                let mut expected = Vec::new();
                for (at, value) in values.iter().enumerate() {
                    let place = [at / 143, at / 13 % 11, at % 13];
                    if (start..end).contains(&place[dimension]) {
                        expected.extend(value.to_le_bytes());
                    }
                }
                assert_eq!(
                    tensors.get("t").expect("loaded").bytes().expect("done"),
                    expected,
                    "{policy} {dimension} {start}..{end}"
                );
            }
        }
    }
}
