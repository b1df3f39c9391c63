//! Trains the model of [`next_byte`](crate::next_byte) as a pipeline of [`STAGES`] stages, each on a device
//! of its own: one program, whatever number of processes the devices are spread over.
//!
//! Each step draws a batch of windows of the text, cut in microbatches. Contexts are made where the first
//! stage is and targets where the last one is; activations move from stage to stage by `device_put`, their
//! gradients back. Nothing depends on the number of processes, nor on timing: losses are the same to the bit.

use std::collections::VecDeque;
use std::sync::Arc;

use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_core::{Jit, ProcessId};

use crate::math::{random_bits, random_unit};
use crate::next_byte::{Activation, BYTES, CONTEXT, initial_scale};
use crate::next_byte_stages::{
    Backward, BackwardIn, Forward, ForwardIn, Layer, Loss, LossGradient, LossIn, StageState, Update, UpdateIn,
};
use crate::text::Text;

/// Stages of the pipeline: embedding and first hidden layer, two hidden layers, the layer of the logits.
pub const STAGES: usize = 4;
/// How many steps later a loss is read: so that the pipeline never runs empty for it.
pub const LOSSES_PENDING: usize = 2;
/// Rows of a batch of held-out windows.
const HELD_OUT_ROWS: usize = 256;

/// What to train, and for how long.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Updates.
    pub steps: usize,
    /// Chooses initial weights and the windows of each step.
    pub seed: u64,
    /// Width of the embedding of a byte.
    pub width: usize,
    /// Width of the hidden layers.
    pub hidden: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Windows of a microbatch.
    pub rows: usize,
    /// Step size at first; it falls to a tenth of that by the end.
    pub learning_rate: f64,
    /// Held-out windows to test with at the end, at most: they are spread evenly over all there are.
    pub held_out_windows: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            steps: 1000,
            seed: 0,
            width: 16,
            hidden: 256,
            microbatches: 8,
            rows: 64,
            learning_rate: 2e-3,
            held_out_windows: 1 << 16,
        }
    }
}

impl Config {
    /// Windows of a step.
    pub fn windows(&self) -> usize {
        self.microbatches * self.rows
    }

    /// The step size of a step, counted from zero.
    pub fn learning_rate(&self, step: usize) -> f64 {
        self.learning_rate * (1.0 - 0.9 * step as f64 / self.steps as f64)
    }

    fn check(&self) -> Result<()> {
        let sizes = [self.width, self.hidden, self.microbatches, self.rows];
        if sizes.contains(&0) { Err(Error::kernel(format!("a size of zero in {self:?}"))) } else { Ok(()) }
    }
}

/// How the training went. Only process 0 knows: elsewhere there is nothing in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The mean cross-entropy of each step's batch before its update, in nats per byte.
    pub losses: Vec<f32>,
    /// The same over held-out windows at the end; `None` where nothing is held out.
    pub held_out_loss: Option<f64>,
}

/// Trains a model; `on_loss` is called on process 0 with each step, counted from zero, and its loss.
///
/// # Errors
///
/// Where a size is zero, where the processes have read different texts, and where the job fails.
pub fn train(
    p: &mut Program,
    text: &Arc<Text>,
    config: &Config,
    mut on_loss: impl FnMut(usize, f32),
) -> Result<Outcome> {
    agree_on_text(p, text)?;
    let mut pipeline = Pipeline::new(p, config)?;
    let mut outcome = Outcome::default();
    let mut pending = VecDeque::new();
    let mut read = |sum: MpmdArray| -> Result<()> {
        if let Some(loss) = pipeline_loss(&sum, config.windows())? {
            on_loss(outcome.losses.len(), loss);
            outcome.losses.push(loss);
        }
        Ok(())
    };
    for step in 0..config.steps {
        pending.push_back(pipeline.step(p, text, step)?);
        if pending.len() > LOSSES_PENDING
            && let Some(sum) = pending.pop_front()
        {
            read(sum)?;
        }
    }
    pending.into_iter().try_for_each(&mut read)?;
    let held_out = HeldOut::new(text, config.held_out_windows);
    if held_out.windows() > 0 {
        let sum = pipeline.held_out_loss(p, &held_out)?;
        if let Some(sum) = sum.to_host()? {
            outcome.held_out_loss = Some(sum.as_slice::<f64>()?[0] / held_out.windows() as f64);
        }
    }
    Ok(outcome)
}

/// The mean loss of a step from the sum that [`Pipeline::step`] returned; `None` where it is remote. Waits
/// for it.
///
/// # Errors
///
/// Where the step failed.
pub fn pipeline_loss(sum: &MpmdArray, windows: usize) -> Result<Option<f32>> {
    let Some(sum) = sum.to_host()? else { return Ok(None) };
    Ok(Some(sum.as_slice::<f32>()?[0] / windows as f32))
}

/// Every process reads files of its own, and draws windows of them by number.
fn agree_on_text(p: &mut Program, text: &Text) -> Result<()> {
    let mine = text.fingerprint();
    let first = p.agree(ProcessId(0), mine, || Ok(mine))?;
    if first == mine {
        return Ok(());
    }
    Err(Error::Environment(format!(
        "process {} has read another text than process 0: {} bytes in {} files",
        p.process(),
        text.bytes().len(),
        text.files()
    )))
}

/// The stages and all that they keep.
pub struct Pipeline {
    config: Config,
    stages: Vec<Stage>,
    loss: Jit<Loss<f32, f32>>,
    loss_gradient: Jit<LossGradient<f32>>,
    held_out_loss: Jit<Loss<f32, f64>>,
    order: Vec<Action>,
}

struct Stage {
    mesh: Mesh,
    state: StageState<MpmdArray>,
    forward: Jit<Forward<f32>>,
    backward: Jit<Backward<f32>>,
    update: Jit<Update<f32>>,
}

/// What is on its way through the pipeline for one microbatch, between two stages.
#[derive(Default)]
struct InFlight {
    /// The input of the stage.
    x: Option<MpmdArray>,
    /// Its output.
    y: Option<MpmdArray>,
    /// The gradient of its output.
    dy: Option<MpmdArray>,
}

impl Pipeline {
    /// Stages with their initial weights, one on each of the job's devices.
    ///
    /// # Errors
    ///
    /// Where a size is zero or the job has not [`STAGES`] devices.
    pub fn new(p: &mut Program, config: &Config) -> Result<Self> {
        config.check()?;
        let meshes = p.mesh(&[("stage", STAGES)])?.split("stage")?;
        let stages = meshes
            .into_iter()
            .enumerate()
            .map(|(i, mesh)| Stage::new(p, config, i, mesh))
            .collect::<Result<Vec<_>>>()?;
        let last = &stages[STAGES - 1].mesh;
        Ok(Self {
            loss: p.jit(Loss::new()).on(last).outputs(last.replicated()).donate("sum").build()?,
            loss_gradient: p
                .jit(LossGradient::new(config.windows()))
                .on(last)
                .outputs(last.replicated())
                .build()?,
            held_out_loss: p.jit(Loss::new()).on(last).outputs(last.replicated()).donate("sum").build()?,
            order: one_forward_one_backward(STAGES, config.microbatches),
            config: config.clone(),
            stages,
        })
    }

    /// One update. Returns at once, with the sum of the losses of the step's windows as an array on the
    /// first stage's device, which is of process 0.
    ///
    /// # Errors
    ///
    /// Where the job is known to have failed.
    pub fn step(&mut self, p: &mut Program, text: &Arc<Text>, step: usize) -> Result<MpmdArray> {
        let (windows, m) = (self.config.windows(), self.config.microbatches);
        let contexts = make_contexts(p, &self.stages[0].mesh, windows, self.sampler(text, step))?;
        let targets = make_targets(p, &self.stages[STAGES - 1].mesh, windows, self.sampler(text, step))?;
        let targets = targets.microbatches(p, 0, m)?;
        let mut moving: Vec<Vec<InFlight>> =
            (0..STAGES).map(|_| (0..m).map(|_| InFlight::default()).collect()).collect();
        for (moving, x) in moving[0].iter_mut().zip(contexts.microbatches(p, 0, m)?) {
            moving.x = Some(x);
        }
        let mut sum = make_zero::<f32>(p, &self.stages[STAGES - 1].mesh)?;
        for action in self.order.clone() {
            match action {
                Action::Forward { stage, microbatch } => {
                    let x = taken(&moving[stage][microbatch].x)?;
                    let y = self.stages[stage].forward(p, x)?;
                    if stage + 1 < STAGES {
                        let next = p.device_put(&y, self.stages[stage + 1].mesh.replicated())?;
                        moving[stage + 1][microbatch].x = Some(next);
                    } else {
                        let targets = targets[microbatch].clone();
                        sum = self.loss.call(p, LossIn { logits: y.clone(), targets, sum })?;
                    }
                    moving[stage][microbatch].y = Some(y);
                }
                Action::Backward { stage, microbatch } => {
                    // What goes out of scope here is freed when the last call that reads it has run.
                    let mut here = std::mem::take(&mut moving[stage][microbatch]);
                    if stage + 1 == STAGES {
                        let input = (taken(&here.y)?, targets[microbatch].clone());
                        here.dy = Some(self.loss_gradient.call(p, input)?);
                    }
                    if let Some(dx) = self.stages[stage].backward(p, &here)? {
                        let previous = stage - 1;
                        let dy = p.device_put(&dx, self.stages[previous].mesh.replicated())?;
                        moving[previous][microbatch].dy = Some(dy);
                    }
                }
            }
        }
        let rate = self.config.learning_rate(step);
        self.stages.iter_mut().try_for_each(|stage| stage.update(p, step, rate))?;
        let sum = p.device_put(&sum, self.stages[0].mesh.replicated())?;
        p.step_end()?;
        Ok(sum)
    }

    /// The sum of the losses of the held-out windows, on the first stage's device: forward passes alone.
    /// Returns at once.
    ///
    /// # Errors
    ///
    /// Where the job is known to have failed.
    pub fn held_out_loss(&self, p: &mut Program, held_out: &HeldOut) -> Result<MpmdArray> {
        let last = &self.stages[STAGES - 1].mesh;
        let mut sum = make_zero::<f64>(p, last)?;
        for first in (0..held_out.windows()).step_by(HELD_OUT_ROWS) {
            let rows = HELD_OUT_ROWS.min(held_out.windows() - first);
            let mut x = make_contexts(p, &self.stages[0].mesh, rows, held_out.sampler(first))?;
            let targets = make_targets(p, last, rows, held_out.sampler(first))?;
            for (i, stage) in self.stages.iter().enumerate() {
                if i > 0 {
                    x = p.device_put(&x, stage.mesh.replicated())?;
                }
                x = stage.forward(p, x)?;
            }
            sum = self.held_out_loss.call(p, LossIn { logits: x, targets, sum })?;
        }
        p.device_put(&sum, self.stages[0].mesh.replicated())
    }

    /// All that the stages keep from step to step.
    pub fn state(&self) -> impl Iterator<Item = &StageState<MpmdArray>> {
        self.stages.iter().map(|stage| &stage.state)
    }

    fn sampler(&self, text: &Arc<Text>, step: usize) -> impl Fn(usize) -> Window + Send + Sync + 'static {
        let (text, seed) = (text.clone(), self.config.seed);
        move |row| {
            let (context, target) = text.sample(seed, step as u64, row as u64);
            Window::new(context, target)
        }
    }
}

impl Stage {
    fn new(p: &mut Program, config: &Config, index: usize, mesh: Mesh) -> Result<Self> {
        let Config { seed, width, hidden, .. } = *config;
        let first = index == 0;
        let inputs = if first { CONTEXT * width } else { hidden };
        let outputs = if index + 1 < STAGES { hidden } else { BYTES };
        let activation = if index + 1 < STAGES { Activation::Tanh } else { Activation::Identity };
        // Each array has a stream of random numbers of its own.
        let stream = |leaf: u64| random_bits(seed, u64::MAX - (index as u64 * 4 + leaf));
        let scale = initial_scale(inputs, outputs);
        let table = if first { Some(make_random(p, &mesh, [BYTES, width], stream(0), 1.0)?) } else { None };
        let w = make_random(p, &mesh, [inputs, outputs], stream(1), scale)?;
        let bias = make_zeros(p, &mesh, &[outputs])?;
        let parameters = Layer { table, w, bias };
        let shapes = parameters.map_ref(&mut |leaf| leaf.aval().clone());
        let mut zeros =
            || shapes.try_map_ref::<MpmdArray, Error>(&mut |aval| make_zeros(p, &mesh, aval.shape()));
        let state = StageState { gradients: zeros()?, mean: zeros()?, square: zeros()?, parameters };
        let on_device = mesh.replicated();
        Ok(Self {
            forward: p.jit(Forward::new(activation)).on(&mesh).outputs(on_device.clone()).build()?,
            backward: p
                .jit(Backward::new(activation))
                .on(&mesh)
                .outputs(on_device.clone())
                .donate("gradients")
                .build()?,
            update: p.jit(Update::new()).on(&mesh).outputs(on_device).donate("state").build()?,
            mesh,
            state,
        })
    }

    fn forward(&self, p: &mut Program, x: MpmdArray) -> Result<MpmdArray> {
        self.forward.call(p, ForwardIn { parameters: self.state.parameters.clone(), x })
    }

    /// Adds to the gradients, and returns that of the input.
    fn backward(&mut self, p: &mut Program, here: &InFlight) -> Result<Option<MpmdArray>> {
        let input = BackwardIn {
            parameters: self.state.parameters.clone(),
            gradients: self.state.gradients.clone(),
            x: taken(&here.x)?,
            y: taken(&here.y)?,
            dy: taken(&here.dy)?,
        };
        let output = self.backward.call(p, input)?;
        self.state.gradients = output.gradients;
        Ok(output.dx)
    }

    fn update(&mut self, p: &mut Program, step: usize, learning_rate: f64) -> Result<()> {
        let input = UpdateIn {
            state: self.state.clone(),
            step: MpmdArray::scalar(u32::try_from(step + 1).unwrap_or(u32::MAX)),
            learning_rate: MpmdArray::scalar(learning_rate),
        };
        self.state = self.update.call(p, input)?;
        Ok(())
    }
}

/// What an action needs of one before it.
fn taken(array: &Option<MpmdArray>) -> Result<MpmdArray> {
    array.clone().ok_or_else(|| Error::kernel("the order of actions uses an array before it is made"))
}

/// One stage's work on one microbatch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Action {
    Forward { stage: usize, microbatch: usize },
    Backward { stage: usize, microbatch: usize },
}

/// One order of all actions of a step, in which each stage runs one forward, one backward: forward as often
/// as stages follow, then in turns, so that it never keeps more microbatches than that.
fn one_forward_one_backward(stages: usize, microbatches: usize) -> Vec<Action> {
    let (mut forwards, mut backwards) = (vec![0; stages], vec![0; stages]);
    let mut order = Vec::new();
    while backwards[0] < microbatches {
        // One round: what can start after the round before, at most one action for each stage.
        let (forwards_before, backwards_before) = (forwards.clone(), backwards.clone());
        for stage in 0..stages {
            let (forward, backward) = (forwards[stage], backwards[stage]);
            let full = forward - backward == stages - stage || forward == microbatches;
            let arrived = stage == 0 || forwards_before[stage - 1] > forward;
            let returned = match backwards_before.get(stage + 1) {
                Some(next) => *next > backward,
                None => forward > backward,
            };
            if full && returned && backward < forward {
                order.push(Action::Backward { stage, microbatch: backward });
                backwards[stage] += 1;
            } else if !full && arrived {
                order.push(Action::Forward { stage, microbatch: forward });
                forwards[stage] += 1;
            }
        }
    }
    order
}

/// A context and what follows it.
struct Window {
    context: [u8; CONTEXT],
    target: u8,
}

impl Window {
    fn new(context: &[u8], target: u8) -> Self {
        let mut window = Self { context: [0; CONTEXT], target };
        window.context.copy_from_slice(context);
        window
    }
}

/// Held-out windows.
pub struct HeldOut {
    windows: Arc<[Window]>,
}

impl HeldOut {
    /// At most `most` held-out windows of a text, evenly spread.
    pub fn new(text: &Text, most: usize) -> Self {
        let every = text.held_out_windows().div_ceil(most.max(1)).max(1);
        let windows = text.held_out().step_by(every).take(most);
        Self { windows: windows.map(|(context, target)| Window::new(context, target)).collect() }
    }

    /// How many there are.
    pub fn windows(&self) -> usize {
        self.windows.len()
    }

    fn sampler(&self, first: usize) -> impl Fn(usize) -> Window + Send + Sync + 'static {
        let windows = self.windows.clone();
        move |row| {
            let Window { context, target } = &windows[first + row];
            Window { context: *context, target: *target }
        }
    }
}

fn make_contexts(
    p: &mut Program,
    mesh: &Mesh,
    rows: usize,
    window: impl Fn(usize) -> Window + Send + Sync + 'static,
) -> Result<MpmdArray> {
    p.make(u8s([rows, CONTEXT]), &mesh.replicated(), move |region, mut contexts| {
        let contexts = contexts.as_mut_slice::<u8>()?.chunks_exact_mut(CONTEXT);
        contexts
            .zip(region.range(0))
            .for_each(|(context, row)| context.copy_from_slice(&window(row).context));
        Ok(())
    })
}

fn make_targets(
    p: &mut Program,
    mesh: &Mesh,
    rows: usize,
    window: impl Fn(usize) -> Window + Send + Sync + 'static,
) -> Result<MpmdArray> {
    p.make(u8s([rows]), &mesh.replicated(), move |region, mut targets| {
        let targets = targets.as_mut_slice::<u8>()?.iter_mut();
        targets.zip(region.range(0)).for_each(|(target, row)| *target = window(row).target);
        Ok(())
    })
}

/// Even random values between `-scale` and `scale`.
fn make_random(
    p: &mut Program,
    mesh: &Mesh,
    shape: [usize; 2],
    stream: u64,
    scale: f64,
) -> Result<MpmdArray> {
    p.make(f32s(shape), &mesh.replicated(), move |region, mut values| {
        let elements = region.range(0).flat_map(|row| region.range(1).map(move |column| (row, column)));
        for (value, (row, column)) in values.as_mut_slice::<f32>()?.iter_mut().zip(elements) {
            *value = (scale * random_unit(stream, (row * shape[1] + column) as u64)) as f32;
        }
        Ok(())
    })
}

fn make_zeros(p: &mut Program, mesh: &Mesh, shape: &[usize]) -> Result<MpmdArray> {
    p.make(f32s(shape), &mesh.replicated(), |_, mut values| Ok(values.fill(0.0f32)?))
}

fn make_zero<T: mpmd_core::aval::Element + Default>(p: &mut Program, mesh: &Mesh) -> Result<MpmdArray> {
    let aval = ShapedArray::new(&[], T::DTYPE);
    p.make(aval, &mesh.replicated(), |_, mut value| Ok(value.fill(T::default())?))
}
