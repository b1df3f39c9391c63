//! Copies into CUDA devices of host memory that they do not reach: what another process has lent,
//! values of the user's.
//!
//! Such memory goes through pinned memory of this process, a chunk at a time: movers pack one while
//! the device copies another. All copies of a process share a few chunks, first come first served,
//! so that what they take of the host's memory is bounded.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpmd_transport::SharedBuffer;
use parking_lot::Mutex;

use super::assembly::DeviceAssembly;
use super::put::Transfer;
use super::{OpGuard, Runtime};
use mpmd_layout::region::Region;

/// Bytes of a chunk: long enough for the device to be at full speed, short enough that the first is
/// packed soon.
pub(crate) const CHUNK: usize = 4 << 20;

/// Chunks that are packed or copied at a time.
pub(crate) const MOST_CHUNKS: usize = 8;

/// The chunks of a process.
#[derive(Default)]
pub(crate) struct Chunks(Mutex<State>);

#[derive(Default)]
struct State {
    taken: usize,
    waiting: VecDeque<Chunked>,
}

/// A piece of a shard that is copied in chunks.
pub(crate) struct Chunked {
    piece: Arc<Piece>,
    /// Those that nobody has begun with.
    left: std::vec::IntoIter<Region>,
}

struct Piece {
    shard: Arc<DeviceAssembly>,
    transfer: Arc<Transfer>,
    bytes: SharedBuffer,
    /// Chunks whose copies are not issued.
    missing: AtomicUsize,
    // Last, so that it is dropped after the bytes.
    #[expect(dead_code, reason = "held for its drop")]
    guard: OpGuard,
}

/// The right to a chunk, until this is dropped.
struct Turn(Arc<Runtime>);

impl Chunked {
    /// Has a piece copied to its place in a shard.
    pub(super) fn begin(
        runtime: &Arc<Runtime>,
        shard: Arc<DeviceAssembly>,
        transfer: Arc<Transfer>,
        bytes: SharedBuffer,
        guard: OpGuard,
    ) {
        let mut chunks = Vec::new();
        cut(&transfer.region, (CHUNK / transfer.item_bytes()).max(1), &mut chunks);
        let missing = AtomicUsize::new(chunks.len());
        let piece = Arc::new(Piece { shard, transfer, bytes, missing, guard });
        runtime.chunks.0.lock().waiting.push_back(Self { piece, left: chunks.into_iter() });
        go_on(runtime);
    }
}

/// Has movers pack what there is room for.
fn go_on(runtime: &Arc<Runtime>) {
    loop {
        let (piece, chunk) = {
            let mut state = runtime.chunks.0.lock();
            if state.taken == MOST_CHUNKS {
                return;
            }
            let Some(first) = state.waiting.front_mut() else { return };
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
        let turn = Turn(runtime.clone());
        runtime.move_data(Box::new(move || piece.copy(&chunk, turn)));
    }
}

impl Piece {
    fn copy(self: Arc<Self>, chunk: &Region, turn: Turn) {
        let Self { shard, transfer, bytes, missing, .. } = &*self;
        // Where it has failed meanwhile, nobody wants it.
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

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.chunks.0.lock().taken -= 1;
        go_on(&self.0);
    }
}

/// Cuts a region, which is not empty, into parts of at most so many elements, along its outermost
/// dimensions.
fn cut(region: &Region, most: usize, parts: &mut Vec<Region>) {
    let wide = region.ranges().position(|range| range.len() > 1);
    let Some(dim) = wide.filter(|_| region.elements() > most) else {
        parts.push(region.clone());
        return;
    };
    let range = region.range(dim);
    // As many of its slices as fit, or one at a time that is cut further.
    let step = (most / (region.elements() / range.len())).max(1);
    for start in range.clone().step_by(step) {
        let part = start..(start + step).min(range.end);
        let ranges = region.ranges().enumerate();
        let part = ranges.map(|(i, range)| if i == dim { part.clone() } else { range }).collect();
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
            prop_assert!(parts.iter().all(|part| region.contains(part) && (1..=most).contains(&part.elements())));
            prop_assert_eq!(parts.iter().map(Region::elements).sum::<usize>(), region.elements());
            let overlaps = |a: &Region, b: &Region| a.intersect(b).is_some_and(|both| !both.is_empty());
            let twice = (0..parts.len()).any(|i| parts[..i].iter().any(|other| overlaps(other, &parts[i])));
            prop_assert!(!twice);
        }
    }
}
