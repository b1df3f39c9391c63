//! Trains a four-stage, tensor-parallel pipeline on 8 devices, with any number of processes: `cargo
//! run --release --bin pipeline`. With `--check` it runs a small job and compares its results with
//! known figures.

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use mpmd::ProcessId;
use mpmd::job::{JobArgs, Rejected, at_least};
use mpmd::prelude::*;
use mpmd::sharding::Sharding;
use mpmd_examples::pipeline::{
    DEVICES, InitialValues, JobSettings, LEARNING_RATE, Number, TrainingJob, check,
};

/// Train a four-stage, tensor-parallel pipeline on 8 devices.
#[derive(Parser)]
#[command(name = "pipeline", version)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Run a small job and compare its results with known figures; exit with 1 if one differs
    #[arg(long)]
    check: bool,
    /// Columns of the activations, rows and columns of the weights
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Rows of the batch
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Number of training steps
    #[arg(long, default_value_t = 20, value_parser = at_least(1))]
    steps: usize,
    /// Microbatches into which the batch is cut; the update uses the mean of their gradients
    #[arg(long, default_value_t = 4, value_parser = at_least(1))]
    microbatches: usize,
    /// Type of all numbers
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Learning rate of gradient descent
    #[arg(long, default_value_t = LEARNING_RATE)]
    learning_rate: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F64,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    args.job.only_on_cpus("pipeline")?;
    mpmd::job::run(&args.job, 4, DEVICES, |p| match (args.check, args.dtype) {
        (true, _) => run_check(p, args.learning_rate),
        (false, Dtype::F32) => Ok(train::<f32>(p, &args)?),
        (false, Dtype::F64) => Ok(train::<f64>(p, &args)?),
    })
}

fn run_check(p: &mut Program, learning_rate: f64) -> anyhow::Result<()> {
    let report = check(p, learning_rate)?;
    if p.is_dry_run() {
        return Ok(());
    }
    if p.process() == ProcessId(0) {
        print!("{report}");
    }
    match report.first_off() {
        None => Ok(()),
        Some(off) => Err(Rejected(format!("a number is off: {off}")).into()),
    }
}

fn train<T: Number>(p: &mut Program, args: &Args) -> Result<()> {
    let settings = JobSettings {
        width: args.width,
        batch: args.batch,
        microbatches: args.microbatches,
        slice: true,
        learning_rate: args.learning_rate,
        start: InitialValues::Random,
    };
    let mut job = TrainingJob::new::<T>(p, &settings)?;

    let start = Instant::now();
    // No step waits for a loss: all are issued before the first value is read.
    let figures = (0..args.steps)
        .map(|_| Ok(job.step(p)?.1))
        .collect::<Result<Vec<_>>>()?;

    let first = Sharding::single_device(p.topology().devices_of(ProcessId(0))[0]);
    let mut losses = Vec::new();
    for figures in [&figures[0], &figures[args.steps - 1]] {
        if let Some(figures) = p.device_put(figures, &first)?.to_host()? {
            losses.push(figures.as_slice::<f64>()?[0]);
        }
    }
    // On process 0 alone.
    if let [first, last] = losses[..] {
        let rate = args.steps as f64 / start.elapsed().as_secs_f64();
        println!("loss {first:.6} in the first step, {last:.6} in the last; {rate:.2} steps/s");
    }
    Ok(())
}
