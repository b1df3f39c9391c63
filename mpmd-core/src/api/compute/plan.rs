//! A call of `compute`: traces the function, and issues its kernels and moves.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::Arc;

use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;

use super::expr::{Expr, check_dtype};
use super::kernel::ComputeKernel;
use super::node::{Node, NodeId, Op};
use super::segments::{KernelNodes, Segment, segments};
use super::trace::{TraceError, mesh_of, trace};
use super::values::{ComputeInputs, ComputeResults};
use crate::api::jit::Jit;
use crate::api::program::Program;
use crate::api::put::MoveOptions;
use crate::error::{IssueProblem, Result};
use crate::exec::Rolling;
use crate::exec::array::MpmdArray;

/// The operations of a function, in order.
pub(super) struct ComputePlan(Vec<PlannedStep>);

enum PlannedStep {
    Kernel {
        jit: Box<Jit<ComputeKernel>>,
        inputs: Vec<NodeId>,
        outputs: Vec<NodeId>,
    },
    Move {
        from: NodeId,
        to: NodeId,
        sharding: Sharding,
    },
}

/// A function that was traced before: its plan and its results.
struct TracedFunction {
    plan: Arc<ComputePlan>,
    /// The nodes of the results.
    results: Vec<NodeId>,
    /// The length of each list in the results.
    lengths: Vec<usize>,
}

/// Traces a function, and issues its operations. `at` is the line of the call.
///
/// A closure that captures nothing is traced once for each line, and for its inputs' shapes, dtypes
/// and shardings.
pub(super) fn run<'a, I, O, F>(
    program: &mut Program,
    mesh: Option<&Mesh>,
    inputs: &I,
    function: F,
    at: &'static Location<'static>,
) -> Result<O::Arrays>
where
    I: ComputeInputs<'a>,
    O: ComputeResults,
    F: FnOnce(I::Exprs) -> O,
{
    type Run<I, A, F> =
        fn(&mut Program, Option<&Mesh>, &I, F, &'static Location<'static>) -> Result<A>;

    let wrong = |why: &str| IssueProblem::Compute(why.to_owned()).at(at, "compute");
    let (mut arrays, mut lengths) = (Vec::new(), Vec::new());
    inputs.push_to(&mut arrays, &mut lengths);
    let this: Run<I, O::Arrays, F> = run::<I, O, F>;
    let key = || function_key(this as usize, mesh, &arrays, &lengths, at);
    let key = (size_of::<F>() == 0).then(key);
    let known = key.and_then(|key| program.computed.get::<TracedFunction>(key));
    let traced = match known {
        Some(traced) => traced,
        None => {
            let traced = Arc::new(traced(program, mesh, inputs, &arrays, function, at)?);
            if let Some(key) = key {
                program.computed.insert(key, traced.clone());
            }
            traced
        }
    };

    let given = arrays.into_iter().cloned().enumerate();
    let known = traced.plan.run(program, given.collect(), at)?;
    let mut values = traced
        .results
        .iter()
        .filter_map(|id| known.get(id).cloned());
    let arrays = O::arrays(&mut values, &mut traced.lengths.iter().copied());
    arrays.ok_or_else(|| wrong("a result has no value"))
}

/// Returns a number that tells a function and its inputs from all others. `function` is the address
/// of code that is made for it alone.
fn function_key(
    function: usize,
    mesh: Option<&Mesh>,
    arrays: &[&MpmdArray],
    lengths: &[usize],
    at: &'static Location<'static>,
) -> u128 {
    let place = std::ptr::from_ref(at).addr();
    let mesh = mesh.map_or(0, Mesh::fingerprint);
    let hash = Rolling::default()
        .mix(function as u64)
        .mix(place as u64)
        .mix(mesh);
    let hash = lengths.iter().fold(hash, |hash, len| hash.mix(*len as u64));
    let hash = arrays.iter().fold(hash, |hash, array| {
        let sharding = array.sharding().map_or(0, Sharding::fingerprint);
        let hash = hash.mix(array.dtype() as u64).mix(sharding);
        let shape = array.shape();
        let hash = hash.mix(shape.len() as u64);
        shape.iter().fold(hash, |hash, size| hash.mix(*size as u64))
    });
    hash.value()
}

/// Traces a function, and plans its operations.
fn traced<'a, I: ComputeInputs<'a>, O: ComputeResults>(
    program: &mut Program,
    mesh: Option<&Mesh>,
    inputs: &I,
    arrays: &[&MpmdArray],
    function: impl FnOnce(I::Exprs) -> O,
    at: &'static Location<'static>,
) -> Result<TracedFunction> {
    let wrong = |why: String| IssueProblem::Compute(why).at(at, "compute");
    let nodes = arrays.iter().enumerate();
    let nodes = nodes.map(|(index, array)| input(index, array, arrays, at));
    let nodes = nodes
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(wrong)?;

    let failed = |error: TraceError| IssueProblem::Compute(error.why).at(error.at, "compute");
    let function = |exprs: Vec<Expr>| {
        let exprs = inputs.exprs(&mut exprs.into_iter());
        function(exprs.expect("there is an expression for each array"))
    };
    let (value, trace) = trace(nodes, function).map_err(failed)?;
    let (mut exprs, mut lengths) = (Vec::new(), Vec::new());
    value.push_to(&mut exprs, &mut lengths);
    let mut results = trace.ids(&exprs, at).map_err(failed)?;
    let mut nodes = trace.nodes;
    skip_stops(&mut nodes, &mut results);
    let of_nodes = || nodes.iter().find_map(mesh_of);
    let mesh = mesh.or_else(of_nodes).ok_or_else(|| {
        wrong("no input is on devices: put one there, or name the mesh by `compute_on`".to_owned())
    })?;
    Ok(TracedFunction {
        plan: planned(program, &nodes, &results, mesh, at)?,
        results,
        lengths,
    })
}

/// Replaces the values whose gradients were stopped by themselves: nothing is computed for them.
fn skip_stops(nodes: &mut [Node], results: &mut [NodeId]) {
    let mut real: Vec<NodeId> = (0..nodes.len()).collect();
    for id in 0..nodes.len() {
        let node = &mut nodes[id];
        node.operands
            .iter_mut()
            .for_each(|operand| *operand = real[*operand]);
        if let (Op::StopGradient, [operand]) = (&node.op, &node.operands[..]) {
            real[id] = *operand;
        }
    }
    results
        .iter_mut()
        .for_each(|result| *result = real[*result]);
}

/// Returns the node of an input, which is one of `all`.
fn input(
    index: usize,
    array: &MpmdArray,
    all: &[&MpmdArray],
    at: &'static Location<'static>,
) -> std::result::Result<Node, String> {
    let named = |why: String| format!("input {index}: {why}");
    check_dtype(array.dtype()).map_err(named)?;
    let sharding = match array.sharding() {
        Some(sharding) if sharding.mesh().is_none() => {
            let [device] = sharding.devices() else {
                let why = format!("expected a sharding by a mesh, found {sharding}");
                return Err(named(why));
            };
            // Another input may be on a mesh of this device alone.
            let meshes = all.iter().filter_map(|other| other.sharding()?.mesh());
            let mut meshes = meshes.filter(|mesh| mesh.devices() == [*device]);
            let mesh = meshes.next().cloned();
            let mesh = mesh.map_or_else(|| Mesh::new(&[("device", 1)], vec![*device]), Ok);
            Some(mesh.map_err(|why| named(why.to_string()))?.replicated())
        }
        sharding => sharding.cloned(),
    };
    Ok(Node {
        op: Op::Input(index),
        operands: Vec::new(),
        aval: array.aval().clone(),
        sharding,
        parts: Vec::new(),
        level: 0,
        at,
    })
}

/// Returns the plan of a function: that of an earlier call, or a new one.
fn planned(
    program: &mut Program,
    nodes: &[Node],
    results: &[NodeId],
    mesh: &Mesh,
    at: &'static Location<'static>,
) -> Result<Arc<ComputePlan>> {
    let text = text(nodes, results, mesh, at);
    let key = Rolling::default().mix_bytes(text.as_bytes()).value();
    if let Some(plan) = program.computed.get(key) {
        return Ok(plan);
    }

    let segments = segments(nodes, results, mesh).into_iter();
    let steps = segments.map(|segment| match segment {
        Segment::Move { from, to, sharding } => Ok(PlannedStep::Move { from, to, sharding }),
        Segment::Kernel(kernel) => bound(program, nodes, kernel, at),
    });
    let plan = Arc::new(ComputePlan(steps.collect::<Result<_>>()?));
    program.computed.insert(key, plan.clone());
    Ok(plan)
}

/// Returns a text that tells a call of a function from all others.
fn text(nodes: &[Node], results: &[NodeId], mesh: &Mesh, at: &'static Location<'static>) -> String {
    use std::fmt::Write as _;

    let mut text = format!("{at} {:x} {results:?}", mesh.fingerprint());
    for Node {
        op,
        operands,
        aval,
        sharding,
        ..
    } in nodes
    {
        let sharding = sharding.as_ref().map_or(0, Sharding::fingerprint);
        // Writing to a text cannot fail.
        let _ = write!(text, ";{op:?}{operands:?}{aval}{sharding:x}");
    }
    text
}

/// Binds a kernel to its mesh.
fn bound(
    program: &Program,
    nodes: &[Node],
    kernel: KernelNodes,
    at: &'static Location<'static>,
) -> Result<PlannedStep> {
    let placed = |id: &NodeId| {
        let sharding = nodes[*id].sharding.clone();
        sharding.unwrap_or_else(|| kernel.mesh.replicated())
    };
    let inputs: Vec<Sharding> = kernel.inputs.iter().map(placed).collect();
    let outputs: Vec<Sharding> = kernel.outputs.iter().map(placed).collect();
    let computed = ComputeKernel::new(nodes, &kernel, at)?;
    let jit = program
        .jit(computed)
        .on(&kernel.mesh)
        .inputs(inputs)
        .outputs(outputs)
        .build()?;
    Ok(PlannedStep::Kernel {
        jit: Box::new(jit),
        inputs: kernel.inputs,
        outputs: kernel.outputs,
    })
}

impl ComputePlan {
    /// Issues the operations. `known` has the arrays of the inputs. Returns those of all nodes that
    /// exist as arrays.
    fn run(
        &self,
        program: &mut Program,
        mut known: BTreeMap<NodeId, MpmdArray>,
        at: &'static Location<'static>,
    ) -> Result<BTreeMap<NodeId, MpmdArray>> {
        let missing = || IssueProblem::Compute("a value is missing".to_owned()).at(at, "compute");
        for step in &self.0 {
            match step {
                PlannedStep::Kernel {
                    jit,
                    inputs,
                    outputs,
                } => {
                    let given = inputs.iter().map(|id| known.get(id).cloned());
                    let given = given.collect::<Option<Vec<_>>>().ok_or_else(missing)?;
                    let made = jit.call_at(program, &given, at)?;
                    known.extend(outputs.iter().copied().zip(made));
                }
                PlannedStep::Move { from, to, sharding } => {
                    let array = known.get(from).cloned().ok_or_else(missing)?;
                    let to_sharding = sharding.clone().into();
                    let moved = program.put_at(&array, &to_sharding, MoveOptions::default(), at)?;
                    known.insert(*to, moved);
                }
            }
        }
        Ok(known)
    }
}
