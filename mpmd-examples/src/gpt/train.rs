//! Trains a transformer as a pipeline. The same program runs with any number of processes, stages
//! and devices.

use std::collections::VecDeque;
use std::sync::Arc;

use mpmd::ProcessId;
use mpmd::aval::DType;
use mpmd::cuda::Math;
use mpmd::pipeline::{
    Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule, StepDeviceMemory, StepOutput,
};
use mpmd::prelude::*;
use mpmd::sharding::Sharding;
use mpmd::topology::Mesh;
use mpmd_train::data::Text;

use super::BYTES;
use super::adamw::{AdamW, WarmupCosine};
use super::clock::Clock;
use super::data::Sequences;
use super::optimizer::{Clipped, Optimizer};
use super::params::{Model, Part, StageParams};
use super::placement::{DATA_AXIS, Grid, Placement, Rule};
use super::stages::{
    First, Float, Last, LastLogits, Logits, Middle, Rows, Targets, Tokens, Whole, WholeLogits,
};

/// Number of steps that are issued before a loss is read, so that reading it does not drain the
/// pipeline.
const LOSSES_PENDING: usize = 2;

/// Number of steps in a dry run: enough to see that all steps are equal.
const PLANNED_STEPS: u64 = 8;

/// Limit on the number of microbatches of an evaluation. It bounds the time for texts of any size.
const MOST_EVALUATED: usize = 256;

/// The model, and the settings of its training.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Sizes of the model.
    pub model: Model,
    /// Stages of the pipeline, on all ranks together.
    pub stages: usize,
    /// Stages of each rank.
    pub chunks: usize,
    /// Devices of each stage that share the sequences of a microbatch, and the storage of the
    /// parameters.
    pub fsdp: usize,
    /// Devices over which the matrices of a stage's blocks are sharded, for each of the `fsdp`
    /// devices.
    pub tensor_parallel: usize,
    /// Sharding rules of the stored parameters, in place of those of [`Placement`].
    pub strategy: Option<Vec<Rule>>,
    /// Sequences of a microbatch, on all devices together.
    pub batch: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Name of the schedule: see [`Schedule::named`].
    pub schedule: String,
    /// The user's own schedule, in place of the named one. It must have `stages` stages and
    /// `microbatches` microbatches. It defines the ranks.
    pub order: Option<Schedule>,
    /// True if stages keep no residuals, and compute their forward pass again for the backward
    /// pass.
    pub recompute: bool,
    /// The learning rate by step.
    pub rates: WarmupCosine,
    /// Constants of the optimiser.
    pub adamw: AdamW,
    /// Limit on the norm of the mean gradient. A larger gradient is scaled down to it.
    pub clip: f64,
    /// Seed of the initial weights and of the sequences of each step.
    pub seed: u64,
    /// Precision of matrix products on CUDA devices.
    pub math: Math,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model: Model { layers: 4, width: 128, heads: 4, hidden: 512, time: 128 },
            stages: 4,
            chunks: 1,
            fsdp: 1,
            tensor_parallel: 1,
            strategy: None,
            batch: 2,
            microbatches: 8,
            schedule: "1f1b".to_owned(),
            order: None,
            recompute: false,
            rates: WarmupCosine { peak: 3e-3, floor: 1e-4, warmup: 40, total: 800 },
            adamw: AdamW::default(),
            clip: 1.0,
            seed: 0,
            math: Math::F32,
        }
    }
}

impl Config {
    /// Returns settings with a model large enough to keep GPUs busy.
    pub fn for_gpus() -> Self {
        let model = Model { layers: 8, width: 512, heads: 8, hidden: 2048, time: 256 };
        Self {
            model,
            batch: 16,
            // Wider layers need a lower learning rate.
            rates: WarmupCosine { peak: 1e-3, floor: 5e-5, ..Self::default().rates },
            ..Self::default()
        }
    }

    /// Returns the number of devices of the job.
    pub fn devices(&self) -> usize {
        self.ranks() * self.grid().devices()
    }

    /// Returns the number of ranks of the pipeline. A rank is a group of devices that run the same
    /// stages.
    pub fn ranks(&self) -> usize {
        self.order.as_ref().map_or(self.stages / self.chunks.max(1), Schedule::ranks)
    }

    /// Returns the numbers of devices of each rank, by axis.
    pub fn grid(&self) -> Grid {
        Grid { data: self.fsdp, model: self.tensor_parallel }
    }

    /// Returns the shardings of each stage's parameters, for a model of dtype `dtype`. They are for
    /// queries only: their meshes do not belong to a program.
    ///
    /// # Errors
    ///
    /// As [`Config::check`].
    pub fn placements(&self, dtype: DType) -> Result<Vec<Placement>> {
        let (grid, strategy) = (self.grid(), self.strategy.as_deref());
        let mesh = grid.mesh()?;
        let parts = self.model.parts(self.stages)?;
        parts.iter().map(|part| Placement::new(part, grid, &mesh, dtype, strategy)).collect()
    }

    /// Returns the number of tokens of a step.
    pub fn tokens(&self) -> usize {
        self.microbatches * self.batch * self.model.time
    }

    /// Checks that the sizes fit each other.
    ///
    /// # Errors
    ///
    /// The first mismatch.
    pub fn check(&self) -> Result<()> {
        self.model.parts(self.stages)?;
        self.schedule()?;
        let Self { model, fsdp, tensor_parallel, batch, microbatches, .. } = self;
        if [*fsdp, *tensor_parallel, *batch, *microbatches].contains(&0) {
            return Err(Error::kernel(format!("a size of zero in {self:?}")));
        }
        let divides = |size: usize| size.is_multiple_of(*tensor_parallel);
        if !divides(model.heads) || !divides(model.hidden) {
            let problem = format!(
                "{} heads and {} hidden columns do not divide among {tensor_parallel} devices",
                model.heads, model.hidden
            );
            return Err(Error::kernel(problem));
        }
        if !batch.is_multiple_of(*fsdp) {
            let problem =
                format!("{batch} sequences of a microbatch do not divide among {fsdp} devices");
            return Err(Error::kernel(problem));
        }
        self.placements(DType::F32).map(drop)
    }

    /// Returns `order` if it is set, otherwise the schedule with the name `schedule`.
    ///
    /// # Errors
    ///
    /// If the name is unknown or does not allow these numbers, or if `order` has other numbers of
    /// stages or microbatches. Also if the schedule has no backward passes.
    pub fn schedule(&self) -> Result<Schedule> {
        let Self { stages, chunks, microbatches, .. } = *self;
        let schedule = match &self.order {
            Some(order) => order.clone(),
            None if chunks == 0 || !stages.is_multiple_of(chunks) => {
                let problem =
                    format!("{stages} stages do not divide among ranks of {chunks} stages each");
                return Err(Error::kernel(problem));
            }
            None => Schedule::named(&self.schedule, stages / chunks, microbatches, Some(chunks))?,
        };
        let (name, found) = (schedule.name(), (schedule.stages(), schedule.microbatches()));
        if found != (stages, microbatches) {
            let problem = format!(
                "schedule {name} is for {} stages and {} microbatches, not {stages} and \
                 {microbatches}",
                found.0, found.1
            );
            return Err(Error::kernel(problem));
        }
        if !schedule.has_backward() {
            return Err(Error::kernel(format!(
                "schedule {name} has no backward passes to train with"
            )));
        }
        Ok(schedule)
    }
}

/// A model under training, with its pipeline, optimiser and data.
pub struct Trainer<T: Float> {
    config: Config,
    parts: Vec<Part>,
    meshes: Vec<Mesh>,
    placements: Vec<Placement>,
    pipeline: Pipeline<Tokens<MpmdArray>, Loss<MpmdArray>>,
    optimizer: Optimizer<T>,
    schedule: Schedule,
    sequences: Sequences,
    clock: Clock,
    steps: u64,
}

impl<T: Float> Trainer<T> {
    /// Creates a model with its initial weights, over all devices of the job. Every process must
    /// call it. The processes compare their texts.
    ///
    /// # Errors
    ///
    /// If sizes do not fit each other, if the job does not have [`Config::devices`] devices, or
    /// as for [`Text::compare`].
    pub fn new(p: &mut Program, text: &Arc<Text>, config: &Config) -> Result<Self> {
        config.check()?;
        text.compare(p)?;
        let sequences = Sequences::new(text, config.model.time, MOST_EVALUATED * config.batch)?;
        let parts = config.model.parts(config.stages)?;
        let grid = config.grid();
        let [data, model] = grid.axes();
        let schedule = config.schedule()?;
        let ranks = p.mesh(&[("rank", schedule.ranks()), data, model])?.split("rank")?;
        let meshes: Vec<Mesh> =
            schedule.ranks_of_stages().iter().map(|rank| ranks[*rank].clone()).collect();
        let strategy = config.strategy.as_deref();
        let placements = parts.iter().zip(&meshes);
        let placements =
            placements.map(|(part, mesh)| Placement::new(part, grid, mesh, T::DTYPE, strategy));
        let placements = placements.collect::<Result<Vec<_>>>()?;
        let stored: Vec<Vec<Sharding>> = placements.iter().map(Placement::shardings).collect();
        let clock = Clock::default();
        let mut params = Vec::with_capacity(parts.len());
        for (part, shardings) in parts.iter().zip(&stored) {
            params.push(part.make::<T>(p, shardings, config.seed)?);
        }
        let wiring = Wiring {
            parts: &parts,
            meshes: &meshes,
            placements: &placements,
            how: (grid, config.math),
            clock: &clock,
        };
        let mut pipeline = wiring.stored(wiring.train::<T>(params)?)?;
        (0..config.stages).for_each(|stage| pipeline.recompute(stage, config.recompute));
        let optimizer =
            Optimizer::new(p, &parts, (&meshes, &stored), config.adamw, config.clip, &clock)?;
        let config = config.clone();
        Ok(Self {
            config,
            parts,
            meshes,
            placements,
            pipeline,
            optimizer,
            schedule,
            sequences,
            clock,
            steps: 0,
        })
    }

    /// Returns the settings of the training.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the sequences of training and evaluation.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// Returns the number of updates so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the clock that measures the time spent in the kernels of this process.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Issues one update at learning rate `rate` and returns at once. The step's loss and norm are
    /// arrays on the last stage's mesh.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    pub fn step(&mut self, p: &mut Program, rate: f64) -> Result<Clipped<MpmdArray>> {
        let output = self.gradients(p)?;
        self.steps += 1;
        let Self { pipeline, optimizer, steps, .. } = self;
        let clipped = optimizer.step(p, pipeline, output, *steps, rate)?;
        p.step_end()?;
        Ok(clipped)
    }

    /// Issues the forward and backward passes of the next step and returns at once. Does not update
    /// the parameters.
    ///
    /// # Errors
    ///
    /// As [`Trainer::step`].
    pub fn gradients(&mut self, p: &mut Program) -> Result<StepOutput> {
        let Config { batch, microbatches, stages, seed, .. } = self.config;
        let ends = (&self.meshes[0], &self.meshes[stages - 1]);
        let rows = (batch * microbatches, microbatches);
        let (tokens, targets) = self.sequences.make_training(p, ends, (seed, self.steps), rows)?;
        let tokens = tokens.microbatches(p, 0, microbatches)?;
        let targets = targets.microbatches(p, 0, microbatches)?;
        let microbatches = tokens.into_iter().zip(targets);
        let microbatches = microbatches.map(|(tokens, targets)| {
            Microbatch::new(Tokens { tokens }).side(stages - 1, Targets { targets })
        });
        self.pipeline.train_step(p, &self.schedule, microbatches.collect())
    }

    /// Predicts the peak memory of a step on the devices of this process, in bytes. With `map`,
    /// also maps that memory now, so that no step waits for the system.
    ///
    /// # Errors
    ///
    /// As [`Pipeline::map_memory`].
    pub fn memory(&self, p: &Program, map: bool) -> Result<StepDeviceMemory> {
        let Config { batch, stages, model, .. } = self.config;
        let bytes = || u8s([batch, model.time]);
        let shapes = MicrobatchShapes::new(Tokens { tokens: bytes() });
        let shapes = shapes.side(stages - 1, &Targets { targets: bytes() });
        let means = (0..stages).map(|stage| self.optimizer.state(stage));
        let beside: Vec<MpmdArray> =
            means.flat_map(|(mean, square)| [mean, square].concat()).collect();
        if map {
            self.pipeline.map_memory(p, &self.schedule, &shapes, &beside)?;
        }
        let plan = self.pipeline.memory(p, &self.schedule, &shapes, &beside)?;
        Ok(plan.of(p.topology().devices_of(p.process())))
    }

    /// Waits until all updates so far have finished on every process. Every process must call it.
    ///
    /// # Errors
    ///
    /// If the job fails.
    pub fn wait(&self, p: &mut Program) -> Result<()> {
        for (_, array) in self.state() {
            array.block_until_ready()?;
        }
        (0..p.processes() as u32)
            .try_for_each(|process| p.broadcast_value(ProcessId(process), (), || Ok(())))
    }

    /// Computes the mean loss over [held-out sequences](Sequences::held_out), in nats per byte.
    /// Blocks until the loss is known. Returns `None` on processes other than 0, or if nothing is
    /// held out.
    ///
    /// Process 0 calls `go_on` before each group of [`Config::microbatches`] microbatches, and at
    /// the end. The arguments are the number of evaluated sequences and the number of all. If
    /// `go_on` returns false before a group, the evaluation ends without a loss.
    ///
    /// # Errors
    ///
    /// If the job fails.
    pub fn held_out_loss(
        &mut self,
        p: &mut Program,
        mut go_on: impl FnMut(usize, usize) -> bool,
    ) -> Result<Option<f64>> {
        let Config { batch, fsdp, microbatches, stages, .. } = self.config;
        let count = self.sequences.held_out_len();
        let (mut sum, mut weight) = (0.0, 0.0);
        let mut pending = VecDeque::new();
        let mut read = |(loss, copies): (Loss<MpmdArray>, usize)| -> Result<()> {
            if let (Some(one), Some(rows)) = (scalar(&loss.sum)?, scalar(&loss.weight)?) {
                sum += one / copies as f64;
                weight += rows / copies as f64;
            }
            Ok(())
        };
        let (mut start, mut passes) = (0, 0usize);
        while start < count {
            if passes.is_multiple_of(microbatches)
                && !p.broadcast_value(ProcessId(0), true, || Ok(go_on(start, count)))?
            {
                return Ok(None);
            }
            passes += 1;
            let ends = (&self.meshes[0], &self.meshes[stages - 1]);
            let left = batch.min(count - start);
            // If fewer sequences than devices are left, one sequence is copied to each device.
            let (rows, copies) = if left < fsdp { (1, fsdp) } else { (left - left % fsdp, 1) };
            let (tokens, targets) =
                self.sequences.make_held_out(p, ends, (start..start + rows, copies))?;
            start += rows;
            let microbatch =
                Microbatch::new(Tokens { tokens }).side(stages - 1, Targets { targets });
            let loss = self.pipeline.forward(p, microbatch)?;
            pending.push_back((p.device_put(&loss, to_process_0(p))?, copies));
            if pending.len() > microbatches
                && let Some(loss) = pending.pop_front()
            {
                read(loss)?;
            }
        }
        pending.into_iter().try_for_each(&mut read)?;
        if p.process() == ProcessId(0) {
            go_on(count, count);
        }
        Ok((weight > 0.0).then(|| sum / weight))
    }

    /// Continues `prompt` by up to `length` bytes, with the same stages. Blocks until the bytes are
    /// known, and returns the new bytes on every process.
    ///
    /// Process 0 calls `choose` with the logits for each new byte and the byte's number, counted
    /// from zero. If `choose` returns `None`, no more bytes follow.
    ///
    /// # Errors
    ///
    /// If the job fails.
    pub fn sample(
        &self,
        p: &mut Program,
        prompt: &[u8],
        length: usize,
        mut choose: impl FnMut(&[f32], u64) -> Option<u8>,
    ) -> Result<Vec<u8>> {
        let wiring = Wiring {
            parts: &self.parts,
            meshes: &self.meshes,
            placements: &self.placements,
            how: (self.config.grid(), self.config.math),
            clock: &Clock::default(),
        };
        let params =
            (0..self.parts.len()).map(|stage| self.params(stage)).collect::<Result<Vec<_>>>()?;
        let mut pipeline = wiring.stored(wiring.logits::<T>(params)?)?;
        // Every device gets the same sequence.
        let copies = self.config.fsdp;
        let time = self.config.model.time;
        let mut bytes = prompt.to_vec();
        if bytes.is_empty() {
            // The byte after the end of a file.
            bytes.push(mpmd_train::data::SEPARATOR);
        }
        let start = bytes.len();
        for number in 0..length as u64 {
            let context = bytes[bytes.len().saturating_sub(time)..].to_vec();
            let last = context.len() - 1;
            let rows = self.meshes[0].sharding(spec![DATA_AXIS]);
            let tokens = p.array_from_fn(u8s([copies, time]), &rows, move |_, mut tokens| {
                // Attention is causal, so bytes after the context have no effect.
                tokens.zero();
                for row in tokens.as_mut_slice::<u8>()?.chunks_exact_mut(time) {
                    row[..context.len()].copy_from_slice(&context);
                }
                Ok(())
            })?;
            let Logits { logits } = pipeline.forward(p, Microbatch::new(Tokens { tokens }))?;
            let logits = p.device_put(&logits, to_process_0(p))?;
            let byte = p.broadcast_value(ProcessId(0), Some(0), || {
                let logits = logits
                    .to_host()?
                    .ok_or_else(|| Error::kernel("the logits are on another process"))?;
                let row = &logits.as_slice::<T>()?[last * BYTES..][..BYTES];
                let row: Vec<f32> = row.iter().map(|logit| logit.to_f64() as f32).collect();
                Ok(choose(&row, number))
            })?;
            let Some(byte) = byte else { break };
            bytes.push(byte);
        }
        Ok(bytes.split_off(start))
    }

    /// Returns (name, array) for each parameter and each running mean of the optimiser. The names
    /// do not depend on the stages.
    pub fn state(&self) -> Vec<(String, MpmdArray)> {
        let mut state = Vec::new();
        for (stage, part) in self.parts.iter().enumerate() {
            let params = self.pipeline.params(stage);
            let (mean, square) = self.optimizer.state(stage);
            let arrays = params.into_iter().zip(mean.iter().zip(square));
            for (name, ((_, param), (mean, square))) in part.names().into_iter().zip(arrays) {
                state.push((format!("optimizer.mean.{name}"), mean.clone()));
                state.push((format!("optimizer.square.{name}"), square.clone()));
                state.push((name, param));
            }
        }
        state
    }

    /// Replaces parameters and running means by those after `steps` updates. `load` returns the
    /// array of a name of [`Trainer::state`], in the given shape and sharding. After an error, some
    /// stages may have their new arrays.
    ///
    /// # Errors
    ///
    /// The first error of `load`.
    pub fn set_state(
        &mut self,
        p: &mut Program,
        steps: u64,
        mut load: impl FnMut(&mut Program, &str, ShapedArray, &Sharding) -> Result<MpmdArray>,
    ) -> Result<()> {
        for (stage, part) in self.parts.iter().enumerate() {
            let shapes = part.shapes();
            let shardings = self.placements[stage].shardings();
            let mut all = |prefix: &str| -> Result<Vec<MpmdArray>> {
                let places = shapes.leaves().into_iter().zip(&shardings);
                let leaves = part.names().into_iter().zip(places);
                leaves
                    .map(|(name, (shape, sharding))| {
                        let aval = ShapedArray::new(&shape.dims, T::DTYPE);
                        load(p, &format!("{prefix}{name}"), aval, sharding)
                    })
                    .collect()
            };
            let (params, mean, square) =
                (all("")?, all("optimizer.mean.")?, all("optimizer.square.")?);
            self.pipeline.set_params(stage, params)?;
            self.optimizer.set_state(stage, mean, square);
        }
        self.steps = steps;
        Ok(())
    }

    fn params(&self, stage: usize) -> Result<StageParams<MpmdArray>> {
        let leaves = self.pipeline.params(stage).into_iter().map(|(_, leaf)| leaf);
        Ok(StageParams::from_leaves(&self.parts[stage].shapes().structure(), leaves)?)
    }
}

/// The parts, meshes, placements and settings from which the stages of a pipeline are built.
struct Wiring<'a> {
    parts: &'a [Part],
    meshes: &'a [Mesh],
    placements: &'a [Placement],
    /// (axes of the meshes, precision of matrix products on CUDA devices).
    how: (Grid, Math),
    clock: &'a Clock,
}

type Params = StageParams<MpmdArray>;

impl Wiring<'_> {
    /// Tells the pipeline the sharding in which each stage's parameters are stored, so that steps
    /// gather them. Returns the pipeline.
    fn stored<In, Out>(&self, mut pipeline: Pipeline<In, Out>) -> Result<Pipeline<In, Out>>
    where
        In: Tree<Leaf = MpmdArray>,
        Out: Tree<Leaf = MpmdArray>,
    {
        for (stage, placement) in self.placements.iter().enumerate() {
            if let Some(storage) = placement.storage()? {
                pipeline.store(stage, storage)?;
            }
        }
        Ok(pipeline)
    }

    fn train<T: Float>(
        &self,
        params: Vec<Params>,
    ) -> Result<Pipeline<Tokens<MpmdArray>, Loss<MpmdArray>>> {
        let Self { parts, meshes, how, clock, .. } = *self;
        let last = parts.len() - 1;
        let mut params = params.into_iter();
        let mut next = || params.next().ok_or_else(|| Error::kernel("a stage without parameters"));
        if last == 0 {
            return Pipeline::first(Whole::<T>::new(parts[0], how, clock), &meshes[0], next()?);
        }
        let front = self.front::<T>(&mut next)?;
        front.then(Last::<T>::new(parts[last], how, clock), &meshes[last], next()?)
    }

    fn logits<T: Float>(
        &self,
        params: Vec<Params>,
    ) -> Result<Pipeline<Tokens<MpmdArray>, Logits<MpmdArray>>> {
        let Self { parts, meshes, how, clock, .. } = *self;
        let last = parts.len() - 1;
        let mut params = params.into_iter();
        let mut next = || params.next().ok_or_else(|| Error::kernel("a stage without parameters"));
        if last == 0 {
            return Pipeline::first(
                WholeLogits::<T>::new(parts[0], how, clock),
                &meshes[0],
                next()?,
            );
        }
        let front = self.front::<T>(&mut next)?;
        front.then(LastLogits::<T>::new(parts[last], how, clock), &meshes[last], next()?)
    }

    /// Builds a pipeline of all stages but the last. `next` returns the parameters of one stage
    /// after the other.
    fn front<T: Float>(
        &self,
        mut next: impl FnMut() -> Result<Params>,
    ) -> Result<Pipeline<Tokens<MpmdArray>, Rows<MpmdArray>>> {
        let Self { parts, meshes, how, clock, .. } = *self;
        let first = Pipeline::first(First::<T>::new(parts[0], how, clock), &meshes[0], next()?)?;
        let middle = parts.iter().zip(meshes).take(parts.len() - 1).skip(1);
        middle.into_iter().try_fold(first, |front, (part, mesh)| {
            front.then(Middle::<T>::new(*part, how, clock), mesh, next()?)
        })
    }
}

/// The figures of a step, as process 0 reads them while later steps run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of updates so far, counted from the start of the model.
    pub step: u64,
    /// Mean loss before the update, in nats per byte.
    pub loss: f64,
    /// Norm of the mean gradient, before clipping.
    pub norm: f64,
}

/// Trains until `more` returns `None`. Blocks until process 0 has read all reports.
///
/// Before each step, process 0 calls `more` with the number of updates so far. `more` returns the
/// learning rate of the step. Process 0 also calls `on_step` with the report of each step.
///
/// # Errors
///
/// If the job fails, or if a loss or a norm is not finite.
pub fn train<T: Float>(
    p: &mut Program,
    trainer: &mut Trainer<T>,
    mut more: impl FnMut(u64) -> Option<f64>,
    mut on_step: impl FnMut(StepReport),
) -> Result<()> {
    let mut pending = VecDeque::new();
    let mut read = |(step, clipped): (u64, Clipped<MpmdArray>)| -> Result<()> {
        let (Some(loss), Some(norm)) = (scalar(&clipped.loss)?, scalar(&clipped.norm)?) else {
            return Ok(());
        };
        if !loss.is_finite() || !norm.is_finite() {
            return Err(Error::kernel(format!(
                "step {step}: loss {loss}, gradients of norm {norm}"
            )));
        }
        on_step(StepReport { step, loss, norm });
        Ok(())
    };
    loop {
        let steps = trainer.steps();
        // A dry run's learning rate is arbitrary: it does not affect the plan.
        let planned = (steps < PLANNED_STEPS).then_some(1.0);
        let Some(rate) = p.broadcast_value(ProcessId(0), planned, || {
            if pending.len() > LOSSES_PENDING
                && let Some(report) = pending.pop_front()
            {
                read(report)?;
            }
            Ok(more(steps))
        })?
        else {
            break;
        };
        let clipped = trainer.step(p, rate)?;
        let clipped = p.device_put(&clipped, to_process_0(p))?;
        if p.process() == ProcessId(0) {
            pending.push_back((steps + 1, clipped));
        }
    }
    p.broadcast_value(ProcessId(0), (), || pending.into_iter().try_for_each(&mut read))
}

/// Returns the sharding on the first device of process 0.
fn to_process_0(p: &Program) -> Sharding {
    Sharding::single_device(p.topology().devices_of(ProcessId(0))[0])
}

fn scalar(array: &MpmdArray) -> Result<Option<f64>> {
    let Some(host) = array.to_host()? else { return Ok(None) };
    Ok(host.as_slice::<f64>()?.first().copied())
}
