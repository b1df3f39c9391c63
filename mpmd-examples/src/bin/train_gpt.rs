//! Trains a byte-level transformer on text as a pipeline, by default with four stages in four
//! processes.
//!
//! ```sh
//! cargo run --release --bin train_gpt                       # on the text of this repository
//! cargo run --release --bin train_gpt -- --stages 2 --processes 2 --steps 100 ~/notes README.md
//! cargo run --release --features cuda --bin train_gpt -- --device cuda        # on GPUs
//! cargo run --release --features cuda --bin train_gpt -- --device cpu,cuda    # first on a CPU
//! ```
//!
//! Ctrl-C and SIGTERM end the program after the current step of training, evaluation or sampling.
//! It writes the files of `--save` and `--losses-out`. Its exit code is then 130 or 143.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use mpmd::aval::DType;
use mpmd::cuda::Math;
use mpmd::pipeline::{Builtin, Schedule, Text as ScheduleText};
use mpmd::topology::{DeviceKind, Topology};
use mpmd::{ProcessId, Program};
use mpmd_examples::gpt::adamw::WarmupCosine;
use mpmd_examples::gpt::bigram::bigram_loss;
use mpmd_examples::gpt::checkpoint::{self, Checkpoint};
use mpmd_examples::gpt::clock::Pass;
use mpmd_examples::gpt::memory::{Expected, Taken};
use mpmd_examples::gpt::params::Model;
use mpmd_examples::gpt::placement::{Placement, Rule};
use mpmd_examples::gpt::progress::{Evaluation, Progress};
use mpmd_examples::gpt::sample::{next_byte, printable};
use mpmd_examples::gpt::train::{Config, StepReport, Trainer, train};
use mpmd_examples::job::{self, JobArgs};
use mpmd_train::data::Text;
use mpmd_train::stop::{StopFlag, exit_code};
use signal_hook::low_level::signal_name;

/// Train a byte-level transformer on text, as a pipeline
#[derive(Parser)]
struct Args {
    /// Files and folders to train on; default: the text of this repository
    paths: Vec<PathBuf>,
    /// Number of blocks [default: 4; 8 if all devices are GPUs]
    #[arg(long, value_parser = at_least(1))]
    layers: Option<usize>,
    /// Width of the model: columns of the activations between blocks. The MLPs have four times as
    /// many hidden columns [default: 128; 512]
    #[arg(long, value_parser = at_least(1))]
    width: Option<usize>,
    /// Attention heads of a block [default: 4; 8]
    #[arg(long, value_parser = at_least(1))]
    heads: Option<usize>,
    /// Bytes of a sequence [default: 128; 256]
    #[arg(long, value_parser = at_least(1))]
    time: Option<usize>,
    /// Sequences of a microbatch [default: 2; 16]
    #[arg(long, value_parser = at_least(1))]
    batch: Option<usize>,
    /// Microbatches of a step [default: 8, or the number in the schedule's file]
    #[arg(long, value_parser = at_least(1))]
    microbatches: Option<usize>,
    /// Number of updates
    #[arg(
        long, default_value_t = Config::default().rates.total as usize, value_parser = at_least(1)
    )]
    steps: usize,
    /// Train for this many seconds instead; the learning rate then follows the time, so losses
    /// differ from run to run
    #[arg(long, conflicts_with = "steps")]
    seconds: Option<f64>,
    /// Highest learning rate [default: 3e-3; 1e-3 with the default width for GPUs]
    #[arg(long = "lr")]
    learning_rate: Option<f64>,
    /// Seed of the initial weights, the sequences of each step, and the sampled text
    #[arg(long, default_value_t = Config::default().seed)]
    seed: u64,
    /// Order of the passes: a built-in schedule (gpipe, 1f1b, eager, interleaved, bfs, zb-h1, zb1p,
    /// zbv, dualpipev), or a file in torch's text format
    #[arg(long, value_name = "NAME|FILE", default_value_t = Config::default().schedule)]
    schedule: String,
    /// Stages of each rank [default: 2 for schedules with several stages per rank, else 1]
    #[arg(long, value_name = "V", value_parser = at_least(1))]
    chunks: Option<usize>,
    /// Stages of the pipeline on all ranks together; surplus stages get no blocks [default: enough
    /// for four ranks, or the number in the schedule's file]
    #[arg(long, value_parser = at_least(1))]
    stages: Option<usize>,
    /// Keep no residuals between a stage's passes; compute the forward pass again before the
    /// backward pass
    #[arg(long)]
    recompute: bool,
    /// Devices of each rank that share the sequences of a microbatch; each stores about 1/F of the
    /// stage's parameters and optimiser state, and gathers the parameters for each step
    #[arg(
        long, value_name = "F", default_value_t = Config::default().fsdp, value_parser = at_least(1)
    )]
    fsdp: usize,
    /// Devices over which a stage's matrices are sharded, for each of the --fsdp devices
    #[arg(
        long,
        value_name = "T",
        alias = "model-parallel",
        default_value_t = Config::default().tensor_parallel,
        value_parser = at_least(1)
    )]
    tensor_parallel: usize,
    /// Sharding rules for the stored parameters and the optimiser's state, in place of those that
    /// follow from --fsdp: JSON, [["pattern", "tactic"], …]
    #[arg(long, value_name = "FILE")]
    strategy: Option<PathBuf>,
    /// Inputs of matrix products on GPUs: f32 keeps them, tf32 and bf16 round them and are faster;
    /// sums are always in f32
    #[arg(long, value_enum, default_value_t)]
    math: ProductMath,
    /// Print the stored and the computed shardings of each stage's parameters, then exit
    #[arg(long)]
    show_sharding: bool,
    /// Text for the model to continue after the training
    #[arg(long, default_value = "/// The ")]
    prompt: String,
    /// Number of bytes to sample after the prompt
    #[arg(long, default_value_t = 200)]
    sample: usize,
    /// Sampling temperature; 0 always takes the likeliest byte
    #[arg(long, default_value_t = 0.7)]
    temperature: f64,
    /// Stop after this update; --save and --load can continue the training later
    #[arg(long, value_name = "STEP")]
    stop_after: Option<u64>,
    /// Write parameters and the optimiser's state to this file at the end, as safetensors
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Continue from a file of --save, with any number of stages and processes
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,
    /// Write each step's number, its loss, and the bits of the loss in hexadecimal to this file
    #[arg(long, value_name = "FILE")]
    losses_out: Option<PathBuf>,
    #[command(flatten)]
    job: JobArgs,
}

/// Format to which GPUs round the inputs of matrix products. `F32` keeps them; the sums are always
/// in `f32`.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum ProductMath {
    #[default]
    F32,
    Tf32,
    Bf16,
}

impl From<ProductMath> for Math {
    fn from(math: ProductMath) -> Self {
        match math {
            ProductMath::F32 => Self::F32,
            ProductMath::Tf32 => Self::Tf32,
            ProductMath::Bf16 => Self::Bf16,
        }
    }
}

fn at_least(least: u64) -> RangedU64ValueParser<usize> {
    // Larger sizes would not fit into memory. The bound prevents overflow in products of sizes.
    RangedU64ValueParser::new().range(least..=1 << 20)
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    // Checked before any process is started, so that a wrong path or size gives one message.
    let mut config = args.config()?;
    config.strategy = args.strategy.as_deref().map(read_strategy).transpose()?;
    config.check()?;
    if args.show_sharding {
        print!("{}", sharding_tables(&config)?);
        return Ok(ExitCode::SUCCESS);
    }
    let text = Arc::new(if args.paths.is_empty() {
        Text::of_this_repository()
    } else {
        Text::of(&args.paths)
    }?);
    // Set if this process is one of the job's. A launcher learns of the signal from their exit
    // codes.
    let stopped = OnceLock::new();
    let code = job::run(&args.job, config.devices().min(4), config.devices(), |p| {
        let signal = run(p, &args, &config, &text)?;
        signal.into_iter().for_each(|signal| _ = stopped.set(exit_code(signal)));
        anyhow::Ok(())
    })?;
    Ok(stopped
        .get()
        .filter(|_| code == ExitCode::SUCCESS)
        .map_or(code, |code| ExitCode::from(*code)))
}

impl Args {
    fn config(&self) -> anyhow::Result<Config> {
        let total = self.steps as u64;
        let defaults = match self.job.device_kinds()? {
            Some(kinds) if kinds.iter().all(|kind| *kind == DeviceKind::Cuda) => Config::for_gpus(),
            _ => Config::default(),
        };
        let width = self.width.unwrap_or(defaults.model.width);
        let model = Model {
            layers: self.layers.unwrap_or(defaults.model.layers),
            width,
            heads: self.heads.unwrap_or(defaults.model.heads),
            hidden: 4 * width,
            time: self.time.unwrap_or(defaults.model.time),
        };
        let warmup = defaults.rates.warmup.min(total / 4);
        // With a given width, the learning rate is the same on every kind of device.
        let usual = if self.width.is_some() { Config::default().rates } else { defaults.rates };
        let peak = self.learning_rate.unwrap_or(usual.peak);
        let rates = WarmupCosine { peak, floor: 0.05 * peak, warmup, total };
        let builtin = Builtin::named(&self.schedule);
        let order = if builtin.is_some() { None } else { Some(read_schedule(&self.schedule)?) };
        let of_order = |number: fn(&Schedule) -> usize| order.as_ref().map(number);
        let chunks = self.chunks.or(builtin.map(Builtin::default_chunks)).unwrap_or(1);
        Ok(Config {
            model,
            stages: self.stages.or(of_order(Schedule::stages)).unwrap_or(defaults.stages * chunks),
            chunks,
            fsdp: self.fsdp,
            tensor_parallel: self.tensor_parallel,
            batch: self.batch.unwrap_or(defaults.batch),
            microbatches: self
                .microbatches
                .or(of_order(Schedule::microbatches))
                .unwrap_or(defaults.microbatches),
            schedule: self.schedule.clone(),
            order,
            recompute: self.recompute,
            rates,
            seed: self.seed,
            math: self.math.into(),
            ..defaults
        })
    }
}

/// Reads a schedule from a file in torch's text format, and names it after the file. A file that is
/// unreadable or invalid is an error.
fn read_schedule(path: &str) -> anyhow::Result<Schedule> {
    let text = std::fs::read_to_string(path).with_context(|| {
        let names = Builtin::ALL.map(Builtin::name).join(", ");
        format!("schedule {path:?} is neither built in ({names}) nor a file that can be read")
    })?;
    let name =
        Path::new(path).file_stem().map_or_else(|| path.into(), std::ffi::OsStr::to_string_lossy);
    let text = ScheduleText::parse(&text, None).with_context(|| path.to_owned())?;
    text.schedule(name).with_context(|| path.to_owned())
}

/// Trains, saves a checkpoint if asked to, evaluates, samples, and prints the results on process 0.
///
/// Returns the number of the signal that ended the run early, or `None`.
fn run(
    p: &mut Program,
    args: &Args,
    config: &Config,
    text: &Arc<Text>,
) -> anyhow::Result<Option<i32>> {
    // A dry run as process 0 must not touch files.
    let first = p.process() == ProcessId(0) && !p.is_dry_run();
    let losses_out = args.losses_out.as_deref().filter(|_| first).map(create).transpose()?;
    if first {
        announce(p, text, args, config);
    }
    let mut trainer = Trainer::<f32>::new(p, text, config)?;
    if let Some(path) = &args.load {
        load(p, &mut trainer, path)?;
    }
    let memory = trainer.memory(p, true)?;
    let memory = Expected::agree(p, memory)?;
    if first {
        println!("{}", memory.line());
    }
    let stop = StopFlag::install().context("cannot watch for Ctrl-C")?;
    let start = Instant::now();
    let length =
        Length { rates: config.rates, seconds: args.seconds, stop_after: args.stop_after, start };
    let mut progress = first.then(|| Progress::new(args.seconds, config, trainer.steps(), start));
    let mut losses = Vec::new();
    let more = |steps| length.rate(steps).filter(|_| !stop.is_set());
    let mut on_step = |report: StepReport| {
        losses.push((report.step, report.loss));
        progress.iter_mut().for_each(|progress| progress.show(report));
    };
    let warm = trainer.steps() + Taken::WARM_UP;
    train(p, &mut trainer, |steps| more(steps).filter(|_| steps < warm), &mut on_step)?;
    trainer.wait(p)?;
    let after_warm_up = p.memory();
    train(p, &mut trainer, more, &mut on_step)?;
    trainer.wait(p)?;
    let taken = Taken::new(after_warm_up, p.memory());
    let took = start.elapsed();
    progress.iter().for_each(Progress::finish);
    if let Some(path) = &args.save {
        save(p, &trainer, path)?;
    }
    let table = time_table(p, &trainer, took)? + &memory.beside(p, taken)?;
    let (mut held_out, mut continuation) = (None, Vec::new());
    if stop.agree(p)?.is_none() {
        let mut evaluation = Evaluation::default();
        held_out = trainer.held_out_loss(p, |done, all| {
            evaluation.show(done, all);
            !stop.is_set()
        })?;
    }
    if stop.agree(p)?.is_none() {
        let next =
            |logits: &[f32], position| next_byte(logits, args.temperature, args.seed, position);
        let choose = |logits: &[f32], position| (!stop.is_set()).then(|| next(logits, position));
        continuation = trainer.sample(p, args.prompt.as_bytes(), args.sample, choose)?;
    }
    let signal = stop.agree(p)?;
    if !first {
        return Ok(signal);
    }
    if let Some((file, path)) = losses_out {
        write_losses(file, &losses).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &args.save {
        println!("saved after step {} to {}", trainer.steps(), path.display());
    }
    let mut rows = vec![training_loss(&losses)];
    if signal.is_none() || held_out.is_some() {
        rows.push(("held-out loss".to_owned(), held_out));
    }
    if let Some(signal) = signal {
        let name = signal_name(signal).unwrap_or("a signal");
        eprintln!("stopped by {name} after step {}", trainer.steps());
    } else {
        let bigram = bigram_loss(text, trainer.sequences().held_out());
        rows.push(("held-out loss of a bigram table".to_owned(), bigram));
    }
    show_losses(&rows);
    let seconds = took.as_secs_f64();
    let rate = (losses.len() * config.tokens()) as f64 / seconds;
    println!("{} steps in {seconds:.1} s: {rate:.0} tokens/s", losses.len());
    if signal.is_none() {
        println!("\n{}{}\n", args.prompt, printable(&continuation));
    }
    print!("{table}");
    Ok(signal)
}

/// Reads sharding rules, ordered pairs of pattern and tactic, from a JSON file.
fn read_strategy(path: &Path) -> anyhow::Result<Vec<Rule>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let rules = serde_json::from_str(&text);
    rules.with_context(|| format!("{}: no list of pairs [\"pattern\", \"tactic\"]", path.display()))
}

/// Returns a text that lists, for each stage, the stored and the computed shardings of its
/// parameters.
fn sharding_tables(config: &Config) -> anyhow::Result<String> {
    let mut text = String::new();
    for (stage, placement) in config.placements(DType::F32)?.iter().enumerate() {
        let Placement { stored: Some(stored), compute: Some(compute), .. } = placement else {
            text += &format!("stage {stage} has no parameters\n");
            continue;
        };
        text += &format!("stage {stage}, as its parameters are stored:\n{stored}\n");
        text += &format!("stage {stage}, as they are computed with:\n{compute}\n");
    }
    Ok(text)
}

/// The end of the training, given by steps or by seconds, and the learning rate of each step.
struct Length {
    rates: WarmupCosine,
    seconds: Option<f64>,
    stop_after: Option<u64>,
    start: Instant,
}

impl Length {
    /// Returns the learning rate of the next update after `steps` updates, or `None` if the
    /// training ends there.
    fn rate(&self, steps: u64) -> Option<f64> {
        if self.stop_after.is_some_and(|last| steps >= last) {
            return None;
        }
        let Some(seconds) = self.seconds else {
            return (steps < self.rates.total).then(|| self.rates.rate(steps + 1));
        };
        /// Number of equal parts of the training time. The learning rate follows these parts in
        /// place of steps.
        const PARTS: u64 = 1 << 20;
        let done = self.start.elapsed().as_secs_f64() / seconds;
        let rates = WarmupCosine { total: PARTS, warmup: PARTS / 16, ..self.rates };
        (done < 1.0).then(|| rates.rate((done * PARTS as f64) as u64 + 1))
    }
}

fn announce(p: &Program, text: &Text, args: &Args, config: &Config) {
    let Model { layers, width, heads, time, .. } = config.model;
    println!(
        "text: {} bytes in {} files, one block in ten held out",
        text.bytes().len(),
        text.files()
    );
    println!(
        "model: {} parameters: {layers} blocks of width {width}, {heads} heads, sequences of \
         {time} bytes",
        config.model.parameters(),
    );
    let (ranks, devices) = (config.ranks(), config.grid().devices());
    let several = if ranks == config.stages { String::new() } else { format!(" on {ranks} ranks") };
    println!(
        "pipeline: {} stages{several} of {devices} {}, {}, over {} {}",
        config.stages,
        if devices == 1 { "device" } else { "devices" },
        config.schedule,
        p.processes(),
        if p.processes() == 1 { "process" } else { "processes" }
    );
    println!("devices: {}", kinds_line(p.topology(), args.math));
    if devices > 1 {
        println!(
            "devices of a rank: {} of fsdp times {} of tensor parallelism",
            config.fsdp, config.tensor_parallel
        );
    }
    let length = match args.seconds {
        Some(seconds) => format!("{seconds} seconds"),
        None => format!("{} steps", config.rates.total),
    };
    println!(
        "training: {length}, each step {} microbatches of {} sequences: {} bytes",
        config.microbatches,
        config.batch,
        config.tokens()
    );
}

/// Returns the device kind of each process, or one kind if all are equal. With GPUs, adds the
/// format of the inputs of matrix products.
fn kinds_line(topology: &Topology, math: ProductMath) -> String {
    let kind = |process: usize| {
        let gpus = topology.has_kind(ProcessId(process as u32), DeviceKind::Cuda);
        if gpus { DeviceKind::Cuda } else { DeviceKind::Cpu }
    };
    let kinds: Vec<DeviceKind> = (0..topology.processes()).map(kind).collect();
    let names = match kinds.split_first() {
        Some((first, rest)) if rest.iter().all(|kind| kind == first) => first.name().to_owned(),
        _ => {
            let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
            format!("{}, by process", names.join(", "))
        }
    };
    if !kinds.contains(&DeviceKind::Cuda) {
        return names;
    }
    format!("{names}; cuda multiplies in {}", format!("{math:?}").to_lowercase())
}

/// Takes (step, loss) pairs. Returns (label, mean loss) of the last 20 pairs, or of all if there
/// are fewer. The mean is `None` without pairs.
fn training_loss(losses: &[(u64, f64)]) -> (String, Option<f64>) {
    let last = &losses[losses.len().saturating_sub(20)..];
    let mean = last.iter().map(|(_, loss)| loss).sum::<f64>() / last.len().max(1) as f64;
    (format!("training loss, last {} steps", last.len()), (!last.is_empty()).then_some(mean))
}

/// Prints losses, given in nats per byte, in nats and in bits per byte. A `None` is printed as a
/// dash.
fn show_losses(rows: &[(String, Option<f64>)]) {
    println!("{:40}{:>10}{:>10}", "per byte", "nats", "bits");
    for (name, nats) in rows {
        match nats {
            Some(nats) => println!("{name:40}{nats:>10.4}{:>10.4}", nats / std::f64::consts::LN_2),
            None => println!("{name:40}{:>10}{:>10}", "-", "-"),
        }
    }
}

/// Returns a table of each process's kernel and idle times. `took` is the wall-clock time of the
/// training on this process. Every process must call this function, and each gets the same text.
///
/// Ranks are spread over the processes in order. With one stage per rank, a process waits for
/// outputs of the process before it and for gradients of the process after it. Otherwise it waits
/// for those of any process. The column `rest` is idle time and other waits: for the norm of all
/// gradients, or for the process's own data.
fn time_table(p: &mut Program, trainer: &Trainer<f32>, took: Duration) -> anyhow::Result<String> {
    let one_each = trainer.config().stages == trainer.config().ranks();
    let waits = if one_each { ["waits for"; 2] } else { ["waits, outputs", "waits, gradients"] };
    let names = [
        "forward",
        "input grad",
        "weight grad",
        "update",
        waits[0],
        waits[1],
        "rest",
        "all-reduces",
    ];
    let mut table = format!("{:7}", "process");
    for name in names {
        let width = if name.starts_with("waits") { 19 } else { 17 };
        table += &format!("{name:>width$}");
    }
    table.push('\n');
    let seconds = |times: [Duration; 5]| times.map(|time| time.as_secs_f64()).to_vec();
    let mine =
        (seconds(trainer.clock().times()), seconds(trainer.clock().idle()), took.as_secs_f64());
    let processes = p.processes() as u32;
    for process in 0..processes {
        let (times, idle, took) =
            p.broadcast_value(ProcessId(process), mine.clone(), || Ok(mine.clone()))?;
        let devices = p.topology().devices_of(ProcessId(process)).len();
        // Each device has its own thread, so the process has this much time in total.
        let available = (took * devices as f64).max(f64::MIN_POSITIVE);
        let part = |time: f64| format!("{time:>8.2} s {:>3.0} %", 100.0 * time / available);
        let busy = &times[..Pass::AllReduce as usize];
        let before = if process > 0 || !one_each { idle[Pass::Forward as usize] } else { 0.0 };
        let last = process + 1 == processes && one_each;
        let after = if last { 0.0 } else { idle[Pass::BackwardInput as usize] };
        let rest = (available - busy.iter().sum::<f64>() - before - after).max(0.0);
        table += &format!("{process:>7}");
        busy.iter().for_each(|time| table += &format!("{:>17}", part(*time)));
        let neighbours = [
            (process.checked_sub(1), before),
            (Some(process + 1).filter(|p| *p < processes), after),
        ];
        for (neighbour, time) in neighbours {
            let cell = match neighbour {
                _ if !one_each => part(time).trim().to_owned(),
                None => "-".to_owned(),
                Some(neighbour) => format!("{neighbour}: {}", part(time).trim()),
            };
            table += &format!("{cell:>19}");
        }
        // All-reduces are part of the passes too, and counted in both.
        table += &format!("{:>17}{:>17}\n", part(rest), part(times[Pass::AllReduce as usize]));
    }
    if (0..processes).any(|process| p.topology().has_kind(ProcessId(process), DeviceKind::Cuda)) {
        table += "for cuda devices this is the time of launching work; a trace shows the time \
            in which they run it\n";
    }
    Ok(table)
}

/// Metadata keys of a checkpoint: `steps` is the number of updates, and `heads` the number of
/// attention heads of a block.
const STEPS: &str = "steps";
const HEADS: &str = "heads";

fn save(p: &mut Program, trainer: &Trainer<f32>, path: &Path) -> anyhow::Result<()> {
    let metadata = BTreeMap::from([
        (STEPS.to_owned(), trainer.steps().to_string()),
        (HEADS.to_owned(), trainer.config().model.heads.to_string()),
    ]);
    Ok(checkpoint::save(p, path, &trainer.state(), &metadata)?)
}

fn load(p: &mut Program, trainer: &mut Trainer<f32>, path: &Path) -> anyhow::Result<()> {
    let file = Checkpoint::open(path)?;
    let number = |key: &str| -> anyhow::Result<u64> {
        let text =
            file.metadata(key).with_context(|| format!("{}: it has no {key}", path.display()))?;
        text.parse().with_context(|| format!("{}: {key} {text:?} is no number", path.display()))
    };
    let (steps, heads) = (number(STEPS)?, number(HEADS)?);
    let expected = trainer.config().model.heads;
    anyhow::ensure!(heads == expected as u64, "{}: {heads} heads, not {expected}", path.display());
    trainer.set_state(p, steps, |p, name, aval, sharding| file.load(p, name, &aval, sharding))?;
    Ok(())
}

fn create(path: &Path) -> anyhow::Result<(File, &Path)> {
    let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok((file, path))
}

fn write_losses(file: File, losses: &[(u64, f64)]) -> std::io::Result<()> {
    let mut file = BufWriter::new(file);
    for (step, loss) in losses {
        writeln!(file, "{step} {loss} {:016x}", loss.to_bits())?;
    }
    file.flush()
}
