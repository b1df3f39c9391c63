//! Gradients of traced functions.
//!
//! They are written as further nodes of the trace, so they are computed, moved and checked as all
//! others. The nodes are visited from the loss back to the inputs; `rules.rs` has the products of
//! each operation's derivative.

mod rules;

use std::collections::BTreeMap;
use std::panic::Location;

use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{Sharding, Spec};
use mpmd_layout::topology::Mesh;

use super::expr::{Expr, constant, is_float};
use super::node::{Node, NodeId, Op, Scalar};
use super::shapes::repeated;
use super::trace::{self, fail, mesh_of};
use super::values::ComputeResults;
use rules::Differentiated;

impl Expr {
    /// Returns the gradients of this value by each of `of`. This value has one element. `of` is a
    /// value of this function, a list or a tuple of them, inputs or computed; the gradients have
    /// the same form.
    ///
    /// ```
    /// use mpmd_core::prelude::*;
    /// use mpmd_layout::spec;
    ///
    /// let results = mpmd_core::simulate(1, 2, 7, |p| {
    ///     let mesh = p.mesh(&[("x", 2)])?;
    ///     let host = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?;
    ///     let x = p.device_put(&host, mesh.sharding(spec!["x"]))?;
    ///     let w = p.device_put(&MpmdArray::scalar(3.0f32), mesh.replicated())?;
    ///     let of_w = p.compute((&w, &x), |(w, x)| (w * x).square().sum(..).gradients(w))?;
    ///     assert_eq!(of_w.sharding(), w.sharding());
    ///     Ok(of_w.to_host()?.map(|of_w| of_w.to_vec::<f32>()).transpose()?)
    /// });
    /// // The sum of 2 w x x.
    /// assert_eq!(results[0].as_ref().unwrap(), &Some(vec![180.0]));
    /// ```
    ///
    /// A gradient has the sharding of its value. `None` behind the last divided dimension is left
    /// out, as in all results. The gradient of a partial sum is that of the whole sum, on all its
    /// devices. The gradient of a host value is whole on all devices.
    ///
    /// Devices that have a whole value may compute with different parts of others. The gradient is
    /// then a sum over these devices. It is added up by a move, which makes the call several
    /// operations as [`to`](Self::to) does.
    ///
    /// Comparisons, indices and conversions from or to whole numbers have no gradient. Where a
    /// function has a kink, the gradient is that of JAX: 1 of `abs` at 0, and equal shares of equal
    /// elements of `maximum`, `minimum`, `max` and `min`. The gradient of a value that this one
    /// does not depend on is 0.
    ///
    /// The product of a gradient `g` of `y` with the derivative of `y`, JAX's `vjp`, is
    /// `(y * g).sum(..).gradients(x)`.
    #[track_caller]
    #[must_use]
    pub fn gradients<T: ComputeResults>(self, of: T) -> T {
        let at = Location::caller();
        let mut exprs = Vec::new();
        of.push_to(&mut exprs, &mut Vec::new());
        let gradients = trace::write_as(at, || gradients(self, &exprs, at));
        let gradients = gradients.unwrap_or_else(|why| {
            let failed = fail(at, format!("gradients: {why}"));
            vec![failed; exprs.len()]
        });
        let of = of.with(&mut gradients.into_iter());
        of.expect("there is a gradient for each value")
    }

    /// Returns the same value; no gradient goes through it.
    #[track_caller]
    #[must_use]
    pub fn stop_gradient(self) -> Self {
        let at = Location::caller();
        let node = self.node(at);
        trace::write_placed(Node {
            op: Op::StopGradient,
            operands: vec![self.id()],
            parts: node.sharding.iter().cloned().collect(),
            at,
            ..node
        })
    }
}

/// Returns the gradients of `loss` by the values `of`.
fn gradients(loss: Expr, of: &[Expr], at: &'static Location<'static>) -> Result<Vec<Expr>, String> {
    let own = loss.node(at);
    if own.aval.elements() != 1 || !is_float(own.aval.dtype()) {
        let cure = match own.aval.elements() {
            1 => "cast it",
            _ => "sum it up with `.sum(..)`",
        };
        return Err(format!("expected one float, found {}: {cure}", own.aval));
    }
    for (index, expr) in of.iter().enumerate() {
        let aval = expr.node(at).aval;
        if !is_float(aval.dtype()) {
            return Err(format!(
                "value {index} is {aval}, and only floats have them"
            ));
        }
    }

    let nodes = trace::all_nodes(at);
    let of_value = |id: NodeId| Expr::new(loss.trace(), id);
    let is_needed = needed(&nodes, of);
    let one = constant(Scalar::Float(1.0), own.aval.dtype(), at).broadcast_to(own.aval.shape());
    let mut parts: BTreeMap<NodeId, Vec<Expr>> = BTreeMap::from([(loss.id(), vec![one])]);
    let mut found = BTreeMap::new();
    // The operands of a node stand before it, so all parts of its gradient are known at its turn.
    while let Some((id, parts_of_it)) = parts.pop_last() {
        if !is_needed.get(id).is_some_and(|is_needed| *is_needed) {
            continue;
        }
        let node = &nodes[id];
        let gradient = total(node, &parts_of_it, at);
        found.insert(id, gradient);
        let differentiated = Differentiated {
            op: &node.op,
            value: of_value(id),
            operands: node.operands.iter().map(|id| of_value(*id)).collect(),
            parts: &node.parts,
            gradient,
            at,
        };
        for (operand, part) in node.operands.iter().zip(differentiated.parts_of_operands()) {
            if let Some(part) = part.filter(|_| is_needed[*operand]) {
                parts.entry(*operand).or_default().push(part);
            }
        }
    }

    let gradient = |expr: &Expr| {
        let found = found.get(&expr.id()).copied();
        found.unwrap_or_else(|| zeros(&expr.node(at), at))
    };
    Ok(of.iter().map(gradient).collect())
}

/// Returns for each node whether it is one of `of`, or depends on one.
fn needed(nodes: &[Node], of: &[Expr]) -> Vec<bool> {
    let mut is_needed = vec![false; nodes.len()];
    for (id, node) in nodes.iter().enumerate() {
        is_needed[id] = of.iter().any(|expr| expr.id() == id)
            || node.operands.iter().any(|operand| is_needed[*operand]);
    }
    is_needed
}

/// Adds up the parts of a node's gradient, in the sharding of the node. Parts with the same
/// sharding are added before they are moved.
fn total(node: &Node, parts: &[Expr], at: &'static Location<'static>) -> Expr {
    let mut groups: Vec<Expr> = Vec::new();
    for part in parts {
        let sharding = part.sharding();
        let same = |group: &&mut Expr| match (group.sharding(), &sharding) {
            (Some(own), Some(other)) => is_same(&own, other),
            (own, other) => own.is_none() && other.is_none(),
        };
        match groups.iter_mut().find(same) {
            Some(group) => *group = *group + *part,
            None => groups.push(*part),
        }
    }
    let home = match &node.sharding {
        Some(own) => Some(own.reduced()),
        // A host value is whole on each device that computes with it.
        None => groups.iter().find_map(|group| {
            let node = group.node(at);
            mesh_of(&node).map(Mesh::replicated)
        }),
    };
    let moved = groups
        .into_iter()
        .map(|group| match (&home, group.sharding()) {
            (Some(home), Some(own)) if !is_same(home, &own) => group.to(home),
            _ => group,
        });
    let total = moved.reduce(|sum, group| sum + group);
    total.unwrap_or_else(|| zeros(node, at))
}

/// True if two shardings are the same, but for `None` behind the last divided dimension. Those that
/// place an array alike by chance, such as on an axis of size 1, are not.
fn is_same(a: &Sharding, b: &Sharding) -> bool {
    let axes = |sharding: &Sharding| {
        let entries = sharding.spec().map_or(&[][..], Spec::entries);
        let mut axes: Vec<Vec<String>> = entries.iter().map(|it| it.axes().to_vec()).collect();
        while axes.last().is_some_and(Vec::is_empty) {
            axes.pop();
        }
        axes
    };
    a == b
        || a.mesh() == b.mesh()
            && a.memory_kind() == b.memory_kind()
            && a.unreduced_axes() == b.unreduced_axes()
            && axes(a) == axes(b)
}

/// Returns zeros with the shape, dtype and sharding of a value.
fn zeros(node: &Node, at: &'static Location<'static>) -> Expr {
    let zero = constant(Scalar::Float(0.0), node.aval.dtype(), at);
    spread(zero, &node.aval, node.sharding.as_ref(), at)
}

/// Repeats a value to the shape of an array. Each device makes the part that it has of the array. A
/// partial sum is added up before, while it is small.
fn spread(
    x: Expr,
    aval: &ShapedArray,
    sharding: Option<&Sharding>,
    at: &'static Location<'static>,
) -> Expr {
    let x = match x.sharding() {
        Some(partial) if !partial.unreduced_axes().is_empty() => x.to(partial.reduced()),
        _ => x,
    };
    repeated(x, aval.shape(), sharding.map(Sharding::reduced), at)
}
