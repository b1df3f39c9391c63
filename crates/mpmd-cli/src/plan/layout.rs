//! `mpmd plan layout`: the region of an array that each device holds.

use std::collections::BTreeMap;

use mpmd_base::DeviceId;
use mpmd_layout::region::Region;
use serde::Serialize;

use super::case::CaseSharding;
use super::field::{Field, Malformed};
use super::json_text;
use super::refusal::CaseRefusal;

/// The case `{sharding, shape}`, read and not yet checked.
#[derive(Debug)]
pub(super) struct LayoutCase {
    sharding: CaseSharding,
    shape: Vec<usize>,
}

#[derive(Serialize)]
struct LayoutJson<'a> {
    /// The region of each device, serialised in order of the device numbers: 2 before 10.
    regions: BTreeMap<DeviceId, &'a Region>,
    fully_replicated: bool,
}

impl LayoutCase {
    /// Names of the fields of a case and of its answer.
    pub(super) const FIELDS: [&str; 4] = ["sharding", "shape", "regions", "fully_replicated"];

    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            sharding: CaseSharding::read(&field.get("sharding")?)?,
            shape: field.get("shape")?.list(Field::count)?,
        })
    }

    pub(super) fn answer(self) -> Result<String, CaseRefusal> {
        let layout = self.sharding.sharding()?.layout(&self.shape)?;
        let regions = layout.iter().collect();
        Ok(json_text(&LayoutJson {
            regions,
            fully_replicated: layout.fully_replicated(),
        }))
    }
}
