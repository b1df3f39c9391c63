//! candle on CUDA devices, with the feature `cuda`.
//!
//! Each thread of a device of mpmd has one device of candle, with a stream of its own. A pass
//! enters it: candle's stream waits for the work of mpmd's compute stream. When the pass ends, that
//! waits for candle's stream. The host waits for neither. Values pass between views and tensors by
//! copies within the device, since candle frees its memory itself. A layer launches mpmd's kernels
//! on candle's stream and memory.
//!
//! candle takes memory from the driver's pool of the device. Limits and plans count only the part
//! of it that a stage declares: graphs and prepared parameters, but no intermediate values of a
//! pass. On a device that is out of memory, candle's allocations make room first (`memory.rs`).

#![allow(unsafe_code)]

mod bridge;
mod gradient;
mod memory;
mod product;
mod tensors;

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::cuda_backend::cudarc::driver::result as driver;
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{CudaDevice, Device, Tensor};
use mpmd_core::cuda::{Cuda, ForeignHandle, ForeignStream};
use mpmd_core::kernel::Context;
use mpmd_core::{Error, Result};

use crate::dtypes::refused;
use memory::RoomGuard;

pub(crate) use bridge::on_cuda;
pub(crate) use gradient::DeviceGradient;
pub(crate) use tensors::tensor;

/// Access to candle's CUDA device during a pass. When it is dropped, mpmd's compute stream waits
/// for candle's stream.
pub(crate) struct OnCuda<'a> {
    /// Interface to the compute stream of mpmd's device.
    compute: Cuda<'a>,
    /// The stream on which candle issues work.
    stream: ForeignStream,
    device: CudaDevice,
    /// A guard: while it is present, candle caches its uploads, such as shapes.
    uploads: Option<Box<dyn Any>>,
    /// A guard that lets candle's allocations free unused memory of the device.
    _room: RoomGuard,
}

thread_local! {
    /// candle's devices of this thread, by the driver's device number. Each number has one device,
    /// since candle does not mix tensors of two device objects.
    static DEVICES: RefCell<HashMap<u32, CudaDevice>> = RefCell::default();
}

impl<'a> OnCuda<'a> {
    /// Opens candle's device of this thread and makes its stream wait for mpmd's compute stream.
    /// Returns `None` if the kernel does not run on a CUDA device.
    ///
    /// # Errors
    ///
    /// If candle cannot use the device, or the device has failed.
    pub(crate) fn enter(cx: &Context<'a>) -> Result<Option<Self>> {
        let Some(compute) = cx.cuda() else {
            return Ok(None);
        };
        let device = DEVICES.with_borrow_mut(|devices| match devices.get(&compute.ordinal()) {
            Some(device) => Ok(device.clone()),
            None => {
                let device = open(compute.ordinal()).map_err(refused)?;
                Ok::<_, Error>(devices.entry(compute.ordinal()).or_insert(device).clone())
            }
        })?;
        // SAFETY: candle made the stream in the device's primary context, and `device` keeps it.
        let handle = unsafe { ForeignHandle::new(device.cuda_stream().cu_stream().cast()) };
        let stream = compute.foreign(handle);
        compute.before(&stream)?;
        let _room = RoomGuard::new(&compute);
        Ok(Some(Self {
            compute,
            stream,
            device,
            uploads: None,
            _room,
        }))
    }

    /// Lets candle cache the uploads of this pass for all later passes: shapes of operations, and
    /// host values of up to 4 KiB. A repeated pass then uploads nothing.
    ///
    /// Do not call it for passes that upload other values each time: candle would keep all of them.
    pub(crate) fn keep_uploads(&mut self) {
        self.uploads = Some(Box::new(self.device.enable_cuda_graph_htod_cache()));
    }

    /// Returns the device of the pass's tensors.
    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.device.clone())
    }

    /// Runs `work` on mpmd's compute stream, after candle's earlier work and before candle's later
    /// work.
    pub(crate) fn between<R>(&self, work: impl FnOnce() -> Result<R>) -> Result<R> {
        self.compute.after(&self.stream)?;
        let result = work()?;
        self.compute.before(&self.stream)?;
        Ok(result)
    }

    /// Returns an interface that issues mpmd's copies and kernels on candle's stream.
    pub(crate) fn kernels(&self) -> Cuda<'_> {
        self.compute.on(&self.stream)
    }
}

impl Drop for OnCuda<'_> {
    fn drop(&mut self) {
        self.uploads = None;
        if let Err(error) = self.compute.after(&self.stream) {
            // The device has failed, and so do the results of the pass.
            tracing::debug!(%error, "the end of a pass of candle");
        }
    }
}

/// Opens candle's device with this number of the driver, on a new stream.
fn open(ordinal: u32) -> candle_core::Result<CudaDevice> {
    let device = CudaDevice::new_with_stream(ordinal as usize)?;
    // SAFETY: the device has one stream, and only its thread uses it: all uses of a tensor's memory
    // are in the stream's order. Its order with our streams is made by `OnCuda`.
    unsafe { device.disable_event_tracking() };
    keep_memory(&device).map_err(candle_core::Error::wrap)?;
    Ok(device)
}

/// Keeps freed memory in the driver's pool for candle's next tensors. By default the pool releases
/// it each time that the host waits for the device.
fn keep_memory(device: &CudaDevice) -> std::result::Result<(), driver::DriverError> {
    let mut pool = std::ptr::null_mut();
    let mut most = u64::MAX;
    let context = device.cuda_stream().context().clone();
    context.bind_to_thread()?;
    let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the context is bound; there is room for the pool, and the attribute is 64 bits.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&raw mut pool, context.cu_device()).result()?;
        sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut most).cast()).result()
    }
}

/// Returns true if the tensors are on CUDA devices.
pub(crate) fn are_on_cuda(tensors: &[&Tensor]) -> bool {
    tensors.iter().all(|tensor| tensor.device().is_cuda())
}
