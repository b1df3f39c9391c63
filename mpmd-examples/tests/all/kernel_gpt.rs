//! The stages of CUDA kernels against those of candle.

use mpmd::aval::DType;
use mpmd::candle::nn::loss::cross_entropy_sum;
use mpmd::candle::{Cx, Tensor, VarBuilder, named, stage};
use mpmd::cuda::Math;
use mpmd::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::random::{Key, uniform_f64};
use mpmd::topology::{DeviceKind, Mesh};
use mpmd::train::AdamW;
use mpmd::train::optimizer::{Optimizer, OptimizerSettings};
use mpmd_examples::kernel_gpt::{FrontStage, LastStage};
use mpmd_examples::transformer::{MODEL_AXIS, ModelPart, ModelSizes};

const SIZES: ModelSizes = ModelSizes {
    layers: 3,
    width: 24,
    heads: 3,
    time: 17,
};
const BATCH: usize = 2;
const MICROBATCHES: usize = 3;
const STEPS: u64 = 20;

type Model = Pipeline<MpmdArray, Loss<MpmdArray>>;

/// Creates a model of two stages, with one block and with two blocks.
fn model(
    p: &mut Program,
    (kind, computes_in): (DeviceKind, DType),
    meshes: &[Mesh],
) -> Result<Model> {
    let part = |blocks: std::ops::Range<usize>, ends: [bool; 2]| {
        move |vb: VarBuilder<'static>| ModelPart::new(&vb, SIZES, blocks.clone(), ends)
    };
    let front = stage(
        part(0..1, [true, false]),
        |part, x: Tensor, cx: &mut Cx<'_>| part.forward(x, cx),
    )?;
    let last = stage(
        part(1..3, [false, true]),
        |part, x: Tensor, cx: &mut Cx<'_>| {
            let (sum, weight) =
                cross_entropy_sum(&part.logits(x, cx)?, &cx.side("targets")?, None)?;
            Ok(Loss::new(sum, weight))
        },
    )?;
    let params = [front.init(p, &meshes[0], 7)?, last.init(p, &meshes[1], 7)?];
    let [of_front, of_last] = params;
    let mut model = match kind {
        DeviceKind::Cuda => {
            let kernels = FrontStage::new("front".to_owned(), SIZES, 0..1, true, Math::F32);
            let last = LastStage::new("last".to_owned(), SIZES, 1..3, false, Math::F32);
            Pipeline::first(kernels, &meshes[0], of_front)?.then(last, &meshes[1], of_last)?
        }
        _ => Pipeline::first(front, &meshes[0], of_front)?.then(last, &meshes[1], of_last)?,
    };
    model.compute_in(computes_in)?;
    let bytes = ShapedArray::new(&[BATCH, SIZES.time], DType::U8);
    let targets = std::collections::BTreeMap::from([("targets".to_owned(), bytes.clone())]);
    model.probe(p, &MicrobatchShapes::new(bytes).side(1, &targets))?;
    Ok(model)
}

/// Returns the microbatches of a step on the devices of their stages.
fn microbatches(p: &mut Program, meshes: &[Mesh], step: u64) -> Result<Vec<Microbatch<MpmdArray>>> {
    let one = |at: usize| {
        let key = Key(step).fold_in(at as u64);
        // A text that can be learnt: each byte follows from the one before it.
        let start = (uniform_f64(key, 0) * 4.0) as u8;
        let count = BATCH * SIZES.time;
        let bytes: Vec<u8> = (0..=count as u8).map(|i| start + i % 7 * 3).collect();
        let shape = [BATCH, SIZES.time];
        let x = MpmdArray::from_slice(&shape, &bytes[..count])?;
        let targets = MpmdArray::from_slice(&shape, &bytes[1..])?;
        let x = p.device_put(&x, meshes[0].replicated())?;
        let targets = p.device_put(&targets, meshes[1].replicated())?;
        x.block_until_ready()?;
        targets.block_until_ready()?;
        Ok(Microbatch::new(x).side(1, named([("targets", targets)])))
    };
    (0..MICROBATCHES).map(one).collect()
}

/// Trains on two devices of the kind `kind`. Returns the losses, and the bytes that the steps after
/// the first have copied between host and devices.
fn train(kind: DeviceKind, computes_in: DType, steps: u64) -> (Vec<f64>, u64) {
    const COPIES: [&str; 4] = [
        "pinned_to_device",
        "pageable_to_device",
        "device_to_pinned",
        "device_to_pageable",
    ];
    let copied = || -> u64 { COPIES.iter().filter_map(|kind| softcuda::bytes(kind)).sum() };
    let mut p = Program::builder()
        .device_kinds(&[kind])
        .devices(2)
        .alone()
        .unwrap();
    let meshes = p
        .mesh(&[("stage", 2), (MODEL_AXIS, 1)])
        .unwrap()
        .split("stage")
        .unwrap();
    let mut model = model(&mut p, (kind, computes_in), &meshes).unwrap();
    let settings = OptimizerSettings::new(AdamW::default()).clip(1.0);
    let mut optimizer = Optimizer::new(&mut p, &model, settings).unwrap();
    let schedule = Schedule::one_f_one_b(2, MICROBATCHES).unwrap();
    let (mut losses, mut inside) = (Vec::new(), 0);
    for step in 0..steps {
        let batch = microbatches(&mut p, &meshes, step).unwrap();
        let before = copied();
        let output = model.train_step(&mut p, &schedule, batch).unwrap();
        let figures = optimizer.step(&mut p, &mut model, output, 0.01).unwrap();
        figures.block_until_ready().unwrap();
        for (_, param) in model.params(0) {
            param.block_until_ready().unwrap();
        }
        inside += if step == 0 { 0 } else { copied() - before };
        losses.push(
            figures
                .to_host()
                .unwrap()
                .unwrap()
                .as_slice::<f64>()
                .unwrap()[0],
        );
    }
    p.finish().unwrap();
    (losses, inside)
}

#[test]
fn kernels_train_to_the_losses_of_the_cpu_without_copies_to_the_host() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let (expected, _) = train(DeviceKind::Cpu, DType::F32, STEPS);
    let (found, copied) = train(DeviceKind::Cuda, DType::F32, STEPS);
    let (halves, copied_halves) = train(DeviceKind::Cuda, DType::Bf16, 5);
    let pairs = found.iter().map(|found| (found, 1e-5)).zip(&expected);
    let pairs = pairs.chain(halves.iter().map(|found| (found, 0.02)).zip(&expected));
    for (step, ((found, part), expected)) in pairs.enumerate() {
        let near = (found - expected).abs() <= part * expected;
        assert!(near, "step {step}: {found}, and {expected} on the CPU");
    }
    assert_ne!(found[..5], halves);
    assert!(
        expected[STEPS as usize - 1] < 0.5 * expected[0],
        "nothing was learnt: {expected:?}"
    );
    assert_eq!(
        copied + copied_halves,
        0,
        "bytes between host and device in steps"
    );
}
