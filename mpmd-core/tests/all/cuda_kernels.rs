//! The operations of kernels on CUDA devices: launches, matrix products, scratch memory, and the
//! origin of launched code.

use crate::common::watchdog;
use half::{bf16, f16};
use mpmd_core::aval::{DType, Element};
use mpmd_core::cuda::{Arg, CUBLAS, Cuda, CudaPart, Gemm, Grid, Math, Source};
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceKind;
use mpmd_device::cuda::{cublas, nvrtc};

pub(crate) static SAXPY: Source = Source::cuda(
    "saxpy.cu",
    r#"
    extern "C" __global__ void saxpy(unsigned long long n, float a, const float *x, float *y) {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < n) y[i] += a * x[i];
    }
    extern "C" __global__ void sums(const float *x, float *y) {
        extern __shared__ float parts[];
        parts[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
        __syncthreads();
        for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
            if (threadIdx.x < step) parts[threadIdx.x] += parts[threadIdx.x + step];
            __syncthreads();
        }
        if (threadIdx.x == 0) y[blockIdx.x] = parts[0];
    }
    extern "C" __global__ void numbers(
        unsigned a, int b, unsigned long long c, long long d, float e, double f, double *y
    ) {
        y[0] = a; y[1] = b; y[2] = (double)c; y[3] = (double)d; y[4] = e; y[5] = f;
    }
    "#,
);

/// A kernel for CUDA devices only: `work` runs with the outputs declared in `outputs`.
struct OnCuda<F> {
    outputs: Vec<ShapedArray>,
    sources: Vec<&'static Source>,
    work: F,
}

impl<F> Kernel for OnCuda<F>
where
    F: Fn(Cuda<'_>, &[View<'_>], &mut [ViewMut<'_>]) -> Result<()> + Send + Sync + 'static,
{
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, _: &Vec<ShapedArray>) -> Result<Signature<Vec<ShapedArray>>> {
        Ok(Signature::new(self.outputs.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>) -> Result<()> {
        let cuda = cx
            .cuda()
            .ok_or_else(|| Error::kernel("it is not on a CUDA device"))?;
        (self.work)(cuda, &x, &mut y)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.sources.clone()
    }
}

/// Runs `work` once in a kernel on a CUDA device, with inputs that are ready. Returns the values of
/// the outputs. Panics if the software driver has found a race.
pub(crate) fn on_device<F>(
    sources: &[&'static Source],
    inputs: &[HostArray],
    outputs: &[ShapedArray],
    work: F,
) -> Result<Vec<HostArray>>
where
    F: Fn(Cuda<'_>, &[View<'_>], &mut [ViewMut<'_>]) -> Result<()> + Send + Sync + 'static,
{
    let mut program = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .alone()?;
    let mesh = program.mesh(&[("x", 1)])?;
    let put = |x: &HostArray| program_put(&mut program, &mesh, x);
    let inputs = inputs.iter().map(put).collect::<Result<Vec<_>>>()?;
    let kernel = OnCuda {
        outputs: outputs.to_vec(),
        sources: sources.to_vec(),
        work,
    };
    let kernel = program
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let y = kernel.call(&mut program, inputs)?;
    let values = y
        .iter()
        .map(|y| y.to_host().map(|y| y.expect("this process has it")));
    let values = values.collect::<Result<Vec<_>>>();
    // A failure is reported a second time here.
    let _ = program.finish();
    // Only the software driver detects races.
    if let Some(driver) = softcuda::driver() {
        assert_eq!(driver.races(), 0);
    }
    values
}

fn program_put(
    program: &mut Program,
    mesh: &mpmd_core::topology::Mesh,
    x: &HostArray,
) -> Result<MpmdArray> {
    program.device_put(&MpmdArray::from_host(x.clone()), mesh.replicated())
}

fn floats(count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 37 + 11) % 23) as f32 / 4.0 - 2.5)
        .collect()
}

pub(crate) fn host<E: Element>(values: &[E]) -> HostArray {
    HostArray::from_slice(&[values.len()], values).unwrap()
}

fn why<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.expect_err("it must fail").to_string()
}

#[test]
fn launches_take_views_parts_scratch_and_numbers() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let n = 1000;
    let x = floats(n);
    let y = on_device(
        &[&SAXPY],
        &[host(&x)],
        &[f32s([n]), f32s([4])],
        move |cuda, x, y| {
            let [y, sums] = y else {
                return Err(Error::kernel("two outputs"));
            };
            cuda.fill(&mut *y, 0.5f32)?;
            let args = [n.into(), 2.0f32.into(), (&x[0]).into(), (&mut *y).into()];
            cuda.launch(&SAXPY, "saxpy", Grid::over(n), &args)?;
            // Adds the second half of x to the first half of y.
            let args: [Arg<'_>; 4] = [
                (n / 2).into(),
                1.0f32.into(),
                x[0].at(n / 2).into(),
                y.at(0).into(),
            ];
            cuda.launch(&SAXPY, "saxpy", Grid::over(n / 2), &args)?;
            let scratch = cuda.scratch(DType::F32, n)?;
            cuda.copy(&*y, &scratch)?;
            let args = [scratch.at(n - 512).into(), (&mut *sums).into()];
            cuda.launch(&SAXPY, "sums", Grid::new(4, 128).shared(512), &args)
        },
    );
    let y = y.unwrap();
    let expected: Vec<f32> = (0..n)
        .map(|i| 0.5 + 2.0 * x[i] + if i < n / 2 { x[i + n / 2] } else { 0.0 })
        .collect();
    assert_eq!(y[0].to_vec::<f32>().unwrap(), expected);
    // Quarters, and few enough that every sum is exact.
    let sums: Vec<f32> = expected[n - 512..]
        .chunks(128)
        .map(|part| part.iter().sum())
        .collect();
    assert_eq!(y[1].to_vec::<f32>().unwrap(), sums);
}

#[test]
fn every_numeric_argument_type_arrives() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let y = on_device(&[&SAXPY], &[], &[f64s([6])], |cuda, _, y| {
        let args: [Arg<'_>; 7] = [
            7u32.into(),
            (-7i32).into(),
            (1usize << 40).into(),
            (-1i64 << 40).into(),
            0.1f32.into(),
            0.1f64.into(),
            (&mut y[0]).into(),
        ];
        cuda.launch(&SAXPY, "numbers", Grid::new(1, 1), &args)
    });
    let big = (1u64 << 40) as f64;
    assert_eq!(
        y.unwrap()[0].to_vec::<f64>().unwrap(),
        [7.0, -7.0, big, -big, f64::from(0.1f32), 0.1]
    );
}

#[test]
fn values_of_every_width_are_filled_copied_and_zeroed() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let outputs = [
        u8s([5]),
        ShapedArray::new(&[7], DType::F16),
        f32s([3]),
        f64s([2000]),
        f64s([3]),
        ShapedArray::new(&[3], DType::C128),
    ];
    let y = on_device(&[], &[], &outputs, |cuda, _, y| {
        cuda.fill(&mut y[0], 9u8)?;
        cuda.fill(&mut y[1], f16::from_f32(1.5))?;
        cuda.fill(&mut y[2], -0.25f32)?;
        cuda.fill(&mut y[3], 0.1f64)?;
        cuda.fill(&mut y[4], 0.1f64)?;
        cuda.zero(y[4].at(2))?;
        cuda.zero(&mut y[5])?;
        // A value of another type than the elements.
        assert!(cuda.fill(&mut y[0], 1i8).is_err());
        Ok(())
    });
    let y = y.unwrap();
    assert_eq!(y[0].to_vec::<u8>().unwrap(), [9; 5]);
    assert_eq!(y[1].to_vec::<f16>().unwrap(), [f16::from_f32(1.5); 7]);
    assert_eq!(y[2].to_vec::<f32>().unwrap(), [-0.25; 3]);
    assert_eq!(y[3].to_vec::<f64>().unwrap(), [0.1; 2000]);
    assert_eq!(y[4].to_vec::<f64>().unwrap(), [0.1, 0.1, 0.0]);
    assert!(y[5].bytes().iter().all(|byte| *byte == 0));
}

#[test]
fn host_inputs_are_copied_to_the_device() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let x = floats(300);
    let mut program = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .alone()
        .unwrap();
    let mesh = program.mesh(&[("x", 1)]).unwrap();
    let work = |cuda: Cuda<'_>, x: &[View<'_>], y: &mut [ViewMut<'_>]| {
        cuda.copy(&x[0], &mut y[0])?;
        for from in [0, 100] {
            let args = [
                200usize.into(),
                1.0f32.into(),
                x[0].at(from).into(),
                (&mut y[0]).into(),
            ];
            cuda.launch(&SAXPY, "saxpy", Grid::over(200), &args)?;
        }
        Ok(())
    };
    let kernel = OnCuda {
        outputs: vec![f32s([300])],
        sources: vec![&SAXPY],
        work,
    };
    let kernel = program
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let y = kernel
        .call(&mut program, vec![MpmdArray::from_host(host(&x))])
        .unwrap();
    let y = y[0].to_host().unwrap().unwrap().to_vec::<f32>().unwrap();
    let expected: Vec<f32> = (0..300)
        .map(|i| x[i] + if i < 200 { x[i] + x[i + 100] } else { 0.0 })
        .collect();
    assert_eq!(y, expected);
    if let Some(driver) = softcuda::driver() {
        // Copied once for all three uses, without waiting.
        assert_eq!(driver.bytes("pinned_to_device"), 1200);
        assert_eq!(driver.bytes("pageable_to_device"), 0);
    }
    program.finish().unwrap();
}

#[test]
fn memory_does_not_grow_with_calls_that_take_scratch() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let mut program = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .alone()
        .unwrap();
    let mesh = program.mesh(&[("x", 1)]).unwrap();
    let work = |cuda: Cuda<'_>, x: &[View<'_>], y: &mut [ViewMut<'_>]| {
        for _ in 0..3 {
            // The same memory each time.
            let scratch = cuda.scratch(DType::F32, 1 << 16)?;
            cuda.copy(&x[0], &scratch)?;
            cuda.copy(&scratch, &mut y[0])?;
        }
        Ok(())
    };
    let kernel = OnCuda {
        outputs: vec![f32s([1 << 16])],
        sources: vec![],
        work,
    };
    let kernel = program
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let start = floats(1 << 16);
    let mut x = vec![program_put(&mut program, &mesh, &host(&start)).unwrap()];
    let mut mapped = Vec::new();
    for _ in 0..200 {
        x = kernel.call(&mut program, x).unwrap();
        x[0].block_until_ready().unwrap();
        mapped.push(program.memory().mapped);
    }
    assert_eq!(mapped[20], mapped[199], "{mapped:?}");
    assert_eq!(
        x[0].to_host().unwrap().unwrap().to_vec::<f32>().unwrap(),
        start
    );
    program.finish().unwrap();
}

/// An element type of a matrix product, with conversions from `f32` and to `f64`.
trait Real: Element + Copy {
    fn of(value: f32) -> Self;
    fn to(self) -> f64;
}

impl Real for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn to(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    fn of(value: f32) -> Self {
        value.into()
    }
    fn to(self) -> f64 {
        self
    }
}

impl Real for f16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn to(self) -> f64 {
        self.into()
    }
}

impl Real for bf16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn to(self) -> f64 {
        self.into()
    }
}

/// Multiplies dense matrices of 7 x 9 and 9 x 5, three in a batch, on the device, with all
/// transpositions. Compares the products with loops, up to the relative `tolerance`.
fn products<T: Real, C: Real>(math: Math, tolerance: f64) {
    let (m, n, k, batch) = (7, 5, 9, 3);
    for (turn_a, turn_b) in [(false, false), (false, true), (true, false), (true, true)] {
        let gemm = Gemm::new(m, n, k).alpha(0.5).beta(2.0).math(math);
        let gemm = if turn_a { gemm.transpose_a() } else { gemm };
        let gemm = if turn_b { gemm.transpose_b() } else { gemm };
        let gemm = gemm.batch(batch, [m * k, 0, m * n]);
        let (a, b) = (floats(batch * m * k), floats(k * n));
        let [a, b]: [Vec<T>; 2] = [a, b].map(|values| values.into_iter().map(T::of).collect());
        let y = on_device(
            &[&CUBLAS],
            &[host(&a), host(&b)],
            &[ShapedArray::new(&[batch * m * n], C::DTYPE)],
            move |cuda, x, y| {
                cuda.fill(&mut y[0], C::of(1.5))?;
                cuda.gemm(gemm, &x[0], &x[1], &mut y[0])
            },
        );
        let y = y.unwrap()[0].to_vec::<C>().unwrap();
        for (i, y) in y.into_iter().enumerate() {
            let (index, row, column) = (i / (m * n), i / n % m, i % n);
            let a =
                |i: usize| a[index * m * k + if turn_a { i * m + row } else { row * k + i }].to();
            let b = |i: usize| {
                b[if turn_b {
                    column * k + i
                } else {
                    i * n + column
                }]
                .to()
            };
            let expected = 0.5 * (0..k).map(|i| a(i) * b(i)).sum::<f64>() + 3.0;
            let error = (y.to() - expected).abs();
            assert!(
                error <= tolerance * expected.abs().max(1.0),
                "{gemm}: {} for {expected}",
                y.to()
            );
        }
    }
}

#[test]
fn matrix_products_are_right_in_every_type_and_batch() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(110);
    products::<f32, f32>(Math::F32, 1e-6);
    products::<f64, f64>(Math::F32, 1e-14);
    products::<f16, f32>(Math::F32, 1e-6);
    products::<f16, f16>(Math::F32, 1e-3);
    products::<bf16, f32>(Math::F32, 1e-6);
    products::<bf16, bf16>(Math::F32, 1e-2);
    // The values have so few bits that no rounding changes them.
    products::<f32, f32>(Math::Tf32, 1e-6);
}

#[test]
fn shared_memory_beyond_that_of_a_block_is_refused_by_size() {
    if softcuda::again!("SOFTCUDA_SHARED" = "101376") {
        return;
    }
    let run = |bytes| {
        let y = on_device(
            &[&SAXPY],
            &[host(&[1f32; 32])],
            &[f32s([1])],
            move |cuda, x, y| {
                let args = [(&x[0]).into(), (&mut y[0]).into()];
                cuda.launch(&SAXPY, "sums", Grid::new(1, 32).shared(bytes), &args)
            },
        );
        y.map(|y| y[0].to_vec::<f32>().unwrap()[0])
    };
    assert_eq!(run(101_376).unwrap(), 32.0);
    let said = why(run(101_377));
    let expected = "launching sums of saxpy.cu: a block needs 101377 bytes of shared memory, and \
                    this device gives a block at most 101376";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn f32_products_are_exact_unless_tf32_is_requested() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    // Has one bit more than tf32 keeps; bf16 keeps fewer.
    let x = 1.0f32 + 2.0f32.powi(-12);
    let square = |math| {
        let y = on_device(
            &[&CUBLAS],
            &[host(&[x])],
            &[f32s([1])],
            move |cuda, x, y| cuda.gemm(Gemm::new(1, 1, 1).math(math), &x[0], &x[0], &mut y[0]),
        );
        y.unwrap()[0].to_vec::<f32>().unwrap()[0]
    };
    assert_eq!(square(Math::F32), x * x);
    // The hardware may compute so small a product exactly.
    let rounded = square(Math::Tf32);
    assert!((rounded - x * x).abs() < 1e-2);
    if !softcuda::real() {
        assert_eq!(rounded, 1.0);
    }
}

/// Launches the kernel `saxpy` with valid arguments; for tests of errors in its source or
/// compilation.
fn launches_saxpy(cuda: Cuda<'_>, _: &[View<'_>], y: &mut [ViewMut<'_>]) -> Result<()> {
    cuda.fill(&mut y[0], 1.0f32)?;
    let ones = cuda.scratch(DType::F32, 100)?;
    cuda.fill(&ones, 1.0f32)?;
    let args = [
        100usize.into(),
        2.0f32.into(),
        (&ones).into(),
        (&mut y[0]).into(),
    ];
    cuda.launch(&SAXPY, "saxpy", Grid::over(100), &args)
}

#[test]
fn source_is_compiled_once_for_all_kernels_and_devices() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let Some(driver) = softcuda::driver() else {
        eprintln!("skipped: only the driver in software counts calls");
        return;
    };
    let _limit = watchdog(100);
    let mut program = Program::builder()
        .devices(2)
        .device_kinds(&[DeviceKind::Cuda])
        .alone()
        .unwrap();
    let mesh = program.mesh(&[("x", 2)]).unwrap();
    let jit = |announced: &[&'static Source]| {
        let kernel = OnCuda {
            outputs: vec![f32s([100])],
            sources: announced.to_vec(),
            work: launches_saxpy,
        };
        program
            .jit(kernel)
            .on(&mesh)
            .outputs(mesh.replicated())
            .build()
            .unwrap()
    };
    // All kernels need it at once. The third kernel has not announced it and finds it too.
    let kernels = [jit(&[&SAXPY]), jit(&[&SAXPY, &SAXPY]), jit(&[])];
    for kernel in &kernels {
        for _ in 0..2 {
            let y = kernel.call(&mut program, Vec::new()).unwrap();
            assert_eq!(
                y[0].to_host().unwrap().unwrap().to_vec::<f32>().unwrap(),
                [3.0; 100]
            );
        }
    }
    assert_eq!(driver.calls("nvrtcCompileProgram"), 1);
    assert_eq!(driver.calls("cuModuleLoadDataEx"), 2, "once on each device");
    assert_eq!(driver.calls("cuModuleGetFunction"), 2);
    assert_eq!(driver.calls("cuLaunchKernel"), 12);
    drop(kernels);
    program.finish().unwrap();
}

#[test]
fn cublas_calls_allocate_no_memory() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let mut program = Program::builder()
        .device_kinds(&[DeviceKind::Cuda])
        .alone()
        .unwrap();
    let mesh = program.mesh(&[("x", 1)]).unwrap();
    let work = |cuda: Cuda<'_>, x: &[View<'_>], y: &mut [ViewMut<'_>]| {
        cuda.gemm(Gemm::new(4, 4, 4), &x[0], &x[0], &mut y[0])
    };
    let kernel = OnCuda {
        outputs: vec![f32s([16])],
        sources: vec![&CUBLAS],
        work,
    };
    let kernel = program
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let x = program_put(&mut program, &mesh, &host(&[1.0f32; 16])).unwrap();
    let mut call = || {
        let y = kernel.call(&mut program, vec![x.clone()]).unwrap();
        assert_eq!(
            y[0].to_host().unwrap().unwrap().to_vec::<f32>().unwrap(),
            [4.0; 16]
        );
    };
    call();
    if let Some(driver) = softcuda::driver() {
        assert_eq!(
            driver.calls("cublasGemmEx"),
            5,
            "the warm-up has computed one of each dtype"
        );
        driver.reset();
        (0..5).for_each(|_| call());
        assert_eq!(driver.calls("cublasGemmEx"), 5);
        for other in [
            "cublasCreate_v2",
            "cublasSetStream_v2",
            "cublasSetWorkspace_v2",
            "cuMemAlloc_v2",
        ] {
            assert_eq!(driver.calls(other), 0, "{other}");
        }
    }
    program.finish().unwrap();
}

#[test]
fn faulting_launch_fails_the_kernel_that_issued_it() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let Some(driver) = softcuda::driver() else {
        eprintln!("skipped: only the driver in software fails when it is asked to");
        return;
    };
    driver.fail("launch", 1);
    let said = why(on_device(&[&SAXPY], &[], &[f32s([100])], launches_saxpy));
    assert!(
        said.contains("kernel OnCuda of operation") && said.contains("CUDA_ERROR"),
        "{said}"
    );
}

/// A library may be newer than the bindings and return codes that the bindings do not know. The
/// error must contain the number.
#[test]
fn unknown_result_codes_are_errors() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let Some(driver) = softcuda::driver() else {
        println!("SKIPPED: only a driver in software gives such answers");
        return;
    };
    driver.fail("nvrtcCompileProgram=4242", 1);
    let said = why(on_device(&[&SAXPY], &[], &[f32s([100])], launches_saxpy));
    assert!(said.contains("NVRTC error 4242"), "{said}");
    // After the four products of the warm-up.
    driver.fail("cublasGemmEx=4242", 5);
    let work = |cuda: Cuda<'_>, x: &[View<'_>], y: &mut [ViewMut<'_>]| {
        cuda.gemm(Gemm::new(4, 4, 4), &x[0], &x[0], &mut y[0])
    };
    let said = why(on_device(
        &[&CUBLAS],
        &[host(&[1.0f32; 16])],
        &[f32s([16])],
        work,
    ));
    assert!(said.contains("cuBLAS error 4242"), "{said}");
    driver.fail("cuMemsetD8Async=4242", 1);
    let zero = |cuda: Cuda<'_>, _: &[View<'_>], y: &mut [ViewMut<'_>]| cuda.zero(&mut y[0]);
    let said = why(on_device(&[], &[], &[f32s([100])], zero));
    assert!(said.contains("CUDA error 4242"), "{said}");
}

static BROKEN: Source = Source::cuda(
    "broken.cu",
    "extern \"C\" __global__ void f(float *y) {\n  y[0] = nonsense;\n}\n",
);

#[test]
fn broken_source_fails_its_calls_with_the_compiler_message() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    let launch = |cuda: Cuda<'_>, _: &[View<'_>], y: &mut [ViewMut<'_>]| {
        cuda.launch(&BROKEN, "f", Grid::new(1, 1), &[(&mut y[0]).into()])
    };
    for announced in [&[&BROKEN][..], &[]] {
        let said = why(on_device(announced, &[], &[f32s([1])], launch));
        for part in [
            "OnCuda",
            "compiling broken.cu: NVRTC_ERROR_COMPILATION",
            "broken.cu",
            "nonsense",
        ] {
            assert!(said.contains(part), "{part} is not in: {said}");
        }
    }
}

#[test]
fn invalid_kernel_calls_are_errors() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(100);
    type Work = fn(Cuda<'_>, &[View<'_>], &mut [ViewMut<'_>]) -> Result<()>;
    let cases: [(Work, &str); 8] = [
        (
            |cuda, x, _| cuda.launch(&SAXPY, "missing", Grid::new(1, 1), &[(&x[0]).into()]),
            "missing",
        ),
        (
            |cuda, x, _| cuda.launch(&CUBLAS, "f", Grid::new(1, 1), &[(&x[0]).into()]),
            "Cuda::gemm",
        ),
        (
            |cuda, x, y| cuda.copy(x[0].at(1), &mut y[0]),
            "9 values are copied to a place of 10",
        ),
        (|cuda, x, y| cuda.copy(x[0].at(11), &mut y[0]), "0 values"),
        (
            |cuda, x, _| cuda.launch(&SAXPY, "sums", Grid::new(1, 1), &[x[0].at(11).into()]),
            "behind the end",
        ),
        (|cuda, x, _| cuda.zero(&x[0]), "only read"),
        (
            |cuda, x, y| cuda.gemm(Gemm::new(2, 5, 3), &x[0], &x[0], &mut y[0]),
            "B has 10 elements",
        ),
        (
            |cuda, x, _| cuda.gemm(Gemm::new(1, 1, 1), &x[0], &x[0], CudaPart::from(&x[0])),
            "only read",
        ),
    ];
    for (work, words) in cases {
        let said = why(on_device(
            &[&SAXPY],
            &[host(&floats(10))],
            &[f32s([10])],
            work,
        ));
        assert!(
            said.contains(words) && said.contains("kernel OnCuda of operation"),
            "{words}: {said}"
        );
    }
}

#[test]
fn missing_nvrtc_is_reported_and_sourceless_kernels_run() {
    if softcuda::real() {
        eprintln!("skipped: this machine's CUDA has NVRTC");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(
        softcuda::library().unwrap(),
        folder.path().join("libcuda.so.1"),
    )
    .unwrap();
    if softcuda::again!("LD_LIBRARY_PATH" = folder.path().to_str().unwrap()) {
        return;
    }
    let _limit = watchdog(100);
    if let (Ok(version), _) | (_, Ok(version)) = (nvrtc(), cublas()) {
        println!("SKIPPED: this machine has NVRTC or cuBLAS {version} elsewhere");
        return;
    }
    let launch = |cuda: Cuda<'_>, _: &[View<'_>], y: &mut [ViewMut<'_>]| {
        cuda.launch(&SAXPY, "numbers", Grid::new(1, 1), &[(&mut y[0]).into()])
    };
    let said = why(on_device(&[&SAXPY], &[], &[f64s([6])], launch));
    assert!(
        said.contains("no NVRTC found: looked for") && said.contains("libnvrtc.so.13, "),
        "{said}"
    );
    let product = |cuda: Cuda<'_>, x: &[View<'_>], y: &mut [ViewMut<'_>]| {
        cuda.gemm(Gemm::new(1, 1, 1), &x[0], &x[0], &mut y[0])
    };
    for announced in [&[&CUBLAS][..], &[]] {
        let said = why(on_device(
            announced,
            &[host(&[1.0f32])],
            &[f32s([1])],
            product,
        ));
        assert!(said.contains("no cuBLAS found: looked for"), "{said}");
    }
    let y = on_device(&[], &[], &[f32s([2])], |cuda, _, y| {
        cuda.fill(&mut y[0], 1.0f32)
    });
    assert_eq!(y.unwrap()[0].to_vec::<f32>().unwrap(), [1.0, 1.0]);
}
