//! Codes in words.

use std::ffi::CStr;

use thruway_sys::cuda::*;

/// Each code that the fake may answer: its constant's name and a sentence.
const CODES: [(CUresult, &CStr, &CStr); 31] = [
    (CUDA_SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (CUDA_ERROR_INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (CUDA_ERROR_OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (CUDA_ERROR_NOT_INITIALIZED, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (CUDA_ERROR_DEINITIALIZED, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (CUDA_ERROR_STUB_LIBRARY, c"CUDA_ERROR_STUB_LIBRARY", c"stub library"),
    (CUDA_ERROR_DEVICE_UNAVAILABLE, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"device busy or unavailable"),
    (CUDA_ERROR_NO_DEVICE, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (CUDA_ERROR_INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (CUDA_ERROR_INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE", c"invalid device code"),
    (CUDA_ERROR_INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (CUDA_ERROR_NO_BINARY_FOR_GPU, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no device code for this GPU"),
    (CUDA_ERROR_ECC_UNCORRECTABLE, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error"),
    (CUDA_ERROR_OPERATING_SYSTEM, c"CUDA_ERROR_OPERATING_SYSTEM", c"operating system call failed"),
    (CUDA_ERROR_INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (CUDA_ERROR_NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (CUDA_ERROR_NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (CUDA_ERROR_ILLEGAL_ADDRESS, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested"),
    (CUDA_ERROR_CONTEXT_IS_DESTROYED, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"already registered"),
    (CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"not registered"),
    (CUDA_ERROR_LAUNCH_FAILED, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (CUDA_ERROR_NOT_PERMITTED, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted"),
    (CUDA_ERROR_NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (CUDA_ERROR_SYSTEM_NOT_READY, c"CUDA_ERROR_SYSTEM_NOT_READY", c"system not yet initialized"),
    (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"driver and library versions differ"),
    (CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, c"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", c"no forward compatibility"),
    (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not permitted when stream is capturing"),
    (
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"would make the legacy stream depend on a capturing one",
    ),
    (CUDA_ERROR_UNKNOWN, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// The constant's name and the sentence of a code.
pub(crate) fn describe(code: CUresult) -> Option<(&'static CStr, &'static CStr)> {
    CODES.iter().find(|(have, ..)| *have == code).map(|(_, name, text)| (*name, *text))
}

/// The code that a number or a constant's name (with or without `CUDA_ERROR_`) means.
pub(crate) fn parse(text: &str) -> Option<CUresult> {
    if let Ok(number) = text.parse() {
        return Some(CUresult(number));
    }
    let means = |name: &CStr| name.to_str().is_ok_and(|name| name == text || name.strip_prefix("CUDA_ERROR_") == Some(text));
    CODES.iter().find(|(_, name, _)| means(name)).map(|(code, ..)| *code)
}
