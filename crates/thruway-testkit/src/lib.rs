//! What Thruway's tests stand on: doubles for the hardware and the system, and fixtures. Unpublished, and the product never
//! depends on it.
//!
//! - [`fake_cuda`]: a CUDA driver over host memory, whose copies finish late and whose every misuse is noticed.
//! - [`fake_cufile`]: cuFile over that driver and ordinary files.
//! - [`conformance`]: the engine contract as one suite, for every engine and every layer.
//! - [`simdisk`]: a disk whose power can be cut at every step.
//! - [`fixtures`]: models whose bytes are known, and a place to put them.
//! - [`training`]: a training run's state at every step, for checkpoints.
//! - [`random`]: what seeds decide.

pub mod conformance;
mod double;
pub mod fake_cuda;
pub mod fake_cufile;
pub mod fixtures;
pub mod random;
pub mod simdisk;
pub mod training;

pub use fake_cuda::fake_cuda_path;
pub use fake_cufile::fake_cufile_path;
