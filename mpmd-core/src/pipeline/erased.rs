//! A stage without its types: its trees are [`Bundle`]s. So the kernels of passes, and all that
//! binds and calls them, are compiled once, and not again for each type of stage.

use std::any::Any;

use super::bundle::Bundle;
use super::context::StageContext;
use super::stage::{Passes, Probe, SideInput, SideShapes, Stage, StageSignature};
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::kernel::{Context, Shapes, View, ViewMut};
use mpmd_device::cuda::source::Source;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::Tree;

/// The number of leaves of a tree of shapes that an error lists. The error only counts further
/// ones.
const LISTED: usize = 4;

/// [`Stage`] with bundles in place of trees. Each method is that of [`Stage`] with its name.
pub(super) trait ErasedStage: Send + Sync {
    fn infer(
        &self,
        params: &Bundle<ShapedArray>,
        x: &Bundle<ShapedArray>,
        side: &Bundle<ShapedArray>,
    ) -> Result<StageSignature<Bundle<ShapedArray>>>;
    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Bundle<View<'_>>,
        x: Bundle<View<'_>>,
        y: Bundle<ViewMut<'_>>,
    ) -> Result<()>;
    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Bundle<View<'_>>,
        dy: Bundle<View<'_>>,
        dx: Option<Bundle<ViewMut<'_>>>,
        gradient: Bundle<ViewMut<'_>>,
    ) -> Result<()>;
    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Bundle<View<'_>>,
        dy: Bundle<View<'_>>,
        dx: Option<Bundle<ViewMut<'_>>>,
    ) -> Result<()>;
    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: Bundle<ViewMut<'_>>,
    ) -> Result<()>;
    fn passes(&self) -> Passes;
    fn side(&self) -> SideInput;
    fn input_spec(&self) -> Spec;
    fn output_spec(&self) -> Spec;
    fn draws_random(&self) -> bool;
    fn is_frozen(&self, path: &str) -> bool;
    fn freeze(&self, path: &str);
    fn prepared_bytes(&self, params: Bundle<ShapedArray>) -> Result<Option<u64>>;
    fn prepare(
        &self,
        cx: &mut Context<'_>,
        params: Bundle<View<'_>>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()>;
    fn probe(&self, program: &mut Program, at: ProbeOf<'_>) -> Result<()>;
    fn compute_in(&self, dtype: DType) -> Result<()>;
    fn name(&self) -> &str;
    fn statics(&self) -> Vec<u64>;
    fn computes_on_host(&self) -> bool;
    fn cuda(&self) -> Vec<&'static Source>;
}

/// [`Probe`] with bundles in place of trees.
pub(super) struct ProbeOf<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) params: Bundle<ShapedArray>,
    pub(super) shardings: &'a [Sharding],
    pub(super) gradients: &'a [Sharding],
    pub(super) x: Bundle<ShapedArray>,
    pub(super) side: Bundle<ShapedArray>,
    pub(super) needs_dx: bool,
    pub(super) stage: usize,
}

impl<S: Stage> ErasedStage for S {
    fn infer(
        &self,
        params: &Bundle<ShapedArray>,
        x: &Bundle<ShapedArray>,
        side: &Bundle<ShapedArray>,
    ) -> Result<StageSignature<Bundle<ShapedArray>>> {
        let params: Shapes<S::Params> = params.clone().into_tree("parameters")?;
        let x: Shapes<S::In> = x.clone().into_tree("input")?;
        let side = SideShapes(side.clone());
        let signature = Stage::infer(self, &params, &x, &side).map_err(|why| {
            let (params, x, side) = (listed(&params), listed(&x), listed(&side.0));
            let given = format!("parameters ({params}), input ({x}), side input ({side})");
            Error::kernel(format!("its `infer` refuses {given}: {why}"))
        })?;
        Ok(signature.map_out(Bundle::of))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Bundle<View<'_>>,
        x: Bundle<View<'_>>,
        y: Bundle<ViewMut<'_>>,
    ) -> Result<()> {
        let (params, x) = (params.into_tree("parameters")?, x.into_tree("input")?);
        Stage::forward(self, cx, params, x, y.into_tree("output")?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Bundle<View<'_>>,
        dy: Bundle<View<'_>>,
        dx: Option<Bundle<ViewMut<'_>>>,
        gradient: Bundle<ViewMut<'_>>,
    ) -> Result<()> {
        let (params, dy) = (
            params.into_tree("parameters")?,
            dy.into_tree("output gradient")?,
        );
        let dx = dx.map(|dx| dx.into_tree("input gradient")).transpose()?;
        Stage::backward(self, cx, params, dy, dx, gradient.into_tree("gradient")?)
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Bundle<View<'_>>,
        dy: Bundle<View<'_>>,
        dx: Option<Bundle<ViewMut<'_>>>,
    ) -> Result<()> {
        let (params, dy) = (
            params.into_tree("parameters")?,
            dy.into_tree("output gradient")?,
        );
        let dx = dx.map(|dx| dx.into_tree("input gradient")).transpose()?;
        Stage::backward_input(self, cx, params, dy, dx)
    }

    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: Bundle<ViewMut<'_>>,
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

    fn prepared_bytes(&self, params: Bundle<ShapedArray>) -> Result<Option<u64>> {
        Ok(Stage::prepared_bytes(
            self,
            &params.into_tree("parameters")?,
        ))
    }

    fn prepare(
        &self,
        cx: &mut Context<'_>,
        params: Bundle<View<'_>>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        Stage::prepare(self, cx, params.into_tree("parameters")?, prepared)
    }

    fn probe(&self, program: &mut Program, at: ProbeOf<'_>) -> Result<()> {
        let probe = Probe::<Self> {
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

/// Lists the first leaves of a tree of shapes in words, with their paths.
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
