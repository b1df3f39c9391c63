//! What devices are asked for, in figures: the same in programs with and without the feature
//! `cuda`.

use std::sync::Arc;

use mpmd_transport::Failure;
use mpmd_transport::memory::DevicePlace;

use super::CudaError;
use crate::device::collective::CollectiveKind;
use crate::device::cuda::work::Types;
use mpmd_layout::aval::DType;

/// An argument of a function, as the driver takes it.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for devices, and there are none"))]
pub(crate) struct RawArg {
    /// Its bytes, from the first on.
    pub(super) bytes: [u8; 8],
    /// How many of them there are.
    pub(super) size: usize,
    /// Where it is an address: what it is the address of, and whether the function may write that.
    pub(super) uses: Option<(DevicePlace, bool)>,
}

impl RawArg {
    /// No argument, for the room.
    pub(crate) const NONE: Self = Self { bytes: [0; 8], size: 0, uses: None };

    /// A number of `size` bytes.
    pub(crate) fn number(bytes: [u8; 8], size: usize) -> Self {
        Self { bytes, size, uses: None }
    }

    /// The address of values.
    pub(crate) fn memory(place: DevicePlace, writes: bool) -> Self {
        Self { bytes: place.address.to_ne_bytes(), size: 8, uses: Some((place, writes)) }
    }
}

/// A product of matrices in columns, as cuBLAS takes it, or a batch of such: `result[m, n]` of
/// `first[m, k]` and `second[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) m: i32,
    pub(crate) n: i32,
    pub(crate) k: i32,
    pub(crate) first: Operand,
    pub(crate) second: Operand,
    pub(crate) result: Operand,
    pub(crate) batch: i32,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
    pub(crate) types: Types,
}

/// A matrix of a product.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Operand {
    pub(crate) transposed: bool,
    /// Elements from the beginning of a column to that of the next.
    pub(crate) leading: i32,
    /// Elements from one matrix of a batch to the next.
    pub(crate) stride: i64,
}

/// What a group's first device tells the others, by which they make communicators of NCCL's that
/// belong together.
pub(crate) type CommunicatorId = [u8; 128];

/// A collective that devices carry out together.
#[derive(Clone, Copy)]
pub(crate) struct Joint<'a> {
    pub(crate) kind: &'a CollectiveKind,
    pub(crate) dtype: DType,
    /// What it was called with.
    pub(crate) elements: usize,
    /// How many devices there are.
    pub(crate) ranks: usize,
    pub(crate) from: DevicePlace,
    pub(crate) to: DevicePlace,
}

/// Why devices do not work together.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NotJoined {
    /// Not because of this device.
    #[error("it was given up: {0}")]
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nobody is joined there"))]
    GivenUp(Arc<Failure>),
    /// NCCL, or the device, refuses.
    #[error(transparent)]
    Failed(#[from] CudaError),
}
