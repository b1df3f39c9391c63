//! Functions of tensors as kernels.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use mpmd_core::kernel::{
    Context, HostKernel, HostWork, Kernel, Shapes, Signature, Views, ViewsMut,
};
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::DimensionRule;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Structure, Tree};

use crate::bridge::{self, Place};
use crate::cuda::OnCuda;
use crate::dtypes;
use crate::pass::{self, PassState};
use crate::tensors::{TensorLeaf, Tensors, Values};
use crate::threads;
use crate::tree_form::TreeForm;

/// A function of tensors with 1 to 4 arguments. `A` is its signature as a function pointer, such as
/// `fn(X) -> Y`.
pub trait TensorFunction<A>: Send + Sync + 'static {
    /// The tree of input arrays: the single argument, or a tuple of all arguments.
    type In: Tree<Leaf = MpmdArray>;
    /// The tree of output arrays.
    type Out: Tree<Leaf = MpmdArray>;

    /// Calls the function.
    ///
    /// # Errors
    ///
    /// Returns the function's error.
    fn call(&self, x: Values<Self::In>) -> candle_core::Result<Values<Self::Out>>;
}

impl<F, X: Tensors, Y: Tensors> TensorFunction<fn(X) -> Y> for F
where
    F: Fn(X) -> candle_core::Result<Y> + Send + Sync + 'static,
{
    type In = X::Arrays;
    type Out = Y::Arrays;

    fn call(&self, x: Values<Self::In>) -> candle_core::Result<Values<Self::Out>> {
        self(X::from_values(x)).map(Tensors::into_values)
    }
}

/// Implements [`TensorFunction`] for functions with the given arguments.
macro_rules! call {
    ($($x:ident: $X:ident),+) => {
        impl<F, Y: Tensors, $($X: Tensors),+> TensorFunction<fn($($X),+) -> Y> for F
        where
            F: Fn($($X),+) -> candle_core::Result<Y> + Send + Sync + 'static,
        {
            type In = ($($X::Arrays),+);
            type Out = Y::Arrays;

            fn call(&self, x: Values<Self::In>) -> candle_core::Result<Values<Self::Out>> {
                let ($($x),+) = x;
                self($($X::from_values($x)),+).map(Tensors::into_values)
            }
        }
    };
}

call! { a: A, b: B }
call! { a: A, b: B, c: C }
call! { a: A, b: B, c: C, d: D }

/// Creates a kernel from a function of tensors: `p.jit(function(f).like_input())`.
///
/// An argument is a [`Tensor`](candle_core::Tensor), or a tree of them: see [`Tensors`]. On each
/// device the function gets the device's regions of the arrays. Inputs are copied to tensors, and
/// results are copied to the output arrays.
///
/// The outputs' shapes are declared, by [`like_input`](FunctionKernel::like_input) or
/// [`outputs`](FunctionKernel::outputs), or found by [`probe`](FunctionKernel::probe). Values that
/// the function captures must be declared by [`with`](FunctionKernel::with), as for
/// [`kernel`](mpmd_core::kernel::kernel()).
#[track_caller]
pub fn function<A: 'static, F: TensorFunction<A>>(f: F) -> FunctionKernel<F, A> {
    let captures = size_of::<F>() != 0;
    let on_host = cfg!(not(feature = "cuda"));
    let work = FunctionWork {
        f,
        on_host,
        shapes: OutputShapes::Unknown,
        arguments: PhantomData,
    };
    FunctionKernel(HostKernel::closure(
        "candle function",
        Location::caller(),
        captures,
        work,
    ))
}

/// A kernel that calls a function of tensors. Created by [`function`].
pub struct FunctionKernel<F: TensorFunction<A>, A: 'static>(HostKernel<FunctionWork<F, A>>);

/// The function, and the shapes of its outputs.
struct FunctionWork<F: TensorFunction<A>, A> {
    f: F,
    on_host: bool,
    shapes: OutputShapes<F::In, F::Out>,
    arguments: PhantomData<fn() -> A>,
}

enum OutputShapes<I: Tree, O: Tree> {
    Unknown,
    LikeInput,
    Declared(Box<Declared<I, O>>),
    Probed(Vec<ShapedArray>, TreeForm),
}

type Declared<I, O> = dyn Fn(&Shapes<I>) -> Result<Shapes<O>> + Send + Sync;

impl<A: 'static, F: TensorFunction<A>> FunctionKernel<F, A> {
    /// Declares that the output has the shape and dtype of the first input.
    #[must_use]
    pub fn like_input(self) -> Self {
        self.shaped(OutputShapes::LikeInput)
    }

    /// Declares the outputs' global shapes as a function of the inputs' global shapes.
    #[must_use]
    pub fn outputs(
        self,
        shapes: impl Fn(&Shapes<F::In>) -> Result<Shapes<F::Out>> + Send + Sync + 'static,
    ) -> Self {
        self.shaped(OutputShapes::Declared(Box::new(shapes)))
    }

    /// Determines the outputs' shapes for inputs of global shapes `x`. The owner of the mesh's
    /// first device runs the function on zeros and sends the shapes to all processes. Every process
    /// must call this method, which blocks until the shapes have arrived.
    ///
    /// # Errors
    ///
    /// If the function fails, on every process. Also as for [`Program::broadcast_value`].
    #[track_caller]
    pub fn probe(self, p: &mut Program, mesh: &Mesh, x: &Shapes<F::In>) -> Result<Self> {
        let mut failed = None;
        let kernel = self.0.map_work(|work| match work.probe(p, mesh, x) {
            Ok(shapes) => FunctionWork { shapes, ..work },
            Err(why) => {
                failed = Some(why);
                work
            }
        });
        failed.map_or(Ok(Self(kernel)), Err)
    }

    /// Declares a value that the function captures: see
    /// [`HostKernel::with`](mpmd_core::kernel::HostKernel::with).
    #[must_use]
    pub fn with(self, value: impl fmt::Debug) -> Self {
        Self(self.0.with(value))
    }

    /// Says how the dimensions of inputs and outputs belong together: see
    /// [`HostKernel::rule`](mpmd_core::kernel::HostKernel::rule).
    #[must_use]
    pub fn rule(self, text: &str) -> Self {
        Self(self.0.rule(text))
    }

    /// Computes in host memory even if the kernel's devices are CUDA devices: all values are copied
    /// to the host and back. Without the feature `cuda`, all functions compute in host memory.
    #[must_use]
    pub fn on_host(self) -> Self {
        Self(self.0.map_work(|work| FunctionWork {
            on_host: true,
            ..work
        }))
    }

    fn shaped(self, shapes: OutputShapes<F::In, F::Out>) -> Self {
        Self(self.0.map_work(|work| FunctionWork { shapes, ..work }))
    }
}

impl<A: 'static, F: TensorFunction<A>> FunctionWork<F, A> {
    /// Determines the outputs' shapes on one process and broadcasts them to all.
    fn probe(
        &self,
        p: &mut Program,
        mesh: &Mesh,
        x: &Shapes<F::In>,
    ) -> Result<OutputShapes<F::In, F::Out>> {
        let first = mesh
            .devices()
            .first()
            .and_then(|device| p.topology().process_of(*device));
        let owner = first.ok_or_else(|| Error::kernel("a probe on a mesh without devices"))?;

        let run = || {
            self.try_out(x)
                .map_err(|why| format!("the function fails in its probe: {why}"))
        };

        // A dry run learns the shapes in the same way as the owner.
        let in_dry_run = if p.is_dry_run() {
            run()
        } else {
            Err(String::new())
        };
        let outputs = p
            .broadcast_value(owner, in_dry_run, || Ok(run()))?
            .map_err(Error::kernel)?;

        let inputs = x.leaves().into_iter().cloned().collect();
        Ok(OutputShapes::Probed(inputs, outputs))
    }

    /// Runs the function on zeros of shapes `x`. Returns the structure and shapes of its outputs.
    fn try_out(&self, x: &Shapes<F::In>) -> Result<TreeForm> {
        let zeros = x
            .leaves()
            .into_iter()
            .map(|aval| bridge::zeros(aval, false).map(TensorLeaf));
        let zeros = zeros.collect::<Result<Vec<_>>>()?;

        let y = self
            .f
            .call(Tree::from_leaves(&x.structure(), zeros)?)
            .map_err(dtypes::refused)?;

        let structure = y.structure();
        let y: Vec<_> = y.into_leaves().into_iter().map(|value| value.0).collect();
        TreeForm::of(&structure, &y, Ok)
    }
}

impl<A: 'static, F: TensorFunction<A>> HostWork for FunctionWork<F, A> {
    type In = F::In;
    type Out = F::Out;

    fn infer(&self, x: &Shapes<F::In>) -> Result<Shapes<F::Out>> {
        let leaves = x.leaves();

        match &self.shapes {
            OutputShapes::LikeInput => {
                let first = leaves.first();
                let first = first.ok_or_else(|| Error::kernel("`like_input` needs an input"))?;
                let shapes = std::iter::once((*first).clone());
                Ok(Tree::from_leaves(&Structure::Leaf, shapes)?)
            }
            OutputShapes::Declared(shapes) => shapes(x),
            OutputShapes::Probed(inputs, outputs) if inputs.iter().eq(leaves) => outputs.shapes(),
            OutputShapes::Probed(inputs, _) => {
                let inputs: Vec<String> = inputs.iter().map(ToString::to_string).collect();
                Err(Error::kernel(format!(
                    "the function was probed for inputs {}: make and probe one for these, or \
                     declare its outputs with `outputs`",
                    inputs.join(", ")
                )))
            }
            OutputShapes::Unknown => Err(Error::kernel(
                "the shapes of the function's outputs are unknown: call `like_input`, `outputs` \
                 or `probe` before `jit`",
            )),
        }
    }

    fn run(&self, x: Views<'_, F::In>, y: ViewsMut<'_, F::Out>) -> Result<()> {
        self.run_at(None, x, y)
    }
}

impl<A: 'static, F: TensorFunction<A>> FunctionWork<F, A> {
    /// Runs the function on the CUDA device of `place`, or on the host. The views are in that
    /// memory.
    fn run_at(&self, place: Place<'_>, x: Views<'_, F::In>, y: ViewsMut<'_, F::Out>) -> Result<()> {
        threads::enter_pool();
        let structure = x.structure();
        let tensors = x
            .leaves()
            .into_iter()
            .map(|view| bridge::tensor_of(view, place).map(TensorLeaf));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let x = Tree::from_leaves(&structure, tensors)?;

        let out = match place {
            // Layers reach the device through the pass.
            Some(_) => pass::enter(
                &mut PassState {
                    cuda: place,
                    ..PassState::default()
                },
                || self.f.call(x),
            ),
            None => self.f.call(x),
        };
        let out = out.map_err(dtypes::refused)?;

        if out.structure() != y.structure() {
            return Err(Error::kernel(
                "the function returned another structure than declared",
            ));
        }

        let values = out.into_leaves().into_iter();
        values
            .zip(y.into_leaves())
            .try_for_each(|(value, mut view)| bridge::write(&value.0, &mut view, place))
    }
}

impl<A: 'static, F: TensorFunction<A>> Kernel for FunctionKernel<F, A> {
    type In = F::In;
    type Out = F::Out;

    fn infer(&self, x: &Shapes<F::In>) -> Result<Signature<Shapes<F::Out>>> {
        self.0.infer(x)
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: Views<'_, F::In>,
        y: ViewsMut<'_, F::Out>,
    ) -> Result<()> {
        let work = self.0.work();
        let on_cuda = if work.on_host {
            None
        } else {
            OnCuda::enter(cx)?
        };
        match on_cuda {
            Some(on) => work.run_at(Some(&on), x, y),
            None => self.0.run(cx, x, y),
        }
    }

    fn rule(&self) -> Option<DimensionRule> {
        Kernel::rule(&self.0)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn statics(&self) -> Vec<u64> {
        self.0.statics()
    }
}
