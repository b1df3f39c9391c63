//! Sharding rules: which leaf of a tree is divided how, said by a few patterns on names.
//!
//! A [`Strategy`] is ordered rules `(pattern, tactic)`. For each leaf the first rule counts whose
//! pattern matches its whole name; its tactic is *ops* joined by `|`, each of which may divide a
//! dimension:
//!
//! - `replicate` divides nothing, and fails where the leaf is divided already.
//! - `replicate(axes)`: the leaf stays whole along these axes; it fails where an op of the tactic,
//!   before or after it, divides over one of them.
//! - `fsdp(axis, min_size_to_shard_mb=4)` divides the largest dimension that is not divided yet and
//!   divides evenly over the axis, or over several: `fsdp(["replica", "fsdp"])`. Of equally large
//!   dimensions the last is taken. Leaves of so many MiB or fewer stay as they are, and those of
//!   which no dimension fits.
//! - `shard_dim(axis, dim, ignore_ndim_error=False)` divides that dimension, counted from the end
//!   where it is negative, whether or not it divides evenly. The absolute value of `dim` must be
//!   below the number of dimensions, or it fails, or leaves the leaf as it is if it shall ignore
//!   that. So `-1` is refused for a vector, as the original does: strategies mean the same in both.
//! - `logical_partitioning()` divides by the names of dimensions: [`LogicalAxes`].
//! - those that users add to a [`Registry`].
//!
//! A leaf that no pattern matches stays whole. The strategies are those of big_vision's
//! `infer_sharding`, and give the same specs (`tests/golden_rules.rs`), but for what the original
//! does to annotated leaves by accident.
//!
//! ```
//! use mpmd_layout::aval::{ShapedArray, f32s};
//! use mpmd_layout::sharding::rules::{Registry, Strategy, infer, infer_sharding};
//! use mpmd_layout::sharding::Sharding;
//! use mpmd_layout::spec;
//! use mpmd_layout::topology::{DeviceId, Mesh};
//! use mpmd_layout::tree::Tree;
//!
//! #[derive(Tree)]
//! struct Params<L> {
//!     embed: L,
//!     head: (L, L),
//! }
//!
//! let params = Params { embed: f32s([4096, 1024]), head: (f32s([1024, 16]), f32s([16])) };
//! let rules = [("head/.*", "replicate"), (".*", r#"fsdp(axis="fsdp")"#)];
//! let strategy = Strategy::parse(&rules, &Registry::default())?;
//! let mesh = Mesh::new(&[("replica", 2), ("fsdp", 4)], (0..8).map(DeviceId).collect())?;
//!
//! let shardings: Params<Sharding> = infer_sharding(&params, &strategy, &mesh)?;
//! assert_eq!(shardings.embed.spec(), Some(&spec!["fsdp", None]));
//! assert_eq!(shardings.head.1.spec(), Some(&spec![None]));
//!
//! // The same as a table, if each device can spare 8 MiB.
//! let leaves = params.leaves_with_paths();
//! let leaves: Vec<_> = leaves.into_iter().map(|(name, aval)| (name, aval.clone())).collect();
//! println!("{}", infer(&leaves, &strategy, &mesh)?.within(8 << 20)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod call;
mod error;
mod inferred;
mod literal;
mod logical;
mod ops;
mod reader;
mod strategy;
#[cfg(test)]
mod tests;

pub use call::{ArgumentError, Call};
pub use error::{ErrorKind, OpFailed, RulesError};
pub use inferred::{Inferred, InferredLeaf};
pub use literal::Literal;
pub use logical::LogicalAxes;
pub use ops::{Op, OpError, Placement};
pub use reader::ParseError;
pub use strategy::{Registry, Strategy};

use ops::State;

use super::Sharding;
use crate::aval::ShapedArray;
use crate::topology::Mesh;
use crate::tree::Tree;

/// The shardings over `mesh` that `strategy` gives to these leaves, each a name and what it is.
///
/// Rules are applied one after the other, of each its ops one after the other, each to all leaves
/// in the order given; the finished specs are checked last. So the first error is the same on every
/// process.
///
/// # Errors
///
/// Fails where there is no leaf, an op refuses a leaf, or a finished spec uses an axis twice or
/// names one that the mesh does not have.
pub fn infer(
    leaves: &[(String, ShapedArray)],
    strategy: &Strategy,
    mesh: &Mesh,
) -> Result<Inferred, RulesError> {
    if leaves.is_empty() {
        return Err(RulesError::NoLeaves);
    }
    let matched = leaves.iter().map(|(name, _)| strategy.rule_of(name));
    let matched = matched.collect::<Result<Vec<Option<usize>>, RulesError>>()?;
    let mut states: Vec<State> = leaves.iter().map(|(_, aval)| State::whole(aval.ndim())).collect();
    for (index, rule) in strategy.rules.iter().enumerate() {
        for step in &rule.steps {
            for (((name, aval), state), matched) in leaves.iter().zip(&mut states).zip(&matched) {
                if *matched != Some(index) {
                    continue;
                }
                let spec = state.spec();
                let (logical, op) = (&strategy.logical, step.text.as_str());
                let mut leaf = Placement { name, aval, mesh, logical, op, state };
                if let Err(reason) = step.op.apply(&mut leaf) {
                    let (pattern, op) = (rule.pattern.clone(), step.text.clone());
                    let (leaf, aval) = (name.clone(), aval.clone());
                    let failed = OpFailed { rule: index, pattern, op, leaf, aval, spec, reason };
                    return Err(RulesError::Op(Box::new(failed)));
                }
            }
        }
    }
    let mut inferred = Vec::with_capacity(leaves.len());
    for ((leaf, state), rule) in leaves.iter().zip(states).zip(matched) {
        check(&leaf.0, &state, mesh)?;
        inferred.push(InferredLeaf::new(leaf.clone(), state.entries, rule, state.notes, mesh));
    }
    Ok(Inferred::new(mesh, inferred, strategy.patterns().map(str::to_owned).collect()))
}

/// The shardings over `mesh` that `strategy` gives to the leaves of a tree, as a tree; their names
/// are their paths (`blocks/3/w`).
///
/// For a tree of arrays their shapes are enough: `arrays.map_ref(&mut |array|
/// array.aval().clone())`.
///
/// # Errors
///
/// Where [`infer`] fails.
pub fn infer_sharding<T: Tree<Leaf = ShapedArray>>(
    tree: &T,
    strategy: &Strategy,
    mesh: &Mesh,
) -> Result<T::With<Sharding>, RulesError> {
    let leaves = tree.leaves_with_paths();
    let leaves: Vec<_> = leaves.into_iter().map(|(name, aval)| (name, aval.clone())).collect();
    let inferred = infer(&leaves, strategy, mesh)?;
    let mut shardings = inferred.shardings();
    Ok(tree.map_ref(&mut |_| shardings.next().expect("a sharding for each leaf")))
}

/// Checks that a finished spec uses only axes of the mesh, each once.
fn check(leaf: &str, state: &State, mesh: &Mesh) -> Result<(), RulesError> {
    let spec = || Box::new(state.spec());
    for (i, (axis, second)) in state.divided.iter().enumerate() {
        if let Some((_, first)) = state.divided[..i].iter().find(|(earlier, _)| earlier == axis) {
            let (leaf, axis) = (leaf.to_owned(), axis.clone());
            let (first, second) = (first.as_str().into(), second.as_str().into());
            return Err(RulesError::AxisUsedTwice { leaf, spec: spec(), axis, first, second });
        }
    }
    match state.divided.iter().find(|(axis, _)| mesh.axis_index(axis).is_none()) {
        None => Ok(()),
        Some((axis, op)) => {
            let (leaf, axis, op) = (leaf.to_owned(), axis.clone(), op.clone());
            Err(RulesError::UnknownAxis { leaf, spec: spec(), axis, op, mesh: mesh.clone() })
        }
    }
}
