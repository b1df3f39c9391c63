//! Conversions between the dtypes of tensors and of arrays, and from candle's errors to mpmd's.

use candle_core::{DType as CandleType, Tensor, WithDType};
use half::{bf16, f16};
use mpmd_core::{Error, Result};
use mpmd_layout::aval::{DType, ShapedArray};

use crate::shortage::with_shortage;

/// Runs `$then` with `$type` as the element type of arrays of dtype `$dtype`. Returns an error for
/// dtypes that candle lacks.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $then:expr) => {
        $crate::dtypes::with_type!(
            $dtype, $type => $then;
            F32: f32, F64: f64, F16: f16, Bf16: bf16, U8: u8, U32: u32, I16: i16, I32: i32, I64: i64
        )
    };
    ($dtype:expr, $type:ident => $then:expr; $($variant:ident: $element:ty),+) => {
        match $dtype {
            $(DType::$variant => {
                type $type = $element;
                $then
            })+
            other => Err($crate::dtypes::no_tensor(other)),
        }
    };
}

pub(crate) use with_type;

pub(crate) fn no_tensor(dtype: DType) -> Error {
    Error::kernel(format!(
        "candle has no tensors of dtype {dtype}: cast the array before"
    ))
}

/// Converts an error of candle to an error of mpmd.
pub(crate) fn refused(error: candle_core::Error) -> Error {
    Error::kernel(with_shortage(error.to_string()))
}

/// Returns candle's dtype for arrays of dtype `dtype`.
pub(crate) fn candle_type(dtype: DType) -> Result<CandleType> {
    with_type!(dtype, T => Ok(<T as WithDType>::DTYPE))
}

/// Returns the dtype of arrays for tensors of dtype `dtype`.
pub(crate) fn array_type(dtype: CandleType) -> Result<DType> {
    Ok(match dtype {
        CandleType::F32 => DType::F32,
        CandleType::F64 => DType::F64,
        CandleType::F16 => DType::F16,
        CandleType::BF16 => DType::Bf16,
        CandleType::U8 => DType::U8,
        CandleType::U32 => DType::U32,
        CandleType::I16 => DType::I16,
        CandleType::I32 => DType::I32,
        CandleType::I64 => DType::I64,
        other => {
            return Err(Error::kernel(format!(
                "a tensor of dtype {} cannot become an array: cast it before",
                other.as_str()
            )));
        }
    })
}

/// Returns the shape and dtype of a tensor.
pub(crate) fn aval_of(tensor: &Tensor) -> Result<ShapedArray> {
    Ok(ShapedArray::try_new(
        tensor.dims(),
        array_type(tensor.dtype())?,
    )?)
}
