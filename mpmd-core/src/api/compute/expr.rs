//! Expressions: the values of a function that `compute` traces.

use std::marker::PhantomData;
use std::panic::Location;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{DimensionLinks, Linearity, OperandDimension, Sharding};

use super::node::{Binary, Comparison, Node, NodeId, Op, Scalar, Unary};
use super::trace::{self, NewNode, fail};

/// A value of a function that [`compute`](crate::Program::compute) traces: its shape, dtype and
/// sharding are known, its elements are not.
///
/// Operators and methods write new expressions. They compute elements as numpy does, with its
/// broadcasting; the operands of one operation need one dtype, and numbers take that of the other
/// operand. Methods that are given a dimension count negative ones from the end.
///
/// The sharding of each value follows from those of its operands:
///
/// - Dimensions that belong together are divided alike. Where one operand has a dimension whole and
///   another one divided, each device takes its part of the first.
/// - A sum or a product over a divided dimension gives a partial sum over its axes, as
///   [`Sharding::unreduced`] describes. Further sums and products keep it, all else needs
///   [`to`](Self::to) or a `device_put` first.
/// - All else is an error of the call, with both operands, their shardings and lines. Nothing is
///   moved silently.
///
/// The first error of an expression is that of the call, so no method returns a `Result`.
#[derive(Clone, Copy, Debug)]
pub struct Expr {
    trace: u64,
    id: NodeId,
    /// It belongs to a trace of its thread.
    of_thread: PhantomData<*const ()>,
}

impl Expr {
    pub(super) fn new(trace: u64, id: NodeId) -> Self {
        Self {
            trace,
            id,
            of_thread: PhantomData,
        }
    }

    pub(super) fn trace(self) -> u64 {
        self.trace
    }

    pub(super) fn id(self) -> NodeId {
        self.id
    }

    /// Returns the shape and the dtype.
    #[track_caller]
    pub fn aval(self) -> ShapedArray {
        self.node(Location::caller()).aval
    }

    /// Returns the shape.
    #[track_caller]
    pub fn shape(self) -> Vec<usize> {
        self.node(Location::caller()).aval.shape().to_vec()
    }

    /// Returns the dtype.
    #[track_caller]
    pub fn dtype(self) -> DType {
        self.node(Location::caller()).aval.dtype()
    }

    /// Returns the sharding. `None` for a value that is on no mesh: a host value, or one that is
    /// computed from such values alone.
    #[track_caller]
    pub fn sharding(self) -> Option<Sharding> {
        self.node(Location::caller()).sharding
    }

    pub(super) fn node(self, at: &'static Location<'static>) -> Node {
        trace::node(self, at)
    }

    /// Moves the value to another sharding, also of another mesh, as `device_put` does. The call is
    /// then several operations: one for each move, and those before and after it.
    #[track_caller]
    #[must_use]
    pub fn to(self, sharding: impl Into<Sharding>) -> Self {
        let at = Location::caller();
        let sharding = sharding.into();
        let node = self.node(at);
        if sharding.mesh().is_none() {
            return fail(
                at,
                format!("to: expected a sharding by a mesh, found {sharding}"),
            );
        }
        if let Err(why) = sharding.layout(node.aval.shape()) {
            return fail(at, format!("to: {why}"));
        }
        trace::write_move(Node {
            op: Op::Move,
            operands: vec![self.id],
            aval: node.aval,
            sharding: Some(sharding),
            parts: Vec::new(),
            level: node.level + 1,
            at,
        })
    }

    /// Converts the elements to another dtype, as `as` does. A boolean is 0 or 1, and a number is
    /// true if it is not 0.
    #[track_caller]
    #[must_use]
    pub fn cast(self, dtype: DType) -> Self {
        let at = Location::caller();
        let node = self.node(at);
        if let Err(why) = check_dtype(dtype) {
            return fail(at, why);
        }
        match node.aval.dtype() == dtype {
            true => self,
            false => self.elementwise(Op::Cast, dtype, Linearity::None, at),
        }
    }

    /// Returns the absolute values.
    #[track_caller]
    #[must_use]
    pub fn abs(self) -> Self {
        self.unary(Unary::Abs, Location::caller())
    }

    /// Returns e to the power of each element.
    #[track_caller]
    #[must_use]
    pub fn exp(self) -> Self {
        self.unary(Unary::Exp, Location::caller())
    }

    /// Returns the natural logarithms.
    #[track_caller]
    #[must_use]
    pub fn log(self) -> Self {
        self.unary(Unary::Log, Location::caller())
    }

    /// Returns the square roots.
    #[track_caller]
    #[must_use]
    pub fn sqrt(self) -> Self {
        self.unary(Unary::Sqrt, Location::caller())
    }

    /// Returns the sines.
    #[track_caller]
    #[must_use]
    pub fn sin(self) -> Self {
        self.unary(Unary::Sin, Location::caller())
    }

    /// Returns the cosines.
    #[track_caller]
    #[must_use]
    pub fn cos(self) -> Self {
        self.unary(Unary::Cos, Location::caller())
    }

    /// Returns the hyperbolic tangents.
    #[track_caller]
    #[must_use]
    pub fn tanh(self) -> Self {
        self.unary(Unary::Tanh, Location::caller())
    }

    /// Returns `1 / (1 + exp(-x))` of each element.
    #[track_caller]
    #[must_use]
    pub fn sigmoid(self) -> Self {
        self.unary(Unary::Sigmoid, Location::caller())
    }

    /// Returns the squares.
    #[track_caller]
    #[must_use]
    pub fn square(self) -> Self {
        self.binary(Binary::Mul, self, Location::caller())
    }

    /// Returns each element to the power of the other's. Whole numbers have no powers here: cast
    /// them.
    #[track_caller]
    #[must_use]
    pub fn pow(self, exponent: impl Operand) -> Self {
        let at = Location::caller();
        let exponent = exponent.beside(self, at);
        self.binary(Binary::Pow, exponent, at)
    }

    /// Returns the larger of two elements; a NaN if one is a NaN.
    #[track_caller]
    #[must_use]
    pub fn maximum(self, other: impl Operand) -> Self {
        let at = Location::caller();
        let other = other.beside(self, at);
        self.binary(Binary::Maximum, other, at)
    }

    /// Returns the smaller of two elements; a NaN if one is a NaN.
    #[track_caller]
    #[must_use]
    pub fn minimum(self, other: impl Operand) -> Self {
        let at = Location::caller();
        let other = other.beside(self, at);
        self.binary(Binary::Minimum, other, at)
    }

    /// Compares elements: `==`.
    #[track_caller]
    #[must_use]
    pub fn equal(self, other: impl Operand) -> Self {
        self.compare(Comparison::Equal, other, Location::caller())
    }

    /// Compares elements: `!=`.
    #[track_caller]
    #[must_use]
    pub fn not_equal(self, other: impl Operand) -> Self {
        self.compare(Comparison::NotEqual, other, Location::caller())
    }

    /// Compares elements: `<`.
    #[track_caller]
    #[must_use]
    pub fn less(self, other: impl Operand) -> Self {
        self.compare(Comparison::Less, other, Location::caller())
    }

    /// Compares elements: `<=`.
    #[track_caller]
    #[must_use]
    pub fn less_equal(self, other: impl Operand) -> Self {
        self.compare(Comparison::LessEqual, other, Location::caller())
    }

    /// Compares elements: `>`.
    #[track_caller]
    #[must_use]
    pub fn greater(self, other: impl Operand) -> Self {
        self.compare(Comparison::Greater, other, Location::caller())
    }

    /// Compares elements: `>=`.
    #[track_caller]
    #[must_use]
    pub fn greater_equal(self, other: impl Operand) -> Self {
        self.compare(Comparison::GreaterEqual, other, Location::caller())
    }

    /// Returns the elements of `yes` where this boolean is true, else those of `no`.
    #[track_caller]
    #[must_use]
    pub fn select(self, yes: Self, no: impl Operand) -> Self {
        let at = Location::caller();
        let no = no.beside(yes, at);
        let nodes = [self, yes, no].map(|expr| expr.node(at));
        if nodes[0].aval.dtype() != DType::Bool {
            return fail(
                at,
                format!("select: expected booleans, found {}", nodes[0].aval),
            );
        }
        if nodes[1].aval.dtype() != nodes[2].aval.dtype() {
            return fail(at, dtypes_differ("select", &nodes[1].aval, &nodes[2].aval));
        }
        let dtype = nodes[1].aval.dtype();
        broadcasting(Op::Select, &[self, yes, no], dtype, Linearity::None, at)
    }

    pub(super) fn unary(self, f: Unary, at: &'static Location<'static>) -> Self {
        let aval = self.node(at).aval;
        let dtype = aval.dtype();
        let fits = match f {
            Unary::Not => dtype == DType::Bool,
            Unary::Neg | Unary::Abs => dtype != DType::Bool,
            _ => is_float(dtype),
        };
        let op = Op::Unary(f);
        if !fits {
            return fail(
                at,
                format!("{} is not defined for {aval}: cast it", op.name()),
            );
        }
        let linearity = match f {
            Unary::Neg => Linearity::Joint,
            _ => Linearity::None,
        };
        self.elementwise(op, dtype, linearity, at)
    }

    /// Writes a function of one element.
    fn elementwise(
        self,
        op: Op,
        dtype: DType,
        linearity: Linearity,
        at: &'static Location<'static>,
    ) -> Self {
        broadcasting(op, &[self], dtype, linearity, at)
    }

    pub(super) fn binary(self, f: Binary, other: Self, at: &'static Location<'static>) -> Self {
        let (a, b) = (self.node(at).aval, other.node(at).aval);
        let op = Op::Binary(f);
        if a.dtype() != b.dtype() {
            return fail(at, dtypes_differ(&op.name(), &a, &b));
        }
        let dtype = a.dtype();
        let fits = match f {
            Binary::And | Binary::Or => dtype == DType::Bool,
            Binary::Div | Binary::Pow => is_float(dtype),
            _ => dtype != DType::Bool,
        };
        if !fits {
            return fail(at, format!("{} is not defined for {a}: cast it", op.name()));
        }
        let linearity = match f {
            Binary::Add | Binary::Sub => Linearity::Joint,
            Binary::Mul => Linearity::Each,
            Binary::Div => Linearity::First,
            _ => Linearity::None,
        };
        broadcasting(op, &[self, other], dtype, linearity, at)
    }

    fn compare(self, f: Comparison, other: impl Operand, at: &'static Location<'static>) -> Self {
        let other = other.beside(self, at);
        let (a, b) = (self.node(at).aval, other.node(at).aval);
        if a.dtype() != b.dtype() {
            return fail(at, dtypes_differ(&Op::Compare(f).name(), &a, &b));
        }
        broadcasting(
            Op::Compare(f),
            &[self, other],
            DType::Bool,
            Linearity::None,
            at,
        )
    }
}

/// The other operand of an operation: an [`Expr`] or a number, which takes the dtype of the first
/// operand.
pub trait Operand: sealed::Sealed {
    /// Returns the operand as an expression, beside one of the dtype that a number takes.
    #[doc(hidden)]
    fn beside(self, other: Expr, at: &'static Location<'static>) -> Expr;
}

impl Operand for Expr {
    fn beside(self, _: Expr, _: &'static Location<'static>) -> Expr {
        self
    }
}

macro_rules! number_operands {
    ($($number:ty: $scalar:ident)*) => {$(
        impl Operand for $number {
            fn beside(self, other: Expr, at: &'static Location<'static>) -> Expr {
                constant(Scalar::$scalar(self.into()), other.node(at).aval.dtype(), at)
            }
        }
    )*};
}

number_operands! { f32: Float f64: Float i32: Int i64: Int bool: Bool }

pub(super) mod sealed {
    pub trait Sealed {}

    impl Sealed for super::Expr {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
    impl Sealed for bool {}
}

/// Writes a number of this dtype. Fails if the dtype cannot hold it.
pub(super) fn constant(value: Scalar, dtype: DType, at: &'static Location<'static>) -> Expr {
    let in_range = |low: i64, high: i64, value: i64| (low..=high).contains(&value);
    let fits = match (value, dtype) {
        (Scalar::Bool(_), DType::Bool) | (Scalar::Float(_), DType::F32 | DType::F64) => true,
        (Scalar::Int(_), DType::F32 | DType::F64 | DType::I64) => true,
        (Scalar::Int(value), DType::I32) => in_range(i32::MIN.into(), i32::MAX.into(), value),
        (Scalar::Int(value), DType::U8) => in_range(0, u8::MAX.into(), value),
        (Scalar::Int(value), DType::U32) => in_range(0, u32::MAX.into(), value),
        _ => false,
    };
    if !fits {
        return fail(
            at,
            format!("a number: {value:?} beside an operand of {dtype}: cast that"),
        );
    }
    trace::write(NewNode {
        op: Op::Constant(value),
        operands: Vec::new(),
        shape: Vec::new(),
        dtype,
        links: DimensionLinks::default(),
        linearity: Linearity::None,
        at,
    })
}

/// Writes a function of the elements at one index, with numpy's broadcasting of the operands.
pub(super) fn broadcasting(
    op: Op,
    operands: &[Expr],
    dtype: DType,
    linearity: Linearity,
    at: &'static Location<'static>,
) -> Expr {
    let avals: Vec<ShapedArray> = operands.iter().map(|expr| expr.node(at).aval).collect();
    let Some(shape) = common_shape(&avals) else {
        let shapes: Vec<String> = avals.iter().map(ToString::to_string).collect();
        let why = format!("the shapes of {} do not fit together", shapes.join(" and "));
        return fail(at, format!("{}: {why}", op.name()));
    };
    let rank = shape.len();
    let links = avals.iter().map(|aval| {
        let first = rank - aval.ndim();
        let dims = aval.shape().iter().enumerate();
        dims.map(|(dim, size)| match *size == shape[first + dim] {
            true => OperandDimension::Linked(first + dim),
            false => OperandDimension::Whole,
        })
        .collect()
    });
    let links = DimensionLinks {
        operands: links.collect(),
        results: vec![(0..rank).map(Some).collect()],
    };
    trace::write(NewNode {
        op,
        operands: operands.to_vec(),
        shape,
        dtype,
        links,
        linearity,
        at,
    })
}

/// Returns the shape to which numpy broadcasts arrays. `None` if there is none.
pub(super) fn common_shape(avals: &[ShapedArray]) -> Option<Vec<usize>> {
    let rank = avals.iter().map(ShapedArray::ndim).max()?;
    let mut shape = vec![1; rank];
    for aval in avals {
        let first = rank - aval.ndim();
        for (common, size) in shape[first..].iter_mut().zip(aval.shape()) {
            match (*common, *size) {
                (same, size) if same == size => {}
                (_, 1) => {}
                (1, size) => *common = size,
                _ => return None,
            }
        }
    }
    Some(shape)
}

pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64)
}

/// Returns the reason if functions cannot compute with a dtype.
pub(super) fn check_dtype(dtype: DType) -> Result<(), String> {
    match dtype {
        DType::Bool
        | DType::I32
        | DType::I64
        | DType::U8
        | DType::U32
        | DType::F32
        | DType::F64 => Ok(()),
        other => Err(format!(
            "compute has the dtypes bool, i32, i64, u8, u32, f32 and f64, and not {other}"
        )),
    }
}

pub(super) fn dtypes_differ(name: &str, a: &ShapedArray, b: &ShapedArray) -> String {
    format!("{name}: the dtypes of {a} and {b} differ: cast one of them")
}
