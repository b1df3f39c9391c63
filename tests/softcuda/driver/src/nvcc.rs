//! The compiler `nvcc`, as far as build scripts of candle's kernels call it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::compile::{Program, compile};

/// Headers of the host and of CUDA that sources may include. Each has the text of `nvcc.h`.
const HOST_HEADERS: [&str; 5] = ["stdint.h", "cmath", "math.h", "cuda.h", "cuda/std/limits"];
const HOST: &str = include_str!("shim/nvcc.h");

/// Names of sources that use instructions which this driver lacks, for products of quantized
/// numbers. The module of such a source has no kernels.
const WITHOUT_KERNELS: [&str; 1] = ["quantized.cu"];

/// Runs the compiler with the arguments of a command line.
///
/// - `--version`: prints the version of CUDA that this driver imitates.
/// - `--ptx --output-directory F source.cu`: compiles the source to a module of this driver.
/// - `-c -o object source.cu`: writes an object without functions.
/// - `--lib -o archive objects`: puts objects into an archive.
///
/// # Errors
///
/// The message of the compiler, or what is missing from the arguments.
pub fn nvcc(arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let arguments: Vec<String> = arguments.collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let after = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        let value = at.and_then(|at| arguments.get(at + 1)).map(PathBuf::from);
        value.ok_or_else(|| format!("nvcc in software: {name} with a path is missing"))
    };
    let files = |ending: &str| {
        let files = arguments
            .iter()
            .filter(|argument| argument.ends_with(ending));
        files.map(PathBuf::from).collect::<Vec<_>>()
    };

    if has("--version") {
        let name = "nvcc: NVIDIA (R) Cuda compiler driver";
        println!("{name}\nin software\nfor tests\nCuda compilation tools, release 13.0, V13.0.0");
        return Ok(());
    }
    if has("--lib") {
        let objects = files(".o")
            .into_iter()
            .filter(|path| *path != after("-o").unwrap_or_default());
        return run(Command::new("ar")
            .arg("crs")
            .arg(after("-o")?)
            .args(objects));
    }

    let sources = files(".cu");
    let [source] = &sources[..] else {
        return Err("nvcc in software: expected one source".into());
    };

    if has("-c") {
        let args = ["-x", "c", "-c", "/dev/null", "-o"];
        return run(Command::new("cc").args(args).arg(after("-o")?));
    }

    let name = source
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let module = compile(&program(source, name.clone(), &arguments)?)?;
    let made = after("--output-directory")?.join(Path::new(&name).with_extension("ptx"));
    std::fs::write(&made, &module[..]).map_err(|why| format!("{}: {why}", made.display()))
}

fn program(source: &Path, name: String, arguments: &[String]) -> Result<Program, String> {
    let at = std::path::absolute(source).map_err(|why| why.to_string())?;
    let text = if WITHOUT_KERNELS.contains(&&name[..]) {
        String::new()
    } else {
        std::fs::read_to_string(source).map_err(|why| format!("{}: {why}", source.display()))?
    };

    // The architecture is given as `-gencode=arch=compute_75,code=sm_75`.
    let capability = arguments
        .iter()
        .find_map(|argument| argument.split("compute_").nth(1));
    let digits: String = capability
        .unwrap_or("75")
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();

    let mut options = vec![
        format!("-D__CUDA_ARCH__={digits}0"),
        "-D__CUDACC_VER_MAJOR__=13".into(),
    ];
    options.extend(["-D__CUDACC_VER_MINOR__=0", "-include", HOST_HEADERS[0]].map(str::to_owned));
    options.extend(at.parent().map(|folder| format!("-I{}", folder.display())));

    let host = HOST_HEADERS
        .iter()
        .map(|name| ((*name).to_owned(), HOST.to_owned()));
    Ok(Program {
        source: text,
        name,
        headers: host.collect(),
        options,
        expressions: Vec::new(),
    })
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?}: {status}")),
        Err(why) => Err(format!("{command:?}: {why}")),
    }
}
