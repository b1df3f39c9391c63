//! A model as stages of a pipeline.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd::aval::{ShapedArray, f32s};
use mpmd::candle::nn::loss::cross_entropy_sum;
use mpmd::candle::{CandleStage, Cx, Result as CandleResult, Tensor, Tensors, stage};
use mpmd::kernel::Shapes;
use mpmd::pipeline::{Loss, Pipeline};
use mpmd::topology::Mesh;
use mpmd::{Error, MpmdArray, Program, Result};

use crate::config::POSITIONS;
use crate::decoder::{EMBEDDING, OUTPUT, Part};
use crate::folder::{CONFIG, Folder};
use crate::generator::Generator;
use crate::lora::{self, Lora};
use crate::rope::Angles;
use crate::unexpected;

/// Number of tokens for which logits are computed at once, where no gradients are needed.
const LOGITS_AT_ONCE: usize = 512;

/// A model that is divided over stages.
#[derive(Clone, Debug)]
pub struct Stages {
    folder: Folder,
    stages: usize,
    positions: usize,
    angles: Vec<Angles>,
    lora: Option<Lora>,
    seed: u64,
    is_packed: bool,
}

impl Stages {
    /// Divides the layers of a model over `stages` stages. `positions` is the largest number of
    /// tokens in a sequence.
    ///
    /// # Errors
    ///
    /// If the model has fewer layers than stages, or was made for fewer positions.
    pub fn new(folder: &Folder, stages: usize, positions: usize) -> Result<Self> {
        let (config, file) = (folder.config(), folder.path().join(CONFIG));
        if config.num_hidden_layers < stages {
            let expected = format!("at least {stages}, the number of stages");
            let key = folder.key("num_hidden_layers");
            return Err(unexpected(&file, key, expected, config.num_hidden_layers));
        }
        let (own, most) = (config.max_position_embeddings, config.positions());
        if positions > most {
            let expected = format!("at least {positions}, the tokens of a sequence");
            let scaled = if most == own { String::new() } else { format!(", scaled to {most}") };
            let key = folder.key(POSITIONS);
            return Err(unexpected(&file, key, expected, format!("{own}{scaled}")));
        }
        let angles = config.ropes.iter().map(|rope| Angles::new(rope, positions));
        let angles = angles.collect::<CandleResult<_>>();
        let angles = angles.map_err(|why| Error::kernel(why.to_string()))?;
        let (folder, stages) = (folder.clone(), stages.max(1));
        Ok(Self { folder, stages, positions, angles, lora: None, seed: 0, is_packed: false })
    }

    /// Has the stages read the side inputs of [`Packed`](mpmd::train::data::Packed): `starts`, and
    /// the last stage `weights` for its loss.
    #[must_use]
    pub fn packed(mut self, is_packed: bool) -> Self {
        self.is_packed = is_packed;
        self
    }

    /// Adds matrices of LoRA to all projections. Only they are trained. Their initial values depend
    /// on the seed.
    #[must_use]
    pub fn lora(mut self, lora: Option<Lora>, seed: u64) -> Self {
        (self.lora, self.seed) = (lora, seed);
        self
    }

    /// Returns the layers of a stage.
    pub fn layers(&self, stage: usize) -> Range<usize> {
        let layers = self.folder.config().num_hidden_layers;
        layers * stage / self.stages..layers * (stage + 1) / self.stages
    }

    /// Creates a pipeline for training, and issues the reading of the weights. `meshes` are those
    /// of the stages, in order; a stage's parameters are replicated over its mesh.
    ///
    /// Its input are tokens `[batch, time]`. The last stage reads the following tokens as the side
    /// input `targets`. The loss is the sum over all tokens, in nats.
    ///
    /// # Errors
    ///
    /// As for [`Folder::load`] and [`Pipeline::then`].
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
    ) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
        self.pipeline(p, meshes, true, loss(usize::MAX, self.is_packed), loss_shapes)
    }

    /// Creates a pipeline that computes losses as [`Stages::training`] does, without gradients.
    ///
    /// # Errors
    ///
    /// As for [`Stages::training`].
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn losses(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
    ) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
        self.pipeline(p, meshes, false, loss(LOGITS_AT_ONCE, self.is_packed), loss_shapes)
    }

    /// Creates a pipeline that computes logits `[batch, time, vocab_size]`, without gradients.
    ///
    /// # Errors
    ///
    /// As for [`Stages::training`].
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn logits(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
    ) -> Result<Pipeline<MpmdArray, MpmdArray>> {
        let tokens = self.folder.config().vocab_size;
        let is_packed = self.is_packed;
        let logits = move |part: &Part, x, cx: &mut Cx<'_>| {
            part.logits(&part.forward(x, starts(cx, is_packed)?.as_ref())?)
        };
        self.pipeline(p, meshes, false, logits, move |x| sequences(x, tokens))
    }

    /// Creates a generator, and issues the reading of the weights. Its sequences have up to
    /// `positions` tokens; scalings of the rotary embedding that depend on the length take that of
    /// `positions`. A device keeps the weights once, as f32.
    ///
    /// # Errors
    ///
    /// As for [`Pipeline::then`]. If a file cannot be read, or a device has too little memory, the
    /// first call fails instead.
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn generator(&self, p: &mut Program, meshes: &[Mesh]) -> Result<Generator> {
        let layers: Vec<Range<usize>> = (0..self.stages).map(|stage| self.layers(stage)).collect();
        Generator::new(p, &self.folder, &layers, &meshes[..self.stages], self.positions)
    }

    fn pipeline<Y: Tensors>(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        trains: bool,
        end: impl Fn(&Part, Tensor, &mut Cx<'_>) -> CandleResult<Y> + Send + Sync + 'static,
        shapes: impl Fn(&ShapedArray) -> Shapes<Y::Arrays> + Send + Sync + 'static,
    ) -> Result<Pipeline<MpmdArray, Y::Arrays>> {
        self.folder.compare(p)?;
        let (last, width) = (self.stages - 1, self.folder.config().hidden_size);
        let middle = |i| {
            let is_packed = self.is_packed;
            let forward = move |part: &Part, x, cx: &mut Cx<'_>| {
                part.forward(x, starts(cx, is_packed)?.as_ref())
            };
            self.stage(i, trains, forward, move |x| sequences(x, width))
        };
        let end = self.stage(last, trains, end, shapes)?;
        if last == 0 {
            let params = self.params(p, &end, &meshes[0])?;
            return Pipeline::first(end, &meshes[0], params);
        }
        let first = middle(0)?;
        let params = self.params(p, &first, &meshes[0])?;
        let mut pipeline = Pipeline::first(first, &meshes[0], params)?;
        for (i, mesh) in meshes.iter().enumerate().take(last).skip(1) {
            let stage = middle(i)?;
            let params = self.params(p, &stage, mesh)?;
            pipeline = pipeline.then(stage, mesh, params)?;
        }
        let params = self.params(p, &end, &meshes[last])?;
        let mut pipeline = pipeline.then(end, &meshes[last], params)?;
        if self.folder.config().tie_word_embeddings {
            pipeline.tie((0, EMBEDDING), (last, OUTPUT))?;
        }
        Ok(pipeline)
    }

    fn stage<Y: Tensors>(
        &self,
        index: usize,
        trains: bool,
        forward: impl Fn(&Part, Tensor, &mut Cx<'_>) -> CandleResult<Y> + Send + Sync + 'static,
        shapes: impl Fn(&ShapedArray) -> Shapes<Y::Arrays> + Send + Sync + 'static,
    ) -> Result<CandleStage<Part, Tensor, Y>> {
        let (config, angles) = (self.folder.config().clone(), self.angles.clone());
        let (lora, layers) = (self.lora, self.layers(index));
        let name = format!("layers {} to {}", layers.start, layers.end - 1);
        let new = move |vb| Part::new(&config, lora, &angles, layers.clone(), &vb);
        let stage = stage(new, forward)?.named(name).outputs(move |x| Ok(shapes(x)));
        match (trains, lora) {
            (false, _) => Ok(stage.frozen()),
            (true, None) => Ok(stage.split_gradients()),
            (true, Some(_)) => Ok(stage.trainable(lora::TRAINED)?.split_gradients()),
        }
    }

    /// Issues the reading of a stage's parameters, and the making of LoRA's.
    fn params<Y: Tensors>(
        &self,
        p: &mut Program,
        stage: &CandleStage<Part, Tensor, Y>,
        mesh: &Mesh,
    ) -> Result<BTreeMap<String, MpmdArray>> {
        let sharding = mesh.replicated();
        let mut params = BTreeMap::new();
        for (name, aval) in stage.shapes() {
            let array = match lora::initial(p, (&name, &aval), &sharding, self.seed) {
                Some(array) => array?,
                // Tied to the embedding of the first stage, whose values replace it.
                None if name == OUTPUT && self.folder.config().tie_word_embeddings => p
                    .array_from_fn(aval, &sharding, |_, mut view| {
                        view.zero();
                        Ok(())
                    })?,
                None => self.folder.load(p, &name, &sharding)?,
            };
            params.insert(name, array);
        }
        Ok(params)
    }
}

/// Returns the function of the last stage that computes the loss. It computes the logits of
/// `at_once` tokens of each sequence at a time.
fn loss(
    at_once: usize,
    is_packed: bool,
) -> impl Fn(&Part, Tensor, &mut Cx<'_>) -> CandleResult<Loss<Tensor>> + Send + Sync + 'static {
    move |part, x, cx| {
        let x = part.forward(x, starts(cx, is_packed)?.as_ref())?;
        let (targets, weights) = (cx.side("targets")?, side(cx, "weights", is_packed)?);
        let time = x.dim(1)?;
        let of = |start: usize| {
            let len = at_once.min(time - start);
            let logits = part.logits(&x.narrow(1, start, len)?)?;
            let weights = weights.as_ref().map(|weights| weights.narrow(1, start, len));
            let weights = weights.transpose()?;
            cross_entropy_sum(&logits, &targets.narrow(1, start, len)?, weights.as_ref())
        };
        let (mut sum, mut weight) = of(0)?;
        for start in (0..time).step_by(at_once).skip(1) {
            let (more, tokens) = of(start)?;
            (sum, weight) = ((sum + more)?, (weight + tokens)?);
        }
        Ok(Loss::new(sum, weight))
    }
}

/// Returns a side input of packed sequences.
fn side(cx: &Cx<'_>, name: &str, is_packed: bool) -> CandleResult<Option<Tensor>> {
    is_packed.then(|| cx.side(name)).transpose()
}

fn starts(cx: &Cx<'_>, is_packed: bool) -> CandleResult<Option<Tensor>> {
    side(cx, "starts", is_packed)
}

fn loss_shapes(_: &ShapedArray) -> Loss<ShapedArray> {
    Loss::new(f32s([]), f32s([]))
}

/// Returns the shape of vectors of this width for each token of `x` `[batch, time, …]`.
fn sequences(x: &ShapedArray, width: usize) -> ShapedArray {
    f32s([x.shape()[0], x.shape()[1], width])
}
