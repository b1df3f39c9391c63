//! The shardings of cases, and their form as JSON.

use mpmd_base::DeviceId;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use mpmd_layout::topology::Mesh;
use serde::Serialize;
use serde_json::{Value, json};

use super::field::{Field, Malformed};
use super::refusal::Refusal;

/// A sharding as a case has it. Its form as JSON is checked, its values are not.
#[derive(Clone, Debug)]
pub(super) enum CaseSharding {
    /// A sharding over a mesh: `{mesh: {axis_names, shape, device_ids}, spec, unreduced?}`.
    Named { mesh: CaseMesh, spec: Spec, unreduced: Vec<String> },
    /// Chunks of a dimension on devices, in order: `{chunk: {dim, placements}}`.
    Chunk { dim: isize, placements: Vec<DeviceId> },
    /// Shards as (device, bounds by dimension): `{shards: [{device, region: [[start, end], …]},
    /// …]}`.
    Shards(Vec<(DeviceId, Vec<(usize, usize)>)>),
    /// All of the array on one device: `{device}`.
    Device(DeviceId),
}

/// A mesh of a case. Its values are not checked.
#[derive(Clone, Debug)]
pub(super) struct CaseMesh {
    axis_names: Vec<String>,
    shape: Vec<usize>,
    device_ids: Vec<DeviceId>,
}

/// A sharding over a mesh, in the form of its JSON.
#[derive(Debug, Serialize)]
pub(super) struct NamedJson {
    mesh: MeshJson,
    spec: Vec<Value>,
}

#[derive(Debug, Serialize)]
struct MeshJson {
    axis_names: Vec<String>,
    shape: Vec<usize>,
    device_ids: Vec<DeviceId>,
}

impl CaseSharding {
    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        let [mesh, chunk, shards, device] = [
            field.find("mesh")?,
            field.find("chunk")?,
            field.find("shards")?,
            field.find("device")?,
        ];
        match (mesh, chunk, shards, device) {
            (Some(mesh), None, None, None) => {
                let unreduced =
                    field.find("unreduced")?.map(|axes| axes.list(Field::text)).transpose()?;
                let (mesh, spec) = (CaseMesh::read(&mesh)?, read_spec(&field.get("spec")?)?);
                Ok(Self::Named { mesh, spec, unreduced: unreduced.unwrap_or_default() })
            }
            (None, Some(chunk), None, None) => Ok(Self::Chunk {
                dim: chunk.get("dim")?.integer()?,
                placements: chunk.get("placements")?.list(device_id)?,
            }),
            (None, None, Some(shards), None) => shards.list(read_shard).map(Self::Shards),
            (None, None, None, Some(device)) => device_id(&device).map(Self::Device),
            _ => Err(field
                .malformed("a sharding has one of the fields mesh, chunk, shards, device".into())),
        }
    }

    /// Returns the sharding, or the reason why its values are invalid.
    pub(super) fn sharding(&self) -> Result<Sharding, Refusal> {
        Ok(match self {
            Self::Named { mesh, spec, unreduced } => {
                let named = Sharding::named(mesh.mesh()?, spec.clone(), MemoryKind::Device);
                let axes: Vec<&str> = unreduced.iter().map(String::as_str).collect();
                if axes.is_empty() { named } else { named.unreduced(&axes)? }
            }
            Self::Chunk { dim, placements } => Sharding::chunk(*dim, placements.clone())?,
            Self::Shards(shards) => {
                let shard = |(device, bounds): &(DeviceId, Vec<(usize, usize)>)| {
                    let region = Region::try_from(bounds.clone()).map_err(|error| {
                        Refusal::new(
                            "region",
                            format!("device {device} has {}: {error}", bounds_text(bounds)),
                        )
                    })?;
                    Ok((*device, region))
                };
                Sharding::enumerated(shards.iter().map(shard).collect::<Result<_, Refusal>>()?)?
            }
            Self::Device(device) => Sharding::single_device(*device),
        })
    }
}

impl CaseMesh {
    fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            axis_names: field.get("axis_names")?.list(Field::text)?,
            shape: field.get("shape")?.list(Field::count)?,
            device_ids: field.get("device_ids")?.list(device_id)?,
        })
    }

    fn mesh(&self) -> Result<Mesh, Refusal> {
        let (names, sizes) = (self.axis_names.len(), self.shape.len());
        if names != sizes {
            return Err(Refusal::new(
                "axis_count",
                format!("a mesh of {names} axes has {sizes} sizes"),
            ));
        }
        let names = self.axis_names.iter().map(String::as_str);
        let axes: Vec<(&str, usize)> = names.zip(self.shape.iter().copied()).collect();
        Ok(Mesh::new(&axes, self.device_ids.clone())?)
    }
}

impl NamedJson {
    /// Returns the mesh and spec of a sharding, or `None` if it has no mesh.
    pub(super) fn of(sharding: &Sharding) -> Option<Self> {
        let (mesh, spec) = (sharding.mesh()?, sharding.spec()?);
        let (axis_names, shape) = (mesh.axis_names().to_vec(), mesh.shape().to_vec());
        let mesh = MeshJson { axis_names, shape, device_ids: mesh.devices().to_vec() };
        Some(Self { mesh, spec: spec_json(spec) })
    }
}

/// Returns a spec as JSON. The entry of each dimension is null, an axis, or a list of axes.
pub(super) fn spec_json(spec: &Spec) -> Vec<Value> {
    let entry = |entry: &SpecEntry| match entry {
        SpecEntry::None => Value::Null,
        SpecEntry::Axis(axis) => json!(axis),
        SpecEntry::Axes(axes) => json!(axes),
    };
    spec.entries().iter().map(entry).collect()
}

/// Reads the axes of one dimension: null gives none, a text one, a list of texts all of them. Fails
/// for other values.
pub(super) fn read_axes(field: &Field<'_>) -> Result<Vec<String>, Malformed> {
    match field.as_text() {
        Some(axis) => Ok(vec![axis.to_owned()]),
        None if field.is_null() => Ok(Vec::new()),
        None if field.elements().is_some() => field.list(Field::text),
        None => Err(field.expected("null, an axis or a list of axes")),
    }
}

fn read_spec(field: &Field<'_>) -> Result<Spec, Malformed> {
    let entries = field.list(read_axes)?;
    Ok(Spec::new(entries.into_iter().map(SpecEntry::from).collect()))
}

fn read_shard(field: &Field<'_>) -> Result<(DeviceId, Vec<(usize, usize)>), Malformed> {
    let bounds = |field: &Field<'_>| {
        let [start, end] = field.pair()?;
        Ok((start.count()?, end.count()?))
    };
    Ok((device_id(&field.get("device")?)?, field.get("region")?.list(bounds)?))
}

fn device_id(field: &Field<'_>) -> Result<DeviceId, Malformed> {
    field.id().map(DeviceId)
}

fn bounds_text(bounds: &[(usize, usize)]) -> String {
    let texts: Vec<String> = bounds.iter().map(|(start, end)| format!("{start}..{end}")).collect();
    format!("[{}]", texts.join(", "))
}
