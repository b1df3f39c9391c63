//! Kernels over the labels of classes.

use super::{check_whole, wrong_dtype};
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::kernel::host::{HostKernel, HostWork, check_region};
use crate::kernel::{Kernel, View, ViewMut};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;

/// Returns a kernel from `i32` labels `[..]` to `f32` values `[.., classes]`: 1 at the label's
/// class, else 0. The classes may be divided over devices.
///
/// # Errors
///
/// A call is refused if the labels have another dtype. The output fails if a label is not in
/// `0..classes`, or if a device has other labels than its part of the output needs.
pub fn one_hot(classes: usize) -> impl Kernel<In = MpmdArray, Out = MpmdArray> {
    HostKernel::named(format!("one_hot({classes})"), OneHot { classes })
}

struct OneHot {
    classes: usize,
}

impl HostWork for OneHot {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, labels: &ShapedArray) -> Result<ShapedArray> {
        if labels.dtype() != DType::I32 {
            return Err(wrong_dtype("one_hot", labels, &[DType::I32]));
        }
        Ok(ShapedArray::try_new(&[labels.shape(), &[self.classes]].concat(), DType::F32)?)
    }

    fn run(&self, labels: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let mut y = y.typed::<f32>()?;
        let classes = y.region().range(labels.global().ndim());
        let of_output = y.region().ranges().take(labels.global().ndim()).collect();
        check_region("the labels", labels.region(), "the output", &Region::new(of_output))?;
        y.fill(0.0);
        for (i, label) in labels.typed::<i32>()?.iter().enumerate() {
            let class = class(*label, self.classes).map_err(|why| {
                Error::kernel(format!("label {i} of the region {}: {why}", labels.region()))
            })?;
            if classes.contains(&class) {
                y[i * classes.len() + class - classes.start] = 1.0;
            }
        }
        Ok(())
    }
}

/// Returns a kernel that computes the softmax cross-entropy of logits `[n, c]`, `f32` or `f64`,
/// with `i32` labels `[n]`.
///
/// It has two outputs in the logits' dtype: the sum of the losses `[]`, and the gradient of that
/// sum by the logits `[n, c]`.
///
/// With the largest logit `max = max_j z_j` of a row and its label `t`:
///
/// ```text
/// loss   = ln(sum_j exp(z_j - max)) + max - z_t
/// dz_j   = exp(z_j - max) / sum_i exp(z_i - max) - (1 if j = t else 0)
/// ```
///
/// Losses are in nats, and summed in double precision in the order of the rows. Divide both outputs
/// by `n` for the mean.
///
/// # Errors
///
/// A call is refused if shapes or dtypes are others. The outputs fail if a label is not in `0..c`;
/// the error names its row. They also fail if rows or classes are divided over devices: the sum
/// needs all of them.
pub fn softmax_cross_entropy()
-> impl Kernel<In = (MpmdArray, MpmdArray), Out = (MpmdArray, MpmdArray)> {
    HostKernel::named("softmax_cross_entropy", CrossEntropy)
}

struct CrossEntropy;

impl HostWork for CrossEntropy {
    type In = (MpmdArray, MpmdArray);
    type Out = (MpmdArray, MpmdArray);

    fn infer(
        &self,
        (logits, labels): &(ShapedArray, ShapedArray),
    ) -> Result<(ShapedArray, ShapedArray)> {
        let of_floats = matches!(logits.dtype(), DType::F32 | DType::F64);
        match (logits.shape(), labels.shape()) {
            ([n, _], [same]) if n == same && of_floats && labels.dtype() == DType::I32 => {
                Ok((ShapedArray::try_new(&[], logits.dtype())?, logits.clone()))
            }
            _ => Err(Error::kernel(format!(
                "softmax_cross_entropy takes logits [n, c], f32 or f64, and labels i32[n], not \
                 {logits} and {labels}"
            ))),
        }
    }

    fn run(
        &self,
        (logits, labels): (View<'_>, View<'_>),
        y: (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let name = "softmax_cross_entropy";
        check_whole(name, "the logits", &logits, 0)?;
        check_whole(name, "the logits", &logits, 1)?;
        check_whole(name, "the labels", &labels, 0)?;
        check_region("the gradient", y.1.region(), "the logits", logits.region())?;
        match logits.global().dtype() {
            DType::F64 => losses::<f64>(logits, labels, y),
            _ => losses::<f32>(logits, labels, y),
        }
    }
}

/// Computes the sum of the losses and its gradient, each row in double precision.
fn losses<T: Element + Into<f64> + FromDouble>(
    logits: View<'_>,
    labels: View<'_>,
    (sum, gradient): (ViewMut<'_>, ViewMut<'_>),
) -> Result<()> {
    let classes = logits.shape()[1];
    let (logits, labels) = (logits.typed::<T>()?, labels.typed::<i32>()?);
    let (mut sum, mut gradient) = (sum.typed::<T>()?, gradient.typed::<T>()?);
    let mut total = 0.0;
    for (row, label) in labels.iter().enumerate() {
        let label = class(*label, classes)
            .map_err(|why| Error::kernel(format!("row {row} of the labels: {why}")))?;
        let own = row * classes..(row + 1) * classes;
        let (z, dz) = (&logits[own.clone()], &mut gradient[own]);
        let max = z.iter().fold(f64::NEG_INFINITY, |max, z| max.max((*z).into()));
        let exp = |z: &T| ((*z).into() - max).exp();
        let exps: f64 = z.iter().map(exp).sum();
        total += exps.ln() + max - z[label].into();
        dz.iter_mut().zip(z).for_each(|(dz, z)| *dz = T::from_double(exp(z) / exps));
        dz[label] = T::from_double(exp(&z[label]) / exps - 1.0);
    }
    sum[0] = T::from_double(total);
    Ok(())
}

/// A float to which a double is rounded.
trait FromDouble {
    fn from_double(double: f64) -> Self;
}

impl FromDouble for f32 {
    fn from_double(double: f64) -> Self {
        double as f32
    }
}

impl FromDouble for f64 {
    fn from_double(double: f64) -> Self {
        double
    }
}

/// Returns the index of a label's class. The error says that there is no such class.
fn class(label: i32, classes: usize) -> Result<usize, String> {
    let index = usize::try_from(label).ok().filter(|class| *class < classes);
    index.ok_or_else(|| format!("there is no class {label} among {classes}"))
}
