//! Captures of streams into graphs: none is carried out, but what they forbid other threads is.

use std::cell::Cell;

use thruway_sys::cuda::{CU_STREAM_CAPTURE_MODE_GLOBAL, CUstreamCaptureMode};

thread_local! {
    /// What the thread may call while another captures.
    static MODE: Cell<CUstreamCaptureMode> = const { Cell::new(CU_STREAM_CAPTURE_MODE_GLOBAL) };
}

/// The calls that could wait or allocate.
const FORBIDDEN: &[&str] = &[
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

/// Whether this thread may make a call while another captures in the global mode.
pub(crate) fn may_call(symbol: &str) -> bool {
    MODE.get() != CU_STREAM_CAPTURE_MODE_GLOBAL || !FORBIDDEN.contains(&symbol)
}

/// Gives the thread another mode, and says which it had.
pub(crate) fn exchange(mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    MODE.replace(mode)
}
