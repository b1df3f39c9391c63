//! Views: one device's part of an array, as a kernel sees it.

use std::ops::{Deref, DerefMut};

use mpmd_memory::DevicePlace;

use crate::error::ViewError;
use crate::exec::array::object::{Measure, NewObject, ObjectCell, ObjectRef};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::tree::Leaf;

/// The region of a global array that a shard holds. All calls of one shape share this object.
#[derive(Debug)]
pub(crate) struct ShardInfo {
    pub(crate) global: ShapedArray,
    pub(crate) region: Region,
    pub(crate) shape: Vec<usize>,
}

impl ShardInfo {
    pub(crate) fn new(global: ShapedArray, region: Region) -> Self {
        let shape = region.shape().to_vec();
        Self {
            global,
            region,
            shape,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.region.elements() * self.global.dtype().size()
    }
}

/// The type parameter of a view whose element type is only known at run time.
#[derive(Clone, Copy, Debug)]
pub struct Untyped;

/// One device's part of an input: the row-major values of one region of the global array.
///
/// With an element type, `View<f32>`, it is a slice of the values: it derefs to `[f32]`.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T = Untyped> {
    /// The values of an untyped view in host memory.
    bytes: &'a [u8],
    /// The values of a typed view.
    values: &'a [T],
    /// Address of the values in device memory. `bytes` is then empty.
    device: Option<DevicePlace>,
    info: &'a ShardInfo,
    in_place: bool,
    /// The object, if the input is an object instead of numbers.
    object: Option<&'a ObjectCell>,
}

/// One device's part of an output, for the kernel to fill.
///
/// With an element type, `ViewMut<f32>`, it is a slice of the values: it derefs to `[f32]`.
#[derive(Debug)]
pub struct ViewMut<'a, T = Untyped> {
    /// The values of an untyped view in host memory.
    bytes: &'a mut [u8],
    /// The values of a typed view.
    values: &'a mut [T],
    /// Address of the values in device memory. `bytes` is then empty.
    device: Option<DevicePlace>,
    info: &'a ShardInfo,
    /// The slot for the new object, if the output is an object instead of numbers.
    object: Option<&'a mut Option<NewObject>>,
}

impl Leaf for View<'_> {}
impl Leaf for ViewMut<'_> {}

impl<'a, T: Element> View<'a, T> {
    /// Returns the values with the lifetime of the borrowed memory.
    pub(super) fn typed_slice(&self) -> &'a [T] {
        self.values
    }
}

impl<T: Element> Deref for View<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.values
    }
}

impl<T: Element> Deref for ViewMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.values
    }
}

impl<T: Element> DerefMut for ViewMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.values
    }
}

fn check<T: Element>(found: DType) -> Result<(), ViewError> {
    if found == T::DTYPE {
        Ok(())
    } else {
        Err(ViewError::DType {
            asked: T::DTYPE,
            found,
        })
    }
}

/// Casts bytes to values. An empty slice need not be aligned.
fn values<T: Element>(bytes: &[u8]) -> Result<&[T], ViewError> {
    if bytes.is_empty() {
        return Ok(&[]);
    }
    bytemuck::checked::try_cast_slice(bytes).map_err(|_| ViewError::Invalid(T::DTYPE))
}

/// Casts bytes to values for writing. An empty slice need not be aligned.
fn values_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T], ViewError> {
    if bytes.is_empty() {
        return Ok(&mut []);
    }
    if T::DTYPE == DType::Bool {
        // Memory with arbitrary old bytes may hold invalid booleans.
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    bytemuck::checked::try_cast_slice_mut(bytes).map_err(|_| ViewError::Invalid(T::DTYPE))
}

impl<'a> View<'a> {
    pub(crate) fn new(bytes: &'a [u8], info: &'a ShardInfo) -> Self {
        Self {
            bytes,
            values: &[],
            device: None,
            info,
            in_place: false,
            object: None,
        }
    }

    /// Returns a view of values in a device's memory.
    pub(crate) fn on_device(place: DevicePlace, info: &'a ShardInfo) -> Self {
        Self {
            bytes: &[],
            values: &[],
            device: Some(place),
            info,
            in_place: false,
            object: None,
        }
    }

    /// Returns a view of an object.
    pub(crate) fn of_object(cell: Option<&'a ObjectCell>, info: &'a ShardInfo) -> Self {
        Self {
            bytes: &[],
            values: &[],
            device: None,
            info,
            in_place: false,
            object: cell,
        }
    }

    /// Returns the address of the values, if they are in a device's memory.
    pub(crate) fn device(&self) -> Option<DevicePlace> {
        self.device
    }

    /// Returns the bytes of the values, if they are in host memory.
    pub(crate) fn host_bytes(&self) -> Option<&'a [u8]> {
        (self.device.is_none() && !self.in_place).then_some(self.bytes)
    }

    pub(crate) fn in_place(info: &'a ShardInfo) -> Self {
        Self {
            bytes: &[],
            values: &[],
            device: None,
            info,
            in_place: true,
            object: None,
        }
    }

    /// Gives exclusive access to the object of this input, until the result is dropped.
    ///
    /// # Errors
    ///
    /// If the input has numbers and no object, or an object of another type. If an earlier call has
    /// taken the object, or this call has already access to it.
    pub fn object<T: 'static>(&self) -> Result<ObjectRef<'a, T>, ViewError> {
        self.object.ok_or(ViewError::NoObject)?.access()
    }

    /// Removes the object from its device and returns it. Later calls with this object fail.
    ///
    /// # Errors
    ///
    /// As for [`View::object`].
    pub fn take_object<T: 'static>(&self) -> Result<T, ViewError> {
        self.object.ok_or(ViewError::NoObject)?.take()
    }

    /// Drops the object of this input, if it has an object that is not in use.
    pub(crate) fn discard_object(&self) {
        if let Some(cell) = self.object {
            cell.discard();
        }
    }

    /// Returns the bytes of a view in host memory.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the values, row-major with shape [`View::shape`].
    ///
    /// # Errors
    ///
    /// If the elements have another dtype, the input is updated in place, or the values are in a
    /// device's memory.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T], ViewError> {
        check::<T>(self.info.global.dtype())?;
        if self.device.is_some() {
            return Err(ViewError::OnDevice);
        }
        if self.in_place {
            return Err(ViewError::InPlace);
        }
        values(self.bytes)
    }

    /// Returns the value of a region with exactly one element.
    ///
    /// # Errors
    ///
    /// If the elements have another dtype, the input is updated in place, or the values are in a
    /// device's memory. Also if the region does not have exactly one element.
    pub fn scalar<T: Element>(&self) -> Result<T, ViewError> {
        match self.as_slice::<T>()? {
            [value] => Ok(*value),
            values => Err(ViewError::NotScalar(values.len())),
        }
    }

    /// Returns the view as a slice of its values, with their element type.
    ///
    /// # Errors
    ///
    /// If [`as_slice`](Self::as_slice) fails.
    pub fn typed<T: Element>(self) -> Result<View<'a, T>, ViewError> {
        let values = self.as_slice()?;
        Ok(View {
            bytes: &[],
            values,
            device: None,
            info: self.info,
            in_place: false,
            object: None,
        })
    }

    /// Returns true if an output updates this input in place: the values are then in the output's
    /// view.
    pub(super) fn is_in_place(&self) -> bool {
        self.in_place
    }

    /// Returns a view of the same region with its values in the host memory `bytes`.
    pub(super) fn copied_to<'b>(&self, bytes: &'b [u8]) -> View<'b>
    where
        'a: 'b,
    {
        View {
            object: self.object,
            in_place: self.in_place,
            ..View::new(bytes, self.info)
        }
    }
}

impl<'a, T> View<'a, T> {
    /// Returns the shape of this device's part.
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// Returns the region of the global array that this view covers.
    pub fn region(&self) -> &'a Region {
        &self.info.region
    }

    /// Returns the shape and dtype of the global array.
    pub fn global(&self) -> &'a ShapedArray {
        &self.info.global
    }
}

impl<'a> ViewMut<'a> {
    pub(crate) fn new(bytes: &'a mut [u8], info: &'a ShardInfo) -> Self {
        Self {
            bytes,
            values: &mut [],
            device: None,
            info,
            object: None,
        }
    }

    /// Returns a view of values in a device's memory.
    pub(crate) fn on_device(place: DevicePlace, info: &'a ShardInfo) -> Self {
        Self {
            bytes: &mut [],
            values: &mut [],
            device: Some(place),
            info,
            object: None,
        }
    }

    /// Returns a view of an object that the kernel makes.
    pub(crate) fn of_object(object: &'a mut Option<NewObject>, info: &'a ShardInfo) -> Self {
        Self {
            bytes: &mut [],
            values: &mut [],
            device: None,
            info,
            object: Some(object),
        }
    }

    /// Makes `value` the object of this output. The object stays on the device; later kernels
    /// access it with [`View::object`].
    ///
    /// # Errors
    ///
    /// If the output is declared as numbers, not as
    /// [`ShapedArray::object`](mpmd_layout::aval::ShapedArray::object).
    pub fn put_object<T: Send + 'static>(&mut self, value: T) -> Result<(), ViewError> {
        self.put_measured(value, None)
    }

    /// Like [`ViewMut::put_object`], with a function that measures the value's bytes.
    pub(crate) fn put_measured<T: Send + 'static>(
        &mut self,
        value: T,
        measure: Option<Measure>,
    ) -> Result<(), ViewError> {
        let place = self.object.as_deref_mut().ok_or(ViewError::NoObject)?;
        *place = Some(NewObject::new(value, measure));
        Ok(())
    }

    /// Returns the address of the values, if they are in a device's memory.
    pub(crate) fn device(&self) -> Option<DevicePlace> {
        self.device
    }

    fn check_host<T: Element>(&self) -> Result<(), ViewError> {
        check::<T>(self.info.global.dtype())?;
        if self.device.is_some() {
            Err(ViewError::OnDevice)
        } else {
            Ok(())
        }
    }

    /// Returns the values for writing, row-major with shape [`ViewMut::shape`].
    ///
    /// # Errors
    ///
    /// If the elements have another dtype, or are in a device's memory.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], ViewError> {
        self.check_host::<T>()?;
        values_mut(self.bytes)
    }

    /// Returns the current values. If the output is aliased to an input, it starts with the input's
    /// values.
    ///
    /// # Errors
    ///
    /// If the elements have another dtype, or are in a device's memory, or are not valid values.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], ViewError> {
        self.check_host::<T>()?;
        values(self.bytes)
    }

    /// Returns the bytes for writing: row-major elements of the view's dtype, in this machine's
    /// byte order. Useful to read values from a file.
    ///
    /// # Panics
    ///
    /// If the values are in a device's memory.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.assert_host();
        self.bytes
    }

    /// Sets every byte to zero, which is the zero of every dtype.
    /// [`Context::zero`](super::Context::zero) does the same on any device.
    ///
    /// # Panics
    ///
    /// If the values are in a device's memory.
    pub fn zero(&mut self) {
        self.assert_host();
        self.bytes.fill(0);
    }

    fn assert_host(&self) {
        assert!(self.device.is_none(), "{}", ViewError::OnDevice);
    }

    /// Sets every element to `value`.
    ///
    /// # Errors
    ///
    /// If the elements have another dtype, or are in a device's memory.
    pub fn fill<T: Element>(&mut self, value: T) -> Result<(), ViewError> {
        self.as_mut_slice::<T>().map(|values| values.fill(value))
    }

    /// Returns the view as a slice of its values, with their element type.
    ///
    /// # Errors
    ///
    /// If [`as_mut_slice`](Self::as_mut_slice) fails.
    pub fn typed<T: Element>(self) -> Result<ViewMut<'a, T>, ViewError> {
        self.check_host::<T>()?;
        let values = values_mut(self.bytes)?;
        Ok(ViewMut {
            bytes: &mut [],
            values,
            device: None,
            info: self.info,
            object: None,
        })
    }

    /// Returns a view of the same region that stores its values in the host memory `bytes`.
    pub(super) fn filled_in<'b>(&'b mut self, bytes: &'b mut [u8]) -> ViewMut<'b> {
        let object = self.object.as_deref_mut();
        ViewMut {
            object,
            ..ViewMut::new(bytes, self.info)
        }
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// Returns the shape of this device's part.
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// Returns the region of the global array that this view covers.
    pub fn region(&self) -> &'a Region {
        &self.info.region
    }

    /// Returns the shape and dtype of the global array.
    pub fn global(&self) -> &'a ShapedArray {
        &self.info.global
    }
}
