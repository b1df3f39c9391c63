//! Matrix products whose bits show the vectors that each process computes with.

use mpmd_core::kernel::matmul;
use mpmd_core::prelude::*;

use super::Say;
use super::parts::{numbered, say_shards};

/// Multiplies on all processes, and prints the bits of the rows of each and the width of vectors.
pub(super) fn product(p: &mut Program, _: &[&str], say: &mut Say<'_>) -> Result<()> {
    let devices = p.topology().devices().len();
    let mesh = p.mesh(&[("x", devices)])?;
    let rows = mesh.sharding(spec!["x"]);
    let a = p.array_from_fn(f32s([17 * devices, 1030]), &rows, numbered(1))?;
    let b = p.array_from_fn(f32s([1030, 65]), mesh.replicated(), numbered(2))?;
    let multiply = p.jit(matmul()).on(&mesh).outputs(rows).build()?;
    let y = multiply.call(p, (a, b))?;
    say_shards("product", &y, say)?;
    say(format!("{} vectors", mpmd_device::cpu::width()));
    Ok(())
}
