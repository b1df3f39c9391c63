//! `finetune --score`: the mean loss of a text's tokens.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mpmd::job::{JobArgs, Rejected, at_least};
use mpmd::train::data::TextBytes;
use mpmd::{Error, ProcessId};
use mpmd_models::score::nats_per_token;
use mpmd_models::{Folder, HeldBytes, Tokens};
use serde::Serialize;

use crate::division::DivisionArgs;
use crate::inputs::{InputFiles, check_inputs, compared};

/// Options of training that `--score`, `--evaluate` and `--merge` would ignore.
const NOT_SCORED: [&str; 21] = [
    "TEXT",
    "data",
    "held_out",
    "evaluate_every",
    "patience",
    "save_best",
    "steps",
    "lr",
    "warmup",
    "clip",
    "weight_decay",
    "seed",
    "lora",
    "lora_alpha",
    "save",
    "save_adapter",
    "checkpoints",
    "save_every",
    "metrics",
    "elastic",
    "publish",
];

/// Arguments of a scoring, of an evaluation, and of a merge.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ScoreArgs {
    /// Print the mean loss of this text's tokens as a line of JSON, in place of a training
    #[arg(long, value_name = "FILE", requires = "tokens", conflicts_with_all = NOT_SCORED)]
    pub score: Option<PathBuf>,
    /// Number of tokens from the start of the text that form the scored sequence
    #[arg(long, value_name = "N", requires = "score", value_parser = at_least(2))]
    pub tokens: Option<usize>,
    /// Print the mean loss and the perplexity of this file as a line of JSON, in place of a
    /// training: examples (.jsonl, .json) or tokens (.bin, .npy) as for --data, or else a text, in
    /// windows of --time
    #[arg(long, value_name = "FILE", conflicts_with = "score", conflicts_with_all = NOT_SCORED)]
    pub evaluate: Option<PathBuf>,
    /// Save the model with the products of --adapter added to its weights in this folder, in place
    /// of a training
    #[arg(long, value_name = "DIR", requires = "adapter",
        conflicts_with_all = ["score", "evaluate"], conflicts_with_all = NOT_SCORED)]
    pub merge: Option<PathBuf>,
}

/// The line of JSON that `--score` prints.
#[derive(Serialize)]
struct Score {
    /// Number of tokens that have a loss.
    tokens: usize,
    nats_per_token: f64,
}

/// Scores the first `count` tokens of a file. Process 0 prints `{"tokens": N-1, "nats_per_token":
/// x}` to stdout.
///
/// Checks the folder and the file before any process is started. Only process 0 reads the text.
///
/// # Errors
///
/// If the folder, the tokenizer or the file is invalid, or the job could not be started. If the
/// score is not a finite number, the job's exit code is 1.
pub(crate) fn run(
    folder: &Folder,
    file: &Path,
    count: usize,
    cut: &DivisionArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let stages = cut.stages();
    let model = cut.stages_of(folder, count, "--tokens")?;
    let model = cut.divide(model, HeldBytes::FROZEN)?;
    let devices = model.devices(|stage| stage)?;
    let meshes = model.meshes(|stage| stage)?;
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    check_inputs(folder, &[file.to_owned()], &[])?;
    let read = || {
        let tokens = Tokens::start_of(&TextBytes::of(&[file])?, folder, count)?;
        let found = tokens.ids().len();
        if found < count {
            let file = file.display();
            let why = format!("{file}: expected at least {count} tokens, found {found}");
            return Err(Error::Environment(why));
        }
        Ok(tokens)
    };
    let text = InputFiles::new("--score", &[file.to_owned()]);
    let job = compared(job, folder, &[&text]);
    mpmd::job::run(&job, stages, devices, |p| {
        let tokens = Tokens::spread(p, read)?;
        let nats = nats_per_token(p, &model, &meshes, &tokens)?;
        // All processes end alike. The first device is of process 0.
        let not_finite = nats
            .filter(|nats| !nats.is_finite())
            .map(|nats| nats.to_string());
        if let Some(nats) = p.broadcast_value(ProcessId(0), None, || Ok(not_finite))? {
            return Err(Rejected(format!(
                "error: the loss of {} in {} is {nats}: its activations overflow",
                file.display(),
                folder.path().display()
            ))
            .into());
        }
        if let Some(nats_per_token) = nats {
            let score = Score {
                tokens: count - 1,
                nats_per_token,
            };
            println!("{}", serde_json::to_string(&score)?);
        }
        anyhow::Ok(())
    })
}
