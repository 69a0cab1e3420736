//! Saving: tensors that Python holds, as a file or a directory of shards.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use thruway::cuda::CallerStream;
use thruway::format::safetensors::{self, TensorSpec};
use thruway::{ByteSize, Cancel, Device, Dtype, Error, ErrorKind, GpuBuffer, HostBuffer, SaveOptions, Session, Source};

use crate::error::OrRaise;
use crate::receipt::Receipt;
use crate::{running, session};

/// Name, dtype and shape.
type Spec = (String, String, Vec<u64>);

/// Where a tensor's bytes are: "host" or "cuda:N", the address, how many, and what keeps them.
type Bytes = (String, u64, usize, Py<PyAny>);

fn spec((name, dtype, shape): Spec) -> thruway::Result<TensorSpec> {
    match dtype.parse::<Dtype>() {
        Ok(dtype) => Ok(TensorSpec { name, dtype, shape }),
        Err(error) => Err(error.with_tensor(&name)),
    }
}

/// The first bytes of a file with these tensors, and for each tensor in the order of the file its number.
#[pyfunction]
pub(crate) fn layout<'py>(
    py: Python<'py>,
    specs: Vec<Spec>,
    metadata: BTreeMap<String, String>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<usize>)> {
    let specs = specs.into_iter().map(spec).collect::<thruway::Result<Vec<TensorSpec>>>().or_raise(py)?;
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
        let session = session::session(device)?;
        let sources = tensors.into_iter().map(|(spec, bytes)| source(&session, spec, bytes));
        session.save(&sources.collect::<thruway::Result<Vec<Source>>>()?, path, options)
    };
    let tick = |py: Python<'_>| running::tell_progress(py, progress.as_ref(), moved.load(Ordering::Relaxed));
    let receipt = running::run(py, &cancel, tick, work)?;
    tick(py)?;
    Ok(Receipt::new(receipt))
}

fn source(session: &Session, spec_of: Spec, (device, address, len, keep): Bytes) -> thruway::Result<Source> {
    let spec = spec(spec_of)?;
    let region = match (device.parse::<Device>()?, session.gpu()) {
        (Device::Cuda(ordinal), Some(gpu)) if gpu.ordinal() == ordinal => {
            // SAFETY: the package passes address and length of a tensor on this GPU, and the tensor itself. What else is
            // queued on it is ordered by the stream that came along.
            unsafe { GpuBuffer::lent(gpu, address, len, Box::new(keep)) }.source(0..len)?
        }
        (Device::Host, _) => {
            let address = usize::try_from(address).ok().and_then(|address| NonNull::new(address as *mut u8));
            // SAFETY: the package passes address and length of a contiguous tensor or array, and the object itself. That no
            // other thread changes it meanwhile is for the caller to see to, as with every library that saves.
            unsafe { HostBuffer::lent(address.unwrap_or(NonNull::dangling()), len, Box::new(keep)) }.source(0..len)?
        }
        _ => {
            let message = format!("a tensor lies on {device}, and this save is for another device");
            return Err(Error::new(ErrorKind::InvalidInput, message).with_tensor(&spec.name));
        }
    };
    Ok(Source { spec, region })
}
