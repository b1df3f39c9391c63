//! Trains or scores a model from a folder:
//! `cargo run --release --bin finetune -- --model DIR TEXT`.
//! Trains a new one: `--new CONFIG TEXT --save DIR`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mpmd_job::{JobArgs, say};
use mpmd_models::score::{self, ScoreArgs};
use mpmd_models::train::{self, TrainArgs};
use mpmd_models::{CutArgs, Folder};

/// Train or score a model from a folder of a model hub, as a pipeline
#[derive(Parser)]
#[command(name = "finetune", version)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    cut: CutArgs,
    #[command(flatten)]
    training: TrainArgs,
    #[command(flatten)]
    scoring: ScoreArgs,
}

/// The folder of the model.
#[derive(clap::Args)]
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

fn main() -> ExitCode {
    let args = Args::parse();
    run(&args).unwrap_or_else(|error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Args { source, cut, training, scoring, job } = args;
    let folder = source.folder(training.seed)?;
    match (&scoring.score, scoring.tokens) {
        (Some(file), Some(tokens)) => score::run(&folder, (file, tokens), cut, job),
        _ => train::run(&folder, training, cut, job),
    }
}
