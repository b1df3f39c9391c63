//! NVRTC: the functions that create and compile programs.

use std::ffi::{CString, c_char};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::compile::{Program, compile, version};
use crate::entry::{In, Out, Text, nvrtc};
use crate::error::{Code, Result};
use crate::faults::{First, first, meet};
use crate::handles::{Handle, Handles};
use crate::settings::CallKind;

static PROGRAMS: Handles<Mutex<State>> = Handles::new(6);

/// Result codes of NVRTC, which the functions of this file return.
const INVALID_INPUT: Code = Code(3);
const INVALID_PROGRAM: Code = Code(4);
const INVALID_OPTION: Code = Code(5);
const COMPILATION: Code = Code(6);
const NO_NAMES_AFTER: Code = Code(8);
const NO_LOWERED_BEFORE: Code = Code(9);
const NAME_NOT_VALID: Code = Code(10);

/// A program and the result of its last compilation.
#[derive(Default)]
struct State {
    program: Program,
    image: Option<Arc<Vec<u8>>>,
    /// True if the last compilation was for a real architecture (`sm_*`). Only then is there a
    /// CUBIN.
    real: bool,
    log: String,
    /// Template instances, as (requested expression, name in C). `nvrtcGetLoweredName` returns
    /// pointers to the names, so they live as long as the program.
    lowered: Vec<(String, CString)>,
}

fn program(handle: Handle) -> Result<Arc<Mutex<State>>> {
    PROGRAMS.get(handle).map_err(|_| INVALID_PROGRAM)
}

/// Translates NVRTC's options. Returns (options for the preprocessor, true if a real architecture
/// `sm_*` is named). Fails with a message for an unknown option.
fn options(given: &[String]) -> std::result::Result<(Vec<String>, bool), String> {
    /// Names of options that NVRTC knows and that change nothing here.
    const KNOWN: &[&str] = &[
        "use_fast_math",
        "fmad",
        "ftz",
        "prec-div",
        "prec-sqrt",
        "default-device",
        "device-debug",
        "lineinfo",
        "generate-line-info",
        "maxrregcount",
        "restrict",
        "disable-warnings",
        "extra-device-vectorization",
        "dopt",
        "minimal",
        "no-source-include",
        "builtin-initializer-list",
        "device-as-default-execution-space",
        "w",
        "G",
        "dw",
        "split-compile",
        "diag-suppress",
        "device-int128",
    ];

    let mut passed = Vec::new();
    let mut architecture = 520;
    let mut real = false;
    let mut given = given.iter();
    while let Some(option) = given.next() {
        let wrong = || format!("softcuda: unrecognized option {option}");
        let name = option.trim_start_matches('-');
        let split = |long: &str, short: &str| {
            let rest = name
                .strip_prefix(long)
                .or_else(|| name.strip_prefix(short))?;
            Some(rest.strip_prefix('=').unwrap_or(rest).to_owned())
        };
        let mut value = |found: String| {
            if found.is_empty() {
                given.next().cloned().ok_or_else(wrong)
            } else {
                Ok(found)
            }
        };

        if let Some(found) = split("gpu-architecture", "arch") {
            let found = value(found)?;
            real = found.starts_with("sm_");
            let number = found
                .strip_prefix("sm_")
                .or_else(|| found.strip_prefix("compute_"))
                .ok_or_else(wrong)?;
            let number = number.trim_end_matches(['a', 'f']);
            architecture = number
                .parse::<u32>()
                .ok()
                .filter(|at| *at >= 50)
                .ok_or_else(wrong)?
                * 10;
        } else if let Some(found) = split("std", "std") {
            if !["c++03", "c++11", "c++14", "c++17", "c++20"].contains(&value(found)?.as_str()) {
                return Err(wrong());
            }
        } else if let Some(found) = split("define-macro", "D") {
            passed.push(format!("-D{}", value(found)?));
        } else if let Some(found) = split("undefine-macro", "U") {
            passed.push(format!("-U{}", value(found)?));
        } else if let Some(found) = split("include-path", "I") {
            passed.push(format!("-I{}", value(found)?));
        } else if !KNOWN.contains(&name.split('=').next().unwrap_or(name)) {
            return Err(wrong());
        }
    }
    passed.push(format!("-D__CUDA_ARCH__={architecture}"));
    Ok((passed, real))
}

/// Returns the compiled image without a final zero, and true if it is for a real architecture.
/// Fails with `NVRTC_ERROR_INVALID_PROGRAM` if the handle is unknown or the program is not
/// compiled.
fn image(handle: Handle) -> Result<(Arc<Vec<u8>>, bool)> {
    let program = program(handle)?;
    let program = program.lock();
    program
        .image
        .clone()
        .map(|image| (image, program.real))
        .ok_or(INVALID_PROGRAM)
}

nvrtc! {
    /// Returns the version of NVRTC. The minor version depends on the C++ text that softcuda puts
    /// around kernels, and is none of a real NVRTC. So a cache that is keyed by version never mixes
    /// images of different versions of softcuda.
    fn nvrtcVersion(major: Out<i32>, minor: Out<i32>) {
        major.set(12)?;
        minor.set(1000 + (version() % 1_000_000) as i32)
    }
}

/// Supported architectures: ten times the major compute capability plus the minor one.
const ARCHITECTURES: [i32; 6] = [75, 80, 86, 89, 90, 100];

nvrtc! {
    /// Returns the number of supported architectures, the length that `nvrtcGetSupportedArchs`
    /// needs.
    fn nvrtcGetNumSupportedArchs(count: Out<i32>) {
        count.set(ARCHITECTURES.len() as i32)
    }
}

nvrtc! {
    /// Writes the supported architectures to an array, the oldest first.
    fn nvrtcGetSupportedArchs(all: Out<i32>) {
        all.set_all(ARCHITECTURES)
    }
}

nvrtc! {
    /// Creates a program from a source and `headers` headers (texts and names). Copies all texts;
    /// compiles nothing.
    fn nvrtcCreateProgram(
        handle: Out<Handle>,
        source: Text,
        name: Text,
        headers: i32,
        texts: In<*const c_char>,
        names: In<*const c_char>,
    ) {
        handle.required()?;

        let mut found = Vec::new();
        for at in 0..usize::try_from(headers).map_err(|_| INVALID_INPUT)? {
            found.push((Text::untyped(names.at(at)?).get()?, Text::untyped(texts.at(at)?).get()?));
        }

        let program = Program {
            source: source.get()?,
            name: name.get().unwrap_or_else(|_| "default_program".into()),
            headers: found,
            ..Program::default()
        };
        let state = State { program, ..State::default() };

        let mut made = 0;
        PROGRAMS.insert(|handle| {
            made = handle;
            Mutex::new(state)
        });
        handle.set(made)
    }
}

nvrtc! {
    /// Destroys a program. Its handle, and the names that it returned, become invalid.
    fn nvrtcDestroyProgram(handle: In<Handle>) {
        PROGRAMS.remove(handle.get()?).map(drop).map_err(|_| INVALID_PROGRAM)
    }
}

nvrtc! {
    /// Requests a kernel that is an instance of a template. Fails after the compilation.
    fn nvrtcAddNameExpression(handle: Handle, expression: Text) {
        let program = program(handle)?;
        let mut program = program.lock();
        if program.image.is_some() {
            return Err(NO_NAMES_AFTER);
        }
        program.program.expressions.push(expression.get()?);
        Ok(())
    }
}

nvrtc! {
    /// Compiles a program with `count` options and blocks until the compiler ends. The program's
    /// log then holds the compiler's messages, or nothing after a success.
    fn nvrtcCompileProgram(handle: Handle, count: i32, given: In<*const c_char>) {
        let program = program(handle)?;
        first(First::Compile);

        let mut program = program.lock();
        let mut texts = Vec::new();
        for at in 0..usize::try_from(count).map_err(|_| INVALID_INPUT)? {
            texts.push(Text::untyped(given.at(at)?).get()?);
        }
        let (options, real) = match options(&texts) {
            Ok(options) => options,
            Err(log) => {
                program.log = log;
                return Err(INVALID_OPTION);
            }
        };

        program.program.options = options;
        program.real = real;
        if meet(CallKind::Compile).is_err() {
            program.log = "softcuda: failed as the test requested".into();
            return Err(COMPILATION);
        }

        match compile(&program.program) {
            Ok(image) => {
                program.image = Some(image);
                program.log.clear();
                let named = program.program.expressions.iter().filter_map(|name| {
                    Some((name.clone(), CString::new(name.clone()).ok()?))
                });
                program.lowered = named.collect();
                Ok(())
            }
            Err(log) => {
                program.log = log;
                Err(COMPILATION)
            }
        }
    }
}

nvrtc! {
    /// Returns the length in bytes of the compiled program, including its final zero.
    fn nvrtcGetPTXSize(handle: Handle, size: Out<usize>) {
        size.set(image(handle)?.0.len() + 1)
    }
}

nvrtc! {
    /// Writes the compiled program with a final zero: a text, but not PTX. Fails if the program is
    /// not compiled.
    fn nvrtcGetPTX(handle: Handle, text: Out<u8>) {
        text.set_all(image(handle)?.0.iter().copied().chain([0]))
    }
}

nvrtc! {
    /// Returns the length in bytes of the program compiled for a real architecture, including its
    /// final zero. It is 0 if the program was compiled for a virtual one.
    fn nvrtcGetCUBINSize(handle: Handle, size: Out<usize>) {
        let (image, real) = image(handle)?;
        size.set(if real { image.len() + 1 } else { 0 })
    }
}

nvrtc! {
    /// Writes the program compiled for a real architecture: the same text as `nvrtcGetPTX`. Fails
    /// with `NVRTC_ERROR_INVALID_PROGRAM` if it was compiled for a virtual one.
    fn nvrtcGetCUBIN(handle: Handle, bytes: Out<u8>) {
        let (image, real) = image(handle)?;
        if !real {
            return Err(INVALID_PROGRAM);
        }
        bytes.set_all(image.iter().copied().chain([0]))
    }
}

nvrtc! {
    /// Returns the length in bytes of the last compilation's messages, including the final zero.
    fn nvrtcGetProgramLogSize(handle: Handle, size: Out<usize>) {
        size.set(program(handle)?.lock().log.len() + 1)
    }
}

nvrtc! {
    /// Writes the messages of the last compilation, with a final zero.
    fn nvrtcGetProgramLog(handle: Handle, text: Out<u8>) {
        text.set_all(program(handle)?.lock().log.bytes().chain([0]))
    }
}

nvrtc! {
    /// Returns the name under which a requested template instance is in the module: the expression
    /// itself. The name lives as long as the program. Fails before the compilation.
    fn nvrtcGetLoweredName(handle: Handle, expression: Text, name: Out<*const c_char>) {
        let program = program(handle)?;
        let program = program.lock();
        if program.image.is_none() {
            return Err(NO_LOWERED_BEFORE);
        }
        let expression = expression.get()?;
        let found =
            program.lowered.iter().find(|(asked, _)| *asked == expression).ok_or(NAME_NOT_VALID)?;
        name.set(found.1.as_ptr())
    }
}

/// Returns the name of an NVRTC code. The text is never freed.
#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(code: u32) -> *const c_char {
    let name = match code {
        0 => c"NVRTC_SUCCESS",
        1 => c"NVRTC_ERROR_OUT_OF_MEMORY",
        2 => c"NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        3 => c"NVRTC_ERROR_INVALID_INPUT",
        4 => c"NVRTC_ERROR_INVALID_PROGRAM",
        5 => c"NVRTC_ERROR_INVALID_OPTION",
        6 => c"NVRTC_ERROR_COMPILATION",
        7 => c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        8 => c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        9 => c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
        10 => c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        11 => c"NVRTC_ERROR_INTERNAL_ERROR",
        _ => c"NVRTC_ERROR unknown",
    };
    name.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::options;

    fn all(texts: &[&str]) -> std::result::Result<(Vec<String>, bool), String> {
        options(
            &texts
                .iter()
                .map(|text| (*text).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn options_are_read_as_nvrtc_does() {
        let (passed, real) = all(&[
            "--gpu-architecture=compute_80",
            "-DN=4",
            "--use_fast_math",
            "--fmad=false",
        ])
        .unwrap();
        assert_eq!(
            (passed, real),
            (
                vec!["-DN=4".to_owned(), "-D__CUDA_ARCH__=800".into()],
                false
            )
        );
        assert!(all(&["-arch", "sm_90a"]).unwrap().1);
        assert!(all(&["--optimize-a-lot"]).is_err());
        assert!(all(&["--gpu-architecture=gpu_80"]).is_err());
    }
}
