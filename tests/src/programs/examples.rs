//! Three small programs over two meshes; each mesh is one half of eight devices.

use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::Mesh;

use super::Say;
use super::parts::Each;

const SHAPE: [usize; 2] = [16, 16];

fn halves(p: &Program) -> Result<(Mesh, Mesh)> {
    let mut halves = p.mesh(&[("half", 2), ("data", 4)])?.split("half")?;
    let back = halves.remove(1);
    Ok((halves.remove(0), back))
}

fn rows(mesh: &Mesh) -> Sharding {
    mesh.sharding(spec!["data"])
}

fn ones() -> Result<MpmdArray> {
    MpmdArray::from_slice(&SHAPE, &[1.0f32; 256])
}

/// Prints for each shard of this process whether all its values are `value`. Prints `remote` on
/// processes without shards.
fn say_all_are(value: f32, x: &MpmdArray, say: &mut Say<'_>) -> Result<()> {
    x.block_until_ready()?;
    if x.is_fully_remote() {
        say("remote".to_owned());
        return Ok(());
    }
    for shard in x.addressable_shards()? {
        let found = shard.data.to_vec::<f32>()?;
        let right = found.len() == 4 * 16 && found.iter().all(|found| *found == value);
        say(format!(
            "{} {}",
            shard.device,
            if right {
                "all right".to_owned()
            } else {
                format!("{found:?}")
            }
        ));
    }
    Ok(())
}

/// Moves host values to devices, and prints whether they arrived.
pub(super) fn uncommitted(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let (front, _) = halves(p)?;
    let x = p.device_put(&ones()?, rows(&front))?;
    say_all_are(1.0, &x, say)
}

/// Moves an array from one mesh to another, and prints whether the values arrived.
pub(super) fn across_meshes(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let (front, back) = halves(p)?;
    let x = p.device_put(&ones()?, rows(&front))?;
    let x = p.device_put(&x, rows(&back))?;
    say_all_are(1.0, &x, say)
}

/// Runs a kernel on one mesh, moves the result, and runs a kernel on the other mesh. Prints whether
/// the values are right.
pub(super) fn jit_and_transfer(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let (front, back) = halves(p)?;
    let first = p
        .jit(Each {
            name: "AddOne",
            f: |x| x + 1.0,
        })
        .on(&front)
        .outputs(rows(&front))
        .build()?;
    let second = p
        .jit(Each {
            name: "Double",
            f: |x| x * 2.0,
        })
        .on(&back)
        .outputs(rows(&back))
        .build()?;
    let x = p.device_put(&ones()?, rows(&front))?;
    let x = first.call(p, x)?;
    let x = p.device_put(&x, rows(&back))?;
    let x = second.call(p, x)?;
    say_all_are(4.0, &x, say)
}
