//! The kernels of an optimiser: sums of squares, the figures of a step, and the update.

use half::{bf16, f16};
use mpmd_core::aval::{DType, ShapedArray, f64s};
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::pipeline::Loss;
use mpmd_core::tree::Tree;
use mpmd_core::{Error, MpmdArray, Result};
use mpmd_layout::topology::DeviceId;

use super::adamw::AdamStep;
use super::float::{Float, clip_factor, square_sum};
use super::settings::UpdateRule;

/// Returns the value of a scalar float as a double.
pub(crate) fn double(view: &View<'_>) -> Result<f64> {
    match view.global().dtype() {
        DType::F32 => Ok(f64::from(view.scalar::<f32>()?)),
        DType::F64 => Ok(view.scalar::<f64>()?),
        other => {
            Err(Error::kernel(format!("a loss or a metric of {other}: it must be f32 or f64")))
        }
    }
}

/// Returns elements of 16 bits as f32.
fn widened<T: Copy>(elements: &[T], widen: fn(T) -> f32) -> Vec<f32> {
    elements.iter().map(|element| widen(*element)).collect()
}

/// Kernel that computes each device's share in the sums of the gradients' squares, `[leaves]`.
///
/// A region that several devices hold is counted by the first of them.
pub(super) struct SquareSums {
    /// For each gradient, the devices that count their region.
    pub(super) counting: Vec<Vec<DeviceId>>,
}

impl Kernel for SquareSums {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, gradients: &Vec<ShapedArray>) -> Result<Signature<ShapedArray>> {
        let (found, expected) = (gradients.len(), self.counting.len());
        if found != expected {
            return Err(Error::kernel(format!("{found} gradients of {expected} parameters")));
        }
        Ok(Signature::new(f64s([found])))
    }

    fn run(&self, cx: &mut Context<'_>, gradients: Vec<View<'_>>, sums: ViewMut<'_>) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(gradients, sums, |cx, gradients, mut sums| {
            let leaves = sums.as_mut_slice::<f64>()?.iter_mut().zip(&gradients).zip(&self.counting);
            for ((sum, gradient), counting) in leaves {
                *sum = match (counting.contains(&cx.device()), gradient.global().dtype()) {
                    (false, _) => 0.0,
                    (true, DType::F64) => square_sum(gradient.as_slice::<f64>()?),
                    (true, DType::Bf16) => square_sum(&widened(gradient.as_slice()?, bf16::to_f32)),
                    (true, DType::F16) => square_sum(&widened(gradient.as_slice()?, f16::to_f32)),
                    (true, _) => square_sum(gradient.as_slice::<f32>()?),
                };
            }
            Ok(())
        })
    }

    fn statics(&self) -> Vec<u64> {
        let leaves = self.counting.iter().flat_map(|devices| {
            let count = devices.len() as u64;
            std::iter::once(count).chain(devices.iter().map(|device| u64::from(device.0)))
        });
        leaves.collect()
    }
}

#[derive(Tree)]
pub(super) struct FiguresIn<L> {
    /// For each stage with trainable parameters, the sums of the gradients' squares.
    pub(super) sums: Vec<L>,
    pub(super) loss: Loss<L>,
    /// Limit of the norm: an `f64`.
    pub(super) limit: L,
}

#[derive(Tree)]
pub(super) struct FiguresOut<L> {
    /// Factor of the summed gradients: an `f64`. It averages and clips them. NaN if their norm is
    /// not finite.
    pub(super) factor: L,
    /// Mean loss, weight, norm of the mean gradient before clipping, the number of the last stage
    /// with a gradient that is not finite, or -1, and the mean metrics: `f64`s, `[STEP_FIGURES]`.
    pub(super) figures: L,
}

/// Kernel that computes the gradients' factor and the figures of a step.
pub(super) struct Figures {
    /// The stages with trainable parameters.
    pub(super) stages: Vec<usize>,
}

/// Number of figures of a step before its metrics.
pub(crate) const FIGURES: usize = 4;

/// Limit of the metrics of a loss: figures have room for as many, so they always have one shape.
pub(crate) const MOST_METRICS: usize = 16;

/// Number of figures of a step.
pub(crate) const STEP_FIGURES: usize = FIGURES + MOST_METRICS;

/// Returns an error if a loss has too many metrics, or figures that are no scalars of floats.
pub(crate) fn check_metrics(loss: &Loss<ShapedArray>) -> Result<()> {
    loss.check()?;
    let count = loss.metrics.len();
    if count > MOST_METRICS {
        return Err(Error::kernel(format!("a loss with {count} metrics: at most {MOST_METRICS}")));
    }
    Ok(())
}

impl Kernel for Figures {
    type In = FiguresIn<MpmdArray>;
    type Out = FiguresOut<MpmdArray>;

    fn infer(&self, x: &FiguresIn<ShapedArray>) -> Result<Signature<FiguresOut<ShapedArray>>> {
        check_metrics(&x.loss)?;
        Ok(Signature::new(FiguresOut { factor: f64s([]), figures: f64s([STEP_FIGURES]) }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: FiguresIn<View<'_>>,
        y: FiguresOut<ViewMut<'_>>,
    ) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(x, y, |_, x, mut y| {
            let (sum, weight) = (double(&x.loss.sum)?, double(&x.loss.weight)?);
            let mut sums = Vec::new();
            let mut not_finite = -1.0;
            for (stage, found) in self.stages.iter().zip(&x.sums) {
                let found = found.as_slice::<f64>()?;
                if found.iter().any(|sum| !sum.is_finite()) {
                    not_finite = *stage as f64;
                }
                sums.extend_from_slice(found);
            }
            // A step without items has sums of zero, whose means are zero.
            let items = if weight == 0.0 { 1.0 } else { weight };
            // The sums are of gradients that are not yet divided by the weight.
            let (factor, norm) = clip_factor(sums, x.limit.scalar::<f64>()? * items);
            y.factor.fill(if norm.is_finite() { factor / items } else { f64::NAN })?;
            let figures = y.figures.as_mut_slice::<f64>()?;
            let (first, metrics) = figures.split_at_mut(FIGURES);
            first.copy_from_slice(&[sum / items, weight, norm / items, not_finite]);
            metrics.fill(0.0);
            for (mean, sum) in metrics.iter_mut().zip(x.loss.metrics.values()) {
                *mean = double(sum)? / items;
            }
            Ok(())
        })
    }

    fn statics(&self) -> Vec<u64> {
        self.stages.iter().map(|stage| *stage as u64).collect()
    }
}

/// The arrays that an update changes in place.
#[derive(Tree)]
pub(super) struct State<L> {
    /// The trainable parameters of a stage.
    pub(super) params: Vec<L>,
    /// For each name of the rule's state, an array for each parameter.
    pub(super) kept: Vec<Vec<L>>,
}

#[derive(Tree)]
pub(super) struct UpdateIn<L> {
    pub(super) state: State<L>,
    pub(super) gradients: Vec<L>,
    /// Factor of the gradients: an `f64`.
    pub(super) factor: L,
    /// Number of the update, counted from one: a `u64`.
    pub(super) number: L,
    /// The learning rate: an `f64`.
    pub(super) rate: L,
}

/// Kernel that updates a stage's parameters, and the optimiser's state for them, in place.
pub(super) struct Update {
    pub(super) rule: UpdateRule,
    /// For each parameter, true if it decays.
    pub(super) decays: Vec<bool>,
}

impl Kernel for Update {
    type In = UpdateIn<MpmdArray>;
    type Out = State<MpmdArray>;

    fn infer(&self, x: &UpdateIn<ShapedArray>) -> Result<Signature<State<ShapedArray>>> {
        let UpdateIn { state: State { params, kept }, gradients, .. } = x;
        if gradients != params
            || kept.iter().any(|kept| kept != params)
            || params.len() != self.decays.len()
        {
            return Err(Error::kernel("parameters, gradients and state differ in shape"));
        }
        let state = State { params: params.clone(), kept: kept.clone() };
        let paths = state.structure().paths();
        Ok(paths.into_iter().fold(Signature::new(state), |signature, path| {
            signature.alias(format!("state/{path}"), path)
        }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: UpdateIn<View<'_>>,
        y: State<ViewMut<'_>>,
    ) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(x, y, |_, x, y| self.update(x, y))
    }

    fn statics(&self) -> Vec<u64> {
        let mut words = self.rule.words();
        words.extend(self.decays.iter().map(|decays| u64::from(*decays)));
        words
    }
}

impl Update {
    fn update(&self, x: UpdateIn<View<'_>>, mut y: State<ViewMut<'_>>) -> Result<()> {
        let step = AdamStep {
            number: x.number.scalar()?,
            rate: x.rate.scalar()?,
            gradient_factor: x.factor.scalar()?,
        };
        if step.gradient_factor.is_nan() {
            // Gradients that are not finite would spoil all parameters.
            return Ok(());
        }
        let mut kept: Vec<_> = y.kept.iter_mut().map(|kept| kept.iter_mut()).collect();
        for ((w, gradient), decays) in y.params.iter_mut().zip(&x.gradients).zip(&self.decays) {
            let rule = if *decays { self.rule } else { self.rule.without_decay() };
            let mut state: Vec<&mut ViewMut<'_>> =
                kept.iter_mut().flat_map(|kept| kept.next()).collect();
            match gradient.global().dtype() {
                DType::F64 => update::<f64>(rule, step, w, &mut state, gradient)?,
                _ => update::<f32>(rule, step, w, &mut state, gradient)?,
            }
        }
        Ok(())
    }
}

/// Updates one parameter. `state` are the arrays that the rule keeps for it.
fn update<T: Float>(
    rule: UpdateRule,
    step: AdamStep,
    w: &mut ViewMut<'_>,
    state: &mut [&mut ViewMut<'_>],
    gradient: &View<'_>,
) -> Result<()> {
    let (w, gradient) = (w.as_mut_slice::<T>()?, gradient.as_slice::<T>()?);
    match (rule, state) {
        (UpdateRule::AdamW(adamw), [mean, square]) => {
            adamw.update(step, w, mean.as_mut_slice()?, square.as_mut_slice()?, gradient);
        }
        (UpdateRule::Sgd(sgd), []) => {
            sgd.update((step.rate, step.gradient_factor), w, None, gradient);
        }
        (UpdateRule::Sgd(sgd), [sum]) => {
            let sum = Some(sum.as_mut_slice()?);
            sgd.update((step.rate, step.gradient_factor), w, sum, gradient);
        }
        (rule, state) => {
            return Err(Error::kernel(format!("{} arrays of state for {rule:?}", state.len())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use mpmd_core::{HostArray, run_here};

    use super::*;

    #[test]
    fn sums_of_squares_are_finite_if_all_values_are() {
        let sums = |x: f32| {
            let x = vec![
                HostArray::from_slice(&[2], &[bf16::ONE, bf16::from_f32(x)]).unwrap(),
                HostArray::from_slice(&[2], &[f16::ONE, f16::from_f32(x)]).unwrap(),
                HostArray::from_slice(&[2], &[1.0, x]).unwrap(),
                HostArray::from_slice(&[2], &[1.0, f64::from(x)]).unwrap(),
            ];
            let sums = run_here(SquareSums { counting: vec![vec![DeviceId(0)]; 4] }, &x).unwrap();
            sums.to_vec::<f64>().unwrap()
        };
        assert_eq!(sums(3.0), [10.0; 4]);
        assert!([f32::NAN, f32::INFINITY].into_iter().flat_map(sums).all(|sum| !sum.is_finite()));
    }
}
