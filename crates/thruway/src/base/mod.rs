//! What every layer may use: the error type, quantities with units, and settings.

pub mod error;
pub(crate) mod parallel;
pub mod pci;
pub mod settings;
pub mod units;

pub use error::{Error, ErrorKind, Result};
pub use parallel::Processors;
pub use pci::PciAddress;
pub use units::{Alignment, ByteSize, Extent};
