//! Whether cuFile may be touched on this machine, from facts alone.
//!
//! cuFile's opening is not safe everywhere: without a CUDA driver 1.19 spins for ever, without nvidia-fs it has been seen to
//! damage the process's descriptor 0, and after a fork nothing is promised. None of that can be tried out from a library: a
//! child that is forked from a threaded process may only `exec`, and `/proc/self/exe` is the interpreter when the library lies
//! in a Python package. So it is not tried out. What is known to go wrong is asked for first, in this order, and where one
//! answer is no, cuFile is not opened at all. What is left, an unknown hang, is bounded by a time limit (see `driver`).

use crate::base::settings::CuFileChoice;
use crate::io::direct::Refusal;
use crate::storage::SystemFacts;

/// By which mechanism the kernel can move bytes between a drive and this GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mechanism {
    /// NVIDIA's kernel module.
    NvidiaFs,
    /// The kernel's own peer-to-peer DMA, which the GPU's driver takes part in.
    P2pDma,
    /// None: cuFile's compatibility mode, which was asked for.
    Compat,
}

const HINT: &str = "load nvidia-fs (`modprobe nvidia_fs`), or set peer-to-peer DMA up in the kernel and the GPU's driver \
                    (docs/direct-path.md); `--path auto` goes through host memory";

/// What cuFile would work with on this machine, or why it is not to be opened. With `thorough`, a refusal says which half of
/// peer-to-peer DMA is missing, which takes a while to find out.
pub(super) fn mechanism(
    facts: &SystemFacts,
    pci_address: &str,
    choice: CuFileChoice,
    thorough: bool,
) -> Result<Mechanism, Refusal> {
    let refuse = |reason: String, hint: &str| Err(Refusal { reason: reason.into(), hint: hint.into() });
    if choice == CuFileChoice::Off {
        return refuse("cuFile is switched off (THRUWAY_CUFILE=off)".to_owned(), "unset THRUWAY_CUFILE");
    }
    if facts.has_nvidia_fs() {
        return Ok(Mechanism::NvidiaFs);
    }
    if facts.peer_memory_bytes(pci_address).is_some_and(|bytes| bytes > 0) {
        return Ok(Mechanism::P2pDma);
    }
    if choice == CuFileChoice::Compat {
        return Ok(Mechanism::Compat);
    }
    let missing = match thorough.then(|| facts.kernel_has_p2pdma()).flatten() {
        Some(false) => "the kernel is built without PCI peer-to-peer DMA (CONFIG_PCI_P2PDMA)",
        _ if facts.peer_memory_bytes(pci_address) == Some(0) => "the GPU's driver publishes 0 bytes for peer-to-peer DMA",
        _ => "the GPU's driver publishes no memory for peer-to-peer DMA",
    };
    refuse(format!("nvidia-fs is not loaded (no /dev/nvidia-fs*), and {missing}"), HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PCI: &str = "0000:41:00.0";

    fn below(files: &[(&str, &str)]) -> (tempfile::TempDir, SystemFacts) {
        let folder = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("below the root")).expect("a directory");
            std::fs::write(path, text).expect("written");
        }
        let facts = SystemFacts::below(folder.path());
        (folder, facts)
    }

    #[test]
    fn nvidia_fs_or_published_memory_opens_the_door_and_nothing_else_does_by_itself() {
        let published = "sys/bus/pci/devices/0000:41:00.0/p2pmem/size";
        let find = |files: &[(&str, &str)], choice| {
            let (_folder, facts) = below(files);
            mechanism(&facts, PCI, choice, true)
        };
        assert_eq!(find(&[("dev/nvidia-fs0", "")], CuFileChoice::Auto), Ok(Mechanism::NvidiaFs));
        assert_eq!(find(&[(published, "1048576\n")], CuFileChoice::Auto), Ok(Mechanism::P2pDma));
        assert_eq!(find(&[("dev/nvidia-fs0", ""), (published, "0\n")], CuFileChoice::Compat), Ok(Mechanism::NvidiaFs));
        assert_eq!(find(&[], CuFileChoice::Compat), Ok(Mechanism::Compat));
        for (files, choice, reason) in [
            (&[("dev/nvidia-fs0", "")][..], CuFileChoice::Off, "switched off"),
            (&[], CuFileChoice::Auto, "no memory for peer-to-peer DMA"),
            (&[(published, "0\n")], CuFileChoice::Auto, "publishes 0 bytes"),
            (&[("proc/kallsyms", "0 T printk\n")], CuFileChoice::Auto, "CONFIG_PCI_P2PDMA"),
            (&[("proc/kallsyms", "0 T pci_p2pdma_add_resource\n")], CuFileChoice::Auto, "the GPU's driver publishes no"),
        ] {
            let refusal = find(files, choice).expect_err(reason);
            assert!(refusal.reason.contains(reason), "{refusal:?}");
            assert!(!refusal.hint.is_empty());
        }
    }
}
