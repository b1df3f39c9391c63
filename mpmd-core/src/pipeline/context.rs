//! The context of a stage's pass: that of its kernel, and the optional values of the pass.

use std::any::Any;
use std::ops::{Deref, DerefMut};

use super::erased_tree::ErasedTree;
use crate::error::{Error, Result};
use crate::exec::array::object::ObjectRef;
use crate::kernel::{Context, View, ViewMut};
use mpmd_layout::random::Key;
use mpmd_layout::tree::Tree;

/// The context of a running pass of a stage. Derefs to the [`Context`] of a kernel, and gives
/// access to the optional values of the pass: side inputs, residuals, state, key and prepared
/// parameters.
///
/// Each value is read as a tree of views. The tree has the structure that the stage declared or the
/// microbatch has: `let (x, mask): (View, View) = cx.side()?`.
pub struct StageContext<'v, 'c> {
    context: &'v mut Context<'c>,
    stage: &'v str,
    mode: Mode,
    given: PassValues<'v>,
    extras: Extras<View<'v>>,
    /// Access to the prepared parameters. `None` until the pass first uses them.
    prepared: Option<ObjectRef<'v, WorkingForm>>,
}

/// The form of a stage's parameters that `Stage::prepare` makes for its passes, on one device.
/// Contains `None` until it is made.
pub(super) struct WorkingForm(pub(super) Option<Box<dyn Any + Send>>);

/// The mode of a pass. Each mode has its own compiled forward kernel.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Mode {
    /// A forward pass outside of training.
    Evaluation,
    /// A forward pass of a training step after which no backward pass follows.
    ForwardOnly,
    /// A forward pass of a training step that runs again before its backward pass.
    Recomputed,
    /// Any other pass of a training step.
    Training,
}

/// The optional inputs of every kernel of a stage: state, working form and random key. Each is
/// `None` if the pass lacks it.
#[derive(Clone, Debug, Tree)]
pub(super) struct Extras<L> {
    /// The object set by [`Pipeline::state`](super::Pipeline::state).
    pub(super) state: Option<L>,
    /// The object made by [`Stage::prepare`](super::Stage::prepare).
    pub(super) prepared: Option<L>,
    /// The random key of this stage and microbatch, as a `u64`.
    pub(super) key: Option<L>,
}

/// The optional values of a pass; each is `None` if the pass does not have it.
#[derive(Default)]
pub(super) struct PassValues<'v> {
    pub(super) input: Option<ErasedTree<View<'v>>>,
    pub(super) side: Option<ErasedTree<View<'v>>>,
    pub(super) residual: Option<ErasedTree<View<'v>>>,
    pub(super) weight_residual: Option<ErasedTree<View<'v>>>,
    pub(super) residual_mut: Option<ErasedTree<ViewMut<'v>>>,
    pub(super) weight_residual_mut: Option<ErasedTree<ViewMut<'v>>>,
}

impl<'v, 'c> StageContext<'v, 'c> {
    pub(super) fn new(
        context: &'v mut Context<'c>,
        stage: &'v str,
        mode: Mode,
        given: PassValues<'v>,
        extras: Extras<View<'v>>,
    ) -> Self {
        Self {
            context,
            stage,
            mode,
            given,
            extras,
            prepared: None,
        }
    }

    /// Returns true in a training step. Returns false in
    /// [`Pipeline::forward`](super::Pipeline::forward) and
    /// [`Pipeline::forward_all`](super::Pipeline::forward_all).
    pub fn is_training(&self) -> bool {
        self.mode != Mode::Evaluation
    }

    /// Returns true if a backward pass will read the residuals of this forward pass.
    ///
    /// False in evaluation, in the first forward pass of a stage that
    /// [recomputes](super::Pipeline::recompute), and if neither this stage nor an earlier one is
    /// trained. Even then the forward pass must write its residuals; objects among them count as 0
    /// bytes. True in backward passes.
    pub fn keeps_residuals(&self) -> bool {
        self.mode == Mode::Training
    }

    /// Returns the random key of this stage and microbatch, in a training step of a stage that
    /// [draws random numbers](super::Stage::draws_random). All passes of the microbatch have the
    /// same key, on every device of the stage.
    ///
    /// # Errors
    ///
    /// In evaluation, and if the stage does not draw random numbers.
    pub fn key(&self) -> Result<Key> {
        let help = match self.is_training() {
            true => "Let `Stage::draws_random` return true.",
            false => "Evaluation has no keys: draw only if `is_training` is true.",
        };
        let key = self
            .extras
            .key
            .as_ref()
            .ok_or_else(|| self.missing("key", help))?;
        Ok(Key(key.scalar::<u64>()?))
    }

    /// Returns the working form of the parameters that [`Stage::prepare`](super::Stage::prepare)
    /// has made on this device. Available in every pass.
    ///
    /// # Errors
    ///
    /// If the stage prepares nothing, or the working form is not of type `T`.
    pub fn prepared<T: 'static>(&mut self) -> Result<&mut T> {
        if self.prepared.is_none() {
            let none = || {
                self.missing(
                    "prepared parameters",
                    "Let `Stage::prepared_bytes` return a number.",
                )
            };
            let access = self.extras.prepared.as_ref().ok_or_else(none)?.object()?;
            self.prepared = Some(access);
        }

        let stage = self.stage;
        let found = self
            .prepared
            .as_mut()
            .and_then(|form| form.0.as_mut()?.downcast_mut());
        found.ok_or_else(|| {
            let asked = std::any::type_name::<T>();
            Error::kernel(format!(
                "the prepared parameters of stage {stage} are no {asked}: ask for the type that \
                 its `prepare` makes"
            ))
        })
    }

    /// Returns the side inputs of the microbatch. Available in the forward pass, and in the
    /// backward pass of a stage that declares no residuals.
    ///
    /// # Errors
    ///
    /// If the pass has no side inputs, or they are no tree of type `T`.
    pub fn side<T: Tree<Leaf = View<'v>>>(&self) -> Result<T> {
        self.read(&self.given.side, "side input", KEPT)
    }

    /// Returns the input of the forward pass. Available in the backward pass of a stage that
    /// declares no residuals.
    ///
    /// # Errors
    ///
    /// If this is another pass, or the stage declares residuals. If the input is no tree of type
    /// `T`.
    pub fn input<T: Tree<Leaf = View<'v>>>(&self) -> Result<T> {
        self.read(&self.given.input, "input", KEPT)
    }

    /// Returns the residuals, for the forward pass to write. Their initial values are undefined.
    ///
    /// # Errors
    ///
    /// If this is not a forward pass, if the stage declares no residuals, or if this pass has
    /// called `residual_mut` before. If the residuals are no tree of type `T`.
    pub fn residual_mut<T: Tree<Leaf = ViewMut<'v>>>(&mut self) -> Result<T> {
        let residual = self.given.residual_mut.take();
        self.write(
            residual,
            "residual",
            "The forward pass writes them once, if they are declared.",
        )
    }

    /// Returns the residuals that the forward pass has written. Available in the backward pass.
    ///
    /// The view of a residual that the signature [keeps](super::StageSignature::keep) is empty in
    /// [`Stage::backward_input`](super::Stage::backward_input): its values are in the weight
    /// residual.
    ///
    /// # Errors
    ///
    /// If this is another pass, or the stage declares no residuals. If they are no tree of type
    /// `T`.
    pub fn residual<T: Tree<Leaf = View<'v>>>(&self) -> Result<T> {
        let help = "The passes `backward` and `backward_input` have them, if they are declared.";
        self.read(&self.given.residual, "residual", help)
    }

    /// Returns the weight residuals, for [`Stage::backward_input`](super::Stage::backward_input) to
    /// write. Those that the signature [keeps](super::StageSignature::keep) already have their
    /// values.
    ///
    /// # Errors
    ///
    /// If this is another pass, or it has called `weight_residual_mut` before. If the weight
    /// residuals are no tree of type `T`.
    pub fn weight_residual_mut<T: Tree<Leaf = ViewMut<'v>>>(&mut self) -> Result<T> {
        let residual = self.given.weight_residual_mut.take();
        self.write(
            residual,
            "weight residual",
            "The pass `backward_input` writes them once.",
        )
    }

    /// Returns the weight residuals, in [`Stage::backward_weight`](super::Stage::backward_weight).
    ///
    /// # Errors
    ///
    /// If this is another pass. If the weight residuals are no tree of type `T`.
    pub fn weight_residual<T: Tree<Leaf = View<'v>>>(&self) -> Result<T> {
        let help = "The pass `backward_weight` has them.";
        self.read(&self.given.weight_residual, "weight residual", help)
    }

    /// Gives exclusive access to the stage's [state](super::Pipeline::state) on this device, until
    /// the result is dropped. Available in every pass.
    ///
    /// # Errors
    ///
    /// If the stage has no state, or its state is not of type `T`. If the pass already holds an
    /// access to the state.
    pub fn state<T: 'static>(&self) -> Result<ObjectRef<'v, T>> {
        let none = || self.missing("state", "Give it with `Pipeline::state`.");
        Ok(self.state_view().ok_or_else(none)?.object()?)
    }

    /// Returns the view of the stage's state, for [`View::object`]; `None` if the stage has no
    /// state.
    pub fn state_view(&self) -> Option<View<'v>> {
        self.extras.state
    }

    fn read<T: Tree<Leaf = View<'v>>>(
        &self,
        found: &Option<ErasedTree<View<'v>>>,
        value: &str,
        help: &str,
    ) -> Result<T> {
        found
            .clone()
            .ok_or_else(|| self.missing(value, help))?
            .into_tree(value)
    }

    fn write<T: Tree<Leaf = ViewMut<'v>>>(
        &self,
        found: Option<ErasedTree<ViewMut<'v>>>,
        value: &str,
        help: &str,
    ) -> Result<T> {
        found
            .ok_or_else(|| self.missing(value, help))?
            .into_tree(value)
    }

    fn missing(&self, value: &str, help: &str) -> Error {
        Error::kernel(format!(
            "this pass of stage {} has no {value}. {help}",
            self.stage
        ))
    }
}

const KEPT: &str = "The pass `backward` has it only if the stage declares no residuals; else write \
                    what it needs to a residual.";

impl<'c> Deref for StageContext<'_, 'c> {
    type Target = Context<'c>;

    fn deref(&self) -> &Context<'c> {
        self.context
    }
}

impl DerefMut for StageContext<'_, '_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.context
    }
}
