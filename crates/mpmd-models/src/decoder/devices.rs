//! The division of a stage's layers over its devices.

use mpmd::Result as CoreResult;
use mpmd::candle::nn::{Linear, Module};
use mpmd::candle::{Cx, Result, Tensor};
use mpmd::topology::Mesh;

/// The mesh axis that divides heads, the inner elements of MLPs, and the vocabulary.
pub(crate) const TENSOR: &str = "tensor";
/// The mesh axis that divides the query heads of one head of keys. All devices along it hold this
/// head of keys.
pub(crate) const REPEAT: &str = "repeat";
/// The mesh axis that divides the experts.
pub(crate) const EXPERT: &str = "expert";
/// The mesh axes that divide matrices, the outer one first.
const AXES: [&str; 2] = [TENSOR, REPEAT];

/// The numbers of devices that share each layer of a stage, by mesh axis.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct DeviceDivision {
    /// Number of devices along [`EXPERT`].
    pub(crate) expert: usize,
    /// Number of devices along [`TENSOR`].
    pub(crate) tensor: usize,
    /// Number of devices along [`REPEAT`].
    pub(crate) repeat: usize,
}

/// The input of a projection whose output rows are divided over devices.
pub(crate) struct SharedInput<'a> {
    /// The input, equal on all devices.
    pub(crate) x: &'a Tensor,
    /// The input for device-specific computations: in the backward pass its gradients are summed
    /// over the devices.
    pub(crate) inside: Tensor,
    axes: &'a [&'a str],
    cx: &'a Cx<'a>,
}

impl DeviceDivision {
    /// The division over a single device: no axis divides anything.
    pub(crate) const ONE: Self = Self {
        expert: 1,
        tensor: 1,
        repeat: 1,
    };

    /// Returns the division by the axes of `mesh`. A mesh without these axes replicates the layers:
    /// [`DeviceDivision::ONE`].
    ///
    /// # Errors
    ///
    /// If the mesh has only some of the axes.
    pub(crate) fn of(mesh: &Mesh) -> CoreResult<Self> {
        let all = [EXPERT, TENSOR, REPEAT];
        if !all.iter().any(|axis| mesh.axis_index(axis).is_some()) {
            return Ok(Self::ONE);
        }
        let [expert, tensor, repeat] = all.map(|axis| mesh.axis_size(axis));
        Ok(Self {
            expert: expert?,
            tensor: tensor?,
            repeat: repeat?,
        })
    }

    /// Returns the names and sizes of the mesh axes of this division.
    pub(crate) fn axes(self) -> [(&'static str, usize); 3] {
        [
            (EXPERT, self.expert),
            (TENSOR, self.tensor),
            (REPEAT, self.repeat),
        ]
    }

    /// Returns the number of devices of a stage.
    pub(crate) fn devices(self) -> usize {
        self.expert * self.parts()
    }

    /// Returns the number of parts into which a matrix is divided.
    pub(crate) fn parts(self) -> usize {
        self.tensor * self.repeat
    }

    /// True if matrices are divided, and `rows` is a multiple of the number of parts.
    pub(crate) fn divides(self, rows: usize) -> bool {
        self.parts() > 1 && rows.is_multiple_of(self.parts())
    }

    /// Returns the index of this device's part of a divided matrix.
    pub(crate) fn place(self, cx: &Cx<'_>) -> Result<usize> {
        match self.parts() {
            1 => Ok(0),
            _ => Ok(cx.axis_index(TENSOR)? * self.repeat + cx.axis_index(REPEAT)?),
        }
    }

    /// Returns the axes that divide matrices. Empty if matrices are not divided.
    pub(crate) fn divided(self) -> &'static [&'static str] {
        if self.parts() == 1 { &[] } else { &AXES }
    }

    /// Returns the axes that divide the heads of keys and values.
    pub(crate) fn of_keys(self) -> &'static [&'static str] {
        self.divided().get(..1).unwrap_or_default()
    }

    /// Returns two inputs made of `x`: for the projections to keys and values, and for the one to
    /// queries.
    pub(crate) fn heads<'a>(self, x: &'a Tensor, cx: &'a Cx<'a>) -> Result<[SharedInput<'a>; 2]> {
        let keys = inside(x, cx, self.of_keys())?;
        let queries = inside(&keys, cx, self.divided().get(1..).unwrap_or_default())?;
        Ok([
            SharedInput {
                x,
                inside: keys,
                axes: self.of_keys(),
                cx,
            },
            SharedInput {
                x,
                inside: queries,
                axes: self.divided(),
                cx,
            },
        ])
    }

    /// Returns `x` as the input of a projection whose output rows are divided over devices.
    pub(crate) fn shared<'a>(self, x: &'a Tensor, cx: &'a Cx<'a>) -> Result<SharedInput<'a>> {
        let axes = self.divided();
        Ok(SharedInput {
            x,
            inside: inside(x, cx, axes)?,
            axes,
            cx,
        })
    }

    /// Returns keys or values `x` for the devices that share one head of keys but have different
    /// query heads. Gradients are summed over these devices.
    pub(crate) fn repeated(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        inside(&x, cx, self.divided().get(1..).unwrap_or_default())
    }

    /// Returns the sum of `x` over the devices that divide matrices. All of them get the sum.
    pub(crate) fn sum(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        sum(&x, cx, self.divided())
    }

    /// Returns `x`, which is equal on all devices, as the input of experts that differ between
    /// devices. Gradients are summed over the devices.
    pub(crate) fn for_experts(self, x: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let x = inside(x, cx, self.divided())?;
        if self.expert == 1 {
            Ok(x)
        } else {
            cx.tree_replicated(&x, EXPERT)
        }
    }

    /// Returns the index of this device's first expert. `own` is the number of experts on each
    /// device.
    pub(crate) fn first_expert(self, own: usize, cx: &Cx<'_>) -> Result<usize> {
        if self.expert == 1 {
            Ok(0)
        } else {
            Ok(own * cx.axis_index(EXPERT)?)
        }
    }

    /// Returns the sum of the experts' results over all devices, on every device. Sums along
    /// [`EXPERT`] first, so the bits do not depend on the number of devices that divide the
    /// experts.
    pub(crate) fn sum_of_experts(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        self.sum(
            if self.expert == 1 {
                x
            } else {
                cx.tree_sum(&x, EXPERT)?
            },
            cx,
        )
    }

    /// Concatenates the devices' parts of `x` along the last dimension. Every device gets the
    /// whole.
    pub(crate) fn gathered(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let dim = x.rank().saturating_sub(1);
        self.divided()
            .iter()
            .rev()
            .try_fold(x, |x, axis| cx.gathered(&x, dim, axis))
    }
}

impl SharedInput<'_> {
    /// Returns the product of the input and a matrix that all devices hold, for device-specific
    /// computations. Gradients of the product are summed over the devices.
    pub(crate) fn product(&self, matrix: &Linear) -> Result<Tensor> {
        inside(&matrix.forward(self.x)?, self.cx, self.axes)
    }
}

/// Returns `x`, which is equal on the devices along `axes`, for device-specific computations. In
/// the backward pass its gradients are summed over these devices.
pub(crate) fn inside(x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
    axes.iter()
        .try_fold(x.clone(), |x, axis| cx.replicated(&x, axis))
}

/// Returns the sum of `x` over the devices along `axes`, the last axis first. All of them get the
/// sum.
pub(crate) fn sum(x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
    axes.iter()
        .rev()
        .try_fold(x.clone(), |x, axis| cx.all_reduce(&x, axis))
}
