//! The device that reads and writes each region of an array, and the pieces of its region.

use mpmd_core::{Error, Result};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;

/// Limit on the bytes of a piece, unless the piece is a single element.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Returns a sharding in which only one device has each region: the first device in the order of
/// `sharding` that holds it.
///
/// # Errors
///
/// If the sharding does not fit the array, or holds partial sums.
pub(crate) fn owners(aval: &ShapedArray, sharding: &Sharding) -> Result<Sharding> {
    let layout = sharding.layout(aval.shape())?;
    if layout.terms() > 1 {
        let problem = format!("{aval} holds partial sums as {sharding}: add them up first");
        return Err(Error::kernel(problem));
    }
    Ok(sharding.first_holders(aval.shape())?)
}

/// Divides a region into pieces of at most `bytes` bytes, or of one element, in row-major order. In
/// a buffer of the region, each piece is contiguous and follows the previous one. `item` is the
/// size of an element in bytes. An empty region has no pieces.
pub(crate) fn pieces(region: &Region, item: usize, bytes: usize) -> Vec<Region> {
    let size = region.elements() * item;
    let longest = (0..region.ndim()).find(|dim| region.range(*dim).len() > 1);
    let (Some(dim), true) = (longest, size > bytes) else {
        return if region.is_empty() {
            Vec::new()
        } else {
            vec![region.clone()]
        };
    };
    let range = region.range(dim);
    let rows = (bytes / (size / range.len())).max(1);
    let blocks = range.clone().step_by(rows).map(|start| {
        let block = start..range.end.min(start + rows);
        Region::new(
            (0..region.ndim())
                .map(|d| {
                    if d == dim {
                        block.clone()
                    } else {
                        region.range(d)
                    }
                })
                .collect(),
        )
    });
    blocks
        .flat_map(|block| pieces(&block, item, bytes))
        .collect()
}

#[cfg(test)]
mod tests {
    use mpmd_layout::aval::f32s;
    use mpmd_layout::spec;
    use mpmd_layout::topology::{DeviceId, Mesh};

    use super::*;

    #[test]
    fn first_holder_owns_a_region() {
        let mesh = Mesh::new(&[("a", 2), ("b", 2)], [3, 1, 2, 0].map(DeviceId).to_vec()).unwrap();
        let owned = |sharding: &Sharding| {
            owners(&f32s([4]), sharding)
                .unwrap()
                .devices()
                .iter()
                .map(|id| id.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(owned(&mesh.replicated()), [3]);
        assert_eq!(owned(&mesh.sharding(spec!["a"])), [3, 2]);
        assert_eq!(owned(&mesh.sharding(spec!["b"])), [3, 1]);
        assert!(owners(&f32s([4]), &mesh.replicated().unreduced(&["a"]).unwrap()).is_err());
    }

    #[test]
    fn pieces_are_the_region_in_order_within_the_limit() {
        let shape = [7, 5, 6];
        for region in [
            Region::full(&shape),
            Region::new(vec![2..6, 1..2, 0..6]),
            Region::full(&[0; 3]),
        ] {
            for bytes in [1, 8, 30, 100, 240, 10_000] {
                let all = pieces(&region, 4, bytes);
                assert!(
                    all.iter().all(|piece| piece.elements() * 4 <= bytes.max(4)),
                    "{all:?}"
                );
                let found: Vec<u64> = all.iter().flat_map(|piece| piece.indices(&shape)).collect();
                assert_eq!(found, region.indices(&shape).collect::<Vec<_>>(), "{bytes}");
            }
        }
        assert_eq!(pieces(&Region::full(&[]), 8, 1), [Region::full(&[])]);
    }
}
