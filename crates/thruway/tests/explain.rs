//! What is explained is what a load then does: the same paths, engines, bytes and reasons, or the same refusal; and explaining
//! moves nothing.

mod common;

use std::path::Path;

use common::{DIRECT, World, forget, model_file, scratch, total};
use thruway::base::settings::{CuFileChoice, EngineChoice, Settings};
use thruway::io::policy::Path as Way;
use thruway::transfer::{FileReceipt, Part};
use thruway::{Device, Explanation, HostBuffer, LoadOptions, PathPolicy, Receipt, SaveOptions, Session, Source};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::random::Random;

const STAGED: PathPolicy = PathPolicy::Require(Way::Staged);
const CACHED: PathPolicy = PathPolicy::Require(Way::Cached);

/// A model of three shards of several tensors each.
fn shards(directory: &Path) -> std::path::PathBuf {
    let mut random = Random::new(41);
    let lengths = [2 << 20, 400_001, 77, 1_500_000, 0, 900_000, 3 << 20];
    let buffers: Vec<HostBuffer> = lengths.iter().map(|length| HostBuffer::from_vec(random.bytes(*length))).collect();
    let source = |(number, buffer): (usize, &HostBuffer)| {
        let region = buffer.source(0..buffer.len()).expect("free");
        Source::new(format!("t{number}"), thruway::Dtype::U8, vec![buffer.len() as u64], region)
    };
    let sources: Vec<Source> = buffers.iter().enumerate().map(source).collect();
    let target = directory.join("shards");
    let session = Session::builder().device(Device::Host).build().expect("a session");
    session.save(&sources, &target, SaveOptions::default().max_shard_size(thruway::ByteSize(3 << 20))).expect("saved");
    target
}

fn chill(model: &Path) {
    if model.is_dir() {
        let entries = std::fs::read_dir(model).expect("a directory").map(|entry| entry.expect("an entry").path());
        entries.for_each(|path| forget(&path));
    } else {
        forget(model);
    }
}

fn warm(model: &Path) {
    let files = if model.is_dir() {
        std::fs::read_dir(model).expect("a directory").map(|entry| entry.expect("an entry").path()).collect()
    } else {
        vec![model.to_owned()]
    };
    files.iter().for_each(|path| drop(std::fs::read(path).expect("readable")));
}

/// Fails unless the load went as was explained. What counters say of the whole stands behind the reason.
fn assert_same(explanation: &Explanation, receipt: &Receipt, what: &str) {
    let told = format!("{what}\nexplained:\n{explanation}\nloaded:\n{receipt}");
    let sorted = |file: &FileReceipt| {
        let mut parts: Vec<Part> = file.parts.clone();
        parts.sort_by(|a, b| (a.bytes, a.path, &a.reason).cmp(&(b.bytes, b.path, &b.reason)));
        parts
    };
    assert_eq!(explanation.bytes(), receipt.bytes, "{told}");
    assert_eq!(explanation.files.len(), receipt.files.len(), "{told}");
    for (expected, found) in explanation.files.iter().zip(&receipt.files) {
        assert_eq!((&expected.file, expected.bytes, expected.identity), (&found.file, found.bytes, found.identity), "{told}");
        let (expected, found) = (sorted(expected), sorted(found));
        assert_eq!(expected.len(), found.len(), "{told}");
        for (expected, found) in expected.iter().zip(&found) {
            let is_same = (expected.path, expected.engine, expected.bytes) == (found.path, found.engine, found.bytes);
            let same_reason = match found.path {
                Way::Unverified => found.reason.starts_with(&*expected.reason),
                _ => found.reason == expected.reason,
            };
            assert!(is_same && same_reason, "{told}");
        }
    }
}

/// Explains, then loads, and compares. Gives the explanation; none where both refuse.
fn explained(session: &Session, model: &Path, policy: PathPolicy, what: &str) -> Option<Explanation> {
    let options = || LoadOptions::all().path(policy);
    match (session.explain(model, options()), session.open(model).expect("a model").load(options())) {
        (Ok(explanation), Ok((_, receipt))) => {
            assert_same(&explanation, &receipt, what);
            Some(explanation)
        }
        (Err(explained), Err(met)) => {
            assert_eq!(explained.kind(), met.kind(), "{what}: {explained:?} {met:?}");
            assert_eq!((explained.message(), explained.hint()), (met.message(), met.hint()), "{what}");
            assert!(explained.contexts().eq(met.contexts()), "{what}: {explained:?} {met:?}");
            None
        }
        (explained, met) => panic!("{what}: explained {explained:?}, and then {met:?}"),
    }
}

#[test]
fn a_load_to_host_memory_goes_as_it_was_explained() {
    let directory = scratch();
    let models = [model_file(directory.path()), shards(directory.path())];
    for engine in [EngineChoice::Auto, EngineChoice::Posix] {
        let settings = Settings { engine, threads: 2, ..Settings::default() };
        let session = Session::builder().device(Device::Host).settings(settings).build().expect("a session");
        for model in &models {
            for policy in [PathPolicy::Auto, STAGED, CACHED, DIRECT] {
                for is_warm in [false, true] {
                    if is_warm {
                        warm(model)
                    } else {
                        chill(model)
                    }
                    let what = format!("{engine:?} {} {policy:?} {is_warm}", model.display());
                    let explanation = explained(&session, model, policy, &what);
                    assert_eq!(explanation.is_none(), policy == DIRECT, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_load_to_a_gpu_goes_as_it_was_explained_whatever_the_machine_has() {
    let directory = scratch();
    let models = [model_file(directory.path()), shards(directory.path())];
    for (has, settings, choice, way) in [
        ("nvidia-fs", "WAY=nvfs; VERSION=1150", CuFileChoice::Auto, Some(Way::Direct)),
        ("p2pdma", "WAY=p2p; VERSION=1200", CuFileChoice::Auto, Some(Way::Direct)),
        ("nvidia-fs", "PINNED_MAX=17000000", CuFileChoice::Auto, Some(Way::Direct)),
        ("nvidia-fs", "COUNTERS=still", CuFileChoice::Auto, Some(Way::Unverified)),
        ("nvidia-fs", "VERSION=1300", CuFileChoice::Auto, Some(Way::Unverified)),
        ("nothing", "WAY=posix", CuFileChoice::Compat, Some(Way::Unverified)),
        ("nothing", "WAY=posix", CuFileChoice::Auto, None),
        ("nvidia-fs", "", CuFileChoice::Off, None),
        ("nvidia-fs", "FAIL=cuFileDriverOpen:*:5001", CuFileChoice::Auto, None),
        ("nvidia-fs", "FAIL=cuFileHandleRegister:*:5008", CuFileChoice::Auto, None),
        ("nvidia-fs", "WAY=posix; ALLOW_COMPAT=1; FAIL=cuFileSetParameterBool:*:5026", CuFileChoice::Auto, None),
    ] {
        let fake = FakeCuda::start("DELAY_US=0..20; ALIGNMENT=65536");
        let world = World::new(&fake, has, settings);
        let session = world.session(choice);
        for model in &models {
            for policy in [PathPolicy::Auto, DIRECT, STAGED, CACHED] {
                let what = format!("{has} {settings} {} {policy:?}", model.display());
                chill(model);
                let Some(explanation) = explained(&session, model, policy, &what) else {
                    assert!(policy == DIRECT && way != Some(Way::Direct), "{what}: refused");
                    continue;
                };
                let expected = match policy {
                    PathPolicy::Auto => way.unwrap_or(Way::Staged),
                    PathPolicy::Require(path) => path,
                };
                assert_eq!(explanation.bytes_by(expected), explanation.bytes(), "{what}: {explanation}");
            }
            warm(model);
            let explanation = explained(&session, model, PathPolicy::Auto, "warm").expect("auto refuses nothing");
            assert_eq!(explanation.bytes_by(Way::Cached), explanation.bytes(), "{explanation}");
        }
        drop(session);
        world.assert_clean();
    }
}

#[test]
fn explaining_moves_one_block_to_try_the_path_and_keeps_nothing() {
    let directory = scratch();
    let model = model_file(directory.path());
    let fake = FakeCuda::start("DELAY_US=0; ALIGNMENT=65536");
    let world = World::new(&fake, "nvidia-fs", "");
    let session = world.session(CuFileChoice::Auto);
    let explanation = session.explain(&model, LoadOptions::all()).expect("explained");
    assert_eq!((explanation.bytes(), explanation.bytes_by(Way::Direct)), (total(), total()));
    assert_eq!((world.cufile.calls("cuFileRead"), world.cufile.count("moved")), (1, 4096), "the trial's block");
    assert_eq!(session.ring_bytes(), 0, "nothing was staged");
    assert_eq!(world.cufile.count("buffers"), 1, "the window stays for the load; tensors' memory does not");
    // The memory is free again, and nothing fills it.
    let (loaded, receipt) = session.open(&model).expect("a model").load(LoadOptions::all()).expect("loaded");
    assert_eq!(receipt.bytes_by(Way::Direct), total());
    common::assert_right(&loaded);
    drop((session, loaded));
    world.assert_clean();
}
