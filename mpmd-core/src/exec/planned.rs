//! A `device_put` in a recorded plan: all pieces of all processes.

use std::collections::HashMap;

use super::put::{PutPlan, PutWhat};
use crate::dry_run::{Kind, Memory, Message, OpDescriptor, Shard};
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{self, Piece};
use mpmd_layout::sharding::{Layout, MemoryKind};
use mpmd_layout::topology::DeviceId;

impl PutPlan {
    /// Returns the descriptor of the move. With `may_alias`, shards may share memory with the
    /// source.
    pub(crate) fn descriptor(&self, may_alias: bool) -> OpDescriptor {
        let runtime = &self.made.runtime;
        let PutWhat { aval, from, to } = &*self.what;
        let item = aval.dtype().size();
        let layout = &self.made.layout;
        // Both layouts were checked when the move was planned.
        let source = from.as_ref().and_then(|from| from.layout(aval.shape()).ok());
        let stays =
            source.as_ref().is_some_and(|source| source.terms() > 1 && **source == **layout);
        let pieces = match &source {
            Some(source) if !stays => reshard::plan(source, layout, item, &runtime.topology)
                .map(|plan| plan.pieces())
                .unwrap_or_default(),
            _ => Vec::new(),
        };
        let one_memory = from.as_ref().is_none_or(|from| from.memory_kind() == to.memory_kind());
        let mut comes: HashMap<DeviceId, Vec<&Piece>> = HashMap::new();
        pieces.iter().for_each(|piece| comes.entry(piece.dst).or_default().push(piece));
        let shared = |device: DeviceId, region: &Region| {
            if !(may_alias && one_memory) {
                return false;
            }
            match (&source, comes.get(&device).map(Vec::as_slice)) {
                (Some(_), _) if stays => true,
                (Some(source), Some([piece])) => {
                    // A CUDA device shares memory with no other device.
                    let on_gpu = [piece.src, device]
                        .map(|device| runtime.is_on_gpu(device, to.memory_kind()));
                    if piece.src != device && on_gpu != [false; 2] {
                        return false;
                    }
                    let here = runtime.topology.process_of(piece.src)
                        == runtime.topology.process_of(device);
                    piece.step == 1
                        && here
                        && piece.region == *region
                        && source.region_of(piece.src) == Some(region)
                }
                _ => false,
            }
        };
        let shard = |(device, region): (DeviceId, &Region)| {
            let whole = source.is_none()
                && *region == Region::full(aval.shape())
                && term(layout, device) == 0;
            let memory = match to.memory_kind() {
                _ if shared(device, region) => Memory::Of(0),
                MemoryKind::Host => Memory::Host,
                kind if whole && may_alias && !runtime.is_on_gpu(device, kind) => Memory::Host,
                MemoryKind::Device => Memory::Own,
            };
            Shard { device: device.0, bytes: (region.elements() * item) as u64, memory }
        };
        let message = |piece: &Piece| Message {
            from: piece.src.0,
            to: piece.dst.0,
            bytes: (piece.region.elements() * item) as u64,
            step: piece.step,
        };
        let moved = pieces.iter().filter(|piece| piece.src != piece.dst);
        OpDescriptor {
            what: self.what.to_string(),
            kind: Kind::Put,
            results: vec![layout.iter().map(shard).collect()],
            messages: moved.map(message).collect(),
        }
    }
}

fn term(layout: &Layout, device: DeviceId) -> usize {
    layout.place_of(device).map_or(0, |place| layout.term_of(place))
}
