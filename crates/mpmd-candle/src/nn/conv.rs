//! Convolutions by candle's operation over two dimensions.
//!
//! Candle's own layers have gradients that are wrong or fail for some shapes. Here the input is
//! padded and cut before, which has right gradients for all.

use candle_core::{Result, Tensor, bail};
pub use candle_nn::conv::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1d, ConvTranspose1dConfig, ConvTranspose2d,
    ConvTranspose2dConfig, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias,
};
use candle_nn::{Init, Module, VarBuilder};

use super::values::{in_layer, name_of, single};

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
        Self {
            weight,
            bias,
            config,
            name: None,
        }
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
        let Conv1dConfig {
            padding,
            stride,
            dilation,
            groups,
            ..
        } = self.config;
        let x_dims = x.dims();
        let dims = self.weight.dims();
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
        Self {
            weight,
            bias,
            config,
            name: None,
        }
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

    fn compute(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dConfig {
            padding,
            stride,
            dilation,
            groups,
            ..
        } = self.config;
        let x_dims = x.dims();
        let dims = self.weight.dims();
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

        add_bias(
            convolution.apply(x, &self.weight, batch)?,
            self.bias.as_ref(),
        )
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
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let layer = conv1d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    Ok(Conv1d {
        bias: Some(bias(in_channels, out_channels, &vb)?),
        ..layer
    })
}

/// Creates a convolution with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let shape = (out_channels, in_channels / cfg.groups, kernel_size);
    let weight = vb.get_with_hints(shape, "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    Ok(Conv1d {
        weight,
        bias: None,
        config: cfg,
        name: name_of(&vb),
    })
}

/// Creates a convolution with the variables `weight` and `bias`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let layer = conv2d_no_bias(in_channels, out_channels, kernel_size, cfg, vb.clone())?;
    Ok(Conv2d {
        bias: Some(bias(in_channels, out_channels, &vb)?),
        ..layer
    })
}

/// Creates a convolution with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    cfg: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let shape = (
        out_channels,
        in_channels / cfg.groups,
        kernel_size,
        kernel_size,
    );
    let weight = vb.get_with_hints(shape, "weight", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;

    Ok(Conv2d {
        weight,
        bias: None,
        config: cfg,
        name: name_of(&vb),
    })
}

fn bias(in_channels: usize, out_channels: usize, vb: &VarBuilder) -> Result<Tensor> {
    let bound = 1.0 / (in_channels as f64).sqrt();
    vb.get_with_hints(
        out_channels,
        "bias",
        Init::Uniform {
            lo: -bound,
            up: bound,
        },
    )
}

/// Adds `bias` `[channels]` to `y` `[batch, channels, ...]`.
fn add_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let Some(bias) = bias else { return Ok(y) };
    let mut shape = vec![1; y.rank()];
    shape[1] = bias.dims1()?;
    single(&y)?
        .broadcast_add(&single(bias)?.reshape(shape)?)?
        .to_dtype(y.dtype())
}

/// A convolution over two dimensions.
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
        let Self {
            channels,
            outputs,
            groups,
            input,
            kernel,
            padding,
            stride,
            dilation,
        } = *self;
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

        let dtype = x.dtype();
        let weight = single(weight)?;
        let x = single(x)?.reshape((batch, channels, input[0], input[1]))?;
        let weight = weight.reshape((outputs, channels / groups, kernel[0], kernel[1]))?;

        // Candle's backward pass fails for windows that do not fill the input, so the rest is cut.
        let x = x.pad_with_zeros(2, padding[0], padding[0])?;
        let x = x.pad_with_zeros(3, padding[1], padding[1])?;
        let used = [0, 1].map(|d| (self.output()[d] - 1) * stride + reach[d]);
        let x = x
            .narrow(2, 0, used[0])?
            .narrow(3, 0, used[1])?
            .contiguous()?;

        x.conv2d(&weight, 0, stride, dilation, groups)?
            .to_dtype(dtype)
    }

    fn output(&self) -> [usize; 2] {
        [0, 1].map(|d| {
            let reach = self.dilation * (self.kernel[d] - 1) + 1;
            (self.input[d] + 2 * self.padding[d] - reach) / self.stride + 1
        })
    }
}
