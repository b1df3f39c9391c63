//! Elements that are chosen, or summed, by indices.
//!
//! Sums of f32 are made in f64, in the order of the elements, and rounded once.

use mpmd_layout::aval::DType;

use super::block::{Block, for_dtype, offset, unsupported};
use super::elements::{Number, cast, for_number};
use crate::error::Result;

/// Takes the elements of a dimension at indices. Those beyond the dimension are its first or last.
pub(super) fn take(
    dim: usize,
    x: &Block<'_>,
    indices: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    let indices = whole_numbers(indices)?;
    let outer: usize = x.shape[..dim].iter().product();
    let inner: usize = x.shape[dim + 1..].iter().product();
    let len = x.shape[dim];
    for_dtype!(x.dtype(), T => {
        let list = x.list::<T>()?;
        let mut taken = Vec::with_capacity(shape.iter().product());
        for before in 0..outer {
            for index in &indices {
                let last = len.saturating_sub(1);
                let index = usize::try_from(*index).unwrap_or(0).min(last);
                let at = offset(&[outer, len, inner], [before, index, 0].into_iter());
                taken.extend_from_slice(&list[at..at + inner]);
            }
        }
        Ok(Block::new(shape, taken))
    })
}

/// Takes elements along a dimension, each at its own index. Those beyond the dimension are its
/// first or last.
pub(super) fn take_along(
    dim: usize,
    x: &Block<'_>,
    indices: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    let (len, inner) = (x.shape[dim], shape[dim + 1..].iter().product());
    let last = len.saturating_sub(1);
    let indices = whole_numbers(indices)?.into_iter();
    let chosen = indices.map(|index| usize::try_from(index).unwrap_or(0).min(last));
    let places = chosen
        .enumerate()
        .map(|(at, index)| along(shape[dim], len, inner, at, index));
    for_dtype!(x.dtype(), T => {
        let list = x.list::<T>()?;
        Ok(Block::new(shape, places.map(|at| list[at]).collect()))
    })
}

/// Returns the place, in an array with `len` indices along a dimension, of the element with this
/// index there and otherwise the indices of element `at` of an array with `own_len`. `inner` is the
/// number of elements behind the dimension.
fn along(own_len: usize, len: usize, inner: usize, at: usize, index: usize) -> usize {
    let before = at / (own_len * inner);
    (before * len + index) * inner + at % inner
}

/// Sums elements along a dimension, each into its own index. Those of no index are left out.
pub(super) fn sum_along(
    dim: usize,
    x: &Block<'_>,
    indices: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    let (len, inner) = (shape[dim], shape[dim + 1..].iter().product());
    let place = |(at, index): (usize, i64)| {
        let index = usize::try_from(index).ok().filter(|index| *index < len);
        index.map(|index| along(x.shape[dim], len, inner, at, index))
    };
    let indices = whole_numbers(indices)?.into_iter().enumerate();
    let places = SegmentPlaces {
        starts: indices.map(place).collect(),
        len: 1,
    };
    sums(&places, x, shape)
}

/// Sums parts of a block into the segments that `segments` names: the parts at the dimensions from
/// `dim` on that `segments` has. Parts of no segment of the result are left out.
pub(super) fn segment_sum(
    dim: usize,
    x: &Block<'_>,
    segments: &Block<'_>,
    shape: &[usize],
) -> Result<Block<'static>> {
    let places = segment_places(dim, segments, shape)?;
    sums(&places, x, shape)
}

/// Sums runs of elements into their places.
fn sums(places: &SegmentPlaces, x: &Block<'_>, shape: &[usize]) -> Result<Block<'static>> {
    match x.dtype() {
        DType::F32 => {
            let x = x.list::<f32>()?;
            let sums = sums_by_place(places, x, shape, |sum: f64, x| sum + f64::from(x));
            let sums = sums.into_iter().map(|sum| sum as f32);
            Ok(Block::new(shape, sums.collect()))
        }
        dtype => for_number!(dtype, T => {
            Ok(Block::new(shape, sums_by_place(places, x.list::<T>()?, shape, T::plus)))
        }),
    }
}

/// The runs of elements of an operand, and where each is added.
struct SegmentPlaces {
    /// The first element of the result for each run; `None` for a run of no segment.
    starts: Vec<Option<usize>>,
    /// Number of elements of each run.
    len: usize,
}

/// Returns the places in a result of this shape.
fn segment_places(dim: usize, segments: &Block<'_>, shape: &[usize]) -> Result<SegmentPlaces> {
    let segments = whole_numbers(segments)?;
    let outer: usize = shape[..dim].iter().product();
    let len: usize = shape[dim + 1..].iter().product();
    let count = shape[dim];
    let starts = (0..outer).flat_map(|before| {
        segments.iter().map(move |segment| {
            let segment = usize::try_from(*segment).ok().filter(|at| *at < count);
            segment.map(|at| (before * count + at) * len)
        })
    });
    Ok(SegmentPlaces {
        starts: starts.collect(),
        len,
    })
}

fn sums_by_place<T: Copy, A: Copy + Default>(
    places: &SegmentPlaces,
    x: &[T],
    shape: &[usize],
    add: impl Fn(A, T) -> A,
) -> Vec<A> {
    let mut sums = vec![A::default(); shape.iter().product()];
    // Runs without elements have no chunks.
    let runs = x.chunks_exact(places.len.max(1));
    for (run, start) in runs.zip(&places.starts) {
        let Some(start) = start else { continue };
        let into = &mut sums[*start..*start + places.len];
        into.iter_mut()
            .zip(run)
            .for_each(|(sum, x)| *sum = add(*sum, *x));
    }
    sums
}

/// Returns rows of zeros with 1 at the index that each element is.
pub(super) fn one_hot(x: &Block<'_>, shape: &[usize], dtype: DType) -> Result<Block<'static>> {
    let classes = shape.last().copied().unwrap_or(0);
    let mut is_it = Vec::with_capacity(shape.iter().product());
    for index in whole_numbers(x)? {
        is_it.extend((0..classes).map(|class| i64::try_from(class) == Ok(index)));
    }
    cast(&Block::new(shape, is_it), dtype)
}

fn whole_numbers(x: &Block<'_>) -> Result<Vec<i64>> {
    match x.dtype() {
        DType::I32 => Ok(x.list::<i32>()?.iter().map(|x| i64::from(*x)).collect()),
        DType::I64 => Ok(x.list::<i64>()?.to_vec()),
        other => Err(unsupported(other)),
    }
}
