//! The program `finetune`: trains, scores or evaluates a model, or merges it with an adapter.

mod best;
mod data;
mod divided_model;
mod evaluate;
mod merge;
mod saved_folders;
mod score;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use mpmd::job::JobArgs;
use mpmd_models::Folder;

use crate::division::DivisionArgs;
use crate::model;
use score::ScoreArgs;
use train::{ADAPTED, TrainArgs};

/// Train, score or evaluate a model from a folder of a model hub, as a pipeline
#[derive(Debug, clap::Parser)]
#[command(name = "finetune", version)]
pub struct Finetune {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    source: Source,
    /// Folder of an adapter of LoRA, as the library `peft` has it: train it further, or score,
    /// evaluate or merge the model with it
    #[arg(long, value_name = "DIR", group = ADAPTED, conflicts_with = "new")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    cut: DivisionArgs,
    #[command(flatten)]
    training: TrainArgs,
    #[command(flatten)]
    scoring: ScoreArgs,
}

/// The folder of the model.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct Source {
    /// Folder with config.json, tokenizer.json and the weights as safetensors; or a GGUF file; or
    /// NAME or NAME@REVISION of a model in the cache of the hub
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Train a new model: folder with config.json and tokenizer.json. Its first weights are drawn
    /// by --seed, with the deviation `initializer_range` of the config
    #[arg(long, value_name = "CONFIG", conflicts_with_all = ["lora", "score", "evaluate"])]
    new: Option<PathBuf>,
}

impl Source {
    /// Opens the folder. `seed` is that of the first weights of a new model.
    fn folder(&self, seed: u64) -> anyhow::Result<Folder> {
        match (&self.model, &self.new) {
            (Some(model), _) => model::open(model, None),
            (_, new) => Ok(Folder::untrained(new.clone().unwrap_or_default(), seed)?),
        }
    }
}

/// Trains a model, scores or evaluates it, or merges it with an adapter. Blocks until the job has
/// ended. Returns its exit code.
///
/// # Errors
///
/// If the folder or the arguments are invalid, or the job could not be started.
pub fn finetune(args: &Finetune) -> anyhow::Result<ExitCode> {
    let Finetune {
        source,
        adapter,
        cut,
        training,
        scoring,
        job,
    } = args;
    let folder = source.folder(training.seed)?;
    let adapter = adapter.as_deref().map(model::open_adapter).transpose()?;
    let with_adapter = |folder: Folder| match &adapter {
        Some(adapter) => folder.with_adapter(adapter),
        None => Ok(folder),
    };
    match scoring {
        ScoreArgs {
            score: Some(file),
            tokens: Some(tokens),
            ..
        } => score::run(&with_adapter(folder)?, file, *tokens, cut, job),
        ScoreArgs {
            evaluate: Some(file),
            ..
        } => evaluate::run(&with_adapter(folder)?, file, training, cut, job),
        ScoreArgs {
            merge: Some(to), ..
        } => merge::run(&with_adapter(folder)?, adapter.as_ref(), to, cut, job),
        _ => {
            let training = TrainArgs {
                start: adapter,
                ..training.clone()
            };
            train::run(&folder, &training, cut, job)
        }
    }
}
