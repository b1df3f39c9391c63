//! Layers in bf16 and f16 against the same layers in f32, over rows that are long enough for a sum
//! of halves to stand still.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use mpmd_candle::nn::{self, Activation, Mask, Module};

/// Returns f32 values in [0.25, 1.25): their sums grow with the number of terms.
fn positive(shape: &[usize], seed: u64) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let values = (0..shape.iter().product()).map(|_| random.f32() + 0.25);
    Tensor::from_vec(values.collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
}

fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor
        .to_dtype(DType::F32)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

type Layer<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Returns the result of `f`, and the gradients of a weighted sum of it.
fn run(f: Layer<'_>, arguments: &[Tensor], weights: DType) -> Result<Vec<Tensor>> {
    let leaves = arguments
        .iter()
        .map(|x| Ok(Var::from_tensor(x)?.as_tensor().clone()));
    let leaves = leaves.collect::<Result<Vec<_>>>()?;
    let y = f(&leaves)?;
    // The same in both types: the gradient of a result of half precision is of that type.
    let weights = positive(y.dims(), 99)
        .to_dtype(weights)?
        .to_dtype(DType::F32)?;
    let store = (y.to_dtype(DType::F32)? * weights)?.sum_all()?.backward()?;
    let gradients = leaves
        .iter()
        .map(|leaf| store.get(leaf).expect("a gradient").clone());
    Ok(std::iter::once(y.detach()).chain(gradients).collect())
}

/// Asserts that `f` of bf16 and f16 computes and differentiates as `f` of the same values in f32.
fn check(what: &str, arguments: &[Tensor], f: Layer<'_>) {
    for (dtype, tolerance) in [(DType::BF16, 0.03), (DType::F16, 0.004)] {
        let cast = |x: &Tensor, dtype| x.to_dtype(dtype).unwrap();
        let halves: Vec<Tensor> = arguments.iter().map(|x| cast(x, dtype)).collect();
        let singles: Vec<Tensor> = halves.iter().map(|x| cast(x, DType::F32)).collect();
        let found = run(f, &halves, dtype).unwrap();
        let expected = run(f, &singles, dtype).unwrap();
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let what = format!(
                "{what} of {dtype:?}, {}",
                if at == 0 { "result" } else { "gradient" }
            );
            assert_eq!(found.dims(), expected.dims(), "{what}");
            assert!(
                at == 0 || found.dtype() == dtype,
                "{what}: {:?}",
                found.dtype()
            );
            let (found, expected) = (elements(found), elements(expected));
            let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
            for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let is_near = (found - expected).abs() <= tolerance * scale;
                assert!(is_near, "{what} {at}: [{place}] is {found}, not {expected}");
            }
        }
    }
}

#[test]
fn linear_layers_add_up_halves_in_f32() {
    let biased = |a: &[Tensor]| nn::Linear::new(a[1].clone(), Some(a[2].clone()));
    for (rows, inputs) in [(16_384, 3), (2, 16_384)] {
        // Small enough for f16.
        let x = (positive(&[rows, inputs], 1) * 0.5).unwrap();
        let weights = (positive(&[3, inputs], 2) * 0.5).unwrap();
        let arguments = [x, weights, positive(&[3], 3)];
        check("linear", &arguments[..2], &|a| {
            nn::Linear::new(a[1].clone(), None).forward(&a[0])
        });
        check("linear with bias", &arguments, &|a| {
            biased(a).forward(&a[0])
        });
        check("linear with GELU", &arguments, &|a| {
            biased(a).forward_activated(&a[0], Activation::Gelu)
        });
    }
    // Most positions have the same token.
    let tokens = Tensor::from_vec(
        (0..16_384).map(|i| u32::from(i % 64 == 0)).collect(),
        16_384,
        &Device::Cpu,
    );
    let tokens = tokens.unwrap();
    check("embedding", &[positive(&[2, 3], 1)], &|a| {
        nn::Embedding::new(a[0].clone(), 3).forward(&tokens)
    });
}

#[test]
fn norms_add_up_halves_in_f32() {
    for shape in [[16_384, 3], [2, 16_384]] {
        let [x, weight, bias] =
            [&shape[..], &shape[1..], &shape[1..]].map(|s| positive(s, s.len() as u64));
        let arguments = [x, weight, bias];
        check("layer norm", &arguments, &|a| {
            nn::LayerNorm::new(a[1].clone(), a[2].clone(), 1e-5).forward(&a[0])
        });
        check("layer norm without bias", &arguments[..2], &|a| {
            nn::LayerNorm::new_no_bias(a[1].clone(), 1e-5).forward(&a[0])
        });
        check("rms norm", &arguments[..2], &|a| {
            nn::RmsNorm::new(a[1].clone(), 1e-5).forward(&a[0])
        });
        check("ops::layer_norm", &arguments, &|a| {
            nn::ops::layer_norm(&a[0], &a[1], &a[2], 1e-5)
        });
        check("ops::rms_norm", &arguments[..2], &|a| {
            nn::ops::rms_norm(&a[0], &a[1], 1e-5)
        });
    }
}

#[test]
fn activations_of_halves_equal_those_of_f32() {
    let x = ((positive(&[2, 1_000], 1) * 8.0).unwrap() - 6.0).unwrap();
    for activation in [
        Activation::Gelu,
        Activation::NewGelu,
        Activation::GeluPytorchTanh,
        Activation::Relu,
        Activation::Relu2,
        Activation::Relu6,
        Activation::Silu,
        Activation::Sigmoid,
        Activation::HardSigmoid,
        Activation::Swiglu,
        Activation::Swish,
        Activation::Mish,
        Activation::HardSwish,
        Activation::Elu(0.7),
        Activation::LeakyRelu(0.1),
    ] {
        check(&format!("{activation:?}"), std::slice::from_ref(&x), &|a| {
            activation.forward(&a[0])
        });
    }
}

#[test]
fn softmaxes_add_up_halves_in_f32() {
    for shape in [&[2, 1_000][..], &[1, 16_384], &[16_384, 2]] {
        let x = [(positive(shape, 1) * 2.0).unwrap()];
        check("softmax of rows", &x, &|a| nn::ops::softmax_last_dim(&a[0]));
        check("logarithm of the softmax", &x, &|a| {
            nn::ops::log_softmax(&a[0], D::Minus1)
        });
        check("softmax of columns", &x, &|a| nn::ops::softmax(&a[0], 0));
        check("logarithm of columns", &x, &|a| {
            nn::ops::log_softmax(&a[0], 0)
        });
    }
}

#[test]
fn attention_adds_up_halves_in_f32() {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    for keys in [1_000, 4_096] {
        // Equal keys, whose values are 1: the result is 1.
        let equal = [
            positive(&[1, 2, 3, 4], 1),
            ones(&[1, 1, keys, 4]),
            ones(&[1, 1, keys, 2]),
        ];
        let y = |dtype| {
            let a = equal.each_ref().map(|x| x.to_dtype(dtype).unwrap());
            elements(&nn::attention(&a[0], &a[1], &a[2], Mask::None, 0.5).unwrap())
        };
        assert!(
            [DType::BF16, DType::F16]
                .iter()
                .all(|dtype| y(*dtype) == [1.0; 12]),
            "{keys}"
        );

        let [q, k, v] =
            [[1, 2, 3, 4], [1, 1, keys, 4], [1, 1, keys, 2]].map(|shape| positive(&shape, 1));
        let mask = positive(&[3, keys], 4);
        let arguments = [q, k, v, mask.clone()];
        let of = |a: &[Tensor], mask| nn::attention(&a[0], &a[1], &a[2], mask, 0.5);
        check("attention", &arguments[..3], &|a| of(a, Mask::None));
        check("causal attention", &arguments[..3], &|a| {
            of(a, Mask::Causal)
        });
        check("masked attention", &arguments[..3], &|a| {
            of(a, Mask::Additive(mask.to_dtype(a[0].dtype())?))
        });
        check("attention with f32 mask", &arguments[..3], &|a| {
            of(a, Mask::Additive(mask.clone()))
        });
        check("learned mask", &arguments, &|a| {
            of(a, Mask::Additive(a[3].clone()))
        });
        check("capped attention", &arguments[..3], &|a| {
            nn::ops::sdpa(&a[0], &a[1], &a[2], None, false, 0.5, 5.0)
        });
    }
    check("self-attention", &[positive(&[1, 1_000, 12], 1)], &|a| {
        nn::self_attention(&a[0], 2, Mask::None, 0.5)
    });
    check(
        "causal self-attention",
        &[positive(&[1, 1_000, 12], 1)],
        &|a| nn::self_attention(&a[0], 2, Mask::Causal, 0.5),
    );
}

#[test]
fn rotary_embeddings_add_up_halves_in_f32() {
    use nn::rotary_emb::{rope, rope_i, rope_thd};
    // Trained angles: each has gradients of 8,000 rows.
    let arguments = [
        positive(&[4_000, 2, 3, 4], 1),
        positive(&[3, 2], 2),
        positive(&[3, 2], 3),
    ];
    check("rope", &arguments, &|a| rope(&a[0], &a[1], &a[2]));
    check("rope_i", &arguments, &|a| rope_i(&a[0], &a[1], &a[2]));
    let [x, cos, sin] = &arguments;
    let x = x.transpose(1, 2).unwrap();
    check("rope_thd", std::slice::from_ref(&x), &|a| {
        let like = |angles: &Tensor| angles.to_dtype(a[0].dtype());
        rope_thd(&a[0], &like(cos)?, &like(sin)?)
    });
}

#[test]
fn losses_add_up_halves_in_f32() {
    use nn::loss;
    let (rows, classes) = (16_384, 150);
    let modulo = |n: u32| {
        let classes = (0..rows as u32).map(|row| row % n).collect();
        Tensor::from_vec(classes, rows, &Device::Cpu).unwrap()
    };
    let targets = modulo(150);
    // Equal logits: the loss is ln 150 = 5.0106.
    for dtype in [DType::BF16, DType::F16] {
        let equal = Tensor::ones((rows, classes), dtype, &Device::Cpu).unwrap();
        let (sum, weight) = loss::cross_entropy_sum(&equal, &targets, None).unwrap();
        let mean = elements(&sum)[0] / elements(&weight)[0];
        assert!((mean - 5.010_635).abs() < 1e-5, "{dtype:?}: {mean}");
        let mean = elements(&loss::cross_entropy(&equal, &targets).unwrap())[0];
        assert!((mean - 5.010_635).abs() < 0.02, "{dtype:?}: {mean}");
    }
    let x = [positive(&[rows, 7], 1)];
    let few = modulo(7);
    check("cross_entropy", &x, &|a| {
        loss::cross_entropy(&a[0], &few)? * 64.0
    });
    check("cross_entropy_sum", &x, &|a| {
        Ok(loss::cross_entropy_sum(&a[0], &few, None)?.0)
    });
    check("nll", &x, &|a| loss::nll(&a[0].neg()?, &few)? * 64.0);
    let both = [positive(&[rows], 1), positive(&[rows], 2)];
    check("mse", &both, &|a| loss::mse(&a[0], &a[1])? * 64.0);
    check("huber", &both, &|a| loss::huber(&a[0], &a[1], 0.5)? * 64.0);
    check("binary cross-entropy", &both, &|a| {
        loss::binary_cross_entropy_with_logit(&a[0], &a[1])? * 64.0
    });
}

#[test]
fn convolutions_add_up_halves_in_f32() {
    let arguments = [
        positive(&[4, 2, 4_096], 1),
        positive(&[3, 2, 3], 2),
        positive(&[3], 3),
    ];
    check("conv1d", &arguments, &|a| {
        let layer = nn::Conv1d::new(a[1].clone(), Some(a[2].clone()), Default::default());
        layer.forward(&a[0])
    });
    let [x, weight] = [
        arguments[0].reshape((4, 2, 64, 64)),
        arguments[1].reshape((3, 2, 3, 1)),
    ];
    let arguments = [x.unwrap(), weight.unwrap(), positive(&[3], 3)];
    check("conv2d", &arguments, &|a| {
        let layer = nn::Conv2d::new(a[1].clone(), Some(a[2].clone()), Default::default());
        layer.forward(&a[0])
    });
}
