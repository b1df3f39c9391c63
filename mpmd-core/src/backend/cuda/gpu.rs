//! A CUDA device that this process uses.

use std::any::Any;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use mpmd_transport::memory::{DeviceAllocator, Pin};

use super::error::CudaError;
use super::line::Line;
use super::memory::Allocator;

/// A CUDA device, its context in this process, and its lines.
pub(crate) struct Gpu {
    context: Arc<Context>,
    compute: Line,
    inward: Line,
    outward: Line,
}

/// The device's primary context, which all who use the device in this process share.
pub(super) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// The number by which memory says whose it is.
    number: u32,
}

// SAFETY: contexts, and what belongs to them, may be used by any thread that has made them its current one, which
// `Context::bind` does before each use; CUDA's calls are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Gpu {
    /// Opens the device that the driver numbers `ordinal`; `number` is what its memory bears.
    ///
    /// The driver must be known to be there: without one this panics.
    ///
    /// # Errors
    ///
    /// Where the driver has no such device, or cannot use it.
    pub(crate) fn open(ordinal: u32, number: u32) -> Result<Arc<Self>, CudaError> {
        let context = Arc::new(Context::open(ordinal, number)?);
        let line = |what: &str| Line::start(&context, format!("cuda-{number}-{what}"));
        let (compute, inward, outward) = (line("compute")?, line("in")?, line("out")?);
        Ok(Arc::new(Self { context, compute, inward, outward }))
    }

    /// Where the segments of its memory come from.
    pub(crate) fn allocator(self: &Arc<Self>) -> Arc<dyn DeviceAllocator> {
        Arc::new(Allocator::new(self.context.clone()))
    }

    /// What keeps pages of the host's memory where they are, so that devices copy from and to them by themselves.
    pub(crate) fn pin(self: &Arc<Self>) -> Pin {
        let context = self.context.clone();
        Box::new(move |address, bytes| {
            let pinned = Pinned::new(context.clone(), address, bytes);
            let pinned =
                pinned.inspect_err(|error| tracing::debug!(%error, bytes, "copies of it are staged"));
            pinned.ok().map(|pinned| Box::new(pinned) as Box<dyn Any + Send + Sync>)
        })
    }

    /// Kernels run here, in the order of their operations.
    pub(crate) fn compute(&self) -> &Line {
        &self.compute
    }

    /// Copies into the device's memory, also from that of other devices.
    pub(crate) fn inward(&self) -> &Line {
        &self.inward
    }

    /// Copies out of the device's memory into the host's.
    pub(crate) fn outward(&self) -> &Line {
        &self.outward
    }
}

impl Context {
    fn open(ordinal: u32, number: u32) -> Result<Self, CudaError> {
        let doing = || format!("opening CUDA device {ordinal}");
        result::init().map_err(|error| cuda(doing(), error))?;
        let device =
            i32::try_from(ordinal).map_err(|_| CudaError::new(doing(), "", "there is no such device"))?;
        let device = result::device::get(device).map_err(|error| cuda(doing(), error))?;
        // SAFETY: `device` is the driver's own; the context is released once, when this is dropped.
        let raw = unsafe { result::primary_ctx::retain(device) }.map_err(|error| cuda(doing(), error))?;
        Ok(Self { raw, device, number })
    }

    /// Makes this the calling thread's current context.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained and lives as long as this.
        unsafe { result::ctx::set_current(self.raw) }.map_err(|error| cuda("using a CUDA device", error))
    }

    /// The number by which memory says whose it is.
    pub(super) fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; whatever belongs to the context holds this, so nothing of it is left.
        if let Err(error) = unsafe { result::primary_ctx::release(self.device) } {
            tracing::debug!(%error, "closing a CUDA device");
        }
    }
}

/// Pages of the host's that stay where they are until this is dropped.
struct Pinned {
    context: Arc<Context>,
    address: usize,
}

impl Pinned {
    fn new(context: Arc<Context>, address: usize, bytes: usize) -> Result<Self, CudaError> {
        context.bind()?;
        let at = std::ptr::with_exposed_provenance_mut(address);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller has just mapped these pages and lets them go only after this is dropped. To pin them
        // changes nothing of what they hold.
        unsafe { sys::cuMemHostRegister_v2(at, bytes, flags) }
            .result()
            .map_err(|error| cuda("pinning memory of the host", error))?;
        Ok(Self { context, address })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        // SAFETY: pinned in `new`, and unpinned once. Work of devices on it is over: who drops memory has seen that.
        let unpinned =
            unsafe { sys::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.address)) };
        if let Err(error) = unpinned.result() {
            tracing::debug!(%error, "unpinning memory of the host");
        }
    }
}

/// The driver's answer in words.
pub(super) fn cuda(doing: impl Into<String>, error: cudarc::driver::DriverError) -> CudaError {
    let text = |found: Result<&std::ffi::CStr, _>| {
        found.map_or_else(|_| format!("{:?}", error.0), |text| text.to_string_lossy().into_owned())
    };
    CudaError::new(doing, text(error.error_name()), text(error.error_string()))
}
