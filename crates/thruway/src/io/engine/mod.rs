//! One file per mechanism.

mod inmemory;
mod posix;
mod uring;

pub use inmemory::InMemory;
pub use posix::Posix;
pub use uring::{Uring, UringRefused};
