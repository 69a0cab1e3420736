//! The places that are asked about: their filesystem, and what lies below it down to the drives.

use super::pci::PciDevice;
use crate::doctor::facts::{Facts, FactsExt, Kind, Question, Unseen};
use crate::doctor::parse::mounts::{Mount, holding};
use crate::doctor::parse::{pci, value};

/// Layers below a filesystem are followed so deep, and so many of them and of drives are listed.
const DEPTH_MAX: usize = 8;
const LAYERS_MAX: usize = 64;
const DRIVES_MAX: usize = 256;

/// Whether `O_DIRECT` is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direct {
    /// It is.
    Accepted,
    /// It is not.
    Refused,
    /// There was no file to try it on.
    Unknown,
}

/// What the system's calls say of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceFacts {
    /// Its path with links resolved.
    pub real: String,
    /// Whether it is neither a directory nor a regular file.
    pub is_special: bool,
    /// Whether it may be read.
    pub may_read: bool,
    /// Whether it may be written, and its filesystem is not read-only.
    pub may_write: bool,
    /// Whether the filesystem takes `O_DIRECT`.
    pub direct: Direct,
    /// All bytes of the filesystem and those free; `None` where it does not tell.
    pub room: Option<(u64, u64)>,
}

/// What lies between a filesystem and its drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Software RAID, with its level.
    Raid(String),
    /// Encryption by the device mapper.
    Crypt,
    /// Logical volumes.
    Lvm,
    /// Several ways to one drive, joined by the device mapper.
    Multipath,
    /// Another target of the device mapper.
    Mapper,
    /// A file that plays a drive.
    Loop,
}

/// One such layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Its name, such as `dm-0`.
    pub name: String,
    /// What it is.
    pub kind: LayerKind,
}

/// What kind of drive it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriveKind {
    /// An NVMe namespace, and how it is reached: `pcie`, `tcp`, `rdma`, `fc`; empty if that is unknown.
    Nvme(String),
    /// A drive of a virtual machine (virtio-blk).
    Virtual,
    /// Any other: SCSI, SATA, eMMC.
    Other,
}

/// A drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Its name, such as `nvme0n1`.
    pub name: String,
    /// What it is.
    pub kind: DriveKind,
    /// Its controller on the PCI bus.
    pub device: Option<PciDevice>,
    /// Bytes of metadata beside each block, of an NVMe drive with integrity data; `None` if that cannot be seen.
    pub metadata_bytes: Option<u64>,
}

/// A place that is asked about.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its path as it was named.
    pub path: String,
    /// What the system's calls say.
    pub place: Result<PlaceFacts, Unseen>,
    /// The mount that holds it.
    pub mount: Option<Mount>,
    /// What lies between the filesystem and its drives, from the top.
    pub layers: Vec<Layer>,
    /// The drives.
    pub drives: Vec<Drive>,
}

impl Target {
    /// Reads all of it.
    pub(super) fn examine(facts: &dyn Facts, mounts: &[Mount], path: &str) -> Self {
        let place = facts.look(&Question::new(Kind::Place, path)).and_then(|text| place(&text, path));
        // A mount that does not answer is still in the table.
        let real = place.as_ref().map_or(path, |place| &place.real);
        let mount = holding(mounts, real).cloned();
        let mut target = Self { path: path.to_owned(), place, mount, layers: Vec::new(), drives: Vec::new() };
        if let Some(base) = target.mount.as_ref().and_then(|mount| block_device(facts, mount)) {
            target.descend(facts, &base, 0);
        }
        target
    }

    /// The drives that PCI shows.
    pub fn devices(&self) -> impl Iterator<Item = &PciDevice> {
        self.drives.iter().filter_map(|drive| drive.device.as_ref())
    }

    /// Whether it lies on NVMe drives of this machine, or may.
    pub fn is_on_local_nvme(&self) -> bool {
        let is_local = |drive: &Drive| matches!(&drive.kind, DriveKind::Nvme(transport) if transport == "pcie");
        self.drives.iter().any(is_local)
    }

    /// Whether it lies on NVMe drives of another machine, reached by RDMA.
    pub fn is_on_remote_nvme(&self) -> bool {
        self.drives.iter().any(|drive| drive.kind == DriveKind::Nvme("rdma".to_owned()))
    }

    /// Whether the filesystem lies on another machine.
    pub fn is_remote(&self) -> bool {
        const REMOTE: [&str; 12] =
            ["nfs", "nfs4", "lustre", "beegfs", "gpfs", "wekafs", "scatefs", "panfs", "cifs", "smb3", "ceph", "glusterfs"];
        self.mount.as_ref().is_some_and(|mount| REMOTE.contains(&mount.kind.as_str()))
    }

    /// Its filesystem, what lies below it, and its drives, in words.
    pub fn describe(&self) -> String {
        let mut words: Vec<String> = self.mount.iter().map(|mount| mount.kind.clone()).collect();
        words.extend(self.layers.iter().map(|layer| layer.name.clone()));
        let drives: Vec<&str> = self.drives.iter().map(|drive| drive.name.as_str()).collect();
        if drives.len() > 4 {
            words.push(format!("{} drives", drives.len()));
        } else if !drives.is_empty() {
            words.push(drives.join(" + "));
        }
        if words.is_empty() { "unknown".to_owned() } else { words.join(" on ") }
    }

    /// Adds what lies at and below a block device; `base` is its resolved path in sysfs.
    fn descend(&mut self, facts: &dyn Facts, base: &str, depth: usize) {
        let base = match base.rsplit_once('/') {
            Some((disk, _)) if facts.line(&format!("{base}/partition")).is_ok() => disk,
            _ => base,
        };
        let name = base.rsplit('/').next().unwrap_or(base).to_owned();
        // What lies below several layers is looked at once; in a machine that somebody made up it may even lie below itself.
        if self.layers.iter().any(|layer| layer.name == name) || self.drives.iter().any(|drive| drive.name == name) {
            return;
        }
        if let Some(kind) = layer_kind(facts, base, &name) {
            if depth > DEPTH_MAX || self.layers.len() == LAYERS_MAX {
                return;
            }
            self.layers.push(Layer { name, kind });
            for slave in facts.names(&format!("{base}/slaves")).iter().take(DRIVES_MAX) {
                if let Ok(below) = facts.link(&format!("/sys/class/block/{slave}")) {
                    self.descend(facts, &below, depth + 1);
                }
            }
        } else if self.drives.len() < DRIVES_MAX {
            self.drives.push(drive(facts, base, name));
        }
    }
}

fn place(text: &str, path: &str) -> Result<PlaceFacts, Unseen> {
    let is = |name: &str| value(text, name) == Some("yes");
    if let Some(missing) = ["kind", "may_read"].iter().find(|name| value(text, name).is_none()) {
        return Err(Unseen::Failed(format!("what is known of it does not say '{missing}'")));
    }
    let number = |name: &str| value(text, name).and_then(|number| number.parse::<u64>().ok());
    Ok(PlaceFacts {
        real: value(text, "real").unwrap_or(path).to_owned(),
        is_special: value(text, "kind") == Some("special"),
        may_read: is("may_read"),
        may_write: is("may_write") && !is("read_only"),
        direct: match value(text, "direct") {
            Some("yes") => Direct::Accepted,
            Some("no") => Direct::Refused,
            _ => Direct::Unknown,
        },
        room: number("total_bytes").zip(number("free_bytes")),
    })
}

/// The resolved path in sysfs of the block device that a mount lies on.
fn block_device(facts: &dyn Facts, mount: &Mount) -> Option<String> {
    if let Ok(base) = facts.link(&format!("/sys/dev/block/{}", mount.device)) {
        return Some(base);
    }
    // Filesystems on several devices (btrfs) have a number of their own, and name one of them.
    if !mount.source.starts_with("/dev/") {
        return None;
    }
    let node = facts.link(&mount.source).ok().filter(|node| node.starts_with("/dev/"));
    let name = node.as_deref().unwrap_or(&mount.source).rsplit('/').next()?.to_owned();
    facts.link(&format!("/sys/class/block/{name}")).ok()
}

fn layer_kind(facts: &dyn Facts, base: &str, name: &str) -> Option<LayerKind> {
    if name.starts_with("dm-") {
        let uuid = facts.line(&format!("{base}/dm/uuid")).unwrap_or_default();
        let kinds = [("CRYPT-", LayerKind::Crypt), ("LVM-", LayerKind::Lvm), ("mpath-", LayerKind::Multipath)];
        let known = kinds.into_iter().find(|(begin, _)| uuid.starts_with(begin));
        return Some(known.map_or(LayerKind::Mapper, |(_, kind)| kind));
    }
    if name.starts_with("md") {
        return Some(LayerKind::Raid(facts.line(&format!("{base}/md/level")).unwrap_or_default()));
    }
    name.starts_with("loop").then_some(LayerKind::Loop)
}

fn drive(facts: &dyn Facts, base: &str, name: String) -> Drive {
    if !is_namespace(&name) {
        let is_virtual = base.contains("/virtio");
        let device = pci::addresses(base).last().and_then(|address| PciDevice::examine(facts, address));
        let kind = if is_virtual { DriveKind::Virtual } else { DriveKind::Other };
        return Drive { name, kind, device, metadata_bytes: Some(0) };
    }
    let controller = controller(facts, base);
    let transport = controller.as_ref().and_then(|name| facts.line(&format!("/sys/class/nvme/{name}/transport")).ok());
    let path = controller.and_then(|name| facts.link(&format!("/sys/class/nvme/{name}")).ok()).unwrap_or_default();
    let device = pci::addresses(&path).last().and_then(|address| PciDevice::examine(facts, address));
    // Kernels before 6.8 do not tell, and few drives have any.
    let metadata_bytes = match facts.line(&format!("{base}/metadata_bytes")) {
        Err(Unseen::Absent) => Some(0),
        bytes => bytes.ok().and_then(|bytes| bytes.parse().ok()),
    };
    Drive { name, kind: DriveKind::Nvme(transport.unwrap_or_default()), device, metadata_bytes }
}

/// Whether a drive's name is one that the NVMe driver gives: `nvme0n1`, `nvme0c0n1`. NVMesh has names of its own.
fn is_namespace(name: &str) -> bool {
    let Some((controller, namespace)) = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n')) else { return false };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number(namespace) && controller.split('c').take(3).all(is_number)
}

/// The controller of an NVMe namespace: the directory above it, or, where the kernel joins several ways to one drive, the
/// first of the subsystem.
fn controller(facts: &dyn Facts, base: &str) -> Option<String> {
    let is_controller =
        |name: &str| name.strip_prefix("nvme").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()) && !rest.is_empty());
    let (above, _) = base.rsplit_once('/')?;
    let name = above.rsplit('/').next()?;
    if is_controller(name) {
        return Some(name.to_owned());
    }
    facts.names(above).into_iter().find(|name| is_controller(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_of_the_nvme_driver_are_known_by_their_whole_name() {
        for name in ["nvme0n1", "nvme12n3", "nvme0c1n1"] {
            assert!(is_namespace(name), "{name}");
        }
        for name in ["nvmesh!vol", "nvmesh0n1", "nvme0", "nvmen1", "nvme0n", "sda", "nvme0n1p1"] {
            assert!(!is_namespace(name), "{name}");
        }
    }
}
