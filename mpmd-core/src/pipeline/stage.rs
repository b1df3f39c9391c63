//! What a user writes for a pipeline: one [`Stage`] after another.

use crate::device::cuda::source::Source;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Shapes, Views, ViewsMut, plain_name};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Leaf, Tree};

/// A stage of a pipeline: parameters, inputs and outputs, and the three passes through it.
///
/// The two backward passes are apart because schedules without bubbles need them apart: the input
/// gradient is what the stage before waits for, the weight gradient is not. What a pass needs later
/// it leaves in *residuals*: arrays of declared shape on the stage's own devices, which never move
/// and die with the last pass that reads them. Like a [`Kernel`](crate::kernel::Kernel), a stage
/// sees one device's regions; it may call the collectives it declares.
pub trait Stage: Send + Sync + 'static {
    /// The parameters.
    type Params: Tree<Leaf = MpmdArray>;
    /// What comes from the stage before, or into the pipeline.
    type In: Tree<Leaf = MpmdArray>;
    /// What comes with each microbatch and has no gradient: labels, masks.
    /// [`Empty`](mpmd_layout::tree::Empty) for none.
    type Side: Tree<Leaf = MpmdArray>;
    /// What goes to the stage after; [`Loss`] on the last.
    type Out: Tree<Leaf = MpmdArray>;
    /// What the forward pass leaves for the input gradient.
    type Residual: Tree<Leaf = MpmdArray>;
    /// What the input gradient leaves for the weight gradient.
    type WeightResidual: Tree<Leaf = MpmdArray>;

    /// What the stage makes of inputs of these global shapes.
    ///
    /// # Errors
    ///
    /// Where the shapes do not fit together.
    fn infer(
        &self,
        params: &Shapes<Self::Params>,
        x: &Shapes<Self::In>,
        side: &Shapes<Self::Side>,
    ) -> Result<Declared<Self>>;

    /// Computes the outputs, and what the input gradient will need.
    ///
    /// # Errors
    ///
    /// As [`Kernel::run`](crate::kernel::Kernel::run); likewise of the passes below.
    fn forward(
        &self,
        cx: &mut Context<'_>,
        params: Views<'_, Self::Params>,
        x: Views<'_, Self::In>,
        side: Views<'_, Self::Side>,
        y: ViewsMut<'_, Self::Out>,
        residual: ViewsMut<'_, Self::Residual>,
    ) -> Result<()>;

    /// Computes the gradient of the inputs from that of the outputs, and what the weight gradient
    /// will need. `dx` is `None` on the first stage: nobody asks for the gradient of the data.
    ///
    /// A residual that the signature [keeps](StageSignature::keep) is in `weight_residual` already,
    /// and its view in `residual` is empty.
    ///
    /// # Errors
    ///
    /// As [`Stage::forward`].
    fn backward_input(
        &self,
        cx: &mut Context<'_>,
        params: Views<'_, Self::Params>,
        residual: Views<'_, Self::Residual>,
        dy: Views<'_, Self::Out>,
        dx: Option<ViewsMut<'_, Self::In>>,
        weight_residual: ViewsMut<'_, Self::WeightResidual>,
    ) -> Result<()>;

    /// Adds the gradient of the parameters to `gradient`.
    ///
    /// # Errors
    ///
    /// As [`Stage::forward`].
    fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        weight_residual: Views<'_, Self::WeightResidual>,
        gradient: ViewsMut<'_, Self::Params>,
    ) -> Result<()>;

    /// Whether [`Stage::backward`] is there, for both gradients at once. It is used where a
    /// schedule has them as one action, and the gradients are no partial sums.
    fn fuses_backward(&self) -> bool {
        false
    }

    /// Computes the gradient of the inputs, as [`Stage::backward_input`], and adds the gradient of
    /// the parameters to `gradient`, as [`Stage::backward_weight`]: there are no weight residuals
    /// between them, and no residual is kept. It may call the collectives that are declared for the
    /// input gradient. The bits of a step do not depend on the schedule where both ways compute the
    /// same ones.
    ///
    /// # Errors
    ///
    /// As [`Stage::forward`].
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

    /// How what comes in is sharded over the stage's mesh, and its gradient: one spec for all its
    /// leaves. Every device has all of it unless overridden.
    fn input_spec(&self) -> Spec {
        Spec::default()
    }

    /// The same of what the stage gives, and of its gradient; a [`Loss`] is never divided.
    fn output_spec(&self) -> Spec {
        Spec::default()
    }

    /// The stage's name in messages; the type's own name unless overridden.
    fn name(&self) -> &str {
        plain_name::<Self>()
    }

    /// The stage's own settings, as words: they are part of what processes compare.
    fn statics(&self) -> Vec<u64> {
        Vec::new()
    }

    /// What its passes launch where its devices are CUDA devices, as
    /// [`Kernel::cuda`](crate::kernel::Kernel::cuda).
    fn cuda(&self) -> Vec<&'static Source> {
        Vec::new()
    }
}

/// What [`Stage::infer`] of a stage gives.
pub type Declared<S> = StageSignature<
    Shapes<<S as Stage>::Out>,
    Placed<<S as Stage>::Residual>,
    Placed<<S as Stage>::WeightResidual>,
>;

/// The tree `T` with a shape and its place on the stage's mesh at each leaf.
pub type Placed<T> = <T as Tree>::With<PlacedShape>;

/// The shape of a residual, and how it is sharded over the stage's mesh.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PlacedShape {
    /// The global shape.
    pub aval: ShapedArray,
    /// How it is sharded.
    pub spec: Spec,
}

impl Leaf for PlacedShape {}

impl PlacedShape {
    /// A residual of this global shape, sharded by `spec`.
    pub fn new(aval: ShapedArray, spec: Spec) -> Self {
        Self { aval, spec }
    }

    /// A residual that every device of the stage has whole.
    pub fn replicated(aval: ShapedArray) -> Self {
        Self { aval, spec: Spec::default() }
    }

    pub(super) fn sharding(&self, mesh: &Mesh) -> Sharding {
        mesh.sharding(self.spec.clone())
    }
}

/// What a stage declares before it runs.
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
    /// A stage that makes `out` and leaves these residuals.
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

    /// The residual at this path is also the weight residual at that one: it stays where it is.
    #[must_use]
    pub fn keep(mut self, residual: impl Into<String>, weight_residual: impl Into<String>) -> Self {
        self.keeps.push((residual.into(), weight_residual.into()));
        self
    }

    /// The next collective of [`Stage::forward`] is an all-reduce over mesh axis `axis` of at most
    /// as many elements per device as `aval` has.
    #[must_use]
    pub fn forward_all_reduce(mut self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.forward.push((axis.into(), aval));
        self
    }

    /// The same for [`Stage::backward_input`].
    #[must_use]
    pub fn backward_all_reduce(mut self, axis: impl Into<String>, aval: ShapedArray) -> Self {
        self.backward_input.push((axis.into(), aval));
        self
    }
}

/// What the last stage makes of a microbatch: scalars, the same on each of its devices.
#[derive(Clone, Debug, Tree)]
pub struct Loss<L> {
    /// The sum of the losses over what they are taken of (rows, tokens).
    pub sum: L,
    /// How many there were. Gradients are divided by the total over all microbatches, so that the
    /// result does not depend on how a batch was cut.
    pub weight: L,
}
