//! The runner: issues a schedule's actions as plain `jit` and `device_put` operations.

use std::collections::HashMap;

use super::schedule::{ActionKind, Schedule};
use super::stage::Loss;
use super::wired::{AnyStage, Bundle};
use crate::array::MpmdArray;
use crate::aval::{DType, ShapedArray};
use crate::error::{Error, Result};
use crate::jit::Jit;
use crate::kernel::{Context, Kernel, Signature, View, ViewMut};
use crate::program::{Label, Program, Role};
use crate::tree::{Empty, Tree};

/// What one microbatch brings: the pipeline's input, and side inputs of stages.
pub struct Microbatch<In> {
    x: In,
    side: HashMap<usize, Bundle>,
}

/// A microbatch with its type erased.
pub(super) struct Parts {
    pub(super) x: Bundle,
    pub(super) side: HashMap<usize, Bundle>,
}

impl<In: Tree<Leaf = MpmdArray>> Microbatch<In> {
    /// A microbatch with this input, which must be on the first stage's mesh.
    pub fn new(x: In) -> Self {
        Self { x, side: HashMap::new() }
    }

    /// The side inputs of a stage, which must be on that stage's mesh.
    #[must_use]
    pub fn side<T: Tree<Leaf = MpmdArray>>(mut self, stage: usize, side: T) -> Self {
        self.side.insert(stage, Bundle::of(side));
        self
    }

    pub(super) fn into_parts(self) -> Parts {
        Parts { x: Bundle::of(self.x), side: self.side }
    }
}

/// A stage's gradients, summed over the microbatches: paths and arrays in the order of its parameters.
pub type Gradients = Vec<(String, MpmdArray)>;

/// What a training step gives.
#[derive(Debug)]
pub struct StepOutput {
    /// The loss and its weight, summed over the microbatches in ascending order; on the last stage's mesh.
    pub loss: Loss<MpmdArray>,
    /// The loss and weight of each microbatch; on the last stage's mesh.
    pub losses: Vec<Loss<MpmdArray>>,
    /// The gradients of each stage.
    pub gradients: Vec<Gradients>,
}

/// Adds one microbatch's loss to the sum.
struct AddLoss;

impl Kernel for AddLoss {
    type In = (Loss<MpmdArray>, Loss<MpmdArray>);
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        (sum, _): &(Loss<ShapedArray>, Loss<ShapedArray>),
    ) -> Result<Signature<Loss<ShapedArray>>> {
        Ok(Signature::new(sum.clone()).alias("0/sum", "sum").alias("0/weight", "weight"))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (_, one): (Loss<View<'_>>, Loss<View<'_>>),
        mut sum: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        for (sum, one) in [(&mut sum.sum, one.sum), (&mut sum.weight, one.weight)] {
            match one.global().dtype() {
                DType::F64 => sum.as_mut_slice::<f64>()?[0] += one.scalar::<f64>()?,
                _ => sum.as_mut_slice::<f32>()?[0] += one.scalar::<f32>()?,
            }
        }
        Ok(())
    }
}

/// How many passes of a step are still to come at a stage.
struct Uses {
    /// Those that read its parameters.
    params: usize,
    /// Those that add to its gradients.
    weights: usize,
}

/// What is under way between the passes of one step, by stage and microbatch.
#[derive(Default)]
struct Flight {
    inputs: HashMap<(usize, usize), Bundle>,
    residuals: HashMap<(usize, usize), Bundle>,
    output_gradients: HashMap<(usize, usize), Bundle>,
    weight_residuals: HashMap<(usize, usize), Bundle>,
    sides: HashMap<(usize, usize), Bundle>,
}

/// Says what the operations that follow are for.
fn label(program: &mut Program, (stage, microbatch): (usize, Option<usize>), role: Role) {
    let microbatch = microbatch.map(|microbatch| microbatch as u32);
    program.set_label(Some(Label { stage: stage as u32, microbatch, role }));
}

#[track_caller]
pub(super) fn train_step(
    stages: &mut [Box<dyn AnyStage>],
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<Parts>,
) -> Result<StepOutput> {
    program.runtime.trace.schedule(schedule);
    let before = program.set_label(None);
    let output = run_step(stages, program, schedule, microbatches);
    program.set_label(before);
    output
}

#[track_caller]
fn run_step(
    stages: &mut [Box<dyn AnyStage>],
    program: &mut Program,
    schedule: &Schedule,
    microbatches: Vec<Parts>,
) -> Result<StepOutput> {
    if schedule.stages() != stages.len() || schedule.microbatches() != microbatches.len() {
        return Err(Error::kernel(format!(
            "schedule {} is for {} stages and {} microbatches; the pipeline has {} stages and was given {}",
            schedule.name(),
            schedule.stages(),
            schedule.microbatches(),
            stages.len(),
            microbatches.len()
        )));
    }
    let last = stages.len() - 1;
    let count = microbatches.len();
    let mut flight = Flight::default();
    for (microbatch, parts) in microbatches.into_iter().enumerate() {
        flight.inputs.insert((0, microbatch), parts.x);
        let sides = parts.side.into_iter().map(|(stage, side)| ((stage, microbatch), side));
        flight.sides.extend(sides);
    }
    let mut losses: Vec<Option<Loss<MpmdArray>>> = (0..count).map(|_| None).collect();
    let mut gradients: Vec<Option<Bundle>> = stages.iter().map(|_| None).collect();
    let order = schedule.global_order().map_err(|error| Error::kernel(error.to_string()))?;
    let mut left: Vec<Uses> = stages.iter().map(|_| Uses { params: 2 * count, weights: count }).collect();
    // What a step that failed has left.
    stages.iter_mut().for_each(|stage| stage.release());
    for action in order {
        let key = (action.stage, action.microbatch);
        if action.kind != ActionKind::BackwardWeight {
            label(program, (action.stage, None), Role::Gather);
            stages[action.stage].gather(program)?;
        }
        match action.kind {
            ActionKind::Forward => {
                let loss = forward_pass(stages, program, &mut flight, key)?;
                if action.stage == last {
                    losses[action.microbatch] = loss;
                }
            }
            ActionKind::BackwardInput => input_pass(stages, program, &mut flight, key)?,
            ActionKind::BackwardWeight => weight_pass(stages, program, &mut flight, key, &mut gradients)?,
            ActionKind::Backward => {
                input_pass(stages, program, &mut flight, key)?;
                weight_pass(stages, program, &mut flight, key, &mut gradients)?;
            }
        }
        let (stage, left) = (&mut stages[action.stage], &mut left[action.stage]);
        let (params, weights) = match action.kind {
            ActionKind::Forward | ActionKind::BackwardInput => (1, 0),
            ActionKind::BackwardWeight => (0, 1),
            ActionKind::Backward => (1, 1),
        };
        // The schedule was checked: each pass of each microbatch is in it once.
        (left.params, left.weights) =
            (left.params.saturating_sub(params), left.weights.saturating_sub(weights));
        if left.params == 0 {
            stage.release();
        }
        if weights > 0
            && left.weights == 0
            && let Some(finished) = gradients[action.stage].take()
        {
            label(program, (action.stage, None), Role::Reduce);
            gradients[action.stage] = Some(stage.reduce(program, finished)?);
        }
    }
    let losses: Vec<Loss<MpmdArray>> = losses.into_iter().flatten().collect();
    label(program, (last, None), Role::Loss);
    let loss = sum_losses(stages[last].as_ref(), program, &losses)?;
    let gradients = gradients
        .into_iter()
        .flatten()
        .map(|Bundle { structure, leaves }| structure.paths().into_iter().zip(leaves).collect())
        .collect();
    Ok(StepOutput { loss, losses, gradients })
}

#[track_caller]
pub(super) fn forward<Out: Tree<Leaf = MpmdArray>>(
    stages: &mut [Box<dyn AnyStage>],
    program: &mut Program,
    microbatch: Parts,
) -> Result<Out> {
    let Parts { mut x, mut side } = microbatch;
    stages.iter_mut().for_each(|stage| stage.release());
    for (index, stage) in stages.iter_mut().enumerate() {
        if index > 0 {
            x = x.put(program, stage.input())?;
        }
        let side = side.remove(&index).unwrap_or_else(nothing);
        stage.gather(program)?;
        x = stage.forward(program, x, side)?.0;
        stage.release();
    }
    x.into_tree()
}

/// One stage's forward pass; the loss where it is the last stage's.
fn forward_pass(
    stages: &mut [Box<dyn AnyStage>],
    program: &mut Program,
    flight: &mut Flight,
    (stage, microbatch): (usize, usize),
) -> Result<Option<Loss<MpmdArray>>> {
    let key = (stage, microbatch);
    let x = take(&mut flight.inputs, key, "input")?;
    let side = flight.sides.remove(&key).unwrap_or_else(nothing);
    label(program, (stage, Some(microbatch)), Role::Forward);
    let (y, residual) = stages[stage].forward(program, x, side)?;
    flight.residuals.insert(key, residual);
    if stage + 1 < stages.len() {
        label(program, (stage, Some(microbatch)), Role::SendForward);
        flight.inputs.insert((stage + 1, microbatch), y.put(program, stages[stage + 1].input())?);
        return Ok(None);
    }
    // The loss counts once, its weight not at all.
    let loss: Loss<MpmdArray> = y.into_tree()?;
    let seed = |value: f64| match loss.sum.dtype() {
        DType::F64 => MpmdArray::scalar(value),
        _ => MpmdArray::scalar(value as f32),
    };
    let seeds = Loss { sum: seed(1.0), weight: seed(0.0) };
    flight.output_gradients.insert(key, Bundle::of(seeds));
    Ok(Some(loss))
}

fn input_pass(
    stages: &mut [Box<dyn AnyStage>],
    program: &mut Program,
    flight: &mut Flight,
    (stage, microbatch): (usize, usize),
) -> Result<()> {
    let key = (stage, microbatch);
    let residual = take(&mut flight.residuals, key, "residual")?;
    let dy = take(&mut flight.output_gradients, key, "output gradient")?;
    label(program, (stage, Some(microbatch)), Role::BackwardInput);
    let (dx, weight_residual) = stages[stage].backward_input(program, residual, dy)?;
    flight.weight_residuals.insert(key, weight_residual);
    if let Some(dx) = dx
        && stage > 0
    {
        label(program, (stage, Some(microbatch)), Role::SendBackward);
        flight.output_gradients.insert((stage - 1, microbatch), dx.put(program, stages[stage - 1].output())?);
    }
    Ok(())
}

fn weight_pass(
    stages: &mut [Box<dyn AnyStage>],
    program: &mut Program,
    flight: &mut Flight,
    key: (usize, usize),
    gradients: &mut [Option<Bundle>],
) -> Result<()> {
    let weight_residual = take(&mut flight.weight_residuals, key, "weight residual")?;
    label(program, (key.0, Some(key.1)), Role::BackwardWeight);
    let so_far = gradients[key.0].take();
    gradients[key.0] = Some(stages[key.0].backward_weight(program, weight_residual, so_far)?);
    Ok(())
}

/// Sums in ascending order of microbatches, whatever order they were computed in.
fn sum_losses(
    last: &dyn AnyStage,
    program: &mut Program,
    losses: &[Loss<MpmdArray>],
) -> Result<Loss<MpmdArray>> {
    let mesh = last.mesh();
    let add: Jit<AddLoss> = program.jit(AddLoss).on(mesh).outputs(mesh.replicated()).build()?;
    let (first, rest) = losses.split_first().ok_or_else(|| Error::kernel("a step without microbatches"))?;
    rest.iter().try_fold(first.clone(), |sum, one| add.call(program, (sum, one.clone())))
}

fn take(from: &mut HashMap<(usize, usize), Bundle>, key: (usize, usize), what: &str) -> Result<Bundle> {
    // The schedule was checked, so this is a schedule made by other means.
    from.remove(&key).ok_or_else(|| {
        Error::kernel(format!("stage {}, microbatch {}: its {what} is not there", key.0, key.1))
    })
}

fn nothing() -> Bundle {
    Bundle::of(Empty::<MpmdArray>::new())
}
