//! Compares chunks with those of PyTorch's resharding, index by index.

use mpmd_layout::region::Region;
use mpmd_layout::sharding::{ChunkRanks, Sharding, chunk_by_rank};
use mpmd_layout::topology::DeviceId;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    shape: Vec<usize>,
    dim: isize,
    placements: Vec<usize>,
    #[serde(flatten)]
    expected: ChunkRanks,
}

fn cases() -> Vec<Case> {
    let golden: Golden = serde_json::from_str(include_str!("chunk_sharding.json")).unwrap();
    assert_eq!(golden.cases.len(), 120);
    golden.cases
}

#[test]
fn chunks_match_pytorch() {
    for Case {
        shape,
        dim,
        placements,
        expected,
    } in cases()
    {
        let text = format!("{shape:?}, {dim}, {placements:?}");
        for dim in [dim, dim - shape.len() as isize] {
            for world in [None, Some(placements.len())] {
                assert_eq!(
                    chunk_by_rank(&shape, dim, &placements, world).as_ref(),
                    Ok(&expected),
                    "{text}"
                );
            }
        }
        let found =
            serde_json::to_value(chunk_by_rank(&shape, dim, &placements, None).unwrap()).unwrap();
        assert_eq!(found, serde_json::to_value(&expected).unwrap(), "{text}");
    }
}

#[test]
fn layouts_have_the_same_regions() {
    for Case {
        shape,
        dim,
        placements,
        expected,
    } in cases()
    {
        let devices: Vec<DeviceId> = placements
            .iter()
            .map(|rank| DeviceId(*rank as u32))
            .collect();
        let sharding = Sharding::chunk(dim, devices).unwrap();
        let layout = sharding.layout(&shape).unwrap();
        let each = expected.offsets_by_rank.iter().zip(&expected.sizes_by_rank);
        let regions = each.map(|(offset, size)| {
            offset
                .iter()
                .zip(size)
                .map(|(offset, size)| (*offset, offset + size))
                .collect::<Region>()
        });
        for (device, region) in (0..).map(DeviceId).zip(regions) {
            assert_eq!(
                layout.region_of(device),
                Some(&region),
                "{sharding}, {shape:?}"
            );
        }
    }
}
