//! Transfers between many pairs of shardings. The result of each owner must not depend on the
//! number of processes that share the devices.

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::{DeviceId, Mesh};

use super::Say;
use super::parts::{numbered, say_shards};

fn chosen(p: &Program, devices: &[u32]) -> Result<Mesh> {
    let devices: Vec<DeviceId> = devices.iter().map(|device| DeviceId(*device)).collect();
    p.mesh_of(&[("d", devices.len())], &devices)
}

/// Moves small arrays between all kinds of shardings, and prints the shards of the results.
#[expect(clippy::too_many_lines, reason = "a table")]
pub(super) fn shapes(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let all = p.mesh(&[("d", 8)])?;
    let grid = p.mesh(&[("a", 2), ("b", 4)])?;
    let (front, back) = (chosen(p, &[0, 1, 2, 3])?, chosen(p, &[4, 5, 6, 7])?);
    let (first, last) = (chosen(p, &[0, 1])?, chosen(p, &[6, 7])?);
    let (middle, odd) = (chosen(p, &[2, 3, 4, 5])?, chosen(p, &[1, 3, 5, 7])?);
    let reversed = chosen(p, &[7, 6, 5, 4, 3, 2, 1, 0])?;
    let (by_rows, by_columns) = (spec!["d"], spec![None, "d"]);
    let ways: Vec<(&str, &[usize], Sharding, Sharding)> = vec![
        (
            "rows to columns",
            &[16, 24],
            all.sharding(by_rows.clone()),
            all.sharding(by_columns.clone()),
        ),
        (
            "grid turned",
            &[8, 8],
            grid.sharding(spec!["a", "b"]),
            grid.sharding(spec!["b", "a"]),
        ),
        (
            "grid to rows",
            &[8, 8],
            grid.sharding(spec!["b"]),
            all.sharding(by_rows.clone()),
        ),
        (
            "both axes on one dimension",
            &[8, 3],
            grid.sharding(spec![("b", "a")]),
            grid.replicated(),
        ),
        (
            "four to two",
            &[8, 6],
            front.sharding(by_rows.clone()),
            last.sharding(by_rows.clone()),
        ),
        (
            "two to four",
            &[8, 8],
            first.sharding(by_rows.clone()),
            back.sharding(by_columns.clone()),
        ),
        (
            "replicated to rows",
            &[8, 5],
            front.replicated(),
            back.sharding(by_rows.clone()),
        ),
        (
            "rows to replicated",
            &[8, 5],
            front.sharding(by_rows.clone()),
            back.replicated(),
        ),
        (
            "everywhere",
            &[8, 5],
            last.sharding(by_rows.clone()),
            all.replicated(),
        ),
        (
            "overlapping meshes",
            &[4, 4],
            middle.sharding(by_rows.clone()),
            odd.sharding(by_columns.clone()),
        ),
        (
            "other order",
            &[16, 3],
            all.sharding(by_rows.clone()),
            reversed.sharding(by_rows.clone()),
        ),
        (
            "nothing at all",
            &[8, 0],
            all.sharding(by_rows.clone()),
            back.sharding(spec![]),
        ),
        (
            "no rows",
            &[0, 8],
            front.replicated(),
            back.sharding(by_columns.clone()),
        ),
        (
            "scalar",
            &[],
            front.replicated(),
            Sharding::single_device(DeviceId(7)),
        ),
        (
            "one element",
            &[1],
            Sharding::single_device(DeviceId(0)),
            back.replicated(),
        ),
        (
            "a refused cut",
            &[4, 6, 8],
            front.sharding(by_columns.clone()),
            back.replicated(),
        ),
    ];
    // The last case cuts a dimension of 6 in 4. It is refused when it is issued, equally on every
    // process, and the program goes on.
    let mut moved = Vec::new();
    for (i, (name, shape, from, to)) in ways.iter().enumerate() {
        match p.array_from_fn(f32s(*shape), from, numbered(i as u64)) {
            Ok(x) => moved.push((*name, p.device_put(&x, to)?)),
            Err(Error::Issue(error)) if *name == "a refused cut" => {
                say(format!("{name}: {}", error.why))
            }
            Err(error) => return Err(error),
        }
    }
    // No array was waited for until here.
    for (name, x) in &moved {
        say_shards(name, x, say)?;
    }

    let start = p.array_from_fn(f32s([16, 24]), all.sharding(by_rows), numbered(99))?;
    let mut x = start.clone();
    for to in [
        back.sharding(by_columns),
        first.replicated(),
        grid.sharding(spec!["b", "a"]),
    ] {
        x = p.device_put(&x, to)?;
    }
    x = p.device_put(&x, all.sharding(spec!["d"]))?;
    say_shards("before the tour", &start, say)?;
    say_shards("after the tour", &x, say)?;

    let host = MpmdArray::from_slice(&[8, 2], &(0..16u8).map(f32::from).collect::<Vec<_>>())?;
    let pair = (host, start);
    let (small, large) = p.device_put(&pair, odd.sharding(spec!["d"]))?;
    say_shards("a tree, host values", &small, say)?;
    say_shards("a tree, moved", &large, say)
}

/// Sends arrays just below, at and just above the size limit for eager messages. Then sends more of
/// them than the eager credit allows. Prints the received shards.
pub(super) fn eager_limit(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    const LIMIT: usize = mpmd_proto::router::EAGER_BYTES as usize;
    let ends = [
        Sharding::single_device(DeviceId(0)),
        Sharding::single_device(DeviceId(7)),
    ];
    let fill = |region: &Region, mut view: ViewMut<'_>| -> Result<()> {
        for (value, index) in view.as_mut_slice::<u8>()?.iter_mut().zip(region.range(0)) {
            *value = (index % 251) as u8;
        }
        Ok(())
    };
    let mut moved = Vec::new();
    for bytes in [LIMIT - 1, LIMIT, LIMIT + 1] {
        for (from, to) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
            let x = p.array_from_fn(u8s([bytes]), from, fill)?;
            moved.push(p.device_put(&x, to)?);
        }
    }
    let unasked = mpmd_proto::router::EAGER_CREDIT as usize / LIMIT;
    for i in 0..unasked * 3 / 2 {
        let x = p.array_from_fn(f32s([LIMIT / 4]), &ends[0], numbered(i as u64))?;
        moved.push(p.device_put(&x, &ends[1])?);
    }
    for (i, x) in moved.iter().enumerate() {
        say_shards(&format!("message {i}"), x, say)?;
    }
    Ok(())
}

/// Moves 64 MiB from rows on one half of the devices to columns on the other half, and prints the
/// shards.
pub(super) fn large(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let (front, back) = (chosen(p, &[0, 1, 2, 3])?, chosen(p, &[4, 5, 6, 7])?);
    let x = p.array_from_fn(f32s([4096, 4096]), front.sharding(spec!["d"]), numbered(5))?;
    let x = p.device_put(&x, back.sharding(spec![None, "d"]))?;
    say_shards("large", &x, say)
}
