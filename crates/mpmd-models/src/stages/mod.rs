//! A model as stages of a pipeline.

pub(crate) mod forward;
pub(crate) mod publish;
pub mod score;
pub(crate) mod trainer;

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd::aval::ShapedArray;
use mpmd::candle::{CandleStage, Cx, Result as CandleResult, Tensor, Tensors, stage};
use mpmd::kernel::Shapes;
use mpmd::pipeline::{Loss, Pipeline};
use mpmd::topology::Mesh;
use mpmd::{DeviceId, Error, MpmdArray, Program, Result};

use crate::config::POSITIONS;
use crate::decoder::devices::DeviceDivision;
use crate::decoder::lora::{self, Lora};
use crate::decoder::{Decoder, DecoderPlan, EMBEDDING, OUTPUT};
use crate::division::costs::{HeldBytes, Room};
use crate::division::rules;
use crate::division::{Division, by_work, check_layers, check_memory, costs};
use crate::error::{DivisionError, InvalidSetting, of_candle, unexpected};
use crate::family::ParameterSource;
use crate::hub::adapter::Adapter;
use crate::hub::folder::{CONFIG, Folder};
use crate::inference::Inference;
use crate::inference::generator::Generator;
use crate::inference::stage_loader::{StageLoader, StageSpec};
use crate::inference::weight_store::WeightStore;
use crate::rope::RopeAngles;
use crate::stages::forward::{StageForward, loss_shapes, sequences};

/// Limit on the layers of a stage in training. Candle's backward pass recurses over the operations,
/// on the stack of the device's thread.
const MOST_TRAINED: usize = 1000;
/// Number of tokens for which logits are computed at once when no gradients are needed.
const LOGITS_AT_ONCE: usize = 512;

/// A model whose layers are divided over pipeline stages.
#[derive(Clone, Debug)]
pub struct Stages {
    folder: Folder,
    /// The layers of each stage.
    cut: Vec<Range<usize>>,
    positions: usize,
    angles: Vec<RopeAngles>,
    /// The division of each stage's layers over the stage's devices.
    over: Vec<DeviceDivision>,
    lora: Option<Lora>,
    /// The adapter from which LoRA's matrices have their first values.
    start: Option<Adapter>,
    seed: u64,
    is_packed: bool,
    /// Number of devices of the job that come before those of the stages.
    after: usize,
    weights: WeightStore,
}

impl Stages {
    /// Divides the layers over `stages` stages so that the largest work of a stage is least.
    /// `positions` is the largest number of tokens in a sequence.
    ///
    /// # Errors
    ///
    /// If the model has fewer layers than stages, or fewer positions than `positions`.
    pub fn new(folder: &Folder, stages: usize, positions: usize) -> Result<Self, DivisionError> {
        let config = folder.config();
        let file = folder.file(CONFIG);
        if config.num_hidden_layers < stages {
            let expected = format!("at least {stages}, the number of stages");
            let key = folder.key("num_hidden_layers");
            return Err(DivisionError::ModelSize {
                setting: "stages",
                why: unexpected(&file, key, expected, config.num_hidden_layers).into(),
            });
        }
        let own = config.max_position_embeddings;
        let most = config.positions();
        if positions > most {
            let expected = format!("at least {positions}, the tokens of a sequence");
            let scaled = if most == own {
                String::new()
            } else {
                format!(", scaled to {most}")
            };
            let key = folder.key(POSITIONS);
            return Err(DivisionError::ModelSize {
                setting: "positions",
                why: unexpected(&file, key, expected, format!("{own}{scaled}")).into(),
            });
        }

        let angles = config
            .ropes
            .iter()
            .map(|rope| RopeAngles::new(rope, positions));
        let angles = angles.collect::<CandleResult<_>>();
        let angles = angles.map_err(of_candle)?;
        let over = vec![DeviceDivision::ONE; stages.max(1)];
        let cut = costs(folder, &over, HeldBytes::default())?.cut(&[]);
        let cut = cut.map_err(|_| Error::kernel("no division without limits"))?;
        Ok(Self {
            folder: folder.clone(),
            cut,
            positions,
            angles,
            over,
            lora: None,
            start: None,
            seed: 0,
            is_packed: false,
            after: 0,
            weights: WeightStore::default(),
        })
    }

    /// Sets whether rows are packed sequences. If so, stages read the side inputs of
    /// [`PackedSequences`](mpmd::train::data::PackedSequences): `starts` on each stage, and
    /// `weights` for the loss on the last one.
    #[must_use]
    pub fn packed(mut self, is_packed: bool) -> Self {
        self.is_packed = is_packed;
        self
    }

    /// Leaves the job's first `devices` devices free. The stages are on the devices after them.
    #[must_use]
    pub fn after(mut self, devices: usize) -> Self {
        self.after = devices;
        self
    }

    /// Adds LoRA's matrices to the projections, and trains only these matrices. Their first values
    /// depend on `seed`. With `None` all parameters are trained.
    #[must_use]
    pub fn lora(mut self, lora: Option<Lora>, seed: u64) -> Self {
        self.lora = lora;
        self.seed = seed;
        self
    }

    /// Trains an adapter further: as [`lora`](Self::lora) with its rank and alpha, and with its
    /// matrices as first values. Projections beside which it has none begin as those of a new
    /// adapter.
    ///
    /// # Errors
    ///
    /// If the adapter has matrices beside other weights than projections of attention and MLP, of
    /// other shapes, or of another rank or alpha than its own.
    pub fn continue_adapter(mut self, adapter: &Adapter, seed: u64) -> Result<Self> {
        let has_experts = self.folder.config().experts.is_some();
        for (weight, matrices) in adapter.matrices() {
            let is_projection = |(name, source): &(&str, &ParameterSource)| {
                let module = name.strip_suffix(lora::WEIGHT).unwrap_or(name);
                // MLPs of models with experts have no matrices of LoRA.
                let is_trained = !has_experts || module.contains(".self_attn.");
                source.name == weight && is_trained && module.ends_with("_proj.")
            };
            let Some((_, source)) = self.folder.sources().find(is_projection) else {
                let expected = "a projection of attention or MLP of the model beside it";
                return Err(adapter.unexpected(weight, expected, "none"));
            };
            self.folder
                .check_adapter(adapter, weight, matrices, source.is_transposed)?;
        }
        self.lora = Some(adapter.lora());
        self.start = Some(adapter.clone());
        self.seed = seed;

        // Shows here what would else fail in the process of one stage.
        for (name, _) in self.folder.sources() {
            let module = name.strip_suffix(lora::WEIGHT).unwrap_or(name);
            self.first_values(&format!("{module}{}", lora::MATRICES[0]))?;
        }
        Ok(self)
    }

    /// Divides each layer of a stage over several devices: its heads, its MLP, and the vocabulary.
    /// `devices` has one number for each stage, or one for all; the default is 1. Results depend on
    /// it in their last bits.
    ///
    /// The layers must be divided over stages afterwards: see [`Stages::divide`].
    ///
    /// # Errors
    ///
    /// If `devices` has a wrong length, or a number does not divide the heads or the MLPs.
    pub fn tensor_parallel(mut self, devices: &[usize]) -> Result<Self, DivisionError> {
        let each = self.each("tensor_parallel", devices)?;
        for (over, devices) in self.over.iter_mut().zip(each) {
            *over = DeviceDivision {
                expert: over.expert,
                ..rules::over(&self.folder, devices)?
            };
        }
        Ok(self)
    }

    /// Divides the experts of each stage over several devices. Each device has some experts of
    /// every layer. `devices` has one number for each stage, or one for all; the default is 1.
    /// Results do not depend on it.
    ///
    /// The layers must be divided over stages afterwards: see [`Stages::divide`].
    ///
    /// # Errors
    ///
    /// If `devices` has a wrong length, or a number is not a power of two that divides the number
    /// of experts.
    pub fn expert_parallel(mut self, devices: &[usize]) -> Result<Self, DivisionError> {
        let each = self.each("expert_parallel", devices)?;
        for (over, devices) in self.over.iter_mut().zip(each) {
            over.expert = rules::over_experts(&self.folder, devices)?;
        }
        Ok(self)
    }

    /// Returns the value of a setting for each stage. `numbers` has one value for each stage, or
    /// one for all.
    fn each(&self, setting: &'static str, numbers: &[usize]) -> Result<Vec<usize>, InvalidSetting> {
        let stages = self.cut.len();
        match *numbers {
            [all] => Ok(vec![all; stages]),
            _ if numbers.len() == stages => Ok(numbers.to_vec()),
            _ => {
                let expected = format!("{stages} numbers, one for each stage, or one for all");
                Err(InvalidSetting::new(setting, expected, numbers.len()))
            }
        }
    }

    /// Returns the number of devices of each rank. `rank_of` maps a stage to its rank.
    ///
    /// # Errors
    ///
    /// If stages of one rank have different numbers of devices.
    pub fn devices(&self, rank_of: impl Fn(usize) -> usize) -> Result<Vec<usize>, InvalidSetting> {
        let mut ranks = BTreeMap::<usize, usize>::new();
        for (stage, over) in self.over.iter().enumerate() {
            let rank = rank_of(stage);
            let devices = *ranks.entry(rank).or_insert(over.devices());
            if devices != over.devices() {
                let expected = format!("{devices} for stage {stage}, as for others of rank {rank}");
                return Err(InvalidSetting::new(
                    "tensor_parallel",
                    expected,
                    over.devices(),
                ));
            }
        }
        Ok(ranks.into_values().collect())
    }

    /// Returns the mesh of each stage. The devices are numbered in this order: those that
    /// [`after`](Self::after) leaves free, those of rank 0, those of rank 1, and so on. `rank_of`
    /// maps a stage to its rank. Stages of one rank share devices.
    ///
    /// # Errors
    ///
    /// As for [`Stages::devices`].
    pub fn meshes(&self, rank_of: impl Fn(usize) -> usize) -> Result<Vec<Mesh>> {
        let devices = self.devices(&rank_of)?;
        let stages = self.over.iter().enumerate();
        let meshes = stages.map(|(stage, over)| {
            let first = self.after + devices[..rank_of(stage)].iter().sum::<usize>();
            let own = first as u32..(first + over.devices()) as u32;
            Ok(Mesh::new(&over.axes(), own.map(DeviceId).collect())?)
        });
        meshes.collect()
    }

    /// Returns the bytes that one cache block takes in all layers on a device: the largest number
    /// over the stages.
    pub fn block_bytes(&self) -> u64 {
        let one = HeldBytes::inference(
            &self.folder,
            Room {
                blocks: 1,
                sequences: 1,
            },
            false,
        )
        .layer;
        let stages = self.cut.iter().zip(&self.over);
        stages
            .map(|(layers, over)| layers.len() as u64 * one.div_ceil(over.tensor as u64))
            .max()
            .unwrap_or(one)
    }

    /// Returns tables for users: each stage's parameters, and their division over the stage's
    /// devices.
    ///
    /// # Errors
    ///
    /// If the devices do not divide a parameter evenly.
    pub fn show_sharding(&self) -> Result<String> {
        let mut text = String::new();
        for (index, mesh) in self.meshes(|stage| stage)?.iter().enumerate() {
            let stage = self.stage(
                index,
                mesh,
                self.lora.is_some(),
                |part: &Decoder, x: Tensor, cx: &mut Cx<'_>| part.forward(x, None, cx),
                |x: &ShapedArray| x.clone(),
            )?;
            let table = rules::divided(self.folder.config(), mesh, stage.shapes())?;

            let Range { start, end } = self.layers(index);
            let of = format!("stage {index}, layers {start} to {}", end - 1);
            let devices = match mesh.devices().len() {
                1 => "on 1 device".to_owned(),
                several => format!("over {several} devices"),
            };
            text += &format!("{of}, {devices}:\n{table}\n");
        }
        Ok(text)
    }

    /// Divides the layers over the stages, and each layer over its stage's devices. A device's
    /// memory is limited by `division.memory`; `held` has the bytes that parameters and layers
    /// take.
    ///
    /// # Errors
    ///
    /// If the given layers do not contain each layer of the model exactly once. If the devices of a
    /// stage have too little memory. As for [`Stages::tensor_parallel`] and
    /// [`Stages::expert_parallel`].
    pub fn divide(mut self, division: &Division, held: HeldBytes) -> Result<Self, DivisionError> {
        let stages = self.cut.len();
        let limits = &division.memory;
        if !limits.is_empty() && limits.len() != stages {
            let expected = format!("{stages} sizes, one for each stage");
            return Err(InvalidSetting::new("memory", expected, limits.len()).into());
        }
        if !division.tensor_parallel.is_empty() {
            self = self.tensor_parallel(&division.tensor_parallel)?;
        }
        if !division.expert_parallel.is_empty() {
            self = self.expert_parallel(&division.expert_parallel)?;
        }

        let costs = costs(&self.folder, &self.over, held)?;
        self.cut = match division.layers.is_empty() {
            true => by_work(&costs, limits)?,
            false => {
                let layers = self.folder.config().num_hidden_layers;
                check_layers(&division.layers, layers, stages)?;
                check_memory(&costs, &division.layers, limits)?;
                division.layers.clone()
            }
        };
        self.check_experts()?;
        Ok(self)
    }

    /// Returns an error if a stage should divide its experts but has no layer with experts.
    fn check_experts(&self) -> Result<(), InvalidSetting> {
        let layers = &self.folder.config().layers;
        for (stage, (range, over)) in self.cut.iter().zip(&self.over).enumerate() {
            let has_experts = layers[range.clone()].iter().any(|layer| layer.has_experts);
            if over.expert > 1 && !has_experts {
                let expected = format!("1 for stage {stage}, whose layers have no experts");
                return Err(InvalidSetting::new(
                    "expert_parallel",
                    expected,
                    over.expert,
                ));
            }
        }
        Ok(())
    }

    /// Returns an error if a stage has too many layers for training.
    ///
    /// # Errors
    ///
    /// If a stage has more than 1,000 layers. The message has the number of stages that would be
    /// enough.
    pub fn check_trained(&self) -> Result<()> {
        let most = self.cut.iter().map(Range::len).max().unwrap_or_default();
        if most <= MOST_TRAINED {
            return Ok(());
        }
        let layers = self.folder.config().num_hidden_layers;
        let stages = layers.div_ceil(MOST_TRAINED);
        Err(unexpected(
            &self.folder.file(CONFIG),
            self.folder.key("num_hidden_layers"),
            format!("at most {MOST_TRAINED} in each stage of a training ({stages} stages or more)"),
            format!("{layers}, and {most} of them in a stage"),
        ))
    }

    /// Returns the layers of a stage.
    ///
    /// # Panics
    ///
    /// If there is no such stage.
    pub fn layers(&self, stage: usize) -> Range<usize> {
        self.cut[stage].clone()
    }

    /// Creates a pipeline for training, and issues the loading of the weights. `meshes` has the
    /// mesh of each stage, as from [`Stages::meshes`]. Meshes without the axes of tensor and expert
    /// parallelism replicate the parameters.
    ///
    /// The input is tokens `[batch, time]`. The last stage reads the following tokens as the side
    /// input `targets`. The loss is the sum over all tokens, in nats.
    ///
    /// # Errors
    ///
    /// As for [`Folder::check_training`], [`Folder::load`] and [`Pipeline::then`], and if a stage
    /// has more than 1,000 layers.
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
    ) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
        self.folder.check_training()?;
        self.check_trained()?;
        self.pipeline(
            p,
            meshes,
            true,
            self.forward(true).loss(usize::MAX),
            loss_shapes,
        )
    }

    /// Creates a pipeline that computes the losses of [`Stages::training`] without gradients.
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
        self.pipeline(
            p,
            meshes,
            false,
            self.forward(false).loss(LOGITS_AT_ONCE),
            loss_shapes,
        )
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
        let all = self.forward(false);
        let logits =
            move |part: &Decoder, x, cx: &mut Cx<'_>| part.logits(&all.run(part, x, cx)?.0, cx);
        self.pipeline(p, meshes, false, logits, move |x| sequences(x, tokens))
    }

    /// Creates a generator, and issues the loading of the weights. Its sequences have up to
    /// `positions` tokens. Rotary scalings that depend on the sequence length use `positions`.
    ///
    /// A device holds each weight once. With `in_half` the matrices are in `bf16`; all other
    /// weights are in f32. Sums are always in f32.
    ///
    /// # Errors
    ///
    /// As for [`Pipeline::then`]. If a file cannot be read, or a device has too little memory, the
    /// first call fails instead.
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn generator(&self, p: &mut Program, meshes: &[Mesh], in_half: bool) -> Result<Generator> {
        let room = Room::for_one(self.positions);
        Ok(Generator::new(
            self.inference(p, meshes, room, in_half)?,
            self.positions,
        ))
    }

    /// Creates an inference, and issues the loading of the weights, as [`Stages::generator`] does.
    /// Its caches have the capacity `room`.
    ///
    /// # Errors
    ///
    /// As for [`Stages::generator`].
    ///
    /// # Panics
    ///
    /// If there are fewer meshes than stages.
    pub fn inference(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        room: Room,
        in_half: bool,
    ) -> Result<Inference> {
        self.folder.compare(p)?;
        let ropes = &self.folder.config().ropes;
        let angles = ropes
            .iter()
            .map(|rope| RopeAngles::fixed(rope, self.positions));
        let angles = angles.collect::<CandleResult<Vec<_>>>();
        let angles = angles.map_err(of_candle)?;

        let meshes = &meshes[..self.cut.len()];
        let mut loaders = Vec::new();
        for (layers, mesh) in self.cut.iter().zip(meshes) {
            let device = mesh.devices().first();
            let kind = device.and_then(|device| p.topology().kind_of(*device));
            // Routing, products of experts and parts of matrices are for CPUs.
            let on_device = kind
                .is_some_and(|kind| kind.is_accelerator() && mpmd::candle::computes_on(kind))
                && mesh.devices().len() == 1
                && self.folder.config().experts.is_none();
            let spec = StageSpec {
                layers: layers.clone(),
                mesh,
                room,
                positions: self.positions,
                in_half,
                on_device,
                weights: &self.weights,
            };
            loaders.push(StageLoader::new(&self.folder, &angles, spec)?);
        }
        Inference::new(p, loaders, meshes, room)
    }

    /// Returns the forward passes of the stages, for training if `trains`.
    fn forward(&self, trains: bool) -> StageForward {
        StageForward::new(self.folder.config(), trains, self.is_packed)
    }

    /// Creates a pipeline. `end` computes the last stage, and `shapes` computes the shapes of its
    /// outputs.
    fn pipeline<Y: Tensors>(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        trains: bool,
        end: impl Fn(&Decoder, Vec<Tensor>, &mut Cx<'_>) -> CandleResult<Y> + Send + Sync + 'static,
        shapes: impl Fn(&ShapedArray) -> Shapes<Y::Arrays> + Send + Sync + 'static,
    ) -> Result<Pipeline<MpmdArray, Y::Arrays>> {
        self.folder.compare(p)?;
        let last = self.cut.len() - 1;
        let width = self.folder.config().hidden_size;
        let all = self.forward(trains);
        let between = move |x: &ShapedArray| all.shapes(x, width);
        if last == 0 {
            let end = move |part: &Decoder, x, cx: &mut Cx<'_>| end(part, vec![x], cx);
            let end = self.stage(0, &meshes[0], trains, end, shapes)?;
            let params = self.params(p, &end, &meshes[0])?;
            return Pipeline::first(end, &meshes[0], params);
        }

        let first = move |part: &Decoder, x, cx: &mut Cx<'_>| all.forward(part, vec![x], cx);
        let first = self.stage(0, &meshes[0], trains, first, between)?;
        let params = self.params(p, &first, &meshes[0])?;
        let mut pipeline = Pipeline::first(first, &meshes[0], params)?;

        for (i, mesh) in meshes.iter().enumerate().take(last).skip(1) {
            let middle = move |part: &Decoder, x, cx: &mut Cx<'_>| all.forward(part, x, cx);
            let shapes = move |x: &Vec<ShapedArray>| between(&x[0]);
            let stage = self.stage(i, mesh, trains, middle, shapes)?;
            let params = self.params(p, &stage, mesh)?;
            pipeline = pipeline.then(stage, mesh, params)?;
        }

        let shapes = move |x: &Vec<ShapedArray>| shapes(&x[0]);
        let end = self.stage(last, &meshes[last], trains, end, shapes)?;
        let params = self.params(p, &end, &meshes[last])?;
        let mut pipeline = pipeline.then(end, &meshes[last], params)?;
        if self.folder.config().tie_word_embeddings {
            pipeline.tie((0, EMBEDDING), (last, OUTPUT))?;
        }
        Ok(pipeline)
    }

    fn stage<X: Tensors, Y: Tensors>(
        &self,
        index: usize,
        mesh: &Mesh,
        trains: bool,
        forward: impl Fn(&Decoder, X, &mut Cx<'_>) -> CandleResult<Y> + Send + Sync + 'static,
        shapes: impl Fn(&Shapes<X::Arrays>) -> Shapes<Y::Arrays> + Send + Sync + 'static,
    ) -> Result<CandleStage<Decoder, X, Y>> {
        let config = self.folder.config().clone();
        let angles = self.angles.clone();
        let lora = self.lora;
        let layers = self.layers(index);
        let over = DeviceDivision::of(mesh)?;
        let name = format!("layers {} to {}", layers.start, layers.end - 1);
        let new = move |vb| {
            let plan = DecoderPlan {
                config: &config,
                lora,
                angles: &angles,
                over,
            };
            Decoder::new(plan, layers.clone(), &vb)
        };
        let stage = stage(new, forward)?
            .named(name)
            .outputs(move |x| Ok(shapes(x)));

        // Routing and products of experts are for CPUs.
        let has_experts = self.folder.config().layers[self.layers(index)]
            .iter()
            .any(|it| it.has_experts);
        let stage = if has_experts { stage.on_host() } else { stage };
        match (trains, lora) {
            (false, _) => Ok(stage.frozen()),
            (true, None) => Ok(stage.split_gradients()),
            (true, Some(_)) => Ok(stage.trainable(lora::TRAINED)?.split_gradients()),
        }
    }

    /// Issues the loading of a stage's parameters, and the creation of LoRA's matrices.
    fn params<X: Tensors, Y: Tensors>(
        &self,
        p: &mut Program,
        stage: &CandleStage<Decoder, X, Y>,
        mesh: &Mesh,
    ) -> Result<BTreeMap<String, MpmdArray>> {
        let shardings = rules::shardings(self.folder.config(), mesh, stage.shapes())?;
        let mut params = BTreeMap::new();
        for (name, aval) in stage.shapes() {
            let sharding = &shardings[&name];
            let first = match self.first_values(&name)? {
                Some(values) => Some(lora::array_of(p, &aval, sharding, values)),
                None => lora::initial(p, &name, &aval, sharding, self.seed),
            };
            let array = match first {
                Some(array) => array?,
                // Tied to the embedding of the first stage, whose values replace it.
                None if name == OUTPUT && self.folder.config().tie_word_embeddings => p
                    .array_from_fn(aval, sharding, |_, mut view| {
                        view.zero();
                        Ok(())
                    })?,
                None => self.folder.load(p, &name, sharding)?,
            };
            params.insert(name, array);
        }
        Ok(params)
    }

    /// Returns the first values of a matrix of LoRA that the adapter has. `None` without an
    /// adapter, and for other parameters.
    fn first_values(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(adapter) = &self.start else {
            return Ok(None);
        };
        let mut ends = lora::MATRICES.iter().enumerate();
        let found = ends.find_map(|(which, end)| Some((which, name.strip_suffix(*end)?)));
        let Some((which, start)) = found else {
            return Ok(None);
        };

        let weight = format!("{start}{}", lora::WEIGHT);
        let own = self.folder.sources().find(|(name, _)| *name == weight);
        let Some((_, source)) = own else {
            return Ok(None);
        };
        let parts = self.folder.sources();
        let parts = parts.filter(|(_, part)| part.name == source.name);
        let parts: Vec<&str> = parts.map(|(name, _)| name).collect();
        let place = parts.iter().position(|part| *part == weight).unwrap_or(0);
        let [a, b] = match adapter.start(source, place, parts.len())? {
            Some(matrices) => matrices,
            None => return Ok(None),
        };
        Ok(Some(if which == 0 { a } else { b }))
    }
}
