//! What the driver says of each GPU, without taking a context on any of them: for whoever only wants to know.

use std::ffi::c_int;
use std::path::Path;

use thruway_sys::LoadError;
use thruway_sys::cuda::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, CU_DEVICE_ATTRIBUTE_INTEGRATED,
    CUdevice, CUdevice_attribute, Cuda,
};

use super::driver::Driver;
use super::gpu::{GpuFacts, facts};
use crate::base::Result;

/// `CUDA_ERROR_NO_DEVICE`: no GPU, or none that `CUDA_VISIBLE_DEVICES` lets this process see.
const NO_DEVICE: &str = "100";
/// `CUDA_ERROR_STUB_LIBRARY`.
const STUB_LIBRARY: &str = "34";

/// What the driver says of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surveyed {
    /// Its name, PCI address and memory.
    pub facts: GpuFacts,
    /// Its compute capability, `(9, 0)` for Hopper.
    pub capability: (u32, u32),
    /// Whether it shares the host's memory.
    pub is_integrated: bool,
    /// Whether other devices may reach its memory (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED`).
    pub has_peer_dma: bool,
    /// Whether its memory can be exported as a dma-buf.
    pub has_dma_buf: bool,
}

/// What the driver says of the GPUs that this process may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The newest CUDA that the driver serves, as 1000 × major + 10 × minor; 0 if it did not start for want of a GPU.
    pub cuda_version: u32,
    /// The GPUs in the order of their ordinals.
    pub gpus: Vec<Surveyed>,
}

/// Starts the driver (that of the library at `path`, or the system's) and asks it for the GPUs; `None` if there is no
/// such library.
///
/// # Errors
/// [`Unsupported`](crate::ErrorKind::Unsupported) if the driver is there and cannot be used,
/// [`Gpu`](crate::ErrorKind::Gpu) if it fails.
pub fn survey(path: Option<&Path>) -> Result<Option<Survey>> {
    if let Err(LoadError::NotOpened { .. }) = Cuda::load(path) {
        return Ok(None);
    }
    let driver = match Driver::load(path) {
        // A driver without a GPU, and what the toolkit has for linking where there is no driver.
        Err(error) if error.context("code") == Some(NO_DEVICE) => return Ok(Some(Survey { cuda_version: 0, gpus: Vec::new() })),
        Err(error) if error.context("code") == Some(STUB_LIBRARY) => return Ok(None),
        driver => driver?,
    };
    let mut version = 0;
    // SAFETY: the pointer is to a local that lives through the call.
    driver.check(unsafe { (driver.cuda.cuDriverGetVersion)(&raw mut version) }, "cuDriverGetVersion")?;
    let count = driver.device_count()?;
    let gpus = (0..count).map(|ordinal| examine(&driver, ordinal)).collect::<Result<Vec<Surveyed>>>()?;
    Ok(Some(Survey { cuda_version: u32::try_from(version).unwrap_or(0), gpus }))
}

fn examine(driver: &Driver, ordinal: u32) -> Result<Surveyed> {
    let mut device: CUdevice = 0;
    let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: the pointer is to a local that lives through the call.
    driver.check(unsafe { (driver.cuda.cuDeviceGet)(&raw mut device, number) }, "cuDeviceGet")?;
    let attribute = |attribute: CUdevice_attribute| -> u32 {
        let mut value = 0;
        // SAFETY: as above. A driver too old to know an attribute refuses it, which is the answer "no".
        let code = unsafe { (driver.cuda.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
        driver.check(code, "cuDeviceGetAttribute").ok().and_then(|()| u32::try_from(value).ok()).unwrap_or(0)
    };
    Ok(Surveyed {
        facts: facts(driver, device)?,
        capability: (
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        is_integrated: attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED) != 0,
        has_peer_dma: attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0,
        has_dma_buf: attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) != 0,
    })
}
