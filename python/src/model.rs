//! Models: opened, described, and loaded.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use thruway::format::safetensors;
use thruway::{Device, PathPolicy, Session};

use crate::error::OrRaise;
use crate::loading::{Loading, Origin, Wanted};
use crate::memory::Bytes;
use crate::process;

/// A tensor of a header: name, dtype, shape, file, and the byte at which it begins in the file and ends.
type Entry = (String, &'static str, Vec<u64>, usize, u64, u64);

/// The `__metadata__` of a file.
type Metadata = Option<BTreeMap<String, String>>;

/// An opened model: a safetensors file, a directory of shards, or an index. Headers only.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct Model {
    model: Arc<thruway::Model>,
    session: Session,
    way: PathPolicy,
    process: u32,
}

#[pymethods]
impl Model {
    /// Opens `path` for loads to `device` ("host" or "cuda:N") by `way` ("auto", or the path that is required).
    #[new]
    fn new(py: Python<'_>, path: PathBuf, device: &str, way: &str) -> PyResult<Self> {
        let _inside = process::enter(py)?;
        let device: Device = device.parse().or_raise(py)?;
        let way = way.parse().or_raise(py)?;
        let opened = py.detach(|| {
            let session = process::session(device)?;
            let model = session.open(&path)?;
            Ok((session, model))
        });
        let (session, model) = opened.or_raise(py)?;
        Ok(Self { model: Arc::new(model), session, way, process: std::process::id() })
    }

    /// How many tensors it has.
    fn __len__(&self) -> usize {
        self.model.entries().len()
    }

    /// The bytes of all tensors.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.model.bytes()
    }

    /// The tensors, file by file in the order of their bytes.
    fn entries(&self) -> Vec<Entry> {
        let entry = |entry: &thruway::model::ModelEntry| {
            let (start, end) = (entry.extent.offset, entry.extent.end());
            (entry.name.clone(), entry.dtype.name(), entry.shape.clone(), entry.file, start, end)
        };
        self.model.entries().iter().map(entry).collect()
    }

    /// The files that hold the tensors.
    fn files(&self) -> Vec<PathBuf> {
        self.model.files().map(std::path::Path::to_owned).collect()
    }

    /// Device, inode, length and time of the last change, in nanoseconds, of one of the files when its header was read.
    fn identity(&self, file: usize) -> PyResult<(u64, u64, u64, i128)> {
        let identity = self.model.identity(file).ok_or_else(|| PyIndexError::new_err("there is no such file"))?;
        Ok((identity.device, identity.inode, identity.length, identity.modified_ns))
    }

    /// The `__metadata__` of one of the files.
    fn metadata(&self, file: usize) -> PyResult<Metadata> {
        if file >= self.model.files().len() {
            return Err(PyIndexError::new_err("there is no such file"));
        }
        Ok(self.model.metadata(file).cloned())
    }

    /// What is odd about the model and harmless.
    fn notes(&self) -> Vec<String> {
        self.model.notes().to_vec()
    }

    /// Begins a load; see [`Loading`].
    #[pyo3(signature = (*, select, slices, into, shared_bytes, stream, progress))]
    #[expect(clippy::too_many_arguments, reason = "they have names on the other side")]
    fn load(
        &self,
        py: Python<'_>,
        select: Option<Vec<String>>,
        slices: Vec<(String, usize, u64, u64)>,
        into: Vec<(String, Bytes)>,
        shared_bytes: Option<u64>,
        stream: Option<u64>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Loading> {
        if self.process != std::process::id() {
            return Err(process::forked()).or_raise(py);
        }
        let _inside = process::enter(py)?;
        let wanted = Wanted { select, slices, into, way: self.way, shared_bytes, stream, progress };
        Loading::begin(Origin::Model(Arc::clone(&self.model)), &self.session, wanted).or_raise(py)
    }
}

/// The tensors of a file's header and its metadata, as [`Model::entries`] gives them. `start` is the file's beginning
/// to the end of its header, or more; `file_bytes` is the length of the whole file.
#[pyfunction]
pub(crate) fn parse_header(py: Python<'_>, start: &[u8], file_bytes: u64) -> PyResult<(Vec<Entry>, Metadata)> {
    let parsed = || {
        let length = safetensors::header_length(start, file_bytes)?;
        let end = usize::try_from(8 + length).unwrap_or(usize::MAX);
        safetensors::parse(&start[8..end.min(start.len())], file_bytes)
    };
    let header = parsed().or_raise(py)?;
    let entry = |entry: safetensors::Entry| {
        let (start, end) = (entry.extent.offset, entry.extent.end());
        (entry.name, entry.dtype.name(), entry.shape, 0, start, end)
    };
    Ok((header.entries.into_iter().map(entry).collect(), header.metadata))
}
