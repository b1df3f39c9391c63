//! Convolutions as matrix products of windows of the input.
//!
//! Candle's own gradients are wrong or fail for some shapes. The kernels here copy the windows of
//! one sequence or image at a time, and drop them; the backward pass copies them again.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
pub use candle_nn::conv::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig, ConvTranspose2d,
    ConvTranspose2dConfig, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias,
};
use candle_nn::{BatchNorm, Init, Module, VarBuilder};

use super::values::{are_fast, in_layer, name_of, result, single, slice, tensor_like, values};
use crate::matmul::{Matrix, multiply};
use crate::pass::weight_gradient;

/// A convolution over the last dimension: `[batch, channels, length]`.
#[derive(Clone, Debug)]
pub struct Conv1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv1dConfig,
    name: Option<String>,
}

impl Conv1d {
    /// Creates a layer from its weight `[out_channels, in_channels / groups, size]` and its bias
    /// `[out_channels]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv1dConfig) -> Self {
        Self { weight, bias, config, name: None }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Conv1dConfig {
        &self.config
    }

    /// Returns the weight: `[out_channels, in_channels / groups, size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias: `[out_channels]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    fn compute(&self, x: &Tensor) -> Result<Tensor> {
        let Conv1dConfig { padding, stride, dilation, groups, .. } = self.config;
        let (x_dims, dims) = (x.dims(), self.weight.dims());
        let (&[batch, channels, length], &[outputs, _, size]) = (x_dims, dims) else {
            bail!("the input is {x_dims:?} and the weight {dims:?}: expected 3 dimensions each");
        };
        let convolution = Convolution {
            channels,
            outputs,
            groups,
            input: [1, length],
            kernel: [1, size],
            padding: [0, padding],
            stride,
            dilation,
        };
        let y = convolution.apply(x, &self.weight, batch)?.squeeze(2)?;
        add_bias(y, self.bias.as_ref())
    }
}

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        in_layer(self.name.as_deref(), self.compute(x))
    }
}

/// A convolution over the last two dimensions: `[batch, channels, height, width]`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
    name: Option<String>,
}

impl Conv2d {
    /// Creates a layer from its weight `[out_channels, in_channels / groups, height, width]` and
    /// its bias `[out_channels]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Self {
        Self { weight, bias, config, name: None }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Conv2dConfig {
        &self.config
    }

    /// Returns the weight: `[out_channels, in_channels / groups, height, width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias: `[out_channels]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns a layer that does the same as this one followed by `bn` in evaluation.
    ///
    /// # Errors
    ///
    /// If `bn` has no weight and bias, or the shapes do not fit each other.
    pub fn absorb_bn(&self, bn: &BatchNorm) -> Result<Self> {
        let like = candle_nn::Conv2d::new(self.weight.clone(), self.bias.clone(), self.config);
        let absorbed = like.absorb_bn(bn)?;
        Ok(Self {
            weight: absorbed.weight().clone(),
            bias: absorbed.bias().cloned(),
            ..self.clone()
        })
    }

    fn compute(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dConfig { padding, stride, dilation, groups, .. } = self.config;
        let (x_dims, dims) = (x.dims(), self.weight.dims());
        let (&[batch, channels, height, width], &[outputs, _, rows, columns]) = (x_dims, dims)
        else {
            bail!("the input is {x_dims:?} and the weight {dims:?}: expected 4 dimensions each");
        };
        let convolution = Convolution {
            channels,
            outputs,
            groups,
            input: [height, width],
            kernel: [rows, columns],
            padding: [padding; 2],
            stride,
            dilation,
        };
        add_bias(convolution.apply(x, &self.weight, batch)?, self.bias.as_ref())
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        in_layer(self.name.as_deref(), self.compute(x))
    }
}

/// Creates a convolution with the variables `weight` and `bias`.
///
/// # Errors
///
/// As [`VarBuilder::get_with_hints`].
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let layer = conv1d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    Ok(Conv1d { bias: Some(bias(in_channels, out_channels, &vb)?), ..layer })
}

/// Creates a convolution with the variable `weight`.
///
/// # Errors
///
/// As [`VarBuilder::get_with_hints`].
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let shape = (out_channels, in_channels / cfg.groups, kernel_size);
    let weight = vb.get_with_hints(shape, "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Conv1d { weight, bias: None, config: cfg, name: name_of(&vb) })
}

/// Creates a convolution with the variables `weight` and `bias`.
///
/// # Errors
///
/// As [`VarBuilder::get_with_hints`].
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let layer = conv2d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    Ok(Conv2d { bias: Some(bias(in_channels, out_channels, &vb)?), ..layer })
}

/// Creates a convolution with the variable `weight`.
///
/// # Errors
///
/// As [`VarBuilder::get_with_hints`].
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let shape = (out_channels, in_channels / cfg.groups, kernel_size, kernel_size);
    let weight = vb.get_with_hints(shape, "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Conv2d { weight, bias: None, config: cfg, name: name_of(&vb) })
}

fn bias(in_channels: usize, out_channels: usize, vb: &VarBuilder) -> Result<Tensor> {
    let bound = 1.0 / (in_channels as f64).sqrt();
    vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })
}

/// Adds `bias` `[channels]` to `y` `[batch, channels, ...]`.
fn add_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let Some(bias) = bias else { return Ok(y) };
    let mut shape = vec![1; y.rank()];
    shape[1] = bias.dims1()?;
    single(&y)?.broadcast_add(&single(bias)?.reshape(shape)?)?.to_dtype(y.dtype())
}

/// The operation of a convolution over two dimensions.
#[derive(Clone, Copy)]
struct Convolution {
    channels: usize,
    outputs: usize,
    groups: usize,
    input: [usize; 2],
    kernel: [usize; 2],
    padding: [usize; 2],
    stride: usize,
    dilation: usize,
}

impl Convolution {
    /// Returns the result `[batch, outputs, height, width]`.
    fn apply(&self, x: &Tensor, weight: &Tensor, batch: usize) -> Result<Tensor> {
        let Self { channels, outputs, groups, input, kernel, padding, stride, dilation } = *self;
        let reach = kernel.map(|size| dilation * size.saturating_sub(1) + 1);
        let fits = (0..2).all(|d| kernel[d] > 0 && input[d] + 2 * padding[d] >= reach[d]);
        let divides = groups > 0
            && channels > 0
            && input[0] * input[1] > 0
            && channels == groups * weight.dim(1)?
            && outputs.is_multiple_of(groups)
            && stride > 0;
        if !fits || !divides {
            bail!(
                "the input is {:?} and the weight {:?}: expected {} input channels in {groups} \
                 groups and a kernel that fits into the padded input",
                x.dims(),
                weight.dims(),
                weight.dim(1)? * groups
            );
        }
        let (x, weight) = (x.contiguous()?, weight.contiguous()?);
        if are_fast(&[&x, &weight]) {
            return x.apply_op2(&weight, *self);
        }
        let x = x.reshape((batch, channels, input[0], input[1]))?;
        let weight = weight.reshape((outputs, channels / groups, kernel[0], kernel[1]))?;
        // Candle's backward pass fails for windows that do not fill the input, so the rest is cut.
        let x = x.pad_with_zeros(2, padding[0], padding[0])?;
        let x = x.pad_with_zeros(3, padding[1], padding[1])?;
        let used = [0, 1].map(|d| (self.output()[d] - 1) * stride + reach[d]);
        let x = x.narrow(2, 0, used[0])?.narrow(3, 0, used[1])?.contiguous()?;
        x.conv2d(&weight, 0, stride, dilation, groups)
    }

    fn output(&self) -> [usize; 2] {
        [0, 1].map(|d| {
            let reach = self.dilation * (self.kernel[d] - 1) + 1;
            (self.input[d] + 2 * self.padding[d] - reach) / self.stride + 1
        })
    }

    /// Returns the lengths of one group: of its input, its windows' rows, and its output.
    fn lengths(&self) -> [usize; 3] {
        let per_group = self.channels / self.groups;
        let places: usize = self.output().iter().product();
        [
            per_group * self.input.iter().product::<usize>(),
            per_group * self.kernel.iter().product::<usize>(),
            self.outputs / self.groups * places,
        ]
    }

    /// Calls `f` with (index in the input, index in the windows) for each element of the windows
    /// `[channels / groups * kernel, output]` of one group that is not padding.
    fn for_windows(&self, mut f: impl FnMut(usize, usize)) {
        let ([height, width], [out_height, out_width]) = (self.input, self.output());
        // The position in the input, if it is not padding.
        let place = |d: usize, out: usize, kernel: usize| {
            let place = out * self.stride + kernel * self.dilation;
            place.checked_sub(self.padding[d]).filter(|place| *place < self.input[d])
        };
        let mut window = 0;
        for channel in 0..self.channels / self.groups {
            for (i, j) in pairs(self.kernel) {
                for out_row in 0..out_height {
                    if let Some(row) = place(0, out_row, i) {
                        let start = (channel * height + row) * width;
                        for column in 0..out_width {
                            if let Some(at) = place(1, column, j) {
                                f(start + at, window + column);
                            }
                        }
                    }
                    window += out_width;
                }
            }
        }
    }

    /// Calls `f` with the index of each group of each example, its group, and its windows.
    fn for_groups(&self, x: &[f32], mut f: impl FnMut(usize, usize, &[f32])) {
        let [input, depth, _] = self.lengths();
        let mut windows = vec![0.0; depth * self.output().iter().product::<usize>()];
        for (at, x) in x.chunks_exact(input).enumerate() {
            self.for_windows(|from, to| windows[to] = x[from]);
            f(at, at % self.groups, &windows);
        }
    }
}

fn pairs([rows, columns]: [usize; 2]) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |i| (0..columns).map(move |j| (i, j)))
}

impl CustomOp2 for Convolution {
    fn name(&self) -> &'static str {
        "convolution"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = slice(weight, weight_layout)?;
        let ([_, depth, out_length], [height, width]) = (self.lengths(), self.output());
        let rows = self.outputs / self.groups;
        let batch = x_layout.dims()[0];
        let mut out = vec![0.0; batch * self.outputs * height * width];
        self.for_groups(&slice(x, x_layout)?, |at, group, windows| {
            let weight = Matrix::new(&weight[group * rows * depth..][..rows * depth], rows, depth);
            let windows = Matrix::new(windows, depth, height * width);
            multiply(&mut out[at * out_length..][..out_length], weight, windows, false);
        });
        result(out, (batch, self.outputs, height, width), x)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let ([input, depth, out_length], rows) = (self.lengths(), self.outputs / self.groups);
        let places = out_length.checked_div(rows).unwrap_or(0);
        let d_x = if x.track_op() {
            let (gradient, weight) = (values(&gradient)?, values(weight)?);
            let mut d_x = vec![0.0; x.elem_count()];
            let mut d_windows = vec![0.0; depth * places];
            for (at, d_x) in d_x.chunks_exact_mut(input).enumerate() {
                let weight = &weight[at % self.groups * rows * depth..][..rows * depth];
                let d_out = Matrix::new(&gradient[at * out_length..][..out_length], rows, places);
                multiply(&mut d_windows, Matrix::new(weight, rows, depth).t(), d_out, false);
                self.for_windows(|to, from| d_x[to] += d_windows[from]);
            }
            Some(tensor_like(d_x, x)?)
        } else {
            None
        };
        let (operation, x) = (*self, x.detach());
        let d_weight = weight_gradient(weight, move |into| {
            let (x, gradient) = (values(&x)?, values(&gradient)?);
            operation.for_groups(&x, |at, group, windows| {
                let d_out = Matrix::new(&gradient[at * out_length..][..out_length], rows, places);
                let into = &mut into[group * rows * depth..][..rows * depth];
                multiply(into, d_out, Matrix::new(windows, depth, places).t(), true);
            });
            Ok(())
        })?;
        Ok((d_x, d_weight))
    }
}
