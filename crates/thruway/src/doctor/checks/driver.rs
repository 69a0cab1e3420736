//! NVIDIA's driver: the kernel module and the library of CUDA.

use super::{Context, find_out, why};
use crate::doctor::facts::{FactsExt, Unseen, is_untold};
use crate::doctor::machine::Machine;
use crate::doctor::report::{Finding, Route, Verdict};
use crate::storage::probe::NO_THREAD;

const VERSION: &str = "/proc/driver/nvidia/version";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let machine = context.machine;
    if machine.gpus.is_empty() && machine.driver == Err(Unseen::Absent) && machine.cuda == Err(Unseen::Absent) {
        return;
    }
    findings.push(module(machine));
    findings.push(cuda(context));
}

/// The kernel module.
fn module(machine: &Machine) -> Finding {
    match &machine.driver {
        Ok(driver) if driver.is_open => {
            Finding::ok("driver.module", format!("driver {}, the open kernel module", driver.text), VERSION)
        }
        Ok(driver) => {
            let seen = format!("driver {}, the closed kernel module", driver.text);
            Finding::new("driver.module", Verdict::Warning, seen, VERSION)
                .remedy("install the open kernel module (package nvidia-open): newer nvidia-fs and P2PDMA need it")
                .shuts(&Route::P2PDMA)
        }
        // Some drivers of virtual machines have no such file.
        Err(Unseen::Absent) if machine.cuda.is_ok() => {
            Finding::new("driver.module", Verdict::Unknown, "the kernel module does not show its version", VERSION)
                .remedy("find out whether the open kernel module is loaded: `modinfo -F license nvidia` says Dual MIT/GPL")
                .shuts(&[Route::CufileP2pdma])
        }
        Err(Unseen::Absent) => Finding::new("driver.module", Verdict::Warning, "NVIDIA's kernel module is not loaded", VERSION)
            .remedy(if machine.container.is_some() {
                "pass the GPU in (`--gpus all`)"
            } else {
                "install NVIDIA's driver (package nvidia-open)"
            })
            .shuts(&Route::ALL),
        Err(unseen) => {
            let seen = format!("the driver's version cannot be read: {}", why(unseen));
            Finding::new("driver.module", Verdict::Unknown, seen, VERSION)
                .remedy(find_out(unseen, "which driver is loaded", &format!("cat {VERSION}")))
                .shuts(&Route::CUFILE)
        }
    }
}

/// The library of CUDA.
fn cuda(context: &Context<'_>) -> Finding {
    let machine = context.machine;
    match &machine.cuda {
        Ok(survey) if survey.gpus.is_empty() && !machine.gpus.is_empty() => {
            let seen = "CUDA shows none of the GPUs that the bus shows";
            let remedy = if context.facts.env(VISIBLE).is_some() {
                "CUDA_VISIBLE_DEVICES is set, and hides them: name a GPU in it, or unset it"
            } else if machine.container.is_some() {
                "pass the GPU in (`--gpus all`)"
            } else {
                "see `nvidia-smi` and `dmesg`: the driver did not take the GPU"
            };
            Finding::new("driver.cuda", Verdict::Warning, seen, "cuDeviceGetCount").remedy(remedy).shuts(&Route::ALL)
        }
        Ok(survey) if survey.gpus.is_empty() => {
            Finding::ok("driver.cuda", "CUDA's driver is there, and no GPU", "cuDeviceGetCount")
        }
        Ok(survey) => {
            let version =
                survey.version.map_or_else(|| "of an unknown version".to_owned(), |(major, minor)| format!("{major}.{minor}"));
            let gpus = survey.gpus.len();
            Finding::ok(
                "driver.cuda",
                format!("CUDA {version}, {gpus} GPU(s) to be used"),
                "cuDriverGetVersion, cuDeviceGetCount",
            )
        }
        Err(Unseen::Absent) => {
            Finding::new("driver.cuda", Verdict::Warning, "there is no library of the CUDA driver", "libcuda.so.1")
                .remedy(if machine.container.is_some() {
                    "pass the GPU in (`--gpus all`)"
                } else {
                    "install NVIDIA's driver with CUDA"
                })
                .shuts(&Route::ALL)
        }
        Err(unseen @ Unseen::Silent(_)) => {
            let seen = format!("the CUDA driver has not started yet: {}", why(unseen));
            Finding::new("driver.cuda", Verdict::Unknown, seen, "cuInit")
                .remedy("keep the driver started (`sudo systemctl enable --now nvidia-persistenced`), and ask again")
                .shuts(&Route::ALL)
        }
        Err(unseen @ Unseen::Failed(why)) if why.starts_with(NO_THREAD) => {
            let seen = format!("what CUDA says is unknown: {}", super::why(unseen));
            Finding::new("driver.cuda", Verdict::Unknown, seen, "cuInit")
                .remedy("raise the limits of processes and of memory (`ulimit -u`, `ulimit -v`), and ask again")
                .shuts(&Route::ALL)
        }
        Err(unseen) if is_untold(unseen) => {
            Finding::new("driver.cuda", Verdict::Unknown, format!("what CUDA says is unknown: {}", why(unseen)), "cuInit")
                .remedy("find out on the machine itself: `thruway doctor`, or `thruway doctor --capture FILE` there")
                .shuts(&Route::ALL)
        }
        Err(unseen) => {
            let seen = format!("the CUDA driver is there and cannot be used: {}", why(unseen));
            Finding::new("driver.cuda", Verdict::Fault, seen, "cuInit")
                .remedy("see `nvidia-smi`: after an update of the driver, restart the machine or load the module anew")
                .shuts(&Route::ALL)
        }
    }
}
