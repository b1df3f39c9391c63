//! The errors of invalid shardings, and of shardings that do not fit a shape.

use super::Spec;
use crate::region::Region;
use crate::topology::{DeviceId, Mesh};

/// The reason that a sharding is invalid or does not fit a shape. Always the caller's fault, and
/// the same on every process.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// The spec names an axis that the mesh does not have.
    #[error("{spec}: dimension {dim} is divided over axis `{axis}`, but the mesh is {mesh}")]
    UnknownAxis {
        /// Index of the dimension that the unknown axis divides.
        dim: usize,
        /// The unknown axis.
        axis: String,
        /// The spec that names the axis.
        spec: Spec,
        /// The mesh that lacks the axis.
        mesh: Mesh,
    },
    /// The spec uses an axis more than once.
    #[error("{spec}: axis `{axis}` divides dimension {first} and again dimension {second}")]
    AxisUsedTwice {
        /// The axis that is used twice.
        axis: String,
        /// The dimension that the axis divides first.
        first: usize,
        /// The dimension that the axis divides again; may be the same.
        second: usize,
        /// The spec that uses the axis twice.
        spec: Spec,
    },
    /// The spec has more entries than the array has dimensions.
    #[error("{spec} has {} entries, but shape {shape:?} has {} \
        dimensions", spec.entries().len(), shape.len())]
    SpecTooLong {
        /// The spec that is too long.
        spec: Spec,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A dimension cannot be divided evenly.
    #[error("{spec}: dimension {dim} of shape {shape:?} has size {}, which {axes} cannot divide \
        into {parts} equal parts: {}leave it whole", shape[*dim], padding(shape[*dim], *parts))]
    NotDivisible {
        /// The index of the dimension.
        dim: usize,
        /// The axes that divide the dimension, with their sizes, as text.
        axes: String,
        /// The number of parts into which the axes divide the dimension.
        parts: usize,
        /// The array's shape.
        shape: Vec<usize>,
        /// The spec that divides the dimension.
        spec: Spec,
    },
    /// The job has no such device.
    #[error("there is no device {device} in a job of {devices} devices")]
    UnknownDevice {
        /// The device that the job lacks.
        device: DeviceId,
        /// Number of devices in the job.
        devices: usize,
    },
    /// Unreduced axes were given for a sharding without a mesh.
    #[error("axis `{axis}` cannot be unreduced: {sharding} has no mesh")]
    UnreducedWithoutMesh {
        /// The first of the axes given.
        axis: String,
        /// The sharding as text.
        sharding: String,
    },
    /// The mesh lacks an axis that was given as unreduced.
    #[error("axis `{axis}` cannot be unreduced: the mesh is {mesh}")]
    UnreducedUnknownAxis {
        /// The axis that the mesh lacks.
        axis: String,
        /// The mesh that lacks the axis.
        mesh: Mesh,
    },
    /// An axis is given twice in a list of unreduced axes.
    #[error("axis `{axis}` is unreduced twice")]
    UnreducedTwice {
        /// The axis that is listed twice.
        axis: String,
    },
    /// An axis that divides a dimension cannot be unreduced: a device would hold only a part of one
    /// summand.
    #[error("axis `{axis}` cannot be unreduced: {spec} divides dimension {dim} over it")]
    UnreducedDivides {
        /// The axis that was given as unreduced.
        axis: String,
        /// The dimension that the axis divides.
        dim: usize,
        /// The sharding's spec, which divides the dimension.
        spec: Spec,
    },
    /// A list of chunk placements is empty.
    #[error("the chunks of dimension {dim} are placed nowhere")]
    NoPlacements {
        /// The dimension that the chunks divide, as given; a negative number counts from the end.
        dim: isize,
    },
    /// A device is given two chunks.
    #[error("chunks {first} and {second} of dimension {dim} are both placed on device {device}")]
    PlacedTwice {
        /// The dimension that the chunks divide, as given; a negative number counts from the end.
        dim: isize,
        /// The device with two chunks.
        device: DeviceId,
        /// The index of the first chunk placed on the device.
        first: usize,
        /// The index of the second chunk placed on the device.
        second: usize,
    },
    /// The array lacks the dimension that the chunks divide.
    #[error("chunks of dimension {dim}: shape {shape:?} has {}", dims(.shape))]
    DimOutOfRange {
        /// The dimension that the chunks divide, as given; a negative number counts from the end.
        dim: isize,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A list of shards is empty.
    #[error("a list of no shards: an array is on at least one device")]
    NoShards,
    /// Two shards have different numbers of dimensions.
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
        /// The first device with a shard of another number of dimensions.
        device: DeviceId,
        /// The region of `device`.
        region: Region,
    },
    /// A device has two shards.
    #[error("device {device} has {first} and again {second}: a device has one shard")]
    ShardTwice {
        /// The device with two shards.
        device: DeviceId,
        /// The device's first region in the list.
        first: Region,
        /// The device's second region in the list.
        second: Region,
    },
    /// Two shards have elements in common.
    #[error(
        "device {first_device} has {first_region} and device {second_device} has {second_region}: \
         both have {common}"
    )]
    Overlap {
        /// The device of the first of the two shards in the list.
        first_device: DeviceId,
        /// The region of `first_device`.
        first_region: Region,
        /// The device of the second of the two shards in the list.
        second_device: DeviceId,
        /// The region of `second_device`.
        second_region: Region,
        /// The intersection of both regions.
        common: Region,
    },
    /// The shards have another number of dimensions than the array.
    #[error("device {device} has {region}, but shape {shape:?} has {} dimensions", shape.len())]
    ShapeNdim {
        /// The first shard's device.
        device: DeviceId,
        /// The region of `device`.
        region: Region,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// A shard ends past the end of the array.
    #[error(
        "device {device} has {region}, which is past the end of dimension {dim} of shape {shape:?}"
    )]
    PastEnd {
        /// The device of the shard.
        device: DeviceId,
        /// The region of `device`.
        region: Region,
        /// The first dimension in which the region ends past the array.
        dim: usize,
        /// The array's shape.
        shape: Vec<usize>,
    },
    /// Some elements of the array are in no shard.
    #[error("no device has {region} of shape {shape:?}; there are {shards} shards")]
    Gap {
        /// A region that no shard contains. There may be others.
        region: Region,
        /// The array's shape.
        shape: Vec<usize>,
        /// Number of shards in the list.
        shards: usize,
    },
    /// A rank is given two chunks.
    #[error("chunks {first} and {second} are both placed on rank {rank}")]
    RankTwice {
        /// The rank with two chunks.
        rank: usize,
        /// The index of the first chunk placed on the rank.
        first: usize,
        /// The index of the second chunk placed on the rank.
        second: usize,
    },
    /// A chunk is placed on a rank that does not exist.
    #[error("chunk {chunk} is placed on rank {rank}, but there are {world} ranks")]
    UnknownRank {
        /// The rank that does not exist.
        rank: usize,
        /// The index of the chunk placed on the rank.
        chunk: usize,
        /// Number of ranks; they are numbered from 0.
        world: usize,
    },
    /// A rank is given no chunk.
    #[error("rank {rank} of {world} gets no chunk: there are {placements} placements")]
    MissingRank {
        /// The first rank without a chunk.
        rank: usize,
        /// Number of ranks.
        world: usize,
        /// Number of placements.
        placements: usize,
    },
}

/// Returns the advice to pad a dimension of `size` indices, or an empty string if the padded size
/// overflows.
fn padding(size: usize, parts: usize) -> String {
    let padded = size.checked_next_multiple_of(parts);
    padded.map_or(String::new(), |padded| format!("pad it to {padded}, or "))
}

fn dims(shape: &[usize]) -> String {
    match shape.len() {
        0 => "none".to_owned(),
        ndim => format!("dimensions -{ndim} to {}", ndim - 1),
    }
}
