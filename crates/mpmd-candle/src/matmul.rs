//! Matrix products on the threads that candle computes with, or on the calling thread.

use mpmd_device::cpu::matmul::{self, Parallelism};

pub(crate) type Matrix<'a> = matmul::MatrixRef<'a, f32>;

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
    matmul::multiply(c, b.columns(), a, b, add, threads);
}

/// Does the same as [`multiply`], on the calling thread alone.
pub(crate) fn multiply_here(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, add: bool) {
    matmul::multiply(c, b.columns(), a, b, add, Parallelism::None);
}
