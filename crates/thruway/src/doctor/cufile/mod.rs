//! `cufile.json`, the settings of NVIDIA's libcufile: reading it with its comments, judging it, changing it.
//!
//! The library takes what it knows and silently leaves out the rest, so that a key in the wrong place is a setting that is
//! not in force. Here every key is looked up, with its type, its place and its range.

pub mod audit;
pub mod edit;
pub mod jsonc;
pub mod schema;

pub use audit::{Audit, Remark, Settings, audit};
pub use edit::set;

/// Where the library looks if `CUFILE_ENV_PATH_JSON` names no other file.
pub const DEFAULT_PATH: &str = "/etc/cufile.json";

/// The longest file that is judged, by whomever: one with every key and a comment to each has a hundredth of it.
pub const BYTES_MAX: usize = 1 << 20;
