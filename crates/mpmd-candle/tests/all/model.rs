//! The model of the tests: an embedding, blocks of two linear layers with a norm, and a head.

use std::collections::BTreeMap;

use mpmd_candle::nn::{self, Dropout, LayerNorm, Linear, Module, ops};
use mpmd_candle::{CandleStage, Cx, Result, Tensor, VarBuilder, named, stage};
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline};
use mpmd_core::prelude::*;
use mpmd_layout::aval::DType;
use mpmd_layout::random::{Key, bits};
use mpmd_layout::topology::Mesh;

/// The number of different tokens.
pub(crate) const TOKENS: usize = 11;
/// The width of the layers.
pub(crate) const WIDTH: usize = 8;
/// Rows of a microbatch, and tokens of a row.
pub(crate) const ROWS: [usize; 2] = [3, 4];
/// The layers of the model.
pub(crate) const LAYERS: usize = 4;
/// Seed of the initial parameters.
pub(crate) const SEED: u64 = 7;

/// A residual block.
pub(crate) struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(layer: usize, dropout: f32, vb: &VarBuilder<'_>) -> Result<Self> {
        let vb = vb.pp(format!("layers.{layer}"));
        Ok(Self {
            norm: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            up: nn::linear(WIDTH, 2 * WIDTH, vb.pp("up"))?,
            down: nn::linear(2 * WIDTH, WIDTH, vb.pp("down"))?,
            dropout: Dropout::new(dropout),
        })
    }

    fn forward(&self, x: &Tensor, training: bool) -> Result<Tensor> {
        let y = self.up.forward(&self.norm.forward(x)?)?.gelu()?;
        x + self.dropout.forward(&self.down.forward(&y)?, training)?
    }
}

/// The layers of one stage.
pub(crate) struct Part {
    embedding: Option<nn::Embedding>,
    blocks: Vec<Block>,
    head: Option<Linear>,
}

impl Part {
    fn new(vb: &VarBuilder<'_>, (at, of): (usize, usize), dropout: f32) -> Result<Self> {
        let layers = at * LAYERS / of..(at + 1) * LAYERS / of;
        let embedding = match at {
            0 => Some(nn::embedding(TOKENS, WIDTH, vb.pp("embedding"))?),
            _ => None,
        };
        let blocks = layers
            .map(|layer| Block::new(layer, dropout, vb))
            .collect::<Result<_>>()?;
        let head = match at + 1 == of {
            true => Some(nn::linear_no_bias(WIDTH, TOKENS, vb.pp("head"))?),
            false => None,
        };
        Ok(Self {
            embedding,
            blocks,
            head,
        })
    }

    fn forward(&self, x: Tensor, training: bool) -> Result<Tensor> {
        let x = match &self.embedding {
            Some(embedding) => embedding.forward(&x)?,
            None => x,
        };
        let x = self
            .blocks
            .iter()
            .try_fold(x, |x, block| block.forward(&x, training))?;
        match &self.head {
            Some(head) => head.forward(&x),
            None => Ok(x),
        }
    }
}

/// Returns the summed cross-entropy of logits, and the number of labels.
pub(crate) fn loss(logits: &Tensor, labels: &Tensor) -> Result<Loss<Tensor>> {
    let logits = logits.flatten_to(1)?;
    let count = labels.elem_count() as f64;
    let log = ops::log_softmax(&logits, 1)?;
    let picked = log.gather(&labels.flatten_all()?.unsqueeze(1)?, 1)?;
    let sum = picked.sum_all()?.neg()?;
    let weight = (sum.zeros_like()?.detach() + count)?;
    Ok(Loss::new(sum, weight))
}

/// A stage before the last.
pub(crate) type Middle = CandleStage<Part, Tensor, Tensor>;
/// The last stage.
pub(crate) type Last = CandleStage<Part, Tensor, Loss<Tensor>>;

/// Settings of a test's model.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub stages: usize,
    pub dropout: f32,
    pub split: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            stages: 2,
            dropout: 0.0,
            split: false,
        }
    }
}

/// Returns stage `at`, which is not the last.
pub(crate) fn middle(at: usize, settings: Settings) -> Middle {
    let Settings {
        stages,
        dropout,
        split,
    } = settings;
    let stage = stage(
        move |vb: VarBuilder<'static>| Part::new(&vb, (at, stages), dropout),
        |part: &Part, x: Tensor, cx: &mut Cx<'_>| part.forward(x, cx.is_training()),
    );
    let stage = stage.unwrap().named(format!("part {at}"));
    if split {
        stage.split_gradients()
    } else {
        stage
    }
}

/// Returns the last stage.
pub(crate) fn last(settings: Settings) -> Last {
    let Settings {
        stages,
        dropout,
        split,
    } = settings;
    let stage = stage(
        move |vb: VarBuilder<'static>| Part::new(&vb, (stages - 1, stages), dropout),
        |part: &Part, x: Tensor, cx: &mut Cx<'_>| {
            loss(&part.forward(x, cx.is_training())?, &cx.side("labels")?)
        },
    );
    let stage = stage.unwrap().named("last part");
    if split {
        stage.split_gradients()
    } else {
        stage
    }
}

/// A pipeline of the model.
pub(crate) type Model = Pipeline<MpmdArray, Loss<MpmdArray>>;

/// Makes the pipeline, with one device for each stage, and probes it.
pub(crate) fn pipeline(p: &mut Program, settings: Settings) -> mpmd_core::Result<Model> {
    let stages = settings.stages;
    let meshes = p.mesh(&[("stage", stages)])?.split("stage")?;
    let end = last(settings);
    let mut pipeline = if stages == 1 {
        let params = end.init(p, &meshes[0], SEED)?;
        Pipeline::first(end, &meshes[0], params)?
    } else {
        let first = middle(0, settings);
        let params = first.init(p, &meshes[0], SEED)?;
        let mut pipeline = Pipeline::first(first, &meshes[0], params)?;
        for (at, mesh) in meshes.iter().enumerate().take(stages - 1).skip(1) {
            let stage = middle(at, settings);
            let params = stage.init(p, mesh, SEED)?;
            pipeline = pipeline.then(stage, mesh, params)?;
        }
        let mesh = &meshes[stages - 1];
        let params = end.init(p, mesh, SEED)?;
        pipeline.then(end, mesh, params)?
    };
    pipeline.probe(p, &shapes(stages))?;
    Ok(pipeline)
}

/// Returns the shapes of a microbatch.
pub(crate) fn shapes(stages: usize) -> MicrobatchShapes<MpmdArray> {
    let tokens = ShapedArray::new(&ROWS, DType::U32);
    let labels = BTreeMap::from([("labels".to_owned(), tokens.clone())]);
    MicrobatchShapes::new(tokens).side(stages - 1, &labels)
}

/// Returns the tokens (or labels, with an odd `stream`) of a microbatch.
pub(crate) fn tokens(step: u64, microbatch: u64, stream: u64) -> Vec<u32> {
    let key = Key(step).fold_in(microbatch).fold_in(stream);
    (0..(ROWS[0] * ROWS[1]) as u64)
        .map(|i| (bits(key, i) % TOKENS as u64) as u32)
        .collect()
}

/// Makes the microbatches of a step.
pub(crate) fn microbatches(
    p: &mut Program,
    meshes: [&Mesh; 2],
    stages: usize,
    (step, count): (u64, usize),
) -> mpmd_core::Result<Vec<Microbatch<MpmdArray>>> {
    let microbatch = |number: u64| {
        let [x, labels] = [0, 1].map(|stream| {
            let values = MpmdArray::from_slice(&ROWS, &tokens(step, number, stream))?;
            p.device_put(&values, meshes[stream as usize].replicated())
        });
        let key = Key(step).fold_in(number);
        Ok(Microbatch::new(x?)
            .side(stages - 1, named([("labels", labels?)]))
            .key(key))
    };
    (0..count as u64).map(microbatch).collect()
}
