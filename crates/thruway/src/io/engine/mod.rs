//! One file per mechanism.

mod inmemory;
mod p2pdma;
mod posix;
mod uring;

pub use inmemory::InMemory;
pub use p2pdma::{P2pDma, PeerPath};
pub use posix::Posix;
pub use uring::{Uring, UringRefused};
