//! The `thruway` command, as the package installs it.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the `thruway` command and gives its exit status. `arguments` begin with the program's name; `again` starts it anew,
/// before a command and its arguments.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, arguments: Vec<OsString>, again: Vec<OsString>) -> u8 {
    py.detach(|| thruway_cli::run(&arguments, &again))
}
