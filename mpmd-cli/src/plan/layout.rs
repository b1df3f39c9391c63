//! `mpmd plan layout`: the region of an array that each device holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use mpmd_base::DeviceId;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, Sharding};
use serde::Serialize;

use super::case::CaseSharding;
use super::field::{Field, Malformed};
use super::holding::Holding;
use super::refusal::Refusal;
use super::{Answer, json_text, tables};

/// The case `{sharding, shape}`, read and not yet checked.
#[derive(Debug)]
pub(super) struct Case {
    sharding: CaseSharding,
    shape: Vec<usize>,
}

#[derive(Debug)]
struct LayoutAnswer {
    sharding: Sharding,
    layout: Arc<Layout>,
}

#[derive(Serialize)]
struct Json<'a> {
    /// The region of each device, serialised in order of the device numbers: 2 before 10.
    regions: BTreeMap<DeviceId, &'a Region>,
    fully_replicated: bool,
}

impl Case {
    /// Fields of a case, and of its answer.
    pub(super) const FIELDS: [&str; 4] = ["sharding", "shape", "regions", "fully_replicated"];

    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            sharding: CaseSharding::read(&field.get("sharding")?)?,
            shape: field.get("shape")?.list(Field::count)?,
        })
    }

    pub(super) fn answer(self) -> Result<Box<dyn Answer>, Refusal> {
        let sharding = self.sharding.sharding()?;
        let layout = sharding.layout(&self.shape)?;
        Ok(Box::new(LayoutAnswer { sharding, layout }))
    }
}

impl LayoutAnswer {
    fn holding(&self) -> Holding {
        let title = format!("{:?}: {}", self.layout.shape(), self.sharding);
        Holding::of_layout(title, "device", &self.layout)
    }
}

impl Answer for LayoutAnswer {
    fn json(&self) -> String {
        let regions = self.layout.iter().collect();
        json_text(&Json { regions, fully_replicated: self.layout.fully_replicated() })
    }

    fn pretty(&self) -> String {
        tables::holding(&self.holding())
    }
}
