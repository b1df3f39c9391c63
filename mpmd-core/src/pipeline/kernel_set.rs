//! The compiled kernels of a stage for microbatches of one shape.

use std::sync::Arc;

use super::bound_stage::BoundStage;
use super::bundle::Bundle;
use super::context::Mode;
use super::kernels::{Backward, BackwardWeight, Forward, Inferred, PassKernel};
use super::stage::{Passes, PlacedShape};
use crate::api::jit::{Jit, JitBuilder};
use crate::api::program::Program;
use crate::error::Result;
use crate::kernel::Kernel;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::tree::{PrefixTree, Tree};

/// The kernels of a stage for microbatches of these shapes.
pub(super) struct KernelSet {
    /// The shapes of the stage's input and side input.
    pub(super) x: Bundle<ShapedArray>,
    pub(super) side: Bundle<ShapedArray>,
    pub(super) keeps_inputs: bool,
    /// The shardings of the outputs of the forward pass.
    outputs: PrefixTree<Sharding>,
    /// A kernel of the forward pass for each mode, built at first use.
    pub(super) forward: Vec<(Mode, Jit<PassKernel<Forward>>)>,
    /// The kernels of the separate gradients, if the stage splits them.
    pub(super) split: Option<Split>,
    /// The kernels of both gradients, if the stage fuses them: for the first microbatch, and for
    /// later ones.
    pub(super) fused: Option<[Jit<PassKernel<Backward>>; 2]>,
}

pub(super) struct Split {
    pub(super) input: Jit<PassKernel<Backward>>,
    /// The kernels of the weight gradient: for the first microbatch, and for later ones.
    pub(super) weight: [Jit<PassKernel<BackwardWeight>>; 2],
}

impl BoundStage {
    /// Returns the index of the forward pass in this mode within its kernel set, and builds it if
    /// it is new. `kernels` is the index of the set.
    pub(super) fn forward_kernel(
        &mut self,
        program: &Program,
        kernels: usize,
        mode: Mode,
    ) -> Result<usize> {
        let (stage, mesh, set) = (&self.stage, &self.mesh, &mut self.kernels[kernels]);
        if let Some(known) = set.forward.iter().position(|(known, _)| *known == mode) {
            return Ok(known);
        }
        let kernel = Forward {
            stage: stage.clone(),
            mode,
        };
        let jit = program
            .jit(PassKernel(kernel))
            .on(mesh)
            .outputs(set.outputs.clone())
            .build()?;
        set.forward.push((mode, jit));
        Ok(set.forward.len() - 1)
    }

    /// Binds the kernels for microbatches of these shapes.
    pub(super) fn bind(
        &self,
        program: &Program,
        x: Bundle<ShapedArray>,
        side: Bundle<ShapedArray>,
    ) -> Result<KernelSet> {
        let signature = self.infer(&self.param_shapes(), &x, &side)?;
        let keeps_inputs = signature.residual.is_none();
        let residual = signature.residual.unwrap_or_else(Bundle::empty);
        let (shapes, places) = self.gradients().into_iter().unzip();
        let gradient = PrefixTree::of(&Bundle {
            structure: self.structure.clone(),
            leaves: places,
        });
        let [input, output] = [&self.input, &self.output].map(PrefixTree::from);
        let weight_residual = self.shardings(&signature.weight_residual);
        let outputs = PrefixTree::from((output, self.shardings(&residual)));
        let nothing = || PrefixTree::Node(Vec::new());
        let inferred = Arc::new(Inferred {
            gradients: Bundle {
                structure: self.structure.clone(),
                leaves: shapes,
            },
            x: x.clone(),
            keeps_inputs,
            weight_residual: signature.weight_residual,
            keeps: signature.keeps,
            backward_input: signature.backward_input,
        });
        let (stage, mesh) = (&self.stage, &self.mesh);
        // Each pass is the last reader of the residuals of the pass before, so it takes them as
        // donations. Inputs that are kept may have other readers.
        let backward = |fused, outputs| {
            let (stage, inferred) = (stage.clone(), inferred.clone());
            let kernel = Backward {
                stage,
                inferred,
                needs_dx: self.needs_dx,
                fused,
            };
            donate(
                program.jit(PassKernel(kernel)).on(mesh).outputs(outputs),
                1,
                &residual,
            )
        };
        let split = || {
            let outputs = PrefixTree::from((input.clone(), weight_residual.clone(), nothing()));
            backward(false, outputs)
        };
        let fused = || {
            let outputs = PrefixTree::from((input.clone(), nothing(), gradient.clone()));
            backward(true, outputs)
        };
        let weight = || {
            let kernel = BackwardWeight(stage.clone(), inferred.clone());
            let jit = program
                .jit(PassKernel(kernel))
                .on(mesh)
                .outputs(gradient.clone());
            donate(jit, 0, &inferred.weight_residual)
        };
        Ok(KernelSet {
            x,
            side,
            keeps_inputs,
            outputs,
            forward: Vec::new(),
            split: match stage.passes() {
                Passes::Fused => None,
                Passes::Split | Passes::Both => Some(Split {
                    input: split().build()?,
                    weight: [
                        weight().build()?,
                        weight().donate("1").partial_sums("1").build()?,
                    ],
                }),
            },
            fused: match self.fuses() {
                false => None,
                true => Some([
                    fused().build()?,
                    fused().donate("3").partial_sums("3").build()?,
                ]),
            },
        })
    }

    fn shardings(&self, placed: &Bundle<PlacedShape>) -> PrefixTree<Sharding> {
        PrefixTree::of(&placed.map_ref(&mut |leaf| leaf.sharding(&self.mesh)))
    }
}

/// Donates residuals, which are the input `input` of the kernel, if there are any.
fn donate<K: Kernel>(
    jit: JitBuilder<K>,
    input: usize,
    residual: &Bundle<PlacedShape>,
) -> JitBuilder<K> {
    if residual.leaves.is_empty() {
        jit
    } else {
        jit.donate(input.to_string())
    }
}
