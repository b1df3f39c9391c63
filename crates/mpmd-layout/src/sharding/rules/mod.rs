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

pub use call::OpCall;
pub use error::{ArgumentError, ErrorKind, OpError, OpFailed, ParseError, RulesError};
pub use inferred::{InferredLeaf, InferredShardings};
pub use literal::Literal;
pub use logical::LogicalAxes;
pub use ops::LeafPlacement;
pub use pattern::{NamePattern, PatternFault};
pub use strategy::{Registry, Strategy};

use std::collections::HashMap;

use ops::LeafState;
use tracing::Level;

use super::Sharding;
use crate::aval::ShapedArray;
use crate::topology::Mesh;
use crate::tree::Tree;

/// Infers the sharding over `mesh` of each leaf, by `strategy`. A leaf is given as its name, and
/// its shape and dtype.
///
/// The rules are applied one after the other, and the ops of a rule one after the other. Each op is
/// applied to all its leaves in the given order. The finished specs are checked last. So the first
/// error is the same on every process.
///
/// Each [note](InferredLeaf::notes) is also a `tracing` event with the fields `leaf`, `array`,
/// `spec` and `rule`, the pattern. Its level is `WARN` for a `shard_dim` that ignores a missing
/// dimension, otherwise `INFO`.
///
/// # Errors
///
/// If there is no leaf, a pattern takes too many steps on a name, or an op refuses a leaf. Also if
/// a finished spec uses an axis twice or names an axis that the mesh lacks.
pub fn infer(
    leaves: &[(String, ShapedArray)],
    strategy: &Strategy,
    mesh: &Mesh,
) -> Result<InferredShardings, RulesError> {
    if leaves.is_empty() {
        return Err(RulesError::NoLeaves);
    }
    let followed = followed_parameters(leaves, strategy);
    let matched = (0..leaves.len()).map(|leaf| {
        let name = match &followed[leaf] {
            Some(followed) => &followed.parameter,
            None => &leaves[leaf].0,
        };
        strategy.rule_of(name)
    });
    let matched = matched.collect::<Result<Vec<Option<usize>>, RulesError>>()?;

    let states = apply_rules(leaves, strategy, mesh, &matched, &followed)?;

    let mut inferred = Vec::with_capacity(leaves.len());
    for (place, (name, aval)) in leaves.iter().enumerate() {
        let parameter = followed[place].as_ref().and_then(|followed| followed.place);
        let state = states[parameter.unwrap_or(place)].clone();
        check(name, &state, mesh)?;

        let levels: Vec<Level> = state.notes.iter().map(|note| note.level).collect();
        let notes = state.notes.into_iter().map(|note| note.text).collect();
        let leaf = InferredLeaf::new(
            name.clone(),
            aval.clone(),
            state.entries,
            matched[place],
            notes,
            mesh,
        );
        report_notes(&leaf, &levels, strategy);
        inferred.push(leaf);
    }

    Ok(InferredShardings::new(
        mesh,
        inferred,
        strategy.patterns().map(str::to_owned).collect(),
    ))
}

/// Applies the ops of each rule to the leaves that match it, op by op, and returns the leaves'
/// states. Skips a leaf of optimizer state if the parameter that it follows is among the leaves.
fn apply_rules(
    leaves: &[(String, ShapedArray)],
    strategy: &Strategy,
    mesh: &Mesh,
    matched: &[Option<usize>],
    followed: &[Option<FollowedParameter>],
) -> Result<Vec<LeafState>, RulesError> {
    let mut states: Vec<LeafState> = leaves
        .iter()
        .map(|(_, aval)| LeafState::whole(aval.ndim()))
        .collect();

    for (index, rule) in strategy.rules.iter().enumerate() {
        for step in &rule.steps {
            for (place, ((name, aval), state)) in leaves.iter().zip(&mut states).enumerate() {
                let followed = followed[place].as_ref();
                let follows = followed.is_some_and(|followed| followed.place.is_some());
                if matched[place] != Some(index) || follows {
                    continue;
                }

                let spec = state.spec();
                let mut leaf = LeafPlacement {
                    name,
                    matched: followed.map_or(name, |followed| &followed.parameter),
                    aval,
                    mesh,
                    logical: &strategy.logical,
                    op: step.text.as_str(),
                    state,
                };
                if let Err(reason) = step.op.apply(&mut leaf) {
                    return Err(RulesError::Op(Box::new(OpFailed {
                        rule: index,
                        pattern: rule.pattern.as_str().to_owned(),
                        op: step.text.clone(),
                        leaf: name.clone(),
                        aval: aval.clone(),
                        spec,
                        reason,
                    })));
                }
            }
        }
    }
    Ok(states)
}

/// Emits a leaf's notes as `tracing` events. `levels` has the levels of the first notes; all others
/// have level INFO.
fn report_notes(leaf: &InferredLeaf, levels: &[Level], strategy: &Strategy) {
    let name = &leaf.name;
    let array = &leaf.aval;
    let spec = &leaf.spec;
    let pattern = leaf.rule.map(|rule| strategy.rules[rule].pattern.as_str());

    for (place, note) in leaf.notes.iter().enumerate() {
        if levels.get(place) == Some(&Level::WARN) {
            tracing::warn!(leaf = %name, %array, %spec, rule = pattern, "{note}");
        } else {
            tracing::info!(leaf = %name, %array, %spec, rule = pattern, "{note}");
        }
    }
}

/// The parameter whose spec a leaf of optimizer state takes over.
struct FollowedParameter {
    /// The parameter's name.
    parameter: String,
    /// Index of the parameter in the list of leaves. `None` if the list has no such parameter of
    /// the same shape.
    place: Option<usize>,
}

/// Returns the parameter that each leaf of optimizer state follows; `None` for other leaves.
fn followed_parameters(
    leaves: &[(String, ShapedArray)],
    strategy: &Strategy,
) -> Vec<Option<FollowedParameter>> {
    let params: Vec<_> = leaves
        .iter()
        .map(|(name, _)| strategy.parameter_of(name))
        .collect();

    let places: HashMap<&str, usize> = (leaves.iter().zip(&params).enumerate())
        .filter(|(_, (_, param))| param.is_none())
        .map(|(place, ((name, _), _))| (name.as_str(), place))
        .collect();

    leaves
        .iter()
        .zip(&params)
        .map(|((_, aval), param)| {
            let parameter = param.clone()?;
            let place = places.get(parameter.as_str()).copied();
            let place = place.filter(|place| leaves[*place].1.shape() == aval.shape());
            Some(FollowedParameter { parameter, place })
        })
        .collect()
}

/// Infers the sharding over `mesh` of each leaf of a tree, by `strategy`. Returns a tree of
/// shardings. The leaves' names are their paths (`blocks/3/w`).
///
/// The leaves are shapes and dtypes. Convert a tree of arrays by
/// `arrays.map_ref(&mut |array| array.aval().clone())`.
///
/// # Errors
///
/// The errors of [`infer`].
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
fn check(leaf: &str, state: &LeafState, mesh: &Mesh) -> Result<(), RulesError> {
    let spec = || Box::new(state.spec());
    for (i, second) in state.divided.iter().enumerate() {
        if let Some(first) = state.divided[..i]
            .iter()
            .find(|earlier| earlier.axis == second.axis)
        {
            return Err(RulesError::AxisUsedTwice {
                leaf: leaf.to_owned(),
                spec: spec(),
                axis: second.axis.clone(),
                first: first.op.as_str().into(),
                second: second.op.as_str().into(),
            });
        }
    }

    match state
        .divided
        .iter()
        .find(|divided| mesh.axis_index(&divided.axis).is_none())
    {
        None => Ok(()),
        Some(unknown) => Err(RulesError::UnknownAxis {
            leaf: leaf.to_owned(),
            spec: spec(),
            axis: unknown.axis.clone(),
            op: unknown.op.clone(),
            mesh: mesh.clone(),
        }),
    }
}
