//! `finetune --evaluate`: the loss and the perplexity of held-out data.

use std::cell::Cell;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use mpmd::ProcessId;
use mpmd::job::JobArgs;
use mpmd::train::Run;
use mpmd::train::stop::exit_code;
use mpmd_models::{Folder, evaluator};
use serde::Serialize;

use super::data::{EvaluatedFile, is_of_examples};
use super::divided_model::DividedModel;
use super::train::TrainArgs;
use crate::division::DivisionArgs;
use crate::inputs::compared;

/// The line of JSON that `--evaluate` prints.
#[derive(Serialize)]
struct Evaluated {
    /// Number of tokens that have a loss.
    tokens: u64,
    /// Mean loss of these tokens.
    held_out_loss: f64,
    /// Exponential of the mean loss.
    perplexity: f64,
}

/// Evaluates a model on a text, examples or tokens as a training evaluates it on its held-out data.
/// Process 0 prints the outcome as a line of JSON to stdout.
///
/// Checks the folder and the file before any process is started. Only process 0 reads the file.
///
/// # Errors
///
/// If the folder, the tokenizer or the file is invalid, or the job could not be started. If the
/// loss is not a finite number, the job's exit code is 1.
pub(super) fn run(
    source: &Folder,
    file: &Path,
    args: &TrainArgs,
    cut: &DivisionArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let DividedModel {
        model,
        schedule,
        devices,
        meshes,
    } = DividedModel::frozen(source, args, cut, is_of_examples(file))?;
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    let input = EvaluatedFile::new(file);
    input.check_readable(source)?;

    let stopped = OnceLock::new();
    let job = &compared(job, source, &[input.file()]);
    let code = mpmd::job::run(job, devices.len(), devices, |p| {
        let data = input.data(p, source, args)?;
        let mut evaluator = evaluator(p, &model, &meshes, schedule.clone(), args.compute.into())?;
        let tokens = Cell::new(0.0);
        let run = Run::steps(0)
            .progress(false)
            .on_evaluation(|report| tokens.set(report.weight));
        let outcome = evaluator.run(p, run, &*data)?;

        if let Some(loss) = outcome.evaluation
            && p.process() == ProcessId(0)
        {
            let evaluated = Evaluated {
                tokens: tokens.get() as u64,
                held_out_loss: loss,
                perplexity: loss.exp(),
            };
            println!("{}", serde_json::to_string(&evaluated)?);
        }
        if let Some(signal) = outcome.stopped {
            // A second signal changes nothing.
            _ = stopped.set(exit_code(signal));
        }
        anyhow::Ok(())
    })?;
    match stopped.get() {
        Some(signal) if code == ExitCode::SUCCESS => Ok(ExitCode::from(*signal)),
        _ => Ok(code),
    }
}
