//! Raw tables of the functions that Thruway calls in NVIDIA's libraries, opened at run time.
//!
//! # Three levels
//! Thruway meets a C library in three steps, and this crate is the first alone:
//!
//! 1. **Raw** (here): types, constants and function pointers, each under the name that the C header gives it, so that
//!    the vendor's documentation and a search through this code find the same word. No policy, no state, no panics.
//! 2. **Result** (`thruway::cuda`): return codes become errors, out-parameters become return values.
//! 3. **Ownership** (`thruway::cuda`, `thruway::memory`): contexts, streams and memory get lifetimes and `Drop`.
//!
//! # Installed and works here are two questions
//! [`cuda::Cuda::load`] answers the first: is there a library, and has it the functions that we need? It is normal for
//! the answer to be no, which is why it is a [`LoadError`] that lists what was tried, never a panic, and why nothing is
//! linked at build time: one binary serves machines with and without a GPU.
//!
//! Whether the library *works* on this machine (a kernel module that matches, a visible GPU, a supported feature) is
//! known only from calls: `cuInit` may say `CUDA_ERROR_NO_DEVICE`, and a symbol that is there may answer
//! `CUDA_ERROR_NOT_SUPPORTED`. That question belongs to the levels above.
//!
//! # A library stays open
//! A loaded library is never closed. Its function pointers are copied about freely, drivers keep threads of their own,
//! and unloading them under those threads ends the process. See [`loader::Library`].

pub mod cuda;
pub mod cufile;
pub mod loader;

pub use loader::LoadError;
