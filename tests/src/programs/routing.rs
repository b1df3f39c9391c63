//! `device_put` from every kind of source to every kind of target.

use std::collections::BTreeSet;

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;
use super::parts::numbered;

/// Returns shardings over some or all of four devices, for arrays of 4 rows and 8 columns.
fn shardings(p: &Program) -> Result<Vec<Sharding>> {
    let mut all = Vec::new();
    for devices in [
        &[0u32, 1][..],
        &[2, 3],
        &[1, 2],
        &[1, 0],
        &[0, 1, 2, 3],
        &[3, 0, 2, 1],
    ] {
        let devices: Vec<DeviceId> = devices.iter().copied().map(DeviceId).collect();
        let mesh = p.mesh_of(&[("x", devices.len())], &devices)?;
        all.extend([
            mesh.replicated(),
            mesh.sharding(spec!["x"]),
            mesh.sharding(spec![None, "x"]),
        ]);
    }
    let grid = p.mesh(&[("x", 2), ("y", 2)])?;
    let specs = [
        spec!["x"],
        spec!["y", None],
        spec!["x", "y"],
        spec!["y", "x"],
        spec![("y", "x")],
        spec![None, ("x", "y")],
    ];
    all.extend(specs.map(|spec| grid.sharding(spec)));
    all.extend([0, 1, 3].map(|device| Sharding::single_device(DeviceId(device))));
    Ok(all)
}

/// Describes where the devices of a sharding are, seen from this process.
fn place(p: &Program, sharding: &Sharding) -> &'static str {
    let here = p.topology().devices_of(p.process());
    match sharding
        .devices()
        .iter()
        .filter(|device| here.contains(device))
        .count()
    {
        0 => "remote",
        n if n == sharding.devices().len() => "local",
        _ => "partial",
    }
}

/// Fails if an element of this process's shards differs from `whole`, the row-major values of a
/// scalar or of a matrix with 8 columns.
fn check(x: &MpmdArray, whole: &[f32]) -> Result<()> {
    if x.is_fully_remote() {
        x.block_until_ready()?;
        return Ok(());
    }
    for shard in x.addressable_shards()? {
        let expected = match shard.region.ndim() {
            0 => whole.to_vec(),
            _ => {
                let rows = shard.region.range(0);
                let columns = || shard.region.range(1);
                rows.flat_map(|row| columns().map(move |column| whole[row * 8 + column]))
                    .collect()
            }
        };
        if shard.data.to_vec::<f32>()? != expected {
            return Err(Error::kernel(format!(
                "{x:?} has wrong values on {}",
                shard.device
            )));
        }
    }
    Ok(())
}

/// Moves a small array between all pairs of shardings, and host values to each. Checks every value.
/// Prints each kind of source and target that occurred on this process.
pub(super) fn table(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let mut seen = BTreeSet::new();
    let whole: Vec<f32> = (0..32u8).map(f32::from).map(|i| i * 7.0).collect();
    let host = MpmdArray::from_slice(&[4, 8], &whole)?;
    for from in shardings(p)? {
        let x = p.array_from_fn(f32s([4, 8]), &from, numbered(0))?;
        let kind = if from.mesh().is_none() {
            "single device"
        } else {
            "mesh"
        };
        for to in shardings(p)? {
            check(&p.device_put(&x, &to)?, &whole)?;
            seen.insert(format!("{kind}, {} to {}", place(p, &from), place(p, &to)));
        }
        check(&x, &whole)?;
        check(&p.device_put(&host, &from)?, &whole)?;
        seen.insert(format!("host array to {}", place(p, &from)));
        if from.spec().is_none_or(|spec| spec.entries().is_empty()) {
            check(&p.device_put(&MpmdArray::scalar(3.5f32), &from)?, &[3.5])?;
            seen.insert(format!("host scalar to {}", place(p, &from)));
        }
    }
    seen.into_iter().for_each(say);
    Ok(())
}
