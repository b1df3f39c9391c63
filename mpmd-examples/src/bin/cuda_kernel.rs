//! A custom kernel, in CUDA C for CUDA devices and in Rust for CPUs: `cargo run
//! --bin cuda_kernel`.

use std::process::ExitCode;

use clap::Parser;
use mpmd::cuda::{Grid, Source, gpu_names};
use mpmd::prelude::*;
use mpmd::topology::DeviceKind;

/// Compute y = a x + y on one device: a CUDA device if there is one, otherwise the CPU.
#[derive(Parser)]
#[command(name = "cuda_kernel", version)]
struct Args {
    /// Number of elements of x and y
    #[arg(long, default_value_t = 1 << 20)]
    elements: usize,
    /// Factor of x
    #[arg(short, default_value_t = 2.0)]
    a: f32,
}

/// CUDA C source of the kernel `saxpy`. It is compiled once per machine, when a kernel that
/// declares it is bound to a mesh.
static SAXPY: Source = Source::cuda(
    "saxpy.cu",
    r#"
    extern "C" __global__ void saxpy(unsigned long long n, float a, const float *x, float *y)
    {
        unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
        if (i < n)
            y[i] += a * x[i];
    }
    "#,
);

/// A kernel that computes `a x + y` from (x, y). The result overwrites `y`.
struct Saxpy {
    a: f32,
}

impl Kernel for Saxpy {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (x, y): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        if x != y {
            return Err(Error::kernel(format!("x is {x} and y is {y}")));
        }
        Ok(Signature::new(y.clone()).alias("1", ""))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (x, _): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            // The launch is asynchronous: this call does not wait for the device.
            let n = x.region().elements();
            let args = [n.into(), self.a.into(), (&x).into(), (&mut y).into()];
            return cuda.launch(&SAXPY, "saxpy", Grid::over(n), &args);
        }
        for (y, x) in y
            .as_mut_slice::<f32>()?
            .iter_mut()
            .zip(x.as_slice::<f32>()?)
        {
            *y += self.a * x;
        }
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&SAXPY]
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.a.to_bits().into()]
    }
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let kind = match gpu_names() {
        Ok(gpus) => {
            println!("on {}", gpus[0]);
            DeviceKind::Cuda
        }
        Err(why) => {
            println!("on the CPU: {why}");
            DeviceKind::Cpu
        }
    };
    let mut p = Program::builder().device_kinds(&[kind]).alone()?;

    let mesh = p.mesh(&[("x", 1)])?;
    let here = mesh.replicated();
    let saxpy = p
        .jit(Saxpy { a: args.a })
        .on(&mesh)
        .outputs(&here)
        .donate("1")
        .build()?;

    let values: Vec<f32> = (0..args.elements).map(|i| (i % 1000) as f32).collect();
    let x = MpmdArray::from_host(HostArray::from_slice(&[args.elements], &values)?);
    let x = p.device_put(&x, &here)?;
    let ones = MpmdArray::from_host(HostArray::from_slice(
        &[args.elements],
        &vec![1.0f32; args.elements],
    )?);
    let mut y = p.device_put(&ones, &here)?;
    for _ in 0..3 {
        y = saxpy.call(&mut p, (x.clone(), y))?;
    }
    // The program waits only here.
    let Some(y) = y.to_host()? else {
        return Err(Error::kernel("the values are on another process"));
    };
    let y = y.to_vec::<f32>()?;
    let wrong = y
        .iter()
        .zip(&values)
        .filter(|(y, x)| (*y - (1.0 + 3.0 * args.a * *x)).abs() > 1e-3 * y.abs())
        .count();
    println!("{} of {} elements are right", y.len() - wrong, y.len());
    p.finish()?;
    if wrong == 0 {
        Ok(())
    } else {
        Err(Error::kernel(format!("{wrong} elements are wrong")))
    }
}
