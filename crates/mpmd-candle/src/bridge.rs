//! Copies values between the views of a kernel and candle's tensors, in host memory or on a device.

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage, Tensor, Var, WithDType};
use half::{bf16, f16};
use mpmd_core::kernel::{View, ViewMut};
use mpmd_core::{Error, Result};
use mpmd_layout::aval::{DType, Element, ShapedArray};

use crate::cuda::OnCuda;
use crate::dtypes::{array_type, aval_of, candle_type, refused, with_type};

/// The CUDA device of a pass; `None` for a pass on the host.
pub(crate) type Place<'a> = Option<&'a OnCuda<'a>>;

/// Returns a tensor with a copy of the view's values.
pub(crate) fn tensor_of(view: &View<'_>, place: Place<'_>) -> Result<Tensor> {
    if let Some(on) = place {
        return on.tensor_of(view, false);
    }
    with_type!(view.global().dtype(), T => {
        let values = view.as_slice::<T>()?;
        Tensor::from_slice(values, view.shape(), &Device::Cpu).map_err(refused)
    })
}

/// Copies the view's values to a tensor of dtype `dtype`, a variable if `trainable` is true.
pub(crate) fn tensor_in(
    view: &View<'_>,
    dtype: DType,
    trainable: bool,
    place: Place<'_>,
) -> Result<Tensor> {
    if let Some(on) = place.filter(|_| dtype == view.global().dtype()) {
        return on.tensor_of(view, trainable);
    }

    let tensor = tensor_of(view, place)?
        .to_dtype(candle_type(dtype)?)
        .map_err(refused)?;
    match trainable {
        true => Ok(Var::from_tensor(&tensor).map_err(refused)?.into_inner()),
        false => Ok(tensor),
    }
}

/// Returns zeros in host memory: a variable if `trainable` is true, else a tensor.
pub(crate) fn zeros(aval: &ShapedArray, trainable: bool) -> Result<Tensor> {
    let dtype = candle_type(aval.dtype())?;
    if trainable {
        let var = Var::zeros(aval.shape(), dtype, &Device::Cpu).map_err(refused)?;
        return Ok(var.into_inner());
    }
    Tensor::zeros(aval.shape(), dtype, &Device::Cpu).map_err(refused)
}

/// Copies a gradient to the view and converts it to the view's float type.
pub(crate) fn write_gradient(
    tensor: &Tensor,
    view: &mut ViewMut<'_>,
    place: Place<'_>,
) -> Result<()> {
    let dtype = candle_type(view.global().dtype())?;
    write(&tensor.to_dtype(dtype).map_err(refused)?, view, place)
}

/// Copies the tensor's values to the view. Returns an error if their shapes or dtypes differ.
pub(crate) fn write(tensor: &Tensor, view: &mut ViewMut<'_>, place: Place<'_>) -> Result<()> {
    let found = aval_of(tensor)?;
    if found.shape() != view.shape() || found.dtype() != view.global().dtype() {
        let expected = ShapedArray::try_new(view.shape(), view.global().dtype())?;
        return Err(Error::kernel(format!(
            "the model returned {found}, and {expected} was declared or found by its probe: its \
             output shape may depend on its inputs' shapes only"
        )));
    }

    if let Some(on) = place {
        return on.write(tensor, view);
    }
    with_type!(found.dtype(), T => {
        read(tensor, |values: &[T]| {
            view.as_mut_slice::<T>().map(|out| out.copy_from_slice(values))
        })?.map_err(Error::from)
    })
}

/// Adds the tensor's values to the view's values. The shapes are equal; the float types may differ.
pub(crate) fn add(tensor: &Tensor, view: &mut ViewMut<'_>, place: Place<'_>) -> Result<()> {
    let tensor = &tensor
        .to_dtype(candle_type(view.global().dtype())?)
        .map_err(refused)?;
    if let Some(on) = place {
        return on.add(tensor, view);
    }
    macro_rules! add {
        ($type:ty, $sum:expr) => {
            read(tensor, |values: &[$type]| {
                let out = view.as_mut_slice::<$type>()?;
                for (out, value) in out.iter_mut().zip(values) {
                    *out = $sum(*out, *value);
                }
                Ok(())
            })?
        };
    }

    match view.global().dtype() {
        DType::F32 => add!(f32, |a: f32, b: f32| a + b),
        DType::F64 => add!(f64, |a: f64, b: f64| a + b),
        DType::F16 => add!(f16, |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32())),
        DType::Bf16 => add!(bf16, |a: bf16, b: bf16| bf16::from_f32(
            a.to_f32() + b.to_f32()
        )),
        other => Err(Error::kernel(format!(
            "parameters of dtype {other} have no gradient"
        ))),
    }
}

/// Calls `f` with the values of a tensor, row-major.
fn read<T: WithDType + Element, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R> {
    let tensor = tensor.contiguous().map_err(refused)?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::kernel(
            "the model returned a tensor that is not in host memory",
        ));
    };

    let values = T::cpu_storage_as_slice(storage).map_err(refused)?;
    let start = layout.start_offset();
    let values = values.get(start..start + layout.shape().elem_count());
    values
        .map(f)
        .ok_or_else(|| Error::kernel("a tensor is larger than its memory"))
}

/// Overwrites a tensor, which may be a variable, with the view's values in the tensor's dtype.
pub(crate) fn refresh(tensor: &Tensor, view: &View<'_>, place: Place<'_>) -> Result<()> {
    let dtype = array_type(tensor.dtype())?;
    if dtype != view.global().dtype() {
        let converted = tensor_in(view, dtype, false, place)?;
        // As vectors, since a scalar has no dimension. They share the tensor's memory.
        let [to, from] = [tensor.detach().flatten_all(), converted.flatten_all()];
        return to
            .and_then(|to| to.slice_set(&from?, 0, 0))
            .map_err(refused);
    }

    if let Some(on) = place {
        return on.refresh(tensor, view);
    }
    with_type!(dtype, T => {
        let values = view.as_slice::<T>()?;
        tensor.inplace_op1(&OverwriteValues(values)).map_err(refused)
    })
}

/// The operation that overwrites a contiguous tensor in place.
struct OverwriteValues<'a, T>(&'a [T]);

/// Element types with mutable access to the elements of a CPU storage.
trait StoredElement: WithDType {
    fn values(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! stored {
    ($($type:ty: $variant:ident),+) => {
        $(impl StoredElement for $type {
            fn values(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
        })+

        fn bytes_of(storage: &CpuStorage) -> usize {
            match storage {
                $(CpuStorage::$variant(values) => size_of_val(&values[..]),)+
                _ => 0,
            }
        }
    };
}

stored! { f32: F32, f64: F64, f16: F16, bf16: BF16, u8: U8, u32: U32, i16: I16, i32: I32, i64: I64 }

impl<T: StoredElement> InplaceOp1 for OverwriteValues<'_, T> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let place = layout.contiguous_offsets();
        let values = T::values(storage).zip(place);
        match values.and_then(|(values, (start, end))| values.get_mut(start..end)) {
            Some(values) if values.len() == self.0.len() => {
                values.copy_from_slice(self.0);
                Ok(())
            }
            _ => candle_core::bail!("a parameter's memory does not fit its array"),
        }
    }
}

/// The address and the size of a tensor's memory.
pub(crate) struct TensorMemory {
    /// The address of candle's storage. Tensors that share memory have the same address.
    pub(crate) address: usize,
    pub(crate) bytes: u64,
}

/// Returns the address and the size of a tensor's memory.
pub(crate) fn memory_of(tensor: &Tensor) -> TensorMemory {
    let (storage, _) = tensor.storage_and_layout();
    let address = std::ptr::from_ref::<Storage>(&storage).addr();
    let bytes = match &*storage {
        Storage::Cpu(storage) => bytes_of(storage),
        _ => tensor.elem_count() * tensor.dtype().size_in_bytes(),
    };
    TensorMemory {
        address,
        bytes: bytes as u64,
    }
}
