//! The direct path to memory that a PCI device publishes, without such a device: fresh shared memory stands in for the device's,
//! and everything else is real, down to the drive's count of what it moved. What the kernel makes of real devices, the emulated
//! machine of `cargo xtask p2pdma` shows.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thruway::base::settings::{EngineChoice, Settings};
use thruway::io::direct::{DirectPath, Reach, Trial};
use thruway::io::engine::{P2pDma, PeerPath, Uring};
use thruway::io::layer::{Fault, FaultPlan, Faulty};
use thruway::io::policy::Source as StorageSide;
use thruway::io::{EngineFactory, Made, OsEngines};
use thruway::memory::PeerMemory;
use thruway::storage::{
    Access, Buffering, DirectRules, File, Identity, Namespace, OsNamespace, PublishedMemory, Residency, drive_traffic,
};
use thruway::{
    CopyOptions, Device, Direction, Dtype, ErrorKind, Extent, HostBuffer, LoadOptions, Path as Way, PathPolicy, Receipt,
    SaveOptions, Session, SessionBuilder, Source, VerifyOptions,
};
use thruway_testkit::fixtures::{KnownModel, model, scratch_dir};

const ADDRESS: &str = "0000:03:00.0";
const DIRECT: PathPolicy = PathPolicy::Require(Way::Direct);

/// A directory of PCI devices with one that publishes so many bytes.
fn devices(available: u64) -> tempfile::TempDir {
    let devices = scratch_dir();
    let memory = devices.path().join(ADDRESS).join("p2pmem");
    std::fs::create_dir_all(&memory).expect("made");
    for (name, number) in [("size", available), ("available", available), ("published", 1)] {
        std::fs::write(memory.join(name), format!("{number}\n")).expect("written");
    }
    // Each shared mapping of it is memory of its own.
    std::os::unix::fs::symlink("/dev/zero", memory.join("allocate")).expect("linked");
    devices
}

fn builder(devices: &tempfile::TempDir) -> SessionBuilder {
    Session::builder().device(Device::Pci(ADDRESS.parse().expect("an address"))).pci_devices(devices.path())
}

/// Whether the build directory lies on a drive that counts what it moves, past the page cache: says so if not.
fn is_countable(directory: &tempfile::TempDir) -> bool {
    let file = directory.path().join("countable");
    std::fs::write(&file, [0; 4096]).expect("written");
    let device = std::fs::metadata(&file).expect("there").dev();
    let rules = OsNamespace.open(&file, Access::Read, Buffering::PageCache).expect("opened").direct_rules();
    let countable = drive_traffic(device).is_some() && rules.is_some_and(|rules| rules.memory.bytes() <= 512);
    if !countable {
        println!("skipped: the build directory lies on no drive whose traffic the kernel counts");
    }
    countable
}

/// Tensors of every kind, at offsets as other writers place them: large, whole blocks, tiny, empty, odd.
fn known(seed: u64) -> KnownModel {
    let specs: [(&str, Dtype, &[u64]); 6] = [
        ("large", Dtype::F32, &[1000, 1001]),
        ("blocks", Dtype::BF16, &[1024, 1024]),
        ("tiny", Dtype::F64, &[3]),
        ("empty", Dtype::F32, &[0, 7]),
        ("middle", Dtype::I64, &[9001]),
        ("odd", Dtype::U8, &[70_003]),
    ];
    model(seed, &specs)
}

fn bytes(known: &KnownModel) -> u64 {
    known.sources().iter().map(|source| source.region.len() as u64).sum()
}

/// Writes a model as another writer would, and lets it reach the drive.
fn write(directory: &Path, known: &KnownModel) -> PathBuf {
    let path = directory.join("model.safetensors");
    std::fs::write(&path, known.to_safetensors()).expect("written");
    std::fs::File::open(&path).expect("there").sync_all().expect("synced");
    path
}

/// What of a receipt's bytes went the direct way, and whether the rest are ends that fill no block.
fn direct_bytes(receipt: &Receipt) -> u64 {
    for part in receipt.files.iter().flat_map(|file| &file.parts).filter(|part| part.path == Way::Direct) {
        assert_eq!(part.engine.as_str(), "p2pdma");
        assert!(part.reason.contains("reaches 0000:03:00.0: proven"), "{receipt}");
    }
    receipt.bytes_by(Way::Direct)
}

#[test]
fn a_load_goes_directly_but_for_the_first_and_the_last_block_of_a_file() {
    let (directory, devices) = (scratch_dir(), devices(1 << 30));
    if !is_countable(&directory) {
        return;
    }
    let known = known(1);
    let path = write(directory.path(), &known);
    let session = builder(&devices).build().expect("a session");
    for policy in [PathPolicy::Auto, DIRECT] {
        let (tensors, receipt) = session.open(&path).expect("opened").load(LoadOptions::all().path(policy)).expect("loaded");
        assert!(tensors.iter().all(|tensor| tensor.device() == session.device()));
        known.assert_loaded(&tensors);
        assert!(bytes(&known) - direct_bytes(&receipt) < 2 * 4096, "{receipt}");
        let staged = receipt.files[0].parts.iter().filter(|part| part.path == Way::Staged);
        assert!(staged.into_iter().all(|part| &*part.reason == "fills no whole block"), "{receipt}");
    }
    assert_eq!(session.device().to_string(), format!("pci:{ADDRESS}"));
}

#[test]
fn the_same_model_goes_by_the_other_paths_where_they_are_demanded() {
    let (directory, devices) = (scratch_dir(), devices(1 << 30));
    let known = known(2);
    let path = write(directory.path(), &known);
    let session = builder(&devices).build().expect("a session");
    for (policy, way) in [("staged", Way::Staged), ("cached", Way::Cached)] {
        let policy: PathPolicy = policy.parse().expect("known");
        let (tensors, receipt) = session.open(&path).expect("opened").load(LoadOptions::all().path(policy)).expect("loaded");
        known.assert_loaded(&tensors);
        assert_eq!(receipt.bytes_by(way), receipt.bytes, "{receipt}");
    }
}

#[test]
fn a_second_load_fills_the_memory_of_the_first() {
    let (directory, devices) = (scratch_dir(), devices(1 << 30));
    let known = known(3);
    let path = write(directory.path(), &known);
    let model = builder(&devices).build().expect("a session").open(&path).expect("opened");
    let (tensors, _) = model.load(LoadOptions::all()).expect("loaded");
    let addresses: Vec<u64> = tensors.iter().map(thruway::Tensor::address).collect();
    let (tensors, _) = model.load(LoadOptions::all().reusing(tensors)).expect("loaded again");
    known.assert_loaded(&tensors);
    assert_eq!(tensors.iter().map(thruway::Tensor::address).collect::<Vec<_>>(), addresses);
}

#[test]
fn what_is_saved_from_the_device_is_written_directly_and_is_what_was_loaded() {
    let (directory, devices) = (scratch_dir(), devices(1 << 30));
    if !is_countable(&directory) {
        return;
    }
    let known = known(4);
    // Of a file that was laid out for it. One of another writer's has its tensors where DMA cannot begin.
    let ours = directory.path().join("ours.safetensors");
    let host = Session::builder().device(Device::Host).build().expect("a session");
    host.save(&known.sources(), &ours, SaveOptions::default()).expect("saved");
    let session = builder(&devices).build().expect("a session");
    let (tensors, _) = session.open(&ours).expect("opened").load(LoadOptions::all().path(DIRECT)).expect("loaded");
    let sources: Vec<Source> = tensors
        .iter()
        .map(|tensor| Source::new(tensor.name(), tensor.dtype(), tensor.shape().to_vec(), tensor.region().expect("free")))
        .collect();
    let target = directory.path().join("saved.safetensors");
    let receipt = session.save(&sources, &target, SaveOptions::default().path(DIRECT)).expect("saved");
    assert!(direct_bytes(&receipt) > bytes(&known) * 9 / 10, "{receipt}");
    known.assert_loaded(&host.open(&target).expect("opened").load(LoadOptions::all()).expect("loaded").0);
}

#[test]
fn a_copy_of_a_file_of_ours_passes_through_the_device_and_not_through_the_host() {
    let (directory, devices) = (scratch_dir(), devices(8 << 20));
    if !is_countable(&directory) {
        return;
    }
    let known = known(5);
    let ours = directory.path().join("ours.safetensors");
    let host = Session::builder().device(Device::Host).build().expect("a session");
    host.save(&known.sources(), &ours, SaveOptions::default()).expect("saved");
    let session = builder(&devices).build().expect("a session");
    let target = directory.path().join("copy.safetensors");
    let model = session.open(&ours).expect("opened");
    let (read, written) = model.copy_to(&target, CopyOptions::default().path(DIRECT)).expect("copied");
    for receipt in [&read, &written] {
        assert!(direct_bytes(receipt) > bytes(&known) * 9 / 10, "{receipt}");
    }
    let verdict = host.open(&target).expect("opened").verify(Some(&model), &VerifyOptions::default()).expect("read");
    assert!(verdict.differences.is_empty(), "{:?}", verdict.differences);
}

#[test]
fn slices_and_buffers_of_the_callers_are_filled_directly_where_dma_can_begin_and_else_staged_or_refused() {
    let (directory, devices) = (scratch_dir(), devices(1 << 30));
    if !is_countable(&directory) {
        return;
    }
    let known = known(6);
    let path = write(directory.path(), &known);
    let session = builder(&devices).build().expect("a session");
    let model = session.open(&path).expect("opened");
    let (tensors, receipt) =
        model.load(LoadOptions::all().select(["blocks"]).slice("large", 0, 100..900).path(DIRECT)).expect("loaded");
    assert!(receipt.bytes_by(Way::Direct) > receipt.bytes * 9 / 10, "{receipt}");
    let whole = model.load(LoadOptions::all().path("cached".parse().expect("known"))).expect("loaded").0;
    let row = 1001 * 4;
    let large = whole.get("large").expect("there").to_host().expect("readable");
    assert!(tensors.get("large").expect("there").to_host().expect("readable") == large[100 * row..900 * row]);

    // In the host's memory nothing is direct, whatever the session is for.
    let host = || HostBuffer::new(2 << 20).expect("memory");
    let refused = model.load(LoadOptions::all().into("blocks", host()).path(DIRECT)).expect_err("the host's memory");
    assert_eq!(refused.kind(), ErrorKind::PathUnavailable);
    let (tensors, receipt) = model.load(LoadOptions::all().into("blocks", host())).expect("loaded");
    known.assert_loaded(&tensors);
    assert!(receipt.bytes_by(Way::Direct) > 4_000_000 && receipt.bytes_by(Way::Direct) < 5_000_000, "{receipt}");
}

#[test]
fn where_no_drive_counts_the_path_is_refused_with_its_reason_and_auto_brings_the_bytes_another_way() {
    let devices = devices(1 << 30);
    // A filesystem in memory takes O_DIRECT and has no drive.
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { return };
    let known = known(7);
    let path = write(directory.path(), &known);
    let session = builder(&devices).build().expect("a session");
    let model = session.open(&path).expect("opened");
    let refused = model.load(LoadOptions::all().path(DIRECT)).expect_err("no drive");
    assert_eq!(refused.kind(), ErrorKind::PathUnavailable);
    assert!(refused.message().contains("the direct path is not to be had: the filesystem"), "{refused}");
    assert!(refused.context("file").is_some_and(|file| file.ends_with("model.safetensors")) && refused.hint().is_some());
    let (tensors, receipt) = model.load(LoadOptions::all()).expect("loaded");
    known.assert_loaded(&tensors);
    assert_eq!(receipt.bytes_by(Way::Direct), 0);
    assert!(receipt.files[0].parts.iter().all(|part| part.reason.contains("; not direct: the filesystem")), "{receipt}");
}

#[test]
fn a_load_goes_as_it_was_explained() {
    let devices = devices(1 << 30);
    let known = known(9);
    let in_memory = tempfile::tempdir_in("/dev/shm").ok();
    for directory in std::iter::once(scratch_dir()).chain(in_memory) {
        let path = write(directory.path(), &known);
        let session = builder(&devices).build().expect("a session");
        for policy in [PathPolicy::Auto, DIRECT, PathPolicy::Require(Way::Staged), PathPolicy::Require(Way::Cached)] {
            let options = || LoadOptions::all().path(policy);
            match (session.explain(&path, options()), session.open(&path).expect("opened").load(options())) {
                (Ok(explanation), Ok((tensors, receipt))) => {
                    known.assert_loaded(&tensors);
                    let (expected, found) = (&explanation.files[0].parts, &receipt.files[0].parts);
                    assert_eq!(expected, found, "{policy:?}: {explanation}\n{receipt}");
                }
                (Err(explained), Err(met)) => assert_eq!(explained.to_string(), met.to_string(), "{policy:?}"),
                (explained, met) => panic!("{policy:?}: explained {explained:?}, and then {met:?}"),
            }
        }
    }
}

/// A file that does not say of itself that the kernel told its rules.
#[derive(Debug)]
struct Untold(Arc<dyn File>);

impl File for Untold {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.0.descriptor()
    }

    fn identity(&self) -> thruway::Result<Identity> {
        self.0.identity()
    }

    fn direct_rules(&self) -> Option<DirectRules> {
        self.0.direct_rules()
    }

    fn residency(&self, extent: Extent) -> Residency {
        self.0.residency(extent)
    }

    fn read_at(&self, target: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.0.read_at(target, offset)
    }

    fn write_at(&self, source: &[u8], offset: u64) -> std::io::Result<usize> {
        self.0.write_at(source, offset)
    }

    fn allocate(&self, length: u64) -> thruway::Result<()> {
        self.0.allocate(length)
    }

    fn sync(&self) -> thruway::Result<()> {
        self.0.sync()
    }
}

/// What a new path to the device finds out of the drive below `buffered`, when its trial reads from `read`.
fn reason_of(devices: &tempfile::TempDir, buffered: &dyn File, read: &Arc<dyn File>) -> String {
    let published = PublishedMemory::of(devices.path(), ADDRESS.parse().expect("an address")).expect("published");
    let memory = Arc::new(PeerMemory::new(published.address(), published.open().expect("a stand-in")));
    let engines = OsEngines { choice: EngineChoice::Auto, depth: 4, threads: 2, direct: None };
    let path = PeerPath::new(&memory, engines).expect("a path");
    let trial = Trial {
        direction: Direction::Read,
        block: Extent::new(0, 4096),
        device: buffered.identity().expect("there").device,
        rules: buffered.direct_rules().expect("it takes O_DIRECT"),
        buffered,
        required: true,
        open: &|| Ok(Arc::clone(read)),
    };
    match path.reach(&trial).expect("no failure of the drive") {
        Reach::Refused(refusal) => refusal.reason.to_string(),
        other => format!("{other:?}"),
    }
}

#[test]
fn a_trial_is_no_proof_where_the_kernel_does_not_tell_and_where_the_bytes_came_from_memory() {
    let (directory, devices) = (scratch_dir(), devices(1 << 20));
    if !is_countable(&directory) {
        return;
    }
    let open = |name: &str, buffering| {
        let path = directory.path().join(name);
        std::fs::write(&path, [7; 8192]).expect("written");
        std::fs::File::open(&path).expect("there").sync_all().expect("synced");
        OsNamespace.open(&path, Access::Read, buffering).expect("opened")
    };
    let (buffered, past_cache) = (open("a", Buffering::PageCache), open("a", Buffering::Direct));
    let told = reason_of(&devices, &Untold(Arc::clone(&buffered)), &past_cache);
    assert!(told.contains("the kernel does not tell whether this filesystem goes past the page cache"), "{told}");
    // Another file, of which the page cache holds all: no drive counts its reads. What others of this machine read at the same
    // moment would be counted as the trial's, so a quiet one is waited for.
    let cached = open("b", Buffering::PageCache);
    let found: Vec<String> = (0..50).map(|_| reason_of(&devices, &*buffered, &cached)).collect();
    assert!(found.iter().any(|reason| reason == "a trial block arrived, and the drive did not count it"), "{found:?}");
}

/// Engines for the direct path that fail as told.
#[derive(Debug)]
struct Refusing(FaultPlan);

impl EngineFactory for Refusing {
    fn make(&self, source: StorageSide) -> thruway::Result<Made> {
        if source == StorageSide::Direct {
            let uring = Uring::new(4).expect("io_uring");
            return Ok(Made { engine: Box::new(Faulty::new(P2pDma::new(uring), self.0.clone())), note: None });
        }
        OsEngines { choice: EngineChoice::Auto, depth: 4, threads: 2, direct: None }.make(source)
    }
}

#[test]
fn a_pair_of_devices_that_the_kernel_refuses_midway_is_named_and_auto_goes_round_it() {
    let (directory, devices) = (scratch_dir(), devices(1 << 30));
    if !is_countable(&directory) || Uring::new(1).is_err() {
        return;
    }
    let known = known(8);
    let path = write(directory.path(), &known);
    let settings = Settings { drive_chunk_bytes: 256 << 10, queue_depth: 4, ..Settings::default() };
    let session = |plan: &FaultPlan| {
        builder(&devices).settings(settings).engines(Box::new(Refusing(plan.clone()))).build().expect("a session")
    };
    for errno in [libc::EREMOTEIO, libc::EINVAL] {
        for at in [0, 3] {
            let plan = FaultPlan::single(at, Fault::Errno(errno));
            let (tensors, receipt) = session(&plan).open(&path).expect("opened").load(LoadOptions::all()).expect("loaded");
            known.assert_loaded(&tensors);
            let gone_round = receipt.files[0].parts.iter().find(|part| part.reason.contains("allows no DMA between"));
            assert!(gone_round.is_some_and(|part| part.path == Way::Staged && part.bytes <= 256 << 10), "{receipt}");
            let plan = FaultPlan::single(at, Fault::Errno(errno));
            let refused = session(&plan).open(&path).expect("opened").load(LoadOptions::all().path(DIRECT)).expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::PathUnavailable);
            assert!(refused.message().contains(ADDRESS) && refused.context("offset").is_some(), "{refused}");
        }
    }
    // A drive that fails is no matter of the path.
    let plan = FaultPlan::single(1, Fault::Errno(libc::EIO));
    let failed = session(&plan).open(&path).expect("opened").load(LoadOptions::all()).expect_err("the drive failed");
    assert_eq!((failed.kind(), failed.context("engine")), (ErrorKind::Io, Some("p2pdma")));
}

#[test]
fn a_device_without_the_memory_is_refused_before_a_byte_is_read() {
    let (directory, devices) = (scratch_dir(), devices(3 << 20));
    let path = write(directory.path(), &known(9));
    let session = builder(&devices).build().expect("a session");
    let refused = session.open(&path).expect("opened").load(LoadOptions::all()).expect_err("too little memory");
    assert_eq!((refused.kind(), refused.context("device")), (ErrorKind::OutOfMemory, Some("pci:0000:03:00.0")));
    let nothing = scratch_dir();
    let absent = builder(&nothing).build().expect_err("no such device");
    assert_eq!(absent.kind(), ErrorKind::Unsupported);
    assert!(absent.message().contains("no PCI device"), "{absent}");
}
