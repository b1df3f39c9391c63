//! The shardings of cases, and their form as JSON.

use mpmd_base::DeviceId;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding, Spec, SpecEntry};
use mpmd_layout::topology::Mesh;
use serde::Serialize;
use serde_json::{Value, json};

use super::field::{Field, ID, Malformed};
use super::placement::read_placements;
use super::refusal::CaseRefusal;

/// A sharding in the JSON form of a case: one of the kinds below. `memory_kind` stands beside its
/// fields if it is not device memory. The form is checked, the values are not.
#[derive(Clone, Debug)]
pub(super) struct CaseSharding {
    kind: CaseKind,
    memory_kind: MemoryKind,
}

#[derive(Clone, Debug)]
enum CaseKind {
    /// A sharding over a mesh: `{mesh: {axis_names, shape, device_ids}, spec, unreduced?}`.
    Named {
        mesh: CaseMesh,
        spec: Spec,
        unreduced: Vec<String>,
    },
    /// Chunks of a dimension on devices, in order: `{chunk: {dim, placements, names?}}`.
    Chunk {
        dim: isize,
        placements: Vec<DeviceId>,
    },
    /// Shards as (device, bounds by dimension): `{shards: [{device, region: [[start, end], …]},
    /// …]}`.
    Shards(Vec<(DeviceId, Vec<(usize, usize)>)>),
    /// All of the array on one device: `{device}`.
    Device(DeviceId),
}

/// A mesh of a case. Its values are not checked.
#[derive(Clone, Debug)]
struct CaseMesh {
    axis_names: Vec<String>,
    shape: Vec<usize>,
    device_ids: Vec<DeviceId>,
}

/// A sharding over a mesh, in the form of its JSON.
#[derive(Debug, Serialize)]
pub(super) struct NamedJson {
    mesh: MeshJson,
    spec: Vec<Value>,
    /// Absent for device memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_kind: Option<&'static str>,
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

        let known: &[&str];
        let kind = match (mesh, chunk, shards, device) {
            (Some(mesh), None, None, None) => {
                known = &["mesh", "spec", "unreduced", "memory_kind"];
                read_named(field, &mesh)?
            }
            (None, Some(chunk), None, None) => {
                known = &["chunk", "memory_kind"];
                read_chunk(&chunk)?
            }
            (None, None, Some(shards), None) => {
                known = &["shards", "memory_kind"];
                CaseKind::Shards(shards.list(read_shard)?)
            }
            (None, None, None, Some(device)) => {
                known = &["device", "memory_kind"];
                CaseKind::Device(device_id(&device)?)
            }
            _ => {
                let known = "a sharding has one of the fields mesh, chunk, shards, device";
                return Err(field.malformed(known.into()));
            }
        };

        field.only(known)?;
        let memory_kind = field
            .find("memory_kind")?
            .map(|kind| read_memory_kind(&kind));
        Ok(Self {
            kind,
            memory_kind: memory_kind.transpose()?.unwrap_or_default(),
        })
    }

    /// Returns the sharding, or the reason why its values are invalid.
    pub(super) fn sharding(&self) -> Result<Sharding, CaseRefusal> {
        let sharding = match &self.kind {
            CaseKind::Named {
                mesh,
                spec,
                unreduced,
            } => {
                let named = Sharding::named(mesh.mesh()?, spec.clone(), MemoryKind::Device);
                let axes: Vec<&str> = unreduced.iter().map(String::as_str).collect();
                if axes.is_empty() {
                    named
                } else {
                    named.unreduced(&axes)?
                }
            }
            CaseKind::Chunk { dim, placements } => Sharding::chunk(*dim, placements.clone())?,
            CaseKind::Shards(shards) => {
                let shard = |(device, bounds): &(DeviceId, Vec<(usize, usize)>)| {
                    let region = Region::try_from(bounds.clone()).map_err(|error| {
                        CaseRefusal::new(
                            "region",
                            format!("device {device} has {}: {error}", bounds_text(bounds)),
                        )
                    })?;
                    Ok((*device, region))
                };
                Sharding::enumerated(
                    shards
                        .iter()
                        .map(shard)
                        .collect::<Result<_, CaseRefusal>>()?,
                )?
            }
            CaseKind::Device(device) => Sharding::single_device(*device),
        };

        Ok(sharding.with_memory_kind(self.memory_kind))
    }
}

fn read_named(field: &Field<'_>, mesh: &Field<'_>) -> Result<CaseKind, Malformed> {
    let unreduced = field
        .find("unreduced")?
        .map(|axes| axes.list(Field::text))
        .transpose()?;
    Ok(CaseKind::Named {
        mesh: CaseMesh::read(mesh)?,
        spec: read_spec(&field.get("spec")?)?,
        unreduced: unreduced.unwrap_or_default(),
    })
}

fn read_chunk(chunk: &Field<'_>) -> Result<CaseKind, Malformed> {
    chunk.only(&["dim", "placements", "names"])?;
    let placements = read_placements(chunk)?;
    let devices = placements.into_iter().map(|(field, number)| {
        u32::try_from(number)
            .map(DeviceId)
            .map_err(|_| field.expected(ID))
    });
    let placements = devices.collect::<Result<_, _>>()?;
    Ok(CaseKind::Chunk {
        dim: chunk.get("dim")?.integer()?,
        placements,
    })
}

impl CaseMesh {
    fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        field.only(&["axis_names", "shape", "device_ids"])?;
        Ok(Self {
            axis_names: field.get("axis_names")?.list(Field::text)?,
            shape: field.get("shape")?.list(Field::count)?,
            device_ids: field.get("device_ids")?.list(device_id)?,
        })
    }

    fn mesh(&self) -> Result<Mesh, CaseRefusal> {
        let names = self.axis_names.len();
        let sizes = self.shape.len();
        if names != sizes {
            return Err(CaseRefusal::new(
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
        let mesh = sharding.mesh()?;
        let spec = sharding.spec()?;

        let mesh = MeshJson {
            axis_names: mesh.axis_names().to_vec(),
            shape: mesh.shape().to_vec(),
            device_ids: mesh.devices().to_vec(),
        };

        let memory_kind = match sharding.memory_kind() {
            MemoryKind::Device => None,
            MemoryKind::Host => Some("host"),
        };

        Some(Self {
            mesh,
            spec: spec_json(spec),
            memory_kind,
        })
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

/// Reads the mesh axes of one dimension from JSON: null for none, a text for one, a list of texts
/// for several. Fails for other values.
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
    Ok(Spec::new(
        entries.into_iter().map(SpecEntry::from).collect(),
    ))
}

fn read_shard(field: &Field<'_>) -> Result<(DeviceId, Vec<(usize, usize)>), Malformed> {
    let bounds = |field: &Field<'_>| {
        let [start, end] = field.pair()?;
        Ok((start.count()?, end.count()?))
    };
    field.only(&["device", "region"])?;
    Ok((
        device_id(&field.get("device")?)?,
        field.get("region")?.list(bounds)?,
    ))
}

/// Reads a memory kind by this framework's name or by JAX's name.
fn read_memory_kind(field: &Field<'_>) -> Result<MemoryKind, Malformed> {
    match field.as_text() {
        Some("device") => Ok(MemoryKind::Device),
        Some("host" | "pinned_host" | "unpinned_host") => Ok(MemoryKind::Host),
        _ => Err(field.expected("device, host, pinned_host or unpinned_host")),
    }
}

fn device_id(field: &Field<'_>) -> Result<DeviceId, Malformed> {
    field.id().map(DeviceId)
}

fn bounds_text(bounds: &[(usize, usize)]) -> String {
    let texts: Vec<String> = bounds
        .iter()
        .map(|(start, end)| format!("{start}..{end}"))
        .collect();
    format!("[{}]", texts.join(", "))
}
