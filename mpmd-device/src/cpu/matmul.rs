//! Matrix products on slices, for CPU kernels.
//!
//! Matrices are dense and row-major. Every product runs on the calling thread alone, because a
//! device has one thread. The same operands give the same bits on every call, regardless of the
//! number of processes.

use std::any::type_name;

/// An element that matrices can be multiplied over: `f32` or `f64`.
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

/// Keeps others from implementing `Scalar`: `gemm` panics for any other type.
mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// Computes `c = a b`, or `c += a b` if `accumulate` is set. `c` is `[m, n]`, `a` is `[m, k]`, `b`
/// is `[k, n]`.
///
/// Without `accumulate` the old content of `c` is not read. With `k == 0` the product is all zeros.
///
/// # Panics
///
/// If a slice is not as long as its shape says.
pub fn matmul<T: Scalar>(
    c: &mut [T],
    a: &[T],
    b: &[T],
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    product(c, Operand::rows("a", a, m, k), Operand::rows("b", b, k, n), accumulate);
}

/// Computes `c = a bᵀ`, or `c += a bᵀ` if `accumulate` is set. `c` is `[m, n]`, `a` is `[m, k]`,
/// `b` is `[n, k]`.
///
/// Without `accumulate` the old content of `c` is not read. With `k == 0` the product is all zeros.
///
/// # Panics
///
/// If a slice is not as long as its shape says.
pub fn matmul_nt<T: Scalar>(
    c: &mut [T],
    a: &[T],
    b: &[T],
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    product(c, Operand::rows("a", a, m, k), Operand::rows("b", b, n, k).transposed(), accumulate);
}

/// Computes `c = aᵀ b`, or `c += aᵀ b` if `accumulate` is set. `c` is `[m, n]`, `a` is `[k, m]`,
/// `b` is `[k, n]`.
///
/// Without `accumulate` the old content of `c` is not read. With `k == 0` the product is all zeros.
///
/// # Panics
///
/// If a slice is not as long as its shape says.
pub fn matmul_tn<T: Scalar>(
    c: &mut [T],
    a: &[T],
    b: &[T],
    m: usize,
    k: usize,
    n: usize,
    accumulate: bool,
) {
    product(c, Operand::rows("a", a, k, m).transposed(), Operand::rows("b", b, k, n), accumulate);
}

/// A read-only matrix. Its strides, in elements, stay within its slice.
struct Operand<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Operand<'a, T> {
    /// Wraps `data` as a dense row-major `[rows, columns]` matrix. Panics if the length is wrong,
    /// so products need no other check.
    fn rows(name: &str, data: &'a [T], rows: usize, columns: usize) -> Self {
        assert_len(name, data.len(), rows, columns);
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Returns the transposed matrix on the same memory.
    fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

fn assert_len(name: &str, len: usize, rows: usize, columns: usize) {
    let asked = rows.checked_mul(columns);
    assert!(
        asked == Some(len),
        "matrix {name} is [{rows}, {columns}] but its slice has {len} elements"
    );
}

fn product<T: Scalar>(c: &mut [T], a: Operand<'_, T>, b: Operand<'_, T>, accumulate: bool) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product of {}", type_name::<T>());
    let (m, k, n) = (a.rows, a.columns, b.columns);
    assert_len("c", c.len(), m, n);
    if m == 0 || n == 0 || k == 0 {
        // There is nothing to read, and `gemm` must not get pointers of empty slices.
        if !accumulate {
            c.fill(T::ZERO);
        }
        return;
    }
    // SAFETY: no dimension is zero here. `c` holds exactly m * n elements (checked above). It is
    // addressed as row * n + column with row < m and column < n, so every access lies within it.
    // Each operand holds exactly rows * columns elements (checked in `Operand::rows`). Its strides
    // are (columns, 1), or both swapped together with the dimensions, so every access lies within
    // its slice too. A slice is at most `isize::MAX` bytes, so no stride overflows `isize`. `c` is
    // borrowed exclusively, hence overlaps neither operand. `T` is `f32` or `f64` (sealed), both of
    // which `gemm` implements. With `read_dst` false `c` is only written, and it is initialised
    // anyway.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `len` integers small enough that every sum is exact, so that results can be compared
    /// bit by bit.
    fn whole_numbers(len: usize, seed: usize) -> Vec<f64> {
        (0..len).map(|i| ((i * 31 + seed * 17) % 13) as f64 - 6.0).collect()
    }

    fn transpose(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
        (0..columns).flat_map(|j| (0..rows).map(move |i| x[i * columns + j])).collect()
    }

    fn by_definition(a: &[f64], b: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
        (0..m * n).map(|at| (0..k).map(|p| a[at / n * k + p] * b[p * n + at % n]).sum()).collect()
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
        let exact: f64 = (0..k).map(|p| f64::from(a[5 * k + p]) * f64::from(b[p * n + 9])).sum();
        assert!((f64::from(f32::from_bits(first[5 * n + 9])) - exact).abs() < 1e-4);
    }

    #[test]
    #[should_panic(expected = "matrix b is [3, 4] but its slice has 11 elements")]
    fn short_slice_panics() {
        matmul(&mut [0.0f32; 8], &[0.0; 6], &[0.0; 11], 2, 3, 4, false);
    }

    #[test]
    #[should_panic(expected = "matrix a is")]
    fn overflowing_shape_panics() {
        matmul(&mut [0.0f32; 0], &[0.0; 0], &[0.0; 0], usize::MAX, 2, 0, false);
    }
}
