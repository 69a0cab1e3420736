//! cuFile's failures as errors: what kind each is, what it says, and what to do.
//!
//! Nearly every code says that *cuFile* cannot carry the bytes, not that the file or the drive is at fault. Such a failure is
//! a [`PathUnavailable`](ErrorKind::PathUnavailable): with `Auto` the bytes go another way and the receipt has the reason.

use thruway_sys::cuda::CUresult;
use thruway_sys::cufile::{
    CU_FILE_CUDA_CONTEXT_MISMATCH, CU_FILE_CUDA_DRIVER_ERROR, CU_FILE_INVALID_CONTEXT_ERROR, CU_FILE_IO_ERROR, CU_FILE_SUCCESS,
    CUfileError_t, CUfileOpError, IoReturn,
};

use crate::base::{Error, ErrorKind, Result};

/// An answer as a result. `call` is the function that gave it.
pub(super) fn check(answer: CUfileError_t, call: &'static str) -> Result<()> {
    if answer.err == CU_FILE_SUCCESS {
        return Ok(());
    }
    // Beside any other code, and beside success, the second number means nothing.
    let cuda = (answer.err == CU_FILE_CUDA_DRIVER_ERROR).then_some(answer.cu_err);
    Err(of_code(answer.err, cuda, call))
}

/// What a read or a write returned, as an engine's result.
pub(super) fn check_io(returned: IoReturn, call: &'static str) -> std::io::Result<u64> {
    match returned {
        IoReturn::Bytes(bytes) => Ok(bytes),
        // A failure that nobody explains is still one.
        IoReturn::Errno(0) => Err(std::io::Error::from_raw_os_error(libc::EIO)),
        IoReturn::Errno(errno) => Err(std::io::Error::from_raw_os_error(errno)),
        IoReturn::Code(code) => Err(of_code(code, None, call).into_io()),
    }
}

/// The error for a code.
pub(super) fn of_code(code: CUfileOpError, cuda: Option<CUresult>, call: &'static str) -> Error {
    let kind = match code {
        CU_FILE_IO_ERROR => ErrorKind::Io,
        CU_FILE_CUDA_CONTEXT_MISMATCH | CU_FILE_INVALID_CONTEXT_ERROR => ErrorKind::Gpu,
        _ => ErrorKind::PathUnavailable,
    };
    let name = code.name().map_or_else(|| format!("code {}", code.0), str::to_owned);
    let error = Error::new(kind, format!("{call} failed: {name}, {}", code.text())).with("code", code.0).with_hint(remedy(code));
    match cuda {
        Some(cuda) => error.with("cuda_code", cuda.0),
        None => error,
    }
}

/// What a user can do about a code.
pub(super) fn remedy(code: CUfileOpError) -> &'static str {
    match code.0 {
        5001 | 5033 => "load nvidia-fs (`modprobe nvidia_fs`), or set the kernel's peer-to-peer DMA up: see docs/direct-path.md",
        5002 | 5003 => "look at the sizes in cufile.json, which CUFILE_ENV_PATH_JSON or /etc/cufile.json names",
        5004 | 5005 | 5010 | 5048 => "install the nvidia-fs and the libcufile of one release; `dmesg` has what the module says",
        5006 => "cuFile is closed while the process ends: end transfers first",
        5007 | 5009 | 5029 => "see docs/direct-path.md for the GPUs and machines that have a direct path",
        5008 | 5018 | 5034 => {
            "put the file on ext4 (mounted with data=ordered) or xfs on a local NVMe drive, and look at the lists of what is \
             denied in cufile.json"
        }
        5011 => "look at the CUDA code; 801 means that the driver was loaded without what peer-to-peer DMA needs",
        5012..=5015 | 5017 | 5023 | 5024 => "use memory that was allocated by cuMemAlloc or cudaMalloc, not by a pool",
        5016 | 5036 | 5045 => {
            "raise properties.max_device_pinned_mem_size_kb in cufile.json; `nvidia-smi -q` shows what is left of BAR1"
        }
        5019 | 5020 => "this is a fault of this library: please report it, with cufile.log",
        5025 => "let this process open /dev/nvidia-fs* and the file; in a container pass the devices in",
        5027 | 5030 | 5046 => "look at cufile.log; in a container mount /run/udev (`--volume /run/udev:/run/udev:ro`)",
        5031 => "raise the limit of open files (`ulimit -n`)",
        5043 => "free host memory, or lower the sizes in cufile.json",
        5044 => "the drive or the filesystem failed: see `dmesg`",
        5047 => "keep the CUDA context that was current when the session was made",
        _ => "look at cufile.log, which cuFile writes into the current directory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_sys::cufile::CODES;

    #[test]
    fn every_code_becomes_an_error_with_its_name_its_number_and_something_to_do() {
        for (code, name, text) in CODES.iter().filter(|(code, ..)| *code != CU_FILE_SUCCESS) {
            let error = check(CUfileError_t { err: *code, cu_err: CUresult(801) }, "cuFileHandleRegister").expect_err(name);
            assert!(error.message().contains(name) && error.message().contains(text), "{error}");
            assert_eq!(error.context("code"), Some(code.0.to_string().as_str()));
            assert!(error.hint().is_some());
            assert_eq!(error.context("cuda_code").is_some(), code.0 == 5011, "the CUDA code counts beside 5011 alone");
            let io = check_io(IoReturn::Code(*code), "cuFileRead").expect_err(name);
            assert_eq!(Error::from_io("cannot read", io).kind(), error.kind());
        }
    }

    #[test]
    fn success_beside_a_cuda_code_is_success_and_unknown_codes_keep_their_number() {
        check(CUfileError_t { err: CU_FILE_SUCCESS, cu_err: CUresult(801) }, "cuFileDriverOpen").expect("seen on GH200");
        let error = check(CUfileError_t { err: CUfileOpError(5999), cu_err: CUresult(0) }, "cuFileDriverOpen").expect_err("new");
        assert!(error.message().contains("code 5999"), "{error}");
    }

    #[test]
    fn error_numbers_stay_error_numbers_and_none_is_success() {
        for errno in [libc::EIO, libc::ENOSPC, libc::EINTR] {
            let error = check_io(IoReturn::Errno(errno), "cuFileWrite").expect_err("failed");
            assert_eq!(error.raw_os_error(), Some(errno));
        }
        assert_eq!(check_io(IoReturn::Errno(0), "cuFileRead").expect_err("failed").raw_os_error(), Some(libc::EIO));
        assert_eq!(check_io(IoReturn::Bytes(0), "cuFileRead").expect("the end of the file"), 0);
    }
}
