//! Matrix products on the threads that candle computes with, or on the calling thread.

use gemm::Parallelism;
use mpmd_device::cpu::matmul;

pub(crate) type Matrix<'a> = matmul::Matrix<'a, f32>;

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
    matmul::multiply((c, b.columns()), a, b, add, threads);
}

/// Does the same as [`multiply`], on the calling thread alone.
pub(crate) fn multiply_here(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    multiply_strided((c, b.columns()), a, b, add);
}

/// Does the same as [`multiply_here`] with an output whose row `i` begins at element `i * stride`
/// of `c`. Leaves the elements between the rows.
///
/// # Panics
///
/// If the shapes do not fit each other, or a row is longer than `stride`.
pub(crate) fn multiply_strided(c: (&mut [f32], usize), a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    matmul::multiply(c, a, b, add, Parallelism::None);
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
}
