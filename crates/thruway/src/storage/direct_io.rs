//! What the kernel has for DMA between drives and GPUs, read from where it says so, without a call into any vendor's library.

use std::path::{Path, PathBuf};

/// Where facts of the system are read from: its root directory, or a stand-in for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemFacts {
    root: PathBuf,
    pci_devices: PathBuf,
}

impl Default for SystemFacts {
    fn default() -> Self {
        Self::below("/")
    }
}

impl SystemFacts {
    /// Facts of the system below `root`, for tests: `dev`, `proc` and `sys` as they would be below `/`.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self { pci_devices: root.join("sys/bus/pci/devices"), root }
    }

    /// The same with another directory of PCI devices.
    #[must_use]
    pub fn with_pci_devices(self, pci_devices: impl Into<PathBuf>) -> Self {
        Self { pci_devices: pci_devices.into(), ..self }
    }

    /// Whether NVIDIA's kernel module for DMA between drives and GPUs is there (`/dev/nvidia-fs` and a number).
    pub fn has_nvidia_fs(&self) -> bool {
        let entries = std::fs::read_dir(self.root.join("dev")).into_iter().flatten().filter_map(Result::ok);
        entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("nvidia-fs"))
    }

    /// The text of nvidia-fs' statistics; `None` without it.
    pub fn nvidia_fs_statistics(&self) -> Option<String> {
        self.read(Path::new("proc/driver/nvidia-fs/stats"))
    }

    /// How many bytes of the PCI device at this address its driver has given to the kernel for peer-to-peer DMA; `None` if it
    /// has not asked for that, or the kernel cannot do it.
    pub fn peer_memory_bytes(&self, pci_address: &str) -> Option<u64> {
        let text = self.read(&self.pci_devices.join(pci_address).join("p2pmem/size"))?;
        text.trim().parse().ok()
    }

    /// Whether the kernel can do peer-to-peer DMA between PCI devices at all (`CONFIG_PCI_P2PDMA`), as far as its list of
    /// symbols tells; `None` where that cannot be read. Takes about 40 ms.
    pub fn kernel_has_p2pdma(&self) -> Option<bool> {
        const SYMBOL: &str = " pci_p2pdma_add_resource";
        let symbols = self.read(Path::new("proc/kallsyms")).filter(|symbols| !symbols.is_empty())?;
        let is_whole = |(at, _): (usize, &str)| !symbols[at + SYMBOL.len()..].starts_with(|next: char| !next.is_whitespace());
        let found = symbols.match_indices(SYMBOL).any(is_whole);
        Some(found)
    }

    /// The text that names the NVIDIA kernel driver; `None` without one.
    pub fn nvidia_driver(&self) -> Option<String> {
        self.read(Path::new("proc/driver/nvidia/version"))
    }

    fn read(&self, below: &Path) -> Option<String> {
        super::namespace::read_small_text(&self.root.join(below).to_string_lossy())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fact_is_read_from_where_the_kernel_has_it_and_nothing_is_made_up() {
        let folder = tempfile::tempdir().expect("a directory");
        let facts = SystemFacts::below(folder.path());
        assert_eq!((facts.has_nvidia_fs(), facts.nvidia_fs_statistics(), facts.nvidia_driver()), (false, None, None));
        assert_eq!((facts.peer_memory_bytes("0000:01:00.0"), facts.kernel_has_p2pdma()), (None, None));
        let put = |path: &str, text: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
            std::fs::write(path, text).expect("written");
        };
        put("dev/nvidia-fs0", "");
        put("sys/bus/pci/devices/0000:01:00.0/p2pmem/size", "1048576\n");
        put("proc/kallsyms", "0000000000000000 T pci_enable_device\n");
        assert!(facts.has_nvidia_fs());
        assert_eq!((facts.peer_memory_bytes("0000:01:00.0"), facts.kernel_has_p2pdma()), (Some(1 << 20), Some(false)));
        put("proc/kallsyms", "0 T pci_enable_device\n0 T pci_p2pdma_add_resource\t[core]\n");
        assert_eq!(facts.kernel_has_p2pdma(), Some(true));
    }
}
