//! Continues a text, or replies to a message, by a model from a folder:
//! `cargo run --release --bin generate -- --model DIR --prompt TEXT`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mpmd_job::{JobArgs, say};
use mpmd_models::generate::{self, GenerateArgs};
use mpmd_models::{CutArgs, Folder};

/// Continue a text by a model from a folder of a model hub, as a pipeline
#[derive(Parser)]
#[command(name = "generate", version)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Folder with config.json, tokenizer.json and the weights as safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    cut: CutArgs,
    #[command(flatten)]
    generation: GenerateArgs,
}

fn main() -> ExitCode {
    let Args { model, cut, generation, job } = Args::parse();
    let run = || generate::run(&Folder::open(model)?, &generation, &cut, &job);
    run().unwrap_or_else(|error: anyhow::Error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}
