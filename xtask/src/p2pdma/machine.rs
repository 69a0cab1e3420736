//! An emulated machine: how it is made, and what it must say.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;

/// A boot takes seconds, and the tests in it as many again. One that has not ended by then hangs.
const PATIENCE_SECONDS: &str = "300";

/// How the device and the drive are connected.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Topology {
    /// Below one PCIe switch.
    Switch,
    /// Each at a root port of its own: the way leads through the host bridge.
    RootPorts,
}

/// A make of the machine.
#[derive(Clone, Copy)]
pub(super) struct Machine {
    /// The module of tests that it is for.
    pub(super) tests: &'static str,
    /// How many they are.
    pub(super) count: usize,
    /// The processor.
    pub(super) cpu: &'static str,
    pub(super) topology: Topology,
    /// Whether the device has memory to publish.
    pub(super) publishes: bool,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.topology == Topology::Switch { "below one switch" } else { "at root ports of their own" };
        let memory = if self.publishes { "publishes memory" } else { "publishes none" };
        write!(f, "{}: device and drive {place}, processor {}, the device {memory}", self.tests, self.cpu)
    }
}

impl Machine {
    /// Boots it, and fails unless every test passed and the emulator saw what they claim.
    pub(super) fn boot(self, folder: &Path, kernel: &Path, initramfs: &Path, drive: &Path) -> Result<(), String> {
        let trace = folder.join(format!("{}.trace", self.tests));
        drop(std::fs::remove_file(&trace));
        let device = folder.join("device.img");
        let made = std::fs::File::create(&device).and_then(|file| file.set_len(1 << 20));
        made.map_err(|error| format!("cannot make {}: {error}", device.display()))?;
        let memory = if self.publishes { ",cmb_size_mb=64" } else { "" };
        let mut qemu = Command::new("timeout");
        qemu.args(["--kill-after=10", PATIENCE_SECONDS, "qemu-system-x86_64"]);
        qemu.args(["-machine", "q35", "-accel", "tcg", "-m", "1024", "-cpu", self.cpu]);
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs);
        qemu.args(["-append", &format!("console=ttyS0 quiet panic=-1 tests={}", self.tests)]);
        for part in self.bridges() {
            qemu.args(["-device", part]);
        }
        for (id, image) in [("device", device.as_path()), ("drive", drive)] {
            qemu.args(["-drive", &format!("if=none,format=raw,id={id},file={}", image.display())]);
        }
        qemu.args(["-device", &format!("nvme,serial=device,drive=device,bus=port1{memory}")]);
        qemu.args(["-device", "nvme,serial=drive,drive=drive,bus=port2"]);
        // The drive's emulation tells each piece of memory that it is asked to read or write.
        qemu.args(["-trace", "enable=pci_nvme_map_addr", "-D"]).arg(&trace);
        let output = qemu.output().map_err(|error| format!("cannot run qemu: {error}"))?;
        let log = String::from_utf8_lossy(&output.stdout);
        for line in said(&log) {
            if !["bar ", "exit ", "doctor ", "direct-bytes "].iter().any(|key| line.starts_with(key)) {
                println!("  {line}");
            }
        }
        let traced = std::fs::read_to_string(&trace).unwrap_or_default();
        self.judge(&log, &traced).map_err(|error| {
            let errors = String::from_utf8_lossy(&output.stderr);
            format!("{}: {error} ({})\n--- the machine said\n{log}{errors}", self.tests, output.status)
        })
    }

    fn bridges(self) -> &'static [&'static str] {
        match self.topology {
            Topology::Switch => &[
                "pcie-root-port,id=root,chassis=1,slot=1",
                "x3130-upstream,id=switch,bus=root",
                "xio3130-downstream,id=port1,bus=switch,chassis=2,slot=2",
                "xio3130-downstream,id=port2,bus=switch,chassis=3,slot=3",
            ],
            Topology::RootPorts => &["pcie-root-port,id=port1,chassis=1,slot=1", "pcie-root-port,id=port2,chassis=2,slot=2"],
        }
    }

    /// Whether what the machine said and what the emulator saw agree with what must be.
    fn judge(self, log: &str, traced: &str) -> Result<(), String> {
        let last = |key: &str| said(log).filter_map(|line| line.strip_prefix(key)).last();
        match last("exit ") {
            Some("0") => {}
            Some(status) => return Err(format!("its tests ended with {status}")),
            None => return Err("it did not come to its end".to_owned()),
        }
        let passed = format!("test result: ok. {} passed; 0 failed", self.count);
        if !log.contains(&passed) {
            return Err(format!("it should say '{passed}'"));
        }
        let memory = last("bar ").and_then(range);
        if memory.is_some() != self.publishes {
            return Err("the device's memory is not where it should be".to_owned());
        }
        let expects_direct = self.publishes && self.topology == Topology::Switch;
        // 0: a direct path is expected; 3: all works by a slower one.
        let expected = if expects_direct { "0" } else { "3" };
        match last("doctor ") {
            Some(status) if status == expected => {}
            status => return Err(format!("the doctor ended with {status:?}, and {expected} is the truth")),
        }
        let direct: u64 = said(log).filter_map(|line| line.strip_prefix("direct-bytes ")?.parse::<u64>().ok()).sum();
        let (all, to_device) = dma_bytes(traced, memory.as_ref());
        println!("  the emulator saw {all} bytes of DMA by drives, {to_device} of them into or out of the device's memory");
        match (expects_direct, direct, to_device) {
            _ if all == 0 => Err("the emulator traced nothing, so nothing is known of what it did".to_owned()),
            (true, 0, _) => Err("nothing was direct".to_owned()),
            (true, ..) if to_device < direct => Err(format!("{direct} bytes were called direct, and {to_device} were")),
            (false, 0, 0) | (true, ..) => Ok(()),
            (false, ..) => Err(format!("{direct} bytes were called direct and {to_device} were, where none can be")),
        }
    }
}

/// What the machine says for those outside. A test's first line follows its name.
fn said(log: &str) -> impl Iterator<Item = &str> {
    log.lines().filter_map(|line| line.split_once("guest: ").map(|(_, said)| said.trim_end()))
}

/// Two hexadecimal numbers.
fn range(text: &str) -> Option<RangeInclusive<u64>> {
    let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let (start, end) = text.split_once(' ')?;
    Some(number(start)?..=number(end)?)
}

/// The bytes of a trace, all and those in the device's memory: `… pci_nvme_map_addr addr 0xfc000000 len 4096`.
fn dma_bytes(traced: &str, memory: Option<&RangeInclusive<u64>>) -> (u64, u64) {
    let (mut all, mut within) = (0, 0);
    for line in traced.lines() {
        let Some((address, length)) = line.split_once("addr 0x").and_then(|(_, rest)| rest.split_once(" len ")) else { continue };
        let (Ok(address), Ok(length)) = (u64::from_str_radix(address, 16), length.trim().parse::<u64>()) else { continue };
        all += length;
        within += if memory.is_some_and(|memory| memory.contains(&address)) { length } else { 0 };
    }
    (all, within)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWITCH: Machine = Machine { tests: "t", count: 2, cpu: "EPYC", topology: Topology::Switch, publishes: true };
    const APART: Machine = Machine { topology: Topology::RootPorts, ..SWITCH };
    const LOG: &str = "guest: bar 0x00000000fc000000 0x00000000fcffffff\nguest: doctor 0\ntest it ... guest: direct-bytes 4096\r\n\
                       test result: ok. 2 passed; 0 failed; 0 ignored\nguest: exit 0\r\n";
    const TRACE: &str = "pci_nvme_map_addr addr 0xfc001000 len 4096\npci_nvme_map_addr addr 0x3efdd000 len 512\n";

    #[test]
    fn what_is_called_direct_must_have_been_seen_by_the_emulator() {
        SWITCH.judge(LOG, TRACE).expect("it was");
        SWITCH.judge(LOG, &TRACE.replace("4096", "4095")).expect_err("less was");
        SWITCH.judge(LOG, "").expect_err("nothing was traced");
        SWITCH.judge(&LOG.replace("direct-bytes 4096", "direct-bytes 0"), TRACE).expect_err("nothing was direct");
    }

    #[test]
    fn where_none_may_be_direct_a_single_byte_is_a_fault() {
        let none = LOG.replace("guest: direct-bytes 4096", "").replace("doctor 0", "doctor 3");
        APART.judge(&none, "pci_nvme_map_addr addr 0x3efdd000 len 512").expect("none was");
        APART.judge(&none, TRACE).expect_err("some was");
        let claimed = LOG.replace("doctor 0", "doctor 3");
        APART.judge(&claimed, "pci_nvme_map_addr addr 0x3efdd000 len 512").expect_err("some was claimed");
    }

    #[test]
    fn the_doctor_must_have_expected_what_happened() {
        SWITCH.judge(&LOG.replace("doctor 0", "doctor 3"), TRACE).expect_err("it expected a slower path");
        SWITCH.judge(&LOG.replace("doctor 0", "doctor 1"), TRACE).expect_err("it found a fault");
        let none = LOG.replace("guest: direct-bytes 4096", "");
        APART.judge(&none, "pci_nvme_map_addr addr 0x3efdd000 len 512").expect_err("it expected a direct path");
    }

    #[test]
    fn a_machine_that_ends_early_or_runs_other_tests_has_failed() {
        SWITCH.judge(&LOG.replace("exit 0", "exit 101"), TRACE).expect_err("a test failed");
        SWITCH.judge(&LOG.replace("guest: exit 0", ""), TRACE).expect_err("it hung");
        SWITCH.judge(&LOG.replace("2 passed", "0 passed"), TRACE).expect_err("no test ran");
        SWITCH.judge(&LOG.replace("guest: bar", "guest: bus"), TRACE).expect_err("no memory");
    }
}
