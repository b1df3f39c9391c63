//! Functions of tensors as kernels on CUDA devices.

use candle_core::{D, Result as CandleResult, Tensor};
use mpmd_candle::nn::{self, PagedCache, PagedRows, PagedScores};
use mpmd_candle::{FunctionKernel, TensorFunction, function};
use mpmd_core::Result;
use mpmd_core::prelude::*;
use mpmd_layout::topology::DeviceKind;

/// Calls the kernel of a function with values of these shapes on a device.
fn call<A, F>(kind: DeviceKind, f: FunctionKernel<F, A>, shapes: [&[usize]; 3]) -> Result<Vec<f32>>
where
    A: 'static,
    F: TensorFunction<A, In = (MpmdArray, MpmdArray, MpmdArray), Out = MpmdArray>,
{
    let mut p = Program::builder().device_kinds(&[kind]).alone()?;
    let mesh = p.mesh(&[("x", 1)])?;
    let jit = p
        .jit(f.like_input())
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()?;
    let mut number = 0;
    let mut array = |shape: &[usize]| {
        let value = |_| {
            number += 1;
            (number as f32 * 0.7).sin()
        };
        let values: Vec<f32> = (0..shape.iter().product::<usize>()).map(value).collect();
        p.device_put(&MpmdArray::from_slice(shape, &values)?, mesh.replicated())
    };
    let x = (array(shapes[0])?, array(shapes[1])?, array(shapes[2])?);
    let y = jit.call(&mut p, x)?;
    let host = y
        .to_host()?
        .ok_or_else(|| Error::kernel("no values here"))?;
    p.finish()?;
    Ok(host.to_vec::<f32>()?)
}

#[track_caller]
fn assert_near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() < 1e-5,
            "element {at} is {found}, not {expected}"
        );
    }
}

fn product(a: Tensor, b: Tensor, c: Tensor) -> CandleResult<Tensor> {
    nn::ops::softmax(&(a.matmul(&b)? + c)?, D::Minus1)
}

#[test]
fn function_equals_that_of_cpus() {
    if softcuda::again!() {
        return;
    }
    let run = |kind, on_host| {
        let f = function(product);
        call(
            kind,
            if on_host { f.on_host() } else { f },
            [&[5, 5], &[5, 5], &[5, 5]],
        )
        .unwrap()
    };
    let expected = run(DeviceKind::Cpu, false);
    assert_near(&run(DeviceKind::Cuda, false), &expected);
    assert_eq!(run(DeviceKind::Cuda, true), expected, "on the host");
}

/// Two passes of two sequences: the first is longer than a block.
fn paged(q: Tensor, k: Tensor, v: Tensor) -> CandleResult<Tensor> {
    let mut cache = PagedCache::new(5, 2, 8);
    let scores = PagedScores {
        scale: 0.4,
        cap: Some(3.0),
        window: Some(14),
    };
    let rows = |start, rows, blocks: &[u32]| PagedRows {
        start,
        rows,
        blocks: blocks.to_vec(),
    };
    let passes = [
        (0, 17, vec![rows(0, 15, &[3]), rows(0, 2, &[0])]),
        (17, 9, vec![rows(15, 6, &[3, 1]), rows(2, 3, &[0])]),
    ];
    let mut out = Vec::new();
    for (first, count, sequences) in passes {
        let part = |x: &Tensor| x.narrow(0, first, count);
        let (q, k, v) = (part(&q)?, part(&k)?, part(&v)?);
        out.push(cache.attention([&q, &k, &v], &sequences, scores)?);
    }
    Tensor::cat(&out, 0)
}

#[test]
fn paged_attention_equals_that_of_cpus() {
    if softcuda::again!() {
        return;
    }
    let shapes: [&[usize]; 3] = [&[26, 4, 8], &[26, 2, 8], &[26, 2, 8]];
    let run = |kind| call(kind, function(paged), shapes).unwrap();
    assert_near(&run(DeviceKind::Cuda), &run(DeviceKind::Cpu));
}
