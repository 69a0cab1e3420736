//! The kernel and the machine as a whole.

use super::Context;
use crate::doctor::facts::FactsExt;
use crate::doctor::report::{Finding, Route, Verdict};

/// The UEFI variable; its fifth byte is 1 where Secure Boot is on.
const SECURE_BOOT: &str = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    let machine = context.machine;
    let kernel = format!("Linux {} on {}", machine.release, machine.architecture);
    findings.push(match (&machine.kernel, machine.is_wsl) {
        (_, true) => Finding::new("host.kernel", Verdict::Warning, format!("{kernel}: Linux on Windows"), "uname")
            .remedy("use Linux itself: Windows hands no drive to the GPU, and cuFile does not start there")
            .rules_out(&Route::ALL),
        (None, _) => Finding::new("host.kernel", Verdict::Unknown, "the kernel's version is unknown", "uname")
            .remedy("find out which kernel runs: `uname -r`")
            .shuts(&Route::ALL),
        _ if machine.architecture.is_empty() => {
            Finding::new("host.kernel", Verdict::Unknown, format!("Linux {}, on what is unknown", machine.release), "uname")
                .remedy("find out which architecture it is: `uname -m`")
                .shuts(&Route::ALL)
        }
        _ => Finding::ok("host.kernel", kernel, "uname"),
    });
    if machine.kernel_at_least(&[6, 11]) && !machine.gpus.is_empty() {
        let seen = "from Linux 6.11 on direct requests of 128 KiB or less are slower (release notes of GPUDirect Storage)";
        findings.push(Finding::ok("host.small_requests", seen, "uname"));
    }
    if machine.is_root == Some(false) {
        let seen = "an ordinary user: the access control of PCIe switches cannot be seen";
        findings.push(Finding::ok("host.user", seen, "geteuid"));
    }
    let secure_boot = context.facts.bytes(SECURE_BOOT);
    if secure_boot.is_ok_and(|bytes| bytes.get(4) == Some(&1)) {
        let seen = "Secure Boot is on: the kernel loads signed modules only, and nvidia-fs built by DKMS needs an enrolled key";
        findings.push(Finding::ok("host.secure_boot", seen, SECURE_BOOT));
    }
}
