//! A CUDA device of this process: its context, its streams and its libraries.

use std::any::Any;
use std::sync::{Arc, Once, OnceLock};

use cudarc::driver::sys;
use mpmd_transport::memory::{DeviceAllocator, Pin, Pool};

use super::blas::Blas;
use super::calls::{self, DriverError};
use super::compile::Architecture;
use super::error::CudaError;
use super::ipc::{Foreign, Shown};
use super::memory::Allocator;
use super::module::Modules;
use super::stream::Stream;
use crate::cuda::spare::Spare;

/// A CUDA device, its context in this process, and its streams.
pub struct Gpu {
    context: Arc<Context>,
    /// cuBLAS for the compute stream, or the error of creating it. Created at first use. Declared
    /// before the streams, so that it is dropped first.
    blas: OnceLock<Result<Blas, CudaError>>,
    /// Set once cuBLAS has loaded the kernels of small products.
    products: OnceLock<()>,
    /// Scratch memory for the compute stream, kept between calls.
    spare: Spare,
    compute: Stream,
    inward: Stream,
    outward: Stream,
    modules: Modules,
    architecture: Architecture,
    processors: u32,
}

/// The device's primary context, shared by all users of the device in this process.
pub(super) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// The driver's number of the device, which its memory carries. It is the same for every `Gpu`
    /// of this device.
    ordinal: u32,
    /// The device's identity, the same in all processes.
    uuid: [u8; 16],
    /// The first error, after which the device does nothing more.
    broken: OnceLock<CudaError>,
    shown: Shown,
    foreign: Foreign,
}

// SAFETY: contexts, and what belongs to them, may be used by any thread that has made them its
// current one, which `Context::bind` does before each use; CUDA's calls are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Gpu {
    /// Opens the device that the driver numbers `ordinal`.
    ///
    /// # Errors
    ///
    /// If the driver has no such device, or cannot use it.
    ///
    /// # Panics
    ///
    /// If there is no driver: look for it first with [`found`](super::found).
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let context = Arc::new(Context::open(ordinal)?);
        let line = |purpose: &str| Stream::start(&context, format!("cuda-{ordinal}-{purpose}"));
        let (compute, inward, outward) = (line("compute")?, line("in")?, line("out")?);
        let figure = |attribute| context.figure(attribute);
        let architecture = Architecture::new(
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        Ok(Arc::new(Self {
            blas: OnceLock::new(),
            products: OnceLock::new(),
            spare: Spare::default(),
            compute,
            inward,
            outward,
            modules: Modules::new(context.clone(), architecture),
            architecture,
            processors: figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            context,
        }))
    }

    /// Returns the driver's number of the device, as in
    /// [`DevicePlace::device`](mpmd_transport::memory::DevicePlace::device).
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    /// Returns the device's context.
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns an allocator for segments of the device's memory.
    pub fn allocator(self: &Arc<Self>) -> Arc<dyn DeviceAllocator> {
        Arc::new(Allocator::new(self.context.clone()))
    }

    /// Returns a function that pins host memory, so that devices can copy from and to it directly.
    /// It takes (address, bytes) and returns a guard that unpins when dropped, or `None` if pinning
    /// fails.
    pub fn pin(self: &Arc<Self>) -> Pin {
        let context = self.context.clone();
        Box::new(move |address, bytes| {
            let pinned = Pinned::new(context.clone(), address, bytes);
            let pinned = pinned.inspect_err(|error| {
                static ONCE: Once = Once::new();
                ONCE.call_once(|| {
                    tracing::warn!(
                        %error,
                        "cannot pin host memory: copies between it and CUDA devices go through \
                         staging buffers, at a fraction of the speed; `mpmd doctor --device cuda` \
                         says what to do"
                    );
                });
                tracing::debug!(%error, bytes, "host memory is not pinned");
            });
            pinned.ok().map(|pinned| Box::new(pinned) as Box<dyn Any + Send + Sync>)
        })
    }

    /// Records begin and end times of work on the [`compute`](Self::compute) stream from now on.
    /// `now` returns nanoseconds since an arbitrary origin. Must be called before any work is
    /// issued. Waits for the device.
    ///
    /// # Errors
    ///
    /// If the device cannot be used.
    pub fn keep_time(&self, now: Box<dyn Fn() -> u64 + Send + Sync>) -> Result<(), CudaError> {
        self.compute.keep_time(now)
    }

    /// Returns the stream that runs kernels, in the order of their operations.
    pub fn compute(&self) -> &Stream {
        &self.compute
    }

    /// Returns the stream for copies into the device's memory, from the host or from other devices.
    pub fn inward(&self) -> &Stream {
        &self.inward
    }

    /// Returns the stream for copies from the device's memory to the host.
    pub fn outward(&self) -> &Stream {
        &self.outward
    }

    /// Returns the scratch memory that the compute stream keeps between calls.
    pub fn spare(&self) -> &Spare {
        &self.spare
    }

    /// Returns the number of streaming multiprocessors.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Returns the modules loaded on the device.
    pub(super) fn modules(&self) -> &Modules {
        &self.modules
    }

    /// Returns cuBLAS for the compute stream, created at the first call. Waits if another thread is
    /// creating it. If that failed, every call returns the same error.
    pub(super) fn blas(&self, pool: &Pool) -> Result<&Blas, CudaError> {
        let make = || Blas::new(&self.context, self.compute.stream(), self.architecture, pool);
        self.blas.get_or_init(make).as_ref().map_err(CudaError::clone)
    }

    /// Returns the cell that is set once cuBLAS has loaded the kernels of small products.
    pub(super) fn products(&self) -> &OnceLock<()> {
        &self.products
    }

    /// Returns the architecture of the device.
    pub(super) fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Returns cuBLAS if it was created already. `None` if not, or if that failed.
    pub(super) fn blas_if_ready(&self) -> Option<&Blas> {
        self.blas.get()?.as_ref().ok()
    }
}

/// Enables direct access between the memories of these devices, where the machine has a link. Other
/// pairs of devices copy through the host. Failures are only logged.
pub fn reach_each_other(gpus: &[Arc<Gpu>]) {
    for from in gpus {
        for to in gpus.iter().filter(|to| to.ordinal() != from.ordinal()) {
            if let Err(error) = from.context.reach(&to.context) {
                let (from, to) = (from.ordinal(), to.ordinal());
                tracing::debug!(%error, from, to, "no direct access between these devices");
            }
        }
    }
}

impl Context {
    fn open(ordinal: u32) -> Result<Self, CudaError> {
        let doing = || format!("opening CUDA device {ordinal}");
        let number = i32::try_from(ordinal)
            .map_err(|_| CudaError::new(doing(), "", "there is no such device"))?;
        let (mut device, mut raw) = (0, std::ptr::null_mut());
        // SAFETY: there is room for the device and for the context, which is released once, when
        // this is dropped.
        unsafe {
            calls::cuInit(0)
                .result()
                .and_then(|()| calls::cuDeviceGet(&raw mut device, number).result())
                .and_then(|()| calls::cuDevicePrimaryCtxRetain(&raw mut raw, device).result())
        }
        .map_err(|error| cuda(doing(), error))?;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: it writes 16 bytes, for which there is room. Only this version of the call
        // distinguishes the parts of a divided device.
        unsafe { calls::cuDeviceGetUuid_v2(&raw mut uuid, device) }
            .result()
            .map_err(|error| cuda(doing(), error))?;
        let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
        let (broken, shown, foreign) = Default::default();
        Ok(Self { raw, device, ordinal, uuid, broken, shown, foreign })
    }

    /// Makes this the calling thread's current context.
    ///
    /// # Errors
    ///
    /// If work on the device has failed: always with that first error.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        if let Some(error) = self.broken.get() {
            return Err(error.clone());
        }
        self.bind_failed()
    }

    /// Makes this the calling thread's current context, even if work on the device has failed. For
    /// the ends of work issued before the failure.
    pub(super) fn bind_failed(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained and lives as long as this.
        unsafe { calls::cuCtxSetCurrent(self.raw) }
            .result()
            .map_err(|error| cuda("using a CUDA device", error))
    }

    /// Makes this the current context until the returned guard is dropped, which restores the
    /// previous one.
    ///
    /// For code that may run while this thread issues work to another device, such as allocating
    /// and freeing memory.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub(super) fn visit(&self) -> Result<ContextGuard, CudaError> {
        let visit = ContextGuard::from_here();
        self.bind()?;
        Ok(visit)
    }

    /// Makes this the current context for cleaning up, even if work on the device has failed.
    fn last_visit(&self) -> Option<ContextGuard> {
        let visit = ContextGuard::from_here();
        self.bind_failed().is_ok().then_some(visit)
    }

    /// Marks the device as failed and returns its first error. From now on, every operation fails
    /// with that error.
    pub(super) fn fails(&self, error: CudaError) -> CudaError {
        self.broken.get_or_init(|| error).clone()
    }

    /// Enables access from this device to the memory of `other`, which is another device. Fails if
    /// the machine has no link between the two.
    fn reach(&self, other: &Self) -> Result<(), CudaError> {
        const DOING: &str = "reaching another CUDA device";
        let _visit = self.visit()?;
        let mut can = 0;
        // SAFETY: both devices are the driver's own; there is room for the number.
        unsafe { calls::cuDeviceCanAccessPeer(&raw mut can, self.device, other.device) }
            .result()
            .map_err(|error| cuda(DOING, error))?;
        if can == 0 {
            return Err(CudaError::new(DOING, "", "the machine has no way between the two"));
        }
        // SAFETY: both contexts are alive, and this one is current.
        let answer = unsafe { calls::cuCtxEnablePeerAccess(other.raw, 0) };
        // The primary context outlives a `Gpu`: an earlier one may have enabled it.
        if answer.is(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
            return Ok(());
        }
        answer.result().map_err(|error| cuda(DOING, error))
    }

    /// Returns an attribute of the device; 0 if it is negative.
    fn figure(&self, attribute: sys::CUdevice_attribute) -> Result<u32, CudaError> {
        let mut figure = 0;
        // SAFETY: the device is the driver's own, and there is room for the number.
        unsafe { calls::cuDeviceGetAttribute(&raw mut figure, attribute, self.device) }
            .result()
            .map_err(|error| cuda("reading an attribute of a CUDA device", error))?;
        Ok(u32::try_from(figure).unwrap_or(0))
    }

    /// Returns the driver's number of the device, which its memory carries.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the device's identity, the same in all processes.
    pub(super) fn uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// Returns the memory shown to other processes.
    pub(super) fn shown(&self) -> &Shown {
        &self.shown
    }

    /// Returns the memory of other processes that is open in this context.
    pub(super) fn foreign(&self) -> &Foreign {
        &self.foreign
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; everything that belongs to the context holds this, so
        // nothing of it is left.
        if let Err(error) = unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) }.result() {
            tracing::debug!(%error, "closing a CUDA device");
        }
    }
}

/// Restores, when dropped, the context that was current on this thread when the guard was created.
pub(super) struct ContextGuard(sys::CUcontext);

impl ContextGuard {
    /// Creates a guard for the thread's current context. If there is none, or it cannot be read,
    /// null is restored.
    fn from_here() -> Self {
        let mut current = std::ptr::null_mut();
        // SAFETY: there is room for the context.
        let told = unsafe { calls::cuCtxGetCurrent(&raw mut current) }.is_success();
        Self(if told { current } else { std::ptr::null_mut() })
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        // SAFETY: it was current on this thread and its user keeps it alive, or it is null, which
        // stands for no context.
        if let Err(error) = unsafe { calls::cuCtxSetCurrent(self.0) }.result() {
            tracing::debug!(%error, "going back to a CUDA device");
        }
    }
}

/// Host pages that stay pinned until this is dropped.
pub(super) struct Pinned {
    context: Arc<Context>,
    address: usize,
}

impl Pinned {
    pub(super) fn new(
        context: Arc<Context>,
        address: usize,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let _visit = context.visit()?;
        let at = std::ptr::with_exposed_provenance_mut(address);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller has just mapped these pages and lets them go only after this is
        // dropped. Pinning does not change their contents.
        unsafe { calls::cuMemHostRegister_v2(at, bytes, flags) }
            .result()
            .map_err(|error| cuda("pinning memory of the host", error))?;
        Ok(Self { context, address })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Left pinned, the driver would take the next mapping at this address for pinned memory.
        let Some(_visit) = self.context.last_visit() else { return };
        // SAFETY: pinned in `new`, and unpinned once. Work of devices on it is over: memory is
        // dropped only after that.
        let unpinned = unsafe {
            calls::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.address))
        };
        if let Err(error) = unpinned.result() {
            tracing::debug!(%error, "unpinning memory of the host");
        }
    }
}

/// Creates an error for a failed driver call, with the driver's name and description of the error.
pub(super) fn cuda(doing: impl Into<String>, error: DriverError) -> CudaError {
    CudaError::new(doing, error.name(), error.text())
}
