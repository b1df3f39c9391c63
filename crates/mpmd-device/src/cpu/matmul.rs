//! Matrix products on slices, for CPU kernels.
//!
//! Products of dense row-major matrices run on the calling thread alone, because a device has one
//! thread. [`multiply`] takes other matrices and more threads. The same operands give the same bits
//! on every call, regardless of the number of processes and threads, on all hosts whose
//! [`width`] is the same: no cache and no other property of the processor counts.

use std::any::type_name;

pub use gemm_common::Parallelism;

use super::products::{ProductElement, ProductPlaces, Strided, StridedMut};
use super::{VectorWidth, width};

/// Length of the longest sum that is computed at once. `gemm` cuts sums where the caches of the
/// processor end, but never shorter than this, so two hosts would add in different orders.
const LONGEST_SUM: usize = 512;

/// An element type of matrices that can be multiplied: `f32` or `f64`.
pub trait Scalar: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The neutral element of addition.
    const ZERO: Self;
    /// The neutral element of multiplication.
    const ONE: Self;
}

impl Scalar for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

impl Scalar for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
}

/// Prevents other implementations of `Scalar`: there are kernels for no other type.
mod sealed {
    #[expect(private_bounds, reason = "nobody else implements it")]
    pub trait Sealed: super::ProductElement {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Computes `c = a b`, or `c += a b` if `accumulate` is true. `c` is `[m, n]`, `a` is `[m, k]`, `b`
/// is `[k, n]`.
///
/// If `accumulate` is false, the old content of `c` is not read. If `k` is 0, the product is all
/// zeros.
///
/// # Panics
///
/// If the length of a slice differs from its shape.
pub fn matmul<T: Scalar>(
    c: &mut [T],
    a: &[T],
    b: &[T],
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    dense(
        c,
        MatrixRef::new(a, m, k),
        MatrixRef::new(b, k, n),
        accumulate,
    );
}

/// Computes `c = a bᵀ`, or `c += a bᵀ` if `accumulate` is true. `c` is `[m, n]`, `a` is `[m, k]`,
/// `b` is `[n, k]`.
///
/// If `accumulate` is false, the old content of `c` is not read. If `k` is 0, the product is all
/// zeros.
///
/// # Panics
///
/// If the length of a slice differs from its shape.
pub fn matmul_nt<T: Scalar>(
    c: &mut [T],
    a: &[T],
    b: &[T],
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    dense(
        c,
        MatrixRef::new(a, m, k),
        MatrixRef::new(b, n, k).t(),
        accumulate,
    );
}

/// Computes `c = aᵀ b`, or `c += aᵀ b` if `accumulate` is true. `c` is `[m, n]`, `a` is `[k, m]`,
/// `b` is `[k, n]`.
///
/// If `accumulate` is false, the old content of `c` is not read. If `k` is 0, the product is all
/// zeros.
///
/// # Panics
///
/// If the length of a slice differs from its shape.
pub fn matmul_tn<T: Scalar>(
    c: &mut [T],
    a: &[T],
    b: &[T],
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    dense(
        c,
        MatrixRef::new(a, k, m).t(),
        MatrixRef::new(b, k, n),
        accumulate,
    );
}

fn dense<T: Scalar>(c: &mut [T], a: MatrixRef<'_, T>, b: MatrixRef<'_, T>, accumulate: bool) {
    assert_len(c.len(), a.rows, b.columns);
    multiply(c, b.columns, a, b, accumulate, Parallelism::None);
}

/// A read-only matrix in a slice, either row-major or transposed.
#[derive(Clone, Copy)]
pub struct MatrixRef<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> MatrixRef<'a, T> {
    /// Wraps `data` as a row-major `[rows, columns]` matrix.
    ///
    /// # Panics
    ///
    /// If the length of `data` is not `rows * columns`.
    pub fn new(data: &'a [T], rows: usize, columns: usize) -> Self {
        assert_len(data.len(), rows, columns);
        Self {
            data,
            rows,
            columns,
            row_stride: columns,
            column_stride: 1,
        }
    }

    /// Wraps the `[rows, columns]` matrix whose row `i` begins at element `i * stride` of `data`.
    ///
    /// # Panics
    ///
    /// If a row is longer than `stride`, or `data` is too short.
    pub fn strided(data: &'a [T], rows: usize, columns: usize, stride: usize) -> Self {
        assert_rows(data.len(), rows, columns, stride);
        Self {
            data,
            rows,
            columns,
            row_stride: stride,
            column_stride: 1,
        }
    }

    /// Returns the transposed matrix on the same memory.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    /// Returns the places of the rows and columns from `row` and `column` on, which exist.
    fn from(&self, row: usize, column: usize) -> Strided<T> {
        let first = row * self.row_stride + column * self.column_stride;
        Strided {
            data: self.data[first..].as_ptr(),
            row_stride: self.row_stride as isize,
            column_stride: self.column_stride as isize,
        }
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }
}

fn assert_len(len: usize, rows: usize, columns: usize) {
    let expected = rows.checked_mul(columns);
    assert!(
        expected == Some(len),
        "a [{rows}, {columns}] matrix in a slice of {len} elements"
    );
}

fn assert_rows(len: usize, rows: usize, columns: usize, stride: usize) {
    let last = rows.saturating_sub(1).checked_mul(stride);
    let end = last.and_then(|last| last.checked_add(if rows == 0 { 0 } else { columns }));
    assert!(
        columns <= stride && end.is_some_and(|end| end <= len),
        "a [{rows}, {columns}] matrix with rows at every {stride} in a slice of {len} elements"
    );
}

/// Computes `c = a b`, or `c += a b` if `accumulate` is true, on the threads of the given
/// parallelism. Row `i` of `c` begins at element `i * stride`. Elements between the rows do not
/// change.
///
/// One thread sums each element of the product, in an order that depends only on the shapes and on
/// [`width`]. So the result has the same bits with any number of threads.
///
/// # Panics
///
/// If the shapes do not fit each other, or a row is longer than `stride`.
pub fn multiply<T: Scalar>(
    c: &mut [T],
    stride: usize,
    a: MatrixRef<'_, T>,
    b: MatrixRef<'_, T>,
    accumulate: bool,
    threads: Parallelism,
) {
    multiply_by(width(), c, stride, a, b, accumulate, threads);
}

/// Computes [`multiply`] with the vector instructions of `width`.
fn multiply_by<T: Scalar>(
    width: VectorWidth,
    c: &mut [T],
    stride: usize,
    a: MatrixRef<'_, T>,
    b: MatrixRef<'_, T>,
    accumulate: bool,
    threads: Parallelism,
) {
    assert_eq!(
        a.columns,
        b.rows,
        "inner dimensions of a product of {}",
        type_name::<T>()
    );

    let m = a.rows;
    let k = a.columns;
    let n = b.columns;
    assert_rows(c.len(), m, n, stride);

    if m == 0 || n == 0 || k == 0 {
        // There is nothing to read, and `gemm` must not get pointers of empty slices.
        if !accumulate && n > 0 {
            c.chunks_mut(stride)
                .take(m)
                .for_each(|row| row[..n].fill(T::ZERO));
        }
        return;
    }

    let step = sum_length(&a, &b);
    for first in (0..k).step_by(step) {
        let places = ProductPlaces {
            rows: m,
            columns: n,
            inner: step.min(k - first),
            c: StridedMut {
                data: c.as_mut_ptr(),
                row_stride: stride as isize,
            },
            a: a.from(0, first),
            b: b.from(first, 0),
            accumulate: accumulate || first > 0,
        };
        // SAFETY: no dimension is zero here. `c` is addressed as row * stride + column with row < m
        // and column < n <= stride, which lies within its elements (checked above), and no two
        // places are equal. An operand is addressed in the same way within its own elements
        // (checked where it was made), or with its strides swapped together with the dimensions,
        // from a place within it on. So all accesses lie within the three slices. A slice is at
        // most `isize::MAX` bytes, so no stride that is used overflows `isize`. `c` is borrowed
        // exclusively, hence overlaps neither operand. The call returns when all its threads have
        // ended their work. `width` is checked by the call.
        unsafe { T::product(width, places, threads) };
    }
}

/// Returns the number of terms that are summed at once. The last sum may be shorter.
fn sum_length<T>(a: &MatrixRef<'_, T>, b: &MatrixRef<'_, T>) -> usize {
    // For these `gemm` asks no cache, and cut rows would be read at half the speed.
    let is_row = a.rows == 1 || b.columns == 1;
    if is_row && a.column_stride == 1 && b.row_stride == 1 {
        return a.columns;
    }
    // About equal lengths, so that no sum is too short to be worth its pass over the result.
    a.columns.div_ceil(a.columns.div_ceil(LONGEST_SUM))
}

#[cfg(test)]
mod tests {
    use super::super::width::widths;
    use super::*;

    fn reals(len: usize, seed: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 7919 + seed * 104_729) % 1013) as f32 / 507.0 - 1.0)
            .collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    /// Returns `len` integers small enough that every sum is exact, so that results can be compared
    /// bit by bit.
    fn whole_numbers(len: usize, seed: usize) -> Vec<f64> {
        (0..len)
            .map(|i| ((i * 31 + seed * 17) % 13) as f64 - 6.0)
            .collect()
    }

    fn transpose(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        (0..columns)
            .flat_map(|j| (0..rows).map(move |i| x[i * columns + j]))
            .collect()
    }

    fn by_definition(a: &[f64], b: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
        (0..m * n)
            .map(|at| (0..k).map(|p| a[at / n * k + p] * b[p * n + at % n]).sum())
            .collect()
    }

    #[test]
    fn products_equal_the_definition_in_every_orientation() {
        let sizes = [0, 1, 2, 3, 5, 8, 17, 33];
        for (m, k, n) in sizes
            .iter()
            .flat_map(|m| sizes.iter().flat_map(|k| sizes.map(|n| (*m, *k, n))))
            .chain([(70, 300, 65)])
        {
            let (a, b) = (whole_numbers(m * k, 1), whole_numbers(k * n, 2));
            let expected = by_definition(&a, &b, m, k, n);
            let (at, bt) = (transpose(&a, m, k), transpose(&b, k, n));
            let mut c = vec![f64::NAN; m * n];
            matmul(&mut c, &a, &b, m, k, n, false);
            assert_eq!(c, expected, "{m} {k} {n}");
            c.fill(f64::NAN);
            matmul_nt(&mut c, &a, &bt, m, k, n, false);
            assert_eq!(c, expected, "{m} {k} {n}, b transposed");
            c.fill(f64::NAN);
            matmul_tn(&mut c, &at, &b, m, k, n, false);
            assert_eq!(c, expected, "{m} {k} {n}, a transposed");
            matmul(&mut c, &a, &b, m, k, n, true);
            matmul_nt(&mut c, &a, &bt, m, k, n, true);
            matmul_tn(&mut c, &at, &b, m, k, n, true);
            assert!(
                c.iter().zip(&expected).all(|(got, one)| *got == 4.0 * one),
                "{m} {k} {n}, accumulated"
            );
        }
    }

    #[test]
    fn single_precision_repeats_bit_by_bit() {
        let (m, k, n) = (37, 129, 64);
        let a: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..k * n).map(|i| (i as f32 * 0.73).cos()).collect();
        let run = || {
            // New copies each time, perhaps with another alignment.
            let (a, b) = (a.clone(), b.clone());
            let mut c = vec![0.0f32; m * n];
            matmul(&mut c, &a, &b, m, k, n, false);
            c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let first = run();
        for _ in 0..5 {
            assert_eq!(first, run());
        }
        let exact: f64 = (0..k)
            .map(|p| f64::from(a[5 * k + p]) * f64::from(b[p * n + 9]))
            .sum();
        assert!((f64::from(f32::from_bits(first[5 * n + 9])) - exact).abs() < 1e-4);
    }

    #[test]
    #[should_panic(expected = "a [3, 4] matrix in a slice of 11 elements")]
    fn short_slice_panics() {
        matmul(&mut [0.0f32; 8], &[0.0; 6], &[0.0; 11], 2, 3, 4, false);
    }

    #[test]
    #[should_panic(expected = "matrix in a slice of 0 elements")]
    fn overflowing_shape_panics() {
        matmul(
            &mut [0.0f32; 0],
            &[0.0; 0],
            &[0.0; 0],
            usize::MAX,
            2,
            0,
            false,
        );
    }

    #[test]
    fn rows_may_lie_apart() {
        let (a, b) = (whole_numbers(5 * 9, 1), whole_numbers(3 * 8, 2));
        let mut c = [7.0; 5 * 6];
        let (left, right) = (
            MatrixRef::strided(&a[2..], 5, 3, 9),
            MatrixRef::strided(&b[1..], 3, 4, 8),
        );
        multiply(&mut c[1..], 6, left, right, false, Parallelism::None);
        for (at, c) in c.iter().enumerate() {
            let (row, column) = (at / 6, at % 6);
            let inside = (1..5).contains(&column);
            let sum = |p: usize| a[2 + row * 9 + p] * b[p * 8 + column];
            assert_eq!(*c, if inside { (0..3).map(sum).sum() } else { 7.0 }, "{at}");
        }
    }

    #[test]
    #[should_panic(expected = "with rows at every 5 in a slice of 13 elements")]
    fn rows_beyond_the_slice_panic() {
        let _ = MatrixRef::strided(&[0.0f64; 13], 3, 4, 5);
    }

    #[test]
    fn long_sums_are_chains_of_fixed_blocks() {
        // Three blocks, which no cache of any processor cuts further.
        for (m, n, k) in [(40, 50, 1300), (70, 80, 1300), (1, 9, 1300)] {
            let (a, b) = (reals(m * k, 1), reals(k * n, 2));
            let mut whole = vec![f32::NAN; m * n];
            matmul(&mut whole, &a, &b, m, k, n, false);

            let mut chain = vec![f32::NAN; m * n];
            for (first, len) in [(0, 434), (434, 434), (868, 432)] {
                let left = MatrixRef::strided(&a[first..], m, len, k);
                let right = MatrixRef::new(&b[first * n..(first + len) * n], len, n);
                let add = first > 0;
                multiply(&mut chain, n, left, right, add, Parallelism::None);
            }
            assert_eq!(bits(&whole), bits(&chain), "{m} {k} {n}");
        }
    }

    #[test]
    fn widths_with_fused_products_give_the_same_bits() {
        let sizes = [1, 2, 3, 7, 16, 33, 65, 100];
        let shapes = sizes
            .iter()
            .flat_map(|m| sizes.map(|n| (*m, n)))
            .flat_map(|(m, n)| [1, 2, 3, 40, 517].map(|k| (m, k, n)));
        for (m, k, n) in shapes {
            let (a, b) = (reals(m * k, 1), reals(k * n, 2));
            let left = [MatrixRef::new(&a, m, k), MatrixRef::new(&a, k, m).t()];
            let right = [MatrixRef::new(&b, k, n), MatrixRef::new(&b, n, k).t()];
            for (a, b) in left.iter().flat_map(|a| right.map(|b| (*a, b))) {
                let run = |width| {
                    let mut c = vec![f32::NAN; m * n];
                    multiply_by(width, &mut c, n, a, b, false, Parallelism::None);
                    multiply_by(width, &mut c, n, a, b, true, Parallelism::None);
                    c
                };
                let plain = run(VectorWidth::Baseline);
                let fused: Vec<_> = widths().skip(1).map(run).collect();
                for pair in fused.windows(2) {
                    assert_eq!(bits(&pair[0]), bits(&pair[1]), "{m} {k} {n}");
                }
                for (plain, fused) in plain.iter().zip(fused.iter().flatten()) {
                    assert!((plain - fused).abs() < 1e-3, "{m} {k} {n}: {plain} {fused}");
                }
            }
        }
    }

    #[test]
    fn products_of_every_width_equal_the_definition() {
        for (m, k, n) in [(1, 600, 40), (5, 7, 9), (70, 300, 65), (16, 1030, 12)] {
            let (a, b) = (whole_numbers(m * k, 1), whole_numbers(k * n, 2));
            let expected = by_definition(&a, &b, m, k, n);
            let narrow = |x: &[f64]| x.iter().map(|x| *x as f32).collect::<Vec<_>>();
            let (a32, b32, expected32) = (narrow(&a), narrow(&b), narrow(&expected));
            for width in widths() {
                let threads = Parallelism::None;
                let (left, right) = (MatrixRef::new(&a, m, k), MatrixRef::new(&b, k, n));
                let mut c = vec![f64::NAN; m * n];
                multiply_by(width, &mut c, n, left, right, false, threads);
                assert_eq!(c, expected, "{m} {k} {n}, {width}");

                let (left, right) = (MatrixRef::new(&a32, m, k), MatrixRef::new(&b32, k, n));
                let mut c = vec![f32::NAN; m * n];
                multiply_by(width, &mut c, n, left, right, false, threads);
                assert_eq!(c, expected32, "{m} {k} {n}, {width}");
            }
        }
    }
}
