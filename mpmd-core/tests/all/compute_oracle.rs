//! `compute` beside JAX with explicit sharding: random functions, the sharding of each value, and
//! the elements of the last one.
//!
//! `functions.jsonl` was written by JAX 0.10.2 on eight devices. Where both compute, the shardings
//! are equal but for the differences that `Difference` names.

use std::collections::BTreeMap;

use crate::common::watchdog;
use crate::compute_functions::{Input, Step, apply, put_inputs, sharding};
use mpmd_core::compute::Expr;
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use serde::Deserialize;

#[derive(Deserialize)]
struct Function {
    seed: u64,
    inputs: Vec<Input>,
    steps: Vec<Step>,
    last: Last,
}

#[derive(Deserialize)]
struct Last {
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// How a step differs from JAX.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Difference {
    /// A sum over a divided dimension is a partial sum here; JAX adds it up at once.
    PartialSum,
    /// Refused here; JAX moves elements between devices.
    RefusedHere,
    /// Another sharding than that of JAX.
    Sharding,
    /// Refused by JAX, computed here.
    RefusedByJax,
}

/// Operations of a divided dimension for which JAX moves elements between devices, and which are
/// refused here.
const MOVED_BY_JAX: [&str; 9] = [
    "argmax",
    "concatenate",
    "einsum",
    "matmul",
    "max",
    "pad",
    "reshape",
    "slice",
    "softmax",
];

/// Computes a function step by step, and then as a whole. Returns how its steps differ from JAX.
fn compare(p: &mut Program, mesh: &Mesh, function: &Function) -> Result<Vec<(Difference, String)>> {
    let seed = function.seed;
    let inputs = put_inputs(p, mesh, &function.inputs, |x| x as f32)?;

    let mut differences = Vec::new();
    let mut made = inputs.clone();
    let mut found = Vec::new();
    for step in &function.steps {
        let computed = p.compute_on(mesh, &made[..], |made| apply(step, &made));
        let difference = match (&computed, &step.spec) {
            (Err(_), None) => None,
            (Ok(_), None) => Some(Difference::RefusedByJax),
            (Err(_), Some(_)) => Some(Difference::RefusedHere),
            (Ok(array), Some(spec)) => {
                let own = array.sharding().expect("a computed value is on devices");
                match (
                    own == &sharding(mesh, spec),
                    own.unreduced_axes().is_empty(),
                ) {
                    (true, _) => None,
                    (false, false) => Some(Difference::PartialSum),
                    (false, true) => Some(Difference::Sharding),
                }
            }
        };
        differences.extend(difference.map(|difference| (difference, step.op.clone())));
        let Some(spec) = &step.spec else { break };
        let as_jax = sharding(mesh, spec);
        let array = match computed {
            Ok(array) => p.device_put(&array, &as_jax)?,
            // The last values are compared below.
            Err(_) => {
                let computed = p.compute_on(mesh, &made[..], |made| {
                    let whole: Vec<Expr> = made.iter().map(|x| x.to(mesh.replicated())).collect();
                    apply(step, &whole).to(&as_jax)
                });
                computed.unwrap_or_else(|why| panic!("function {seed}: {}: {why}", step.op))
            }
        };
        found.push(difference);
        made.push(array);
    }

    // The whole function, with moves where its steps differ.
    let whole = p.compute_on(mesh, &inputs[..], |inputs| {
        let mut made = inputs;
        for (step, difference) in function.steps.iter().zip(&found) {
            let Some(spec) = &step.spec else { break };
            let as_jax = sharding(mesh, spec);
            let value = match difference {
                None => apply(step, &made),
                Some(Difference::RefusedHere) => {
                    let whole: Vec<Expr> = made.iter().map(|x| x.to(mesh.replicated())).collect();
                    apply(step, &whole).to(&as_jax)
                }
                Some(_) => apply(step, &made).to(&as_jax),
            };
            made.push(value);
        }
        made[made.len() - 1]
    })?;
    let expected = made.last().expect("there are inputs");
    assert_eq!(whole.sharding(), expected.sharding(), "function {seed}");
    assert_eq!(whole.shape(), function.last.shape, "function {seed}");
    for array in [expected, &whole] {
        let array = p.device_put(array, mesh.replicated())?;
        let found = array.to_host()?.expect("a shard is here").to_vec::<f32>()?;
        for (found, expected) in found.iter().zip(&function.last.values) {
            let distance = (found - expected).abs();
            let close = distance <= 1e-5 * expected.abs().max(1.0) || found == expected;
            assert!(close, "function {seed}: {found} in place of {expected}");
        }
    }
    Ok(differences)
}

/// Compares all functions of a file. Returns the number of steps with each difference, by
/// operation.
fn compare_all(text: &str) -> BTreeMap<(Difference, String), usize> {
    let functions: Vec<Function> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a function"))
        .collect();
    let results = mpmd_core::simulate(2, 8, 7, |p| {
        let mesh = p.mesh(&[("x", 2), ("y", 2), ("z", 2)])?;
        let mut counts = BTreeMap::new();
        for function in &functions {
            for difference in compare(p, &mesh, function)? {
                *counts.entry(difference).or_insert(0) += 1;
            }
        }
        Ok(counts)
    });
    results
        .into_iter()
        .next()
        .expect("a process")
        .expect("all functions are computed")
}

#[test]
fn functions_are_those_of_jax() {
    let _limit = watchdog(300);
    let text = match std::env::var("MPMD_TEST_FUNCTIONS") {
        Ok(path) => std::fs::read_to_string(path).expect("functions"),
        Err(_) => include_str!("../golden/functions.jsonl").to_owned(),
    };
    let counts = compare_all(&text);
    let is_known = |(difference, op): &(Difference, String)| match difference {
        Difference::PartialSum => ["sum", "matmul", "einsum"].contains(&op.as_str()),
        Difference::RefusedHere => MOVED_BY_JAX.contains(&op.as_str()),
        // A divided contraction, and operands of which one is whole.
        Difference::RefusedByJax => {
            ["concatenate", "einsum", "matmul", "select"].contains(&op.as_str())
        }
        Difference::Sharding => false,
    };
    let unknown: Vec<_> = counts.iter().filter(|(at, _)| !is_known(at)).collect();
    assert!(unknown.is_empty(), "{unknown:?} of {counts:?}");
    assert!(
        counts.len() > 8,
        "the file has all kinds of steps: {counts:?}"
    );
}
