//! A model as stages of a pipeline.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd::aval::ShapedArray;
use mpmd::candle::{CandleStage, Cx, Result as CandleResult, Tensor, Tensors, stage};
use mpmd::kernel::Shapes;
use mpmd::pipeline::{Loss, Pipeline};
use mpmd::topology::Mesh;
use mpmd::{DeviceId, Error, MpmdArray, Program, Result};
use mpmd_base::bytes_text;

use crate::config::POSITIONS;
use crate::cut::{Cost, Costs, CutArgs, Held, Layers, Room, TooLittle};
use crate::decoder::{EMBEDDING, OUTPUT, Part, Plan};
use crate::divide;
use crate::folder::{CONFIG, Folder};
use crate::forward::{Forward, loss_shapes, sequences};
use crate::generator::Generator;
use crate::inference::Inference;
use crate::load::{Load, Weights};
use crate::lora::{self, Lora};
use crate::over::Over;
use crate::rope::Angles;
use crate::{unexpected, wrong};

/// Limit on the number of layers in a stage that is trained: candle walks over the operations of a
/// pass by recursion, on the stack of the device's thread.
const MOST_TRAINED: usize = 1000;
/// Number of tokens for which logits are computed at once, where no gradients are needed.
const LOGITS_AT_ONCE: usize = 512;

/// A model that is divided over stages.
#[derive(Clone, Debug)]
pub struct Stages {
    folder: Folder,
    /// The layers of each stage.
    cut: Vec<Range<usize>>,
    positions: usize,
    angles: Vec<Angles>,
    /// The division of each stage's layers over its devices.
    over: Vec<Over>,
    lora: Option<Lora>,
    seed: u64,
    is_packed: bool,
    /// The number of devices of the job before those of the stages.
    after: usize,
    weights: Weights,
}

impl Stages {
    /// Divides the layers of a model over `stages` stages, so that the stage with most work has as
    /// little as possible. `positions` is the largest number of tokens in a sequence.
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
        let over = vec![Over::ONE; stages.max(1)];
        let cut = costs(folder, &over, Held::default())?.cut(&[]);
        let cut = cut.map_err(|_| Error::kernel("no division without limits"))?;
        Ok(Self {
            folder: folder.clone(),
            cut,
            positions,
            angles,
            over,
            lora: None,
            seed: 0,
            is_packed: false,
            after: 0,
            weights: Weights::default(),
        })
    }

    /// Has the stages read the side inputs of [`Packed`](mpmd::train::data::Packed): `starts`, and
    /// the last stage `weights` for its loss.
    #[must_use]
    pub fn packed(mut self, is_packed: bool) -> Self {
        self.is_packed = is_packed;
        self
    }

    /// Leaves the first devices of the job to others.
    #[must_use]
    pub fn after(mut self, devices: usize) -> Self {
        self.after = devices;
        self
    }

    /// Adds matrices of LoRA to all projections. Only they are trained. Their initial values depend
    /// on the seed.
    #[must_use]
    pub fn lora(mut self, lora: Option<Lora>, seed: u64) -> Self {
        (self.lora, self.seed) = (lora, seed);
        self
    }

    /// Divides the layers of each stage over several devices: heads, MLPs, and tokens of the
    /// vocabulary. There is one number for each stage, or one for all; by default it is 1. Results
    /// depend on it in their last bits.
    ///
    /// The layers are to be divided over stages afterwards: see [`Stages::cut`].
    ///
    /// # Errors
    ///
    /// If the numbers are not as many as the stages, or do not divide the heads or the MLPs.
    pub fn tensor_parallel(mut self, devices: &[usize]) -> Result<Self> {
        let each = self.each("--tensor-parallel", devices)?;
        for (over, devices) in self.over.iter_mut().zip(each) {
            *over = Over { expert: over.expert, ..divide::over(&self.folder, devices)? };
        }
        Ok(self)
    }

    /// Divides the experts of each stage over several devices, each of which has some of all
    /// layers. There is one number for each stage, or one for all; by default it is 1. Results do
    /// not depend on it.
    ///
    /// The layers are to be divided over stages afterwards: see [`Stages::cut`].
    ///
    /// # Errors
    ///
    /// If the numbers are not as many as the stages, or one is no power of two that divides the
    /// number of experts.
    pub fn expert_parallel(mut self, devices: &[usize]) -> Result<Self> {
        let each = self.each("--expert-parallel", devices)?;
        for (over, devices) in self.over.iter_mut().zip(each) {
            over.expert = divide::over_experts(&self.folder, devices)?;
        }
        Ok(self)
    }

    /// Returns the number of an option for each stage. There is one for each, or one for all.
    fn each(&self, option: &str, numbers: &[usize]) -> Result<Vec<usize>> {
        let stages = self.cut.len();
        match *numbers {
            [all] => Ok(vec![all; stages]),
            _ if numbers.len() == stages => Ok(numbers.to_vec()),
            _ => {
                let expected = format!("{stages} numbers, one for each stage, or one for all");
                Err(wrong(option, expected, numbers.len()))
            }
        }
    }

    /// Returns the number of devices of each rank. `rank_of` returns the rank of a stage.
    ///
    /// # Errors
    ///
    /// If stages of one rank have unequal numbers.
    pub fn devices(&self, rank_of: impl Fn(usize) -> usize) -> Result<Vec<usize>> {
        let mut ranks = BTreeMap::<usize, usize>::new();
        for (stage, over) in self.over.iter().enumerate() {
            let rank = rank_of(stage);
            let devices = *ranks.entry(rank).or_insert(over.devices());
            if devices != over.devices() {
                let expected = format!("{devices} for stage {stage}, as for others of rank {rank}");
                let options = "--tensor-parallel, --expert-parallel";
                return Err(wrong(options, expected, over.devices()));
            }
        }
        Ok(ranks.into_values().collect())
    }

    /// Returns the mesh of each stage. The devices of the job are those that are
    /// [left to others](Self::after), those of rank 0, then those of rank 1, and so on. `rank_of`
    /// returns the rank of a stage.
    ///
    /// # Errors
    ///
    /// As for [`Stages::devices`].
    pub fn meshes(&self, rank_of: impl Fn(usize) -> usize) -> Result<Vec<Mesh>> {
        let devices = self.devices(&rank_of)?;
        let mesh = |(stage, over): (usize, &Over)| {
            let first = self.after + devices[..rank_of(stage)].iter().sum::<usize>();
            let own = first as u32..(first + over.devices()) as u32;
            Ok(Mesh::new(&over.axes(), own.map(DeviceId).collect())?)
        };
        self.over.iter().enumerate().map(mesh).collect()
    }

    /// Returns the bytes that a block of keys and values takes on a device of the stage with most
    /// layers for its devices.
    pub fn block_bytes(&self) -> u64 {
        let one = Held::inference(&self.folder, Room { blocks: 1, sequences: 1 }, false).layer;
        let of = |(layers, over): (&Range<usize>, &Over)| {
            layers.len() as u64 * one.div_ceil(over.tensor as u64)
        };
        self.cut.iter().zip(&self.over).map(of).max().unwrap_or(one)
    }

    /// Returns tables of each stage's parameters, and of their division over its devices.
    ///
    /// # Errors
    ///
    /// If the devices do not divide a parameter evenly.
    pub fn show_sharding(&self) -> Result<String> {
        let mut text = String::new();
        for (index, mesh) in self.meshes(|stage| stage)?.iter().enumerate() {
            let stage = self.stage(
                (index, mesh),
                self.lora.is_some(),
                |part: &Part, x: Tensor, cx: &mut Cx<'_>| part.forward(x, None, cx),
                |x: &ShapedArray| x.clone(),
            )?;
            let table = divide::divided(self.folder.config(), mesh, stage.shapes())?;
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

    /// Divides the layers as the arguments say. A stage may hold at most its bytes of
    /// `args.memory`.
    ///
    /// # Errors
    ///
    /// If the given layers are not those of the model, each once, or a device of some stage has too
    /// little memory: with the bytes that it needs. As for [`Stages::tensor_parallel`].
    pub fn cut(mut self, args: &CutArgs, held: Held) -> Result<Self> {
        let (stages, limits) = (self.cut.len(), &args.memory);
        let layers = self.folder.config().num_hidden_layers;
        if !limits.is_empty() && limits.len() != stages {
            let expected = format!("{stages} sizes, one for each stage");
            return Err(wrong("--memory", expected, limits.len()));
        }
        if !args.tensor_parallel.is_empty() {
            self = self.tensor_parallel(&args.tensor_parallel)?;
        }
        if !args.expert_parallel.is_empty() {
            self = self.expert_parallel(&args.expert_parallel)?;
        }
        let costs = costs(&self.folder, &self.over, held)?;
        if args.cut.is_empty() {
            self.cut = match costs.cut(limits) {
                Ok(cut) => cut,
                Err(TooLittle { stage, needs }) => {
                    let limit = limits.get(stage).copied().unwrap_or_default();
                    let more = bytes_text(needs.saturating_sub(limit));
                    return Err(Error::Environment(format!(
                        "--memory: stage {stage} needs {}, and has {}: {more} more, or more stages",
                        bytes_text(needs),
                        bytes_text(limit)
                    )));
                }
            };
            return self.with_experts();
        }
        let mut end = 0;
        for (stage, range) in args.cut.iter().enumerate() {
            if range.start != end {
                let expected = format!("stage {stage} to begin at layer {end}");
                return Err(wrong("--cut", expected, format!("{range:?}")));
            }
            end = range.end;
            let bytes = costs.cost(range.clone(), stage).bytes;
            if let Some(limit) = limits.get(stage).filter(|limit| bytes > **limit) {
                let expected = format!("{} for stage {stage}", bytes_text(bytes));
                return Err(wrong("--memory", expected, bytes_text(*limit)));
            }
        }
        if end != layers {
            return Err(wrong("--cut", format!("{layers} layers in all"), end));
        }
        self.cut.clone_from(&args.cut);
        self.with_experts()
    }

    /// Returns an error if a stage without experts is to divide them.
    fn with_experts(self) -> Result<Self> {
        let layers = &self.folder.config().layers;
        let has_none =
            |range: &Range<usize>| !layers[range.clone()].iter().any(|it| it.has_experts);
        let mut stages = self.cut.iter().zip(&self.over).enumerate();
        match stages.find(|(_, (range, over))| over.expert > 1 && has_none(range)) {
            None => Ok(self),
            Some((stage, (_, over))) => {
                let expected = format!("1 for stage {stage}, whose layers have no experts");
                Err(wrong("--expert-parallel", expected, over.expert))
            }
        }
    }

    /// Checks that each stage has few enough layers for a training.
    ///
    /// # Errors
    ///
    /// If one has too many: with the number of stages that are enough.
    pub(crate) fn check_trained(&self) -> Result<()> {
        let most = self.cut.iter().map(Range::len).max().unwrap_or_default();
        if most <= MOST_TRAINED {
            return Ok(());
        }
        let layers = self.folder.config().num_hidden_layers;
        let stages = layers.div_ceil(MOST_TRAINED);
        Err(unexpected(
            &self.folder.path().join(CONFIG),
            self.folder.key("num_hidden_layers"),
            format!(
                "at most {MOST_TRAINED} in each stage of a training (--stages {stages} or more)"
            ),
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

    /// Creates a pipeline for training, and issues the reading of the weights. `meshes` are those
    /// of the stages, in order: those of [`Stages::meshes`], or meshes without axes of these names,
    /// over which the parameters are replicated.
    ///
    /// Its input are tokens `[batch, time]`. The last stage reads the following tokens as the side
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
        self.pipeline(p, meshes, true, self.forward(true).loss(usize::MAX), loss_shapes)
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
        self.pipeline(p, meshes, false, self.forward(false).loss(LOGITS_AT_ONCE), loss_shapes)
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
            move |part: &Part, x, cx: &mut Cx<'_>| part.logits(&all.run(part, x, cx)?.0, cx);
        self.pipeline(p, meshes, false, logits, move |x| sequences(x, tokens))
    }

    /// Creates a generator, and issues the reading of the weights. Its sequences have up to
    /// `positions` tokens; scalings of the rotary embedding that depend on the length take that of
    /// `positions`. A device keeps the weights once, in f32, or in `bf16` if `in_half` is set. Sums
    /// are in f32 in any case.
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
        Ok(Generator::new(self.inference(p, meshes, room, in_half)?, self.positions))
    }

    /// Creates an inference, and issues the reading of the weights, as [`Stages::generator`] does.
    /// There is `room` for sequences.
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
        let angles = ropes.iter().map(|rope| Angles::fixed(rope, self.positions));
        let angles = angles.collect::<CandleResult<Vec<_>>>();
        let angles = angles.map_err(|why| Error::kernel(why.to_string()))?;
        let meshes = &meshes[..self.cut.len()];
        let load = |(layers, mesh): (&Range<usize>, &Mesh)| {
            let place = (layers.clone(), mesh);
            let device = mesh.devices().first().and_then(|device| p.topology().kind_of(*device));
            // Routing, products of experts and parts of matrices are for CPUs.
            let on_device = device
                .is_some_and(|kind| kind.is_accelerator() && mpmd::candle::computes_on(kind))
                && mesh.devices().len() == 1
                && self.folder.config().experts.is_none();
            let kind = (in_half, on_device, &self.weights);
            Load::new(&self.folder, &angles, place, (room, self.positions), kind)
        };
        let loads = self.cut.iter().zip(meshes).map(load).collect::<Result<_>>()?;
        Inference::new(p, loads, meshes, room)
    }

    /// Returns the forward passes of the stages.
    fn forward(&self, trains: bool) -> Forward {
        Forward::new(self.folder.config(), trains, self.is_packed)
    }

    /// Creates a pipeline. `end` computes the last stage, and `shapes` the shapes of its results
    /// from those of the tokens.
    fn pipeline<Y: Tensors>(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        trains: bool,
        end: impl Fn(&Part, Vec<Tensor>, &mut Cx<'_>) -> CandleResult<Y> + Send + Sync + 'static,
        shapes: impl Fn(&ShapedArray) -> Shapes<Y::Arrays> + Send + Sync + 'static,
    ) -> Result<Pipeline<MpmdArray, Y::Arrays>> {
        self.folder.compare(p)?;
        let (last, width) = (self.cut.len() - 1, self.folder.config().hidden_size);
        let all = self.forward(trains);
        let between = move |x: &ShapedArray| all.shapes(x, width);
        if last == 0 {
            let end = move |part: &Part, x, cx: &mut Cx<'_>| end(part, vec![x], cx);
            let end = self.stage((0, &meshes[0]), trains, end, shapes)?;
            let params = self.params(p, &end, &meshes[0])?;
            return Pipeline::first(end, &meshes[0], params);
        }
        let first = move |part: &Part, x, cx: &mut Cx<'_>| all.forward(part, vec![x], cx);
        let first = self.stage((0, &meshes[0]), trains, first, between)?;
        let params = self.params(p, &first, &meshes[0])?;
        let mut pipeline = Pipeline::first(first, &meshes[0], params)?;
        for (i, mesh) in meshes.iter().enumerate().take(last).skip(1) {
            let middle = move |part: &Part, x, cx: &mut Cx<'_>| all.forward(part, x, cx);
            let shapes = move |x: &Vec<ShapedArray>| between(&x[0]);
            let stage = self.stage((i, mesh), trains, middle, shapes)?;
            let params = self.params(p, &stage, mesh)?;
            pipeline = pipeline.then(stage, mesh, params)?;
        }
        let shapes = move |x: &Vec<ShapedArray>| shapes(&x[0]);
        let end = self.stage((last, &meshes[last]), trains, end, shapes)?;
        let params = self.params(p, &end, &meshes[last])?;
        let mut pipeline = pipeline.then(end, &meshes[last], params)?;
        if self.folder.config().tie_word_embeddings {
            pipeline.tie((0, EMBEDDING), (last, OUTPUT))?;
        }
        Ok(pipeline)
    }

    fn stage<X: Tensors, Y: Tensors>(
        &self,
        (index, mesh): (usize, &Mesh),
        trains: bool,
        forward: impl Fn(&Part, X, &mut Cx<'_>) -> CandleResult<Y> + Send + Sync + 'static,
        shapes: impl Fn(&Shapes<X::Arrays>) -> Shapes<Y::Arrays> + Send + Sync + 'static,
    ) -> Result<CandleStage<Part, X, Y>> {
        let (config, angles) = (self.folder.config().clone(), self.angles.clone());
        let (lora, layers, over) = (self.lora, self.layers(index), Over::of(mesh)?);
        let name = format!("layers {} to {}", layers.start, layers.end - 1);
        let new = move |vb| {
            let plan = Plan { config: &config, lora, angles: &angles, over };
            Part::new(plan, layers.clone(), &vb)
        };
        let stage = stage(new, forward)?.named(name).outputs(move |x| Ok(shapes(x)));
        // Routing and products of experts are for CPUs.
        let has_experts =
            self.folder.config().layers[self.layers(index)].iter().any(|it| it.has_experts);
        let stage = if has_experts { stage.on_host() } else { stage };
        match (trains, lora) {
            (false, _) => Ok(stage.frozen()),
            (true, None) => Ok(stage.split_gradients()),
            (true, Some(_)) => Ok(stage.trainable(lora::TRAINED)?.split_gradients()),
        }
    }

    /// Issues the reading of a stage's parameters, and the making of LoRA's.
    fn params<X: Tensors, Y: Tensors>(
        &self,
        p: &mut Program,
        stage: &CandleStage<Part, X, Y>,
        mesh: &Mesh,
    ) -> Result<BTreeMap<String, MpmdArray>> {
        let shardings = divide::shardings(self.folder.config(), mesh, stage.shapes())?;
        let mut params = BTreeMap::new();
        for (name, aval) in stage.shapes() {
            let sharding = &shardings[&name];
            let array = match lora::initial(p, (&name, &aval), sharding, self.seed) {
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
}

/// Returns the costs of the layers on a device of each stage, and of what the first and the last
/// stage have beside. `over` is the division of each stage over its devices.
fn costs(folder: &Folder, over: &[Over], held: Held) -> Result<Costs> {
    let (count, mut stages) = (over.len(), Vec::<(Over, Layers)>::new());
    for over in over.iter().copied() {
        let known = stages.iter().find(|(other, _)| *other == over);
        let costs = match known {
            Some((_, costs)) => costs.clone(),
            None => costs_on(folder, over, count, held)?,
        };
        stages.push((over, costs));
    }
    Ok(Costs(stages.into_iter().map(|(_, costs)| costs).collect()))
}

/// Returns the costs of the layers on each of these devices, for one of `stages` stages. A layer's
/// work is the number of its parameters, of experts of those that a token takes. Of the embedding a
/// token reads a row. Where there are caches, tokens of prompts need no logits: a third of all
/// tokens is taken to be such.
fn costs_on(folder: &Folder, over: Over, stages: usize, held: Held) -> Result<Layers> {
    let config = folder.config();
    let mesh = Mesh::new(&over.axes(), (0..over.devices() as u32).map(DeviceId).collect())?;
    let params = folder.params().map(|(name, aval)| (name.to_owned(), aval.clone()));
    let cache = held.layer.div_ceil(over.tensor as u64);
    let mut layers = vec![Cost { work: 0, bytes: cache }; config.num_hidden_layers];
    let (mut first, mut last) = (Cost::default(), Cost::default());
    for leaf in divide::divided(config, &mesh, params)?.leaves() {
        let (name, elements) = (&*leaf.name, leaf.bytes_per_device / size_of::<f32>() as u64);
        let cost = |work: u64| Cost { work, bytes: elements * held.element };
        let logits = if held.layer > 0 { 2 * elements / 3 } else { elements };
        let index = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        let layer = index.and_then(|index| layers.get_mut(index.parse::<usize>().ok()?));
        let taken = match config.experts {
            Some(experts) if name.contains(".experts.") => {
                elements * experts.per_token as u64 / experts.count as u64
            }
            _ => elements,
        };
        let (work, to) = match (layer, name) {
            (Some(layer), _) => (taken, layer),
            (None, OUTPUT) => (logits, &mut last),
            (None, name) if name.starts_with("model.embed") => (0, &mut first),
            _ => (0, &mut last),
        };
        *to = to.and(cost(work));
        if name == EMBEDDING && config.tie_word_embeddings {
            // A copy, unless it is in the same stage.
            let bytes = if stages > 1 { cost(elements).bytes } else { 0 };
            last = last.and(Cost { work: logits, bytes });
        }
    }
    Ok(Layers::new(&layers, first, last))
}
