//! The one public entry: a session owns the ring, the engines and the counters, and everything starts from it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::base::error::escaped;
use crate::base::settings::{self, Settings};
use crate::base::{ErrorKind, Result};
use crate::checkpoint::{Checkpointer, CheckpointerOptions, Checkpoints};
use crate::cuda::Gpu;
use crate::io::direct::DirectPath;
use crate::io::engine::{CuFileOptions, CuFilePath, PeerPath};
use crate::io::policy::PathPolicy;
use crate::io::profile::{Advisor, Machine, PROFILE_BYTES_MAX};
use crate::io::{EngineFactory, EnginePool, OsEngines};
use crate::memory::{CopyStreams, Device, PinnedSlabs, Ring, RingSettings};
use crate::model::{self, LoadOptions, Model, SaveOptions, Source};
use crate::storage::{self, Namespace, OsNamespace, PCI_DEVICES, PublishedMemory, SystemFacts};
use crate::telemetry::{Counters, Snapshot};
use crate::transfer::plan::Limits;
use crate::transfer::{self, Explanation, Move, Peer, Receipt, TransferContext, TransferOptions};

/// What transfers share. Cloning is cheap and shares everything; a session may be used from many threads.
#[derive(Clone, Debug)]
pub struct Session {
    context: Arc<TransferContext>,
    policy: PathPolicy,
    device: Device,
    device_reason: Arc<str>,
    counters: Arc<Counters>,
}

/// Settings of a session to be.
#[derive(Debug)]
pub struct SessionBuilder {
    device: Device,
    policy: PathPolicy,
    settings: Option<Settings>,
    namespace: Arc<dyn Namespace>,
    engines: Option<Box<dyn EngineFactory>>,
    cuda_library: Option<PathBuf>,
    pci_devices: Option<PathBuf>,
    cufile_library: Option<PathBuf>,
    system_facts: SystemFacts,
    profile: Option<PathBuf>,
}

impl Session {
    /// A builder with the defaults: the best memory, the best path, settings from the environment.
    pub fn builder() -> SessionBuilder {
        SessionBuilder {
            device: Device::Auto,
            policy: PathPolicy::Auto,
            settings: None,
            namespace: Arc::new(OsNamespace),
            engines: None,
            cuda_library: None,
            pci_devices: None,
            cufile_library: None,
            system_facts: SystemFacts::default(),
            profile: std::env::var_os(settings::PROFILE).map(PathBuf::from),
        }
    }

    /// Opens a model: a safetensors file, a directory of shards, or an index file. Reads headers only, and
    /// checks that every file is whole.
    ///
    /// # Errors
    /// What is missing, malformed, cut short or contradictory, by file and tensor; all missing shards at once.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Model> {
        Model::open(Arc::clone(&self.context), self.policy, path.as_ref())
    }

    /// Which way a load of the model at `path` with these options would bring each file's bytes now, and why. No tensor is
    /// loaded: headers are read, and where a direct path may be, one block to try it.
    ///
    /// # Errors
    /// What [`open`](Self::open) and [`Model::load`] report before the bytes of tensors move.
    pub fn explain(&self, path: impl AsRef<Path>, options: LoadOptions) -> Result<Explanation> {
        self.open(path)?.explain(options)
    }

    /// Saves tensors as a safetensors file, or as a directory of shards if `options` set a shard size. What
    /// stands at `target` is replaced at once and only when the new is complete and durable. A link there is itself
    /// replaced by a file (what it points to stays), and refused where a directory is to stand.
    ///
    /// # Errors
    /// Names, shapes or sizes that contradict each other, and whatever storage reports. Then nothing at
    /// `target` has changed, unless the error has the fact `published`: then all of the new stands there, and only a
    /// power cut might still undo it, because the directory could not be synced.
    pub fn save(&self, tensors: &[Source], target: impl AsRef<Path>, options: SaveOptions) -> Result<Receipt> {
        model::save(&self.context, self.policy, tensors, target.as_ref(), options)
    }

    /// The training checkpoints in a directory. Touches nothing yet.
    pub fn checkpoints(&self, directory: impl AsRef<Path>) -> Checkpoints {
        Checkpoints::new(Arc::clone(&self.context), self.policy, directory.as_ref())
    }

    /// The training checkpoints in a directory, saved beside training too. Pins the pool's memory, if its size is stated.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) or [`LimitReached`](ErrorKind::LimitReached) if so much cannot be had or pinned.
    pub fn checkpointer(&self, directory: impl AsRef<Path>, options: CheckpointerOptions) -> Result<Checkpointer> {
        Checkpointer::new(self.checkpoints(directory), options)
    }

    /// Carries out moves between files and memory. Returns when nothing moves any more.
    ///
    /// # Errors
    /// The first failure, naming file and offset.
    pub fn transfer(&self, moves: Vec<Move>, options: &TransferOptions) -> Result<Receipt> {
        transfer::run(&self.context, moves, options)
    }

    /// The memory that loads go to: `Auto` is decided by now.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Why loads go there, in words.
    pub fn device_reason(&self) -> &str {
        &self.device_reason
    }

    /// The GPU that this session uses, if it uses one.
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.context.streams.as_ref().map(|streams| streams.gpu())
    }

    /// The path that loads and saves take unless told otherwise.
    pub fn policy(&self) -> PathPolicy {
        self.policy
    }

    /// The counters now.
    pub fn counters(&self) -> Snapshot {
        self.counters.snapshot()
    }

    /// The staging memory allocated so far, in bytes.
    pub fn ring_bytes(&self) -> usize {
        self.context.ring.allocated_bytes()
    }
}

impl SessionBuilder {
    /// Where tensors go.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Which path bytes must take.
    #[must_use]
    pub fn path(mut self, policy: PathPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Settings, instead of those of the environment.
    #[must_use]
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Another filesystem than the operating system's: a simulated disk.
    #[must_use]
    pub fn namespace(mut self, namespace: Arc<dyn Namespace>) -> Self {
        self.namespace = namespace;
        self
    }

    /// Other engines than the operating system's: fault injection, a simulated disk.
    #[must_use]
    pub fn engines(mut self, engines: Box<dyn EngineFactory>) -> Self {
        self.engines = Some(engines);
        self
    }

    /// Another CUDA driver library than the system's (`THRUWAY_CUDA_LIB` does the same).
    #[must_use]
    pub fn cuda_library(mut self, path: impl Into<PathBuf>) -> Self {
        self.cuda_library = Some(path.into());
        self
    }

    /// Another directory of PCI devices than the kernel's, for tests (`THRUWAY_PCI_DEVICES` does the same).
    #[must_use]
    pub fn pci_devices(mut self, path: impl Into<PathBuf>) -> Self {
        self.pci_devices = Some(path.into());
        self
    }

    /// Another libcufile than the one that is found (`THRUWAY_CUFILE_LIB` does the same).
    #[must_use]
    pub fn cufile_library(mut self, path: impl Into<PathBuf>) -> Self {
        self.cufile_library = Some(path.into());
        self
    }

    /// Where facts of the system are read, for tests of what a machine has.
    #[must_use]
    pub fn system_facts(mut self, facts: SystemFacts) -> Self {
        self.system_facts = facts;
        self
    }

    /// The file of measured rates that the choice of path follows where it speaks of it ([`io::profile`](crate::io::profile));
    /// `None` for none, whatever `THRUWAY_PROFILE` says. A file that cannot be used is ignored, and receipts say why.
    #[must_use]
    pub fn profile(mut self, path: Option<PathBuf>) -> Self {
        self.profile = path;
        self
    }

    /// The session. Allocates nothing yet (of a PCI device's memory one page) and starts no thread; with a GPU it takes the
    /// GPU's primary context.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) for an environment variable that cannot be used,
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a GPU that was asked for and is not there, and whatever the
    /// driver of one that is there reports, for [`Auto`](Device::Auto) too.
    pub fn build(self) -> Result<Session> {
        let settings = self.settings.map_or_else(Settings::from_env, Ok)?;
        settings.validate()?;
        let library = self.cuda_library.or_else(|| std::env::var_os(settings::CUDA_LIBRARY).map(PathBuf::from));
        let (gpu, device_reason) = choose(self.device, library.as_deref())?;
        let devices = self.pci_devices.or_else(|| std::env::var_os(settings::PCI_DEVICES).map(PathBuf::from));
        let system_facts = match &devices {
            Some(devices) => self.system_facts.with_pci_devices(devices),
            None => self.system_facts,
        };
        let published = published(self.device, devices.as_deref().unwrap_or(Path::new(PCI_DEVICES)))?;
        let streams = gpu.as_ref().map(CopyStreams::new).transpose()?;
        let device = match (&gpu, &published) {
            (Some(gpu), _) => Device::Cuda(gpu.ordinal()),
            (None, Some(published)) => Device::Pci(published.address()),
            (None, None) => Device::Host,
        };
        let Settings { engine, queue_depth, threads, ring_bytes, .. } = settings;
        let os_engines = OsEngines { choice: engine, depth: queue_depth, threads, direct: None };
        let peer = published.map(Peer::new).transpose()?;
        let direct = peer.as_ref().map(|peer| PeerPath::new(&peer.memory, os_engines.clone())).transpose()?;
        let longest = settings.chunk_bytes.max(settings.drive_chunk_bytes);
        // One slot at least, and no slot larger than the ring may be.
        let slot_bytes = longest.min(ring_bytes);
        let cufile = gpu.as_ref().filter(|_| self.engines.is_none()).map(|gpu| {
            let library = self.cufile_library.or_else(|| std::env::var_os(settings::CUFILE_LIBRARY).map(PathBuf::from));
            let window =
                RingSettings { slot_bytes, slab_bytes: WINDOW_SLAB_BYTES.max(slot_bytes), bytes_max: window_bytes(slot_bytes) };
            let (choice, facts, depth) = (settings.cufile, system_facts, queue_depth);
            let options = CuFileOptions { choice, library, facts, depth, window, ..CuFileOptions::default() };
            Arc::new(CuFilePath::new(Arc::clone(gpu), options)) as Arc<dyn DirectPath>
        });
        let direct = direct.map(|path| Arc::new(path) as Arc<dyn DirectPath>).or(cufile);
        let engines = self.engines.unwrap_or_else(|| Box::new(OsEngines { direct: direct.clone(), ..os_engines }));
        let counters = Arc::new(Counters::default());
        let slab_bytes = RingSettings::default().slab_bytes.min(ring_bytes).max(slot_bytes);
        let ring_settings = RingSettings { slot_bytes, slab_bytes, bytes_max: ring_bytes };
        let near = gpu.as_ref().and_then(|gpu| storage::processors_near(&gpu.facts().pci_address));
        let ring = match &gpu {
            Some(gpu) => Ring::with_source(ring_settings, Box::new(PinnedSlabs::new(Arc::clone(gpu), near.clone()))),
            None => Ring::new(ring_settings),
        };
        let (chunk_bytes, drive_chunk_bytes) = (settings.chunk_bytes as u64, settings.drive_chunk_bytes as u64);
        let limits = Limits { chunk_bytes, drive_chunk_bytes, ..Limits::default() };
        let engines = EnginePool::new(engines, Arc::clone(&counters));
        let staging_bytes = (2 * queue_depth as u64).saturating_mul(drive_chunk_bytes).min(ring_bytes as u64);
        let (namespace, copies) = (self.namespace, Mutex::default());
        let advisor = gpu.as_ref().zip(self.profile.as_deref()).map(|(gpu, path)| advisor(gpu, path)).transpose()?;
        let context =
            TransferContext { namespace, engines, ring, direct, advisor, peer, streams, near, copies, limits, staging_bytes };
        Ok(Session { context: Arc::new(context), policy: self.policy, device, device_reason: device_reason.into(), counters })
    }
}

/// What the window grows by, in bytes: registering device memory with cuFile takes a system call for each.
const WINDOW_SLAB_BYTES: usize = 16 << 20;

/// The most GPU memory of the window, in bytes: what an engine has in flight, and as much being copied on.
fn window_bytes(slot_bytes: usize) -> usize {
    (4 * WINDOW_SLAB_BYTES).max(slot_bytes)
}

/// The memory of the PCI device that was asked for, if one was.
fn published(device: Device, devices: &Path) -> Result<Option<PublishedMemory>> {
    let Device::Pci(address) = device else { return Ok(None) };
    PublishedMemory::of(devices, address).map(Some)
}

/// What a file of measured rates says of a GPU, or why it says nothing.
fn advisor(gpu: &Gpu, path: &Path) -> Result<Advisor> {
    let text = storage::read_text(&OsNamespace, path, PROFILE_BYTES_MAX);
    Ok(Advisor::new(escaped(&path.to_string_lossy()), text, Machine::of(gpu)?))
}

/// The GPU that a device stands for, if any, and why it is that one or none.
fn choose(device: Device, library: Option<&Path>) -> Result<(Option<Arc<Gpu>>, String)> {
    match device {
        Device::Host => Ok((None, "host memory was asked for".to_owned())),
        Device::Cuda(ordinal) => {
            let gpu = Gpu::open(ordinal, library)?;
            let reason = format!("cuda:{ordinal} was asked for: {}", gpu.facts().name);
            Ok((Some(gpu), reason))
        }
        Device::Pci(address) => Ok((None, format!("pci:{address} was asked for"))),
        Device::Auto => match Gpu::open(0, library) {
            Ok(gpu) => {
                let reason = format!("the first GPU: {}", gpu.facts().name);
                Ok((Some(gpu), reason))
            }
            // No driver or no GPU. One that is there and fails is nothing to be silent about.
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok((None, error.message().to_owned())),
            Err(error) => Err(error.with("device", "cuda:0").with_hint("see `nvidia-smi`, or ask for host memory")),
        },
    }
}
