//! A model as candle_nn's documentation teaches: convolution, norms, attention and an embedding.
//! Only its `use` lines name `mpmd_candle`.

use mpmd_candle::nn::{
    Conv2d, Conv2dConfig, Dropout, Embedding, GroupNorm, LayerNorm, Linear, Module, RmsNorm,
    VarBuilder, conv2d, embedding, group_norm, layer_norm, linear, linear_no_bias, ops, rms_norm,
};
use mpmd_candle::{Cx, Result, Tensor, named, stage};
use mpmd_core::Simulation;
use mpmd_core::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd_core::prelude::*;

const CHANNELS: usize = 8;
const CLASSES: usize = 3;

/// The lower half: two convolutions with a norm over groups of channels.
struct Images {
    first: Conv2d,
    norm: GroupNorm,
    second: Conv2d,
    dropout: Dropout,
}

impl Images {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let padded = Conv2dConfig {
            padding: 1,
            ..Default::default()
        };
        Ok(Self {
            first: conv2d(1, CHANNELS, 3, padded, vb.pp("first"))?,
            norm: group_norm(2, CHANNELS, 1e-5, vb.pp("norm"))?,
            second: conv2d(CHANNELS, CHANNELS, 3, padded, vb.pp("second"))?,
            dropout: Dropout::new(0.1),
        })
    }

    fn forward(&self, images: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.norm.forward(&self.first.forward(images)?)?.relu()?;
        self.dropout
            .forward(&self.second.forward(&x)?.max_pool2d(2)?, train)
    }
}

/// The upper half: attention over the places of the image, with a learned query for each class.
struct Classes {
    norm: LayerNorm,
    queries: Embedding,
    keys: Linear,
    values: Linear,
    last: RmsNorm,
    head: Linear,
}

impl Classes {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            norm: layer_norm(CHANNELS, 1e-5, vb.pp("norm"))?,
            queries: embedding(CLASSES, CHANNELS, vb.pp("queries"))?,
            keys: linear(CHANNELS, CHANNELS, vb.pp("keys"))?,
            values: linear_no_bias(CHANNELS, CHANNELS, vb.pp("values"))?,
            last: rms_norm(CHANNELS, 1e-5, vb.pp("last"))?,
            head: linear(CHANNELS, 1, vb.pp("head"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(&x.flatten_from(2)?.transpose(1, 2)?)?;
        let queries = self
            .queries
            .forward(&Tensor::arange(0u32, CLASSES as u32, x.device())?)?;
        let keys = self.keys.forward(&x)?.transpose(1, 2)?;
        let scores = queries.unsqueeze(0)?.broadcast_matmul(&keys)?;
        let picked = ops::softmax_last_dim(&scores)?.matmul(&self.values.forward(&x)?)?;
        self.head.forward(&self.last.forward(&picked)?)?.squeeze(2)
    }
}

/// Returns image `number`: a bright row at the height of its class, and its class.
fn image(number: u32) -> ([f32; 64], u32) {
    let class = number % CLASSES as u32;
    let row = 1 + 2 * class as usize;
    let pixel = |i: usize| {
        let noise = ((number as usize * 64 + i) * 7919 % 101) as f32 / 505.0;
        if i / 8 == row { 1.0 + noise } else { noise }
    };
    (std::array::from_fn(pixel), class)
}

#[test]
fn documented_model_learns_in_two_stages() {
    let results = Simulation::new(2, 2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let lower = stage(
            |vb| Images::new(vb),
            |model, images: Tensor, cx: &mut Cx<'_>| model.forward(&images, cx.is_training()),
        )?;
        let upper = stage(
            |vb| Classes::new(vb),
            |model, x: Tensor, cx| {
                let (sum, weight) = mpmd_candle::nn::loss::cross_entropy_sum(
                    &model.forward(&x)?,
                    &cx.side("classes")?,
                    None,
                )?;
                Ok(Loss::new(sum, weight))
            },
        )?;
        let (a, b) = (lower.init(p, &meshes[0], 1)?, upper.init(p, &meshes[1], 1)?);
        let mut pipeline = Pipeline::first(lower, &meshes[0], a)?.then(upper, &meshes[1], b)?;
        let schedule = Schedule::one_f_one_b(2, 2)?;
        let descend = |mesh: &mpmd_layout::topology::Mesh, p: &Program| {
            p.jit(elementwise(|w: f32, g: f32| w - 0.02 * g))
                .on(mesh)
                .outputs(mesh.replicated())
                .build()
        };
        let descend = [descend(&meshes[0], p)?, descend(&meshes[1], p)?];
        let mut losses = Vec::new();
        for step in 0..30u32 {
            let mut batch = Vec::new();
            for microbatch in 0..2 {
                let first = 12 * step + 6 * microbatch;
                let (images, classes): (Vec<_>, Vec<_>) = (first..first + 6).map(image).unzip();
                let images = MpmdArray::from_slice(&[6, 1, 8, 8], images.as_flattened())?;
                let classes = MpmdArray::from_slice(&[6], &classes)?;
                let images = p.device_put(&images, meshes[0].replicated())?;
                let classes = p.device_put(&classes, meshes[1].replicated())?;
                let key = mpmd_layout::random::Key(u64::from(first));
                let side = named([("classes", classes)]);
                batch.push(Microbatch::new(images).side(1, side).key(key));
            }
            if step == 0 {
                pipeline.probe(p, &batch[0].shapes())?;
            }
            let output = pipeline.train_step(p, &schedule, batch)?;
            for (stage, gradients) in output.gradients.into_iter().enumerate() {
                let mut params = Vec::new();
                for ((_, param), (_, gradient)) in pipeline.params(stage).into_iter().zip(gradients)
                {
                    params.push(descend[stage].call(p, (param, gradient))?);
                }
                pipeline.set_params(stage, params)?;
            }
            losses.push(output.loss.sum);
            p.step_end()?;
        }
        let mut values = Vec::new();
        for loss in losses {
            if let Some(loss) = loss.to_host()? {
                values.extend(loss.to_vec::<f32>()?);
            }
        }
        mpmd_core::Result::Ok(values)
    });
    let losses: Vec<f32> = results
        .into_iter()
        .flat_map(|result| result.unwrap())
        .collect();
    let (first, last) = (losses[0] / 12.0, losses[29] / 12.0);
    assert!(
        first > 0.9 && last < 0.3,
        "losses of {first} and, after 30 steps, {last}: {losses:?}"
    );
}
