//! Matrix products on the threads that candle computes with.
//!
//! An element of a product is summed by one thread, in an order that depends only on the shapes. So
//! the result has the same bits with any number of threads.

#![allow(unsafe_code)]

use gemm::Parallelism;

/// A read-only matrix with dense rows, perhaps transposed.
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

    /// Wraps the `[rows, columns]` matrix whose row `i` begins at element `i * stride` of `data`.
    ///
    /// # Panics
    ///
    /// If a row is longer than `stride`, or `data` is too short.
    pub(crate) fn strided(data: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        assert_rows(data.len(), rows, columns, stride);
        Self { data, rows, columns, row_stride: stride, column_stride: 1 }
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
    product((c, b.columns), a, b, add, threads);
}

/// Does the same as [`multiply`], on the calling thread alone.
pub(crate) fn multiply_here(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    product((c, b.columns), a, b, add, Parallelism::None);
}

/// Does the same as [`multiply_here`] with an output whose row `i` begins at element `i * stride`
/// of `c`. Leaves the elements between the rows.
///
/// # Panics
///
/// If the shapes do not fit each other, or a row is longer than `stride`.
pub(crate) fn multiply_strided(
    (c, stride): (&mut [f32], usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
    add: bool,
) {
    product((c, stride), a, b, add, Parallelism::None);
}

fn product(
    (c, stride): (&mut [f32], usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
    add: bool,
    threads: Parallelism,
) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product");
    let (m, k, n) = (a.rows, a.columns, b.columns);
    assert_rows(c.len(), m, n, stride);
    if m == 0 || n == 0 || k == 0 {
        // There is nothing to read, and `gemm` must not get pointers of empty slices.
        if !add && n > 0 {
            c.chunks_mut(stride).take(m).for_each(|row| row[..n].fill(0.0));
        }
        return;
    }
    // SAFETY: no dimension is zero here. `c` is addressed as row * stride + column with row < m and
    // column < n <= stride, which lies within its elements (checked above), and no two places are
    // equal. An operand is addressed in the same way within its own elements (checked where it was
    // made), or with its strides swapped together with the dimensions. So all accesses lie within
    // the three slices. A slice is at most `isize::MAX` bytes, so no stride that is used overflows
    // `isize`. `c` is borrowed exclusively, hence overlaps neither operand. `gemm` implements f32
    // and returns when all its threads have ended their work.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            stride as isize,
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

fn assert_rows(len: usize, rows: usize, columns: usize, stride: usize) {
    let last = rows.saturating_sub(1).checked_mul(stride);
    let end = last.and_then(|last| last.checked_add(if rows == 0 { 0 } else { columns }));
    assert!(
        columns <= stride && end.is_some_and(|end| end <= len),
        "a [{rows}, {columns}] matrix with rows at every {stride} in a slice of {len} elements"
    );
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
    fn rows_may_lie_apart() {
        let (a, b) = (whole_numbers(5 * 9, 1), whole_numbers(3 * 8, 2));
        let mut c = [7.0; 5 * 6];
        let (left, right) = (Matrix::strided(&a[2..], 5, 3, 9), Matrix::strided(&b[1..], 3, 4, 8));
        multiply_strided((&mut c[1..], 6), left, right, false);
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
        let _ = Matrix::strided(&[0.0; 13], 3, 4, 5);
    }

    #[test]
    #[should_panic(expected = "a [3, 4] matrix in a slice of 11 elements")]
    fn short_slice_panics() {
        let _ = Matrix::new(&[0.0; 11], 3, 4);
    }
}
