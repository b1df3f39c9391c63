//! Four stages in a ring: the last stage's output goes into the first, step after step, until the
//! test ends it.

use mpmd_core::Builder;
use mpmd_core::prelude::*;

use super::Say;
use super::parts::Each;

/// Number of steps, more than a test has time for.
const STEPS: usize = 1_000_000;

const MICROBATCHES: usize = 3;

/// Shape of an array that is larger than an eager message, and smaller than a socket takes at once.
const WIDE: [usize; 2] = [128, 256];

/// Shape of an array that fits into an eager message.
const NARROW: [usize; 2] = [4, 8];

/// Limits the lead of the program to 64 unfinished operations. No other limit stops a program that
/// does not read its arrays.
pub(super) fn short_lead(builder: Builder) -> Builder {
    builder.run_ahead(64, 1 << 30)
}

/// Shape of an array that is larger than a socket takes at once, so that a process that dies leaves
/// partly sent pieces behind.
const LARGE: [usize; 2] = [1024, 2048];

/// Runs until the test ends it, or for the number of steps in the arguments. With the argument
/// `large` the arrays are large; otherwise some are small. With the argument `reading`, every
/// process waits for its part of each step. Otherwise a process waits only for the limit of its
/// lead.
pub(super) fn ring(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let stages = p.mesh(&[("stage", 4)])?.split("stage")?;
    let mut steps = Vec::new();
    for stage in &stages {
        let each = Each {
            name: "Step",
            f: |x| x * 0.5 + 1.0,
        };
        steps.push(p.jit(each).on(stage).outputs(stage.replicated()).build()?);
    }
    let mut batch = Vec::new();
    let large = args.contains(&"large");
    for shape in if large {
        [LARGE; MICROBATCHES]
    } else {
        [WIDE, NARROW, WIDE]
    } {
        batch.push(
            p.array_from_fn(f32s(shape), stages[0].replicated(), |_, mut view| {
                Ok(view.fill(0.0f32)?)
            })?,
        );
    }
    for step in 0..args
        .iter()
        .find_map(|arg| arg.parse().ok())
        .unwrap_or(STEPS)
    {
        for x in &mut batch {
            for (i, stage) in steps.iter().enumerate() {
                let y = stage.call(p, x.clone())?;
                if args.contains(&"reading") {
                    y.block_until_ready()?;
                }
                let next = &stages[(i + 1) % stages.len()];
                *x = p.device_put(&y, next.replicated())?;
            }
        }
        p.step_end()?;
        say(format!("step {step}"));
    }
    Ok(())
}
