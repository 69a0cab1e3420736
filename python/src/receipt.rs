//! Receipts: what a transfer did, and which way.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use thruway::Path;

/// What a load or a save did: bytes, seconds, and for each file which way its bytes went, and why.
#[pyclass(frozen, module = "thruway")]
pub(crate) struct Receipt {
    receipt: thruway::Receipt,
}

impl Receipt {
    pub(crate) fn new(receipt: thruway::Receipt) -> Self {
        Self { receipt }
    }
}

#[pymethods]
impl Receipt {
    /// One receipt for pieces of one piece of work that overlapped, with the seconds that they took together.
    #[staticmethod]
    fn joined(py: Python<'_>, receipts: Vec<Py<Self>>, seconds: f64, cpu_seconds: f64) -> Self {
        let mut all = thruway::Receipt::default();
        receipts.iter().for_each(|one| all.merge(one.bind(py).get().receipt.clone()));
        Self { receipt: thruway::Receipt { seconds, cpu_seconds, ..all } }
    }

    /// The bytes that were asked for and moved.
    #[getter]
    fn bytes(&self) -> u64 {
        self.receipt.bytes
    }

    /// The seconds from the first read to the last copy.
    #[getter]
    fn seconds(&self) -> f64 {
        self.receipt.seconds
    }

    /// The CPU seconds that the whole process used meanwhile.
    #[getter]
    fn cpu_seconds(&self) -> f64 {
        self.receipt.cpu_seconds
    }

    /// How often an operation was tried again: short I/O, interrupted calls.
    #[getter]
    fn retries(&self) -> u64 {
        self.receipt.retries
    }

    /// Decimal gigabytes a second.
    #[getter]
    fn gb_per_s(&self) -> f64 {
        self.receipt.gb_per_s()
    }

    /// The bytes that went each way: `{"cached": 1234}`.
    #[getter]
    fn paths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let paths = PyDict::new(py);
        for path in [Path::Direct, Path::Unverified, Path::Staged, Path::Cached, Path::Plain] {
            let bytes = self.receipt.bytes_by(path);
            if bytes > 0 {
                paths.set_item(path.as_str(), bytes)?;
            }
        }
        Ok(paths)
    }

    /// Everything as plain values, ready for `json.dumps`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let files = PyList::empty(py);
        for file in &self.receipt.files {
            let parts = PyList::empty(py);
            for part in &file.parts {
                let item = PyDict::new(py);
                item.set_item("path", part.path.as_str())?;
                item.set_item("engine", part.engine.to_string())?;
                item.set_item("bytes", part.bytes)?;
                item.set_item("reason", &*part.reason)?;
                parts.append(item)?;
            }
            let item = PyDict::new(py);
            item.set_item("file", file.file.to_string_lossy())?;
            item.set_item("bytes", file.bytes)?;
            item.set_item("parts", parts)?;
            files.append(item)?;
        }
        let all = PyDict::new(py);
        all.set_item("bytes", self.receipt.bytes)?;
        all.set_item("seconds", self.receipt.seconds)?;
        all.set_item("gb_per_s", self.receipt.gb_per_s())?;
        all.set_item("cpu_seconds", self.receipt.cpu_seconds)?;
        all.set_item("retries", self.receipt.retries)?;
        all.set_item("paths", self.paths(py)?)?;
        all.set_item("files", files)?;
        all.set_item("notes", &self.receipt.notes)?;
        Ok(all)
    }

    fn __repr__(&self) -> String {
        format!("Receipt({})", self.receipt)
    }
}
