//! Compilation of kernel sources with NVRTC. Each source is compiled once per architecture in a
//! process.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use cudarc::nvrtc::sys;
use mpmd_base::block::{Mutex, now, since};

use super::calls::{self, CallStatus, static_text};
use super::error::CudaError;
use super::library::NVRTC;
use crate::cuda::source::Source;
use crate::cuda::source::SourceKind;

/// A device's architecture: its compute capability as `major * 10 + minor`.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct Architecture(pub(super) u32);

impl Architecture {
    pub(super) fn new(major: u32, minor: u32) -> Self {
        Self(major * 10 + minor)
    }

    pub(super) fn major(self) -> u32 {
        self.0 / 10
    }
}

/// A compiled kernel source that the driver can load.
#[derive(Clone, Debug)]
pub(super) struct Image {
    /// The code. A zero byte ends it, which the driver requires for text.
    bytes: Arc<[u8]>,
    binary: bool,
}

impl Image {
    fn new(mut bytes: Vec<u8>, binary: bool) -> Self {
        if bytes.last() != Some(&0) {
            bytes.push(0);
        }
        Self {
            bytes: bytes.into(),
            binary,
        }
    }

    /// Wraps PTX text.
    pub(super) fn of_text(text: &str) -> Self {
        Self::new(text.into(), false)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns true for machine code of one architecture, and false for PTX.
    pub(super) fn is_binary(&self) -> bool {
        self.binary
    }
}

/// The form of compiled code.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum ImageForm {
    /// CUBIN: machine code for one architecture.
    Binary,
    /// PTX, for one architecture and later ones. The driver compiles it to machine code.
    Assembly,
}

/// Returns the image of a source for an architecture. Compiles the source, unless this process has
/// compiled it before. Waits if another thread is compiling it.
///
/// # Errors
///
/// If NVRTC is missing. If the source does not compile; the error has NVRTC's log.
pub(super) fn image(
    source: &'static Source,
    architecture: Architecture,
) -> Result<Image, CudaError> {
    let known = known()?;
    if known.is_empty() || known.contains(&architecture) {
        return in_process(source, architecture, ImageForm::Binary);
    }

    // The device is newer than NVRTC: the driver compiles PTX for the newest architecture that
    // NVRTC knows.
    assembly(source, architecture)
}

/// Returns the image of a source as PTX, which the driver compiles further. The PTX is for the
/// newest architecture that NVRTC knows and that is not newer than `architecture`. Compiles the
/// source, unless this process has compiled it before.
///
/// # Errors
///
/// If NVRTC is missing, or the source does not compile.
pub(super) fn assembly(
    source: &'static Source,
    architecture: Architecture,
) -> Result<Image, CudaError> {
    let newest = known()?
        .iter()
        .filter(|known| **known <= architecture)
        .max();
    in_process(
        source,
        newest.copied().unwrap_or(architecture),
        ImageForm::Assembly,
    )
}

/// The images of this process, including images that are still being compiled.
type Images = HashMap<ImageKey, Arc<OnceLock<Result<Image, CudaError>>>>;

#[derive(Eq, Hash, PartialEq)]
struct ImageKey {
    /// The address of the source.
    source: usize,
    architecture: Architecture,
    form: ImageForm,
}

fn in_process(
    source: &'static Source,
    architecture: Architecture,
    form: ImageForm,
) -> Result<Image, CudaError> {
    static IMAGES: Mutex<Option<Images>> = Mutex::new(None);
    let key = ImageKey {
        source: std::ptr::from_ref(source).addr(),
        architecture,
        form,
    };

    let compiled = IMAGES
        .lock()
        .get_or_insert_default()
        .entry(key)
        .or_default()
        .clone();

    compiled
        .get_or_init(|| new(source, architecture, form))
        .clone()
}

fn new(source: &Source, architecture: Architecture, form: ImageForm) -> Result<Image, CudaError> {
    let begin = now();
    let bytes = compile(source, &options(source, architecture, form), form)?;
    tracing::debug!(source = source.name(), took = ?since(begin), "compiled");
    Ok(Image::new(bytes, form == ImageForm::Binary))
}

fn options(source: &Source, architecture: Architecture, form: ImageForm) -> Vec<String> {
    let what = match form {
        ImageForm::Binary => "sm",
        ImageForm::Assembly => "compute",
    };
    let mut options = vec![
        format!("--gpu-architecture={what}_{}", architecture.0),
        "--std=c++17".to_owned(),
        // Used by profilers and compute-sanitizer; free at run time.
        "--generate-line-info".to_owned(),
    ];

    if source.kind == (SourceKind::Cuda { exact: true }) {
        options.push("--fmad=false".to_owned());
    }
    options.extend(headers().map(|folder| format!("--include-path={}", folder.display())));
    options
}

/// Returns the CUDA toolkit's folder `include`, if `CUDA_HOME` or `CUDA_PATH` names a toolkit that
/// has it. Sources may include its headers, such as `cuda_fp16.h`.
fn headers() -> Option<PathBuf> {
    let home = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .find_map(std::env::var_os)?;
    let folder = PathBuf::from(home).join("include");
    folder.is_dir().then_some(folder)
}

/// Loads NVRTC, and returns the architectures that it supports. The list is empty if NVRTC does not
/// report them.
fn known() -> Result<&'static [Architecture], CudaError> {
    static KNOWN: OnceLock<Result<Vec<Architecture>, CudaError>> = OnceLock::new();
    let known = KNOWN.get_or_init(|| {
        const DOING: &str = "compiling for a CUDA device";
        super::driver::nvrtc().map_err(|error| CudaError::new(DOING, "", error.to_string()))?;
        Ok(architectures())
    });
    known.as_deref().map_err(CudaError::clone)
}

fn architectures() -> Vec<Architecture> {
    let asked = ["nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs"];
    if !asked.into_iter().all(|symbol| NVRTC.has(symbol)) {
        return Vec::new();
    }

    let mut count = 0;
    // SAFETY: NVRTC has both functions; there is room for the number, and for as many as it says.
    let known = unsafe {
        if !calls::nvrtcGetNumSupportedArchs(&raw mut count).is_success() {
            return Vec::new();
        }
        let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
        if !calls::nvrtcGetSupportedArchs(known.as_mut_ptr()).is_success() {
            return Vec::new();
        }
        known
    };

    known
        .into_iter()
        .filter_map(|number| u32::try_from(number).ok().map(Architecture))
        .collect()
}

/// An NVRTC program, destroyed when dropped.
struct NvrtcProgram(sys::nvrtcProgram);

impl Drop for NvrtcProgram {
    fn drop(&mut self) {
        // SAFETY: created in `compile`, destroyed once.
        let _ = unsafe { calls::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn compile(source: &Source, options: &[String], form: ImageForm) -> Result<Vec<u8>, CudaError> {
    code(source, &compiled(source, options)?, form)
}

fn compiled(source: &Source, options: &[String]) -> Result<NvrtcProgram, CudaError> {
    let text = c_string(source, source.text())?;
    let name = c_string(source, source.name())?;
    let options = options
        .iter()
        .map(|option| c_string(source, option))
        .collect::<Result<Vec<_>, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

    let mut program = std::ptr::null_mut();
    // SAFETY: text and name end with zeros, there are no headers, and there is room for the
    // program.
    let created = unsafe {
        calls::nvrtcCreateProgram(
            &raw mut program,
            text.as_ptr(),
            name.as_ptr(),
            0,
            std::ptr::null(),
            std::ptr::null(),
        )
    };
    check(source, created)?;

    let program = NvrtcProgram(program);
    // SAFETY: the program is alive. There are `options.len()` options, each of which ends with a
    // zero.
    let compiled =
        unsafe { calls::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    check(source, compiled).map_err(|error| error.with_log(&log(&program)))?;

    Ok(program)
}

/// Returns the compiled code of a program in the requested form.
fn code(source: &Source, program: &NvrtcProgram, form: ImageForm) -> Result<Vec<u8>, CudaError> {
    let mut size = 0;
    // SAFETY: the program is alive and compiled; there is room for the number, and for as many
    // bytes as it says.
    unsafe {
        match form {
            ImageForm::Binary => {
                check(source, calls::nvrtcGetCUBINSize(program.0, &raw mut size))?;
                let mut bytes = vec![0u8; size];
                check(
                    source,
                    calls::nvrtcGetCUBIN(program.0, bytes.as_mut_ptr().cast()),
                )?;
                Ok(bytes)
            }
            ImageForm::Assembly => {
                check(source, calls::nvrtcGetPTXSize(program.0, &raw mut size))?;
                let mut bytes = vec![0u8; size];
                check(
                    source,
                    calls::nvrtcGetPTX(program.0, bytes.as_mut_ptr().cast()),
                )?;
                Ok(bytes)
            }
        }
    }
}

/// Returns NVRTC's log of a compilation, successful or not. The log is empty if NVRTC provides
/// none.
fn log(program: &NvrtcProgram) -> String {
    let mut size = 0;
    // SAFETY: the program is alive; there is room for the number, and for as many bytes as it says.
    let bytes = unsafe {
        if !calls::nvrtcGetProgramLogSize(program.0, &raw mut size).is_success() {
            return String::new();
        }
        let mut bytes = vec![0u8; size];
        if size == 0
            || !calls::nvrtcGetProgramLog(program.0, bytes.as_mut_ptr().cast()).is_success()
        {
            return String::new();
        }
        bytes
    };

    let said = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(said).trim_end().to_owned()
}

fn c_string(source: &Source, text: &str) -> Result<CString, CudaError> {
    CString::new(text).map_err(|_| {
        CudaError::new(
            format!("compiling {}", source.name()),
            "",
            "the source, its name or an option contains a zero byte",
        )
    })
}

fn check(source: &Source, answer: CallStatus) -> Result<(), CudaError> {
    if answer.is_success() {
        return Ok(());
    }
    // SAFETY: NVRTC has a static text for each status, and one for numbers that are none.
    let name = unsafe { static_text(calls::nvrtcGetErrorString(answer)) };

    let doing = format!("compiling {}", source.name());
    let number = format!("NVRTC error {}", answer.0);
    Err(CudaError::new(
        doing,
        name.unwrap_or_else(|| number.clone()),
        number,
    ))
}

#[cfg(test)]
mod tests;
