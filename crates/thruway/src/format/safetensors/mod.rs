//! safetensors: tensors one after the other, behind a JSON header that says where each one lies.
//!
//! ```text
//!  byte 0        8                                8 + N                             end of file
//!  ├─────────────┼────────────────────────────────┼──────────┬──────────┬───────────┤
//!  │ N           │ {"__metadata__":{"k":"v"},     │ tensor   │ tensor   │ tensor    │
//!  │ u64, little │  "w":{"dtype":"F32",           │ data     │ data     │ data      │
//!  │ endian      │       "shape":[2,3],           │          │          │           │
//!  │             │       "data_offsets":[0,24]},  │          │          │           │
//!  │             │  …}   and spaces as padding    │          │          │           │
//!  ├─────────────┼────────────────────────────────┼──────────┴──────────┴───────────┤
//!                                                 ↑ data_offsets count from here
//! ```
//!
//! The data is little-endian, row-major, and packed: the first tensor begins where the header ends, each one
//! begins where the one before it ends, and the last one ends where the file ends. Elements of the 4-bit and
//! 6-bit types are packed without gaps, so such a tensor needs a shape that fills whole bytes.
//!
//! # Reading
//!
//! [`header_length`] takes a file's first 8 bytes and its size and says how long the JSON is; [`parse`] takes
//! that JSON and gives a [`Header`]: every tensor with its absolute place in the file. Both need the size,
//! because a file that is shorter or longer than its header says is refused before any tensor is handed out.
//!
//! Refused, each with a message of its own: a header beyond 100,000,000 bytes or beyond the end of the file,
//! text that is not UTF-8 or not JSON, unknown dtypes, a byte range that does not fit the shape, holes,
//! overlaps, data cut short, and bytes after the last tensor. Where the first bytes show what the file
//! really is (a pickle, a Git LFS pointer, a web page, see [`sniff()`]), the message says so.
//!
//! # Where this reader differs from the reference on purpose
//!
//! The yardstick is the `safetensors` crate, version 0.8. What it accepts is accepted and what it refuses is
//! refused, with these exceptions, all of them refused here:
//!
//! - a tensor, or a key of `__metadata__`, that is written twice. The format forbids it, and two readers that
//!   each keep another one of the two see different tensors;
//! - a tensor's entry written as a JSON list, or its dtype as a JSON object (`{"F32":null}`). The format
//!   asks for an object and a string; the reference takes them because its JSON library does.
//!
//! It is as lenient as the reference elsewhere: spaces and line breaks before and after the JSON, unknown
//! fields in an entry, `"__metadata__": null`, header lengths that are no multiple of 8, and any tensor name that
//! is Unicode text, be it empty or with a zero byte inside.
//!
//! # Writing
//!
//! [`layout()`] takes names, dtypes and shapes and gives the file's first bytes and every tensor's place. Small
//! files are byte for byte what the reference writes; large ones are arranged for direct I/O.
//!
//! # Models of several files
//!
//! [`Index`] is the `model.safetensors.index.json` beside a model's shards; [`shard_file_name`],
//! [`parse_shard_name`] and [`split_into_shards`] follow the same convention.

mod dtype;
mod header;
mod index;
mod json;
mod layout;
mod sniff;
#[cfg(test)]
mod tests;

pub use dtype::Dtype;
pub use header::{Entry, HEADER_BYTES_MAX, Header, PREFIX_BYTES, header_length, parse};
pub use index::{INDEX_BYTES_MAX, INDEX_METADATA_BYTES_MAX, Index, parse_shard_name, shard_file_name, split_into_shards};
pub use layout::{ALIGNED_FROM_BYTES, Layout, TensorSpec, layout};
pub use sniff::{FileKind, sniff};
