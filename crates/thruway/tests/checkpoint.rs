//! Checkpoints: what is saved comes back, and nothing that is damaged, mixed up or half there is taken for whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use thruway::checkpoint::{CheckpointOptions, Checkpoints, Group, Json, RestoreOptions, Retention, VerifyOptions};
use thruway::format::safetensors::Dtype;
use thruway::{ByteSize, Device, Error, ErrorKind, HostBuffer, LoadOptions, Result, Session, Source};
use thruway_testkit::fixtures::{model, scratch_dir};
use thruway_testkit::training::State;

fn session() -> Session {
    Session::builder().device(Device::Host).build().expect("session")
}

fn checkpoints(directory: &Path) -> Checkpoints {
    session().checkpoints(directory)
}

/// Small shards and small chunks, so that there are several of each.
fn options() -> CheckpointOptions {
    CheckpointOptions::default().max_shard_size(ByteSize(40_000)).chunk_size(ByteSize(4096))
}

fn save(state: &State, into: &Checkpoints, step: u64) -> Result<PathBuf> {
    let saved = into.save(step, &state.groups(), &state.structure(), options())?;
    assert_eq!(saved.warnings.iter().map(Error::to_string).collect::<Vec<_>>(), [""; 0]);
    Ok(saved.path)
}

fn assert_restored(state: &State, from: &Checkpoints, options: &RestoreOptions) {
    let restored = from.restore(options).expect("it can be restored");
    assert_eq!(state.difference(&restored), None);
}

fn structure(step: u64) -> Json {
    State::at(step).structure()
}

/// A directory with these steps.
fn saved(steps: &[u64]) -> (tempfile::TempDir, Checkpoints) {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(&scratch.path().join("run"));
    for step in steps {
        save(&State::at(*step), &checkpoints, *step).expect("saved");
    }
    (scratch, checkpoints)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn what_a_save_will_take_is_told_before_it_and_from_the_second_on_how_long() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(&scratch.path().join("run"));
    let state = State::at(1);
    let ask = || checkpoints.preflight(&state.groups(), &state.structure(), &options()).expect("there is room");
    let before = ask();
    assert_eq!(before.seconds, None);
    assert!(!checkpoints.directory().exists() && before.free_bytes > before.bytes);
    let path = save(&state, &checkpoints, 1).expect("saved");
    // The manifest is no part of the bytes.
    let lengths = std::fs::read_dir(&path).expect("a directory").map(|entry| {
        let entry = entry.expect("an entry");
        if entry.file_name() == "manifest.json" { 0 } else { entry.metadata().expect("metadata").len() }
    });
    assert_eq!((before.files, before.bytes), (names(&path).len() as u64, lengths.sum()));
    let took = checkpoints.open(1).expect("it is there").manifest().written_in_ms;
    let predicted = ask().seconds.map(std::time::Duration::from_secs_f64).expect("there is one to go by");
    assert!(took > 0 && predicted.abs_diff(std::time::Duration::from_millis(took)).as_micros() < 1, "{predicted:?}, {took} ms");
}

#[test]
fn what_is_saved_comes_back_with_all_that_was_kept_beside_it() {
    let (_scratch, checkpoints) = saved(&[1000]);
    assert_restored(&State::at(1000), &checkpoints, &RestoreOptions::default());
    let checkpoint = checkpoints.open(1000).expect("it is there");
    assert_eq!(checkpoint.manifest().structure.text(), structure(1000).text());
    assert_eq!(checkpoint.manifest().step, 1000);
    assert!(checkpoint.manifest().groups[0].tensors.iter().any(|tensor| !tensor.chunks.is_empty()), "several chunks");
    let only = LoadOptions::all().select(["norm", "scale"]);
    let loaded = checkpoint.load("model", only).expect("two tensors");
    assert_eq!((loaded.tensors.len(), loaded.unverified.len()), (2, 0));
    assert_eq!(checkpoint.load("nobody", LoadOptions::all()).expect_err("no such group").kind(), ErrorKind::InvalidInput);
}

#[test]
fn what_is_loaded_in_part_is_said_to_be_unverified() {
    let (_scratch, checkpoints) = saved(&[1]);
    let options = LoadOptions::all().select(["norm"]).slice("embed", 0, 3..5);
    let loaded = checkpoints.open(1).expect("open").load("model", options).expect("a slice and a tensor");
    assert_eq!(loaded.unverified, ["embed"]);
}

#[test]
fn any_reader_of_safetensors_opens_the_shards_and_the_model_as_it_lies() {
    let (_scratch, checkpoints) = saved(&[7]);
    let path = checkpoints.directory_of(7).expect("there");
    assert_eq!(
        names(&path),
        [
            "manifest.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer.safetensors"
        ]
    );
    let (tensors, _) = session().open(&path).expect("the model").load(LoadOptions::all()).expect("loaded");
    State::at(7).model.assert_loaded(&tensors);
    let bytes = std::fs::read(path.join("optimizer.safetensors")).expect("a file");
    let foreign = safetensors::SafeTensors::deserialize(&bytes).expect("the reference reads it");
    assert_eq!(foreign.len(), 2);
}

#[test]
fn files_have_ordinary_modes() {
    use std::os::unix::fs::PermissionsExt;
    let (scratch, checkpoints) = saved(&[7]);
    let ordinary = scratch.path().join("ordinary");
    std::fs::write(&ordinary, "x").expect("a file");
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let path = checkpoints.directory_of(7).expect("there");
    for name in names(&path) {
        assert_eq!(mode(&path.join(&name)), mode(&ordinary), "{name}");
    }
}

#[test]
fn names_of_tensors_and_groups_never_become_paths() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(&scratch.path().join("run"));
    let long = "n".repeat(300);
    let tensors: &[(&str, Dtype, &[u64])] =
        &[("../../x", Dtype::U8, &[3]), ("/etc/passwd", Dtype::U8, &[2]), (&long, Dtype::U8, &[1]), ("权重\n", Dtype::U8, &[4])];
    let known = model(5, tensors);
    let groups: Vec<Group> =
        ["../up", "a/b", "", "manifest", "权重", &long].iter().map(|name| Group::new(*name, known.sources())).collect();
    checkpoints.save(1, &groups, &Json::default(), options()).expect("saved");
    assert_eq!(names(scratch.path()), ["run"]);
    assert_eq!(names(&scratch.path().join("run")), [".thruway-lock", "step-00000001"]);
    let restored = checkpoints.restore(&RestoreOptions::default()).expect("restored");
    assert_eq!(restored.groups.len(), groups.len());
    restored.groups.values().for_each(|loaded| known.assert_loaded(&loaded.tensors));
}

#[test]
fn names_that_stand_twice_are_refused_before_anything_is_made() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(&scratch.path().join("run"));
    let sources = model(1, &[("a", Dtype::U8, &[3])]).sources();
    let twice = Group::new("model", [sources.clone(), sources.clone()].concat());
    let error = checkpoints.save(1, &[twice], &Json::default(), options()).expect_err("two tensors");
    assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::InvalidInput, Some("a")));
    let groups = [Group::new("model", sources.clone()), Group::new("model", sources)];
    let error = checkpoints.save(1, &groups, &Json::default(), options()).expect_err("two groups");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(names(scratch.path()), [""; 0]);
}

#[test]
fn every_dtype_and_shapes_without_elements_come_back() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(scratch.path());
    let mut specs: Vec<(String, Dtype, Vec<u64>)> = Vec::new();
    for dtype in Dtype::ALL {
        for shape in [vec![], vec![0], vec![0, 5], vec![8], vec![4, 6]] {
            if dtype.byte_count(&shape).is_ok() {
                specs.push((format!("{dtype}{shape:?}"), dtype, shape));
            }
        }
    }
    let specs: Vec<(&str, Dtype, &[u64])> = specs.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, &**shape)).collect();
    let known = model(3, &specs);
    let groups = [Group::new("model", known.sources()), Group::new("nothing", Vec::new())];
    checkpoints.save(0, &groups, &Json::default(), options()).expect("saved");
    let restored = checkpoints.restore(&RestoreOptions::default()).expect("restored");
    known.assert_loaded(&restored.groups["model"].tensors);
    assert!(restored.groups["nothing"].tensors.is_empty());
    assert_eq!(checkpoints.verify(0, &VerifyOptions::default()).expect("readable").damage, []);
}

#[test]
fn a_checkpoint_of_nothing_but_structure_is_one() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(scratch.path());
    checkpoints.save(3, &[], &structure(3), options()).expect("saved");
    let restored = checkpoints.restore(&RestoreOptions::default()).expect("restored");
    assert_eq!(restored.checkpoint.manifest().structure.text(), structure(3).text());
    assert!(restored.groups.is_empty());
}

#[test]
fn a_step_is_not_saved_twice_unless_it_is_to_be_replaced() {
    let (_scratch, checkpoints) = saved(&[5]);
    let error = save(&State::at(6), &checkpoints, 5).expect_err("it is there");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert_restored(&State::at(5), &checkpoints, &RestoreOptions::default());
    for seed in [6, 7] {
        let new = State::at(seed);
        let saved = checkpoints.save(5, &new.groups(), &new.structure(), options().replace()).expect("replaced");
        assert!(saved.warnings.is_empty() && saved.path.ends_with("step-00000005"), "{saved:?}");
        assert_restored(&new, &checkpoints, &RestoreOptions::default());
        assert_eq!(names(checkpoints.directory()), [".thruway-lock", "step-00000005"]);
    }
}

#[test]
fn a_shorter_checkpoint_in_the_place_of_a_longer_one_keeps_no_tail_of_it() {
    let (_scratch, checkpoints) = saved(&[5]);
    let short = model(9, &[("only", Dtype::U8, &[81])]);
    let groups = [Group::new("model", short.sources())];
    let saved = checkpoints.save(5, &groups, &Json::default(), options().replace()).expect("replaced");
    assert_eq!(names(&saved.path), ["manifest.json", "model.safetensors"]);
    let restored = checkpoints.restore(&RestoreOptions::default()).expect("restored");
    assert_eq!(restored.groups.keys().collect::<Vec<_>>(), ["model"]);
    short.assert_loaded(&restored.groups["model"].tensors);
}

#[test]
fn every_file_that_is_missing_or_cut_is_named_before_anything_is_loaded() {
    let (_scratch, checkpoints) = saved(&[5]);
    let path = checkpoints.directory_of(5).expect("there");
    let files: Vec<String> = names(&path).into_iter().filter(|name| name != "manifest.json").collect();
    for file in &files {
        let whole = std::fs::read(path.join(file)).expect("a file");
        for bytes in [None, Some(&[][..]), Some(&whole[..whole.len() - 1])] {
            match bytes {
                None => std::fs::remove_file(path.join(file)).expect("removed"),
                Some(bytes) => std::fs::write(path.join(file), bytes).expect("written"),
            }
            let error = checkpoints.open(5).expect_err("it is not whole");
            assert!(error.message().contains(file.as_str()), "{error}");
            let expected = if bytes.is_none() { ErrorKind::NotFound } else { ErrorKind::UnexpectedEof };
            assert_eq!(error.kind(), expected, "{error}");
        }
        std::fs::write(path.join(file), [&whole[..], b"x"].concat()).expect("written");
        assert_eq!(checkpoints.open(5).expect_err("too long").kind(), ErrorKind::Malformed);
        std::fs::write(path.join(file), whole).expect("written");
    }
    for file in &files {
        std::fs::remove_file(path.join(file)).expect("removed");
    }
    let error = checkpoints.open(5).expect_err("nothing is there").to_string();
    assert!(files.iter().all(|file| error.contains(file.as_str())), "all at once: {error}");
}

#[test]
fn a_shard_of_another_save_is_refused_though_it_has_the_same_name_and_size() {
    let (_scratch, checkpoints) = saved(&[5, 6]);
    let of = |step| checkpoints.directory_of(step).expect("there");
    std::fs::copy(of(5).join("optimizer.safetensors"), of(6).join("optimizer.safetensors")).expect("copied");
    let error = checkpoints.open(6).expect_err("two saves are mixed");
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert!(error.context("file").is_some_and(|file| file.ends_with("optimizer.safetensors")), "{error}");
    // The same for the manifest of another step.
    std::fs::copy(of(5).join("manifest.json"), of(6).join("manifest.json")).expect("copied");
    assert_eq!(checkpoints.open(6).expect_err("another step").kind(), ErrorKind::Mismatch);
}

#[test]
fn a_shard_that_was_written_without_the_checkpoint_is_refused() {
    let (_scratch, checkpoints) = saved(&[5]);
    let path = checkpoints.directory_of(5).expect("there").join("optimizer.safetensors");
    let bytes = std::fs::read(&path).expect("a file");
    let text = String::from_utf8_lossy(&bytes[..200]).into_owned();
    let at = text.find("thruway.save_id").expect("it stands in the header");
    let mut renamed = bytes.clone();
    renamed[at] = b'T';
    std::fs::write(&path, renamed).expect("written");
    assert_eq!(checkpoints.open(5).expect_err("of no save").kind(), ErrorKind::Mismatch);
}

#[test]
fn a_damaged_tensor_is_named_with_its_file_and_offset_and_the_one_before_is_taken_only_if_asked() {
    let (_scratch, checkpoints) = saved(&[5, 6]);
    let checkpoint = checkpoints.open(6).expect("whole");
    let record = checkpoint.manifest().groups[0].tensors.iter().find(|tensor| tensor.name == "embed").expect("there").clone();
    let file = checkpoint.path().join(&checkpoint.manifest().files[record.file].name);
    let mut bytes = std::fs::read(&file).expect("a file");
    let at = record.offset + 2 * 4096 + 17;
    bytes[usize::try_from(at).expect("small")] ^= 4;
    std::fs::write(&file, bytes).expect("written");

    let error = checkpoints.restore(&RestoreOptions::default()).expect_err("a bit is wrong");
    assert_eq!((error.kind(), error.context("tensor")), (ErrorKind::Mismatch, Some("embed")));
    assert_eq!(error.context("file"), file.to_str());
    assert_eq!(error.context("offset"), Some((record.offset + 2 * 4096).to_string().as_str()), "the chunk");
    let restored = checkpoints.restore(&RestoreOptions::default().fallback()).expect("the one before");
    assert_eq!((restored.checkpoint.step(), restored.passed_over.len()), (5, 1));
    State::at(5).model.assert_loaded(&restored.groups["model"].tensors);
    // What is asked for by name and is not damaged comes without a word.
    checkpoints.restore(&RestoreOptions::default().groups(["optimizer"])).expect("the optimizer is whole");
    let found = checkpoints.verify(6, &VerifyOptions::default()).expect("readable");
    assert_eq!(found.damage.len(), 1);
    assert_eq!(found.damage[0].tensor, Some(("model".to_owned(), "embed".to_owned())));
}

#[test]
fn a_checkpoint_copied_with_ordinary_tools_is_valid_elsewhere_and_back() {
    let (scratch, checkpoints_here) = saved(&[5, 6]);
    let there = scratch.path().join("archive");
    std::fs::create_dir(&there).expect("a directory");
    let status = Command::new("cp").arg("-r").arg(checkpoints_here.directory_of(5).expect("there")).arg(&there).status();
    assert!(status.expect("cp").success());
    let copied = checkpoints(&there);
    assert_restored(&State::at(5), &copied, &RestoreOptions::default());
    assert_eq!(copied.recover().expect("nothing to do").removed, [""; 0]);
    assert_eq!(copied.steps().expect("steps"), [5]);
}

#[test]
fn a_directory_without_a_manifest_is_no_checkpoint_and_is_left_alone() {
    let (_scratch, checkpoints) = saved(&[5]);
    let copying = checkpoints.directory().join("step-00000009");
    std::fs::create_dir(&copying).expect("a directory");
    std::fs::write(copying.join("model.safetensors"), "not all of it").expect("a file");
    assert_eq!(checkpoints.newest().expect("steps"), Some(5));
    assert_restored(&State::at(5), &checkpoints, &RestoreOptions::default());
    assert_eq!(checkpoints.recover().expect("nothing to do").removed, [""; 0]);
    let pruned = checkpoints.prune(Retention { keep: Some(1), keep_every: None }, false).expect("pruned");
    assert_eq!(pruned.removed, [0; 0]);
    assert!(copying.join("model.safetensors").exists());
}

#[test]
fn retention_never_takes_the_newest_whole_one_whatever_is_newer_and_damaged() {
    let (_scratch, checkpoints) = saved(&[1, 2, 3, 4]);
    for step in [3, 4] {
        let path = checkpoints.directory_of(step).expect("there").join("optimizer.safetensors");
        std::fs::write(path, "cut").expect("written");
    }
    let retention = Retention { keep: Some(1), keep_every: None };
    assert_eq!(checkpoints.prune(retention, true).expect("a dry run").removed, [1]);
    assert_eq!(checkpoints.steps().expect("steps"), [1, 2, 3, 4], "a dry run removes nothing");
    assert_eq!(checkpoints.prune(retention, false).expect("pruned").removed, [1]);
    assert_eq!(checkpoints.steps().expect("steps"), [2, 3, 4]);
    assert_restored(&State::at(2), &checkpoints, &RestoreOptions::default().fallback());
}

#[test]
fn a_save_lets_go_what_retention_says_once_it_is_committed() {
    let (_scratch, checkpoints) = saved(&[10, 20, 30]);
    let retention = Retention { keep: Some(2), keep_every: Some(20) };
    let saved = checkpoints.save(40, &State::at(40).groups(), &structure(40), options().retention(retention)).expect("saved");
    assert_eq!(saved.removed, [10]);
    assert_eq!(checkpoints.steps().expect("steps"), [20, 30, 40]);
    assert_eq!(names(checkpoints.directory()), [".thruway-lock", "step-00000020", "step-00000030", "step-00000040"]);
}

#[test]
fn what_the_dead_left_is_removed_by_recover_and_by_the_next_save_and_nothing_else_is() {
    let (_scratch, checkpoints) = saved(&[1]);
    let leave = || {
        let left = checkpoints.directory().join(".step-00000002.thruway-123-0-ff");
        std::fs::create_dir(&left).expect("a directory");
        std::fs::write(left.join("model.safetensors"), "half").expect("a file");
    };
    let others = [".model.thruway-1-2-3", ".step-00000002", "notes.txt"];
    others.iter().for_each(|name| std::fs::write(checkpoints.directory().join(name), "mine").expect("a file"));
    leave();
    assert_eq!(checkpoints.unfinished().expect("a list"), [".step-00000002.thruway-123-0-ff"]);
    assert_eq!(checkpoints.recover().expect("recovered").removed, [".step-00000002.thruway-123-0-ff"]);
    leave();
    save(&State::at(2), &checkpoints, 2).expect("saved");
    let expected: Vec<&str> = [others[0], others[1], ".thruway-lock", "notes.txt", "step-00000001", "step-00000002"].to_vec();
    assert_eq!(names(checkpoints.directory()), expected);
}

#[test]
fn a_directory_that_is_not_there_is_no_empty_run() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(&scratch.path().join("unmounted"));
    assert_eq!(checkpoints.newest().expect_err("not there").kind(), ErrorKind::NotFound);
    checkpoints.create().expect("made");
    checkpoints.create().expect("already there");
    assert_eq!(checkpoints.newest().expect("there"), None);
    let error = checkpoints.restore(&RestoreOptions::default()).expect_err("nothing is there");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(checkpoints.restore(&RestoreOptions::default().step(3)).expect_err("no 3").kind(), ErrorKind::NotFound);
}

#[test]
fn two_checkpoints_are_compared_without_reading_a_tensor() {
    let (_scratch, checkpoints) = saved(&[1, 2]);
    let (one, two) = (checkpoints.open(1).expect("1"), checkpoints.open(2).expect("2"));
    let (differences, same) = one.manifest().compare(two.manifest());
    // The tensor without elements is the same in both.
    assert_eq!((differences.len(), same), (7, 1));
    assert_eq!(one.manifest().compare(one.manifest()), (Vec::new(), 8));
}

#[test]
fn thousands_of_tensors_take_few_descriptors_and_a_hundred_saves_no_more_than_one() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(scratch.path());
    let buffer = HostBuffer::new(64 * 3000).expect("memory");
    let source = |number: usize| {
        let region = buffer.source(number * 64..(number + 1) * 64).expect("free");
        Source::new(format!("t{number}"), Dtype::U8, [64], region)
    };
    let groups = [Group::new("model", (0..3000).map(source).collect())];
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("a list").count();
    let options = || options().max_shard_size(ByteSize(2000)).retention(Retention { keep: Some(1), keep_every: None });
    checkpoints.save(0, &groups, &Json::default(), options()).expect("a hundred shards");
    let before = descriptors();
    for step in 1..=3 {
        checkpoints.save(step, &groups, &Json::default(), options()).expect("saved");
    }
    let small = [Group::new("model", model(1, &[("a", Dtype::U8, &[100])]).sources())];
    for step in 4..100 {
        checkpoints.save(step, &small, &Json::default(), options()).expect("saved");
    }
    // Other tests of this program open files too.
    assert!(descriptors() <= before + 40, "{} descriptors, and {before} before", descriptors());
    assert_eq!(checkpoints.steps().expect("steps"), [99]);
}

#[test]
fn metadata_of_a_group_stands_in_its_shards_and_that_of_the_checkpoint_in_the_manifest() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(scratch.path());
    let mut group = Group::new("model", model(1, &[("a", Dtype::U8, &[3])]).sources());
    group.metadata.insert("format".to_owned(), "pt".to_owned());
    let metadata = BTreeMap::from([("run".to_owned(), "7".to_owned())]);
    checkpoints.save(1, &[group.clone()], &Json::default(), options().metadata(metadata.clone())).expect("saved");
    let checkpoint = checkpoints.open(1).expect("open");
    assert_eq!(checkpoint.manifest().metadata, metadata);
    let model = session().open(checkpoint.path()).expect("the model");
    assert_eq!(model.metadata(0).and_then(|metadata| metadata.get("format")).map(String::as_str), Some("pt"));
    group.metadata.insert("thruway.save_id".to_owned(), "mine".to_owned());
    checkpoints.save(2, &[group], &Json::default(), options()).expect_err("a key of the checkpoint's own");
}

#[test]
fn tensors_of_every_size_around_a_block_come_back() {
    let scratch = scratch_dir();
    let checkpoints = checkpoints(scratch.path());
    let sizes: Vec<u64> = (0..70).chain(500..530).chain(4090..4105).chain(8185..8194).chain([1 << 20]).collect();
    let specs: Vec<(String, Vec<u64>)> = sizes.iter().map(|size| (format!("t{size}"), vec![*size])).collect();
    let specs: Vec<(&str, Dtype, &[u64])> = specs.iter().map(|(name, shape)| (name.as_str(), Dtype::U8, &**shape)).collect();
    let known = model(8, &specs);
    for (step, shard) in [(1, ByteSize(1 << 30)), (2, ByteSize(20_000))] {
        let options = CheckpointOptions::default().max_shard_size(shard);
        checkpoints.save(step, &[Group::new("model", known.sources())], &Json::default(), options).expect("saved");
        let restored = checkpoints.restore(&RestoreOptions::default()).expect("restored");
        known.assert_loaded(&restored.groups["model"].tensors);
    }
}

/// The variable that makes a child of this program: where it saves.
const CHILD_VARIABLE: &str = "THRUWAY_CHECKPOINT_LIMITED_CHILD";

/// Not a test of its own: what others run under a limit of the shell's.
#[test]
fn child_that_saves_under_a_limit() {
    let Some(directory) = std::env::var_os(CHILD_VARIABLE) else { return };
    let options = options().max_shard_size(ByteSize(2000));
    let state = State::at(2);
    match checkpoints(Path::new(&directory)).save(2, &state.groups(), &state.structure(), options) {
        Ok(saved) => println!("\nchild saved {} files", saved.receipt.files.len()),
        Err(error) => println!("\nchild failed: {}: {error}", error.kind().name()),
    }
}

/// Saves step 2 in a child under this limit, beside step 1, and gives what the child said.
fn save_under(limit: &str) -> (tempfile::TempDir, Checkpoints, String) {
    let (scratch, checkpoints) = saved(&[1]);
    let program = std::env::current_exe().expect("this program");
    let output = Command::new("sh")
        .args(["-c", &format!("{limit} && exec \"$0\" --exact child_that_saves_under_a_limit --nocapture")])
        .arg(program)
        .env(CHILD_VARIABLE, checkpoints.directory())
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = said.lines().find(|line| line.starts_with("child ")).unwrap_or_else(|| panic!("{output:?}"));
    (scratch, checkpoints, line.to_owned())
}

#[test]
fn a_save_of_more_files_than_may_be_open_goes_well() {
    let (_scratch, checkpoints, said) = save_under("ulimit -n 40");
    assert!(said.starts_with("child saved "), "{said}");
    assert!(std::fs::read_dir(checkpoints.directory_of(2).expect("saved")).expect("files").count() > 5);
    assert_restored(&State::at(2), &checkpoints, &RestoreOptions::default());
}

#[test]
fn too_few_descriptors_are_said_before_anything_is_made() {
    let (_scratch, checkpoints, said) = save_under("ulimit -n 12");
    assert!(said.starts_with("child failed: limit reached"), "{said}");
    assert_eq!(names(checkpoints.directory()), [".thruway-lock", "step-00000001"]);
}

#[test]
fn a_limit_on_the_length_of_files_fails_the_save_and_leaves_what_was_there() {
    // In blocks of 512 bytes, or 1024 in some shells: below the largest shard. The signal that goes with it is ignored, as Python
    // and the command do.
    let (_scratch, checkpoints, said) = save_under("trap '' XFSZ && ulimit -f 10");
    assert!(said.starts_with("child failed: "), "{said}");
    assert_eq!(names(checkpoints.directory()), [".thruway-lock", "step-00000001"]);
    assert_restored(&State::at(1), &checkpoints, &RestoreOptions::default());
}

#[test]
fn of_many_who_save_at_once_each_has_saved_or_was_refused() {
    let scratch = scratch_dir();
    let directory = scratch.path().join("run");
    let attempts = |thread: u64| {
        let here = checkpoints(&directory);
        let mut saved = Vec::new();
        for step in (0..8).map(|number| thread * 8 + number) {
            let state = State::tiny(step);
            match here.save(step, &state.groups(), &state.structure(), options()) {
                Ok(done) => {
                    assert!(done.warnings.is_empty(), "{:?}", done.warnings);
                    saved.push(step);
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}"),
            }
        }
        saved
    };
    let mut saved: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || attempts(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    saved.sort_unstable();
    let here = checkpoints(&directory);
    assert!(!saved.is_empty());
    assert_eq!(here.steps().expect("steps"), saved);
    for step in saved {
        let restored = here.restore(&RestoreOptions::default().step(step)).expect("whole");
        assert_eq!(State::tiny(step).difference(&restored), None, "step {step}");
    }
    assert!(names(&directory).iter().all(|name| name == ".thruway-lock" || name.starts_with("step-")));
}
