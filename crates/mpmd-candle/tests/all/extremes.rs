//! Layers of very large numbers, of infinite ones, and of nothing.

use candle_core::{DType, Device, Result, Tensor, Var};
use mpmd_candle::nn::{self, Activation, Mask, Module};

const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

type Layer<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

fn doubles(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Returns a variable of these values.
fn variable(values: &[f64], shape: &[usize], dtype: DType) -> Tensor {
    let values = Tensor::from_slice(values, shape, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap();
    Var::from_tensor(&values).unwrap().as_tensor().clone()
}

/// Returns the result of `f` and the gradient of its sum.
fn run(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> [Vec<f64>; 2] {
    let y = f(x).unwrap();
    let store = y.sum_all().unwrap().backward().unwrap();
    [doubles(&y), doubles(store.get(x).unwrap())]
}

fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 4e-3;
    assert!(
        found.iter().zip(expected).all(is_near),
        "{what}: {found:?}, not {expected:?}"
    );
}

#[test]
fn large_logits_keep_their_logarithm() {
    for dtype in TYPES {
        let large: f64 = if dtype == DType::F16 { 6e4 } else { 3e7 };
        for large in [large, -large] {
            let what = format!("{dtype:?}, {large}");
            let lowest = large - large.abs();
            let logits = variable(&[large, large, lowest], &[1, 3], dtype);
            let target = Tensor::new(&[0u32], &Device::Cpu).unwrap();
            let [loss, d] = run(&logits, |x| nn::loss::cross_entropy(x, &target));
            assert_near(&what, &loss, &[2f64.ln()]);
            assert_near(&what, &d, &[-0.5, 0.5, 0.0]);
        }
    }
    // Probabilities of 1 and 0 have no logarithm.
    for dtype in TYPES {
        let logits = variable(&[200.0, -200.0, 200.0, -200.0], &[4], dtype);
        let target = variable(&[1.0, 0.0, 0.0, 1.0], &[4], dtype).detach();
        let loss = |x: &Tensor| nn::loss::binary_cross_entropy_with_logit(x, &target);
        let [loss, d] = run(&logits, loss);
        assert_near(&format!("{dtype:?}"), &loss, &[100.0]);
        assert_near(&format!("{dtype:?}"), &d, &[0.0, 0.0, 0.25, -0.25]);
    }
}

#[test]
fn large_scores_keep_the_gradients() {
    // All scores of a row are equal, so all probabilities are 1/8.
    let (keys, dim) = (8, 2);
    let values: Vec<f64> = (0..keys * dim).map(|i| i as f64 / 8.0).collect();
    let ones = vec![1.0; keys * dim];
    let d_v = vec![1.0; keys * dim];
    for dtype in TYPES {
        let low = if dtype == DType::F16 { -6e4 } else { -1e9 };
        let v = variable(&values, &[1, 1, keys, dim], dtype);
        let qk = variable(&ones, &[1, 1, keys, dim], dtype).detach();
        let hidden = Tensor::new(&[low], &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        let masked = |v: &Tensor| nn::attention(&qk, &qk, v, Mask::Additive(hidden.clone()), 1.0);
        let [y, d] = run(&v, masked);
        assert_near(
            &format!("{dtype:?}, masked throughout"),
            &y,
            &[0.875, 1.0].repeat(keys),
        );
        assert_near(&format!("{dtype:?}, masked throughout"), &d, &d_v);
        let [_, d] = run(&v, |v| nn::attention(&qk, &qk, v, Mask::None, 1e4));
        assert_near(&format!("{dtype:?}, large scale"), &d, &d_v);

        // Queries and keys are ones; the gradient of the values is the same.
        let rows = values
            .chunks(dim)
            .flat_map(|v| [1.0, 1.0, 1.0, 1.0, v[0], v[1]]);
        let qkv = variable(&rows.collect::<Vec<_>>(), &[1, keys, 3 * dim], dtype);
        let [_, d] = run(&qkv, |qkv| nn::self_attention(qkv, 1, Mask::None, 1e4));
        let d: Vec<f64> = d
            .chunks(3 * dim)
            .flat_map(|row| row[2 * dim..].to_vec())
            .collect();
        assert_near(&format!("{dtype:?}, self-attention"), &d, &d_v);
    }
}

#[test]
fn rows_of_weight_zero_may_be_infinite() {
    const INF: f64 = f64::INFINITY;
    for dtype in TYPES {
        let rows = [0.0, 0.0, -INF, 1.0, -INF, -INF, INF, INF];
        let logits = variable(&rows, &[4, 2], dtype);
        let weights = Tensor::new(&[2f32, 0.0, 0.0, 0.0], &Device::Cpu).unwrap();
        let targets = Tensor::new(&[1i64, 0, 0, -100], &Device::Cpu).unwrap();
        let sum = |x: &Tensor| Ok(nn::loss::cross_entropy_sum(x, &targets, Some(&weights))?.0);
        let [loss, d] = run(&logits, sum);
        assert_near(&format!("{dtype:?}"), &loss, &[2.0 * 2f64.ln()]);
        assert_near(
            &format!("{dtype:?}"),
            &d,
            &[1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        );
    }
}

#[test]
fn activations_have_limits_at_infinity() {
    const INF: f64 = f64::INFINITY;
    let bound = |x: &Tensor, linear: bool, curve: Activation| match linear {
        false => curve.forward(x),
        true => {
            let one = Tensor::ones((1, 1), x.dtype(), x.device())?;
            let zero = Tensor::zeros(1, x.dtype(), x.device())?;
            let layer = nn::Linear::new(one, Some(zero));
            layer.forward_activated(&x.unsqueeze(1)?, curve)?.squeeze(1)
        }
    };
    for dtype in TYPES {
        // f16 makes some of them infinite.
        let low = [-INF, -1e38, -1e30, -1e20, -1e10, -5e4, -2e3];
        let high = low.map(|x| -x);
        for curve in [
            Activation::Gelu,
            Activation::NewGelu,
            Activation::Silu,
            Activation::Mish,
        ] {
            for linear in [false, true] {
                let what = format!("{curve:?} of {dtype:?}, in a layer: {linear}");
                let [y, d] = run(&variable(&low, &[7], dtype), |x| bound(x, linear, curve));
                assert_eq!((&y[..], &d[..]), (&[0.0; 7][..], &[0.0; 7][..]), "{what}");
                let x = variable(&high, &[7], dtype);
                let [y, d] = run(&x, |x| bound(x, linear, curve));
                assert_eq!(
                    (&y[..], &d[..]),
                    (&doubles(&x)[..], &[1.0; 7][..]),
                    "{what}"
                );
                let nan = variable(&[f64::NAN], &[1], dtype);
                assert!(
                    bound(&nan, linear, curve).is_ok_and(|y| doubles(&y)[0].is_nan()),
                    "{what}"
                );
            }
        }
        // The gates are the first half of the row.
        let x = variable(&[low.to_vec(), vec![3.0; 7]].concat(), &[1, 14], dtype);
        let [y, d] = run(&x, nn::ops::swiglu);
        assert_eq!(
            (&y[..], &d[..]),
            (&[0.0; 7][..], &[0.0; 14][..]),
            "swiglu of {dtype:?}"
        );
    }
}

#[test]
fn layers_take_an_empty_batch() {
    for dtype in TYPES {
        let of = |shape: &[usize]| variable(&vec![1.0; shape.iter().product()], shape, dtype);
        let (x, heads) = (of(&[0, 3, 4]), of(&[0, 2, 3, 4]));
        let (weight, bias) = (of(&[4, 4]), of(&[4]));
        let tokens = Tensor::zeros((0, 3), DType::U32, &Device::Cpu).unwrap();
        let rows = |x: &Tensor| x.reshape((0, 4));
        let cases: [(&str, Layer<'_>); 12] = [
            ("linear", &|x| {
                nn::Linear::new(weight.clone(), Some(bias.clone())).forward(x)
            }),
            ("layer norm", &|x| {
                nn::LayerNorm::new(bias.clone(), bias.clone(), 1e-5).forward(x)
            }),
            ("gelu", &nn::ops::gelu),
            ("swiglu", &nn::ops::swiglu),
            ("softmax", &nn::ops::softmax_last_dim),
            ("softmax of columns", &|x| nn::ops::softmax(x, 1)),
            ("log softmax", &|x| nn::ops::log_softmax(x, 2)),
            ("self-attention", &|x| {
                nn::self_attention(&Tensor::cat(&[x, x, x], 2)?, 2, Mask::Causal, 1.0)
            }),
            ("attention", &|_| {
                nn::attention(&heads, &heads, &heads, Mask::None, 1.0)?.reshape((0, 3, 4))
            }),
            ("masked attention", &|_| {
                let mask = Mask::Additive(of(&[3, 3]));
                nn::attention(&heads, &heads, &heads, mask, 1.0)?.reshape((0, 3, 4))
            }),
            ("cross-entropy", &|x| {
                let none = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
                Ok(nn::loss::cross_entropy_sum(&rows(x)?, &none, None)?.0)
            }),
            ("embedding", &|_| {
                nn::Embedding::new(weight.clone(), 4).forward(&tokens)
            }),
        ];
        for (name, layer) in cases {
            let y = layer(&x).unwrap_or_else(|why| panic!("{name} of {dtype:?}: {why}"));
            let expected: &[f64] = if name == "cross-entropy" { &[0.0] } else { &[] };
            assert_eq!(doubles(&y), expected, "{name} of {dtype:?}");
        }
    }
}

#[test]
fn activations_take_each_dimension_empty() {
    let curves: [(&str, Layer<'_>); 5] = [
        ("gelu", &nn::ops::gelu),
        ("gelu by the error function", &nn::ops::gelu_erf),
        ("silu", &nn::ops::silu),
        ("mish", &nn::ops::mish),
        ("swiglu", &nn::ops::swiglu),
    ];
    for dtype in TYPES {
        for empty in 0..3 {
            let mut shape = [2, 3, 4];
            shape[empty] = 0;
            let x = variable(&[], &shape, dtype);
            for (name, curve) in curves {
                let y = curve(&x).unwrap_or_else(|why| panic!("{name} of {dtype:?}: {why}"));
                assert_eq!(doubles(&y), [0.0; 0], "{name} of {dtype:?}, {shape:?}");
            }
        }
    }
}
