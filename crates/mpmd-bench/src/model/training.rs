//! Steps of training on random tokens.

use std::time::Instant;

use anyhow::Result;
use mpmd::train::Run;
use mpmd::train::data::{TextBytes, Windows};
use mpmd_core::pipeline::Schedule;
use mpmd_core::prelude::Program;
use mpmd_models::{Folder, Stages, TrainerSettings, trainer};

use super::ModelArgs;
use crate::case::Case;

/// Number of tokens in a microbatch.
const TOKENS: usize = 256;
/// Number of microbatches in a step, for each stage.
const MICROBATCHES: usize = 2;
/// Number of bytes of the text.
const TEXT: usize = 1 << 14;

/// Trains for some steps. The rate of a step is measured from report to report on each process.
pub(super) fn run(p: &mut Program, folder: &Folder, args: &ModelArgs) -> Result<Vec<Case>> {
    let stages = Stages::new(folder, args.stages, TOKENS)?;
    let meshes = stages.meshes(|stage| stage)?;
    let microbatches = MICROBATCHES * args.stages;
    let schedule = Schedule::one_f_one_b(args.stages, microbatches)?;
    let settings = TrainerSettings::default();
    let mut trainer = trainer(p, &stages, &meshes, schedule, &settings)?;

    let text = (0..TEXT).map(|at| (at * 7919 % 251) as u8 + 1).collect();
    let text = TextBytes::of_files(&[text])?;
    let windows = Windows::new(&text, TOKENS, 1)?;

    // The first step finds new memory.
    let steps = args.options.repeats as u64 + 1;
    let mut samples = Vec::new();
    let mut last: Option<Instant> = None;
    let run = Run::steps(steps).progress(false).on_step(|_| {
        let now = Instant::now();
        if let Some(last) = last.replace(now) {
            let tokens = (TOKENS * microbatches) as f64;
            samples.push(tokens / (now - last).as_secs_f64());
        }
    });
    trainer.run(p, run, &windows)?;
    Ok(vec![Case {
        name: "training",
        parameters: format!("{microbatches} microbatches of {TOKENS} tokens"),
        unit: "tokens/s",
        samples,
        beside: None,
    }])
}
