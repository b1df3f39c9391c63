//! A stage without its types: its trees are [`ErasedTree`]s. So the kernels of passes, and all that
//! binds and calls them, are compiled once, and not again for each type of stage.

use std::any::Any;

use super::context::StageContext;
use super::erased_tree::ErasedTree;
use super::stage::{Passes, SideInput, SideShapes, Stage, StageProbe, StageSignature};
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::kernel::{Context, Shapes, View, ViewMut};
use mpmd_device::cuda::source::Source;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::Tree;

/// Maximum number of leaves of a shape tree that an error message lists. Further leaves are only
/// counted.
const LISTED: usize = 4;

/// The trait [`Stage`] with [`ErasedTree`]s instead of typed trees. Each method does the same as
/// the [`Stage`] method of its name.
pub(super) trait ErasedStage: Send + Sync {
    fn infer(
        &self,
        params: &ErasedTree<ShapedArray>,
        x: &ErasedTree<ShapedArray>,
        side: &ErasedTree<ShapedArray>,
    ) -> Result<StageSignature<ErasedTree<ShapedArray>>>;
    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: ErasedTree<View<'_>>,
        x: ErasedTree<View<'_>>,
        y: ErasedTree<ViewMut<'_>>,
    ) -> Result<()>;
    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: ErasedTree<View<'_>>,
        dy: ErasedTree<View<'_>>,
        dx: Option<ErasedTree<ViewMut<'_>>>,
        gradient: ErasedTree<ViewMut<'_>>,
    ) -> Result<()>;
    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: ErasedTree<View<'_>>,
        dy: ErasedTree<View<'_>>,
        dx: Option<ErasedTree<ViewMut<'_>>>,
    ) -> Result<()>;
    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: ErasedTree<ViewMut<'_>>,
    ) -> Result<()>;
    fn passes(&self) -> Passes;
    fn side(&self) -> SideInput;
    fn input_spec(&self) -> Spec;
    fn output_spec(&self) -> Spec;
    fn draws_random(&self) -> bool;
    fn is_frozen(&self, path: &str) -> bool;
    fn freeze(&self, path: &str);
    fn prepared_bytes(&self, params: ErasedTree<ShapedArray>) -> Result<Option<u64>>;
    fn prepare(
        &self,
        cx: &mut Context<'_>,
        params: ErasedTree<View<'_>>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()>;
    fn probe(&self, program: &mut Program, at: ErasedProbe<'_>) -> Result<()>;
    fn compute_in(&self, dtype: DType) -> Result<()>;
    fn name(&self) -> &str;
    fn statics(&self) -> Vec<u64>;
    fn computes_on_host(&self) -> bool;
    fn cuda(&self) -> Vec<&'static Source>;
}

/// The type [`StageProbe`] with [`ErasedTree`]s instead of typed trees.
pub(super) struct ErasedProbe<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) params: ErasedTree<ShapedArray>,
    pub(super) shardings: &'a [Sharding],
    pub(super) gradients: &'a [Sharding],
    pub(super) x: ErasedTree<ShapedArray>,
    pub(super) side: ErasedTree<ShapedArray>,
    pub(super) needs_dx: bool,
    pub(super) stage: usize,
}

impl<S: Stage> ErasedStage for S {
    fn infer(
        &self,
        params: &ErasedTree<ShapedArray>,
        x: &ErasedTree<ShapedArray>,
        side: &ErasedTree<ShapedArray>,
    ) -> Result<StageSignature<ErasedTree<ShapedArray>>> {
        let params: Shapes<S::Params> = params.clone().into_tree("parameters")?;
        let x: Shapes<S::In> = x.clone().into_tree("input")?;
        let side = SideShapes(side.clone());

        let signature = Stage::infer(self, &params, &x, &side).map_err(|why| {
            let params = listed(&params);
            let x = listed(&x);
            let side = listed(&side.0);
            let given = format!("parameters ({params}), input ({x}), side input ({side})");
            Error::kernel(format!("its `infer` refuses {given}: {why}"))
        })?;
        Ok(signature.map_out(ErasedTree::of))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: ErasedTree<View<'_>>,
        x: ErasedTree<View<'_>>,
        y: ErasedTree<ViewMut<'_>>,
    ) -> Result<()> {
        let params = params.into_tree("parameters")?;
        let x = x.into_tree("input")?;
        Stage::forward(self, cx, params, x, y.into_tree("output")?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: ErasedTree<View<'_>>,
        dy: ErasedTree<View<'_>>,
        dx: Option<ErasedTree<ViewMut<'_>>>,
        gradient: ErasedTree<ViewMut<'_>>,
    ) -> Result<()> {
        let params = params.into_tree("parameters")?;
        let dy = dy.into_tree("output gradient")?;
        let dx = dx.map(|dx| dx.into_tree("input gradient")).transpose()?;
        Stage::backward(self, cx, params, dy, dx, gradient.into_tree("gradient")?)
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: ErasedTree<View<'_>>,
        dy: ErasedTree<View<'_>>,
        dx: Option<ErasedTree<ViewMut<'_>>>,
    ) -> Result<()> {
        let params = params.into_tree("parameters")?;
        let dy = dy.into_tree("output gradient")?;
        let dx = dx.map(|dx| dx.into_tree("input gradient")).transpose()?;
        Stage::backward_input(self, cx, params, dy, dx)
    }

    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: ErasedTree<ViewMut<'_>>,
    ) -> Result<()> {
        Stage::backward_weight(self, cx, gradient.into_tree("gradient")?)
    }

    fn passes(&self) -> Passes {
        Stage::passes(self)
    }

    fn side(&self) -> SideInput {
        Stage::side(self)
    }

    fn input_spec(&self) -> Spec {
        Stage::input_spec(self)
    }

    fn output_spec(&self) -> Spec {
        Stage::output_spec(self)
    }

    fn draws_random(&self) -> bool {
        Stage::draws_random(self)
    }

    fn is_frozen(&self, path: &str) -> bool {
        Stage::is_frozen(self, path)
    }

    fn freeze(&self, path: &str) {
        Stage::freeze(self, path);
    }

    fn prepared_bytes(&self, params: ErasedTree<ShapedArray>) -> Result<Option<u64>> {
        Ok(Stage::prepared_bytes(
            self,
            &params.into_tree("parameters")?,
        ))
    }

    fn prepare(
        &self,
        cx: &mut Context<'_>,
        params: ErasedTree<View<'_>>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        Stage::prepare(self, cx, params.into_tree("parameters")?, prepared)
    }

    fn probe(&self, program: &mut Program, at: ErasedProbe<'_>) -> Result<()> {
        let probe = StageProbe::<Self> {
            mesh: at.mesh,
            params: &at.params.into_tree("parameters")?,
            shardings: at.shardings,
            gradients: at.gradients,
            x: &at.x.into_tree("input")?,
            side: &SideShapes(at.side),
            needs_dx: at.needs_dx,
            stage: at.stage,
        };
        Stage::probe(self, program, &probe)
    }

    fn compute_in(&self, dtype: DType) -> Result<()> {
        Stage::compute_in(self, dtype)
    }

    fn name(&self) -> &str {
        Stage::name(self)
    }

    fn statics(&self) -> Vec<u64> {
        Stage::statics(self)
    }

    fn computes_on_host(&self) -> bool {
        Stage::computes_on_host(self)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        Stage::cuda(self)
    }
}

/// Formats the first leaves of a shape tree, with their paths, for messages.
fn listed(tree: &impl Tree<Leaf = ShapedArray>) -> String {
    let leaves = tree.leaves_with_paths();
    let shown = leaves
        .iter()
        .take(LISTED)
        .map(|(path, aval)| match path.is_empty() {
            true => aval.to_string(),
            false => format!("{path}: {aval}"),
        });
    let mut shown: Vec<String> = shown.collect();
    if let rest @ 1.. = leaves.len().saturating_sub(LISTED) {
        shown.push(format!("and {rest} more"));
    }
    shown.join(", ")
}
