//! Ranks that save together: their notes go by a board that is Python's.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use thruway::checkpoint::{Board, SaveId};
use thruway::{Cancel, Error, ErrorKind};

use crate::error::OrRaise;
use crate::{process, running};

/// An object with `put(name, text)` and `get(name)`, which gives `None` for what is not there.
#[derive(Debug)]
struct Notes(Py<PyAny>);

impl Board for Notes {
    fn put(&self, name: &str, text: &str) -> thruway::Result<()> {
        attached(|py| self.0.call_method1(py, "put", (name, text)).map(drop))
    }

    fn get(&self, name: &str) -> thruway::Result<Option<String>> {
        attached(|py| self.0.call_method1(py, "get", (name,))?.extract(py))
    }
}

/// Calls Python, from whatever thread a save is on. What that raises is the failure to reach the other ranks.
fn attached<T>(call: impl FnOnce(Python<'_>) -> PyResult<T>) -> thruway::Result<T> {
    let called = Python::try_attach(|py| {
        if process::is_closed() {
            return Err(process::ending());
        }
        let _inside = process::enter(py).map_err(|_| process::ending())?;
        call(py).map_err(|raised| {
            Error::new(ErrorKind::Io, format!("the other ranks cannot be reached: {raised}"))
                .with_hint("the store of the process group is gone, and most likely the rank that kept it, which is the first")
        })
    });
    called.unwrap_or_else(|| Err(process::ending()))
}

/// The ranks of one save, or of one restore, as one of them sees them.
#[pyclass(frozen, module = "thruway._thruway")]
pub(crate) struct Ranks(thruway::checkpoint::Ranks);

impl Ranks {
    pub(crate) fn inner(&self) -> thruway::checkpoint::Ranks {
        self.0.clone()
    }
}

#[pymethods]
impl Ranks {
    #[new]
    fn new(py: Python<'_>, rank: u32, count: u32, save_id: &str, timeout: f64, board: Py<PyAny>) -> PyResult<Self> {
        let invalid = |what| Error::new(ErrorKind::InvalidInput, what);
        let save_id = SaveId::parse(save_id).ok_or_else(|| invalid("a save id is 32 hexadecimal digits")).or_raise(py)?;
        let timeout = Duration::try_from_secs_f64(timeout);
        let timeout = timeout.map_err(|_| invalid("the timeout is no number of seconds")).or_raise(py)?;
        Ok(Self(thruway::checkpoint::Ranks { rank, count, save_id, timeout, board: Arc::new(Notes(board)) }))
    }

    /// Puts up a note.
    fn put(&self, py: Python<'_>, name: &str, text: &str) -> PyResult<()> {
        let _inside = process::enter(py)?;
        py.detach(|| self.0.put(name, text)).or_raise(py)
    }

    /// Waits for a note of a rank. Raises the failure of whichever rank failed.
    fn wait(&self, py: Python<'_>, name: String, rank: u32) -> PyResult<String> {
        let _inside = process::enter(py)?;
        let (ranks, cancel) = (self.0.clone(), Cancel::default());
        let stop = cancel.clone();
        running::run(py, &cancel, |_| Ok(()), move || ranks.wait(&name, rank, &stop))
    }

    /// Tells the others of a failure, of this rank unless another is named.
    fn fail(&self, py: Python<'_>, kind: &str, message: &str, rank: Option<u32>) -> PyResult<()> {
        let _inside = process::enter(py)?;
        let error = Error::new(ErrorKind::from_name(kind).unwrap_or(ErrorKind::Io), message);
        let error = match rank {
            Some(rank) => error.with("rank", rank),
            None => error,
        };
        py.detach(|| self.0.fail(&error));
        Ok(())
    }
}
