//! Brings the regions of a commit from the processes that have copies to the shardings of the new
//! epoch.
//!
//! The first holders of an array's new sharding get its elements once: each region moves, in host
//! memory, to the devices that need a part of it. There they are put together, and the array moves
//! to the sharding itself. So the job may have another number of processes than at the commit.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use mpmd_device::copy::copy_region;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, MemoryKind, Sharding};
use mpmd_layout::topology::DeviceId;
use mpmd_memory::SharedBuffer;

use super::inventory::RegionSource;
use crate::api::program::Program;
use crate::api::put::MoveOptions;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::exec::recovery_store::{RegionCopy, hash};

/// A region of an array that is in this process's memory.
struct HeldRegion {
    region: Region,
    bytes: SharedBuffer,
    /// The hash that the bytes must have; `None` for a region that was moved, and so checked
    /// before.
    hash: Option<u128>,
}

/// An array's new sharding, reduced to the first device of each region.
struct ArrayHome {
    sharding: Sharding,
    layout: Arc<Layout>,
}

/// A region that is being moved between processes.
struct ComingRegion {
    array: usize,
    region: Region,
}

/// Creates `like.len()` arrays from the regions in `sources`, in the shardings of `like`. `copies`
/// are the copies of this process. Blocks until the regions have moved, but not until the arrays
/// are filled.
pub(super) fn restore_arrays(
    p: &mut Program,
    like: &[MpmdArray],
    sources: Vec<Vec<RegionSource>>,
    copies: Vec<RegionCopy>,
    at: &'static Location<'static>,
) -> Result<Vec<MpmdArray>> {
    let first = p.topology().device_ids()[0];
    let to = |array: &MpmdArray| {
        let sharding = array.sharding().cloned();
        sharding.unwrap_or_else(|| Sharding::single_device(first))
    };
    let mut homes = Vec::with_capacity(like.len());
    for array in like {
        let sharding = to(array).first_holders(array.shape())?;
        let layout = sharding.layout(array.shape())?;
        homes.push(ArrayHome { sharding, layout });
    }
    let held = move_regions(p, like, &homes, sources, copies, at)?;

    let mut made = Vec::with_capacity(like.len());
    for ((array, home), held) in like.iter().zip(homes).zip(held) {
        made.push(put_together(p, array, &home.sharding, held)?);
    }

    let shardings: Vec<Sharding> = like.iter().map(to).collect();
    let options = MoveOptions::default().donate(true).cache_plans(false);
    p.device_put_with(&made, shardings, options)
}

/// Moves the regions in `sources` to the processes that need a part of them in their new `homes`.
/// Returns, for each array, the regions that this process then has.
fn move_regions(
    p: &mut Program,
    like: &[MpmdArray],
    homes: &[ArrayHome],
    sources: Vec<Vec<RegionSource>>,
    copies: Vec<RegionCopy>,
    at: &'static Location<'static>,
) -> Result<Vec<Vec<HeldRegion>>> {
    let mut here: Vec<HashMap<Region, SharedBuffer>> = vec![HashMap::new(); like.len()];
    for copy in copies {
        here[copy.array].insert(copy.region, copy.bytes);
    }

    let mut held: Vec<Vec<HeldRegion>> = like.iter().map(|_| Vec::new()).collect();
    let mut moved = Vec::new();
    let mut copied = Vec::new();
    let mut coming = Vec::new();
    for (number, sources) in sources.into_iter().enumerate() {
        for source in sources {
            let RegionSource {
                region,
                holder,
                hash,
            } = source;
            let bytes = here[number].remove(&region);
            let targets = targets(&homes[number].layout, &region);

            // A region that only its holder needs stays where it is.
            let owner = |device| p.topology().device(device).map(|device| device.process);
            if targets
                .iter()
                .all(|(device, _)| owner(*device) == Some(holder))
            {
                let stays = bytes.map(|bytes| HeldRegion {
                    region,
                    bytes,
                    hash: Some(hash),
                });
                held[number].extend(stays);
                continue;
            }

            let from = p.topology().devices_of(holder)[0];
            let from = Sharding::single_device(from).with_memory_kind(MemoryKind::Host);
            let aval = ShapedArray::new(&region.shape(), like[number].dtype());
            let name = region.clone();
            copied.push(p.array_from_fn(aval, from, move |_, mut values| {
                let bytes = intact(bytes.as_ref(), &name, Some(hash))?;
                values.as_bytes_mut().copy_from_slice(bytes);
                Ok(())
            })?);
            moved.push(Sharding::enumerated(targets)?.with_memory_kind(MemoryKind::Host));
            coming.push(ComingRegion {
                array: number,
                region,
            });
        }
    }

    let once = MoveOptions::default().cache_plans(false).may_alias(false);
    let moved = p.device_put_with(&copied, moved, once)?;
    drop(copied);
    for (
        ComingRegion {
            array: number,
            region: of,
        },
        array,
    ) in coming.into_iter().zip(moved)
    {
        for shard in array.shards_here(at)? {
            let region = shifted(&shard.region, |dim, at| at + of.range(dim).start);
            let bytes = shard.data.bytes().clone();
            held[number].push(HeldRegion {
                region,
                bytes,
                hash: None,
            });
        }
    }
    Ok(held)
}

/// Creates an array like `array` in the sharding `home`, from regions in this process's memory.
fn put_together(
    p: &mut Program,
    array: &MpmdArray,
    home: &Sharding,
    held: Vec<HeldRegion>,
) -> Result<MpmdArray> {
    let held = Arc::new(held);
    let item = array.dtype().size();
    p.array_from_fn(array.aval().clone(), home, move |region, mut values| {
        let mut left = region.elements();
        for part in held.iter() {
            let Some(piece) = part.region.intersect(region) else {
                continue;
            };
            let bytes = intact(Some(&part.bytes), &part.region, part.hash)?;
            copy_region(
                bytes,
                &part.region,
                values.as_bytes_mut(),
                region,
                &piece,
                item,
            );
            left = left.saturating_sub(piece.elements());
        }

        if left > 0 {
            Err(Error::kernel("the copy is gone"))
        } else {
            Ok(())
        }
    })
}

/// Returns the devices that need a part of a region, each with that part. Its indices are relative
/// to the start of the region.
fn targets(homes: &Layout, region: &Region) -> Vec<(DeviceId, Region)> {
    let needs = homes.iter().filter_map(|(device, home)| {
        let part = home.intersect(region)?;
        Some((
            device,
            shifted(&part, |dim, at| at - region.range(dim).start),
        ))
    });
    needs.collect()
}

/// Returns a region whose bounds are `to(dimension, bound)` of the given region's bounds.
fn shifted(region: &Region, to: impl Fn(usize, usize) -> usize) -> Region {
    let ranges = region.ranges().enumerate();
    Region::new(
        ranges
            .map(|(dim, range)| to(dim, range.start)..to(dim, range.end))
            .collect(),
    )
}

/// Returns the bytes of a copy. Fails if they are missing or do not have the expected hash.
fn intact<'a>(
    bytes: Option<&'a SharedBuffer>,
    region: &Region,
    expected: Option<u128>,
) -> Result<&'a SharedBuffer> {
    let bytes = bytes.ok_or_else(|| Error::kernel("the copy is gone"))?;
    match expected.is_none_or(|expected| expected == hash(bytes)) {
        true => Ok(bytes),
        false => Err(Error::kernel(format!(
            "the copy of region {region} was damaged"
        ))),
    }
}
