//! Ready kernels. Each function returns a kernel for [`jit`](crate::Program::jit).
//!
//! A dimension that a kernel needs whole may not be divided over devices: that fails the outputs,
//! and never gives wrong values. Other dimensions may be divided, if the arrays are divided alike.
//!
//! [`matmul`] computes on CUDA devices with cuBLAS. The other kernels compute in host memory there,
//! which is slow: see [`HostKernel`](super::HostKernel).
//!
//! ```
//! use mpmd_core::kernel::ready;
//! use mpmd_core::prelude::*;
//!
//! let x = HostArray::from_slice(&[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
//! let columns = mpmd_core::run_here(ready::sum(&[0]), &x)?;
//! assert_eq!(columns.to_vec::<f32>()?, [4.0, 6.0]);
//! # Ok::<(), Error>(())
//! ```

mod arithmetic;
mod labels;
mod matmul;
mod parts;
mod real;
mod sum;

use super::View;
use crate::error::{Error, Result, ViewError};
pub use arithmetic::{add, cast, scale};
pub use labels::{one_hot, softmax_cross_entropy};
pub use matmul::matmul;
use mpmd_layout::aval::{DType, ShapedArray};
pub use parts::{concatenate, slice};
pub use sum::sum;

/// Returns an error if dimension `dim` of the input is divided over devices.
fn check_whole(kernel: &str, what: &str, x: &View<'_>, dim: usize) -> Result<()> {
    let (found, size) = (x.region().range(dim), x.global().shape()[dim]);
    if found == (0..size) {
        return Ok(());
    }
    Err(Error::kernel(format!(
        "dimension {dim} of {what}, {}, is divided: this device has {found:?} of it; {kernel} \
         needs it whole on each device",
        x.global()
    )))
}

/// Returns the error of an input with a dtype that the kernel does not take.
fn wrong_dtype(kernel: &str, x: &ShapedArray, takes: &[DType]) -> Error {
    let takes: Vec<&str> = takes.iter().map(|dtype| dtype.name()).collect();
    Error::kernel(format!("{kernel} takes {}, not {x}: use `cast`", takes.join(", ")))
}

/// Returns the bytes of an input in host memory.
fn bytes<'a>(x: &View<'a>) -> Result<&'a [u8], ViewError> {
    x.host_bytes().ok_or(if x.device().is_some() {
        ViewError::OnDevice
    } else {
        ViewError::InPlace
    })
}
