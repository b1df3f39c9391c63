//! Compares the parts of inputs and outputs on each device by the kernel's rule.

use std::sync::Arc;

use super::Jit;
use super::plan::OutputPlan;
use crate::error::IssueProblem;
use crate::exec::array::MpmdArray;
use crate::kernel::Kernel;
use mpmd_layout::sharding::{DimensionMisfit, Layout, Sharding};

/// Returns an error if the kernel has a rule, and an input or output is divided in another way than
/// the rule says. Host values are on each device as a whole.
///
/// Passes over a call on partial sums: they are declared, so the program adds them later.
pub(super) fn check_dimensions<K: Kernel>(
    jit: &Jit<K>,
    leaves: &[&MpmdArray],
    outputs: &[OutputPlan],
) -> Result<(), IssueProblem> {
    let Some(rule) = jit.kernel.rule() else {
        return Ok(());
    };
    let whole = jit.mesh.replicated();
    let inputs = leaves
        .iter()
        .map(|leaf| layout(leaf, &whole))
        .collect::<Result<Vec<_>, _>>()?;
    if inputs.iter().any(|layout| layout.terms() > 1) {
        return Ok(());
    }

    let inputs: Vec<Option<&Layout>> = inputs.iter().map(|layout| Some(&**layout)).collect();
    let outputs_here: Vec<&Layout> = outputs.iter().map(|output| &*output.made.layout).collect();
    let shapes = |layouts: &[&Layout]| {
        layouts
            .iter()
            .map(|layout| layout.shape().to_vec())
            .collect::<Vec<_>>()
    };
    let operands = shapes(&inputs.iter().flatten().copied().collect::<Vec<_>>());
    let results = shapes(&outputs_here);
    let operands: Vec<&[usize]> = operands.iter().map(Vec::as_slice).collect();
    let results: Vec<&[usize]> = results.iter().map(Vec::as_slice).collect();

    let misfit = |why: DimensionMisfit| IssueProblem::Dimensions {
        why: Box::new(why),
        arrays: shardings(leaves, outputs),
    };
    let bound = rule.bind(&operands, &results).map_err(misfit)?;
    bound.check(&inputs, &outputs_here).map_err(misfit)
}

fn layout(leaf: &MpmdArray, whole: &Sharding) -> Result<Arc<Layout>, IssueProblem> {
    match leaf.made() {
        Some(made) => Ok(made.layout.clone()),
        None => whole
            .layout(leaf.shape())
            .map_err(|why| IssueProblem::Sharding {
                path: String::new(),
                why,
            }),
    }
}

/// Returns the shardings of all inputs and outputs, for messages.
fn shardings(leaves: &[&MpmdArray], outputs: &[OutputPlan]) -> String {
    let text = |sharding: &Sharding| match sharding.spec() {
        Some(spec) if sharding.unreduced_axes().is_empty() => spec.to_string(),
        _ => sharding.to_string(),
    };
    let inputs = leaves
        .iter()
        .enumerate()
        .map(|(i, leaf)| match leaf.sharding() {
            Some(sharding) => format!("input {i} is {}", text(sharding)),
            None => format!("input {i} is a host value, whole on each device"),
        });
    let outputs = outputs.iter().enumerate();
    let outputs =
        outputs.map(|(i, output)| format!("output {i} is {}", text(&output.made.sharding)));
    inputs.chain(outputs).collect::<Vec<_>>().join(", ")
}
