//! Loads compiled sources as CUDA modules and finds their functions.
//!
//! Modules stay loaded as long as the device's context exists, so that nothing has to track when
//! the last of their functions has run.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use mpmd_base::block::RwLock;

use super::calls;
use super::compile::{self, Architecture};
use super::context::{DeviceContext, cuda};
use super::descriptions::RawArg;
use super::error::CudaError;
use super::library::DRIVER;
use crate::cuda::source::Source;
use crate::cuda::source::SourceKind;

/// Dynamic shared memory in bytes that a thread block can use without a request to the driver.
const SHARED_BYTES: u32 = 48 << 10;
/// Size in bytes of the buffer for the driver's log when it refuses a module.
const LOG_BYTES: usize = 8 << 10;

/// The modules loaded on one device.
pub(super) struct Modules {
    context: Arc<DeviceContext>,
    architecture: Architecture,
    /// The sources and their modules, by the address of the source.
    slots: RwLock<HashMap<usize, Arc<ModuleSlot>>>,
}

/// A source that was announced or launched, with its module.
struct ModuleSlot {
    source: &'static Source,
    /// The loaded module, or the error. The first thread that needs the module creates it; other
    /// threads wait.
    module: OnceLock<Result<Module, CudaError>>,
}

struct Module {
    raw: sys::CUmodule,
    functions: RwLock<Vec<LoadedFunction>>,
}

// SAFETY: modules and functions may be used by any thread that has bound their context; CUDA's
// calls are thread-safe.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A loaded function that can be launched.
pub(super) struct LoadedFunction {
    name: Box<str>,
    raw: sys::CUfunction,
    /// Sizes of the parameters in bytes; `None` if the driver does not report them.
    parameters: Option<Vec<usize>>,
    /// Bytes of static shared memory that the function declares.
    own_shared: u32,
    /// Bytes of dynamic shared memory that a launch can use without a further request to the
    /// driver.
    shared_bytes: AtomicU32,
}

impl Modules {
    pub(super) fn new(context: Arc<DeviceContext>, architecture: Architecture) -> Self {
        Self {
            context,
            architecture,
            slots: RwLock::default(),
        }
    }

    /// Registers a source before its first launch. The launch then logs no warning that it
    /// compiles.
    pub(super) fn announce(&self, source: &'static Source) {
        if self.slots.read().contains_key(&key(source)) {
            return;
        }
        self.slots
            .write()
            .entry(key(source))
            .or_insert_with(|| Arc::new(ModuleSlot::new(source)));
    }

    /// Compiles and loads a source, unless it is loaded already. Waits if another thread is loading
    /// it.
    ///
    /// # Errors
    ///
    /// If the source does not compile, NVRTC is missing, or the driver refuses the module. Every
    /// call returns the same error.
    pub(super) fn make_ready(&self, source: &'static Source) -> Result<(), CudaError> {
        self.announce(source);
        let slot = self.slots.read().get(&key(source)).cloned();
        slot.map_or(Ok(()), |slot| self.module(&slot).map(|_| ()))
    }

    /// Calls `then` with the function named `function`, and returns the result of `then`. Compiles
    /// and loads the source first if it is not loaded.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Modules::make_ready`] and of `then`. If there is no such function.
    pub(super) fn with_function<T>(
        &self,
        source: &'static Source,
        function: &str,
        then: impl FnOnce(&LoadedFunction) -> Result<T, CudaError>,
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
        let module = slots
            .get(&key(source))
            .and_then(|slot| slot.module.get()?.as_ref().ok());
        let functions = module.map(|module| module.functions.read());
        let found = functions
            .as_ref()
            .and_then(|all| all.iter().find(|known| &*known.name == function));
        // The function was just added, and none is ever removed.
        found.map_or_else(|| Err(no_function(source, function)), then)
    }

    /// Loads the source, looks up the function, and adds it to the module's list.
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
                "compiling a source during a launch, because no kernel lists it (Kernel::cuda)"
            );
        }
        self.make_ready(source)?;

        let slot = self.slots.read().get(&key(source)).cloned();
        let Some(slot) = slot else {
            return Err(no_function(source, function));
        };

        let module = self.module(&slot)?;
        let found = LoadedFunction::find(module, source, function)?;
        let mut functions = module.functions.write();
        if functions.iter().all(|known| *known.name != *function) {
            functions.push(found);
        }
        Ok(())
    }

    fn module<'s>(&self, slot: &'s ModuleSlot) -> Result<&'s Module, CudaError> {
        let made = slot
            .module
            .get_or_init(|| self.context.bind().and_then(|()| self.load(slot.source)));
        made.as_ref().map_err(CudaError::clone)
    }

    fn load(&self, source: &'static Source) -> Result<Module, CudaError> {
        match source.kind {
            SourceKind::Cuda { .. } => {
                let image = compile::image(source, self.architecture)?;
                match Module::load(source, &image) {
                    // A driver older than NVRTC cannot load NVRTC's machine code, but may compile
                    // its PTX.
                    Err(error) if image.is_binary() && error.is_unknown_image() => {
                        tracing::debug!(
                            source = source.name(), %error,
                            "the driver refuses NVRTC's machine code; it compiles PTX instead"
                        );
                        Module::load(source, &compile::assembly(source, self.architecture)?)
                    }
                    loaded => loaded,
                }
            }
            SourceKind::Ptx => Module::load(source, &compile::Image::of_text(source.text())),
            SourceKind::Cublas => Err(CudaError::new(
                "loading cuBLAS",
                "",
                "it is called by `Cuda::gemm`, and has no functions to launch",
            )),
        }
    }
}

impl ModuleSlot {
    fn new(source: &'static Source) -> Self {
        Self {
            source,
            module: OnceLock::new(),
        }
    }
}

impl Module {
    /// Loads a module and all its functions, so that a first launch has nothing to load. Drivers
    /// before 12.4 load only the module. The context must be current.
    fn load(source: &Source, image: &compile::Image) -> Result<Self, CudaError> {
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The driver expects the second value as a number in place of a pointer.
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            std::ptr::without_provenance_mut(log.len()),
        ];

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

        let module = Self {
            raw,
            functions: RwLock::default(),
        };
        module.load_functions();
        Ok(module)
    }

    /// Loads all functions of the module. Drivers before 12.4 cannot, and load each function at its
    /// first launch. Failures are only logged.
    fn load_functions(&self) {
        if ![
            "cuModuleGetFunctionCount",
            "cuModuleEnumerateFunctions",
            "cuFuncLoad",
        ]
        .into_iter()
        .all(|symbol| DRIVER.has(symbol))
        {
            return;
        }

        let mut count = 0;
        // SAFETY: the module is alive, and the driver has these functions. There is room for the
        // number, and for as many functions as it says.
        let loaded = unsafe {
            calls::cuModuleGetFunctionCount(&raw mut count, self.raw)
                .result()
                .and_then(|()| {
                    let mut functions = vec![std::ptr::null_mut(); count as usize];
                    calls::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, self.raw)
                        .result()?;
                    functions
                        .into_iter()
                        .try_for_each(|function| calls::cuFuncLoad(function).result())
                })
        };

        if let Err(error) = loaded {
            tracing::debug!(%error, "functions will be loaded at their first launch");
        }
    }
}

impl LoadedFunction {
    fn find(module: &Module, source: &Source, function: &str) -> Result<Self, CudaError> {
        let name = CString::new(function).map_err(|_| no_function(source, function))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is alive and the name ends with a zero; there is room for the
        // function.
        unsafe { calls::cuModuleGetFunction(&raw mut raw, module.raw, name.as_ptr()) }
            .result()
            .map_err(|error| {
                cuda(
                    format!("looking for function {function} in {}", source.name()),
                    error,
                )
            })?;

        let mut own = 0;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive, and there is room for the number.
        let told = unsafe { calls::cuFuncGetAttribute(&raw mut own, which, raw) }.is_success();
        let own = if told {
            u32::try_from(own).unwrap_or(0)
        } else {
            0
        };

        let shared_bytes = SHARED_BYTES.saturating_sub(own);
        Ok(Self {
            name: function.into(),
            raw,
            parameters: parameters(raw),
            own_shared: own,
            shared_bytes: AtomicU32::new(shared_bytes),
        })
    }

    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    /// Returns an error if the number of arguments, or their sizes in bytes, differ from the
    /// function's parameters. Checks nothing if the driver does not report the parameters.
    pub(super) fn check(
        &self,
        source: &Source,
        function: &str,
        args: &[RawArg],
    ) -> Result<(), CudaError> {
        let Some(parameters) = &self.parameters else {
            return Ok(());
        };
        let fit = parameters.len() == args.len()
            && parameters
                .iter()
                .zip(args)
                .all(|(parameter, arg)| *parameter == arg.size);
        if fit {
            return Ok(());
        }

        let given: Vec<usize> = args.iter().map(|arg| arg.size).collect();
        let text = format!("it takes parameters of {parameters:?} bytes, and is given {given:?}");
        Err(CudaError::new(
            format!("launching {function} of {}", source.name()),
            "",
            text,
        ))
    }

    /// Allows launches with `bytes` bytes of dynamic shared memory. `most` is the limit of shared
    /// memory for a block on this device. Calls the driver only if `bytes` exceeds what is allowed
    /// already.
    ///
    /// # Errors
    ///
    /// If a block would need more than `most` bytes, or the driver refuses.
    pub(super) fn allow_shared(
        &self,
        source: &Source,
        bytes: u32,
        most: u32,
    ) -> Result<(), CudaError> {
        if bytes <= self.shared_bytes.load(Ordering::Relaxed) {
            return Ok(());
        }

        let doing = || format!("launching {} of {}", self.name, source.name());
        let needed = u64::from(bytes) + u64::from(self.own_shared);
        if needed > u64::from(most) {
            let text = format!(
                "a block needs {needed} bytes of shared memory, and this device gives a block at \
                 most {most}"
            );
            return Err(CudaError::new(doing(), "", text));
        }

        let dynamic = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let asked = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the function is alive.
        unsafe { calls::cuFuncSetAttribute(self.raw, dynamic, asked) }
            .result()
            .map_err(|error| cuda(doing(), error))?;

        self.shared_bytes.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Returns the address of a source, which identifies it, since sources are static.
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

/// Returns the size in bytes of each parameter; `None` for drivers before 12.4.
fn parameters(function: sys::CUfunction) -> Option<Vec<usize>> {
    if !DRIVER.has("cuFuncGetParamInfo") {
        return None;
    }

    let size = |index| {
        let mut offset = 0;
        let mut size = 0;
        // SAFETY: the function is alive, the driver has this call, and there is room for both
        // numbers.
        let told =
            unsafe { calls::cuFuncGetParamInfo(function, index, &raw mut offset, &raw mut size) };
        // An error means that there are no more parameters.
        told.result().ok().map(|()| size)
    };

    Some((0..).map_while(size).collect())
}
