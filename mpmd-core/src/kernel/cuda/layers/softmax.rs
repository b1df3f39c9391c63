//! Softmax of rows and cross-entropy.

use mpmd_device::cuda::kernels::SOFTMAX;

use super::{Cuda, CudaPart, LayerCall, MatrixShape, args, product};
use crate::error::Result;
use mpmd_layout::aval::DType;

/// Computes the softmax of each row of `x`, `[rows, width]`, or with `is_log` the logarithm of the
/// softmax. `y` may be `x`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn softmax<'x>(
    cuda: &Cuda<'_>,
    shape: MatrixShape,
    is_log: bool,
    x: impl Into<CudaPart<'x>>,
    y: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let x = x.into();
    let y = y.into();

    let call = LayerCall::new(cuda, "softmax", &SOFTMAX, &x)?;
    let MatrixShape { rows, width } = shape;
    let all = shape.elements();
    call.has(&[("x", &x, all), ("y", &y, all)])?;
    call.writes(&[&y])?;

    let args = args![width, u32::from(is_log), x, y];
    call.blocks("softmax", rows, args)
}

/// Computes the gradient of `x` from the result `y` of [`softmax`] and its gradient `d_y`. `d_x`
/// may be `d_y`.
///
/// # Errors
///
/// If lengths or dtypes do not fit, or the driver refuses the work.
pub fn softmax_backward<'x>(
    cuda: &Cuda<'_>,
    shape: MatrixShape,
    is_log: bool,
    y: impl Into<CudaPart<'x>>,
    d_y: impl Into<CudaPart<'x>>,
    d_x: impl Into<CudaPart<'x>>,
) -> Result<()> {
    let y = y.into();
    let d_y = d_y.into();
    let d_x = d_x.into();

    let call = LayerCall::new(cuda, "gradient of a softmax", &SOFTMAX, &y)?;
    let MatrixShape { rows, width } = shape;
    let all = shape.elements();
    call.has(&[("y", &y, all), ("d_y", &d_y, all), ("d_x", &d_x, all)])?;
    call.writes(&[&d_x])?;

    let args = args![width, u32::from(is_log), y, d_y, d_x];
    call.blocks("softmax_backward", rows, args)
}

/// The cross-entropy of target classes under rows of logits, in nats.
#[derive(Clone, Copy, Debug)]
pub struct CudaCrossEntropy<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of classes: the length of a row of logits.
    pub classes: usize,
    /// The class of each row, of u8, u32 or i64.
    pub targets: CudaPart<'a>,
    /// The weight of each row, `f32`. Without weights, each row has weight 1. A row of weight 0 may
    /// have any target.
    pub weights: Option<CudaPart<'a>>,
}

impl CudaCrossEntropy<'_> {
    /// Sets `total`, two numbers of `f32`, to the weighted sum of all losses and the sum of the
    /// weights. `normalizers`, `[rows, 2]` of `f32`, gets the largest logit of each row and one
    /// over the sum of its exponentials, for [`backward`](Self::backward). A target that is no
    /// class gives NaN.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, the device has no memory left, or the driver refuses
    /// the work.
    pub fn forward<'x>(
        &self,
        cuda: &Cuda<'_>,
        logits: impl Into<CudaPart<'x>>,
        total: impl Into<CudaPart<'x>>,
        normalizers: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let logits = logits.into();
        let total = total.into();
        let normalizers = normalizers.into();

        let call = LayerCall::new(cuda, "cross-entropy", &SOFTMAX, &logits)?;
        let bytes = self.check(&call, &logits, &normalizers)?;
        call.has_f32(&[("the total", &total, 2)])?;
        call.writes(&[&total, &normalizers])?;

        let Self {
            rows,
            classes,
            targets,
            weights,
        } = *self;
        let losses = cuda.scratch(DType::F32, rows)?;
        let args = args![
            classes,
            logits,
            targets,
            bytes,
            weights,
            &losses,
            normalizers
        ];
        call.blocks("cross_entropy", rows, args)?;

        let args = args![rows, &losses, weights, total];
        call.blocks("loss_total", 1, args)
    }

    /// Computes the gradient of the logits: the gradient of the weighted sum of losses, times
    /// `scale`. If `d_loss`, an `f32` on the device, is given, also multiplies by it. `d_logits`
    /// may be `logits`.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, or the driver refuses the work.
    pub fn backward<'x>(
        &self,
        cuda: &Cuda<'_>,
        logits: impl Into<CudaPart<'x>>,
        normalizers: impl Into<CudaPart<'x>>,
        scale: f32,
        d_loss: Option<CudaPart<'x>>,
        d_logits: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let logits = logits.into();
        let normalizers = normalizers.into();
        let d_logits = d_logits.into();

        let call = LayerCall::new(cuda, "gradient of a cross-entropy", &SOFTMAX, &logits)?;
        let bytes = self.check(&call, &logits, &normalizers)?;
        let Self {
            rows,
            classes,
            targets,
            weights,
        } = *self;

        call.has(&[("d_logits", &d_logits, product(&[rows, classes]))])?;
        d_loss
            .iter()
            .try_for_each(|d_loss| call.has_f32(&[("d_loss", d_loss, 1)]))?;
        call.writes(&[&d_logits])?;

        let args = args![
            classes,
            logits,
            targets,
            bytes,
            weights,
            normalizers,
            scale,
            d_loss,
            d_logits
        ];
        call.blocks("cross_entropy_backward", rows, args)
    }

    /// Checks the arguments of the forward and backward pass. Returns the bytes per target.
    fn check(
        &self,
        call: &LayerCall<'_>,
        logits: &CudaPart<'_>,
        normalizers: &CudaPart<'_>,
    ) -> Result<u32> {
        let Self {
            rows,
            classes,
            targets,
            weights,
        } = self;

        call.has(&[("the logits", logits, product(&[*rows, *classes]))])?;
        call.has_f32(&[("normalizers", normalizers, product(&[*rows, 2]))])?;
        weights
            .iter()
            .try_for_each(|weights| call.has_f32(&[("the weights", weights, *rows)]))?;
        call.indices("the targets", targets, *rows)
    }
}
