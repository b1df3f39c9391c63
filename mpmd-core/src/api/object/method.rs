//! Methods of objects: kernels that take an object as one more input.

use std::panic::Location;

use super::{MpmdObject, ObjectBytes, measure};
use crate::api::jit::{Jit, JitBuilder};
use crate::api::program::Program;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use crate::exec::array::object::Measure;
use crate::kernel::{Kernel, Shapes, ViewsMut, below};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{Empty, PrefixTree, Tree};

/// A kernel whose first input is an object, which it may read and change.
///
/// [`method`](super::method) makes one from closures. Implement this trait for your own [`Kernel`]
/// if it needs trees of arrays, collectives or CUDA. Such a kernel accesses the object by
/// [`View::object`](crate::kernel::View::object).
pub trait Method:
    Kernel<In = (MpmdArray, Self::Inputs), Out = (Self::Outputs, <Self::Made as Makes>::Tree)>
{
    /// The type of the object's values.
    type Object: Send + 'static;
    /// The structure of the inputs other than the object.
    type Inputs: Tree<Leaf = MpmdArray>;
    /// The structure of the outputs.
    type Outputs: Tree<Leaf = MpmdArray>;
    /// The objects that a call makes: `()` for none, or [`MadeObject`] for one.
    type Made: Makes;
}

/// A new object that a method's closure returns.
pub struct MadeObject<T> {
    value: T,
    measure: Option<Measure>,
}

impl<T: Send + 'static> MadeObject<T> {
    /// Wraps `value` as a new object.
    pub fn new(value: T) -> Self {
        Self {
            value,
            measure: None,
        }
    }

    /// Wraps `value` as a new object. The bytes that it [reports](ObjectBytes) are compared with
    /// the declared bytes.
    pub fn measured(value: T) -> Self
    where
        T: ObjectBytes,
    {
        Self {
            value,
            measure: Some(measure::<T>),
        }
    }
}

/// The objects that a call of a method makes. Implemented for `()` and [`MadeObject`].
pub trait Makes: Sized + Send + 'static {
    /// The structure of the new objects, as arrays.
    type Tree: Tree<Leaf = MpmdArray>;
    /// The return type of a call; `Y` is the type of the method's outputs.
    type Results<Y>;

    /// Returns a placeholder shape for each new object.
    fn shapes() -> Shapes<Self::Tree>;

    /// Stores the new objects in the outputs of the kernel.
    ///
    /// # Errors
    ///
    /// If the outputs are declared as arrays of numbers instead of objects.
    fn store(self, objects: ViewsMut<'_, Self::Tree>) -> Result<()>;

    /// Combines the outputs of a call with handles to its new objects.
    fn results<Y>(outputs: Y, objects: Self::Tree) -> Self::Results<Y>;
}

impl Makes for () {
    type Tree = Empty<MpmdArray>;
    type Results<Y> = Y;

    fn shapes() -> Empty<ShapedArray> {
        Empty::new()
    }

    fn store(self, _: ViewsMut<'_, Self::Tree>) -> Result<()> {
        Ok(())
    }

    fn results<Y>(outputs: Y, _: Self::Tree) -> Y {
        outputs
    }
}

impl<T: Send + 'static> Makes for MadeObject<T> {
    type Tree = MpmdArray;
    type Results<Y> = (Y, MpmdObject<T>);

    fn shapes() -> ShapedArray {
        ShapedArray::object()
    }

    fn store(self, mut object: ViewsMut<'_, MpmdArray>) -> Result<()> {
        Ok(object.put_measured(self.value, self.measure)?)
    }

    fn results<Y>(outputs: Y, object: MpmdArray) -> (Y, MpmdObject<T>) {
        (outputs, MpmdObject::of(object))
    }
}

impl Program {
    /// Returns a builder that binds a method to a mesh, as [`Program::jit`] does for kernels:
    /// `program.method(append).on(&mesh).outputs(sharding).build()?`.
    ///
    /// Each output is replicated over the mesh unless `outputs` says otherwise.
    pub fn method<M: Method>(&self, method: M) -> MethodBuilder<M> {
        MethodBuilder {
            jit: self.jit(method),
            mesh: None,
            inputs: None,
            outputs: None,
        }
    }
}

/// Builder of a [`BoundMethod`]. Created by [`Program::method`].
#[must_use = "a builder does nothing until `build`"]
pub struct MethodBuilder<M> {
    jit: JitBuilder<M>,
    mesh: Option<Mesh>,
    inputs: Option<PrefixTree<Sharding>>,
    outputs: Option<PrefixTree<Sharding>>,
}

impl<M: Method> MethodBuilder<M> {
    /// Sets the mesh, which must be the mesh of the objects. Required.
    pub fn on(mut self, mesh: &Mesh) -> Self {
        self.mesh = Some(mesh.clone());
        self
    }

    /// Sets the expected shardings of the inputs, as [`JitBuilder::inputs`] does.
    pub fn inputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.inputs = Some(shardings.into());
        self
    }

    /// Sets the shardings of the outputs: one for all, or a tree prefix.
    pub fn outputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.outputs = Some(shardings.into());
        self
    }

    /// Donates the input at this path, as [`JitBuilder::donate`] does. The object is not counted in
    /// paths.
    pub fn donate(mut self, path: &str) -> Self {
        self.jit = self.jit.donate(below(1, path));
        self
    }

    /// Builds the bound method.
    ///
    /// # Errors
    ///
    /// As for [`JitBuilder::build`].
    #[track_caller]
    pub fn build(self) -> Result<BoundMethod<M>> {
        let Self {
            mut jit,
            mesh,
            inputs,
            outputs,
        } = self;
        let with = |pair: [PrefixTree<Sharding>; 2]| PrefixTree::<Sharding>::from(pair);

        if let Some(mesh) = mesh {
            let whole = PrefixTree::Leaf(mesh.replicated());
            jit = jit.on(&mesh);
            if let Some(inputs) = inputs {
                jit = jit.inputs(with([whole.clone(), inputs]));
            }
            jit = jit.outputs(match outputs {
                Some(outputs) => with([outputs, whole]),
                None => whole,
            });
        }
        Ok(BoundMethod { jit: jit.build()? })
    }
}

/// A method bound to a mesh.
pub struct BoundMethod<M: Method> {
    jit: Jit<M>,
}

impl<M: Method> BoundMethod<M> {
    /// Queues the method on this process's devices of the mesh, behind earlier calls. Returns
    /// handles to its outputs, and to the new object if it makes one. Blocks only as
    /// [`Jit::call`] does.
    ///
    /// # Errors
    ///
    /// As for [`Jit::call`]. If the call fails when it runs, its outputs fail instead, and later
    /// calls with the object too.
    #[track_caller]
    pub fn call(
        &self,
        program: &mut Program,
        object: &MpmdObject<M::Object>,
        x: M::Inputs,
    ) -> Result<<M::Made as Makes>::Results<M::Outputs>> {
        let at = program.caller(Location::caller());
        let (outputs, objects) = self.jit.call_at(program, &(object.array.clone(), x), at)?;
        Ok(M::Made::results(outputs, objects))
    }

    /// Returns the mesh that the method runs on.
    pub fn mesh(&self) -> &Mesh {
        self.jit.mesh()
    }
}
