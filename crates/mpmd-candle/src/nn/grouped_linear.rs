//! A linear layer with a weight for each group of rows, such as those of an expert.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::values::{are_fast, in_layer, name_of, result, slice, tensor_like, values};
use crate::cuda_layers;
use crate::matmul::{Matrix, multiply};
use crate::pass::weight_gradient;

/// Linear layers without bias, one for each group of rows: `y[group] = x[group] w[group]ᵀ`.
#[derive(Clone, Debug)]
pub struct Grouped {
    weight: Tensor,
    name: Option<String>,
}

impl Grouped {
    /// Creates the layers from their weights `[groups, outputs, inputs]`.
    pub fn new(weight: Tensor) -> Self {
        Self { weight, name: None }
    }

    /// Returns the weights: `[groups, outputs, inputs]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Computes `[rows, outputs]` from `x` `[rows, inputs]`. The first `rows[0]` rows of `x` belong
    /// to group 0, the next `rows[1]` rows to group 1, and so on.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit each other, or `rows` does not have one number for each group.
    pub fn forward(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        in_layer(self.name.as_deref(), self.compute(x, rows))
    }

    fn compute(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        let (groups, outputs, inputs) = self.weight.dims3()?;
        let all: usize = rows.iter().sum();
        if x.dims() != [all, inputs] {
            bail!("the input is {:?}: expected [{all}, {inputs}]", x.dims());
        }
        if rows.len() != groups {
            bail!(
                "numbers of rows for {} groups: expected {groups}",
                rows.len()
            );
        }

        let x = x.contiguous()?;
        let weight = self.weight.contiguous()?;
        if are_fast(&[&x, &weight]) {
            return x.apply_op2(
                &weight,
                GroupedProduct {
                    rows: rows.into(),
                    outputs,
                    inputs,
                },
            );
        }

        if let Some(y) = cuda_layers::grouped(&x, &weight, ranges(rows)) {
            return y;
        }

        let parts = ranges(rows)
            .enumerate()
            .map(|(group, rows)| {
                x.narrow(0, rows.start, rows.len())?
                    .matmul(&weight.get(group)?.t()?)
            })
            .collect::<Result<Vec<_>>>()?;
        Tensor::cat(&parts, 0)
    }
}

/// Creates linear layers without bias, one for each group, with the variable `weight`.
///
/// # Errors
///
/// Returns the errors of [`VarBuilder::get_with_hints`].
pub fn grouped(groups: usize, in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Grouped> {
    // As that of a linear layer: the groups count as neither inputs nor outputs.
    let init = Init::Randn {
        mean: 0.0,
        stdev: (2.0 / in_dim as f64).sqrt(),
    };
    let weight = vb.get_with_hints((groups, out_dim, in_dim), "weight", init)?;
    Ok(Grouped {
        weight,
        name: name_of(&vb),
    })
}

/// Returns the range of rows of each group. `rows` has the number of rows per group.
fn ranges(rows: &[usize]) -> impl Iterator<Item = Range<usize>> {
    rows.iter().scan(0, |end, rows| {
        *end += rows;
        Some(*end - rows..*end)
    })
}

/// The operation of [`Grouped`], with the number of rows per group.
struct GroupedProduct {
    rows: Arc<[usize]>,
    outputs: usize,
    inputs: usize,
}

impl GroupedProduct {
    /// Returns (range of rows, range of weight elements) of each group that has rows.
    fn groups(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let size = self.outputs * self.inputs;
        let weight = (0..).map(move |group| group * size..(group + 1) * size);
        ranges(&self.rows)
            .zip(weight)
            .filter(|(rows, _)| !rows.is_empty())
    }

    /// Returns the range of elements of `rows` in a matrix with `width` columns.
    fn rows(rows: &Range<usize>, width: usize) -> Range<usize> {
        rows.start * width..rows.end * width
    }
}

impl CustomOp2 for GroupedProduct {
    fn name(&self) -> &'static str {
        "grouped linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let outputs = self.outputs;
        let inputs = self.inputs;
        let from = slice(x, x_layout)?;
        let all = slice(weight, weight_layout)?;

        let rows: usize = self.rows.iter().sum();
        let mut y = vec![0.0; rows * outputs];
        for (rows, weight) in self.groups() {
            let weight = Matrix::new(&all[weight], outputs, inputs);
            let from = Matrix::new(&from[Self::rows(&rows, inputs)], rows.len(), inputs);
            multiply(&mut y[Self::rows(&rows, outputs)], from, weight.t(), false);
        }

        result(y, (rows, outputs), x)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let outputs = self.outputs;
        let inputs = self.inputs;

        let gradient = gradient.contiguous()?;
        let d_x = if x.track_op() {
            let mut d_x = vec![0.0; x.elem_count()];
            let gradient = values(&gradient)?;
            let all = values(weight)?;
            for (rows, weight) in self.groups() {
                let weight = Matrix::new(&all[weight], outputs, inputs);
                let part = &gradient[Self::rows(&rows, outputs)];
                let part = Matrix::new(part, rows.len(), outputs);
                multiply(&mut d_x[Self::rows(&rows, inputs)], part, weight, false);
            }
            Some(tensor_like(d_x, x)?)
        } else {
            None
        };

        let x = x.detach();
        let own = Self {
            rows: self.rows.clone(),
            ..*self
        };
        let d_weight = weight_gradient(weight, move |into| {
            let x = values(&x)?;
            let gradient = values(&gradient)?;
            for (rows, weight) in own.groups() {
                let part = &gradient[Self::rows(&rows, outputs)];
                let part = Matrix::new(part, rows.len(), outputs);
                let x = Matrix::new(&x[Self::rows(&rows, inputs)], rows.len(), inputs);
                multiply(&mut into[weight], part.t(), x, true);
            }
            Ok(())
        })?;

        Ok((d_x, d_weight))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};
    use candle_nn::Module;

    use super::*;
    use crate::nn::Linear;

    fn variable(shape: &[usize], step: f32) -> Result<Var> {
        let count = shape.iter().product::<usize>() as f32;
        let values = (Tensor::arange(0f32, count, &Device::Cpu)? * f64::from(step))?.sin()?;
        Var::from_tensor(&values.reshape(shape)?)
    }

    #[test]
    fn each_group_computes_as_a_layer_of_its_own() -> Result<()> {
        let (inputs, outputs) = (5, 7);
        let weight = variable(&[4, outputs, inputs], 1.3)?;
        for rows in [[3, 0, 1, 6], [0, 0, 10, 0], [0, 0, 0, 0]] {
            let all: usize = rows.iter().sum();
            let x = variable(&[all, inputs], 0.7)?;
            let y = Grouped::new(weight.as_tensor().clone()).forward(&x, &rows)?;
            assert_eq!(y.dims(), [all, outputs]);
            let store = y.sqr()?.sum_all()?.backward()?;
            let (d_x, d_weight) = (store.get(&x).unwrap(), store.get(&weight).unwrap());
            for (group, range) in ranges(&rows).enumerate() {
                let part = |tensor: &Tensor| {
                    tensor
                        .narrow(0, range.start, range.len())?
                        .flatten_all()?
                        .to_vec1::<f32>()
                };
                let own = Var::from_tensor(&weight.get(group)?)?;
                let found = d_weight.get(group)?.flatten_all()?.to_vec1::<f32>()?;
                if range.is_empty() {
                    assert_eq!(found, [0.0; 35], "no rows, no gradient");
                    continue;
                }
                let x = Var::from_tensor(&x.narrow(0, range.start, range.len())?)?;
                let alone = Linear::new(own.as_tensor().clone(), None).forward(&x)?;
                let store = alone.sqr()?.sum_all()?.backward()?;
                let of = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
                assert_eq!(part(&y)?, of(&alone)?, "to the bit");
                assert_eq!(part(d_x)?, of(store.get(&x).unwrap())?);
                assert_eq!(found, of(store.get(&own).unwrap())?);
            }
        }
        Ok(())
    }

    #[test]
    fn other_types_compute_the_same() -> Result<()> {
        let (x, weight) = (variable(&[6, 5], 0.7)?, variable(&[3, 4, 5], 1.3)?);
        let rows = [2, 0, 4];
        let y = Grouped::new(weight.as_tensor().clone()).forward(&x, &rows)?;
        for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::BF16, 0.03)] {
            let layer = Grouped::new(weight.to_dtype(dtype)?);
            let other = layer.forward(&x.to_dtype(dtype)?, &rows)?;
            assert_eq!(other.dtype(), dtype);
            let off = (other.to_dtype(DType::F32)? - &y)?
                .abs()?
                .max_all()?
                .to_scalar::<f32>()?;
            assert!(off < tolerance, "{dtype:?}: {off}");
        }
        Ok(())
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() -> Result<()> {
        let (x, weight) = (variable(&[6, 5], 0.7)?, variable(&[2, 4, 5], 1.3)?);
        let layer = Grouped::new(weight.as_tensor().clone());
        let said = layer.forward(&x, &[2, 3]).unwrap_err().to_string();
        assert!(
            said.contains("the input is [6, 5]: expected [5, 5]"),
            "{said}"
        );
        let said = layer.forward(&x, &[2, 3, 1]).unwrap_err().to_string();
        assert!(
            said.contains("numbers of rows for 3 groups: expected 2"),
            "{said}"
        );
        Ok(())
    }
}
