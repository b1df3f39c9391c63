//! The built-in ops of tactics, and the type that users write their own ops with.

use tracing::Level;

use super::call::OpCall;
use super::error::{ArgumentError, OpError};
use super::literal::Literal;
use super::logical::LogicalAxes;
use crate::aval::ShapedArray;
use crate::sharding::{Spec, SpecEntry};
use crate::topology::Mesh;

/// One step of a tactic: divides a leaf's dimensions over axes of the mesh.
pub(super) trait ShardingOp: Send + Sync {
    /// Applies the op to one leaf. If the op cannot divide the leaf, the whole inference fails.
    fn apply(&self, leaf: &mut LeafPlacement<'_>) -> Result<(), OpError>;
}

/// The state of a leaf while the ops of a tactic are applied to it.
#[derive(Debug)]
pub struct LeafPlacement<'a> {
    pub(super) name: &'a str,
    /// The name that patterns are matched with: the parameter's name for a leaf of optimizer state,
    /// otherwise the leaf's own.
    pub(super) matched: &'a str,
    pub(super) aval: &'a ShapedArray,
    pub(super) mesh: &'a Mesh,
    pub(super) logical: &'a LogicalAxes,
    /// Text of the op that is being applied, as written in the tactic.
    pub(super) op: &'a str,
    pub(super) state: &'a mut LeafState,
}

/// The decisions about a leaf that the ops have made so far.
#[derive(Clone, Debug, Default)]
pub(super) struct LeafState {
    /// The axes that divide each dimension: one entry for each.
    pub(super) entries: Vec<SpecEntry>,
    /// The axes that divide a dimension, in the order of the decisions.
    pub(super) divided: Vec<AxisUse>,
    /// The axes that must not divide any dimension.
    pub(super) kept_whole: Vec<AxisUse>,
    pub(super) notes: Vec<LeafNote>,
}

/// An axis, and the op that decided on it.
#[derive(Clone, Debug)]
pub(super) struct AxisUse {
    pub(super) axis: String,
    /// Text of the op, as written in the tactic.
    pub(super) op: String,
}

/// A remark of an op on a leaf.
#[derive(Clone, Debug)]
pub(super) struct LeafNote {
    /// Level of the `tracing` event that reports the note.
    pub(super) level: Level,
    pub(super) text: String,
}

impl LeafPlacement<'_> {
    /// Returns the leaf's name.
    pub fn name(&self) -> &str {
        self.name
    }

    /// Returns the leaf's shape and dtype.
    pub fn aval(&self) -> &ShapedArray {
        self.aval
    }

    /// Returns the mesh over which the leaf is divided.
    pub fn mesh(&self) -> &Mesh {
        self.mesh
    }

    /// Returns the axes that divide each dimension so far, one entry for each dimension.
    pub fn entries(&self) -> &[SpecEntry] {
        &self.state.entries
    }

    /// Divides dimension `dim` over `axes`, major to minor.
    ///
    /// Does not check that the size divides evenly, that the mesh has the axes, or that no other
    /// dimension uses them. [`infer`](super::infer) checks axes after all ops are done.
    ///
    /// # Errors
    ///
    /// If there is no such dimension, the dimension is divided already, or an earlier op keeps the
    /// leaf whole along one of the axes.
    pub fn shard(&mut self, dim: usize, axes: &[String]) -> Result<(), OpError> {
        let ndim = self.state.entries.len();
        let Some(entry) = self.state.entries.get_mut(dim) else {
            return Err(OpError::DimOutOfRange {
                dim: i64::try_from(dim).unwrap_or(i64::MAX),
                ndim,
            });
        };

        if *entry != SpecEntry::None {
            return Err(OpError::AlreadySharded {
                dim,
                by: entry.clone(),
            });
        }

        if let Some(kept) = self
            .state
            .kept_whole
            .iter()
            .find(|kept| axes.contains(&kept.axis))
        {
            return Err(OpError::KeptWhole {
                axis: kept.axis.clone(),
                by: kept.op.clone(),
            });
        }

        *entry = SpecEntry::from(axes.to_vec());
        self.state.divided.extend(axes.iter().map(|axis| AxisUse {
            axis: axis.clone(),
            op: self.op.to_owned(),
        }));
        Ok(())
    }

    /// Keeps the leaf whole along `axes`: every later op that divides over one of them fails.
    ///
    /// # Errors
    ///
    /// If the mesh lacks one of the axes or an earlier op divides over it.
    pub fn keep_whole(&mut self, axes: &[String]) -> Result<(), OpError> {
        self.parts(axes)?;
        if let Some(divided) = self
            .state
            .divided
            .iter()
            .find(|divided| axes.contains(&divided.axis))
        {
            return Err(OpError::DividedBefore {
                axis: divided.axis.clone(),
                by: divided.op.clone(),
            });
        }

        self.state
            .kept_whole
            .extend(axes.iter().map(|axis| AxisUse {
                axis: axis.clone(),
                op: self.op.to_owned(),
            }));
        Ok(())
    }

    /// Returns the number of parts into which `axes` divide a dimension.
    ///
    /// # Errors
    ///
    /// If the mesh lacks one of the axes.
    pub fn parts(&self, axes: &[String]) -> Result<usize, OpError> {
        let size = |axis: &String| match self.mesh.axis_size(axis) {
            Ok(size) => Ok(size),
            Err(_) => Err(OpError::UnknownAxis {
                axis: axis.clone(),
                mesh: self.mesh.clone(),
            }),
        };
        // An axis that is listed twice may overflow; a later check refuses it.
        axes.iter()
            .try_fold(1usize, |parts, axis| Ok(parts.saturating_mul(size(axis)?)))
    }

    /// Adds a note on the leaf. The table of [`InferredShardings`](super::InferredShardings) shows
    /// it.
    pub fn note(&mut self, note: impl Into<String>) {
        self.state.notes.push(LeafNote {
            level: Level::INFO,
            text: note.into(),
        });
    }
}

impl LeafState {
    pub(super) fn whole(ndim: usize) -> Self {
        Self {
            entries: vec![SpecEntry::None; ndim],
            ..Self::default()
        }
    }

    pub(super) fn spec(&self) -> Spec {
        Spec::new(self.entries.clone())
    }
}

/// The op `replicate` or `replicate(axes)`.
pub(super) enum Replicate {
    /// Fails if the leaf is divided at this op.
    Whole,
    /// Fails if another op of the tactic, before or after this one, divides over these axes.
    Along(Vec<String>),
}

/// The op `fsdp(axis, min_size_to_shard_mb=4)`.
pub(super) struct Fsdp {
    axes: Vec<String>,
    /// Size limit in bytes: the op does not change leaves of this size or smaller.
    small: f64,
}

/// The op `shard_dim(axis, dim, ignore_ndim_error=False)`.
pub(super) struct ShardDim {
    axes: Vec<String>,
    dim: i64,
    ignore_ndim_error: bool,
}

/// The op `logical_partitioning()`.
pub(super) struct LogicalPartitioning;

impl Replicate {
    pub(super) fn new(call: &OpCall) -> Result<Self, ArgumentError> {
        let [axes] = call.bind(["axes"])?;
        axes.map_or(Ok(Self::Whole), |axes| {
            Ok(Self::Along(axes_argument(Some(axes), "axes")?))
        })
    }
}

impl ShardingOp for Replicate {
    fn apply(&self, leaf: &mut LeafPlacement<'_>) -> Result<(), OpError> {
        match self {
            Self::Whole if leaf.entries().iter().any(|entry| *entry != SpecEntry::None) => {
                Err(OpError::NotWhole)
            }
            Self::Whole => Ok(()),
            Self::Along(axes) => leaf.keep_whole(axes),
        }
    }
}

impl Fsdp {
    pub(super) fn new(call: &OpCall) -> Result<Self, ArgumentError> {
        let [axes, min_size] = call.bind(["axis", "min_size_to_shard_mb"])?;
        let mebibytes = match min_size {
            None => 4.0,
            Some(min_size) => min_size
                .number()
                .ok_or_else(|| ArgumentError("needs a number as `min_size_to_shard_mb`".into()))?,
        };
        Ok(Self {
            axes: axes_argument(axes, "axis")?,
            small: mebibytes * f64::from(1 << 20),
        })
    }
}

impl ShardingOp for Fsdp {
    fn apply(&self, leaf: &mut LeafPlacement<'_>) -> Result<(), OpError> {
        let parts = leaf.parts(&self.axes)?;
        if leaf.aval().bytes() as f64 <= self.small {
            return Ok(());
        }

        let shape = leaf.aval().shape();
        let fits = |dim: &usize| {
            shape[*dim].is_multiple_of(parts) && leaf.entries()[*dim] == SpecEntry::None
        };
        let Some(dim) = largest_first(shape).into_iter().find(fits) else {
            let axes = SpecEntry::from(self.axes.clone());
            leaf.note(format!(
                "`{}` fits no dimension: none that is still whole divides evenly by {parts} \
                 ({axes})",
                leaf.op
            ));
            return Ok(());
        };
        leaf.shard(dim, &self.axes)
    }
}

impl ShardDim {
    pub(super) fn new(call: &OpCall) -> Result<Self, ArgumentError> {
        let [axes, dim, ignore] = call.bind(["axis", "dim", "ignore_ndim_error"])?;

        let axes = axes_argument(axes, "axis")?;
        let dim = dim.and_then(Literal::int);
        let dim = dim.ok_or_else(|| ArgumentError("needs a whole number as `dim`".into()))?;
        let ignore_ndim_error = match ignore {
            None => false,
            Some(ignore) => ignore.bool().ok_or_else(|| {
                ArgumentError("needs True or False as `ignore_ndim_error`".into())
            })?,
        };
        Ok(Self {
            axes,
            dim,
            ignore_ndim_error,
        })
    }
}

impl ShardingOp for ShardDim {
    fn apply(&self, leaf: &mut LeafPlacement<'_>) -> Result<(), OpError> {
        let ndim = leaf.entries().len();
        let index = usize::try_from(self.dim.unsigned_abs())
            .ok()
            .filter(|index| *index < ndim);

        let Some(index) = index else {
            if !self.ignore_ndim_error {
                return Err(OpError::DimOutOfRange {
                    dim: self.dim,
                    ndim,
                });
            }
            let note = format!(
                "`{}` does nothing: the leaf has {ndim} dimensions, and the absolute value of \
                 `dim` must be below that",
                leaf.op
            );
            leaf.state.notes.push(LeafNote {
                level: Level::WARN,
                text: note,
            });
            return Ok(());
        };

        leaf.shard(if self.dim < 0 { ndim - index } else { index }, &self.axes)
    }
}

impl LogicalPartitioning {
    pub(super) fn new(call: &OpCall) -> Result<Self, ArgumentError> {
        call.bind([]).map(|[]| Self)
    }
}

impl ShardingOp for LogicalPartitioning {
    fn apply(&self, leaf: &mut LeafPlacement<'_>) -> Result<(), OpError> {
        let logical = leaf.logical;
        let Some(names) = logical.names_of(leaf.matched)? else {
            return Ok(());
        };
        for (dim, axes) in logical.assign(names, leaf.entries())? {
            leaf.shard(dim, &axes)?;
        }
        Ok(())
    }
}

/// Returns the indices of the dimensions from the largest to the smallest. Of equally large
/// dimensions the last comes first.
pub(super) fn largest_first(shape: &[usize]) -> Vec<usize> {
    let mut dims: Vec<usize> = (0..shape.len()).collect();
    dims.sort_by_key(|dim| std::cmp::Reverse((shape[*dim], *dim)));
    dims
}

fn axes_argument(axes: Option<&Literal>, name: &str) -> Result<Vec<String>, ArgumentError> {
    let needed = || {
        ArgumentError(format!(
            "needs the name of an axis, or a list of names, as `{name}`"
        ))
    };
    axes.and_then(Literal::axes).ok_or_else(needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_of_equal_dimensions_comes_first() {
        assert_eq!(largest_first(&[512, 16, 512]), [2, 0, 1]);
        assert_eq!(largest_first(&[64, 8, 64, 8, 64]), [4, 2, 0, 3, 1]);
        assert!(largest_first(&[]).is_empty());
    }

    #[test]
    fn arguments_of_the_wrong_kind_are_refused() {
        let call = |text: &str| OpCall::parse_tactic(text).unwrap().remove(0);
        let message = |result: Result<(), ArgumentError>| result.unwrap_err().to_string();
        let fsdp = |text| message(Fsdp::new(&call(text)).map(drop));
        assert_eq!(
            fsdp("fsdp"),
            "needs the name of an axis, or a list of names, as `axis`"
        );
        assert_eq!(fsdp("fsdp([])"), fsdp("fsdp"));
        assert_eq!(fsdp("fsdp({'a', 'b'})"), fsdp("fsdp"));
        assert_eq!(
            fsdp("fsdp('x', 'y')"),
            "needs a number as `min_size_to_shard_mb`"
        );
        let shard_dim = |text| message(ShardDim::new(&call(text)).map(drop));
        assert_eq!(shard_dim("shard_dim('x')"), "needs a whole number as `dim`");
        assert_eq!(
            shard_dim("shard_dim('x', 1.0)"),
            "needs a whole number as `dim`"
        );
        assert_eq!(
            shard_dim("shard_dim('x', 0, 1)"),
            "needs True or False as `ignore_ndim_error`"
        );
        assert!(Replicate::new(&call("replicate([1])")).is_err());
        assert_eq!(
            message(LogicalPartitioning::new(&call("f(1)")).map(drop)),
            "takes at most 0 arguments, found 1"
        );
    }
}
