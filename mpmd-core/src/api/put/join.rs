//! Moves of small leaves between the same devices, which share an operation.
//!
//! A model has many small leaves: biases, scales, counters. One operation for all of them costs
//! little more than one of them alone, and its pieces for one process leave in one message. Each
//! leaf still completes, fails and is donated by itself.
//!
//! Large leaves keep their own operations. They gain nothing here, and a program that runs ahead is
//! held back by the memory of whole operations.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::PutSteps;
use crate::exec::array::MpmdArray;
use crate::exec::{PutPlan, PutWhat};
use mpmd_layout::reshard::MOST_JOINED;
use mpmd_layout::topology::DeviceId;
use mpmd_record::dry_run::{OpDescriptor, ShardMemory};

/// Maximum size in bytes of a leaf that shares an operation.
const SMALL_LEAF: usize = 64 << 10;

/// Groups the moves of leaves into operations, in order of their first leaves. Returns the leaf
/// indices of each operation.
///
/// The leaves of a joined operation are small. They come from the same devices in the same order,
/// and go to the same devices. Host values, which every process has, count as one common source.
pub(super) fn groups(moves: &[(&MpmdArray, &PutSteps)]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut open: HashMap<(Option<&[DeviceId]>, &[DeviceId]), usize> = HashMap::new();
    for (place, (array, steps)) in moves.iter().enumerate() {
        if steps.first.is_none() && steps.last.is_joinable(SMALL_LEAF) {
            let from = array.sharding().map(|sharding| sharding.devices());
            let group = open
                .entry((from, steps.last.made.sharding.devices()))
                .or_insert(usize::MAX);

            if let Some(group) = groups
                .get_mut(*group)
                .filter(|group| group.len() < MOST_JOINED)
            {
                group.push(place);
                continue;
            }
            *group = groups.len();
        }
        groups.push(vec![place]);
    }
    groups
}

/// Returns the description, for messages, of a move with these plans.
pub(super) fn what(plans: &[Arc<PutPlan>]) -> Arc<dyn fmt::Display + Send + Sync> {
    match plans {
        [plan] => plan.what.clone(),
        _ => Arc::new(JoinedWhat {
            leaves: plans.len(),
            first: plans[0].what.clone(),
        }),
    }
}

/// The description of moves that share an operation. It must not hold a plan, because the runtime
/// keeps descriptions and plans hold the runtime.
struct JoinedWhat {
    leaves: usize,
    first: Arc<PutWhat>,
}

impl fmt::Display for JoinedWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device_put of {} leaves; the first: {}",
            self.leaves, self.first
        )
    }
}

/// Returns the descriptor of a move for a dry run. It joins the descriptors of all leaves.
pub(super) fn descriptor(plans: &[Arc<PutPlan>], may_alias: bool) -> OpDescriptor {
    let mut leaves = plans.iter().map(|plan| plan.descriptor(may_alias));

    let mut all = leaves.next().expect("a move has a leaf");
    for (leaf, mut other) in (1..).zip(leaves) {
        for shard in other.results.iter_mut().flatten() {
            if let ShardMemory::Of(input) = &mut shard.memory {
                *input = leaf;
            }
        }
        other
            .messages
            .iter_mut()
            .for_each(|message| message.leaf = leaf);
        all.results.append(&mut other.results);
        all.messages.append(&mut other.messages);
    }

    if plans.len() > 1 {
        all.what = what(plans).to_string();
        // In an order in which they can be sent.
        all.messages.sort_by_key(|message| message.step);
    }
    all
}
