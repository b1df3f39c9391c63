//! Linear layers: products by cuBLAS, through candle.

use std::ops::Range;
use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::op::Add;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};
use mpmd_core::cuda::layers::{self, ActivationCurve, MatrixShape};

use super::op::{CudaLayer, LayerArgument, LayerOp, fit, issue};
use crate::cuda::are_on_cuda;
use crate::cuda::tensor;
use crate::pass::device_gradient;

/// Computes `x wᵀ + b` with a result of shape `shape`. `x` is `[..., inputs]`, `weight` `[outputs,
/// inputs]`, and `bias` `[outputs]`. All are contiguous. Returns `None` for tensors on the CPU.
pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &[usize],
) -> Option<Result<Tensor>> {
    let like = |other: &Tensor| other.dtype() == x.dtype() && other.device().is_cuda();
    if !are_on_cuda(&[x]) || !like(weight) || !bias.is_none_or(like) {
        return None;
    }
    let product = LayerOp(CudaLinearProduct {
        shape: shape.to_vec(),
        group: None,
    });
    Some(match bias {
        None => x.apply_op2(weight, product),
        Some(bias) => x.apply_op3(weight, bias, product),
    })
}

/// Computes `curve(x wᵀ + b)` for the shapes of [`linear`]. Returns `None` if mpmd's kernels
/// cannot.
pub(crate) fn activated(
    [x, weight, bias]: [&Tensor; 3],
    curve: ActivationCurve,
    shape: &[usize],
) -> Option<Result<Tensor>> {
    fit(&[x, weight, bias]).then(|| {
        let product = CudaLinearProduct {
            shape: shape.to_vec(),
            group: None,
        };
        let operation = LayerOp(CudaLinearActivated {
            product,
            curve,
            before: OnceLock::new(),
        });
        x.contiguous()?
            .apply_op3(&weight.contiguous()?, &bias.contiguous()?, operation)
    })
}

/// Computes a product for each group of rows: `y[rows] = x[rows] w[group]ᵀ`. `x` is `[all, inputs]`
/// and `weight` is `[groups, outputs, inputs]`, both contiguous.
pub(crate) fn grouped(
    x: &Tensor,
    weight: &Tensor,
    ranges: impl Iterator<Item = Range<usize>>,
) -> Option<Result<Tensor>> {
    if !are_on_cuda(&[x, weight]) || x.dtype() != weight.dtype() {
        return None;
    }
    let compute = || {
        let outputs = weight.dim(1)?;

        let mut parts = Vec::new();
        for (group, rows) in ranges.enumerate().filter(|(_, rows)| !rows.is_empty()) {
            let product = LayerOp(CudaLinearProduct {
                shape: vec![rows.len(), outputs],
                group: Some(group),
            });
            parts.push(
                x.narrow(0, rows.start, rows.len())?
                    .apply_op2(weight, product)?,
            );
        }

        match parts.is_empty() {
            true => Tensor::zeros((0, outputs), x.dtype(), x.device()),
            false => Tensor::cat(&parts, 0),
        }
    };

    Some(compute())
}

/// Adds a bias `[width]` to rows `[..., width]` on the same device.
pub(crate) fn add_bias(y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    y.contiguous()?
        .apply_op2(&bias.contiguous()?, LayerOp(CudaBiasAddition))
}

/// The matrix product of a linear layer. Its result has shape `shape`.
struct CudaLinearProduct {
    shape: Vec<usize>,
    /// The index of the layer's weight in a tensor of several weights.
    group: Option<usize>,
}

impl CudaLinearProduct {
    fn multiply(&self, x: LayerArgument<'_>, weight: LayerArgument<'_>) -> Result<CudaStorage> {
        let dims = weight.layout.dims();
        let strides = weight.layout.stride();
        let start = weight.layout.start_offset() + self.group.map_or(0, |at| at * strides[0]);
        let strides = &strides[dims.len() - 2..];
        let dims = &dims[dims.len() - 2..];

        let weight_layout = Layout::new(Shape::from(dims), strides.to_vec(), start);
        let outputs = dims[0];
        let inputs = dims[1];

        let rows = x
            .layout
            .shape()
            .elem_count()
            .checked_div(inputs)
            .unwrap_or(0);

        let x_layout = Layout::contiguous_with_offset((rows, inputs), x.layout.start_offset());
        let sizes = (1, rows, outputs, inputs);
        x.storage.matmul(
            weight.storage,
            sizes,
            &x_layout,
            &weight_layout.transpose(0, 1)?,
        )
    }

    /// Returns the gradients of input and weight. The weight's is `None` if a pass adds or defers
    /// it.
    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let own = weight.detach();
        let own = self.group.map_or(Ok(own.clone()), |group| own.get(group))?;
        let (outputs, inputs) = own.dims2()?;

        let gradient = gradient.reshape(((), outputs))?;
        let d_x = match x.track_op() {
            true => Some(gradient.matmul(&own)?.reshape(x.shape())?),
            false => None,
        };

        let x = x.detach().reshape(((), inputs))?;
        let group = self.group;

        let d_weight = device_gradient(weight, move |into| into.add_product(&gradient, &x, group))?;
        Ok((d_x, d_weight))
    }
}

impl CudaLayer<2> for CudaLinearProduct {
    const NAME: &'static str = "linear";

    fn forward(&self, [x, weight]: [LayerArgument<'_>; 2]) -> Result<(CudaStorage, Shape)> {
        Ok((self.multiply(x, weight)?, self.shape.clone().into()))
    }

    fn backward(
        &self,
        [x, weight]: [&Tensor; 2],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        let (d_x, d_weight) = self.gradients(x, weight, gradient)?;
        Ok([d_x, d_weight])
    }
}

impl CudaLayer<3> for CudaLinearProduct {
    const NAME: &'static str = "linear with bias";

    fn forward(&self, [x, weight, bias]: [LayerArgument<'_>; 3]) -> Result<(CudaStorage, Shape)> {
        let y = self.multiply(x, weight)?;
        let shape = Shape::from(self.shape.clone());
        let y = LayerArgument {
            storage: &y,
            layout: &Layout::contiguous(&shape),
        };
        Ok((sum(y, bias)?, shape))
    }

    fn backward(
        &self,
        [x, weight, bias]: [&Tensor; 3],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let (d_x, d_weight) = self.gradients(x, weight, gradient)?;
        Ok([d_x, d_weight, bias_gradient(bias, gradient)?])
    }
}

/// The operation of a linear layer with bias, followed by an activation function.
struct CudaLinearActivated {
    product: CudaLinearProduct,
    curve: ActivationCurve,
    /// The product without bias, which the forward pass saves for the backward pass.
    before: OnceLock<Tensor>,
}

impl CudaLayer<3> for CudaLinearActivated {
    const NAME: &'static str = "linear with activation";

    fn forward(&self, [x, weight, bias]: [LayerArgument<'_>; 3]) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(self.product.shape.clone());
        let before = tensor(self.product.multiply(x, weight)?, &shape);
        let width = bias.layout.shape().elem_count();
        let size = MatrixShape::new(before.elem_count() / width.max(1), width);

        let y = issue(|on| {
            on.made(&shape, before.dtype(), |y| {
                on.with([&before], |[before]| {
                    let bias = Some(bias.part(on)?);
                    layers::activate(&on.kernels(), self.curve, size, before, bias, y)
                })
            })
        })?;

        self.before.get_or_init(|| before);
        Ok((y, shape))
    }

    fn backward(
        &self,
        [x, weight, bias]: [&Tensor; 3],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let Some(before) = self.before.get() else {
            bail!("a linear layer's backward pass before its forward pass");
        };
        let width = bias.elem_count();
        let size = MatrixShape::new(before.elem_count() / width.max(1), width);

        let gradient = issue(|on| {
            on.tensor_like(before, |d_x| {
                on.with([before, bias, gradient], |[before, bias, d_y]| {
                    let cuda = on.kernels();
                    layers::activate_backward(&cuda, self.curve, size, before, Some(bias), d_y, d_x)
                })
            })
        })?;

        let (d_x, d_weight) = self.product.gradients(x, weight, &gradient)?;
        Ok([d_x, d_weight, bias_gradient(bias, &gradient)?])
    }
}

/// Returns the sum of contiguous rows and a bias.
fn sum(y: LayerArgument<'_>, bias: LayerArgument<'_>) -> Result<CudaStorage> {
    let rows = bias.layout.broadcast_as(y.layout.shape().clone())?;
    y.storage.binary_impl::<Add>(bias.storage, y.layout, &rows)
}

/// Sums the contiguous gradient `[..., width]` of a layer's output to the gradient of `bias`
/// `[width]`. Adds it to the pass's gradient at once or later; returns it if no pass collects it.
pub(super) fn bias_gradient(bias: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
    let width = bias.elem_count();
    let gradient = gradient.clone();
    let size = MatrixShape::new(gradient.elem_count() / width.max(1), width);
    let is_fit = fit(&[&gradient]);

    device_gradient(bias, move |into| match is_fit {
        true => into.add_by(|on, sums| {
            on.with([&gradient], |[d]| {
                layers::sum_rows(&on.kernels(), size, d, sums)
            })
        }),
        false => into.add(&gradient.reshape(((), width))?.sum(0)?),
    })
}

/// The operation that adds a bias `[width]` to contiguous rows `[..., width]`.
struct CudaBiasAddition;

impl CudaLayer<2> for CudaBiasAddition {
    const NAME: &'static str = "bias";

    fn forward(&self, [y, bias]: [LayerArgument<'_>; 2]) -> Result<(CudaStorage, Shape)> {
        Ok((sum(y, bias)?, y.layout.shape().clone()))
    }

    fn backward(
        &self,
        [_, bias]: [&Tensor; 2],
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 2]> {
        Ok([Some(gradient.clone()), bias_gradient(bias, gradient)?])
    }
}
