//! Copies to accelerators from host memory that they cannot reach: memory lent by another process,
//! or values of the user.
//!
//! The bytes go through pinned memory of this process, one chunk at a time: copy workers pack one
//! chunk while the device copies another. All copies of a process share a few chunks, first come
//! first served. That bounds the host memory they take.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpmd_base::block::Mutex;
use mpmd_memory::SharedBuffer;

use crate::exec::moves::assembly::DeviceAssembly;
use crate::exec::moves::transfer::RegionTransfer;
use crate::exec::{OpGuard, Runtime};
use mpmd_layout::region::Region;

/// Maximum size in bytes of a piece that the receiving thread packs itself: queueing would cost
/// more.
pub(crate) const COPY_INLINE: usize = 64 << 10;

/// Size of a chunk in bytes: large enough for the device's full copy speed, small enough that the
/// first chunk is packed soon.
pub(crate) const CHUNK: usize = 4 << 20;

/// Maximum number of chunks that are packed or copied at the same time.
pub(crate) const MOST_CHUNKS: usize = 8;

/// The chunk limit of a process, and the pieces that wait for chunks.
#[derive(Default)]
pub(crate) struct ChunkQueue(Mutex<ChunkState>);

/// The chunks in use and the pieces that wait.
#[derive(Default)]
struct ChunkState {
    taken: usize,
    waiting: VecDeque<WaitingChunks>,
}

/// A piece of a shard that is copied in chunks.
pub(crate) struct WaitingChunks {
    piece: Arc<ChunkedPiece>,
    /// The regions of chunks that no copy worker has started.
    left: std::vec::IntoIter<Region>,
}

/// A piece of a shard, shared by the copies of its chunks.
struct ChunkedPiece {
    shard: Arc<DeviceAssembly>,
    transfer: Arc<RegionTransfer>,
    bytes: SharedBuffer,
    /// The number of chunks that are not yet issued to the device.
    missing: AtomicUsize,
    // Last, so that it is dropped after the bytes.
    #[expect(dead_code, reason = "held for its drop")]
    guard: OpGuard,
}

/// The right to use one chunk. Dropping it lets the next waiting chunk start.
struct ChunkTurn(Arc<Runtime>);

impl WaitingChunks {
    /// Queues the copy of a piece into a shard, in chunks. Returns without waiting for the copy.
    pub(crate) fn begin(
        runtime: &Arc<Runtime>,
        shard: Arc<DeviceAssembly>,
        transfer: Arc<RegionTransfer>,
        bytes: SharedBuffer,
        guard: OpGuard,
    ) {
        let mut chunks = Vec::new();
        cut(
            &transfer.region,
            (CHUNK / transfer.item_bytes()).max(1),
            &mut chunks,
        );

        let missing = AtomicUsize::new(chunks.len());
        let piece = Arc::new(ChunkedPiece {
            shard,
            transfer,
            bytes,
            missing,
            guard,
        });
        runtime.chunks.0.lock().waiting.push_back(Self {
            piece,
            left: chunks.into_iter(),
        });
        go_on(runtime);
    }
}

/// Queues chunks on the copy workers until none is waiting or [`MOST_CHUNKS`] are in use.
fn go_on(runtime: &Arc<Runtime>) {
    loop {
        let (piece, chunk) = {
            let mut state = runtime.chunks.0.lock();
            if state.taken == MOST_CHUNKS {
                return;
            }
            let Some(first) = state.waiting.front_mut() else {
                return;
            };
            let next = first.left.next().map(|chunk| (first.piece.clone(), chunk));
            let Some(next) = next else {
                let done = state.waiting.pop_front();
                drop(state);
                drop(done);
                continue;
            };
            state.taken += 1;
            next
        };

        let turn = ChunkTurn(runtime.clone());
        runtime.move_data(Box::new(move || piece.copy(&chunk, turn)));
    }
}

impl ChunkedPiece {
    fn copy(self: Arc<Self>, chunk: &Region, turn: ChunkTurn) {
        let Self {
            shard,
            transfer,
            bytes,
            missing,
            ..
        } = &*self;
        // A shard that has failed meanwhile does not need it.
        if shard.is_open()
            && let Some(packed) = shard.pack(bytes, &transfer.holds, chunk)
        {
            shard.copy(&packed, chunk, chunk, None, turn);
        }
        if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            shard.placed();
        }
    }
}

impl Drop for ChunkTurn {
    fn drop(&mut self) {
        self.0.chunks.0.lock().taken -= 1;
        go_on(&self.0);
    }
}

/// Cuts a non-empty region into parts of at most `most` elements, along its outermost dimensions,
/// and adds them to `parts`.
fn cut(region: &Region, most: usize, parts: &mut Vec<Region>) {
    let wide = region.ranges().position(|range| range.len() > 1);
    let Some(dim) = wide.filter(|_| region.elements() > most) else {
        parts.push(region.clone());
        return;
    };

    let range = region.range(dim);
    // Number of slices that fit into one part. At least one, which is then cut further.
    let step = (most / (region.elements() / range.len())).max(1);
    for start in range.clone().step_by(step) {
        let part = start..(start + step).min(range.end);
        let ranges = region.ranges().enumerate();
        let part = ranges
            .map(|(i, range)| if i == dim { part.clone() } else { range })
            .collect();
        cut(&Region::new(part), most, parts);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_are_small_and_cover_each_element_once(
            bounds in proptest::collection::vec((0usize..4, 1usize..6), 0..4),
            most in 1usize..40,
        ) {
            let region: Region = bounds.iter().map(|(start, len)| (*start, start + len)).collect();
            let mut parts = Vec::new();
            cut(&region, most, &mut parts);
            let fits = |part: &Region| {
                region.contains(part) && (1..=most).contains(&part.elements())
            };
            prop_assert!(parts.iter().all(fits));
            prop_assert_eq!(parts.iter().map(Region::elements).sum::<usize>(), region.elements());
            let overlaps = |a: &Region, b: &Region| {
                a.intersect(b).is_some_and(|both| !both.is_empty())
            };
            let is_again = |i: usize| parts[..i].iter().any(|other| overlaps(other, &parts[i]));
            let twice = (0..parts.len()).any(is_again);
            prop_assert!(!twice);
        }
    }
}
