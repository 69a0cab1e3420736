//! The drive below a filesystem: its name, where it sits, and how much it has moved.

use std::fmt;

use super::namespace::{link_target, read_small_text};
use crate::base::PciAddress;

/// A block device that filesystems lie on, whole or a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// The kernel's name: `nvme0n1p1`.
    pub name: String,
    /// The PCI device that it belongs to; `None` for one that the kernel composes of others (LVM, RAID).
    pub pci: Option<PciAddress>,
}

impl fmt::Display for Drive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pci {
            Some(pci) => write!(f, "{} ({pci})", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl Drive {
    /// The drive below the filesystem with this device number; `None` for one that lies on no block device, or on
    /// several.
    pub fn below(device: u64) -> Option<Self> {
        Self::at(link_target(&directory_of(device))?.to_str()?)
    }

    /// Reads the path of a block device in `/sys/devices`: the last address in it is the drive's controller.
    fn at(path: &str) -> Option<Self> {
        let name = path.rsplit('/').next().filter(|name| !name.is_empty())?;
        let pci = path.rsplit('/').find_map(|part| part.parse().ok());
        Some(Self { name: name.to_owned(), pci })
    }
}

/// The bytes that the drive below a filesystem has read and written since it was found, as the kernel's block layer counts
/// them; `None` where there is no such drive, or where it keeps no count.
pub fn drive_traffic(device: u64) -> Option<Traffic> {
    Traffic::parse(&read_small_text(&format!("{}/stat", directory_of(device)))?)
}

/// What a drive has moved, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the drive.
    pub read_bytes: u64,
    /// To the drive.
    pub written_bytes: u64,
}

impl Traffic {
    /// What was moved between `earlier` and this.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
        }
    }

    /// `stat` of a block device (Documentation/block/stat.rst): the third and the seventh number count sectors, which are
    /// 512 bytes whatever the drive's are.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(|number| number.parse::<u64>().ok());
        let (read, written) = (numbers.nth(2)??, numbers.nth(3)??);
        Some(Self { read_bytes: read.saturating_mul(512), written_bytes: written.saturating_mul(512) })
    }
}

fn directory_of(device: u64) -> String {
    format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controller_nearest_to_the_drive_is_its_address() {
        let path = "../../devices/pci0000:00/0000:00:02.0/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p1";
        let drive = Drive::at(path).expect("a drive");
        assert_eq!(drive.to_string(), "nvme0n1p1 (0000:01:00.0)");
        let composed = Drive::at("../../devices/virtual/block/md0").expect("a drive");
        assert_eq!((composed.name.as_str(), composed.pci), ("md0", None));
    }

    #[test]
    fn sectors_are_counted_in_units_of_512() {
        let text = "  873927    83981 532824010  1637232   162222   368734 168622840   720910        0   224020\n";
        let traffic = Traffic::parse(text).expect("numbers");
        assert_eq!(traffic, Traffic { read_bytes: 532_824_010 * 512, written_bytes: 168_622_840 * 512 });
        assert_eq!(Traffic::parse("1 2"), None);
    }
}
