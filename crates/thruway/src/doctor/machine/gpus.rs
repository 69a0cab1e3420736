//! GPUs, from the CUDA driver, from `/proc/driver/nvidia/gpus`, and from the PCI bus.

use super::pci::{PciDevice, is_of_nvidia};
use crate::doctor::facts::{Facts, FactsExt};
use crate::doctor::parse::nvidia::{CudaGpu, CudaSurvey};
use crate::doctor::parse::{Version, field, pci};

/// The lines of products that GPUDirect Storage tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// For data centres.
    DataCentre,
    /// For workstations: Quadro, RTX A and RTX PRO.
    Professional,
    /// GeForce and TITAN.
    Consumer,
    /// Part of a processor: it shares the host's memory (Jetson, GB10).
    Integrated,
    /// None that is known.
    Unknown,
}

/// Beginnings of the names of data-centre GPUs, behind `NVIDIA` and `Tesla`.
const DATA_CENTRE: [&str; 21] = [
    "A100", "A800", "A30", "A40", "A10", "A16", "A2", "L4", "L20", "L40", "H100", "H200", "H20", "H800", "GH200", "B100", "B200",
    "B300", "GB200", "GB300", "T4",
];
/// Those that NVIDIA names for PCI P2PDMA (release notes of GPUDirect Storage 1.13 to 1.19), and their Grace siblings.
const P2PDMA: [&str; 12] = ["A100", "A40", "L4", "L40S", "H100", "H200", "B100", "B200", "B300", "GH200", "GB200", "GB300"];

/// So many GPUs are looked at: more than any machine has.
const GPUS_MAX: usize = 32;

/// A GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Its ordinal for CUDA; `None` if CUDA does not show it.
    pub ordinal: Option<usize>,
    /// Its name; empty if nothing tells.
    pub name: String,
    /// Its PCI address.
    pub address: String,
    /// What the bus shows of it.
    pub device: Option<PciDevice>,
    /// Bytes of its memory.
    pub memory_bytes: Option<u64>,
    /// Its compute capability.
    pub capability: Option<Version>,
    /// Whether other devices may reach its memory (GPUDirect RDMA), as CUDA says.
    pub has_peer_dma: Option<bool>,
    /// Whether it hands out its memory as a dma-buf, as CUDA says.
    pub has_dma_buf: Option<bool>,
    /// The line of products it belongs to.
    pub line: Line,
}

impl Gpu {
    /// How people call it: `cuda:0 (NVIDIA H100)`, or by its address.
    pub fn label(&self) -> String {
        let name = if self.name.is_empty() { "NVIDIA GPU" } else { &self.name };
        match self.ordinal {
            Some(ordinal) => format!("cuda:{ordinal} ({name})"),
            None => format!("{} ({name})", self.address),
        }
    }

    /// Whether it is one of those that NVIDIA names for PCI P2PDMA.
    pub fn is_named_for_p2pdma(&self) -> bool {
        let model = model(&self.name);
        P2PDMA.contains(&model)
    }

    /// Whether it hangs on a Grace processor, to which cuFile goes by the link between the two (C2C) instead of PCIe.
    pub fn is_on_grace(&self) -> bool {
        ["GH200", "GB200", "GB300"].contains(&model(&self.name))
    }
}

/// All GPUs.
pub(super) fn all(facts: &dyn Facts, survey: Option<&CudaSurvey>, classes: &[(String, pci::Class)]) -> Vec<Gpu> {
    let seen = survey.map_or(&[][..], |survey| &survey.gpus);
    let mut gpus: Vec<Gpu> =
        seen.iter().take(GPUS_MAX).enumerate().map(|(ordinal, gpu)| from_cuda(facts, ordinal, gpu)).collect();
    let displays = classes.iter().filter(|(_, class)| *class == pci::Class::Display).map(|(address, _)| address);
    for address in displays.filter(|address| is_of_nvidia(facts, address)) {
        if gpus.len() == GPUS_MAX {
            break;
        }
        if gpus.iter().all(|gpu| gpu.address != *address) {
            let information = facts.file(&format!("/proc/driver/nvidia/gpus/{address}/information")).unwrap_or_default();
            let name = field(&information, "Model", ':').unwrap_or_default().to_owned();
            gpus.push(Gpu {
                ordinal: None,
                line: line(&name, false),
                name,
                device: PciDevice::examine(facts, address),
                address: address.clone(),
                memory_bytes: None,
                capability: None,
                has_peer_dma: None,
                has_dma_buf: None,
            });
        }
    }
    gpus
}

fn from_cuda(facts: &dyn Facts, ordinal: usize, gpu: &CudaGpu) -> Gpu {
    // The driver writes eight digits of the domain at times, sysfs as many as it has, and four at least.
    let short = gpu.address.split_once(':').and_then(|(domain, rest)| {
        let zeros = domain.len() - domain.trim_start_matches('0').len();
        let cut = domain.len().checked_sub(4)?.min(zeros);
        Some(format!("{}:{rest}", domain.get(cut..)?))
    });
    let address = short.unwrap_or_else(|| gpu.address.clone());
    Gpu {
        ordinal: Some(ordinal),
        name: gpu.name.clone(),
        device: PciDevice::examine(facts, &address),
        address,
        memory_bytes: gpu.memory_bytes,
        capability: gpu.capability.clone(),
        has_peer_dma: gpu.has_peer_dma,
        has_dma_buf: gpu.has_dma_buf,
        line: line(&gpu.name, gpu.is_integrated),
    }
}

/// The word of a name that names the model: `H100` of `NVIDIA H100 80GB HBM3`.
fn model(name: &str) -> &str {
    let name = name.trim_start_matches("NVIDIA ").trim_start_matches("Tesla ");
    let end = name.find([' ', '-']).unwrap_or(name.len());
    &name[..end]
}

fn line(name: &str, is_integrated: bool) -> Line {
    let model = model(name);
    let has = |word: &str| name.contains(word);
    if is_integrated || has("Orin") || has("Xavier") || has("Thor") || model == "GB10" {
        Line::Integrated
    } else if has("GeForce") || has("TITAN") {
        Line::Consumer
    } else if has("Quadro") || has("RTX") {
        Line::Professional
    } else if has("Tesla") || DATA_CENTRE.iter().any(|known| model == *known || model.strip_prefix(known).is_some_and(is_suffix))
    {
        Line::DataCentre
    } else {
        Line::Unknown
    }
}

/// `S`, `G`, `X`, `PCIE`, `SXM`: what may stand behind a model's number without a blank.
fn is_suffix(rest: &str) -> bool {
    ["S", "G", "X", "M", "N", "D"].contains(&rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_line_of_products() {
        for (name, expected) in [
            ("NVIDIA H100 80GB HBM3", Line::DataCentre),
            ("NVIDIA A100-SXM4-80GB", Line::DataCentre),
            ("NVIDIA L40S", Line::DataCentre),
            ("NVIDIA GH200 480GB", Line::DataCentre),
            ("Tesla V100-PCIE-16GB", Line::DataCentre),
            ("NVIDIA A10G", Line::DataCentre),
            ("NVIDIA RTX A6000", Line::Professional),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", Line::Professional),
            ("Quadro RTX 8000", Line::Professional),
            ("NVIDIA GeForce RTX 4090", Line::Consumer),
            ("NVIDIA TITAN RTX", Line::Consumer),
            ("NVIDIA GB10", Line::Integrated),
            ("Orin (nvgpu)", Line::Integrated),
            ("Something new", Line::Unknown),
        ] {
            assert_eq!(line(name, false), expected, "{name}");
        }
        assert_eq!(line("NVIDIA H100", true), Line::Integrated);
    }
}
