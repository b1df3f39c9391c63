//! The program `finetune`: trains or scores a model.

mod data;
mod divided_model;
mod score;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use mpmd::job::JobArgs;
use mpmd_models::Folder;

use crate::division::DivisionArgs;
use score::ScoreArgs;
use train::TrainArgs;

/// Train or score a model from a folder of a model hub, as a pipeline
#[derive(Debug, clap::Parser)]
#[command(name = "finetune", version)]
pub struct Finetune {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    source: Source,
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
    /// Folder with config.json, tokenizer.json and the weights as safetensors
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Train a new model: folder with config.json and tokenizer.json. Its first weights are drawn
    /// by --seed, with the deviation `initializer_range` of the config
    #[arg(long, value_name = "CONFIG", conflicts_with_all = ["lora", "score"])]
    new: Option<PathBuf>,
}

impl Source {
    fn folder(&self, seed: u64) -> mpmd::Result<Folder> {
        match (&self.model, &self.new) {
            (Some(model), _) => Folder::open(model),
            (_, new) => Folder::untrained(new.clone().unwrap_or_default(), seed),
        }
    }
}

/// Trains a model, or scores a text. Blocks until the job has ended. Returns its exit code.
///
/// # Errors
///
/// If the folder or the arguments are invalid, or the job could not be started.
pub fn finetune(args: &Finetune) -> anyhow::Result<ExitCode> {
    let Finetune {
        source,
        cut,
        training,
        scoring,
        job,
    } = args;
    let folder = source.folder(training.seed)?;
    match (&scoring.score, scoring.tokens) {
        (Some(file), Some(tokens)) => score::run(&folder, file, tokens, cut, job),
        _ => train::run(&folder, training, cut, job),
    }
}
