//! Enumerated shardings: lists of disjoint regions that together fill the array.

use std::cmp::Reverse;

use super::{Layout, ShardingError};
use crate::region::Region;
use crate::topology::DeviceId;

/// Checks the conditions that do not depend on a shape: there is a shard, each device has at most
/// one, and no two overlap.
pub(super) fn check(shards: &[(DeviceId, Region)]) -> Result<(), ShardingError> {
    let Some((first_device, first_region)) = shards.first() else {
        return Err(ShardingError::NoShards);
    };
    if let Some((device, region)) = shards
        .iter()
        .find(|(_, region)| region.ndim() != first_region.ndim())
    {
        return Err(ShardingError::ShardNdim {
            first_device: *first_device,
            first_region: first_region.clone(),
            device: *device,
            region: region.clone(),
        });
    }

    let mut by_device: Vec<(DeviceId, usize)> =
        shards.iter().map(|(device, _)| *device).zip(0..).collect();
    by_device.sort_unstable();
    if let Some(pair) = by_device.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let [first, second] = [pair[0].1, pair[1].1].map(|shard| shards[shard].1.clone());
        return Err(ShardingError::ShardTwice {
            device: pair[0].0,
            first,
            second,
        });
    }

    if let Some(ShardOverlap {
        first,
        second,
        common,
    }) = overlap(shards)
    {
        let (first_device, first_region) = shards[first].clone();
        let (second_device, second_region) = shards[second].clone();
        return Err(ShardingError::Overlap {
            first_device,
            first_region,
            second_device,
            second_region,
            common,
        });
    }
    Ok(())
}

/// Returns the layout of an array of `shape` whose shards are `shards`. The caller has already
/// passed them to [`check`].
pub(super) fn layout(
    shards: &[(DeviceId, Region)],
    shape: &[usize],
) -> Result<Layout, ShardingError> {
    let shape_error = |device: DeviceId, region: &Region| ShardingError::ShapeNdim {
        device,
        region: region.clone(),
        shape: shape.to_vec(),
    };
    for (device, region) in shards {
        if region.ndim() != shape.len() {
            return Err(shape_error(*device, region));
        }
        // Also checks empty shards: a shard that ends past the array was meant for another array.
        if let Some(dim) = (0..shape.len()).find(|dim| region.range(*dim).end > shape[*dim]) {
            let device = *device;
            let region = region.clone();
            let shape = shape.to_vec();
            return Err(ShardingError::PastEnd {
                device,
                region,
                dim,
                shape,
            });
        }
    }

    let whole = Region::full(shape);
    let held: Vec<&Region> = shards.iter().map(|(_, region)| region).collect();
    if let Some(region) = gap(whole, held) {
        return Err(ShardingError::Gap {
            region,
            shape: shape.to_vec(),
            shards: shards.len(),
        });
    }

    let (devices, regions) = shards.iter().cloned().unzip();
    Ok(Layout::new(shape, devices, regions, shards.len() == 1))
}

/// Two shards that overlap, and their intersection.
struct ShardOverlap {
    /// Index of the earlier shard in the list of shards; `second` is the index of the later one.
    first: usize,
    second: usize,
    /// The intersection of the regions of both shards.
    common: Region,
}

/// Returns two shards that overlap, or `None` if no two shards overlap.
///
/// Sweeps along the dimension with the most distinct starts. A shard is compared only with the
/// shards that start no later and have not ended yet.
fn overlap(shards: &[(DeviceId, Region)]) -> Option<ShardOverlap> {
    let mut order: Vec<usize> = (0..shards.len())
        .filter(|shard| !shards[*shard].1.is_empty())
        .collect();

    let ndim = shards.first()?.1.ndim();
    let range = |shard: usize, dim: usize| shards[shard].1.range(dim);
    let starts = |dim: usize| {
        let mut starts: Vec<usize> = order.iter().map(|shard| range(*shard, dim).start).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };

    // Sorted along the dimension with the most different starts, few shards stay open at a time.
    let along = (0..ndim).max_by_key(|dim| (starts(*dim), Reverse(*dim)));
    let starts_at = |shard: usize| along.map_or(0, |dim| range(shard, dim).start);
    order.sort_by_key(|shard| starts_at(*shard));

    let mut open: Vec<usize> = Vec::new();
    for shard in order {
        if let Some(dim) = along {
            open.retain(|earlier| range(*earlier, dim).end > starts_at(shard));
        }
        let common = |earlier: &usize| {
            let meet = (0..ndim).all(|dim| {
                let a = range(*earlier, dim);
                let b = range(shard, dim);
                a.start < b.end && b.start < a.end
            });
            meet.then(|| shards[*earlier].1.intersect(&shards[shard].1))
                .flatten()
        };
        if let Some((earlier, common)) = open
            .iter()
            .find_map(|earlier| Some((*earlier, common(earlier)?)))
        {
            return Some(ShardOverlap {
                first: earlier.min(shard),
                second: earlier.max(shard),
                common,
            });
        }
        open.push(shard);
    }
    None
}

/// Returns a part of `whole` that no region of `held` contains, or `None` if they cover `whole`.
/// The regions must be disjoint.
///
/// Counting elements shows whether such a part exists. To find it, the search repeatedly cuts a
/// held region out of the remainder. It continues in a part of the remainder that is not covered.
fn gap(whole: Region, mut held: Vec<&Region>) -> Option<Region> {
    if is_full(&whole, &held) {
        return None;
    }

    let mut rest = whole;
    loop {
        held.retain(|region| region.intersect(&rest).is_some());
        let Some(cut) = held.get(held.len() / 2) else {
            return Some(rest);
        };
        rest = rest
            .without(cut)
            .into_iter()
            .find(|part| !is_full(part, &held))?;
    }
}

fn is_full(whole: &Region, held: &[&Region]) -> bool {
    let parts = held.iter().filter_map(|region| whole.intersect(region));
    parts.fold(0u128, |sum, part| sum.saturating_add(elements(&part))) == elements(whole)
}

/// Counts the elements like [`Region::elements`], but also for regions larger than any memory.
fn elements(region: &Region) -> u128 {
    region.ranges().fold(1, |product, range| {
        u128::saturating_mul(product, range.len() as u128)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::Sharding;
    use proptest::prelude::*;

    /// Returns shards on devices 0, 1, …, from offsets and sizes.
    fn shards<const D: usize>(parts: &[([usize; D], [usize; D])]) -> Vec<(DeviceId, Region)> {
        let region = |(offset, size): &([usize; D], [usize; D])| {
            offset
                .iter()
                .zip(size)
                .map(|(offset, size)| (*offset, offset + size))
                .collect()
        };
        (0..).map(DeviceId).zip(parts.iter().map(region)).collect()
    }

    fn refused(shards: Vec<(DeviceId, Region)>) -> String {
        Sharding::enumerated(shards).unwrap_err().to_string()
    }

    fn uncovered(shards: Vec<(DeviceId, Region)>, shape: &[usize]) -> String {
        Sharding::enumerated(shards)
            .unwrap()
            .layout(shape)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn overlapping_shards_are_named() {
        assert_eq!(
            refused(shards(&[([0, 0], [5, 4]), ([4, 0], [5, 4])])),
            "device 0 has [0..5, 0..4] and device 1 has [4..9, 0..4]: both have [4..5, 0..4]"
        );
        assert_eq!(
            refused(shards(&[([5, 0, 5], [5, 5, 5]), ([5, 4, 9], [5, 5, 5])])),
            "device 0 has [5..10, 0..5, 5..10] and device 1 has [5..10, 4..9, 9..14]: \
             both have [5..10, 4..5, 9..10]"
        );
        assert!(
            Sharding::enumerated(shards(&[([5, 0, 5], [5, 5, 5]), ([5, 5, 5], [5, 5, 5])])).is_ok()
        );
        assert_eq!(
            refused(shards(&[([], []), ([], [])])),
            "device 0 has [] and device 1 has []: both have []"
        );
    }

    #[test]
    fn empty_shards_overlap_nothing() {
        let inside = shards(&[([0, 0], [4, 4]), ([2, 2], [0, 1]), ([2, 2], [0, 1])]);
        let layout = Sharding::enumerated(inside)
            .unwrap()
            .layout(&[4, 4])
            .unwrap();
        assert_eq!(
            layout.region_of(DeviceId(1)).unwrap().to_string(),
            "[2..2, 2..3]"
        );
        let nothing = Sharding::enumerated(shards(&[([0, 0], [0, 3]), ([0, 0], [0, 3])])).unwrap();
        assert!(!nothing.layout(&[0, 3]).unwrap().fully_replicated());
    }

    #[test]
    fn invalid_shard_lists_are_refused() {
        assert_eq!(
            refused(Vec::new()),
            "a list of no shards: an array is on at least one device"
        );
        let mut mixed = shards(&[([0, 0], [5, 4])]);
        mixed.push((DeviceId(7), Region::full(&[5])));
        assert_eq!(
            refused(mixed),
            "device 0 has [0..5, 0..4] and device 7 has [0..5]: 2 and 1 dimensions"
        );
        let mut twice = shards(&[([0], [5]), ([5], [1]), ([6], [1])]);
        twice[2].0 = DeviceId(0);
        assert_eq!(
            refused(twice),
            "device 0 has [0..5] and again [6..7]: a device has one shard"
        );
    }

    #[test]
    fn shards_that_do_not_fill_the_array_are_refused() {
        let diagonal = shards(&[([0, 0], [5, 5]), ([5, 5], [5, 5])]);
        assert_eq!(
            uncovered(diagonal.clone(), &[10, 10]),
            "no device has [0..5, 5..10] of shape [10, 10]; there are 2 shards"
        );
        assert_eq!(
            uncovered(diagonal.clone(), &[10, 3]),
            "device 0 has [0..5, 0..5], which is past the end of dimension 1 of shape [10, 3]"
        );
        assert_eq!(
            uncovered(diagonal, &[10, 10, 10]),
            "device 0 has [0..5, 0..5], but shape [10, 10, 10] has 3 dimensions"
        );
        let outside = shards(&[([0, 0], [5, 2]), ([6, 0], [0, 2])]);
        assert!(
            uncovered(outside, &[5, 2])
                .contains("device 1 has [6..6, 0..2], which is past the end")
        );
        let huge = shards(&[([0, 0], [1 << 62; 2]), ([1 << 62; 2], [5, 5])]);
        assert!(uncovered(huge, &[1 << 63; 2]).starts_with("no device has"));
    }

    #[test]
    fn uneven_tilings_are_accepted() {
        let uneven = shards(&[
            ([0, 0], [2, 4]),
            ([0, 4], [4, 2]),
            ([2, 0], [4, 4]),
            ([4, 4], [2, 2]),
        ]);
        let layout = Sharding::enumerated(uneven.clone())
            .unwrap()
            .layout(&[6, 6])
            .unwrap();
        let found: Vec<_> = layout
            .iter()
            .map(|(device, region)| (device, region.clone()))
            .collect();
        assert_eq!(found, uneven);
        let scalar = Sharding::enumerated(shards(&[([], [])]))
            .unwrap()
            .layout(&[])
            .unwrap();
        assert!(scalar.fully_replicated());
    }

    #[test]
    fn gaps_and_overlaps_are_named() {
        let gap = Sharding::enumerated(shards(&[([0, 0], [7, 2])])).unwrap();
        assert_eq!(
            gap.layout(&[13, 2]).unwrap_err().to_string(),
            "no device has [7..13, 0..2] of shape [13, 2]; there are 1 shards"
        );
        let overlap = Sharding::enumerated(shards(&[([0], [4]), ([0], [4])])).unwrap_err();
        assert!(
            matches!(overlap, ShardingError::Overlap { .. }),
            "{overlap}"
        );
    }

    #[test]
    fn many_shards_are_checked() {
        let side = 128;
        let tile = |i: usize| ([i / side * 4, i % side * 4], [4, 4]);
        let mut tiles = shards(&(0..side * side).map(tile).collect::<Vec<_>>());
        let shape = [4 * side, 4 * side];
        assert!(
            Sharding::enumerated(tiles.clone())
                .unwrap()
                .layout(&shape)
                .is_ok()
        );
        let (_, missing) = tiles.remove(side * side / 3);
        let error = Sharding::enumerated(tiles)
            .unwrap()
            .layout(&shape)
            .unwrap_err();
        assert_eq!(
            error,
            ShardingError::Gap {
                region: missing,
                shape: shape.to_vec(),
                shards: side * side - 1
            }
        );
    }

    /// Returns a tiling made by cuts from side to side. Each cut is the choice of (part, dimension,
    /// index) and cuts one of the parts so far in two. Parts may be empty.
    fn tiling(
        shape: &[usize],
        cuts: &[(
            prop::sample::Index,
            prop::sample::Index,
            prop::sample::Index,
        )],
    ) -> Vec<Region> {
        let mut parts = vec![Region::full(shape)];
        for (part, dim, at) in cuts {
            let part = parts.swap_remove(part.index(parts.len()));
            let dim = dim.index(shape.len());
            let range = part.range(dim);
            let middle = range.start + at.index(range.len() + 1);
            for side in [range.start..middle, middle..range.end] {
                let mut ranges: Vec<_> = part.ranges().collect();
                ranges[dim] = side;
                parts.push(Region::new(ranges));
            }
        }
        parts
    }

    fn tilings() -> impl Strategy<Value = (Vec<usize>, Vec<(DeviceId, Region)>)> {
        let cut = (
            any::<prop::sample::Index>(),
            any::<prop::sample::Index>(),
            any::<prop::sample::Index>(),
        );
        (
            prop::collection::vec(1usize..9, 1..4),
            prop::collection::vec(cut, 0..12),
        )
            .prop_flat_map(|(shape, cuts)| {
                let regions = Just(tiling(&shape, &cuts)).prop_shuffle();
                (Just(shape), regions)
            })
            .prop_map(|(shape, regions)| (shape, (3..).map(DeviceId).zip(regions).collect()))
    }

    /// True if every element of the array is in exactly one shard. Checks element by element.
    fn tiles_by_counting(shape: &[usize], shards: &[(DeviceId, Region)]) -> bool {
        let whole = Region::full(shape);
        if !shards.iter().all(|(_, region)| {
            region
                .ranges()
                .zip(shape)
                .all(|(range, size)| range.end <= *size)
        }) {
            return false;
        }
        let mut point = vec![0; shape.len()];
        for _ in 0..whole.elements() {
            let holds = |region: &Region| {
                region
                    .ranges()
                    .zip(&point)
                    .all(|(range, i)| range.contains(i))
            };
            if shards.iter().filter(|(_, region)| holds(region)).count() != 1 {
                return false;
            }
            for (i, size) in point.iter_mut().zip(shape).rev() {
                *i = (*i + 1) % size;
                if *i > 0 {
                    break;
                }
            }
        }
        true
    }

    proptest! {
        #[test]
        fn tilings_pass_and_wrong_shards_are_refused(
            (shape, shards) in tilings(),
            which in any::<prop::sample::Index>(),
            dim in any::<prop::sample::Index>(),
        ) {
            let accepted = |shards: &[(DeviceId, Region)]| {
                Sharding::enumerated(shards.to_vec()).and_then(|sharding| sharding.layout(&shape))
            };
            let layout = accepted(&shards).unwrap();
            prop_assert!(layout.iter().eq(shards.iter().map(|(device, region)| (*device, region))));
            prop_assert!(tiles_by_counting(&shape, &shards));

            let which = which.index(shards.len());
            let dim = dim.index(shape.len());
            let region = shards[which].1.clone();
            let with = |change: &dyn Fn(std::ops::Range<usize>) -> Option<std::ops::Range<usize>>| {
                let mut changed = shards.clone();
                let mut ranges: Vec<_> = region.ranges().collect();
                ranges[dim] = change(ranges[dim].clone())?;
                changed[which].1 = Region::new(ranges);
                Some(changed)
            };
            let moved = with(&|range| Some(range.start + 1..range.end + 1));
            let back = with(&|range| Some(range.start.checked_sub(1)?..range.end - 1));
            let grown = with(&|range| Some(range.start..range.end + 1));
            let down = with(&|range| Some(range.start.checked_sub(1)?..range.end));
            let shrunk = with(&|range| (!range.is_empty()).then(|| range.start..range.end - 1));
            let mut dropped = shards.clone();
            dropped.remove(which);
            for changed in [moved, back, grown, down, shrunk, Some(dropped)].into_iter().flatten() {
                let verdict = accepted(&changed);
                // A change of an empty shard is often still valid, so counting decides.
                let right = !changed.is_empty() && tiles_by_counting(&shape, &changed);
                prop_assert_eq!(verdict.is_ok(), right, "{:?}: {:?}", &changed, &verdict);
                prop_assert!(!right || region.is_empty());
                match verdict {
                    Err(ShardingError::Overlap {
                        first_device, first_region, second_device, second_region, common,
                    }) => {
                        prop_assert!(changed.contains(&(first_device, first_region.clone())));
                        prop_assert!(changed.contains(&(second_device, second_region.clone())));
                        prop_assert_eq!(first_region.intersect(&second_region), Some(common));
                    }
                    Err(ShardingError::Gap { region, .. }) => {
                        prop_assert!(!region.is_empty() && Region::full(&shape).contains(&region));
                        let is_held = |held: &Region| held.intersect(&region).is_some();
                        prop_assert!(!changed.iter().any(|(_, held)| is_held(held)));
                    }
                    Err(ShardingError::PastEnd { device, region, dim, .. }) => {
                        prop_assert!(region.range(dim).end > shape[dim]);
                        prop_assert!(changed.contains(&(device, region)));
                    }
                    Err(ShardingError::NoShards) => prop_assert!(changed.is_empty()),
                    Err(other) => panic!("{other}"),
                    Ok(_) => {}
                }
            }
        }
    }
}
