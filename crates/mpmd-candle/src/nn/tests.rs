//! Layers inside a pass: deferred gradients, and dropout.

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, TensorId, Var};
use candle_nn::Module;
use mpmd_layout::random::Key;

use super::{
    Dropout, Embedding, Grouped, LayerNorm, Linear, Mask, RmsNorm, attention, self_attention,
};
use crate::pass::{Gradient, PassState, enter};

fn pass(key: Option<Key>) -> PassState<'static> {
    PassState {
        key,
        ..PassState::default()
    }
}

/// Returns a variable of f32 in [-1, 1).
fn variable(shape: &[usize], seed: u64) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let values = (0..shape.iter().product()).map(|_| random.f32() * 2.0 - 1.0);
    let values = Tensor::from_vec(values.collect::<Vec<_>>(), shape, &Device::Cpu);
    Var::from_tensor(&values.unwrap())
        .unwrap()
        .as_tensor()
        .clone()
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Computes a model with a layer of each kind that can defer. `weights[0]` is used twice.
fn loss(weights: &[Tensor]) -> Result<Tensor> {
    let [table, gain, bias, square, stack] = weights else {
        unreachable!()
    };
    let tokens = Tensor::new(&[[1u32, 3, 1, 0], [2, 4, 4, 1]], &Device::Cpu)?;
    let x = Embedding::new(table.clone(), 12).forward(&tokens)?;
    let x = LayerNorm::new(gain.clone(), bias.clone(), 1e-5).forward(&x)?;
    let x = Linear::new(square.clone(), Some(bias.clone())).forward(&x)?;
    let heads = x.reshape((2, 4, 3, 4))?.transpose(1, 2)?;
    let x = attention(&heads, &heads, &heads, Mask::Causal, 0.5)?;
    let x = x.transpose(1, 2)?.reshape((2, 4, 12))?;
    let x = RmsNorm::new(gain.clone(), 1e-5).forward(&x)?;
    let x = Grouped::new(stack.clone()).forward(&x.reshape((8, 12))?, &[3, 0, 5])?;
    let x = x.reshape((2, 4, 12))?;
    let x = Linear::new(table.clone(), None).forward(&x)?;
    super::loss::cross_entropy(&x.reshape((8, 5))?, &tokens.flatten_all()?)
}

fn weights() -> Vec<Tensor> {
    let shapes: [&[usize]; 5] = [&[5, 12], &[12], &[12], &[12, 12], &[3, 12, 12]];
    shapes
        .iter()
        .enumerate()
        .map(|(at, shape)| variable(shape, at as u64))
        .collect()
}

#[test]
fn deferred_gradients_have_the_bits_of_immediate_ones() {
    let weights = weights();
    // Outside of a pass, candle collects the gradients.
    let by_candle = loss(&weights).unwrap().backward().unwrap();
    let by_candle: Vec<Vec<f32>> = weights
        .iter()
        .map(|weight| elements(by_candle.get(weight).unwrap()))
        .collect();

    let run = |is_deferred: bool| {
        let mut slices: Vec<Vec<f32>> = weights
            .iter()
            .map(|weight| vec![0.0; weight.elem_count()])
            .collect();
        let ids = weights.iter().map(Tensor::id);
        let mut pass = PassState {
            gradients: ids
                .zip(slices.iter_mut().map(|slice| Gradient::Host(slice)))
                .collect(),
            deferred: is_deferred.then(Vec::new),
            ..PassState::default()
        };
        let rest = enter(&mut pass, || loss(&weights)?.backward()).unwrap();
        assert!(weights.iter().all(|weight| rest.get(weight).is_none()));
        let PassState {
            gradients,
            deferred,
            kept_bytes,
            ..
        } = pass;
        // Indices of 8 tokens, two numbers for each of 24 queries, four for each of 8 losses.
        assert_eq!(kept_bytes, 4 * (8 + 2 * 24 + 4 * 8));
        let slices_of = gradients
            .into_iter()
            .map(|(weight, gradient)| match gradient {
                Gradient::Host(values) => (weight, values),
                Gradient::Cuda(_) => unreachable!("the weights are on the CPU"),
            });
        let mut gradients: HashMap<TensorId, &mut [f32]> = slices_of.collect();
        if let Some(deferred) = deferred {
            assert!(
                gradients
                    .values()
                    .all(|gradient| gradient.iter().all(|x| *x == 0.0))
            );
            // Another thread computes them.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for deferred in deferred {
                        let values = gradients.get_mut(&deferred.weight).unwrap();
                        (deferred.add)(&mut Gradient::Host(values)).unwrap();
                    }
                });
            });
        }
        drop(gradients);
        slices
    };
    let (immediate, deferred) = (run(false), run(true));
    for (at, (immediate, deferred)) in immediate.iter().zip(&deferred).enumerate() {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(immediate), bits(deferred), "weight {at}");
        for (found, expected) in immediate.iter().zip(&by_candle[at]) {
            assert!(
                (found - expected).abs() < 1e-5,
                "weight {at}: {found}, not {expected}"
            );
        }
    }
}

#[test]
fn self_attention_is_attention_to_its_parts() -> Result<()> {
    for (batch, time, heads, dim) in [(2, 7, 3, 4), (1, 130, 2, 8), (3, 64, 1, 5)] {
        let x = variable(&[batch, time, heads * 3 * dim], 1);
        for mask in [Mask::None, Mask::Causal] {
            let split = |x: &Tensor| {
                let x = x.reshape((batch, time, heads, 3, dim))?.transpose(1, 2)?;
                let part = |which| x.narrow(3, which, 1)?.squeeze(3);
                let y = attention(&part(0)?, &part(1)?, &part(2)?, mask.clone(), 0.4)?;
                y.transpose(1, 2)?.reshape((batch, time, heads * dim))
            };
            let run = |y: Tensor| -> Result<[Vec<f32>; 2]> {
                let weights = Tensor::arange(0f32, y.elem_count() as f32, &Device::Cpu)?;
                let sum = (&y * weights.sin()?.reshape(y.shape())?)?.sum_all()?;
                Ok([elements(&y), elements(sum.backward()?.get(&x).unwrap())])
            };
            let found = run(self_attention(&x, heads, mask.clone(), 0.4)?)?.concat();
            let expected = run(split(&x)?)?.concat();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
            }
        }
    }
    let odd = variable(&[1, 2, 10], 1);
    let why = self_attention(&odd, 2, Mask::None, 1.0)
        .unwrap_err()
        .to_string();
    assert!(why.contains("[1, 2, 10] with 2 heads"), "{why}");
    Ok(())
}

#[test]
fn dropout_draws_a_mask_of_the_key() {
    let x = variable(&[300, 301], 1);
    let drop = |key: u64| {
        enter(&mut pass(Some(Key(key))), || {
            let first = Dropout::new(0.3).forward(&x, true).unwrap();
            (
                elements(&first),
                elements(&Dropout::new(0.3).forward(&x, true).unwrap()),
            )
        })
    };
    let (first, second) = drop(7);
    assert_eq!((first.clone(), second.clone()), drop(7), "the same key");
    assert_ne!(first, second, "two calls");
    assert_ne!(first, drop(8).0, "two keys");
    let zeros = first.iter().filter(|y| **y == 0.0).count() as f64;
    assert!(
        (zeros / first.len() as f64 - 0.3).abs() < 0.01,
        "{zeros} zeros"
    );
    for (x, y) in elements(&x).iter().zip(&first) {
        // 0.3 is not a multiple of 2^-16.
        assert!(*y == 0.0 || *y == x * (65536.0 / (65536.0 - 19661.0)));
    }
    // Columns that share random bits are dropped independently.
    let both = first
        .chunks_exact(2)
        .filter(|pair| pair[0] == 0.0 && pair[1] == 0.0)
        .count();
    assert!(
        (both as f64 / (first.len() / 2) as f64 - 0.09).abs() < 0.01,
        "{both} pairs"
    );
}

#[test]
fn dropout_has_the_gradient_of_its_mask() {
    let x = variable(&[50, 50], 1);
    let (y, gradients) = enter(&mut pass(Some(Key(7))), || {
        let y = super::ops::dropout(&x, 0.25).unwrap();
        let gradients = y.sum_all().unwrap().backward().unwrap();
        (y, gradients)
    });
    for (y, d) in elements(&y)
        .iter()
        .zip(elements(gradients.get(&x).unwrap()))
    {
        assert_eq!(d, if *y == 0.0 { 0.0 } else { 1.0 / 0.75 });
    }
    // Other types have the same mask.
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::BF16, 1e-2), (DType::F16, 1e-3)] {
        let other = x.to_dtype(dtype).unwrap();
        let other = enter(&mut pass(Some(Key(7))), || {
            super::ops::dropout(&other, 0.25)
        })
        .unwrap();
        let other = elements(&other.to_dtype(DType::F32).unwrap());
        assert!(
            elements(&y)
                .iter()
                .zip(&other)
                .all(|(y, other)| (y - other).abs() < tolerance)
        );
    }
}

#[test]
fn dropout_scales_by_the_probability_of_its_mask() {
    let x = Tensor::ones(1 << 16, DType::F32, &Device::Cpu).unwrap();
    let drop = |p| {
        let y = enter(&mut pass(Some(Key(7))), || super::ops::dropout(&x, p)).unwrap();
        elements(&y)
            .into_iter()
            .filter(|y| *y != 0.0)
            .collect::<Vec<_>>()
    };
    // Below half of 2^-16, nothing is dropped, so nothing is scaled.
    assert_eq!(drop(7e-6), [1.0; 1 << 16]);
    // Near 1, the largest probability that keeps anything.
    let kept = drop(0.999_999);
    assert!(
        kept.len() < 20 && kept.iter().all(|y| *y == 65536.0),
        "{kept:?}"
    );
}

#[test]
fn dropout_without_training_needs_no_key() {
    let x = variable(&[5], 1);
    let same = |y: Result<Tensor>| assert_eq!(elements(&y.unwrap()), elements(&x));
    same(Dropout::new(0.5).forward(&x, false));
    same(Dropout::new(0.0).forward(&x, true));
    assert!(Dropout::new(1.0).forward(&x, true).is_err());
    let error = enter(&mut pass(None), || Dropout::new(0.5).forward(&x, true)).unwrap_err();
    assert!(error.to_string().contains("Microbatch::key"), "{error}");
}
