//! Serves a model from a folder: `cargo run --release --bin serve -- --model DIR`. Without a folder
//! it serves the demonstration model of this crate's sources.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::ensure;
use clap::Parser;
use mpmd_job::{JobArgs, say};
use mpmd_models::{CutArgs, Folder};
use mpmd_serve::{HttpArgs, ServeArgs, serve};

/// The folder of the demonstration model. It is not part of the program.
const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/mpmd-demo");
const ABOUT: &str = "mpmd-demo is a tiny demonstration model, trained on the guide of mpmd. It \
                     only shows that serving works; --model DIR serves another.";

/// Serve a model from a folder of a model hub, as a pipeline, with the HTTP interface of OpenAI
#[derive(Parser)]
#[command(name = "serve", version)]
struct Args {
    #[command(flatten)]
    job: JobArgs,
    /// Folder with config.json, tokenizer.json and the weights as safetensors; default: a tiny
    /// demonstration model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    cut: CutArgs,
    #[command(flatten)]
    serving: ServeArgs,
    #[command(flatten)]
    http: HttpArgs,
}

fn main() -> ExitCode {
    let Args { model, cut, serving, mut http, job } = Args::parse();
    let run = || {
        let folder = match model {
            Some(model) => model,
            None => {
                http.description = Some(ABOUT);
                demo()?
            }
        };
        serve(&Folder::open(folder)?, &serving, &cut, &http, &job)
    };
    run().unwrap_or_else(|error: anyhow::Error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}

/// Returns the folder of the demonstration model.
///
/// # Errors
///
/// If the sources that this program was built from are gone.
fn demo() -> anyhow::Result<PathBuf> {
    ensure!(
        Path::new(DEMO).is_dir(),
        "the demonstration model is no longer in {DEMO}, where this program was built: give \
         --model DIR"
    );
    Ok(DEMO.into())
}
