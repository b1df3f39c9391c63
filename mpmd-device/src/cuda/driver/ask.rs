//! Finds the CUDA driver and its libraries. The driver is asked once in a process; the versions of
//! the other libraries at every call.

use std::panic::{UnwindSafe, catch_unwind};
use std::sync::OnceLock;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::super::calls::{self, Answer, DriverError};
use super::{Attributes, Driver, Gpu, NoCuda, OLDEST, Uuid, Version};

/// The driver's name in messages.
const DRIVER: &str = "CUDA driver";
/// Room for a device's name, in bytes.
const NAME_BYTES: usize = 256;

/// Returns the CUDA driver. Only the first call in a process starts and asks it; later calls return
/// the same result.
pub(super) fn driver() -> Result<&'static Driver, NoCuda> {
    static DRIVER: OnceLock<Result<Driver, NoCuda>> = OnceLock::new();
    let found = DRIVER.get_or_init(|| guarded(self::DRIVER, look));
    found.as_ref().map_err(NoCuda::clone)
}

fn look() -> Result<Driver, NoCuda> {
    // SAFETY: loading a library runs its initialisers. Only the driver has these names, and its
    // initialisers are made to run in any program. A user able to put another file of such a name
    // into the loader's path controls the process anyway.
    if !unsafe { sys::is_culib_present() } {
        return Err(missing(DRIVER, &["cuda", "nvcuda"]));
    }
    // SAFETY: as above; it was there a moment ago. Names are only looked up: nothing is called
    // through this type.
    whole(DRIVER, calls::DRIVER, |name| unsafe {
        sys::culib().get::<unsafe extern "C" fn()>(name).is_ok()
    })?;
    let no_gpu = || NoCuda::NoGpu { visible: variable("CUDA_VISIBLE_DEVICES") };
    // SAFETY: its only argument is a number of flags, which must be 0.
    unsafe { calls::cuInit(0) }.result().map_err(|error| match error {
        error if error.is(sys::CUresult::CUDA_ERROR_NO_DEVICE) => no_gpu(),
        error => refused("cuInit", error),
    })?;
    let version = driver_version().map_err(|error| refused("cuDriverGetVersion", error))?;
    if version < OLDEST {
        return Err(NoCuda::TooOld { version });
    }
    let mut count = 0;
    // SAFETY: it writes one number, for which there is room.
    unsafe { calls::cuDeviceGetCount(&raw mut count) }
        .result()
        .map_err(|error| refused("cuDeviceGetCount", error))?;
    let gpus: Vec<Gpu> = (0..count).map(gpu).collect::<Result<_, _>>()?;
    if gpus.is_empty() {
        return Err(no_gpu());
    }
    Ok(Driver { version, gpus })
}

fn driver_version() -> Result<Version, DriverError> {
    let mut number = 0;
    // SAFETY: it writes one number, for which there is room.
    unsafe { calls::cuDriverGetVersion(&raw mut number) }.result()?;
    Ok(Version::of_number(u32::try_from(number).unwrap_or(0)))
}

fn gpu(ordinal: i32) -> Result<Gpu, NoCuda> {
    let mut device = 0;
    // SAFETY: it writes one device, for which there is room.
    unsafe { calls::cuDeviceGet(&raw mut device, ordinal) }
        .result()
        .map_err(|error| refused("cuDeviceGet", error))?;
    let number = |attribute: Attribute| {
        let mut number = 0;
        // SAFETY: the device comes from `cuDeviceGet`, and there is room for the number.
        match unsafe { calls::cuDeviceGetAttribute(&raw mut number, attribute, device) }.result() {
            Ok(()) => Ok(u32::try_from(number).unwrap_or(0)),
            // An attribute newer than the driver: the driver does not support the feature.
            Err(error) if error.is(sys::CUresult::CUDA_ERROR_INVALID_VALUE) => Ok(0),
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
        shared_memory_bytes: number(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
    };
    let capability = Version {
        major: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    };
    let mut memory_bytes = 0;
    // SAFETY: the device comes from `cuDeviceGet`, and there is room for the number.
    unsafe { calls::cuDeviceTotalMem_v2(&raw mut memory_bytes, device) }
        .result()
        .map_err(|error| refused("cuDeviceTotalMem", error))?;
    let mut name = [0u8; NAME_BYTES];
    // SAFETY: the device comes from `cuDeviceGet`, and there is room for the number of bytes that
    // is passed.
    unsafe { calls::cuDeviceGetName(name.as_mut_ptr().cast(), NAME_BYTES as i32, device) }
        .result()
        .map_err(|error| refused("cuDeviceGetName", error))?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device comes from `cuDeviceGet`, and there is room for the number. This version
    // of the call distinguishes the parts of a divided device.
    let got = unsafe { calls::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    got.result().map_err(|error| refused("cuDeviceGetUuid_v2", error))?;
    Ok(Gpu {
        ordinal: ordinal.unsigned_abs(),
        name: String::from_utf8_lossy(name).into_owned(),
        uuid: Uuid(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])),
        memory_bytes: memory_bytes as u64,
        capability,
        attributes,
    })
}

/// Creates an error for a failed driver call, with the driver's name and description of the error.
pub(super) fn refused(call: &'static str, error: DriverError) -> NoCuda {
    NoCuda::Refused { library: DRIVER, call, name: error.name(), text: error.text() }
}

/// Returns the version of NVRTC as `major.minor`. Loads the library if it is not loaded yet.
pub(super) fn nvrtc() -> Result<String, NoCuda> {
    use cudarc::nvrtc::sys;
    const WHAT: &str = "NVRTC";
    guarded(WHAT, || {
        // SAFETY: as for the driver: a library of NVIDIA's that is made to be loaded by any
        // program.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing(WHAT, &["nvrtc"]));
        }
        // SAFETY: as for the driver.
        whole(WHAT, &["nvrtcVersion"], |name| unsafe {
            sys::culib().get::<unsafe extern "C" fn()>(name).is_ok()
        })?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers, for which there is room.
        match unsafe { calls::nvrtcVersion(&raw mut major, &raw mut minor) } {
            answer if answer.is_success() => Ok(format!("{major}.{minor}")),
            answer => Err(status(WHAT, "nvrtcVersion", answer)),
        }
    })
}

/// Returns the version of cuBLAS as `major.minor.patch`, or a text that it is unknown. Loads the
/// library if it is not loaded yet.
pub(super) fn cublas() -> Result<String, NoCuda> {
    use cudarc::cublas::sys::{self, libraryPropertyType as Property};
    const WHAT: &str = "cuBLAS";
    guarded(WHAT, || {
        // SAFETY: as for the driver: a library of NVIDIA's that is made to be loaded by any
        // program.
        if !unsafe { sys::is_culib_present() } {
            return Err(missing(WHAT, &["cublas"]));
        }
        // SAFETY: as for the driver.
        let has = |name: &[u8]| unsafe { sys::culib().get::<unsafe extern "C" fn()>(name).is_ok() };
        whole(WHAT, &["cublasCreate_v2", "cublasGemmEx", "cublasGemmStridedBatchedEx"], has)?;
        if !has(b"cublasGetProperty") {
            return Ok("of unknown version".to_owned());
        }
        let number = |property: Property| {
            let mut number = 0;
            // SAFETY: it writes one number, for which there is room. It needs neither handle nor
            // context.
            match unsafe { calls::cublasGetProperty(property, &raw mut number) } {
                answer if answer.is_success() => Ok(number),
                answer => Err(status(WHAT, "cublasGetProperty", answer)),
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

/// Returns the version of NCCL as `major.minor.patch`. Loads the library if it is not loaded yet.
pub(super) fn nccl() -> Result<String, NoCuda> {
    use super::NCCL as LIBRARY;
    use crate::cuda::{NCCL_NAMES, NCCL_SYMBOLS, nccl_library, nccl_version_of};
    let Some(loaded) = nccl_library() else {
        let looked_for = NCCL_NAMES.map(str::to_owned).to_vec();
        return Err(NoCuda::NoLibrary {
            library: LIBRARY,
            looked_for,
            library_path: variable("LD_LIBRARY_PATH"),
        });
    };
    // SAFETY: names are only looked up: nothing is called through this type.
    whole(LIBRARY, NCCL_SYMBOLS, |name| unsafe {
        loaded.get::<unsafe extern "C" fn()>(name).is_ok()
    })?;
    let number = nccl_version_of(loaded);
    number
        .map(nccl_version)
        .map_err(|error| NoCuda::Broken { library: LIBRARY, why: error.to_string() })
}

/// Formats NCCL's number for a version, encoded as in NCCL_VERSION since 2.9: 22203 is 2.22.3.
fn nccl_version(number: i32) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

fn status(library: &'static str, call: &'static str, answer: Answer) -> NoCuda {
    NoCuda::Refused {
        library,
        call,
        name: format!("error {}", answer.0),
        text: "no further details".to_owned(),
    }
}

/// Returns an error that lists those of the functions `names` that a library lacks, if any.
fn whole(library: &'static str, names: &[&str], has: impl Fn(&[u8]) -> bool) -> Result<(), NoCuda> {
    let lacking = names.iter().filter(|name| !has(name.as_bytes())).map(|name| (*name).to_owned());
    let symbols: Vec<String> = lacking.collect();
    if symbols.is_empty() { Ok(()) } else { Err(NoCuda::NoSymbols { library, symbols }) }
}

fn missing(library: &'static str, libraries: &[&str]) -> NoCuda {
    let names = libraries.iter().flat_map(|name| cudarc::get_lib_name_candidates(name));
    let mut looked_for: Vec<String> = Vec::new();
    for name in names {
        if !looked_for.contains(&name) {
            looked_for.push(name);
        }
    }
    NoCuda::NoLibrary { library, looked_for, library_path: variable("LD_LIBRARY_PATH") }
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Converts a panic of the binding to an error. The binding panics if a library has disappeared or
/// lacks a function.
fn guarded<T>(
    library: &'static str,
    ask: impl FnOnce() -> Result<T, NoCuda> + UnwindSafe,
) -> Result<T, NoCuda> {
    catch_unwind(ask).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let why = words
            .or(panic.downcast_ref::<&str>().copied())
            .unwrap_or("the binding gave up")
            .to_owned();
        Err(NoCuda::Broken { library, why })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_tried_once() {
        let NoCuda::NoLibrary { looked_for, .. } = missing(DRIVER, &["cuda", "nvcuda"]) else {
            panic!("another error")
        };
        assert!(
            looked_for.contains(&"libcuda.so".to_owned())
                && looked_for.contains(&"libcuda.so.1".to_owned())
        );
        let mut names = looked_for.clone();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), looked_for.len(), "{looked_for:?}");
    }

    #[test]
    fn functions_that_are_missing_are_named() {
        assert_eq!(whole(DRIVER, calls::DRIVER, |_| true), Ok(()));
        let said = whole(DRIVER, calls::DRIVER, |name| !name.starts_with(b"cuDeviceGetU"))
            .unwrap_err()
            .to_string();
        assert_eq!(
            said,
            "no CUDA driver found that can be used: the library here has no cuDeviceGetUuid_v2"
        );
    }

    #[test]
    fn panics_of_the_binding_become_errors() {
        let error = guarded::<()>("NVRTC", || {
            std::panic::resume_unwind(Box::new("Missing symbol x".to_owned()))
        });
        let said = error.unwrap_err().to_string();
        assert_eq!(said, "no NVRTC found that can be used: Missing symbol x");
    }

    #[test]
    fn nccls_numbers_are_read() {
        assert_eq!(nccl_version(22203), "2.22.3");
        assert_eq!(nccl_version(23005), "2.30.5");
    }
}
