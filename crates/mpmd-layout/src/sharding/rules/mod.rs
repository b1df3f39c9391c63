//! Sharding rules: patterns on the names of leaves decide how each leaf of a tree is divided.
//!
//! A [`Strategy`] is a list of ordered rules `(pattern, tactic)`. The first rule with a pattern
//! that matches a leaf's whole name applies to the leaf. The tactic is *ops* joined by `|`, each of
//! which may divide a dimension:
//!
//! - `replicate` divides nothing. It fails if the leaf is divided already.
//! - `replicate(axes)` keeps the leaf whole along these axes. It fails if another op of the tactic,
//!   before or after it, divides over one of them.
//! - `fsdp(axis, min_size_to_shard_mb=4)` divides the largest dimension that is not divided yet and
//!   divides evenly over the axis. Several axes are given as a list: `fsdp(["replica", "fsdp"])`.
//!   Of equally large dimensions it takes the last. Leaves of at most `min_size_to_shard_mb` MiB do
//!   not change, nor do leaves without a dimension that fits.
//! - `shard_dim(axis, dim, ignore_ndim_error=False)` divides that dimension, whether or not it
//!   divides evenly. A negative `dim` counts from the end. The absolute value of `dim` must be
//!   below the number of dimensions. Otherwise the op fails, or warns and does nothing if
//!   `ignore_ndim_error` is true. So `-1` is refused for a vector, as in the original: strategies
//!   mean the same in both.
//! - `logical_partitioning()` divides by the logical names of dimensions: [`LogicalAxes`].
//! - Users can add ops to a [`Registry`].
//!
//! A leaf without a matching pattern stays whole. The strategies are those of big_vision's
//! `infer_sharding` and give the same specs (`tests/golden/rules.rs`), with two exceptions. For
//! annotated leaves the original behaves differently by accident. If equally large dimensions tie
//! in `fsdp` on an array of four or more dimensions, the original takes the one that numpy's sort
//! puts last. That sort is not stable, and its result depends on numpy's version and the
//! processor. Here the last dimension wins everywhere, as in the original for up to three.
//!
//! ```
//! # extern crate mpmd_layout as mpmd;
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
//! // The same as a table, with a budget of 8 MiB on each device.
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
mod pattern;
mod reader;
mod strategy;
#[cfg(test)]
mod tests;

pub use call::Call;
pub use error::{ArgumentError, ErrorKind, OpError, OpFailed, ParseError, RulesError};
pub use inferred::{Inferred, InferredLeaf};
pub use literal::Literal;
pub use logical::LogicalAxes;
pub use ops::Placement;
pub use strategy::{Registry, Strategy};

use std::collections::HashMap;

use ops::State;
use tracing::Level;

use super::Sharding;
use crate::aval::ShapedArray;
use crate::topology::Mesh;
use crate::tree::Tree;

/// Infers the shardings over `mesh` that `strategy` gives to these leaves. A leaf is (name, shape
/// and dtype).
///
/// Rule after rule, and in a rule op after op, is applied to all leaves in the given order. The
/// finished specs are checked last. So the first error is the same on every process.
///
/// Each [note](InferredLeaf::notes) is also a `tracing` event with the fields `leaf`, `array`,
/// `spec` and `rule`, the pattern. Its level is `WARN` for a `shard_dim` that ignores a missing
/// dimension, otherwise `INFO`.
///
/// # Errors
///
/// If there is no leaf, a pattern takes too many steps on a name, or an op refuses a leaf. Also if
/// a finished spec uses an axis twice or names one that the mesh does not have.
pub fn infer(
    leaves: &[(String, ShapedArray)],
    strategy: &Strategy,
    mesh: &Mesh,
) -> Result<Inferred, RulesError> {
    if leaves.is_empty() {
        return Err(RulesError::NoLeaves);
    }
    let params = params_of(leaves, strategy);
    let matched_name = |leaf: usize| match &params[leaf] {
        Some((param, _)) => param,
        None => &leaves[leaf].0,
    };
    let matched = (0..leaves.len()).map(|leaf| strategy.rule_of(matched_name(leaf)));
    let matched = matched.collect::<Result<Vec<Option<usize>>, RulesError>>()?;
    let follows = |leaf: usize| params[leaf].as_ref().and_then(|(_, param)| *param);
    let mut states: Vec<State> = leaves
        .iter()
        .map(|(_, aval)| State::whole(aval.ndim()))
        .collect();
    for (index, rule) in strategy.rules.iter().enumerate() {
        for step in &rule.steps {
            for (place, ((name, aval), state)) in leaves.iter().zip(&mut states).enumerate() {
                if matched[place] != Some(index) || follows(place).is_some() {
                    continue;
                }
                let spec = state.spec();
                let (logical, op) = (&strategy.logical, step.text.as_str());
                let matched = matched_name(place);
                let mut leaf = Placement {
                    name,
                    matched,
                    aval,
                    mesh,
                    logical,
                    op,
                    state,
                };
                if let Err(reason) = step.op.apply(&mut leaf) {
                    let (pattern, op) = (rule.pattern.clone(), step.text.clone());
                    let (leaf, aval) = (name.clone(), aval.clone());
                    let failed = OpFailed {
                        rule: index,
                        pattern,
                        op,
                        leaf,
                        aval,
                        spec,
                        reason,
                    };
                    return Err(RulesError::Op(Box::new(failed)));
                }
            }
        }
    }
    let mut inferred = Vec::with_capacity(leaves.len());
    for (place, leaf) in leaves.iter().enumerate() {
        let state = states[follows(place).unwrap_or(place)].clone();
        check(&leaf.0, &state, mesh)?;
        let (levels, notes): (Vec<Level>, Vec<String>) = state.notes.into_iter().unzip();
        let leaf = InferredLeaf::new(leaf.clone(), state.entries, matched[place], notes, mesh);
        let pattern = leaf.rule.map(|rule| strategy.rules[rule].pattern.as_str());
        for (place, note) in leaf.notes.iter().enumerate() {
            let (name, array, spec) = (&leaf.name, &leaf.aval, &leaf.spec);
            if levels.get(place) == Some(&Level::WARN) {
                tracing::warn!(leaf = %name, %array, %spec, rule = pattern, "{note}");
            } else {
                tracing::info!(leaf = %name, %array, %spec, rule = pattern, "{note}");
            }
        }
        inferred.push(leaf);
    }
    Ok(Inferred::new(
        mesh,
        inferred,
        strategy.patterns().map(str::to_owned).collect(),
    ))
}

/// For each leaf that is state: the name of its parameter, and the parameter's place among the
/// leaves if it is there with the same shape.
fn params_of(
    leaves: &[(String, ShapedArray)],
    strategy: &Strategy,
) -> Vec<Option<(String, Option<usize>)>> {
    let params: Vec<_> = leaves
        .iter()
        .map(|(name, _)| strategy.parameter_of(name))
        .collect();
    let places: HashMap<&str, usize> = (leaves.iter().zip(&params).enumerate())
        .filter(|(_, (_, param))| param.is_none())
        .map(|(place, ((name, _), _))| (name.as_str(), place))
        .collect();
    let place = |(leaf, param): (&(String, ShapedArray), &Option<String>)| {
        let param = param.clone()?;
        let place = places.get(param.as_str()).copied();
        let place = place.filter(|place| leaves[*place].1.shape() == leaf.1.shape());
        Some((param, place))
    };
    leaves.iter().zip(&params).map(place).collect()
}

/// Infers the shardings over `mesh` that `strategy` gives to the leaves of a tree, and returns them
/// as a tree. The leaves' names are their paths (`blocks/3/w`).
///
/// A tree of arrays only has to give their shapes: `arrays.map_ref(&mut |array|
/// array.aval().clone())`.
///
/// # Errors
///
/// As [`infer`].
pub fn infer_sharding<T: Tree<Leaf = ShapedArray>>(
    tree: &T,
    strategy: &Strategy,
    mesh: &Mesh,
) -> Result<T::With<Sharding>, RulesError> {
    let leaves = tree.leaves_with_paths();
    let leaves: Vec<_> = leaves
        .into_iter()
        .map(|(name, aval)| (name, aval.clone()))
        .collect();
    let inferred = infer(&leaves, strategy, mesh)?;
    let mut shardings = inferred.shardings();
    Ok(tree.map_ref(&mut |_| shardings.next().expect("a sharding for each leaf")))
}

/// Checks that the finished spec of the leaf named `leaf` uses only axes of the mesh, each once.
fn check(leaf: &str, state: &State, mesh: &Mesh) -> Result<(), RulesError> {
    let spec = || Box::new(state.spec());
    for (i, (axis, second)) in state.divided.iter().enumerate() {
        if let Some((_, first)) = state.divided[..i]
            .iter()
            .find(|(earlier, _)| earlier == axis)
        {
            let (leaf, axis) = (leaf.to_owned(), axis.clone());
            let (first, second) = (first.as_str().into(), second.as_str().into());
            return Err(RulesError::AxisUsedTwice {
                leaf,
                spec: spec(),
                axis,
                first,
                second,
            });
        }
    }
    match state
        .divided
        .iter()
        .find(|(axis, _)| mesh.axis_index(axis).is_none())
    {
        None => Ok(()),
        Some((axis, op)) => {
            let (leaf, axis, op) = (leaf.to_owned(), axis.clone(), op.clone());
            Err(RulesError::UnknownAxis {
                leaf,
                spec: spec(),
                axis,
                op,
                mesh: mesh.clone(),
            })
        }
    }
}
