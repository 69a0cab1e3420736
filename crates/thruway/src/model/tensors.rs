//! Tensors in memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::base::Result;
use crate::format::safetensors::Dtype;
use crate::memory::{HostBuffer, Region};
use crate::transfer::verify::{Digest, digests};

/// A loaded tensor. It keeps its memory alive by itself: it outlives its model, its session and its siblings.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) buffer: Arc<HostBuffer>,
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

    /// Its bytes: little-endian, row-major, packed.
    ///
    /// # Errors
    /// Only while something else fills the same buffer.
    pub fn bytes(&self) -> Result<&[u8]> {
        Ok(&self.buffer.bytes()?[self.range.clone()])
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
    /// Only while something else fills the same buffers.
    pub fn digests(&self) -> Result<Vec<Digest>> {
        let slices = self.list.iter().map(Tensor::bytes).collect::<Result<Vec<&[u8]>>>()?;
        Ok(digests(&slices))
    }
}

impl<'a> IntoIterator for &'a Tensors {
    type Item = &'a Tensor;
    type IntoIter = std::slice::Iter<'a, Tensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
