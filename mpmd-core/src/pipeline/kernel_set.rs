//! The compiled kernels of a stage for microbatches of one shape.

use std::sync::Arc;

use super::bound_stage::BoundStage;
use super::context::Mode;
use super::erased_tree::ErasedTree;
use super::kernels::{
    BackwardKernel, BackwardWeightKernel, ForwardKernel, InferredStage, PassKernel,
};
use super::stage::{Passes, PlacedShape};
use crate::api::jit::{Jit, JitBuilder};
use crate::api::program::Program;
use crate::error::Result;
use crate::kernel::Kernel;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{PrefixTree, Tree};

/// The compiled kernels of a stage for one combination of input and side input shapes.
pub(super) struct KernelSet {
    /// The shapes of the stage's input.
    pub(super) x: ErasedTree<ShapedArray>,
    pub(super) side: ErasedTree<ShapedArray>,
    pub(super) keeps_inputs: bool,
    /// The shardings of the outputs of the forward pass.
    outputs: PrefixTree<Sharding>,
    /// The forward kernels, at most one for each [`Mode`], each built at its first use.
    pub(super) forward: Vec<ForwardOfMode>,
    /// The kernels for input and weight gradient as separate passes, if the stage implements these.
    pub(super) split: Option<SplitKernels>,
    /// The kernels that compute both gradients in one pass, if [`BoundStage::fuses`]: one for the
    /// first microbatch, one for later microbatches.
    pub(super) fused: Option<[Jit<PassKernel<BackwardKernel>>; 2]>,
}

/// A kernel of the forward pass, compiled for one mode.
pub(super) struct ForwardOfMode {
    mode: Mode,
    pub(super) jit: Jit<PassKernel<ForwardKernel>>,
}

/// The kernels that compute input gradient and weight gradient in separate passes.
pub(super) struct SplitKernels {
    pub(super) input: Jit<PassKernel<BackwardKernel>>,
    /// The kernels of the weight gradient: one for the first microbatch, one for later
    /// microbatches.
    pub(super) weight: [Jit<PassKernel<BackwardWeightKernel>>; 2],
}

impl BoundStage {
    /// Returns the index of the forward kernel for `mode` in the kernel set with index `kernels`.
    /// Builds the kernel at its first use.
    pub(super) fn forward_kernel(
        &mut self,
        program: &Program,
        kernels: usize,
        mode: Mode,
    ) -> Result<usize> {
        let set = &mut self.kernels[kernels];
        if let Some(known) = set.forward.iter().position(|known| known.mode == mode) {
            return Ok(known);
        }

        let kernel = ForwardKernel {
            stage: self.stage.clone(),
            mode,
        };
        let jit = program
            .jit(PassKernel(kernel))
            .on(&self.mesh)
            .outputs(set.outputs.clone())
            .build()?;
        set.forward.push(ForwardOfMode { mode, jit });
        Ok(set.forward.len() - 1)
    }

    /// Builds the kernels for microbatches of these shapes, bound to the stage's mesh.
    pub(super) fn bind(
        &self,
        program: &Program,
        x: ErasedTree<ShapedArray>,
        side: ErasedTree<ShapedArray>,
    ) -> Result<KernelSet> {
        let signature = self.infer(&self.param_shapes(), &x, &side)?;
        let keeps_inputs = signature.residual.is_none();
        let residual = signature.residual.unwrap_or_else(ErasedTree::empty);
        let outputs = PrefixTree::from((PrefixTree::from(&self.output), self.shardings(&residual)));

        let gradients = self.gradients().into_iter();
        let (shapes, shardings) = gradients
            .map(|gradient| (gradient.aval, gradient.sharding))
            .unzip();
        let inferred = Arc::new(InferredStage {
            gradients: ErasedTree {
                structure: self.structure.clone(),
                leaves: shapes,
            },
            x: x.clone(),
            keeps_inputs,
            weight_residual: signature.weight_residual,
            keeps: signature.keeps,
            backward_input: signature.backward_input,
        });

        let builder = BackwardBuilder {
            stage: self,
            program,
            residual: &residual,
            inferred: &inferred,
            gradients: PrefixTree::of(&ErasedTree {
                structure: self.structure.clone(),
                leaves: shardings,
            }),
        };
        let split = match self.stage.passes() {
            Passes::Fused => None,
            Passes::Split | Passes::Both => Some(builder.split()?),
        };
        let fused = if self.fuses() {
            Some(builder.fused()?)
        } else {
            None
        };
        Ok(KernelSet {
            x,
            side,
            keeps_inputs,
            outputs,
            forward: Vec::new(),
            split,
            fused,
        })
    }

    fn shardings(&self, placed: &ErasedTree<PlacedShape>) -> PrefixTree<Sharding> {
        PrefixTree::of(&placed.map_ref(&mut |leaf| leaf.sharding(&self.mesh)))
    }
}

/// Builds the kernels of the backward passes for microbatches of one shape.
///
/// Each pass is the last reader of the residuals of the pass before, so the kernel donates them.
/// Inputs that the stage keeps are not donated: they may have other readers.
struct BackwardBuilder<'a> {
    stage: &'a BoundStage,
    program: &'a Program,
    /// The declared residuals; empty if the stage keeps its inputs instead.
    residual: &'a ErasedTree<PlacedShape>,
    inferred: &'a Arc<InferredStage>,
    /// The shardings of the gradients of the parameters.
    gradients: PrefixTree<Sharding>,
}

impl BackwardBuilder<'_> {
    /// Builds the kernels that compute input gradient and weight gradient separately.
    fn split(&self) -> Result<SplitKernels> {
        let weight_residual = self.stage.shardings(&self.inferred.weight_residual);
        let outputs = PrefixTree::from((self.input(), weight_residual, nothing()));
        Ok(SplitKernels {
            input: self.backward(false, outputs).build()?,
            weight: [
                self.weight().build()?,
                self.weight().donate("1").partial_sums("1").build()?,
            ],
        })
    }

    /// Builds the kernels that compute both gradients: for the first microbatch, and for later
    /// ones.
    fn fused(&self) -> Result<[Jit<PassKernel<BackwardKernel>>; 2]> {
        let fused = || {
            let outputs = PrefixTree::from((self.input(), nothing(), self.gradients.clone()));
            self.backward(true, outputs)
        };
        Ok([
            fused().build()?,
            fused().donate("3").partial_sums("3").build()?,
        ])
    }

    /// Returns the sharding of the gradient of the stage's input.
    fn input(&self) -> PrefixTree<Sharding> {
        PrefixTree::from(&self.stage.input)
    }

    fn backward(
        &self,
        fused: bool,
        outputs: PrefixTree<Sharding>,
    ) -> JitBuilder<PassKernel<BackwardKernel>> {
        let kernel = BackwardKernel {
            stage: self.stage.stage.clone(),
            inferred: self.inferred.clone(),
            needs_dx: self.stage.needs_dx,
            fused,
        };
        let jit = self.program.jit(PassKernel(kernel)).on(&self.stage.mesh);
        donate(jit.outputs(outputs), 1, self.residual)
    }

    fn weight(&self) -> JitBuilder<PassKernel<BackwardWeightKernel>> {
        let kernel = BackwardWeightKernel {
            stage: self.stage.stage.clone(),
            inferred: self.inferred.clone(),
        };
        let jit = self.program.jit(PassKernel(kernel)).on(&self.stage.mesh);
        donate(
            jit.outputs(self.gradients.clone()),
            0,
            &self.inferred.weight_residual,
        )
    }
}

/// Returns the shardings of an output tree that has no leaves.
fn nothing() -> PrefixTree<Sharding> {
    PrefixTree::Node(Vec::new())
}

/// Makes the kernel donate its residuals, if there are any. They are the input at index `input` of
/// the kernel.
fn donate<K: Kernel>(
    jit: JitBuilder<K>,
    input: usize,
    residual: &ErasedTree<PlacedShape>,
) -> JitBuilder<K> {
    if residual.leaves.is_empty() {
        jit
    } else {
        jit.donate(input.to_string())
    }
}
