//! Finds the CUDA driver and its libraries. The driver is asked once in a process; the versions of
//! the other libraries at every call.

use std::sync::OnceLock;

use cudarc::driver::sys;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::super::calls::{self, DriverError};
use super::super::library;
use super::super::no_cuda::{CudaVersion, NoCuda, OLDEST};
use super::{Attributes, Driver, GpuInfo, Uuid};

/// Size in bytes of the buffer for a device's name.
const NAME_BYTES: usize = 256;

/// Returns facts about the CUDA driver. The first call in a process initialises the driver, which
/// may take seconds; later calls return the same result. Never panics.
///
/// # Errors
///
/// If there is no driver, it does not work, or it shows no device.
pub fn found() -> Result<&'static Driver, NoCuda> {
    static DRIVER: OnceLock<Result<Driver, NoCuda>> = OnceLock::new();
    DRIVER.get_or_init(look).as_ref().map_err(NoCuda::clone)
}

fn look() -> Result<Driver, NoCuda> {
    library::DRIVER.check(calls::DRIVER)?;

    let variable = |name| std::env::var_os(name).map(library::text);
    let no_gpu = || NoCuda::NoGpu {
        visible: variable("CUDA_VISIBLE_DEVICES"),
    };
    // SAFETY: its only argument is a number of flags, which must be 0.
    unsafe { calls::cuInit(0) }
        .result()
        .map_err(|error| match error {
            error if error.is(sys::CUresult::CUDA_ERROR_NO_DEVICE) => no_gpu(),
            error if error.is(sys::CUresult::CUDA_ERROR_STUB_LIBRARY) => NoCuda::Stub {
                library_path: variable("LD_LIBRARY_PATH"),
            },
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

    let gpus: Vec<GpuInfo> = (0..count).map(gpu).collect::<Result<_, _>>()?;
    if gpus.is_empty() {
        return Err(no_gpu());
    }
    Ok(Driver { version, gpus })
}

fn driver_version() -> Result<CudaVersion, DriverError> {
    let mut number = 0;
    // SAFETY: it writes one number, for which there is room.
    unsafe { calls::cuDriverGetVersion(&raw mut number) }.result()?;
    Ok(CudaVersion::of_number(u32::try_from(number).unwrap_or(0)))
}

fn gpu(ordinal: i32) -> Result<GpuInfo, NoCuda> {
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

    let capability = CudaVersion {
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
    got.result()
        .map_err(|error| refused("cuDeviceGetUuid_v2", error))?;

    Ok(GpuInfo {
        ordinal: ordinal.unsigned_abs(),
        name: String::from_utf8_lossy(name).into_owned(),
        uuid: Uuid(uuid.bytes.map(|byte| byte.to_ne_bytes()[0])),
        memory_bytes: memory_bytes as u64,
        capability,
        attributes,
    })
}

/// Creates the error of a failed driver call, with the driver's name and description of the error.
pub(crate) fn refused(call: &'static str, error: DriverError) -> NoCuda {
    NoCuda::Refused {
        library: library::DRIVER.name,
        call,
        name: error.name(),
        text: error.text(),
    }
}

/// Returns the version of NVRTC, the compiler of kernels, as text such as `12.8`. Loads the library
/// if it is not loaded yet.
///
/// # Errors
///
/// If NVRTC cannot be loaded or does not work.
pub fn nvrtc() -> Result<String, NoCuda> {
    library::NVRTC.check(calls::NVRTC)?;
    let mut major = 0;
    let mut minor = 0;
    // SAFETY: it writes two numbers, for which there is room.
    match unsafe { calls::nvrtcVersion(&raw mut major, &raw mut minor) } {
        answer if answer.is_success() => Ok(format!("{major}.{minor}")),
        answer => Err(library::NVRTC.refused("nvrtcVersion", answer.0)),
    }
}

/// Returns the version of cuBLAS, the library for matrix products, as text such as `12.8.4`. If the
/// version is unknown, the text says so. Loads the library if it is not loaded yet.
///
/// # Errors
///
/// If cuBLAS cannot be loaded or does not work.
pub fn cublas() -> Result<String, NoCuda> {
    use cudarc::cublas::sys::libraryPropertyType as Property;
    library::CUBLAS.check(calls::CUBLAS)?;
    if !library::CUBLAS.has("cublasGetProperty") {
        return Ok("of unknown version".to_owned());
    }

    let number = |property: Property| {
        let mut number = 0;
        // SAFETY: it writes one number, for which there is room. It needs neither handle nor
        // context.
        match unsafe { calls::cublasGetProperty(property, &raw mut number) } {
            answer if answer.is_success() => Ok(number),
            answer => Err(library::CUBLAS.refused("cublasGetProperty", answer.0)),
        }
    };

    Ok(format!(
        "{}.{}.{}",
        number(Property::MAJOR_VERSION)?,
        number(Property::MINOR_VERSION)?,
        number(Property::PATCH_LEVEL)?
    ))
}

/// Returns the version of NCCL, the library for collectives, as text such as `2.22.3`. Loads the
/// library if it is not loaded yet.
///
/// # Errors
///
/// If NCCL cannot be loaded or does not work.
pub fn nccl() -> Result<String, NoCuda> {
    super::super::nccl::library::version().map(nccl_version)
}

/// Formats NCCL's number of a version, encoded as by NCCL_VERSION since 2.9: 22203 is 2.22.3.
fn nccl_version(number: i32) -> String {
    format!(
        "{}.{}.{}",
        number / 10_000,
        number / 100 % 100,
        number % 100
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccls_numbers_are_read() {
        assert_eq!(nccl_version(22203), "2.22.3");
        assert_eq!(nccl_version(23005), "2.30.5");
    }
}
