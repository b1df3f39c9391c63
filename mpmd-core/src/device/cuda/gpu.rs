//! A CUDA device that this process uses.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::sys;
use mpmd_transport::memory::{DeviceAllocator, Pin, Pool};
use parking_lot::Mutex;

use super::blas::Blas;
use super::calls::{self, DriverError};
use super::compile::Architecture;
use super::error::CudaError;
use super::ipc::Shown;
use super::line::{Ends, Line};
use super::memory::Allocator;
use super::module::Modules;
use crate::device::cuda::spare::Spare;

/// A CUDA device, its context in this process, and its lines.
pub(crate) struct Gpu {
    context: Arc<Context>,
    /// cuBLAS, from when it was first needed. Gone before the lines are.
    blas: OnceLock<Result<Blas, CudaError>>,
    /// Scratch of the compute line's work.
    spare: Spare,
    compute: Line,
    inward: Line,
    outward: Line,
    modules: Modules,
    architecture: Architecture,
    processors: u32,
}

/// The device's primary context, which all who use the device in this process share.
pub(super) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// The driver's number of the device, by which its memory says whose it is: one for all who
    /// open it.
    ordinal: u32,
    /// What it is known by in all processes.
    uuid: [u8; 16],
    /// Why it does nothing more.
    broken: OnceLock<CudaError>,
    /// Whether other processes may be shown events.
    shares_events: AtomicBool,
    shown: Shown,
    /// Of its lines, for who has to give them up.
    lines: Mutex<Vec<Weak<Ends>>>,
    /// Some of its work will never end.
    pub(super) is_stuck: AtomicBool,
}

// SAFETY: contexts, and what belongs to them, may be used by any thread that has made them its
// current one, which `Context::bind` does before each use; CUDA's calls are thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Gpu {
    /// Opens the device that the driver numbers `ordinal`, which is what its memory bears.
    ///
    /// The driver must be known to be there: without one this panics.
    ///
    /// # Errors
    ///
    /// Where the driver has no such device, or cannot use it.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let context = Arc::new(Context::open(ordinal)?);
        let line = |what: &str| Line::start(&context, format!("cuda-{ordinal}-{what}"));
        let (compute, inward, outward) = (line("compute")?, line("in")?, line("out")?);
        let figure = |attribute| context.figure(attribute);
        let architecture = Architecture::new(
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        Ok(Arc::new(Self {
            blas: OnceLock::new(),
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

    /// The driver's number of the device: what its memory
    /// [says](mpmd_transport::memory::DevicePlace::device).
    pub(crate) fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    /// The device's context.
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Where the segments of its memory come from.
    pub(crate) fn allocator(self: &Arc<Self>) -> Arc<dyn DeviceAllocator> {
        Arc::new(Allocator::new(self.context.clone()))
    }

    /// What keeps pages of the host's memory where they are, so that devices copy from and to them
    /// by themselves.
    pub(crate) fn pin(self: &Arc<Self>) -> Pin {
        let context = self.context.clone();
        Box::new(move |address, bytes| {
            let pinned = Pinned::new(context.clone(), address, bytes);
            let pinned = pinned
                .inspect_err(|error| tracing::debug!(%error, bytes, "copies of it are staged"));
            pinned.ok().map(|pinned| Box::new(pinned) as Box<dyn Any + Send + Sync>)
        })
    }

    /// From now on work of [`compute`](Self::compute) is told with its times, by `now`: nanoseconds
    /// from some beginning. To be called before there is any.
    ///
    /// # Errors
    ///
    /// Where the device cannot be used.
    pub(crate) fn keep_time(
        &self,
        now: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Result<(), CudaError> {
        self.compute.keep_time(now)
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

    /// Scratch of the compute line's work, for work to come.
    pub(crate) fn spare(&self) -> &Spare {
        &self.spare
    }

    /// How many multiprocessors it has.
    pub(crate) fn processors(&self) -> u32 {
        self.processors
    }

    /// What was compiled for it.
    pub(super) fn modules(&self) -> &Modules {
        &self.modules
    }

    /// cuBLAS for the compute line, made now unless it was before; waits where another thread is
    /// about it.
    pub(super) fn blas(&self, pool: &Pool) -> Result<&Blas, CudaError> {
        let make = || Blas::new(&self.context, self.compute.stream(), self.architecture, pool);
        self.blas.get_or_init(make).as_ref().map_err(CudaError::clone)
    }

    /// cuBLAS, where it was made.
    pub(super) fn blas_if_ready(&self) -> Option<&Blas> {
        self.blas.get()?.as_ref().ok()
    }
}

/// Lets the devices of a process reach each other's memory, where the machine has a way: then
/// copies between them take it, of whatever shape. Else the driver takes them through the host.
pub(crate) fn reach_each_other(gpus: &[Arc<Gpu>]) {
    for from in gpus {
        for to in gpus.iter().filter(|to| to.ordinal() != from.ordinal()) {
            if let Err(error) = from.context.reach(&to.context) {
                tracing::debug!(%error, from = from.ordinal(), to = to.ordinal(), "devices that \
                    do not reach each other");
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
        // SAFETY: it writes 16 bytes, for which there is room. This version alone tells the parts
        // of a device apart.
        unsafe { calls::cuDeviceGetUuid_v2(&raw mut uuid, device) }
            .result()
            .map_err(|error| cuda(doing(), error))?;
        let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
        let (broken, shares_events, shown, lines, is_stuck) = Default::default();
        Ok(Self { raw, device, ordinal, uuid, broken, shares_events, shown, lines, is_stuck })
    }

    /// Makes this the calling thread's current context.
    ///
    /// # Errors
    ///
    /// Where work on the device has failed: with that error, whoever asks.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        if let Some(error) = self.broken.get() {
            return Err(error.clone());
        }
        self.bind_failed()
    }

    /// As [`bind`](Self::bind), also where work on the device has failed: for what has to do with
    /// work issued before.
    pub(super) fn bind_failed(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained and lives as long as this.
        unsafe { calls::cuCtxSetCurrent(self.raw) }
            .result()
            .map_err(|error| cuda("using a CUDA device", error))
    }

    /// As [`bind`](Self::bind), until what this returns is dropped; then the context is current
    /// again that was before.
    ///
    /// For what may happen on a thread that is issuing work to another device: memory that is asked
    /// for and let go.
    ///
    /// # Errors
    ///
    /// As [`bind`](Self::bind).
    pub(super) fn visit(&self) -> Result<Visit, CudaError> {
        let visit = Visit::from_here();
        self.bind()?;
        Ok(visit)
    }

    /// As [`visit`](Self::visit), to leave nothing behind, also where work on the device has
    /// failed; `None` where some of it [will never end](Self::is_stuck), for which such calls would
    /// wait.
    fn last_visit(&self) -> Option<Visit> {
        let visit = Visit::from_here();
        let is_stuck = self.is_stuck.load(Ordering::Acquire);
        (!is_stuck && self.bind_failed().is_ok()).then_some(visit)
    }

    /// Work on the device has failed: from now on everything does, with the error that came first,
    /// which is returned.
    pub(super) fn fails(&self, error: CudaError) -> CudaError {
        self.broken.get_or_init(|| error).clone()
    }

    /// Has work of this device read and write memory of the other, which is another one.
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
        // Contexts are the process's: a program before this one may have asked.
        if answer.is(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
            return Ok(());
        }
        answer.result().map_err(|error| cuda(DOING, error))
    }

    /// A figure of the device's.
    fn figure(&self, attribute: sys::CUdevice_attribute) -> Result<u32, CudaError> {
        let mut figure = 0;
        // SAFETY: the device is the driver's own, and there is room for the number.
        unsafe { calls::cuDeviceGetAttribute(&raw mut figure, attribute, self.device) }
            .result()
            .map_err(|error| cuda("asking what a CUDA device is", error))?;
        Ok(u32::try_from(figure).unwrap_or(0))
    }

    /// The number by which memory says whose it is.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What the device is known by in all processes.
    pub(super) fn uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// Events that are made from now on can be shown to other processes.
    pub(super) fn share_events(&self) {
        self.shares_events.store(true, Ordering::Relaxed);
    }

    /// Whether events are made so that they can be shown to other processes.
    pub(super) fn shares_events(&self) -> bool {
        self.shares_events.load(Ordering::Relaxed)
    }

    /// A line of this context was made.
    pub(super) fn note_line(&self, line: &Arc<Ends>) {
        self.lines.lock().push(Arc::downgrade(line));
    }

    /// The lines that there are.
    pub(super) fn lines(&self) -> Vec<Arc<Ends>> {
        self.lines.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// What other processes were shown of it.
    pub(super) fn shown(&self) -> &Shown {
        &self.shown
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if *self.is_stuck.get_mut() {
            // It would be waited for in vain. The end of this process ends it.
            return;
        }
        // SAFETY: retained once in `open`; whatever belongs to the context holds this, so nothing
        // of it is left.
        if let Err(error) = unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) }.result() {
            tracing::debug!(%error, "closing a CUDA device");
        }
    }
}

/// A thread's visit to a context; it goes back to the one before when this is dropped.
pub(super) struct Visit(sys::CUcontext);

impl Visit {
    /// Goes back to what is current now. One that has ended meanwhile is none to go back to.
    fn from_here() -> Self {
        let mut current = std::ptr::null_mut();
        // SAFETY: there is room for the context.
        let told = unsafe { calls::cuCtxGetCurrent(&raw mut current) }.is_success();
        Self(if told { current } else { std::ptr::null_mut() })
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        // SAFETY: it was current on this thread, whose user holds it, or is null, which is none.
        if let Err(error) = unsafe { calls::cuCtxSetCurrent(self.0) }.result() {
            tracing::debug!(%error, "going back to a CUDA device");
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
        let _visit = context.visit()?;
        let at = std::ptr::with_exposed_provenance_mut(address);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller has just mapped these pages and lets them go only after this is
        // dropped. To pin them changes nothing of what they hold.
        unsafe { calls::cuMemHostRegister_v2(at, bytes, flags) }
            .result()
            .map_err(|error| cuda("pinning memory of the host", error))?;
        Ok(Self { context, address })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Other devices would take what is mapped there next for pinned.
        let Some(_visit) = self.context.last_visit() else { return };
        // SAFETY: pinned in `new`, and unpinned once. Work of devices on it is over: who drops
        // memory has seen that.
        let unpinned = unsafe {
            calls::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.address))
        };
        if let Err(error) = unpinned.result() {
            tracing::debug!(%error, "unpinning memory of the host");
        }
    }
}

/// The driver's answer in words.
pub(super) fn cuda(doing: impl Into<String>, error: DriverError) -> CudaError {
    CudaError::new(doing, error.name(), error.text())
}
