//! What a launch is given: its grid, its arguments, and parts of views.

use mpmd_transport::memory::DevicePlace;

use super::Scratch;
use crate::kernel::{View, ViewMut};
use mpmd_layout::aval::DType;

/// Values that a launch or a product uses: a view, or one from some element on. Made of a view or
/// of [`Scratch`].
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    memory: Memory<'a>,
    dtype: DType,
    /// Elements of it that were left out.
    skipped: usize,
    /// Elements of the whole.
    elements: usize,
    writable: bool,
}

/// Where values are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Memory<'a> {
    Device(DevicePlace),
    /// The host's, of an input that is on no device.
    Host(&'a [u8]),
    /// In an output.
    InPlace,
}

impl<'a> Part<'a> {
    /// The same from `elements` further on; from past the end where it has fewer, which the call it
    /// is given to refuses.
    #[must_use]
    pub fn at(self, elements: usize) -> Self {
        Self { skipped: self.skipped.saturating_add(elements), ..self }
    }

    pub(super) fn scratch(place: DevicePlace, dtype: DType, elements: usize) -> Self {
        Self { memory: Memory::Device(place), dtype, skipped: 0, elements, writable: true }
    }

    pub(super) fn memory(&self) -> Memory<'a> {
        self.memory
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it begins in its memory, in elements.
    pub(super) fn skipped(&self) -> usize {
        self.skipped
    }

    /// How many elements it has; `None` where it begins behind its end.
    pub(super) fn elements(&self) -> Option<usize> {
        self.elements.checked_sub(self.skipped)
    }

    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }
}

impl<'a> View<'a> {
    /// The values from element `elements` on, for a CUDA device's work.
    pub fn at(&self, elements: usize) -> Part<'a> {
        Part::from(self).at(elements)
    }
}

impl ViewMut<'_> {
    /// The values from element `elements` on, for a CUDA device's work.
    pub fn at(&mut self, elements: usize) -> Part<'_> {
        Part::from(self).at(elements)
    }
}

impl<'a> From<&View<'a>> for Part<'a> {
    fn from(view: &View<'a>) -> Self {
        let memory = match (view.device(), view.host_bytes()) {
            (Some(place), _) => Memory::Device(place),
            (None, Some(bytes)) => Memory::Host(bytes),
            (None, None) => Memory::InPlace,
        };
        let elements = view.region().elements();
        Self { memory, dtype: view.global().dtype(), skipped: 0, elements, writable: false }
    }
}

/// To be read: an output that is updated in place, or that this kernel has filled.
impl<'a> From<&'a ViewMut<'_>> for Part<'a> {
    fn from(view: &'a ViewMut<'_>) -> Self {
        let memory = view.device().map_or(Memory::Host(&[]), Memory::Device);
        let elements = view.region().elements();
        Self { memory, dtype: view.global().dtype(), skipped: 0, elements, writable: false }
    }
}

impl<'a> From<&'a mut ViewMut<'_>> for Part<'a> {
    fn from(view: &'a mut ViewMut<'_>) -> Self {
        Self { writable: true, ..Self::from(&*view) }
    }
}

impl<'a> From<&'a Scratch<'_>> for Part<'a> {
    fn from(scratch: &'a Scratch<'_>) -> Self {
        scratch.at(0)
    }
}

/// An argument of a function: values in memory, or a number.
///
/// Views and [`Scratch`] become the address of their first element, `usize` becomes a 64-bit
/// number. An input that is on no device is copied to the device by the launch: for a single
/// number, better give the function the value of [`View::scalar`].
#[derive(Debug)]
pub struct Arg<'a>(pub(super) Value<'a>);

#[derive(Debug)]
pub(super) enum Value<'a> {
    Part(Part<'a>),
    Number(Number),
}

/// The bytes of a number, as the function gets them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Number {
    pub(super) bytes: [u8; 8],
    pub(super) size: usize,
}

impl Number {
    fn new<const N: usize>(number: [u8; N]) -> Self {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&number);
        Self { bytes, size: N }
    }
}

impl<'a> From<Part<'a>> for Arg<'a> {
    fn from(part: Part<'a>) -> Self {
        Self(Value::Part(part))
    }
}

impl<'a> From<&View<'a>> for Arg<'a> {
    fn from(view: &View<'a>) -> Self {
        Part::from(view).into()
    }
}

impl<'a> From<&'a ViewMut<'_>> for Arg<'a> {
    fn from(view: &'a ViewMut<'_>) -> Self {
        Part::from(view).into()
    }
}

impl<'a> From<&'a mut ViewMut<'_>> for Arg<'a> {
    fn from(view: &'a mut ViewMut<'_>) -> Self {
        Part::from(view).into()
    }
}

impl<'a> From<&'a Scratch<'_>> for Arg<'a> {
    fn from(scratch: &'a Scratch<'_>) -> Self {
        Part::from(scratch).into()
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for Arg<'_> {
            fn from(number: $number) -> Self {
                Self(Value::Number(Number::new(number.to_ne_bytes())))
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
    use crate::device::cuda::work::Grid;

    #[test]
    fn grids_cover_all_elements_and_have_a_block_at_least() {
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
            Value::Number(number) => number,
            Value::Part(_) => panic!("a part"),
        };
        assert_eq!(number(1.5f32.into()), Number::new(1.5f32.to_ne_bytes()));
        assert_eq!(number(1.5f32.into()).size, 4);
        assert_eq!(
            (number(7usize.into()).bytes, number(7usize.into()).size),
            (7u64.to_ne_bytes(), 8)
        );
        assert_eq!(
            (number((-1i32).into()).bytes[..4].to_vec(), number((-1i32).into()).size),
            (vec![255; 4], 4)
        );
    }

    #[test]
    fn parts_end_where_the_whole_does() {
        let place = DevicePlace { device: 0, address: 1 << 20, bytes: 40 };
        let part = |from| Part::scratch(place, DType::F32, 10).at(from).at(0).elements();
        assert_eq!(
            [part(0), part(3), part(10), part(11), part(usize::MAX)],
            [Some(10), Some(7), Some(0), None, None]
        );
    }
}
