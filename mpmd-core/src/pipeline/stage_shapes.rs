//! The shapes and shardings of all arrays of a stage.

use super::bound_stage::BoundStage;
use super::bundle::Bundle;
use super::stage::PlacedShape;
use crate::error::Result;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::Tree;

/// Shapes of arrays, each with its sharding.
pub(super) type Places = Vec<(ShapedArray, Sharding)>;

/// Global shapes and shardings of all arrays of a stage.
pub(super) struct StageShapes {
    pub(super) mesh: Mesh,
    /// All parameters in their stored shardings, including those that other stages store.
    pub(super) params: Places,
    /// Indices of the parameters that the stage stores itself.
    pub(super) own: Vec<usize>,
    /// Parameters in the shardings that kernels compute with.
    pub(super) compute: Places,
    /// Gradients as the backward passes write them: `[0]` for frozen parameters.
    pub(super) gradients: Places,
    /// For each parameter, true if it is not trained.
    pub(super) frozen: Vec<bool>,
    /// An array that takes as many bytes as the working form of the parameters.
    pub(super) prepared: Option<(ShapedArray, Sharding)>,
    pub(super) fuses: bool,
    /// True if the stage keeps its inputs and side inputs until the backward pass.
    pub(super) keeps_inputs: bool,
    pub(super) input: Places,
    pub(super) output: Places,
    /// The shapes of the outputs, for later stages.
    pub(super) out: Bundle<ShapedArray>,
    pub(super) residual: Places,
    /// Residuals that take no memory in a forward pass that does not keep them.
    pub(super) unkept_residual: Places,
    /// Residuals that become weight residuals without a copy.
    pub(super) kept_residual: Places,
    pub(super) weight_residual: Places,
}

impl BoundStage {
    /// Returns the shapes of all arrays of the stage for inputs `x` and side inputs `side` of these
    /// shapes.
    pub(super) fn shapes(
        &self,
        x: &Bundle<ShapedArray>,
        side: &Bundle<ShapedArray>,
    ) -> Result<StageShapes> {
        let params = self.param_shapes();
        let signature = self.infer(&params, x, side)?;
        let keeps_inputs = signature.residual.is_none();
        let residual = signature.residual.unwrap_or_else(Bundle::empty);
        let (stored, compute) = (self.stored(), self.compute());
        let all = |to: &[Sharding]| params.leaves.iter().cloned().zip(to.iter().cloned()).collect();
        let placed = |leaf: &PlacedShape| leaf.counted(&self.mesh);
        let objects = residual.leaves.iter().filter(|leaf| leaf.aval.is_object());
        let object = PlacedShape::object_of_bytes;
        let kept = residual.leaves_with_paths().into_iter();
        let kept =
            kept.filter(|(path, _)| signature.keeps.iter().any(|(residual, _)| residual == path));
        Ok(StageShapes {
            mesh: self.mesh.clone(),
            params: all(&stored),
            own: self.own(),
            compute: all(&compute),
            gradients: self.gradients(),
            frozen: self.frozen().to_vec(),
            prepared: self.prepared.bytes().map(|bytes| object(bytes).counted(&self.mesh)),
            fuses: self.fuses(),
            keeps_inputs,
            input: x.leaves.iter().map(|aval| (aval.clone(), self.input.clone())).collect(),
            output: signature
                .out
                .leaves
                .iter()
                .map(|aval| (aval.clone(), self.output.clone()))
                .collect(),
            kept_residual: kept.map(|(_, leaf)| placed(leaf)).collect(),
            residual: residual.leaves.iter().map(placed).collect(),
            unkept_residual: objects.map(placed).collect(),
            weight_residual: signature.weight_residual.leaves.iter().map(placed).collect(),
            out: signature.out,
        })
    }
}
