//! Kernels that run the passes of a stage.

use std::sync::Arc;

use half::{bf16, f16};

use super::stage::{PlacedShape, Stage};
use crate::device::cuda::kernels::ADD;
use crate::device::cuda::{source::Source, work::Grid};
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::{
    device::collective::{Reduce, combine},
    kernel::{Context, Kernel, Shapes, Signature, View, ViewMut, Views, ViewsMut, below},
};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::tree::{Structure, Tree, TreeError};

/// The kernel of the forward pass: (parameters, inputs, side inputs) -> (outputs, residuals).
pub(super) struct Forward<S: Stage>(pub(super) Arc<S>);

/// The kernel of the input gradient: (parameters, residuals, output gradients) -> (input gradients,
/// weight residuals).
pub(super) struct BackwardInput<S: Stage>(pub(super) Arc<S>, pub(super) Arc<Inferred>);

/// Like [`BackwardInput`], without input gradients: for the first stage.
pub(super) struct BackwardFirst<S: Stage>(pub(super) Arc<S>, pub(super) Arc<Inferred>);

/// The kernel of the weight gradient of the first microbatch: weight residuals -> gradients.
pub(super) struct BackwardWeight<S: Stage>(pub(super) Arc<S>, pub(super) Arc<Inferred>);

/// The kernel of the weight gradient of later microbatches: (weight residuals, gradients so far) ->
/// gradients, in place.
pub(super) struct AddBackwardWeight<S: Stage>(pub(super) Arc<S>);

/// The kernel of both gradients: (parameters, residuals, output gradients, gradients so far) ->
/// (input gradients, gradients). The first microbatch has no gradients so far, and the first stage
/// no input gradients.
pub(super) struct FusedBackward<S: Stage> {
    pub(super) stage: Arc<S>,
    pub(super) inferred: Arc<Inferred>,
    pub(super) first: bool,
}

/// The kernel that adds the second of two arrays to the first, in place.
pub(super) struct AddArrays;

/// The stage's declaration for given shapes.
pub(super) struct Inferred {
    pub(super) params: Flat,
    pub(super) x: Flat,
    pub(super) weight_residual: Flat,
    pub(super) keeps: Vec<(String, String)>,
    pub(super) backward_input: Vec<(String, ShapedArray)>,
}

/// A tree of shapes without its type.
pub(super) struct Flat {
    structure: Structure,
    avals: Vec<ShapedArray>,
}

impl Flat {
    pub(super) fn of(tree: &impl Tree<Leaf = ShapedArray>) -> Self {
        Self { structure: tree.structure(), avals: tree.leaves().into_iter().cloned().collect() }
    }

    pub(super) fn of_placed(tree: &impl Tree<Leaf = PlacedShape>) -> Self {
        let avals = tree.leaves().into_iter().map(|leaf| leaf.aval.clone()).collect();
        Self { structure: tree.structure(), avals }
    }

    fn tree<T: Tree>(&self) -> Result<Shapes<T>, TreeError> {
        Shapes::<T>::from_leaves(&self.structure, self.avals.iter().cloned())
    }
}

fn declare<O>(signature: Signature<O>, collectives: &[(String, ShapedArray)]) -> Signature<O> {
    collectives
        .iter()
        .fold(signature, |signature, (axis, aval)| signature.all_reduce(axis, aval.clone()))
}

impl<S: Stage> Kernel for Forward<S> {
    type In = (S::Params, S::In, S::Side);
    type Out = (S::Out, S::Residual);

    fn infer(&self, (params, x, side): &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        let signature = self.0.infer(params, x, side)?;
        let residual = Flat::of_placed(&signature.residual).tree::<S::Residual>()?;
        let collectives = signature.forward;
        Ok(declare(Signature::new((signature.out, residual)), &collectives))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (params, x, side): Views<'_, Self::In>,
        (y, residual): ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        self.0.forward(cx, params, x, side, y, residual)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        [vec![u64::from(b'F')], self.0.statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.cuda()
    }
}

impl Inferred {
    /// Returns the signature of the input gradient's kernel. `outputs` is the index of the weight
    /// residuals in the tuple of outputs; `None` if they are the only output.
    fn backward_input<O>(&self, out: O, outputs: Option<usize>) -> Signature<O> {
        let signature = declare(Signature::new(out), &self.backward_input);
        self.keeps.iter().fold(signature, |signature, (residual, weight)| {
            let output = outputs.map_or_else(|| weight.clone(), |index| below(index, weight));
            signature.alias(below(1, residual), output)
        })
    }
}

impl<S: Stage> Kernel for BackwardInput<S> {
    type In = (S::Params, S::Residual, S::Out);
    type Out = (S::In, S::WeightResidual);

    fn infer(&self, _: &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        let weight = self.1.weight_residual.tree::<S::WeightResidual>()?;
        Ok(self.1.backward_input((self.1.x.tree::<S::In>()?, weight), Some(1)))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (params, residual, dy): Views<'_, Self::In>,
        (dx, weight_residual): ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        self.0.backward_input(cx, params, residual, dy, Some(dx), weight_residual)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        [vec![u64::from(b'I')], self.0.statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.cuda()
    }
}

impl<S: Stage> Kernel for BackwardFirst<S> {
    type In = (S::Params, S::Residual, S::Out);
    type Out = S::WeightResidual;

    fn infer(&self, _: &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        Ok(self.1.backward_input(self.1.weight_residual.tree::<S::WeightResidual>()?, None))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (params, residual, dy): Views<'_, Self::In>,
        weight_residual: ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        self.0.backward_input(cx, params, residual, dy, None, weight_residual)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        [vec![u64::from(b'i')], self.0.statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.cuda()
    }
}

impl<S: Stage> Kernel for BackwardWeight<S> {
    type In = S::WeightResidual;
    type Out = S::Params;

    fn infer(&self, _: &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        Ok(Signature::new(self.1.params.tree::<S::Params>()?))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        weight_residual: Views<'_, Self::In>,
        gradient: ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        let mut leaves = gradient.into_leaves();
        leaves.iter_mut().try_for_each(|leaf| cx.zero(leaf))?;
        let gradient = ViewsMut::<'_, S::Params>::from_leaves(&self.1.params.structure, leaves)?;
        self.0.backward_weight(cx, weight_residual, gradient)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        [vec![u64::from(b'W')], self.0.statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.cuda()
    }
}

impl<S: Stage> Kernel for AddBackwardWeight<S> {
    type In = (S::WeightResidual, S::Params);
    type Out = S::Params;

    fn infer(&self, (_, gradient): &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        let paths = gradient.structure().paths();
        let signature = Signature::new(Flat::of(gradient).tree::<S::Params>()?);
        Ok(paths.iter().fold(signature, |signature, path| signature.alias(below(1, path), path)))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (weight_residual, _): Views<'_, Self::In>,
        gradient: ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        self.0.backward_weight(cx, weight_residual, gradient)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        [vec![u64::from(b'w')], self.0.statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.cuda()
    }
}

/// Input of [`FusedBackward`].
type FusedIn<S> =
    (<S as Stage>::Params, <S as Stage>::Residual, <S as Stage>::Out, Option<<S as Stage>::Params>);

impl<S: Stage> Kernel for FusedBackward<S> {
    type In = FusedIn<S>;
    type Out = (Option<S::In>, S::Params);

    fn infer(&self, (_, _, _, so_far): &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        let dx = (!self.first).then(|| self.inferred.x.tree::<S::In>()).transpose()?;
        let signature = Signature::new((dx, self.inferred.params.tree::<S::Params>()?));
        let signature = declare(signature, &self.inferred.backward_input);
        let paths = so_far.iter().flat_map(|so_far| so_far.structure().paths());
        Ok(paths
            .fold(signature, |signature, path| signature.alias(below(3, &path), below(1, &path))))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (params, residual, dy, so_far): Views<'_, Self::In>,
        (dx, gradient): ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        let mut leaves = gradient.into_leaves();
        if so_far.is_none() {
            leaves.iter_mut().try_for_each(|leaf| cx.zero(leaf))?;
        }
        let gradient =
            ViewsMut::<'_, S::Params>::from_leaves(&self.inferred.params.structure, leaves)?;
        self.stage.backward(cx, params, residual, dy, dx, gradient)
    }

    fn name(&self) -> &str {
        self.stage.name()
    }

    fn statics(&self) -> Vec<u64> {
        [vec![u64::from(b'B'), u64::from(self.first)], self.stage.statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.stage.cuda()
    }
}

impl Kernel for AddArrays {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (sum, more): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        if sum != more {
            return Err(Error::kernel(format!("{more} cannot be added to {sum}")));
        }
        match sum.dtype() {
            DType::F16 | DType::Bf16 | DType::F32 | DType::F64 => {
                Ok(Signature::new(sum.clone()).alias("0", ""))
            }
            other => Err(Error::kernel(format!("gradients of {other}: they are floats"))),
        }
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (_, more): (View<'_>, View<'_>),
        mut sum: ViewMut<'_>,
    ) -> Result<()> {
        add(cx, &mut sum, &more)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&ADD]
    }
}

/// Adds floats, `sum += more`, with the same bits on any device.
pub(super) fn add(cx: &Context<'_>, sum: &mut ViewMut<'_>, more: &View<'_>) -> Result<()> {
    let dtype = more.global().dtype();
    if let Some(cuda) = cx.cuda() {
        let function = match dtype {
            DType::F16 => "add_f16",
            DType::Bf16 => "add_bf16",
            DType::F64 => "add_f64",
            _ => "add_f32",
        };
        let n = more.region().elements();
        return cuda.launch(&ADD, function, Grid::over(n), &[n.into(), sum.into(), more.into()]);
    }
    match dtype {
        DType::F16 => combine(Reduce::Sum, sum.as_mut_slice::<f16>()?, more.as_slice()?),
        DType::Bf16 => combine(Reduce::Sum, sum.as_mut_slice::<bf16>()?, more.as_slice()?),
        DType::F64 => combine(Reduce::Sum, sum.as_mut_slice::<f64>()?, more.as_slice()?),
        _ => combine(Reduce::Sum, sum.as_mut_slice::<f32>()?, more.as_slice()?),
    }
    Ok(())
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use crate::exec::host_array::HostArray;
    use crate::prelude::*;
    use mpmd_layout::topology::DeviceKind;

    use super::*;

    /// Returns the bytes of the sums of all pairs of some 16-bit floats, and of many wider floats.
    /// A device of this kind computes them. There is one item for each of the dtypes f16, bf16, f32
    /// and f64.
    fn sums(kind: DeviceKind) -> Vec<Vec<u8>> {
        let mut p = Program::builder().device_kinds(&[kind]).alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let add =
            p.jit(AddArrays).on(&mesh).outputs(mesh.replicated()).donate("0").build().unwrap();
        // All exponents, both signs, and mantissas that round up, down, and to even. No NaN: its
        // bits depend on the device.
        let mantissas = [0u16, 1, 2, 0x55, 0x7f, 0x80, 0x200, 0x3ff];
        let every = |exponents: u16, shift: u16, mask: u16| {
            let one = move |i: u16| (i << shift) | (mantissas[i as usize % 8] & mask);
            (0..exponents).map(one).flat_map(|half| [half, half | 0x8000]).collect::<Vec<u16>>()
        };
        let [f16s, bf16s] = [every(31, 10, 0x3ff), every(255, 7, 0x7f)];
        let pairs = |halves: &[u16]| {
            let count = halves.len();
            let of = |pick: &dyn Fn(usize) -> usize| {
                (0..count * count).flat_map(|i| halves[pick(i)].to_ne_bytes()).collect::<Vec<u8>>()
            };
            [of(&|i| i / count), of(&|i| i % count)]
        };
        let f32s: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) / 7.0).collect();
        let f64s: Vec<f64> = (0..1000).map(|i| (f64::from(i) - 500.0) / 7.0).collect();
        let reversed =
            |bytes: &[u8], size: usize| bytes.chunks(size).rev().flatten().copied().collect();
        let wide = |bytes: &[u8], size| [bytes.to_vec(), reversed(bytes, size)];
        let cases = [
            (DType::F16, pairs(&f16s)),
            (DType::Bf16, pairs(&bf16s)),
            (DType::F32, wide(bytemuck::cast_slice(&f32s), 4)),
            (DType::F64, wide(bytemuck::cast_slice(&f64s), 8)),
        ];
        let found = cases.map(|(dtype, values)| {
            let aval = ShapedArray::new(&[values[0].len() / dtype.size()], dtype);
            let [sum, more] = values.map(|bytes| {
                let host = HostArray::from_bytes(aval.clone(), bytes.into()).unwrap();
                p.device_put(&MpmdArray::from_host(host), mesh.replicated()).unwrap()
            });
            let sum = add.call(&mut p, (sum, more)).unwrap();
            sum.to_host().unwrap().unwrap().bytes().to_vec()
        });
        p.finish().unwrap();
        found.to_vec()
    }

    #[test]
    fn cuda_float_sums_equal_those_of_the_host() {
        if softcuda::again!() {
            return;
        }
        for (cuda, cpu) in sums(DeviceKind::Cuda).into_iter().zip(sums(DeviceKind::Cpu)) {
            let differ = cuda.iter().zip(&cpu).filter(|(cuda, cpu)| cuda != cpu).count();
            assert_eq!((cuda.len(), differ), (cpu.len(), 0));
        }
    }
}
