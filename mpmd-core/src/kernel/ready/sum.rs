//! Sums over dimensions.

use super::{check_whole, wrong_dtype};
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::host::{HostKernel, HostWork, check_region};
use crate::kernel::{Kernel, View, ViewMut};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;

/// The dtypes that have a sum.
const TAKES: [DType; 4] = [DType::F32, DType::F64, DType::I32, DType::I64];

/// Returns a kernel that sums over dimensions `dims`, which the output lacks. For `f32`, `f64`,
/// `i32` and `i64`.
///
/// Elements are added in row-major order, `f32` in double precision. Integers wrap around. The
/// output of `sum(&[])` is the input.
///
/// # Errors
///
/// A call is refused if the array has another dtype, or if a dimension is named twice or does not
/// exist. The output fails if a summed dimension is divided over devices, or if a device has other
/// regions of input and output.
pub fn sum(dims: &[usize]) -> impl Kernel<In = MpmdArray, Out = MpmdArray> + use<> {
    HostKernel::named(format!("sum({dims:?})"), Sum { dims: dims.to_vec() })
}

struct Sum {
    dims: Vec<usize>,
}

impl Sum {
    /// Returns the items of the dimensions that are not summed.
    fn kept<T>(&self, items: impl IntoIterator<Item = T>) -> Vec<T> {
        let items = items.into_iter().enumerate();
        items.filter(|(dim, _)| !self.dims.contains(dim)).map(|(_, item)| item).collect()
    }

    /// Sums over the dimensions, in elements of type `A`.
    fn sum<T: Element, A: Copy>(
        &self,
        x: View<'_>,
        y: ViewMut<'_>,
        zero: A,
        add: impl Fn(A, T) -> A,
        end: impl Fn(A) -> T,
    ) -> Result<()> {
        let (x, mut y) = (x.typed::<T>()?, y.typed::<T>()?);
        let mut sums = vec![zero; y.len()];
        let strides = self.strides(x.shape());
        let last = x.shape().len().saturating_sub(1);
        let (columns, stride) = x.shape().last().map_or((1, 0), |size| (*size, strides[last]));
        let (mut index, mut to) = (vec![0; last], 0);
        for row in x.chunks_exact(columns.max(1)) {
            if stride == 0 {
                sums[to] = row.iter().fold(sums[to], |sum, x| add(sum, *x));
            } else {
                let sums = sums[to..to + columns].iter_mut();
                sums.zip(row).for_each(|(sum, x)| *sum = add(*sum, *x));
            }
            for dim in (0..last).rev() {
                index[dim] += 1;
                to += strides[dim];
                if index[dim] < x.shape()[dim] {
                    break;
                }
                to -= strides[dim] * index[dim];
                index[dim] = 0;
            }
        }
        y.iter_mut().zip(sums).for_each(|(y, sum)| *y = end(sum));
        Ok(())
    }

    /// Returns, for each dimension of an input of `shape`, the distance in elements between its
    /// successive indices in the output. 0 for summed dimensions.
    fn strides(&self, shape: &[usize]) -> Vec<usize> {
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for dim in (0..shape.len()).rev().filter(|dim| !self.dims.contains(dim)) {
            strides[dim] = stride;
            stride *= shape[dim];
        }
        strides
    }
}

impl HostWork for Sum {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<ShapedArray> {
        let twice = |(i, dim)| self.dims[..i].contains(dim);
        if let Some((_, dim)) =
            self.dims.iter().enumerate().find(|(i, dim)| **dim >= x.ndim() || twice((*i, *dim)))
        {
            return Err(Error::kernel(format!(
                "dimension {dim} of {x} cannot be summed: it is named twice or does not exist"
            )));
        }
        if !TAKES.contains(&x.dtype()) {
            return Err(wrong_dtype("sum", x, &TAKES));
        }
        Ok(ShapedArray::try_new(&self.kept(x.shape().iter().copied()), x.dtype())?)
    }

    fn run(&self, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        self.dims.iter().try_for_each(|dim| check_whole("sum", "the input", &x, *dim))?;
        let kept = Region::new(self.kept(x.region().ranges()));
        check_region("the output", y.region(), "the sums of its input", &kept)?;
        match x.global().dtype() {
            DType::F32 => {
                self.sum(x, y, 0.0, |sum: f64, x: f32| sum + f64::from(x), |sum| sum as f32)
            }
            DType::F64 => self.sum(x, y, 0.0, |sum: f64, x: f64| sum + x, |sum| sum),
            DType::I32 => self.sum(x, y, 0, i32::wrapping_add, |sum| sum),
            DType::I64 => self.sum(x, y, 0, i64::wrapping_add, |sum| sum),
            _ => Err(wrong_dtype("sum", x.global(), &TAKES)),
        }
    }
}
