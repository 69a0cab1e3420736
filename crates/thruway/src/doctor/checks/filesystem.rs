//! Each place: whether it can be used, its filesystem, what lies below it.

use super::{Context, p2pdma, peers, why};
use crate::base::ByteSize;
use crate::doctor::facts::Unseen;
use crate::doctor::machine::{Direct, Drive, DriveKind, Layer, LayerKind, Target, is_loaded};
use crate::doctor::parse::mounts::Mount;
use crate::doctor::quote::quoted;
use crate::doctor::report::{Finding, Route, Verdict};

const MOUNTS: &str = "/proc/self/mountinfo";
const LOCAL: &str = "keep the data on ext4 or xfs, straight on a local NVMe drive";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    for target in &context.machine.targets {
        let begin = findings.len();
        findings.push(access(target));
        findings.push(match &target.mount {
            Some(mount) => filesystem(context, mount),
            None => Finding::new("path.filesystem", Verdict::Unknown, "no mount is known that holds it", MOUNTS)
                .remedy(format!("find out what holds {}: `findmnt -T {}`", target.path, quoted(&target.path)))
                .shuts(&Route::ALL),
        });
        findings.extend(unseen_drives(target));
        findings.extend(direct(context, target));
        for layer in &target.layers {
            findings.push(below(context, layer));
        }
        for drive in &target.drives {
            findings.push(kind(drive));
        }
        findings.extend(denied(context, target));
        findings.extend(p2pdma::drives_iommu(context, target));
        findings.extend(peers::distance(context, target));
        findings.extend(peers::sockets(context, target));
        findings.extend(peers::pool_distance(context, target));
        findings.extend(room(target));
        for finding in findings.iter_mut().skip(begin) {
            finding.subject.clone_from(&target.path);
        }
    }
}

/// A filesystem on drives that cannot be seen may lie on anything.
fn unseen_drives(target: &Target) -> Option<Finding> {
    let mount = target.mount.as_ref()?;
    if !matches!(mount.kind.as_str(), "ext4" | "xfs") || !target.drives.is_empty() {
        return None;
    }
    let seen = format!("the drives below {} cannot be seen", mount.source);
    let source = format!("/sys/dev/block/{}", mount.device);
    let finding = Finding::new("path.drive", Verdict::Unknown, seen, source).shuts(&Route::ALL);
    Some(finding.remedy(format!("find out on which drives {} lies: `lsblk -s {}`", mount.source, quoted(&mount.source))))
}

fn access(target: &Target) -> Finding {
    let fault = |seen: String, remedy: &str| {
        Finding::new("path.access", Verdict::Fault, seen, "stat, access").remedy(remedy).shuts(&Route::ALL)
    };
    match &target.place {
        Ok(place) if place.is_special => {
            fault("it is neither a directory nor a regular file".to_owned(), "name a directory or a file instead")
        }
        Ok(place) if !place.may_read => {
            fault("this user may not read it".to_owned(), "check its owner and mode, and those above it")
        }
        Ok(place) if !place.may_write => Finding::ok("path.access", "it can be read, and not written by this user", "access"),
        Ok(_) => Finding::ok("path.access", "it can be read and written", "access"),
        Err(Unseen::Absent) => fault("there is no such file or directory".to_owned(), "check the name"),
        Err(Unseen::Denied) => {
            fault("this user may not go there".to_owned(), "check the owner and mode of the directories above it")
        }
        Err(unseen @ Unseen::Silent(_)) => {
            let seen = format!("{}: its drive or server is gone", why(unseen));
            fault(seen, "bring the server back, or unmount it: `umount -l`")
        }
        Err(unseen) => Finding::new("path.access", Verdict::Unknown, format!("it cannot be examined: {}", why(unseen)), "stat")
            .remedy(format!("find out whether {} can be read: `stat {}`", target.path, quoted(&target.path)))
            .shuts(&Route::ALL),
    }
}

/// What cuFile makes of the kind of filesystem: the matrix of its release notes.
fn filesystem(context: &Context<'_>, mount: &Mount) -> Finding {
    let described = format!("{} on {}", mount.kind, mount.source);
    let finding = |verdict, seen: String| Finding::new("path.filesystem", verdict, seen, MOUNTS);
    let by_host = |what: &str| finding(Verdict::Warning, format!("{described}: {what}")).remedy(LOCAL).rules_out(&Route::ALL);
    let by_module = |what: &str| finding(Verdict::Ok, format!("{described}: {what}")).rules_out(&Route::P2PDMA);
    match mount.kind.as_str() {
        "ext4" if mount.has("data=journal") => {
            finding(Verdict::Warning, format!("{described}, data=journal: nothing goes past the page cache"))
                .remedy(format!("mount {} with data=ordered", mount.point))
                .shuts(&Route::ALL)
        }
        "ext4" if !mount.has("data=ordered") => {
            let mode = mount.value("data").map_or_else(|| "without data=ordered".to_owned(), |mode| format!("with data={mode}"));
            finding(Verdict::Warning, format!("{described}, mounted {mode}: cuFile takes it with data=ordered written out only"))
                .remedy(format!("mount {0} with data=ordered: add that to its options in /etc/fstab", mount.point))
                .shuts(&Route::CUFILE)
        }
        "ext4" | "xfs" => finding(Verdict::Ok, described),
        "nfs" | "nfs4" | "lustre" if mount.is_over_rdma().is_none() => {
            let at = quoted(&mount.point);
            let command = if mount.kind == "lustre" { "lnetctl net show".to_owned() } else { format!("findmnt {at}") };
            finding(Verdict::Unknown, format!("{described}: over which network cannot be told"))
                .remedy(format!("find out whether {} is mounted over RDMA: `{command}`", mount.point))
                .shuts(&[Route::NvidiaFs])
                .rules_out(&Route::P2PDMA)
        }
        "nfs" | "nfs4" if mount.is_over_rdma() == Some(true) => by_module("over RDMA, by nvidia-fs"),
        "nfs" | "nfs4" => finding(Verdict::Warning, format!("{described}: over TCP every byte goes through the host"))
            .remedy(format!("mount {} with proto=rdma,port=20049, if server and network can", mount.point))
            .shuts(&[Route::NvidiaFs])
            .rules_out(&Route::P2PDMA),
        "lustre" | "beegfs" | "scatefs" => by_module("over its RDMA network, by nvidia-fs"),
        "panfs" => panasas(context, by_module("over RDMA, by nvidia-fs")),
        "wekafs" if is_broken_with_weka(context) => {
            finding(Verdict::Warning, format!("{described}: libcufile 1.16 (CUDA 13.1) fails there (EBADF)"))
                .remedy("install another libcufile: 1.15, or 1.17 or newer")
                .shuts(&[Route::NvidiaFs])
                .rules_out(&Route::P2PDMA)
        }
        "wekafs" | "gpfs" => peer_memory(context, by_module("over RDMA from user space")),
        "virtiofs" => finding(Verdict::Ok, format!("{described}: by P2PDMA")).rules_out(&[Route::NvidiaFs, Route::KernelP2pdma]),
        "tmpfs" | "ramfs" | "devtmpfs" => by_host("its files lie in the host's memory"),
        "overlay" => by_host("a container's layers, which cuFile does not see through"),
        "btrfs" | "zfs" | "squashfs" | "bcachefs" => by_host("cuFile runs in its compatibility mode there"),
        "fuse" | "fuseblk" | "cifs" | "smb3" | "9p" | "ceph" => by_host("a program or a server moves its bytes"),
        kind if kind.starts_with("fuse.") => by_host("a program moves its bytes"),
        _ => by_host("cuFile does not support it"),
    }
}

/// PanFS came with libcufile 1.19.1.
fn panasas(context: &Context<'_>, finding: Finding) -> Finding {
    const INSTALL: &str = "install libcufile 1.19.1 or newer";
    let library = context.machine.library.as_ref().ok();
    let seen = format!("{}, with libcufile 1.19.1 or newer", finding.seen);
    match library.map(|library| library.version.as_ref()) {
        Some(Some(version)) if version.at_least(&[1, 19, 1]) => finding,
        Some(None) => Finding { verdict: Verdict::Unknown, seen, ..finding }.remedy(INSTALL).shuts(&[Route::NvidiaFs]),
        _ => Finding { verdict: Verdict::Warning, seen, ..finding }.remedy(INSTALL).shuts(&[Route::NvidiaFs]),
    }
}

/// A known issue of the release notes of GPUDirect Storage 1.16.
fn is_broken_with_weka(context: &Context<'_>) -> bool {
    let version = context.machine.library.as_ref().ok().and_then(|library| library.version.as_ref());
    version.is_some_and(|version| version.at_least(&[1, 16]) && !version.at_least(&[1, 17]))
}

/// RDMA from user space needs what lets the network card into the GPU: a module, or the GPU's memory as a dma-buf.
fn peer_memory(context: &Context<'_>, finding: Finding) -> Finding {
    if is_loaded(context.facts, "nvidia_peermem") || context.machine.gpus.iter().any(|gpu| gpu.has_dma_buf == Some(true)) {
        return finding;
    }
    let seen = format!("{}, nvidia-peermem is not loaded, and CUDA hands out no memory as dma-buf", finding.seen);
    Finding { verdict: Verdict::Warning, seen, ..finding }
        .remedy("load nvidia-peermem: `sudo modprobe nvidia-peermem`")
        .shuts(&[Route::NvidiaFs])
}

fn direct(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let place = target.place.as_ref().ok()?;
    // Of what cannot be used it does not matter.
    if place.is_special || !place.may_read {
        return None;
    }
    Some(match place.direct {
        Direct::Accepted => Finding::ok("path.direct_io", "O_DIRECT is taken", "statx"),
        Direct::Refused => {
            Finding::new("path.direct_io", Verdict::Warning, "O_DIRECT is refused: bytes go through the page cache", "statx")
                .remedy(LOCAL)
                .rules_out(&Route::ALL)
        }
        // These have it on every drive.
        Direct::Unknown => {
            let has_it = target.mount.as_ref().is_some_and(|mount| ["ext4", "xfs", "btrfs"].contains(&mount.kind.as_str()));
            let is_idle = context.machine.gpus.is_empty() && context.machine.pools.is_empty() || has_it;
            let verdict = if is_idle { Verdict::NotApplicable } else { Verdict::Unknown };
            let finding = Finding::new("path.direct_io", verdict, "there is no readable file to try O_DIRECT on", "open");
            if is_idle { finding } else { finding.remedy(format!("find out with a file: name one below {}", target.path)) }
        }
    })
}

fn below(context: &Context<'_>, layer: &Layer) -> Finding {
    let source = format!("/sys/class/block/{}", layer.name);
    let shut = |what: &str| {
        Finding::new("path.layer", Verdict::Warning, format!("{}: {what}", layer.name), source.clone())
            .remedy("put the filesystem straight on an NVMe drive")
            .rules_out(&Route::ALL)
    };
    match &layer.kind {
        LayerKind::Raid(level) => raid(context, &layer.name, level, source),
        LayerKind::Crypt => shut("dm-crypt: the processor has to see every byte"),
        LayerKind::Lvm => shut("a logical volume, through which there is no direct path"),
        LayerKind::Multipath => shut("device-mapper multipath, through which there is no direct path"),
        LayerKind::Mapper => shut("a target of the device mapper, through which there is no direct path"),
        LayerKind::Loop => shut("a file that plays a drive"),
    }
}

fn raid(context: &Context<'_>, name: &str, level: &str, source: String) -> Finding {
    let seen = format!("{name}: software RAID ({level})");
    let finding = |verdict, seen| Finding::new("path.layer", verdict, seen, source.clone());
    match level {
        // Whether cuFile is told so is another check's question.
        "raid0" if context.machine.kernel_at_least(&[7, 1]) || context.machine.is_grace() => finding(Verdict::Ok, seen),
        "raid0" => {
            finding(Verdict::Ok, format!("{seen}: by nvidia-fs; over P2PDMA from Linux 7.1 on, with block.raid.use_pci_p2pdma"))
                .rules_out(&Route::P2PDMA)
        }
        "raid1" | "raid10" => {
            let library = context.machine.library.as_ref().ok();
            let is_new = library.map(|library| library.version.as_ref().map(|version| version.at_least(&[1, 19])));
            let finding = |verdict| {
                let seen = format!("{seen}: by nvidia-fs with libcufile 1.19 or newer");
                Finding::new("path.layer", verdict, seen, source.clone()).rules_out(&Route::P2PDMA)
            };
            let install = "install libcufile 1.19 (CUDA 13.4), or use RAID 0";
            match is_new.unwrap_or(Some(false)) {
                Some(true) => finding(Verdict::Ok),
                Some(false) => finding(Verdict::Warning).remedy(install).shuts(&[Route::NvidiaFs]),
                None => finding(Verdict::Unknown).remedy(install).shuts(&[Route::NvidiaFs]),
            }
        }
        _ => finding(Verdict::Warning, format!("{seen}: through this level there is no direct path"))
            .remedy("put the filesystem straight on an NVMe drive, or on RAID 0")
            .rules_out(&Route::ALL),
    }
}

fn kind(drive: &Drive) -> Finding {
    let source = format!("/sys/class/block/{}", drive.name);
    let name = &drive.name;
    let shut = |what: &str| {
        Finding::new("path.drive", Verdict::Warning, format!("{name}: {what}"), source.clone())
            .remedy("use a local NVMe drive")
            .rules_out(&Route::ALL)
    };
    match &drive.kind {
        DriveKind::Nvme(transport) => match transport.as_str() {
            "pcie" => match drive.metadata_bytes {
                Some(0) => Finding::ok("path.drive", format!("{name}: NVMe on PCIe"), source),
                Some(bytes) => {
                    let seen = format!("{name}: NVMe, with {bytes} bytes of integrity data beside each block");
                    Finding::new("path.drive", Verdict::Warning, seen, source)
                        .remedy(format!("format {name} without metadata (`nvme format --lbaf`): its content is lost by that"))
                        .shuts(&Route::P2PDMA)
                }
                None => {
                    let seen = format!("{name}: NVMe on PCIe; whether it has integrity data beside each block cannot be seen");
                    Finding::new("path.drive", Verdict::Unknown, seen, source)
                        .remedy(format!("find out whether it has: `nvme id-ns -H /dev/{name}` (ms:0 in the format in use)"))
                        .shuts(&Route::P2PDMA)
                }
            },
            "rdma" => Finding::ok("path.drive", format!("{name}: NVMe over RDMA"), source).rules_out(&[Route::KernelP2pdma]),
            "" => {
                let seen = format!("{name}: NVMe, reached in an unknown way");
                Finding::new("path.drive", Verdict::Unknown, seen, source)
                    .remedy(format!("find out how {name} is reached: `nvme list-subsys /dev/{name}`"))
                    .shuts(&Route::ALL)
            }
            other => shut(&format!("NVMe over {other}, whose bytes go through the host")),
        },
        DriveKind::Virtual => shut("a virtual drive: the host of this machine moves its bytes"),
        DriveKind::Other if is_known_other(name) => shut("no NVMe drive: there is no direct path to it"),
        DriveKind::Other => {
            let seen = format!("{name}: a drive of a kind that is not known here");
            Finding::new("path.drive", Verdict::Unknown, seen, source)
                .remedy(format!("find out whether the driver of {name} has registered: `cat /proc/driver/nvidia-fs/modules`"))
                .shuts(&[Route::NvidiaFs])
                .rules_out(&Route::P2PDMA)
        }
    }
}

/// Whether a drive's name is one of those that the kernel gives to drives without a direct path: SCSI and SATA, eMMC, of virtual
/// machines, of mainframes, in memory, over a network. Others may have a driver that knows nvidia-fs (NVMesh, ScaleFlux).
fn is_known_other(name: &str) -> bool {
    let letters = name.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(name.len());
    let kind = &name[..letters];
    ["mmcblk", "dasda", "nbd", "rbd", "zd", "zram", "ram", "pmem", "bcache", "drbd", "sr"].contains(&kind)
        || ["sd", "hd", "vd", "xvd"].iter().any(|begin| kind.starts_with(begin))
}

/// Whether cufile.json keeps this place from the direct path.
fn denied(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let config = &context.machine.config;
    let mount = target.mount.as_ref()?;
    let word = config.audit()?.settings.denied.iter().find(|word| {
        **word == mount.kind
            || std::path::Path::new(&mount.point).starts_with(word) && word.starts_with('/')
            || target.drives.iter().any(|drive| word.trim_start_matches("/dev/") == drive.name || is_driver(word, drive))
    })?;
    Some(
        Finding::new("path.denied", Verdict::Warning, format!("cufile.json keeps {word} from the direct path"), &config.path)
            .remedy(format!("take {word} out of denylist"))
            .shuts(&Route::CUFILE),
    )
}

/// Whether a word of `denylist.drivers` names the driver of a drive.
fn is_driver(word: &str, drive: &Drive) -> bool {
    match &drive.kind {
        DriveKind::Nvme(transport) if transport == "rdma" => matches!(word, "nvme" | "nvme_rdma" | "nvme-rdma" | "nvmeof"),
        DriveKind::Nvme(_) => word == "nvme",
        _ => false,
    }
}

fn room(target: &Target) -> Option<Finding> {
    let (total, free) = target.place.as_ref().ok()?.room?;
    let seen = format!("{} of {} are free", ByteSize(free), ByteSize(total));
    // Filesystems grow slow when nearly full: 2 % is where ext4 and xfs begin to.
    Some(if free < total / 50 {
        Finding::new("path.room", Verdict::Warning, seen, "statfs").remedy("free space before a checkpoint needs it")
    } else {
        Finding::ok("path.room", seen, "statfs")
    })
}
