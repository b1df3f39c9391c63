//! Trains a small model to predict the next byte of a text from the last 16. It is a pipeline of
//! four stages, each on its own device, by default in four processes.
//!
//! ```sh
//! cargo run --release --bin train_mlp                       # on the text of this repository
//! cargo run --release --bin train_mlp -- --processes 2 ~/notes README.md
//! ```

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use indicatif::{ProgressBar, ProgressStyle};
use mpmd::{ProcessId, Program};
use mpmd_examples::job::{self, JobArgs};
use mpmd_examples::next_byte_data::HeldOut;
use mpmd_examples::next_byte_job::{Config, Outcome, STAGES, train};
use mpmd_examples::text::{ByteWindows as _, Text};

/// Train a next-byte model on text, as a pipeline of four stages
#[derive(Parser)]
struct Args {
    /// Files and folders to train on; default: the text of this repository
    paths: Vec<PathBuf>,
    /// Number of updates
    #[arg(long, default_value_t = Config::default().steps, value_parser = at_least(1))]
    steps: usize,
    /// Seed of the initial weights and of the windows of each step
    #[arg(long, default_value_t = Config::default().seed)]
    seed: u64,
    /// Width of a byte's embedding
    #[arg(long, default_value_t = Config::default().width, value_parser = at_least(1))]
    width: usize,
    /// Width of the hidden layers
    #[arg(long, default_value_t = Config::default().hidden, value_parser = at_least(1))]
    hidden: usize,
    /// Microbatches of a step
    #[arg(long, default_value_t = Config::default().microbatches, value_parser = at_least(1))]
    microbatches: usize,
    /// Windows of a microbatch
    #[arg(long, default_value_t = Config::default().rows, value_parser = at_least(1))]
    rows: usize,
    /// Step size of the first update; it falls linearly to a tenth by the end
    #[arg(long = "lr", default_value_t = Config::default().learning_rate)]
    learning_rate: f64,
    /// Write each step's number, its loss, and the bits of the loss in hexadecimal to this file
    #[arg(long, value_name = "FILE")]
    losses_out: Option<PathBuf>,
    #[command(flatten)]
    job: JobArgs,
}

fn at_least(least: u64) -> RangedU64ValueParser<usize> {
    // Larger sizes would not fit into memory. The bound prevents overflow in products of sizes.
    RangedU64ValueParser::new().range(least..=1 << 30)
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    args.job.only_on_cpus("train_mlp")?;
    // Read before any process is started, so that a wrong path gives one message. Each process
    // reads it again.
    let text = Arc::new(if args.paths.is_empty() {
        Text::of_this_repository()
    } else {
        Text::of(&args.paths)
    }?);
    job::run(&args.job, STAGES, STAGES, |p| run(p, &args, &text))
}

fn run(p: &mut Program, args: &Args, text: &Arc<Text>) -> anyhow::Result<()> {
    let config = args.config();
    // The losses are read on the first stage, which process 0 owns.
    if p.process() != ProcessId(0) || p.is_dry_run() {
        train(p, text, &config, |_, _| {})?;
        return Ok(());
    }
    let losses_out = args.losses_out.as_deref().map(create).transpose()?;
    announce(p, text, &config);
    let mut progress = Progress::new(&config);
    let outcome = train(p, text, &config, |step, loss| progress.show(step, loss))?;
    let took = progress.finish();
    if let Some((file, path)) = losses_out {
        write_losses(file, &outcome.losses)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    conclude(text, &config, &outcome, took);
    Ok(())
}

impl Args {
    fn config(&self) -> Config {
        let Self { steps, seed, width, hidden, microbatches, rows, learning_rate, .. } = *self;
        Config {
            steps,
            seed,
            width,
            hidden,
            microbatches,
            rows,
            learning_rate,
            ..Config::default()
        }
    }
}

fn announce(p: &Program, text: &Text, config: &Config) {
    println!(
        "text: {} bytes in {} files, one block in ten held out",
        text.bytes().len(),
        text.files()
    );
    println!(
        "model: {} parameters in {STAGES} stages, on {STAGES} devices of {} {}",
        config.parameters(),
        p.processes(),
        if p.processes() == 1 { "process" } else { "processes" }
    );
    println!(
        "training: {} steps of {} microbatches of {} windows",
        config.steps, config.microbatches, config.rows
    );
}

/// Shows the progress of a training on stderr: a bar on a terminal, otherwise a line for about each
/// tenth of the steps.
struct Progress {
    bar: ProgressBar,
    steps: usize,
    windows: usize,
    start: Instant,
    /// Time from the creation of this value to the last loss shown.
    took: Duration,
}

impl Progress {
    fn new(config: &Config) -> Self {
        let bar = ProgressBar::new(config.steps as u64);
        let template = "{bar:30} step {pos}/{len}  {msg}  {eta} left";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        Self {
            bar,
            steps: config.steps,
            windows: config.windows(),
            start: Instant::now(),
            took: Duration::ZERO,
        }
    }

    fn show(&mut self, step: usize, loss: f32) {
        let done = step + 1;
        self.took = self.start.elapsed();
        let rate = (done * self.windows) as f64 / self.took.as_secs_f64();
        let message = format!("loss {loss:.3}  {rate:.0} bytes/s");
        if !self.bar.is_hidden() {
            self.bar.set_message(message);
            self.bar.set_position(done as u64);
        } else if done == 1 || done == self.steps || done.is_multiple_of(self.steps.div_ceil(10)) {
            eprintln!("step {done}/{}  {message}", self.steps);
        }
    }

    /// Ends the bar. Returns the time from the bar's creation to the last loss shown.
    fn finish(self) -> Duration {
        self.bar.finish();
        if !self.bar.is_hidden() {
            // The bar leaves the cursor at its end.
            eprintln!();
        }
        self.took
    }
}

fn conclude(text: &Text, config: &Config, outcome: &Outcome, took: Duration) {
    let last = &outcome.losses[outcome.losses.len().saturating_sub(50)..];
    let training = last.iter().map(|loss| f64::from(*loss)).sum::<f64>() / last.len() as f64;
    let rows = [
        (format!("training loss, last {} steps", last.len()), Some(training)),
        (
            format!(
                "held-out loss, {} windows",
                HeldOut::new(text, config.held_out_windows).windows()
            ),
            outcome.held_out_loss,
        ),
        ("held-out loss of byte frequencies".to_owned(), text.byte_frequency_loss()),
    ];
    println!("{:40}{:>10}{:>10}", "per byte", "nats", "bits");
    for (name, nats) in rows {
        match nats {
            Some(nats) => println!("{name:40}{nats:>10.4}{:>10.4}", nats / std::f64::consts::LN_2),
            None => println!("{name:40}{:>10}{:>10}", "-", "-"),
        }
    }
    let seconds = took.as_secs_f64();
    println!(
        "{} steps in {seconds:.1} s: {:.1} steps/s, {:.0} bytes/s",
        config.steps,
        config.steps as f64 / seconds,
        (config.steps * config.windows()) as f64 / seconds
    );
}

fn create(path: &Path) -> anyhow::Result<(File, &Path)> {
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok((file, path))
}

fn write_losses(file: File, losses: &[f32]) -> std::io::Result<()> {
    let mut file = BufWriter::new(file);
    for (step, loss) in losses.iter().enumerate() {
        writeln!(file, "{step} {loss} {:08x}", loss.to_bits())?;
    }
    file.flush()
}
