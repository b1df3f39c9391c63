//! Chunk shardings: cuts one dimension into chunks of one size. Only the trailing chunks may be
//! short or empty.
//!
//! Let `n` be the number of indices, `k` the number of chunks and `c = ceil(n / k)`. Chunk `i` has
//! the indices from `min(n, c i)` to `min(n, c (i + 1))`. An empty chunk is therefore at the end of
//! the dimension. The sizes are those of PyTorch's `ChunkShardingSpec`; so are its offsets when it
//! reshards.

use std::collections::HashMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Layout, ShardingError};
use crate::region::Region;
use crate::topology::DeviceId;

/// The chunks of an array, and the rank that holds each chunk. For programs that use ranks instead
/// of devices.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ChunkRanks {
    /// The first index of each rank's chunk in every dimension, as `[rank][dimension]`.
    pub offsets_by_rank: Vec<Vec<usize>>,
    /// The number of indices of each rank's chunk in every dimension, as `[rank][dimension]`.
    pub sizes_by_rank: Vec<Vec<usize>>,
    /// The rank of each chunk, in the order of the chunks.
    pub ranks: Vec<usize>,
}

/// Divides dimension `dim` of an array of `shape` into one chunk for each placement. Rank
/// `placements[i]` holds chunk `i`.
///
/// A negative `dim` counts from the end. `world` is the number of ranks. If it is `None`, there are
/// as many ranks as placements.
///
/// # Errors
///
/// If the array has no such dimension, if there are no placements, or if a rank is missing, unknown
/// or listed twice. The error names the rank.
pub fn chunk_by_rank(
    shape: &[usize],
    dim: isize,
    placements: &[usize],
    world: Option<usize>,
) -> Result<ChunkRanks, ShardingError> {
    let at = dim_index(shape, dim)?;
    if placements.is_empty() {
        return Err(ShardingError::NoPlacements { dim });
    }

    let world = world.unwrap_or(placements.len());
    // A map instead of a list by rank, because `world` may be any number.
    let mut chunk_of = HashMap::with_capacity(placements.len());
    for (chunk, rank) in placements.iter().copied().enumerate() {
        if rank >= world {
            return Err(ShardingError::UnknownRank { rank, chunk, world });
        }
        if let Some(first) = chunk_of.insert(rank, chunk) {
            return Err(ShardingError::RankTwice {
                rank,
                first,
                second: chunk,
            });
        }
    }

    if let Some(rank) = (0..world).find(|rank| !chunk_of.contains_key(rank)) {
        return Err(ShardingError::MissingRank {
            rank,
            world,
            placements: placements.len(),
        });
    }

    let regions =
        || (0..world).map(|rank| chunk_region(shape, at, placements.len(), chunk_of[&rank]));
    Ok(ChunkRanks {
        offsets_by_rank: regions()
            .map(|region| region.ranges().map(|range| range.start).collect())
            .collect(),
        sizes_by_rank: regions().map(|region| region.shape()).collect(),
        ranks: placements.to_vec(),
    })
}

/// Checks the conditions that do not depend on a shape: there is a placement, and each device has
/// at most one chunk.
pub(super) fn check(dim: isize, placements: &[DeviceId]) -> Result<(), ShardingError> {
    if placements.is_empty() {
        return Err(ShardingError::NoPlacements { dim });
    }

    let mut chunk_of = HashMap::with_capacity(placements.len());
    for (chunk, device) in placements.iter().copied().enumerate() {
        if let Some(first) = chunk_of.insert(device, chunk) {
            return Err(ShardingError::PlacedTwice {
                dim,
                device,
                first,
                second: chunk,
            });
        }
    }
    Ok(())
}

/// Returns the layout of an array of `shape`, with dimension `dim` cut into a chunk for each
/// placement. Fails if the array has no such dimension.
pub(super) fn layout(
    dim: isize,
    placements: &[DeviceId],
    shape: &[usize],
) -> Result<Layout, ShardingError> {
    let at = dim_index(shape, dim)?;
    let chunks = placements.len();
    let regions = (0..chunks)
        .map(|chunk| chunk_region(shape, at, chunks, chunk))
        .collect();
    Ok(Layout::new(
        shape,
        placements.to_vec(),
        regions,
        chunks == 1,
    ))
}

/// Returns `dim` as an index from 0; a negative `dim` counts from the end. Fails if the shape has
/// no such dimension.
fn dim_index(shape: &[usize], dim: isize) -> Result<usize, ShardingError> {
    let from_start = if dim < 0 {
        dim.checked_add_unsigned(shape.len())
    } else {
        Some(dim)
    };
    from_start
        .and_then(|dim| usize::try_from(dim).ok())
        .filter(|dim| *dim < shape.len())
        .ok_or_else(|| ShardingError::DimOutOfRange {
            dim,
            shape: shape.to_vec(),
        })
}

fn chunk_region(shape: &[usize], dim: usize, chunks: usize, chunk: usize) -> Region {
    let sizes = shape.iter().enumerate();
    sizes
        .map(|(d, size)| {
            let range = if d == dim {
                chunk_range(*size, chunks, chunk)
            } else {
                0..*size
            };
            (range.start, range.end)
        })
        .collect()
}

fn chunk_range(size: usize, chunks: usize, chunk: usize) -> Range<usize> {
    let each = size.div_ceil(chunks);
    let bound = |chunk: usize| each.saturating_mul(chunk).min(size);
    bound(chunk)..bound(chunk + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::Sharding;
    use proptest::prelude::*;

    fn ids(devices: &[u32]) -> Vec<DeviceId> {
        devices.iter().copied().map(DeviceId).collect()
    }

    /// Returns offsets and sizes by rank as text: `[0,18]/[13,3]` and so on.
    fn table(shape: &[usize], dim: isize, placements: &[usize]) -> String {
        let found = chunk_by_rank(shape, dim, placements, Some(placements.len())).unwrap();
        assert_eq!(found.ranks, placements);
        let each = found.offsets_by_rank.iter().zip(&found.sizes_by_rank);
        let texts: Vec<String> = each
            .map(|(offset, size)| format!("{offset:?}/{size:?}"))
            .collect();
        texts.join(" ").replace(", ", ",")
    }

    #[test]
    fn chunks_by_rank() {
        let cases: [(&[usize], isize, &[usize], &str); 11] = [
            (
                &[13, 21],
                0,
                &[0, 1, 2, 3],
                "[0,0]/[4,21] [4,0]/[4,21] [8,0]/[4,21] [12,0]/[1,21]",
            ),
            (
                &[13, 21],
                1,
                &[2, 3, 1, 0],
                "[0,18]/[13,3] [0,12]/[13,6] [0,0]/[13,6] [0,6]/[13,6]",
            ),
            (
                &[12, 24],
                1,
                &[0, 1, 2, 3],
                "[0,0]/[12,6] [0,6]/[12,6] [0,12]/[12,6] [0,18]/[12,6]",
            ),
            (
                &[15, 26],
                -1,
                &[1, 0, 3, 2],
                "[0,7]/[15,7] [0,0]/[15,7] [0,21]/[15,5] [0,14]/[15,7]",
            ),
            (
                &[5, 2],
                0,
                &[0, 1, 2, 3],
                "[0,0]/[2,2] [2,0]/[2,2] [4,0]/[1,2] [5,0]/[0,2]",
            ),
            (
                &[5, 2],
                0,
                &[3, 1, 0, 2],
                "[4,0]/[1,2] [2,0]/[2,2] [5,0]/[0,2] [0,0]/[2,2]",
            ),
            (
                &[2, 3],
                0,
                &[0, 1, 2, 3],
                "[0,0]/[1,3] [1,0]/[1,3] [2,0]/[0,3] [2,0]/[0,3]",
            ),
            (&[0, 3], 0, &[0, 1], "[0,0]/[0,3] [0,0]/[0,3]"),
            (
                &[9],
                0,
                &[0, 1, 2, 3, 4],
                "[0]/[2] [2]/[2] [4]/[2] [6]/[2] [8]/[1]",
            ),
            (
                &[6, 6, 4],
                2,
                &[1, 2, 0],
                "[0,0,4]/[6,6,0] [0,0,0]/[6,6,2] [0,0,2]/[6,6,2]",
            ),
            (&[1], 0, &[2, 1, 0], "[1]/[0] [1]/[0] [0]/[1]"),
        ];
        for (shape, dim, placements, expected) in cases {
            assert_eq!(
                table(shape, dim, placements),
                expected,
                "{shape:?}, {dim}, {placements:?}"
            );
        }
        // Worked examples of PyTorch: 21 over four ranks, in both orders.
        assert_eq!(
            table(&[21], 0, &[0, 1, 2, 3]),
            "[0]/[6] [6]/[6] [12]/[6] [18]/[3]"
        );
        assert_eq!(
            table(&[21], 0, &[3, 2, 1, 0]),
            "[18]/[3] [12]/[6] [6]/[6] [0]/[6]"
        );
    }

    #[test]
    fn sizes_of_chunks() {
        let sizes =
            |size, chunks| [0, chunks - 1].map(|chunk| chunk_range(size, chunks, chunk).len());
        // All but the trailing chunks have the first one's size.
        for (size, chunks, first, last) in [
            (11, 4, 3, 2),
            (12, 4, 3, 3),
            (13, 4, 4, 1),
            (5, 4, 2, 0),
            (11, 1, 11, 11),
            (11, 11, 1, 1),
        ] {
            assert_eq!(sizes(size, chunks), [first, last], "{size} over {chunks}");
        }
        let huge = usize::MAX;
        assert_eq!(
            (
                chunk_range(huge, 3, 2).end,
                chunk_range(huge, huge, huge - 1).len()
            ),
            (huge, 1)
        );
    }

    #[test]
    fn ranks_without_exactly_one_chunk_are_errors() {
        let error = |shape: &[usize], dim, placements: &[usize], world| {
            chunk_by_rank(shape, dim, placements, world)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            error(&[8, 4], 0, &[0, 1], Some(4)),
            "rank 2 of 4 gets no chunk: there are 2 placements"
        );
        assert_eq!(
            error(&[8, 4], 0, &[0, 1, 2, 3], Some(2)),
            "chunk 2 is placed on rank 2, but there are 2 ranks"
        );
        assert_eq!(
            error(&[6], 0, &[0, 0, 1], Some(3)),
            "chunks 0 and 1 are both placed on rank 0"
        );
        assert_eq!(
            error(&[6], 0, &[1, 2], None),
            "chunk 1 is placed on rank 2, but there are 2 ranks"
        );
        assert_eq!(
            error(&[6], 0, &[], None),
            "the chunks of dimension 0 are placed nowhere"
        );
        assert!(error(&[6], 0, &[0], Some(usize::MAX)).starts_with("rank 1 of"));
        for dim in [2, -3, isize::MAX, isize::MIN] {
            let text = format!("chunks of dimension {dim}: shape [8, 4] has dimensions -2 to 1");
            assert_eq!(error(&[8, 4], dim, &[0], None), text);
        }
        assert_eq!(
            error(&[], 0, &[0], None),
            "chunks of dimension 0: shape [] has none"
        );
    }

    #[test]
    fn chunk_accepts_any_distinct_devices() {
        let chunks = Sharding::chunk(0, ids(&[7, 2, 5])).unwrap();
        let layout = chunks.layout(&[4, 2]).unwrap();
        assert_eq!(layout.devices(), ids(&[7, 2, 5]));
        assert_eq!(
            layout.region_of(DeviceId(2)).unwrap().to_string(),
            "[2..4, 0..2]"
        );
        assert_eq!(
            layout.region_of(DeviceId(5)).unwrap().to_string(),
            "[4..4, 0..2]"
        );
        assert_eq!(layout.regions()[0].to_string(), "[0..2, 0..2]");
        assert_eq!(
            Sharding::chunk(1, ids(&[3, 0, 3])).unwrap_err().to_string(),
            "chunks 0 and 2 of dimension 1 are both placed on device 3"
        );
        assert_eq!(
            Sharding::chunk(-1, vec![]),
            Err(ShardingError::NoPlacements { dim: -1 })
        );
    }

    #[test]
    fn dimensions_below_zero_count_from_the_end() {
        let chunks = |dim| Sharding::chunk(dim, ids(&[0, 1])).unwrap();
        assert_eq!(chunks(-1).layout(&[4, 3]), chunks(1).layout(&[4, 3]));
        assert_ne!(chunks(-1).layout(&[4, 4, 4]), chunks(1).layout(&[4, 4, 4]));
        assert_ne!(chunks(-1), chunks(1), "other shapes tell them apart");
        assert_eq!(
            chunks(2).layout(&[4, 3]),
            Err(ShardingError::DimOutOfRange {
                dim: 2,
                shape: vec![4, 3]
            })
        );
        assert!(chunks(0).layout(&[]).is_err() && chunks(-1).layout(&[]).is_err());
    }

    #[test]
    fn one_chunk_divides_nothing() {
        assert!(
            Sharding::chunk(0, ids(&[3]))
                .unwrap()
                .layout(&[5])
                .unwrap()
                .fully_replicated()
        );
        assert!(
            !Sharding::chunk(0, ids(&[3, 4]))
                .unwrap()
                .layout(&[0])
                .unwrap()
                .fully_replicated()
        );
    }

    proptest! {
        #[test]
        fn chunks_cover_the_array_once(
            shape in prop::collection::vec(0usize..7, 1..4),
            dim in any::<prop::sample::Index>(),
            placements in Just((0..9u32).collect::<Vec<_>>()).prop_shuffle(),
            count in 1usize..9,
            negative in any::<bool>(),
        ) {
            let at = dim.index(shape.len());
            let dim = at as isize - if negative { shape.len() as isize } else { 0 };
            let sharding = Sharding::chunk(dim, ids(&placements[..count])).unwrap();
            let layout = sharding.layout(&shape).unwrap();
            let mut next = 0;
            let each = shape[at].div_ceil(count);
            for (place, (device, region)) in layout.iter().enumerate() {
                prop_assert_eq!(device.0, placements[place]);
                prop_assert_eq!(region.range(at).start, next);
                prop_assert!(region.range(at).len() <= each);
                let whole = |d: usize| d == at || region.range(d) == (0..shape[d]);
                prop_assert!((0..shape.len()).all(whole));
                next = region.range(at).end;
            }
            prop_assert_eq!(next, shape[at]);
        }
    }
}
