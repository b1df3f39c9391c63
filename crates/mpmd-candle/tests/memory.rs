//! The memory of a step: the bytes that the framework accounts, against those that candle
//! allocates. A test binary of its own, since it counts all memory of the process.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mpmd_candle::nn::{self, Dropout, LayerNorm, Linear, Module};
use mpmd_candle::{Cx, Tensor, VarBuilder, named, stage};
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_layout::random::Key;
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WIDTH: usize = 128;
const ROWS: usize = 256;

/// The memory of a step in bytes.
#[derive(Debug)]
struct Memory {
    /// The peak of the device's memory, with declared bytes of graphs.
    accounted: f64,
    /// The peak of the process's own memory, which has the graphs, but no arrays.
    allocated: f64,
}

/// Trains two steps of `microbatches` microbatches, all forward passes first.
fn step(microbatches: usize, recompute: bool) -> Memory {
    let mut p = Program::builder().alone().unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let layer = |vb: &VarBuilder<'_>, name| nn::linear(WIDTH, WIDTH, vb.pp(name));
    let stage = stage(
        move |vb: VarBuilder<'static>| {
            let layers = [layer(&vb, "a")?, layer(&vb, "b")?, layer(&vb, "c")?];
            Ok((
                nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
                layers,
                Dropout::new(0.1),
            ))
        },
        |(norm, layers, dropout): &(LayerNorm, [Linear; 3], Dropout), x: Tensor, cx: &mut Cx| {
            let mut x = norm.forward(&x)?;
            for layer in layers {
                x = dropout.forward(&layer.forward(&x)?.gelu()?, cx.is_training())?;
            }
            let sum = (x - cx.side("targets")?)?.sqr()?.sum_all()?;
            Ok(Loss::new(sum.clone(), sum.ones_like()?.detach()))
        },
    );
    let stage = stage.unwrap();
    let params = stage.init(&mut p, &mesh, 0).unwrap();
    let mut pipeline = Pipeline::first(stage, &mesh, params).unwrap();
    pipeline.recompute(0, recompute);
    let shape = f32s([ROWS, WIDTH]);
    let side = BTreeMap::from([("targets".to_owned(), shape.clone())]);
    let shapes = MicrobatchShapes::new(shape).side(0, &side);
    pipeline.probe(&mut p, &shapes).unwrap();
    let schedule = Schedule::named("gpipe", 1, microbatches, None).unwrap();
    let pass_on = p
        .jit(elementwise(|x: f32| x))
        .on(&mesh)
        .outputs(mesh.replicated());
    let pass_on = pass_on.build().unwrap();
    let mut memory = Memory {
        accounted: 0.0,
        allocated: f64::MAX,
    };
    for round in 0..5 {
        let mut kept = Vec::new();
        let batch: Vec<_> = (0..microbatches as u64)
            .map(|number| {
                let mut make = || {
                    let fill = |_: &Region, mut view: ViewMut<'_>| Ok(view.fill(0.5f32)?);
                    p.array_from_fn(f32s([ROWS, WIDTH]), mesh.replicated(), fill)
                        .unwrap()
                };
                let (x, targets) = (make(), make());
                kept.extend([x.clone(), targets.clone()]);
                Microbatch::new(x)
                    .side(0, named([("targets", targets)]))
                    .key(Key(number))
            })
            .collect();
        p.step_end().unwrap();
        // The device drops graphs of the step before behind its last pass, and calls are in order.
        let last = pass_on.call(&mut p, kept[0].clone()).unwrap();
        last.block_until_ready().unwrap();
        settle();
        p.forget_memory_peak();
        ALLOCATOR.reset_peak_usage();
        let before = ALLOCATOR.current_usage();
        let output = pipeline.train_step(&mut p, &schedule, batch).unwrap();
        output.loss.sum.block_until_ready().unwrap();
        for (_, gradient) in &output.gradients[0] {
            gradient.block_until_ready().unwrap();
        }
        // The first round allocates what later ones have already. On a busy machine memory of one
        // pass may be freed during the next, so the least of several rounds counts.
        if round > 0 {
            drop(kept);
            memory.accounted = p.memory().recent_peak as f64;
            let allocated = (ALLOCATOR.peak_usage() - before) as f64;
            memory.allocated = memory.allocated.min(allocated);
        }
    }
    p.finish().unwrap();
    memory
}

/// Blocks until the memory in use has not changed for a while: a device's thread frees what a call
/// has used only after the call's results are there.
fn settle() {
    const LOOKS: usize = 20;
    let (mut usage, mut same) = (ALLOCATOR.current_usage(), 0);
    let until = Instant::now() + Duration::from_secs(5);
    while same < LOOKS && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
        let now = ALLOCATOR.current_usage();
        same = if now == usage { same + 1 } else { 0 };
        usage = now;
    }
}

#[test]
fn graphs_take_the_memory_that_is_accounted() {
    let (few, many) = (step(2, false), step(8, false));
    // Gradients on their way are the same in both, so the difference is that of six graphs, and of
    // the inputs and targets of six microbatches.
    let arrays = 6.0 * 2.0 * (ROWS * WIDTH * 4) as f64;
    let accounted = many.accounted - few.accounted - arrays;
    let found = many.allocated - few.allocated;
    let off = (found / accounted - 1.0).abs();
    assert!(off < 0.05, "graphs: accounted {accounted}, found {found}");
    // With recomputation, only one graph exists at a time.
    let again = step(8, true);
    assert!(
        again.accounted < 0.7 * many.accounted,
        "{again:?} and {many:?}"
    );
    let more = again.allocated - few.allocated;
    assert!(
        more < 0.1 * accounted,
        "{more} bytes more with recomputation"
    );
}
