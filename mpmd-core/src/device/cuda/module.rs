//! Sources made ready for a device: modules that are loaded, and their functions.
//!
//! Modules stay loaded as long as the device's context is there: nobody has to know when the last
//! of their functions has run.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use parking_lot::RwLock;

use super::asked::RawArg;
use super::calls::{self, DriverError};
use super::compile::{self, Architecture};
use super::error::CudaError;
use super::gpu::{Context, cuda};
use crate::device::cuda::source::Kind;
use crate::device::cuda::source::Source;

/// Shared memory that a block may have before the driver is asked for more.
const SHARED_BYTES: u32 = 48 << 10;
/// Room for what the driver says of a module that it refuses.
const LOG_BYTES: usize = 8 << 10;

/// The modules of one device.
pub(super) struct Modules {
    context: Arc<Context>,
    architecture: Architecture,
    /// By the places of their sources.
    slots: RwLock<HashMap<usize, Arc<Slot>>>,
}

/// A source that somebody has announced or launched.
struct Slot {
    source: &'static Source,
    /// Whoever comes first makes it, others wait.
    module: OnceLock<Result<Module, CudaError>>,
}

struct Module {
    raw: sys::CUmodule,
    functions: RwLock<Vec<Function>>,
}

// SAFETY: modules and functions may be used by any thread that has bound their context; CUDA's
// calls are thread-safe.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A function that can be launched.
pub(super) struct Function {
    name: Box<str>,
    raw: sys::CUfunction,
    /// Bytes of its parameters, where the driver tells.
    parameters: Option<Vec<usize>>,
    /// Shared memory that a launch may give it as things are, in bytes.
    shared_bytes: AtomicU32,
}

impl Modules {
    pub(super) fn new(context: Arc<Context>, architecture: Architecture) -> Self {
        Self { context, architecture, slots: RwLock::default() }
    }

    /// Says that a source will be used: from now on nobody wonders where it comes from.
    pub(super) fn announce(&self, source: &'static Source) {
        if self.slots.read().contains_key(&key(source)) {
            return;
        }
        self.slots.write().entry(key(source)).or_insert_with(|| Arc::new(Slot::new(source)));
    }

    /// Compiles and loads a source, unless that has been done; waits where another thread is about
    /// it.
    ///
    /// # Errors
    ///
    /// Where it does not compile, there is no NVRTC, or the driver refuses what came of it: the
    /// same again for all who ask.
    pub(super) fn make_ready(&self, source: &'static Source) -> Result<(), CudaError> {
        self.announce(source);
        let slot = self.slots.read().get(&key(source)).cloned();
        slot.map_or(Ok(()), |slot| self.module(&slot).map(|_| ()))
    }

    /// Calls `then` with a function.
    ///
    /// # Errors
    ///
    /// As [`Modules::make_ready`], where there is no such function, and those of `then`.
    pub(super) fn with_function<T>(
        &self,
        source: &'static Source,
        function: &str,
        then: impl FnOnce(&Function) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let slots = self.slots.read();
        if let Some(slot) = slots.get(&key(source))
            && let Some(Ok(module)) = slot.module.get()
            && let functions = module.functions.read()
            && let Some(found) = functions.iter().find(|known| &*known.name == function)
        {
            return then(found);
        }
        let announced = slots.contains_key(&key(source));
        drop(slots);
        self.find(source, function, announced)
            .map_err(|error| error.in_the_course_of(format!("launching {function}")))?;
        let slots = self.slots.read();
        let module = slots.get(&key(source)).and_then(|slot| slot.module.get()?.as_ref().ok());
        let functions = module.map(|module| module.functions.read());
        let found =
            functions.as_ref().and_then(|all| all.iter().find(|known| &*known.name == function));
        // It was found just now, and nothing goes.
        found.map_or_else(|| Err(no_function(source, function)), then)
    }

    /// Has the function in its module's list.
    fn find(
        &self,
        source: &'static Source,
        function: &str,
        announced: bool,
    ) -> Result<(), CudaError> {
        if !announced {
            tracing::warn!(
                source = source.name(),
                function,
                "compiled as it is launched, since no kernel announces it (Kernel::cuda)"
            );
        }
        self.make_ready(source)?;
        let slot = self.slots.read().get(&key(source)).cloned();
        let Some(slot) = slot else { return Err(no_function(source, function)) };
        let module = self.module(&slot)?;
        let found = Function::find(module, source, function)?;
        let mut functions = module.functions.write();
        if functions.iter().all(|known| *known.name != *function) {
            functions.push(found);
        }
        Ok(())
    }

    fn module<'s>(&self, slot: &'s Slot) -> Result<&'s Module, CudaError> {
        let made =
            slot.module.get_or_init(|| self.context.bind().and_then(|()| self.load(slot.source)));
        made.as_ref().map_err(CudaError::clone)
    }

    fn load(&self, source: &'static Source) -> Result<Module, CudaError> {
        match source.kind {
            Kind::Cuda { .. } => {
                let image = compile::image(source, self.architecture)?;
                match Module::load(source, &image) {
                    Err(error) if image.is_kept() => {
                        tracing::debug!(source = source.name(), %error, "what was kept is \
                            compiled again");
                        Module::load(source, &compile::anew(source, self.architecture)?)
                    }
                    // A driver that is older than NVRTC may know what NVRTC can make of it without
                    // its help.
                    Err(error) if image.is_binary() && error.is_unknown_image() => {
                        tracing::debug!(source = source.name(), %error, "the driver compiles it");
                        Module::load(source, &compile::assembly(source, self.architecture)?)
                    }
                    loaded => loaded,
                }
            }
            Kind::Ptx => Module::load(source, &compile::Image::of_text(source.text())),
            Kind::Cublas => Err(CudaError::new(
                "loading cuBLAS",
                "",
                "it is called by `Cuda::gemm`, and has no functions to launch",
            )),
        }
    }
}

impl Slot {
    fn new(source: &'static Source) -> Self {
        Self { source, module: OnceLock::new() }
    }
}

impl Module {
    /// Loads it, with all its functions: none is loaded as it is launched.
    fn load(source: &Source, image: &compile::Image) -> Result<Self, CudaError> {
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The second is a number in place of a pointer: the driver wants it so.
        let mut values =
            [log.as_mut_ptr().cast::<c_void>(), std::ptr::without_provenance_mut(log.len())];
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is bound by the caller. The image ends with a zero, as texts must;
        // there are as many options as values, and the log is as long as is said. There is room for
        // the module.
        let loaded = unsafe {
            calls::cuModuleLoadDataEx(
                &raw mut raw,
                image.bytes().as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if let Err(error) = loaded.result() {
            let error = cuda(format!("loading {}", source.name()), error);
            let said = log
                .split(|byte| *byte == 0)
                .next()
                .map(String::from_utf8_lossy)
                .unwrap_or_default();
            return Err(error.with_log(said.trim()));
        }
        let module = Self { raw, functions: RwLock::default() };
        module.load_functions();
        Ok(module)
    }

    /// Drivers since 12.4 load functions at once where they are asked to, and otherwise at their
    /// first launch, which is right too.
    fn load_functions(&self) {
        if !["cuModuleGetFunctionCount", "cuModuleEnumerateFunctions", "cuFuncLoad"]
            .into_iter()
            .all(has)
        {
            return;
        }
        let mut count = 0;
        // SAFETY: the module is alive, and the driver has these functions. There is room for the
        // number, and for as many functions as it says.
        let loaded = unsafe {
            calls::cuModuleGetFunctionCount(&raw mut count, self.raw).result().and_then(|()| {
                let mut functions = vec![std::ptr::null_mut(); count as usize];
                calls::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.raw)
                    .result()?;
                functions.into_iter().try_for_each(|function| calls::cuFuncLoad(function).result())
            })
        };
        if let Err(error) = loaded {
            tracing::debug!(%error, "functions are loaded as they are launched");
        }
    }
}

impl Function {
    fn find(module: &Module, source: &Source, function: &str) -> Result<Self, CudaError> {
        let name = CString::new(function).map_err(|_| no_function(source, function))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is alive and the name ends with a zero; there is room for the
        // function.
        unsafe { calls::cuModuleGetFunction(&raw mut raw, module.raw, name.as_ptr()) }
            .result()
            .map_err(|error| {
                cuda(format!("looking for function {function} in {}", source.name()), error)
            })?;
        let (mut own, which) = (0, sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
        // SAFETY: the function is alive, and there is room for the number.
        let told = unsafe { calls::cuFuncGetAttribute(&raw mut own, which, raw) }.is_success();
        let own = if told { u32::try_from(own).unwrap_or(0) } else { 0 };
        let shared_bytes = SHARED_BYTES.saturating_sub(own);
        Ok(Self {
            name: function.into(),
            raw,
            parameters: parameters(raw),
            shared_bytes: AtomicU32::new(shared_bytes),
        })
    }

    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Fails where arguments are not what the function takes, as far as the driver tells.
    pub(super) fn check(
        &self,
        source: &Source,
        function: &str,
        args: &[RawArg],
    ) -> Result<(), CudaError> {
        let Some(parameters) = &self.parameters else { return Ok(()) };
        let fit = parameters.len() == args.len()
            && parameters.iter().zip(args).all(|(parameter, arg)| *parameter == arg.size);
        if fit {
            return Ok(());
        }
        let given: Vec<usize> = args.iter().map(|arg| arg.size).collect();
        let text = format!("it takes parameters of {parameters:?} bytes, and is given {given:?}");
        Err(CudaError::new(format!("launching {function} of {}", source.name()), "", text))
    }

    /// Asks the driver for as much shared memory, where it is more than it gives unasked.
    pub(super) fn allow_shared(&self, bytes: u32) -> Result<(), DriverError> {
        if bytes <= self.shared_bytes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let dynamic = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let asked = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is alive.
        unsafe { calls::cuFuncSetAttribute(self.raw, dynamic, asked) }.result()?;
        self.shared_bytes.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// A source is where it is: it is static.
fn key(source: &'static Source) -> usize {
    std::ptr::from_ref(source).addr()
}

fn no_function(source: &Source, function: &str) -> CudaError {
    CudaError::new(
        format!("looking for function {function}"),
        "",
        format!("{} has none of this name", source.name()),
    )
}

/// Bytes of each of a function's parameters; drivers since 12.4 tell.
fn parameters(function: sys::CUfunction) -> Option<Vec<usize>> {
    if !has("cuFuncGetParamInfo") {
        return None;
    }
    let size = |index| {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is alive, the driver has this call, and there is room for both
        // numbers.
        let told =
            unsafe { calls::cuFuncGetParamInfo(function, index, &raw mut offset, &raw mut size) };
        // Behind the last.
        told.result().ok().map(|()| size)
    };
    Some((0..).map_while(size).collect())
}

/// Whether the driver has a function that not all have.
fn has(symbol: &str) -> bool {
    // SAFETY: whoever has a module has a driver; its symbols are only looked for.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(symbol.as_bytes()).is_ok() }
}
