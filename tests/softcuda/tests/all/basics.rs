//! Tests of memory, copies, streams, events and kernels through `cudarc`.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::compile_ptx;

#[test]
fn numbers_are_copied_to_device_and_back() {
    if softcuda::again!() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let there = stream.clone_htod(&[1.0_f32, 2.0, 3.0]).unwrap();
    assert_eq!(stream.clone_dtoh(&there).unwrap(), [1.0, 2.0, 3.0]);
}

#[test]
fn a_kernel_runs() {
    if softcuda::again!() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let ptx = compile_ptx(
        r#"
extern "C" __global__ void scale(float *out, const float *in, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * by;
}
"#,
    )
    .unwrap();
    let module = context.load_module(ptx).unwrap();
    let kernel = module.load_function("scale").unwrap();
    let input: Vec<f32> = (0..1000).map(|at| at as f32).collect();
    let given = stream.clone_htod(&input).unwrap();
    let mut out = stream.alloc_zeros::<f32>(1000).unwrap();
    let mut launch = stream.launch_builder(&kernel);
    launch
        .arg(&mut out)
        .arg(&given)
        .arg(&2.0_f32)
        .arg(&1000_i32);
    // SAFETY: the arguments are those of the kernel, and it stays within them.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }.unwrap();
    let want: Vec<f32> = input.iter().map(|x| x * 2.0).collect();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), want);
}

#[test]
fn copy_beyond_allocation_fails_the_context() {
    if softcuda::again!() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    // SAFETY: plain calls of the driver; the last copy is wrong on purpose.
    unsafe {
        let small = result::malloc_sync(256).unwrap();
        let large = result::malloc_sync(4096).unwrap();
        result::memcpy_dtod_async(small, large, 4096, stream.cu_stream()).unwrap();
        let failed = DriverError(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(result::stream::synchronize(stream.cu_stream()), Err(failed));
        assert_eq!(result::malloc_sync(256), Err(failed));
        let mut free = 0;
        let mut total = 0;
        assert_eq!(
            sys::cuMemGetInfo_v2(&mut free, &mut total),
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        );
    }
}
