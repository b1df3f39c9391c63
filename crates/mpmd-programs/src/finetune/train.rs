//! Training of a model on text.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::ensure;
use mpmd::job::{Elastic, JobArgs, at_least, not_negative, positive, say};
use mpmd::pipeline::{Builtin, Schedule};
use mpmd::train::stop::exit_code;
use mpmd::train::tensors::FolderClaim;
use mpmd::train::{Checkpoints, Run, Trainer};
use mpmd::weights::Publication;
use mpmd::{Commits, Error, MpmdArray, ProcessId, Program};
use mpmd_models::{
    Adapter, Folder, Lora, TrainerSettings, WeightPublisher, merged, save, save_adapter, trainer,
};
use serde::Serialize;

use super::best::{BestFolder, BestRecord};
use super::data::{TrainingFiles, data, is_of_examples};
use super::divided_model::DividedModel;
use super::saved_folders::{SavedFolder, SavedFolders};
use crate::chat::ChatArgs;
use crate::division::DivisionArgs;
use crate::inputs::compared;
use crate::token_type::TokenTypeArg;
use crate::weight_type::ComputeArg;
use crate::weights::PublishArgs;

/// Group of the arguments with which matrices of LoRA are trained.
pub(super) const ADAPTED: &str = "adapted";
/// Number of checkpoints that are kept in their folder.
const KEPT: usize = 2;

/// Arguments of a training.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TrainArgs {
    /// Texts to train on: files and folders
    #[arg(id = "TEXT")]
    pub paths: Vec<PathBuf>,
    /// Train on this file, in place of texts. If it ends with .jsonl or .json, on the completions
    /// and replies of its examples: lines of JSON with `prompt` and `completion`, or `messages` for
    /// the folder's chat template. If it ends with .bin or .npy, on its tokens: numbers of
    /// --token-type without a header, or an array of NumPy of uint16 or uint32
    #[arg(long, value_name = "FILE", conflicts_with = "TEXT")]
    pub data: Option<PathBuf>,
    #[command(flatten)]
    pub chat: ChatArgs,
    /// Type of the numbers in .bin files of tokens, which are little-endian
    #[arg(long, value_name = "TYPE", default_value = "u16")]
    pub token_type: TokenTypeArg,
    /// Evaluate on this file: with examples in --data on examples (.jsonl, .json), else on tokens
    /// (.bin, .npy) or a text (any other name); default: every tenth part of the training data
    #[arg(long, value_name = "FILE")]
    pub held_out: Option<PathBuf>,
    /// Updates between evaluations; there is one at the end in any case
    #[arg(long, value_name = "STEPS", value_parser = at_least(1))]
    pub evaluate_every: Option<usize>,
    /// Keep the model with the lowest held-out loss in this folder: in the form of --save, or with
    /// LoRA in that of --save-adapter
    #[arg(long, value_name = "DIR", requires = "evaluate_every")]
    pub save_best: Option<PathBuf>,
    /// End when this number of evaluations in a row had no lower loss than the best one
    #[arg(long, value_name = "N", requires = "evaluate_every", value_parser = at_least(1))]
    pub patience: Option<usize>,
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
    #[arg(long, value_name = "NORM", value_parser = positive)]
    pub clip: Option<f64>,
    /// Weight decay of the matrices
    #[arg(long, value_name = "DECAY", default_value_t = 0.01, value_parser = not_negative)]
    pub weight_decay: f64,
    /// Numbers that the model computes with, where its weights are f32; these, their gradients, the
    /// optimiser's state and losses stay f32
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub compute: ComputeArg,
    /// Train only matrices of LoRA with this rank, beside the weights of all projections
    #[arg(long, value_name = "RANK", group = ADAPTED, value_parser = at_least(1))]
    pub lora: Option<usize>,
    /// Factor of LoRA's products, before division by the rank; default: twice the rank
    #[arg(long, value_name = "ALPHA", requires = "lora", value_parser = positive)]
    pub lora_alpha: Option<f64>,
    /// Save LoRA's matrices in this folder, as the library `peft` has them
    #[arg(long, value_name = "DIR", requires = ADAPTED)]
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
    /// SIGTERM, SIGUSR1 and SIGUSR2 end one process in order
    #[arg(long, conflicts_with = "publish")]
    pub elastic: bool,
    /// The publication of the weights.
    #[command(flatten)]
    pub publish: PublishArgs,
    /// The adapter that is trained further.
    #[arg(skip)]
    pub start: Option<Adapter>,
}

impl TrainArgs {
    /// Returns the settings of LoRA. `None` if all parameters are trained.
    pub(crate) fn lora(&self) -> Option<Lora> {
        if let Some(adapter) = &self.start {
            return Some(adapter.lora());
        }
        let rank = self.lora?;
        Some(Lora {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
        })
    }

    /// True if the trained model outlives the training, or goes to servers during it.
    fn keeps_model(&self) -> bool {
        let folders = [
            &self.save,
            &self.save_adapter,
            &self.save_best,
            &self.checkpoints,
        ];
        folders.into_iter().any(Option::is_some) || self.publish.publish.is_some()
    }

    /// True if the training data are examples, not texts or tokens.
    pub(super) fn is_of_examples(&self) -> bool {
        self.data.as_deref().is_some_and(is_of_examples)
    }

    /// Returns the folders in which a training of `source` saves.
    fn saved_folders(&self, source: &Folder) -> SavedFolders<'_> {
        let model = source.saved_bytes();
        // An adapter is small beside the model.
        let best = if self.lora().is_some() { 0 } else { model };
        let all = [
            ("--save", &self.save, model),
            ("--save-adapter", &self.save_adapter, 0),
            ("--save-best", &self.save_best, best),
        ];
        let models = all.into_iter().filter_map(|(option, path, bytes)| {
            let path = path.as_deref()?;
            Some(SavedFolder {
                option,
                path,
                bytes,
            })
        });
        SavedFolders {
            models: models.collect(),
            checkpoints: self.checkpoints.as_deref(),
        }
    }

    /// Returns the settings of the trainer.
    fn settings(&self) -> TrainerSettings {
        TrainerSettings {
            steps: self.steps as u64,
            learning_rate: self.lr,
            warmup: self.warmup,
            weight_decay: self.weight_decay,
            clip: self.clip,
            compute: self.compute.into(),
            seed: self.seed,
        }
    }

    /// Returns the options of the training loop, without checkpoints.
    fn run(&self) -> Run<'static> {
        let mut run = Run::steps(self.steps as u64);
        if let Some(steps) = self.evaluate_every {
            run = run.evaluate_every(steps as u64);
        }
        if let Some(evaluations) = self.patience {
            run = run.patience(evaluations as u64);
        }
        if let Some(file) = &self.metrics {
            run = run.metrics(file);
        }
        if let Some(steps) = self.save_every {
            run = run.save_every(steps as u64);
        }
        run
    }

    /// Returns the schedule of `--schedule` for `stages` stages.
    pub(super) fn schedule(&self, stages: usize) -> anyhow::Result<Schedule> {
        let chunks = Builtin::named(&self.schedule).map_or(1, Builtin::default_chunks);
        let name = &self.schedule;
        let ranks = stages / chunks;
        ensure!(
            ranks * chunks == stages,
            "{name} has {chunks} stages a rank: --stages {stages} is no multiple of it"
        );
        Ok(Schedule::named(
            name,
            ranks,
            self.microbatches,
            Some(chunks),
        )?)
    }
}

/// The line of JSON that a training prints at its end.
#[derive(Serialize)]
struct Trained {
    /// Number of updates, those before a continued checkpoint included.
    steps: u64,
    /// Mean loss of the last step, in nats per token.
    loss: Option<f64>,
    /// Mean loss of the held-out tokens, in nats per token.
    held_out_loss: Option<f64>,
    /// The evaluation with the lowest loss, if `--evaluate-every` is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<BestRecord>,
}

/// Trains a model on texts, examples or tokens, and saves it. Process 0 prints the outcome as a
/// line of JSON to stdout.
///
/// Checks the folder and the data before any process is started. In the job only process 0 reads
/// the data.
///
/// # Errors
///
/// If the folder, the tokenizer or a text is invalid, if the arguments do not fit the model or each
/// other, or if the job could not be started.
pub(crate) fn run(
    source: &Folder,
    args: &TrainArgs,
    cut: &DivisionArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    source.check_training()?;
    ensure!(
        !args.paths.is_empty() || args.data.is_some(),
        "there is nothing to train on: give a TEXT or --data FILE, or --score or --evaluate FILE"
    );
    let DividedModel { model, devices, .. } = DividedModel::new(source, args, cut)?;
    model.check_trained()?;
    let inputs = TrainingFiles::new(args);
    inputs.check_readable(source, args)?;
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    args.saved_folders(source)
        .create(source, args.start.as_ref())?;

    // Process 0 alone writes them.
    let mut job = compared(job, source, &inputs.all()).may_differ(["metrics"]);
    if let Some(adapter) = args.start.clone() {
        job = job.input(move || vec![adapter.fact()]);
    }
    let job = &job;
    let publication = args.publish.publication()?;
    let training = Training {
        source,
        args,
        cut,
        inputs,
        publication,
        stopped: OnceLock::new(),
        claims: OnceLock::new(),
    };
    let code = match args.elastic {
        false => mpmd::job::run(job, devices.len(), devices, |p| training.run(p, None)),
        true => {
            let elastic = Elastic {
                layout: Some(training.layout()),
                drop_slow: None,
            };
            let processes = devices.len();
            let all_devices: usize = devices.iter().sum();
            mpmd::job::run_recovering(job, processes, all_devices, elastic, |p, commits| {
                training.run(p, Some(commits))
            })
        }
    }?;
    match training.stopped.get() {
        Some(signal) if code == ExitCode::SUCCESS => Ok(ExitCode::from(*signal)),
        _ => Ok(code),
    }
}

/// A training job: the same on all of its processes.
struct Training<'a> {
    source: &'a Folder,
    args: &'a TrainArgs,
    cut: &'a DivisionArgs,
    inputs: TrainingFiles,
    publication: Option<Publication>,
    /// The exit code for the signal that stopped the training. Set only in processes of the job; it
    /// tells a launcher of the signal.
    stopped: OnceLock<u8>,
    /// The claims of the folders for models and adapters.
    claims: OnceLock<Vec<FolderClaim>>,
}

impl Training<'_> {
    /// Returns a function from a number of processes to the number of devices that they use
    /// together.
    fn layout(&self) -> mpmd::job::Layout {
        let source = self.source.clone();
        let args = self.args.clone();
        let cut = self.cut.clone();
        Box::new(move |processes| {
            let divided = DividedModel::over(&source, &args, &cut, processes);
            divided
                .map(|all| all.devices.iter().sum())
                .map_err(|why| format!("{why:#}"))
        })
    }

    /// Trains in one epoch of the job, and saves the model. `commits` is `None` in a job that does
    /// not recover.
    fn run(&self, p: &mut Program, commits: Option<&Commits>) -> anyhow::Result<()> {
        let Self {
            source, args, cut, ..
        } = *self;
        let claims = args.saved_folders(source).claim(p)?;
        _ = self.claims.set(claims);
        let divided = match p.epoch() {
            1 => DividedModel::new(source, args, cut)?,
            _ => DividedModel::over(source, args, cut, p.processes())?,
        };
        let DividedModel {
            model,
            schedule,
            meshes,
            ..
        } = divided;
        let data = data(p, source, args, &self.inputs)?;
        for (option, is_given) in [
            ("--save-best", args.save_best.is_some()),
            ("--patience", args.patience.is_some()),
        ] {
            ensure!(
                !is_given || data.held_out_len() > 0,
                "{option}: nothing is held out for evaluations: give --held-out FILE"
            );
        }
        let mut trainer = trainer(p, &model, &meshes, schedule, &args.settings())?;
        if p.process() == ProcessId(0) && p.epoch() == 1 && !p.is_dry_run() {
            say(&format!("model: {}", trainer.model_size(p)));
            say(&trainer.computed_by(p));
            if !args.keeps_model() {
                say(
                    "warning: the trained model is not kept: give --save, --save-adapter, \
                     --save-best or --checkpoints",
                );
            }
        }

        let resumed = match commits.map(|commits| trainer.resume(p, commits, None)) {
            None => 0,
            Some(Err(Error::CommitsLost { .. })) if args.checkpoints.is_some() => 0,
            Some(step) => step?,
        };
        let mut run = args.run();
        if let Some(folder) = &args.checkpoints {
            let checkpoints = self.checkpoints(folder)?;
            if resumed == 0 {
                restore(p, &mut trainer, &checkpoints, folder)?;
            }
            run = run.checkpoints(checkpoints);
        }
        if let Some(publication) = self.publication.clone() {
            trainer = self.published(p, trainer, publication)?;
        }
        let is_first = p.process() == ProcessId(0) && !p.is_dry_run();
        let kept = args.save_best.as_ref();
        let kept = kept.map(|folder| BestFolder::new(folder, source, args.lora()));
        if let Some(kept) = kept.clone() {
            if is_first {
                kept.warn_of_missing(trainer.best());
            }
            trainer = trainer.after_best(move |p, best, pipeline: &_| kept.save(p, best, pipeline));
        }

        let outcome = trainer.run(p, run, &*data)?;
        self.save(p, &trainer)?;
        if is_first {
            for folder in [&args.save, &args.save_adapter].into_iter().flatten() {
                let folder = folder.display();
                say(&format!("saved after step {} to {folder}", outcome.steps));
            }
            let best = trainer.best().filter(|_| args.evaluate_every.is_some());
            if let Some((kept, best)) = kept.zip(best) {
                kept.report(best);
            }
            let trained = Trained {
                steps: outcome.steps,
                loss: outcome.last.map(|last| last.loss),
                held_out_loss: outcome.evaluation,
                best: best.map(BestRecord::from),
            };
            println!("{}", serde_json::to_string(&trained)?);
        }
        if let Some(signal) = outcome.stopped {
            // A second signal changes nothing.
            _ = self.stopped.set(exit_code(signal));
        }
        Ok(())
    }

    /// Returns the checkpoints in `folder`. They record settings that must be the same when
    /// training continues.
    fn checkpoints(&self, folder: &Path) -> anyhow::Result<Checkpoints> {
        let lora = self.args.lora();
        let name = match lora {
            Some(Lora { rank, alpha }) => format!("rank {rank} and alpha {alpha}"),
            None => "none".to_owned(),
        };
        let mut checkpoints = Checkpoints::new(folder).keep(KEPT).setting("--lora", &name);
        if lora.is_some() {
            // The other parameters are those of --model, which the settings name.
            checkpoints = checkpoints.trained_only();
        }
        for (name, value) in self.source.settings()? {
            checkpoints = checkpoints.setting(format!("--model {name}"), value);
        }
        Ok(checkpoints)
    }

    /// Sets the trainer to publish the weights every `--publish-every` steps.
    fn published(
        &self,
        p: &mut Program,
        trainer: Trainer<MpmdArray>,
        publication: Publication,
    ) -> anyhow::Result<Trainer<MpmdArray>> {
        let config = self.source.config();
        let lora = self.args.lora();
        let held = self.args.publish.publish_as.into();
        let every = self.args.publish.publish_every as u64;
        let mut weights =
            WeightPublisher::new(p, publication, trainer.pipeline(), config, lora, held)?;
        let publish =
            move |p: &mut Program, step: u64, pipeline: &_| match step.is_multiple_of(every) {
                true => weights.publish(p, step, pipeline),
                false => Ok(()),
            };
        Ok(trainer.after_step(publish))
    }

    /// Saves the model to `--save`, and LoRA's matrices to `--save-adapter`, if these are given.
    fn save(&self, p: &mut Program, trainer: &Trainer<MpmdArray>) -> anyhow::Result<()> {
        let lora = self.args.lora();
        if let Some(folder) = &self.args.save {
            let params = merged(p, trainer.pipeline(), lora)?;
            save(p, self.source, &params, folder)?;
        }
        if let (Some(folder), Some(lora)) = (&self.args.save_adapter, lora) {
            save_adapter(p, self.source, trainer.pipeline(), lora, folder)?;
        }
        Ok(())
    }
}

/// Restores the trainer from the newest checkpoint in a folder, if there is one.
fn restore(
    p: &mut Program,
    trainer: &mut Trainer<MpmdArray>,
    checkpoints: &Checkpoints,
    folder: &Path,
) -> anyhow::Result<()> {
    let step = trainer.restore(p, checkpoints)?.unwrap_or(0);
    if step > 0 && p.process() == ProcessId(0) {
        say(&format!(
            "continuing after step {step} of {}",
            folder.display()
        ));
    }
    Ok(())
}
