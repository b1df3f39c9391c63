//! Optimisers for the parameters of a pipeline, stored in any shardings.
//!
//! The norm of the gradients is reduced parameter by parameter. Each device of a stage adds up the
//! squares of its regions. The sums move to the last stage, which adds them in the order of stages
//! and parameters. The resulting factor moves back to each stage. So the bits do not depend on the
//! number of processes. Other stages, and other devices for a parameter, change the order of the
//! additions: then the last bits of the norm may differ, and of updates that it clips.
//!
//! Gradients and state have the shardings of the stored parameters: each device updates its own
//! part. CUDA devices do so in their own memory (`cuda.rs`), with the same bits. Weight decay is
//! for parameters of two or more dimensions alone, unless the settings choose others.

mod adamw;
mod cuda;
mod float;
mod kernels;
mod settings;
mod sgd;

use std::collections::BTreeMap;

use mpmd_core::aval::DType;
use mpmd_core::pipeline::{Gradients, Loss, Pipeline, StepOutput};
use mpmd_core::tree::{PrefixTree, Tree};
use mpmd_core::{Error, Jit, MpmdArray, Program, Result};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;

pub use adamw::{AdamStep, AdamW};
pub use float::{Float, clip_factor, square_sum};
use kernels::{FiguresIn, FiguresOut, SquareSums, StepFigures, Update, UpdateIn, UpdateState};
pub(crate) use kernels::{MOST_METRICS, STEP_FIGURES, check_metrics, double};
pub use settings::{OptimizerSettings, UpdateRule};
pub use sgd::Sgd;

use crate::tensors::owners::owners;

/// An optimiser for all stages of a pipeline: its state, and the kernels that update the parameters
/// in place.
#[derive(Debug)]
pub struct Optimizer {
    rule: UpdateRule,
    clip: Option<f64>,
    updates: u64,
    figures: Jit<StepFigures>,
    last: Mesh,
    /// The optimiser of each stage; `None` for a stage without trainable parameters.
    stages: Vec<Option<StageOptimizer>>,
}

#[derive(Debug)]
struct StageOptimizer {
    mesh: Mesh,
    /// The paths of the stage's trainable parameters, in leaf order.
    paths: Vec<String>,
    /// For each state name of the rule, one array per path.
    kept: Vec<Vec<MpmdArray>>,
    square_sums: Jit<SquareSums>,
    update: Jit<Update>,
}

impl Optimizer {
    /// Creates the optimiser of a pipeline's trainable parameters. Its state is zero, in the
    /// shardings of the stored parameters.
    ///
    /// Call it after [`Pipeline::store`], [`Pipeline::tie`] and other changes of the parameters.
    ///
    /// # Errors
    ///
    /// If a parameter is neither `f32` nor `f64`, or has no sharding.
    pub fn new<In, Out>(
        p: &mut Program,
        pipeline: &Pipeline<In, Out>,
        settings: impl Into<OptimizerSettings>,
    ) -> Result<Self>
    where
        In: Tree<Leaf = MpmdArray>,
        Out: Tree<Leaf = MpmdArray>,
    {
        let settings = settings.into();
        let last = pipeline.mesh(pipeline.stages() - 1).clone();
        let stages = (0..pipeline.stages()).map(|stage| {
            let params = params(pipeline, stage, true);
            let new = |params| StageOptimizer::new(p, pipeline.mesh(stage), params, &settings);
            Some(params)
                .filter(|params| !params.is_empty())
                .map(new)
                .transpose()
        });
        let stages: Vec<Option<StageOptimizer>> = stages.collect::<Result<_>>()?;

        let trained = (0..stages.len())
            .filter(|stage| stages[*stage].is_some())
            .collect();
        let figures = p.jit(StepFigures { stages: trained });
        let figures = figures.on(&last).outputs(last.replicated()).build()?;
        let OptimizerSettings { rule, clip, .. } = settings;
        Ok(Self {
            rule,
            clip,
            updates: 0,
            figures,
            last,
            stages,
        })
    }

    /// Sets the limit of the norm of the mean gradient; `None` for no limit.
    pub fn set_clip(&mut self, limit: Option<f64>) {
        self.clip = limit;
    }

    /// Returns the number of updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Sets the number of updates so far, for instance to that of a loaded checkpoint.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Issues one update of the pipeline's parameters, in place, with the gradients of a step.
    /// Returns without waiting.
    ///
    /// The gradients are divided by the weight of the step's loss. A weight of 0, as of padding
    /// alone, counts as 1, and the gradients are 0. `rate` is the learning rate. If the norm of the
    /// gradients is not finite, parameters and state keep their values.
    ///
    /// Returns the figures of the step: `f64`s of shape `[20]` on the last stage's mesh. They are
    /// the mean loss before the update, the weight, and the norm of the mean gradient before
    /// clipping. Then come the number of the last stage whose gradients are not finite (or -1), and
    /// the mean metrics.
    ///
    /// # Errors
    ///
    /// If the gradients do not match the trainable parameters, or the job is known to have failed.
    pub fn step<In>(
        &mut self,
        p: &mut Program,
        pipeline: &mut Pipeline<In, Loss<MpmdArray>>,
        output: StepOutput,
        rate: f64,
    ) -> Result<MpmdArray>
    where
        In: Tree<Leaf = MpmdArray>,
    {
        let StepOutput {
            loss, gradients, ..
        } = output;
        let mut sorted = Vec::with_capacity(self.stages.len());
        let mut sums = Vec::with_capacity(self.stages.len());
        for (index, (stage, gradients)) in self.stages.iter().zip(gradients).enumerate() {
            let Some(stage) = stage else { continue };
            let gradients = stage.in_order(index, gradients)?;
            let sum = stage.square_sums.call(p, gradients.clone())?;
            sums.push(p.device_put(&sum, self.last.replicated())?);
            sorted.push((index, gradients));
        }

        let limit = MpmdArray::scalar(self.clip.unwrap_or(f64::INFINITY));
        let FiguresOut { factor, figures } =
            self.figures.call(p, FiguresIn { sums, loss, limit })?;

        let number = self.updates + 1;
        for (index, gradients) in sorted {
            let Some(stage) = &mut self.stages[index] else {
                continue;
            };
            let mut all = pipeline.params(index);
            let places = places(&all, &stage.paths)?;
            let params = places.iter().map(|place| all[*place].1.clone()).collect();
            let input = UpdateIn {
                state: UpdateState {
                    params,
                    kept: stage.kept.clone(),
                },
                gradients,
                factor: p.device_put(&factor, stage.mesh.replicated())?,
                number: MpmdArray::scalar(number),
                rate: MpmdArray::scalar(rate),
            };

            let UpdateState { params, kept } = stage.update.call(p, input)?;
            stage.kept = kept;
            places
                .into_iter()
                .zip(params)
                .for_each(|(place, param)| all[place].1 = param);
            pipeline.set_params(index, all.into_iter().map(|(_, param)| param).collect())?;
        }

        self.updates = number;
        Ok(figures)
    }

    /// Returns (stage, path) of the first trainable parameter with a value that is not finite, on
    /// every process. Blocks until the parameters are computed. `everywhere` is a replicated
    /// sharding over one device of each process.
    ///
    /// # Errors
    ///
    /// If the pipeline's parameters are not those of the optimiser, or an operation failed.
    pub(crate) fn not_finite<In>(
        &self,
        p: &mut Program,
        pipeline: &Pipeline<In, Loss<MpmdArray>>,
        everywhere: &Sharding,
    ) -> Result<Option<(usize, String)>>
    where
        In: Tree<Leaf = MpmdArray>,
    {
        let mut sums = Vec::with_capacity(self.stages.len());
        for (index, stage) in self.stages.iter().enumerate() {
            let Some(stage) = stage else { continue };
            let all = pipeline.params(index);
            let places = places(&all, &stage.paths)?.into_iter();
            let params = places.map(|place| all[place].1.clone()).collect();
            let sum = stage.square_sums.call(p, params)?;
            sums.push((index, stage.paths.clone(), p.device_put(&sum, everywhere)?));
        }
        first_not_finite(sums)
    }

    /// Does the same as [`Optimizer::not_finite`] for parameters of float dtypes that are not
    /// trained.
    pub(crate) fn frozen_not_finite<In>(
        p: &mut Program,
        pipeline: &Pipeline<In, Loss<MpmdArray>>,
        everywhere: &Sharding,
    ) -> Result<Option<(usize, String)>>
    where
        In: Tree<Leaf = MpmdArray>,
    {
        let mut sums = Vec::new();
        for stage in 0..pipeline.stages() {
            let is_float = |array: &MpmdArray| {
                matches!(
                    array.dtype(),
                    DType::F32 | DType::F64 | DType::Bf16 | DType::F16
                )
            };
            let mut frozen = params(pipeline, stage, false);
            frozen.retain(|(_, array)| is_float(array) && array.sharding().is_some());
            if frozen.is_empty() {
                continue;
            }

            let kernel = square_sums(p, pipeline.mesh(stage), &frozen)?;
            let (paths, arrays): (_, Vec<MpmdArray>) = frozen.into_iter().unzip();
            let sum = kernel.call(p, arrays)?;
            sums.push((stage, paths, p.device_put(&sum, everywhere)?));
        }
        first_not_finite(sums)
    }

    /// Returns (name, array) of each state array of a stage: `mean/<path>` and `square/<path>` for
    /// [`AdamW`], `momentum/<path>` for [`Sgd`]. `<path>` is the parameter's path within the stage.
    ///
    /// # Panics
    ///
    /// If there is no such stage.
    pub fn state(&self, stage: usize) -> Vec<(String, MpmdArray)> {
        let Some(stage) = &self.stages[stage] else {
            return Vec::new();
        };
        let named = self.rule.state_names().iter().zip(&stage.kept);
        let arrays = named.flat_map(|(name, arrays)| {
            let named = stage.paths.iter().zip(arrays);
            named.map(move |(path, array)| (format!("{name}/{path}"), array.clone()))
        });
        arrays.collect()
    }

    /// Replaces the state arrays of a stage, for instance by those of a loaded checkpoint. `state`
    /// has the names of [`Optimizer::state`], in any order.
    ///
    /// # Errors
    ///
    /// If the names differ, or an array has another shape, dtype or sharding than the one that it
    /// replaces. Then nothing is replaced.
    ///
    /// # Panics
    ///
    /// If there is no such stage.
    pub fn set_state(&mut self, stage: usize, state: Vec<(String, MpmdArray)>) -> Result<()> {
        let expected = self.state(stage);
        let mut found: BTreeMap<String, MpmdArray> = state.into_iter().collect();
        let mut arrays = Vec::with_capacity(expected.len());
        for (name, old) in expected {
            let new = found.remove(&name).ok_or_else(|| {
                Error::kernel(format!(
                    "set_state of stage {stage}: there is no array {name:?}"
                ))
            })?;
            if new.aval() != old.aval() || new.sharding() != old.sharding() {
                let problem = format!(
                    "set_state of stage {stage}: array {name:?} is {} with another sharding or \
                     shape than the kept {}",
                    new.aval(),
                    old.aval()
                );
                return Err(Error::kernel(problem));
            }
            arrays.push(new);
        }

        if let Some(name) = found.keys().next() {
            let problem = format!("set_state of stage {stage}: array {name:?} is of no parameter");
            return Err(Error::kernel(problem));
        }
        if let Some(stage) = &mut self.stages[stage] {
            let mut arrays = arrays.into_iter();
            let count = stage.paths.len();
            for kept in &mut stage.kept {
                *kept = arrays.by_ref().take(count).collect();
            }
        }
        Ok(())
    }
}

impl StageOptimizer {
    fn new(
        p: &mut Program,
        mesh: &Mesh,
        params: Vec<(String, MpmdArray)>,
        settings: &OptimizerSettings,
    ) -> Result<Self> {
        let shardings = params.iter().map(sharding).collect::<Result<Vec<_>>>()?;
        let square_sums = square_sums(p, mesh, &params)?;
        let names = settings.rule.state_names();
        let decays = params
            .iter()
            .map(|(path, param)| (settings.decays)(path, param.shape()));
        let update = Update {
            rule: settings.rule,
            decays: decays.collect(),
        };
        let outputs = UpdateState {
            params: shardings.clone(),
            kept: vec![shardings.clone(); names.len()],
        };
        let update = p.jit(update).on(mesh).outputs(PrefixTree::of(&outputs));
        let update = update.donate("state").donate("gradients").build()?;

        let mut kept = Vec::with_capacity(names.len());
        for _ in names {
            let zeros = params.iter().zip(&shardings).map(|((_, param), sharding)| {
                p.array_from_fn(param.aval().clone(), sharding, |_, mut zeros| {
                    zeros.zero();
                    Ok(())
                })
            });
            kept.push(zeros.collect::<Result<Vec<_>>>()?);
        }
        let paths = params.into_iter().map(|(path, _)| path).collect();
        Ok(Self {
            mesh: mesh.clone(),
            paths,
            kept,
            square_sums,
            update,
        })
    }

    /// Returns the gradients in the order of the trainable parameters.
    fn in_order(&self, stage: usize, gradients: Gradients) -> Result<Vec<MpmdArray>> {
        let found = gradients.len();
        let expected = self.paths.len();
        if found != expected {
            let problem = format!(
                "stage {stage} has {found} gradients, and {expected} trainable parameters when the \
                 optimiser was created"
            );
            return Err(Error::kernel(problem));
        }
        let places = places(&gradients, &self.paths)?;
        Ok(places
            .into_iter()
            .map(|place| gradients[place].1.clone())
            .collect())
    }
}

/// Returns (path, array) of each parameter of a stage that is trained, or not trained if `trained`
/// is false.
fn params<In, Out>(
    pipeline: &Pipeline<In, Out>,
    stage: usize,
    trained: bool,
) -> Vec<(String, MpmdArray)>
where
    In: Tree<Leaf = MpmdArray>,
    Out: Tree<Leaf = MpmdArray>,
{
    let params = pipeline
        .params(stage)
        .into_iter()
        .zip(pipeline.trainable(stage));
    params
        .filter_map(|(param, is_trained)| (is_trained == trained).then_some(param))
        .collect()
}

/// Creates a kernel that sums the squares of each of these parameters of a stage.
fn square_sums(
    p: &mut Program,
    mesh: &Mesh,
    params: &[(String, MpmdArray)],
) -> Result<Jit<SquareSums>> {
    let counting = params.iter().filter_map(|(_, param)| {
        let owners = owners(param.aval(), param.sharding()?);
        Some(owners.map(|owners| owners.devices().to_vec()))
    });
    let counting = counting.collect::<std::result::Result<Vec<_>, _>>()?;
    let partial: Vec<&str> = mesh.axis_names().iter().map(String::as_str).collect();
    let sums = mesh.replicated().unreduced(&partial)?;
    p.jit(SquareSums { counting })
        .on(mesh)
        .outputs(sums)
        .build()
}

/// Returns (stage, path) of the first parameter whose sum of squares is not finite. `sums` has
/// (stage, paths, sums of the squares of these parameters).
fn first_not_finite(sums: Vec<(usize, Vec<String>, MpmdArray)>) -> Result<Option<(usize, String)>> {
    for (stage, paths, sums) in sums {
        let Some(sums) = sums.to_host()? else {
            continue;
        };
        let mut found = sums.as_slice::<f64>()?.iter().zip(paths);
        if let Some((_, path)) = found.find(|(sum, _)| !sum.is_finite()) {
            return Ok(Some((stage, path)));
        }
    }
    Ok(None)
}

/// Returns the index in `arrays` of each path.
fn places(arrays: &[(String, MpmdArray)], paths: &[String]) -> Result<Vec<usize>> {
    let place = |path: &String| {
        let place = arrays.iter().position(|(name, _)| name == path);
        place.ok_or_else(|| Error::kernel(format!("there is no array for parameter {path:?}")))
    };
    paths.iter().map(place).collect()
}

/// Returns the sharding of a stored parameter. Fails if an optimiser cannot update the parameter.
fn sharding((path, param): &(String, MpmdArray)) -> Result<Sharding> {
    if !matches!(param.dtype(), DType::F32 | DType::F64) {
        let problem = format!(
            "parameter {path:?} is {}: optimisers take f32 and f64. Freeze it, or store it as f32",
            param.aval()
        );
        return Err(Error::kernel(problem));
    }
    let missing = || Error::kernel(format!("parameter {path:?} is not on the stage's devices"));
    param.sharding().cloned().ok_or_else(missing)
}
