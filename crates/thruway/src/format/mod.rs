//! File formats, as pure functions: bytes in, values out, and back.
//!
//! Nothing here opens a file, touches a GPU or waits. Whoever has the first bytes of a file asks this module
//! where everything else in it lies; whoever wants to write one asks what its first bytes must be. So every
//! rule of a format can be tested, and fuzzed, without a disk.

pub mod safetensors;
