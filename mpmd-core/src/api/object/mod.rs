//! Objects: Rust values that live on devices.
//!
//! An object is made by a kernel without inputs, and its methods are kernels that take it as one
//! more input. So objects need no operations of their own: calls are numbered, hashed, traced,
//! listed by dry runs and replayed as `jit` calls are. Only the values differ: the buffer of an
//! object leads to a cell ([`exec/array/object.rs`](crate::exec::array::object)).

mod closure;
mod method;

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use crate::api::program::Program;
use crate::error::Result;
use crate::exec::array::object::Measure;
use crate::exec::array::{ArrayFuture, MpmdArray};
use crate::kernel::{Context, Kernel, Signature, ViewMut};
pub use closure::{MethodClosures, MethodResult, RunMethod, method};
pub use method::{BoundMethod, MadeObject, Makes, Method, MethodBuilder};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::topology::{DeviceId, Mesh};
use mpmd_layout::tree::Empty;

/// A handle to Rust values of type `T` on the devices of a mesh: one value for each device.
///
/// A process that owns some of the devices has their values. On every other process the handle is a
/// placeholder. Values stay on their devices: a method writes data for another device to arrays.
/// Typical objects are caches, tokenizers, data loaders, and sessions of other engines.
///
/// [`Program::object`] makes an object, and methods bound by [`Program::method`] use it. Calls run
/// in the order in which they were issued, one at a time on each device.
///
/// # Failures
///
/// If a call fails, panics, or cannot run because one of its inputs failed, the values may be half
/// changed. So each later call with the object fails too, with that first failure.
///
/// # Drop
///
/// Dropping a handle never blocks. With the last one the values are dropped, on their devices'
/// threads after the last call. A panic of that drop is caught and printed.
pub struct MpmdObject<T> {
    array: MpmdArray,
    object: PhantomData<fn() -> T>,
}

/// A value that reports its use of memory, which the framework compares with the declared bytes.
pub trait ObjectBytes {
    /// Returns the bytes of memory that the value occupies at present.
    fn bytes(&self) -> u64;
}

impl Program {
    /// Makes an object: `make` creates its value for each device of the mesh, on the process that
    /// owns the device.
    ///
    /// Returns at once. `make` runs on the device's thread, in order with other operations of the
    /// device.
    ///
    /// # Errors
    ///
    /// If a step is being captured. An error or a panic of `make` fails each call with the object
    /// instead.
    #[track_caller]
    pub fn object<T: Send + 'static>(
        &mut self,
        mesh: &Mesh,
        make: impl Fn(DeviceId) -> Result<T> + Send + Sync + 'static,
    ) -> Result<MpmdObject<T>> {
        self.object_at(mesh, make, 0, None, Location::caller())
    }

    /// Makes an object as [`Program::object`] does, with `bytes` declared bytes on each device.
    ///
    /// The bytes count against the memory limit of the device, and in estimates of memory, until
    /// the object is dropped. A call fails if the value then [reports](ObjectBytes) more bytes than
    /// were declared for the object in total.
    ///
    /// # Errors
    ///
    /// As for [`Program::object`]. If the device has no memory for the object, each call with the
    /// object fails.
    #[track_caller]
    pub fn object_of_bytes<T: ObjectBytes + Send + 'static>(
        &mut self,
        mesh: &Mesh,
        bytes: u64,
        make: impl Fn(DeviceId) -> Result<T> + Send + Sync + 'static,
    ) -> Result<MpmdObject<T>> {
        self.object_at(mesh, make, bytes, Some(measure::<T>), Location::caller())
    }

    fn object_at<T: Send + 'static>(
        &mut self,
        mesh: &Mesh,
        make: impl Fn(DeviceId) -> Result<T> + Send + Sync + 'static,
        bytes: u64,
        measure: Option<Measure>,
        at: &'static Location<'static>,
    ) -> Result<MpmdObject<T>> {
        self.refuse_in_capture(at, "object")?;
        let name = format!(
            "object {} at {}:{}",
            short_name::<T>(),
            at.file(),
            at.line()
        );
        let kernel = ObjectMaker {
            make,
            bytes,
            measure,
            name,
        };

        let maker = self
            .jit(kernel)
            .on(mesh)
            .outputs(mesh.replicated())
            .build()?;
        Ok(MpmdObject::of(maker.call_at(self, &Empty::new(), at)?))
    }
}

impl<T> MpmdObject<T> {
    /// Returns a handle to an object that a kernel has made as its output `array`.
    pub(crate) fn of(array: MpmdArray) -> Self {
        Self {
            array,
            object: PhantomData,
        }
    }

    /// Returns the object as an array of shape [`ShapedArray::object`]. Kernels take it as an input
    /// and access the value by [`View::object`](crate::kernel::View::object).
    pub fn array(&self) -> &MpmdArray {
        &self.array
    }

    /// True if this process owns none of the object's devices.
    pub fn is_fully_remote(&self) -> bool {
        self.array.is_fully_remote()
    }

    /// Blocks until the values on this process are made, and returns `self`.
    ///
    /// # Errors
    ///
    /// If a value could not be made.
    #[track_caller]
    pub fn block_until_ready(&self) -> Result<&Self> {
        self.array.block_until_ready().map(|_| self)
    }

    /// Returns a future that completes once the values on this process are made, or have failed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect on the object.
    pub fn ready(&self) -> ArrayFuture {
        self.array.clone().into_future()
    }
}

impl<T> Clone for MpmdObject<T> {
    fn clone(&self) -> Self {
        Self::of(self.array.clone())
    }
}

impl<T> fmt::Debug for MpmdObject<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpmdObject({}, {:?})", short_name::<T>(), self.array)
    }
}

/// The kernel that makes an object's value on each device.
struct ObjectMaker<F> {
    make: F,
    bytes: u64,
    measure: Option<Measure>,
    name: String,
}

impl<T: Send + 'static, F> Kernel for ObjectMaker<F>
where
    F: Fn(DeviceId) -> Result<T> + Send + Sync + 'static,
{
    type In = Empty<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, _: &Empty<ShapedArray>) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(ShapedArray::object()).object_bytes("", self.bytes))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        _: Empty<crate::kernel::View<'_>>,
        mut object: ViewMut<'_>,
    ) -> Result<()> {
        Ok(object.put_measured((self.make)(cx.device())?, self.measure)?)
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.bytes]
    }
}

/// Returns the bytes that `value` reports if it is of type `T`, else 0.
fn measure<T: ObjectBytes + 'static>(value: &(dyn std::any::Any + Send)) -> u64 {
    value.downcast_ref::<T>().map_or(0, ObjectBytes::bytes)
}

/// Returns the name of a type without module paths.
fn short_name<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    let plain = name.split('<').next().unwrap_or(name);
    plain.rsplit("::").next().unwrap_or(plain)
}
