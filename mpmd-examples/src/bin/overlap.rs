//! Runs four stages that compute while their last outputs are on the way: `cargo run --release
//! --bin overlap`.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use mpmd::ProcessId;
use mpmd::prelude::*;
use mpmd::random::{Key, normal_f64, uniform_f32};
use mpmd_examples::job::{self, JobArgs};
use mpmd_examples::math::matmul;
use mpmd_examples::pipeline::gpipe;

/// Run microbatches forward through four stages of two devices each. Both devices of a stage hold
/// its whole weights and activations, and compute the same.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Columns of the activations, rows and columns of the weights
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Rows of each microbatch
    #[arg(long, default_value_t = 512)]
    batch: usize,
    /// Microbatches of a step
    #[arg(long, default_value_t = 4)]
    microbatches: usize,
    /// Number of steps; each starts with the last output of the step before
    #[arg(long, default_value_t = 10)]
    steps: usize,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    args.job.only_on_cpus("overlap")?;
    job::run(&args.job, 4, 8, |p| program(p, &args))
}

fn program(p: &mut Program, args: &Args) -> Result<()> {
    let (width, batch) = (args.width, args.batch);
    let stages = p.mesh(&[("stage", 4), ("repl", 2)])?.split("stage")?;
    let mut products = Vec::new();
    let mut weights = Vec::new();
    for (s, mesh) in stages.iter().enumerate() {
        products.push(p.jit(Product).on(mesh).outputs(mesh.replicated()).build()?);
        // Divided by the square root of the width, so that values keep their size from step to
        // step.
        let scale = 1.0 / (width as f64).sqrt();
        let weight = move |i| (scale * normal_f64(Key(s as u64), i)) as f32;
        weights.push(p.array_from_fn(f32s([width, width]), &mesh.replicated(), fill(weight))?);
    }
    let input = |i| uniform_f32(Key(100), i);
    let mut x = p.array_from_fn(f32s([batch, width]), &stages[0].replicated(), fill(input))?;

    let start = Instant::now();
    for _ in 0..args.steps {
        let mut activations = vec![x.clone(); args.microbatches];
        for task in gpipe(stages.len(), args.microbatches).into_iter().filter(|task| !task.backward)
        {
            let y = &mut activations[task.microbatch];
            *y = products[task.stage].call(p, (weights[task.stage].clone(), y.clone()))?;
            // Moved at once, while this stage computes its next microbatch. The last stage's output
            // goes to the first.
            let next = &stages[(task.stage + 1) % stages.len()];
            *y = p.device_put(&*y, next.replicated())?;
        }
        x = activations.pop().unwrap_or(x);
        p.step_end()?;
    }
    println!("process {}: the output {}", p.process(), arrived(&x)?);
    if p.process() == ProcessId(0) {
        let seconds = start.elapsed().as_secs_f64();
        println!("{:.2} steps/s", args.steps as f64 / seconds);
    }
    Ok(())
}

/// Waits for an array that is replicated on its mesh. Describes its type, its devices on this
/// process, and the root mean square of its values.
///
/// If the array is on other processes, describes only its type. A root mean square that is not
/// finite is an error.
fn arrived(x: &MpmdArray) -> Result<String> {
    let Some(values) = x.to_host()? else {
        return Ok(format!("is a handle: {} on other processes", x.aval()));
    };
    let values = values.as_slice::<f32>()?;
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let size = (squares / values.len().max(1) as f64).sqrt();
    if !size.is_finite() {
        return Err(Error::kernel(format!("{} has values that are not finite", x.aval())));
    }
    let devices: Vec<_> =
        x.addressable_shards()?.iter().map(|shard| shard.device.to_string()).collect();
    Ok(format!(
        "is here, {} on devices {}, root mean square {size:.6}",
        x.aval(),
        devices.join(", ")
    ))
}

/// Returns a function that fills a region of a matrix. `value` gets an element's row-major index in
/// the whole matrix.
fn fill(
    value: impl Fn(u64) -> f32 + Send + Sync + 'static,
) -> impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync {
    move |region, mut view| {
        let columns = view.global().shape()[1];
        let row = |row: usize| region.range(1).map(move |column| (row * columns + column) as u64);
        let places = region.range(0).flat_map(row);
        view.as_mut_slice::<f32>()?.iter_mut().zip(places).for_each(|(x, place)| *x = value(place));
        Ok(())
    }
}

/// A kernel that computes the matrix product `y = x w` from (w, x).
struct Product;

impl Kernel for Product {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (w, x): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        match (x.shape(), w.shape()) {
            ([rows, inner], [same, columns]) if inner == same => {
                Ok(Signature::new(ShapedArray::new(&[*rows, *columns], x.dtype())))
            }
            _ => Err(Error::kernel(format!("{x} @ {w}: the inner dimensions differ"))),
        }
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (w, x): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let (m, k, n) = (x.shape()[0], x.shape()[1], w.shape()[1]);
        matmul(y.as_mut_slice::<f32>()?, x.as_slice()?, w.as_slice()?, m, k, n, false);
        Ok(())
    }
}
