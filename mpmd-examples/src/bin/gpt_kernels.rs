//! Measures the transformer's arithmetic on one core, without the framework. It times training
//! steps of a model with four blocks, and the matrix products of a step alone.
//!
//! `cargo run --release --bin gpt_kernels`

use std::convert::Infallible;
use std::time::{Duration, Instant};

use mpmd::tree::Tree as _;
use mpmd_examples::gpt::adamw::{AdamStep, AdamW, WarmupCosine, clip_factor, square_sum};
use mpmd_examples::gpt::block::{
    self, BlockGradients, BlockInputs, BlockInterior, BlockParameters,
};
use mpmd_examples::gpt::embed::{self, EmbedParameters};
use mpmd_examples::gpt::head::{self, HeadGradients, HeadParameters, HeadResiduals};
use mpmd_examples::gpt::{BYTES, BlockShape, Initial, LeafShape};
use mpmd_examples::math::{matmul, matmul_nt, matmul_tn, random_bits, random_unit};

const LAYERS: usize = 4;
const SHAPE: BlockShape =
    BlockShape { batch: 8, time: 128, width: 128, heads_total: 4, heads: 4, hidden: 512 };
const STEPS: u64 = 40;

/// One `f32` for each parameter of the model. The parameters, their gradients and the optimiser's
/// two running means all have this form.
struct Model {
    embed: EmbedParameters<Vec<f32>>,
    blocks: Vec<BlockParameters<Vec<f32>>>,
    head: HeadParameters<Vec<f32>>,
}

impl Model {
    fn zeros() -> Self {
        Self {
            embed: SHAPE.embed_parameters().each(zeros),
            blocks: (0..LAYERS).map(|_| SHAPE.block_parameters().each(zeros)).collect(),
            head: SHAPE.head_parameters().each(zeros),
        }
    }

    fn start() -> Self {
        let mut model = Self::zeros();
        let mut initial = SHAPE.embed_initial().into_leaves();
        (0..LAYERS).for_each(|_| initial.extend(SHAPE.block_initial(LAYERS).into_leaves()));
        initial.extend(SHAPE.head_initial().into_leaves());
        for (seed, (leaf, initial)) in model.leaves_mut().into_iter().zip(initial).enumerate() {
            for (i, value) in leaf.iter_mut().enumerate() {
                *value = match initial {
                    Initial::Constant(value) => value as f32,
                    // Uniform values with the same standard deviation are good enough here.
                    Initial::Normal(std) => {
                        (std * 3f64.sqrt() * random_unit(seed as u64, i as u64)) as f32
                    }
                };
            }
        }
        model
    }

    fn leaves_mut(&mut self) -> Vec<&mut Vec<f32>> {
        let mut leaves = Vec::new();
        self.embed.each_mut(|leaf| leaves.push(leaf));
        for block in &mut self.blocks {
            block.each_mut(|leaf| leaves.push(leaf));
        }
        self.head.each_mut(|leaf| leaves.push(leaf));
        leaves
    }
}

fn zeros(shape: &LeafShape) -> Vec<f32> {
    vec![0.0; shape.elements()]
}

/// (inputs, interior values, output gradients) of one block, kept for the backward pass.
type Kept = (BlockInputs<Vec<f32>>, BlockInterior<Vec<f32>>, BlockGradients<Vec<f32>>);

/// The buffers that a training step writes. They are allocated once and reused.
struct Buffers {
    /// `LAYERS + 1` activations `[rows, width]`: after the embedding and after each block.
    rows: Vec<Vec<f32>>,
    blocks: Vec<Kept>,
    head: (HeadResiduals<Vec<f32>>, HeadGradients<Vec<f32>>),
    scratch: Vec<f32>,
    d: Vec<f32>,
    dx: Vec<f32>,
}

/// The time of each part of a step, summed over all steps.
#[derive(Default)]
struct Times {
    forward: Duration,
    backward_input: Duration,
    backward_weight: Duration,
    update: Duration,
}

fn main() {
    let mut model = Model::start();
    let (mut gradients, mut mean, mut square) = (Model::zeros(), Model::zeros(), Model::zeros());
    let parameters: usize = model.leaves_mut().iter().map(|leaf| leaf.len()).sum();
    let rows = || vec![0.0f32; SHAPE.rows() * SHAPE.width];
    let mut buffers = Buffers {
        rows: (0..=LAYERS).map(|_| rows()).collect(),
        blocks: (0..LAYERS)
            .map(|_| {
                let (inputs, interior) = (SHAPE.block_inputs(), SHAPE.block_interior());
                (inputs.each(zeros), interior.each(zeros), SHAPE.block_gradients().each(zeros))
            })
            .collect(),
        head: (SHAPE.head_residuals().each(zeros), SHAPE.head_gradients().each(zeros)),
        scratch: vec![0.0; block::forward_scratch(SHAPE).max(block::backward_scratch(SHAPE))],
        d: rows(),
        dx: rows(),
    };
    // A text that can be learnt: each byte follows from the one before, plus some noise.
    let text: Vec<u8> = (0..SHAPE.rows() * 16).fold(vec![1], |mut text, i| {
        let noise = (random_bits(7, i as u64) % 4) as u8;
        text.push((text[i].wrapping_mul(5).wrapping_add(noise)) % 64);
        text
    });
    let rates = WarmupCosine { peak: 2e-3, floor: 2e-4, warmup: 10, total: STEPS };

    println!("{parameters} parameters, {LAYERS} blocks, {SHAPE:?}");
    let (mut times, mut products, mut best_step, mut best_products) =
        (Times::default(), Products::new(), f64::MAX, f64::MAX);
    for step in 1..=STEPS {
        let at = (step as usize * 977) % (text.len() - SHAPE.rows() - 1);
        let (tokens, targets) = (&text[at..at + SHAPE.rows()], &text[at + 1..=at + SHAPE.rows()]);
        let started = Instant::now();
        for leaf in gradients.leaves_mut() {
            leaf.fill(0.0);
        }
        let loss = train(&model, &mut gradients, &mut buffers, tokens, targets, &mut times);
        let updating = Instant::now();
        let sums = gradients.leaves_mut().into_iter().map(|leaf| square_sum(leaf));
        let (clip, norm) = clip_factor(sums.map(|sum| sum / (SHAPE.rows() as f64).powi(2)), 1.0);
        let step_of = AdamStep {
            number: step,
            rate: rates.rate(step),
            gradient_factor: clip / SHAPE.rows() as f64,
        };
        let state = mean.leaves_mut().into_iter().zip(square.leaves_mut());
        let leaves = model.leaves_mut().into_iter().zip(gradients.leaves_mut());
        for ((leaf, gradient), (mean, square)) in leaves.zip(state) {
            AdamW::default().update(step_of, leaf, mean, square, gradient);
        }
        times.update += updating.elapsed();
        best_step = best_step.min(started.elapsed().as_secs_f64());
        best_products = best_products.min(products.run().as_secs_f64());
        if step == 1 || step % 10 == 0 {
            println!("step {step:3}: loss {:.4}, norm {norm:.3}", loss / SHAPE.rows() as f64);
        }
    }
    let each = |time: Duration| time.as_secs_f64() * 1e3 / STEPS as f64;
    println!(
        "mean per step: forward {:.1} ms, input gradient {:.1} ms, weight gradient {:.1} ms, \
         update {:.1} ms",
        each(times.forward),
        each(times.backward_input),
        each(times.backward_weight),
        each(times.update)
    );
    println!(
        "fastest step {:.1} ms ({:.0} tokens/s); its matrix products alone {:.1} ms ({:.1} \
         GFLOP/s): {:.0} %",
        best_step * 1e3,
        SHAPE.rows() as f64 / best_step,
        best_products * 1e3,
        products.flops() / best_products * 1e-9,
        100.0 * best_products / best_step
    );
}

fn train(
    model: &Model,
    gradients: &mut Model,
    buffers: &mut Buffers,
    tokens: &[u8],
    targets: &[u8],
    times: &mut Times,
) -> f64 {
    let alone = |_: &mut [f32]| Ok::<(), Infallible>(());
    let Buffers { rows, blocks, head, scratch, d, dx } = buffers;
    let mut mark = Instant::now();
    let mut lap = |time: &mut Duration| {
        *time += mark.elapsed();
        mark = Instant::now();
    };
    embed::embed_forward(SHAPE, &model.embed.each(|l| l.as_slice()), &mut rows[0], tokens);
    for (i, (inputs, interior, _)) in blocks.iter_mut().enumerate() {
        let p = model.blocks[i].each(|l| l.as_slice());
        let (inputs, interior) =
            (inputs.each_mut(|l| l.as_mut_slice()), interior.each_mut(|l| l.as_mut_slice()));
        let (before, after) = rows.split_at_mut(i + 1);
        let (mut inputs, mut interior) = (inputs, interior);
        let Ok(()) = block::forward(
            SHAPE,
            &p,
            &mut inputs,
            &mut interior,
            &mut after[0],
            &before[i],
            scratch,
            alone,
        );
    }
    let p = model.head.each(|l| l.as_slice());
    let residuals = &mut head.0.each_mut(|l| l.as_mut_slice());
    let (loss, _) = head::forward(SHAPE, &p, residuals, &rows[LAYERS], targets);
    lap(&mut times.forward);
    let residuals = head.0.each(|l| l.as_slice());
    head::backward_input(
        SHAPE,
        &p,
        &residuals,
        &mut head.1.each_mut(|l| l.as_mut_slice()),
        d,
        targets,
        1.0,
    );
    lap(&mut times.backward_input);
    let kept = (residuals.norm_hat, residuals.norm_out);
    let d_head = &mut gradients.head.each_mut(|l| l.as_mut_slice());
    head::backward_weight(SHAPE, kept, &head.1.each(|l| l.as_slice()), d_head);
    lap(&mut times.backward_weight);
    for (i, (inputs, interior, kept)) in blocks.iter_mut().enumerate().rev() {
        let p = model.blocks[i].each(|l| l.as_slice());
        let (inputs, interior) = (inputs.each(|l| l.as_slice()), interior.each(|l| l.as_slice()));
        let kept_mut = &mut kept.each_mut(|l| l.as_mut_slice());
        let residuals = (&inputs, &interior);
        let Ok(()) = block::backward_input(SHAPE, &p, residuals, kept_mut, dx, d, scratch, alone);
        lap(&mut times.backward_input);
        let d_block = &mut gradients.blocks[i].each_mut(|l| l.as_mut_slice());
        block::backward_weight(SHAPE, &inputs, &kept.each(|l| l.as_slice()), d_block);
        lap(&mut times.backward_weight);
        std::mem::swap(d, dx);
    }
    let d_embed = &mut gradients.embed.each_mut(|l| l.as_mut_slice());
    embed::embed_backward_weight(SHAPE, d_embed, d, tokens);
    lap(&mut times.backward_weight);
    loss
}

/// Two operands and a result, large enough for every matrix product of a step. They serve to time
/// the products alone.
struct Products {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Products {
    fn new() -> Self {
        let most = SHAPE.rows() * SHAPE.hidden.max(3 * SHAPE.width).max(BYTES);
        let fill = |seed| (0..most).map(|i| random_unit(seed, i as u64) as f32 * 0.01).collect();
        Self { a: fill(1), b: fill(2), c: vec![0.0; most] }
    }

    /// Returns (input columns, output columns, number of layers) for each kind of linear layer.
    fn layers() -> [(usize, usize, usize); 5] {
        let BlockShape { width, hidden, .. } = SHAPE;
        [
            (width, 3 * width, LAYERS),
            (width, width, LAYERS),
            (width, hidden, LAYERS),
            (hidden, width, LAYERS),
            (width, BYTES, 1),
        ]
    }

    fn flops(&self) -> f64 {
        let rows = SHAPE.rows();
        let layers: usize =
            Self::layers().iter().map(|(k, n, times)| 6 * rows * k * n * times).sum();
        (layers + LAYERS * 12 * rows * SHAPE.time * SHAPE.width) as f64
    }

    fn run(&mut self) -> Duration {
        let Self { a, b, c } = self;
        let (rows, time, head_dim) = (SHAPE.rows(), SHAPE.time, SHAPE.head_dim());
        let started = Instant::now();
        for (k, n, times) in Self::layers() {
            for _ in 0..times {
                matmul(&mut c[..rows * n], &a[..rows * k], &b[..k * n], rows, k, n, false);
                matmul_nt(&mut c[..rows * k], &a[..rows * n], &b[..k * n], rows, n, k, false);
                matmul_tn(&mut c[..k * n], &a[..rows * k], &b[..rows * n], k, rows, n, true);
            }
        }
        let (square, head) = (time * time, time * head_dim);
        for _ in 0..LAYERS * SHAPE.batch * SHAPE.heads {
            // Twice: once for the scores and once for the weighted sums, each with its two
            // gradients.
            for _ in 0..2 {
                matmul_nt(&mut c[..square], &a[..head], &b[..head], time, head_dim, time, false);
                matmul(&mut c[..head], &a[..square], &b[..head], time, time, head_dim, false);
                matmul_tn(&mut c[..head], &a[..square], &b[..head], time, time, head_dim, false);
            }
        }
        started.elapsed()
    }
}
