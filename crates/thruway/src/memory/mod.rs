//! Memory that transfers read from and write to.
//!
//! A *block* ([`Memory`]) is one stretch of memory with one owner: host memory, pinned host memory or GPU memory, each
//! kind in its own file. A [`Region`] is a byte range of a block, and a *claim* on it:
//!
//! ```text
//! HostBuffer ──region(&mut self)──► Region (writable claim) ──► engine, kernel, copy engine
//!     │        ──source(&self)────► Region (read-only claim)
//!     └─bytes(&self)  refuses while a writable claim lives; bytes_mut(&mut self) while any claim lives
//! ```
//!
//! A region keeps its block alive. An engine holds the regions of whatever it has in flight, so a dropped
//! handle, an error or a cancelled call never frees memory under I/O. And since safe access to a block's
//! bytes is refused while claims live, nobody can look at memory that a drive is writing.

mod copies;
mod gpu;
mod host;
mod peer;
mod pinned;
mod pool;
mod region;
mod ring;

pub use copies::{Copies, CopyStreams, Fence};
pub use gpu::{GpuBuffer, GpuSlabs};
pub(crate) use host::HostBlock;
pub use host::HostBuffer;
pub use peer::{PeerBuffer, PeerMemory};
pub use pinned::PinnedSlabs;
pub(crate) use pool::copy_to_pool;
pub use pool::{PoolBlock, StagingPool};
pub(crate) use region::Filling;
pub use region::{Access, Region, Registration};
pub use ring::{Ring, RingSettings, Slot};

use std::fmt::Debug;

use crate::base::{Error, ErrorKind, PciAddress, Result};

/// Which memory a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Ordinary pageable host memory, or host memory that a caller lent.
    Host,
    /// Host memory that is registered with the CUDA driver.
    Pinned,
    /// Memory of the GPU with this CUDA ordinal.
    Gpu(u32),
    /// Memory that this PCI device publishes, mapped: the CPU reaches it, uncached.
    Peer(PciAddress),
}

impl MemoryKind {
    /// Whether the CPU can read and write the memory at its address.
    pub const fn is_host_accessible(self) -> bool {
        match self {
            Self::Host | Self::Pinned | Self::Peer(_) => true,
            Self::Gpu(_) => false,
        }
    }

    /// Whether it is the host's own memory, which every drive reaches.
    pub const fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Pinned)
    }
}

/// Where a caller wants tensors to lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The best memory there is: a GPU's, or the host's where there is none.
    #[default]
    Auto,
    /// Host memory.
    Host,
    /// The memory of the GPU with this CUDA ordinal.
    Cuda(u32),
    /// The memory that the PCI device at this address publishes for the DMA of others.
    Pci(PciAddress),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => write!(f, "auto"),
            Self::Host => write!(f, "host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Pci(address) => write!(f, "pci:{address}"),
        }
    }
}

impl std::str::FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "host" | "cpu" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda(0)),
            _ if text.starts_with("pci:") => text["pci:".len()..].parse().map(Self::Pci),
            _ => text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()).map(Self::Cuda).ok_or_else(|| {
                let shown = crate::base::error::printable(text);
                Error::new(ErrorKind::InvalidInput, format!("'{shown}' is no device"))
                    .with_hint("use auto, host, cuda:N or pci:ADDRESS")
            }),
        }
    }
}

/// A buffer in whichever memory.
#[derive(Debug)]
pub enum Buffer {
    /// In host memory.
    Host(HostBuffer),
    /// In a GPU's memory.
    Gpu(GpuBuffer),
    /// In memory that a PCI device publishes.
    Peer(PeerBuffer),
}

impl Buffer {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Gpu(buffer) => buffer.len(),
            Self::Peer(buffer) => buffer.len(),
        }
    }

    /// Whether the buffer holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, where the CPU may look at them.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if they lie in a device's memory, or while a transfer fills them.
    pub fn bytes(&self) -> Result<&[u8]> {
        match self {
            Self::Host(buffer) => buffer.bytes(),
            Self::Gpu(_) | Self::Peer(_) => Err(Error::new(ErrorKind::InvalidInput, "the bytes lie in a device's memory")
                .with_hint("copy them to the host first")),
        }
    }

    /// A writable claim on `range`.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the buffer, or if a transfer uses it.
    pub fn region(&mut self, range: std::ops::Range<usize>) -> Result<Region> {
        match self {
            Self::Host(buffer) => buffer.region(range),
            Self::Gpu(buffer) => buffer.region(range),
            Self::Peer(buffer) => buffer.region(range),
        }
    }

    /// A read-only claim on `range`.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) if the range does not lie within the buffer, or if a transfer fills it.
    pub fn source(&self, range: std::ops::Range<usize>) -> Result<Region> {
        match self {
            Self::Host(buffer) => buffer.source(range),
            Self::Gpu(buffer) => buffer.source(range),
            Self::Peer(buffer) => buffer.source(range),
        }
    }
}

impl From<HostBuffer> for Buffer {
    fn from(buffer: HostBuffer) -> Self {
        Self::Host(buffer)
    }
}

impl From<GpuBuffer> for Buffer {
    fn from(buffer: GpuBuffer) -> Self {
        Self::Gpu(buffer)
    }
}

impl From<PeerBuffer> for Buffer {
    fn from(buffer: PeerBuffer) -> Self {
        Self::Peer(buffer)
    }
}

/// One stretch of memory with one owner. Implemented in this module alone, because the claim rules are kept here.
///
/// # Safety
/// The bytes from `address` to `address + len` are valid for reads and writes for as long as the value
/// lives (by the CPU, if the kind is host-accessible), do not move, and are reached through no Rust
/// reference while a [`Region`] of the block lives, except as the claim counters allow.
pub unsafe trait Memory: Send + Sync + Debug {
    /// Which memory this is.
    fn kind(&self) -> MemoryKind;
    /// The address of the first byte, in the address space of its kind.
    fn address(&self) -> usize;
    /// The length in bytes.
    fn len(&self) -> usize;
    /// Whether the block holds no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Whether the memory was allocated here for this block alone, so that it may be made known to a drive's DMA engine.
    fn is_owned(&self) -> bool {
        false
    }
    /// The block's claim counters.
    fn claims(&self) -> &region::Claims;
}

/// Where a transfer gets staging memory from. The ring asks for one slab at a time.
pub trait SlabSource: Send + Sync + Debug {
    /// A page-aligned block of `len` bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`](ErrorKind::OutOfMemory) if there is none.
    fn allocate(&self, len: usize) -> Result<std::sync::Arc<dyn Memory>>;
}

/// Slabs of ordinary host memory: what staging to a host destination needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostSlabs;

impl SlabSource for HostSlabs {
    fn allocate(&self, len: usize) -> Result<std::sync::Arc<dyn Memory>> {
        Ok(std::sync::Arc::new(HostBlock::map(len)?))
    }
}
