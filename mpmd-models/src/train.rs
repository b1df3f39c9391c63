//! Training of a model on text.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::ensure;
use mpmd::aval::DType;
use mpmd::pipeline::{Builtin, Schedule};
use mpmd::topology::Mesh;
use mpmd::train::data::{Data, HELD_OUT_EVERY, Packed, Sequence, Text, Windows};
use mpmd::train::stop::exit_code;
use mpmd::train::tensors::check_folder;
use mpmd::train::{AdamW, Checkpoints, Rate, Run, Trainer};
use mpmd::{Commits, Error, MpmdArray, ProcessId, Program, Result};
use mpmd_job::{Elastic, JobArgs, at_least, not_negative, say};
use serde::Serialize;

use crate::cut::{CutArgs, Held};
use crate::examples::{read_examples, spread_examples};
use crate::folder::Folder;
use crate::inputs::{Files, compared};
use crate::lora::{Lora, merged};
use crate::publish::{PublishArgs, Weights};
use crate::save::{save, save_adapter};
use crate::stages::Stages;
use crate::tokens::{Tokens, check_inputs};
use crate::unexpected;

/// Number of checkpoints that stay in their folder.
const KEPT: usize = 2;

/// The numbers that a model computes with.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, clap::ValueEnum)]
pub enum Compute {
    /// Those of its weights.
    #[default]
    F32,
    /// bf16, which has the range of f32 and 8 bits.
    Bf16,
    /// f16, which has 11 bits; gradients below 6e-8 are lost.
    F16,
}

/// Arguments of a training.
#[derive(Clone, Debug, clap::Args)]
pub struct TrainArgs {
    /// Texts to train on: files and folders
    #[arg(id = "TEXT")]
    pub paths: Vec<PathBuf>,
    /// Train on the completions and replies of this file, in place of texts: lines of JSON with
    /// `prompt` and `completion`, or `messages` for the folder's chat template
    #[arg(long, value_name = "FILE", conflicts_with = "TEXT")]
    pub data: Option<PathBuf>,
    /// Evaluate on this text, or this file of examples; default: every tenth part of the others
    #[arg(long, value_name = "FILE")]
    pub held_out: Option<PathBuf>,
    /// Number of updates, those before a continued checkpoint included
    #[arg(long, default_value_t = 100, value_parser = at_least(1))]
    pub steps: usize,
    /// Highest learning rate; it falls linearly to a tenth
    #[arg(long, default_value_t = 2e-5, value_parser = not_negative)]
    pub lr: f64,
    /// Updates in which the learning rate rises linearly from zero
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub warmup: u64,
    /// Tokens of a window, or of a row into which examples are packed
    #[arg(long, default_value_t = 256, value_parser = at_least(1))]
    pub time: usize,
    /// Windows or rows of a microbatch
    #[arg(long, default_value_t = 1, value_parser = at_least(1))]
    pub rows: usize,
    /// Microbatches of an update
    #[arg(long, default_value_t = 8, value_parser = at_least(1))]
    pub microbatches: usize,
    /// Order of the passes: a built-in schedule, such as gpipe, 1f1b, interleaved or zb-h1
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    pub schedule: String,
    /// Seed of the windows of each step, and of the first values of a new model or LoRA's matrices
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Largest norm of the mean gradient; larger gradients are scaled down to it
    #[arg(long, value_name = "NORM", value_parser = not_negative)]
    pub clip: Option<f64>,
    /// Weight decay of the matrices
    #[arg(long, value_name = "DECAY", default_value_t = 0.01, value_parser = not_negative)]
    pub weight_decay: f64,
    /// Numbers that the model computes with, where its weights are f32; these, their gradients, the
    /// optimiser's state and losses stay f32
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub compute: Compute,
    /// Train only matrices of LoRA with this rank, beside the weights of all projections
    #[arg(long, value_name = "RANK", value_parser = at_least(1))]
    pub lora: Option<usize>,
    /// Factor of LoRA's products, before division by the rank; default: twice the rank
    #[arg(long, value_name = "ALPHA", requires = "lora")]
    pub lora_alpha: Option<f64>,
    /// Save LoRA's matrices in this folder, as the library `peft` has them
    #[arg(long, value_name = "DIR", requires = "lora")]
    pub save_adapter: Option<PathBuf>,
    /// Save the trained model in this folder, in the form of the folder that it comes from
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Keep the two newest checkpoints in this folder, and continue from the newest one
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,
    /// Updates between checkpoints; there is one at the end in any case
    #[arg(long, value_name = "STEPS", requires = "checkpoints", value_parser = at_least(1))]
    pub save_every: Option<usize>,
    /// Write a line of JSON for each update to this file
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Go on when a process is lost: its place goes to a spare, or the processes that are left take
    /// over its stages, or the layers are divided anew, within --memory. Processes that come later
    /// are taken in.
    /// SIGTERM and SIGUSR1 end one process in order
    #[arg(long, conflicts_with = "publish")]
    pub elastic: bool,
    /// The publication of the weights.
    #[command(flatten)]
    pub publish: PublishArgs,
}

impl TrainArgs {
    /// Returns the settings of LoRA. `None` if all parameters are trained.
    pub fn lora(&self) -> Option<Lora> {
        let rank = self.lora?;
        Some(Lora { rank, alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64) })
    }

    /// Returns the schedule for this number of stages.
    fn schedule(&self, stages: usize) -> anyhow::Result<Schedule> {
        let chunks = Builtin::named(&self.schedule).map_or(1, Builtin::default_chunks);
        let (name, ranks) = (&self.schedule, stages / chunks);
        ensure!(
            ranks * chunks == stages,
            "{name} has {chunks} stages a rank: --stages {stages} is no multiple of it"
        );
        Ok(Schedule::named(name, ranks, self.microbatches, Some(chunks))?)
    }
}

/// A model under training, divided over devices.
struct Divided {
    model: Stages,
    schedule: Schedule,
    /// The number of devices of each rank.
    devices: Vec<usize>,
    /// The mesh of each stage.
    meshes: Vec<Mesh>,
}

impl Divided {
    /// Divides a model over as many stages as the arguments say.
    ///
    /// # Errors
    ///
    /// If the arguments do not fit the model or each other, or memory is too small.
    fn new(source: &Folder, args: &TrainArgs, cut: &CutArgs) -> anyhow::Result<Self> {
        let stages = cut.stages();
        let schedule = args.schedule(stages)?;
        let held = if args.lora.is_some() { Held::FROZEN } else { Held::TRAINING };
        let model = Stages::new(source, stages, args.time)?.cut(cut, held)?;
        let model = model.lora(args.lora(), args.seed);
        let model = model.packed(args.data.is_some());
        let rank_of = |stage| schedule.rank_of(stage);
        let (devices, meshes) = (model.devices(rank_of)?, model.meshes(rank_of)?);
        Ok(Self { model, schedule, devices, meshes })
    }

    /// Divides a model over the processes of a job that has lost or got some. They have equally
    /// many of the stages, or else the layers are divided anew, over a stage for each process.
    /// Where that is not possible some processes have more stages than others.
    ///
    /// # Errors
    ///
    /// As for [`Divided::new`].
    fn over(
        source: &Folder,
        args: &TrainArgs,
        cut: &CutArgs,
        processes: usize,
    ) -> anyhow::Result<Self> {
        let first = Self::new(source, args, cut)?;
        let ranks = first.schedule.ranks();
        // A process with more stages than at the start may have too little memory.
        if processes == ranks || ranks.is_multiple_of(processes) && cut.memory.is_empty() {
            return Ok(first);
        }
        match first.anew(source, args, cut, processes) {
            Err(_) if cut.memory.is_empty() => Ok(first),
            anew => anew,
        }
    }

    /// Divides the model over more or fewer ranks.
    fn anew(
        &self,
        source: &Folder,
        args: &TrainArgs,
        cut: &CutArgs,
        ranks: usize,
    ) -> anyhow::Result<Self> {
        let mut pairs = self.devices.windows(2);
        ensure!(
            pairs.all(|pair| pair[0] == pair[1]) && cut.cut.is_empty(),
            "the layers cannot be divided anew: with --elastic and --memory, leave --cut out, and \
             give one number of devices for all stages"
        );
        let chunks = self.schedule.stages() / self.schedule.ranks();
        let most = source.config().num_hidden_layers / chunks;
        let stages = ranks.min(most.max(self.schedule.ranks())) * chunks;
        // A device that may come to have another stage has no more memory than before.
        let memory = cut.memory.iter().min().map_or(Vec::new(), |least| vec![*least; stages]);
        Self::new(source, args, &CutArgs { stages, memory, ..cut.clone() })
    }
}

/// The line that a training prints.
#[derive(Serialize)]
struct Trained {
    /// Number of updates, those before a continued checkpoint included.
    steps: u64,
    /// Mean loss of the last step, in nats per token.
    loss: Option<f64>,
    /// Mean loss of the held-out tokens, in nats per token.
    held_out_loss: Option<f64>,
}

/// Trains a model on texts, and saves it. Process 0 prints the outcome as a line of JSON to stdout.
/// Checks the folder and the texts before a process is started. Process 0 alone reads the texts, in
/// the job.
///
/// # Errors
///
/// If the folder, the tokenizer or a text is invalid, if the arguments do not fit the model or each
/// other, or if the job could not be started.
pub fn run(
    source: &Folder,
    args: &TrainArgs,
    cut: &CutArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    source.check_training()?;
    ensure!(
        !args.paths.is_empty() || args.data.is_some(),
        "there is nothing to train on: give a TEXT, --data FILE or --score FILE"
    );
    let Divided { model, devices, .. } = Divided::new(source, args, cut)?;
    model.check_trained()?;
    let (mut texts, mut files) = (args.paths.clone(), Vec::new());
    files.extend(args.data.clone());
    let held_out = if args.data.is_some() { &mut files } else { &mut texts };
    held_out.extend(args.held_out.clone());
    check_inputs(source, &texts, &files)?;
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    let saved = [("--save", &args.save), ("--save-adapter", &args.save_adapter)];
    let mut folders = vec![source.path().canonicalize().ok()];
    for (name, to) in saved.iter().filter_map(|(name, to)| Some((name, to.as_ref()?))) {
        // Found before hours of training.
        std::fs::create_dir_all(to)
            .map_err(|why| unexpected(to, "", "a folder for the trained model", why))?;
        let to = to.canonicalize().ok();
        ensure!(
            !folders.contains(&to),
            "{name}: another save, --model or --new has the same folder"
        );
        folders.push(to);
    }
    let publication = args.publish.publication()?;
    let inputs = Inputs::new(args);
    // Process 0 alone writes them.
    let job = &compared(job, source, &inputs.all()).may_differ(["metrics"]);
    // Set if this process is one of the job's. A launcher learns of the signal from their exit
    // codes.
    let stopped = OnceLock::new();
    let program = |p: &mut Program, commits: Option<&Commits>| {
        if let Some(to) = &args.save {
            check_folder(p, to, source.saved_bytes())?;
        }
        if let Some(to) = &args.save_adapter {
            // It is small beside the model.
            check_folder(p, to, 0)?;
        }
        let divided = match p.epoch() {
            1 => Divided::new(source, args, cut)?,
            _ => Divided::over(source, args, cut, p.processes())?,
        };
        let Divided { model, schedule, meshes, .. } = divided;
        let data = data(p, source, args, &inputs)?;
        let mut trainer = trainer(p, &model, &meshes, schedule, args)?;
        if p.process() == ProcessId(0) && p.epoch() == 1 && !p.is_dry_run() {
            say(&trainer.computed_by(p));
        }
        let mut run = Run::steps(args.steps as u64);
        let mut step = match commits.map(|commits| trainer.resume(p, commits, None)) {
            None => 0,
            Some(Err(Error::CommitsLost { .. })) if args.checkpoints.is_some() => 0,
            Some(step) => step?,
        };
        if let Some(file) = &args.metrics {
            run = run.metrics(file);
        }
        if let Some(folder) = &args.checkpoints {
            let lora =
                args.lora().map(|lora| format!("rank {} and alpha {}", lora.rank, lora.alpha));
            let checkpoints = Checkpoints::new(folder).keep(KEPT);
            let checkpoints = checkpoints.setting("--lora", lora.as_deref().unwrap_or("none"));
            let checkpoints = match lora {
                // The others are those of --model, which the settings name.
                Some(_) => checkpoints.trained_only(),
                None => checkpoints,
            };
            let settings = source.settings()?.into_iter();
            let checkpoints =
                settings.fold(checkpoints, |to, (name, value)| to.setting(name, value));
            if step == 0 {
                step = trainer.restore(p, &checkpoints)?.unwrap_or(0);
                if step > 0 && p.process() == ProcessId(0) {
                    say(&format!("continuing after step {step} of {}", folder.display()));
                }
            }
            run = run.checkpoints(checkpoints);
        }
        if let Some(steps) = args.save_every {
            run = run.save_every(steps as u64);
        }
        if let Some(publication) = publication.clone() {
            let (model, every) =
                ((source.config(), args.lora()), args.publish.publish_every as u64);
            let held = args.publish.publish_as;
            let mut weights = Weights::new(p, publication, trainer.pipeline(), model, held)?;
            trainer =
                trainer.after_step(move |p, step, pipeline| match step.is_multiple_of(every) {
                    true => weights.publish(p, step, pipeline),
                    false => Ok(()),
                });
        }
        let outcome = trainer.run(p, run, &*data)?;
        if let Some(to) = &args.save {
            let params = merged(p, trainer.pipeline(), args.lora())?;
            save(p, source, &params, to)?;
        }
        if let (Some(to), Some(lora)) = (&args.save_adapter, args.lora()) {
            save_adapter(p, source, trainer.pipeline(), lora, to)?;
        }
        if p.process() == ProcessId(0) && !p.is_dry_run() {
            let (steps, held_out_loss) = (outcome.steps, outcome.evaluation);
            let trained =
                Trained { steps, loss: outcome.last.map(|last| last.loss), held_out_loss };
            println!("{}", serde_json::to_string(&trained)?);
        }
        outcome.stopped.into_iter().for_each(|signal| _ = stopped.set(exit_code(signal)));
        anyhow::Ok(())
    };
    let code = match args.elastic {
        false => mpmd_job::run(job, devices.len(), devices, |p| program(p, None)),
        true => {
            let (source, args, cut) = (source.clone(), args.clone(), cut.clone());
            let layout: mpmd_job::Layout = Box::new(move |processes| {
                let divided = Divided::over(&source, &args, &cut, processes);
                divided.map(|all| all.devices.iter().sum()).map_err(|why| format!("{why:#}"))
            });
            let elastic = Elastic { layout: Some(layout), drop_slow: None };
            let (processes, devices) = (devices.len(), devices.iter().sum());
            mpmd_job::run_recovering(job, processes, devices, elastic, |p, commits| {
                program(p, Some(commits))
            })
        }
    }?;
    Ok(stopped
        .get()
        .filter(|_| code == ExitCode::SUCCESS)
        .map_or(code, |code| ExitCode::from(*code)))
}

/// The files of a training.
struct Inputs {
    texts: Files,
    data: Files,
    held_out: Files,
}

impl Inputs {
    fn new(args: &TrainArgs) -> Self {
        let one = |path: &Option<PathBuf>| path.iter().cloned().collect::<Vec<_>>();
        Self {
            texts: Files::new("TEXT", &args.paths),
            data: Files::new("--data", &one(&args.data)),
            held_out: Files::new("--held-out", &one(&args.held_out)),
        }
    }

    fn all(&self) -> [&Files; 3] {
        [&self.texts, &self.data, &self.held_out]
    }

    /// Checks that the files are those that the processes have compared: a later epoch of the job
    /// reads them again.
    fn check(&self) -> Result<()> {
        self.all().into_iter().try_for_each(Files::check)
    }
}

/// Reads texts or examples on process 0, and returns them as data on every process.
///
/// # Errors
///
/// Those of [`Tokens::spread`]. If a file cannot be read, is too short, or has a wrong line.
fn data(
    p: &mut Program,
    source: &Folder,
    args: &TrainArgs,
    inputs: &Inputs,
) -> Result<Box<dyn Data<MpmdArray>>> {
    let (time, rows) = (args.time, args.rows);
    let Some(file) = &args.data else {
        let tokens = |p: &mut Program, paths: &[PathBuf]| {
            Tokens::spread(p, || {
                let tokens = Tokens::of(&Text::of(paths)?, source)?;
                inputs.check().map(|()| tokens)
            })
        };
        let windows = Windows::new(&tokens(p, &args.paths)?, time, rows)?;
        return Ok(Box::new(match &args.held_out {
            Some(text) => windows.evaluated_on(&tokens(p, std::slice::from_ref(text))?)?,
            None => windows,
        }));
    };
    let read = |file| {
        let examples = read_examples(file, source, time)?;
        inputs.check().map(|()| examples)
    };
    let mut examples = |file| spread_examples(p, || read(file));
    let lines = examples(file)?;
    let held_out = args.held_out.as_deref().map(examples).transpose()?;
    // All examples of a line are held out, or none: they may have the same messages.
    let is_held_out = |at: usize| held_out.is_none() && at % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
    let (own, training): (Vec<_>, Vec<_>) =
        lines.into_iter().enumerate().partition(|(at, _)| is_held_out(*at));
    let flat =
        |lines: Vec<(usize, Vec<Sequence>)>| lines.into_iter().flat_map(|(_, line)| line).collect();
    let held_out = held_out.map_or_else(|| flat(own), |lines| lines.concat());
    let packed = Packed::new(flat(training), Some(held_out), time, rows)?;
    if p.process() == ProcessId(0) && !p.is_dry_run() {
        let packed_rows = packed.training_rows();
        let steps = packed_rows as f64 / (rows * args.microbatches) as f64;
        say(&format!("epoch: {packed_rows} rows of {time} tokens, {steps:.1} steps"));
    }
    Ok(Box::new(packed))
}

/// Creates a trainer of the model. It updates as `torch.optim.AdamW` does by default, except that
/// only matrices decay.
///
/// # Errors
///
/// As for [`Stages::training`] and [`Trainer::new`].
pub fn trainer(
    p: &mut Program,
    model: &Stages,
    meshes: &[Mesh],
    schedule: Schedule,
    args: &TrainArgs,
) -> Result<Trainer<MpmdArray>> {
    let pipeline = model.training(p, meshes)?;
    let decay = args.weight_decay;
    let adamw = AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, decay };
    let (peak, warmup, total) = (args.lr, args.warmup, args.steps as u64);
    let rate = Rate::WarmupLinear { peak, floor: peak / 10.0, warmup, total };
    let trainer = Trainer::new(p, pipeline, schedule, adamw)?.rate(rate).seed(args.seed);
    let trainer = match args.compute {
        Compute::F32 => trainer,
        Compute::Bf16 => trainer.compute(DType::Bf16)?,
        Compute::F16 => trainer.compute(DType::F16)?,
    };
    Ok(match args.clip {
        Some(clip) => trainer.clip(clip),
        None => trainer,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Args {
        #[command(flatten)]
        train: TrainArgs,
        #[command(flatten)]
        cut: CutArgs,
    }

    /// Returns the ranks over which a model of four layers is divided on 1 to 5 processes, in a job
    /// that was started with these arguments.
    fn ranks(args: &[&str]) -> Vec<anyhow::Result<usize>> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../mpmd-serve/mpmd-demo");
        let source = Folder::open(folder).unwrap();
        let Args { train, cut } = Args::parse_from([&["finetune"], args].concat());
        let over = |processes| Divided::over(&source, &train, &cut, processes);
        (1..=5).map(|processes| Ok(over(processes)?.schedule.ranks())).collect()
    }

    fn all(args: &[&str]) -> Vec<usize> {
        ranks(args).into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn layers_are_divided_anew_where_stages_do_not_divide() {
        assert_eq!(all(&["--stages", "4"]), [4, 4, 3, 4, 4]);
        // Each stage would have the same memory as before.
        assert_eq!(all(&["--stages", "4", "--memory", "1GiB,1GiB,1GiB,1GiB"]), [1, 2, 3, 4, 4]);
        assert_eq!(all(&["--cut", "0..1,1..2,2..4"]), [3; 5], "by hand: kept");
    }

    #[test]
    fn processes_that_need_too_much_memory_are_refused() {
        let found = ranks(&["--stages", "4", "--memory", "8MiB,8MiB,8MiB,8MiB"]);
        let said = found[0].as_ref().unwrap_err().to_string();
        assert!(said.contains("--memory: stage 0 needs"), "{said}");
        assert_eq!(*found[3].as_ref().unwrap(), 4);
    }
}
