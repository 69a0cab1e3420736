//! One file per mechanism.

mod cufile;
mod inmemory;
mod p2pdma;
mod posix;
mod uring;

pub use cufile::{CuFileOptions, CuFilePath};
pub use inmemory::InMemory;
pub use p2pdma::{P2pDma, PeerPath};
pub use posix::Posix;
pub use uring::{Uring, UringRefused};
