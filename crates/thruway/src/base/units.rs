//! Quantities that must not be confused: sizes, alignments, byte ranges of files.

use std::fmt;
use std::str::FromStr;

use super::error::{Error, ErrorKind, Result};

/// A number of bytes that people read and write: `256MiB`, `5GB`, `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    /// `count` binary kilobytes (1024 bytes each).
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// `count` binary megabytes (1024² bytes each).
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// `count` binary gigabytes (1024³ bytes each).
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ByteSize {
    /// Decimal units, rounded to three significant digits, as drives and the Hugging Face hub count: `8.72 GB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] = [(1_000, "kB"), (1_000_000, "MB"), (1_000_000_000, "GB"), (1_000_000_000_000, "TB")];
        if self.0 < 1_000 {
            return write!(f, "{} B", self.0);
        }
        for (unit, name) in UNITS {
            let hundredths = (u128::from(self.0) * 100 + u128::from(unit) / 2) / u128::from(unit);
            let tenths = (u128::from(self.0) * 10 + u128::from(unit) / 2) / u128::from(unit);
            let whole = (u128::from(self.0) + u128::from(unit) / 2) / u128::from(unit);
            if hundredths < 1_000 {
                return write!(f, "{}.{:02} {name}", hundredths / 100, hundredths % 100);
            } else if tenths < 1_000 {
                return write!(f, "{}.{} {name}", tenths / 10, tenths % 10);
            } else if whole < 1_000 || name == "TB" {
                return write!(f, "{whole} {name}");
            }
        }
        Ok(())
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    /// Reads a whole number with an optional unit: `kB MB GB TB` count in thousands, `KiB MiB GiB TiB`
    /// (and the bare letters `K M G T`) in powers of 1024. Case does not matter.
    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            Error::new(ErrorKind::InvalidInput, format!("'{}' is not a size", super::error::printable(text)))
                .with_hint("write a whole number with a unit, such as 512MiB or 5GB")
        };
        let trimmed = text.trim();
        let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let number: u64 = trimmed[..digits].parse().map_err(|_| refuse())?;
        let factor: u64 = match trimmed[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            _ => return Err(refuse()),
        };
        number.checked_mul(factor).map(Self).ok_or_else(refuse)
    }
}

/// A power of two that offsets, lengths or addresses must be multiples of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alignment(u64);

impl Alignment {
    /// No demand at all.
    pub const ONE: Self = Self(1);
    /// A page on every machine that this library runs on, and the largest block of ordinary drives.
    pub const PAGE: Self = Self(4096);

    /// A page of this machine: 4 KiB nearly everywhere, up to 64 KiB on Arm. Never less than [`PAGE`](Self::PAGE).
    pub fn system_page() -> Self {
        Self::new(rustix::param::page_size() as u64).unwrap_or(Self::PAGE).max(Self::PAGE)
    }

    /// The alignment to `bytes`; `None` unless it is a power of two.
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() { Some(Self(bytes)) } else { None }
    }

    /// The alignment in bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Whether `value` is a multiple.
    pub const fn divides(self, value: u64) -> bool {
        value & (self.0 - 1) == 0
    }

    /// The largest multiple that is not above `value`.
    pub const fn down(self, value: u64) -> u64 {
        value & !(self.0 - 1)
    }

    /// The smallest multiple that is not below `value`; saturates at the last multiple that 64 bits hold.
    pub const fn up(self, value: u64) -> u64 {
        match value.checked_add(self.0 - 1) {
            Some(sum) => self.down(sum),
            None => self.down(u64::MAX),
        }
    }

    /// The stricter of the two.
    pub fn max(self, other: Self) -> Self {
        Self(self.0.max(other.0))
    }
}

/// A byte range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// Where the range begins, in bytes from the file's start.
    pub offset: u64,
    /// How many bytes it holds.
    pub length: u64,
}

impl Extent {
    /// The range of `length` bytes from `offset`.
    pub const fn new(offset: u64, length: u64) -> Self {
        Self { offset, length }
    }

    /// The first byte after the range; saturating, so that a nonsensical range stays comparable.
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Whether the range holds no byte.
    pub const fn is_empty(self) -> bool {
        self.length == 0
    }

    /// The smallest range with both ends aligned that holds this one.
    pub const fn aligned_superset(self, alignment: Alignment) -> Self {
        let start = alignment.down(self.offset);
        Self::new(start, alignment.up(self.end()) - start)
    }

    /// The largest range with both ends aligned that lies within this one; `None` if there is none.
    pub fn aligned_core(self, alignment: Alignment) -> Option<Self> {
        let (start, end) = (alignment.up(self.offset), alignment.down(self.end()));
        (start < end).then(|| Self::new(start, end - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print_with_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.00 kB"),
            (90_868_376, "90.9 MB"),
            (999_499, "999 kB"),
            (999_500, "1.00 MB"),
            (9_994_999, "9.99 MB"),
            (9_995_000, "10.0 MB"),
            (8_720_000_000, "8.72 GB"),
            (141_000_000_000, "141 GB"),
            (1_234_567_000_000_000, "1235 TB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_parse_with_units_and_refuse_the_rest() {
        for (text, bytes) in [("4096", 4096), ("5GB", 5_000_000_000), (" 512 MiB ", 512 << 20), ("1k", 1024), ("7b", 7)] {
            assert_eq!(text.parse::<ByteSize>().expect(text), ByteSize(bytes));
        }
        for text in ["", "GB", "-1", "1.5GB", "1 parsec", "99999999999999999999", "99999999999TB"] {
            assert_eq!(text.parse::<ByteSize>().expect_err(text).kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn alignment_rounds_both_ways_without_overflow() {
        let page = Alignment::PAGE;
        assert_eq!((page.down(4097), page.up(4097), page.up(4096)), (4096, 8192, 4096));
        assert_eq!(page.up(u64::MAX), u64::MAX - 4095);
        assert_eq!(Alignment::new(3), None);
        assert_eq!(Alignment::new(0), None);
    }

    #[test]
    fn an_extents_core_lies_within_and_its_superset_around() {
        let extent = Extent::new(100, 10_000);
        assert_eq!(extent.aligned_core(Alignment::PAGE), Some(Extent::new(4096, 4096)));
        assert_eq!(extent.aligned_superset(Alignment::PAGE), Extent::new(0, 12_288));
        assert_eq!(Extent::new(1, 4095).aligned_core(Alignment::PAGE), None);
    }
}
