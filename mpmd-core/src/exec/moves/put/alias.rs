//! The rule by which the result of a `device_put` shares memory with its source.

use crate::exec::Runtime;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::topology::DeviceId;

/// The only piece of a target shard, as its source has it before the move.
pub(crate) struct OnlyPiece<'a> {
    /// The device of the source shard and its memory kind, or `None` for host values.
    pub(crate) from: Option<(DeviceId, MemoryKind)>,
    /// The region that the source shard or the host values cover.
    pub(crate) held: &'a Region,
    pub(crate) region: &'a Region,
}

impl OnlyPiece<'_> {
    /// Returns true if the shard of `device` with this region can share the memory of its source.
    ///
    /// The piece must be the whole source shard and the whole target shard. Both must be of one
    /// process and in the same memory kind. An accelerator shares memory with no other device.
    pub(crate) fn can_alias(
        &self,
        runtime: &Runtime,
        (device, kind): (DeviceId, MemoryKind),
        region: &Region,
    ) -> bool {
        let on_accelerator = runtime.is_on_accelerator(device, kind);
        let one_memory = match self.from {
            None => !on_accelerator,
            Some((from, from_kind)) if from == device => from_kind == kind,
            Some((from, from_kind)) => {
                let process = |device| runtime.topology.process_of(device);
                from_kind == kind
                    && process(from) == process(device)
                    && !on_accelerator
                    && !runtime.is_on_accelerator(from, kind)
            }
        };
        one_memory && self.region == region && self.held == region
    }
}
