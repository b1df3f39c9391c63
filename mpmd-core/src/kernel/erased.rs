//! Kernels without their types: their trees are lists of leaves. All of a call but the building of
//! its trees is the same code for every kernel, which the compiler then sees once.

use super::{Context, Kernel, Shapes, Signature, View, ViewMut, Views, ViewsMut};
use crate::error::Result;
use mpmd_device::cuda::source::Source;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::DimensionRule;
use mpmd_layout::tree::{Structure, Tree};

/// A kernel of any type.
pub(crate) trait UntypedKernel: Send + Sync + 'static {
    fn name(&self) -> &str;

    fn statics(&self) -> Vec<u64>;

    fn cuda(&self) -> Vec<&'static Source>;

    fn rule(&self) -> Option<DimensionRule>;

    /// Computes the signature for inputs of these global shapes, which are the leaves of a tree of
    /// this structure.
    fn infer(
        &self,
        structure: &Structure,
        shapes: &mut dyn Iterator<Item = ShapedArray>,
    ) -> Result<Signature<OutputShapes>>;

    /// Computes this device's part of the outputs. Each argument has the structure of a tree and
    /// its leaves.
    fn run<'a>(
        &self,
        cx: &mut Context<'_>,
        inputs: (&Structure, &mut dyn Iterator<Item = View<'a>>),
        outputs: (&Structure, &mut dyn Iterator<Item = ViewMut<'a>>),
    ) -> Result<()>;
}

/// The shapes of a kernel's outputs: a tree, as its structure and its leaves.
pub(crate) struct OutputShapes {
    pub(crate) structure: Structure,
    /// The path of each leaf.
    pub(crate) paths: Vec<String>,
    pub(crate) shapes: Vec<ShapedArray>,
}

/// A kernel whose type only this wrapper knows.
pub(crate) struct Typed<K>(pub(crate) K);

impl<K: Kernel> UntypedKernel for Typed<K> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        self.0.statics()
    }

    fn cuda(&self) -> Vec<&'static Source> {
        self.0.cuda()
    }

    fn rule(&self) -> Option<DimensionRule> {
        self.0.rule()
    }

    fn infer(
        &self,
        structure: &Structure,
        shapes: &mut dyn Iterator<Item = ShapedArray>,
    ) -> Result<Signature<OutputShapes>> {
        let x = <Shapes<K::In> as Tree>::from_leaves(structure, shapes)?;
        let signature = self.0.infer(&x)?;
        let structure = signature.outputs.structure();
        Ok(signature.with_outputs(|outputs| OutputShapes {
            paths: structure.paths(),
            shapes: outputs.into_leaves(),
            structure,
        }))
    }

    fn run<'a>(
        &self,
        cx: &mut Context<'_>,
        inputs: (&Structure, &mut dyn Iterator<Item = View<'a>>),
        outputs: (&Structure, &mut dyn Iterator<Item = ViewMut<'a>>),
    ) -> Result<()> {
        let x = <Views<'a, K::In> as Tree>::from_leaves(inputs.0, inputs.1)?;
        let y = <ViewsMut<'a, K::Out> as Tree>::from_leaves(outputs.0, outputs.1)?;
        self.0.run(cx, x, y)
    }
}
