//! Changes of shape: other orders of dimensions, parts of them, and arrays one behind the other.

use super::block::{Block, for_dtype, for_rows, offset};
use super::elements::filled;
use crate::api::compute::node::Scalar;
use crate::error::Result;

/// Returns the block with its dimensions in another order: dimension `i` of the result is dimension
/// `order[i]`.
pub(super) fn transpose(order: &[usize], x: &Block<'_>) -> Result<Block<'static>> {
    let shape: Vec<usize> = order.iter().map(|dim| x.shape[*dim]).collect();
    for_dtype!(x.dtype(), T => {
        let list = x.list::<T>()?;
        if order.is_sorted() {
            return Ok(Block::new(&shape, list.to_vec()));
        }
        let mut strides = vec![1; x.shape.len()];
        for dim in (1..x.shape.len()).rev() {
            strides[dim - 1] = strides[dim] * x.shape[dim];
        }
        let strides: Vec<usize> = order.iter().map(|dim| strides[*dim]).collect();
        let (len, stride) = (shape[shape.len() - 1], strides[strides.len() - 1]);
        let mut moved = Vec::with_capacity(list.len());
        for_rows(&shape, |at| {
            let start: usize = at.iter().zip(&strides).map(|(at, stride)| at * stride).sum();
            moved.extend((0..len).map(|i| list[start + i * stride]));
        });
        Ok(Block::new(&shape, moved))
    })
}

/// Returns the block with another shape of equally many elements.
pub(super) fn reshape(x: &Block<'_>, shape: &[usize]) -> Result<Block<'static>> {
    for_dtype!(x.dtype(), T => Ok(Block::new(shape, x.list::<T>()?.to_vec())))
}

/// Returns the elements of a dimension from index `start` on, as many as `shape` has.
pub(super) fn slice(
    dim: usize,
    start: usize,
    x: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    for_dtype!(x.dtype(), T => {
        let list = x.list::<T>()?;
        let inner: usize = shape[dim + 1..].iter().product();
        let outer: usize = shape[..dim].iter().product();
        let mut part = Vec::with_capacity(shape.iter().product());
        for before in 0..outer {
            let at = offset(&[outer, x.shape[dim], inner], [before, start, 0].into_iter());
            part.extend_from_slice(&list[at..at + shape[dim] * inner]);
        }
        Ok(Block::new(shape, part))
    })
}

/// Returns a block of this shape filled with `value`, in which `x` begins at index `before` of a
/// dimension.
pub(super) fn pad(
    dim: usize,
    before: usize,
    value: Scalar,
    x: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    let mut sizes = shape.to_vec();
    sizes[dim] = before;
    let front = filled(&sizes, x.dtype(), value)?;
    sizes[dim] = shape[dim] - before - x.shape[dim];
    let back = filled(&sizes, x.dtype(), value)?;
    concatenate(dim, &[&front, x, &back], shape)
}

/// Returns blocks one behind the other along a dimension.
pub(super) fn concatenate(
    dim: usize,
    blocks: &[&Block<'_>],
    shape: &[usize],
) -> Result<Block<'static>> {
    let Some(first) = blocks.first() else {
        return filled(shape, mpmd_layout::aval::DType::F32, Scalar::Float(0.0));
    };
    for_dtype!(first.dtype(), T => {
        let lists = blocks.iter().map(|block| block.list::<T>());
        let lists = lists.collect::<Result<Vec<_>>>()?;
        let outer: usize = shape[..dim].iter().product();
        let mut all = Vec::with_capacity(shape.iter().product());
        for before in 0..outer {
            for (block, list) in blocks.iter().zip(&lists) {
                let len: usize = block.shape[dim..].iter().product();
                all.extend_from_slice(&list[before * len..(before + 1) * len]);
            }
        }
        Ok(Block::new(shape, all))
    })
}
