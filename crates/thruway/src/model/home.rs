//! The memory in which a session's tensors live: the host's, a GPU's, or what a PCI device publishes.

use std::sync::Arc;

use crate::base::Result;
use crate::cuda::Gpu;
use crate::memory::{Buffer, GpuBuffer, HostBuffer};
use crate::transfer::{Peer, TransferContext};

/// Where a session's buffers are allocated.
#[derive(Clone, Copy)]
pub(super) enum Home<'a> {
    Host,
    Gpu(&'a Arc<Gpu>),
    Peer(&'a Peer),
}

impl<'a> Home<'a> {
    /// Of the session whose parts these are.
    pub(super) fn of(context: &'a TransferContext) -> Self {
        match (&context.streams, &context.peer) {
            (Some(streams), _) => Self::Gpu(streams.gpu()),
            (None, Some(peer)) => Self::Peer(peer),
            (None, None) => Self::Host,
        }
    }

    pub(super) fn is_gpu(self) -> bool {
        matches!(self, Self::Gpu(_))
    }

    /// Refuses what there is no room for. `staging` is what passes through the host's memory at once.
    pub(super) fn ensure_bytes(self, bytes: u64, staging: u64) -> Result<()> {
        match self {
            Self::Host => crate::storage::ensure_host_bytes(bytes + staging),
            Self::Gpu(gpu) => gpu.ensure_bytes(bytes),
            Self::Peer(peer) => peer.published.ensure_bytes(bytes),
        }
    }

    /// A new buffer.
    pub(super) fn allocate(self, len: usize) -> Result<Buffer> {
        Ok(match self {
            Self::Host => HostBuffer::new(len)?.into(),
            Self::Gpu(gpu) => GpuBuffer::new(gpu, len)?.into(),
            Self::Peer(peer) => peer.memory.allocate(len)?.into(),
        })
    }

    /// Whether a buffer of an earlier load can be filled again: it lies here, it is its own, and nothing uses it.
    pub(super) fn may_reuse(self, buffer: &Buffer) -> bool {
        match (self, buffer) {
            (Self::Host, Buffer::Host(buffer)) => buffer.is_owned_and_free(),
            (Self::Gpu(gpu), Buffer::Gpu(buffer)) => buffer.gpu().ordinal() == gpu.ordinal() && buffer.is_owned_and_free(),
            (Self::Peer(peer), Buffer::Peer(buffer)) => buffer.device() == peer.memory.address() && buffer.is_free(),
            _ => false,
        }
    }
}
