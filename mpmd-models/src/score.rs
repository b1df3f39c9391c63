//! Scoring of a text: the mean loss of its tokens under a model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use mpmd::aval::{DType, ShapedArray};
use mpmd::candle::named;
use mpmd::pipeline::Microbatch;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd::train::data::{Text, TokenSource};
use mpmd::{MpmdArray, ProcessId, Program, Result};
use mpmd_job::{JobArgs, Rejected, at_least};
use serde::Serialize;

use crate::cut::{CutArgs, Held};
use crate::folder::Folder;
use crate::inputs::{Files, compared};
use crate::stages::Stages;
use crate::tokens::{Tokens, check_inputs};
use crate::unexpected;

/// Arguments of a training that a scoring would ignore.
const NOT_SCORED: [&str; 7] =
    ["TEXT", "data", "held_out", "lora", "save", "checkpoints", "metrics"];

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
/// "nats_per_token": x}` to stdout. Checks the folder and the file before a process is started.
/// Process 0 alone reads the text.
///
/// # Errors
///
/// If the folder, the tokenizer or the file is invalid, or the job could not be started. If the
/// score is not a finite number, the job's exit code is 1.
pub fn run(
    folder: &Folder,
    (file, count): (&Path, usize),
    cut: &CutArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let stages = cut.stages();
    let model = Stages::new(folder, stages, count)?.cut(cut, Held::FROZEN)?;
    let (devices, meshes) = (model.devices(|stage| stage)?, model.meshes(|stage| stage)?);
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    check_inputs(folder, &[file], &[] as &[&Path])?;
    let read = || {
        let tokens = Tokens::start_of(&Text::of(&[file])?, folder, count)?;
        match tokens.ids().len() {
            found if found < count => {
                Err(unexpected(file, "", format!("at least {count} tokens"), found))
            }
            _ => Ok(tokens),
        }
    };
    let text = Files::new("--score", &[file.to_owned()]);
    let job = compared(job, folder, &[&text]);
    mpmd_job::run(&job, stages, devices, |p| {
        let tokens = Tokens::spread(p, read)?;
        let nats = nats_per_token(p, &model, &meshes, &tokens)?;
        // All processes end alike. The first device is of process 0.
        let not_finite = nats.filter(|nats| !nats.is_finite()).map(|nats| nats.to_string());
        if let Some(nats) = p.broadcast_value(ProcessId(0), None, || Ok(not_finite))? {
            return Err(Rejected(format!(
                "error: the loss of {} in {} is {nats}: the model has values that are not finite, \
                 or its activations overflow",
                file.display(),
                folder.path().display()
            ))
            .into());
        }
        if let Some(nats_per_token) = nats {
            let score = Score { tokens: count - 1, nats_per_token };
            println!("{}", serde_json::to_string(&score)?);
        }
        anyhow::Ok(())
    })
}

/// Returns the mean loss of all tokens but the first, as one sequence, in nats: on the process of
/// the first device. `None` on the others, and in a dry run.
///
/// # Errors
///
/// Those of [`Stages::losses`]. If a file cannot be read, or an operation fails.
pub fn nats_per_token(
    p: &mut Program,
    model: &Stages,
    meshes: &[Mesh],
    tokens: &Tokens,
) -> Result<Option<f64>> {
    tokens.compare(p)?;
    let mut pipeline = model.losses(p, meshes)?;
    let time = tokens.ids().len().saturating_sub(1);
    // The stages declare their shapes, so a probe of one token is enough for one device. Several
    // have more collectives for more tokens.
    let is_divided = meshes.iter().any(|mesh| mesh.devices().len() > 1);
    let first = microbatch(p, meshes, tokens, if is_divided { time } else { 1 })?;
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
        p.array_from_fn(aval, mesh.replicated(), move |region, mut view| {
            tokens.read(start + region.range(1).start, view.as_mut_slice()?)
        })
    };
    let last = meshes.len() - 1;
    let (inputs, targets) = (array(&meshes[0], 0)?, array(&meshes[last], 1)?);
    Ok(Microbatch::new(inputs).side(last, named([("targets", targets)])))
}
