//! Kernels made from closures.

/// Expands to a tree type with one array for each name.
macro_rules! arrays {
    () => {
        Empty<MpmdArray>
    };
    ($name:ident) => {
        MpmdArray
    };
    ($($name:ident)+) => {
        ($(arrays!($name)),+)
    };
}
pub(crate) use arrays;

/// Expands to the only name, or to a tuple of all names: a pattern or an expression.
macro_rules! names {
    () => {
        _
    };
    ($name:ident) => {
        $name
    };
    ($($name:ident)+) => {
        ($($name),+)
    };
}
pub(crate) use names;

mod arity;
mod elementwise;
mod identity;

use std::marker::PhantomData;
use std::panic::Location;

use super::host::{HostKernel, HostWork};
use super::{Shapes, Views, ViewsMut};
use crate::error::{Error, Result, leaf};
use crate::exec::array::MpmdArray;
pub use arity::{InferShapes, RunKernel};
pub use elementwise::{Elementwise, elementwise};
pub(crate) use identity::ClosureIdentity;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::tree::Tree;

/// Creates a kernel from two closures: `shapes` computes the outputs' global shapes, `run` computes
/// one device's part of the outputs.
///
/// `run` takes typed views: 1 to 6 inputs ([`View<f32>`](super::View)), then 1 to 3 outputs
/// ([`ViewMut<f32>`](super::ViewMut)). It returns `()` or `Result<()>`. A typed view is a slice of
/// the device's values, row-major; `shape()`, `region()` and `global()` describe it. Outputs start
/// with arbitrary values. One input or output is an [`MpmdArray`], several are a tuple.
///
/// `shapes` takes a [`ShapedArray`] reference for each input. It returns the output's shape, or a
/// tuple with the shape of each output, plain or in a `Result`. Or it is [`like_input`].
///
/// A closure is identified by its source line. Declare the values that `run` captures by
/// [`with`](HostKernel::with), so that processes can compare them. A plain `fn` captures nothing.
///
/// On CUDA devices the values are copied to the host and back, which is slow: see [`HostKernel`].
///
/// ```
/// use mpmd_core::prelude::*;
///
/// // Scaled row sums of the device's rows: [n, m] -> [n].
/// let factor = 0.5f32;
/// let sums = kernel(
///     |x: &ShapedArray| f32s([x.shape()[0]]),
///     move |x: View<f32>, mut y: ViewMut<f32>| {
///         for (y, row) in y.iter_mut().zip(x.chunks(x.shape()[1].max(1))) {
///             *y = factor * row.iter().sum::<f32>();
///         }
///     },
/// )
/// .with(factor);
/// let x = HostArray::from_slice(&[2, 2], &[1.0f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(mpmd_core::run_here(sums, &x)?.to_vec::<f32>()?, [1.5, 3.5]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
///
/// A call is refused when it is issued, on every process alike:
///
/// - if an input or a declared output has another dtype than `run`'s view of it;
/// - if `shapes` refuses the inputs;
/// - if `run` captures values and `with` declares none.
///
/// An error or a panic of `run` fails the outputs instead.
#[track_caller]
pub fn kernel<S, F, A, B>(shapes: S, run: F) -> HostKernel<Closures<S, F, A, B>>
where
    F: RunKernel<A>,
    S: InferShapes<B, F::In, F::Out>,
    A: 'static,
    B: 'static,
{
    let work = Closures {
        shapes,
        run,
        arguments: PhantomData,
    };
    HostKernel::closure("kernel", Location::caller(), size_of::<F>() != 0, work)
}

/// The shape inference of a [`kernel`] with outputs like its first input: the same shape and dtype.
#[expect(
    non_camel_case_types,
    reason = "used as a value, in the place of a closure"
)]
#[derive(Clone, Copy, Debug)]
pub struct like_input;

/// The closures of a [`kernel`], with their argument types.
pub struct Closures<S, F, A, B> {
    shapes: S,
    run: F,
    arguments: PhantomData<fn() -> (A, B)>,
}

impl<S, F, A, B> HostWork for Closures<S, F, A, B>
where
    F: RunKernel<A>,
    S: InferShapes<B, F::In, F::Out>,
    A: 'static,
    B: 'static,
{
    type In = F::In;
    type Out = F::Out;

    fn infer(&self, x: &Shapes<F::In>) -> Result<Shapes<F::Out>> {
        check_dtypes("input", x, F::INPUTS)?;
        let y = self.shapes.infer(x)?;
        check_dtypes("output", &y, F::OUTPUTS)?;
        Ok(y)
    }

    fn run(&self, x: Views<'_, F::In>, y: ViewsMut<'_, F::Out>) -> Result<()> {
        self.run.run(x, y)
    }
}

/// Returns an error that names the first leaf with another dtype than in `expected`.
pub(crate) fn check_dtypes(
    kind: &str,
    shapes: &impl Tree<Leaf = ShapedArray>,
    expected: &[DType],
) -> Result<()> {
    for ((path, aval), dtype) in shapes.leaves_with_paths().into_iter().zip(expected) {
        if aval.dtype() != *dtype {
            let place = leaf(&path);
            return Err(Error::kernel(format!(
                "{kind} {place}{aval} does not fit the closure, which has {dtype} elements there"
            )));
        }
    }
    Ok(())
}
