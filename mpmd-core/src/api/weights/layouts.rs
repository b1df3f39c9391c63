//! The layouts of the two ends of a link: the leaves that a publisher offers, those that a
//! subscriber wants, and the pieces of leaves that travel.

use std::ops::Range;

use mpmd_layout::aval::{AvalError, DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Sharding, ShardingError};
use mpmd_layout::topology::DeviceId;
use serde::{Deserialize, Serialize};

/// The reason why the leaves of the two ends of a link do not fit each other.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum LayoutMismatch {
    /// The sharding of a leaf that the subscriber wants does not fit the leaf's shape.
    #[error("{leaf}: {why}")]
    Sharding { leaf: String, why: ShardingError },
    /// The publisher or the subscriber sent an impossible shape.
    #[error("{leaf}: {why}")]
    Shape { leaf: String, why: AvalError },
    /// A part of a wanted leaf has an impossible shape.
    #[error("{0}")]
    PartShape(AvalError),
    /// A shard is on a device outside its own end of the link, or its region is outside its leaf.
    #[error(
        "{leaf}: {region} on device {device} of the link is no shard of {dtype}{shape:?} on its \
         devices {devices:?}"
    )]
    Shard {
        leaf: String,
        region: Region,
        device: u32,
        dtype: DType,
        shape: Vec<usize>,
        devices: Range<u32>,
    },
    /// The publisher has no leaf of this name. `known` has some names that it offers.
    #[error("{leaf}: the publisher has no leaf {from}; it has {} and others", .known.join(", "))]
    NotOffered {
        leaf: String,
        from: String,
        known: Vec<String>,
    },
    /// The publisher's leaf has another dtype than the wanted one.
    #[error(
        "{leaf}: {wanted} is wanted, and {from} is published as {found}: give both ends one type, \
         as with --publish-as {wanted} of finetune or --dtype {found} of serve"
    )]
    OtherType {
        leaf: String,
        from: String,
        wanted: DType,
        found: DType,
    },
    /// The publisher's leaf has another shape than the wanted one.
    #[error("{leaf}: {wanted:?} is wanted, and {from} is published with the shape {found:?}")]
    OtherShape {
        leaf: String,
        from: String,
        wanted: Vec<usize>,
        found: Vec<usize>,
    },
    /// A part refers to a region that the publisher's leaf does not have.
    #[error("{leaf}: {region} is no region of {from}")]
    Region {
        leaf: String,
        region: Region,
        from: String,
    },
    /// A part, placed at its start indices, extends beyond the wanted leaf.
    #[error("{leaf}: {region} of {from} does not fit at {at:?}")]
    Place {
        leaf: String,
        region: Region,
        from: String,
        at: Vec<usize>,
    },
    /// Two parts of a wanted leaf overlap.
    #[error("{leaf}: its parts at {first} and {second} overlap")]
    Overlap {
        leaf: String,
        first: Region,
        second: Region,
    },
    /// The parts leave elements of the wanted leaf undefined.
    #[error("{leaf}: its parts have {found} elements, and {wanted} are wanted")]
    Unfilled {
        leaf: String,
        found: usize,
        wanted: usize,
    },
    /// No device of the subscriber holds a shard of the wanted leaf.
    #[error("{leaf}: it is wanted on no device")]
    NoDevice { leaf: String },
    /// Some regions of the wanted leaf have more replicas than others.
    #[error("{leaf}: its regions have unequal numbers of replicas")]
    UnequalReplicas { leaf: String },
}

/// A leaf that a publisher offers. Device numbers are those of the link.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct OfferedLeaf {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// The regions of the leaf, each with the first device that holds it.
    pub(super) shards: Vec<(u32, Region)>,
}

/// A leaf that a subscriber wants: its name, shape and sharding in the subscriber's job, and its
/// parts.
///
/// By default it is the publisher's leaf of the same name. A leaf with parts is composed of regions
/// of the publisher's leaves. For instance, a query projection may be some rows of a fused
/// projection, or a fused projection may consist of three leaves.
#[derive(Clone, Debug)]
pub struct WantedLeaf {
    pub(super) name: String,
    pub(super) aval: ShapedArray,
    pub(super) sharding: Sharding,
    pub(super) parts: Vec<LeafPart>,
}

/// A region of a publisher's leaf, and its position in a subscriber's leaf.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LeafPart {
    /// The name of the publisher's leaf.
    pub from: String,
    /// The region of the publisher's leaf; `None` for the whole leaf.
    pub region: Option<Region>,
    /// The indices in the subscriber's leaf at which the region begins.
    pub at: Vec<usize>,
}

impl WantedLeaf {
    /// Creates a request for the publisher's leaf `name`, in this sharding over devices of this
    /// job. Shape and dtype must equal the publisher's.
    pub fn new(name: impl Into<String>, aval: ShapedArray, sharding: Sharding) -> Self {
        let name = name.into();
        let part = LeafPart {
            from: name.clone(),
            region: None,
            at: vec![0; aval.shape().len()],
        };
        Self {
            name,
            aval,
            sharding,
            parts: vec![part],
        }
    }

    /// Composes the leaf of regions of the publisher's leaves, in place of the publisher's leaf of
    /// the same name. The parts must fill the leaf without overlap.
    #[must_use]
    pub fn of(mut self, parts: Vec<LeafPart>) -> Self {
        self.parts = parts;
        self
    }

    /// Returns the name of the leaf.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape and dtype of the leaf.
    pub fn aval(&self) -> &ShapedArray {
        &self.aval
    }

    /// Returns the leaf in the form that is sent to the publisher. `number` returns the link's
    /// number of a device.
    ///
    /// # Errors
    ///
    /// If the sharding does not fit the shape.
    pub(super) fn told(
        &self,
        number: impl Fn(DeviceId) -> u32,
    ) -> Result<AskedLeaf, LayoutMismatch> {
        let layout = self.sharding.layout(self.aval.shape());
        let layout = layout.map_err(|why| LayoutMismatch::Sharding {
            leaf: self.name.clone(),
            why,
        })?;

        let shards = layout
            .iter()
            .map(|(device, region)| (number(device), region.clone()));
        Ok(AskedLeaf {
            name: self.name.clone(),
            shape: self.aval.shape().to_vec(),
            dtype: self.aval.dtype(),
            shards: shards.collect(),
            parts: self.parts.clone(),
        })
    }
}

/// A [`WantedLeaf`] in the form that is sent to the publisher. Device numbers are those of the
/// link.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct AskedLeaf {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) shards: Vec<(u32, Region)>,
    pub(super) parts: Vec<LeafPart>,
}

/// A region of a leaf that is transferred as an array of its own. The indices of `sources` and
/// `targets` count from the start of the piece.
#[derive(Clone, Debug)]
pub(super) struct LeafPiece {
    /// Index of the publisher's leaf. `to` is the index of the subscriber's leaf.
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) aval: ShapedArray,
    /// The shape of the publisher's leaf.
    pub(super) from_shape: Vec<usize>,
    /// Start indices of the piece in the publisher's leaf. `to_at` has those in the subscriber's
    /// leaf.
    pub(super) from_at: Vec<usize>,
    pub(super) to_at: Vec<usize>,
    /// The publisher's devices with their regions of the piece, each region once.
    pub(super) sources: Vec<(DeviceId, Region)>,
    /// The subscriber's devices with their regions of the piece. The first layer has each region
    /// once, further layers have replicas.
    pub(super) targets: Vec<Vec<(DeviceId, Region)>>,
}

/// Returns the pieces that are transferred from the publisher's to the subscriber's devices. The
/// result is the same on every process of a link.
///
/// # Errors
///
/// If a leaf is not offered, or its shape, dtype, shards or parts do not fit.
pub(super) fn pieces(
    offered: &[OfferedLeaf],
    publisher_devices: Range<u32>,
    asked: &[AskedLeaf],
    subscriber_devices: Range<u32>,
) -> Result<Vec<LeafPiece>, LayoutMismatch> {
    for OfferedLeaf {
        name,
        shape,
        dtype,
        shards,
    } in offered
    {
        check_told(name, shape, *dtype, shards, &publisher_devices)?;
    }
    for AskedLeaf {
        name,
        shape,
        dtype,
        shards,
        ..
    } in asked
    {
        check_told(name, shape, *dtype, shards, &subscriber_devices)?;
    }

    let mut pieces = Vec::new();
    for (to, leaf) in asked.iter().enumerate() {
        let mut filled = Vec::new();
        for part in &leaf.parts {
            let piece = piece(offered, to, leaf, part)?;
            let own = shifted(&Region::full(piece.aval.shape()), &piece.to_at, &[]);
            if let Some(other) = filled.iter().find(|other: &&Region| overlap(other, &own)) {
                return Err(LayoutMismatch::Overlap {
                    leaf: leaf.name.clone(),
                    first: other.clone(),
                    second: own,
                });
            }
            filled.push(own);
            if piece.aval.elements() > 0 {
                pieces.push(piece);
            }
        }

        let found: usize = filled.iter().map(Region::elements).sum();
        let wanted: usize = leaf.shape.iter().product();
        if found != wanted {
            return Err(LayoutMismatch::Unfilled {
                leaf: leaf.name.clone(),
                found,
                wanted,
            });
        }
    }
    Ok(pieces)
}

/// Checks the numbers of a leaf that another process has sent, because they are used as indices.
fn check_told(
    name: &str,
    shape: &[usize],
    dtype: DType,
    shards: &[(u32, Region)],
    devices: &Range<u32>,
) -> Result<(), LayoutMismatch> {
    ShapedArray::try_new(shape, dtype).map_err(|why| LayoutMismatch::Shape {
        leaf: name.to_owned(),
        why,
    })?;

    let full = Region::full(shape);
    let wrong = shards.iter().find(|(device, region)| {
        !devices.contains(device) || region.ndim() != full.ndim() || !full.contains(region)
    });
    match wrong {
        Some((device, region)) => Err(LayoutMismatch::Shard {
            leaf: name.to_owned(),
            region: region.clone(),
            device: *device,
            dtype,
            shape: shape.to_vec(),
            devices: devices.clone(),
        }),
        None => Ok(()),
    }
}

/// Returns the piece for one part of the wanted leaf `leaf`. `to` is the index of this leaf.
fn piece(
    offered: &[OfferedLeaf],
    to: usize,
    leaf: &AskedLeaf,
    part: &LeafPart,
) -> Result<LeafPiece, LayoutMismatch> {
    let AskedLeaf { name, shape, .. } = leaf;
    let from = find_offered(offered, leaf, part)?;
    let source = &offered[from];
    let region = part
        .region
        .clone()
        .unwrap_or_else(|| Region::full(&source.shape));
    let aval =
        ShapedArray::try_new(&region.shape(), leaf.dtype).map_err(LayoutMismatch::PartShape)?;
    if region.ndim() != source.shape.len() || !Region::full(&source.shape).contains(&region) {
        return Err(LayoutMismatch::Region {
            leaf: name.clone(),
            region,
            from: part.from.clone(),
        });
    }
    let placed = shifted(&Region::full(aval.shape()), &part.at, &[]);
    let fits = part.at.len() == shape.len()
        && placed.ndim() == shape.len()
        && placed.shape() == aval.shape()
        && Region::full(shape).contains(&placed);
    if !fits {
        return Err(LayoutMismatch::Place {
            leaf: name.clone(),
            region,
            from: part.from.clone(),
            at: part.at.clone(),
        });
    }

    let from_at: Vec<usize> = region.ranges().map(|range| range.start).collect();
    let sources = shards_within(&source.shards, &region, &from_at);
    let targets = layers(shards_within(&leaf.shards, &placed, &part.at));
    // A process without a device of the leaf has no part in it.
    if targets.is_empty() && aval.elements() > 0 {
        return Err(LayoutMismatch::NoDevice { leaf: name.clone() });
    }
    let mut others = targets.iter().skip(1);
    if others.any(|layer| layer.len() != targets[0].len()) {
        return Err(LayoutMismatch::UnequalReplicas { leaf: name.clone() });
    }

    Ok(LeafPiece {
        from,
        to,
        aval,
        from_shape: source.shape.clone(),
        from_at,
        to_at: part.at.clone(),
        sources,
        targets,
    })
}

/// Returns the index of the offered leaf to which a part refers. Fails if its dtype or shape does
/// not fit.
fn find_offered(
    offered: &[OfferedLeaf],
    leaf: &AskedLeaf,
    part: &LeafPart,
) -> Result<usize, LayoutMismatch> {
    let AskedLeaf {
        name, shape, dtype, ..
    } = leaf;
    let from = offered.iter().position(|offered| offered.name == part.from);
    let from = from.ok_or_else(|| {
        let some = offered.iter().take(3);
        LayoutMismatch::NotOffered {
            leaf: name.clone(),
            from: part.from.clone(),
            known: some.map(|one| one.name.clone()).collect(),
        }
    })?;

    let source = &offered[from];
    if source.dtype != *dtype {
        return Err(LayoutMismatch::OtherType {
            leaf: name.clone(),
            from: part.from.clone(),
            wanted: *dtype,
            found: source.dtype,
        });
    }
    if leaf.parts.len() == 1 && part.region.is_none() && source.shape != *shape {
        return Err(LayoutMismatch::OtherShape {
            leaf: name.clone(),
            from: part.from.clone(),
            wanted: shape.clone(),
            found: source.shape.clone(),
        });
    }
    Ok(from)
}

/// Intersects the shards with the region `all`. Returned regions count from `at`, the first indices
/// of `all`.
fn shards_within(shards: &[(u32, Region)], all: &Region, at: &[usize]) -> Vec<(DeviceId, Region)> {
    let mut within = Vec::new();
    for (device, shard) in shards {
        let common = shard.intersect(all).filter(|common| !common.is_empty());
        if let Some(common) = common {
            within.push((DeviceId(*device), shifted(&common, &[], at)));
        }
    }
    within
}

/// Divides shards into layers such that no layer has a region twice.
fn layers(shards: Vec<(DeviceId, Region)>) -> Vec<Vec<(DeviceId, Region)>> {
    let mut layers: Vec<Vec<(DeviceId, Region)>> = Vec::new();
    for (device, own) in shards {
        let mut free = layers.iter_mut();
        match free.find(|layer| layer.iter().all(|(_, other)| *other != own)) {
            Some(layer) => layer.push((device, own)),
            None => layers.push(vec![(device, own)]),
        }
    }
    layers
}

impl LeafPiece {
    /// Converts a region of the piece to indices of the publisher's leaf.
    pub(super) fn in_source(&self, region: &Region) -> Region {
        shifted(region, &self.from_at, &[])
    }

    /// Converts a region of the piece to indices of the subscriber's leaf.
    pub(super) fn in_target(&self, region: &Region) -> Region {
        shifted(region, &self.to_at, &[])
    }

    /// Returns the region of the piece that a target device gets; `None` if it gets none.
    pub(super) fn target_of(&self, device: DeviceId) -> Option<&Region> {
        let mut all = self.targets.iter().flatten();
        all.find(|(other, _)| *other == device)
            .map(|(_, region)| region)
    }
}

/// Moves a region: in each dimension, adds `plus` to its indices and subtracts `less`.
fn shifted(region: &Region, plus: &[usize], less: &[usize]) -> Region {
    let by = |offsets: &[usize], dim: usize| offsets.get(dim).copied().unwrap_or(0);
    let ranges = region.ranges().enumerate().map(|(dim, range)| {
        let plus = by(plus, dim);
        let less = by(less, dim);
        let shifted = |index: usize| index.saturating_add(plus).saturating_sub(less);
        shifted(range.start)..shifted(range.end)
    });
    Region::new(ranges.collect())
}

fn overlap(one: &Region, other: &Region) -> bool {
    one.intersect(other)
        .is_some_and(|common| !common.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn told_shards_are_on_devices_of_their_end_and_in_their_leaf() {
        let all = Region::full(&[4]);
        let part = LeafPart {
            from: "w".to_owned(),
            region: None,
            at: vec![0],
        };
        let found = |shape: &[usize], own: (u32, &Region), other: (u32, &Region)| {
            let (name, dtype) = ("w".to_owned(), DType::F32);
            let shards = vec![(own.0, own.1.clone())];
            let offered = OfferedLeaf {
                name: name.clone(),
                shape: shape.to_vec(),
                dtype,
                shards,
            };
            let (shards, parts) = (vec![(other.0, other.1.clone())], vec![part.clone()]);
            let asked = AskedLeaf {
                name,
                shape: shape.to_vec(),
                dtype,
                shards,
                parts,
            };
            pieces(&[offered], 0..2, &[asked], 2..3).map(|pieces| pieces.len())
        };
        assert_eq!(found(&[4], (1, &all), (2, &all)), Ok(1));
        for (from, to) in [(2, 2), (1, 1), (0, u32::MAX)] {
            let why = found(&[4], (from, &all), (to, &all))
                .unwrap_err()
                .to_string();
            assert!(why.contains("is no shard of f32[4]"), "{why}");
        }
        for region in [Region::full(&[5]), Region::full(&[]), Region::full(&[4, 1])] {
            assert!(found(&[4], (0, &region), (2, &all)).is_err());
            assert!(found(&[4], (0, &all), (2, &region)).is_err());
        }
        assert!(found(&[usize::MAX, 2], (0, &all), (2, &all)).is_err());
        let far = LeafPart {
            at: vec![usize::MAX],
            ..part.clone()
        };
        let (name, dtype, shards) = ("w".to_owned(), DType::F32, vec![(0, all.clone())]);
        let offered = OfferedLeaf {
            name: name.clone(),
            shape: vec![4],
            dtype,
            shards,
        };
        let asked = AskedLeaf {
            name,
            shape: vec![4],
            dtype,
            shards: vec![(2, all)],
            parts: vec![far],
        };
        let why = pieces(&[offered], 0..2, &[asked], 2..3)
            .unwrap_err()
            .to_string();
        assert!(why.contains("does not fit at"), "{why}");
    }
}
