//! Random numbers whose bits do not depend on the sharding.

use std::panic::Location;

use mpmd_layout::aval::ShapedArray;
use mpmd_layout::random::Key;
use mpmd_layout::sharding::{MemoryKind, Sharding};

use super::expr::{Expr, is_float};
use super::node::{Distribution, Node, Op};
use super::trace::{self, fail};

/// Returns random numbers from 0 to 1, 1 excluded, of f32 or f64. Each depends on the key and its
/// place in the array alone, so the bits are the same with every sharding.
#[track_caller]
#[must_use]
pub fn uniform(key: Key, aval: ShapedArray, sharding: impl Into<Sharding>) -> Expr {
    let at = Location::caller();
    random(key, Distribution::Uniform, aval, sharding.into(), at)
}

/// Returns random numbers of the standard normal distribution, of f32 or f64. Each depends on the
/// key and its place in the array alone, so the bits are the same with every sharding.
#[track_caller]
#[must_use]
pub fn normal(key: Key, aval: ShapedArray, sharding: impl Into<Sharding>) -> Expr {
    let at = Location::caller();
    random(key, Distribution::Normal, aval, sharding.into(), at)
}

fn random(
    key: Key,
    distribution: Distribution,
    aval: ShapedArray,
    sharding: Sharding,
    at: &'static Location<'static>,
) -> Expr {
    if !is_float(aval.dtype()) {
        return fail(
            at,
            format!("random numbers: expected f32 or f64, found {aval}"),
        );
    }
    let is_usual =
        sharding.unreduced_axes().is_empty() && sharding.memory_kind() == MemoryKind::Device;
    if sharding.mesh().is_none() || !is_usual {
        let why = format!(
            "expected a sharding by a mesh, in device memory and without partial sums, found \
             {sharding}"
        );
        return fail(at, format!("random numbers: {why}"));
    }
    if let Err(why) = sharding.layout(aval.shape()) {
        return fail(at, format!("random numbers: {why}"));
    }
    trace::write_placed(Node {
        op: Op::Random(key, distribution),
        operands: Vec::new(),
        aval,
        sharding: Some(sharding),
        parts: Vec::new(),
        level: 0,
        at,
    })
}
