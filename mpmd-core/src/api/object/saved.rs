//! Saving an object's values to arrays, and making an object from arrays.

use std::marker::PhantomData;
use std::panic::Location;

use super::MpmdObject;
use crate::api::program::Program;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Kernel, Shapes, Signature, View, ViewMut, Views, ViewsMut};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{PrefixTree, Structure, Tree};

/// A value that can be saved to arrays and restored from them, for example in a checkpoint.
pub trait Saved: Sized + Send + 'static {
    /// The structure of the arrays.
    type Arrays: Tree<Leaf = MpmdArray>;

    /// Writes the value to arrays. `y` has this device's regions.
    ///
    /// # Errors
    ///
    /// An error fails the arrays and the object.
    fn save(&self, y: ViewsMut<'_, Self::Arrays>) -> Result<()>;

    /// Makes a value from arrays that [`save`](Self::save) has written.
    ///
    /// # Errors
    ///
    /// An error fails the object.
    fn restore(x: Views<'_, Self::Arrays>) -> Result<Self>;
}

impl Program {
    /// Saves an object on a mesh to arrays of these global shapes and shardings.
    ///
    /// The shapes are given here, because every process must know them. Saving is a call of the
    /// object, in order with other calls.
    ///
    /// # Errors
    ///
    /// If the object is not on the mesh, or a sharding does not fit.
    #[track_caller]
    pub fn save_object<T: Saved>(
        &mut self,
        object: &MpmdObject<T>,
        mesh: &Mesh,
        shapes: &Shapes<T::Arrays>,
        shardings: impl Into<PrefixTree<Sharding>>,
    ) -> Result<T::Arrays> {
        let at = Location::caller();
        let kernel = Save::<T> {
            structure: shapes.structure(),
            avals: shapes.leaves().into_iter().cloned().collect(),
            object: PhantomData,
        };
        let save = self.jit(kernel).on(mesh).outputs(shardings).build()?;
        save.call_at(self, object.array(), at)
    }

    /// Makes an object on a mesh from arrays that [`Program::save_object`] has written. Each device
    /// restores its value from its regions of the arrays.
    ///
    /// # Errors
    ///
    /// If an array has no part on a device of the mesh.
    #[track_caller]
    pub fn restore_object<T: Saved>(
        &mut self,
        mesh: &Mesh,
        arrays: &T::Arrays,
    ) -> Result<MpmdObject<T>> {
        let at = Location::caller();
        let kernel = Restore::<T>(PhantomData);
        let restore = self.jit(kernel).on(mesh).outputs(mesh.replicated()).build()?;
        Ok(MpmdObject::of(restore.call_at(self, arrays, at)?))
    }
}

/// The kernel that writes an object to arrays.
struct Save<T> {
    structure: Structure,
    avals: Vec<ShapedArray>,
    object: PhantomData<fn() -> T>,
}

impl<T: Saved> Kernel for Save<T> {
    type In = MpmdArray;
    type Out = T::Arrays;

    fn infer(&self, _: &ShapedArray) -> Result<Signature<Shapes<T::Arrays>>> {
        let avals = self.avals.iter().cloned();
        Ok(Signature::new(Shapes::<T::Arrays>::from_leaves(&self.structure, avals)?))
    }

    fn run(&self, _: &mut Context<'_>, x: View<'_>, y: ViewsMut<'_, T::Arrays>) -> Result<()> {
        x.object::<T>()?.save(y)
    }

    fn name(&self) -> &str {
        "save_object"
    }
}

/// The kernel that makes an object from arrays.
struct Restore<T>(PhantomData<fn() -> T>);

impl<T: Saved> Kernel for Restore<T> {
    type In = T::Arrays;
    type Out = MpmdArray;

    fn infer(&self, _: &Shapes<T::Arrays>) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(ShapedArray::object()))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        x: Views<'_, T::Arrays>,
        mut object: ViewMut<'_>,
    ) -> Result<()> {
        Ok(object.put_object(T::restore(x)?)?)
    }

    fn name(&self) -> &str {
        "restore_object"
    }
}
