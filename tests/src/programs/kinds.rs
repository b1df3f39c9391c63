//! Moves between chunks, lists of regions, parts along a mesh axis, and by way of an intermediate
//! sharding. The result of each owner must not depend on the number of processes.

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;
use super::parts::{numbered, say_shards};

fn chunks(dim: isize, devices: &[u32]) -> Result<Sharding> {
    let devices = devices.iter().copied().map(DeviceId).collect();
    Sharding::chunk(dim, devices).map_err(|error| Error::kernel(error.to_string()))
}

fn listed(shards: &[(u32, [(usize, usize); 2])]) -> Result<Sharding> {
    let shard = |(device, bounds): &(u32, [(usize, usize); 2])| {
        (
            DeviceId(*device),
            bounds.iter().copied().collect::<Region>(),
        )
    };
    Sharding::enumerated(shards.iter().map(shard).collect())
        .map_err(|error| Error::kernel(error.to_string()))
}

/// Returns all permutations of these devices.
fn orders(devices: &[u32]) -> Vec<Vec<u32>> {
    if devices.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for first in devices {
        let others: Vec<u32> = devices
            .iter()
            .copied()
            .filter(|other| other != first)
            .collect();
        all.extend(
            orders(&others)
                .into_iter()
                .map(|others| [vec![*first], others].concat()),
        );
    }
    all
}

/// Moves arrays between different kinds of shardings, and prints the shards of the results.
pub(super) fn moves(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    chunks_in_all_orders(p, say)?;
    every_kind_to_every_other(p, say)?;
    parts_of_a_mesh(p, say)?;
    by_an_intermediate(p, say)
}

/// Moves an array of five uneven chunks to all 120 orders of its devices.
fn chunks_in_all_orders(p: &mut Program, say: &mut Say<'_>) -> Result<()> {
    let devices = [0, 2, 3, 5, 7];
    let x = p.array_from_fn(f32s([13, 3]), &chunks(0, &devices)?, numbered(1))?;
    for order in orders(&devices) {
        let y = p.device_put(&x, chunks(0, &order)?)?;
        say_shards(&format!("chunks {order:?}"), &y, say)?;
    }
    Ok(())
}

fn every_kind_to_every_other(p: &mut Program, say: &mut Say<'_>) -> Result<()> {
    let grid = p.mesh(&[("a", 2), ("b", 4)])?;
    let spiral = [
        (0, [(0, 5), (0, 1)]),
        (6, [(0, 1), (1, 6)]),
        (3, [(1, 5), (5, 6)]),
        (5, [(1, 5), (1, 5)]),
    ];
    let uneven = [
        (1, [(0, 5), (2, 6)]),
        (4, [(3, 3), (1, 2)]),
        (7, [(0, 4), (0, 2)]),
        (2, [(4, 5), (0, 2)]),
    ];
    let all = [
        chunks(0, &[0, 2, 4, 6])?,
        chunks(-1, &[7, 1, 3])?,
        listed(&spiral)?,
        listed(&uneven)?,
        grid.sharding(spec![None, "a"]),
        Sharding::single_device(DeviceId(5)),
    ];
    for (i, from) in all.iter().enumerate() {
        let x = p.array_from_fn(f32s([5, 6]), from, numbered(2))?;
        for (j, to) in all.iter().enumerate() {
            let y = p.device_put(&x, to)?;
            say_shards(&format!("kind {i} to kind {j}"), &y, say)?;
        }
    }
    Ok(())
}

/// Splits an array along a mesh axis, sends the parts around, and joins them in another order.
fn parts_of_a_mesh(p: &mut Program, say: &mut Say<'_>) -> Result<()> {
    let grid = p.mesh(&[("x", 4), ("y", 2)])?;
    let x = p.array_from_fn(f32s([8, 6]), grid.sharding(spec!["x", "y"]), numbered(3))?;
    let parts = p.split_by_mesh_axis(&x, "x", Sections::Each, SplitOptions::default())?;
    let places: Vec<Sharding> = parts
        .iter()
        .filter_map(|part| part.sharding().cloned())
        .collect();
    let mut turned = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        say_shards(&format!("part {i}"), part, say)?;
        turned.push(p.device_put(part, &places[(i + 1) % places.len()])?);
    }
    turned.rotate_right(1);
    let joined = p.concatenate_by_mesh_axis(&turned, "x", SplitOptions::default())?;
    say_shards("turned and joined", &joined, say)
}

/// Moves an array to fewer devices, which a gather on the source's devices makes cheaper.
fn by_an_intermediate(p: &mut Program, say: &mut Say<'_>) -> Result<()> {
    let source: Vec<DeviceId> = (0..4).map(DeviceId).collect();
    let target: Vec<DeviceId> = (6..8).map(DeviceId).collect();
    let source = p.mesh_of(&[("x", 4)], &source)?.sharding(spec!["x", None]);
    let target = p.mesh_of(&[("x", 2)], &target)?.sharding(spec![None, "x"]);
    let x = p.array_from_fn(f32s([8, 6]), &source, numbered(4))?;
    let before = p.operations();
    let y = p.reshard_with_intermediate_sharding(&x, &source, &target, MoveOptions::default())?;
    if p.operations() == before + 1 {
        return Err(Error::kernel("there was no intermediate".to_owned()));
    }
    say_shards("by an intermediate", &y, say)
}
