//! The functions of the golden files that `compute` is compared with: their inputs and steps.

use mpmd_core::aval::Element;
use mpmd_core::compute::{Expr, concatenate, einsum, number};
use mpmd_core::prelude::*;
use mpmd_core::sharding::{Sharding, Spec, SpecEntry};
use mpmd_core::topology::Mesh;
use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct Input {
    pub(crate) shape: Vec<usize>,
    pub(crate) spec: InputSpec,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum InputSpec {
    Placed(Vec<Vec<String>>),
    /// The word "host".
    Host(#[expect(dead_code, reason = "only its presence counts")] String),
}

#[derive(Clone, Deserialize)]
pub(crate) struct Step {
    pub(crate) op: String,
    pub(crate) args: Vec<usize>,
    #[serde(default)]
    pub(crate) dims: Vec<isize>,
    #[serde(default)]
    pub(crate) dim: isize,
    #[serde(default)]
    pub(crate) order: Vec<isize>,
    #[serde(default)]
    pub(crate) shape: Vec<usize>,
    #[serde(default)]
    pub(crate) range: (usize, usize),
    #[serde(default)]
    pub(crate) text: String,
    #[serde(default)]
    pub(crate) before: usize,
    #[serde(default)]
    pub(crate) after: usize,
    #[serde(default)]
    pub(crate) value: f64,
    #[serde(default)]
    pub(crate) by: f64,
    #[serde(default)]
    pub(crate) indices: Vec<i32>,
    #[serde(default)]
    pub(crate) count: usize,
    /// The sharding that JAX gives the value; `None` if it refuses the step.
    pub(crate) spec: Option<Vec<Vec<String>>>,
}

/// Returns the result of a step.
pub(crate) fn apply(step: &Step, made: &[Expr]) -> Expr {
    let args: Vec<Expr> = step.args.iter().map(|arg| made[*arg]).collect();
    let x = args[0];
    match step.op.as_str() {
        "add" => x + args[1],
        "mul" => x * args[1],
        "sub" => x - args[1],
        "maximum" => x.maximum(args[1]),
        "div" => x / args[1],
        "minimum" => x.minimum(args[1]),
        "pow" => x.pow(args[1]),
        "power" => x.pow(step.by),
        "tanh" => x.tanh(),
        "neg" => -x,
        "abs" => x.abs(),
        "sigmoid" => x.sigmoid(),
        "exp" => x.exp(),
        "log" => x.log(),
        "sqrt" => x.sqrt(),
        "sin" => x.sin(),
        "cos" => x.cos(),
        "square" => x.square(),
        "scale" => x * step.by,
        "shift" => x + step.by,
        "sum" => x.sum(&step.dims[..]),
        "mean" => x.mean(&step.dims[..]),
        "max" => x.max(&step.dims[..]),
        "min" => x.min(&step.dims[..]),
        "log_sum_exp" => x.log_sum_exp(step.dims[0]),
        "stop" => x.stop_gradient(),
        "take" => x.take(step.dim, whole_numbers(&step.indices)),
        "segment_sum" => x.segment_sum(step.dim, whole_numbers(&step.indices), step.count),
        "argmax" => x.argmax(step.dims[0]).cast(DType::F32),
        "softmax" => x.softmax(step.dims[0]),
        "matmul" => x.matmul(args[1]),
        "einsum" => einsum(&step.text, x, args[1]),
        "transpose" => x.transpose(&step.order),
        "reshape" => x.reshape(&step.shape),
        "expand" => x.expand(step.dim),
        "broadcast" => x.broadcast_to(&step.shape),
        "slice" => x.slice(step.dim, step.range.0..step.range.1),
        "pad" => x.pad(step.dim, step.before, step.after, step.value),
        "concatenate" => concatenate(&args, step.dim),
        "select" => x.greater(0.0).select(args[1], args[2]),
        other => panic!("{other}"),
    }
}

pub(crate) fn sharding(mesh: &Mesh, spec: &[Vec<String>]) -> Sharding {
    let entries = spec.iter().map(|axes| SpecEntry::from(axes.clone()));
    mesh.sharding(Spec::new(entries.collect()))
}

/// Returns a list of whole numbers as an expression.
fn whole_numbers(list: &[i32]) -> Expr {
    let each = list
        .iter()
        .map(|value| number(f64::from(*value), DType::I32).expand(0));
    concatenate(&each.collect::<Vec<_>>(), 0)
}

/// Makes the inputs of a function, with the elements that the generators give them.
pub(crate) fn put_inputs<T: Element>(
    p: &mut Program,
    mesh: &Mesh,
    inputs: &[Input],
    convert: impl Fn(f64) -> T,
) -> Result<Vec<MpmdArray>> {
    let put = |(number, input): (usize, &Input)| {
        let value = |i: usize| ((i * 7 + 3 * number) % 11) as f64 / 4.0 - 1.25;
        let count: usize = input.shape.iter().product();
        let values: Vec<T> = (0..count).map(|i| convert(value(i))).collect();
        let host = MpmdArray::from_slice(&input.shape, &values)?;
        match &input.spec {
            InputSpec::Placed(spec) => p.device_put(&host, sharding(mesh, spec)),
            InputSpec::Host(_) => Ok(host),
        }
    };
    inputs.iter().enumerate().map(put).collect()
}
