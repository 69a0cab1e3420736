//! Whether this machine has a direct path between its storage and its GPUs, and what is in the way.
//!
//! ```text
//! facts (the machine, or a capture)  →  parse  →  machine (values)  →  checks (findings)  →  route (the conclusion)
//! ```
//! Everything past the facts is pure. The doctor says what is *expected*: only bytes that were moved prove a path.

pub mod cufile;
pub mod facts;
pub mod parse;
