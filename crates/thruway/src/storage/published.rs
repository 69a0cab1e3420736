//! Memory that a PCI device publishes for the DMA of others, as its driver tells in sysfs (Linux 6.2, `CONFIG_PCI_P2PDMA`).

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::namespace::read_small;
use crate::base::{ByteSize, Error, ErrorKind, PciAddress, Result};

/// Where the kernel lists PCI devices.
pub const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// The `p2pmem` directory of a device.
#[derive(Clone, Debug)]
pub struct PublishedMemory {
    address: PciAddress,
    directory: PathBuf,
}

impl PublishedMemory {
    /// The memory that this device publishes. `devices` is [`PCI_DEVICES`], or stands in for it in a test.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) if there is no such device, if it has no such memory, or if its driver keeps
    /// that to itself.
    pub fn of(devices: &Path, address: PciAddress) -> Result<Self> {
        let device = devices.join(address.to_string());
        let found = Self { address, directory: device.join("p2pmem") };
        let unsupported = |what: &str, hint: &str| {
            Err(Error::new(ErrorKind::Unsupported, what).with("device", format_args!("pci:{address}")).with_hint(hint))
        };
        if !device.exists() {
            return unsupported("there is no PCI device at this address", "`lspci -D` lists the devices and their addresses");
        }
        if !found.directory.exists() {
            return unsupported(
                "the device publishes no memory for peer-to-peer DMA",
                "that takes a kernel with CONFIG_PCI_P2PDMA and a device and driver that publish theirs: see docs/direct-path.md",
            );
        }
        if found.number("published")? == 0 {
            return unsupported(
                "the device's driver does not publish its peer-to-peer memory",
                "that is the driver's choice: see docs/direct-path.md",
            );
        }
        if found.number("size")? == 0 {
            return unsupported(
                "the peer-to-peer memory of the device has no byte",
                "see the device's driver: docs/direct-path.md",
            );
        }
        Ok(found)
    }

    /// The device.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// The bytes that nobody has taken yet. They need not be in one piece.
    ///
    /// # Errors
    /// What reading it gives.
    pub fn available_bytes(&self) -> Result<u64> {
        self.number("available")
    }

    /// Refuses an allocation that is larger than what is available.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory), with both numbers.
    pub fn ensure_bytes(&self, bytes: u64) -> Result<()> {
        let available = self.available_bytes()?;
        if bytes <= available {
            return Ok(());
        }
        let (need, have) = (ByteSize(bytes), ByteSize(available));
        Err(Error::new(ErrorKind::OutOfMemory, format!("this needs {need} of the device's memory and {have} are available"))
            .with("device", format_args!("pci:{}", self.address))
            .with_hint("load fewer tensors, or end what else uses the device's memory"))
    }

    /// Opens the file whose mappings are the memory: each takes what it maps.
    ///
    /// # Errors
    /// [`PermissionDenied`](ErrorKind::PermissionDenied) for users whom its mode does not admit.
    pub fn open(&self) -> Result<OwnedFd> {
        let path = self.directory.join("allocate");
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| {
            let error = Error::from_io("cannot open the device's memory", errno.into()).with_file(&path);
            match errno {
                Errno::NOENT => error.with_hint("the kernel must be 6.2 or newer to give this memory to programs"),
                _ => error,
            }
        })
    }

    fn number(&self, name: &str) -> Result<u64> {
        let path = self.directory.join(name);
        let text = read_small(&path).map_err(|source| Error::from_io("cannot read", source).with_file(&path))?;
        let number = text.trim().parse().ok();
        number.ok_or_else(|| Error::new(ErrorKind::Unsupported, "the kernel gives no number here").with_file(&path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(files: &[(&str, &str)]) -> (tempfile::TempDir, PciAddress) {
        let directory = tempfile::tempdir().expect("a directory");
        let address: PciAddress = "0000:03:00.0".parse().expect("an address");
        let memory = directory.path().join("0000:03:00.0/p2pmem");
        std::fs::create_dir_all(&memory).expect("made");
        files.iter().for_each(|(name, text)| std::fs::write(memory.join(name), text).expect("written"));
        (directory, address)
    }

    #[test]
    fn each_missing_piece_is_named() {
        let whole = [("size", "8192\n"), ("available", "4096\n"), ("published", "1\n")];
        let (devices, address) = device(&whole);
        let found = PublishedMemory::of(devices.path(), address).expect("all is there");
        assert_eq!(found.available_bytes().expect("a number"), 4096);
        found.ensure_bytes(4096).expect("it fits");
        let error = found.ensure_bytes(4097).expect_err("too much");
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.message().contains("4.10 kB are available"), "{error}");
        assert!(found.open().expect_err("an old kernel").hint().is_some_and(|hint| hint.contains("6.2")));

        let nothing = tempfile::tempdir().expect("a directory");
        let absent = PublishedMemory::of(nothing.path(), address).expect_err("no device");
        assert!(absent.message().contains("no PCI device"), "{absent}");
        assert_eq!((absent.kind(), absent.context("device")), (ErrorKind::Unsupported, Some("pci:0000:03:00.0")));
        std::fs::create_dir(nothing.path().join("0000:03:00.0")).expect("made");
        let without = PublishedMemory::of(nothing.path(), address).expect_err("no memory");
        assert!(without.message().contains("publishes no memory"), "{without}");
        for (files, what) in [
            ([("size", "8192"), ("published", "0")], "does not publish"),
            ([("size", "0"), ("published", "1")], "has no byte"),
            ([("size", "many"), ("published", "1")], "no number"),
        ] {
            let (devices, address) = device(&files);
            let error = PublishedMemory::of(devices.path(), address).expect_err(what);
            assert!(error.message().contains(what), "{error}");
        }
    }
}
