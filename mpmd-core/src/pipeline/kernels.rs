//! Kernels that run the passes of a stage.

use std::sync::Arc;

use half::{bf16, f16};

use super::context::{Extras, Mode, PassValues, StageContext};
use super::erased::ErasedStage;
use super::erased_tree::ErasedTree;
use super::stage::{KeptResidual, PlacedShape};
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{
    Collective, Context, Kernel, Shapes, Signature, View, ViewMut, Views, ViewsMut, below,
};
use mpmd_device::collective::{Reduce, combine};
use mpmd_device::cuda::kernels::ADD;
use mpmd_device::cuda::{source::Source, work::Grid};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::tree::Tree;

/// A pass of a stage, run by the kernel [`PassKernel`].
pub(super) trait StagePass: Send + Sync + 'static {
    type In: Tree<Leaf = MpmdArray>;
    type Out: Tree<Leaf = MpmdArray>;

    fn stage(&self) -> &dyn ErasedStage;

    /// Infers the kernel's signature from the shapes `x` of its inputs.
    fn signature(&self, x: &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>>;

    /// Returns the kind of the pass and its settings as words, for [`Kernel::statics`].
    fn words(&self) -> Vec<u64>;

    /// Runs the pass, on the host or on the kernel's device.
    fn pass(
        &self,
        cx: &mut Context<'_>,
        x: Views<'_, Self::In>,
        y: ViewsMut<'_, Self::Out>,
    ) -> Result<()>;
}

/// The kernel that runs a [`StagePass`].
pub(super) struct PassKernel<P>(pub(super) P);

impl<P: StagePass> Kernel for PassKernel<P> {
    type In = P::In;
    type Out = P::Out;

    fn infer(&self, x: &Shapes<P::In>) -> Result<Signature<Shapes<P::Out>>> {
        self.0.signature(x)
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: Views<'_, P::In>,
        y: ViewsMut<'_, P::Out>,
    ) -> Result<()> {
        match self.0.stage().computes_on_host() {
            true => cx.on_host::<P::In, P::Out>(x, y, |cx, x, y| self.0.pass(cx, x, y)),
            false => self.0.pass(cx, x, y),
        }
    }

    fn name(&self) -> &str {
        self.0.stage().name()
    }

    fn statics(&self) -> Vec<u64> {
        [self.0.words(), self.0.stage().statics()].concat()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.stage().cuda()
    }
}

/// The kernel of the forward pass: (parameters, inputs, side inputs, extras) -> (outputs,
/// residuals).
pub(super) struct ForwardKernel {
    pub(super) stage: Arc<dyn ErasedStage>,
    pub(super) mode: Mode,
}

/// The kernel of the input gradient: (parameters, residuals, output gradients, gradients so far,
/// extras) -> (input gradients, weight residuals, gradients).
///
/// The input gradients are absent unless `needs_dx`. A `fused` kernel also computes the parameters'
/// gradients, and has no weight residuals. Any other kernel has no parameter gradients. After the
/// first microbatch, a fused kernel adds to the gradients so far.
pub(super) struct BackwardKernel {
    pub(super) stage: Arc<dyn ErasedStage>,
    pub(super) inferred: Arc<InferredStage>,
    pub(super) needs_dx: bool,
    pub(super) fused: bool,
}

/// The kernel of the weight gradient: (weight residuals, gradients so far, extras) -> gradients.
/// The first microbatch has no gradients so far.
pub(super) struct BackwardWeightKernel {
    pub(super) stage: Arc<dyn ErasedStage>,
    pub(super) inferred: Arc<InferredStage>,
}

/// The kernel that adds the second of two arrays to the first, in place.
pub(super) struct AddArrays;

/// The declaration of a stage for given shapes, as its `infer` returned it.
pub(super) struct InferredStage {
    /// The shapes of the parameters' gradients: the parameter's shape, or `[0]` if it is frozen.
    pub(super) gradients: ErasedTree<ShapedArray>,
    pub(super) x: ErasedTree<ShapedArray>,
    /// True if the stage keeps its inputs and side inputs as residuals.
    pub(super) keeps_inputs: bool,
    pub(super) weight_residual: ErasedTree<PlacedShape>,
    pub(super) keeps: Vec<KeptResidual>,
    pub(super) backward_input: Vec<Collective>,
}

/// Returns the shapes of residuals, without their shardings.
fn avals(placed: &ErasedTree<PlacedShape>) -> ErasedTree<ShapedArray> {
    placed.map_ref(&mut |leaf| leaf.aval.clone())
}

fn declare<O>(mut signature: Signature<O>, collectives: &[Collective]) -> Signature<O> {
    signature.collectives.extend_from_slice(collectives);
    signature
}

/// Declares the bytes of the objects among the residuals `placed`. The residuals are the output at
/// index `output` of the kernel.
fn declare_objects<O>(
    signature: Signature<O>,
    output: usize,
    placed: &ErasedTree<PlacedShape>,
) -> Signature<O> {
    let all = placed
        .leaves_with_paths()
        .into_iter()
        .filter(|(_, leaf)| leaf.object_bytes > 0);
    all.fold(signature, |signature, (path, leaf)| {
        signature.object_bytes(below(output, &path), leaf.object_bytes)
    })
}

/// Sets the gradient of the parameters to zero if `starts`, that is, for the first microbatch. The
/// pass then adds to it.
fn prepare_gradient(
    cx: &Context<'_>,
    gradient: &mut ErasedTree<ViewMut<'_>>,
    starts: bool,
) -> Result<()> {
    if starts {
        let mut trained = gradient
            .leaves
            .iter_mut()
            .filter(|leaf| !leaf.region().is_empty());
        trained.try_for_each(|leaf| cx.zero(leaf))?;
    }
    Ok(())
}

impl StagePass for ForwardKernel {
    type In = (ErasedTree, ErasedTree, ErasedTree, Extras<MpmdArray>);
    type Out = (ErasedTree, ErasedTree);

    fn stage(&self) -> &dyn ErasedStage {
        &*self.stage
    }

    fn signature(
        &self,
        (params, x, side, _): &Shapes<Self::In>,
    ) -> Result<Signature<Shapes<Self::Out>>> {
        let signature = self.stage.infer(params, x, side)?;
        let residual = signature.residual.unwrap_or_else(ErasedTree::empty);
        let kernel = Signature::new((signature.out, avals(&residual)));
        let kernel = declare(kernel, &signature.forward);
        Ok(if self.mode == Mode::Training {
            declare_objects(kernel, 1, &residual)
        } else {
            kernel
        })
    }

    fn words(&self) -> Vec<u64> {
        vec![u64::from(b'F'), self.mode as u64]
    }

    fn pass(
        &self,
        cx: &mut Context<'_>,
        (params, x, side, extras): Views<'_, Self::In>,
        (y, residual): ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        let given = PassValues {
            side: Some(side),
            residual_mut: Some(residual),
            ..PassValues::default()
        };
        let mut cx = StageContext::new(cx, self.stage.name(), self.mode, given, extras);
        self.stage.forward(&mut cx, params, x, y)
    }
}

impl StagePass for BackwardKernel {
    type In = (
        ErasedTree,
        ErasedTree,
        ErasedTree,
        Option<ErasedTree>,
        Extras<MpmdArray>,
    );
    type Out = (Option<ErasedTree>, ErasedTree, Option<ErasedTree>);

    fn stage(&self) -> &dyn ErasedStage {
        &*self.stage
    }

    fn signature(
        &self,
        (_, _, _, so_far, _): &Shapes<Self::In>,
    ) -> Result<Signature<Shapes<Self::Out>>> {
        let inferred = &self.inferred;
        let dx = self.needs_dx.then(|| inferred.x.clone());

        // A fused kernel adds to the gradients so far, in place.
        if self.fused {
            let gradient = Some(inferred.gradients.clone());
            let signature = Signature::new((dx, ErasedTree::empty(), gradient));
            let signature = declare(signature, &inferred.backward_input);
            let paths = so_far.iter().flat_map(|so_far| so_far.structure().paths());
            return Ok(paths.fold(signature, |signature, path| {
                signature.alias(below(3, &path), below(2, &path))
            }));
        }

        let signature = Signature::new((dx, avals(&inferred.weight_residual), None));
        let signature = declare(signature, &inferred.backward_input);
        let keeps = inferred.keeps.iter();
        let signature = keeps.fold(signature, |signature, kept| {
            let residual = below(1, &kept.residual);
            signature.alias(residual, below(1, &kept.weight_residual))
        });
        Ok(declare_objects(signature, 1, &inferred.weight_residual))
    }

    fn words(&self) -> Vec<u64> {
        let kind = if self.fused { b'B' } else { b'I' };
        vec![u64::from(kind), u64::from(self.needs_dx)]
    }

    fn pass(
        &self,
        cx: &mut Context<'_>,
        (params, residual, dy, so_far, extras): Views<'_, Self::In>,
        (dx, weight_residual, gradient): ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        let mut given = PassValues::default();
        let mut objects = Vec::new();
        if self.inferred.keeps_inputs {
            (given.input, given.side) = residual
                .into_branches()
                .map(|[input, side]| (input, side))
                .unzip();
        } else {
            objects.clone_from(&residual.leaves);
            given.residual = Some(residual);
        }

        let stage = self.stage.name();
        let Some(mut gradient) = gradient else {
            given.weight_residual_mut = Some(weight_residual);
            let mut cx = StageContext::new(cx, stage, Mode::Training, given, extras);
            self.stage.backward_input(&mut cx, params, dy, dx)?;
            objects.iter().for_each(View::discard_object);
            return Ok(());
        };

        prepare_gradient(cx, &mut gradient, so_far.is_none())?;
        let mut cx = StageContext::new(cx, stage, Mode::Training, given, extras);
        self.stage.backward(&mut cx, params, dy, dx, gradient)?;
        objects.iter().for_each(View::discard_object);
        Ok(())
    }
}

impl StagePass for BackwardWeightKernel {
    type In = (ErasedTree, Option<ErasedTree>, Extras<MpmdArray>);
    type Out = ErasedTree;

    fn stage(&self) -> &dyn ErasedStage {
        &*self.stage
    }

    fn signature(&self, (_, so_far, _): &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>> {
        let signature = Signature::new(self.inferred.gradients.clone());
        let paths = so_far.iter().flat_map(|so_far| so_far.structure().paths());
        Ok(paths.fold(signature, |signature, path| {
            signature.alias(below(1, &path), path)
        }))
    }

    fn words(&self) -> Vec<u64> {
        vec![u64::from(b'W')]
    }

    fn pass(
        &self,
        cx: &mut Context<'_>,
        (weight_residual, so_far, extras): Views<'_, Self::In>,
        mut gradient: ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        prepare_gradient(cx, &mut gradient, so_far.is_none())?;

        let objects = weight_residual.leaves.clone();
        let given = PassValues {
            weight_residual: Some(weight_residual),
            ..PassValues::default()
        };
        let mut cx = StageContext::new(cx, self.stage.name(), Mode::Training, given, extras);
        self.stage.backward_weight(&mut cx, gradient)?;
        objects.iter().for_each(View::discard_object);
        Ok(())
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
            other => Err(Error::kernel(format!(
                "gradients of {other}: they are floats"
            ))),
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

/// Adds `more` to `sum`, element by element, with the same bits on any kind of device.
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
        return cuda.launch(
            &ADD,
            function,
            Grid::over(n),
            &[n.into(), sum.into(), more.into()],
        );
    }

    match dtype {
        DType::F16 => combine(Reduce::Sum, sum.as_mut_slice::<f16>()?, more.as_slice()?),
        DType::Bf16 => combine(Reduce::Sum, sum.as_mut_slice::<bf16>()?, more.as_slice()?),
        DType::F64 => combine(Reduce::Sum, sum.as_mut_slice::<f64>()?, more.as_slice()?),
        _ => combine(Reduce::Sum, sum.as_mut_slice::<f32>()?, more.as_slice()?),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::exec::array::host_array::HostArray;
    use crate::prelude::*;
    use mpmd_layout::topology::DeviceKind;

    use super::*;

    /// Adds all pairs of some 16-bit floats, and many wider floats, on a device of this kind.
    /// Returns the bytes of the sums for f16, bf16, f32 and f64.
    fn sums(kind: DeviceKind) -> Vec<Vec<u8>> {
        let mut p = Program::builder().device_kinds(&[kind]).alone().unwrap();
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let add = p
            .jit(AddArrays)
            .on(&mesh)
            .outputs(mesh.replicated())
            .donate("0")
            .build()
            .unwrap();
        // All exponents, both signs, and mantissas that round up, down, and to even. No NaN: its
        // bits depend on the device.
        let mantissas = [0u16, 1, 2, 0x55, 0x7f, 0x80, 0x200, 0x3ff];
        let every = |exponents: u16, shift: u16, mask: u16| {
            let one = move |i: u16| (i << shift) | (mantissas[i as usize % 8] & mask);
            (0..exponents)
                .map(one)
                .flat_map(|half| [half, half | 0x8000])
                .collect::<Vec<u16>>()
        };
        let [f16s, bf16s] = [every(31, 10, 0x3ff), every(255, 7, 0x7f)];
        let pairs = |halves: &[u16]| {
            let count = halves.len();
            let of = |pick: &dyn Fn(usize) -> usize| {
                (0..count * count)
                    .flat_map(|i| halves[pick(i)].to_ne_bytes())
                    .collect::<Vec<u8>>()
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
                p.device_put(&MpmdArray::from_host(host), mesh.replicated())
                    .unwrap()
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
        for (cuda, cpu) in sums(DeviceKind::Cuda)
            .into_iter()
            .zip(sums(DeviceKind::Cpu))
        {
            let differ = cuda
                .iter()
                .zip(&cpu)
                .filter(|(cuda, cpu)| cuda != cpu)
                .count();
            assert_eq!((cuda.len(), differ), (cpu.len(), 0));
        }
    }
}
