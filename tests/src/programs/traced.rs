//! Steps of two stages that print every operation.

use mpmd_core::prelude::*;
use mpmd_core::{Label, Role};

use super::Say;
use super::parts::{Each, numbered};

const STEPS: usize = 4;

const MICROBATCHES: u32 = 3;

/// Shapes of the arrays. The first is larger than an eager message, the second smaller.
const SHAPES: [[usize; 2]; 2] = [[256, 128], [8, 2]];

/// Sends each microbatch through both halves of the devices and back. The first steps are issued,
/// the others replayed. Prints `operation NUMBER front|back|both`: the halves of the devices that
/// take part in the operation.
pub(super) fn steps(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let halves = p.mesh(&[("half", 2), ("x", 2)])?.split("half")?;
    let (front, back) = (&halves[0], &halves[1]);
    let there = p
        .jit(Each {
            name: "There",
            f: |x| x + 1.0,
        })
        .on(front)
        .outputs(front.sharding(spec!["x"]));
    let there = there.build()?;
    let again = p
        .jit(Each {
            name: "Again",
            f: |x| x * 0.5,
        })
        .on(back)
        .outputs(back.sharding(spec![None, "x"]));
    let again = again.build()?;
    let mut say = |op: u64, whose: &str| say(format!("operation {op} {whose}"));
    for shape in SHAPES {
        let mut x = p.array_from_fn(f32s(shape), front.sharding(spec!["x"]), numbered(3))?;
        say(p.operations(), "front");
        let step = |p: &mut Program, mut x: MpmdArray, say: &mut dyn FnMut(u64, &str)| {
            for microbatch in 0..MICROBATCHES {
                let label = |stage, role| {
                    Some(Label {
                        stage,
                        microbatch: Some(microbatch),
                        role,
                    })
                };
                p.set_label(label(0, Role::Forward));
                let y = there.call(p, x)?;
                say(p.operations(), "front");
                p.set_label(label(0, Role::SendForward));
                let y = p.device_put(&y, back.sharding(spec![None, "x"]))?;
                say(p.operations(), "both");
                p.set_label(label(1, Role::Forward));
                let y = again.call(p, y)?;
                say(p.operations(), "back");
                p.set_label(label(1, Role::SendBackward));
                x = p.device_put(&y, front.sharding(spec!["x"]))?;
                say(p.operations(), "both");
            }
            p.set_label(None);
            Ok(x)
        };
        for _ in 0..STEPS / 2 {
            x = step(p, x, &mut say)?;
            p.step_end()?;
        }
        let (mut y, captured) = p.capture(x, |p, x| step(p, x, &mut say))?;
        p.step_end()?;
        for _ in STEPS / 2 + 1..STEPS {
            let before = p.operations();
            y = captured.replay(p, y)?;
            for (place, whose) in
                (before + 1..=p.operations()).zip(["front", "both", "back", "both"].iter().cycle())
            {
                say(place, whose);
            }
            p.step_end()?;
        }
        y.block_until_ready()?;
    }
    Ok(())
}
