//! Plain descriptions of device operations: arguments, matrix products and collectives.

use std::sync::Arc;

use mpmd_memory::DevicePlace;
use mpmd_proto::Failure;

use super::CudaError;
use crate::collective::CollectiveKind;
use crate::cuda::work::Types;
use mpmd_layout::aval::DType;

/// An argument of a device function, in the form that the CUDA driver takes.
#[derive(Clone, Copy, Debug)]
pub struct RawArg {
    /// The value, in the first `size` bytes.
    pub(super) bytes: [u8; 8],
    /// The number of bytes used.
    pub(super) size: usize,
    /// The memory that an address points to. `None` for a number.
    pub(super) uses: Option<UsedMemory>,
}

/// Memory that a launched function may read, and also write if `writes` is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedMemory {
    pub(super) place: DevicePlace,
    pub(super) writes: bool,
}

impl RawArg {
    /// A placeholder for unused array entries.
    pub const NONE: Self = Self {
        bytes: [0; 8],
        size: 0,
        uses: None,
    };

    /// Returns an argument passed by value: the first `size` bytes of `bytes`.
    pub fn number(bytes: [u8; 8], size: usize) -> Self {
        Self {
            bytes,
            size,
            uses: None,
        }
    }

    /// Returns an argument with the address of `place`. `writes` says whether the function may
    /// write there.
    pub fn memory(place: DevicePlace, writes: bool) -> Self {
        Self {
            bytes: place.address.to_ne_bytes(),
            size: 8,
            uses: Some(UsedMemory { place, writes }),
        }
    }
}

/// A product of column-major matrices, as cuBLAS takes it, or a batch of products: `result[m, n] =
/// first[m, k] second[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CublasProduct {
    /// Rows of the result.
    pub m: i32,
    /// Columns of the result.
    pub n: i32,
    /// Length of the sums.
    pub k: i32,
    /// The left factor.
    pub first: Operand,
    /// The right factor.
    pub second: Operand,
    /// The matrix that is written.
    pub result: Operand,
    /// Number of products.
    pub batch: i32,
    /// Factor of the product.
    pub alpha: f64,
    /// Factor of the previous result; with 0 it is not read.
    pub beta: f64,
    /// The dtypes and the precision.
    pub types: Types,
}

/// The memory layout of a matrix of a product.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Operand {
    /// True if the transposed matrix lies in memory.
    pub transposed: bool,
    /// Elements between the starts of two successive columns.
    pub leading: i32,
    /// Elements between the starts of two successive matrices of a batch.
    pub stride: i64,
}

/// The id that a group's first device sends to the others. Ranks that use the same id join the same
/// NCCL communicator.
pub type CommunicatorId = [u8; 128];

/// A collective operation of a group of devices, as one device issues it.
#[derive(Clone, Copy)]
pub struct Joint<'a> {
    /// The operation.
    pub kind: &'a CollectiveKind,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The number of elements at `from`, the same on every device of the group.
    pub elements: usize,
    /// The number of devices in the group.
    pub ranks: usize,
    /// Memory that is read.
    pub from: DevicePlace,
    /// Memory that is written.
    pub to: DevicePlace,
}

/// The reason why a collective of several devices failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotJoined {
    /// The communicators were given up because of this failure elsewhere.
    #[error("it was given up: {0}")]
    GivenUp(Arc<Failure>),
    /// An error of NCCL or of this device.
    #[error(transparent)]
    Failed(#[from] CudaError),
}
