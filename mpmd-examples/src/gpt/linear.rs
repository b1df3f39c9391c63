//! The arithmetic of a linear layer, `x w + bias`.
//!
//! Sums run over rows in order on one thread, so results do not depend on the number of processes.

use crate::math::{Real, matmul, matmul_tn};

/// The sizes of a layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct LinearShape {
    /// Number of rows of the batch.
    pub(crate) rows: usize,
    /// Number of columns of the layer's input.
    pub(crate) inputs: usize,
    /// Number of columns of the layer's output.
    pub(crate) outputs: usize,
}

/// Computes `y = x w + bias`.
///
/// Shapes: `x` `[rows, inputs]`, `w` `[inputs, outputs]`, `bias` `[outputs]`, `y` `[rows,
/// outputs]`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub(crate) fn linear_forward<T: Real>(
    shape: LinearShape,
    y: &mut [T],
    x: &[T],
    w: &[T],
    bias: &[T],
) {
    let LinearShape { rows, inputs, outputs } = shape;
    assert_eq!((y.len(), bias.len()), (rows * outputs, outputs), "elements of output and bias");
    if outputs == 0 {
        return;
    }
    for y in y.chunks_exact_mut(outputs) {
        y.copy_from_slice(bias);
    }
    matmul(y, x, w, rows, inputs, outputs, true);
}

/// *Adds* the gradients of weights and bias: `dw += xᵀ dy`, and `dbias +=` the sum of the rows of
/// `dy`, the gradient of the output.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub(crate) fn linear_backward_weights<T: Real>(
    shape: LinearShape,
    dw: &mut [T],
    dbias: &mut [T],
    x: &[T],
    dy: &[T],
) {
    let LinearShape { rows, inputs, outputs } = shape;
    assert_eq!((dbias.len(), dy.len()), (outputs, rows * outputs), "elements of bias and outputs");
    matmul_tn(dw, x, dy, inputs, rows, outputs, true);
    if outputs == 0 {
        return;
    }
    for dy in dy.chunks_exact(outputs) {
        for (dbias, dy) in dbias.iter_mut().zip(dy) {
            *dbias += *dy;
        }
    }
}
