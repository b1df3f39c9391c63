//! Reductions of dimensions.
//!
//! Sums of f32 are made in f64, in the order of the elements, and rounded once.

use mpmd_layout::aval::DType;

use super::block::{Block, Held};
use super::elements::{Number, for_number};
use crate::api::compute::node::Reduction;
use crate::error::Result;

/// Reduces the dimensions `dims` of a block to a block of this shape.
pub(super) fn reduce(
    reduction: Reduction,
    dims: &[usize],
    x: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    match (reduction, x.dtype()) {
        (Reduction::Any, _) => fold(x, dims, shape, false, |any, x: bool| any || x, |any| any),
        (Reduction::All, _) => fold(x, dims, shape, true, |all, x: bool| all && x, |all| all),
        (Reduction::Sum, DType::F32) => fold(
            x,
            dims,
            shape,
            0.0,
            |sum: f64, x: f32| sum + f64::from(x),
            |sum| sum as f32,
        ),
        (Reduction::Sum, DType::F64) => fold(x, dims, shape, 0.0, |sum, x: f64| sum + x, |sum| sum),
        (Reduction::Sum, dtype) => for_number!(dtype, T => {
            fold(x, dims, shape, T::default(), T::plus, |sum| sum)
        }),
        (Reduction::Max, dtype) => for_number!(dtype, T => {
            extreme(x, dims, shape, T::larger)
        }),
        (Reduction::Min, dtype) => for_number!(dtype, T => {
            extreme(x, dims, shape, T::smaller)
        }),
    }
}

/// Returns the extreme elements. No reduced dimension is empty: the trace refuses it.
fn extreme<T: Number>(
    x: &Block<'_>,
    dims: &[usize],
    shape: &[usize],
    choose: impl Fn(T, T) -> T,
) -> Result<Block<'static>> {
    let choose = |best: Option<T>, x: T| Some(best.map_or(x, |best| choose(best, x)));
    fold(x, dims, shape, None, choose, Option::unwrap_or_default)
}

/// Folds the elements along the reduced dimensions, in order. `start` is the value before the first
/// one, and `end` makes the result of the last.
fn fold<T: Held, A: Copy, R: Held>(
    x: &Block<'_>,
    dims: &[usize],
    shape: &[usize],
    start: A,
    step: impl Fn(A, T) -> A,
    end: impl Fn(A) -> R,
) -> Result<Block<'static>> {
    let list = x.list::<T>()?;
    let mut folded = vec![start; shape.iter().product()];
    let strides = strides_of_result(&x.shape, dims);
    let Some((len, stride)) = x.shape.last().copied().zip(strides.last().copied()) else {
        let value = list.iter().fold(start, |value, x| step(value, *x));
        return Ok(Block::new(shape, vec![end(value)]));
    };
    for_each_row(&x.shape, &strides, |row, at| {
        let elements = &list[row * len..(row + 1) * len];
        match stride {
            0 => folded[at] = elements.iter().fold(folded[at], |value, x| step(value, *x)),
            _ => {
                let into = &mut folded[at..at + len];
                into.iter_mut()
                    .zip(elements)
                    .for_each(|(into, x)| *into = step(*into, *x));
            }
        }
    });
    Ok(Block::new(shape, folded.into_iter().map(end).collect()))
}

/// Returns for each dimension of an operand its stride in the result, which is 0 for a reduced one.
fn strides_of_result(shape: &[usize], dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut stride = 1;
    for dim in (0..shape.len()).rev() {
        if !dims.contains(&dim) {
            strides[dim] = stride;
            stride *= shape[dim];
        }
    }
    strides
}

/// Calls `f` with (the number of each row, the place in the result of its first element).
fn for_each_row(shape: &[usize], strides: &[usize], mut f: impl FnMut(usize, usize)) {
    let mut number = 0;
    super::block::for_rows(shape, |at| {
        f(
            number,
            at.iter().zip(strides).map(|(at, stride)| at * stride).sum(),
        );
        number += 1;
    });
}

/// Returns the index of the first largest element along a dimension. A NaN is the largest.
pub(super) fn argmax(dim: usize, x: &Block<'_>, shape: &[usize]) -> Result<Block<'static>> {
    let inner: usize = x.shape[dim + 1..].iter().product();
    let len = x.shape[dim];
    for_number!(x.dtype(), T => {
        let list = x.list::<T>()?;
        let index = |place: usize| {
            let first = place / inner.max(1) * len * inner + place % inner.max(1);
            let mut best = 0;
            for at in 1..len {
                let (x, of_best) = (list[first + at * inner], list[first + best * inner]);
                if !of_best.is_nan() && (x > of_best || x.is_nan()) {
                    best = at;
                }
            }
            best as i32
        };
        let count: usize = shape.iter().product();
        Ok(Block::new(shape, (0..count).map(index).collect()))
    })
}
