//! Runs four stages that compute while their last outputs are on the way: `cargo run --release
//! --bin overlap`.

use mpmd::{kernels, prelude::*};
use mpmd_examples::arrays;

/// Run microbatches forward through four stages of two devices each. Both devices of a stage hold
/// its whole weights and activations, and compute the same.
#[derive(clap::Parser)]
struct Args {
    #[command(flatten)]
    job: mpmd_job::JobArgs,
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

fn main() -> anyhow::Result<std::process::ExitCode> {
    let args: Args = clap::Parser::parse();
    mpmd_job::run(&args.job, 4, 8, |p| program(p, &args))
}

fn program(p: &mut Program, args: &Args) -> Result<()> {
    let stages = p.mesh(&[("stage", 4), ("repl", 2)])?.split("stage")?;
    let mut layers = Vec::new();
    for (mesh, key) in stages.iter().zip(0..) {
        let product = p.jit(kernels::matmul()).on(mesh).outputs(mesh.replicated()).build()?;
        layers.push((product, arrays::weights(p, args.width, mesh, key)?));
    }
    let mut x = arrays::inputs(p, [args.batch, args.width], &stages[0])?;
    let start = std::time::Instant::now();
    for _ in 0..args.steps {
        for mut y in vec![x.clone(); args.microbatches] {
            for (i, (product, weights)) in layers.iter().enumerate() {
                y = product.call(p, (y, weights.clone()))?;
                // Moved at once, while this stage computes its next microbatch. The last stage's
                // output goes to the first.
                y = p.device_put(&y, stages[(i + 1) % stages.len()].replicated())?;
            }
            x = y;
        }
        p.step_end()?;
    }
    arrays::report(p, &x, args.steps, start)
}
