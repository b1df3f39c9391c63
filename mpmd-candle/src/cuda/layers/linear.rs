//! Linear layers: products by cuBLAS, through candle.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::op::Add;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail,
};

use crate::cuda::are_on_cuda;
use crate::pass::device_gradient;

/// Computes `x wᵀ + b` with a result of this shape. `x` is `[..., inputs]`, `weight` `[outputs,
/// inputs]`, and `bias` `[outputs]`. All are contiguous.
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
    let product = Product { shape: shape.to_vec(), group: None };
    Some(match bias {
        None => x.apply_op2(weight, product),
        Some(bias) => x.apply_op3(weight, bias, product),
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
            let product = Product { shape: vec![rows.len(), outputs], group: Some(group) };
            parts.push(x.narrow(0, rows.start, rows.len())?.apply_op2(weight, product)?);
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
    y.contiguous()?.apply_op2(&bias.contiguous()?, AddBias)
}

/// The operation of a layer with a result of this shape.
struct Product {
    shape: Vec<usize>,
    /// The index of the weight among several.
    group: Option<usize>,
}

impl Product {
    /// Returns the weight `[outputs, inputs]` that the layer uses.
    fn weight(&self, weight: &Tensor) -> Result<Tensor> {
        self.group.map_or(Ok(weight.clone()), |group| weight.get(group))
    }

    fn forward(
        &self,
        (x, x_layout): (&CudaStorage, &Layout),
        (weight, weight_layout): (&CudaStorage, &Layout),
    ) -> Result<CudaStorage> {
        let (dims, strides) = (weight_layout.dims(), weight_layout.stride());
        let (dims, strides) = (&dims[dims.len() - 2..], &strides[dims.len() - 2..]);
        let start = weight_layout.start_offset()
            + self.group.map_or(0, |group| group * weight_layout.stride()[0]);
        let weight_layout = Layout::new(Shape::from(dims), strides.to_vec(), start);
        let (outputs, inputs) = (dims[0], dims[1]);
        let rows = x_layout.shape().elem_count().checked_div(inputs).unwrap_or(0);
        let x_layout = Layout::contiguous_with_offset((rows, inputs), x_layout.start_offset());
        let sizes = (1, rows, outputs, inputs);
        x.matmul(weight, sizes, &x_layout, &weight_layout.transpose(0, 1)?)
    }

    /// Returns the gradient of the input. Adds that of the weight, or defers that, or returns it.
    fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let own = self.weight(&weight.detach())?;
        let (outputs, inputs) = own.dims2()?;
        let gradient = gradient.reshape(((), outputs))?;
        let d_x = match x.track_op() {
            true => Some(gradient.matmul(&own)?.reshape(x.shape())?),
            false => None,
        };
        let (x, group) = (x.detach().reshape(((), inputs))?, self.group);
        let d_weight = device_gradient(weight, move |into| {
            let more = gradient.t()?.matmul(&x)?;
            match group {
                Some(group) => into.add_group(&more, group),
                None => into.add(&more),
            }
        })?;
        Ok((d_x, d_weight))
    }
}

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("a layer for CUDA devices on the CPU")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let y = self.forward((x, x_layout), (weight, weight_layout))?;
        Ok((y, self.shape.clone().into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward(x, weight, &gradient.contiguous()?)
    }
}

impl CustomOp3 for Product {
    fn name(&self) -> &'static str {
        "linear with bias"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("a layer for CUDA devices on the CPU")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let y = self.forward((x, x_layout), (weight, weight_layout))?;
        let shape = Shape::from(self.shape.clone());
        Ok((sum((&y, &Layout::contiguous(&shape)), (bias, bias_layout))?, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let (d_x, d_weight) = self.backward(x, weight, &gradient)?;
        Ok((d_x, d_weight, bias_gradient(bias, gradient)?))
    }
}

/// Returns the sum of contiguous rows and a bias.
fn sum(
    (y, layout): (&CudaStorage, &Layout),
    (bias, bias_layout): (&CudaStorage, &Layout),
) -> Result<CudaStorage> {
    y.binary_impl::<Add>(bias, layout, &bias_layout.broadcast_as(layout.shape().clone())?)
}

/// Adds the contiguous gradient `[..., width]` of a layer's output to that of `bias` `[width]`, or
/// defers that, or returns it.
pub(super) fn bias_gradient(bias: &Tensor, gradient: Tensor) -> Result<Option<Tensor>> {
    let width = bias.elem_count();
    device_gradient(bias, move |into| into.add(&gradient.reshape(((), width))?.sum(0)?))
}

/// The operation that adds a bias `[width]` to contiguous rows `[..., width]`.
struct AddBias;

impl CustomOp2 for AddBias {
    fn name(&self) -> &'static str {
        "bias"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        bail!("a layer for CUDA devices on the CPU")
    }

    fn cuda_fwd(
        &self,
        y: &CudaStorage,
        y_layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Ok((sum((y, y_layout), (bias, bias_layout))?, y_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        Ok((Some(gradient.clone()), bias_gradient(bias, gradient)?))
    }
}
