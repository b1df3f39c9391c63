//! The context of a model's forward pass.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor, bail};
use mpmd_core::ObjectRef;
use mpmd_core::kernel::View;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::random::Key;

use crate::bridge::{self, Place};
use crate::collectives;
use crate::pass;

/// The surroundings of a model's forward pass: side inputs, random keys, collectives, and whether
/// this is training.
pub struct Cx<'a> {
    pub(crate) training: bool,
    pub(crate) side: SideValues<'a>,
    /// The stage's state. `None` in a probe, and if the stage has none.
    pub(crate) state: Option<View<'a>>,
    /// The CUDA device of the pass.
    pub(crate) place: Place<'a>,
}

/// The side inputs of a microbatch, by name.
pub(crate) enum SideValues<'a> {
    Values(BTreeMap<String, View<'a>>),
    /// Only the shapes, of a probe.
    Shapes(BTreeMap<String, ShapedArray>),
}

impl Cx<'_> {
    /// Returns true in training, and false in evaluation.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// Returns a copy of the side input of this name, such as labels or a mask.
    ///
    /// # Errors
    ///
    /// If the microbatch has no side input of this name for the stage.
    pub fn side(&self, name: &str) -> Result<Tensor> {
        let found = match &self.side {
            SideValues::Values(values) => values
                .get(name)
                .map(|view| bridge::tensor_of(view, self.place)),
            SideValues::Shapes(shapes) => shapes.get(name).map(|aval| bridge::zeros(aval, false)),
        };

        match found {
            Some(tensor) => tensor.map_err(candle_core::Error::wrap),
            None => {
                let given = self.names();
                bail!(
                    "the stage reads side input {name:?}, and the microbatch gives it {given}: add \
                     it with `Microbatch::side(stage, named([({name:?}, array)]))`"
                )
            }
        }
    }

    /// Gives exclusive access to the stage's [state](mpmd_core::pipeline::Pipeline::state) on this
    /// device, such as a cache, until the result is dropped. `None` in a probe, which has zeros in
    /// place of all values: compute with a state of the same shapes that is dropped.
    ///
    /// # Errors
    ///
    /// If the stage has no state, or one of another type. If the pass has access to it already.
    pub fn state<T: 'static>(&self) -> Result<Option<ObjectRef<'_, T>>> {
        match (&self.state, &self.side) {
            (Some(state), _) => state.object().map(Some).map_err(candle_core::Error::wrap),
            (None, SideValues::Shapes(_)) => Ok(None),
            (None, _) => bail!("the stage has no state: give it one with `Pipeline::state`"),
        }
    }

    /// Returns the names of the side inputs in words.
    fn names(&self) -> String {
        let names: Vec<&String> = match &self.side {
            SideValues::Values(values) => values.keys().collect(),
            SideValues::Shapes(shapes) => shapes.keys().collect(),
        };
        if names.is_empty() {
            "none".to_owned()
        } else {
            format!("{names:?}")
        }
    }

    /// Returns a random key. It depends on the microbatch's key, the stage, and the number of keys
    /// drawn before in this pass. Recomputation draws the same keys.
    ///
    /// # Errors
    ///
    /// In training, if the microbatch has no key. Always in evaluation.
    pub fn key(&self) -> Result<Key> {
        pass::random_key()
    }

    /// Adds up `x` over the devices along mesh axis `axis`. All devices get the sum.
    ///
    /// The gradient of the sum is the same on each device, and becomes the gradient of `x` without
    /// communication.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis, or `x` is not of dtype `f32`. If a device fails.
    pub fn all_reduce(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::all_reduce(x, axis)
    }

    /// Concatenates `x` of the devices along mesh axis `axis`, in dimension `dim`. All devices get
    /// the result.
    ///
    /// Each device may use the result for something else: the gradients of the devices are added
    /// up, and each device gets the part of its `x` (a reduce-scatter).
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_reduce`], and if there is no such dimension.
    pub fn all_gather(&self, x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
        collectives::all_gather(x, dim, axis)
    }

    /// Concatenates `x` of the devices along mesh axis `axis`, in dimension `dim`, for computations
    /// that are the same on all of these devices. Each device's `x` gets its part of the gradient,
    /// without communication.
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_gather`].
    pub fn gathered(&self, x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
        collectives::gathered(x, dim, axis)
    }

    /// Returns the place of this device along mesh axis `axis`. A probe runs on the first one.
    ///
    /// # Errors
    ///
    /// If the mesh has no such axis.
    pub fn axis_index(&self, axis: &str) -> Result<usize> {
        collectives::index(axis)
    }

    /// Adds up `x` over the devices along mesh axis `axis`, and gives each device its part of
    /// dimension `dim`, in the order of the devices.
    ///
    /// Its gradient is the concatenation of the devices' gradients (an all-gather).
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_gather`], and if the devices do not divide the dimension.
    pub fn reduce_scatter(&self, x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
        collectives::reduce_scatter(x, dim, axis)
    }

    /// Returns `x`, which is the same on all devices along mesh axis `axis`, for computations that
    /// differ between these devices. Its gradient is the sum of the devices' gradients.
    ///
    /// A tensor-parallel part of a model begins with it, and ends with [`Cx::all_reduce`].
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_reduce`].
    pub fn replicated(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::replicated(x, axis)
    }

    /// Adds up `x` over the devices along mesh axis `axis`, as [`Cx::all_reduce`] does, in the
    /// order of a binary tree over the devices: the sums of both halves are added.
    ///
    /// Add the terms of a device in such an order too. Then the bits of the sum of all terms are
    /// the same on 1, 2, 4 and so on devices. Each device gets the terms of all.
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_reduce`].
    pub fn tree_sum(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::tree_sum(x, axis)
    }

    /// Returns `x` as [`Cx::replicated`] does. The devices' gradients are added up as by
    /// [`Cx::tree_sum`].
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_reduce`].
    pub fn tree_replicated(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::tree_replicated(x, axis)
    }
}
