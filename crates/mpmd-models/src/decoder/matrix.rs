//! The matrices of a decoder: as they are trained, or packed for inference.

use mpmd::candle::nn::{Embedding, Grouped, Linear, Module, PackedLinear};
use mpmd::candle::{Cx, Result, Tensor};

/// A linear layer.
#[derive(Clone, Debug)]
pub(crate) enum MatrixLayer {
    Plain(Linear),
    Packed(PackedLinear),
    /// A layer without values, for a probe. Has the number of outputs; its results are zeros.
    Hollow(usize),
}

impl MatrixLayer {
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(linear) => linear.forward(x),
            Self::Packed(packed) => packed.forward(x),
            Self::Hollow(outputs) => zeros(x, *outputs),
        }
    }

    /// Computes the layer if the devices along `axes` divide the inputs. Sums the products over the
    /// devices, then adds the bias.
    pub(crate) fn forward_over(&self, x: &Tensor, cx: &Cx<'_>, axes: &[&str]) -> Result<Tensor> {
        match self {
            Self::Plain(linear) => linear.forward_over(x, cx, axes),
            Self::Packed(packed) => packed.forward_over(x, cx, axes),
            Self::Hollow(outputs) => axes
                .iter()
                .rev()
                .try_fold(zeros(x, *outputs)?, |y, axis| cx.all_reduce(&y, axis)),
        }
    }

    /// Converts the weight to `form`, unless it has been converted before.
    pub(crate) fn pack(&mut self, form: MatrixForm) -> Result<()> {
        if let Self::Plain(linear) = self {
            *self = match form {
                MatrixForm::Packed { in_half } => Self::Packed(PackedLinear::new(linear, in_half)?),
                MatrixForm::Hollow => Self::Hollow(linear.weight().dim(0)?),
            };
        }
        Ok(())
    }

    /// Returns the number of outputs on this device.
    pub(crate) fn outputs(&self) -> Result<usize> {
        match self {
            Self::Plain(linear) => linear.weight().dim(0),
            Self::Packed(packed) => Ok(packed.outputs()),
            Self::Hollow(outputs) => Ok(*outputs),
        }
    }
}

/// The linear layers of several experts: one weight matrix for each expert.
#[derive(Debug)]
pub(crate) enum Matrices {
    Plain(Grouped),
    Packed(Vec<PackedLinear>),
    /// No values, for a probe: only the numbers of experts and of outputs.
    Hollow {
        experts: usize,
        outputs: usize,
    },
}

impl Matrices {
    /// Applies each expert's layer to its rows of `x`. `rows` has the number of rows of each
    /// expert; the rows of the first expert come first.
    pub(crate) fn forward(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        match self {
            Self::Plain(grouped) => grouped.forward(x, rows),
            Self::Packed(packed) => {
                let mut parts = Vec::new();
                let mut first = 0;
                for (packed, rows) in packed.iter().zip(rows).filter(|(_, rows)| **rows > 0) {
                    parts.push(packed.forward(&x.narrow(0, first, *rows)?)?);
                    first += rows;
                }
                match &parts[..] {
                    [] => zeros(x, packed.first().map_or(0, PackedLinear::outputs)),
                    parts => Tensor::cat(parts, 0),
                }
            }
            Self::Hollow { outputs, .. } => zeros(x, *outputs),
        }
    }

    /// Converts the weights to `form`, as [`MatrixLayer::pack`] does.
    pub(crate) fn pack(&mut self, form: MatrixForm) -> Result<()> {
        let Self::Plain(grouped) = self else {
            return Ok(());
        };
        let (experts, outputs, _) = grouped.weight().dims3()?;
        let packed = |expert, in_half| {
            PackedLinear::new(&Linear::new(grouped.weight().get(expert)?, None), in_half)
        };
        *self = match form {
            MatrixForm::Packed { in_half } => {
                let all = (0..experts).map(|expert| packed(expert, in_half));
                Self::Packed(all.collect::<Result<_>>()?)
            }
            MatrixForm::Hollow => Self::Hollow { experts, outputs },
        };
        Ok(())
    }

    /// Returns the number of experts on this device.
    pub(crate) fn experts(&self) -> Result<usize> {
        match self {
            Self::Plain(grouped) => grouped.weight().dim(0),
            Self::Packed(packed) => Ok(packed.len()),
            Self::Hollow { experts, .. } => Ok(*experts),
        }
    }
}

/// The storage form of matrices for inference.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatrixForm {
    /// Packed for fast products. If `in_half`, the elements are rounded to `bf16`.
    Packed { in_half: bool },
    /// No values, for a probe.
    Hollow,
}

/// An embedding table with one row for each token.
#[derive(Debug)]
pub(crate) enum Table {
    Plain(Embedding),
    Packed(PackedLinear),
    /// No values, for a probe: only the numbers of rows and columns.
    Hollow {
        rows: usize,
        columns: usize,
    },
}

impl Table {
    pub(crate) fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        match self {
            Self::Plain(embedding) => embedding.forward(tokens),
            Self::Packed(packed) => packed.rows(tokens),
            Self::Hollow { columns, .. } => zeros(&tokens.unsqueeze(tokens.rank())?, *columns),
        }
    }

    /// Returns the number of rows on this device.
    pub(crate) fn rows(&self) -> Result<usize> {
        match self {
            Self::Plain(embedding) => embedding.embeddings().dim(0),
            Self::Packed(packed) => Ok(packed.outputs()),
            Self::Hollow { rows, .. } => Ok(*rows),
        }
    }
}

/// Returns f32 zeros in the shape of `x`, but with `last` as the last dimension.
fn zeros(x: &Tensor, last: usize) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    shape.pop();
    shape.push(last);
    Tensor::zeros(shape, mpmd::candle::candle_core::DType::F32, x.device())
}
