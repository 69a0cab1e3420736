//! Addresses of PCI devices.

use std::fmt;
use std::str::FromStr;

use super::error::{Error, ErrorKind, Result, printable};

/// Where a PCI device sits: `0000:03:00.0` is domain, bus, device and function, in hexadecimal, as the kernel names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// The address that `text` is, written in full and in no other way. `None` for everything else.
    fn parse(text: &str) -> Option<Self> {
        let hex = |digits: &str, count: std::ops::RangeInclusive<usize>| {
            let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            (plain && count.contains(&digits.len())).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
        };
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        // Virtual bridges (Intel's VMD) have domains of more than four digits.
        let domain = hex(domain, 4..=8)?;
        let bus = u8::try_from(hex(bus, 2..=2)?).ok()?;
        let device = u8::try_from(hex(device, 2..=2)?).ok().filter(|device| *device < 32)?;
        let function = u8::try_from(hex(function, 1..=1)?).ok().filter(|function| *function < 8)?;
        Some(Self { domain, bus, device, function })
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, format!("'{}' is no PCI address", printable(text)))
                .with_hint("write it in full, such as 0000:03:00.0; `lspci -D` lists them")
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_as_the_kernel_writes_them() {
        for text in ["0000:03:00.0", "0000:ff:1f.7", "10001:e1:00.0"] {
            assert_eq!(text.parse::<PciAddress>().expect(text).to_string(), text);
        }
        assert_eq!("0000:AF:00.1".parse::<PciAddress>().expect("capitals are fine").to_string(), "0000:af:00.1");
    }

    #[test]
    fn everything_else_is_refused() {
        for text in ["", "03:00.0", "0000:03:00", "0000:3:00.0", "0000:03:20.0", "0000:03:00.8", "0000:03:00.0 ", "+000:03:00.0"]
        {
            let error = text.parse::<PciAddress>().expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.hint().is_some());
        }
    }
}
