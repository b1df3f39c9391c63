//! `mpmd plan chunk`: front-loaded chunks of a dimension, by rank.

use mpmd_layout::sharding::chunk_by_rank;

use super::field::{Field, Malformed};
use super::json_text;
use super::placement::read_placements;
use super::refusal::CaseRefusal;

/// The case `{shape, dim, placements, names?, world?}`, read and not yet checked. Placements are
/// ranks.
#[derive(Debug)]
pub(super) struct ChunkCase {
    shape: Vec<usize>,
    dim: isize,
    placements: Vec<usize>,
    world: Option<usize>,
}

impl ChunkCase {
    /// Names of the fields of a case and of its answer.
    pub(super) const FIELDS: [&str; 8] = [
        "shape",
        "dim",
        "placements",
        "names",
        "world",
        "offsets_by_rank",
        "sizes_by_rank",
        "ranks",
    ];

    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        let placements = read_placements(field)?;
        Ok(Self {
            shape: field.get("shape")?.list(Field::count)?,
            dim: field.get("dim")?.integer()?,
            placements: placements.into_iter().map(|(_, rank)| rank).collect(),
            world: field
                .find("world")?
                .map(|world| world.count())
                .transpose()?,
        })
    }

    pub(super) fn answer(self) -> Result<String, CaseRefusal> {
        let chunks = chunk_by_rank(&self.shape, self.dim, &self.placements, self.world)?;
        Ok(json_text(&chunks))
    }
}
