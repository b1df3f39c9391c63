//! The transformer's arithmetic against automatic differentiation: the same model written down as
//! tensor expressions, whose values and gradients must be those of the kernels.

use std::convert::Infallible;

use candle_core::{D, Device, Result, Tensor, Var, WithDType};
use mpmd::tree::Tree;
use mpmd_examples::gpt::block::{self, BlockParameters};
use mpmd_examples::gpt::embed::{self, EmbedParameters};
use mpmd_examples::gpt::head::{self, HeadParameters};
use mpmd_examples::gpt::{BYTES, BlockShape, LeafShape};
use mpmd_examples::math::{Real, random_bits, random_unit};

const SHAPE: BlockShape =
    BlockShape { batch: 3, time: 20, width: 32, heads_total: 4, heads: 4, hidden: 48 };

/// Multiplies the loss sum: gradients of about 1.
const FACTOR: f64 = 0.5;

fn norm(x: &Tensor, gain: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?.broadcast_mul(gain)?.broadcast_add(bias)
}

fn linear(x: &Tensor, w: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(w)?.broadcast_add(bias)
}

fn attention(x: &Tensor, w_qkv: &Tensor, b_qkv: &Tensor) -> Result<Tensor> {
    let BlockShape { batch, time, width, heads, .. } = SHAPE;
    let qkv = linear(x, &w_qkv.reshape((width, 3 * width))?, &b_qkv.flatten_all()?)?;
    let group = |which: usize| {
        let columns = qkv.narrow(D::Minus1, which * width, width)?;
        columns.reshape((batch, time, heads, width / heads))?.transpose(1, 2)?.contiguous()
    };
    let scores =
        (group(0)?.matmul(&group(1)?.t()?.contiguous()?)? * ((width / heads) as f64).powf(-0.5))?;
    let mask: Vec<f64> =
        (0..time * time).map(|at| if at % time > at / time { -1e9 } else { 0.0 }).collect();
    let mask = Tensor::from_vec(mask, (time, time), &Device::Cpu)?.to_dtype(scores.dtype())?;
    let scores = scores.broadcast_add(&mask)?;
    let powers = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let probabilities = powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?;
    probabilities.matmul(&group(2)?)?.transpose(1, 2)?.reshape((batch, time, width))
}

fn block_by_tensors(p: &BlockParameters<Var>, x: &Tensor) -> Result<Tensor> {
    let gathered = attention(&norm(x, &p.norm1_gain, &p.norm1_bias)?, &p.w_qkv, &p.b_qkv)?;
    let h = (x + linear(&gathered, &p.w_out, &p.b_out)?)?;
    let up = linear(&norm(&h, &p.norm2_gain, &p.norm2_bias)?, &p.w_up, &p.b_up)?;
    let inner = ((&up + (up.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    let activated = (up * 0.5)?.mul(&(inner.tanh()? + 1.0)?)?;
    &h + linear(&activated, &p.w_down, &p.b_down)?
}

fn cross_entropy(logits: &Tensor, targets: &[u8]) -> Result<Tensor> {
    let logits = logits.reshape((SHAPE.rows(), BYTES))?;
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let targets: Vec<u32> = targets.iter().copied().map(u32::from).collect();
    let targets = Tensor::from_vec(targets, (SHAPE.rows(), 1), &Device::Cpu)?;
    let total = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (total - shifted.gather(&targets, D::Minus1)?)?.sum_all()
}

/// Parameters of embedding, block and head.
type Parameters<L> = (EmbedParameters<L>, BlockParameters<L>, HeadParameters<L>);

/// Names and values of everything that is compared.
type Outcome<T> = Vec<(String, Vec<T>)>;

fn shapes() -> Parameters<LeafShape> {
    (SHAPE.embed_parameters(), SHAPE.block_parameters(), SHAPE.head_parameters())
}

fn parameters<T: Real>() -> Parameters<Vec<T>> {
    let mut leaves = shapes()
        .leaves_with_paths()
        .into_iter()
        .enumerate()
        .map(|(seed, (path, leaf))| {
            let (scale, offset) =
                (if leaf.dims.len() > 1 { 0.3 } else { 0.2 }, f64::from(path.ends_with("gain")));
            (0..leaf.elements())
                .map(|i| T::of(offset + scale * random_unit(seed as u64, i as u64)))
                .collect()
        })
        .collect::<Vec<_>>()
        .into_iter();
    let (embed, block, head) = shapes();
    let mut next = |_: &LeafShape| leaves.next().expect("values for each leaf");
    (embed.each(&mut next), block.each(&mut next), head.each(&mut next))
}

/// Names of the parameters with the leaves of such a tree.
fn named<L>((embed, block, head): &Parameters<L>) -> Vec<(String, &L)> {
    let mut leaves = Vec::new();
    embed.each(|leaf| leaves.push(leaf));
    block.each(|leaf| leaves.push(leaf));
    head.each(|leaf| leaves.push(leaf));
    shapes().leaves_with_paths().into_iter().map(|(path, _)| path).zip(leaves).collect()
}

fn tokens() -> (Vec<u8>, Vec<u8>) {
    let bytes = |seed| (0..SHAPE.rows()).map(move |i| random_bits(seed, i as u64) as u8);
    // Few enough different ones that some come twice.
    (bytes(100).map(|byte| byte % 40).collect(), bytes(101).collect())
}

fn by_tensors<T: Real + WithDType>() -> Result<Outcome<T>> {
    let mut shapes = shapes().into_leaves().into_iter();
    let mut var = |values: &Vec<T>| {
        let dims = shapes.next().expect("a shape for each leaf").dims;
        Var::from_tensor(&Tensor::from_slice(values, dims, &Device::Cpu)?)
    };
    let (embed, block, head) = parameters::<T>();
    let p = (embed.try_each(&mut var)?, block.try_each(&mut var)?, head.try_each(&mut var)?);
    let (embed, block, head) = &p;

    let (tokens, targets) = tokens();
    let BlockShape { batch, time, width, .. } = SHAPE;
    let ids: Vec<u32> = tokens.into_iter().map(u32::from).collect();
    let ids = Tensor::from_vec(ids, SHAPE.rows(), &Device::Cpu)?;
    let rows = embed.bytes.index_select(&ids, 0)?.reshape((batch, time, width))?;
    let x = rows.broadcast_add(&embed.positions)?;
    let y = block_by_tensors(block, &x)?;
    let logits = norm(&y, &head.norm_gain, &head.norm_bias)?.broadcast_matmul(&head.weight)?;
    let loss = cross_entropy(&logits, &targets)?;
    let gradients = (&loss * FACTOR)?.backward()?;

    let flat = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<T>();
    let gradient = |of: &Tensor| flat(gradients.get(of).expect("a gradient of everything"));
    let mut outcome: Outcome<T> = vec![
        ("embedded".to_owned(), flat(&x)?),
        ("block output".to_owned(), flat(&y)?),
        ("loss".to_owned(), flat(&loss)?),
    ];
    for (name, leaf) in named(&p) {
        outcome.push((name, gradient(leaf)?));
    }
    Ok(outcome)
}

fn unset<T: Real>(leaf: &LeafShape) -> Vec<T> {
    vec![T::of(f64::NAN); leaf.elements()]
}

fn by_kernels<T: Real>() -> Outcome<T> {
    let p = parameters::<T>();
    let embed_p = p.0.each(|leaf| leaf.as_slice());
    let block_p = p.1.each(|leaf| leaf.as_slice());
    let head_p = p.2.each(|leaf| leaf.as_slice());
    let (tokens, targets) = tokens();
    let rows = || vec![T::of(f64::NAN); SHAPE.rows() * SHAPE.width];
    let (mut x, mut y, mut dx, mut dy) = (rows(), rows(), rows(), rows());
    let mut scratch =
        vec![T::ZERO; block::forward_scratch(SHAPE).max(block::backward_scratch(SHAPE))];
    let alone = |_: &mut [T]| Ok::<(), Infallible>(());

    embed::embed_forward(SHAPE, &embed_p, &mut x, &tokens);
    let mut inputs = SHAPE.block_inputs().each(unset::<T>);
    let mut interior = SHAPE.block_interior().each(unset::<T>);
    let inputs_mut = &mut inputs.each_mut(|leaf| leaf.as_mut_slice());
    let interior_mut = &mut interior.each_mut(|leaf| leaf.as_mut_slice());
    let Ok(()) =
        block::forward(SHAPE, &block_p, inputs_mut, interior_mut, &mut y, &x, &mut scratch, alone);
    let mut residuals = SHAPE.head_residuals().each(unset::<T>);
    let residuals_mut = &mut residuals.each_mut(|leaf| leaf.as_mut_slice());
    let (loss, count) = head::forward(SHAPE, &head_p, residuals_mut, &y, &targets);
    assert_eq!(count, SHAPE.rows());

    let residuals = residuals.each(|leaf| leaf.as_slice());
    let mut head_g = SHAPE.head_gradients().each(unset::<T>);
    let head_g_mut = &mut head_g.each_mut(|leaf| leaf.as_mut_slice());
    head::backward_input(SHAPE, &head_p, &residuals, head_g_mut, &mut dy, &targets, FACTOR);
    let inputs = inputs.each(|leaf| leaf.as_slice());
    let interior = interior.each(|leaf| leaf.as_slice());
    let mut block_g = SHAPE.block_gradients().each(unset::<T>);
    let block_g_mut = &mut block_g.each_mut(|leaf| leaf.as_mut_slice());
    let kept = (&inputs, &interior);
    let Ok(()) = block::backward_input(
        SHAPE,
        &block_p,
        kept,
        block_g_mut,
        &mut dx,
        &dy,
        &mut scratch,
        alone,
    );

    let zeros = |leaf: &Vec<T>| vec![T::ZERO; leaf.len()];
    let mut d = (p.0.each(zeros), p.1.each(zeros), p.2.each(zeros));
    embed::embed_backward_weight(
        SHAPE,
        &mut d.0.each_mut(|leaf| leaf.as_mut_slice()),
        &dx,
        &tokens,
    );
    let block_g = block_g.each(|leaf| leaf.as_slice());
    block::backward_weight(SHAPE, &inputs, &block_g, &mut d.1.each_mut(|leaf| leaf.as_mut_slice()));
    let head_g = head_g.each(|leaf| leaf.as_slice());
    let kept = (residuals.norm_hat, residuals.norm_out);
    head::backward_weight(SHAPE, kept, &head_g, &mut d.2.each_mut(|leaf| leaf.as_mut_slice()));

    let mut outcome: Outcome<T> = vec![
        ("embedded".to_owned(), x),
        ("block output".to_owned(), y),
        ("loss".to_owned(), vec![T::of(loss)]),
    ];
    outcome.extend(named(&d).into_iter().map(|(name, leaf)| (name, leaf.clone())));
    outcome
}

/// Every value of the two within `tolerance` of each other, relative to the array's largest one;
/// and the arrays not all of zeros, which would agree about nothing.
fn assert_agree<T: Real + WithDType>(tolerance: f64) {
    let expected = by_tensors::<T>().expect("the tensor library computes the model");
    let got = by_kernels::<T>();
    assert_eq!(got.len(), expected.len());
    for ((name, got), (other, expected)) in got.iter().zip(&expected) {
        assert_eq!((name, got.len()), (other, expected.len()));
        let largest =
            expected.iter().fold(0.0, |largest: f64, v| largest.max(Real::to_f64(*v).abs()));
        assert!(largest > 1e-3, "{name} is all zeros");
        // The bias of the keys moves all scores of a row alike, so a third of this gradient is
        // rounding only.
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let apart = (Real::to_f64(*got) - Real::to_f64(*expected)).abs();
            assert!(apart <= tolerance * largest, "{name}[{i}]: {got}, not {expected}");
        }
    }
}

#[test]
fn single_precision_agrees_with_automatic_differentiation() {
    assert_agree::<f32>(1e-4);
}

#[test]
fn double_precision_agrees_with_automatic_differentiation() {
    assert_agree::<f64>(1e-10);
}
