//! `mpmd plan chunk`: front-loaded chunks of a dimension, by rank.

use mpmd_layout::region::Region;
use mpmd_layout::sharding::{ChunkRanks, chunk_by_rank};

use super::field::{Field, Malformed};
use super::holding::Holding;
use super::placement::read_placements;
use super::refusal::Refusal;
use super::{Answer, json_text, tables};

/// The case `{shape, dim, placements, names?, world?}`, read and not yet checked. Placements are
/// ranks.
#[derive(Debug)]
pub(super) struct Case {
    shape: Vec<usize>,
    dim: isize,
    placements: Vec<usize>,
    world: Option<usize>,
}

#[derive(Debug)]
struct ChunkAnswer {
    case: Case,
    chunks: ChunkRanks,
}

impl Case {
    /// Fields of a case, and of its answer.
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
            world: field.find("world")?.map(|world| world.count()).transpose()?,
        })
    }

    pub(super) fn answer(self) -> Result<Box<dyn Answer>, Refusal> {
        let chunks = chunk_by_rank(&self.shape, self.dim, &self.placements, self.world)?;
        Ok(Box::new(ChunkAnswer { case: self, chunks }))
    }
}

impl ChunkAnswer {
    fn holding(&self) -> Holding {
        let Case { shape, dim, placements, .. } = &self.case;
        let title = format!("{shape:?}: chunks of dimension {dim} on ranks {placements:?}");
        let each = self.chunks.offsets_by_rank.iter().zip(&self.chunks.sizes_by_rank);
        let region = |(offsets, sizes): (&Vec<usize>, &Vec<usize>)| {
            offsets
                .iter()
                .zip(sizes)
                .map(|(offset, size)| (*offset, offset + size))
                .collect::<Region>()
        };
        Holding::new(title, "rank", each.map(region).enumerate())
    }
}

impl Answer for ChunkAnswer {
    fn json(&self) -> String {
        json_text(&self.chunks)
    }

    fn pretty(&self) -> String {
        tables::holding(&self.holding())
    }
}
