//! Access of custom operations to the elements of tensors, and their division among threads.

use std::borrow::Cow;
use std::ops::Deref;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, StorageRef, Tensor, bail};
use candle_nn::VarBuilder;
use half::slice::HalfFloatSliceExt;
use half::vec::HalfFloatVecExt;
use mpmd_device::cpu::rows;
use rayon::prelude::*;

use crate::pass::weight_gradient;

/// The least number of elements per thread. For fewer, waking a thread takes longer than the work.
const GRAIN: usize = 1 << 14;

/// Returns true if the CPU kernels of this module can compute with these tensors. All must be on
/// the CPU, all in f32 or all in the same half-precision dtype. The kernels compute in f32.
pub(super) fn are_fast(tensors: &[&Tensor]) -> bool {
    let dtype = tensors.first().map(|tensor| tensor.dtype());
    matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16))
        && tensors
            .iter()
            .all(|x| Some(x.dtype()) == dtype && x.device().is_cpu())
}

/// Returns `x`, or an f32 copy of a half-precision tensor. candle's own operations would sum in
/// half precision.
pub(super) fn single(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}

/// Elements of a tensor on the CPU as f32: borrowed from an f32 tensor, or copied from half
/// precision.
pub(super) enum TensorValues<'a> {
    InPlace {
        storage: StorageRef<'a>,
        from: usize,
        to: usize,
    },
    Copied(Vec<f32>),
}

/// Returns the elements of a contiguous `tensor`, row-major.
///
/// # Errors
///
/// If the tensor is not f32 or half precision, not contiguous, or not on the CPU.
pub(super) fn values(tensor: &Tensor) -> Result<TensorValues<'_>> {
    let (storage, layout) = tensor.storage_and_layout();
    let (from, to) = offsets(layout)?;
    match &*storage {
        Storage::Cpu(CpuStorage::F32(_)) => Ok(TensorValues::InPlace { storage, from, to }),
        Storage::Cpu(halves) => {
            slice(halves, layout).map(|copy| TensorValues::Copied(copy.into_owned()))
        }
        _ => bail!("the tensor is on {:?}: expected the CPU", tensor.device()),
    }
}

/// Returns the elements of an operation's result, as [`values`] does. Returns `None` if they were
/// rounded to half precision.
pub(super) fn exact(result: &Tensor) -> Result<Option<TensorValues<'_>>> {
    (result.dtype() == DType::F32)
        .then(|| values(result))
        .transpose()
}

impl<'a> TensorValues<'a> {
    /// Returns the elements of an f32 `tensor` from its first one to the end of its memory. The
    /// tensor's strides are offsets in this slice.
    ///
    /// # Errors
    ///
    /// If the tensor is not f32, or not on the CPU.
    pub(super) fn strided(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(all)) = &*storage else {
            bail!(
                "the tensor is {:?} on {:?}: expected f32 on the CPU",
                tensor.dtype(),
                tensor.device()
            );
        };
        let from = layout.start_offset();
        let to = all.len();
        Ok(Self::InPlace { storage, from, to })
    }
}

impl Deref for TensorValues<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Copied(copied) => copied,
            Self::InPlace { storage, from, to } => match &**storage {
                Storage::Cpu(CpuStorage::F32(all)) => &all[*from..*to],
                _ => &[],
            },
        }
    }
}

/// Returns the elements of an argument of a custom operation. Half precision is copied to f32.
///
/// # Errors
///
/// If the argument is not f32 or half precision, or not contiguous.
pub(super) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<Cow<'a, [f32]>> {
    let (from, to) = offsets(layout)?;
    Ok(match storage {
        CpuStorage::F32(all) => Cow::Borrowed(&all[from..to]),
        CpuStorage::F16(all) => Cow::Owned(all[from..to].to_f32_vec()),
        CpuStorage::BF16(all) => Cow::Owned(all[from..to].to_f32_vec()),
        _ => bail!("the tensor is not of f32, f16 or bf16"),
    })
}

/// Returns the range of a contiguous tensor's elements in its memory.
pub(super) fn offsets(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(offsets) => Ok(offsets),
        None => bail!("the tensor is not contiguous: {layout:?}"),
    }
}

/// Returns the result of a custom operation, converted to the dtype of its argument `like`.
pub(super) fn result(
    values: Vec<f32>,
    shape: impl Into<Shape>,
    like: &CpuStorage,
) -> Result<(CpuStorage, Shape)> {
    let storage = match like {
        CpuStorage::F16(_) => CpuStorage::F16(Vec::from_f32_slice(&values)),
        CpuStorage::BF16(_) => CpuStorage::BF16(Vec::from_f32_slice(&values)),
        _ => CpuStorage::F32(values),
    };
    Ok((storage, shape.into()))
}

/// Returns `values` as a tensor of the shape and type of `like`, on its device.
///
/// # Errors
///
/// If the number of elements differs.
pub(super) fn tensor_like(values: Vec<f32>, like: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(values, like.shape(), like.device())?.to_dtype(like.dtype())
}

/// Calls `f` with (index of the first row, rows) for all rows of `out`, a row-major matrix of
/// `width` columns. Several threads share the rows.
pub(super) fn for_rows(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    for_costly_rows(out, width, width, f);
}

/// Does the same as [`for_rows`] for rows that each cost as much time as `cost` elements.
pub(super) fn for_costly_rows<T: Send>(
    out: &mut [T],
    width: usize,
    cost: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    if out.is_empty() {
        return;
    }
    let rows = (GRAIN / cost.max(1)).max(1);
    if out.len() <= rows * width {
        return f(0, out);
    }
    out.par_chunks_mut(rows * width)
        .enumerate()
        .for_each(|(at, out)| f(at * rows, out));
}

/// Adds terms to the columns `sums`, row by row in order. Several threads share the columns.
///
/// `add` gets the index of a row, the index of the first column, and the sums to which it adds.
pub(super) fn add_columns(
    sums: &mut [f32],
    rows: usize,
    add: impl Fn(usize, usize, &mut [f32]) + Sync,
) {
    if sums.len() * rows <= GRAIN {
        return (0..rows).for_each(|row| add(row, 0, sums));
    }
    // Whole cache lines, so that no two threads write to one.
    let columns = (GRAIN / rows).max(1).next_multiple_of(64);
    sums.par_chunks_mut(columns)
        .enumerate()
        .for_each(|(at, sums)| {
            for row in 0..rows {
                add(row, at * columns, sums);
            }
        });
}

/// Sums the contiguous gradient `[..., width]` of a layer's output to the gradient of `bias`
/// `[width]`. Adds, defers or returns it as [`weight_gradient`] does.
///
/// # Errors
///
/// Returns the errors of [`weight_gradient`].
pub(super) fn bias_gradient(bias: &Tensor, gradient: Tensor) -> Result<Option<Tensor>> {
    weight_gradient(bias, move |into| {
        let gradient = values(&gradient)?;
        let width = into.len();
        add_columns(
            into,
            gradient.len().checked_div(width).unwrap_or(0),
            |row, at, sums| {
                let row = &gradient[row * width + at..][..sums.len()];
                rows::add(sums, row);
            },
        );
        Ok(())
    })
}

/// Returns the path prefix of `vb` as the layer's name; `None` at the root.
pub(super) fn name_of(vb: &VarBuilder) -> Option<String> {
    Some(vb.prefix()).filter(|name| !name.is_empty())
}

/// Adds the context `layer <name>:` to an error.
pub(super) fn in_layer<T>(name: Option<&str>, result: Result<T>) -> Result<T> {
    match name {
        Some(name) if result.is_err() => {
            let context = format!("layer {name}:");
            result.map_err(|error| error.context(context))
        }
        _ => result,
    }
}
