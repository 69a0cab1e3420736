//! Saving: tensors that Python holds, as a file or a directory of shards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use thruway::cuda::CallerStream;
use thruway::format::safetensors::{self, TensorSpec};
use thruway::{ByteSize, Cancel, Device, Dtype, SaveOptions, Session, Source};

use crate::error::OrRaise;
use crate::memory::{self, Bytes};
use crate::receipt::Receipt;
use crate::{process, running};

/// Name, dtype and shape.
pub(crate) type Spec = (String, String, Vec<u64>);

fn spec((name, dtype, shape): Spec) -> thruway::Result<TensorSpec> {
    match dtype.parse::<Dtype>() {
        Ok(dtype) => Ok(TensorSpec { name, dtype, shape }),
        Err(error) => Err(error.with_tensor(&name)),
    }
}

/// The first bytes of a file with these tensors, of which each has so many bytes, and for each tensor in the order of the
/// file its number.
#[pyfunction]
pub(crate) fn layout<'py>(
    py: Python<'py>,
    tensors: Vec<(Spec, u64)>,
    metadata: BTreeMap<String, String>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<usize>)> {
    let checked = |(spec_of, bytes)| {
        let spec = spec(spec_of)?;
        spec.check_bytes(bytes)?;
        Ok(spec)
    };
    let specs = tensors.into_iter().map(checked).collect::<thruway::Result<Vec<TensorSpec>>>().or_raise(py)?;
    let laid_out = safetensors::layout(&specs, &metadata).or_raise(py)?;
    Ok((PyBytes::new(py, &laid_out.head), laid_out.order))
}

/// Saves tensors at `path`, replacing what stands there only when the new is complete and durable. With `max_shard_bytes` as
/// a directory of shards.
#[pyfunction]
#[pyo3(signature = (tensors, path, *, device, metadata, max_shard_bytes, way, stream, progress))]
#[expect(clippy::too_many_arguments, reason = "they have names on the other side")]
pub(crate) fn save(
    py: Python<'_>,
    tensors: Vec<(Spec, Bytes)>,
    path: PathBuf,
    device: &str,
    metadata: BTreeMap<String, String>,
    max_shard_bytes: Option<u64>,
    way: &str,
    stream: Option<u64>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Receipt> {
    let _inside = process::enter(py)?;
    let device: Device = device.parse().or_raise(py)?;
    let (cancel, moved) = (Cancel::default(), Arc::new(AtomicU64::new(0)));
    let told = Arc::clone(&moved);
    let mut options = SaveOptions::default().metadata(metadata).path(way.parse().or_raise(py)?).cancel(cancel.clone());
    options = options.progress(Arc::new(move |bytes| told.store(bytes, Ordering::Relaxed)));
    if let Some(bytes) = max_shard_bytes {
        options = options.max_shard_size(ByteSize(bytes));
    }
    if let Some(stream) = stream {
        // SAFETY: the package passes the handle of torch's current stream on this GPU, which torch keeps for as long as the
        // process lives.
        options = options.after(unsafe { CallerStream::from_handle(stream) });
    }
    let work = move || {
        let session = process::session(device)?;
        let sources = tensors.into_iter().map(|(spec, bytes)| source(&session, spec, bytes));
        session.save(&sources.collect::<thruway::Result<Vec<Source>>>()?, path, options)
    };
    let tick = |py: Python<'_>| running::tell_progress(py, progress.as_ref(), moved.load(Ordering::Relaxed));
    let receipt = running::run(py, &cancel, tick, work)?;
    tick(py)?;
    Ok(Receipt::new(receipt))
}

pub(crate) fn source(session: &Session, spec_of: Spec, bytes: Bytes) -> thruway::Result<Source> {
    let spec = spec(spec_of)?;
    let len = bytes.2;
    let region =
        memory::lent(session, bytes).and_then(|buffer| buffer.source(0..len)).map_err(|error| error.with_tensor(&spec.name))?;
    Ok(Source { spec, region })
}
