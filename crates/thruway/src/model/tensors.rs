//! Tensors in memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::base::{Result, parallel};
use crate::format::safetensors::Dtype;
use crate::memory::{Buffer, Device, Region};
use crate::transfer::verify::{Digest, Digester};

/// How much of a GPU tensor is copied to the host at a time to be digested.
const DIGEST_WINDOW_BYTES: usize = 16 << 20;

/// A loaded tensor. It keeps its memory alive by itself: it outlives its model, its session and its siblings.
///
/// On a GPU it is aligned to 256 bytes. In host memory, and in a PCI device's, it is aligned as in its file, but to no less
/// than 8 bytes. In a
/// buffer of the caller's it begins where that does.
///
/// Tensors of one file share an allocation (on a GPU of about 512 MiB, or of one larger tensor; in host memory of as
/// much as the file's wanted tensors need), which is freed when the last of them is dropped. So one small tensor that is
/// kept can keep much memory: copy it, or load it into a buffer of its own ([`LoadOptions::into`](crate::LoadOptions::into)).
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) buffer: Arc<Buffer>,
    pub(super) range: Range<usize>,
}

impl Tensor {
    /// The name: any Unicode text, so escape it before printing.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The length of each dimension, in elements; of a slice, what was sliced.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        match &*self.buffer {
            Buffer::Host(_) => Device::Host,
            Buffer::Gpu(buffer) => Device::Cuda(buffer.gpu().ordinal()),
            Buffer::Peer(buffer) => Device::Pci(buffer.device()),
        }
    }

    /// The address of its first byte, in the memory of its device. Valid for as long as the tensor lives.
    pub fn address(&self) -> u64 {
        let start = match &*self.buffer {
            Buffer::Host(buffer) => buffer.address() as u64,
            Buffer::Gpu(buffer) => buffer.address(),
            Buffer::Peer(buffer) => buffer.address() as u64,
        };
        start + self.range.start as u64
    }

    /// How many bytes it has.
    pub fn byte_count(&self) -> usize {
        self.range.len()
    }

    /// Its bytes in host memory: little-endian, row-major, packed.
    ///
    /// # Errors
    /// [`InvalidInput`](crate::ErrorKind::InvalidInput) if it lies in a device's memory (see [`to_host`](Self::to_host)), or while
    /// something else fills the same buffer.
    pub fn bytes(&self) -> Result<&[u8]> {
        let bytes = self.buffer.bytes().map_err(|error| error.with_tensor(&self.name))?;
        Ok(&bytes[self.range.clone()])
    }

    /// A copy of its bytes in host memory, wherever it lies.
    ///
    /// # Errors
    /// While something else fills the same buffer, and whatever the GPU's driver reports.
    pub fn to_host(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.range.len()];
        self.copy_part(0, &mut bytes)?;
        Ok(bytes)
    }

    fn copy_part(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let start = self.range.start + offset;
        let range = start..start + target.len();
        match &*self.buffer {
            Buffer::Host(buffer) => target.copy_from_slice(&buffer.bytes()?[range]),
            Buffer::Gpu(buffer) => buffer.copy_to_host(range, target)?,
            Buffer::Peer(buffer) => buffer.copy_to_host(range, target)?,
        }
        Ok(())
    }

    /// Its bytes in order, in host memory: all at once if they lie there, else copied so many at a time.
    pub(crate) fn read_by(&self, window_bytes: usize, mut take: impl FnMut(&[u8])) -> Result<()> {
        if let Buffer::Host(buffer) = &*self.buffer {
            take(&buffer.bytes()?[self.range.clone()]);
            return Ok(());
        }
        let mut window = vec![0; window_bytes.min(self.range.len())];
        for offset in (0..self.range.len()).step_by(window_bytes) {
            let length = window.len().min(self.range.len() - offset);
            self.copy_part(offset, &mut window[..length])?;
            take(&window[..length]);
        }
        Ok(())
    }

    /// The SHA-256 of its bytes as they lie in memory.
    fn digest(&self) -> Result<Digest> {
        let mut digester = Digester::default();
        self.read_by(DIGEST_WINDOW_BYTES, |bytes| digester.update(bytes))?;
        Ok(digester.finish())
    }

    /// Its memory as the source of a write.
    ///
    /// # Errors
    /// Only while something else fills the same buffer.
    pub fn region(&self) -> Result<Region> {
        self.buffer.source(self.range.clone())
    }
}

/// The tensors of one load, in the order of the model's entries.
#[derive(Clone, Debug, Default)]
pub struct Tensors {
    list: Vec<Tensor>,
    by_name: HashMap<String, usize>,
}

impl Tensors {
    pub(super) fn new(list: Vec<Tensor>) -> Self {
        let by_name = list.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
        Self { list, by_name }
    }

    /// The buffers that no tensor outside of these still uses.
    pub(super) fn into_buffers(self) -> Vec<Buffer> {
        let mut buffers: Vec<Arc<Buffer>> = self.list.into_iter().map(|tensor| tensor.buffer).collect();
        buffers.sort_unstable_by_key(Arc::as_ptr);
        buffers.dedup_by(|one, other| Arc::ptr_eq(one, other));
        buffers.into_iter().filter_map(Arc::into_inner).collect()
    }

    /// The tensor with this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).map(|index| &self.list[*index])
    }

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, Tensor> {
        self.list.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The SHA-256 of each tensor's bytes as they lie in memory, in order.
    ///
    /// # Errors
    /// While something else fills the same buffers, and whatever the GPU's driver reports.
    pub fn digests(&self) -> Result<Vec<Digest>> {
        let digests = parallel::each(self.list.len(), parallel::processors(), |index| self.list[index].digest());
        digests.into_iter().collect()
    }
}

impl<'a> IntoIterator for &'a Tensors {
    type Item = &'a Tensor;
    type IntoIter = std::slice::Iter<'a, Tensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
