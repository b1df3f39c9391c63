//! Trains or scores a model from a folder:
//! `cargo run --release --bin finetune -- --model DIR TEXT`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mpmd_job::{JobArgs, say};
use mpmd_models::score::{self, ScoreArgs};
use mpmd_models::train::{self, TrainArgs};
use mpmd_models::{CutArgs, Folder};

/// Train or score a model from a folder of a model hub, as a pipeline
#[derive(Parser)]
struct Args {
    /// Folder with config.json, tokenizer.json and the weights as safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    cut: CutArgs,
    #[command(flatten)]
    training: TrainArgs,
    #[command(flatten)]
    scoring: ScoreArgs,
    #[command(flatten)]
    job: JobArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    run(&args).unwrap_or_else(|error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Args { model, cut, training, scoring, job } = args;
    let folder = Folder::open(model)?;
    match (&scoring.score, scoring.tokens) {
        (Some(file), Some(tokens)) => score::run(&folder, (file, tokens), cut, job),
        _ => train::run(&folder, training, cut, job),
    }
}
