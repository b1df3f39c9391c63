//! Why a sharding cannot be, or does not apply to a shape.

use super::Spec;
use crate::region::Region;
use crate::topology::{DeviceId, Mesh};

/// Why a sharding cannot be, or does not apply to a shape. Always the caller's fault, and the same
/// on every process.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// The spec names an axis that the mesh does not have.
    #[error("{spec}: dimension {dim} is divided over axis `{axis}`, but the mesh is {mesh}")]
    UnknownAxis {
        /// The dimension.
        dim: usize,
        /// The name.
        axis: String,
        /// The spec.
        spec: Spec,
        /// The mesh.
        mesh: Mesh,
    },
    /// The spec uses an axis more than once.
    #[error("{spec}: axis `{axis}` divides dimension {first} and again dimension {second}")]
    AxisUsedTwice {
        /// The axis.
        axis: String,
        /// The dimension that uses it first.
        first: usize,
        /// The dimension that uses it again; may be the same.
        second: usize,
        /// The spec.
        spec: Spec,
    },
    /// The spec has more entries than the array has dimensions.
    #[error("{spec} has {} entries, but shape {shape:?} has {} \
        dimensions", spec.entries().len(), shape.len())]
    SpecTooLong {
        /// The spec.
        spec: Spec,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A dimension cannot be divided evenly.
    #[error("{spec}: dimension {dim} of shape {shape:?} has size {}, which {axes} divides into \
        {parts} parts", shape[*dim])]
    NotDivisible {
        /// The dimension.
        dim: usize,
        /// The axes that divide it, with their sizes.
        axes: String,
        /// The number of parts they make.
        parts: usize,
        /// The array's shape.
        shape: Vec<usize>,
        /// The spec.
        spec: Spec,
    },
    /// The job has no such device.
    #[error("there is no device {device} in a job of {devices} devices")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
        /// How many devices there are.
        devices: usize,
    },
    /// Unreduced axes of a sharding that has no mesh.
    #[error("axis `{axis}` cannot be unreduced: {sharding} has no mesh")]
    UnreducedWithoutMesh {
        /// The first of the axes.
        axis: String,
        /// The sharding.
        sharding: String,
    },
    /// An unreduced axis that the mesh does not have.
    #[error("axis `{axis}` cannot be unreduced: the mesh is {mesh}")]
    UnreducedUnknownAxis {
        /// The axis.
        axis: String,
        /// The mesh.
        mesh: Mesh,
    },
    /// An axis that is to be unreduced twice.
    #[error("axis `{axis}` is unreduced twice")]
    UnreducedTwice {
        /// The axis.
        axis: String,
    },
    /// An axis that divides a dimension and is to be unreduced: a device would hold a part of one
    /// summand only.
    #[error("axis `{axis}` cannot be unreduced: {spec} divides dimension {dim} over it")]
    UnreducedDivides {
        /// The axis.
        axis: String,
        /// The dimension.
        dim: usize,
        /// The spec.
        spec: Spec,
    },
    /// Chunks that are placed nowhere.
    #[error("the chunks of dimension {dim} are placed nowhere")]
    NoPlacements {
        /// The dimension, as it was given.
        dim: isize,
    },
    /// A device that is to hold two chunks.
    #[error("chunks {first} and {second} of dimension {dim} are both placed on device {device}")]
    PlacedTwice {
        /// The dimension, as it was given.
        dim: isize,
        /// The device.
        device: DeviceId,
        /// The first chunk placed there.
        first: usize,
        /// The next.
        second: usize,
    },
    /// The array does not have the dimension that is to be cut into chunks.
    #[error("chunks of dimension {dim}: shape {shape:?} has {}", dims(.shape))]
    DimOutOfRange {
        /// The dimension, as it was given.
        dim: isize,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A list of shards without any.
    #[error("a list of no shards: an array is on at least one device")]
    NoShards,
    /// Shards with different numbers of dimensions.
    #[error(
        "device {first_device} has {first_region} and device {device} has {region}: {} and {} \
         dimensions",
        first_region.ndim(),
        region.ndim()
    )]
    ShardNdim {
        /// The first shard's device.
        first_device: DeviceId,
        /// The first shard's region.
        first_region: Region,
        /// The device whose shard differs.
        device: DeviceId,
        /// Its region.
        region: Region,
    },
    /// A device with two shards.
    #[error("device {device} has {first} and again {second}: a device has one shard")]
    ShardTwice {
        /// The device.
        device: DeviceId,
        /// Its region that comes first in the list.
        first: Region,
        /// Its next.
        second: Region,
    },
    /// Two shards that have elements in common.
    #[error(
        "device {first_device} has {first_region} and device {second_device} has {second_region}: \
         both have {common}"
    )]
    Overlap {
        /// The device that comes first in the list.
        first_device: DeviceId,
        /// Its region.
        first_region: Region,
        /// The other device.
        second_device: DeviceId,
        /// Its region.
        second_region: Region,
        /// What both have.
        common: Region,
    },
    /// Shards that have other numbers of dimensions than the array.
    #[error("device {device} has {region}, but shape {shape:?} has {} dimensions", shape.len())]
    ShapeNdim {
        /// The first shard's device.
        device: DeviceId,
        /// Its region.
        region: Region,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A shard that ends after the array does.
    #[error(
        "device {device} has {region}, which is past the end of dimension {dim} of shape {shape:?}"
    )]
    PastEnd {
        /// The device.
        device: DeviceId,
        /// Its region.
        region: Region,
        /// The first dimension that it goes past.
        dim: usize,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A part of the array that no shard has.
    #[error("no device has {region} of shape {shape:?}; there are {shards} shards")]
    Gap {
        /// Some of what is missing.
        region: Region,
        /// The array's shape.
        shape: Vec<usize>,
        /// How many shards there are.
        shards: usize,
    },
    /// A rank that gets two chunks.
    #[error("chunks {first} and {second} are both placed on rank {rank}")]
    RankTwice {
        /// The rank.
        rank: usize,
        /// The first chunk placed there.
        first: usize,
        /// The next.
        second: usize,
    },
    /// A rank that does not exist.
    #[error("chunk {chunk} is placed on rank {rank}, but there are {world} ranks")]
    UnknownRank {
        /// The rank.
        rank: usize,
        /// The chunk placed there.
        chunk: usize,
        /// How many ranks there are.
        world: usize,
    },
    /// A rank that gets no chunk.
    #[error("rank {rank} of {world} gets no chunk: there are {placements} placements")]
    MissingRank {
        /// The first such rank.
        rank: usize,
        /// How many ranks there are.
        world: usize,
        /// How many placements there are.
        placements: usize,
    },
}

fn dims(shape: &[usize]) -> String {
    match shape.len() {
        0 => "none".to_owned(),
        ndim => format!("dimensions -{ndim} to {}", ndim - 1),
    }
}
