//! The nodes of a traced function.

use std::panic::Location;

use mpmd_layout::aval::ShapedArray;
use mpmd_layout::random::Key;
use mpmd_layout::sharding::Sharding;

/// The index of a node in its trace.
pub(super) type NodeId = usize;

/// A number that is written in a function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scalar {
    Bool(bool),
    Int(i64),
    Float(f64),
}

/// A function of one element.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Unary {
    Neg,
    Abs,
    Not,
    Exp,
    Log,
    Sqrt,
    Sin,
    Cos,
    Tanh,
    Sigmoid,
}

/// A function of two elements of one dtype.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Maximum,
    Minimum,
    And,
    Or,
}

/// A comparison of two elements of one dtype.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// The reduction of dimensions to one element.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reduction {
    Sum,
    Max,
    Min,
    Any,
    All,
}

/// The distribution of random numbers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Distribution {
    Uniform,
    Normal,
}

/// The dimensions of a product of two arrays, summed over those that the result lacks. Letters
/// stand for dimensions.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Contraction {
    pub(super) operands: [Vec<char>; 2],
    pub(super) result: Vec<char>,
}

/// The computation of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    /// The input with this index.
    Input(usize),
    Constant(Scalar),
    Random(Key, Distribution),
    Unary(Unary),
    Cast,
    Binary(Binary),
    Compare(Comparison),
    /// Operands: a condition, and the values where it is true and false.
    Select,
    /// Reduces these dimensions, ascending. The result keeps them with size 1 if `keeps` is true.
    Reduce {
        reduction: Reduction,
        dims: Vec<usize>,
        keeps: bool,
    },
    ArgMax {
        dim: usize,
    },
    Contract(Contraction),
    /// Dimension `i` of the result is dimension `order[i]` of the operand.
    Transpose(Vec<usize>),
    Reshape,
    /// Repeats dimensions of size 1, and puts dimensions in front.
    Broadcast,
    Slice {
        dim: usize,
        start: usize,
    },
    Pad {
        dim: usize,
        before: usize,
        value: Scalar,
    },
    Concatenate {
        dim: usize,
    },
    /// Takes the elements of dimension `dim` at the indices of the second operand.
    Take {
        dim: usize,
    },
    /// Takes along dimension `dim` the elements at the indices of the second operand, which has one
    /// for each element of the result.
    TakeAlong {
        dim: usize,
    },
    /// Sums the elements of the first operand, each into the index along `dim` that the element of
    /// the second operand at its place is.
    SumAlong {
        dim: usize,
    },
    /// Sums the parts of the first operand, at the dimensions from `dim` on that the second operand
    /// has, into the one that its element there names.
    SegmentSum {
        dim: usize,
    },
    /// 1 at the index that each element is, along a new last dimension.
    OneHot,
    /// The operand, without its gradient.
    StopGradient,
    /// Moves the operand to the node's sharding.
    Move,
}

impl Op {
    /// Returns the name for messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Unary(f) => format!("{f:?}").to_lowercase(),
            Self::Binary(f) => format!("{f:?}").to_lowercase(),
            Self::Compare(f) => format!("{f:?}").to_lowercase(),
            Self::Reduce { reduction, .. } => format!("{reduction:?}").to_lowercase(),
            Self::Contract(_) => "matmul or einsum".to_owned(),
            Self::Slice { .. } => "slice".to_owned(),
            Self::Pad { .. } => "pad".to_owned(),
            Self::Concatenate { .. } => "concatenate".to_owned(),
            Self::Take { .. } => "take".to_owned(),
            Self::TakeAlong { .. } | Self::SumAlong { .. } => "take_along".to_owned(),
            Self::SegmentSum { .. } => "segment_sum".to_owned(),
            Self::ArgMax { .. } => "argmax".to_owned(),
            Self::Transpose(_) => "transpose".to_owned(),
            Self::OneHot => "one_hot".to_owned(),
            other => format!("{other:?}").to_lowercase(),
        }
    }
}

/// One value of a traced function.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) op: Op,
    pub(super) operands: Vec<NodeId>,
    pub(super) aval: ShapedArray,
    /// The sharding by a mesh. `None` for a value that no device holds yet: a host value, a number,
    /// or one that is computed from these alone.
    pub(super) sharding: Option<Sharding>,
    /// The shardings of the parts of the operands that each device computes with. Empty if
    /// `sharding` is `None`: then all are whole.
    pub(super) parts: Vec<Sharding>,
    /// Number of moves on the way from the inputs to this node, at most.
    pub(super) level: usize,
    /// The line of the program that has written this node.
    pub(super) at: &'static Location<'static>,
}
