//! Files, directories and the facts about them.
//!
//! [`Namespace`] is the only way to the filesystem: it opens, creates, renames, removes, locks and syncs.
//! [`OsNamespace`] is the real one; a simulated disk can stand in for it, so that tests can cut the power at
//! every step. [`File`] is what it opens: engines move bytes through its descriptor (or, in a simulation,
//! through its positional calls), and the policy reads its facts: what O_DIRECT demands, and which of its
//! bytes the page cache already holds.

mod direct_io;
mod drive;
mod file;
mod limits;
mod namespace;
mod numa;
mod os_file;
pub mod probe;
mod process;
mod publish;
mod published;
mod residency;

pub use direct_io::SystemFacts;
pub use drive::{Drive, Traffic, drive_traffic};
pub use file::{Access, Buffering, DirectRules, File, Identity};
pub use limits::{
    available_host_bytes, ensure_host_bytes, io_uring_disabled, kernel_release, limit_of_locked_memory, limit_of_open_files,
    open_files_left, process_cpu_seconds, runs_as_root,
};
pub use namespace::{Directory, EntryKind, Lock, Metadata, Namespace, OsNamespace, read_text};
pub use numa::processors_near;
pub use os_file::OsFile;
pub use process::Process;
pub use publish::Staging;
pub(crate) use publish::{name_of_temporary, temporary_name};
pub use published::{PCI_DEVICES, PublishedMemory};
pub use residency::{Residency, drop_from_page_cache, exact_residency, forget};
