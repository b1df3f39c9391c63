//! The trait by which the runner drives a stage of any type.

use super::bundle::Bundle;
use super::context::Mode;
use super::param_sharding::ParamSharding;
use super::prepare::Freshness;
use super::shapes::StageShapes;
use super::stage::Passes;
use crate::api::program::Program;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Structure, TreeError};

/// The results of a forward pass.
pub(super) struct Forwarded {
    pub(super) y: Bundle,
    /// The declared residuals; `None` if the stage keeps its inputs and side inputs instead.
    pub(super) residual: Option<Bundle>,
    /// Index of the kernel set for these shapes.
    pub(super) kernels: usize,
}

/// The results of a pass that computes the input gradient.
pub(super) struct BackwardOutput {
    /// The gradient of the input; `None` if nothing that the stage reads is trained.
    pub(super) dx: Option<Bundle>,
    pub(super) weight_residual: Bundle,
    /// The gradients of the parameters, if the pass is fused.
    pub(super) gradient: Option<Bundle>,
}

/// A stage with its type erased, as the runner sees it.
pub(super) trait AnyStage: Send {
    fn name(&self) -> &str;
    fn mesh(&self) -> &Mesh;
    /// The sharding of the inputs on this stage's mesh.
    fn input(&self) -> &Sharding;
    /// The sharding of the outputs and of their gradients.
    fn output(&self) -> &Sharding;
    /// Returns the paths of all parameters, in leaf order, including those that other stages store.
    fn paths(&self) -> Vec<String>;
    /// Returns the indices of the parameters that the stage stores itself.
    fn own(&self) -> Vec<usize>;
    /// Returns the parameter at leaf index `place` as it is stored, or `None` if another stage
    /// stores it.
    fn param(&self, place: usize) -> Option<&MpmdArray>;
    /// Returns all parameters that the stage stores itself, in leaf order.
    fn params(&self) -> Vec<MpmdArray>;
    fn set_params(&mut self, params: Vec<MpmdArray>) -> Result<()>;
    /// Returns the shape and sharding of the parameter at leaf index `place`. The sharding is the
    /// stored one if this stage stores the parameter.
    fn place(&self, place: usize) -> &ParamPlace;
    /// Drops the parameter at leaf index `place`: another stage stores it from now on. If it is
    /// `frozen` there, it is frozen here.
    fn give_up(&mut self, place: usize, frozen: bool) -> Result<()>;
    /// Returns, for each parameter in leaf order, true if it is not trained.
    fn frozen(&self) -> &[bool];
    /// Returns true if the backward passes compute the gradient of the input.
    fn needs_dx(&self) -> bool;
    /// Sets the result of `needs_dx`.
    fn set_needs_dx(&mut self, yes: bool);
    /// Returns true if the passes need a random key in training.
    fn draws_random(&self) -> bool;
    /// Returns the state of the working form of the parameters.
    fn freshness(&self) -> Freshness;
    /// Notes whether the values of the parameters have changed since the last call of `prepare`.
    fn set_stale(&mut self, stale: bool);
    /// Makes or updates the working form of the parameters, which must be gathered.
    fn prepare(&mut self, program: &mut Program) -> Result<()>;
    /// Calls the stage's `probe` for inputs of these shapes. `index` is the index of the stage.
    fn probe(
        &self,
        program: &mut Program,
        index: usize,
        x: &Bundle<ShapedArray>,
        side: &Bundle<ShapedArray>,
    ) -> Result<()>;
    /// Returns an error if the stage does not take a side input of this structure. `None` stands
    /// for a microbatch without side input.
    fn check_side(&self, side: Option<&Structure>) -> Result<(), TreeError>;
    /// Returns the shapes of all arrays of the stage for inputs `x` and side inputs `side` of these
    /// shapes.
    fn shapes(&self, x: &Bundle<ShapedArray>, side: &Bundle<ShapedArray>) -> Result<StageShapes>;
    /// Sets the object that every pass of the stage has. It must be on the stage's mesh.
    fn set_state(&mut self, state: &MpmdArray) -> Result<()>;
    fn passes(&self) -> Passes;
    /// Sets the shardings in which kernels compute with the parameters. The arrays stay stored as
    /// they are.
    fn store(&mut self, storage: ParamSharding) -> Result<()>;
    /// Returns true if the parameters are available in the shardings that kernels compute with.
    fn is_gathered(&self) -> bool;
    /// Transfers the parameters to the shardings that kernels compute with. The copies stay until
    /// `release`. `tied` are (leaf index, array) of the parameters that other stages store.
    fn gather(&mut self, program: &mut Program, tied: Vec<(usize, MpmdArray)>) -> Result<()>;
    fn release(&mut self);
    /// Runs the forward pass. `key` is the random key of the microbatch, if the stage draws.
    fn forward(
        &mut self,
        program: &mut Program,
        x_and_side: (&Bundle, &Bundle),
        how: (Mode, Option<MpmdArray>),
    ) -> Result<Forwarded>;
    /// Runs the input gradient. With `fused`, the same kernel computes the gradients of the
    /// parameters, and adds them to those so far.
    fn backward(
        &mut self,
        program: &mut Program,
        of: &PassOf,
        residual_and_dy: (Bundle, Bundle),
        fused: Option<SoFar>,
    ) -> Result<BackwardOutput>;
    /// Runs the weight gradient. Returns `so_far` plus the gradients of this microbatch.
    fn backward_weight(
        &mut self,
        program: &mut Program,
        of: &PassOf,
        weight_residual: Bundle,
        so_far: SoFar,
    ) -> Result<Bundle>;
    /// Returns true if one kernel computes both gradients of a combined backward action.
    fn fuses(&self) -> bool;
}

/// Data that the passes of a microbatch at a stage share.
#[derive(Clone, Debug, Default)]
pub(super) struct PassOf {
    /// Index of the kernel set compiled for the microbatch's shapes. The forward pass returns it.
    pub(super) kernels: usize,
    /// The random key, if the stage draws.
    pub(super) key: Option<MpmdArray>,
}

/// Gradients of a stage's parameters so far; `None` before the first microbatch.
pub(super) type SoFar = Option<Bundle>;

/// Shape and sharding of a parameter.
pub(super) struct ParamPlace {
    pub(super) aval: ShapedArray,
    pub(super) sharding: Sharding,
}
