//! Models: safetensors files and sharded directories as one set of tensors.
//!
//! | step | what is read | where |
//! |---|---|---|
//! | find the files | directory names, an index | `resolve` |
//! | open | each file's header, in batches | `open` |
//! | load | the tensors wanted | `load` |
//! | stream | every tensor through two windows, for `verify` and `copy` | `stream` |
//! | save | tensors from memory | `save` |
//! | write | files staged together and published at once, for `save`, `copy` and checkpoints | `writer` |

mod copy;
mod entry;
mod home;
mod load;
mod open;
mod resolve;
mod save;
mod stream;
mod stripes;
mod tensors;
mod verify;
mod writer;

pub use copy::CopyOptions;
pub use entry::ModelEntry;
pub use load::{Allocation, Allocator, LoadOptions, Place};
pub use open::Model;
pub(crate) use save::plan_group;
pub use save::{SaveOptions, Source, save};
pub use tensors::{Tensor, Tensors};
pub use verify::{Difference, Verdict, VerifyOptions};
pub(crate) use writer::{FilePlan, Form, Writer, ensure_space};
