//! Products of two arrays, summed over the dimensions that the result lacks.
//!
//! Both operands are brought into the form of matrices, one for each index of the dimensions that
//! all three arrays have.

use std::borrow::Cow;

use mpmd_device::cpu::matmul::{Scalar as Factor, matmul};
use mpmd_layout::aval::DType;

use super::block::{Block, Held};
use super::elements::{Number, filled, for_number};
use super::reshape::transpose;
use crate::api::compute::node::{Contraction, Reduction, Scalar};
use crate::error::{Error, Result};

/// Computes a contraction. `shape` is that of the result.
pub(super) fn contract(
    contraction: &Contraction,
    a: &Block<'_>,
    b: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    let Contraction {
        operands: [of_a, of_b],
        result,
    } = contraction;
    if is_of_nothing(contraction, [a, b]) {
        return filled(shape, a.dtype(), Scalar::Int(0));
    }
    // Dimensions of one operand alone are summed before.
    let (a, of_a) = without_lonely(a, of_a, of_b, result)?;
    let (b, of_b) = without_lonely(b, of_b, &of_a, result)?;

    let batch = kept(&of_a, |letter| {
        of_b.contains(letter) && result.contains(letter)
    });
    let rows = kept(&of_a, |letter| !of_b.contains(letter));
    let summed = kept(&of_a, |letter| {
        of_b.contains(letter) && !result.contains(letter)
    });
    let columns = kept(&of_b, |letter| !of_a.contains(letter));

    let a = in_order(a, &of_a, &[&batch[..], &rows, &summed].concat())?;
    let b = in_order(b, &of_b, &[&batch[..], &summed, &columns].concat())?;
    let count = |block: &Block<'_>, from: usize, dims: usize| -> usize {
        block.shape[from..from + dims].iter().product()
    };
    let sizes = MatrixSizes {
        count: count(&a, 0, batch.len()),
        m: count(&a, batch.len(), rows.len()),
        k: count(&a, batch.len() + rows.len(), summed.len()),
        n: count(&b, batch.len() + summed.len(), columns.len()),
    };

    let order = [&batch[..], &rows, &columns].concat();
    let shape_of = |letter: &char| {
        let place = result.iter().position(|other| other == letter);
        place.map_or(1, |place| shape[place])
    };
    let made: Vec<usize> = order.iter().map(shape_of).collect();
    let product = match a.dtype() {
        DType::F32 => Block::new(&made, sizes.of_floats(a.list::<f32>()?, b.list::<f32>()?)),
        DType::F64 => Block::new(&made, sizes.of_floats(a.list::<f64>()?, b.list::<f64>()?)),
        dtype => for_number!(dtype, T => {
            Ok(Block::new(&made, sizes.of_numbers(a.list::<T>()?, b.list::<T>()?)))
        })?,
    };
    Ok(in_order(Cow::Owned(product), &order, result)?.into_owned())
}

/// True if a dimension without elements is summed over: then all sums are 0, whatever the other
/// operand has.
fn is_of_nothing(contraction: &Contraction, blocks: [&Block<'_>; 2]) -> bool {
    let operands = contraction.operands.iter().zip(blocks);
    let mut dims = operands.flat_map(|(letters, block)| letters.iter().zip(&block.shape));
    dims.any(|(letter, size)| *size == 0 && !contraction.result.contains(letter))
}

/// Returns the letters for which `is_kept` is true.
fn kept(letters: &[char], is_kept: impl Fn(&char) -> bool) -> Vec<char> {
    letters.iter().copied().filter(is_kept).collect()
}

/// Returns the block with its dimensions in the order of `to`.
fn in_order<'b, 'a>(
    x: Cow<'b, Block<'a>>,
    from: &[char],
    to: &[char],
) -> Result<Cow<'b, Block<'a>>> {
    if from == to {
        return Ok(x);
    }
    let order = to
        .iter()
        .map(|letter| from.iter().position(|other| other == letter));
    let order: Option<Vec<usize>> = order.collect();
    let order = order.ok_or_else(|| Error::kernel("a product lacks a dimension"))?;
    Ok(Cow::Owned(transpose(&order, &x)?))
}

/// Sums a block over the dimensions that neither the other operand nor the result has. Returns (the
/// sums, the letters of their dimensions).
fn without_lonely<'b, 'a>(
    x: &'b Block<'a>,
    own: &[char],
    other: &[char],
    result: &[char],
) -> Result<(Cow<'b, Block<'a>>, Vec<char>)> {
    let is_lonely = |letter: &char| !other.contains(letter) && !result.contains(letter);
    let dims: Vec<usize> = (0..own.len()).filter(|dim| is_lonely(&own[*dim])).collect();
    if dims.is_empty() {
        return Ok((Cow::Borrowed(x), own.to_vec()));
    }
    let letters = kept(own, |letter| !is_lonely(letter));
    let sizes = (0..own.len()).filter(|dim| !dims.contains(dim));
    let shape: Vec<usize> = sizes.map(|dim| x.shape[dim]).collect();
    let sums = super::reduce::reduce(Reduction::Sum, &dims, x, &shape)?;
    Ok((Cow::Owned(sums), letters))
}

/// The sizes of a list of products of matrices: `[m, k]` times `[k, n]`, `count` times.
struct MatrixSizes {
    count: usize,
    m: usize,
    k: usize,
    n: usize,
}

impl MatrixSizes {
    fn of_floats<T: Held + Factor>(&self, a: &[T], b: &[T]) -> Vec<T> {
        let Self { count, m, k, n } = *self;
        let mut product = vec![T::default(); count * m * n];
        for i in 0..count {
            let a = &a[i * m * k..(i + 1) * m * k];
            let b = &b[i * k * n..(i + 1) * k * n];
            matmul(
                &mut product[i * m * n..(i + 1) * m * n],
                a,
                b,
                m,
                k,
                n,
                false,
            );
        }
        product
    }

    fn of_numbers<T: Number>(&self, a: &[T], b: &[T]) -> Vec<T> {
        let Self { count, m, k, n } = *self;
        let mut product = Vec::with_capacity(count * m * n);
        for i in 0..count {
            for row in 0..m {
                for column in 0..n {
                    let terms = (0..k)
                        .map(|at| a[(i * m + row) * k + at].times(b[(i * k + at) * n + column]));
                    product.push(terms.fold(T::default(), Number::plus));
                }
            }
        }
        product
    }
}
