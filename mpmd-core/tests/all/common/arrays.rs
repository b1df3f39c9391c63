//! Arrays with known elements, and checks of the shards that a process must hold.

use std::collections::BTreeSet;

use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceId;

/// Returns host values of any dtype, in a fixed pattern of bytes that seldom repeats.
pub(crate) fn values(shape: &[usize], dtype: DType) -> HostArray {
    let aval = ShapedArray::new(shape, dtype);
    let byte = |i: usize| {
        if dtype == DType::Bool {
            (i * i / 3 % 2) as u8
        } else {
            (i * 37 + i / 256) as u8
        }
    };
    HostArray::from_bytes(
        aval.clone(),
        (0..aval.bytes()).map(byte).collect::<Vec<u8>>().into(),
    )
    .unwrap()
}

/// Returns the bytes of one region of `whole`, in row-major order, copied element by element.
pub(crate) fn part(whole: &HostArray, region: &Region) -> Vec<u8> {
    let item = whole.dtype().size();
    let mut elements = vec![0];
    for (range, size) in region.ranges().zip(whole.shape()) {
        elements = elements
            .iter()
            .flat_map(|base| range.clone().map(move |i| base * size + i))
            .collect();
    }
    elements
        .into_iter()
        .flat_map(|i| whole.bytes()[i * item..(i + 1) * item].to_vec())
        .collect()
}

/// Checks that this process holds exactly its shards of `whole`, with their values. Waits for the
/// array if this process has none.
pub(crate) fn check(p: &Program, array: &MpmdArray, whole: &HostArray) -> Result<()> {
    let sharding = array.sharding().expect("it is placed").clone();
    assert_eq!(array.aval(), whole.aval());
    let layout = sharding.layout(array.shape())?;
    let here = p.topology().devices_of(p.process());
    let expected: BTreeSet<DeviceId> = sharding
        .devices()
        .iter()
        .copied()
        .filter(|device| here.contains(device))
        .collect();
    if expected.is_empty() {
        assert!(array.is_fully_remote() && array.to_host()?.is_none());
        array.block_until_ready()?;
        return Ok(());
    }
    let shards = array.addressable_shards()?;
    assert_eq!(
        shards
            .iter()
            .map(|shard| shard.device)
            .collect::<BTreeSet<_>>(),
        expected
    );
    for shard in shards {
        assert_eq!(Some(&shard.region), layout.region_of(shard.device));
        assert_eq!(shard.data.shape(), shard.region.shape());
        assert_eq!(
            shard.data.bytes()[..],
            part(whole, &shard.region)[..],
            "{sharding} on {}",
            shard.device
        );
    }
    Ok(())
}
