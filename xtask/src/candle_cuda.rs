//! `cargo xtask candle-cuda`: candle with its feature `cuda`, which links CUDA's libraries.
//!
//! Without a toolkit it is built with the compiler `nvcc` of the tests' driver in software, and its
//! tests run on that driver. With `--real` it is built with the toolkit of this machine. Such a
//! program starts only where CUDA's libraries are, so it has a target folder of its own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::commands::{cargo_in, run, target};

/// Names of CUDA's libraries: those that programs are linked with, and those that this project
/// loads.
pub(crate) const LIBRARIES: [&str; 11] = [
    "libcuda.so",
    "libcublas.so",
    "libcublasLt.so",
    "libcurand.so",
    "libcudart.so",
    "libnvrtc.so",
    "libcuda.so.1",
    "libnvrtc.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcurand.so.10",
];

/// File name of the driver in software, as cargo builds it.
const DRIVER: &str = "libsoftcuda_driver.so";

/// The compute capability of the driver in software.
const CAPABILITY: &str = "80";

/// Runs the command. `arguments` are `--real`, or the arguments of the tests.
///
/// # Errors
///
/// If a build or a test fails, or `--real` finds no toolkit.
pub(crate) fn candle_cuda(root: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let folder = target()?.join("candle-cuda");
    match arguments {
        ["--real"] => real(root, &folder),
        tests => software(root, &folder, tests),
    }
}

/// Returns the folder in which the driver in software has the names of CUDA's libraries.
///
/// # Errors
///
/// If cargo's target folder is not known.
pub(crate) fn toolkit() -> anyhow::Result<PathBuf> {
    Ok(target()?.join("candle-cuda/toolkit"))
}

/// Prepares `command` to build candle for CUDA. With `software` it uses the driver in software,
/// else the toolkit of this machine. The build has its own target folder.
///
/// # Errors
///
/// If the driver cannot be built, or there is no toolkit.
pub(crate) fn prepare(root: &Path, command: &mut Command, software: bool) -> anyhow::Result<()> {
    let folder = target()?.join("candle-cuda");
    // Tests are listed on it in either case.
    build_toolkit(root, &folder)?;
    match software {
        true => by_software(&folder, command),
        false => by_toolkit(&folder, command),
    }
}

/// Builds the driver in software, and links it under the names of CUDA's libraries and compiler.
fn build_toolkit(root: &Path, folder: &Path) -> anyhow::Result<()> {
    let mut command = cargo_in(root, &["build", "--package", "softcuda-driver"]);
    run(command.env("CARGO_TARGET_DIR", folder))?;
    let programs = folder.join("debug");
    let toolkit = folder.join("toolkit");
    fs::create_dir_all(&toolkit).context("making a folder for the driver")?;

    let mut links = vec![("nvcc", programs.join("nvcc"))];
    links.extend(LIBRARIES.map(|name| (name, programs.join("deps").join(DRIVER))));
    for (name, file) in links {
        let link = toolkit.join(name);
        // The old link may be of a folder that was moved.
        let _ = fs::remove_file(&link);
        symlink(&file, &link).with_context(|| format!("linking {}", link.display()))?;
    }
    Ok(())
}

/// Sets the environment of `command`, which builds candle and then starts the built programs. Both
/// use the driver in software, from the toolkit in `folder`.
fn by_software(folder: &Path, command: &mut Command) -> anyhow::Result<()> {
    let toolkit = folder.join("toolkit");
    command
        .env("CARGO_TARGET_DIR", folder)
        .env("PATH", first("PATH", &toolkit)?);
    command
        .env("LIBRARY_PATH", &toolkit)
        .env("CUDA_COMPUTE_CAP", CAPABILITY);
    command.env("LD_LIBRARY_PATH", first("LD_LIBRARY_PATH", &toolkit)?);
    Ok(())
}

fn software(root: &Path, folder: &Path, tests: &[&str]) -> anyhow::Result<()> {
    build_toolkit(root, folder)?;
    let packages = ["--package", "mpmd-candle", "--package", "mpmd-models"];
    let features = ["--features", "mpmd-candle/cuda,mpmd-models/candle-cuda"];
    let mut command = cargo_in(root, &[&["test"][..], &packages, &features].concat());
    if tests.is_empty() {
        command.args(["--test", "cuda"]);
    }
    by_software(folder, &mut command)?;
    run(command.args(tests))
}

fn real(root: &Path, folder: &Path) -> anyhow::Result<()> {
    let mut command = cargo_in(
        root,
        &["build", "--profile", "gpu", "--features", "candle-cuda"],
    );
    command.args(["--package", "mpmd-examples", "--bin", "train_gpt"]);
    by_toolkit(folder, &mut command)?;
    run(&mut command)?;

    let program = folder
        .with_file_name("candle-cuda-real")
        .join("gpu/train_gpt");
    let bytes = fs::metadata(&program)
        .context("looking at the program")?
        .len();
    println!("{}: {:.1} MB", program.display(), bytes as f64 / 1e6);
    Ok(())
}

/// Sets the environment of a command that builds candle with the toolkit of this machine.
fn by_toolkit(folder: &Path, command: &mut Command) -> anyhow::Result<()> {
    command.env(
        "CARGO_TARGET_DIR",
        folder.with_file_name("candle-cuda-real"),
    );

    if let Some(home) = std::env::var_os("CUDA_HOME").map(PathBuf::from) {
        command.env("PATH", first("PATH", &home.join("bin"))?);
        command.env("LIBRARY_PATH", first("LIBRARY_PATH", &home.join("lib64"))?);
    } else if !crate::commands::answers("nvcc", &["--version"]) {
        bail!("this build needs CUDA's toolkit: set CUDA_HOME, or put nvcc on PATH");
    }

    if std::env::var_os("CUDA_COMPUTE_CAP").is_none()
        && Command::new("nvidia-smi").output().is_err()
    {
        bail!("set CUDA_COMPUTE_CAP, for example to 90: there is no nvidia-smi that tells it");
    }
    Ok(())
}

/// Returns the value of a search path variable, with `folder` in front.
fn first(variable: &str, folder: &Path) -> anyhow::Result<std::ffi::OsString> {
    let rest = std::env::var_os(variable)
        .filter(|rest| !rest.is_empty())
        .unwrap_or_default();
    let rest = std::env::split_paths(&rest).collect::<Vec<_>>();
    std::env::join_paths(std::iter::once(folder.to_owned()).chain(rest))
        .with_context(|| format!("the path of {variable}"))
}
