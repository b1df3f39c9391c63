//! Arrays of host values, before they are placed on devices and after they are read back.

use std::fmt;
use std::panic::Location;

use mpmd_device::copy::copy_region;
use mpmd_memory::ALIGNMENT;
use mpmd_memory::SharedBuffer;

use mpmd_layout::aval::{AvalError, DType, Element, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::tree::Leaf;

/// A whole array in host memory, row-major. Immutable; clones share the values.
#[derive(Clone)]
pub struct HostArray {
    aval: ShapedArray,
    /// Aligned for every dtype.
    data: SharedBuffer,
}

impl HostArray {
    /// Copies `values` into an array of `shape`.
    ///
    /// # Errors
    ///
    /// If the number of values is not the number of elements of `shape`.
    #[track_caller]
    pub fn from_slice<E: Element>(shape: &[usize], values: &[E]) -> Result<Self, AvalError> {
        let aval = ShapedArray::try_new(shape, E::DTYPE)?;
        if values.len() != aval.elements() {
            let at = Location::caller();
            let found = values.len();
            return Err(AvalError::Elements {
                at,
                expected: aval,
                found,
            });
        }
        Ok(Self {
            aval,
            data: aligned_copy(bytemuck::cast_slice(values)),
        })
    }

    /// Creates an array from bytes without a copy; only unaligned bytes are copied.
    ///
    /// # Errors
    ///
    /// If the number of bytes does not match `aval`. Invalid values are found when they are read.
    #[track_caller]
    pub fn from_bytes(aval: ShapedArray, data: SharedBuffer) -> Result<Self, AvalError> {
        if data.len() != aval.bytes() {
            let at = Location::caller();
            let found = data.len();
            return Err(AvalError::Length {
                at,
                expected: aval,
                found,
            });
        }
        let aligned = (data.as_ptr() as usize).is_multiple_of(ALIGNMENT);
        let data = if aligned { data } else { aligned_copy(&data) };
        Ok(Self { aval, data })
    }

    /// Creates an array of shape `[]`.
    pub fn scalar<E: Element>(value: E) -> Self {
        let aval = ShapedArray::new(&[], E::DTYPE);
        Self {
            aval,
            data: aligned_copy(bytemuck::bytes_of(&value)),
        }
    }

    /// Returns the shape and dtype.
    pub fn aval(&self) -> &ShapedArray {
        &self.aval
    }

    /// Returns the size of each dimension.
    pub fn shape(&self) -> &[usize] {
        self.aval.shape()
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.aval.dtype()
    }

    /// Returns the elements, row-major.
    ///
    /// # Errors
    ///
    /// If the elements are not of type `E`, or some bytes are not valid values of it.
    #[track_caller]
    pub fn as_slice<E: Element>(&self) -> Result<&[E], AvalError> {
        let at = Location::caller();
        if E::DTYPE != self.dtype() {
            return Err(AvalError::DType {
                at,
                expected: self.dtype(),
                found: E::DTYPE,
            });
        }
        // Length and alignment were checked at construction, so only values can be invalid.
        bytemuck::checked::try_cast_slice(&self.data).map_err(|_| AvalError::BitPattern {
            at,
            aval: self.aval.clone(),
        })
    }

    /// Copies the elements to a vector, row-major.
    ///
    /// # Errors
    ///
    /// If the elements are not of type `E`, or some bytes are not valid values of it.
    #[track_caller]
    pub fn to_vec<E: Element>(&self) -> Result<Vec<E>, AvalError> {
        self.as_slice().map(<[E]>::to_vec)
    }

    /// Returns the elements' bytes: row-major, and little-endian as on every supported machine.
    pub fn bytes(&self) -> &SharedBuffer {
        &self.data
    }

    /// Returns the values of a region, row-major. Copies nothing if the region is the whole array.
    pub(crate) fn part(&self, region: &Region) -> SharedBuffer {
        let whole = Region::full(self.shape());
        if *region == whole {
            return self.data.clone();
        }
        let item_bytes = self.dtype().size();
        let bytes = region.elements() * item_bytes;
        aligned(bytes, |padded| {
            let start = padded.len();
            padded.resize(start + bytes, 0);
            let part = &mut padded[start..];
            copy_region(&self.data, &whole, part, region, region, item_bytes);
        })
    }
}

impl fmt::Debug for HostArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostArray({})", self.aval)
    }
}

impl Leaf for HostArray {}

/// Copies bytes to memory that starts at a multiple of [`ALIGNMENT`].
fn aligned_copy(bytes: &[u8]) -> SharedBuffer {
    aligned(bytes.len(), |padded| padded.extend_from_slice(bytes))
}

/// Returns `bytes` bytes of memory that starts at a multiple of [`ALIGNMENT`], as a part of a
/// longer vector, to which `write` appends them. The part is never the whole vector: a kernel could
/// update a whole vector in place, so that updates would depend on its address.
fn aligned(bytes: usize, write: impl FnOnce(&mut Vec<u8>)) -> SharedBuffer {
    let mut padded = Vec::with_capacity(bytes + ALIGNMENT);
    let padding = ALIGNMENT - padded.as_ptr() as usize % ALIGNMENT;
    padded.resize(padding, 0);
    write(&mut padded);
    SharedBuffer::from(padded).slice(padding..padding + bytes)
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use num_complex::Complex;

    use super::*;
    use mpmd_layout::aval::{bools, f64s};

    #[test]
    fn values_come_back_and_are_aligned() {
        for n in [0usize, 1, 5, 1000] {
            let values: Vec<Complex<f64>> = (0..n).map(|i| Complex::new(i as f64, -1.0)).collect();
            let array = HostArray::from_slice(&[n, 1], &values).unwrap();
            assert_eq!(array.as_slice::<Complex<f64>>().unwrap(), values);
            assert_eq!(array.bytes().as_ptr() as usize % ALIGNMENT, 0);
            let part = array.part(&Region::new(vec![n / 3..n, 0..1]));
            assert_eq!(part.as_ptr() as usize % ALIGNMENT, 0);
            assert_eq!(*part, *bytemuck::cast_slice::<_, u8>(&values[n / 3..]));
        }
        let halves = HostArray::from_slice(&[2], &[bf16::ONE, bf16::NEG_ONE]).unwrap();
        assert_eq!(halves.to_vec::<bf16>().unwrap(), [bf16::ONE, bf16::NEG_ONE]);
        assert_eq!(HostArray::scalar(true).to_vec::<bool>().unwrap(), [true]);
    }

    #[test]
    fn a_wrong_dtype_is_an_error_that_names_both_and_the_line() {
        let array = HostArray::scalar(1.0f32);
        let said = "the elements are f32, and are read as i32: read them as f32";
        let (line, error) = (line!(), array.as_slice::<i32>().unwrap_err().to_string());
        assert!(
            error.contains(&format!("host_array.rs:{line}:")) && error.ends_with(said),
            "{error}"
        );
        let (line, error) = (line!(), array.to_vec::<i32>().unwrap_err().to_string());
        assert!(
            error.contains(&format!("host_array.rs:{line}:")) && error.ends_with(said),
            "{error}"
        );
    }

    #[test]
    fn lengths_and_bool_bytes_are_checked() {
        let line = line!() + 1;
        let short = HostArray::from_slice(&[2, 3], &[1.0f32; 5]).unwrap_err();
        let said = short.to_string();
        assert!(said.contains(&format!("host_array.rs:{line}:")), "{said}");
        assert!(
            said.ends_with(": shape [2, 3] has 6 elements, but 5 values are given"),
            "{said}"
        );
        let short = HostArray::from_bytes(f64s([2]), vec![0; 15].into())
            .unwrap_err()
            .to_string();
        assert!(short.contains("host_array.rs:"), "{short}");
        assert!(
            short.ends_with(": f64[2] has 16 bytes, but 15 are given"),
            "{short}"
        );
        let bad = HostArray::from_bytes(bools([2]), vec![1, 2].into()).unwrap();
        assert!(matches!(
            bad.as_slice::<bool>(),
            Err(AvalError::BitPattern { .. })
        ));
    }

    #[test]
    fn unaligned_bytes_are_copied_and_aligned_ones_are_not() {
        let whole = aligned_copy(&[0; 80]);
        let kept = HostArray::from_bytes(f64s([10]), whole.clone()).unwrap();
        assert!(kept.bytes().same_place(&whole));
        let moved = HostArray::from_bytes(f64s([9]), whole.slice(3..75)).unwrap();
        assert_eq!(moved.to_vec::<f64>().unwrap(), [0.0; 9]);
    }
}
