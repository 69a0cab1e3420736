//! Writing: where each tensor of a new file goes, and the bytes before them.
//!
//! Two arrangements, chosen by the amount of data, both plain safetensors:
//!
//! - *Small* (up to [`ALIGNED_FROM_BYTES`] in all): the very bytes of the reference writer. Tensors by dtype,
//!   greatest alignment first, then by name; compact JSON, padded with spaces to a multiple of 8.
//! - *Large*: the JSON is padded until the data begins on 4 KiB, and the tensors whose size is a multiple of
//!   4 KiB come first (same order among them), then the others (same order again). So each tensor of the
//!   first group begins and ends on 4 KiB and can go between drive and memory directly, without a gap in the
//!   file, which the format would not allow. Weights of common models are nearly all in that group; what
//!   is left are biases, norms and scales.
//!
//! Both groups begin on an 8-byte boundary and descend by dtype, so every tensor is aligned for its elements.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::dtype::{Dtype, shape_text};
use super::header::{Entry, HEADER_BYTES_MAX, METADATA_KEY, PREFIX_BYTES};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::units::{Alignment, Extent};

/// Files with more bytes of data than this are arranged for direct I/O; below it, the padding and another order
/// than the reference writer's would cost more than they bring.
pub const ALIGNED_FROM_BYTES: u64 = 1 << 20;

/// A tensor to be written: everything about it except its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name: any Unicode text except `__metadata__`.
    pub name: String,
    /// What its elements are.
    pub dtype: Dtype,
    /// Its dimensions, outermost first; none for a single number.
    pub shape: Vec<u64>,
}

impl TensorSpec {
    /// Checks that so many bytes are the whole of it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if they are more or fewer, with its name as a fact.
    pub fn check_bytes(&self, have: u64) -> Result<()> {
        let needs = self.dtype.byte_count(&self.shape).map_err(|error| error.with_tensor(&self.name))?;
        if needs == have {
            return Ok(());
        }
        let message = format!("its shape needs {needs} bytes and its memory holds {have}");
        Err(Error::new(ErrorKind::InvalidInput, message).with_tensor(&self.name))
    }
}

/// Where everything goes in a file to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// All bytes before the data: the 8 bytes of the length, the JSON and its padding.
    pub head: Vec<u8>,
    /// The tensors by their place in the file: what [`super::parse`] gives for this file.
    pub entries: Vec<Entry>,
    /// Which tensor of the input each entry is: `entries[i]` is `tensors[order[i]]`.
    pub order: Vec<usize>,
    /// The size of the whole file, in bytes.
    pub file_bytes: u64,
}

/// Lays out a file with these tensors and notes. The same input gives the same bytes, and so does the same input
/// in another order.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`] for a tensor called `__metadata__` (no reader could open the file), a name given
/// twice, a shape that overflows or ends in the middle of a byte, data beyond 64 bits, and a header beyond
/// [`HEADER_BYTES_MAX`]. The fact `tensor` names the culprit, where it is one.
pub fn layout(tensors: &[TensorSpec], metadata: &BTreeMap<String, String>) -> Result<Layout> {
    let sizes = sizes(tensors)?;
    let overflow = || Error::new(ErrorKind::InvalidInput, "the tensors together are too large for a file");
    let data_bytes = sizes.iter().try_fold(0_u64, |sum, &size| sum.checked_add(size)).ok_or_else(overflow)?;
    let aligned = data_bytes > ALIGNED_FROM_BYTES;

    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_unstable_by_key(|&index| {
        let (tensor, size) = (&tensors[index], sizes[index]);
        let first = aligned && size != 0 && Alignment::PAGE.divides(size);
        (!first, Reverse(tensor.dtype), tensor.name.as_str())
    });
    let mut extents = Vec::with_capacity(order.len());
    let mut position = 0;
    for &index in &order {
        extents.push(Extent::new(position, sizes[index]));
        position += sizes[index];
    }

    let head = head(&Json { tensors, metadata, order: &order, extents: &extents }, aligned)?;
    let data_start = head.len() as u64;
    let file_bytes = data_start.checked_add(data_bytes).ok_or_else(overflow)?;
    let (entries, order) = by_place(tensors, &order, &extents, data_start);
    Ok(Layout { head, entries, order, file_bytes })
}

/// The size of each tensor, in bytes, once nothing is wrong with any of them.
fn sizes(tensors: &[TensorSpec]) -> Result<Vec<u64>> {
    let mut names = HashSet::with_capacity(tensors.len());
    let size = |tensor: &TensorSpec| {
        let refuse = |message: String| Error::new(ErrorKind::InvalidInput, message).with_tensor(&tensor.name);
        if tensor.name == METADATA_KEY {
            return Err(refuse("a tensor cannot be called __metadata__: the header keeps the file's notes there".to_owned())
                .with_hint("rename the tensor"));
        }
        tensor
            .dtype
            .size_of(&tensor.shape)
            .map_err(|fault| refuse(fault.to_string()).with("dtype", tensor.dtype).with("shape", shape_text(&tensor.shape)))
    };
    let mut sizes = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(Error::new(ErrorKind::InvalidInput, "two tensors have the same name").with_tensor(&tensor.name));
        }
        sizes.push(size(tensor)?);
    }
    Ok(sizes)
}

/// The length, the JSON and the padding.
fn head(json: &Json<'_>, aligned: bool) -> Result<Vec<u8>> {
    let mut head = vec![0; 8];
    // Writing to memory cannot fail, and no map here has a key that is not text.
    serde_json::to_writer(&mut head, json)
        .map_err(|error| Error::new(ErrorKind::InvalidInput, format!("cannot write the header: {error}")))?;
    let boundary = if aligned { 4096 } else { 8 };
    head.resize(head.len().next_multiple_of(boundary), b' ');
    let length = head.len() as u64 - PREFIX_BYTES;
    if length > HEADER_BYTES_MAX {
        let message = format!("the header would take {length} bytes, and the limit is {HEADER_BYTES_MAX}");
        return Err(Error::new(ErrorKind::InvalidInput, message).with_hint("spread the tensors over several files"));
    }
    head[..8].copy_from_slice(&length.to_le_bytes());
    Ok(head)
}

/// The entries in the order in which [`super::parse`] gives them, which differs from the JSON's where empty
/// tensors share a place, and the index of each one's tensor.
fn by_place(tensors: &[TensorSpec], order: &[usize], extents: &[Extent], data_start: u64) -> (Vec<Entry>, Vec<usize>) {
    let mut placed: Vec<(Extent, usize)> = extents.iter().copied().zip(order.iter().copied()).collect();
    placed.sort_unstable_by_key(|&(extent, index)| (extent, tensors[index].name.as_str()));
    let entry = |&(extent, index): &(Extent, usize)| {
        let TensorSpec { name, dtype, shape } = tensors[index].clone();
        Entry { name, dtype, shape, extent: Extent::new(data_start + extent.offset, extent.length) }
    };
    (placed.iter().map(entry).collect(), placed.iter().map(|&(_, index)| index).collect())
}

/// The header as JSON, written piece by piece: notes first, then the tensors in file order.
struct Json<'a> {
    tensors: &'a [TensorSpec],
    metadata: &'a BTreeMap<String, String>,
    order: &'a [usize],
    /// The place of each tensor of `order`, counted from the start of the data.
    extents: &'a [Extent],
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA_KEY, self.metadata)?;
        }
        for (&index, extent) in self.order.iter().zip(self.extents) {
            let TensorSpec { name, dtype, shape } = &self.tensors[index];
            let info = Info { dtype: dtype.name(), shape, data_offsets: [extent.offset, extent.end()] };
            map.serialize_entry(name, &info)?;
        }
        map.end()
    }
}

/// One entry; the fields are in the reference writer's order.
#[derive(serde::Serialize)]
struct Info<'a> {
    dtype: &'static str,
    shape: &'a [u64],
    data_offsets: [u64; 2],
}
