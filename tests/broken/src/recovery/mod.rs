//! Programs that commit and restore their state in a wrong way.

pub(crate) mod parts_restored_apart;
pub(crate) mod two_states_at_a_step;

use mpmd::prelude::*;
use mpmd::sharding::Sharding;

/// Returns the sharding of an array of which each process has one half.
fn halves(p: &mut Program) -> Result<Sharding> {
    Ok(p.mesh(&[("x", 2)])?.sharding(spec!["x"]))
}

/// Creates an array of which each process has one half, filled with a value.
fn filled(p: &mut Program, value: f32) -> Result<MpmdArray> {
    let halves = halves(p)?;
    p.array_from_fn(f32s([4]), &halves, move |_, mut values| {
        Ok(values.fill(value)?)
    })
}
