//! CUDA's libraries under all names and in all folders where programs look for them. The other
//! tests have them in `LD_LIBRARY_PATH`, under their newest names.

use std::fs;
use std::os::unix::fs::symlink;

use crate::common::watchdog;
use crate::cuda_kernels::{SAXPY, host, on_device};
use mpmd_core::cuda::{CUBLAS, Cuda, Gemm, Grid};
use mpmd_core::prelude::*;
use mpmd_device::cuda::{cublas, found, nccl, nvrtc};

/// The driver in software, in a folder of a library path and under other names and folders.
struct Installed(tempfile::TempDir);

impl Installed {
    /// Links the driver as `files`, whose folders are created.
    fn new(files: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            symlink(softcuda::library().unwrap(), file).unwrap();
        }
        Self(folder)
    }

    fn path(&self, below: &str) -> String {
        self.0.path().join(below).display().to_string()
    }
}

/// Returns true if this process has mapped a file whose name contains `name`.
fn has_mapped(name: &str) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter_map(|line| line.rsplit('/').next())
        .any(|file| file.contains(name))
}

/// Checks that all libraries are found, and that a kernel and a product run.
fn all_work() {
    let _limit = watchdog(100);
    found().unwrap();
    for version in [nvrtc(), cublas(), nccl()] {
        version.unwrap();
    }
    if ["libnvrtc.so", "libcublas.so"].into_iter().any(has_mapped) {
        println!("SKIPPED: the loader finds other libraries of CUDA first on this machine");
        return;
    }
    let work = |cuda: Cuda<'_>, x: &[View<'_>], y: &mut [ViewMut<'_>]| {
        let [product, sum] = y else {
            unreachable!("there are two outputs")
        };
        cuda.gemm(Gemm::new(2, 2, 1), &x[0], &x[0], &mut *product)?;
        cuda.zero(&mut *sum)?;
        let args = [4_u64.into(), 2_f32.into(), (&*product).into(), sum.into()];
        cuda.launch(&SAXPY, "saxpy", Grid::over(4), &args)
    };
    let sources = [&SAXPY, &CUBLAS];
    let y = on_device(
        &sources,
        &[host(&[1.0_f32, 2.0])],
        &[f32s([4]), f32s([4])],
        work,
    )
    .unwrap();
    assert_eq!(y[1].to_vec::<f32>().unwrap(), [2.0, 4.0, 4.0, 8.0]);
}

#[test]
fn libraries_of_cuda_12_are_found() {
    let folder = Installed::new(&[
        "libcuda.so.1",
        "libnvrtc.so.12",
        "libcublas.so.12",
        "libnccl.so.2",
    ]);
    if softcuda::real() || softcuda::again!("LD_LIBRARY_PATH" = &folder.path("")) {
        return;
    }
    all_work();
}

#[test]
fn libraries_of_a_toolkit_are_found() {
    let folder = Installed::new(&[
        "driver/libcuda.so.1",
        "cuda/lib64/libnvrtc.so",
        "cuda/lib64/libcublas.so",
        "cuda/lib64/libnccl.so",
    ]);
    if softcuda::real()
        || softcuda::again!(
            "LD_LIBRARY_PATH" = &folder.path("driver"),
            "CUDA_HOME" = &folder.path("cuda"),
        )
    {
        return;
    }
    all_work();
}

#[test]
fn libraries_of_the_active_environment_are_found() {
    let folder = Installed::new(&[
        "driver/libcuda.so.1",
        "env/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
        "env/lib/python3.12/site-packages/nvidia/cu13/lib/libcublas.so.13",
        "env/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2",
    ]);
    // NVRTC opens this one by its name alone.
    let helper = "env/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc-builtins.so.13.0";
    fs::copy(softcuda::library().unwrap(), folder.path(helper)).unwrap();
    if softcuda::real()
        || softcuda::again!(
            "LD_LIBRARY_PATH" = &folder.path("driver"),
            "VIRTUAL_ENV" = &folder.path("env"),
        )
    {
        return;
    }
    all_work();
    assert!(has_mapped("libnvrtc-builtins.so.13.0"));
}

#[test]
fn libraries_of_the_python_on_the_path_are_found() {
    let folder = Installed::new(&[
        "driver/libcuda.so.1",
        "env/bin/python3",
        "env/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "env/lib/python3.9/site-packages/nvidia/cublas/lib/libcublas.so.12",
        "env/lib/python3.9/site-packages/nvidia/nccl/lib/libnccl.so.2",
    ]);
    let path = std::env::var("PATH").unwrap_or_default();
    if softcuda::real()
        || softcuda::again!(
            "LD_LIBRARY_PATH" = &folder.path("driver"),
            "PATH" = &format!("{}:{path}", folder.path("env/bin")),
        )
    {
        return;
    }
    all_work();
}

#[test]
fn stub_of_a_toolkit_is_named() {
    if softcuda::again!("SOFTCUDA_FAIL" = "cuInit=34:1") {
        return;
    }
    let said = found().unwrap_err().to_string();
    assert!(
        said.contains("libcuda.so is the stub of a CUDA toolkit"),
        "{said}"
    );
    assert!(
        said.contains("folder `stubs` out of LD_LIBRARY_PATH (/"),
        "{said}"
    );
}
