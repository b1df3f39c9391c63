//! Kernels that work in host memory, on any kind of device.

use std::fmt;
use std::panic::Location;

use super::closure::ClosureIdentity;
use super::context::{Context, CudaAccess};
use super::cuda::{Cuda, CudaPart};
use super::view::{View, ViewMut};
use super::{Kernel, Shapes, Signature, Views, ViewsMut};
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{DimensionRule, DimensionRuleError};
use mpmd_layout::tree::Tree;
use mpmd_memory::OwnedBuffer;

/// The shape inference and the computation of a [`HostKernel`].
pub trait HostWork: Send + Sync + 'static {
    /// The structure of the inputs.
    type In: Tree<Leaf = MpmdArray>;
    /// The structure of the outputs.
    type Out: Tree<Leaf = MpmdArray>;

    /// Computes the outputs' global shapes, as [`Kernel::infer`] does.
    ///
    /// # Errors
    ///
    /// If the inputs' shapes or dtypes do not fit.
    fn infer(&self, x: &Shapes<Self::In>) -> Result<Shapes<Self::Out>>;

    /// Returns the rule of the dimensions of inputs and outputs, as [`Kernel::rule`] does.
    fn rule(&self) -> Option<DimensionRule> {
        None
    }

    /// Adds further declarations to the signature. Default: none.
    fn declare(
        &self,
        x: &Shapes<Self::In>,
        signature: Signature<Shapes<Self::Out>>,
    ) -> Signature<Shapes<Self::Out>> {
        let _ = x;
        signature
    }

    /// Computes one device's part of the outputs. All values are in host memory.
    ///
    /// # Errors
    ///
    /// An error fails the outputs.
    fn run(&self, x: Views<'_, Self::In>, y: ViewsMut<'_, Self::Out>) -> Result<()>;
}

/// A kernel that works in host memory. Made by [`kernel`](super::kernel()) and
/// [`elementwise`](super::elementwise).
///
/// On a CUDA device each call copies its inputs to the host, waits for them, computes on the
/// device's thread, and copies the outputs back. That is slow. Where it matters, implement
/// [`Kernel`] and issue work with [`Context::cuda`].
pub struct HostKernel<W> {
    work: W,
    identity: ClosureIdentity,
    /// The rule that the program gave, or the reason why its text is none.
    rule: Option<std::result::Result<DimensionRule, DimensionRuleError>>,
}

impl<W> HostKernel<W> {
    /// Returns the kernel's shape inference and computation.
    pub fn work(&self) -> &W {
        &self.work
    }

    /// Replaces the kernel's shape inference and computation by the result of `change`.
    #[must_use]
    pub fn map_work(self, change: impl FnOnce(W) -> W) -> Self {
        Self {
            work: change(self.work),
            ..self
        }
    }
}

impl<W: HostWork> HostKernel<W> {
    /// Creates the kernel of a closure made at line `at`. `kind` is the first word of its name.
    /// `captures` is true if the closure has captured values.
    pub fn closure(kind: &str, at: &'static Location<'static>, captures: bool, work: W) -> Self {
        Self {
            work,
            identity: ClosureIdentity::new(kind, at, captures),
            rule: None,
        }
    }

    /// Declares a value that the closure captures. Call it once for each such value.
    ///
    /// Processes compare the text that `Debug` writes, so that all run the same kernel. A short
    /// text is shown in the kernel's name. A closure that captures values without any `with` is
    /// refused when it is called.
    #[must_use]
    pub fn with(mut self, value: impl fmt::Debug) -> Self {
        self.identity.declare(&value);
        self
    }
}

impl<W: HostWork> HostKernel<W> {
    /// Says how the dimensions of inputs and outputs belong together, as a [`DimensionRule`]:
    /// `"b k, k n -> b n"`. A call whose arrays are divided in other ways, or a text that is no
    /// rule, is refused when it is issued. Of a host value each device gets its part.
    #[must_use]
    pub fn rule(mut self, text: &str) -> Self {
        self.rule = Some(text.parse());
        self
    }
}

impl<W: HostWork> Kernel for HostKernel<W> {
    type In = W::In;
    type Out = W::Out;

    fn infer(&self, x: &Shapes<W::In>) -> Result<Signature<Shapes<W::Out>>> {
        self.identity.check()?;
        if let Some(Err(why)) = &self.rule {
            return Err(Error::kernel(format!("rule {why}")));
        }
        let signature = Signature::new(self.work.infer(x)?);
        Ok(self.work.declare(x, signature))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        x: Views<'_, W::In>,
        y: ViewsMut<'_, W::Out>,
    ) -> Result<()> {
        cx.on_host::<W::In, W::Out>(x, y, |_, x, y| self.work.run(x, y))
    }

    fn rule(&self) -> Option<DimensionRule> {
        match &self.rule {
            // `infer` refuses a rule that cannot be read.
            Some(rule) => rule.clone().ok(),
            None => self.work.rule(),
        }
    }

    fn name(&self) -> &str {
        self.identity.name()
    }

    fn statics(&self) -> Vec<u64> {
        self.identity.statics()
    }
}

impl<W> fmt::Debug for HostKernel<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKernel({})", self.identity.name())
    }
}

/// Returns an error that names both arrays and their regions if the regions differ. `first` and
/// `second` name the arrays.
pub(super) fn check_region(
    first: &str,
    region: &Region,
    second: &str,
    other: &Region,
) -> Result<()> {
    if region == other {
        return Ok(());
    }
    Err(Error::kernel(format!(
        "this device has the region {region} of {first}, but {other} of {second}: shard them alike"
    )))
}

/// Host buffers for the values of a call on a CUDA device, one for each leaf. Buffers of objects,
/// and of inputs that are updated in place, are empty.
struct HostCopies {
    given: Vec<OwnedBuffer>,
    results: Vec<OwnedBuffer>,
}

impl HostCopies {
    /// Issues copies of the inputs to the host. With `updates`, also copies the outputs; else only
    /// allocates their buffers. After an error, the device may still write to the allocated
    /// buffers.
    fn fetch(
        &mut self,
        cuda: &Cuda<'_>,
        x: &[View<'_>],
        y: &[ViewMut<'_>],
        updates: bool,
    ) -> Result<()> {
        for y in y {
            self.results.push(match (y.global().is_object(), updates) {
                (true, _) => Vec::new().into(),
                (false, true) => cuda.fetch(&CudaPart::from(y))?,
                (false, false) => cuda.room(&CudaPart::from(y))?,
            });
        }

        for x in x {
            self.given
                .push(match x.global().is_object() || x.is_in_place() {
                    true => Vec::new().into(),
                    false => cuda.fetch(&CudaPart::from(x))?,
                });
        }
        Ok(())
    }
}

impl Context<'_> {
    /// Calls `run` with the views `x` and `y` in host memory.
    ///
    /// On a CUDA device, copies the inputs to the host, and the outputs too if inputs are updated
    /// in place. Blocks until these copies are done. Then calls `run` and issues copies of the
    /// outputs to the device. Outputs that update no input start with arbitrary values.
    ///
    /// # Errors
    ///
    /// If `run` fails, there is no memory left, or work of the device failed.
    pub fn on_host<I: Tree<Leaf = MpmdArray>, O: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: Views<'_, I>,
        y: ViewsMut<'_, O>,
        run: impl FnOnce(&mut Self, Views<'_, I>, ViewsMut<'_, O>) -> Result<()>,
    ) -> Result<()> {
        if self.cuda().is_none() {
            return run(self, x, y);
        }

        let inputs = x.structure();
        let outputs = y.structure();
        let x = x.into_leaves();
        let mut y = y.into_leaves();

        self.apart_from_device(|cx, CudaAccess { cuda, turn }| {
            let updates = x.iter().any(View::is_in_place);
            let mut copies = HostCopies {
                given: Vec::with_capacity(x.len()),
                results: Vec::with_capacity(y.len()),
            };
            let fetched = copies.fetch(cuda, &x, &y, updates);
            let HostCopies { given, mut results } = copies;

            if let Err(error) = fetched.and_then(|()| Ok(turn.wait()?)) {
                // The device may still write to them.
                results
                    .into_iter()
                    .chain(given)
                    .for_each(|staged| cuda.hold(staged));
                return Err(error);
            }

            turn.pause(|| {
                let views = x.iter().zip(&given).map(|(x, staged)| x.copied_to(staged));
                let x = <Views<'_, I> as Tree>::from_leaves(&inputs, views)?;
                let views = y
                    .iter_mut()
                    .zip(&mut results)
                    .map(|(y, staged)| y.filled_in(staged));
                let y = <ViewsMut<'_, O> as Tree>::from_leaves(&outputs, views)?;
                run(cx, x, y)
            })?;
            // Meanwhile this thread may have run work of another device; make this one current
            // again.
            turn.begin()?;

            let mut numbers = results
                .into_iter()
                .zip(&y)
                .filter(|(_, y)| !y.global().is_object());
            numbers.try_for_each(|(staged, y)| cuda.put(staged, &y.into()))
        })
    }
}
