//! The rule by which the result of a `device_put` shares memory with its source.

use crate::exec::Runtime;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::topology::DeviceId;

/// A device and the kind of memory that a shard has there.
#[derive(Clone, Copy)]
pub(crate) struct ShardPlace {
    pub(crate) device: DeviceId,
    pub(crate) kind: MemoryKind,
}

/// The only piece of a target shard, as seen at its source.
pub(crate) struct OnlyPiece<'a> {
    /// The place of the source shard, or `None` for host values.
    pub(crate) from: Option<ShardPlace>,
    /// The region that the source shard or the host values cover.
    pub(crate) held: &'a Region,
    pub(crate) region: &'a Region,
}

impl OnlyPiece<'_> {
    /// Returns true if the target shard `region` at `to` can share the memory of its source.
    ///
    /// The piece must be the whole source shard and the whole target shard. Both shards must be on
    /// the same process and in the same kind of memory. An accelerator shares memory with no other
    /// device.
    pub(crate) fn can_alias(&self, runtime: &Runtime, to: ShardPlace, region: &Region) -> bool {
        let on_accelerator = runtime.is_on_accelerator(to.device, to.kind);
        let one_memory = match self.from {
            None => !on_accelerator,
            Some(from) if from.device == to.device => from.kind == to.kind,
            Some(from) => {
                let process = |device| runtime.topology.process_of(device);
                from.kind == to.kind
                    && process(from.device) == process(to.device)
                    && !on_accelerator
                    && !runtime.is_on_accelerator(from.device, to.kind)
            }
        };
        one_memory && self.region == region && self.held == region
    }
}
