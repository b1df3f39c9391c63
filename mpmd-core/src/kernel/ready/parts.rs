//! Kernels that copy parts of arrays.

use std::ops::Range;

use super::bytes;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::host::{HostKernel, HostWork};
use crate::kernel::{Kernel, View, ViewMut};
use mpmd_device::copy::copy_region;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;

/// Returns a kernel that joins arrays along dimension `dim`, in their order. Any dtype.
///
/// # Errors
///
/// A call is refused if there is no array or no such dimension, or if dtypes or other dimensions
/// differ. The output fails if a device lacks elements that its region of the output needs.
pub fn concatenate(dim: usize) -> impl Kernel<In = Vec<MpmdArray>, Out = MpmdArray> {
    HostKernel::named(format!("concatenate({dim})"), Concatenate { dim })
}

struct Concatenate {
    dim: usize,
}

impl HostWork for Concatenate {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, x: &Vec<ShapedArray>) -> Result<ShapedArray> {
        let Some(first) = x.first() else {
            return Err(Error::kernel("concatenate takes at least one array"));
        };
        let mut shape = first.shape().to_vec();
        if self.dim >= shape.len() {
            return Err(Error::kernel(format!("{first} has no dimension {}", self.dim)));
        }
        shape[self.dim] = 0;
        for other in x {
            let size = other.shape().get(self.dim).copied().unwrap_or_default();
            let mut expected = shape.clone();
            expected[self.dim] = size;
            if other.shape() != expected || other.dtype() != first.dtype() {
                return Err(Error::kernel(format!(
                    "{other} cannot be joined with {first} along dimension {}",
                    self.dim
                )));
            }
            shape[self.dim] = shape[self.dim].saturating_add(size);
        }
        Ok(ShapedArray::try_new(&shape, first.dtype())?)
    }

    fn run(&self, x: Vec<View<'_>>, mut y: ViewMut<'_>) -> Result<()> {
        let mut offset = 0;
        for (i, x) in x.iter().enumerate() {
            // All regions are in the output's coordinates.
            let by = |dim| if dim == self.dim { offset } else { 0 };
            let place = shifted(&Region::full(x.global().shape()), by);
            if let Some(piece) = y.region().intersect(&place) {
                let has = shifted(x.region(), by);
                check_contains(&format!("input {i}"), &has, &piece)?;
                let (region, item) = (y.region(), x.global().dtype().size());
                copy_region(bytes(x)?, &has, y.as_bytes_mut(), region, &piece, item);
            }
            offset += x.global().shape()[self.dim];
        }
        Ok(())
    }
}

/// Returns a kernel that copies one range of each dimension. Any dtype.
///
/// # Errors
///
/// A call is refused if there is not one range for each dimension, or if a range ends before it
/// begins or behind the dimension's end. The output fails if a device lacks elements that its
/// region of the output needs.
pub fn slice(ranges: &[Range<usize>]) -> impl Kernel<In = MpmdArray, Out = MpmdArray> + use<> {
    HostKernel::named(format!("slice({ranges:?})"), Slice { ranges: ranges.to_vec() })
}

struct Slice {
    ranges: Vec<Range<usize>>,
}

impl HostWork for Slice {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<ShapedArray> {
        let fits =
            |(range, size): (&Range<usize>, &usize)| range.start <= range.end && range.end <= *size;
        if self.ranges.len() != x.ndim() || !self.ranges.iter().zip(x.shape()).all(fits) {
            let ranges = &self.ranges;
            return Err(Error::kernel(format!("{ranges:?} are not ranges of {x}")));
        }
        let shape: Vec<usize> = self.ranges.iter().map(Range::len).collect();
        Ok(ShapedArray::try_new(&shape, x.dtype())?)
    }

    fn run(&self, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        let piece = shifted(y.region(), |dim| self.ranges[dim].start);
        check_contains("the input", x.region(), &piece)?;
        let item = x.global().dtype().size();
        copy_region(bytes(&x)?, x.region(), y.as_bytes_mut(), &piece, &piece, item);
        Ok(())
    }
}

/// Returns the region with `by(dim)` added to the indices of each dimension.
fn shifted(region: &Region, by: impl Fn(usize) -> usize) -> Region {
    let ranges = region.ranges().enumerate();
    ranges.map(|(dim, range)| (range.start + by(dim), range.end + by(dim))).collect()
}

/// Returns an error unless this device has all elements of an input that its output needs.
fn check_contains(what: &str, has: &Region, needs: &Region) -> Result<()> {
    if has.contains(needs) {
        return Ok(());
    }
    Err(Error::kernel(format!(
        "this device has the region {has} of {what}, but its part of the output needs {needs}: a \
         dimension that is cut or joined must be whole on each device"
    )))
}
