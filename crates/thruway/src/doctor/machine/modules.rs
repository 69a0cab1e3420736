//! Kernel modules: which are loaded, and which could be.

use crate::doctor::facts::{Facts, FactsExt};

/// Whether a module is loaded.
pub fn is_loaded(facts: &dyn Facts, module: &str) -> bool {
    facts.lines("/proc/modules", &format!("{module} ")).is_ok_and(|lines| !lines.is_empty())
}

/// Whether nvidia-fs was built or installed for a kernel: by DKMS, from NVIDIA's packages, or with the kernel.
pub fn nvidia_fs_is_installed(facts: &dyn Facts, release: &str) -> bool {
    let directories = ["updates/dkms", "extra", "kernel/drivers/nvidia-fs", "kernel/nvidia-fs", "updates", "weak-updates"];
    directories.iter().any(|directory| {
        let names = facts.names(&format!("/lib/modules/{release}/{directory}"));
        names.iter().any(|name| name.starts_with("nvidia-fs.ko"))
    })
}

/// Whether a kernel is one of Ubuntu's `linux-nvidia`, whose NVMe driver knows nvidia-fs: `6.8.0-1030-nvidia`,
/// `6.8.0-1030-nvidia-64k`.
pub fn is_nvidia_kernel(release: &str) -> bool {
    release.split('-').any(|part| part == "nvidia")
}

/// By which a patched NVMe driver lets nvidia-fs register.
pub const REGISTER: [&str; 2] = ["nvme_v1_register_nvfs_dma_ops", "nvme_v2_register_nvfs_dma_ops"];

/// depmod's table of what the modules of a kernel export.
pub fn exported_symbols(release: &str) -> String {
    format!("/lib/modules/{release}/modules.symbols")
}

/// Whether the NVMe driver knows nvidia-fs, as far as that can be seen while nvidia-fs is not loaded. Ubuntu's kernels
/// `linux-nvidia` have a patched one. One that DOCA or MLNX_OFED brought exports the function by which nvidia-fs registers; where
/// that is not told, their `mlx_compat` counts, which comes with their network drivers too.
pub fn has_patched_nvme(facts: &dyn Facts, release: &str) -> bool {
    let table = exported_symbols(release);
    let mut exports = REGISTER.iter().map(|symbol| facts.lines(&table, &format!("alias symbol:{symbol}")));
    is_nvidia_kernel(release)
        || exports.any(|lines| match lines {
            Ok(lines) => !lines.is_empty(),
            Err(_) => facts.link("/sys/module/mlx_compat").is_ok(),
        })
}
