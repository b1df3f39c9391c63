//! Kernels from functions of single elements.

use std::marker::PhantomData;
use std::panic::Location;

use super::{MpmdArray, check_dtypes};
use crate::error::{Error, Result};
use crate::kernel::host::{HostKernel, HostWork, check_region};
use crate::kernel::{Shapes, View, ViewMut, Views, ViewsMut, written_rule};
use mpmd_layout::aval::{Element, ShapedArray};
use mpmd_layout::sharding::DimensionRule;

/// Number of elements computed at a time, and of copies of a scalar argument in a buffer on the
/// stack.
const CHUNK: usize = 256;

/// Creates a kernel that computes each element of its output from the elements at the same index of
/// its inputs.
///
/// `f` takes 1 to 4 elements, each of any element type, and returns one of any element type. All
/// inputs have the same shape, and the output gets it too. An input of shape `[]` is used for every
/// element. One input is an [`MpmdArray`], several are a tuple.
///
/// The closure is identified by its source line. Declare captured values by
/// [`with`](HostKernel::with), so that processes can compare them. A plain `fn` captures nothing.
///
/// On CUDA devices the values are copied to the host and back, which is slow: see [`HostKernel`].
///
/// ```
/// use mpmd_core::prelude::*;
///
/// let line = elementwise(|x: f32, a: f32| a * x + 1.0);
/// let (x, a) = (HostArray::from_slice(&[3], &[1.0f32, 2.0, 3.0])?, HostArray::scalar(2.0f32));
/// assert_eq!(mpmd_core::run_here(line, &(x, a))?.to_vec::<f32>()?, [3.0, 5.0, 7.0]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
///
/// A call is refused when it is issued, on every process alike:
///
/// - if an input has another dtype than `f`'s argument;
/// - if the shapes of two inputs differ and neither is `[]`;
/// - if a device holds different regions of two arrays: the error names both;
/// - if `f` captures values and `with` declares none.
#[track_caller]
pub fn elementwise<F, A>(f: F) -> HostKernel<Elementwise<F, A>>
where
    Elementwise<F, A>: HostWork,
{
    let work = Elementwise {
        f,
        arguments: PhantomData,
    };
    HostKernel::closure("elementwise", Location::caller(), size_of::<F>() != 0, work)
}

/// The work of an [`elementwise`] kernel: a closure `F`. The function type `A` fixes the types of
/// its arguments.
pub struct Elementwise<F, A> {
    f: F,
    arguments: PhantomData<fn() -> A>,
}

/// An input of the element loop.
struct ElementwiseInput<'a, T> {
    values: &'a [T],
    /// Copies of a scalar's value; unused for other inputs.
    repeated: [T; CHUNK],
    is_scalar: bool,
}

impl<'a, T: Element> ElementwiseInput<'a, T> {
    /// Creates the input. Fails if it is neither a scalar nor has the same region as the device's
    /// output. The input and the output must not be empty.
    fn new(path: &str, x: View<'a, T>, y: &ViewMut<'_, impl Element>) -> Result<Self> {
        let is_scalar = x.global().ndim() == 0;
        if !is_scalar {
            check_region(path, x.region(), "the output", y.region())?;
        }
        let values = x.typed_slice();
        Ok(Self {
            values,
            repeated: [values[0]; CHUNK],
            is_scalar,
        })
    }

    /// Returns `len` elements from index `start` on. `len` is at most `CHUNK`.
    fn chunk(&self, start: usize, len: usize) -> &[T] {
        if self.is_scalar {
            &self.repeated[..len]
        } else {
            &self.values[start..start + len]
        }
    }
}

/// Returns the shape that all inputs but scalars have. Fails if two of them differ.
fn common_shape<'a>(inputs: &[&'a ShapedArray]) -> Result<&'a [usize]> {
    let mut arrays = inputs.iter().enumerate().filter(|(_, x)| x.ndim() > 0);
    let Some((i, first)) = arrays.next() else {
        return Ok(&[]);
    };
    match arrays.find(|(_, x)| x.shape() != first.shape()) {
        None => Ok(first.shape()),
        Some((j, other)) => Err(Error::kernel(format!(
            "input {i} is {first}, but input {j} is {other}: elementwise takes one shape and \
             scalars"
        ))),
    }
}

/// Implements the loop over elements for functions of these arguments.
macro_rules! elementwise {
    ($($x:ident: $X:ident $path:literal $comma:literal)+) => {
        impl<F, R, $($X),+> HostWork for Elementwise<F, fn($($X),+) -> R>
        where
            F: Fn($($X),+) -> R + Send + Sync + 'static,
            R: Element,
            $($X: Element),+
        {
            type In = arrays!($($x)+);
            type Out = MpmdArray;

            fn infer(&self, x: &Shapes<Self::In>) -> Result<ShapedArray> {
                check_dtypes("input", x, &[$($X::DTYPE),+])?;
                let names!($($x)+) = x;
                Ok(ShapedArray::try_new(common_shape(&[$($x),+])?, R::DTYPE)?)
            }

            fn rule(&self) -> Option<DimensionRule> {
                written_rule(concat!($($comma, "...",)+ " -> ..."))
            }

            fn run(&self, x: Views<'_, Self::In>, y: ViewsMut<'_, MpmdArray>) -> Result<()> {
                let mut y = y.typed::<R>()?;
                if y.is_empty() {
                    return Ok(());
                }
                let names!($($x)+) = x;
                $(let $x = ElementwiseInput::new($path, $x.typed::<$X>()?, &y)?;)+
                for (chunk, y) in y.chunks_mut(CHUNK).enumerate() {
                    $(let $x = $x.chunk(chunk * CHUNK, y.len());)+
                    for (i, y) in y.iter_mut().enumerate() {
                        *y = (self.f)($($x[i]),+);
                    }
                }
                Ok(())
            }
        }
    };
}

elementwise! { a: A "input 0" "" }
elementwise! { a: A "input 0" "" b: B "input 1" ", " }
elementwise! { a: A "input 0" "" b: B "input 1" ", " c: C "input 2" ", " }
elementwise! {
    a: A "input 0" "" b: B "input 1" ", " c: C "input 2" ", " d: D "input 3" ", "
}
