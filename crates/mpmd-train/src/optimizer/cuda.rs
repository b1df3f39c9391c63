//! The work of an optimiser on CUDA devices, issued from its kernels (`update.cu`). It has the bits
//! of the host's.

use mpmd_core::Result;
use mpmd_core::aval::DType;
use mpmd_core::cuda::{Arg, Cuda, CudaPart, Grid};
use mpmd_core::kernel::{View, ViewMut};
use mpmd_core::pipeline::Loss;
use mpmd_device::cuda::kernels::UPDATE;

use super::adamw::{AdamFactors, AdamStep};
use super::float::{BLOCK, Float, LANES};
use super::kernels::{FIGURES, FiguresOut, MOST_METRICS, wrong_state};
use super::settings::UpdateRule;
use super::sgd::Sgd;

/// Issues the sums of the squares of the arrays for which `counted` is true. Writes 0 for the
/// others.
pub(super) fn square_sums(
    cuda: &Cuda<'_>,
    arrays: &[View<'_>],
    counted: impl Iterator<Item = bool>,
    sums: &mut ViewMut<'_>,
) -> Result<()> {
    cuda.zero(&mut *sums)?;
    for (at, (array, counted)) in arrays.iter().zip(counted).enumerate() {
        let elements = array.region().elements();
        if !counted || elements == 0 {
            continue;
        }
        let function = match array.global().dtype() {
            DType::F64 => "square_sums_f64",
            DType::Bf16 => "square_sums_bf16",
            DType::F16 => "square_sums_f16",
            _ => "square_sums_f32",
        };

        let blocks = |elements: usize| elements.div_ceil(BLOCK);
        let first = cuda.scratch(DType::F64, blocks(elements))?;
        let issue = |function, elements: usize, from: Arg<'_>, to: Arg<'_>| {
            let grid = Grid::new(blocks(elements) as u32, LANES as u32);
            cuda.launch(&UPDATE, function, grid, &[elements.into(), from, to])
        };

        let mut left = blocks(elements);
        if left == 1 {
            issue(function, elements, array.into(), sums.at(at).into())?;
            continue;
        }
        issue(function, elements, array.into(), (&first).into())?;
        let mut from = first;
        while left > 1 {
            let to = cuda.scratch(DType::F64, blocks(left))?;
            match blocks(left) {
                1 => issue("sums_f64", left, (&from).into(), sums.at(at).into())?,
                _ => issue("sums_f64", left, (&from).into(), (&to).into())?,
            }
            from = to;
            left = blocks(left);
        }
    }
    Ok(())
}

/// Issues the computation of a step's figures and of the gradients' factor. `stages` has the stage
/// of each array in `sums`; `limit` is the limit of the gradients' norm.
pub(super) fn figures(
    cuda: &Cuda<'_>,
    stages: &[usize],
    sums: &[View<'_>],
    loss: &Loss<View<'_>>,
    limit: f64,
    mut y: FiguresOut<ViewMut<'_>>,
) -> Result<()> {
    let one = Grid::new(1, 1);
    // The total of the sums, and the last stage with sums that are not finite.
    let state = cuda.scratch(DType::F64, 2)?;
    let add = |sums: CudaPart<'_>, count: usize, stage: f64, first: bool| {
        let first = i32::from(first);
        let args = [
            count.into(),
            sums.into(),
            stage.into(),
            first.into(),
            (&state).into(),
        ];
        cuda.launch(&UPDATE, "figure_sums", one, &args)
    };
    if sums.is_empty() {
        add(state.at(0), 0, 0.0, true)?;
    }
    for (at, (stage, sums)) in stages.iter().zip(sums).enumerate() {
        add(
            sums.into(),
            sums.region().elements(),
            *stage as f64,
            at == 0,
        )?;
    }
    let metrics = loss.metrics.len();
    let doubles = cuda.scratch(DType::F64, 2 + metrics)?;
    let scalars = [&loss.sum, &loss.weight]
        .into_iter()
        .chain(loss.metrics.values());
    for (at, scalar) in scalars.enumerate() {
        let function = match scalar.global().dtype() {
            DType::F64 => "figure_f64",
            _ => "figure_f32",
        };
        cuda.launch(
            &UPDATE,
            function,
            one,
            &[scalar.into(), (&doubles).into(), at.into()],
        )?;
    }
    debug_assert_eq!(y.figures.shape(), [FIGURES + MOST_METRICS]);
    let args = [
        (&state).into(),
        (&doubles).into(),
        limit.into(),
        metrics.into(),
        MOST_METRICS.into(),
        (&mut y.factor).into(),
        (&mut y.figures).into(),
    ];
    cuda.launch(&UPDATE, "figures", one, &args)
}

/// Issues the update of one parameter. `state` has the arrays that the rule keeps for the
/// parameter. The gradients' factor is read on the device; if it is NaN, nothing changes.
pub(super) fn update<T: Float>(
    cuda: &Cuda<'_>,
    rule: UpdateRule,
    step: AdamStep,
    w: &mut ViewMut<'_>,
    state: &mut [&mut ViewMut<'_>],
    gradient: &View<'_>,
    factor: &View<'_>,
) -> Result<()> {
    let elements = gradient.region().elements();
    let of = |value: f64| -> Arg<'_> { T::from_double(value).into() };
    let (name, state, constants): (_, Vec<Arg<'_>>, Vec<Arg<'_>>) = match (rule, state) {
        (UpdateRule::AdamW(adamw), [mean, square]) => {
            let AdamFactors {
                rate,
                root,
                keep,
                beta1,
                fresh1,
                beta2,
                fresh2,
                epsilon,
            } = adamw.factors::<T>(step);
            let constants = [rate, root, keep, beta1, fresh1, beta2, fresh2, epsilon];
            let kept = vec![(&mut **mean).into(), (&mut **square).into()];
            ("adamw", kept, constants.map(Into::into).into())
        }
        (UpdateRule::Sgd(Sgd { decay, .. }), []) => {
            ("sgd", Vec::new(), vec![of(step.rate), of(decay)])
        }
        (
            UpdateRule::Sgd(Sgd {
                decay,
                momentum,
                nesterov,
            }),
            [sum],
        ) => {
            let constants = vec![
                of(step.rate),
                of(decay),
                of(momentum),
                i32::from(nesterov).into(),
            ];
            ("sgd_momentum", vec![(&mut **sum).into()], constants)
        }
        (rule, state) => return Err(wrong_state(rule, state.len())),
    };

    let suffix = if T::DTYPE == DType::F64 { "f64" } else { "f32" };
    let mut args = vec![elements.into(), w.into()];
    args.extend(state);
    args.extend([gradient.into(), factor.into()]);
    args.extend(constants);
    cuda.launch(
        &UPDATE,
        &format!("{name}_{suffix}"),
        Grid::over(elements),
        &args,
    )
}
