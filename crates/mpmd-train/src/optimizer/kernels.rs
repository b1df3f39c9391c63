//! The kernels of an optimiser: sums of squares, the figures of a step, and the update.

use half::{bf16, f16};
use mpmd_core::aval::{DType, ShapedArray, f64s};
use mpmd_core::cuda::Source;
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::pipeline::Loss;
use mpmd_core::tree::Tree;
use mpmd_core::{Error, MpmdArray, Result};
use mpmd_device::cuda::kernels::UPDATE;
use mpmd_layout::topology::DeviceId;

use super::adamw::AdamStep;
use super::cuda;
use super::float::{Float, clip_factor, square_sum};
use super::settings::UpdateRule;

/// Returns the value of a scalar of a float dtype as a double.
pub(crate) fn double(view: &View<'_>) -> Result<f64> {
    match view.global().dtype() {
        DType::F32 => Ok(f64::from(view.scalar::<f32>()?)),
        DType::F64 => Ok(view.scalar::<f64>()?),
        other => Err(Error::kernel(format!(
            "a loss or a metric of {other}: it must be f32 or f64"
        ))),
    }
}

/// Converts elements of 16 bits to f32.
fn widened<T: Copy>(elements: &[T], widen: fn(T) -> f32) -> Vec<f32> {
    elements.iter().map(|element| widen(*element)).collect()
}

/// A kernel that sums the squares of the gradients on each device: one sum per gradient,
/// `[leaves]`.
///
/// Of several devices that hold a region, only the first counts it; the others have 0.
pub(super) struct SquareSums {
    /// For each gradient, the devices that count their region of it.
    pub(super) counting: Vec<Vec<DeviceId>>,
}

impl Kernel for SquareSums {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, gradients: &Vec<ShapedArray>) -> Result<Signature<ShapedArray>> {
        let found = gradients.len();
        let expected = self.counting.len();
        if found != expected {
            return Err(Error::kernel(format!(
                "{found} gradients of {expected} parameters"
            )));
        }
        Ok(Signature::new(f64s([found])))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        gradients: Vec<View<'_>>,
        mut sums: ViewMut<'_>,
    ) -> Result<()> {
        let counted = self
            .counting
            .iter()
            .map(|devices| devices.contains(&cx.device()));

        if let Some(cuda) = cx.cuda() {
            return cuda::square_sums(&cuda, &gradients, counted, &mut sums);
        }

        let leaves = sums
            .as_mut_slice::<f64>()?
            .iter_mut()
            .zip(&gradients)
            .zip(counted);
        for ((sum, gradient), counted) in leaves {
            *sum = match (counted, gradient.global().dtype()) {
                (false, _) => 0.0,
                (true, DType::F64) => square_sum(gradient.as_slice::<f64>()?),
                (true, DType::Bf16) => square_sum(&widened(gradient.as_slice()?, bf16::to_f32)),
                (true, DType::F16) => square_sum(&widened(gradient.as_slice()?, f16::to_f32)),
                (true, _) => square_sum(gradient.as_slice::<f32>()?),
            };
        }
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&UPDATE]
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
    /// The sums of the gradients' squares, for each stage with trainable parameters.
    pub(super) sums: Vec<L>,
    pub(super) loss: Loss<L>,
    /// Limit of the mean gradient's norm: an `f64`.
    pub(super) limit: L,
}

#[derive(Tree)]
pub(super) struct FiguresOut<L> {
    /// Factor that averages and clips the summed gradients: an `f64`. It is NaN if their norm is
    /// not finite.
    pub(super) factor: L,
    /// The figures of a step: `f64`s, `[STEP_FIGURES]`. Mean loss, weight, norm of the mean
    /// gradient before clipping, the last stage whose gradients are not finite (or -1), then the
    /// mean metrics.
    pub(super) figures: L,
}

/// A kernel that computes the gradients' factor and the figures of a step.
pub(super) struct StepFigures {
    /// The stages with trainable parameters.
    pub(super) stages: Vec<usize>,
}

/// Number of figures of a step before its metrics.
pub(crate) const FIGURES: usize = 4;

/// Limit on the number of a loss's metrics. Arrays of figures always have space for this number.
pub(crate) const MOST_METRICS: usize = 16;

/// Number of figures of a step.
pub(crate) const STEP_FIGURES: usize = FIGURES + MOST_METRICS;

/// Returns an error if a loss has too many metrics, or a figure that is no scalar of a float dtype.
pub(crate) fn check_metrics(loss: &Loss<ShapedArray>) -> Result<()> {
    loss.check()?;
    let count = loss.metrics.len();
    if count > MOST_METRICS {
        return Err(Error::kernel(format!(
            "a loss with {count} metrics: at most {MOST_METRICS}"
        )));
    }
    Ok(())
}

impl Kernel for StepFigures {
    type In = FiguresIn<MpmdArray>;
    type Out = FiguresOut<MpmdArray>;

    fn infer(&self, x: &FiguresIn<ShapedArray>) -> Result<Signature<FiguresOut<ShapedArray>>> {
        check_metrics(&x.loss)?;
        Ok(Signature::new(FiguresOut {
            factor: f64s([]),
            figures: f64s([STEP_FIGURES]),
        }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: FiguresIn<View<'_>>,
        mut y: FiguresOut<ViewMut<'_>>,
    ) -> Result<()> {
        let limit = x.limit.scalar::<f64>()?;
        if let Some(cuda) = cx.cuda() {
            return cuda::figures(&cuda, &self.stages, &x.sums, &x.loss, limit, y);
        }
        let sum = double(&x.loss.sum)?;
        let weight = double(&x.loss.weight)?;
        let mut sums = Vec::new();
        let mut not_finite = -1.0;
        for (stage, found) in self.stages.iter().zip(&x.sums) {
            let found = found.as_slice::<f64>()?;
            if found.iter().any(|sum| !sum.is_finite()) {
                not_finite = *stage as f64;
            }
            sums.extend_from_slice(found);
        }
        // A step without items has sums of zero: dividing them by 1 gives means of zero.
        let items = if weight == 0.0 { 1.0 } else { weight };
        // The sums are of gradients that are not yet divided by the weight.
        let (factor, norm) = clip_factor(sums, limit * items);
        y.factor.fill(if norm.is_finite() {
            factor / items
        } else {
            f64::NAN
        })?;
        let figures = y.figures.as_mut_slice::<f64>()?;
        let (first, metrics) = figures.split_at_mut(FIGURES);
        first.copy_from_slice(&[sum / items, weight, norm / items, not_finite]);
        metrics.fill(0.0);
        for (mean, sum) in metrics.iter_mut().zip(x.loss.metrics.values()) {
            *mean = double(sum)? / items;
        }
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&UPDATE]
    }

    fn statics(&self) -> Vec<u64> {
        self.stages.iter().map(|stage| *stage as u64).collect()
    }
}

/// The arrays that an update changes in place.
#[derive(Tree)]
pub(super) struct UpdateState<L> {
    /// The trainable parameters of a stage.
    pub(super) params: Vec<L>,
    /// For each state name of the rule, one array per parameter.
    pub(super) kept: Vec<Vec<L>>,
}

#[derive(Tree)]
pub(super) struct UpdateIn<L> {
    pub(super) state: UpdateState<L>,
    pub(super) gradients: Vec<L>,
    /// Factor that multiplies the gradients: an `f64`.
    pub(super) factor: L,
    /// Number of the update in the training, counted from 1: a `u64`.
    pub(super) number: L,
    /// The learning rate: an `f64`.
    pub(super) rate: L,
}

/// A kernel that updates a stage's parameters and their optimiser state in place.
pub(super) struct Update {
    pub(super) rule: UpdateRule,
    /// For each parameter, true if weight decay applies to it.
    pub(super) decays: Vec<bool>,
}

impl Kernel for Update {
    type In = UpdateIn<MpmdArray>;
    type Out = UpdateState<MpmdArray>;

    fn infer(&self, x: &UpdateIn<ShapedArray>) -> Result<Signature<UpdateState<ShapedArray>>> {
        let UpdateIn {
            state: UpdateState { params, kept },
            gradients,
            ..
        } = x;
        if gradients != params
            || kept.iter().any(|kept| kept != params)
            || params.len() != self.decays.len()
        {
            return Err(Error::kernel(
                "parameters, gradients and state differ in shape",
            ));
        }

        let state = UpdateState {
            params: params.clone(),
            kept: kept.clone(),
        };
        let paths = state.structure().paths();
        Ok(paths
            .into_iter()
            .fold(Signature::new(state), |signature, path| {
                signature.alias(format!("state/{path}"), path)
            }))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: UpdateIn<View<'_>>,
        y: UpdateState<ViewMut<'_>>,
    ) -> Result<()> {
        self.update(cx, x, y)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&UPDATE]
    }

    fn statics(&self) -> Vec<u64> {
        let mut words = self.rule.words();
        words.extend(self.decays.iter().map(|decays| u64::from(*decays)));
        words
    }
}

impl Update {
    fn update(
        &self,
        cx: &Context<'_>,
        x: UpdateIn<View<'_>>,
        mut y: UpdateState<ViewMut<'_>>,
    ) -> Result<()> {
        let number = x.number.scalar()?;
        let rate = x.rate.scalar()?;
        let on_cuda = cx.cuda();
        // On a CUDA device the factor is in its memory.
        let gradient_factor = if on_cuda.is_some() {
            1.0
        } else {
            x.factor.scalar::<f64>()?
        };
        let step = AdamStep {
            number,
            rate,
            gradient_factor,
        };
        if gradient_factor.is_nan() {
            // Gradients that are not finite would spoil all parameters.
            return Ok(());
        }
        let mut kept: Vec<_> = y.kept.iter_mut().map(|kept| kept.iter_mut()).collect();
        for ((w, gradient), decays) in y.params.iter_mut().zip(&x.gradients).zip(&self.decays) {
            let rule = if *decays {
                self.rule
            } else {
                self.rule.without_decay()
            };
            let mut state: Vec<&mut ViewMut<'_>> =
                kept.iter_mut().flat_map(|kept| kept.next()).collect();
            let is_double = gradient.global().dtype() == DType::F64;
            match (&on_cuda, is_double) {
                (Some(cuda), true) => {
                    cuda::update::<f64>(cuda, rule, step, w, &mut state, gradient, &x.factor)?;
                }
                (Some(cuda), false) => {
                    cuda::update::<f32>(cuda, rule, step, w, &mut state, gradient, &x.factor)?;
                }
                (None, true) => update::<f64>(rule, step, w, &mut state, gradient)?,
                (None, false) => update::<f32>(rule, step, w, &mut state, gradient)?,
            }
        }
        Ok(())
    }
}

/// Updates one parameter. `state` has the arrays that the rule keeps for the parameter.
fn update<T: Float>(
    rule: UpdateRule,
    step: AdamStep,
    w: &mut ViewMut<'_>,
    state: &mut [&mut ViewMut<'_>],
    gradient: &View<'_>,
) -> Result<()> {
    let w = w.as_mut_slice::<T>()?;
    let gradient = gradient.as_slice::<T>()?;

    match (rule, state) {
        (UpdateRule::AdamW(adamw), [mean, square]) => {
            adamw.update(
                step,
                w,
                mean.as_mut_slice()?,
                square.as_mut_slice()?,
                gradient,
            );
        }
        (UpdateRule::Sgd(sgd), []) => {
            sgd.update(step.rate, step.gradient_factor, w, None, gradient);
        }
        (UpdateRule::Sgd(sgd), [sum]) => {
            let sum = Some(sum.as_mut_slice()?);
            sgd.update(step.rate, step.gradient_factor, w, sum, gradient);
        }
        (rule, state) => return Err(wrong_state(rule, state.len())),
    }
    Ok(())
}

/// Creates the error for a number of state arrays that does not fit the rule.
pub(super) fn wrong_state(rule: UpdateRule, arrays: usize) -> Error {
    Error::kernel(format!("{arrays} arrays of state for {rule:?}"))
}

#[cfg(test)]
mod tests {
    use mpmd_core::prelude::*;
    use mpmd_core::random::{Key, normal_f64};
    use mpmd_core::{HostArray, run_here};
    use mpmd_layout::topology::DeviceKind;

    use super::super::{AdamW, Sgd};
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
            let sums = run_here(
                SquareSums {
                    counting: vec![vec![DeviceId(0)]; 4],
                },
                &x,
            )
            .unwrap();
            sums.to_vec::<f64>().unwrap()
        };
        assert_eq!(sums(3.0), [10.0; 4]);
        assert!(
            [f32::NAN, f32::INFINITY]
                .into_iter()
                .flat_map(sums)
                .all(|sum| !sum.is_finite())
        );
    }

    /// Elements of the parameters: one block of a sum, the edges of one, and several.
    const LENGTHS: [usize; 6] = [0, 1, 257, 4096, 4097, 20_000];

    /// Returns the bits of all that two updates of an optimiser compute on a device of this kind:
    /// the sums of squares, the figures, the parameters and the state.
    fn computed(kind: DeviceKind, rule: UpdateRule, double: bool, clip: f64) -> Vec<Vec<u8>> {
        let mut p = Program::builder().device_kinds(&[kind]).alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let whole = mesh.replicated();
        let mut seed = 0;
        let mut put = |p: &mut Program, length: usize, zero: bool| {
            seed += 1;
            let value = |i| if zero { 0.0 } else { normal_f64(Key(seed), i) };
            let values: Vec<f64> = (0..length as u64).map(value).collect();
            let singles: Vec<f32> = values.iter().map(|value| *value as f32).collect();
            let array = match double {
                true => MpmdArray::from_slice(&[length], &values),
                false => MpmdArray::from_slice(&[length], &singles),
            };
            p.device_put(&array.unwrap(), &whole).unwrap()
        };
        let mut all = |p: &mut Program, zero| -> Vec<MpmdArray> {
            LENGTHS.iter().map(|length| put(p, *length, zero)).collect()
        };
        let params = all(&mut p, false);
        let kept = rule
            .state_names()
            .iter()
            .map(|_| all(&mut p, true))
            .collect();
        let mut state = UpdateState { params, kept };
        let counting = vec![vec![mesh.devices()[0]]; LENGTHS.len()];
        let sums = p
            .jit(SquareSums { counting })
            .on(&mesh)
            .outputs(&whole)
            .build()
            .unwrap();
        let figures = p
            .jit(StepFigures { stages: vec![3] })
            .on(&mesh)
            .outputs(&whole)
            .build()
            .unwrap();
        let decays = (0..LENGTHS.len()).map(|leaf| leaf % 2 == 1).collect();
        let update = p
            .jit(Update { rule, decays })
            .on(&mesh)
            .outputs(&whole)
            .build()
            .unwrap();
        let mut found = Vec::new();
        for number in 1..=3u64 {
            let gradients = match number {
                // Gradients that are not finite change nothing.
                2 => (LENGTHS.iter())
                    .map(|length| match double {
                        true => MpmdArray::from_slice(&[*length], &vec![f64::NAN; *length]),
                        false => MpmdArray::from_slice(&[*length], &vec![f32::INFINITY; *length]),
                    })
                    .map(|array| p.device_put(&array.unwrap(), &whole).unwrap())
                    .collect(),
                _ => all(&mut p, false),
            };
            let sum = sums.call(&mut p, gradients.clone()).unwrap();
            let scalar = |p: &mut Program, value: f32| {
                p.device_put(&MpmdArray::scalar(value), &whole).unwrap()
            };
            let loss = Loss::new(scalar(&mut p, 5.0), scalar(&mut p, 7.0));
            let loss = loss.metric("right", scalar(&mut p, 3.0));
            let limit = MpmdArray::scalar(clip);
            let x = FiguresIn {
                sums: vec![sum.clone()],
                loss,
                limit,
            };
            let y = figures.call(&mut p, x).unwrap();
            let x = UpdateIn {
                state,
                gradients,
                factor: y.factor.clone(),
                number: MpmdArray::scalar(number),
                rate: MpmdArray::scalar(0.01f64),
            };
            state = update.call(&mut p, x).unwrap();
            found.extend([sum, y.figures]);
        }
        found.extend(state.params);
        found.extend(state.kept.into_iter().flatten());
        let bytes = |array: &MpmdArray| array.to_host().unwrap().unwrap().bytes().to_vec();
        let bytes = found.iter().map(bytes).collect();
        p.finish().unwrap();
        bytes
    }

    #[test]
    fn cuda_devices_compute_the_bits_of_the_host() {
        if softcuda::again!() {
            return;
        }
        let sgd = Sgd {
            momentum: 0.9,
            decay: 0.01,
            nesterov: true,
        };
        let rules: [UpdateRule; 3] = [
            AdamW::default().into(),
            sgd.into(),
            Sgd {
                momentum: 0.0,
                ..sgd
            }
            .into(),
        ];
        for (rule, double) in rules
            .into_iter()
            .flat_map(|rule| [(rule, false), (rule, true)])
        {
            for clip in [0.5, f64::INFINITY] {
                let [cuda, cpu] = [DeviceKind::Cuda, DeviceKind::Cpu]
                    .map(|kind| computed(kind, rule, double, clip));
                assert_eq!(cuda.len(), cpu.len());
                for (at, (cuda, cpu)) in cuda.iter().zip(&cpu).enumerate() {
                    // The figures of gradients that are no numbers may differ in their bits.
                    let finite = !cpu
                        .chunks_exact(8)
                        .any(|word| !f64::from_ne_bytes(word.try_into().unwrap()).is_finite());
                    assert!(
                        cuda == cpu || (at < 6 && !finite),
                        "{rule:?}, {double}, {clip}: {at}"
                    );
                }
            }
        }
    }
}
