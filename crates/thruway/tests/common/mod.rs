//! What the tests over doubles of cuFile and of the CUDA driver share: a machine with both, and a model.

#![allow(dead_code, reason = "each test file uses its part of this")]

use std::path::{Path, PathBuf};

use thruway::base::settings::{CuFileChoice, Settings};
use thruway::io::policy::Path as Way;
use thruway::storage::{Access, Buffering, Namespace, OsNamespace, SystemFacts};
use thruway::{Device, LoadOptions, PathPolicy, Receipt, Session, SessionBuilder, Tensors};
use thruway_testkit::fake_cuda::FakeCuda;
use thruway_testkit::fake_cufile::FakeCuFile;
use thruway_testkit::random::Random;

pub(crate) const PCI: &str = "0000:01:00.0";

pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for scratch files")
}

/// What a machine has: nothing, nvidia-fs, or a GPU's driver that publishes memory.
pub(crate) fn machine(has: &str) -> (tempfile::TempDir, SystemFacts) {
    let root = scratch();
    let put = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
        std::fs::write(path, text).expect("written");
    };
    match has {
        "nvidia-fs" => put("dev/nvidia-fs0", ""),
        "old nvidia-fs" => {
            put("dev/nvidia-fs0", "");
            put("proc/driver/nvidia-fs/stats", "");
        }
        "p2pdma of 0 bytes" => put(&format!("sys/bus/pci/devices/{PCI}/p2pmem/size"), "0\n"),
        "p2pdma" => put(&format!("sys/bus/pci/devices/{PCI}/p2pmem/size"), "1048576\n"),
        _ => put("proc/kallsyms", "0 T printk\n"),
    }
    let facts = SystemFacts::below(root.path());
    (root, facts)
}

/// A machine with both doubles.
pub(crate) struct World<'a> {
    pub(crate) fake: &'a FakeCuda,
    pub(crate) cufile: FakeCuFile<'a>,
    pub(crate) facts: SystemFacts,
    _root: tempfile::TempDir,
}

impl<'a> World<'a> {
    pub(crate) fn new(fake: &'a FakeCuda, has: &str, settings: &str) -> Self {
        let (root, facts) = machine(has);
        let settings = settings.replace("ROOT", &root.path().to_string_lossy());
        let settings = settings.as_str();
        Self { fake, cufile: FakeCuFile::start(fake, settings), facts, _root: root }
    }

    pub(crate) fn session(&self, choice: CuFileChoice) -> Session {
        self.builder(choice).build().expect("session")
    }

    pub(crate) fn builder(&self, choice: CuFileChoice) -> SessionBuilder {
        let settings =
            Settings { queue_depth: 6, threads: 2, drive_chunk_bytes: 256 << 10, cufile: choice, ..Settings::default() };
        let builder = Session::builder().device(Device::Cuda(0)).cuda_library(self.fake.path()).settings(settings);
        builder.cufile_library(self.cufile.path()).system_facts(self.facts.clone())
    }

    pub(crate) fn assert_clean(&self) {
        self.cufile.assert_clean();
        assert_eq!(self.cufile.report()["open"], false, "the last session closes cuFile");
        self.fake.assert_clean();
    }
}

/// Sizes that meet every branch of the planner.
pub(crate) fn tensors() -> Vec<(String, Vec<u8>)> {
    let mut random = Random::new(77);
    let mut all: Vec<(String, usize)> = [("large", 1_300_001), ("blocks", 1 << 20), ("tiny", 1), ("odd", 70_003)]
        .map(|(name, length)| (name.to_owned(), length))
        .into();
    all.extend((0..20).map(|number| (format!("small.{number}"), 100 + number * 37)));
    all.into_iter().map(|(name, length)| (name, random.bytes(length))).collect()
}

/// The tensors in a file, its data at an offset that suits no block, and none of it in the page cache.
pub(crate) fn model_file(directory: &Path) -> PathBuf {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, bytes) in tensors() {
        let entry =
            serde_json::json!({"dtype": "U8", "shape": [bytes.len()], "data_offsets": [data.len(), data.len() + bytes.len()]});
        data.extend(bytes);
        header.insert(name, entry);
    }
    let text = serde_json::Value::Object(header).to_string().into_bytes();
    let path = directory.join("model.safetensors");
    std::fs::write(&path, [&(text.len() as u64).to_le_bytes(), text.as_slice(), &data].concat()).expect("write");
    forget(&path);
    path
}

pub(crate) fn forget(path: &Path) {
    let file = OsNamespace.open(path, Access::Write, Buffering::PageCache).expect("it is there");
    thruway::storage::drop_from_page_cache(&*file).expect("dropped");
}

pub(crate) fn load(session: &Session, path: &Path, policy: PathPolicy) -> thruway::Result<(Tensors, Receipt)> {
    session.open(path)?.load(LoadOptions::all().path(policy))
}

pub(crate) fn assert_right(loaded: &Tensors) {
    for (name, bytes) in tensors() {
        assert!(loaded.get(&name).expect("loaded").to_host().expect("readable") == bytes, "{name} has other bytes");
    }
}

pub(crate) const DIRECT: PathPolicy = PathPolicy::Require(Way::Direct);

pub(crate) fn total() -> u64 {
    tensors().iter().map(|(_, bytes)| bytes.len() as u64).sum()
}
