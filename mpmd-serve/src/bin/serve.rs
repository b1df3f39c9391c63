//! Serves a model from a folder: `cargo run --release --bin serve -- --model DIR`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mpmd_job::{JobArgs, say};
use mpmd_models::{CutArgs, Folder};
use mpmd_serve::{HttpArgs, ServeArgs, serve};

/// Serve a model from a folder of a model hub, as a pipeline, with the HTTP interface of OpenAI
#[derive(Parser)]
struct Args {
    /// Folder with config.json, tokenizer.json and the weights as safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    cut: CutArgs,
    #[command(flatten)]
    serving: ServeArgs,
    #[command(flatten)]
    http: HttpArgs,
    #[command(flatten)]
    job: JobArgs,
}

fn main() -> ExitCode {
    let Args { model, cut, serving, http, job } = Args::parse();
    let run = || serve(&Folder::open(model)?, &serving, &cut, &http, &job);
    run().unwrap_or_else(|error: anyhow::Error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}
