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
    /// The argument's value, in the first `size` bytes.
    pub(super) bytes: [u8; 8],
    /// The number of bytes of `bytes` that are used.
    pub(super) size: usize,
    /// The memory to which an address points; `None` for a number.
    pub(super) uses: Option<UsedMemory>,
}

/// Memory that a launched function may read. If `writes` is true, it may also write there.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedMemory {
    pub(super) place: DevicePlace,
    pub(super) writes: bool,
}

impl RawArg {
    /// A placeholder for unused elements of an array of arguments.
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

    /// Returns an argument with the address of `place`. If `writes` is true, the function may write
    /// there.
    pub fn memory(place: DevicePlace, writes: bool) -> Self {
        Self {
            bytes: place.address.to_ne_bytes(),
            size: 8,
            uses: Some(UsedMemory { place, writes }),
        }
    }
}

/// A matrix product, or a batch of products, in the form that cuBLAS takes. Matrices are
/// column-major: `result[m, n] = first[m, k] second[k, n]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CublasProduct {
    /// Number of rows of the result.
    pub m: i32,
    /// Number of columns of the result.
    pub n: i32,
    /// Number of products that are summed for each element of the result.
    pub k: i32,
    /// The layout of the left factor.
    pub first: Operand,
    /// The layout of the right factor.
    pub second: Operand,
    /// The layout of the result.
    pub result: Operand,
    /// Number of products in the batch.
    pub batch: i32,
    /// Factor that multiplies the product.
    pub alpha: f64,
    /// Factor of the previous result, which is added. If it is 0, the previous result is not read.
    pub beta: f64,
    /// The dtypes and the precision of the product.
    pub types: Types,
}

/// The memory layout of a matrix in a [`CublasProduct`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Operand {
    /// True if the memory holds the transposed matrix.
    pub transposed: bool,
    /// Number of elements between the starts of two successive columns.
    pub leading: i32,
    /// Number of elements between the starts of two successive matrices of a batch.
    pub stride: i64,
}

/// The id of an NCCL communicator. The first device of a group sends it to the others. Ranks with
/// the same id join the same communicator.
pub type CommunicatorId = [u8; 128];

/// A collective operation of a group of devices, with the memory of one device.
#[derive(Clone, Copy)]
pub struct Joint<'a> {
    /// The kind of the collective operation.
    pub kind: &'a CollectiveKind,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The number of elements in `from`, the same on every device of the group.
    pub elements: usize,
    /// The number of devices in the group.
    pub ranks: usize,
    /// Memory of the device that the operation reads.
    pub from: DevicePlace,
    /// Memory of the device that the operation writes.
    pub to: DevicePlace,
}

/// A reason why a collective of several devices failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NotJoined {
    /// The communicators were aborted because of a failure elsewhere.
    #[error("it was given up: {0}")]
    GivenUp(Arc<Failure>),
    /// An error of NCCL or of this device.
    #[error(transparent)]
    Failed(#[from] CudaError),
}
