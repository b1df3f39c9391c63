//! Scoring of a text: the mean loss of its tokens under a model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::named;
use mpmd::pipeline::Microbatch;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd::train::data::{Text, TokenSource};
use mpmd::{Error, MpmdArray, Program, Result};
use mpmd_job::JobArgs;
use mpmd_job::at_least;
use serde::Serialize;

use crate::folder::Folder;
use crate::stages::Llama;
use crate::tokens::{Tokens, tokenizer};
use crate::unexpected;

/// Arguments of a training that a scoring would ignore.
const NOT_SCORED: [&str; 5] = ["paths", "lora", "save", "checkpoints", "metrics"];

/// Arguments of a scoring.
#[derive(Clone, Debug, clap::Args)]
pub struct ScoreArgs {
    /// Print the mean loss of this text's tokens as a line of JSON, in place of a training
    #[arg(long, value_name = "FILE", requires = "tokens", conflicts_with_all = NOT_SCORED)]
    pub score: Option<PathBuf>,
    /// Number of tokens from the start of the text that form the scored sequence
    #[arg(long, value_name = "N", requires = "score", value_parser = at_least(2))]
    pub tokens: Option<usize>,
}

/// The line that a scoring prints.
#[derive(Serialize)]
struct Score {
    /// Number of tokens with a loss.
    tokens: usize,
    nats_per_token: f64,
}

/// Scores the first `count` tokens of a file, and has process 0 print `{"tokens": N-1,
/// "nats_per_token": x}` to stdout. Checks all inputs before a process is started.
///
/// # Errors
///
/// If the folder, the tokenizer or the file is invalid, or the job could not be started.
pub fn run(
    folder: &Folder,
    (file, count): (&Path, usize),
    stages: usize,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let model = Llama::new(folder, stages, count)?;
    let tokens = Tokens::of(&Text::of(&[file])?, &tokenizer(folder)?)?;
    if tokens.ids().len() < count {
        let expected = format!("at least {count} tokens");
        return Err(unexpected(file, "", expected, tokens.ids().len()).into());
    }
    let tokens = tokens.first(count);
    mpmd_job::run(job, stages, stages, |p| {
        let meshes = p.mesh(&[("stage", stages)])?.split("stage")?;
        if let Some(nats) = nats_per_token(p, &model, &meshes, &tokens)? {
            let score = Score { tokens: count - 1, nats_per_token: nats };
            let line = serde_json::to_string(&score);
            println!("{}", line.map_err(|why| Error::kernel(why.to_string()))?);
        }
        Ok::<_, Error>(())
    })
}

/// Returns the mean loss of all tokens but the first, as one sequence, in nats: on the process of
/// the first device. `None` on the others, and in a dry run.
///
/// # Errors
///
/// Those of [`Llama::losses`]. If a file cannot be read, or an operation fails.
pub fn nats_per_token(
    p: &mut Program,
    model: &Llama,
    meshes: &[Mesh],
    tokens: &Tokens,
) -> Result<Option<f64>> {
    tokens.compare(p)?;
    let mut pipeline = model.losses(p, meshes)?;
    let time = tokens.ids().len().saturating_sub(1);
    // The stages declare their shapes, so a probe of one token is enough.
    let first = microbatch(p, meshes, tokens, 1)?;
    pipeline.probe(p, &first.shapes())?;
    let microbatch = microbatch(p, meshes, tokens, time)?;
    let loss = pipeline.forward(p, microbatch)?;
    let device = p.topology().device_ids()[0];
    let loss = p.device_put(&loss, Sharding::single_device(device))?;
    let (Some(sum), Some(weight)) = (loss.sum.to_host()?, loss.weight.to_host()?) else {
        return Ok(None);
    };
    let [sum, weight] = [sum.as_slice::<f32>()?[0], weight.as_slice::<f32>()?[0]];
    Ok(Some(f64::from(sum) / f64::from(weight)))
}

/// Issues the making of one sequence of `time` tokens, and of the token that follows each.
fn microbatch(
    p: &mut Program,
    meshes: &[Mesh],
    tokens: &Tokens,
    time: usize,
) -> Result<Microbatch<MpmdArray>> {
    let mut array = |mesh: &Mesh, start: usize| {
        let tokens = tokens.clone();
        let aval = ShapedArray::try_new(&[1, time], DType::U32)?;
        p.array_from_fn(aval, &mesh.replicated(), move |region, mut view| {
            tokens.read(start + region.range(1).start, view.as_mut_slice()?)
        })
    };
    let last = meshes.len() - 1;
    let (inputs, targets) = (array(&meshes[0], 0)?, array(&meshes[last], 1)?);
    Ok(Microbatch::new(inputs).side(last, named([("targets", targets)])))
}
