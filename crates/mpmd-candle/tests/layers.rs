//! Layers against plain compositions of candle's operations: results, gradients and errors.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use mpmd_candle::nn::{self, Mask, Module, VarBuilder, VarMap};

/// Returns a tensor of doubles in [-1, 1).
fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut random = fastrand::Rng::with_seed(seed);
    let values = (0..shape.iter().product()).map(|_| random.f64() * 2.0 - 1.0);
    Tensor::from_vec(values.collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
}

fn doubles(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Asserts that two tensors differ by at most `tolerance` times the largest expected element.
fn assert_near(what: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let (found, expected) = (doubles(found), doubles(expected));
    let scale = expected.iter().fold(1e-3, |max: f64, x| max.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let is_near = (found - expected).abs() <= tolerance * scale;
        assert!(is_near, "{what}: element {at} is {found}, not {expected}");
    }
}

/// Runs `f` on `arguments` as variables, or as plain tensors where `frozen`. Returns the result
/// and the gradients of a weighted sum of it. The first argument is a transposed view of its
/// variable if `is_transposed` is set.
fn run(
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    arguments: &[Tensor],
    frozen: &[bool],
    is_transposed: bool,
) -> (Tensor, Vec<Option<Tensor>>) {
    let swap = |x: &Tensor| x.transpose(D::Minus1, D::Minus2).unwrap();
    let at_first = |at: usize| at == 0 && is_transposed;
    let leaves: Vec<Tensor> = (arguments.iter().zip(frozen).enumerate())
        .map(|(at, (x, is_frozen))| {
            let x = if at_first(at) {
                swap(x).contiguous().unwrap()
            } else {
                x.clone()
            };
            if *is_frozen {
                x
            } else {
                Var::from_tensor(&x).unwrap().as_tensor().clone()
            }
        })
        .collect();
    let views: Vec<Tensor> = (leaves.iter().enumerate())
        .map(|(at, leaf)| {
            if at_first(at) {
                swap(leaf)
            } else {
                leaf.clone()
            }
        })
        .collect();
    let y = f(&views).unwrap();
    let weights = random(y.dims(), 99).to_dtype(y.dtype()).unwrap();
    let gradients = (&y * weights)
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    let gradients = (leaves.iter().enumerate()).map(|(at, leaf)| {
        let gradient = gradients.get(leaf)?;
        Some(if at_first(at) {
            swap(gradient)
        } else {
            gradient.clone()
        })
    });
    (y.detach(), gradients.collect())
}

/// Asserts that `ours` computes the same as `plain`, with the same gradients: in both precisions,
/// of transposed input, and with any one argument frozen.
fn check(
    what: &str,
    arguments: &[Tensor],
    ours: &dyn Fn(&[Tensor]) -> Result<Tensor>,
    plain: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) {
    let trainable = vec![false; arguments.len()];
    let (y, gradients) = run(plain, arguments, &trainable, false);
    let compare = |arguments: &[Tensor], frozen: &[bool], is_transposed, tolerance| {
        let what = format!("{what} of {:?}, frozen {frozen:?}", arguments[0].dtype());
        let (our_y, our_gradients) = run(ours, arguments, frozen, is_transposed);
        assert_near(&what, &our_y, &y, tolerance);
        for (at, expected) in gradients.iter().enumerate().filter(|(at, _)| !frozen[*at]) {
            let (found, expected) = (our_gradients[at].as_ref(), expected.as_ref());
            let what = format!("{what}: gradient {at}");
            assert_near(&what, found.unwrap(), expected.unwrap(), tolerance);
        }
    };
    let single: Vec<Tensor> = arguments
        .iter()
        .map(|x| x.to_dtype(DType::F32).unwrap())
        .collect();
    for is_transposed in [false, arguments[0].rank() > 1] {
        compare(&single, &trainable, is_transposed, 1e-5);
        compare(arguments, &trainable, is_transposed, 1e-9);
    }
    for at in 0..arguments.len() {
        let mut frozen = trainable.clone();
        frozen[at] = true;
        compare(&single, &frozen, false, 1e-5);
    }
}

#[test]
fn linear_equals_the_composition() {
    for shape in [&[5, 7][..], &[3, 4, 7], &[2, 3, 2, 7], &[40, 30, 7]] {
        let arguments = [random(shape, 1), random(&[6, 7], 2), random(&[6], 3)];
        let plain = |a: &[Tensor]| a[0].contiguous()?.broadcast_matmul(&a[1].t()?);
        let ours = |a: &[Tensor]| nn::Linear::new(a[1].clone(), None).forward(&a[0]);
        check(
            &format!("linear of {shape:?}"),
            &arguments[..2],
            &ours,
            &plain,
        );
        let plain = |a: &[Tensor]| plain(a)?.broadcast_add(&a[2]);
        let ours = |a: &[Tensor]| nn::Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0]);
        check(
            &format!("biased linear of {shape:?}"),
            &arguments,
            &ours,
            &plain,
        );
    }
    // A row without other dimensions.
    let (x, w) = (random(&[7], 1), random(&[6, 7], 2));
    let y = nn::Linear::new(w.clone(), None).forward(&x).unwrap();
    assert_near(
        "row",
        &y,
        &x.unsqueeze(0)
            .unwrap()
            .matmul(&w.t().unwrap())
            .unwrap()
            .squeeze(0)
            .unwrap(),
        1e-9,
    );
}

#[test]
fn embedding_equals_the_composition() {
    let indices = Tensor::new(&[[3u32, 0, 3], [4, 3, 1]], &Device::Cpu).unwrap();
    for indices in [indices.clone(), indices.to_dtype(DType::I64).unwrap()] {
        let ours = |a: &[Tensor]| nn::Embedding::new(a[0].clone(), 4).forward(&indices);
        let plain = |a: &[Tensor]| {
            a[0].contiguous()?
                .index_select(&indices.flatten_all()?, 0)?
                .reshape((2, 3, 4))
        };
        check("embedding", &[random(&[5, 4], 1)], &ours, &plain);
    }
}

#[test]
fn norms_equal_the_compositions() {
    fn plain(a: &[Tensor], remove_mean: bool) -> Result<Tensor> {
        let x = match remove_mean {
            true => a[0].broadcast_sub(&a[0].mean_keepdim(D::Minus1)?)?,
            false => a[0].clone(),
        };
        let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
        let y = x
            .broadcast_div(&(variance + 1e-5)?.sqrt()?)?
            .broadcast_mul(&a[1])?;
        if a.len() > 2 {
            y.broadcast_add(&a[2])
        } else {
            Ok(y)
        }
    }
    for shape in [&[5, 19][..], &[3, 4, 19], &[2, 3, 2, 19], &[30, 50, 19]] {
        let arguments = [random(shape, 1), random(&[19], 2), random(&[19], 3)];
        let ours = |a: &[Tensor]| nn::RmsNorm::new(a[1].clone(), 1e-5).forward(&a[0]);
        check("rms norm", &arguments[..2], &ours, &|a| plain(a, false));
        let ours = |a: &[Tensor]| nn::RmsNorm::new(a[1].clone(), 1e-5).forward_diff(&a[0]);
        check("rms norm, forward_diff", &arguments[..2], &ours, &|a| {
            plain(a, false)
        });
        let ours = |a: &[Tensor]| nn::LayerNorm::new_no_bias(a[1].clone(), 1e-5).forward(&a[0]);
        check("layer norm without bias", &arguments[..2], &ours, &|a| {
            plain(a, true)
        });
        let ours =
            |a: &[Tensor]| nn::LayerNorm::new(a[1].clone(), a[2].clone(), 1e-5).forward(&a[0]);
        check("layer norm", &arguments, &ours, &|a| plain(a, true));
    }
    // Rows with a mean far from zero keep their precision.
    let x = ((random(&[4, 19], 1) * 0.5).unwrap() + 50.0).unwrap();
    let arguments = [
        x.to_dtype(DType::F32)
            .unwrap()
            .to_dtype(DType::F64)
            .unwrap(),
        random(&[19], 2),
    ];
    let ours = |a: &[Tensor]| nn::LayerNorm::new_no_bias(a[1].clone(), 1e-5).forward(&a[0]);
    let single = arguments.clone().map(|x| x.to_dtype(DType::F32).unwrap());
    let (y, gradients) = run(&|a| plain(a, true), &arguments, &[false; 2], false);
    let (our_y, our_gradients) = run(&ours, &single, &[false; 2], false);
    assert_near("shifted rows", &our_y, &y, 2e-5);
    for (found, expected) in our_gradients.iter().zip(&gradients) {
        assert_near(
            "shifted rows",
            found.as_ref().unwrap(),
            expected.as_ref().unwrap(),
            2e-5,
        );
    }
}

#[test]
fn activations_equal_the_compositions() {
    let gelu = |x: &Tensor| {
        let u = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
        (x * (u.tanh()? + 1.0)?)? * 0.5
    };
    let gelu_erf = |x: &Tensor| (x * ((x / 2f64.sqrt())?.erf()? + 1.0)?)? * 0.5;
    let silu = |x: &Tensor| x / (x.neg()?.exp()? + 1.0)?;
    for shape in [&[40][..], &[3, 10], &[2, 3, 10], &[200, 100]] {
        let x = (random(shape, 1) * 4.0).unwrap();
        let single = [x.to_dtype(DType::F32).unwrap()];
        type Composition<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
        let cases: [(nn::Activation, Composition<'_>); 3] = [
            (nn::Activation::NewGelu, &gelu),
            (nn::Activation::Gelu, &gelu_erf),
            (nn::Activation::Silu, &silu),
        ];
        for (activation, plain) in cases {
            // Candle's own slopes of doubles have few digits, so only single precision is compared.
            let (y, gradients) = run(&|a| plain(&a[0]), std::slice::from_ref(&x), &[false], false);
            let (our_y, our_gradients) =
                run(&|a| activation.forward(&a[0]), &single, &[false], false);
            let what = format!("{activation:?}");
            assert_near(&what, &our_y, &y, 1e-5);
            let (found, expected) = (our_gradients[0].as_ref(), gradients[0].as_ref());
            assert_near(&what, found.unwrap(), expected.unwrap(), 1e-5);
        }
    }
    let plain = |a: &[Tensor]| {
        let halves = a[0].chunk(2, D::Minus1)?;
        silu(&halves[0])? * &halves[1]
    };
    check(
        "swiglu",
        &[random(&[3, 4, 10], 1)],
        &|a| nn::ops::swiglu(&a[0]),
        &plain,
    );
    check(
        "swiglu",
        &[random(&[300, 100], 1)],
        &|a| nn::Activation::Swiglu.forward(&a[0]),
        &plain,
    );
}

#[test]
fn softmax_equals_the_composition() {
    let softmax = |x: &Tensor, dim: usize| {
        let power = x.exp()?;
        power.broadcast_div(&power.sum_keepdim(dim)?)
    };
    for shape in [&[3, 19][..], &[2, 3, 19], &[30, 40, 19]] {
        let (x, last) = (random(shape, 1), shape.len() - 1);
        let arguments = [(x * 3.0).unwrap()];
        check(
            "softmax",
            &arguments,
            &|a| nn::ops::softmax_last_dim(&a[0]),
            &|a| softmax(&a[0], last),
        );
        check(
            "softmax",
            &arguments,
            &|a| nn::ops::softmax(&a[0], 0),
            &|a| softmax(&a[0], 0),
        );
        let plain = |a: &[Tensor]| softmax(&a[0], last)?.log();
        check(
            "log softmax",
            &arguments,
            &|a| nn::ops::log_softmax(&a[0], D::Minus1),
            &plain,
        );
    }
}

/// Computes attention by its definition, with a mask of all scores.
fn plain_attention(
    a: &[Tensor],
    mask: &Tensor,
    scale: f64,
    cap: impl Into<Option<f64>>,
) -> Result<Tensor> {
    let heads = a[0].dim(1)?;
    let spread = |x: &Tensor| {
        let (batch, groups, time, dim) = x.dims4()?;
        let shape = (batch, groups, heads / groups, time, dim);
        x.unsqueeze(2)?
            .broadcast_as(shape)?
            .contiguous()?
            .reshape((batch, heads, time, dim))
    };
    let (k, v) = (spread(&a[1])?, spread(&a[2])?);
    let mut scores = (a[0].contiguous()?.matmul(&k.t()?.contiguous()?)? * scale)?;
    if let Some(cap) = cap.into() {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let scores = scores.broadcast_add(mask)?.exp()?;
    scores.broadcast_div(&scores.sum_keepdim(3)?)?.matmul(&v)
}

/// Returns the first key of each query of a sliding window, and of two rows of packed sequences.
fn first_keys(queries: usize, keys: usize) -> [(&'static str, Vec<u32>); 2] {
    let own = |query: usize| (query + keys - queries) as u32;
    let window = (0..queries)
        .map(|query| own(query).saturating_sub(2))
        .collect();
    let sequences = [3, 67].iter().flat_map(|start| {
        (0..queries).map(move |query| if own(query) < *start { 0 } else { *start })
    });
    [
        ("a sliding window", window),
        ("packed sequences", sequences.collect()),
    ]
}

#[test]
fn attention_equals_the_composition() {
    // (heads, groups, queries, keys): one block, several blocks, and fewer queries than keys.
    for (heads, groups, queries, keys) in [(2, 2, 5, 5), (4, 2, 70, 70), (6, 1, 66, 75)] {
        let arguments = [
            random(&[2, heads, queries, 8], 1),
            random(&[2, groups, keys, 8], 2),
            random(&[2, groups, keys, 6], 3),
        ];
        let hidden = |query: usize, key: usize| key > query + keys - queries;
        let causal: Vec<f64> = (0..queries * keys)
            .map(|at| {
                if hidden(at / keys, at % keys) {
                    f64::NEG_INFINITY
                } else {
                    0.0
                }
            })
            .collect();
        let causal = Tensor::from_vec(causal, (queries, keys), &Device::Cpu).unwrap();
        let bias = random(&[heads, queries, keys], 4);
        let none = bias.zeros_like().unwrap();
        let case = |what: &str, mask: Mask, plain_mask: &Tensor| {
            let ours = |a: &[Tensor]| {
                let mask = match &mask {
                    Mask::Additive(mask) => Mask::Additive(mask.to_dtype(a[0].dtype())?),
                    mask => mask.clone(),
                };
                nn::attention(&a[0], &a[1], &a[2], mask, 0.3)
            };
            check(what, &arguments, &ours, &|a| {
                plain_attention(a, plain_mask, 0.3, None)
            });
        };
        case("attention", Mask::None, &none);
        case("causal attention", Mask::Causal, &causal);
        for (what, firsts) in first_keys(queries, keys) {
            let hidden = |at: usize| {
                let (query, key) = (at / keys % queries, at % keys);
                hidden(query, key) || key < firsts[at / keys] as usize
            };
            let rows = firsts.len() / queries;
            let plain: Vec<f64> = (0..firsts.len() * keys)
                .map(|at| if hidden(at) { f64::NEG_INFINITY } else { 0.0 })
                .collect();
            let of = |device| Tensor::from_vec(plain, (rows, 1, queries, keys), device);
            let firsts = Tensor::from_vec(firsts, (rows, queries), &Device::Cpu).unwrap();
            case(what, Mask::CausalFrom(firsts), &of(&Device::Cpu).unwrap());
        }
        case("masked attention", Mask::Additive(causal.clone()), &causal);
        case("biased attention", Mask::Additive(bias.clone()), &bias);
        // A cap of 1 is one like any other.
        for cap in [0.5, 1.0, 2.0] {
            let ours =
                |a: &[Tensor]| nn::capped_attention(&a[0], &a[1], &a[2], Mask::Causal, 1.3, cap);
            let plain = |a: &[Tensor]| plain_attention(a, &causal, 1.3, cap);
            check(
                &format!("attention with a cap of {cap}"),
                &arguments,
                &ours,
                &plain,
            );
        }
        for (is_masked, is_causal, cap) in (0..8).map(|case| {
            (
                case & 1 > 0,
                case & 2 > 0,
                if case & 4 > 0 { 2.0 } else { 1.0 },
            )
        }) {
            let ours = |a: &[Tensor]| {
                let mask = is_masked.then(|| bias.to_dtype(a[0].dtype())).transpose()?;
                nn::ops::sdpa(&a[0], &a[1], &a[2], mask.as_ref(), is_causal, 0.25, cap)
            };
            let mask = if is_masked { &bias } else { &none };
            let mask = if is_causal {
                mask.broadcast_add(&causal).unwrap()
            } else {
                mask.clone()
            };
            let what = format!("sdpa, mask {is_masked}, causal {is_causal}, cap {cap}");
            let capped = (cap != 1.0).then(|| f64::from(cap));
            let plain = |a: &[Tensor]| plain_attention(a, &mask, 0.25, capped);
            check(&what, &arguments, &ours, &plain);
        }
    }
}

#[test]
fn packed_linear_equals_the_plain_one() {
    for (rows, columns, bias) in [(1, 1, false), (70, 33, true), (64, 300, false)] {
        let single = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::F32).unwrap();
        let bias = bias.then(|| single(&[rows], 3));
        let weight = single(&[rows, columns], 1);
        let plain = nn::Linear::new(weight.clone(), bias);
        let halves = weight
            .to_dtype(DType::BF16)
            .unwrap()
            .to_dtype(DType::F32)
            .unwrap();
        for (in_half, exact) in [(false, &weight), (true, &halves)] {
            let packed = nn::PackedLinear::new(&plain, in_half).unwrap();
            let expected = nn::Linear::new(exact.clone(), plain.bias().cloned());
            for shape in [vec![columns], vec![2, 3, columns], vec![0, columns]] {
                let x = single(&shape, 2);
                let (found, expected) = (packed.forward(&x), expected.forward(&x));
                assert_near("packed", &found.unwrap(), &expected.unwrap(), 1e-5);
            }
            let indices = Tensor::new(&[[rows as u32 - 1], [0]], &Device::Cpu).unwrap();
            let found = packed.rows(&indices).unwrap();
            assert_eq!(found.dims(), [2, 1, columns]);
            let expected = exact
                .index_select(&indices.flatten_all().unwrap(), 0)
                .unwrap();
            assert_eq!(doubles(&found), doubles(&expected), "in half {in_half}");
            let read = |block: std::ops::Range<usize>, values: &mut [f32]| {
                let part = weight.narrow(0, block.start, block.len())?.flatten_all()?;
                values.copy_from_slice(&part.to_vec1::<f32>()?);
                Result::Ok(())
            };
            let of_rows = nn::PackedLinear::of_rows(rows, columns, in_half, read).unwrap();
            assert_eq!(
                doubles(&of_rows.rows(&indices).unwrap()),
                doubles(&expected)
            );
            let beyond = Tensor::new(&[rows as u32], &Device::Cpu).unwrap();
            assert!(
                packed
                    .rows(&beyond)
                    .unwrap_err()
                    .to_string()
                    .contains("of an embedding with")
            );
            let wrong = packed
                .forward(&single(&[2, columns + 1], 2))
                .unwrap_err()
                .to_string();
            assert!(
                wrong.contains(&format!("expected F32 [..., {columns}]")),
                "{wrong}"
            );
        }
    }
}

#[test]
fn trainable_mask_gets_its_gradient() {
    let arguments = [
        random(&[1, 2, 5, 8], 1),
        random(&[1, 2, 5, 8], 2),
        random(&[1, 2, 5, 8], 3),
        random(&[2, 5, 5], 4),
    ];
    let ours = |a: &[Tensor]| nn::attention(&a[0], &a[1], &a[2], Mask::Additive(a[3].clone()), 0.3);
    check("learned mask", &arguments, &ours, &|a| {
        plain_attention(a, &a[3], 0.3, None)
    });
}

#[test]
fn rotary_embeddings_equal_the_compositions() {
    let angles = random(&[2, 9, 4], 5);
    for (batched, what) in [(false, "rope"), (true, "rope of a batch")] {
        let angles = if batched {
            angles.clone()
        } else {
            angles.get(0).unwrap()
        };
        let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());
        // The angles of each row of `[batch, heads, time, _]`.
        let of_rows = |x: &Tensor| {
            let x = x.narrow(x.rank() - 2, 0, 7).unwrap();
            if batched { x.unsqueeze(1).unwrap() } else { x }
        };
        let plain = |x: &Tensor| {
            let (a, b) = (x.narrow(3, 0, 4)?, x.narrow(3, 4, 4)?);
            let (cos, sin) = (of_rows(&cos), of_rows(&sin));
            let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
            let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
            Tensor::cat(&[first, second], 3)
        };
        let angles_for = |x: &Tensor| {
            let to = |angles: &Tensor| angles.to_dtype(x.dtype());
            Ok::<_, candle_core::Error>((to(&cos)?, to(&sin)?))
        };
        let x = [random(&[2, 3, 7, 8], 1)];
        let ours = |a: &[Tensor]| {
            let (cos, sin) = angles_for(&a[0])?;
            nn::rotary_emb::rope(&a[0], &cos, &sin)
        };
        check(what, &x, &ours, &|a| plain(&a[0]));
        let ours = |a: &[Tensor]| {
            let (cos, sin) = angles_for(&a[0])?;
            nn::rotary_emb::rope_thd(&a[0].transpose(1, 2)?, &cos, &sin)?.transpose(1, 2)
        };
        check(what, &x, &ours, &|a| plain(&a[0]));
        // Neighbours become the two halves, and go back.
        let halves = |x: &Tensor| {
            x.reshape((2, 3, 7, 4, 2))?
                .transpose(3, 4)?
                .reshape(x.shape())
        };
        let back = |x: &Tensor| {
            x.reshape((2, 3, 7, 2, 4))?
                .transpose(3, 4)?
                .reshape(x.shape())
        };
        let ours = |a: &[Tensor]| {
            let (cos, sin) = angles_for(&a[0])?;
            nn::rotary_emb::rope_i(&a[0], &cos, &sin)
        };
        check(what, &x, &ours, &|a| back(&plain(&halves(&a[0])?)?));
    }
}

#[test]
fn cross_entropy_equals_the_composition() {
    let targets = Tensor::new(&[[3u32, 0, 18], [4, 3, 1]], &Device::Cpu).unwrap();
    let row_targets = targets.flatten_all().unwrap();
    let losses = |logits: &Tensor| {
        let logs = logits
            .contiguous()?
            .log_sum_exp(D::Minus1)?
            .unsqueeze(D::Minus1)?;
        let rows = logits
            .broadcast_sub(&logs)?
            .contiguous()?
            .reshape((6, 19))?;
        rows.gather(&row_targets.unsqueeze(1)?, 1)?
            .squeeze(1)?
            .neg()
    };
    let x = (random(&[6, 19], 1) * 5.0).unwrap();
    let ours = |a: &[Tensor]| nn::loss::cross_entropy(&a[0], &row_targets);
    check("mean", &[x], &ours, &|a| losses(&a[0])?.mean_all());

    let x = [random(&[2, 3, 19], 2)];
    // The row without weight has a target that is no class.
    let weights = Tensor::new(&[[1.0f32, 0.5, 2.0], [1.0, 0.0, 3.0]], &Device::Cpu).unwrap();
    let padded = Tensor::new(&[[3i64, 0, 18], [4, -100, 1]], &Device::Cpu).unwrap();
    let plain = |a: &[Tensor]| {
        let weights = weights.to_dtype(DType::F64)?.flatten_all()?;
        (losses(&a[0])? * weights)?.sum_all()
    };
    let (y, gradients) = run(&plain, &x, &[false], false);
    for x in [x[0].to_dtype(DType::F32).unwrap(), x[0].clone()] {
        let ours = |a: &[Tensor]| {
            let (sum, weight) = nn::loss::cross_entropy_sum(&a[0], &padded, Some(&weights))?;
            assert_eq!((sum.dtype(), weight.to_scalar::<f32>()?), (DType::F32, 7.5));
            Ok(sum)
        };
        let (our_y, our_gradients) = run(&ours, &[x], &[false], false);
        assert_near("sum", &our_y, &y, 1e-6);
        let (found, expected) = (our_gradients[0].as_ref(), gradients[0].as_ref());
        assert_near("sum", found.unwrap(), expected.unwrap(), 1e-5);
    }
    let (_, rows) = nn::loss::cross_entropy_sum(&x[0], &targets, None).unwrap();
    assert_eq!(rows.to_scalar::<f32>().unwrap(), 6.0);
}

#[test]
fn frozen_weights_get_no_gradient() {
    let single = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::F32).unwrap();
    let (x, w, b) = (single(&[5, 7], 1), single(&[7, 7], 2), single(&[7], 3));
    let layer = |a: &[Tensor]| {
        let x = nn::Linear::new(a[1].clone(), Some(a[2].clone())).forward(&a[0])?;
        let x = nn::LayerNorm::new(a[2].clone(), a[2].clone(), 1e-5).forward(&x)?;
        nn::RmsNorm::new(a[2].clone(), 1e-5).forward(&x)
    };
    for frozen in 0..8 {
        let frozen = [frozen & 1 > 0, frozen & 2 > 0, frozen & 4 > 0];
        let (_, gradients) = run(&layer, &[x.clone(), w.clone(), b.clone()], &frozen, false);
        let has_none: Vec<bool> = gradients.iter().map(Option::is_none).collect();
        assert_eq!(has_none, frozen);
    }
    let heads = [
        single(&[1, 2, 3, 4], 1),
        single(&[1, 2, 3, 4], 2),
        single(&[1, 2, 3, 4], 3),
    ];
    let f = |a: &[Tensor]| nn::attention(&a[0], &a[1], &a[2], Mask::Causal, 0.5);
    let (_, gradients) = run(&f, &heads, &[false, true, true], false);
    assert!(gradients[0].is_some() && gradients[1].is_none() && gradients[2].is_none());
}

/// Asserts that the gradients of `f` equal finite differences.
fn check_differences(what: &str, arguments: &[Tensor], f: &dyn Fn(&[Tensor]) -> Result<Tensor>) {
    let frozen = vec![false; arguments.len()];
    let (_, gradients) = run(f, arguments, &frozen, false);
    let value = |arguments: &[Tensor]| {
        let y = f(arguments).unwrap();
        let weights = random(y.dims(), 99);
        (y * weights)
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f64>()
            .unwrap()
    };
    for (at, gradient) in gradients.iter().enumerate() {
        let gradient = doubles(gradient.as_ref().unwrap());
        for element in (0..gradient.len()).step_by(gradient.len() / 5 + 1) {
            let moved = |by: f64| {
                let mut values = doubles(&arguments[at]);
                values[element] += by;
                let mut moved = arguments.to_vec();
                moved[at] = Tensor::from_vec(values, arguments[at].shape(), &Device::Cpu).unwrap();
                value(&moved)
            };
            let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let error = (gradient[element] - expected).abs();
            let found = gradient[element];
            let is_near = error < 1e-6 * (1.0 + expected.abs());
            assert!(
                is_near,
                "{what}: {at}[{element}] is {found}, not {expected}"
            );
        }
    }
}

#[test]
fn layers_of_candle_have_the_gradients_of_the_table() {
    let x = random(&[2, 4, 6, 5], 1);
    check_differences(
        "group norm",
        &[x.clone(), random(&[4], 2), random(&[4], 3)],
        &|a| nn::GroupNorm::new(a[1].clone(), a[2].clone(), 4, 2, 1e-5)?.forward(&a[0]),
    );
    let statistics = (
        random(&[4], 4),
        Tensor::ones(4, DType::F64, &Device::Cpu).unwrap(),
    );
    check_differences(
        "batch norm",
        &[x.clone(), random(&[4], 2), random(&[4], 3)],
        &|a| {
            let (mean, variance) = statistics.clone();
            nn::BatchNorm::new(4, mean, variance, a[1].clone(), a[2].clone(), 1e-5)?
                .forward_train(&a[0])
        },
    );
    check_differences("prelu", &[x.clone(), random(&[4], 2)], &|a| {
        nn::PReLU::new(a[1].clone(), false).forward(&a[0])
    });
    check_differences("transposed conv2d", &[x, random(&[4, 3, 2, 2], 2)], &|a| {
        nn::ConvTranspose2d::new(a[1].clone(), None, Default::default()).forward(&a[0])
    });
    let x = Var::from_tensor(&random(&[2, 4, 9], 1)).unwrap();
    let layer = nn::ConvTranspose1d::new(random(&[4, 3, 2], 2), None, Default::default());
    assert!(
        layer
            .forward(&x)
            .unwrap()
            .sum_all()
            .unwrap()
            .backward()
            .is_err()
    );
}

#[test]
fn convolutions_have_gradients_in_any_configuration() {
    for (padding, stride, dilation, groups) in [
        (0, 1, 1, 1),
        (1, 2, 1, 1),
        (2, 1, 2, 2),
        (1, 3, 1, 4),
        (0, 2, 2, 2),
    ] {
        let config = nn::Conv1dConfig {
            padding,
            stride,
            dilation,
            groups,
            ..Default::default()
        };
        let arguments = [
            random(&[2, 4, 9], 1),
            random(&[8, 4 / groups, 3], 2),
            random(&[8], 3),
        ];
        let layer =
            |a: &[Tensor]| nn::Conv1d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]);
        let plain =
            candle_nn::Conv1d::new(arguments[1].clone(), Some(arguments[2].clone()), config);
        let expected = plain.forward(&arguments[0]).unwrap();
        assert_near("conv1d", &layer(&arguments).unwrap(), &expected, 1e-9);
        check_differences("conv1d", &arguments, &layer);
        check("conv1d", &arguments, &layer, &layer);

        let config = nn::Conv2dConfig {
            padding,
            stride,
            dilation,
            groups,
            ..Default::default()
        };
        let (x, w) = (random(&[2, 4, 6, 7], 1), random(&[8, 4 / groups, 3, 2], 2));
        let arguments = [x, w, random(&[8], 3)];
        let layer =
            |a: &[Tensor]| nn::Conv2d::new(a[1].clone(), Some(a[2].clone()), config).forward(&a[0]);
        let plain =
            candle_nn::Conv2d::new(arguments[1].clone(), Some(arguments[2].clone()), config);
        let expected = plain.forward(&arguments[0]).unwrap();
        assert_near("conv2d", &layer(&arguments).unwrap(), &expected, 1e-9);
        check_differences("conv2d", &arguments, &layer);
        check("conv2d", &arguments, &layer, &layer);
    }
}

#[test]
fn recurrent_layers_train() {
    use nn::RNN;
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let lstm = nn::lstm(3, 4, Default::default(), vb.pp("lstm")).unwrap();
    let gru = nn::gru(4, 4, Default::default(), vb.pp("gru")).unwrap();
    let x = random(&[2, 5, 3], 1).to_dtype(DType::F32).unwrap();
    let states = lstm.seq(&x).unwrap();
    let states = gru.seq(&lstm.states_to_tensor(&states).unwrap()).unwrap();
    let loss = gru.states_to_tensor(&states).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    assert!(
        map.all_vars()
            .iter()
            .all(|var| gradients.get(var).is_some())
    );
}

#[test]
fn constructors_ask_for_the_variables_of_candle() {
    let (ours, theirs) = (VarMap::new(), VarMap::new());
    let vb = VarBuilder::from_varmap(&ours, DType::F32, &Device::Cpu);
    nn::linear(3, 4, vb.pp("a")).unwrap();
    nn::linear_no_bias(3, 4, vb.pp("b")).unwrap();
    nn::linear_b(3, 4, true, vb.pp("c")).unwrap();
    nn::embedding(5, 4, vb.pp("d")).unwrap();
    nn::layer_norm(4, 1e-5, vb.pp("e")).unwrap();
    nn::layer_norm_no_bias(4, 1e-5, vb.pp("f")).unwrap();
    nn::rms_norm(4, 1e-5, vb.pp("g")).unwrap();
    let vb = VarBuilder::from_varmap(&theirs, DType::F32, &Device::Cpu);
    candle_nn::linear(3, 4, vb.pp("a")).unwrap();
    candle_nn::linear_no_bias(3, 4, vb.pp("b")).unwrap();
    candle_nn::linear_b(3, 4, true, vb.pp("c")).unwrap();
    candle_nn::embedding(5, 4, vb.pp("d")).unwrap();
    candle_nn::layer_norm(4, 1e-5, vb.pp("e")).unwrap();
    candle_nn::layer_norm_no_bias(4, 1e-5, vb.pp("f")).unwrap();
    candle_nn::rms_norm(4, 1e-5, vb.pp("g")).unwrap();
    let list = |map: &VarMap| {
        let data = map.data().lock().unwrap();
        let mut list: Vec<_> = data
            .iter()
            .map(|(k, v)| (k.clone(), v.dims().to_vec()))
            .collect();
        list.sort();
        list
    };
    assert_eq!(list(&ours), list(&theirs));
    for name in ["e.weight", "e.bias", "g.weight"] {
        let value = |map: &VarMap| doubles(map.data().lock().unwrap()[name].as_tensor());
        assert_eq!(value(&ours), value(&theirs), "{name}");
    }
}

#[test]
fn errors_name_the_layer_and_both_shapes() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu).pp("block.0");
    let x = random(&[2, 3], 1).to_dtype(DType::F32).unwrap();
    // Without the backtrace that candle appends if `RUST_BACKTRACE` is set.
    let message = |result: Result<Tensor>| {
        result
            .unwrap_err()
            .to_string()
            .lines()
            .take(2)
            .collect::<Vec<_>>()
            .join("\n")
    };
    let found = message(nn::linear(4, 5, vb.pp("up")).unwrap().forward(&x));
    assert_eq!(
        found,
        "layer block.0.up:\nthe input is [2, 3]: expected [..., 4]"
    );
    let found = message(nn::layer_norm(4, 1e-5, vb.pp("norm")).unwrap().forward(&x));
    assert_eq!(
        found,
        "layer block.0.norm:\nthe input is [2, 3]: expected [..., 4]"
    );
    let indices = Tensor::new(&[1u32, 7], &Device::Cpu).unwrap();
    let found = message(
        nn::embedding(4, 5, vb.pp("table"))
            .unwrap()
            .forward(&indices),
    );
    assert_eq!(
        found,
        "layer block.0.table:\nindex 7 is not in the table of 4 rows"
    );
    let w = random(&[5, 4], 1).to_dtype(DType::F32).unwrap();
    let found = message(nn::Linear::new(w, None).forward(&x));
    assert!(
        found.starts_with("the input is [2, 3]: expected [..., 4]"),
        "{found}"
    );
    let found = message(nn::loss::cross_entropy(&x, &indices));
    let expected = "cross_entropy: the target 7 of row 1 is not one of 3 classes";
    assert!(found.starts_with(expected), "{found}");
    let found = message(nn::ops::dropout(&x, 0.5));
    assert!(found.contains("inside a stage"), "{found}");
    let q = random(&[2, 3, 4, 8], 1);
    let k = random(&[2, 2, 4, 8], 1);
    let found = message(nn::attention(&q, &k, &k, Mask::None, 1.0));
    assert!(found.contains("q [2, 3, 4, 8], k [2, 2, 4, 8]"), "{found}");
    for (firsts, expected) in [
        (vec![0u32; 3], "U32 [3]: expected U32 [2, 4]"),
        (vec![0, 1, 3, 3], "query 2 of 4 cannot begin at key 3 of 4"),
    ] {
        let q = random(&[2, 2, 4, 8], 1);
        let shape = if firsts.len() == 3 {
            vec![3]
        } else {
            vec![1, 4]
        };
        let firsts = Tensor::from_vec(firsts, shape, &Device::Cpu).unwrap();
        let found = message(nn::attention(&q, &q, &q, Mask::CausalFrom(firsts), 1.0));
        assert!(found.contains(expected), "{found}");
    }
}
