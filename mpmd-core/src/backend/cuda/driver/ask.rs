//! The calls that find the driver and its libraries. Nothing here is called twice in a process but for the three
//! libraries' versions.

use std::panic::{UnwindSafe, catch_unwind};
use std::sync::OnceLock;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{DriverError, result, sys};

use super::{Attributes, Driver, Gpu, NoCuda, OLDEST, Uuid, Version};

/// The driver for people.
const DRIVER: &str = "CUDA driver";

/// Functions of the driver without which it is not used. `cudarc` would panic in the middle of things where one of them
/// is missing: whatever the back end calls without asking for it first belongs in here.
pub(crate) const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemcpy3DAsync_v2",
    "cuMemsetD8Async",
    "cuMemsetD16Async",
    "cuMemsetD32Async",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuEventDestroy_v2",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle_v2",
    "cuIpcCloseMemHandle",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuLaunchHostFunc",
    "cuLaunchKernel",
];

/// As [`found`](super::found).
pub(super) fn driver() -> Result<&'static Driver, NoCuda> {
    static DRIVER: OnceLock<Result<Driver, NoCuda>> = OnceLock::new();
    let found = DRIVER.get_or_init(|| guarded(self::DRIVER, look));
    found.as_ref().map_err(NoCuda::clone)
}

fn look() -> Result<Driver, NoCuda> {
    // SAFETY: loading a library runs its initialisers. These are names of the driver alone, whose own are made to run
    // in any program; whoever puts another file of such a name into the loader's way has the process anyway.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing(DRIVER, &["cuda", "nvcuda"]));
    }
    // SAFETY: as above; it was there a moment ago. Names are only looked up: nothing is called by this type.
    whole(DRIVER, SYMBOLS, |name| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name).is_ok() })?;
    let no_gpu = || NoCuda::NoGpu { visible: variable("CUDA_VISIBLE_DEVICES") };
    result::init().map_err(|error| match error {
        DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE) => no_gpu(),
        error => refused("cuInit", error),
    })?;
    let version = driver_version().map_err(|error| refused("cuDriverGetVersion", error))?;
    if version < OLDEST {
        return Err(NoCuda::TooOld { version });
    }
    let count = result::device::get_count().map_err(|error| refused("cuDeviceGetCount", error))?;
    let gpus: Vec<Gpu> = (0..count).map(gpu).collect::<Result<_, _>>()?;
    if gpus.is_empty() {
        return Err(no_gpu());
    }
    Ok(Driver { version, gpus })
}

fn driver_version() -> Result<Version, DriverError> {
    let mut number = 0;
    // SAFETY: it writes one number, for which there is room.
    unsafe { sys::cuDriverGetVersion(&raw mut number) }.result()?;
    Ok(Version::of_number(u32::try_from(number).unwrap_or(0)))
}

fn gpu(ordinal: i32) -> Result<Gpu, NoCuda> {
    let device = result::device::get(ordinal).map_err(|error| refused("cuDeviceGet", error))?;
    let number = |attribute: Attribute| {
        // SAFETY: the device comes from `cuDeviceGet`.
        match unsafe { result::device::get_attribute(device, attribute) } {
            Ok(number) => Ok(u32::try_from(number).unwrap_or(0)),
            // An attribute that is younger than the driver is one of what the driver cannot do.
            Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)) => Ok(0),
            Err(error) => Err(refused("cuDeviceGetAttribute", error)),
        }
    };
    let has = |attribute| number(attribute).map(|number| number != 0);
    let mode = number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)?;
    let attributes = Attributes {
        processors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        copy_engines: number(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        unified_addressing: has(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)?,
        ipc: has(Attribute::CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)?,
        exclusive: mode == sys::CUcomputemode::CU_COMPUTEMODE_EXCLUSIVE_PROCESS as u32,
        prohibited: mode == sys::CUcomputemode::CU_COMPUTEMODE_PROHIBITED as u32,
        integrated: has(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)?,
        shared_memory_bytes: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
    };
    let capability = Version {
        major: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    };
    // SAFETY: the device comes from `cuDeviceGet`.
    let memory = unsafe { result::device::total_mem(device) };
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device comes from `cuDeviceGet`, and there is room for the number. This version of the call tells
    // the parts of a divided processor from each other.
    let got = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    got.result().map_err(|error| refused("cuDeviceGetUuid_v2", error))?;
    Ok(Gpu {
        // Counted from 0 upwards.
        ordinal: ordinal.unsigned_abs(),
        name: result::device::get_name(device).map_err(|error| refused("cuDeviceGetName", error))?,
        uuid: Uuid(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])),
        memory_bytes: memory.map_err(|error| refused("cuDeviceTotalMem", error))? as u64,
        capability,
        attributes,
    })
}

/// The driver's own words for an error.
pub(crate) fn refused(call: &'static str, error: DriverError) -> NoCuda {
    let text = |words: Result<&std::ffi::CStr, DriverError>| {
        words.map_or_else(|_| format!("{:?}", error.0), |words| words.to_string_lossy().into_owned())
    };
    NoCuda::Refused { what: DRIVER, call, name: text(error.error_name()), text: text(error.error_string()) }
}

/// As [`nvrtc`](super::nvrtc).
pub(super) fn nvrtc() -> Result<String, NoCuda> {
    use cudarc::nvrtc::sys;
    const WHAT: &str = "NVRTC";
    guarded(WHAT, || {
        // SAFETY: as for the driver: a library of NVIDIA's that is made to be loaded by any program.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing(WHAT, &["nvrtc"]));
        }
        // SAFETY: as for the driver.
        whole(WHAT, &["nvrtcVersion"], |name| unsafe {
            sys::culib().get::<unsafe extern "C" fn()>(name).is_ok()
        })?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers, for which there is room.
        match unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) } {
            sys::nvrtcResult::NVRTC_SUCCESS => Ok(format!("{major}.{minor}")),
            error => Err(status(WHAT, "nvrtcVersion", &error)),
        }
    })
}

/// As [`cublas`](super::cublas).
pub(super) fn cublas() -> Result<String, NoCuda> {
    use cudarc::cublas::sys::{self, libraryPropertyType as Property};
    const WHAT: &str = "cuBLAS";
    guarded(WHAT, || {
        // SAFETY: as for the driver: a library of NVIDIA's that is made to be loaded by any program.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing(WHAT, &["cublas"]));
        }
        // SAFETY: as for the driver.
        let has = |name: &[u8]| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name).is_ok() };
        whole(WHAT, &["cublasCreate_v2", "cublasGemmEx", "cublasGemmStridedBatchedEx"], has)?;
        if !has(b"cublasGetProperty") {
            return Ok("of a version that it does not tell".to_owned());
        }
        let number = |property: Property| {
            let mut number = 0;
            // SAFETY: it writes one number, for which there is room. It needs neither handle nor context.
            match unsafe { sys::cublasGetProperty(property, &raw mut number) } {
                sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(number),
                error => Err(status(WHAT, "cublasGetProperty", &error)),
            }
        };
        Ok(format!(
            "{}.{}.{}",
            number(Property::MAJOR_VERSION)?,
            number(Property::MINOR_VERSION)?,
            number(Property::PATCH_LEVEL)?
        ))
    })
}

/// As [`nccl`](super::nccl).
pub(super) fn nccl() -> Result<String, NoCuda> {
    use super::NCCL as WHAT;
    use crate::backend::cuda::{NCCL_NAMES, NCCL_SYMBOLS, nccl_library, nccl_version_of};
    let Some(library) = nccl_library() else {
        let looked_for = NCCL_NAMES.map(str::to_owned).to_vec();
        return Err(NoCuda::NoLibrary { what: WHAT, looked_for, library_path: variable("LD_LIBRARY_PATH") });
    };
    // SAFETY: names are only looked up: nothing is called by this type.
    whole(WHAT, NCCL_SYMBOLS, |name| unsafe { library.get::<unsafe extern "C" fn()>(name).is_ok() })?;
    let number = nccl_version_of(library);
    number.map(nccl_version).map_err(|error| NoCuda::Broken { what: WHAT, why: error.to_string() })
}

/// NCCL's way to write a version in a number, as NCCL_VERSION in its header has it since 2.9: 22203 is 2.22.3.
fn nccl_version(number: i32) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

fn status(what: &'static str, call: &'static str, error: &dyn std::fmt::Debug) -> NoCuda {
    NoCuda::Refused { what, call, name: format!("{error:?}"), text: "no more is said".to_owned() }
}

/// Fails where a library `has` not all of these functions.
fn whole(what: &'static str, names: &[&str], has: impl Fn(&[u8]) -> bool) -> Result<(), NoCuda> {
    let lacking = names.iter().filter(|name| !has(name.as_bytes())).map(|name| (*name).to_owned());
    let symbols: Vec<String> = lacking.collect();
    if symbols.is_empty() { Ok(()) } else { Err(NoCuda::NoSymbols { what, symbols }) }
}

fn missing(what: &'static str, libraries: &[&str]) -> NoCuda {
    let names = libraries.iter().flat_map(|name| cudarc::get_lib_name_candidates(name));
    let mut looked_for: Vec<String> = Vec::new();
    for name in names {
        if !looked_for.contains(&name) {
            looked_for.push(name);
        }
    }
    NoCuda::NoLibrary { what, looked_for, library_path: variable("LD_LIBRARY_PATH") }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Says a panic of the binding's as an error: it has them where a library went away or lacks a function.
fn guarded<T>(what: &'static str, ask: impl FnOnce() -> Result<T, NoCuda> + UnwindSafe) -> Result<T, NoCuda> {
    catch_unwind(ask).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let why = words.or(panic.downcast_ref::<&str>().copied()).unwrap_or("the binding gave up").to_owned();
        Err(NoCuda::Broken { what, why })
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_name_is_tried_once() {
        let NoCuda::NoLibrary { looked_for, .. } = missing(DRIVER, &["cuda", "nvcuda"]) else {
            panic!("another error")
        };
        assert!(
            looked_for.contains(&"libcuda.so".to_owned()) && looked_for.contains(&"libcuda.so.1".to_owned())
        );
        let mut names = looked_for.clone();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), looked_for.len(), "{looked_for:?}");
    }

    #[test]
    fn functions_that_are_missing_are_named() {
        assert_eq!(whole(DRIVER, SYMBOLS, |_| true), Ok(()));
        let said = whole(DRIVER, SYMBOLS, |name| !name.starts_with(b"cuDeviceGetU")).unwrap_err().to_string();
        assert_eq!(said, "no CUDA driver found that can be used: the library here has no cuDeviceGetUuid_v2");
    }

    /// What is called of the driver by its own name, in all files of the back end.
    fn called() -> Vec<String> {
        let mut names = Vec::new();
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(path).unwrap();
                let calls = text.split("sys::cu").skip(1).filter_map(|rest| {
                    let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
                    let is_call =
                        rest[end..].starts_with('(') && rest.starts_with(|c: char| c.is_ascii_uppercase());
                    is_call.then(|| format!("cu{}", &rest[..end]))
                });
                names.extend(calls);
            }
        }
        names
    }

    #[test]
    fn nothing_is_called_that_was_not_looked_for() {
        /// Of younger drivers: who calls them asks first.
        const ASKED: [&str; 4] =
            ["cuModuleGetFunctionCount", "cuModuleEnumerateFunctions", "cuFuncLoad", "cuFuncGetParamInfo"];
        let called = called();
        assert!(called.iter().any(|name| name == "cuDriverGetVersion"), "{called:?}");
        let unknown: Vec<&String> = called
            .iter()
            .filter(|name| !SYMBOLS.contains(&name.as_str()) && !ASKED.contains(&name.as_str()))
            .collect();
        assert!(unknown.is_empty(), "to be added to SYMBOLS: {unknown:?}");
    }

    #[test]
    fn panics_of_the_binding_become_errors() {
        let error =
            guarded::<()>("NVRTC", || std::panic::resume_unwind(Box::new("Missing symbol x".to_owned())));
        let said = error.unwrap_err().to_string();
        assert_eq!(said, "no NVRTC found that can be used: Missing symbol x");
    }

    #[test]
    fn nccls_numbers_are_read() {
        assert_eq!(nccl_version(22203), "2.22.3");
        assert_eq!(nccl_version(23005), "2.30.5");
    }
}
