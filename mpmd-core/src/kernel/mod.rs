//! Kernels: what runs on a device. *Shapes are global, data is local.*
//!
//! A [`Kernel`] says with [`Kernel::infer`], on every process and from global shapes alone, what it
//! will produce; [`Kernel::run`] then sees, on each device of its mesh, that device's regions.
//! Kernels are values without mutable state; [`jit`](crate::Program::jit) binds one to a mesh.

mod collectives;
mod collectives_cuda;
mod collectives_nccl;
mod context;
pub mod cuda;
pub(crate) mod planned;
mod sent;
mod signature;
mod view;

pub use crate::device::collective::{CollectiveKind, Reduce, Reducible};
pub use crate::error::ViewError;
pub use collectives::TWO_ROUNDS_FROM_BYTES;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use collectives_nccl::nccl_has;
pub use context::Context;
pub(crate) use context::{OnCuda, Place, Seats};
pub(crate) use sent::agreeing;
pub use signature::{Collective, Signature};
pub(crate) use view::ShardInfo;
pub use view::{View, ViewMut};

use crate::device::cuda::source::Source;
use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::tree::Tree;

/// The tree `T` with a shape at each leaf.
pub type Shapes<T> = <T as Tree>::With<ShapedArray>;

/// The tree `T` with a device's part of an input at each leaf.
pub type Views<'a, T> = <T as Tree>::With<View<'a>>;

/// The tree `T` with a device's part of an output at each leaf.
pub type ViewsMut<'a, T> = <T as Tree>::With<ViewMut<'a>>;

/// A computation on the shards of one device, the same on each device of a mesh.
///
/// ```
/// use mpmd_core::prelude::*;
///
/// /// y = x * factor
/// struct Scale {
///     factor: f32,
/// }
///
/// impl Kernel for Scale {
///     type In = MpmdArray;
///     type Out = MpmdArray;
///
///     fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
///         Ok(Signature::new(x.clone()))
///     }
///
///     fn run(&self, _: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
///         for (y, x) in y.as_mut_slice::<f32>()?.iter_mut().zip(x.as_slice::<f32>()?) {
///             *y = x * self.factor;
///         }
///         Ok(())
///     }
///
///     fn statics(&self) -> Vec<u64> {
///         vec![self.factor.to_bits().into()]
///     }
/// }
/// ```
pub trait Kernel: Send + Sync + 'static {
    /// The structure of the inputs.
    type In: Tree<Leaf = MpmdArray>;
    /// The structure of the outputs.
    type Out: Tree<Leaf = MpmdArray>;

    /// What the kernel makes of inputs of these global shapes.
    ///
    /// A pure function: every process calls it and must get the same answer.
    ///
    /// # Errors
    ///
    /// Where the shapes do not fit together; [`Error::kernel`](crate::Error::kernel) makes an error
    /// of a text. The caller of `jit` gets it.
    fn infer(&self, x: &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>>;

    /// Computes this device's part of the outputs from its part of the inputs.
    ///
    /// An output that the signature aliases to an input starts with that input's values; every
    /// other output starts with arbitrary ones.
    ///
    /// # Errors
    ///
    /// An error fails the outputs on every device that depends on them, and what is made from them.
    fn run(
        &self,
        cx: &mut Context<'_>,
        x: Views<'_, Self::In>,
        y: ViewsMut<'_, Self::Out>,
    ) -> Result<()>;

    /// The kernel's name in messages; the type's own name unless overridden.
    fn name(&self) -> &str {
        plain_name::<Self>()
    }

    /// The kernel's own parameters, as words: they are part of what processes compare.
    fn statics(&self) -> Vec<u64> {
        Vec::new()
    }

    /// What the kernel launches where its devices are CUDA devices: made ready from the moment it
    /// is bound to its mesh, so that nothing is compiled when it runs. With
    /// [`CUBLAS`](crate::device::cuda::source::CUBLAS) where it multiplies matrices. Not asked where it runs on
    /// others.
    fn cuda(&self) -> Vec<&'static Source> {
        Vec::new()
    }
}

/// A type's own name, without its path and its parameters.
pub(crate) fn plain_name<T: ?Sized>() -> &'static str {
    let name = std::any::type_name::<T>();
    let plain = name.split('<').next().unwrap_or(name);
    plain.rsplit("::").next().unwrap_or(plain)
}
