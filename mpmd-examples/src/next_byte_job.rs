//! Trains the model of [`next_byte`](crate::next_byte) as a pipeline of [`STAGES`] stages, each on
//! its own device. The same program runs with any number of processes.
//!
//! Each step draws a batch of windows of the text and cuts it into microbatches. Contexts are made
//! on the first stage and targets on the last. `device_put` moves activations from stage to stage,
//! and their gradients back. Nothing depends on the number of processes or on timing: losses are
//! the same to the bit.

use std::collections::VecDeque;
use std::sync::Arc;

use mpmd::prelude::*;
use mpmd::topology::Mesh;
use mpmd::{Jit, ProcessId};

use crate::math::random_bits;
use crate::next_byte::{Activation, BYTES, CONTEXT, initial_scale};
use crate::next_byte_data::{
    HeldOut, make_contexts, make_random, make_targets, make_zeros, sampler,
};
use crate::next_byte_stages::{
    Backward, BackwardIn, Forward, ForwardIn, Layer, Loss, LossGradient, LossIn, StageState,
    Update, UpdateIn,
};
use crate::text::{ByteWindows as _, Text};

/// Number of stages: embedding and first hidden layer, two hidden layers, the layer of the logits.
pub const STAGES: usize = 4;
/// Number of steps that are issued before a loss is read, so that reading it does not drain the
/// pipeline.
pub const LOSSES_PENDING: usize = 2;
/// Number of held-out windows in a batch. The last batch may have fewer.
const HELD_OUT_ROWS: usize = 256;

/// Sizes of the model, and length of its training.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Number of updates.
    pub steps: usize,
    /// Seed of the initial weights and of the windows of each step.
    pub seed: u64,
    /// Width of the embedding of a byte.
    pub width: usize,
    /// Width of the hidden layers.
    pub hidden: usize,
    /// Microbatches of a step.
    pub microbatches: usize,
    /// Windows of a microbatch.
    pub rows: usize,
    /// Step size of the first update. It falls linearly to a tenth by the end.
    pub learning_rate: f64,
    /// Limit on the number of held-out windows for the test at the end. They are spread evenly over
    /// all held-out windows.
    pub held_out_windows: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            steps: 2000,
            seed: 0,
            width: 16,
            hidden: 256,
            microbatches: 8,
            rows: 64,
            learning_rate: 5e-3,
            held_out_windows: 1 << 16,
        }
    }
}

impl Config {
    /// Returns the number of windows of a step.
    pub fn windows(&self) -> usize {
        self.microbatches * self.rows
    }

    /// Returns the number of weights of the model.
    pub fn parameters(&self) -> usize {
        let Self { width, hidden, .. } = *self;
        let layers =
            [(CONTEXT * width, hidden), (hidden, hidden), (hidden, hidden), (hidden, BYTES)];
        BYTES * width + layers.iter().map(|(inputs, outputs)| (inputs + 1) * outputs).sum::<usize>()
    }

    /// Returns the learning rate of update `step`, counted from zero.
    pub fn learning_rate(&self, step: usize) -> f64 {
        self.learning_rate * (1.0 - 0.9 * step as f64 / self.steps as f64)
    }

    fn check(&self) -> Result<()> {
        let sizes = [self.width, self.hidden, self.microbatches, self.rows];
        if sizes.contains(&0) {
            Err(Error::kernel(format!("a size of zero in {self:?}")))
        } else {
            Ok(())
        }
    }
}

/// The losses of a training. On processes other than 0, the structure is empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The mean cross-entropy of each step's batch before its update, in nats per byte.
    pub losses: Vec<f32>,
    /// The mean cross-entropy over held-out windows at the end, in nats per byte. `None` if nothing
    /// is held out.
    pub held_out_loss: Option<f64>,
}

/// Trains a model. On process 0, calls `on_loss` after each step with the step's index, counted
/// from zero, and the step's mean loss. Blocks until the training has ended.
///
/// # Errors
///
/// If a size is zero, if the processes have read different texts, or if the job fails.
pub fn train(
    p: &mut Program,
    text: &Arc<Text>,
    config: &Config,
    mut on_loss: impl FnMut(usize, f32),
) -> Result<Outcome> {
    agree_on_text(p, text)?;
    if text.training_windows() == 0 {
        let bytes = text.bytes().len();
        return Err(Error::Environment(format!("{bytes} bytes of text have no training window")));
    }
    let mut pipeline = Pipeline::new(p, config)?;
    let mut outcome = Outcome::default();
    let mut pending = VecDeque::new();
    let mut read = |sum: MpmdArray| -> Result<()> {
        if let Some(loss) = mean_loss(&sum, config.windows())? {
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

/// Waits for the sum that [`Pipeline::step`] returned, and divides it by `windows`, the step's
/// number of windows. `None` if the sum is on another process.
///
/// # Errors
///
/// If the step failed.
pub fn mean_loss(sum: &MpmdArray, windows: usize) -> Result<Option<f32>> {
    let Some(sum) = sum.to_host()? else { return Ok(None) };
    Ok(Some(sum.as_slice::<f32>()?[0] / windows as f32))
}

/// Checks that this process has read the same text as process 0. If not, returns an error. Every
/// process must call it; it blocks until the value of process 0 has arrived.
pub(crate) fn agree_on_text(p: &mut Program, text: &Text) -> Result<()> {
    let mine = text.fingerprint();
    let first = p.broadcast_value(ProcessId(0), mine, || Ok(mine))?;
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

/// The stages, their arrays and their kernels.
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

/// The arrays of one microbatch at one stage.
#[derive(Default)]
struct InFlight {
    /// The input of the stage.
    x: Option<MpmdArray>,
    /// The output of the stage.
    y: Option<MpmdArray>,
    /// The gradient of the output of the stage.
    dy: Option<MpmdArray>,
}

impl Pipeline {
    /// Creates the stages with their initial weights, one on each of the job's devices.
    ///
    /// # Errors
    ///
    /// If a size is zero or the job does not have [`STAGES`] devices.
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
            held_out_loss: p
                .jit(Loss::new())
                .on(last)
                .outputs(last.replicated())
                .donate("sum")
                .build()?,
            order: one_forward_one_backward(STAGES, config.microbatches),
            config: config.clone(),
            stages,
        })
    }

    /// Issues update `step`, counted from zero, and returns at once. The result is the sum of the
    /// losses of the step's windows. It is on the first stage's device, which belongs to process 0.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    pub fn step(&mut self, p: &mut Program, text: &Arc<Text>, step: usize) -> Result<MpmdArray> {
        let (windows, m) = (self.config.windows(), self.config.microbatches);
        let contexts =
            make_contexts(p, &self.stages[0].mesh, windows, sampler(text, self.config.seed, step))?;
        let targets = make_targets(
            p,
            &self.stages[STAGES - 1].mesh,
            windows,
            sampler(text, self.config.seed, step),
        )?;
        let targets = targets.microbatches(p, 0, m)?;
        let mut moving: Vec<Vec<InFlight>> =
            (0..STAGES).map(|_| (0..m).map(|_| InFlight::default()).collect()).collect();
        for (moving, x) in moving[0].iter_mut().zip(contexts.microbatches(p, 0, m)?) {
            moving.x = Some(x);
        }
        let mut sum = make_zeros::<f32>(p, &self.stages[STAGES - 1].mesh, &[])?;
        for action in self.order.clone() {
            match action {
                Action::Forward { stage, microbatch } => {
                    let x = made(&moving[stage][microbatch].x)?;
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
                    // Arrays that go out of scope here are freed after the last call that reads
                    // them.
                    let mut here = std::mem::take(&mut moving[stage][microbatch]);
                    if stage + 1 == STAGES {
                        let input = (made(&here.y)?, targets[microbatch].clone());
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

    /// Issues forward passes over the held-out windows and returns at once. The result is the sum
    /// of the windows' losses, on the first stage's device.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    pub fn held_out_loss(&self, p: &mut Program, held_out: &HeldOut) -> Result<MpmdArray> {
        let last = &self.stages[STAGES - 1].mesh;
        let mut sum = make_zeros::<f64>(p, last, &[])?;
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

    /// Returns the arrays that the stages keep from step to step.
    pub fn state(&self) -> impl Iterator<Item = &StageState<MpmdArray>> {
        self.stages.iter().map(|stage| &stage.state)
    }
}

impl Stage {
    fn new(p: &mut Program, config: &Config, index: usize, mesh: Mesh) -> Result<Self> {
        let Config { seed, width, hidden, .. } = *config;
        let first = index == 0;
        let inputs = if first { CONTEXT * width } else { hidden };
        let outputs = if index + 1 < STAGES { hidden } else { BYTES };
        let activation = if index + 1 < STAGES { Activation::Tanh } else { Activation::Identity };
        // Each array has its own stream of random numbers.
        let stream = |leaf: u64| random_bits(seed, u64::MAX - (index as u64 * 4 + leaf));
        let scale = initial_scale(inputs, outputs);
        let table =
            if first { Some(make_random(p, &mesh, [BYTES, width], stream(0), 1.0)?) } else { None };
        let w = make_random(p, &mesh, [inputs, outputs], stream(1), scale)?;
        let bias = make_zeros::<f32>(p, &mesh, &[outputs])?;
        let parameters = Layer { table, w, bias };
        let shapes = parameters.map_ref(&mut |leaf| leaf.aval().clone());
        let mut zeros = || {
            shapes.try_map_ref::<MpmdArray, Error>(&mut |aval| {
                make_zeros::<f32>(p, &mesh, aval.shape())
            })
        };
        let state =
            StageState { gradients: zeros()?, mean: zeros()?, square: zeros()?, parameters };
        let on_device = mesh.replicated();
        Ok(Self {
            forward: p
                .jit(Forward::new(activation))
                .on(&mesh)
                .outputs(on_device.clone())
                .build()?,
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

    /// Issues the backward pass of a microbatch, which adds to the stage's gradients. Returns the
    /// gradient of the stage's input, or `None` on the first stage.
    fn backward(&mut self, p: &mut Program, here: &InFlight) -> Result<Option<MpmdArray>> {
        let input = BackwardIn {
            parameters: self.state.parameters.clone(),
            gradients: self.state.gradients.clone(),
            x: made(&here.x)?,
            y: made(&here.y)?,
            dy: made(&here.dy)?,
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

/// Returns a clone of an array, or an error if no earlier action has made the array.
fn made(array: &Option<MpmdArray>) -> Result<MpmdArray> {
    array
        .clone()
        .ok_or_else(|| Error::kernel("the order of actions uses an array before it is made"))
}

/// One stage's forward or backward pass of one microbatch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Action {
    Forward { stage: usize, microbatch: usize },
    Backward { stage: usize, microbatch: usize },
}

/// Returns an order of all actions of a step in which each stage alternates between one forward and
/// one backward pass. Before that, a stage runs one forward pass for itself and for each later
/// stage. It never keeps more microbatches than that.
fn one_forward_one_backward(stages: usize, microbatches: usize) -> Vec<Action> {
    let (mut forwards, mut backwards) = (vec![0; stages], vec![0; stages]);
    let mut order = Vec::new();
    while backwards[0] < microbatches {
        // One round: at most one action for each stage, which must depend only on earlier rounds.
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use mpmd::{MemoryUse, testing::Simulation};

    use super::*;

    fn small(steps: usize) -> Config {
        Config {
            steps,
            width: 4,
            hidden: 24,
            microbatches: 4,
            rows: 16,
            learning_rate: 1e-2,
            held_out_windows: 600,
            ..Config::default()
        }
    }

    /// Returns a text with a pattern that can be learnt.
    fn text() -> Arc<Text> {
        let words = ["one ", "two ", "three ", "four ", "five ", "six "];
        let text: String =
            (0..12_000).map(|i| words[(random_bits(5, i / 3) % 3 + i % 3) as usize]).collect();
        Arc::new(Text::of_files(&[text.into_bytes()]).unwrap())
    }

    #[test]
    fn losses_are_the_same_bits_on_any_number_of_processes() {
        let (text, config) = (text(), small(10));
        let run = |processes, seed| {
            let simulation =
                Simulation::new(processes, STAGES).delays(seed, Duration::from_millis(2));
            let results = simulation.run(|p| train(p, &text, &config, |_, _| {}));
            let mut outcomes = results.into_iter().map(|result| result.unwrap());
            let first = outcomes.next().unwrap();
            assert!(
                outcomes.all(|outcome| outcome == Outcome::default()),
                "losses on process 0 alone"
            );
            first
        };
        let alone = run(1, 0);
        assert_eq!(alone.losses.len(), 10);
        assert!((alone.losses[0] - (BYTES as f32).ln()).abs() < 0.5, "{alone:?}");
        assert!(alone.losses[9] < alone.losses[0], "{alone:?}");
        for processes in [2, 4] {
            for seed in 0..3 {
                let outcome = run(processes, seed);
                let bits = |outcome: &Outcome| {
                    let losses: Vec<u32> =
                        outcome.losses.iter().map(|loss| loss.to_bits()).collect();
                    (losses, outcome.held_out_loss.map(f64::to_bits))
                };
                assert_eq!(bits(&outcome), bits(&alone), "{processes} processes, seed {seed}");
            }
        }
    }

    #[test]
    fn model_beats_byte_frequencies_and_depends_on_its_seed() {
        let text = text();
        let train = |config: Config| {
            let results = Simulation::new(2, STAGES).run(|p| train(p, &text, &config, |_, _| {}));
            results.into_iter().next().unwrap().unwrap()
        };
        let held_out = train(small(80)).held_out_loss.unwrap();
        let frequencies = text.byte_frequency_loss().unwrap();
        assert!(held_out < 0.7 * frequencies, "{held_out}, frequencies {frequencies}");
        let other = train(Config { seed: 1, ..small(3) });
        assert_ne!(train(small(3)).losses, other.losses);
    }

    /// Waits until every process has finished all issued work and this process's memory use is
    /// steady. Returns that use.
    fn memory_at_rest(p: &mut Program, pipeline: &Pipeline, sum: MpmdArray) -> MemoryUse {
        let leaves = pipeline.state().flat_map(|state| state.leaves());
        leaves.chain([&sum]).for_each(|array| {
            array.block_until_ready().unwrap();
        });
        // Between threads, an array may share the sender's memory.
        drop(sum);
        for process in 0..p.processes() as u32 {
            p.broadcast_value(ProcessId(process), (), || Ok(())).unwrap();
        }
        // Arrays are freed a moment after their last read.
        let (start, mut since, mut last) = (Instant::now(), Instant::now(), p.memory());
        while since.elapsed() < Duration::from_millis(300)
            && start.elapsed() < Duration::from_secs(20)
        {
            std::thread::sleep(Duration::from_millis(10));
            let now = p.memory();
            if now.live != last.live {
                (since, last) = (Instant::now(), now);
            }
        }
        p.memory()
    }

    #[test]
    fn memory_does_not_grow_over_the_steps() {
        let (text, config) = (text(), small(60));
        for processes in [1, 4] {
            let results = Simulation::new(processes, STAGES).run(|p| {
                let mut pipeline = Pipeline::new(p, &config)?;
                let mut at_rest = Vec::new();
                for step in 0..config.steps {
                    let sum = pipeline.step(p, &text, step)?;
                    if step + 1 == 20 || step + 1 == config.steps {
                        at_rest.push(memory_at_rest(p, &pipeline, sum));
                    }
                }
                Ok(at_rest)
            });
            for (process, at_rest) in results.into_iter().enumerate() {
                let at_rest = at_rest.unwrap();
                assert!(at_rest[0].live > 0);
                assert_eq!(at_rest[1].live, at_rest[0].live, "process {process} of {processes}");
            }
        }
    }

    #[test]
    fn zero_size_and_different_texts_are_errors() {
        let text = text();
        let config = Config { hidden: 0, ..small(1) };
        let error =
            Simulation::new(1, STAGES).run(|p| train(p, &text, &config, |_, _| {})).remove(0);
        assert!(error.unwrap_err().to_string().contains("hidden: 0"));

        let other = Arc::new(Text::of_files(&[vec![b'x'; 1000]]).unwrap());
        let results = Simulation::new(2, STAGES).run(|p| {
            let text = if p.process() == ProcessId(1) { &other } else { &text };
            train(p, text, &small(2), |_, _| {})
        });
        let errors: Vec<String> =
            results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
        assert!(
            errors[1].contains("process 1 has read another text than process 0: 1001 bytes"),
            "{errors:?}"
        );
        assert!(errors[0].contains("process 1"), "{errors:?}");
    }

    #[test]
    fn order_is_one_forward_one_backward_on_every_stage() {
        for (stages, microbatches) in
            [(1, 1), (1, 3), (2, 1), (2, 5), (4, 1), (4, 3), (4, 4), (4, 8), (5, 12)]
        {
            let order = one_forward_one_backward(stages, microbatches);
            assert_eq!(order.len(), 2 * stages * microbatches);
            let at = |action| order.iter().position(|a| *a == action).unwrap();
            for stage in 0..stages {
                for microbatch in 0..microbatches {
                    let forward = at(Action::Forward { stage, microbatch });
                    let backward = at(Action::Backward { stage, microbatch });
                    assert!(forward < backward);
                    if stage + 1 < stages {
                        assert!(forward < at(Action::Forward { stage: stage + 1, microbatch }));
                        assert!(backward > at(Action::Backward { stage: stage + 1, microbatch }));
                    }
                    if microbatch > 0 {
                        // Ascending, so that gradients are added in one order.
                        assert!(
                            forward > at(Action::Forward { stage, microbatch: microbatch - 1 })
                        );
                        assert!(
                            backward > at(Action::Backward { stage, microbatch: microbatch - 1 })
                        );
                    }
                }
                let (mut kept, mut most) = (0usize, 0);
                for action in &order {
                    match *action {
                        Action::Forward { stage: of, .. } if of == stage => kept += 1,
                        Action::Backward { stage: of, .. } if of == stage => kept -= 1,
                        _ => {}
                    }
                    most = most.max(kept);
                }
                assert_eq!(
                    most,
                    microbatches.min(stages - stage),
                    "{stages} stages, {microbatches}"
                );
            }
        }
    }
}
