//! What a correct program never does, written down when it happens.

/// What kind of misuse a fault is. The names appear in the report, and tests match on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// Work on device addresses that no allocation holds, or across an allocation's end.
    OutOfBounds,
    /// Work on device memory that was freed.
    UseAfterFree,
    /// Work on stream-ordered memory before its stream had allocated it.
    UseBeforeAlloc,
    /// Freeing what is not allocated: a second time, or by another address.
    InvalidFree,
    /// Device memory was freed while work over it was in flight.
    FreedInFlight,
    /// Host memory was unregistered or freed while a copy over it was in flight.
    UnpinnedInFlight,
    /// The source of a copy in flight changed before the copy was done with it.
    SourceChanged,
    /// The destination of a copy in flight was written by someone else.
    DestinationChanged,
    /// Host memory was unmapped under a copy.
    HostMemoryGone,
    /// A host range that leaves the registration it begins in, or enters one from outside.
    CrossesPinned,
    /// A host address where a device address belongs, or the other way round.
    WrongSide,
    /// A stream, event or context that does not exist (any more).
    StaleHandle,
    /// A call that breaks another thread's capture of a stream.
    BreaksCapture,
    /// The last reference to a context was given back while memory was still allocated or pinned in it.
    ReleasedWithMemory,
    /// The fake itself failed.
    Internal,
}

impl FaultKind {
    /// The name in the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OutOfBounds => "out_of_bounds",
            Self::UseAfterFree => "use_after_free",
            Self::UseBeforeAlloc => "use_before_alloc",
            Self::InvalidFree => "invalid_free",
            Self::FreedInFlight => "freed_in_flight",
            Self::UnpinnedInFlight => "unpinned_in_flight",
            Self::SourceChanged => "source_changed",
            Self::DestinationChanged => "destination_changed",
            Self::HostMemoryGone => "host_memory_gone",
            Self::CrossesPinned => "crosses_pinned",
            Self::WrongSide => "wrong_side",
            Self::StaleHandle => "stale_handle",
            Self::BreaksCapture => "breaks_capture",
            Self::ReleasedWithMemory => "released_with_memory",
            Self::Internal => "internal",
        }
    }
}

/// One misuse.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    /// What kind.
    pub(crate) kind: FaultKind,
    /// Which addresses, which call.
    pub(crate) detail: String,
}
