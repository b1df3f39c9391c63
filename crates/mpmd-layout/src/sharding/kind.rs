//! The data behind a [`Sharding`](super::Sharding): its kind, and its fingerprint and text.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Spec;
use crate::fingerprint::Fingerprint;
use crate::region::Region;
use crate::topology::mesh::DeviceList;
use crate::topology::{DeviceId, Mesh};

/// Maximum number of shards that the displayed text of an enumerated sharding lists.
const SHARDS_SHOWN: usize = 8;

/// The kinds of [`Sharding`](super::Sharding) and the data of each kind.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum ShardingKind {
    /// Dimensions divided over the axes of a mesh.
    Named {
        /// The mesh over which the array is divided.
        mesh: Mesh,
        /// The mesh axes that divide each dimension.
        spec: Spec,
        /// The axes over which the shards are partial sums, in the order of the mesh. Each value of
        /// the array is the sum of its shards along these axes.
        unreduced: Vec<String>,
        /// The memory, of each device or its host, that holds the shards.
        memory_kind: MemoryKind,
    },
    /// One dimension cut into chunks of one size. Only the trailing chunks may be short or empty.
    Chunk {
        /// The divided dimension; a negative number counts from the end.
        dim: isize,
        /// The device of each chunk, in the order of the chunks.
        placements: Vec<DeviceId>,
        /// The memory, of each device or its host, that holds the chunks.
        memory_kind: MemoryKind,
    },
    /// Shards listed one by one. Applies only to the shape that they fill.
    Enumerated {
        /// The (device, region) of each shard, in the order of the list.
        shards: Vec<(DeviceId, Region)>,
        /// The memory, of each device or its host, that holds the shards.
        memory_kind: MemoryKind,
    },
    /// The whole array on one device.
    SingleDevice {
        /// The device that holds the array.
        device: DeviceId,
        /// The memory, of the device or its host, that holds the array.
        memory_kind: MemoryKind,
    },
}

/// The memory that holds the shards: the device's or its host's.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// The device's own memory, in which its kernels compute.
    #[default]
    Device,
    /// The memory of the device's host.
    Host,
}

impl ShardingKind {
    pub(super) fn memory_kind(&self) -> MemoryKind {
        match self {
            Self::Named { memory_kind, .. }
            | Self::Chunk { memory_kind, .. }
            | Self::Enumerated { memory_kind, .. }
            | Self::SingleDevice { memory_kind, .. } => *memory_kind,
        }
    }

    pub(super) fn with_memory_kind(&self, kind: MemoryKind) -> Self {
        let mut other = self.clone();
        match &mut other {
            Self::Named { memory_kind, .. }
            | Self::Chunk { memory_kind, .. }
            | Self::Enumerated { memory_kind, .. }
            | Self::SingleDevice { memory_kind, .. } => *memory_kind = kind,
        }
        other
    }

    pub(super) fn fingerprint(&self) -> u64 {
        let mut fingerprint = Fingerprint::new("sharding");

        match self {
            Self::Named {
                mesh,
                spec,
                unreduced,
                ..
            } => {
                fingerprint.text("named");
                fingerprint.word(mesh.fingerprint());
                spec.add_to(&mut fingerprint);
                fingerprint.word(unreduced.len() as u64);
                unreduced.iter().for_each(|axis| fingerprint.text(axis));
            }
            Self::Chunk {
                dim, placements, ..
            } => {
                fingerprint.text("chunk");
                fingerprint.word(*dim as i64 as u64);
                fingerprint.words(placements.iter().map(|device| u64::from(device.0)));
            }
            Self::Enumerated { shards, .. } => {
                fingerprint.text("enumerated");
                fingerprint.word(shards.len() as u64);
                for (device, region) in shards {
                    fingerprint.word(u64::from(device.0));
                    fingerprint.words(region.ranges().map(|range| range.start as u64));
                    fingerprint.words(region.ranges().map(|range| range.end as u64));
                }
            }
            Self::SingleDevice { device, .. } => {
                fingerprint.text("single device");
                fingerprint.word(u64::from(device.0));
            }
        }

        fingerprint.word(self.memory_kind() as u64);
        fingerprint.finish()
    }
}

impl fmt::Display for ShardingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named {
                mesh,
                spec,
                unreduced,
                ..
            } => {
                write!(f, "{spec} ")?;
                if !unreduced.is_empty() {
                    write!(f, "unreduced over {{{}}} ", unreduced.join(", "))?;
                }
                write!(f, "on {mesh}")?;
            }
            Self::Chunk {
                dim, placements, ..
            } => {
                write!(
                    f,
                    "chunks of dimension {dim} on devices {}",
                    DeviceList(placements)
                )?;
            }
            Self::Enumerated { shards, .. } => {
                f.write_str("shards {")?;
                for (i, (device, region)) in shards.iter().take(SHARDS_SHOWN).enumerate() {
                    write!(f, "{}{device}: {region}", if i == 0 { "" } else { ", " })?;
                }
                if shards.len() > SHARDS_SHOWN {
                    write!(f, ", and {} more", shards.len() - SHARDS_SHOWN)?;
                }
                f.write_str("}")?;
            }
            Self::SingleDevice { device, .. } => write!(f, "device {device}")?,
        }

        match self.memory_kind() {
            MemoryKind::Device => Ok(()),
            MemoryKind::Host => f.write_str(" in host memory"),
        }
    }
}
