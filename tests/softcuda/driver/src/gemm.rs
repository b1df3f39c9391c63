//! Matrix products in cuBLAS's column-major layout: `C = alpha * A * B + beta * C`.

use std::ops::{Add, AddAssign, Mul};

use half::{bf16, f16};

use crate::device::memory::space;
use crate::device::races::Use;
use crate::error::Result;

/// The type of a matrix's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    F32,
    F64,
}

impl Element {
    /// Returns the bytes of one element.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Element::F16 | Element::Bf16 => 2,
            Element::F32 => 4,
            Element::F64 => 8,
        }
    }
}

/// The precision to which elements of A and B are rounded before they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Exact,
    /// TF32: ten bits of mantissa.
    Tf32,
    F16,
    Bf16,
}

/// A matrix in device memory, stored by columns, or a batch of matrices of one shape at equal
/// distances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) address: u64,
    pub(crate) element: Element,
    /// Elements from the start of one column to the next.
    pub(crate) leading: u64,
    /// Elements from the start of one matrix to the next.
    pub(crate) stride: u64,
    /// Number of rows of the stored matrix, before any transposition.
    pub(crate) rows: u64,
    pub(crate) columns: u64,
    /// True if the product uses the transposed matrix.
    pub(crate) transposed: bool,
}

impl Matrix {
    /// Returns the number of bytes from the first element of `batch` matrices to the last,
    /// inclusive. 0 if there is no element.
    pub(crate) fn reach(&self, batch: u64) -> u64 {
        if self.rows == 0 || self.columns == 0 || batch == 0 {
            return 0;
        }
        ((batch - 1) * self.stride + (self.columns - 1) * self.leading + self.rows)
            * self.element.bytes()
    }

    /// Returns the memory range that an operation on `batch` matrices reads or writes.
    pub(crate) fn used(&self, batch: u64, write: bool) -> Use {
        Use {
            address: self.address,
            bytes: self.reach(batch),
            write,
        }
    }

    /// Returns the offset in elements of an element from the start of the matrix. `row` and
    /// `column` are positions after the transposition.
    fn at(&self, row: u64, column: u64) -> usize {
        let (row, column) = if self.transposed {
            (column, row)
        } else {
            (row, column)
        };
        (column * self.leading + row) as usize
    }
}

/// Alpha or beta of a product. It is known when the product is issued, or is read from (device
/// address, element type) when the product runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scale {
    Known(f64),
    There(u64, Element),
}

impl Scale {
    fn get(self) -> Result<f64> {
        match self {
            Scale::Known(value) => Ok(value),
            Scale::There(address, element) => {
                let span = space().span(address, element.bytes())?;
                // SAFETY: the span is of one element.
                Ok(unsafe { read(span.pointer(), element, 0) })
            }
        }
    }
}

/// A product `C = alpha * A * B + beta * C`, or `batch` of them with equal shapes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) c: Matrix,
    /// Number of terms in each sum: the columns of A after its transposition.
    pub(crate) inner: u64,
    pub(crate) batch: u64,
    pub(crate) alpha: Scale,
    pub(crate) beta: Scale,
    pub(crate) rounding: Rounding,
    /// True if sums are computed in `f64`, false if in `f32`.
    pub(crate) double: bool,
}

/// Computes a product and writes C, in the calling thread.
///
/// # Errors
///
/// `CUDA_ERROR_ILLEGAL_ADDRESS` if a matrix, or a scale in device memory, is not entirely in one
/// live allocation. A and B are not accessed if alpha or `inner` is 0.
pub(crate) fn compute(product: &Product) -> Result {
    if product.double {
        compute_in::<f64>(product)
    } else {
        compute_in::<f32>(product)
    }
}

/// A float type in which sums are computed.
trait Real: Copy + Default + Add<Output = Self> + Mul<Output = Self> + AddAssign {
    fn from_wide(value: f64) -> Self;
    fn to_wide(self) -> f64;
}

impl Real for f32 {
    fn from_wide(value: f64) -> f32 {
        value as f32
    }
    fn to_wide(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    fn from_wide(value: f64) -> f64 {
        value
    }
    fn to_wide(self) -> f64 {
        self
    }
}

/// Number of rows of the tile of C that is computed in registers. `BROAD` is the number of columns.
const TALL: usize = 8;
const BROAD: usize = 4;

fn compute_in<T: Real>(product: &Product) -> Result {
    let Product {
        a,
        b,
        c,
        inner,
        batch,
        ..
    } = *product;

    let alpha = product.alpha.get()?;
    let beta = product.beta.get()?;
    // With a scale of zero the factors are not read, so NaNs in them do not matter.
    let read_factors = alpha != 0.0 && inner > 0;

    let reach = |matrix: &Matrix, wanted: bool| {
        let bytes = matrix.reach(batch);
        (wanted && bytes > 0)
            .then(|| space().span(matrix.address, bytes))
            .transpose()
    };
    let a_span = reach(&a, read_factors)?;
    let b_span = reach(&b, read_factors)?;
    let c_span = reach(&c, true)?;
    let Some(c_span) = c_span else { return Ok(()) };

    let alpha = T::from_wide(alpha);
    let beta = T::from_wide(beta);
    let keeps = beta.to_wide() != 0.0;

    let mut left = Vec::new();
    let mut right = Vec::new();
    for one in 0..batch {
        let start = |matrix: &Matrix| (one * matrix.stride) as usize;

        if let (Some(a_span), Some(b_span)) = (&a_span, &b_span) {
            let round = product.rounding;
            // SAFETY: both spans reach from the first to the last element of all matrices.
            unsafe {
                pack(&mut left, TALL, c.rows, inner, |row, column| {
                    rounded(
                        read(a_span.pointer(), a.element, start(&a) + a.at(row, column)),
                        round,
                    )
                });
                pack(&mut right, BROAD, c.columns, inner, |column, row| {
                    rounded(
                        read(b_span.pointer(), b.element, start(&b) + b.at(row, column)),
                        round,
                    )
                });
            }
        }

        let sums = inner as usize;
        for (j, right_panel) in (0..c.columns).step_by(BROAD).enumerate() {
            for (i, left_panel) in (0..c.rows).step_by(TALL).enumerate() {
                let part = if read_factors {
                    tile::<T>(
                        &left[i * TALL * sums..][..TALL * sums],
                        &right[j * BROAD * sums..][..BROAD * sums],
                    )
                } else {
                    [[T::default(); TALL]; BROAD]
                };
                for (y, column) in part
                    .iter()
                    .enumerate()
                    .take((c.columns - right_panel) as usize)
                {
                    for (x, sum) in column
                        .iter()
                        .enumerate()
                        .take((c.rows - left_panel) as usize)
                    {
                        let at = start(&c) + c.at(left_panel + x as u64, right_panel + y as u64);
                        // SAFETY: the span reaches from the first to the last element of all
                        // matrices.
                        unsafe {
                            let mut value = alpha * *sum;
                            if keeps {
                                value += beta * T::from_wide(read(c_span.pointer(), c.element, at));
                            }
                            write(c_span.pointer(), c.element, at, value.to_wide());
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Copies a factor into panels of `broad` rows of A, or columns of B. For each of the `sums` terms,
/// a panel has `broad` values side by side. Beyond the end of the matrix they are zero.
fn pack<T: Real>(
    into: &mut Vec<T>,
    broad: usize,
    lines: u64,
    sums: u64,
    value: impl Fn(u64, u64) -> f64,
) {
    into.clear();
    for first in (0..lines).step_by(broad) {
        for at in 0..sums {
            for line in first..first + broad as u64 {
                into.push(if line < lines {
                    T::from_wide(value(line, at))
                } else {
                    T::default()
                });
            }
        }
    }
}

/// Returns one tile of the product, as columns of rows. `left` is a panel of A, `right` is a panel
/// of B.
fn tile<T: Real>(left: &[T], right: &[T]) -> [[T; TALL]; BROAD] {
    let mut sums = [[T::default(); TALL]; BROAD];
    for (a, b) in left
        .as_chunks::<TALL>()
        .0
        .iter()
        .zip(right.as_chunks::<BROAD>().0)
    {
        for (column, b) in sums.iter_mut().zip(b) {
            for (sum, a) in column.iter_mut().zip(a) {
                *sum += *a * *b;
            }
        }
    }
    sums
}

fn rounded(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Exact => value,
        Rounding::Tf32 => f64::from(tf32(value as f32)),
        Rounding::F16 => f64::from(f16::from_f64(value)),
        Rounding::Bf16 => f64::from(bf16::from_f64(value)),
    }
}

/// Rounds to the nearest number with ten bits of mantissa.
fn tf32(value: f32) -> f32 {
    if !value.is_finite() {
        return value;
    }
    let bits = value.to_bits();
    f32::from_bits(bits.wrapping_add(0xFFF + (bits >> 13 & 1)) & !0x1FFF)
}

/// Reads the element at index `at` as an `f64`.
///
/// # Safety
///
/// The element is within readable memory.
unsafe fn read(start: *const u8, element: Element, at: usize) -> f64 {
    // SAFETY: see above.
    unsafe {
        match element {
            Element::F16 => f64::from(start.cast::<f16>().add(at).read_unaligned()),
            Element::Bf16 => f64::from(start.cast::<bf16>().add(at).read_unaligned()),
            Element::F32 => f64::from(start.cast::<f32>().add(at).read_unaligned()),
            Element::F64 => start.cast::<f64>().add(at).read_unaligned(),
        }
    }
}

/// Writes a number as the element at index `at`, rounded to the element's type.
///
/// # Safety
///
/// The element is within writable memory.
unsafe fn write(start: *mut u8, element: Element, at: usize, value: f64) {
    // SAFETY: see above.
    unsafe {
        match element {
            Element::F16 => start
                .cast::<f16>()
                .add(at)
                .write_unaligned(f16::from_f64(value)),
            Element::Bf16 => start
                .cast::<bf16>()
                .add(at)
                .write_unaligned(bf16::from_f64(value)),
            Element::F32 => start.cast::<f32>().add(at).write_unaligned(value as f32),
            Element::F64 => start.cast::<f64>().add(at).write_unaligned(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tf32_keeps_ten_bits() {
        assert_eq!(tf32(1.0 + 2.0_f32.powi(-10)), 1.0 + 2.0_f32.powi(-10));
        assert_eq!(tf32(1.0 + 2.0_f32.powi(-12)), 1.0);
        assert_eq!(
            tf32(-1.0 - 3.0 * 2.0_f32.powi(-12)),
            -1.0 - 2.0_f32.powi(-10)
        );
        assert!(tf32(f32::NAN).is_nan());
    }
}
