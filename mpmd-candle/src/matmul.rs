//! Matrix products on the threads that candle computes with.
//!
//! An element of a product is summed by one thread, in an order that depends only on the shapes. So
//! the result has the same bits with any number of threads.

use gemm::Parallelism;

/// A dense read-only matrix, perhaps transposed.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Wraps `data` as a row-major `[rows, columns]` matrix.
    ///
    /// # Panics
    ///
    /// If the length of `data` is not `rows * columns`.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_len(data.len(), rows, columns);
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Returns the transposed matrix on the same memory.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// Computes `c = a b`, or `c += a b` if `add` is set. `c` is row-major `[a.rows, b.columns]`.
///
/// # Panics
///
/// If the shapes do not fit each other.
pub(crate) fn multiply(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    let threads = match rayon::current_num_threads() {
        0 | 1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    product(c, a, b, add, threads);
}

/// Does the same as [`multiply`], on the calling thread alone.
pub(crate) fn multiply_here(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    product(c, a, b, add, Parallelism::None);
}

fn product(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool, threads: Parallelism) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product");
    let (m, k, n) = (a.rows, a.columns, b.columns);
    assert_len(c.len(), m, n);
    if m == 0 || n == 0 || k == 0 {
        // There is nothing to read, and `gemm` must not get pointers of empty slices.
        if !add {
            c.fill(0.0);
        }
        return;
    }
    // SAFETY: no dimension is zero here. `c` holds exactly m * n elements (checked above) and is
    // addressed as row * n + column with row < m and column < n. An operand holds exactly
    // rows * columns elements (checked in `Matrix::new`). Its strides are (columns, 1), or both
    // swapped together with the dimensions. So all accesses lie within the three slices. A slice is
    // at most `isize::MAX` bytes, so no stride overflows `isize`. `c` is borrowed exclusively,
    // hence overlaps neither operand. `gemm` implements f32 and returns when all its threads have
    // ended their work.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            add,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}

fn assert_len(len: usize, rows: usize, columns: usize) {
    let expected = rows.checked_mul(columns);
    assert!(expected == Some(len), "a [{rows}, {columns}] matrix in a slice of {len} elements");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns integers that are small enough for exact sums.
    fn whole_numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 31 + seed * 17) % 13) as f32 - 6.0).collect()
    }

    #[test]
    fn products_equal_the_definition() {
        for (m, k, n) in [(0, 3, 2), (2, 0, 3), (1, 1, 1), (3, 5, 7), (70, 300, 65)] {
            let (a, b) = (whole_numbers(m * k, 1), whole_numbers(k * n, 2));
            let bt: Vec<f32> = (0..n * k).map(|at| b[at % k * n + at / k]).collect();
            let expected: Vec<f32> = (0..m * n)
                .map(|at| (0..k).map(|p| a[at / n * k + p] * b[p * n + at % n]).sum())
                .collect();
            let a = Matrix::new(&a, m, k);
            let mut c = vec![f32::NAN; m * n];
            multiply(&mut c, a, Matrix::new(&b, k, n), false);
            assert_eq!(c, expected, "{m} {k} {n}");
            multiply_here(&mut c, a, Matrix::new(&bt, n, k).t(), true);
            assert!(c.iter().zip(&expected).all(|(c, one)| *c == 2.0 * one), "{m} {k} {n}");
        }
    }

    #[test]
    #[should_panic(expected = "a [3, 4] matrix in a slice of 11 elements")]
    fn short_slice_panics() {
        let _ = Matrix::new(&[0.0; 11], 3, 4);
    }
}
