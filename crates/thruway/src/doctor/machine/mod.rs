//! The machine as values: what several checks need, read once.

mod gpus;
mod modules;
mod network;
mod pci;
mod settings;
mod storage;

use std::collections::HashSet;

use super::facts::{Facts, FactsExt, Unseen, calls};
use super::parse::mounts::{self, Mount};
use super::parse::nvidia::{self, CudaSurvey, DriverVersion};
use super::parse::{Version, value};

pub use gpus::{Gpu, Line};
pub use modules::{REGISTER, exported_symbols, has_patched_nvme, is_loaded, is_nvidia_kernel, nvidia_fs_is_installed};
pub use network::{Nic, RdmaPort};
pub use pci::{Controller, Link, PciDevice, links};
pub use settings::{CufileConfig, CufileLibrary};
pub use storage::{Direct, Drive, DriveKind, Layer, LayerKind, PlaceFacts, Target};

/// A machine, and the places on it that are asked about.
#[derive(Debug)]
pub struct Machine {
    /// The kernel's release, such as `6.8.0-45-generic`; empty if it is unknown.
    pub release: String,
    /// Its version.
    pub kernel: Option<Version>,
    /// The architecture, such as `x86_64`.
    pub architecture: String,
    /// Whether it is Linux on Windows.
    pub is_wsl: bool,
    /// What shows that this is a container, if anything does.
    pub container: Option<&'static str>,
    /// Whether the superuser asks; `None` if that is unknown.
    pub is_root: Option<bool>,
    /// The kernel module of NVIDIA's driver.
    pub driver: Result<DriverVersion, Unseen>,
    /// The CUDA driver.
    pub cuda: Result<CudaSurvey, Unseen>,
    /// The GPUs: those of the CUDA driver first, in its order, then those that only the PCI bus shows.
    pub gpus: Vec<Gpu>,
    /// Whether the devices on the PCI bus could be listed; a machine without one has none.
    pub is_bus_seen: bool,
    /// The network cards on the bus.
    pub nics: Vec<Nic>,
    /// The NVMe controllers on the bus.
    pub controllers: Vec<Controller>,
    /// Other devices on the bus that offer memory to their peers and to programs.
    pub pools: Vec<PciDevice>,
    /// The library of cuFile; absent if it lies in none of the usual places, all of which could be looked at.
    pub library: Result<CufileLibrary, Unseen>,
    /// Its settings.
    pub config: CufileConfig,
    /// The mounts.
    pub mounts: Vec<Mount>,
    /// The places that are asked about.
    pub targets: Vec<Target>,
    /// Their paths.
    places: HashSet<String>,
}

impl Machine {
    /// Reads all of it.
    pub fn examine(facts: &dyn Facts, paths: &[String]) -> Self {
        let kernel = facts.call(calls::KERNEL).unwrap_or_default();
        let release = value(&kernel, "release").unwrap_or_default().to_owned();
        let user = facts.call(calls::USER).ok();
        let cuda = facts.call(calls::CUDA).map(|text| nvidia::survey(&text));
        let driver = facts.file("/proc/driver/nvidia/version").and_then(|text| {
            nvidia::driver_version(&text).ok_or_else(|| Unseen::Failed("its text is not what it should be".to_owned()))
        });
        let mounts = facts.file("/proc/self/mountinfo").map(|table| mounts::parse(&table)).unwrap_or_default();
        let classes = pci::classes(facts);
        let controllers = pci::controllers(facts);
        let offers = |controller: &&Controller| controller.device.peer_bytes.is_some_and(|bytes| bytes > 0);
        let targets = paths.iter().map(|path| Target::examine(facts, &mounts, path)).collect();
        Self {
            kernel: Version::parse(&release),
            architecture: value(&kernel, "machine").unwrap_or_default().to_owned(),
            is_wsl: release.to_ascii_lowercase().contains("microsoft"),
            container: container(facts, &mounts),
            is_root: user.as_deref().and_then(|text| value(text, "root")).map(|word| word == "yes"),
            gpus: gpus::all(facts, cuda.as_ref().ok(), &classes),
            is_bus_seen: matches!(facts.list(pci::DEVICES), Ok(_) | Err(Unseen::Absent)),
            nics: network::all(facts, &classes),
            pools: controllers.iter().filter(offers).map(|controller| controller.device.clone()).collect(),
            controllers,
            library: settings::library(facts),
            config: CufileConfig::examine(facts),
            release,
            driver,
            cuda,
            mounts,
            targets,
            places: paths.iter().cloned().collect(),
        }
    }

    /// Whether this is one of the places that are asked about.
    pub fn is_place(&self, path: &str) -> bool {
        self.places.contains(path)
    }

    /// The GPUs that programs here may use: those that CUDA shows, or where it shows none, all on the bus.
    pub fn usable_gpus(&self) -> impl Iterator<Item = &Gpu> {
        let shows_any = self.gpus.iter().any(|gpu| gpu.ordinal.is_some());
        self.gpus.iter().filter(move |gpu| gpu.ordinal.is_some() || !shows_any)
    }

    /// Whether cuFile goes by the link between the processor and its GPUs (C2C) instead of PCIe.
    pub fn is_grace(&self) -> bool {
        !self.is_x86() && self.usable_gpus().next().is_some() && self.usable_gpus().all(Gpu::is_on_grace)
    }

    /// Whether this is an x86 machine, to which some demands are made that others do not know.
    pub fn is_x86(&self) -> bool {
        self.architecture == "x86_64"
    }

    /// Whether there may be a GPU though none was seen.
    pub fn may_have_gpu(&self) -> bool {
        self.gpus.is_empty() && (!self.is_bus_seen || matches!(self.cuda, Err(Unseen::Silent(_) | Unseen::Denied)))
    }

    /// Whether the kernel is of this version or newer.
    pub fn kernel_at_least(&self, least: &[u32]) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.at_least(least))
    }
}

/// What shows that this is a container.
fn container(facts: &dyn Facts, mounts: &[Mount]) -> Option<&'static str> {
    // The third is systemd's own mark, in LXC, Incus and systemd-nspawn.
    const SIGNS: [&str; 4] = ["/.dockerenv", "/run/.containerenv", "/run/systemd/container", "/.singularity.d"];
    // Podman and systemd set the first, Apptainer and Singularity their own names.
    const NAMES: [&str; 6] = [
        "container",
        "KUBERNETES_SERVICE_HOST",
        "APPTAINER_NAME",
        "APPTAINER_CONTAINER",
        "SINGULARITY_NAME",
        "SINGULARITY_CONTAINER",
    ];
    let is_there = |path: &&str| matches!(facts.link(path), Ok(_) | Err(Unseen::Denied));
    let sign = SIGNS.into_iter().find(is_there).or_else(|| NAMES.into_iter().find(|name| facts.env(name).is_some()))?;
    (!is_booted_from_image(facts, mounts)).then_some(sign)
}

/// Whether this is a virtual machine that was booted from a container's image, and so carries a container's marks: the kernel's
/// threads are among the processes seen here, as they are outside of all containers, and `/` is a whole drive. A container
/// that shares its host's processes has an overlay, a subdirectory, or a volume that its runtime made for it.
fn is_booted_from_image(facts: &dyn Facts, mounts: &[Mount]) -> bool {
    // Process 2 starts all other threads of the kernel, and has had this name since Linux 2.6.
    let sees_threads = facts.file("/proc/2/comm").is_ok_and(|name| name.trim() == "kthreadd");
    let is_made = |source: &str| ["/dev/mapper/", "/dev/dm-", "/dev/loop"].iter().any(|begin| source.starts_with(begin));
    let is_drive = |mount: &Mount| mount.root == "/" && mount.source.starts_with("/dev/") && !is_made(&mount.source);
    sees_threads && mounts.iter().rev().find(|mount| mount.point == "/").is_some_and(is_drive)
}
