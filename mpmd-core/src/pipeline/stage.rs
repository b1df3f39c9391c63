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

/// A stage of a pipeline: types of parameters, inputs and outputs, and the passes.
///
/// A small stage has [`infer`](Stage::infer), [`forward`](Stage::forward) and
/// [`backward`](Stage::backward). All else is optional: side inputs, residuals, state, random keys,
/// [prepared](Stage::prepare) parameters, and backward [`passes`](Stage::passes) that are split.
/// These values are read from the [`StageContext`].
///
/// Like a [`Kernel`](crate::kernel::Kernel), a stage sees the regions of one device. It may call
/// the collectives that it declares.
pub trait Stage: Send + Sync + 'static {
    /// The parameters.
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

    /// Computes the outputs `y`, and the residuals that the stage declares, on one device. The
    /// arguments are the regions of the arrays on this device.
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
    /// parameters to `gradient`. `dx` is `None` on the first stage, and if nothing that the stage
    /// reads is trained.
    ///
    /// There are no weight residuals, and no residual is kept for later. The pass may call the
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

    /// Computes the input gradient `dx` from the output gradient `dy`, and the weight residuals.
    /// `dx` is as in [`Stage::backward`]. Needed for [`Passes::Split`] and [`Passes::Both`].
    /// Default: an error.
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

    /// Adds the gradient of the parameters for one microbatch to `gradient`, from the weight
    /// residuals. Needed for [`Passes::Split`] and [`Passes::Both`]. Default: an error.
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

    /// Returns true if the passes draw random numbers in training. Each microbatch of a training
    /// step then needs [`Microbatch::key`](super::Microbatch::key), and the passes have a key of
    /// the stage and the microbatch: [`StageContext::key`]. Default: false.
    fn draws_random(&self) -> bool {
        false
    }

    /// Returns true if the parameter at path `path` is not trained. Its gradient has the shape
    /// `[0]` in all backward passes, moves nowhere, and is not among the gradients of a step.
    /// Default: false.
    ///
    /// If nothing is trained at or before a stage, the stage runs no backward pass, keeps no
    /// residuals, and a stage that reads it has `dx = None`.
    fn is_frozen(&self, path: &str) -> bool {
        let _ = path;
        false
    }

    /// Notes that the parameter at `path` is frozen from now on, as if [`Stage::is_frozen`]
    /// returned true: it is tied to a frozen parameter of another stage. Default: does nothing.
    ///
    /// A stage that adds to all its gradients has to leave this one out: its shape is `[0]`.
    fn freeze(&self, path: &str) {
        let _ = path;
    }

    /// Returns the bytes on each device of the object that [`Stage::prepare`] makes, or `None` if
    /// the stage prepares nothing. `params` has the shape of the largest region of each parameter
    /// on one device. Default: `None`.
    fn prepared_bytes(&self, params: &Shapes<Self::Params>) -> Option<u64> {
        let _ = params;
        None
    }

    /// Makes the stage's working form of its parameters on one device, or updates it in place.
    /// `prepared` is `None` at the first call on a device. All passes have it by
    /// [`StageContext::prepared`].
    ///
    /// Called only if [`Stage::prepared_bytes`] returns a number: before the first pass, and before
    /// the next pass after the values of the parameters have changed. If the shapes or shardings of
    /// the parameters change, the working form is made anew. Default: an error.
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

    /// Finds the facts that [`Stage::infer`] declares, for instance by a trial run of a model.
    /// [`Pipeline::probe`](super::Pipeline::probe) calls it before `infer`. Default: does nothing.
    ///
    /// All processes call it in the same order, and must issue the same operations.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit together, or the trial fails.
    fn probe(&self, program: &mut Program, at: &StageProbe<'_, Self>) -> Result<()> {
        let _ = (program, at);
        Ok(())
    }

    /// Makes the passes compute in this dtype, where the parameters are f32:
    /// [`Pipeline::compute_in`](super::Pipeline::compute_in) calls it before any pass. Gradients
    /// of parameters stay f32. Default: an error.
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

    /// Returns the settings of the stage as words, which the processes compare with each other.
    /// Default: none.
    fn statics(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Returns true if the passes and [`Stage::prepare`] read and write values in host memory on
    /// any device. Default: false.
    ///
    /// On a CUDA device, each pass then waits for its inputs, copies them to the host, computes on
    /// the device's thread and copies the outputs back. That is slow.
    fn computes_on_host(&self) -> bool {
        false
    }

    /// Returns the CUDA sources that the passes launch on CUDA devices, like
    /// [`Kernel::cuda`](crate::kernel::Kernel::cuda). Default: none.
    fn cuda(&self) -> Vec<&'static Source> {
        Vec::new()
    }
}

/// The place and the shapes of a stage, for [`Stage::probe`].
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
    /// [`Stage::backward`] alone. Where a schedule splits the gradients, both are computed with the
    /// input gradient, and the weight gradient has nothing to do. The gradients are then added in
    /// the order of the input gradients.
    Fused,
    /// [`Stage::backward_input`] and [`Stage::backward_weight`]. The stage before waits for the
    /// input gradient, but not for the weight gradient: schedules without bubbles need that.
    Split,
    /// All three. `backward` is called where a schedule has both gradients as one action, unless
    /// they are partial sums. It must compute the same bits as the two others.
    Both,
}

/// The type of a stage's side inputs: arrays that come with each microbatch and have no gradient,
/// such as labels and masks.
#[derive(Clone, Copy, Debug)]
pub struct SideInput {
    fits: fn(&Structure) -> Result<(), TreeError>,
}

impl SideInput {
    /// Declares side inputs of type `T`.
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

    /// Returns an error if side inputs of this structure are not of the type.
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
    /// If they are no tree of type `T`.
    pub fn tree<T: Tree<Leaf = ShapedArray>>(&self) -> Result<T> {
        self.0.clone().into_tree("side input")
    }
}

/// The global shape of a residual, and its sharding over the stage's mesh; or an object.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PlacedShape {
    pub(super) aval: ShapedArray,
    spec: Spec,
    /// The declared bytes of an object on each device.
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

    /// Creates a residual that every device of the stage holds whole.
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

    /// Creates a residual like [`PlacedShape::object`] of `bytes` bytes on each device. They count
    /// against the device's memory limit, and in estimates of memory.
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

/// A residual that is a weight residual, too, without a copy.
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
    /// `None` if the stage keeps its inputs and side inputs instead.
    pub(super) residual: Option<ErasedTree<PlacedShape>>,
    pub(super) weight_residual: ErasedTree<PlacedShape>,
    pub(super) keeps: Vec<KeptResidual>,
    pub(super) forward: Vec<Collective>,
    pub(super) backward_input: Vec<Collective>,
}

impl<O> StageSignature<O> {
    /// Declares a stage with output `out`. It keeps its inputs and side inputs, without a copy,
    /// until its backward pass has read them by [`StageContext::input`] and [`StageContext::side`].
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

    /// Returns the declaration with another form of the output.
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
    /// backward pass. They never move, and are freed after the last pass that reads them.
    ///
    /// The stage then does not keep its inputs. With
    /// [`Empty`](mpmd_layout::tree::Empty) it keeps nothing.
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

    /// Declares that the residual at path `residual` is also the weight residual at path
    /// `weight_residual`. It is not copied.
    #[must_use]
    pub fn keep(mut self, residual: impl Into<String>, weight_residual: impl Into<String>) -> Self {
        self.keeps.push(KeptResidual {
            residual: residual.into(),
            weight_residual: weight_residual.into(),
        });
        self
    }

    /// Declares further collectives of [`Stage::forward`]: those of `declared`, in order. All else
    /// in `declared` has no effect.
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

    /// Declares further collectives of [`Stage::backward_input`] and [`Stage::backward`], like
    /// [`StageSignature::forward_collectives`].
    #[must_use]
    pub fn backward_collectives(mut self, declared: Signature<()>) -> Self {
        self.backward_input.extend(declared.collectives);
        self
    }
}

/// The output of the last stage for a microbatch: scalars with the same values on each device of
/// the stage, in `f32` or `f64`.
#[derive(Clone, Debug, Tree)]
#[non_exhaustive]
pub struct Loss<L> {
    /// The sum of the losses over all items (rows, tokens).
    pub sum: L,
    /// The number of items. Gradients are divided by the total over all microbatches, so the result
    /// does not depend on the division of a batch.
    pub weight: L,
    /// The sum of further figures over all items, by name, such as the number of right answers.
    /// They have no gradient.
    pub metrics: BTreeMap<String, L>,
}

impl Loss<ShapedArray> {
    /// Checks that all figures are scalars of f32 or f64, and that the metrics have names in one
    /// line, none of which is `loss`.
    ///
    /// # Errors
    ///
    /// If one is not. The error names it.
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
    /// Creates a loss without metrics: its sum over all items, and their number.
    pub fn new(sum: L, weight: L) -> Self {
        Self {
            sum,
            weight,
            metrics: BTreeMap::new(),
        }
    }

    /// Adds the sum of a metric over all items. Reports show its mean, as that of the loss.
    #[must_use]
    pub fn metric(mut self, name: impl Into<String>, sum: L) -> Self {
        self.metrics.insert(name.into(), sum);
        self
    }
}
