//! Each place: whether it can be used, its filesystem, what lies below it.

use super::{Context, pcie, why};
use crate::base::ByteSize;
use crate::doctor::facts::Unseen;
use crate::doctor::machine::{Direct, Drive, DriveKind, Layer, LayerKind, Target, is_loaded};
use crate::doctor::parse::mounts::Mount;
use crate::doctor::report::{Finding, Route, Verdict};

const MOUNTS: &str = "/proc/self/mountinfo";
const LOCAL: &str = "keep the data on ext4 or xfs, straight on a local NVMe drive";

pub(super) fn check(context: &Context<'_>, findings: &mut Vec<Finding>) {
    for target in &context.machine.targets {
        let begin = findings.len();
        findings.push(access(target));
        findings.push(match &target.mount {
            Some(mount) => filesystem(context, mount),
            None => {
                Finding::new("path.filesystem", Verdict::Unknown, "no mount is known that holds it", MOUNTS).shuts(&Route::ALL)
            }
        });
        findings.extend(unseen_drives(target));
        findings.extend(direct(target));
        for layer in &target.layers {
            findings.push(below(context, layer));
        }
        for drive in &target.drives {
            findings.push(kind(drive));
        }
        findings.extend(denied(context, target));
        findings.extend(pcie::distance(context, target));
        findings.extend(pcie::pool_distance(context, target));
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
    Some(Finding::new("path.drive", Verdict::Unknown, seen, source).shuts(&Route::ALL))
}

fn access(target: &Target) -> Finding {
    let fault = |seen: String, remedy: &str| {
        Finding::new("path.access", Verdict::Fault, seen, "stat, access").remedy(remedy).shuts(&Route::ALL)
    };
    match &target.place {
        Ok(place) if place.is_special => {
            fault("it is neither a directory nor a regular file".to_owned(), "name a directory or a file")
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
        Err(unseen) => Finding::new("path.access", Verdict::Unknown, format!("it cannot be examined: {}", why(unseen)), "stat"),
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
                .remedy("mount it with data=ordered")
                .shuts(&Route::ALL)
        }
        "ext4" if !mount.has("data=ordered") => {
            let mode = mount.value("data").map_or_else(|| "without data=ordered".to_owned(), |mode| format!("with data={mode}"));
            finding(Verdict::Warning, format!("{described}, mounted {mode}: cuFile takes it with data=ordered written out only"))
                .remedy(format!("mount it so: add data=ordered to the options of {} in /etc/fstab", mount.point))
                .shuts(&Route::CUFILE)
        }
        "ext4" | "xfs" => finding(Verdict::Ok, described),
        "nfs" | "nfs4" if mount.value("proto") == Some("rdma") => by_module("over RDMA, by nvidia-fs"),
        "nfs" | "nfs4" => finding(Verdict::Warning, format!("{described}: over TCP every byte goes through the host"))
            .remedy("mount it with proto=rdma,port=20049, if server and network can")
            .shuts(&[Route::NvidiaFs])
            .rules_out(&Route::P2PDMA),
        "lustre" | "beegfs" | "scatefs" => by_module("over its RDMA network, by nvidia-fs"),
        "wekafs" | "gpfs" => peer_memory(context, by_module("over RDMA from user space")),
        "virtiofs" => finding(Verdict::Ok, format!("{described}: by P2PDMA")).rules_out(&[Route::NvidiaFs, Route::KernelP2pdma]),
        "tmpfs" | "ramfs" | "devtmpfs" => by_host("it is memory of the host"),
        "overlay" => by_host("a container's layers, which cuFile does not see through"),
        "btrfs" | "zfs" | "squashfs" | "bcachefs" => by_host("cuFile runs in its compatibility mode there"),
        "fuse" | "fuseblk" | "cifs" | "smb3" | "9p" | "ceph" => by_host("a program or a server moves its bytes"),
        kind if kind.starts_with("fuse.") => by_host("a program moves its bytes"),
        _ => by_host("cuFile does not support it"),
    }
}

/// RDMA from user space needs a module that lets the network card into the GPU.
fn peer_memory(context: &Context<'_>, finding: Finding) -> Finding {
    if is_loaded(context.facts, "nvidia_peermem") {
        return finding;
    }
    let seen = format!("{}, and nvidia-peermem is not loaded", finding.seen);
    Finding { verdict: Verdict::Warning, seen, ..finding }
        .remedy("load it: `sudo modprobe nvidia-peermem`")
        .shuts(&[Route::NvidiaFs])
}

fn direct(target: &Target) -> Option<Finding> {
    Some(match target.place.as_ref().ok()?.direct {
        Direct::Accepted => Finding::ok("path.direct_io", "O_DIRECT is taken", "statx"),
        Direct::Refused => {
            Finding::new("path.direct_io", Verdict::Warning, "O_DIRECT is refused: bytes go through the page cache", "statx")
                .remedy(LOCAL)
                .rules_out(&Route::ALL)
        }
        Direct::Unknown => Finding::new("path.direct_io", Verdict::Unknown, "there is no file to try O_DIRECT on", "open")
            .remedy("name a file, or `thruway bench --dir` there"),
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
    let settings = context.machine.config.audit().map(|audit| &audit.settings);
    let told = settings.is_some_and(|settings| settings.raid_p2pdma == Some(true));
    let seen = format!("{name}: software RAID ({level})");
    let finding = |verdict, seen| Finding::new("path.layer", verdict, seen, source.clone());
    match level {
        "raid0" if (context.machine.kernel_at_least(&[7, 1]) || !context.machine.is_x86()) && told => finding(Verdict::Ok, seen),
        "raid0" => {
            finding(Verdict::Ok, format!("{seen}: by nvidia-fs; over P2PDMA from Linux 7.1 on, with block.raid.use_pci_p2pdma"))
                .rules_out(&Route::P2PDMA)
        }
        "raid1" | "raid10" => {
            let is_new = context
                .machine
                .library
                .as_ref()
                .and_then(|library| library.version.as_ref())
                .is_some_and(|v| v.at_least(&[1, 19]));
            let finding = finding(
                if is_new { Verdict::Ok } else { Verdict::Warning },
                format!("{seen}: by nvidia-fs with libcufile 1.19 or newer"),
            )
            .rules_out(&Route::P2PDMA);
            if is_new {
                finding
            } else {
                finding.remedy("install libcufile 1.19 (CUDA 13.4), or use RAID 0").shuts(&[Route::NvidiaFs])
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
            "pcie" if drive.metadata_bytes > 0 => {
                let seen = format!("{name}: NVMe, with {} bytes of integrity data beside each block", drive.metadata_bytes);
                Finding::new("path.drive", Verdict::Warning, seen, source)
                    .remedy("format it without metadata (`nvme format --lbaf`): its content is lost by that")
                    .shuts(&Route::P2PDMA)
            }
            "pcie" => Finding::ok("path.drive", format!("{name}: NVMe on PCIe"), source),
            "rdma" => Finding::ok("path.drive", format!("{name}: NVMe over RDMA"), source).rules_out(&[Route::KernelP2pdma]),
            "" => {
                let seen = format!("{name}: NVMe, reached in an unknown way");
                Finding::new("path.drive", Verdict::Unknown, seen, source).shuts(&Route::ALL)
            }
            other => shut(&format!("NVMe over {other}, whose bytes go through the host")),
        },
        DriveKind::Virtual => shut("a virtual drive: the host of this machine moves its bytes"),
        DriveKind::Other => shut("no NVMe drive: there is no direct path to it"),
    }
}

/// Whether cufile.json keeps this place from the direct path.
fn denied(context: &Context<'_>, target: &Target) -> Option<Finding> {
    let config = &context.machine.config;
    let mount = target.mount.as_ref()?;
    let word = config.audit()?.settings.denied.iter().find(|word| {
        **word == mount.kind
            || std::path::Path::new(&mount.point).starts_with(word) && word.starts_with('/')
            || target.drives.iter().any(|drive| word.trim_start_matches("/dev/") == drive.name)
    })?;
    Some(
        Finding::new("path.denied", Verdict::Warning, format!("cufile.json keeps {word} from the direct path"), &config.path)
            .remedy(format!("take {word} out of denylist"))
            .shuts(&Route::CUFILE),
    )
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
