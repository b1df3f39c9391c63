//! Moves arrays between two stages on two meshes: `cargo run --bin basic`, or on GPUs `cargo run
//! --features cuda --bin basic -- --device cuda`.

use std::process::ExitCode;

use clap::Parser;
use mpmd::cuda::{Grid, Source};
use mpmd::prelude::*;
use mpmd_examples::job::{self, JobArgs};

/// Add one on devices 0 to 3, double on devices 4 to 7, and print the results of each process.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Rows of the arrays, a multiple of 4
    #[arg(long, default_value_t = 512)]
    rows: usize,
    /// Columns of the arrays
    #[arg(long, default_value_t = 4096)]
    columns: usize,
    /// Number of repetitions
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    job::run(&args.job, 2, 8, |p| program(p, &args))
}

fn program(p: &mut Program, args: &Args) -> Result<()> {
    let stages = p.mesh(&[("stage", 2), ("data", 4)])?.split("stage")?;
    let [front, back] = [&stages[0], &stages[1]].map(|mesh| mesh.sharding(spec!["data"]));
    let add_one = p.jit(AddOne).on(&stages[0]).outputs(&front).build()?;
    let double = p.jit(Double).on(&stages[1]).outputs(&back).build()?;

    let shape = f32s([args.rows, args.columns]);
    let a = p.array_from_fn(shape.clone(), &front, |_, mut a| Ok(a.fill(0.0f32)?))?;
    let b = p.array_from_fn(shape, &front, |_, mut b| Ok(b.fill(1.0f32)?))?;
    for round in 0..args.rounds {
        // Both chains are issued before the program waits: `b` is computed while `a` is moving.
        let mut both_stages = |x: &MpmdArray| {
            let x = add_one.call(p, x.clone())?;
            let x = p.device_put(&x, &back)?;
            double.call(p, x)
        };
        let (a2, b2) = (both_stages(&a)?, both_stages(&b)?);
        println!("process {}, round {round}: a2 {}", p.process(), arrived(&a2, 2.0)?);
        println!("process {}, round {round}: b2 {}", p.process(), arrived(&b2, 4.0)?);
        p.step_end()?;
    }
    Ok(())
}

/// Waits for an array, and checks that every element on this process equals `expected`. An element
/// that differs is an error.
///
/// Returns a description of the rows on this process, or says that the array is on other processes.
fn arrived(x: &MpmdArray, expected: f32) -> Result<String> {
    if x.is_fully_remote() {
        return Ok(format!("is a handle: {} on other processes", x.aval()));
    }
    let mut places = Vec::new();
    for shard in x.addressable_shards()? {
        let place = format!("rows {:?} on device {}", shard.region.range(0), shard.device);
        if let Some(value) = shard.data.as_slice::<f32>()?.iter().find(|value| **value != expected)
        {
            return Err(Error::kernel(format!("{place}: {value} instead of {expected}")));
        }
        places.push(place);
    }
    Ok(format!("is {expected:?} everywhere in {}", places.join(", ")))
}

/// CUDA C source of the kernels `add_one` and `twice`.
static SOURCE: Source = Source::cuda(
    "basic.cu",
    r#"
    typedef unsigned long long u64;

    extern "C" __global__ void add_one(float *y, const float *x, u64 n) {
        u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i] + 1.0f;
    }

    extern "C" __global__ void twice(float *y, const float *x, u64 n) {
        u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i] * 2.0f;
    }
    "#,
);

struct AddOne;

impl Kernel for AddOne {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            let n = x.region().elements();
            return cuda.launch(
                &SOURCE,
                "add_one",
                Grid::over(n),
                &[(&mut y).into(), (&x).into(), n.into()],
            );
        }
        let (x, y) = (x.as_slice::<f32>()?, y.as_mut_slice::<f32>()?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x + 1.0);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&SOURCE]
    }
}

struct Double;

impl Kernel for Double {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            let n = x.region().elements();
            return cuda.launch(
                &SOURCE,
                "twice",
                Grid::over(n),
                &[(&mut y).into(), (&x).into(), n.into()],
            );
        }
        let (x, y) = (x.as_slice::<f32>()?, y.as_mut_slice::<f32>()?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x * 2.0);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&SOURCE]
    }
}
