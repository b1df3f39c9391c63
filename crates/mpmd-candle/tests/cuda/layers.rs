//! Each layer in a stage: its values and its gradients.

use std::collections::BTreeMap;

use candle_core::{D, DType as CandleType, Tensor};
use mpmd_candle::nn::{self, Activation, Init, Mask, Module};
use mpmd_candle::{Cx, VarBuilder, named, stage};
use mpmd_core::Result;
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_layout::topology::DeviceKind;

type Forward = fn(&[Tensor], Tensor, &mut Cx<'_>) -> candle_core::Result<Tensor>;

/// Name and shape of each parameter, shape of the input, and the layer.
struct Case {
    name: &'static str,
    params: &'static [&'static [usize]],
    input: &'static [usize],
    /// True if the input are indices below 7.
    indices: bool,
    forward: Forward,
}

const CASES: &[Case] = &[
    Case {
        name: "linear",
        params: &[&[6, 5], &[6]],
        input: &[2, 3, 5],
        indices: false,
        forward: |p, x, _| nn::Linear::new(p[0].clone(), Some(p[1].clone())).forward(&x),
    },
    Case {
        name: "linear without bias, in bf16",
        params: &[&[6, 5]],
        input: &[4, 5],
        indices: false,
        forward: |p, x, _| {
            let half = |x: &Tensor| x.to_dtype(CandleType::BF16);
            let y = nn::Linear::new(half(&p[0])?, None).forward(&half(&x)?)?;
            y.to_dtype(CandleType::F32)
        },
    },
    Case {
        name: "linear with activations",
        params: &[&[6, 5], &[6], &[6, 6]],
        input: &[2, 3, 5],
        indices: false,
        forward: |p, x, _| {
            let layer = nn::Linear::new(p[0].clone(), Some(p[1].clone()));
            let y = layer.forward_activated(&x, Activation::NewGelu)?;
            let layer = nn::Linear::new(p[2].clone(), Some(p[1].clone()));
            let y = layer.forward_activated(&y, Activation::Gelu)?;
            nn::ops::silu(&layer.forward(&y)?)
        },
    },
    Case {
        name: "grouped",
        params: &[&[3, 6, 5]],
        input: &[8, 5],
        indices: false,
        forward: |p, x, _| nn::Grouped::new(p[0].clone()).forward(&x, &[3, 0, 5]),
    },
    Case {
        name: "embedding, tied to a head",
        params: &[&[7, 12]],
        input: &[2, 4],
        indices: true,
        forward: |p, x, _| {
            let y = nn::Embedding::new(p[0].clone(), 12).forward(&x)?;
            nn::Linear::new(p[0].clone(), None).forward(&y)
        },
    },
    Case {
        name: "norms",
        params: &[&[8], &[8], &[8]],
        input: &[3, 2, 8],
        indices: false,
        forward: |p, x, _| {
            let x = nn::LayerNorm::new(p[0].clone(), p[1].clone(), 1e-5).forward(&x)?;
            let x = (nn::LayerNorm::new_no_bias(p[2].clone(), 1e-5).forward(&x)? + x)?;
            nn::RmsNorm::new(p[0].clone(), 1e-6).forward(&x)
        },
    },
    Case {
        name: "attention with groups",
        params: &[&[8, 8], &[4, 8], &[4, 8]],
        input: &[2, 5, 8],
        indices: false,
        forward: |p, x, _| {
            let heads = |at: usize, heads: usize| {
                let y = nn::Linear::new(p[at].clone(), None).forward(&x)?;
                y.reshape((2, 5, heads, 4))?.transpose(1, 2)
            };
            let y = nn::attention(
                &heads(0, 2)?,
                &heads(1, 1)?,
                &heads(2, 1)?,
                Mask::Causal,
                0.5,
            )?;
            y.transpose(1, 2)?.reshape((2, 5, 8))
        },
    },
    Case {
        name: "attention with masks",
        params: &[&[5, 5]],
        input: &[2, 2, 5, 4],
        indices: false,
        forward: |p, x, _| {
            let first = Tensor::new(&[[0u32, 0, 1, 1, 4]], x.device())?;
            let y = nn::attention(&x, &x, &x, Mask::CausalFrom(first), 0.5)?;
            let mask = p[0].detach().reshape((1, 1, 5, 5))?;
            let y = nn::attention(&y, &x, &y, Mask::Additive(mask), 0.3)?;
            let y = nn::capped_attention(&y, &y, &x, Mask::None, 0.7, 2.0)?;
            let y = nn::capped_attention(&y, &x, &y, Mask::Causal, 1.7, 1.0)?;
            y.broadcast_matmul(&p[0].narrow(1, 0, 4)?.t()?.contiguous()?)
        },
    },
    Case {
        name: "self-attention",
        params: &[&[24, 8]],
        input: &[2, 5, 8],
        indices: false,
        forward: |p, x, _| {
            let qkv = nn::Linear::new(p[0].clone(), None).forward(&x)?;
            let y = nn::self_attention(&qkv, 2, Mask::Causal, 0.5)?;
            y + nn::self_attention(&qkv, 2, Mask::None, 0.5)?
        },
    },
    Case {
        name: "rotary embedding",
        params: &[&[4, 4]],
        input: &[1, 2, 3, 4],
        indices: false,
        forward: |p, x, _| {
            let [cos, sin] = [
                [1f32, 0.8, 0.5, 0.1, 0.2, -0.3],
                [0f32, 0.6, 0.8, 0.9, 0.9, 0.9],
            ]
            .map(|values| Tensor::new(&values, x.device())?.reshape((3, 2)));
            let y = nn::Linear::new(p[0].clone(), None).forward(&x)?;
            let (cos, sin) = (cos?, sin?);
            let y = nn::rotary_emb::rope(&y.contiguous()?, &cos, &sin)?;
            nn::rotary_emb::rope_i(&y.contiguous()?, &cos, &sin)
        },
    },
    Case {
        name: "dropout",
        params: &[&[5, 5]],
        input: &[3, 5],
        indices: false,
        forward: |p, x, cx| {
            let y = nn::Linear::new(p[0].clone(), None).forward(&x)?;
            nn::Dropout::new(0.3).forward(&y, cx.is_training())
        },
    },
    Case {
        name: "softmax",
        params: &[&[5, 5]],
        input: &[3, 5],
        indices: false,
        forward: |p, x, _| {
            let y = nn::Linear::new(p[0].clone(), None).forward(&x)?;
            nn::ops::softmax(&y, D::Minus1)? + nn::ops::log_softmax(&y, 0)?
        },
    },
    Case {
        name: "cross-entropy",
        params: &[&[7, 5]],
        input: &[2, 3, 5],
        indices: false,
        forward: |p, x, cx| {
            let logits = nn::Linear::new(p[0].clone(), None).forward(&x)?;
            let (targets, weights) = (cx.side("targets")?, cx.side("weights")?);
            let (sum, weight) = nn::loss::cross_entropy_sum(&logits, &targets, Some(&weights))?;
            let flat = logits.flatten_to(1)?;
            let mean = nn::loss::cross_entropy(&flat, &targets.flatten_all()?)?;
            Tensor::cat(&[(sum / weight)?.reshape(1)?, mean.reshape(1)?], 0)
        },
    },
];

/// The loss, and the gradients of all parameters.
type Found = BTreeMap<String, Vec<f32>>;

/// The way in which passes compute.
#[derive(Clone, Copy)]
struct Passes {
    /// True if gradients of weights are computed later than those of inputs.
    splits: bool,
    dtype: DType,
}

fn train(kind: DeviceKind, case: &'static Case, passes: Passes) -> Result<Found> {
    let Passes { splits, dtype } = passes;
    let mut p = Program::builder()
        .device_kinds(&[kind])
        .devices(2)
        .alone()?;
    let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
    let init = Init::Randn {
        mean: 0.1,
        stdev: 0.5,
    };
    let first = stage(
        move |vb: VarBuilder<'static>| {
            let params = case.params.iter().enumerate();
            params
                .map(|(at, shape)| vb.get_with_hints(*shape, &format!("p{at}"), init))
                .collect()
        },
        move |params: &Vec<Tensor>, x: Tensor, cx: &mut Cx<'_>| (case.forward)(params, x, cx),
    )?;
    let last = stage(
        move |vb: VarBuilder<'static>| vb.get_with_hints(1, "scale", init),
        |scale: &Tensor, x: Tensor, _: &mut Cx<'_>| {
            let sum = (x.sqr()? + &x)?.broadcast_mul(scale)?.sum_all()?;
            let weight = (sum.zeros_like()?.detach() + 1.0)?;
            Ok(Loss::new(sum, weight))
        },
    )?;
    let (first, last) = match splits {
        true => (first.split_gradients(), last.split_gradients()),
        false => (first, last),
    };
    let params = first.init(&mut p, &meshes[0], 3)?;
    let pipeline = Pipeline::first(first, &meshes[0], params)?;
    let params = last.init(&mut p, &meshes[1], 4)?;
    let mut pipeline = pipeline.then(last, &meshes[1], params)?;
    pipeline.compute_in(dtype)?;
    let input = ShapedArray::new(
        case.input,
        if case.indices { DType::U32 } else { DType::F32 },
    );
    let side = [("targets", DType::U32), ("weights", DType::F32)];
    let shapes = side.map(|(name, dtype)| (name.to_owned(), ShapedArray::new(&[2, 3], dtype)));
    let shapes = MicrobatchShapes::new(input).side(0, &BTreeMap::from(shapes));
    pipeline.probe(&mut p, &shapes)?;
    let mut microbatches = Vec::new();
    for number in 0..2u64 {
        let count = case.input.iter().product::<usize>() as u64;
        let x = match case.indices {
            true => {
                let values: Vec<u32> = (0..count).map(|i| ((i * 5 + number) % 7) as u32).collect();
                MpmdArray::from_slice(case.input, &values)?
            }
            false => {
                let value = |i| ((i * 7 + number * 3 + 1) as f32).sin();
                MpmdArray::from_slice(case.input, &(0..count).map(value).collect::<Vec<f32>>())?
            }
        };
        let targets = MpmdArray::from_slice(&[2, 3], &[1u32, 6, 0, 3, 3, 5])?;
        let weights = MpmdArray::from_slice(&[2, 3], &[1f32, 0.5, 0.0, 2.0, 1.0, 1.0])?;
        let mut put = |array| p.device_put(&array, meshes[0].replicated());
        let (x, targets, weights) = (put(x)?, put(targets)?, put(weights)?);
        let side = named([("targets", targets), ("weights", weights)]);
        let key = mpmd_layout::random::Key(number);
        microbatches.push(Microbatch::new(x).side(0, side).key(key));
    }
    let schedule = if splits { "zb-h1" } else { "1f1b" };
    let schedule = Schedule::named(schedule, 2, microbatches.len(), None)?;
    let output = pipeline.train_step(&mut p, &schedule, microbatches)?;
    let read = |array: &MpmdArray| -> Result<Vec<f32>> {
        let host = array
            .to_host()?
            .ok_or_else(|| Error::kernel("no values here"))?;
        Ok(host.to_vec::<f32>()?)
    };
    let mut found = BTreeMap::from([("loss".to_owned(), read(&output.loss.sum)?)]);
    for (path, gradient) in output.gradients.into_iter().flatten() {
        found.insert(path, read(&gradient)?);
    }
    p.finish()?;
    Ok(found)
}

#[track_caller]
fn check(case: &'static Case, passes: Passes) {
    let name = case.name;
    let run = |kind| train(kind, case, passes).unwrap_or_else(|why| panic!("{name}: {why}"));
    let (found, expected) = (run(DeviceKind::Cuda), run(DeviceKind::Cpu));
    assert_eq!(found.len(), case.params.len() + 2, "{name}");
    let is_half = passes.dtype == DType::Bf16 || name.contains("bf16");
    let tolerance = if is_half { 2e-2 } else { 1e-5 };
    for (path, expected) in &expected {
        let scale = expected.iter().fold(1.0f32, |most, x| most.max(x.abs()));
        for (at, (found, expected)) in found[path].iter().zip(expected).enumerate() {
            let is_near = (found - expected).abs() <= tolerance * scale;
            assert!(is_near, "{name}: {path} at {at} is {found}, not {expected}");
        }
    }
    assert_eq!(
        softcuda::driver().map(|driver| driver.races()),
        Some(0),
        "races"
    );
}

#[test]
fn fused_passes_equal_those_of_cpus() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        let passes = Passes {
            splits: false,
            dtype: DType::F32,
        };
        CASES.iter().for_each(|case| check(case, passes));
    }
}

#[test]
fn split_passes_equal_those_of_cpus() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        let passes = Passes {
            splits: true,
            dtype: DType::F32,
        };
        CASES.iter().for_each(|case| check(case, passes));
    }
}

#[test]
fn bf16_weight_gradients_are_computed_with_tf32_on() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    // cuBLAS has no product of bf16 by TF32.
    candle_core::cuda::set_gemm_reduced_precision_f32(true);
    let multiplying = [
        "linear",
        "linear with activations",
        "grouped",
        "embedding, tied to a head",
    ];
    for case in CASES.iter().filter(|case| multiplying.contains(&case.name)) {
        for splits in [false, true] {
            check(
                case,
                Passes {
                    splits,
                    dtype: DType::Bf16,
                },
            );
        }
    }
}
