//! The [`Stage`] trait, which users implement for each stage of a pipeline, and the shapes that it
//! declares.

use std::any::Any;
use std::collections::BTreeMap;

use super::context::StageContext;
use super::erased_tree::ErasedTree;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::{Collective, Context, Shapes, Signature, Views, ViewsMut, plain_name};
use mpmd_device::cuda::source::Source;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Leaf, Structure, Tree, TreeError};

/// A stage of a pipeline: the types of its parameters, inputs and outputs, and its passes.
///
/// A small stage implements [`infer`](Stage::infer), [`forward`](Stage::forward) and
/// [`backward`](Stage::backward). All else is optional: side inputs, residuals, state, random keys,
/// [prepared](Stage::prepare) parameters, and backward [`passes`](Stage::passes) that are split.
/// The passes read these values from the [`StageContext`].
///
/// Like a [`Kernel`](crate::kernel::Kernel), a stage sees the regions of one device. It may call
/// the collectives that it declares.
pub trait Stage: Send + Sync + 'static {
    /// The tree of the stage's parameters.
    type Params: Tree<Leaf = MpmdArray>;
    /// The input tree: outputs of earlier stages, or the input of the pipeline.
    type In: Tree<Leaf = MpmdArray>;
    /// The output tree, which later stages read; [`Loss`] on the last stage.
    type Out: Tree<Leaf = MpmdArray>;

    /// Declares outputs, residuals and collectives for inputs of these global shapes. `side` has
    /// the shapes of the microbatch's side inputs.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit together.
    fn infer(
        &self,
        params: &Shapes<Self::Params>,
        x: &Shapes<Self::In>,
        side: &SideShapes,
    ) -> Result<StageSignature<Shapes<Self::Out>>>;

    /// Computes the outputs `y`, and the residuals that the stage declares, on one device. All
    /// views are of the regions that this device holds.
    ///
    /// # Errors
    ///
    /// As for [`Kernel::run`](crate::kernel::Kernel::run).
    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Views<'_, Self::Params>,
        x: Views<'_, Self::In>,
        y: ViewsMut<'_, Self::Out>,
    ) -> Result<()>;

    /// Computes the input gradient `dx` from the output gradient `dy`, and adds the gradient of the
    /// parameters to `gradient`. `dx` is `None` on the first stage, and if no stage that this one
    /// reads is trained.
    ///
    /// The pass has no weight residuals, and the residuals are dropped after it. It may call the
    /// collectives that are declared for the input gradient. Default: an error.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`].
    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Views<'_, Self::Params>,
        dy: Views<'_, Self::Out>,
        dx: Option<ViewsMut<'_, Self::In>>,
        gradient: ViewsMut<'_, Self::Params>,
    ) -> Result<()> {
        let _ = (cx, params, dy, dx, gradient);
        Err(lacks(self, "backward"))
    }

    /// Returns the backward passes that the stage implements. Default: [`Passes::Fused`].
    fn passes(&self) -> Passes {
        Passes::Fused
    }

    /// Computes the input gradient `dx` from the output gradient `dy`, and writes the weight
    /// residuals. `dx` may be `None`, as in [`Stage::backward`]. Needed for [`Passes::Split`] and
    /// [`Passes::Both`]. Default: an error.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`].
    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: Views<'_, Self::Params>,
        dy: Views<'_, Self::Out>,
        dx: Option<ViewsMut<'_, Self::In>>,
    ) -> Result<()> {
        let _ = (cx, params, dy, dx);
        Err(lacks(self, "backward_input"))
    }

    /// Computes one microbatch's gradient of the parameters from the weight residuals, and adds it
    /// to `gradient`. Needed for [`Passes::Split`] and [`Passes::Both`]. Default: an error.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`].
    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: ViewsMut<'_, Self::Params>,
    ) -> Result<()> {
        let _ = (cx, gradient);
        Err(lacks(self, "backward_weight"))
    }

    /// Returns the type of the side inputs. Default: none.
    fn side(&self) -> SideInput {
        SideInput::none()
    }

    /// Returns the sharding of the inputs and of their gradients over the stage's mesh: one spec
    /// for all leaves. Default: replicated on every device.
    fn input_spec(&self) -> Spec {
        Spec::default()
    }

    /// Returns the sharding of the outputs and of their gradients over the stage's mesh. A [`Loss`]
    /// must be replicated. Default: replicated on every device.
    fn output_spec(&self) -> Spec {
        Spec::default()
    }

    /// Returns true if the passes draw random numbers in training. Then each microbatch of a
    /// training step needs a [`Microbatch::key`](super::Microbatch::key). The passes read the key
    /// of their stage and microbatch by [`StageContext::key`]. Default: false.
    fn draws_random(&self) -> bool {
        false
    }

    /// Returns true if the parameter at path `path` is not trained. Its gradient has the shape
    /// `[0]` in all backward passes, is not transferred, and is not among the gradients of a step.
    /// Default: false.
    ///
    /// If neither a stage nor any stage before it is trained, the stage runs no backward pass and
    /// keeps no residuals. The stages that read its outputs then get `dx = None`.
    fn is_frozen(&self, path: &str) -> bool {
        let _ = path;
        false
    }

    /// Tells the stage that its parameter at `path` is frozen from now on, as if
    /// [`Stage::is_frozen`] returned true for it. The reason: it is tied to a frozen parameter of
    /// another stage. Default: does nothing.
    ///
    /// The stage must not add to this parameter's gradient any more: its shape is `[0]`.
    fn freeze(&self, path: &str) {
        let _ = path;
    }

    /// Returns the bytes, on each device, of the object that [`Stage::prepare`] makes; `None` if
    /// the stage prepares nothing. `params` has, for each parameter, the shape of the largest
    /// region on one device. Default: `None`.
    fn prepared_bytes(&self, params: &Shapes<Self::Params>) -> Option<u64> {
        let _ = params;
        None
    }

    /// Makes the stage's working form of its parameters on one device, or updates it in place.
    /// `prepared` is `None` at the first call on a device. All passes read the working form by
    /// [`StageContext::prepared`].
    ///
    /// Called only if [`Stage::prepared_bytes`] returns a number: before the first pass, and again
    /// before the next pass after the parameters have changed. If shapes or shardings of the
    /// parameters change, the working form is made anew. Default: an error.
    ///
    /// # Errors
    ///
    /// As for [`Stage::forward`]. The error fails all later passes of the stage.
    fn prepare(
        &self,
        cx: &mut Context<'_>,
        params: Views<'_, Self::Params>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        let _ = (cx, params, prepared);
        let name = self.name();
        Err(Error::kernel(format!(
            "stage {name} has `prepared_bytes`, and no `prepare`: implement it, or return `None`"
        )))
    }

    /// Finds facts that [`Stage::infer`] needs for its declaration, for instance by a trial run of
    /// a model. [`Pipeline::probe`](super::Pipeline::probe) calls it before `infer`. Default: does
    /// nothing.
    ///
    /// All processes call it in the same order. Its operations must be the same on all of them.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit together, or the trial fails.
    fn probe(&self, program: &mut Program, at: &StageProbe<'_, Self>) -> Result<()> {
        let _ = (program, at);
        Ok(())
    }

    /// Makes the passes compute in this dtype although the parameters are f32.
    /// [`Pipeline::compute_in`](super::Pipeline::compute_in) calls it before any pass. Gradients of
    /// parameters stay f32. Default: an error.
    ///
    /// # Errors
    ///
    /// If the stage cannot compute in this dtype.
    fn compute_in(&self, dtype: DType) -> Result<()> {
        let name = self.name();
        Err(Error::kernel(format!(
            "stage {name} is to compute in {dtype}, and has no `compute_in`: it computes in the \
             dtypes of its parameters"
        )))
    }

    /// Returns the name of the stage for messages. Default: the name of the type.
    fn name(&self) -> &str {
        plain_name::<Self>()
    }

    /// Returns the settings of the stage as words. The processes compare them, so that a difference
    /// is an error. Default: none.
    fn statics(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Returns true if the passes and [`Stage::prepare`] read and write values in host memory, even
    /// on a CUDA device. Default: false.
    ///
    /// On a CUDA device, each pass then waits for its inputs and copies them to the host. It
    /// computes on the device's thread and copies the outputs back, which is slow.
    fn computes_on_host(&self) -> bool {
        false
    }

    /// Returns the sources of the CUDA kernels that the passes launch, like
    /// [`Kernel::cuda`](crate::kernel::Kernel::cuda). Default: none.
    fn cuda(&self) -> Vec<&'static Source> {
        Vec::new()
    }
}

/// The mesh, shapes and shardings of a stage, passed to [`Stage::probe`].
#[non_exhaustive]
pub struct StageProbe<'a, S: Stage + ?Sized> {
    /// The mesh of the stage.
    pub mesh: &'a Mesh,
    /// The global shapes of the parameters.
    pub params: &'a Shapes<S::Params>,
    /// The shardings of the parameters that kernels compute with, in leaf order.
    pub shardings: &'a [Sharding],
    /// The shardings of the gradients that the passes write, in leaf order.
    pub gradients: &'a [Sharding],
    /// The global shapes of the input.
    pub x: &'a Shapes<S::In>,
    /// The global shapes of the side inputs.
    pub side: &'a SideShapes,
    /// True if the backward passes compute the gradient of the input.
    pub needs_dx: bool,
    /// The index of the stage in the pipeline, from 0.
    pub stage: usize,
}

/// Returns the error for a pass that a stage does not implement.
fn lacks<S: Stage + ?Sized>(stage: &S, pass: &str) -> Error {
    let name = stage.name();
    let passes = stage.passes();
    Error::kernel(format!(
        "stage {name} has `Passes::{passes:?}`, and no `{pass}`: implement it, or return other \
         `passes`"
    ))
}

/// The backward passes that a stage implements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Passes {
    /// Only [`Stage::backward`]. If a schedule splits the gradients, both are computed when the
    /// input gradient is due, and the weight gradient's action does nothing. Gradients are then
    /// added in the order of the input gradients.
    Fused,
    /// [`Stage::backward_input`] and [`Stage::backward_weight`]. The stage before waits only for
    /// the input gradient, not for the weight gradient. Zero-bubble schedules need that.
    Split,
    /// All three methods. [`Stage::backward`] is called if the schedule combines both gradients in
    /// one action and the gradients are no partial sums. It must compute the same bits as the two
    /// others.
    Both,
}

/// The type of a stage's side inputs: arrays that come with each microbatch and have no gradient,
/// such as labels and masks.
#[derive(Clone, Copy, Debug)]
pub struct SideInput {
    fits: fn(&Structure) -> Result<(), TreeError>,
}

impl SideInput {
    /// Creates the type of side inputs whose tree is `T`.
    pub fn of<T: Tree<Leaf = MpmdArray>>() -> Self {
        Self {
            fits: |structure| {
                let leaves = std::iter::repeat_n(false, structure.leaves());
                T::With::<bool>::from_leaves(structure, leaves).map(drop)
            },
        }
    }

    pub(super) fn none() -> Self {
        Self::of::<mpmd_layout::tree::Empty<MpmdArray>>()
    }

    /// Returns an error if `structure` is not the structure of this type.
    pub(super) fn check(&self, structure: &Structure) -> Result<(), TreeError> {
        (self.fits)(structure)
    }
}

/// The global shapes of a microbatch's side inputs.
#[derive(Debug)]
pub struct SideShapes(pub(super) ErasedTree<ShapedArray>);

impl SideShapes {
    /// Returns the shapes as a tree: `let labels: ShapedArray = side.tree()?`.
    ///
    /// # Errors
    ///
    /// If the shapes are no tree of type `T`.
    pub fn tree<T: Tree<Leaf = ShapedArray>>(&self) -> Result<T> {
        self.0.clone().into_tree("side input")
    }
}

/// A residual of a stage: an array's global shape and its sharding over the stage's mesh, or an
/// object.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PlacedShape {
    pub(super) aval: ShapedArray,
    spec: Spec,
    /// The declared bytes of the object on each device; used only for objects.
    pub(super) object_bytes: u64,
}

impl Leaf for PlacedShape {}

impl PlacedShape {
    /// Creates a residual of the global shape `aval`, sharded by `spec`.
    pub fn new(aval: ShapedArray, spec: Spec) -> Self {
        Self {
            aval,
            spec,
            object_bytes: 0,
        }
    }

    /// Creates a residual that is replicated on every device of the stage.
    pub fn replicated(aval: ShapedArray) -> Self {
        Self::new(aval, Spec::default())
    }

    /// Creates a residual that is a Rust value on each device. The forward pass makes it by
    /// [`ViewMut::put_object`](crate::kernel::ViewMut::put_object), and the backward pass gets it
    /// by [`View::object`](crate::kernel::View::object) or
    /// [`View::take_object`](crate::kernel::View::take_object).
    ///
    /// It is dropped after the last pass that reads it.
    pub fn object() -> Self {
        Self::object_of_bytes(0)
    }

    /// Creates a residual like [`PlacedShape::object`] that takes `bytes` bytes on each device. The
    /// bytes count against the device's memory limit and in memory estimates.
    pub fn object_of_bytes(bytes: u64) -> Self {
        Self {
            object_bytes: bytes,
            ..Self::replicated(ShapedArray::object())
        }
    }

    pub(super) fn sharding(&self, mesh: &Mesh) -> Sharding {
        mesh.sharding(self.spec.clone())
    }
}

/// A residual that also serves as a weight residual, without a copy.
#[derive(Clone, Debug)]
pub(super) struct KeptResidual {
    /// The path of the residual.
    pub(super) residual: String,
    /// The path of the weight residual.
    pub(super) weight_residual: String,
}

/// The declaration of a stage: outputs, residuals and collectives, known before it runs.
#[derive(Clone, Debug)]
pub struct StageSignature<O> {
    pub(super) out: O,
    /// The declared residuals; `None` if the stage keeps its inputs and side inputs instead.
    pub(super) residual: Option<ErasedTree<PlacedShape>>,
    pub(super) weight_residual: ErasedTree<PlacedShape>,
    pub(super) keeps: Vec<KeptResidual>,
    pub(super) forward: Vec<Collective>,
    pub(super) backward_input: Vec<Collective>,
}

impl<O> StageSignature<O> {
    /// Creates the declaration of a stage with output `out` and no residuals. The stage then keeps
    /// its inputs and side inputs, without a copy, for its backward pass. That reads them by
    /// [`StageContext::input`] and [`StageContext::side`].
    pub fn new(out: O) -> Self {
        Self {
            out,
            residual: None,
            weight_residual: ErasedTree::empty(),
            keeps: Vec::new(),
            forward: Vec::new(),
            backward_input: Vec::new(),
        }
    }

    /// Returns the same declaration with the output converted by `f`.
    pub(super) fn map_out<P>(self, f: impl FnOnce(O) -> P) -> StageSignature<P> {
        let Self {
            out,
            residual,
            weight_residual,
            keeps,
            forward,
            backward_input,
        } = self;
        StageSignature {
            out: f(out),
            residual,
            weight_residual,
            keeps,
            forward,
            backward_input,
        }
    }

    /// Declares residuals: arrays on the stage's own devices that the forward pass writes for the
    /// backward pass. They are never transferred, and are freed after the last pass that reads
    /// them.
    ///
    /// The stage then does not keep its inputs. With [`Empty`](mpmd_layout::tree::Empty) as
    /// residuals it keeps nothing.
    #[must_use]
    pub fn residual(mut self, residual: impl Tree<Leaf = PlacedShape>) -> Self {
        self.residual = Some(ErasedTree::of(residual));
        self
    }

    /// Declares residuals that [`Stage::backward_input`] writes for [`Stage::backward_weight`].
    #[must_use]
    pub fn weight_residual(mut self, residual: impl Tree<Leaf = PlacedShape>) -> Self {
        self.weight_residual = ErasedTree::of(residual);
        self
    }

    /// Declares that the residual at path `residual` also serves as the weight residual at path
    /// `weight_residual`, without a copy.
    #[must_use]
    pub fn keep(mut self, residual: impl Into<String>, weight_residual: impl Into<String>) -> Self {
        self.keeps.push(KeptResidual {
            residual: residual.into(),
            weight_residual: weight_residual.into(),
        });
        self
    }

    /// Adds the collectives of `declared` to those of [`Stage::forward`], in order. Everything else
    /// in `declared` is ignored.
    ///
    /// ```
    /// # use mpmd_core::pipeline::StageSignature;
    /// # use mpmd_core::prelude::*;
    /// let part = f32s([4, 8]);
    /// let collectives = Signature::new(()).all_gather("model", part.clone());
    /// let signature = StageSignature::new(part).forward_collectives(collectives);
    /// ```
    #[must_use]
    pub fn forward_collectives(mut self, declared: Signature<()>) -> Self {
        self.forward.extend(declared.collectives);
        self
    }

    /// Adds the collectives of `declared` to those of [`Stage::backward_input`] and
    /// [`Stage::backward`]. Everything else in `declared` is ignored.
    #[must_use]
    pub fn backward_collectives(mut self, declared: Signature<()>) -> Self {
        self.backward_input.extend(declared.collectives);
        self
    }
}

/// The output of the last stage for a microbatch: scalars of type `f32` or `f64`, with the same
/// values on each device of the stage.
#[derive(Clone, Debug, Tree)]
#[non_exhaustive]
pub struct Loss<L> {
    /// The sum of the losses over all items (rows, tokens).
    pub sum: L,
    /// The number of items. The caller divides gradients by the sum of the weights over all
    /// microbatches, so the result does not depend on how a batch is divided.
    pub weight: L,
    /// Sums of further figures over all items, by name, such as the number of right answers. They
    /// have no gradient.
    pub metrics: BTreeMap<String, L>,
}

impl Loss<ShapedArray> {
    /// Checks that all figures are scalars of f32 or f64. A metric's name must not be empty,
    /// contain control characters or be `loss`.
    ///
    /// # Errors
    ///
    /// If a figure or name is not valid. The error names it.
    pub fn check(&self) -> Result<()> {
        let is_bad = |name: &&String| {
            name.is_empty() || name.as_str() == "loss" || name.contains(char::is_control)
        };
        if let Some(name) = self.metrics.keys().find(is_bad) {
            return Err(Error::kernel(format!(
                "a metric of the loss has the name {name:?}: take another, in one line"
            )));
        }

        let metrics = self
            .metrics
            .iter()
            .map(|(name, aval)| (format!("metric {name:?}"), aval));
        let own = [
            ("sum".to_owned(), &self.sum),
            ("weight".to_owned(), &self.weight),
        ];
        let wrong = |(_, aval): &(String, &ShapedArray)| {
            !aval.shape().is_empty() || !matches!(aval.dtype(), DType::F32 | DType::F64)
        };

        match own.into_iter().chain(metrics).find(wrong) {
            None => Ok(()),
            Some((name, aval)) => Err(Error::kernel(format!(
                "the {name} of the loss is {aval}: it must be a scalar of f32 or f64, the sum over \
                 all items"
            ))),
        }
    }
}

impl<L> Loss<L> {
    /// Creates a loss without metrics. `sum` is the sum of the losses over all items, `weight` the
    /// number of items.
    pub fn new(sum: L, weight: L) -> Self {
        Self {
            sum,
            weight,
            metrics: BTreeMap::new(),
        }
    }

    /// Adds a metric. `sum` is its sum over all items; reports divide it by the loss's weight.
    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, sum: L) -> Self {
        self.metrics.insert(name.into(), sum);
        self
    }
}
