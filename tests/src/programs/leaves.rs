//! A tree of many small and some larger leaves, which moves between devices of several processes.

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;

use super::Say;
use super::parts::{numbered, say_shards};

const LEAVES: usize = 1_000;

/// Returns the shape of leaf number `leaf`. Most leaves have less than 1 KiB, some up to 16 KiB,
/// and a few 80 KiB.
fn shape(leaf: usize) -> [usize; 2] {
    match leaf % 50 {
        7 => [4_000 + leaf % 5, 5],
        1 | 12 | 31 => [900 + leaf % 99, 4],
        _ => [leaf * 7 % 61, 1 + leaf % 4],
    }
}

/// Moves a tree from two devices to two others, to all, and to one. Prints the shards of the leaves
/// after every move.
pub(super) fn moves(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let chunks = |devices: &[u32]| {
        let devices = devices.iter().copied().map(DeviceId).collect();
        Sharding::chunk(0, devices).map_err(|error| Error::kernel(error.to_string()))
    };
    let first = chunks(&[0, 7])?;
    let make = |leaf: usize| p.array_from_fn(f32s(shape(leaf)), &first, numbered(leaf as u64));
    let mut x: Vec<MpmdArray> = (0..LEAVES).map(make).collect::<Result<_>>()?;
    let all = p.mesh(&[("x", 8)])?.replicated();
    for (stop, to) in [chunks(&[3, 4])?, all, chunks(&[6])?]
        .into_iter()
        .enumerate()
    {
        let before = p.operations();
        x = p.device_put(&x, &to)?;
        say(format!(
            "stop {stop} took {} operations",
            p.operations() - before
        ));
        for (leaf, x) in x.iter().enumerate() {
            say_shards(&format!("stop {stop} leaf {leaf}"), x, say)?;
        }
    }
    Ok(())
}
