//! Kernels: computations that run on devices. *Shapes are global, data is local.*
//!
//! [`Kernel::infer`] computes the outputs' shapes on every process, from global shapes alone.
//! [`Kernel::run`] then runs on each device of the mesh and sees that device's regions. Kernels are
//! values without mutable state; [`jit`](crate::Program::jit) binds one to a mesh.
//!
//! A kernel is a type that implements [`Kernel`], or a closure in [`kernel()`] or [`elementwise`],
//! or [`matmul`].

mod closure;
mod collectives;
mod collectives_cuda;
mod collectives_nccl;
mod context;
pub mod cuda;
pub(crate) mod dry_run;
mod erased;
mod host;
mod matmul;
mod rank_messages;
mod signature;
mod view;

pub use mpmd_device::collective::{CollectiveKind, Reduce, Reducible};

pub use crate::error::ViewError;
pub(crate) use closure::{ClosureIdentity, arrays, check_dtypes, names};
pub use closure::{Closures, Elementwise, InferShapes, RunKernel, elementwise, kernel, like_input};
pub use collectives::TWO_ROUNDS_FROM_BYTES;
pub use context::Context;
pub(crate) use context::{CudaAccess, DeviceBindings, MeshPosition};
pub(crate) use erased::{OutputShapes, Typed, UntypedKernel};
pub use host::{HostKernel, HostWork};
pub use matmul::matmul;
pub(crate) use rank_messages::agreeing;
pub use signature::{Collective, Signature};
pub(crate) use view::ShardInfo;
pub use view::{Untyped, View, ViewMut};

use crate::error::Result;
use crate::exec::array::MpmdArray;
use mpmd_device::cuda::source::Source;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::sharding::DimensionRule;
use mpmd_layout::tree::Tree;

/// The tree `T` with a shape at each leaf.
pub type Shapes<T> = <T as Tree>::With<ShapedArray>;

/// The tree `T` with a device's part of an input at each leaf.
pub type Views<'a, T> = <T as Tree>::With<View<'a>>;

/// The tree `T` with a device's part of an output at each leaf.
pub type ViewsMut<'a, T> = <T as Tree>::With<ViewMut<'a>>;

/// A computation on the shards of one device. It runs on each device of a mesh.
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

    /// Computes the signature for inputs of these global shapes.
    ///
    /// Must be a pure function: every process calls it and must get the same result.
    ///
    /// # Errors
    ///
    /// If the shapes do not fit together. Create the error with
    /// [`Error::kernel`](crate::Error::kernel); the caller of `jit` gets it.
    fn infer(&self, x: &Shapes<Self::In>) -> Result<Signature<Shapes<Self::Out>>>;

    /// Computes this device's part of the outputs from its part of the inputs.
    ///
    /// An output that the signature aliases to an input starts with that input's values. Other
    /// outputs start with arbitrary values. On a CUDA device, this only issues work (see
    /// [`Context::cuda`]).
    ///
    /// # Errors
    ///
    /// An error fails the outputs on every device that depends on them, and all values computed
    /// from them.
    fn run(
        &self,
        cx: &mut Context<'_>,
        x: Views<'_, Self::In>,
        y: ViewsMut<'_, Self::Out>,
    ) -> Result<()>;

    /// Returns the rule by which the dimensions of inputs and outputs belong together, if the
    /// kernel has one. Leaves of trees count in their order.
    ///
    /// With a rule, a call whose inputs and outputs are divided in other ways is refused when it is
    /// issued, and each device gets the part of a host value that belongs to its parts of the other
    /// inputs. By default there is no rule: the kernel itself finds misfits, and each device gets
    /// the whole of a host value.
    fn rule(&self) -> Option<DimensionRule> {
        None
    }

    /// Returns the kernel's name for messages. The default is the name of the type.
    fn name(&self) -> &str {
        plain_name::<Self>()
    }

    /// Returns the kernel's own parameters as 64-bit words. Processes compare them to make sure
    /// that all run the same kernel.
    fn statics(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Returns the CUDA sources from which the kernel launches functions. They are prepared when
    /// the kernel is bound to its mesh, so that nothing is compiled while it runs. Include
    /// [`CUBLAS`](mpmd_device::cuda::source::CUBLAS) if the kernel multiplies matrices. Called only
    /// if the kernel runs on CUDA devices.
    fn cuda(&self) -> Vec<&'static Source> {
        Vec::new()
    }
}

/// Returns a rule that is written in this crate.
pub(crate) fn written_rule(text: &str) -> Option<DimensionRule> {
    let rule = text.parse();
    Some(rule.expect("the rules of this crate are right"))
}

/// Returns a type's name without path and type parameters.
pub(crate) fn plain_name<T: ?Sized>() -> &'static str {
    let name = std::any::type_name::<T>();
    let plain = name.split('<').next().unwrap_or(name);
    plain.rsplit("::").next().unwrap_or(plain)
}

/// Returns a leaf's path in a tuple: `path` is its path within the element `index`.
pub(crate) fn below(index: usize, path: &str) -> String {
    if path.is_empty() {
        index.to_string()
    } else {
        format!("{index}/{path}")
    }
}
