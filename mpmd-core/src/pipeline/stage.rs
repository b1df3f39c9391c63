//! The [`Stage`] trait, which users implement for each stage of a pipeline, and the shapes that it
//! declares.

use crate::device::cuda::source::Source;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Shapes, Views, ViewsMut, plain_name};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Leaf, Tree};

/// A stage of a pipeline: types of parameters, inputs and outputs, and the three passes.
///
/// The backward pass is split in two for schedules without bubbles. The stage before waits for the
/// input gradient, but not for the weight gradient. Each pass leaves data for later passes in
/// *residuals*: arrays of declared shape on the stage's own devices. They never move and are freed
/// after the last pass that reads them. Like a [`Kernel`](crate::kernel::Kernel), a stage sees the
/// regions of one device. It may call the collectives that it declares.
pub trait Stage: Send + Sync + 'static {
    /// The parameters.
    type Params: Tree<Leaf = MpmdArray>;
    /// The input tree: outputs of earlier stages, or the input of the pipeline.
    type In: Tree<Leaf = MpmdArray>;
    /// Arrays that come with each microbatch and have no gradient, such as labels and masks. Use
    /// [`Empty`](mpmd_layout::tree::Empty) for none.
    type Side: Tree<Leaf = MpmdArray>;
    /// The output tree, which later stages read; [`Loss`] on the last stage.
    type Out: Tree<Leaf = MpmdArray>;
    /// Residuals of the forward pass, read by the input gradient.
    type Residual: Tree<Leaf = MpmdArray>;
    /// Residuals of the input gradient, read by the weight gradient.
    type WeightResidual: Tree<Leaf = MpmdArray>;

    /// Declares outputs, residuals and collectives for inputs of these global shapes.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit together.
    fn infer(
        &self,
        params: &Shapes<Self::Params>,
        x: &Shapes<Self::In>,
        side: &Shapes<Self::Side>,
    ) -> Result<Declared<Self>>;

    /// Computes the outputs `y`, and the residuals for the input gradient, on one device. The
    /// arguments are the regions of the arrays on this device.
    ///
    /// # Errors
    ///
    /// As for [`Kernel::run`](crate::kernel::Kernel::run).
    fn forward(
        &self,
        cx: &mut Context<'_>,
        params: Views<'_, Self::Params>,
        x: Views<'_, Self::In>,
        side: Views<'_, Self::Side>,
        y: ViewsMut<'_, Self::Out>,
        residual: ViewsMut<'_, Self::Residual>,
    ) -> Result<()>;

    /// Computes the input gradient `dx` from the output gradient `dy`, and the residuals for the
    /// weight gradient. `dx` is `None` on the first stage: the data need no gradient.
    ///
    /// A residual that the signature [keeps](StageSignature::keep) is already in `weight_residual`,
    /// and its view in `residual` is empty.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`].
    fn backward_input(
        &self,
        cx: &mut Context<'_>,
        params: Views<'_, Self::Params>,
        residual: Views<'_, Self::Residual>,
        dy: Views<'_, Self::Out>,
        dx: Option<ViewsMut<'_, Self::In>>,
        weight_residual: ViewsMut<'_, Self::WeightResidual>,
    ) -> Result<()>;

    /// Adds the gradient of the parameters for one microbatch to `gradient`.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`].
    fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        weight_residual: Views<'_, Self::WeightResidual>,
        gradient: ViewsMut<'_, Self::Params>,
    ) -> Result<()>;

    /// Returns true if [`Stage::backward`] computes both gradients in one pass. The runner then
    /// calls `backward` where a schedule has both gradients as one action, unless the gradients are
    /// partial sums. Default: false.
    fn fuses_backward(&self) -> bool {
        false
    }

    /// Computes the input gradient like [`Stage::backward_input`], and adds the gradient of the
    /// parameters to `gradient` like [`Stage::backward_weight`].
    ///
    /// There are no weight residuals, and no residual is kept. The pass may call the collectives
    /// that are declared for the input gradient. If it computes the same bits as the two separate
    /// passes, the bits of a step do not depend on the schedule. Default: an error.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`].
    fn backward(
        &self,
        cx: &mut Context<'_>,
        params: Views<'_, Self::Params>,
        residual: Views<'_, Self::Residual>,
        dy: Views<'_, Self::Out>,
        dx: Option<ViewsMut<'_, Self::In>>,
        gradient: ViewsMut<'_, Self::Params>,
    ) -> Result<()> {
        let _ = (cx, params, residual, dy, dx, gradient);
        Err(Error::kernel(format!(
            "stage {} says that it fuses its backward passes, and does not",
            self.name()
        )))
    }

    /// Returns the sharding of the inputs and of their gradient over the stage's mesh: one spec for
    /// all leaves. Default: replicated on every device.
    fn input_spec(&self) -> Spec {
        Spec::default()
    }

    /// Returns the sharding of the outputs and of their gradient over the stage's mesh. A [`Loss`]
    /// is never divided. Default: replicated on every device.
    fn output_spec(&self) -> Spec {
        Spec::default()
    }

    /// Returns the name of the stage for messages. Default: the name of the type.
    fn name(&self) -> &str {
        plain_name::<Self>()
    }

    /// Returns the settings of the stage as words, which the processes compare with each other.
    /// Default: none.
    fn statics(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Returns the CUDA sources that the passes launch on CUDA devices, like
    /// [`Kernel::cuda`](crate::kernel::Kernel::cuda). Default: none.
    fn cuda(&self) -> Vec<&'static Source> {
        Vec::new()
    }
}

/// The signature that [`Stage::infer`] of a stage returns.
pub type Declared<S> = StageSignature<
    Shapes<<S as Stage>::Out>,
    Placed<<S as Stage>::Residual>,
    Placed<<S as Stage>::WeightResidual>,
>;

/// The tree `T` with a [`PlacedShape`] at each leaf.
pub type Placed<T> = <T as Tree>::With<PlacedShape>;

/// The global shape of a residual, and its sharding over the stage's mesh.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PlacedShape {
    /// The global shape.
    pub aval: ShapedArray,
    /// The sharding over the stage's mesh.
    pub spec: Spec,
}

impl Leaf for PlacedShape {}

impl PlacedShape {
    /// Creates a residual of the global shape `aval`, sharded by `spec`.
    pub fn new(aval: ShapedArray, spec: Spec) -> Self {
        Self { aval, spec }
    }

    /// Creates a residual that every device of the stage holds whole.
    pub fn replicated(aval: ShapedArray) -> Self {
        Self { aval, spec: Spec::default() }
    }

    pub(super) fn sharding(&self, mesh: &Mesh) -> Sharding {
        mesh.sharding(self.spec.clone())
    }
}

/// The declaration of a stage: outputs, residuals and collectives, known before it runs.
#[derive(Clone, Debug)]
pub struct StageSignature<O, R, W> {
    pub(super) out: O,
    pub(super) residual: R,
    pub(super) weight_residual: W,
    pub(super) keeps: Vec<(String, String)>,
    pub(super) forward: Vec<(String, ShapedArray)>,
    pub(super) backward_input: Vec<(String, ShapedArray)>,
}

impl<O, R, W> StageSignature<O, R, W> {
    /// Declares a stage with output `out` and these residuals, without kept residuals and without
    /// collectives.
    pub fn new(out: O, residual: R, weight_residual: W) -> Self {
        Self {
            out,
            residual,
            weight_residual,
            keeps: Vec::new(),
            forward: Vec::new(),
            backward_input: Vec::new(),
        }
    }

    /// Declares that the residual at path `residual` is also the weight residual at path
    /// `weight_residual`. It is not copied.
    #[must_use]
    pub fn keep(mut self, residual: impl Into<String>, weight_residual: impl Into<String>) -> Self {
        self.keeps.push((residual.into(), weight_residual.into()));
        self
    }

    /// Declares the next collective of [`Stage::forward`]: an all-reduce over mesh axis `axis`.
    /// `aval` limits the number of elements that each device contributes.
    #[must_use]
    pub fn forward_all_reduce(mut self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.forward.push((axis.into(), aval));
        self
    }

    /// Declares the next collective of [`Stage::backward_input`], like
    /// [`StageSignature::forward_all_reduce`].
    #[must_use]
    pub fn backward_all_reduce(mut self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.backward_input.push((axis.into(), aval));
        self
    }
}

/// The output of the last stage for a microbatch: scalars with the same values on each device of
/// the stage.
#[derive(Clone, Debug, Tree)]
pub struct Loss<L> {
    /// The sum of the losses over all items (rows, tokens).
    pub sum: L,
    /// The number of items. Gradients are divided by the total over all microbatches, so the result
    /// does not depend on the division of a batch.
    pub weight: L,
}
