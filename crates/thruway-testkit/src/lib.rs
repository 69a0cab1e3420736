//! What Thruway's tests stand on: doubles for the hardware and the system, and fixtures. Unpublished, and the product never
//! depends on it.
//!
//! - [`fake_cuda`]: a CUDA driver over host memory, whose copies finish late and whose every misuse is noticed.

pub mod fake_cuda;

pub use fake_cuda::fake_cuda_path;
