//! A tensor of a model, as its file's header tells it.

use crate::base::Extent;
use crate::format::safetensors::Dtype;

/// Where a tensor lies and what it is. Nothing of its bytes has been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelEntry {
    /// The name: any Unicode text, so escape it before printing.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The length of each dimension, in elements; empty for a scalar.
    pub shape: Vec<u64>,
    /// Which of the model's files holds it.
    pub file: usize,
    /// Its bytes in that file.
    pub extent: Extent,
}
