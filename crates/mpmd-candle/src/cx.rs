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
    /// The CUDA device of the pass; `None` for a pass on the host.
    pub(crate) place: Place<'a>,
}

/// The side inputs of a microbatch, by name.
pub(crate) enum SideValues<'a> {
    Values(BTreeMap<String, View<'a>>),
    /// The shapes of the side inputs, in a probe.
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
    /// device, such as a cache, until the result is dropped.
    ///
    /// Returns `None` in a probe, where all values are zeros. Create a temporary state of the same
    /// shapes there.
    ///
    /// # Errors
    ///
    /// If the stage has no state, or a state of another type. If this pass already holds the
    /// access.
    pub fn state<T: 'static>(&self) -> Result<Option<ObjectRef<'_, T>>> {
        match (&self.state, &self.side) {
            (Some(state), _) => state.object().map(Some).map_err(candle_core::Error::wrap),
            (None, SideValues::Shapes(_)) => Ok(None),
            (None, _) => bail!("the stage has no state: give it one with `Pipeline::state`"),
        }
    }

    /// Lists the names of the side inputs for an error message.
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
    /// Devices may use the result in different computations. The backward pass sums the devices'
    /// gradients and gives each device the part of its own `x` (a reduce-scatter).
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_reduce`], and if there is no such dimension.
    pub fn all_gather(&self, x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
        collectives::all_gather(x, dim, axis)
    }

    /// Concatenates `x` of the devices along mesh axis `axis`, in dimension `dim`, for computations
    /// that are the same on all of these devices. In the backward pass each device takes its own
    /// part of the gradient, without communication.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Cx::all_gather`].
    pub fn gathered(&self, x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
        collectives::gathered(x, dim, axis)
    }

    /// Returns the index of this device along mesh axis `axis`. It is 0 in a probe.
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
    /// In the backward pass the devices' gradients are concatenated (an all-gather).
    ///
    /// # Errors
    ///
    /// As for [`Cx::all_gather`], and if the dimension is no multiple of the number of devices.
    pub fn reduce_scatter(&self, x: &Tensor, dim: usize, axis: &str) -> Result<Tensor> {
        collectives::reduce_scatter(x, dim, axis)
    }

    /// Returns `x`, which is the same on all devices along mesh axis `axis`, for computations that
    /// differ between these devices. The backward pass sums the devices' gradients.
    ///
    /// A tensor-parallel part of a model begins with this call and ends with [`Cx::all_reduce`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Cx::all_reduce`].
    pub fn replicated(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::replicated(x, axis)
    }

    /// Adds up `x` over the devices along mesh axis `axis`, as [`Cx::all_reduce`] does, in the
    /// order of a binary tree over the devices: the sums of both halves are added.
    ///
    /// If each device also adds its own terms in such an order, the total has the same bits on 1,
    /// 2, 4 and so on devices. Every device receives the `x` of all devices.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Cx::all_reduce`].
    pub fn tree_sum(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::tree_sum(x, axis)
    }

    /// Returns `x` as [`Cx::replicated`] does. The backward pass sums the devices' gradients in the
    /// order of [`Cx::tree_sum`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Cx::all_reduce`].
    pub fn tree_replicated(&self, x: &Tensor, axis: &str) -> Result<Tensor> {
        collectives::tree_replicated(x, axis)
    }
}
