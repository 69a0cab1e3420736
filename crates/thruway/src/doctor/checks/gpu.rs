//! The GPUs: whether there is one, of which kind, and how much of its memory others can reach.

use super::Context;
use crate::base::ByteSize;
use crate::doctor::facts::FactsExt;
use crate::doctor::machine::{Gpu, Line};
use crate::doctor::parse::pci::Register;
use crate::doctor::report::{Finding, Route, Verdict};

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let gpus = &context.machine.gpus;
    if gpus.is_empty() {
        if context.machine.may_have_gpu() {
            let seen = "the CUDA driver or the PCI bus does not answer, and neither shows an NVIDIA GPU";
            let finding = Finding::new("gpu.present", Verdict::Unknown, seen, "/sys/bus/pci/devices");
            findings
                .push(finding.remedy("find out whether there is a GPU: `nvidia-smi`, `lspci -d 10de:`").shuts(&Route::CUFILE));
            return;
        }
        let seen = "neither the CUDA driver nor the PCI bus shows an NVIDIA GPU";
        let cufile = Finding::new("gpu.present", Verdict::NotApplicable, seen, "/sys/bus/pci/devices")
            .remedy("nothing, unless there is one: then pass it in (`--gpus all`, or PCI pass-through)")
            .rules_out(&Route::CUFILE);
        findings.push(cufile);
        return;
    }
    for gpu in gpus {
        findings.push(kind(context, gpu));
        findings.push(bar1(context, gpu));
    }
}

fn kind(context: &Context<'_>, gpu: &Gpu) -> Finding {
    let source = if gpu.ordinal.is_some() { "cuDeviceGetName" } else { "/proc/driver/nvidia/gpus" };
    let finding = |verdict, seen: &str| Finding::new("gpu.kind", verdict, seen, source).about(gpu.label());
    // GPUDirect Storage 1.15 gave up Pascal and Volta, whose capability is below 7.5.
    let is_old = gpu.capability.as_ref().is_some_and(|capability| !capability.at_least(&[7, 5]));
    if is_old && matches!(gpu.line, Line::DataCentre | Line::Professional) {
        let library = context.machine.library.as_ref().ok().and_then(|library| library.version.as_ref());
        return match library.map(|version| version.at_least(&[1, 15])) {
            Some(false) => finding(Verdict::Ok, "it supports GPUDirect Storage with nvidia-fs, up to libcufile 1.14 (CUDA 12.9)")
                .rules_out(&[Route::CufileP2pdma]),
            Some(true) => finding(
                Verdict::Warning,
                "older than Turing: GPUDirect Storage supports it up to libcufile 1.14 (CUDA 12.9) only",
            )
            .remedy("use a newer GPU, or libcufile 1.14 of CUDA 12.9")
            .shuts(&[Route::NvidiaFs])
            .rules_out(&[Route::CufileP2pdma]),
            None => finding(
                Verdict::Unknown,
                "older than Turing: GPUDirect Storage supports it up to libcufile 1.14 (CUDA 12.9) only",
            )
            .remedy("find out which version libcufile has: `readlink -f` on libcufile.so.0")
            .shuts(&[Route::NvidiaFs])
            .rules_out(&[Route::CufileP2pdma]),
        };
    }
    if gpu.has_peer_dma == Some(false) && matches!(gpu.line, Line::DataCentre | Line::Professional | Line::Unknown) {
        return finding(Verdict::Warning, "CUDA says that no other device reaches its memory (GPUDirect RDMA)")
            .remedy("use a GPU with GPUDirect RDMA; of a virtual GPU, see its licence and its profile")
            .shuts(&Route::CUFILE);
    }
    match gpu.line {
        Line::DataCentre if gpu.is_named_for_p2pdma() => finding(Verdict::Ok, "a data-centre GPU: it supports GPUDirect Storage"),
        Line::DataCentre | Line::Professional => {
            finding(Verdict::Ok, "it supports GPUDirect Storage with nvidia-fs, and is not among those named for P2PDMA")
                .rules_out(&[Route::CufileP2pdma])
        }
        Line::Consumer => finding(Verdict::Warning, "of a consumer line: cuFile runs in its compatibility mode only")
            .remedy("use a GPU of the data-centre or professional lines")
            .rules_out(&Route::CUFILE),
        Line::Integrated => finding(Verdict::Warning, "it shares the host's memory: cuFile runs in its compatibility mode only")
            .remedy("nothing: what is read into host memory is in the GPU's memory here")
            .rules_out(&Route::CUFILE),
        Line::Unknown if gpu.name.is_empty() => finding(Verdict::Unknown, "its name cannot be seen, so its support is unknown")
            .remedy("find out which GPU this is: `nvidia-smi -L`")
            .shuts(&Route::CUFILE),
        Line::Unknown => finding(Verdict::Unknown, "its name is none that is known, so its support is unknown")
            .remedy("find out whether NVIDIA's GPUDirect Storage guide lists this GPU")
            .shuts(&Route::CUFILE),
    }
}

/// The window through which other devices reach its memory.
fn bar1(context: &Context<'_>, gpu: &Gpu) -> Finding {
    let source = format!("/sys/bus/pci/devices/{}/resource", gpu.address);
    let finding = |verdict, seen: String| Finding::new("gpu.bar1", verdict, seen, source.clone()).about(gpu.label());
    if gpu.line == Line::Integrated {
        return finding(Verdict::NotApplicable, "it shares the host's memory, which needs no BAR1".to_owned());
    }
    let Some(register) = gpu.device.as_ref().and_then(|device| device.registers.get(1)).copied() else {
        return finding(Verdict::Unknown, "the size of BAR1 is unknown".to_owned())
            .remedy("find out how large BAR1 is: `nvidia-smi -q -d MEMORY`")
            .shuts(&Route::CUFILE);
    };
    let bytes = register.bytes;
    let size = ByteSize(bytes);
    match gpu.memory_bytes {
        _ if bytes == 0 => finding(Verdict::Warning, "BAR1 has no address: no other device reaches the GPU's memory".to_owned())
            .remedy("switch on \"Above 4G decoding\" in the firmware's set-up")
            .shuts(&Route::CUFILE),
        _ if gpu.is_on_grace() => {
            finding(Verdict::Ok, format!("BAR1 has {size}; cuFile goes by the link to the processor (C2C)"))
        }
        // CUDA reports a little less than what is built in.
        Some(memory) if bytes < memory => finding(Verdict::Warning, narrow(context, gpu, register))
            .remedy("switch on resizable BAR in the firmware's set-up; of professional cards see NVIDIA's displaymodeselector")
            .shuts(&[Route::CufileP2pdma]),
        Some(_) => finding(Verdict::Ok, format!("BAR1 has {size} and covers the GPU's memory")),
        None => finding(Verdict::Unknown, format!("BAR1 has {size}; whether that covers the GPU's memory is unknown"))
            .remedy("find out how much memory the GPU has: `nvidia-smi`")
            .shuts(&[Route::CufileP2pdma]),
    }
}

/// What there is to say of a window that does not cover the GPU's memory: whether the GPU could have a larger one.
fn narrow(context: &Context<'_>, gpu: &Gpu, bar1: Register) -> String {
    let size = ByteSize(bar1.bytes);
    // One bit for each size that BAR1 may have, from 1 MiB on.
    let sizes = context.facts.line(&format!("/sys/bus/pci/devices/{}/resource{}_resize", gpu.address, bar1.line)).ok();
    let largest = sizes.and_then(|mask| u64::from_str_radix(&mask, 16).ok()?.checked_ilog2()).filter(|bit| *bit < 44);
    let could = match largest.map(|bit| ByteSize(1 << (bit + 20))) {
        Some(largest) if largest > size => format!("; it is resizable, to {largest} at most"),
        _ => String::new(),
    };
    format!("BAR1 has {size}, less than the GPU's memory{could}")
}
