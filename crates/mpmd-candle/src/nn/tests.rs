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

/// Computes a function on tensors of these sizes. The sizes' meaning is that of the function.
type OfSizes = fn(&[usize], DType) -> Result<Tensor>;

/// A function of this module whose sizes may be 0.
struct SizedFunction {
    name: &'static str,
    sizes: &'static [usize],
    compute: OfSizes,
    /// Returns the shape of the result.
    shape: fn(&[usize]) -> Vec<usize>,
}

/// Returns a variable of `dtype`.
fn typed(shape: &[usize], dtype: DType) -> Tensor {
    variable(shape, 7).to_dtype(dtype).unwrap()
}

/// Returns indices that are all 0.
fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::U32, &Device::Cpu).unwrap()
}

/// Returns queries, keys and values for the sizes batch, heads, groups, queries, keys, dim and
/// out_dim.
fn heads(s: &[usize], dtype: DType) -> [Tensor; 3] {
    [
        typed(&[s[0], s[1], s[3], s[5]], dtype),
        typed(&[s[0], s[2], s[4], s[5]], dtype),
        typed(&[s[0], s[2], s[4], s[6]], dtype),
    ]
}

fn attend_with(s: &[usize], dtype: DType, mask: Mask) -> Result<Tensor> {
    let [q, k, v] = heads(s, dtype);
    attention(&q, &k, &v, mask, 0.5)
}

fn linear_of(s: &[usize], dtype: DType) -> Linear {
    Linear::new(typed(&[s[3], s[2]], dtype), Some(typed(&[s[3]], dtype)))
}

const HEADS: &[usize] = &[2, 4, 2, 3, 5, 8, 6];
const LINEAR: &[usize] = &[2, 3, 4, 5];

fn of_elements() -> Vec<SizedFunction> {
    let function = |name, compute: OfSizes| SizedFunction {
        name,
        sizes: &[2, 3, 4],
        compute,
        shape: <[usize]>::to_vec,
    };

    vec![
        function("softmax", |s, t| super::ops::softmax(&typed(s, t), 2)),
        function("softmax of columns", |s, t| {
            super::ops::softmax(&typed(s, t), 1)
        }),
        function("log_softmax", |s, t| {
            super::ops::log_softmax(&typed(s, t), 2)
        }),
        function("gelu", |s, t| super::ops::gelu(&typed(s, t))),
        function("gelu_erf", |s, t| super::ops::gelu_erf(&typed(s, t))),
        function("silu", |s, t| super::ops::silu(&typed(s, t))),
        function("mish", |s, t| super::ops::mish(&typed(s, t))),
        function("rms_norm", |s, t| {
            super::ops::rms_norm(&typed(s, t), &typed(&s[2..], t), 1e-5)
        }),
        function("layer_norm", |s, t| {
            let of_width = typed(&s[2..], t);
            super::ops::layer_norm(&typed(s, t), &of_width, &of_width, 1e-5)
        }),
        SizedFunction {
            shape: |s| vec![s[0], s[1], s[2] / 2],
            ..function("swiglu", |s, t| super::ops::swiglu(&typed(s, t)))
        },
    ]
}

fn of_layers() -> Vec<SizedFunction> {
    let linear = |name, compute: OfSizes| SizedFunction {
        name,
        sizes: LINEAR,
        compute,
        shape: |s| vec![s[0], s[1], s[3]],
    };

    vec![
        linear("linear", |s, t| linear_of(s, t).forward(&typed(&s[..3], t))),
        linear("linear without bias", |s, t| {
            Linear::new(typed(&[s[3], s[2]], t), None).forward(&typed(&s[..3], t))
        }),
        linear("linear with activation", |s, t| {
            linear_of(s, t).forward_activated(&typed(&s[..3], t), super::Activation::Silu)
        }),
        linear("packed linear", |s, t| {
            super::PackedLinear::new(&linear_of(s, t), false)?.forward(&typed(&s[..3], t))
        }),
        SizedFunction {
            name: "rows of a packed linear",
            sizes: LINEAR,
            compute: |s, t| {
                super::PackedLinear::new(&linear_of(s, t), false)?.rows(&zeros(&s[..2]))
            },
            shape: |s| vec![s[0], s[1], s[2]],
        },
        SizedFunction {
            name: "grouped",
            sizes: &[2, 3, 4, 5],
            compute: |s, t| {
                let weight = typed(&[s[0], s[3], s[2]], t);
                Grouped::new(weight).forward(&typed(&[s[0] * s[1], s[2]], t), &vec![s[1]; s[0]])
            },
            shape: |s| vec![s[0] * s[1], s[3]],
        },
        SizedFunction {
            name: "embedding",
            sizes: &[2, 3, 4, 5],
            compute: |s, t| Embedding::new(typed(&s[2..], t), s[3]).forward(&zeros(&s[..2])),
            shape: |s| vec![s[0], s[1], s[3]],
        },
        SizedFunction {
            name: "new layers",
            sizes: &[3, 4],
            compute: |s, t| {
                let variables = candle_nn::VarMap::new();
                let vb = candle_nn::VarBuilder::from_varmap(&variables, t, &Device::Cpu);
                let x = super::embedding(3, s[0], vb.pp("e"))?.forward(&zeros(&[2]))?;
                let x = super::layer_norm(s[0], 1e-5, vb.pp("n"))?.forward(&x)?;
                super::linear(s[0], s[1], vb.pp("l"))?.forward(&x)
            },
            shape: |s| vec![2, s[1]],
        },
    ]
}

fn of_heads() -> Vec<SizedFunction> {
    let attention = |name, compute: OfSizes| SizedFunction {
        name,
        sizes: HEADS,
        compute,
        shape: |s| vec![s[0], s[1], s[3], s[6]],
    };
    let rotary = |name, compute: OfSizes| SizedFunction {
        name,
        sizes: &[2, 3, 4, 6],
        compute,
        shape: <[usize]>::to_vec,
    };

    vec![
        attention("attention", |s, t| attend_with(s, t, Mask::None)),
        attention("causal attention", |s, t| attend_with(s, t, Mask::Causal)),
        attention("attention from keys", |s, t| {
            attend_with(s, t, Mask::CausalFrom(zeros(&[s[0], s[3]])))
        }),
        attention("masked attention", |s, t| {
            let mask = variable(&[s[0], 1, s[3], s[4]], 3).detach();
            attend_with(s, t, Mask::Additive(mask))
        }),
        attention("capped attention", |s, t| {
            let [q, k, v] = heads(s, t);
            super::capped_attention(&q, &k, &v, Mask::Causal, 0.5, 3.0)
        }),
        SizedFunction {
            name: "self-attention",
            sizes: &[2, 3, 4, 5],
            compute: |s, t| {
                let qkv = typed(&[s[0], s[1], s[2] * 3 * s[3]], t);
                self_attention(&qkv, s[2], Mask::Causal, 0.5)
            },
            shape: |s| vec![s[0], s[1], s[2] * s[3]],
        },
        SizedFunction {
            name: "paged attention",
            sizes: &[3, 4, 2, 5],
            compute: |s, t| {
                let mut cache = super::PagedCache::new(1, s[2], s[3]);
                let rows = super::PagedRows {
                    start: 0,
                    rows: s[0],
                    blocks: vec![0],
                };
                let scores = super::PagedScores {
                    scale: 0.5,
                    cap: None,
                    window: None,
                };
                let q = typed(&[s[0], s[1], s[3]], t);
                let k = typed(&[s[0], s[2], s[3]], t);
                cache.attention([&q, &k, &k], &[rows], scores)
            },
            shape: |s| vec![s[0], s[1], s[3]],
        },
        rotary("rope", |s, t| {
            let angles = typed(&[s[2], s[3] / 2], t).detach();
            super::rotary_emb::rope(&typed(s, t), &angles, &angles)
        }),
        rotary("rope_i", |s, t| {
            let angles = typed(&[s[2], s[3] / 2], t).detach();
            super::rotary_emb::rope_i(&typed(s, t), &angles, &angles)
        }),
    ]
}

fn of_losses() -> Vec<SizedFunction> {
    let loss = |name, compute: OfSizes| SizedFunction {
        name,
        sizes: &[3, 4],
        compute,
        shape: |_| Vec::new(),
    };

    vec![
        loss("cross_entropy", |s, t| {
            super::loss::cross_entropy(&typed(s, t), &zeros(&s[..1]))
        }),
        loss("cross_entropy_sum", |s, t| {
            Ok(super::loss::cross_entropy_sum(&typed(s, t), &zeros(&s[..1]), None)?.0)
        }),
        loss("cross_entropy_sum without rows that count", |s, t| {
            let none = Tensor::zeros(s[0], DType::F32, &Device::Cpu)?;
            let sums = super::loss::cross_entropy_sum(&typed(s, t), &zeros(&s[..1]), Some(&none));
            Ok(sums?.0)
        }),
        loss("nll", |s, t| {
            super::loss::nll(&typed(s, t), &zeros(&s[..1]))
        }),
        loss("mse", |s, t| super::loss::mse(&typed(s, t), &typed(s, t))),
        loss("huber", |s, t| {
            super::loss::huber(&typed(s, t), &typed(s, t), 1.0)
        }),
        loss("binary_cross_entropy", |s, t| {
            super::loss::binary_cross_entropy_with_logit(&typed(s, t), &typed(s, t))
        }),
    ]
}

/// Computes a function and its gradients. Returns the failure, if it is not a typed error.
fn failure_of(function: &SizedFunction, sizes: &[usize], dtype: DType) -> Option<String> {
    let run = || {
        let Ok(y) = (function.compute)(sizes, dtype) else {
            return None;
        };
        let expected = (function.shape)(sizes);
        if y.dims() != expected {
            return Some(format!("{:?} instead of {expected:?}", y.dims()));
        }
        // Its error is a typed one.
        let _ = y.sum_all().and_then(|sum| sum.backward());
        None
    };
    std::panic::catch_unwind(run).unwrap_or_else(|_| Some("a panic".to_owned()))
}

#[test]
fn empty_dimensions_give_empty_results_or_errors() {
    let functions = [of_elements(), of_layers(), of_heads(), of_losses()];
    let mut failures = Vec::new();
    for function in functions.iter().flatten() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let full = (function.compute)(function.sizes, dtype);
            // Layers for inference are of f32 alone.
            assert!(
                full.is_ok() || dtype != DType::F32,
                "{}: {full:?}",
                function.name
            );
            let one_empty = (0..function.sizes.len()).map(|at| {
                let mut sizes = function.sizes.to_vec();
                sizes[at] = 0;
                sizes
            });

            for sizes in one_empty.chain([vec![0; function.sizes.len()]]) {
                if let Some(failure) = failure_of(function, &sizes, dtype) {
                    failures.push(format!(
                        "{} of {dtype:?} {sizes:?}: {failure}",
                        function.name
                    ));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn linear_without_inputs_gives_its_bias_and_gradients() {
    let bias = variable(&[5], 1);
    let layer = Linear::new(variable(&[5, 0], 2), Some(bias.clone()));
    let y = layer.forward(&variable(&[2, 3, 0], 3)).unwrap();
    let expected = bias.broadcast_as((2, 3, 5)).unwrap().contiguous().unwrap();
    assert_eq!(elements(&y), elements(&expected));
    let gradients = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(elements(gradients.get(&bias).unwrap()), [6.0; 5]);
}
