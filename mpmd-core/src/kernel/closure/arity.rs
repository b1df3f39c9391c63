//! The traits of a kernel's closures, for every number of inputs and outputs.

use super::{MpmdArray, like_input};
use crate::error::{Error, Result};
use crate::kernel::{Shapes, View, ViewMut, Views, ViewsMut};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::tree::{Empty, Tree};

/// A closure that computes from typed views: first the inputs, then the outputs. `A` is the
/// function type with its arguments.
pub trait RunKernel<A>: Send + Sync + 'static {
    /// The structure of the inputs.
    type In: Tree<Leaf = MpmdArray>;
    /// The structure of the outputs.
    type Out: Tree<Leaf = MpmdArray>;
    /// The dtypes of the inputs.
    const INPUTS: &'static [DType];
    /// The dtypes of the outputs.
    const OUTPUTS: &'static [DType];

    /// Calls the closure.
    ///
    /// # Errors
    ///
    /// If a view has another dtype or is in device memory, or the closure fails.
    fn run(&self, x: Views<'_, Self::In>, y: ViewsMut<'_, Self::Out>) -> Result<()>;
}

/// A closure that computes the outputs' global shapes from the inputs', or [`like_input`]. `A` is
/// the function type with its result.
pub trait InferShapes<A, I: Tree<Leaf = MpmdArray>, O: Tree<Leaf = MpmdArray>>:
    Send + Sync + 'static
{
    /// Calls the closure.
    ///
    /// # Errors
    ///
    /// The closure's own.
    fn infer(&self, x: &Shapes<I>) -> Result<Shapes<O>>;
}

/// A closure's result, either the plain value or a `Result`.
pub trait Returned<O> {
    /// Returns the value, or the closure's error.
    ///
    /// # Errors
    ///
    /// The closure's own.
    fn returned(self) -> Result<O>;
}

impl<O> Returned<O> for O {
    fn returned(self) -> Result<O> {
        Ok(self)
    }
}

impl<O> Returned<O> for Result<O> {
    fn returned(self) -> Result<O> {
        self
    }
}

/// The outputs of a kernel from closures: one array or a tuple of several.
pub trait ClosureOutputs: Tree<Leaf = MpmdArray> {
    /// Returns outputs that all have the shape and dtype of `aval`.
    fn all(aval: &ShapedArray) -> Shapes<Self>;
}

impl<I: Tree<Leaf = MpmdArray>, O: ClosureOutputs> InferShapes<(), I, O> for like_input {
    fn infer(&self, x: &Shapes<I>) -> Result<Shapes<O>> {
        x.leaves()
            .first()
            .map(|first| O::all(first))
            .ok_or_else(|| Error::kernel("`like_input` is for functions with an input"))
    }
}

/// Implements `ClosureOutputs` for a tuple with an array for each name.
macro_rules! outputs {
    ($($y:ident)+) => {
        impl ClosureOutputs for arrays!($($y)+) {
            fn all(aval: &ShapedArray) -> Shapes<Self> {
                $(let $y = aval.clone();)+
                names!($($y)+)
            }
        }
    };
}

/// Infers no shapes, for a method without outputs.
impl<I: Tree<Leaf = MpmdArray>> InferShapes<(), I, Empty<MpmdArray>> for () {
    fn infer(&self, _: &Shapes<I>) -> Result<Empty<ShapedArray>> {
        Ok(Empty::new())
    }
}

/// Infers the outputs' shapes for a method without inputs.
impl<S, D, O> InferShapes<fn() -> D, Empty<MpmdArray>, O> for S
where
    S: Fn() -> D + Send + Sync + 'static,
    D: Returned<Shapes<O>>,
    O: Tree<Leaf = MpmdArray>,
{
    fn infer(&self, _: &Empty<ShapedArray>) -> Result<Shapes<O>> {
        self().returned()
    }
}

/// Implements `RunKernel` for closures with these inputs and outputs.
macro_rules! run {
    ([$($x:ident: $X:ident)+] [$($y:ident: $Y:ident)+]) => {
        impl<F, R, $($X,)+ $($Y,)+>
            RunKernel<fn($(View<'static, $X>,)+ $(ViewMut<'static, $Y>,)+) -> R> for F
        where
            F: Fn($(View<'_, $X>,)+ $(ViewMut<'_, $Y>),+) -> R + Send + Sync + 'static,
            R: Returned<()>,
            $($X: Element,)+
            $($Y: Element,)+
        {
            type In = arrays!($($x)+);
            type Out = arrays!($($y)+);
            const INPUTS: &'static [DType] = &[$($X::DTYPE),+];
            const OUTPUTS: &'static [DType] = &[$($Y::DTYPE),+];

            fn run(&self, x: Views<'_, Self::In>, y: ViewsMut<'_, Self::Out>) -> Result<()> {
                let names!($($x)+) = x;
                let names!($($y)+) = y;
                self($($x.typed()?,)+ $($y.typed()?),+).returned()
            }
        }
    };
}

/// Expands to the type of a reference to a shape, once for each given name.
macro_rules! shape {
    ($name:ident) => {
        &ShapedArray
    };
}

/// Implements the closure traits for these inputs, with 1 to 3 outputs.
macro_rules! inputs {
    ($($x:ident: $X:ident)+) => {
        impl<S, D, O> InferShapes<fn() -> D, arrays!($($x)+), O> for S
        where
            S: Fn($(shape!($x)),+) -> D + Send + Sync + 'static,
            D: Returned<Shapes<O>>,
            O: Tree<Leaf = MpmdArray>,
        {
            fn infer(&self, x: &Shapes<arrays!($($x)+)>) -> Result<Shapes<O>> {
                let names!($($x)+) = x;
                self($($x),+).returned()
            }
        }

        run! { [$($x: $X)+] [p: P] }
        run! { [$($x: $X)+] [p: P q: Q] }
        run! { [$($x: $X)+] [p: P q: Q s: S] }
    };
}

outputs! { p }
outputs! { p q }
outputs! { p q s }
inputs! { a: A }
inputs! { a: A b: B }
inputs! { a: A b: B c: C }
inputs! { a: A b: B c: C d: D }
inputs! { a: A b: B c: C d: D e: E }
inputs! { a: A b: B c: C d: D e: E g: G }
