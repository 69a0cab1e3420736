//! A CUDA driver made of host memory, for tests on machines without a GPU.
//!
//! It is a shared library that exports the driver functions Thruway calls. A test opens it where the product would open
//! `libcuda.so.1`; nothing in the product knows. Its purpose is not speed but severity: what a real driver lets pass most
//! of the time, this one turns into wrong bytes, an error or a recorded *fault*.
//!
//! # How it is severe
//! - **Device memory is not host memory.** Device addresses lie in a reserved range that the CPU cannot touch, so a
//!   product that dereferences one dies at once. The bytes themselves are mapped elsewhere (`arena`).
//! - **Copies finish late.** Work runs on a thread of its own, in order within a stream and in any order between
//!   streams, each piece after a pseudo-random delay (`engine`). The source of a copy from pinned memory is read only
//!   when the copy *completes*, so a buffer that is reused too early shows as wrong bytes; and a destination in pinned
//!   memory is filled with rubbish when the copy begins, so that reading too early shows as well.
//! - **Touching a buffer in flight is noticed** even when the bytes would come out right: the source's digest is taken
//!   at the call and compared at completion.
//! - **Every range is checked**, when work is submitted and again when it runs: bounds, liveness, and that a host range
//!   does not leave the registration it begins in.
//! - **Pinned allocations are not page-aligned.** Nothing promises that they are, and a driver was seen to put even a
//!   megabyte 512-aligned behind smaller ones.
//!
//! # What it imitates
//! Answers follow the documentation and, where that is silent, what a driver of CUDA 13.0 was seen to do on an H200: which
//! calls need a current context, which wait for all work (`cuMemFree_v2`, `cuMemFreeHost`, `cuMemHostUnregister`), that
//! registered ranges may share a page but not a byte, that the primary context keeps its handle, that a forked child gets
//! `CUDA_ERROR_NOT_INITIALIZED`. It is stricter in one point: a device address given as a copy's host side is refused,
//! where a driver copies within the device. Errors found while work runs are sticky in their context.
//!
//! Of device code it knows the product's one kernel, and does by the CPU what that does, as late as copies.
//!
//! Not imitated: other device code, the per-thread default stream, graphs, peer access rules, and the
//! kernel's refusal to pin some file mappings.
//!
//! # Settings
//! Environment variables, read at the first call; [`control::fake_cuda_reset`] takes the same, without the prefix.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FAKE_CUDA_DEVICES` | how many devices; with 0 `cuInit` says `CUDA_ERROR_NO_DEVICE` | 1 |
//! | `FAKE_CUDA_NAME` | their name | Fake GPU |
//! | `FAKE_CUDA_MEMORY` | bytes of memory of each | 16 GiB |
//! | `FAKE_CUDA_PCI` | PCI addresses, separated by commas | 0000:01:00.0, … |
//! | `FAKE_CUDA_VERSION` | what `cuDriverGetVersion` says | 13000 |
//! | `FAKE_CUDA_SEED` | seed of the delays: the same calls get the same delays | 1 |
//! | `FAKE_CUDA_DELAY_US` | `min..max` microseconds that each copy takes | 20..500 |
//! | `FAKE_CUDA_FAIL` | `symbol:nth:code`, separated by commas: that call fails | none |
//! | `FAKE_CUDA_FAIL_LATE` | likewise, but the call succeeds and its work fails later, making the context unusable | none |
//! | `FAKE_CUDA_ALIGNMENT` | what device memory is aligned to: 512 or more | 512 |
//! | `FAKE_CUDA_HOST_OFFSET` | how far into a page `cuMemHostAlloc` begins | 512 |
//! | `FAKE_CUDA_CAPTURING` | 1: some thread captures streams in the global mode, all the time | 0 |
//! | `FAKE_CUDA_WRONG_SUMS` | 1: the kernel computes something else | 0 |
//! | `FAKE_CUDA_CHECK` | 0: buffers in flight are neither digested nor filled with rubbish (faster) | 1 |
//!
//! In a rule the symbol may lack its `_v2`, `nth` counts from 1 and may be `*` for every call, and the code is a number or
//! a constant's name with or without `CUDA_ERROR_`: `cuMemAlloc:3:OUT_OF_MEMORY`.
//!
//! # The tests' side
//! [`control`] has the functions beyond the driver's: a report of what is alive, in flight and at fault, and a reset.

mod arena;
mod capture;
mod config;
mod context;
mod copy;
mod engine;
mod fault;
mod host;
mod inject;
mod kernel;
mod names;
mod report;
mod stream;
mod world;

#[allow(non_snake_case, reason = "exports have the names that the C header gives them")]
pub mod api;
pub mod control;
