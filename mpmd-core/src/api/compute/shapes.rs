//! Methods that change the shape of an expression, or choose elements.

use std::ops::Range;
use std::panic::Location;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{DimensionLinks, Linearity, OperandDimension, Sharding};

use super::dims::dim;
use super::expr::{Expr, Operand, check_dtype, constant, dtypes_differ};
use super::node::{Node, Op, Scalar};
use super::reshaped::reshaped;
use super::trace::{self, NewNode, fail};

impl Expr {
    /// Returns the array with its dimensions in this order: dimension `i` of the result is
    /// dimension `order[i]` of this one.
    #[track_caller]
    #[must_use]
    pub fn transpose(self, order: &[isize]) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        let rank = aval.ndim();
        let dims: Result<Vec<usize>, String> = order.iter().map(|at| dim(*at, rank)).collect();
        let is_order = |dims: &Vec<usize>| (0..rank).all(|dim| dims.contains(&dim));
        let dims = match dims {
            Ok(dims) if dims.len() == rank && is_order(&dims) => dims,
            Ok(_) => {
                let why = format!("expected each dimension of {aval} once, found {order:?}");
                return fail(at, format!("transpose: {why}"));
            }
            Err(why) => return fail(at, format!("transpose: {why}")),
        };
        trace::write(NewNode {
            operands: vec![self],
            shape: dims.iter().map(|dim| aval.shape()[*dim]).collect(),
            dtype: aval.dtype(),
            links: DimensionLinks {
                operands: vec![(0..rank).map(OperandDimension::Linked).collect()],
                results: vec![dims.iter().copied().map(Some).collect()],
            },
            op: Op::Transpose(dims),
            linearity: Linearity::Joint,
            at,
        })
    }

    /// Returns the array with its last two dimensions exchanged.
    #[track_caller]
    #[must_use]
    pub fn t(self) -> Self {
        let at = Location::caller();
        let rank = self.node(at).aval.ndim();
        if rank < 2 {
            return fail(at, format!("t: expected two dimensions, found {rank}"));
        }
        let mut order: Vec<isize> = (0..rank.cast_signed()).collect();
        order.swap(rank - 1, rank - 2);
        self.transpose(&order)
    }

    /// Returns the elements in the same order with another shape. Dimensions that keep their size
    /// stay divided; of those that are joined or parted only the first may be.
    #[track_caller]
    #[must_use]
    pub fn reshape(self, shape: &[usize]) -> Self {
        let at = Location::caller();
        let node = self.node(at);
        if node.aval.shape() == shape {
            return self;
        }
        let aval = match ShapedArray::try_new(shape, node.aval.dtype()) {
            Ok(aval) if aval.elements() == node.aval.elements() => aval,
            Ok(aval) => {
                let why = format!("{} has other elements than {aval}", node.aval);
                return fail(at, format!("reshape: {why}"));
            }
            Err(why) => return fail(at, format!("reshape: {why}")),
        };
        let sharding = match &node.sharding {
            None => None,
            Some(sharding) => match reshaped(node.aval.shape(), shape, sharding) {
                Ok(sharding) => Some(sharding),
                Err(why) => {
                    let from = &node.aval;
                    return fail(at, format!("reshape of {from} to {shape:?}: {why}"));
                }
            },
        };
        let parts = node.sharding.into_iter().collect();
        trace::write_placed(Node {
            op: Op::Reshape,
            operands: vec![self.id()],
            aval,
            sharding,
            parts,
            level: node.level,
            at,
        })
    }

    /// Returns the array with a dimension of size 1 in front of dimension `before`, or behind the
    /// last one.
    #[track_caller]
    #[must_use]
    pub fn expand(self, before: isize) -> Self {
        let at = Location::caller();
        let shape = self.node(at).aval.shape().to_vec();
        match dim(before, shape.len() + 1) {
            Err(_) => {
                let rank = shape.len();
                fail(
                    at,
                    format!("expand: {before} is no place among {rank} dimensions"),
                )
            }
            Ok(before) => {
                let mut shape = shape;
                shape.insert(before, 1);
                self.reshape(&shape)
            }
        }
    }

    /// Repeats dimensions of size 1 to this shape, and puts further dimensions in front.
    #[track_caller]
    #[must_use]
    pub fn broadcast_to(self, shape: &[usize]) -> Self {
        let at = Location::caller();
        repeated(self, shape, None, at)
    }

    /// Returns the elements in a range of a dimension, which may not be divided.
    #[track_caller]
    #[must_use]
    pub fn slice(self, along: isize, range: Range<usize>) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        let along = match dim(along, aval.ndim()) {
            Ok(along) => along,
            Err(why) => return fail(at, format!("slice: {why}")),
        };
        if range.start > range.end || range.end > aval.shape()[along] {
            let why = format!("{range:?} is no part of dimension {along} of {aval}");
            return fail(at, format!("slice: {why}"));
        }
        let op = Op::Slice {
            dim: along,
            start: range.start,
        };
        resized(op, &[self], along, range.len(), Linearity::Joint, at)
    }

    /// Returns parts of these sizes one behind the other along a dimension, which may not be
    /// divided. The sizes add up to that of the dimension.
    #[track_caller]
    #[must_use]
    pub fn split(self, along: isize, sizes: &[usize]) -> Vec<Self> {
        let at = Location::caller();
        let aval = self.node(at).aval;
        let sum = sizes
            .iter()
            .fold(0usize, |sum, size| sum.saturating_add(*size));
        let why = match dim(along, aval.ndim()) {
            Ok(along) if sum == aval.shape()[along] => None,
            Ok(along) => Some(format!(
                "the sizes {sizes:?} do not add up to dimension {along} of {aval}"
            )),
            Err(why) => Some(why),
        };
        if let Some(why) = why {
            return vec![fail(at, format!("split: {why}")); sizes.len()];
        }
        let mut start = 0;
        let part = |size: &usize| {
            let range = start..start + size;
            start = range.end;
            self.slice(along, range)
        };
        sizes.iter().map(part).collect()
    }

    /// Puts `before` elements in front of those along a dimension and `after` behind, all with this
    /// value. The dimension may not be divided.
    #[track_caller]
    #[must_use]
    pub fn pad(self, along: isize, before: usize, after: usize, value: impl Operand) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        let along = match dim(along, aval.ndim()) {
            Ok(along) => along,
            Err(why) => return fail(at, format!("pad: {why}")),
        };
        let value = value.beside(self, at).node(at);
        if value.aval.dtype() != aval.dtype() {
            return fail(at, dtypes_differ("pad", &aval, &value.aval));
        }
        let Op::Constant(value) = value.op else {
            return fail(at, "pad: expected a number as the value");
        };
        let size = before.checked_add(after);
        let Some(size) = size.and_then(|both| both.checked_add(aval.shape()[along])) else {
            return fail(at, "pad: the dimension is too long");
        };
        // Zeros of each summand are those of the sum.
        let linearity = match value {
            Scalar::Int(0) | Scalar::Float(0.0) => Linearity::Joint,
            _ => Linearity::None,
        };
        let op = Op::Pad {
            dim: along,
            before,
            value,
        };
        resized(op, &[self], along, size, linearity, at)
    }

    /// Returns an array of this shape and dtype in which each element is `value`. It has no
    /// sharding of its own, but follows the operands with which it is used.
    #[track_caller]
    #[must_use]
    pub fn filled_like(self, value: impl Operand) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        let value = value.beside(self, at);
        let own = value.node(at).aval;
        match own.dtype() == aval.dtype() {
            true => value.broadcast_to(aval.shape()),
            false => fail(at, dtypes_differ("filled_like", &aval, &own)),
        }
    }
}

/// Repeats an array to this shape. Its sharding follows also from that of `like`, an array of this
/// shape.
pub(super) fn repeated(
    x: Expr,
    shape: &[usize],
    like: Option<Sharding>,
    at: &'static Location<'static>,
) -> Expr {
    let aval = x.node(at).aval;
    let first = shape.len().checked_sub(aval.ndim());
    let fits = |first: &usize| {
        let mut pairs = aval.shape().iter().zip(&shape[*first..]);
        pairs.all(|(own, new)| own == new || *own == 1)
    };
    let Some(first) = first.filter(fits) else {
        return fail(at, format!("broadcast_to: {aval} does not fit {shape:?}"));
    };
    let own = aval.shape().iter().enumerate();
    let linked = own.map(|(dim, size)| match *size == shape[first + dim] {
        true => OperandDimension::Linked(first + dim),
        false => OperandDimension::Whole,
    });
    let all = 0..shape.len();
    let new = NewNode {
        op: Op::Broadcast,
        operands: vec![x],
        shape: shape.to_vec(),
        dtype: aval.dtype(),
        links: DimensionLinks {
            operands: vec![linked.collect()],
            results: vec![all.clone().map(Some).collect()],
        },
        linearity: Linearity::Joint,
        at,
    };
    let like = like.map(|like| (all.map(OperandDimension::Linked).collect(), like));
    trace::write_like(new, like)
}

/// Returns the arrays one behind the other along a dimension, which may not be divided.
#[track_caller]
#[must_use]
pub fn concatenate(arrays: &[Expr], along: isize) -> Expr {
    let at = Location::caller();
    let Some(first) = arrays.first() else {
        return fail(at, "concatenate: expected an array, found none");
    };
    let aval = first.node(at).aval;
    let along = match dim(along, aval.ndim()) {
        Ok(along) => along,
        Err(why) => return fail(at, format!("concatenate: {why}")),
    };
    // A size that is too large is refused with the shape.
    let mut size = 0usize;
    for array in arrays {
        let other = array.node(at).aval;
        if other.dtype() != aval.dtype() {
            return fail(at, dtypes_differ("concatenate", &aval, &other));
        }
        let is_same = |dim: usize| dim == along || other.shape()[dim] == aval.shape()[dim];
        if other.ndim() != aval.ndim() || !(0..aval.ndim()).all(is_same) {
            let why = format!("{aval} and {other} differ in more than dimension {along}");
            return fail(at, format!("concatenate: {why}"));
        }
        size = other.shape()[along].saturating_add(size);
    }
    let op = Op::Concatenate { dim: along };
    resized(op, arrays, along, size, Linearity::Joint, at)
}

/// Returns a number as an expression of this dtype.
#[track_caller]
#[must_use]
pub fn number(value: f64, dtype: DType) -> Expr {
    let at = Location::caller();
    if let Err(why) = check_dtype(dtype) {
        return fail(at, why);
    }
    match dtype {
        DType::F32 | DType::F64 => constant(Scalar::Float(value), dtype, at),
        DType::Bool if value == 0.0 || value == 1.0 => {
            constant(Scalar::Bool(value == 1.0), dtype, at)
        }
        dtype if value.fract() == 0.0 && value.abs() < 2f64.powi(53) => {
            constant(Scalar::Int(value as i64), dtype, at)
        }
        dtype => {
            let why = format!("expected a whole number below 2^53 for {dtype}, found {value}");
            fail(at, format!("number: {why}"))
        }
    }
}

/// Writes a node whose operands have the same dimensions as the result, except for `along`, which
/// has another size in each.
fn resized(
    op: Op,
    operands: &[Expr],
    along: usize,
    size: usize,
    linearity: Linearity,
    at: &'static Location<'static>,
) -> Expr {
    let Some(aval) = operands.first().map(|expr| expr.node(at).aval) else {
        return fail(at, "expected an array");
    };
    let mut shape = aval.shape().to_vec();
    shape[along] = size;
    let linked = |dim| match dim == along {
        true => OperandDimension::Whole,
        false => OperandDimension::Linked(dim),
    };
    let operand = |_: &Expr| (0..shape.len()).map(linked).collect();
    let links = DimensionLinks {
        operands: operands.iter().map(operand).collect(),
        results: vec![
            (0..shape.len())
                .map(|dim| Some(dim).filter(|dim| *dim != along))
                .collect(),
        ],
    };
    trace::write(NewNode {
        op,
        operands: operands.to_vec(),
        shape,
        dtype: aval.dtype(),
        links,
        linearity,
        at,
    })
}
