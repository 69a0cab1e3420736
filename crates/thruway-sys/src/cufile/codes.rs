//! cuFile's codes (`CUfileOpError`), and how a read or a write says what became of it.
//!
//! The names are the header's; the sentences are ours. 5021 and 5032 are not used, and 1.14 and older end at 5038 and use 5039
//! for what is 5050 now.

use super::types::CUfileOpError;

/// Declares the codes and a table of them.
macro_rules! codes {
    ($($code:literal $name:ident $text:literal;)+) => {
        $(#[doc = concat!("In words: ", $text, ".")]
        pub const $name: CUfileOpError = CUfileOpError($code);)+

        /// Every code of the header, in order: its name there, and a sentence.
        pub const CODES: &[(CUfileOpError, &str, &str)] = &[$(($name, stringify!($name), $text),)+];
    };
}

codes! {
    0 CU_FILE_SUCCESS "the call did what it was asked";
    5001 CU_FILE_DRIVER_NOT_INITIALIZED "nvidia-fs is not loaded, and compatibility mode is not allowed";
    5002 CU_FILE_DRIVER_INVALID_PROPS "a property of the configuration is not valid";
    5003 CU_FILE_DRIVER_UNSUPPORTED_LIMIT "a property is outside of what the library supports";
    5004 CU_FILE_DRIVER_VERSION_MISMATCH "nvidia-fs is of another version than the library needs";
    5005 CU_FILE_DRIVER_VERSION_READ_ERROR "the version of nvidia-fs cannot be read";
    5006 CU_FILE_DRIVER_CLOSING "cuFile is shutting down";
    5007 CU_FILE_PLATFORM_NOT_SUPPORTED "this machine is not supported";
    5008 CU_FILE_IO_NOT_SUPPORTED "the file lies where no direct path leads";
    5009 CU_FILE_DEVICE_NOT_SUPPORTED "this GPU has no direct path";
    5010 CU_FILE_NVFS_DRIVER_ERROR "a call into nvidia-fs failed";
    5011 CU_FILE_CUDA_DRIVER_ERROR "a call into the CUDA driver failed";
    5012 CU_FILE_CUDA_POINTER_INVALID "the address is not one that CUDA knows";
    5013 CU_FILE_CUDA_MEMORY_TYPE_INVALID "memory of this type cannot be used";
    5014 CU_FILE_CUDA_POINTER_RANGE_ERROR "the range goes beyond its allocation";
    5015 CU_FILE_CUDA_CONTEXT_MISMATCH "the memory belongs to another CUDA context";
    5016 CU_FILE_INVALID_MAPPING_SIZE "more device memory would be registered than may be";
    5017 CU_FILE_INVALID_MAPPING_RANGE "the range goes beyond what is registered";
    5018 CU_FILE_INVALID_FILE_TYPE "a file of this type cannot be used";
    5019 CU_FILE_INVALID_FILE_OPEN_FLAG "the file is open with a flag that is not supported";
    5020 CU_FILE_DIO_NOT_SET "the file is not open with O_DIRECT";
    5022 CU_FILE_INVALID_VALUE "an argument is not valid";
    5023 CU_FILE_MEMORY_ALREADY_REGISTERED "the memory is registered already";
    5024 CU_FILE_MEMORY_NOT_REGISTERED "the memory is not registered";
    5025 CU_FILE_PERMISSION_DENIED "the driver or the file may not be used by this process";
    5026 CU_FILE_DRIVER_ALREADY_OPEN "cuFile is open already";
    5027 CU_FILE_HANDLE_NOT_REGISTERED "the file is not registered";
    5028 CU_FILE_HANDLE_ALREADY_REGISTERED "the descriptor is registered already";
    5029 CU_FILE_DEVICE_NOT_FOUND "the GPU was not found";
    5030 CU_FILE_INTERNAL_ERROR "an internal failure of the library";
    5031 CU_FILE_GETNEWFD_FAILED "no further descriptor was to be had";
    5033 CU_FILE_NVFS_SETUP_ERROR "nvidia-fs could not be set up";
    5034 CU_FILE_IO_DISABLED "the configuration shuts this file out";
    5035 CU_FILE_BATCH_SUBMIT_FAILED "a batch could not be submitted";
    5036 CU_FILE_GPU_MEMORY_PINNING_FAILED "device memory could not be pinned";
    5037 CU_FILE_BATCH_FULL "the batch is full";
    5038 CU_FILE_ASYNC_NOT_SUPPORTED "operations in a stream are not supported";
    5039 CU_FILE_INTERNAL_BATCH_SETUP_ERROR "a batch could not be set up";
    5040 CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR "a batch could not be submitted, inside the library";
    5041 CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR "a batch's state could not be had";
    5042 CU_FILE_INTERNAL_BATCH_CANCEL_ERROR "a batch could not be cancelled";
    5043 CU_FILE_NOMEM_ERROR "the library has no memory left";
    5044 CU_FILE_IO_ERROR "reading or writing failed";
    5045 CU_FILE_INTERNAL_BUF_REGISTER_ERROR "memory could not be registered, inside the library";
    5046 CU_FILE_HASH_OPR_ERROR "a table of the library is damaged or full";
    5047 CU_FILE_INVALID_CONTEXT_ERROR "no valid CUDA context is current";
    5048 CU_FILE_NVFS_INTERNAL_DRIVER_ERROR "nvidia-fs failed inside";
    5049 CU_FILE_BATCH_NOCOMPAT_ERROR "the batch would need compatibility mode, which is off";
    5050 CU_FILE_IO_MAX_ERROR "a failure without a name of its own";
}

impl CUfileOpError {
    /// The constant's name, if the header has one for the code.
    pub fn name(self) -> Option<&'static str> {
        CODES.iter().find(|(code, ..)| *code == self).map(|(_, name, _)| *name)
    }

    /// One sentence about the code, without a full stop.
    pub fn text(self) -> &'static str {
        CODES.iter().find(|(code, ..)| *code == self).map_or("a code that no header explains", |(.., text)| *text)
    }
}

/// What a read or a write returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoReturn {
    /// So many bytes were moved.
    Bytes(u64),
    /// The system's error number.
    Errno(i32),
    /// A code of cuFile's.
    Code(CUfileOpError),
}

impl IoReturn {
    /// Reads a return value. `errno` is the thread's error number after the call, which counts only beside -1. The documentation
    /// has it that other negative values are cuFile's codes; libraries have also been seen to put such a code into `errno`, and
    /// to return a negated error number, so the magnitude decides.
    pub fn decode(returned: isize, errno: i32) -> Self {
        if let Ok(bytes) = u64::try_from(returned) {
            return Self::Bytes(bytes);
        }
        let number = if returned == -1 { errno } else { i32::try_from(returned.unsigned_abs()).unwrap_or(i32::MAX) };
        if number > CODE_BASE { Self::Code(CUfileOpError(number)) } else { Self::Errno(number) }
    }
}

/// Codes of cuFile's are larger than this (`CUFILEOP_BASE_ERR`), error numbers of Linux are smaller.
const CODE_BASE: i32 = 5000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_own_name_and_sentence_and_unknown_ones_keep_their_number() {
        for pair in CODES.windows(2) {
            assert!(pair[0].0 < pair[1].0, "{pair:?}");
        }
        let mut texts: Vec<&str> = CODES.iter().map(|(.., text)| *text).collect();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), CODES.len());
        assert_eq!(CUfileOpError(5030).name(), Some("CU_FILE_INTERNAL_ERROR"));
        assert_eq!((CUfileOpError(5099).name(), CUfileOpError(5099).text()), (None, "a code that no header explains"));
    }

    #[test]
    fn a_return_value_is_bytes_or_an_error_number_or_a_code_by_its_size() {
        let decode = IoReturn::decode;
        assert_eq!(decode(0, 5), IoReturn::Bytes(0));
        assert_eq!(decode(4096, 0), IoReturn::Bytes(4096));
        assert_eq!(decode(-1, 5), IoReturn::Errno(5));
        assert_eq!(decode(-1, 5027), IoReturn::Code(CU_FILE_HANDLE_NOT_REGISTERED));
        assert_eq!(decode(-5, 0), IoReturn::Errno(5));
        assert_eq!(decode(-5011, 0), IoReturn::Code(CU_FILE_CUDA_DRIVER_ERROR));
        assert_eq!(decode(isize::MIN, 0), IoReturn::Code(CUfileOpError(i32::MAX)));
    }
}
