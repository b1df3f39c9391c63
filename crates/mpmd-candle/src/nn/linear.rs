//! The linear layer, `y = x wᵀ + b`.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};

use super::activation::{Activation, ActivationKernel};
use super::values::{
    are_fast, bias_gradient, in_layer, name_of, result, single, slice, tensor_like, values,
};
use crate::collectives;
use crate::cx::Cx;
use crate::matmul::{Matrix, multiply};
use crate::pass::{keeps, weight_gradient};
use crate::{cuda, cuda_layers};

/// A linear layer: `y = x wᵀ + b`, with `x` `[..., inputs]` and `y` `[..., outputs]`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    name: Option<String>,
}

impl Linear {
    /// Creates a layer from its weight `[outputs, inputs]` and its bias `[outputs]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self {
            weight,
            bias,
            name: None,
        }
    }

    /// Returns the weight: `[outputs, inputs]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias: `[outputs]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Computes the layer if the input dimension is divided over the devices along mesh axes
    /// `axes`: `x` is `[..., inputs / devices]`. Adds up the products over the axes, the last one
    /// first, then adds the bias. All devices get the result.
    ///
    /// The weight is divided in dimension 1, and the bias is whole on every device.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Cx::all_reduce`].
    pub fn forward_over(&self, x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
        let sizes = axes
            .iter()
            .map(|axis| collectives::size(axis))
            .collect::<Result<Vec<_>>>()?;
        if sizes.iter().all(|size| *size == 1) {
            return self.forward(x);
        }

        let product = Self {
            weight: self.weight.clone(),
            bias: None,
            name: self.name.clone(),
        };
        let y = axes
            .iter()
            .rev()
            .try_fold(product.forward(x)?, |y, axis| cx.all_reduce(&y, axis))?;

        match &self.bias {
            None => Ok(y),
            Some(bias) if cuda::are_on_cuda(&[&y, bias]) => cuda_layers::add_bias(&y, bias),
            Some(bias) if are_fast(&[&y, bias]) => y.apply_op2(&bias.contiguous()?, BiasAddition),
            Some(bias) => single(&y)?
                .broadcast_add(&single(bias)?)?
                .to_dtype(y.dtype()),
        }
    }

    /// Applies an activation function to the layer's output. For GELU and SiLU, product and
    /// function are one operation, which takes fewer passes over memory.
    ///
    /// # Errors
    ///
    /// Returns the errors of `forward`.
    pub fn forward_activated(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        if let (Some(curve), Some(bias)) = (activation.curve(), &self.bias)
            && let Ok(shape) = self.shape(x)
            && let Some(y) =
                cuda_layers::activated([x, &self.weight, bias], curve.on_cuda(), &shape)
        {
            return in_layer(self.name.as_deref(), y);
        }

        let fast = self
            .bias
            .as_ref()
            .filter(|bias| are_fast(&[x, &self.weight, bias]));
        let (Some(curve), Some(bias)) = (activation.curve(), fast) else {
            return activation.forward(&self.forward(x)?);
        };
        in_layer(self.name.as_deref(), self.shape(x)).and_then(|shape| {
            if x.track_op() || self.weight.track_op() || bias.track_op() {
                keeps((shape.iter().product::<usize>() * size_of::<f32>()) as u64);
            }

            let operation = LinearActivated {
                product: LinearProduct(shape),
                curve,
                before: OnceLock::new(),
            };
            x.contiguous()?
                .apply_op3(&self.weight.contiguous()?, &bias.contiguous()?, operation)
        })
    }

    /// Returns the shape of the output for the input `x`.
    fn shape(&self, x: &Tensor) -> Result<Vec<usize>> {
        let (outputs, inputs) = self.weight.dims2()?;
        let Some((&last, leading)) = x.dims().split_last() else {
            bail!("the input has no dimension: expected [..., {inputs}]");
        };
        if last != inputs {
            bail!("the input is {:?}: expected [..., {inputs}]", x.dims());
        }
        if let Some(bias) = &self.bias
            && bias.dims() != [outputs]
        {
            bail!("the bias is {:?}: expected [{outputs}]", bias.dims());
        }

        let mut shape = leading.to_vec();
        shape.push(outputs);
        Ok(shape)
    }

    fn compute(&self, x: &Tensor) -> Result<Tensor> {
        let shape = self.shape(x)?;
        let x = x.contiguous()?;
        let weight = self.weight.contiguous()?;
        let bias = self.bias.as_ref().map(Tensor::contiguous).transpose()?;

        if let Some(y) = cuda_layers::linear(&x, &weight, bias.as_ref(), &shape) {
            return y;
        }
        if are_fast(&[&x, &weight]) && bias.as_ref().is_none_or(|bias| are_fast(&[bias])) {
            return match &bias {
                None => x.apply_op2(&weight, LinearProduct(shape)),
                Some(bias) => x.apply_op3(&weight, bias, LinearProduct(shape)),
            };
        }

        let rows = shape.iter().rev().skip(1).product::<usize>();
        let inputs = self.weight.dim(1)?;
        let y = x
            .reshape((rows, inputs))?
            .matmul(&weight.t()?)?
            .reshape(shape)?;

        match bias {
            None => Ok(y),
            Some(bias) => single(&y)?
                .broadcast_add(&single(&bias)?)?
                .to_dtype(y.dtype()),
        }
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        in_layer(self.name.as_deref(), self.compute(x))
    }
}

/// Creates a linear layer with the variables `weight` and `bias`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let layer = linear_no_bias(in_dim, out_dim, vb.clone())?;
    let bound = 1.0 / (in_dim as f64).sqrt();
    let bias = vb.get_with_hints(
        out_dim,
        "bias",
        Init::Uniform {
            lo: -bound,
            up: bound,
        },
    )?;
    Ok(Linear {
        bias: Some(bias),
        ..layer
    })
}

/// Creates a linear layer with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init)?;
    Ok(Linear {
        weight,
        bias: None,
        name: name_of(&vb),
    })
}

/// Creates a linear layer, with a bias if `bias` is true.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    if bias {
        linear(in_dim, out_dim, vb)
    } else {
        linear_no_bias(in_dim, out_dim, vb)
    }
}

/// The operation of a linear layer. Holds the shape of the result.
struct LinearProduct(Vec<usize>);

impl LinearProduct {
    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let outputs = *self.0.last().unwrap_or(&0);
        let rows = self.0.iter().rev().skip(1).product::<usize>();
        let mut y = match bias {
            Some(bias) => bias.repeat(rows),
            None => vec![0.0; rows * outputs],
        };

        if let Some(inputs) = weight.len().checked_div(outputs) {
            let weight = Matrix::new(weight, outputs, inputs);
            multiply(
                &mut y,
                Matrix::new(x, rows, inputs),
                weight.t(),
                bias.is_some(),
            );
        }
        y
    }
}

/// Returns the gradients of input and weight. The weight's is `None` if a pass adds or defers it.
fn backward(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (outputs, inputs) = weight.dims2()?;
    let rows = x.dims().iter().rev().skip(1).product();

    let d_x = if x.track_op() {
        let mut d_x = vec![0.0; x.elem_count()];
        let gradient = values(gradient)?;
        let weight = values(weight)?;
        let weight = Matrix::new(&weight, outputs, inputs);
        multiply(
            &mut d_x,
            Matrix::new(&gradient, rows, outputs),
            weight,
            false,
        );
        Some(tensor_like(d_x, x)?)
    } else {
        None
    };

    let x = x.detach();
    let gradient = gradient.clone();
    let d_weight = weight_gradient(weight, move |into| {
        let x = values(&x)?;
        let gradient = values(&gradient)?;
        let gradient = Matrix::new(&gradient, rows, outputs);
        multiply(into, gradient.t(), Matrix::new(&x, rows, inputs), true);
        Ok(())
    })?;

    Ok((d_x, d_weight))
}

impl CustomOp2 for LinearProduct {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let y = self.forward(&slice(x, x_layout)?, &slice(weight, weight_layout)?, None);
        result(y, self.0.clone(), x)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        backward(x, weight, &gradient.contiguous()?)
    }
}

impl CustomOp3 for LinearProduct {
    fn name(&self) -> &'static str {
        "linear with bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = slice(weight, weight_layout)?;
        let bias = slice(bias, bias_layout)?;
        let y = self.forward(&slice(x, x_layout)?, &weight, Some(&bias));
        result(y, self.0.clone(), x)
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
        let (d_x, d_weight) = backward(x, weight, &gradient)?;
        Ok((d_x, d_weight, bias_gradient(bias, gradient)?))
    }
}

/// The operation of a linear layer with bias, followed by an activation function.
struct LinearActivated {
    product: LinearProduct,
    curve: ActivationKernel,
    /// The layer's output before the activation function, saved for the backward pass.
    before: OnceLock<Vec<f32>>,
}

impl CustomOp3 for LinearActivated {
    fn name(&self) -> &'static str {
        "linear with activation"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = slice(weight, weight_layout)?;
        let bias = slice(bias, bias_layout)?;

        let before = self
            .product
            .forward(&slice(x, x_layout)?, &weight, Some(&bias));
        let y = self.curve.forward(&before);
        self.before.get_or_init(|| before);
        result(y, self.product.0.clone(), x)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        y: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(before) = self.before.get() else {
            bail!("a linear layer's backward pass before its forward pass");
        };
        let gradient = gradient.contiguous()?;
        let gradient = self.curve.backward(before, &values(&gradient)?);
        let gradient = tensor_like(gradient, y)?.detach();
        let (d_x, d_weight) = backward(x, weight, &gradient)?;
        Ok((d_x, d_weight, bias_gradient(bias, gradient)?))
    }
}

/// The operation that adds a bias `[outputs]` to rows `[..., outputs]`.
struct BiasAddition;

impl CustomOp2 for BiasAddition {
    fn name(&self) -> &'static str {
        "bias"
    }

    fn cpu_fwd(
        &self,
        y: &CpuStorage,
        y_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let bias = slice(bias, bias_layout)?;
        let mut sum = slice(y, y_layout)?.into_owned();
        for row in sum.chunks_exact_mut(bias.len().max(1)) {
            row.iter_mut().zip(&*bias).for_each(|(y, bias)| *y += *bias);
        }
        result(sum, y_layout.shape(), y)
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

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn activation_in_the_layer_matches_the_one_after_it() -> Result<()> {
        let values = |shape: &[usize]| {
            let count = shape.iter().product::<usize>() as f32;
            let values = (Tensor::arange(0f32, count, &Device::Cpu)? * 1.3)?.sin()?;
            Var::from_tensor(&values.reshape(shape)?)
        };
        let (x, weight, bias) = (values(&[2, 3, 5])?, values(&[7, 5])?, values(&[7])?);
        let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        for activation in [
            Activation::NewGelu,
            Activation::Gelu,
            Activation::Silu,
            Activation::Relu,
        ] {
            let run = |y: Tensor| -> Result<Vec<Vec<f32>>> {
                let store = y.sqr()?.sum_all()?.backward()?;
                let gradients = [&x, &weight, &bias].map(|var| store.get(var));
                let all = std::iter::once(&y).chain(gradients.into_iter().flatten());
                all.map(|tensor| tensor.flatten_all()?.to_vec1()).collect()
            };
            let expected = run(activation.forward(&layer.forward(&x)?)?)?;
            let found = run(layer.forward_activated(&x, activation)?)?;
            assert_eq!((found.len(), &found), (4, &expected), "{activation:?}");
        }
        Ok(())
    }
}
