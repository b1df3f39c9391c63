//! A pipeline in which one process runs another program, in one of several ways.

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::{Jit, ProcessId};

use super::Say;
use super::parts::Each;

const STEPS: usize = 3;
const MICROBATCHES: usize = 4;

/// The (step, microbatch) at which the programs diverge.
const AT: (usize, usize) = (1, 1);

/// Runs `diverging HOW PROCESS ELEMENTS`: the process with this number departs from the program
/// once, in the way `HOW`. The arrays have `ELEMENTS` elements.
pub(super) fn pipeline(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let [how, who, elements] = args else {
        return Err(Error::kernel("three arguments are needed"));
    };
    let number = |text: &str| {
        text.parse::<usize>()
            .map_err(|error| Error::kernel(error.to_string()))
    };
    let astray = p.process() == ProcessId(number(who)? as u32);
    let shape = [number(elements)?];
    let stages = p.mesh(&[("stage", 4)])?.split("stage")?;
    let whole: Vec<Sharding> = stages.iter().map(|stage| stage.replicated()).collect();
    let mut run: Vec<Jit<Each>> = Vec::new();
    let mut aside: Vec<Jit<Each>> = Vec::new();
    for (stage, whole) in stages.iter().zip(&whole) {
        run.push(
            p.jit(Each {
                name: "Forward",
                f: |x| x + 1.0,
            })
            .on(stage)
            .outputs(whole)
            .build()?,
        );
        aside.push(
            p.jit(Each {
                name: "Aside",
                f: |x| -x,
            })
            .on(stage)
            .outputs(whole)
            .build()?,
        );
    }
    let steps = if astray && *how == "end-early" {
        STEPS - 1
    } else {
        STEPS
    };
    for step in 0..steps {
        let mut results = Vec::new();
        for microbatch in 0..MICROBATCHES {
            let now = astray && (step, microbatch) == AT;
            if now && *how == "skip-microbatch" {
                continue;
            }
            let value = (step * 10 + microbatch) as f32;
            let mut x = p.array_from_fn(f32s(shape), &whole[0], move |_, mut view| {
                Ok(view.fill(value)?)
            })?;
            for stage in 0..stages.len() {
                if stage == 3 && !(now && *how == "skip-aside") {
                    // Used by nothing; only process 3 takes part.
                    aside[stage].call(p, x.clone())?.block_until_ready()?;
                }
                x = run[stage].call(p, x)?;
                if now && *how == "unguarded-read" && stage == 3 {
                    x.to_host()?
                        .ok_or_else(|| Error::kernel("the last stage's values are not here"))?;
                }
                if now && *how == "extra-jit" && stage == 2 {
                    aside[stage].call(p, x.clone())?.block_until_ready()?;
                }
                if let Some(next) = whole.get(stage + 1) {
                    if now && *how == "extra-put" && stage == 1 {
                        let lost = p.device_put(&x, next)?;
                        drop(lost);
                    }
                    x = p.device_put(&x, next)?;
                }
            }
            results.push((microbatch, x));
        }
        if how.ends_with("-value") {
            let value = if astray && *how == "other-value" {
                2.0f32
            } else {
                1.0
            };
            p.device_put(&MpmdArray::scalar(value), &whole[0])?
                .block_until_ready()?;
        }
        p.step_end()?;
        for (microbatch, x) in results {
            let expected = (step * 10 + microbatch + stages.len()) as f32;
            if let Some(found) = x.to_host()? {
                let found = found.to_vec::<f32>()?;
                let right = found.len() == shape[0] && found.iter().all(|found| *found == expected);
                let verdict = if right { "right" } else { "WRONG" };
                say(format!("step {step}, microbatch {microbatch}: {verdict}"));
            }
        }
    }
    if astray == (*how == "extra-at-end") && how.ends_with("-at-end") {
        let _ = p.array_from_fn(f32s(shape), &whole[2], |_, mut view| Ok(view.fill(0.0f32)?))?;
    }
    Ok(())
}
