//! The CUDA driver, made safe: a loaded library, a GPU's primary context, streams and events; and one kernel, which sums memory.
//!
//! The driver's library is opened when first asked for. That it is not there, or that there is no GPU, is an
//! ordinary answer and no failure of this library: [`Gpu::open`] says so in an error, and nobody panics.
//!
//! The *primary* context is used, the one that the CUDA runtime and PyTorch use: memory, streams and events of both
//! can be mixed in one process. A call that needs a current context makes it current for its own duration and puts
//! back what was there ([`Gpu::current`]), so a thread of the caller's is left as it was.

mod crc64;
mod driver;
mod event;
mod gpu;
mod stream;
mod survey;

pub use crc64::Crc64;
pub use driver::{Driver, driver_version};
pub use event::{Event, Events};
pub use gpu::{Current, Gpu, GpuFacts};
pub use stream::{CallerStream, Rows, Stream};
pub use survey::{Survey, Surveyed, survey};
