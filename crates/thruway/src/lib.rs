//! Thruway moves tensors between storage and memory by the shortest path the machine has, and says which
//! path it took.
//!
//! ```no_run
//! use thruway::{LoadOptions, Session};
//!
//! # fn main() -> thruway::Result<()> {
//! let session = Session::builder().build()?;
//! let model = session.open("model/")?; // a file, a sharded directory, or an index: headers only
//! for entry in model.entries() {
//!     println!("{} {} {:?}", entry.name, entry.dtype, entry.shape);
//! }
//! let (tensors, receipt) = model.load(LoadOptions::all())?;
//! println!("{receipt}"); // bytes, seconds, and for each file which way its bytes went, and why
//! # Ok(())
//! # }
//! ```
//!
//! # Where to look
//! - [`Session`]: the entry; owns the ring, the engines and the counters.
//! - [`model`]: safetensors files and sharded directories as one set of tensors; loading, saving, copying.
//! - [`checkpoint`]: training checkpoints: saved so that none is ever torn, and restored against checksums.
//! - [`transfer`]: the mechanism below: moves in, receipt out.
//! - [`io`]: the engines and their contract; [`io::policy`] decides which way bytes go.
//! - [`memory`], [`storage`], [`cuda`]: buffers, files, GPUs.
//! - [`doctor`]: whether the machine has a direct path, and what is in the way.
//! - [`mod@format`]: safetensors, bytes to values and back.
//!
//! Everything here works without a GPU; where none is found, tensors go to host memory.

#![deny(unsafe_code)]

/// The README's program is compiled with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

pub mod base;
pub mod checkpoint;
#[expect(unsafe_code, reason = "the driver is a C library")]
pub mod cuda;
pub mod doctor;
pub mod format;
pub mod io;
#[expect(unsafe_code, reason = "mapping memory and copying by address is this module's job")]
pub mod memory;
pub mod model;
mod session;
#[expect(unsafe_code, reason = "cachestat has no safe wrapper")]
pub mod storage;
pub mod telemetry;
pub mod transfer;

pub use base::{Alignment, ByteSize, Error, ErrorKind, Extent, PciAddress, Result};
pub use checkpoint::Checkpoints;
pub use format::safetensors::Dtype;
pub use io::Direction;
pub use io::policy::{Path, PathPolicy};
pub use memory::{Buffer, Device, GpuBuffer, HostBuffer, PeerBuffer, Region};
pub use model::{CopyOptions, LoadOptions, Model, SaveOptions, Source, Tensor, Tensors, VerifyOptions};
pub use session::{Session, SessionBuilder};
pub use transfer::{Cancel, Explanation, FileRef, Move, Receipt, TransferOptions};
