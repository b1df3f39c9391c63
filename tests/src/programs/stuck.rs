//! A pipeline of four stages in which one pass of the third stage never ends.

use std::time::Duration;

use mpmd_core::prelude::*;
use mpmd_core::{Label, Role};

use super::Say;
use super::parts::Each;

const MICROBATCHES: u32 = 3;

/// The (stage, microbatch) of the pass that never ends.
const STUCK: (usize, u32) = (2, 1);

/// A kernel that never ends.
struct Stuck;

impl Kernel for Stuck {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, _: &mut Context<'_>, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

/// Issues all forward passes, then all backward passes. Each process waits for its parts of the
/// outputs; a process without outputs ends. With the argument `sending` there are no backward
/// passes, so that the first processes end early.
pub(super) fn pipeline(p: &mut Program, args: &[&str], say: &mut Say<'_>) -> Result<()> {
    let stages = p.mesh(&[("stage", 4)])?.split("stage")?;
    let mut passes = Vec::new();
    for stage in &stages {
        let each = Each {
            name: "Pass",
            f: |x| x * 0.5 + 1.0,
        };
        passes.push(p.jit(each).on(stage).outputs(stage.replicated()).build()?);
    }
    let stuck = p
        .jit(Stuck)
        .on(&stages[STUCK.0])
        .outputs(stages[STUCK.0].replicated())
        .build()?;
    let label = |p: &mut Program, stage: usize, microbatch: u32, role: Role| {
        p.set_label(Some(Label {
            stage: stage as u32,
            microbatch: Some(microbatch),
            role,
        }));
    };
    let mut outputs = Vec::new();
    for microbatch in 0..MICROBATCHES {
        label(p, 0, microbatch, Role::Load);
        let mut x = p.array_from_fn(f32s([64]), stages[0].replicated(), |_, mut view| {
            Ok(view.fill(0.0f32)?)
        })?;
        for (stage, pass) in passes.iter().enumerate() {
            label(p, stage, microbatch, Role::Forward);
            x = if (stage, microbatch) == STUCK {
                stuck.call(p, x)?
            } else {
                pass.call(p, x)?
            };
            if let Some(next) = stages.get(stage + 1) {
                label(p, stage, microbatch, Role::SendForward);
                x = p.device_put(&x, next.replicated())?;
            }
        }
        outputs.push(x);
    }
    let back = if args.contains(&"sending") {
        0
    } else {
        MICROBATCHES
    };
    for (microbatch, mut dy) in (0..back).zip(outputs.clone()) {
        for (stage, pass) in passes.iter().enumerate().rev() {
            label(p, stage, microbatch, Role::BackwardInput);
            dy = pass.call(p, dy)?;
            if stage > 0 {
                label(p, stage, microbatch, Role::SendBackward);
                dy = p.device_put(&dy, stages[stage - 1].replicated())?;
            }
        }
        outputs.push(dy);
    }
    p.set_label(None);
    say("issued".to_owned());
    outputs
        .iter()
        .try_for_each(|output| output.block_until_ready().map(drop))
}
