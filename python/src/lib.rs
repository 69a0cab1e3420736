//! The native half of the Python package: `thruway._thruway`.
//!
//! It holds no logic of its own. Each file stands for one of the library's ideas and turns Python's values into the library's
//! and back: `process` (sessions, and threads), `model` (opening), `loading` (a load under way), `save`, `checkpoint`, `ranks`,
//! `memory` (that Python has), `receipt`, `error`, `running` (threads, and signals), `command`. What is done with them is in the package's Python files.

mod checkpoint;
mod command;
mod error;
mod loading;
mod memory;
mod model;
mod process;
mod ranks;
mod receipt;
mod running;
mod save;

use pyo3::prelude::*;

#[pymodule]
mod _thruway {
    #[pymodule_export]
    use super::checkpoint::{Checkpoint, Checkpointer, Saving};
    #[pymodule_export]
    use super::command::run_command;
    #[pymodule_export]
    use super::loading::{HostTensor, Loading};
    #[pymodule_export]
    use super::model::{Model, parse_header};
    #[pymodule_export]
    use super::process::{close, device_count};
    #[pymodule_export]
    use super::ranks::Ranks;
    #[pymodule_export]
    use super::receipt::Receipt;
    #[pymodule_export]
    use super::save::{layout, save};

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use pyo3::types::PyModuleMethods;
        // Sessions and threads are the process's, and end with the interpreter that they began in.
        // SAFETY: this thread is attached to an interpreter.
        if unsafe { pyo3::ffi::PyInterpreterState_GetID(pyo3::ffi::PyInterpreterState_Get()) } != 0 {
            return Err(pyo3::exceptions::PyImportError::new_err("thruway works in the main interpreter of a process only"));
        }
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
