//! Kernels that compute each element by itself.

use super::real::{Real, with_real};
use super::{bytes, wrong_dtype};
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::host::{HostKernel, HostWork, check_region};
use crate::kernel::{Kernel, View, ViewMut};
use mpmd_device::sum::add_region;
use mpmd_layout::aval::{DType, ShapedArray};

/// Returns a kernel that adds two arrays of one shape and dtype.
///
/// Integers wrap around. Half precision is rounded after the addition.
///
/// # Errors
///
/// A call is refused if shapes or dtypes differ, or the dtype is `bool`. The output fails if a
/// device has other regions of the three arrays.
pub fn add() -> impl Kernel<In = (MpmdArray, MpmdArray), Out = MpmdArray> {
    HostKernel::named("add", Add)
}

struct Add;

impl HostWork for Add {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (a, b): &(ShapedArray, ShapedArray)) -> Result<ShapedArray> {
        if a == b && a.dtype() != DType::Bool {
            return Ok(a.clone());
        }
        Err(Error::kernel(format!(
            "add takes two arrays of one shape and one dtype of numbers, not {a} and {b}"
        )))
    }

    fn run(&self, (a, b): (View<'_>, View<'_>), mut y: ViewMut<'_>) -> Result<()> {
        check_region("input 0", a.region(), "the output", y.region())?;
        check_region("input 1", b.region(), "the output", y.region())?;
        let (region, dtype) = (y.region(), y.global().dtype());
        let y = y.as_bytes_mut();
        y.copy_from_slice(bytes(&a)?);
        add_region(bytes(&b)?, region, y, region, region, dtype);
        Ok(())
    }
}

/// Returns a kernel that multiplies every element by `factor`, for `f32`, `f64`, `f16` and `bf16`.
///
/// The factor is rounded to the array's dtype first; for half precision, to `f32`.
///
/// # Errors
///
/// A call is refused if the array has another dtype. The output fails if a device has other regions
/// of input and output.
pub fn scale(factor: f64) -> impl Kernel<In = MpmdArray, Out = MpmdArray> {
    HostKernel::named(format!("scale({factor:?})"), Scale { factor })
}

struct Scale {
    factor: f64,
}

impl HostWork for Scale {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<ShapedArray> {
        const TAKES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];
        if TAKES.contains(&x.dtype()) {
            return Ok(x.clone());
        }
        Err(wrong_dtype("scale", x, &TAKES))
    }

    fn run(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let factor = self.factor;
        let single = factor as f32;
        match x.global().dtype() {
            DType::F64 => each(x, y, |x: f64| x * factor),
            DType::F32 => each(x, y, |x: f32| x * single),
            DType::F16 => each(x, y, |x: half::f16| half::f16::from_f32(x.to_f32() * single)),
            DType::Bf16 => each(x, y, |x: half::bf16| half::bf16::from_f32(x.to_f32() * single)),
            _ => Err(Error::kernel("scale takes floats")),
        }
    }
}

/// Returns a kernel that converts every element to `dtype`, as Rust's `as` does.
///
/// Floats are rounded to the nearest value of the dtype. Conversion of a float to an integer cuts
/// off the fraction, keeps within the dtype's range, and makes NaN zero. Conversion between
/// integers keeps the lower bits. A `bool` is 0 or 1, and true unless the number is zero.
///
/// # Errors
///
/// A call is refused if one of the dtypes is complex. The output fails if a device has other
/// regions of input and output.
pub fn cast(dtype: DType) -> impl Kernel<In = MpmdArray, Out = MpmdArray> {
    HostKernel::named(format!("cast({dtype})"), Cast { dtype })
}

struct Cast {
    dtype: DType,
}

impl HostWork for Cast {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<ShapedArray> {
        if [x.dtype(), self.dtype]
            .iter()
            .any(|dtype| matches!(dtype, DType::C64 | DType::C128 | DType::Object))
        {
            return Err(Error::kernel(format!(
                "cast has neither complex numbers nor objects: {x} to {}",
                self.dtype
            )));
        }
        Ok(ShapedArray::try_new(x.shape(), self.dtype)?)
    }

    fn run(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let complex = || Err(Error::kernel("cast has neither complex numbers nor objects"));
        with_real!(x.global().dtype(), From => cast_from::<From>(x, y), complex())
    }
}

fn cast_from<From: Real>(x: View<'_>, y: ViewMut<'_>) -> Result<()> {
    let complex = || Err(Error::kernel("cast has neither complex numbers nor objects"));
    let convert = From::wide;
    with_real!(y.global().dtype(), To => each(x, y, |x| To::narrow(convert(x))), complex())
}

/// Sets each element of `y` to `f` of the element of `x` at the same place.
fn each<A: Real, B: Real>(x: View<'_>, y: ViewMut<'_>, f: impl Fn(A) -> B) -> Result<()> {
    check_region("the input", x.region(), "the output", y.region())?;
    let (x, mut y) = (x.typed::<A>()?, y.typed::<B>()?);
    y.iter_mut().zip(x.iter()).for_each(|(y, x)| *y = f(*x));
    Ok(())
}
