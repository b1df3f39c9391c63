//! Layer norm and RMS norm.

use mpmd_device::cuda::kernels::NORM;

use super::columns::{RowChunks, finish};
use super::{Cuda, CudaPart, LayerCall, ResultTarget, args, product};
use crate::error::Result;
use mpmd_layout::aval::DType;

/// A layer norm or RMS norm: scales each row to variance 1, then scales and shifts each column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CudaNorm {
    /// Number of rows.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
    /// Number added to the variance.
    pub eps: f32,
    /// True for a layer norm, which gives rows mean 0. False for an RMS norm, which divides by the
    /// root of the mean square.
    pub remove_mean: bool,
}

impl CudaNorm {
    /// Computes `y`, `[rows, width]`, from `x` of the same shape. `weight` and `bias` have one
    /// element for each column. `statistics`, `[rows, 2]` of `f32`, gets each row's mean and one
    /// over its standard deviation, for the backward pass. `y` may be `x`.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, or the driver refuses the work.
    pub fn forward<'x>(
        &self,
        cuda: &Cuda<'_>,
        x: impl Into<CudaPart<'x>>,
        weight: CudaPart<'x>,
        bias: Option<CudaPart<'x>>,
        y: impl Into<CudaPart<'x>>,
        statistics: impl Into<CudaPart<'x>>,
    ) -> Result<()> {
        let Self {
            rows,
            width,
            eps,
            remove_mean,
        } = *self;

        let x = x.into();
        let y = y.into();
        let statistics = statistics.into();

        let call = LayerCall::new(cuda, "norm", &NORM, &x)?;
        let all = product(&[rows, width]);
        call.has(&[
            ("x", &x, all),
            ("the weight", &weight, width),
            ("y", &y, all),
        ])?;
        bias.iter()
            .try_for_each(|bias| call.has(&[("the bias", bias, width)]))?;
        call.has_f32(&[("statistics", &statistics, product(&[rows, 2]))])?;
        call.writes(&[&y, &statistics])?;

        let args = args![
            width,
            eps,
            u32::from(remove_mean),
            x,
            weight,
            bias,
            y,
            statistics
        ];
        call.blocks("norm_forward", rows, args)
    }

    /// Computes the gradient of `x` from `d_y`, both `[rows, width]`, and the `statistics` of the
    /// forward pass. `d_x` may be `d_y`.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, or the driver refuses the work.
    pub fn backward<'x>(
        &self,
        cuda: &Cuda<'_>,
        x: impl Into<CudaPart<'x>>,
        weight: impl Into<CudaPart<'x>>,
        d_y: impl Into<CudaPart<'x>>,
        statistics: impl Into<CudaPart<'x>>,
        d_x: impl Into<ResultTarget<'x>>,
    ) -> Result<()> {
        let Self {
            rows,
            width,
            remove_mean,
            ..
        } = *self;

        let x = x.into();
        let weight = weight.into();
        let d_y = d_y.into();
        let statistics = statistics.into();
        let ResultTarget { part: d_x, adds } = d_x.into();

        let call = LayerCall::new(cuda, "gradient of a norm", &NORM, &x)?;
        let all = product(&[rows, width]);
        call.has(&[("x", &x, all), ("the weight", &weight, width)])?;
        call.has(&[("d_y", &d_y, all), ("d_x", &d_x, all)])?;
        call.has_f32(&[("statistics", &statistics, product(&[rows, 2]))])?;
        call.writes(&[&d_x])?;

        let args = args![
            width,
            u32::from(remove_mean),
            x,
            weight,
            d_y,
            statistics,
            d_x,
            u32::from(adds)
        ];
        call.blocks("norm_backward", rows, args)
    }

    /// Computes the gradients of weight and bias, `f32`, from `x`, `d_y` and the `statistics` of
    /// the forward pass.
    ///
    /// # Errors
    ///
    /// If lengths or dtypes do not fit, the device has no memory left, or the driver refuses
    /// the work.
    pub fn backward_weight<'x>(
        &self,
        cuda: &Cuda<'_>,
        x: impl Into<CudaPart<'x>>,
        d_y: impl Into<CudaPart<'x>>,
        statistics: impl Into<CudaPart<'x>>,
        d_weight: impl Into<ResultTarget<'x>>,
        d_bias: Option<ResultTarget<'x>>,
    ) -> Result<()> {
        let Self { rows, width, .. } = *self;

        let x = x.into();
        let d_y = d_y.into();
        let statistics = statistics.into();
        let d_weight = d_weight.into();

        let call = LayerCall::new(cuda, "weight gradient of a norm", &NORM, &x)?;
        let all = product(&[rows, width]);
        call.has(&[("x", &x, all), ("d_y", &d_y, all)])?;
        call.has_f32(&[("statistics", &statistics, product(&[rows, 2]))])?;

        let chunks = RowChunks::of(rows);
        let sums = cuda.scratch(DType::F32, product(&[2, chunks.count, width]))?;
        if all > 0 {
            let args = args![
                rows,
                width,
                chunks.rows,
                x,
                d_y,
                statistics,
                sums.at(0),
                sums.at(chunks.count * width)
            ];
            call.launch("norm_weight_sums", chunks.grid(width), args)?;
        }

        finish(&call, chunks, width, sums.at(0), d_weight)?;
        match d_bias {
            Some(d_bias) => finish(&call, chunks, width, sums.at(chunks.count * width), d_bias),
            None => Ok(()),
        }
    }
}
