//! The trace of a function: the nodes that its expressions have written so far.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{
    ComputedShardings, DimensionLinks, Linearity, OperandDimension, Sharding, Spec,
};
use mpmd_layout::topology::Mesh;

use super::expr::Expr;
use super::node::{Node, NodeId, Op};

thread_local! {
    /// The traces of this thread: functions that are being traced, the innermost last.
    static TRACES: RefCell<Vec<Trace>> = const { RefCell::new(Vec::new()) };
}

/// The error of an expression that was kept from another call.
const OF_ANOTHER: &str =
    "an expression of another function is used: give this one its array as an input";

/// The nodes of a function, and the first error of its expressions.
pub(super) struct Trace {
    /// The number of the trace, by which its expressions are known.
    number: u64,
    pub(super) nodes: Vec<Node>,
    /// The line of the method that is writing nodes, if it does so by others.
    writer: Option<&'static Location<'static>>,
    error: Option<TraceError>,
}

/// The first error of a function's expressions.
#[derive(Clone, Debug)]
pub(super) struct TraceError {
    pub(super) at: &'static Location<'static>,
    pub(super) why: String,
}

/// A node that is to be written.
pub(super) struct NewNode {
    pub(super) op: Op,
    pub(super) operands: Vec<Expr>,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) links: DimensionLinks,
    pub(super) linearity: Linearity,
    pub(super) at: &'static Location<'static>,
}

/// Traces `function`, which gets the expressions of `inputs`. Returns (its value, the trace).
///
/// # Errors
///
/// The first error of an expression. A panic of the function after it is a consequence: the shape
/// of an expression with an error is not known.
pub(super) fn trace<T>(
    inputs: Vec<Node>,
    function: impl FnOnce(Vec<Expr>) -> T,
) -> Result<(T, Trace), TraceError> {
    thread_local! {
        static NUMBER: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    let number = NUMBER.get() + 1;
    NUMBER.set(number);
    let exprs = (0..inputs.len()).map(|id| Expr::new(number, id)).collect();
    TRACES.with_borrow_mut(|traces| {
        traces.push(Trace {
            number,
            nodes: inputs,
            writer: None,
            error: None,
        });
    });

    let value = catch_unwind(AssertUnwindSafe(|| function(exprs)));
    let trace = TRACES.with_borrow_mut(Vec::pop);
    let mut trace = trace.expect("the trace was pushed above");
    match (trace.error.take(), value) {
        (Some(error), _) => Err(error),
        (None, Err(panic)) => resume_unwind(panic),
        (None, Ok(value)) => Ok((value, trace)),
    }
}

/// Calls `f` with the innermost trace.
///
/// # Panics
///
/// If an expression is used outside of the function that is traced. `at` is the line that does so.
fn innermost<T>(at: &'static Location<'static>, f: impl FnOnce(&mut Trace) -> T) -> T {
    TRACES.with_borrow_mut(|traces| match traces.last_mut() {
        Some(trace) => f(trace),
        None => {
            panic!("{at}: an expression is used outside of the function that `compute` traces")
        }
    })
}

/// Returns the node of an expression. Of an expression of another function, and of one with an
/// error, returns a number without dimensions.
pub(super) fn node(expr: Expr, at: &'static Location<'static>) -> Node {
    innermost(at, |trace| trace.node(expr, at))
}

/// Records an error, unless there is one, and returns an expression that stands for its value.
pub(super) fn fail(at: &'static Location<'static>, why: impl fmt::Display) -> Expr {
    innermost(at, |trace| trace.fail(at, why.to_string()))
}

/// Writes a node, whose sharding follows from those of its operands.
pub(super) fn write(new: NewNode) -> Expr {
    innermost(new.at, |trace| trace.write(new, None))
}

/// Writes a node as [`write`] does. Its sharding follows also from that of `like`: the numbers of
/// an array's dimensions, and the array's sharding.
pub(super) fn write_like(new: NewNode, like: Option<(Vec<OperandDimension>, Sharding)>) -> Expr {
    innermost(new.at, |trace| trace.write(new, like))
}

/// Writes a move, or returns the same one that was written before.
pub(super) fn write_move(node: Node) -> Expr {
    innermost(node.at, |trace| {
        let is_it = |other: &Node| {
            other.op == Op::Move
                && other.operands == node.operands
                && other.sharding == node.sharding
        };
        match trace.nodes.iter().position(is_it) {
            Some(id) => Expr::new(trace.number, id),
            None => trace.push(node),
        }
    })
}

/// Calls `f`, whose nodes and errors are all of the line `at`.
pub(super) fn write_as<T>(at: &'static Location<'static>, f: impl FnOnce() -> T) -> T {
    let before = innermost(at, |trace| trace.writer.replace(at));
    let value = f();
    innermost(at, |trace| trace.writer = before);
    value
}

/// Returns the nodes of the function so far.
pub(super) fn all_nodes(at: &'static Location<'static>) -> Vec<Node> {
    innermost(at, |trace| trace.nodes.clone())
}

/// Writes a node with a given sharding.
pub(super) fn write_placed(node: Node) -> Expr {
    innermost(node.at, |trace| trace.push(node))
}

impl Trace {
    /// Returns the nodes of expressions.
    ///
    /// # Errors
    ///
    /// If an expression is of another function. `at` is the line of the call.
    pub(super) fn ids(
        &self,
        exprs: &[Expr],
        at: &'static Location<'static>,
    ) -> Result<Vec<NodeId>, TraceError> {
        match exprs.iter().all(|expr| expr.trace() == self.number) {
            true => Ok(exprs.iter().map(|expr| expr.id()).collect()),
            false => Err(TraceError {
                at,
                why: OF_ANOTHER.to_owned(),
            }),
        }
    }

    fn node(&mut self, expr: Expr, at: &'static Location<'static>) -> Node {
        let found = self.nodes.get(expr.id());
        match found.filter(|_| expr.trace() == self.number) {
            Some(node) => node.clone(),
            None => {
                self.fail(at, OF_ANOTHER.to_owned());
                nothing(at)
            }
        }
    }

    fn fail(&mut self, at: &'static Location<'static>, why: String) -> Expr {
        let at = self.writer.unwrap_or(at);
        self.error.get_or_insert(TraceError { at, why });
        self.push(nothing(at))
    }

    fn push(&mut self, mut node: Node) -> Expr {
        node.at = self.writer.unwrap_or(node.at);
        self.nodes.push(node);
        Expr::new(self.number, self.nodes.len() - 1)
    }

    fn write(&mut self, mut new: NewNode, like: Option<(Vec<OperandDimension>, Sharding)>) -> Expr {
        if self.error.is_some() {
            return self.push(nothing(new.at));
        }
        let aval = match ShapedArray::try_new(&new.shape, new.dtype) {
            Ok(aval) => aval,
            Err(why) => return self.fail(new.at, format!("{}: {why}", new.op.name())),
        };
        let ids: Vec<NodeId> = new.operands.iter().map(|expr| expr.id()).collect();
        let operands = ids.iter().map(|id| &self.nodes[*id]);
        let level = operands.clone().map(|node| node.level).max().unwrap_or(0);
        let mut shardings: Vec<Option<&Sharding>> =
            operands.map(|node| node.sharding.as_ref()).collect();
        if let Some((dims, sharding)) = &like {
            new.links.operands.push(dims.clone());
            shardings.push(Some(sharding));
        }
        let mesh = shardings
            .iter()
            .find_map(|sharding| sharding.and_then(Sharding::mesh));
        let inferred = mesh.map(|mesh| new.links.infer(mesh, &shardings, new.linearity));
        let (parts, sharding) = match inferred.transpose() {
            Ok(None) => (Vec::new(), None),
            Ok(Some(ComputedShardings {
                mut operands,
                results,
            })) => {
                operands.truncate(ids.len());
                (operands, results.into_iter().next())
            }
            Err(why) => {
                let why = self.conflict(&new, &why);
                return self.fail(new.at, why);
            }
        };
        // The division of a size that its result does not have evenly.
        if let Some(Err(why)) = sharding.as_ref().map(|it| it.layout(aval.shape())) {
            let why = format!("{}: {why}", new.op.name());
            return self.fail(new.at, why);
        }
        self.push(Node {
            op: new.op,
            operands: ids,
            aval,
            sharding,
            parts,
            level,
            at: new.at,
        })
    }

    /// Describes a conflict with the operands and their lines.
    fn conflict(&self, new: &NewNode, why: &dyn fmt::Display) -> String {
        let operand = |(index, expr): (usize, &Expr)| {
            let node = &self.nodes[expr.id()];
            let sharding = match &node.sharding {
                Some(sharding) => format!(" {}", placement(sharding)),
                None => String::new(),
            };
            format!("input {index} is {}{sharding} of {}", node.aval, node.at)
        };
        let operands: Vec<String> = new.operands.iter().enumerate().map(operand).collect();
        let it = if operands.len() == 1 {
            "it"
        } else {
            "one of them"
        };
        format!(
            "{}: {why}. {}. Move {it} before, by `.to(sharding)` or device_put",
            new.op.name(),
            operands.join(", ")
        )
    }
}

/// Formats a sharding without its mesh.
fn placement(sharding: &Sharding) -> String {
    let spec = sharding.spec().map_or_else(String::new, Spec::to_string);
    match sharding.unreduced_axes() {
        [] => spec,
        axes => format!("{spec} unreduced over {}", axes.join(", ")),
    }
}

/// Returns a node that stands for a value with an error.
fn nothing(at: &'static Location<'static>) -> Node {
    Node {
        op: Op::Constant(super::node::Scalar::Float(0.0)),
        operands: Vec::new(),
        aval: ShapedArray::new(&[], DType::F32),
        sharding: None,
        parts: Vec::new(),
        level: 0,
        at,
    }
}

/// Returns the mesh of a node, if it is on one.
pub(super) fn mesh_of(node: &Node) -> Option<&Mesh> {
    node.sharding.as_ref().and_then(Sharding::mesh)
}
