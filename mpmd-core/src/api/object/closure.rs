//! Methods made from closures.

use std::marker::PhantomData;
use std::panic::Location;

use super::method::{MadeObject, Makes, Method};
use crate::error::Result;
use crate::exec::array::MpmdArray;
use crate::kernel::{
    HostKernel, HostWork, InferShapes, Shapes, Signature, View, ViewMut, Views, ViewsMut, arrays,
    check_dtypes, names,
};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::tree::{Empty, Tree};

/// Creates a method from two closures: `shapes` computes the outputs' global shapes, `run` changes
/// one device's value and computes its part of the outputs.
///
/// `run` takes the value as `&mut T`, then typed views: 0 to 4 inputs
/// ([`View<f32>`](crate::kernel::View)), then 0 to 2 outputs
/// ([`ViewMut<f32>`](crate::kernel::ViewMut)). It returns `()`, or a new object as [`MadeObject`],
/// plain or in a `Result`. `shapes` is as for [`kernel`](crate::kernel::kernel()), or `()` for a
/// method without outputs.
///
/// The method is identified by its source line. Values that `run` captures must be declared by
/// [`with`](HostKernel::with).
///
/// ```
/// use mpmd_core::{method, prelude::*};
///
/// let mut p = Program::builder().alone()?;
/// let mesh = p.mesh(&[("x", 1)])?;
/// let total = p.object(&mesh, |_| Ok(0.0f32))?;
/// let add = method(like_input, |total: &mut f32, x: View<f32>, mut y: ViewMut<f32>| {
///     *total += x[0];
///     y[0] = *total;
/// });
/// let add = p.method(add).on(&mesh).build()?;
/// let y = (1..=3).map(|i| add.call(&mut p, &total, MpmdArray::scalar(i as f32)));
/// let y = y.collect::<Result<Vec<_>>>()?;
/// assert_eq!(y[2].to_host()?.unwrap().to_vec::<f32>()?, [6.0]);
/// # p.finish()?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
///
/// A call is refused when it is issued, on every process alike, in the cases of
/// [`kernel`](crate::kernel::kernel()). An error or a panic of `run` fails the outputs, and every
/// later call with the object.
#[track_caller]
pub fn method<S, F, A, B>(shapes: S, run: F) -> HostKernel<MethodClosures<S, F, A, B>>
where
    F: RunMethod<A>,
    S: InferShapes<B, F::In, F::Out>,
    A: 'static,
    B: 'static,
{
    let work = MethodClosures {
        shapes,
        run,
        bytes: None,
        types: PhantomData,
    };
    HostKernel::closure("method", Location::caller(), size_of::<F>() != 0, work)
}

/// A function that computes the bytes of a new object from the inputs' global shapes.
type BytesOf = Box<dyn Fn(&[&ShapedArray]) -> u64 + Send + Sync>;

/// The closures of a [`method`], with their argument types.
pub struct MethodClosures<S, F, A, B> {
    shapes: S,
    run: F,
    bytes: Option<BytesOf>,
    types: PhantomData<fn() -> (A, B)>,
}

impl<S, F, A, B> HostKernel<MethodClosures<S, F, A, B>> {
    /// Declares the bytes, on each device, of the object that a call makes. `bytes` computes them
    /// from the global shapes of the inputs. They count until the object is dropped.
    #[must_use]
    pub fn makes(self, bytes: impl Fn(&[&ShapedArray]) -> u64 + Send + Sync + 'static) -> Self {
        self.map_work(|work| MethodClosures {
            bytes: Some(Box::new(bytes)),
            ..work
        })
    }
}

impl<S, F, A, B> HostWork for MethodClosures<S, F, A, B>
where
    F: RunMethod<A>,
    S: InferShapes<B, F::In, F::Out>,
    A: 'static,
    B: 'static,
{
    type In = (MpmdArray, F::In);
    type Out = (F::Out, <F::Made as Makes>::Tree);

    fn infer(&self, (_, x): &Shapes<Self::In>) -> Result<Shapes<Self::Out>> {
        check_dtypes("input", x, F::INPUTS)?;
        let y = self.shapes.infer(x)?;
        check_dtypes("output", &y, F::OUTPUTS)?;
        Ok((y, F::Made::shapes()))
    }

    fn declare(
        &self,
        (_, x): &Shapes<Self::In>,
        signature: Signature<Shapes<Self::Out>>,
    ) -> Signature<Shapes<Self::Out>> {
        match &self.bytes {
            Some(bytes) => signature.object_bytes("1", bytes(&x.leaves())),
            None => signature,
        }
    }

    fn run(
        &self,
        (object, x): Views<'_, Self::In>,
        (y, made): ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        let mut object = object.object::<F::Object>()?;
        self.run.run(&mut object, x, y)?.store(made)
    }
}

impl<S, F, A, B> Method for HostKernel<MethodClosures<S, F, A, B>>
where
    F: RunMethod<A>,
    S: InferShapes<B, F::In, F::Out>,
    A: 'static,
    B: 'static,
{
    type Object = F::Object;
    type Inputs = F::In;
    type Outputs = F::Out;
    type Made = F::Made;
}

/// A closure that takes an object and typed views, inputs first. `A` is a function type with the
/// closure's arguments.
pub trait RunMethod<A>: Send + Sync + 'static {
    /// The type of the object's value on each device.
    type Object: Send + 'static;
    /// The structure of the inputs.
    type In: Tree<Leaf = MpmdArray>;
    /// The structure of the outputs.
    type Out: Tree<Leaf = MpmdArray>;
    /// The objects that a call of the method makes: `()`, or [`MadeObject`] for one.
    type Made: Makes;
    /// The dtypes of the inputs.
    const INPUTS: &'static [DType];
    /// The dtypes of the outputs.
    const OUTPUTS: &'static [DType];

    /// Calls the closure.
    ///
    /// # Errors
    ///
    /// If a view has another dtype than its argument or is in device memory, or if the closure
    /// fails.
    fn run(
        &self,
        object: &mut Self::Object,
        x: Views<'_, Self::In>,
        y: ViewsMut<'_, Self::Out>,
    ) -> Result<Self::Made>;
}

/// The values that a method's closure may return. Kernels have a trait of their own, so that type
/// inference works for a bare `Err(…)`.
pub trait MethodResult {
    /// The objects that the call makes: `()`, or [`MadeObject`] for one.
    type Made: Makes;

    /// Returns the new objects, or the error of a closure that failed.
    ///
    /// # Errors
    ///
    /// The error that the closure returned.
    fn made(self) -> Result<Self::Made>;
}

impl MethodResult for () {
    type Made = ();

    fn made(self) -> Result<()> {
        Ok(())
    }
}

impl MethodResult for Result<()> {
    type Made = ();

    fn made(self) -> Result<()> {
        self
    }
}

impl<T: Send + 'static> MethodResult for MadeObject<T> {
    type Made = Self;

    fn made(self) -> Result<Self> {
        Ok(self)
    }
}

impl<T: Send + 'static> MethodResult for Result<MadeObject<T>> {
    type Made = MadeObject<T>;

    fn made(self) -> Self {
        self
    }
}

/// Implements `RunMethod` for closures with the given number of inputs and outputs.
macro_rules! run_method {
    ([$($x:ident: $X:ident)*] [$($y:ident: $Y:ident)*]) => {
        impl<F, T, R, $($X,)* $($Y,)*>
            RunMethod<fn(T, $(View<'static, $X>,)* $(ViewMut<'static, $Y>,)*) -> R> for F
        where
            F: Fn(&mut T, $(View<'_, $X>,)* $(ViewMut<'_, $Y>),*) -> R + Send + Sync + 'static,
            T: Send + 'static,
            R: MethodResult,
            $($X: Element,)*
            $($Y: Element,)*
        {
            type Object = T;
            type In = arrays!($($x)*);
            type Out = arrays!($($y)*);
            type Made = R::Made;
            const INPUTS: &'static [DType] = &[$($X::DTYPE),*];
            const OUTPUTS: &'static [DType] = &[$($Y::DTYPE),*];

            fn run(
                &self,
                object: &mut T,
                x: Views<'_, Self::In>,
                y: ViewsMut<'_, Self::Out>,
            ) -> Result<R::Made> {
                let names!($($x)*) = x;
                let names!($($y)*) = y;
                self(object, $($x.typed()?,)* $($y.typed()?),*).made()
            }
        }
    };
    ([$($x:ident: $X:ident)*]) => {
        run_method! { [$($x: $X)*] [] }
        run_method! { [$($x: $X)*] [p: P] }
        run_method! { [$($x: $X)*] [p: P q: Q] }
    };
}

run_method! { [] }
run_method! { [a: A] }
run_method! { [a: A b: B] }
run_method! { [a: A b: B c: C] }
run_method! { [a: A b: B c: C d: D] }
