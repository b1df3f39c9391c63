//! Compares the parts of inputs and outputs on each device by the kernel's rule.

use crate::error::IssueProblem;
use crate::exec::array::{Made, MpmdArray};
use crate::kernel::UntypedKernel;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::{DeviceParts, DimensionMisfit, Layout, Linearity, Sharding};
use mpmd_layout::topology::Mesh;

/// Returns the shardings of outputs with these shapes, which follow from those of the inputs by the
/// kernel's rule.
///
/// # Errors
///
/// If no single sharding follows.
pub(super) fn shardings_by_rule(
    kernel: &dyn UntypedKernel,
    mesh: &Mesh,
    leaves: &[&MpmdArray],
    outputs: &[ShapedArray],
) -> Result<Vec<Sharding>, IssueProblem> {
    let rule = kernel.rule().ok_or(IssueProblem::MissingOutputs)?;
    let operand_shapes: Vec<&[usize]> = leaves.iter().map(|leaf| leaf.shape()).collect();
    let result_shapes: Vec<&[usize]> = outputs.iter().map(ShapedArray::shape).collect();
    let arrays = || shardings(leaves, &[]);
    let bound = rule.bind(&operand_shapes, &result_shapes);
    let bound = bound.map_err(|why| IssueProblem::Dimensions {
        why: Box::new(why),
        arrays: arrays(),
    })?;
    // An input that is whole on each device is so by any mesh.
    let inputs = leaves.iter().map(|leaf| {
        let is_whole = layout(leaf).is_some_and(Layout::fully_replicated);
        leaf.sharding()
            .filter(|sharding| sharding.mesh() == Some(mesh) || !is_whole)
    });
    let inputs: Vec<Option<&Sharding>> = inputs.collect();
    // Only the kernel knows in which inputs it is linear.
    let inferred = bound.links().infer(mesh, &inputs, Linearity::None);
    let inferred = inferred.map_err(|why| IssueProblem::OutputsByRule {
        why: Box::new(why),
        arrays: arrays(),
    })?;
    Ok(inferred.results)
}

/// Compares the inputs and outputs on each device by the kernel's rule. Returns the part that each
/// device computes with, or `None` if the kernel has no rule.
///
/// # Errors
///
/// If an input or output is divided in another way than the rule says.
pub(super) fn check_dimensions(
    kernel: &dyn UntypedKernel,
    leaves: &[&MpmdArray],
    outputs: &[&Made],
) -> Result<Option<DeviceParts>, IssueProblem> {
    let Some(rule) = kernel.rule() else {
        return Ok(None);
    };
    let inputs: Vec<Option<&Layout>> = leaves.iter().map(|leaf| layout(leaf)).collect();

    let results: Vec<&Layout> = outputs.iter().map(|output| &*output.layout).collect();
    let operand_shapes: Vec<&[usize]> = leaves.iter().map(|leaf| leaf.shape()).collect();
    let result_shapes: Vec<&[usize]> = results.iter().map(|layout| layout.shape()).collect();
    let misfit = |why: DimensionMisfit| IssueProblem::Dimensions {
        why: Box::new(why),
        arrays: shardings(leaves, outputs),
    };
    let bound = rule.bind(&operand_shapes, &result_shapes).map_err(misfit)?;
    bound.check(&inputs, &results).map(Some).map_err(misfit)
}

/// Returns the layout of an array. `None` for host values, of which each device takes its part.
fn layout(leaf: &MpmdArray) -> Option<&Layout> {
    leaf.made().map(|made| &*made.layout)
}

/// Returns the shardings of all inputs and outputs, for messages.
fn shardings(leaves: &[&MpmdArray], outputs: &[&Made]) -> String {
    let text = |sharding: &Sharding| match sharding.spec() {
        Some(spec) if sharding.unreduced_axes().is_empty() => spec.to_string(),
        _ => sharding.to_string(),
    };
    let inputs = leaves
        .iter()
        .enumerate()
        .map(|(i, leaf)| match leaf.sharding() {
            Some(sharding) => format!("input {i} is {}", text(sharding)),
            None => format!("input {i} is a host value"),
        });
    let outputs = outputs.iter().enumerate();
    let outputs = outputs.map(|(i, output)| format!("output {i} is {}", text(&output.sharding)));
    inputs.chain(outputs).collect::<Vec<_>>().join(", ")
}
