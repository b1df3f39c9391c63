//! Tests of kernels: cooperation of the threads of a block, and refused operations.

use std::sync::Arc;

use cudarc::driver::sys::{CUfunction_attribute_enum as Attribute, CUresult};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx, compile_ptx_with_opts};

fn start() -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: these tests use one stream, which is ordered without the events that cudarc would
    // record. With them, a launch would return the error of the event after it.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream().unwrap();
    (context, stream)
}

fn kernel(context: &Arc<CudaContext>, source: &str, name: &str) -> CudaFunction {
    let ptx = compile_ptx(source).unwrap_or_else(|error| panic!("{error}"));
    context
        .load_module(ptx)
        .unwrap()
        .load_function(name)
        .unwrap()
}

fn config(blocks: u32, threads: u32, shared: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: shared,
    }
}

/// Source of a kernel that sums rows: the lanes of a warp by shuffles, the warps of a block through
/// shared memory.
const SUM: &str = r#"
extern "C" __global__ void __launch_bounds__(256)
sum_rows(const float *__restrict__ in, float *out, int columns) {
    __shared__ float parts[32];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += in[blockIdx.x * columns + i];
    for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0.0f;
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        if (threadIdx.x == 0) out[blockIdx.x] = sum;
    }
}
"#;

#[test]
fn threads_of_a_block_work_together() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let sum_rows = kernel(&context, SUM, "sum_rows");
    let (rows, columns) = (300_u32, 512);
    let input: Vec<f32> = (0..rows as usize * columns)
        .map(|at| (at % 7) as f32)
        .collect();
    let given = stream.clone_htod(&input).unwrap();
    let mut out = stream.alloc_zeros::<f32>(rows as usize).unwrap();
    let columns_there = columns as i32;
    let mut launch = stream.launch_builder(&sum_rows);
    launch.arg(&given).arg(&mut out).arg(&columns_there);
    // SAFETY: the arguments are those of the kernel, and it stays within them.
    unsafe { launch.launch(config(rows, 256, 0)) }.unwrap();
    let want: Vec<f32> = input.chunks(columns).map(|row| row.iter().sum()).collect();
    assert_eq!(stream.clone_dtoh(&out).unwrap(), want);
}

#[test]
fn dynamic_shared_memory_votes_and_atomics_work() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let source = r#"
extern "C" __global__ void turn(const int *in, int *out, unsigned *counts, float *total) {
    extern __shared__ __align__(16) int line[];
    int i = threadIdx.x;
    line[i] = in[i];
    int odd = __syncthreads_count(in[i] & 1);
    out[i] = line[blockDim.x - 1 - i];
    unsigned ballot = __ballot_sync(0xffffffffu, in[i] & 1);
    if (i % 32 == 0) counts[1 + i / 32] = ballot;
    if (i == 0) counts[0] = odd;
    atomicAdd(total, 0.5f);
    float4 wide = make_float4(1.0f, 2.0f, rsqrtf(4.0f), fmaxf(3.0f, min(9.0f, 8.0f)));
    if (i == 1) atomicAdd(total, wide.x + wide.y + wide.z + wide.w);
}
"#;
    let turn = kernel(&context, source, "turn");
    let input: Vec<i32> = (0..64).collect();
    let given = stream.clone_htod(&input).unwrap();
    let mut out = stream.alloc_zeros::<i32>(64).unwrap();
    let mut counts = stream.alloc_zeros::<u32>(3).unwrap();
    let mut total = stream.alloc_zeros::<f32>(1).unwrap();
    let mut launch = stream.launch_builder(&turn);
    launch
        .arg(&given)
        .arg(&mut out)
        .arg(&mut counts)
        .arg(&mut total);
    // SAFETY: the arguments are those of the kernel, and it stays within them.
    unsafe { launch.launch(config(1, 64, 256)) }.unwrap();
    assert_eq!(
        stream.clone_dtoh(&out).unwrap(),
        (0..64).rev().collect::<Vec<i32>>()
    );
    assert_eq!(
        stream.clone_dtoh(&counts).unwrap(),
        [32, 0xAAAA_AAAA, 0xAAAA_AAAA]
    );
    assert_eq!(
        stream.clone_dtoh(&total).unwrap(),
        [32.0 + 1.0 + 2.0 + 0.5 + 8.0]
    );
}

#[test]
fn half_types_come_with_cudas_headers() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let source = r#"
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void
halves(const float *in, unsigned short *half, unsigned short *brain, float *back) {
    int i = threadIdx.x;
    half[i] = __half_as_ushort(__float2half(in[i]));
    brain[i] = __bfloat16_as_ushort(__float2bfloat16(in[i]));
    float first = __half2float(__ushort_as_half(half[i]));
    back[i] = first + __bfloat162float(__ushort_as_bfloat16(brain[i]));
}
"#;
    let halves = kernel(&context, source, "halves");
    let input = [
        0.0_f32, 1.0, -2.5, 65504.0, 1e-7, 6.1e-5, 1e9, 0.333_333, -1e-9, 65519.0,
    ];
    let count = input.len();
    let given = stream.clone_htod(&input).unwrap();
    let mut half = stream.alloc_zeros::<u16>(count).unwrap();
    let mut brain = stream.alloc_zeros::<u16>(count).unwrap();
    let mut back = stream.alloc_zeros::<f32>(count).unwrap();
    let mut launch = stream.launch_builder(&halves);
    launch
        .arg(&given)
        .arg(&mut half)
        .arg(&mut brain)
        .arg(&mut back);
    // SAFETY: the arguments are those of the kernel, and it stays within them.
    unsafe { launch.launch(config(1, count as u32, 0)) }.unwrap();
    let want_half: Vec<u16> = input
        .iter()
        .map(|x| half::f16::from_f32(*x).to_bits())
        .collect();
    let want_brain: Vec<u16> = input
        .iter()
        .map(|x| half::bf16::from_f32(*x).to_bits())
        .collect();
    let sum = |x: &f32| half::f16::from_f32(*x).to_f32() + half::bf16::from_f32(*x).to_f32();
    assert_eq!(stream.clone_dtoh(&half).unwrap(), want_half);
    assert_eq!(stream.clone_dtoh(&brain).unwrap(), want_brain);
    assert_eq!(
        stream.clone_dtoh(&back).unwrap(),
        input.iter().map(sum).collect::<Vec<_>>()
    );
}

/// Source of a kernel that writes 1.0 at index `at` of `out`, which may be out of bounds.
const STRAY: &str = r#"
extern "C" __global__ void put(float *out, long long at) { out[at] = 1.0f; }
"#;

fn stray(null: bool, at: i64) -> CUresult {
    let (context, stream) = start();
    let put = kernel(&context, STRAY, "put");
    let out = stream.alloc_zeros::<f32>(100).unwrap();
    let nothing = 0_u64;
    let mut launch = stream.launch_builder(&put);
    if null {
        launch.arg(&nothing).arg(&at);
    } else {
        launch.arg(&out).arg(&at);
    }
    // SAFETY: the kernel writes to invalid memory, which is the test.
    unsafe { launch.launch(config(1, 1, 0)) }.unwrap();
    // The launch itself succeeds. The wait returns the error, and so does every later call.
    let error = stream.synchronize().unwrap_err().0;
    assert_eq!(context.new_stream().unwrap_err(), DriverError(error));
    assert!(stream.clone_htod(&[1.0_f32]).is_err());
    std::mem::forget(out);
    error
}

#[test]
fn write_beyond_allocation_fails() {
    if !softcuda::again!() {
        assert_eq!(stray(false, 1 << 20), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}

#[test]
fn write_just_beyond_allocation_fails() {
    if !softcuda::again!() {
        // The allocation of 400 bytes is rounded up to 512, and lies at the end of its page.
        assert_eq!(stray(false, 128), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}

#[test]
fn write_through_null_fails() {
    if !softcuda::again!() {
        assert_eq!(stray(true, 0), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}

#[test]
fn fault_in_kernel_with_barriers_fails() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let source = r#"
extern "C" __global__ void late(float *out) {
    __syncthreads();
    if (threadIdx.x == 77) out[1 << 20] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}
"#;
    let late = kernel(&context, source, "late");
    let mut out = stream.alloc_zeros::<f32>(128).unwrap();
    let mut launch = stream.launch_builder(&late);
    launch.arg(&mut out);
    // SAFETY: the kernel writes to invalid memory, which is the test.
    unsafe { launch.launch(config(4, 128, 0)) }.unwrap();
    assert_eq!(
        stream.synchronize().unwrap_err().0,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
    );
    std::mem::forget(out);
}

#[test]
fn deadlocked_threads_fail_with_timeout() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let source = r#"
extern "C" __global__ void apart() {
    if (threadIdx.x < 32) __syncthreads();
    else __shfl_sync(0xffffffffu, 1, 0), __syncthreads(), __syncthreads();
    if (threadIdx.x == 0) __shfl_sync(3u, 1, 0);
    else if (threadIdx.x == 1) { __syncthreads(); __shfl_sync(3u, 1, 0); }
    else __syncthreads();
}
"#;
    let apart = kernel(&context, source, "apart");
    // SAFETY: the kernel has no arguments. It cannot end, which is the test.
    unsafe { stream.launch_builder(&apart).launch(config(1, 64, 0)) }.unwrap();
    assert_eq!(
        stream.synchronize().unwrap_err().0,
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
    );
}

#[test]
fn wrong_launches_are_refused_at_once() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let nothing = kernel(
        &context,
        r#"extern "C" __global__ void nothing() {}"#,
        "nothing",
    );
    let tried = |grid_dim, block_dim, shared_mem_bytes| {
        let config = LaunchConfig {
            grid_dim,
            block_dim,
            shared_mem_bytes,
        };
        // SAFETY: the kernel does nothing.
        unsafe { stream.launch_builder(&nothing).launch(config) }.map(drop)
    };
    let invalid = Err(DriverError(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(tried((1, 1, 1), (1024, 1, 1), 48 << 10), Ok(()));
    assert_eq!(tried((0, 1, 1), (1, 1, 1), 0), invalid);
    assert_eq!(tried((1, 1, 1), (0, 1, 1), 0), invalid);
    assert_eq!(tried((1, 1, 1), (1025, 1, 1), 0), invalid);
    assert_eq!(tried((1, 1, 1), (64, 64, 1), 0), invalid);
    assert_eq!(tried((1, 1, 1), (1, 1, 65), 0), invalid);
    assert_eq!(tried((1, 65536, 1), (1, 1, 1), 0), invalid);
    assert_eq!(tried((1, 1, 1), (1, 1, 1), (48 << 10) + 1), invalid);
    const SHARED: Attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    assert_eq!(nothing.set_attribute(SHARED, (227 << 10) + 1), invalid);
    nothing.set_attribute(SHARED, 227 << 10).unwrap();
    assert_eq!(tried((1, 1, 1), (1, 1, 1), 227 << 10), Ok(()));
    // No refused launch has failed the stream.
    stream.synchronize().unwrap();
}

#[test]
fn launch_beyond_launch_bounds_is_refused() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let source = r#"extern "C" __global__ void __launch_bounds__(64 * 2, 4) few() {}"#;
    let few = kernel(&context, source, "few");
    // SAFETY: the kernel does nothing.
    let tried =
        |threads| unsafe { stream.launch_builder(&few).launch(config(1, threads, 0)) }.map(drop);
    assert_eq!(tried(128), Ok(()));
    assert_eq!(
        tried(129),
        Err(DriverError(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES))
    );
    const THREADS: Attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    assert_eq!(few.get_attribute(THREADS), Ok(128));
}

#[test]
fn kernels_reach_pinned_host_memory_and_no_other() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    let put = kernel(&context, STRAY, "put");
    let tried = |address: *mut f32| {
        let (address, at) = (address as u64, 0_i64);
        // SAFETY: the memory lives until the wait. A write to pageable memory is the test.
        unsafe {
            stream
                .launch_builder(&put)
                .arg(&address)
                .arg(&at)
                .launch(config(1, 1, 0))
        }
        .unwrap();
        stream.synchronize().map_err(|error| error.0)
    };
    // SAFETY: freed by the end of the process.
    let pinned: *mut f32 = unsafe { cudarc::driver::result::malloc_host(64, 0) }
        .unwrap()
        .cast();
    assert_eq!(tried(pinned), Ok(()));
    // SAFETY: the kernel that wrote it is done.
    assert_eq!(unsafe { pinned.read() }, 1.0);
    let mut local = [0.0_f32];
    assert_eq!(
        tried(local.as_mut_ptr()),
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    );
    assert_eq!(local, [0.0]);
}

#[test]
fn a_source_with_an_error_is_refused_with_a_log() {
    if softcuda::again!() {
        return;
    }
    let wrong =
        compile_ptx("extern \"C\" __global__ void k(float *x) {\n    x[0] = undefined_name;\n}\n");
    let CompileError::CompileError { log, .. } = wrong.unwrap_err() else {
        panic!("another error")
    };
    let log = log.to_string_lossy();
    assert!(
        log.contains("undefined_name") && log.contains(":2:"),
        "{log}"
    );
    // As with NVRTC, declarations of the host's headers are absent.
    assert!(
        compile_ptx("#include <stdint.h>\nextern \"C\" __global__ void k(uint32_t *x) {}").is_err()
    );
    assert!(compile_ptx("extern \"C\" __global__ void k(float *x) { *x = INFINITY; }").is_err());
    let options = CompileOptions {
        options: vec!["--quick".into()],
        ..Default::default()
    };
    assert!(compile_ptx_with_opts("", options).is_err());
}

#[test]
fn template_instances_are_found_by_name_expression() {
    if softcuda::again!() {
        return;
    }
    let (context, stream) = start();
    use cudarc::nvrtc::{result, sys};
    use std::ffi::{CStr, CString};
    let source = c"template <class T, int N> __global__ void add(T *out) { *out += T(N); }\n\
        extern \"C\" __global__ void plain(float *x) {}\n__global__ void mangled(float *x) {}";
    let program = result::create_program(source, None).unwrap();
    let expression = c"add<float, 3>";
    // SAFETY: the calls follow NVRTC's rules: a valid program, zero-terminated texts, and a buffer
    // of the reported size.
    let (lowered, image) = unsafe {
        assert_eq!(
            sys::nvrtcAddNameExpression(program, expression.as_ptr()),
            sys::nvrtcResult::NVRTC_SUCCESS
        );
        result::compile_program(program, &["--gpu-architecture=sm_80"]).unwrap();
        let mut lowered = std::ptr::null();
        assert_eq!(
            sys::nvrtcGetLoweredName(program, expression.as_ptr(), &mut lowered),
            sys::nvrtcResult::NVRTC_SUCCESS
        );
        let mut size = 0;
        assert_eq!(
            sys::nvrtcGetCUBINSize(program, &mut size),
            sys::nvrtcResult::NVRTC_SUCCESS
        );
        let mut image = vec![0_i8; size];
        assert_eq!(
            sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()),
            sys::nvrtcResult::NVRTC_SUCCESS
        );
        (
            CStr::from_ptr(lowered).to_string_lossy().into_owned(),
            image,
        )
    };
    use cudarc::driver::result::module;
    // SAFETY: the image is one that was just compiled; the kernel's argument is one float of device
    // memory.
    unsafe {
        let loaded = module::load_data(image.as_ptr().cast()).unwrap();
        assert!(module::get_function(loaded, CString::new("plain").unwrap()).is_ok());
        let not_found = Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND));
        assert_eq!(
            module::get_function(loaded, CString::new("mangled").unwrap()),
            not_found
        );
        let add = module::get_function(loaded, CString::new(lowered).unwrap()).unwrap();
        let out = cudarc::driver::result::malloc_sync(4).unwrap();
        cudarc::driver::result::memset_d8_sync(out, 0, 4).unwrap();
        context.synchronize().unwrap();
        let mut arguments = [std::ptr::from_ref(&out).cast_mut().cast()];
        let one = (1, 1, 1);
        cudarc::driver::result::launch_kernel(add, one, one, 0, stream.cu_stream(), &mut arguments)
            .unwrap();
        stream.synchronize().unwrap();
        let mut back = [0.0_f32];
        cudarc::driver::result::memcpy_dtoh_sync(&mut back, out).unwrap();
        assert_eq!(back, [3.0]);
    }
}

#[test]
fn foreign_ptx_is_refused() {
    if softcuda::again!() {
        return;
    }
    let (context, _) = start();
    // The minor version is one that no real NVRTC has. So a cache keyed by version never gives a
    // real driver an image of this one.
    let (mut major, mut minor) = (0, 0);
    // SAFETY: places for two numbers.
    unsafe { cudarc::nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }
        .result()
        .unwrap();
    assert!(major == 12 && minor >= 1000, "{major}.{minor}");
    let ptx = cudarc::nvrtc::Ptx::from_src(".version 8.0\n.target sm_80\n");
    assert_eq!(
        context.load_module(ptx).unwrap_err().0,
        CUresult::CUDA_ERROR_INVALID_PTX
    );
}
