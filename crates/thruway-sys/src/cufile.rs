//! The part of cuFile (`libcufile.so.0`, the library of GPUDirect Storage) that Thruway calls.
//!
//! # Names and versions
//! A field is called as the exported symbol. The library's versions are not CUDA's: cuFile 1.7 came with CUDA 12.2, 1.11 with
//! 12.6, 1.14 with 12.9, 1.15 with 13.0, 1.19 with 13.4. Each function's documentation names the first version that has it.
//! All of that is read from the headers of 1.14 to 1.20 and from the symbols that those libraries export.
//!
//! # What is unsafe to call, and when
//! Loading the library does nothing but load it: it opens the CUDA driver, NVML and others later, by name. The functions
//! that may be called before `cuFileDriverOpen` are those about versions, parameters and the statistics' level.
//!
//! - Without a CUDA driver, 1.19 never returns from `cuFileDriverOpen` nor from `cuFileHandleRegister` (which opens the
//!   driver by itself), and spins meanwhile. 1.15 answers 5033. So whoever calls either has started the CUDA driver before.
//! - On a machine without `/dev/nvidia-fs*`, opening the driver has been seen to damage the process's descriptor 0.
//! - After a fork the child must not call anything here.
//!
//! # How failures come back
//! Most functions return a [`CUfileError_t`], whose CUDA code means something for one cuFile code alone. `cuFileRead` and
//! `cuFileWrite` return a number: [`IoReturn::decode`] says what it means.

mod codes;
mod constants;
mod places;
mod statistics;
#[allow(non_camel_case_types, reason = "types have the names that the C header gives them")]
mod types;

use std::ffi::{c_int, c_void};
use std::path::Path;

pub use codes::*;
pub use constants::*;
pub use statistics::*;
pub use types::*;

use crate::loader::{Library, LoadError, symbol_table};

impl CuFile {
    /// Opens cuFile's library and fills the table. With `path_override`, that library and no other: an override that fails is
    /// an error, not a reason to try elsewhere. Otherwise it is looked for where the dynamic linker looks, then in the folders
    /// of the CUDA toolkit, of the driver's packages and of Python's wheels, in this order.
    ///
    /// This says that the library is installed, not that it may be used: see the module's documentation.
    pub fn load(path_override: Option<&Path>) -> Result<Self, LoadError> {
        let library = match path_override {
            Some(path) => Library::open([path.as_os_str()])?,
            None => Library::open(places::candidates())?,
        };
        Self::fill(&library)
    }
}

symbol_table! {
    /// cuFile's functions: `(cufile.cuFileDriverOpen)()`. Made by [`CuFile::load`].
    ///
    /// Calling one is `unsafe`: the library believes every pointer, size and handle that it is given.
    pub struct CuFile;
    required: {
        /// Starts cuFile in this process and reads its configuration. A second time it fails with
        /// [`CU_FILE_DRIVER_ALREADY_OPEN`], or counts. 1.0.
        fn cuFileDriverOpen() -> CUfileError_t;
        /// `cuFileDriverClose`: ends it. A library that is still open when the process exits has been seen to crash there. 1.0.
        fn cuFileDriverClose_v2() -> CUfileError_t;
        /// What the library found on this machine. 1.0.
        fn cuFileDriverGetProperties(properties: *mut CUfileDrvProps_t) -> CUfileError_t;

        /// Makes an open file known. The descriptor stays the caller's, who keeps it open until the handle is gone. The same
        /// descriptor a second time is [`CU_FILE_HANDLE_ALREADY_REGISTERED`]. 1.0.
        fn cuFileHandleRegister(handle: *mut CUfileHandle_t, description: *mut CUfileDescr_t) -> CUfileError_t;
        /// Forgets it. 1.0.
        fn cuFileHandleDeregister(handle: CUfileHandle_t) -> ();

        /// Pins and maps device memory. `base` is remembered: reads and writes give it again, and an offset to it. `flags` is 0
        /// but for RDMA. 1.0.
        fn cuFileBufRegister(base: *const c_void, length: usize, flags: c_int) -> CUfileError_t;
        /// Forgets it. Before the memory is freed, or the kernel's module may wait for ever. 1.0.
        fn cuFileBufDeregister(base: *const c_void) -> CUfileError_t;

        /// Reads `size` bytes from `file_offset` on to `base + base_offset`, and returns how many, or a failure. An offset other
        /// than 0 is for registered memory. 1.0.
        fn cuFileRead(
            handle: CUfileHandle_t, base: *mut c_void, size: usize, file_offset: off_t, base_offset: off_t,
        ) -> isize;
        /// Likewise from memory to the file. 1.0.
        fn cuFileWrite(
            handle: CUfileHandle_t, base: *const c_void, size: usize, file_offset: off_t, base_offset: off_t,
        ) -> isize;
    }
    optional: {
        /// The library's version, as 1000 × major + 10 × minor. 1.8.
        fn cuFileGetVersion(version: *mut c_int) -> CUfileError_t;
        /// A switch of the configuration: a `CUFILE_PARAM_*` of [`CUFileBoolConfigParameter_t`]. 1.14.
        fn cuFileGetParameterBool(parameter: CUFileBoolConfigParameter_t, value: *mut bool) -> CUfileError_t;
        /// Sets it, for the next `cuFileDriverOpen`; [`CU_FILE_DRIVER_ALREADY_OPEN`] afterwards. 1.14.
        fn cuFileSetParameterBool(parameter: CUFileBoolConfigParameter_t, value: bool) -> CUfileError_t;
        /// A number of the configuration. 1.14.
        fn cuFileGetParameterSizeT(parameter: CUFileSizeTConfigParameter_t, value: *mut usize) -> CUfileError_t;
        /// Sets it, likewise. What is out of range is said at the opening only. 1.14.
        fn cuFileSetParameterSizeT(parameter: CUFileSizeTConfigParameter_t, value: usize) -> CUfileError_t;
        /// How much is counted, 0 to 3. [`CUfilePerGpuStats_t`] needs 3. 1.15.
        fn cuFileSetStatsLevel(level: c_int) -> CUfileError_t;
        /// Asks for it. 1.15.
        fn cuFileGetStatsLevel(level: *mut c_int) -> CUfileError_t;
        /// Begins to count. 1.15.
        fn cuFileStatsStart() -> CUfileError_t;
        /// Stops counting. 1.15.
        fn cuFileStatsStop() -> CUfileError_t;
        /// Everything counted, written in the layout of the *library's* version, which may be larger than that of any header:
        /// give it a [`StatsBuffer`]. 1.15.
        fn cuFileGetStatsL3(statistics: *mut c_void) -> CUfileError_t;
        /// Which peer-to-peer mechanisms (bits `1 << CUFILE_*`) serve a kind of storage (a `CU_FILE_*_SUPPORTED`). 1.16.
        fn cuFileDriverGetP2PFlags(storage: CUfileDriverStatusFlags_t, flags: *mut CUfileP2PFlags_t) -> CUfileError_t;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_is_the_only_library_tried() {
        let error = CuFile::load(Some(Path::new("/nonexistent/libcufile.so.0"))).expect_err("no such file");
        let LoadError::NotOpened { attempts } = error else { panic!("{error:?}") };
        assert_eq!(attempts.len(), 1);
        assert_eq!(attempts[0].name, Path::new("/nonexistent/libcufile.so.0"));
    }

    #[test]
    fn a_library_that_is_not_cufile_is_refused_by_the_first_symbol_that_it_lacks() {
        let error = CuFile::load(Some(Path::new("libc.so.6"))).expect_err("the C library is not cuFile");
        let LoadError::MissingSymbol { symbol, .. } = error else { panic!("{error:?}") };
        assert_eq!(symbol, "cuFileDriverOpen");
    }

    #[test]
    fn without_an_override_the_linkers_names_are_tried_first() {
        // On a machine with cuFile this loads it, which is as good an answer.
        if let Err(LoadError::NotOpened { attempts }) = CuFile::load(None) {
            let names: Vec<&Path> = attempts.iter().take(2).map(|attempt| attempt.name.as_path()).collect();
            assert_eq!(names, [Path::new("libcufile.so.0"), Path::new("libcufile.so")]);
        }
    }
}
