//! Divides a traced function into kernels and moves, in the order in which they are issued.
//!
//! A move cuts a function: its operand is computed before, and its users after. The level of a
//! node is the number of moves before it. The nodes of one level and one mesh make one kernel.

use std::collections::{BTreeMap, BTreeSet};

use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;

use super::node::{Node, NodeId, Op};
use super::trace::mesh_of;

/// An operation of a function.
pub(super) enum Segment {
    Kernel(KernelNodes),
    Move {
        from: NodeId,
        to: NodeId,
        sharding: Sharding,
    },
}

/// The nodes of a kernel.
pub(super) struct KernelNodes {
    pub(super) mesh: Mesh,
    /// The nodes whose arrays exist before: inputs, moved values, and results of other kernels.
    pub(super) inputs: Vec<NodeId>,
    /// The nodes that are computed, ascending.
    pub(super) computed: Vec<NodeId>,
    /// The computed nodes that others need.
    pub(super) outputs: Vec<NodeId>,
}

/// Returns the operations that compute the nodes `results`. Those without a mesh are computed on
/// `mesh`.
pub(super) fn segments(nodes: &[Node], results: &[NodeId], mesh: &Mesh) -> Vec<Segment> {
    let used = used_nodes(nodes, results);
    let is_kept = |id: NodeId| is_computed(&nodes[id]) && used.contains(&id);
    let home = |id: NodeId| mesh_of(&nodes[id]).unwrap_or(mesh);

    // The results of each kernel, by level and mesh.
    let mut kernels: BTreeMap<(usize, u64), (Mesh, BTreeSet<NodeId>)> = BTreeMap::new();
    let mut gives = |id: NodeId| {
        if is_kept(id) {
            let mesh = home(id);
            let kernel = kernels.entry((nodes[id].level, mesh.fingerprint()));
            let outputs = &mut kernel.or_insert_with(|| (mesh.clone(), BTreeSet::new())).1;
            outputs.insert(id);
        }
    };
    results.iter().for_each(|id| gives(*id));
    for id in &used {
        for operand in &nodes[*id].operands {
            let (user, own) = (&nodes[*id], &nodes[*operand]);
            // Numbers and host values are computed again where they are needed.
            let is_far = user.level > own.level && own.sharding.is_some();
            if user.op == Op::Move || is_far {
                gives(*operand);
            }
        }
    }

    let moves: Vec<NodeId> = used
        .iter()
        .copied()
        .filter(|id| nodes[*id].op == Op::Move)
        .collect();
    let levels = used.iter().map(|id| nodes[*id].level).max().unwrap_or(0);
    let mut segments = Vec::new();
    for level in 0..=levels {
        for ((_, _), (mesh, outputs)) in kernels.range((level, 0)..=(level, u64::MAX)) {
            segments.push(Segment::Kernel(kernel(nodes, mesh, level, outputs)));
        }
        for to in moves
            .iter()
            .copied()
            .filter(|to| nodes[*to].level == level + 1)
        {
            if let (Some(sharding), [from]) = (&nodes[to].sharding, &nodes[to].operands[..]) {
                segments.push(Segment::Move {
                    from: *from,
                    to,
                    sharding: sharding.clone(),
                });
            }
        }
    }
    segments
}

/// True for a node that a kernel computes.
fn is_computed(node: &Node) -> bool {
    !matches!(node.op, Op::Input(_) | Op::Move)
}

/// Returns the nodes that the results need, ascending.
fn used_nodes(nodes: &[Node], results: &[NodeId]) -> BTreeSet<NodeId> {
    let mut used = BTreeSet::new();
    let mut open: Vec<NodeId> = results.to_vec();
    while let Some(id) = open.pop() {
        if used.insert(id) {
            open.extend(&nodes[id].operands);
        }
    }
    used
}

/// Returns the kernel that computes `outputs`.
fn kernel(nodes: &[Node], mesh: &Mesh, level: usize, outputs: &BTreeSet<NodeId>) -> KernelNodes {
    let mut inputs = BTreeSet::new();
    let mut computed = BTreeSet::new();
    let mut open: Vec<NodeId> = outputs.iter().copied().collect();
    while let Some(id) = open.pop() {
        let node = &nodes[id];
        let is_here = node.level == level || node.sharding.is_none();
        match is_computed(node) && is_here {
            true if computed.insert(id) => open.extend(&node.operands),
            true => {}
            false => _ = inputs.insert(id),
        }
    }
    KernelNodes {
        mesh: mesh.clone(),
        inputs: inputs.into_iter().collect(),
        computed: computed.into_iter().collect(),
        outputs: outputs.iter().copied().collect(),
    }
}
