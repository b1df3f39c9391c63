//! One device's part of an array, as a kernel sees it.

use mpmd_transport::memory::DevicePlace;

use crate::error::ViewError;
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::tree::Leaf;

/// Which part of which array a shard is. Made once for each call shape, shared by all calls.
#[derive(Debug)]
pub(crate) struct ShardInfo {
    pub(crate) global: ShapedArray,
    pub(crate) region: Region,
    pub(crate) shape: Vec<usize>,
}

impl ShardInfo {
    pub(crate) fn new(global: ShapedArray, region: Region) -> Self {
        let shape = region.shape().to_vec();
        Self { global, region, shape }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.region.elements() * self.global.dtype().size()
    }
}

/// This device's part of an input: row-major values of one region of the whole.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    /// Where the values are in a device's memory: `bytes` are none then.
    device: Option<DevicePlace>,
    info: &'a ShardInfo,
    in_place: bool,
}

/// This device's part of an output, to be filled.
#[derive(Debug)]
pub struct ViewMut<'a> {
    bytes: &'a mut [u8],
    /// As in [`View`].
    device: Option<DevicePlace>,
    info: &'a ShardInfo,
}

impl Leaf for View<'_> {}
impl Leaf for ViewMut<'_> {}

fn check<T: Element>(found: DType) -> Result<(), ViewError> {
    if found == T::DTYPE { Ok(()) } else { Err(ViewError::DType { asked: T::DTYPE, found }) }
}

/// No bytes are no values wherever they lie: memory for them need not be aligned.
fn values<T: Element>(bytes: &[u8]) -> Result<&[T], ViewError> {
    if bytes.is_empty() {
        return Ok(&[]);
    }
    bytemuck::checked::try_cast_slice(bytes).map_err(|_| ViewError::Invalid(T::DTYPE))
}

impl<'a> View<'a> {
    pub(crate) fn new(bytes: &'a [u8], info: &'a ShardInfo) -> Self {
        Self { bytes, device: None, info, in_place: false }
    }

    /// Values in the memory of a device.
    pub(crate) fn on_device(place: DevicePlace, info: &'a ShardInfo) -> Self {
        Self { bytes: &[], device: Some(place), info, in_place: false }
    }

    /// Where the values are, where that is the memory of a device.
    pub(crate) fn device(&self) -> Option<DevicePlace> {
        self.device
    }

    /// The values' bytes, where they are the host's.
    pub(crate) fn host_bytes(&self) -> Option<&'a [u8]> {
        (self.device.is_none() && !self.in_place).then_some(self.bytes)
    }

    pub(crate) fn in_place(info: &'a ShardInfo) -> Self {
        Self { bytes: &[], device: None, info, in_place: true }
    }

    /// The values, row-major over [`View::shape`].
    ///
    /// # Errors
    ///
    /// Where the elements have another type, the input is updated in place, or the values are in a
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

    /// The value of a region with one element.
    ///
    /// # Errors
    ///
    /// As [`View::as_slice`], and where there are more or fewer elements.
    pub fn scalar<T: Element>(&self) -> Result<T, ViewError> {
        match self.as_slice::<T>()? {
            [value] => Ok(*value),
            values => Err(ViewError::NotScalar(values.len())),
        }
    }

    /// The shape of this device's part.
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// Which part of the whole this is.
    pub fn region(&self) -> &'a Region {
        &self.info.region
    }

    /// The whole array's shape and dtype.
    pub fn global(&self) -> &'a ShapedArray {
        &self.info.global
    }
}

impl<'a> ViewMut<'a> {
    pub(crate) fn new(bytes: &'a mut [u8], info: &'a ShardInfo) -> Self {
        Self { bytes, device: None, info }
    }

    /// Values in the memory of a device.
    pub(crate) fn on_device(place: DevicePlace, info: &'a ShardInfo) -> Self {
        Self { bytes: &mut [], device: Some(place), info }
    }

    /// As [`View::device`].
    pub(crate) fn device(&self) -> Option<DevicePlace> {
        self.device
    }

    fn check_host<T: Element>(&self) -> Result<(), ViewError> {
        check::<T>(self.info.global.dtype())?;
        if self.device.is_some() { Err(ViewError::OnDevice) } else { Ok(()) }
    }

    /// The values, row-major over [`ViewMut::shape`].
    ///
    /// # Errors
    ///
    /// Where the elements have another type, or are in a device's memory.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], ViewError> {
        self.check_host::<T>()?;
        if self.bytes.is_empty() {
            return Ok(&mut []);
        }
        if T::DTYPE == DType::Bool {
            // Arbitrary old bytes are no booleans.
            self.bytes.iter_mut().for_each(|byte| *byte &= 1);
        }
        bytemuck::checked::try_cast_slice_mut(self.bytes).map_err(|_| ViewError::Invalid(T::DTYPE))
    }

    /// The values as they are now: those of the input that an output is aliased to.
    ///
    /// # Errors
    ///
    /// As [`ViewMut::as_mut_slice`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T], ViewError> {
        self.check_host::<T>()?;
        values(self.bytes)
    }

    /// The bytes, for values that are read from somewhere: row-major elements of the view's dtype,
    /// in this machine's byte order.
    ///
    /// # Panics
    ///
    /// Where they are in a device's memory: a kernel for the host's processors has come there.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.assert_host();
        self.bytes
    }

    /// Sets every byte to zero, which is the zero of every type.
    /// [`Context::zero`](super::Context::zero) does so on any device.
    ///
    /// # Panics
    ///
    /// Where the values are in a device's memory: a kernel for the host's processors has come
    /// there.
    pub fn zero(&mut self) {
        self.assert_host();
        self.bytes.fill(0);
    }

    fn assert_host(&self) {
        assert!(self.device.is_none(), "{}", ViewError::OnDevice);
    }

    /// Sets every element.
    ///
    /// # Errors
    ///
    /// Where the elements have another type, or are in a device's memory.
    pub fn fill<T: Element>(&mut self, value: T) -> Result<(), ViewError> {
        self.as_mut_slice::<T>().map(|values| values.fill(value))
    }

    /// The shape of this device's part.
    pub fn shape(&self) -> &'a [usize] {
        &self.info.shape
    }

    /// Which part of the whole this is.
    pub fn region(&self) -> &'a Region {
        &self.info.region
    }

    /// The whole array's shape and dtype.
    pub fn global(&self) -> &'a ShapedArray {
        &self.info.global
    }
}
