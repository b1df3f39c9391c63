//! Trains a four-stage, tensor-parallel pipeline on 8 devices, with any number of processes: `cargo
//! run --release --bin pipeline`. With `--check` it runs a small job and compares its results with
//! known figures.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use mpmd::DeviceId;
use mpmd::ProcessId;
use mpmd::prelude::*;
use mpmd::sharding::Sharding;
use mpmd_examples::mm;
use mpmd_examples::pipeline::{DEVICES, Meter, Number, Pipeline, Settings, Start, check};
use mpmd_job::{JobArgs, Rejected};

/// Train a four-stage, tensor-parallel pipeline on 8 devices.
#[derive(Parser)]
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
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Microbatches of a step; their gradients are summed
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    microbatches: u16,
    /// Cut the batch into the microbatches; otherwise each microbatch is the whole batch
    #[arg(long)]
    slice: bool,
    /// Type of all numbers
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Step size; default: 0.04 divided by the number of microbatches, because their gradients are
    /// summed
    #[arg(long)]
    learning_rate: Option<f64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F64,
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    args.job.only_on_cpus("pipeline")?;
    mpmd_job::run(&args.job, 4, DEVICES, |p| match (args.check, args.dtype) {
        (true, _) => run_check(p, args.learning_rate.unwrap_or(mm::LEARNING_RATE)),
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
    let microbatches = usize::from(args.microbatches);
    let settings = Settings {
        width: args.width,
        batch: args.batch,
        microbatches,
        slice: args.slice,
        learning_rate: args.learning_rate.unwrap_or(0.04 / microbatches as f64),
        start: Start::Random,
    };
    let mut job = Pipeline::<T>::new(p, &settings)?;
    job.block_until_ready()?;
    let start = Instant::now();
    let bar = progress(p, args.steps.into());
    let mut shown = Vec::new();
    for step in 0..args.steps {
        let losses = job.step(p)?;
        let loss = job.mean(p, losses)?;
        // Moved to the process that draws the bar. The steps do not wait for it.
        let loss = p.device_put(&loss, Sharding::single_device(DeviceId(0)))?;
        let bar = bar.clone();
        loss.then(move |loss| {
            if let Ok(loss) = loss.and_then(|loss| value::<T>(&loss)) {
                bar.set_message(format!("loss {loss:.6}"));
                bar.inc(1);
            }
        });
        if step == 0 || step + 1 == args.steps {
            shown.push(loss);
        }
    }
    job.block_until_ready()?;
    let total = start.elapsed();
    // Empty except on the process that prints the losses.
    let mut losses = Vec::new();
    for loss in shown {
        losses.extend(loss.to_host()?.map(|loss| value::<T>(&loss)).transpose()?);
    }
    bar.finish_and_clear();
    if let (Some(first), Some(last)) = (losses.first(), losses.last()) {
        let rate = f64::from(args.steps) / total.as_secs_f64();
        println!("loss {first:.6} in the first step, {last:.6} in the last; {rate:.2} steps/s");
    }
    where_time_went(p, job.meter(), total)
}

fn value<T: Number>(loss: &HostArray) -> Result<f64> {
    Ok(loss.as_slice::<T>()?.iter().map(|loss| loss.to_f64()).sum())
}

/// Creates a progress bar of `steps` steps. Process 0 draws it if stderr is a terminal; on other
/// processes it is hidden.
fn progress(p: &Program, steps: u64) -> ProgressBar {
    if p.process() != ProcessId(0) {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:32} step {pos}/{len}  {msg}  {elapsed}, {eta} left")
    {
        bar.set_style(style);
    }
    bar
}

/// Gathers the kernel and all-reduce times of all processes, and prints a table of them on process
/// 0. Every process must call it.
///
/// `total` is the wall-clock time of the training on this process.
fn where_time_went(p: &mut Program, meter: &Meter, total: Duration) -> Result<()> {
    let mine = [meter.computing(), meter.summing(), total].map(|time| time.as_secs_f64());
    let mut lines = Vec::new();
    for process in 0..p.processes() as u32 {
        let [computing, summing, total] =
            p.broadcast_value(ProcessId(process), mine, || Ok(mine))?;
        let devices = p.topology().devices_of(ProcessId(process)).len();
        // Each device has its own thread, so the process has this much time in total.
        let available = total * devices as f64;
        let part = |time: f64| {
            format!("{time:>8.3} s {:>3.0} %", 100.0 * time / available.max(f64::MIN_POSITIVE))
        };
        let rest = (available - computing - summing).max(0.0);
        let [computing, summing, rest] = [part(computing), part(summing), part(rest)];
        lines.push(format!("{process:>7} {devices:>8}  {computing}   {summing}   {rest}"));
    }
    if p.process() == ProcessId(0) {
        println!("process  devices          kernels  in all-reduces   waiting, moving");
        lines.iter().for_each(|line| println!("{line}"));
    }
    Ok(())
}
