//! cuFile for tests on machines without GPUDirect Storage: a shared library with the functions that Thruway calls, over
//! ordinary files and the memory of the fake CUDA driver.
//!
//! A test opens it where the product would open `libcufile.so.0`; nothing in the product knows. Like the fake driver it is
//! there to be severe: what a real library lets pass most of the time is written down here as a *fault*.
//!
//! # How it moves bytes
//! It asks the fake CUDA driver where the CPU finds the bytes of a device address, and reads or writes the file there, as a
//! drive's DMA engine would. It finds the driver by what the process has mapped, so both work on the same memory; a process
//! that has not loaded the fake driver has no CUDA. Alignment does not matter to the caller, as it does not with cuFile.
//!
//! # How it is severe
//! - Files closed before their handle was given back, memory freed before its registration was, handles or memory given back
//!   while a request still uses them, and a driver closed over either, are faults.
//! - Opening the driver without a working CUDA driver, where a real one of 1.19 never returns, is a fault (and an error).
//! - Device memory without a current context is refused.
//! - The statistics are written with the size of the version that is imitated, whatever room the caller has.
//!
//! # Settings
//! Environment variables, read at the first call; [`control::fake_cufile_reset`] takes the same, without the prefix.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `FAKE_CUFILE_VERSION` | what `cuFileGetVersion` says, and the layout of the statistics | 1150 |
//! | `FAKE_CUFILE_WAY` | how bytes go, as the counters tell: `nvfs`, `p2p`, or `posix` (compatibility mode) | nvfs |
//! | `FAKE_CUFILE_ALLOW_COMPAT` | 1: the configuration allows compatibility mode; else, with `posix`, nothing opens | 0 |
//! | `FAKE_CUFILE_COUNTERS` | `true`; `still` (they do not move), `half` (they count half), `other` (another GPU's move), `absent` (they have no GPU) | true |
//! | `FAKE_CUFILE_NVFS_STATS` | a file to which totals are written as nvidia-fs writes them | none |
//! | `FAKE_CUFILE_REPORT` | a file to which the report is written when the driver is closed, for processes that are not the test's own | none |
//! | `FAKE_CUFILE_FAIL` | `symbol:nth:code`, separated by commas: that call fails; below 5000 it is an error number; with a leading `e` it comes in `errno` whatever it is | none |
//! | `FAKE_CUFILE_CU_ERR` | the CUDA code in each answer, success or not | 0 |
//! | `FAKE_CUFILE_SHORT` | the most bytes that one read or write moves; 0 is no limit | 0 |
//! | `FAKE_CUFILE_DELAY_US` | `min..max` microseconds that each read and write takes | 0..200 |
//! | `FAKE_CUFILE_SEED` | seed of the delays | 1 |
//! | `FAKE_CUFILE_HANDLES_MAX` | the most files registered at once | 1048576 |
//! | `FAKE_CUFILE_PINNED_MAX` | the most bytes registered at once | 32 GiB |
//! | `FAKE_CUFILE_POOLED` | 0: memory of a pool cannot be registered | 0 |
//! | `FAKE_CUFILE_DAMAGE` | 1: opening the driver damages descriptor 0, as has been seen without nvidia-fs | 0 |
//!
//! In a rule `nth` counts from 1 and may be `*`, and the symbol may lack its `_v2`.

mod config;
mod cuda;
mod io;
mod stats;
mod world;

#[allow(non_snake_case, reason = "exports have the names that the C header gives them")]
pub mod api;
pub mod control;
