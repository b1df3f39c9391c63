//! The division of a stage's layers over its devices.

use mpmd::Result as CoreResult;
use mpmd::candle::nn::{Linear, Module};
use mpmd::candle::{Cx, Result, Tensor};
use mpmd::topology::Mesh;

/// The axis over which heads, the inner elements of MLPs, and tokens of the vocabulary are divided.
pub(crate) const TENSOR: &str = "tensor";
/// The axis over which the query heads of a head of keys are divided. Each of its devices has that
/// head of keys.
pub(crate) const REPEAT: &str = "repeat";
/// The axis over which experts are divided.
pub(crate) const EXPERT: &str = "expert";
/// The axes over which matrices are divided, the outer one first.
const AXES: [&str; 2] = [TENSOR, REPEAT];

/// The numbers of devices over which a stage's layers are divided.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct DeviceDivision {
    /// Number of devices along [`EXPERT`].
    pub(crate) expert: usize,
    /// Number of devices along [`TENSOR`].
    pub(crate) tensor: usize,
    /// Number of devices along [`REPEAT`].
    pub(crate) repeat: usize,
}

/// The input of projections of which each device has some rows.
pub(crate) struct SharedInput<'a> {
    /// The input, as all devices have it.
    pub(crate) x: &'a Tensor,
    /// The same for computations that differ between devices.
    pub(crate) inside: Tensor,
    axes: &'a [&'a str],
    cx: &'a Cx<'a>,
}

impl DeviceDivision {
    /// One device.
    pub(crate) const ONE: Self = Self {
        expert: 1,
        tensor: 1,
        repeat: 1,
    };

    /// Returns the division over the axes of a mesh. A mesh without them has one device for each
    /// part of a batch.
    ///
    /// # Errors
    ///
    /// If the mesh has some of the axes only.
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

    /// Returns the axes of a mesh with these devices, and their sizes.
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

    /// Returns the number of parts of a matrix.
    pub(crate) fn parts(self) -> usize {
        self.tensor * self.repeat
    }

    /// True if the devices have parts of this number of rows.
    pub(crate) fn divides(self, rows: usize) -> bool {
        self.parts() > 1 && rows.is_multiple_of(self.parts())
    }

    /// Returns the place of this device's part.
    pub(crate) fn place(self, cx: &Cx<'_>) -> Result<usize> {
        match self.parts() {
            1 => Ok(0),
            _ => Ok(cx.axis_index(TENSOR)? * self.repeat + cx.axis_index(REPEAT)?),
        }
    }

    /// Returns the axes over which matrices are divided. None, if they are not.
    pub(crate) fn divided(self) -> &'static [&'static str] {
        if self.parts() == 1 { &[] } else { &AXES }
    }

    /// Returns the axes over which the heads of keys are divided.
    pub(crate) fn of_keys(self) -> &'static [&'static str] {
        self.divided().get(..1).unwrap_or_default()
    }

    /// Returns the inputs of projections to keys and values, and to queries.
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

    /// Returns the input of projections of which each device has some rows.
    pub(crate) fn shared<'a>(self, x: &'a Tensor, cx: &'a Cx<'a>) -> Result<SharedInput<'a>> {
        let axes = self.divided();
        Ok(SharedInput {
            x,
            inside: inside(x, cx, axes)?,
            axes,
            cx,
        })
    }

    /// Returns keys or values, which all devices with queries for them have, for computations that
    /// differ between these devices.
    pub(crate) fn repeated(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        inside(&x, cx, self.divided().get(1..).unwrap_or_default())
    }

    /// Adds up over the devices. All get the sum.
    pub(crate) fn sum(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        sum(&x, cx, self.divided())
    }

    /// Returns a tensor that all devices have for the experts, which differ between them.
    pub(crate) fn for_experts(self, x: &Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let x = inside(x, cx, self.divided())?;
        if self.expert == 1 {
            Ok(x)
        } else {
            cx.tree_replicated(&x, EXPERT)
        }
    }

    /// Returns the place of the first of this device's experts, of which it has `own`.
    pub(crate) fn first_expert(self, own: usize, cx: &Cx<'_>) -> Result<usize> {
        if self.expert == 1 {
            Ok(0)
        } else {
            Ok(own * cx.axis_index(EXPERT)?)
        }
    }

    /// Adds up the results of the devices' experts. All get the sum. Experts come first, so its
    /// bits do not depend on the number of devices over which they are divided.
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

    /// Concatenates the parts in the last dimension, for computations that are the same on all
    /// devices.
    pub(crate) fn gathered(self, x: Tensor, cx: &Cx<'_>) -> Result<Tensor> {
        let dim = x.rank().saturating_sub(1);
        self.divided()
            .iter()
            .rev()
            .try_fold(x, |x, axis| cx.gathered(&x, dim, axis))
    }
}

impl SharedInput<'_> {
    /// Returns the product with a matrix that all devices have, for computations that differ
    /// between them.
    pub(crate) fn product(&self, matrix: &Linear) -> Result<Tensor> {
        inside(&matrix.forward(self.x)?, self.cx, self.axes)
    }
}

/// Returns a tensor that is the same on the devices along some axes, for computations that differ
/// between them.
pub(crate) fn inside(x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
    axes.iter()
        .try_fold(x.clone(), |x, axis| cx.replicated(&x, axis))
}

/// Adds up over the devices along some axes, the last one first. All get the sum.
pub(crate) fn sum(x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
    axes.iter()
        .rev()
        .try_fold(x.clone(), |x, axis| cx.all_reduce(&x, axis))
}
