//! The dimensions that a method is given.

use std::ops::RangeFull;

/// Dimensions of an expression: one number, a list of them, or `..` for all. Negative ones count
/// from the end.
pub trait Dims {
    /// Returns the dimensions of an array of `rank` dimensions, ascending.
    ///
    /// # Errors
    ///
    /// If the array lacks a dimension, or one is given twice.
    #[doc(hidden)]
    fn of_rank(self, rank: usize) -> Result<Vec<usize>, String>;
}

impl Dims for isize {
    fn of_rank(self, rank: usize) -> Result<Vec<usize>, String> {
        Ok(vec![dim(self, rank)?])
    }
}

impl<const N: usize> Dims for [isize; N] {
    fn of_rank(self, rank: usize) -> Result<Vec<usize>, String> {
        self.as_slice().of_rank(rank)
    }
}

impl Dims for &[isize] {
    fn of_rank(self, rank: usize) -> Result<Vec<usize>, String> {
        let dims = self.iter().map(|given| dim(*given, rank));
        let mut dims = dims.collect::<Result<Vec<_>, _>>()?;
        dims.sort_unstable();
        match dims.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(twice) => Err(format!("dimension {} is given twice", twice[0])),
            None => Ok(dims),
        }
    }
}

impl Dims for RangeFull {
    fn of_rank(self, rank: usize) -> Result<Vec<usize>, String> {
        Ok((0..rank).collect())
    }
}

/// Returns a dimension of an array of `rank` dimensions.
pub(super) fn dim(given: isize, rank: usize) -> Result<usize, String> {
    let from_start = match given < 0 {
        true => given.checked_add_unsigned(rank),
        false => Some(given),
    };
    from_start
        .and_then(|dim| usize::try_from(dim).ok())
        .filter(|dim| *dim < rank)
        .ok_or_else(|| format!("there is no dimension {given} of {rank}"))
}
