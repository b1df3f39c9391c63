//! A `device_put` in a dry run: all pieces of all processes.

use std::collections::HashMap;

use crate::exec::moves::put::{OnlyPiece, PutPlan, PutWhat, ShardPlace};
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{self, ReshardPiece};
use mpmd_layout::sharding::{Layout, MemoryKind};
use mpmd_layout::topology::DeviceId;
use mpmd_record::dry_run::{OpDescriptor, OpKind, OpMessage, ResultShard, ShardMemory};

impl PutPlan {
    /// Returns the descriptor of the move. With `may_alias`, shards may share memory with the
    /// source.
    pub(crate) fn descriptor(&self, may_alias: bool) -> OpDescriptor {
        let runtime = &self.made.runtime;
        let PutWhat { aval, from, to } = &*self.what;
        let item = aval.dtype().size();
        let layout = &self.made.layout;
        // Both layouts were checked when the move was planned.
        let source = from
            .as_ref()
            .and_then(|from| from.layout(aval.shape()).ok());
        let stays = source
            .as_ref()
            .is_some_and(|source| source.terms() > 1 && **source == **layout);
        let pieces = match &source {
            Some(source) if !stays => reshard::plan(source, layout, item, &runtime.topology)
                .map(|plan| plan.pieces())
                .unwrap_or_default(),
            _ => Vec::new(),
        };

        let mut comes: HashMap<DeviceId, Vec<&ReshardPiece>> = HashMap::new();
        pieces
            .iter()
            .for_each(|piece| comes.entry(piece.dst).or_default().push(piece));
        let whole = Region::full(aval.shape());
        let can_alias = |device: DeviceId, region: &Region| {
            let from = |device| {
                let kind = from.as_ref()?.memory_kind();
                Some(ShardPlace { device, kind })
            };
            let only = match (&source, comes.get(&device).map(Vec::as_slice)) {
                (None, _) if term(layout, device) == 0 => OnlyPiece {
                    from: None,
                    held: &whole,
                    region,
                },
                (Some(_), _) if stays => OnlyPiece {
                    from: from(device),
                    held: region,
                    region,
                },
                (Some(source), Some([piece])) if piece.step == 1 => {
                    let Some(held) = source.region_of(piece.src) else {
                        return false;
                    };
                    OnlyPiece {
                        from: from(piece.src),
                        held,
                        region: &piece.region,
                    }
                }
                _ => return false,
            };
            let to = ShardPlace {
                device,
                kind: to.memory_kind(),
            };
            only.can_alias(runtime, to, region)
        };

        let shard = |device: DeviceId, region: &Region| {
            let memory = match (may_alias && can_alias(device, region), to.memory_kind()) {
                (true, _) if source.is_some() => ShardMemory::Of(0),
                (_, MemoryKind::Host) => ShardMemory::Host,
                // Host values that a device shares count as its own memory, too.
                (_, MemoryKind::Device) => ShardMemory::Own,
            };
            ResultShard {
                device: device.0,
                bytes: (region.elements() * item) as u64,
                memory,
            }
        };
        let message = |piece: &ReshardPiece| OpMessage {
            from: piece.src.0,
            to: piece.dst.0,
            bytes: (piece.region.elements() * item) as u64,
            step: piece.step,
            leaf: 0,
        };
        let moved = pieces.iter().filter(|piece| piece.src != piece.dst);
        let shards = layout.iter().map(|(device, region)| shard(device, region));
        OpDescriptor {
            what: self.what.to_string(),
            kind: OpKind::Put,
            results: vec![shards.collect()],
            messages: moved.map(message).collect(),
        }
    }
}

fn term(layout: &Layout, device: DeviceId) -> usize {
    layout
        .place_of(device)
        .map_or(0, |place| layout.term_of(place))
}
