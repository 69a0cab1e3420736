//! Memory of tensors and arrays that live in Python, lent to the library.

use std::ptr::NonNull;

use pyo3::prelude::*;
use thruway::{Buffer, Device, Error, ErrorKind, GpuBuffer, HostBuffer, Session};

/// Some memory: its device, address and length in bytes, and the object that it belongs to.
pub(crate) type Bytes = (String, u64, usize, Py<PyAny>);

/// The memory as a buffer, which keeps the object alive. It must lie where the session works, or in host memory.
pub(crate) fn lent(session: &Session, (device, address, len, keep): Bytes) -> thruway::Result<Buffer> {
    match (device.parse::<Device>()?, session.gpu()) {
        (Device::Cuda(ordinal), Some(gpu)) if gpu.ordinal() == ordinal => {
            // SAFETY: the package passes address and length of a tensor on this GPU, and the tensor itself. What else is
            // queued on it is ordered by the stream that came along.
            Ok(unsafe { GpuBuffer::lent(gpu, address, len, Box::new(keep)) }.into())
        }
        (Device::Host, _) => {
            let address = usize::try_from(address).ok().and_then(|address| NonNull::new(address as *mut u8));
            // SAFETY: the package passes address and length of a contiguous tensor or array, and the object itself. That no
            // other thread touches it meanwhile is for the caller to see to, as with every library that loads or saves.
            Ok(unsafe { HostBuffer::lent(address.unwrap_or(NonNull::dangling()), len, Box::new(keep)) }.into())
        }
        _ => {
            Err(Error::new(ErrorKind::InvalidInput, format!("a tensor lies on {device}, and the session is for another device")))
        }
    }
}
