//! A model made up on the spot: the names and the mixture of sizes of a llama-like transformer, filled with
//! pseudo-random bytes that are the same every time.

use std::ops::Range;
use std::sync::Arc;

use thruway::cuda::Gpu;
use thruway::format::safetensors::Dtype;
use thruway::memory::{Copies, CopyStreams};
use thruway::{Alignment, Buffer, Error, ErrorKind, GpuBuffer, HostBuffer, Result, Source};

use crate::measure::{at_once, processors, to_usize};

/// The bytes that one thread fills at a time; each such piece has a seed of its own.
const PIECE_BYTES: usize = 1 << 20;

/// A tensor of the model to be.
#[derive(Debug)]
struct Planned {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
}

impl Planned {
    fn new(name: impl Into<String>, dtype: Dtype, shape: &[u64]) -> Self {
        Self { name: name.into(), dtype, shape: shape.to_vec() }
    }

    fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bits() / 8
    }
}

/// A model in memory.
#[derive(Debug)]
pub(crate) struct Synthetic {
    buffer: Buffer,
    places: Vec<(Planned, Range<usize>)>,
}

impl Synthetic {
    /// A model of this many bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`](thruway::ErrorKind::OutOfMemory) if there is too little memory.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let mut places = Vec::new();
        let mut cursor = 0;
        for tensor in plan(bytes) {
            let start = Alignment::PAGE.up(cursor);
            cursor = start + tensor.bytes();
            places.push((tensor, to_usize(start)..to_usize(cursor)));
        }
        let mut buffer = HostBuffer::new(to_usize(cursor))?;
        fill(buffer.bytes_mut()?);
        Ok(Self { buffer: buffer.into(), places })
    }

    /// The same model in a GPU's memory.
    ///
    /// # Errors
    /// [`OutOfMemory`](thruway::ErrorKind::OutOfMemory) if the GPU has too little, and whatever its driver reports.
    pub(crate) fn into_gpu(self, gpu: &Arc<Gpu>) -> Result<Self> {
        let mut buffer = GpuBuffer::new(gpu, self.buffer.len())?;
        let mut copies = Copies::new(Some(CopyStreams::new(gpu)?));
        let queued = copies.copy(&self.buffer.source(0..self.buffer.len())?, &buffer.region(0..buffer.len())?);
        copies.drain()?;
        queued?;
        Ok(Self { buffer: buffer.into(), places: self.places })
    }

    /// The tensors, to be saved.
    ///
    /// # Errors
    /// None in practice: nothing else uses the buffer.
    pub(crate) fn sources(&self) -> Result<Vec<Source>> {
        let source = |(tensor, range): &(Planned, Range<usize>)| {
            let region = self.buffer.source(range.clone())?;
            Ok(Source::new(tensor.name.clone(), tensor.dtype, tensor.shape.clone(), region))
        };
        self.places.iter().map(source).collect()
    }

    /// Each tensor's name and bytes.
    ///
    /// # Errors
    /// [`InvalidInput`](ErrorKind::InvalidInput) for a model in a GPU's memory.
    pub(crate) fn tensors(&self) -> Result<Vec<(&str, &[u8])>> {
        let Buffer::Host(buffer) = &self.buffer else {
            return Err(Error::new(ErrorKind::InvalidInput, "the model lies in GPU memory"));
        };
        let bytes = buffer.bytes()?;
        Ok(self.places.iter().map(|(tensor, range)| (tensor.name.as_str(), &bytes[range.clone()])).collect())
    }
}

/// The tensors of a model of this many bytes: layers of weights as wide as fits at least four times, the small
/// things that come with them, and what makes up the rest.
fn plan(bytes: u64) -> Vec<Planned> {
    // Embedding and head take 32 bytes for each square of the width, a layer about 21.5.
    let width = (6..=13).rev().map(|power| 1_u64 << power).find(|width| 118 * width * width <= bytes).unwrap_or(32);
    let (inner, narrow, vocabulary) = (width * 11 / 4, width / 4, width * 8);
    let mut tensors = vec![
        Planned::new("model.embed_tokens.weight", Dtype::BF16, &[vocabulary, width]),
        Planned::new("lm_head.weight", Dtype::BF16, &[vocabulary, width]),
        Planned::new("model.norm.weight", Dtype::BF16, &[width]),
        Planned::new("model.rotary_emb.inv_freq", Dtype::F32, &[32]),
        Planned::new("model.step", Dtype::I64, &[]),
        Planned::new("model.unused", Dtype::F16, &[0, 4]),
        Planned::new("tokenizer.blob", Dtype::U8, &[10_007]),
    ];
    let layer = |number: u64| {
        let weight = |name: &str, shape: &[u64]| Planned::new(format!("model.layers.{number}.{name}.weight"), Dtype::BF16, shape);
        [
            weight("self_attn.q_proj", &[width, width]),
            weight("self_attn.k_proj", &[narrow, width]),
            weight("self_attn.v_proj", &[narrow, width]),
            weight("self_attn.o_proj", &[width, width]),
            weight("mlp.gate_proj", &[inner, width]),
            weight("mlp.up_proj", &[inner, width]),
            weight("mlp.down_proj", &[width, inner]),
            weight("input_layernorm", &[width]),
            weight("post_attention_layernorm", &[width]),
            Planned::new(format!("model.layers.{number}.mlp.scale"), Dtype::F32, &[width]),
        ]
    };
    let size = |tensors: &[Planned]| tensors.iter().map(Planned::bytes).sum::<u64>();
    let mut left = bytes.saturating_sub(size(&tensors));
    for number in 0.. {
        let layer = layer(number);
        if size(&layer) > left {
            break;
        }
        left -= size(&layer);
        tensors.extend(layer);
    }
    if left >= 2 {
        tensors.push(Planned::new("model.rest", Dtype::BF16, &[left / 2]));
    }
    if left % 2 == 1 {
        tensors.push(Planned::new("model.odd", Dtype::U8, &[1]));
    }
    tensors
}

/// Fills `bytes` with numbers that look random and depend on their place alone.
pub(crate) fn fill(bytes: &mut [u8]) {
    let stripe = bytes.len().div_ceil(processors()).next_multiple_of(PIECE_BYTES).max(PIECE_BYTES);
    at_once(bytes.chunks_mut(stripe).enumerate().map(|(number, stripe_bytes)| {
        move || {
            for (piece, bytes) in stripe_bytes.chunks_mut(PIECE_BYTES).enumerate() {
                fill_piece(bytes, (number * (stripe / PIECE_BYTES) + piece) as u64);
            }
        }
    }));
}

/// SplitMix64, seeded by the number of the piece.
fn fill_piece(bytes: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0xD134_2543_DE82_EF95);
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word.copy_from_slice(&(mixed ^ (mixed >> 31)).to_le_bytes()[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_as_large_as_asked_with_large_and_small_tensors() {
        for bytes in [1_000_000, 4 << 20, 1_000_000_000, 8_720_000_001] {
            let tensors = plan(bytes);
            let total: u64 = tensors.iter().map(Planned::bytes).sum();
            assert_eq!(total, bytes);
            assert!(tensors.iter().any(|tensor| tensor.bytes() == 8) && tensors.iter().any(|tensor| tensor.bytes() == 0));
            assert!(tensors.iter().filter(|tensor| tensor.name.ends_with("q_proj.weight")).count() >= 3);
        }
    }

    #[test]
    fn the_bytes_are_the_same_every_time_and_nowhere_alike() {
        let (mut first, mut second) = (vec![0; 3 * PIECE_BYTES + 5], vec![1; 3 * PIECE_BYTES + 5]);
        fill(&mut first);
        fill(&mut second);
        assert!(first == second);
        assert_ne!(first[..64], first[PIECE_BYTES..PIECE_BYTES + 64]);
    }
}
