//! Errors: each of the library's becomes the exception of its kind, made by `thruway._errors`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use thruway::Error;

/// The library's result as Python's.
pub(crate) trait OrRaise<T> {
    /// The value, or the exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for thruway::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}

/// The exception for an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let made = || -> PyResult<Bound<'_, PyAny>> {
        let context = PyDict::new(py);
        for (key, value) in error.contexts() {
            context.set_item(key, value)?;
        }
        let make = py.import("thruway._errors")?.getattr("make")?;
        make.call1((error.kind().name(), error.to_string(), error.hint(), context, error.os_error()))
    };
    match made() {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}
