//! The structure and shapes of a tree of tensors, on their way from the process that has found them
//! to all others.

use candle_core::Tensor;
use mpmd_core::{Error, Result};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::tree::{Name, Structure, Tree};
use serde::{Deserialize, Serialize};

use crate::dtypes;

/// A tree's structure, and the shape and dtype of each leaf.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct TreeForm {
    branches: Branches,
    leaves: Vec<(Vec<usize>, DType)>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
enum Branches {
    Leaf,
    Absent,
    /// The branches of a sequence, in order.
    Numbered(Vec<Branches>),
    /// The branches of a struct or map as (name, branches).
    Named(Vec<(String, Branches)>),
}

impl TreeForm {
    /// Describes a tree of tensors. `change` maps the shape and dtype of each leaf.
    ///
    /// # Errors
    ///
    /// If a tensor's dtype is no dtype of arrays, or `change` fails.
    pub(crate) fn of(
        structure: &Structure,
        tensors: &[Tensor],
        change: impl Fn(ShapedArray) -> Result<ShapedArray>,
    ) -> Result<Self> {
        let leaves = tensors.iter().map(|tensor| {
            let aval = change(dtypes::aval_of(tensor)?)?;
            Ok((aval.shape().to_vec(), aval.dtype()))
        });
        Ok(Self {
            branches: structure.into(),
            leaves: leaves.collect::<Result<_>>()?,
        })
    }

    /// Returns the shapes as a tree of type `T`.
    ///
    /// # Errors
    ///
    /// If `T` does not have this structure.
    pub(crate) fn shapes<T: Tree<Leaf = ShapedArray>>(&self) -> Result<T> {
        let avals = self
            .leaves
            .iter()
            .map(|(dims, dtype)| ShapedArray::try_new(dims, *dtype));
        let avals = avals.collect::<Result<Vec<_>, _>>()?;
        T::from_leaves(&Structure::from(&self.branches), avals).map_err(Error::from)
    }
}

impl From<&Structure> for Branches {
    fn from(structure: &Structure) -> Self {
        match structure {
            Structure::Leaf => Self::Leaf,
            Structure::Absent => Self::Absent,
            Structure::Node(branches) if structure.elements(None).is_ok() => {
                Self::Numbered(branches.iter().map(|(_, branch)| branch.into()).collect())
            }
            Structure::Node(branches) => {
                let named = branches.iter();
                let named = named.map(|(name, branch)| (name.text().into(), branch.into()));
                Self::Named(named.collect())
            }
        }
    }
}

impl From<&Branches> for Structure {
    fn from(branches: &Branches) -> Self {
        match branches {
            Branches::Leaf => Self::Leaf,
            Branches::Absent => Self::Absent,
            Branches::Numbered(branches) => Self::sequence(branches.iter().map(Self::from)),
            Branches::Named(branches) => Self::node(
                branches
                    .iter()
                    .map(|(name, branch)| (Name::Key(name.clone()), branch.into())),
            ),
        }
    }
}
