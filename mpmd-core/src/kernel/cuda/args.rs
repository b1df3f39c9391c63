//! Arguments of a kernel launch: the grid, values and numbers.

use mpmd_memory::DevicePlace;

use super::Scratch;
use crate::kernel::{View, ViewMut};
use mpmd_layout::aval::DType;

/// Values on a CUDA device for a launch, a matrix product or a copy: all of a view or [`Scratch`],
/// or a range of its elements.
#[derive(Clone, Copy, Debug)]
pub struct CudaPart<'a> {
    memory: PartMemory<'a>,
    dtype: DType,
    /// Index of the first element in the view or scratch.
    skipped: usize,
    /// Index behind the last element in the view or scratch.
    end: usize,
    writable: bool,
}

/// The memory that holds the values of a [`CudaPart`].
#[derive(Clone, Copy, Debug)]
pub(super) enum PartMemory<'a> {
    Device(DevicePlace),
    /// Host memory, for an input that is on no device.
    Host(&'a [u8]),
    /// No memory: the input is updated in place, and its values are in the output's view.
    InPlace,
}

impl<'a> CudaPart<'a> {
    /// Returns the part without its first `elements` values. If the part has fewer, the call that
    /// uses it fails.
    #[must_use]
    pub fn at(self, elements: usize) -> Self {
        Self {
            skipped: self.skipped.saturating_add(elements),
            ..self
        }
    }

    /// Returns the first `elements` values, or all if there are fewer.
    #[must_use]
    pub fn first(self, elements: usize) -> Self {
        let end = self.skipped.saturating_add(elements).min(self.end);
        // A part that begins beyond the end stays an error.
        Self {
            end: end.max(self.skipped.min(self.end)),
            ..self
        }
    }

    pub(super) fn new(
        memory: PartMemory<'a>,
        dtype: DType,
        elements: usize,
        writable: bool,
    ) -> Self {
        Self {
            memory,
            dtype,
            skipped: 0,
            end: elements,
            writable,
        }
    }

    pub(super) fn scratch(place: DevicePlace, dtype: DType, elements: usize) -> Self {
        Self::new(PartMemory::Device(place), dtype, elements, true)
    }

    pub(super) fn memory(&self) -> PartMemory<'a> {
        self.memory
    }

    /// Returns the number of elements. It is 0 if the part begins beyond the end.
    pub fn count(&self) -> usize {
        self.elements().unwrap_or(0)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the index of the first element in its memory.
    pub(super) fn skipped(&self) -> usize {
        self.skipped
    }

    /// Returns the number of elements. `None` if the part begins beyond the end.
    pub(super) fn elements(&self) -> Option<usize> {
        self.end.checked_sub(self.skipped)
    }

    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }
}

impl<'a> View<'a> {
    /// Returns the values from element `elements` on, for work of a CUDA device.
    pub fn at(&self, elements: usize) -> CudaPart<'a> {
        CudaPart::from(self).at(elements)
    }
}

impl ViewMut<'_> {
    /// Returns the values from element `elements` on, for work of a CUDA device.
    pub fn at(&mut self, elements: usize) -> CudaPart<'_> {
        CudaPart::from(self).at(elements)
    }
}

impl<'a> From<&View<'a>> for CudaPart<'a> {
    fn from(view: &View<'a>) -> Self {
        let memory = match (view.device(), view.host_bytes()) {
            (Some(place), _) => PartMemory::Device(place),
            (None, Some(bytes)) => PartMemory::Host(bytes),
            (None, None) => PartMemory::InPlace,
        };
        let elements = view.region().elements();
        Self {
            memory,
            dtype: view.global().dtype(),
            skipped: 0,
            end: elements,
            writable: false,
        }
    }
}

/// Reads an output that is updated in place, or that this kernel has filled.
impl<'a> From<&'a ViewMut<'_>> for CudaPart<'a> {
    fn from(view: &'a ViewMut<'_>) -> Self {
        let memory = view
            .device()
            .map_or(PartMemory::Host(&[]), PartMemory::Device);
        let elements = view.region().elements();
        Self {
            memory,
            dtype: view.global().dtype(),
            skipped: 0,
            end: elements,
            writable: false,
        }
    }
}

impl<'a> From<&'a mut ViewMut<'_>> for CudaPart<'a> {
    fn from(view: &'a mut ViewMut<'_>) -> Self {
        Self {
            writable: true,
            ..Self::from(&*view)
        }
    }
}

impl<'a> From<&'a Scratch<'_>> for CudaPart<'a> {
    fn from(scratch: &'a Scratch<'_>) -> Self {
        scratch.at(0)
    }
}

/// An argument of a device function: values in memory, or a number.
///
/// Views and [`Scratch`] become the address of their first element; `None` becomes a null pointer.
/// `usize` becomes a 64-bit number. The launch copies an input that is on no device to the device.
/// For a single number, pass [`View::scalar`] instead.
#[derive(Debug)]
pub struct Arg<'a>(pub(super) ArgValue<'a>);

#[derive(Debug)]
pub(super) enum ArgValue<'a> {
    Part(CudaPart<'a>),
    Number(NumberBytes),
}

/// The bytes of a number argument: the first `size` of `bytes`, in this machine's byte order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct NumberBytes {
    pub(super) bytes: [u8; 8],
    pub(super) size: usize,
}

impl NumberBytes {
    fn new<const N: usize>(number: [u8; N]) -> Self {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&number);
        Self { bytes, size: N }
    }
}

impl<'a> From<CudaPart<'a>> for Arg<'a> {
    fn from(part: CudaPart<'a>) -> Self {
        Self(ArgValue::Part(part))
    }
}

impl<'a> From<Option<CudaPart<'a>>> for Arg<'a> {
    fn from(part: Option<CudaPart<'a>>) -> Self {
        part.map_or_else(|| 0u64.into(), Self::from)
    }
}

impl<'a> From<&View<'a>> for Arg<'a> {
    fn from(view: &View<'a>) -> Self {
        CudaPart::from(view).into()
    }
}

impl<'a> From<&'a ViewMut<'_>> for Arg<'a> {
    fn from(view: &'a ViewMut<'_>) -> Self {
        CudaPart::from(view).into()
    }
}

impl<'a> From<&'a mut ViewMut<'_>> for Arg<'a> {
    fn from(view: &'a mut ViewMut<'_>) -> Self {
        CudaPart::from(view).into()
    }
}

impl<'a> From<&'a Scratch<'_>> for Arg<'a> {
    fn from(scratch: &'a Scratch<'_>) -> Self {
        CudaPart::from(scratch).into()
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for Arg<'_> {
            fn from(number: $number) -> Self {
                Self(ArgValue::Number(NumberBytes::new(number.to_ne_bytes())))
            }
        }
    )*};
}

numbers!(u32, i32, u64, i64, f32, f64);

impl From<usize> for Arg<'_> {
    fn from(number: usize) -> Self {
        (number as u64).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_device::cuda::work::Grid;

    #[test]
    fn grids_cover_all_elements_with_at_least_one_block() {
        let blocks = |elements| Grid::over(elements).blocks;
        assert_eq!(
            [blocks(0), blocks(1), blocks(256), blocks(257)],
            [1, 1, 1, 2].map(|x| (x, 1, 1))
        );
        assert_eq!(blocks(usize::MAX), (i32::MAX as u32, 1, 1));
        assert_eq!(Grid::new(2, 64).shared(1024).shared_bytes, 1024);
    }

    #[test]
    fn numbers_keep_their_bytes() {
        let number = |arg: Arg<'_>| match arg.0 {
            ArgValue::Number(number) => number,
            ArgValue::Part(_) => panic!("a part"),
        };
        assert_eq!(
            number(1.5f32.into()),
            NumberBytes::new(1.5f32.to_ne_bytes())
        );
        assert_eq!(number(1.5f32.into()).size, 4);
        assert_eq!(
            (number(7usize.into()).bytes, number(7usize.into()).size),
            (7u64.to_ne_bytes(), 8)
        );
        assert_eq!(
            (
                number((-1i32).into()).bytes[..4].to_vec(),
                number((-1i32).into()).size
            ),
            (vec![255; 4], 4)
        );
    }

    #[test]
    fn parts_end_with_the_whole() {
        let place = DevicePlace {
            device: 0,
            address: 1 << 20,
            bytes: 40,
        };
        let part = |from| {
            CudaPart::scratch(place, DType::F32, 10)
                .at(from)
                .at(0)
                .elements()
        };
        assert_eq!(
            [part(0), part(3), part(10), part(11), part(usize::MAX)],
            [Some(10), Some(7), Some(0), None, None]
        );
        let first = |from, count| {
            CudaPart::scratch(place, DType::F32, 10)
                .at(from)
                .first(count)
                .elements()
        };
        assert_eq!(
            [
                first(0, 4),
                first(8, 4),
                first(3, 0),
                first(11, 1),
                first(1, usize::MAX)
            ],
            [Some(4), Some(2), Some(0), None, Some(9)]
        );
    }
}
