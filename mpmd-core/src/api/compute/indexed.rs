//! Methods that choose or sum elements by indices.

use std::panic::Location;

use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{DimensionLinks, Linearity, OperandDimension};

use super::dims::dim;
use super::expr::{Expr, check_dtype};
use super::node::Op;
use super::trace::{self, NewNode, fail};

impl Expr {
    /// Takes the elements of a dimension at these indices, which are i32 or i64. The dimensions of
    /// the indices replace it. It may not be divided; the indices may. An index beyond it is that
    /// of its last element, and a negative one that of its first.
    #[track_caller]
    #[must_use]
    pub fn take(self, along: isize, indices: Self) -> Self {
        let at = Location::caller();
        let (aval, chosen) = (self.node(at).aval, indices.node(at).aval);
        let along = match taken_dimension(&aval, along, &chosen) {
            Ok(along) => along,
            Err(why) => return fail(at, format!("take: {why}")),
        };
        let rank = aval.ndim();
        let of_indices: Vec<usize> = (rank..rank + chosen.ndim()).collect();
        let linked = |dim| match dim == along {
            true => OperandDimension::Whole,
            false => OperandDimension::Linked(dim),
        };
        let result = (0..along)
            .chain(of_indices.iter().copied())
            .chain(along + 1..rank);
        let links = DimensionLinks {
            operands: vec![
                (0..rank).map(linked).collect(),
                of_indices
                    .iter()
                    .map(|of| OperandDimension::Linked(*of))
                    .collect(),
            ],
            results: vec![result.map(Some).collect()],
        };
        let shape = [
            &aval.shape()[..along],
            chosen.shape(),
            &aval.shape()[along + 1..],
        ]
        .concat();
        trace::write(NewNode {
            op: Op::Take { dim: along },
            operands: vec![self, indices],
            shape,
            dtype: aval.dtype(),
            links,
            linearity: Linearity::First,
            at,
        })
    }

    /// Takes along a dimension the element at each of these indices, which are i32 or i64: the
    /// result has the shape of the indices, whose other dimensions are those of this array. The
    /// dimension may not be divided. An index beyond it is that of its last element, and a negative
    /// one that of its first.
    #[track_caller]
    #[must_use]
    pub fn take_along(self, along: isize, indices: Self) -> Self {
        let at = Location::caller();
        let (aval, chosen) = (self.node(at).aval, indices.node(at).aval);
        let along = match taken_dimension(&aval, along, &chosen) {
            Ok(along) => along,
            Err(why) => return fail(at, format!("take_along: {why}")),
        };
        let is_same = |dim: usize| dim == along || aval.shape()[dim] == chosen.shape()[dim];
        if aval.ndim() != chosen.ndim() || !(0..aval.ndim()).all(is_same) {
            let why = format!("{aval} and {chosen} differ in more than dimension {along}");
            return fail(at, format!("take_along: {why}"));
        }
        let count = chosen.shape()[along];
        let op = Op::TakeAlong { dim: along };
        along_dimension(op, [self, indices], along, count, at)
    }

    /// Sums the elements along a dimension, each into the index that the element of `indices` at
    /// its place is: the derivative of [`take_along`](Self::take_along). The result has `count`
    /// indices.
    pub(super) fn sum_along(
        self,
        along: usize,
        indices: Self,
        count: usize,
        at: &'static Location<'static>,
    ) -> Self {
        let op = Op::SumAlong { dim: along };
        along_dimension(op, [self, indices], along, count, at)
    }

    /// Sums parts of the array by segment. The dimensions from `along` on that `segments` has are
    /// replaced by one of size `count`: what stands at an index of them is added to the segment
    /// that the element of `segments` names, an i32 or i64. A number that is no segment's leaves
    /// its part out. Over divided segments it is a partial sum.
    #[track_caller]
    #[must_use]
    pub fn segment_sum(self, along: isize, segments: Self, count: usize) -> Self {
        let at = Location::caller();
        let (aval, chosen) = (self.node(at).aval, segments.node(at).aval);
        let rank = aval.ndim();
        // Without segments' dimensions, the new one may also stand behind the last.
        let places = rank + usize::from(chosen.ndim() == 0);
        let along = match dim(along, places) {
            Ok(along) => along,
            Err(why) => return fail(at, format!("segment_sum: {why}")),
        };
        let behind = along + chosen.ndim();
        if behind > rank || aval.shape()[along..behind] != *chosen.shape() {
            let why = format!("{chosen} does not fit the dimensions from {along} on of {aval}");
            return fail(at, format!("segment_sum: {why}"));
        }
        if let Err(why) = check_indices(&chosen) {
            return fail(at, format!("segment_sum: {why}"));
        }
        if aval.dtype() == DType::Bool {
            return fail(
                at,
                format!("segment_sum is not defined for {aval}: cast it"),
            );
        }
        let (before, after) = (0..along, behind..rank);
        let result = before.clone().map(Some).chain([None]);
        let links = DimensionLinks {
            operands: vec![
                (0..rank).map(OperandDimension::Linked).collect(),
                (along..behind).map(OperandDimension::Linked).collect(),
            ],
            results: vec![result.chain(after.clone().map(Some)).collect()],
        };
        let shape = [&aval.shape()[before], &[count], &aval.shape()[after]].concat();
        trace::write(NewNode {
            op: Op::SegmentSum { dim: along },
            operands: vec![self, segments],
            shape,
            dtype: aval.dtype(),
            links,
            linearity: Linearity::First,
            at,
        })
    }

    /// Returns for each whole number `i` a row of `classes` elements with 1 at index `i` and 0
    /// elsewhere, along a new last dimension. A number that is no index has zeros alone.
    #[track_caller]
    #[must_use]
    pub fn one_hot(self, classes: usize, dtype: DType) -> Self {
        let at = Location::caller();
        let aval = self.node(at).aval;
        if let Err(why) = check_indices(&aval) {
            return fail(at, format!("one_hot: {why}"));
        }
        if let Err(why) = check_dtype(dtype) {
            return fail(at, why);
        }
        let rank = aval.ndim();
        trace::write(NewNode {
            op: Op::OneHot,
            operands: vec![self],
            shape: [aval.shape(), &[classes]].concat(),
            dtype,
            links: DimensionLinks {
                operands: vec![(0..rank).map(OperandDimension::Linked).collect()],
                results: vec![(0..rank).map(Some).chain([None]).collect()],
            },
            linearity: Linearity::None,
            at,
        })
    }
}

/// Returns the dimension of an array from which elements are taken at these indices.
fn taken_dimension(
    aval: &ShapedArray,
    along: isize,
    indices: &ShapedArray,
) -> Result<usize, String> {
    let along = dim(along, aval.ndim())?;
    check_indices(indices)?;
    match aval.shape()[along] == 0 && indices.elements() > 0 {
        true => Err(format!("dimension {along} of {aval} has no elements")),
        false => Ok(along),
    }
}

/// Returns the reason if the elements of an array are no indices.
fn check_indices(aval: &ShapedArray) -> Result<(), String> {
    match aval.dtype() {
        DType::I32 | DType::I64 => Ok(()),
        _ => Err(format!("expected indices of i32 or i64, found {aval}")),
    }
}

/// Writes a node of an array and its indices. Their dimensions are the same but for `along`, where
/// the result has the size `count`.
fn along_dimension(
    op: Op,
    operands: [Expr; 2],
    along: usize,
    count: usize,
    at: &'static Location<'static>,
) -> Expr {
    let aval = operands[0].node(at).aval;
    let rank = aval.ndim();
    let is_take = matches!(op, Op::TakeAlong { .. });
    // The number of the dimension along which the elements are chosen, in the indices.
    let linked = |dim: usize| OperandDimension::Linked(if dim == along { rank } else { dim });
    let chosen_from = |dim: usize| match dim == along && is_take {
        true => OperandDimension::Whole,
        false => linked(dim),
    };
    let result = |dim: usize| match dim == along {
        true => Some(rank).filter(|_| is_take),
        false => Some(dim),
    };
    let mut shape = aval.shape().to_vec();
    match shape.get_mut(along) {
        Some(size) => *size = count,
        // A value with an error has no dimensions.
        None => return operands[0],
    }
    trace::write(NewNode {
        op,
        operands: operands.to_vec(),
        shape,
        dtype: aval.dtype(),
        links: DimensionLinks {
            operands: vec![
                (0..rank).map(chosen_from).collect(),
                (0..rank).map(linked).collect(),
            ],
            results: vec![(0..rank).map(result).collect()],
        },
        linearity: Linearity::First,
        at,
    })
}
