//! The regions of an array and their holders: the content of the drawings.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd_layout::region::Region;
use mpmd_layout::sharding::Layout;

/// The regions of an array and their holders. A holder is a device or a rank.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    /// A heading that describes the array and its sharding.
    pub(super) title: String,
    /// The word for a holder: `device` or `rank`.
    pub(super) holder: &'static str,
    shape: Vec<usize>,
    /// The regions with elements, ordered by their first corner.
    pub(super) tiles: Vec<Tile>,
    /// The holders of empty regions, ascending.
    pub(super) empty: Vec<u32>,
}

/// A region and its holders, ascending.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    pub(super) region: Region,
    pub(super) holders: Vec<u32>,
}

/// A holding of an array of at most two dimensions, as a grid. The grid lines are the starts and
/// ends of all regions. An array of one dimension is one row.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    /// The array indices at which the rows of the grid start, and the end of the last one.
    pub(super) rows: Vec<usize>,
    /// The array indices at which the columns of the grid start, and the end of the last one.
    pub(super) columns: Vec<usize>,
    /// For each tile the (rows, columns) of the grid that it covers, as ranges of indices.
    pub(super) spans: Vec<(Range<usize>, Range<usize>)>,
    /// The index of the tile at each (row, column); `None` where no tile is.
    pub(super) tile_at: Vec<Vec<Option<usize>>>,
    /// True if the array has a dimension for the rows; false if there is only one row.
    pub(super) has_rows: bool,
    /// True if the array has a dimension for the columns; false if there is only one column.
    pub(super) has_columns: bool,
}

impl Holding {
    /// Collects the regions of an array of `shape` from (holder, region) pairs. The regions of two
    /// holders must be equal or disjoint.
    pub(super) fn new(
        title: String,
        holder: &'static str,
        shape: &[usize],
        held: impl Iterator<Item = (usize, Region)>,
    ) -> Self {
        let mut by_region: BTreeMap<Region, Vec<u32>> = BTreeMap::new();
        let mut empty = Vec::new();
        for (holder, region) in held {
            let holders =
                if region.is_empty() { &mut empty } else { by_region.entry(region).or_default() };
            holders.push(holder as u32);
        }
        empty.sort_unstable();
        let tile = |(region, mut holders): (Region, Vec<u32>)| {
            holders.sort_unstable();
            Tile { region, holders }
        };
        let tiles = by_region.into_iter().map(tile).collect();
        Self { title, holder, shape: shape.to_vec(), tiles, empty }
    }

    /// Collects the regions of the devices of a layout. `holder` is the word for a device.
    pub(super) fn of_layout(title: String, holder: &'static str, layout: &Layout) -> Self {
        let held = layout.iter().map(|(device, region)| (device.0 as usize, region.clone()));
        Self::new(title, holder, layout.shape(), held)
    }

    /// Returns the grid, or `None` if the array has more than two dimensions or no elements.
    pub(super) fn grid(&self) -> Option<Grid> {
        if self.shape.len() > 2 || self.tiles.is_empty() {
            return None;
        }
        let ndim = self.shape.len();
        let (has_rows, has_columns) = (ndim == 2, ndim > 0);
        let rows_of = |tile: &Tile| if has_rows { tile.region.range(0) } else { 0..1 };
        let columns_of = |tile: &Tile| if has_columns { tile.region.range(ndim - 1) } else { 0..1 };
        let (rows, columns) =
            (cuts(self.tiles.iter().map(rows_of)), cuts(self.tiles.iter().map(columns_of)));
        let place = |cuts: &[usize], range: Range<usize>| {
            cuts.partition_point(|cut| *cut < range.start)
                ..cuts.partition_point(|cut| *cut < range.end)
        };
        let spans: Vec<_> = self
            .tiles
            .iter()
            .map(|tile| (place(&rows, rows_of(tile)), place(&columns, columns_of(tile))))
            .collect();
        let mut tile_at = vec![vec![None; columns.len() - 1]; rows.len() - 1];
        for (tile, (rows, columns)) in spans.iter().enumerate() {
            tile_at[rows.clone()].iter_mut().for_each(|row| row[columns.clone()].fill(Some(tile)));
        }
        Some(Grid { rows, columns, spans, tile_at, has_rows, has_columns })
    }
}

/// Formats ascending numbers, with runs of three and more as ranges, as `0-3, 8`.
pub(super) fn numbers(sorted: &[u32]) -> String {
    let mut texts = Vec::new();
    let mut rest = sorted;
    while let Some(first) = rest.first() {
        let run = rest
            .iter()
            .zip(u64::from(*first)..)
            .take_while(|(n, next)| u64::from(**n) == *next)
            .count();
        // A run of two is written as two numbers.
        let run = if run == 2 { 1 } else { run };
        texts.push(if run == 1 { first.to_string() } else { format!("{first}-{}", rest[run - 1]) });
        rest = &rest[run..];
    }
    texts.join(", ")
}

/// Returns all starts and ends of the ranges, ascending, without duplicates.
fn cuts(ranges: impl Iterator<Item = Range<usize>>) -> Vec<usize> {
    let mut cuts: Vec<usize> = ranges.flat_map(|range| [range.start, range.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_three_and_more_are_ranges() {
        assert_eq!(numbers(&[]), "");
        assert_eq!(numbers(&[0, 1, 2, 3, 5, 7, 8, 10, 11, 12]), "0-3, 5, 7, 8, 10-12");
        assert_eq!(numbers(&[u32::MAX - 2, u32::MAX - 1, u32::MAX]), "4294967293-4294967295");
    }

    #[test]
    fn grids_are_cut_where_regions_start_or_end() {
        let region = |rows: Range<usize>, columns: Range<usize>| Region::new(vec![rows, columns]);
        let held = [
            (4, region(0..2, 0..6)),
            (1, region(2..4, 0..3)),
            (0, region(2..4, 3..6)),
            (7, region(4..4, 0..6)),
            (2, region(0..2, 0..6)),
        ];
        let holding = Holding::new("x".into(), "device", &[4, 6], held.into_iter());
        assert_eq!(holding.empty, [7]);
        assert_eq!(holding.tiles[0].holders, [2, 4]);
        let grid = holding.grid().unwrap();
        assert_eq!((grid.rows, grid.columns), (vec![0, 2, 4], vec![0, 3, 6]));
        assert_eq!(grid.tile_at, [[Some(0), Some(0)], [Some(1), Some(2)]]);
        assert_eq!(grid.spans[0], (0..1, 0..2));
    }

    #[test]
    fn only_nonempty_arrays_up_to_2d_have_a_grid() {
        let grid = |shape: &[usize]| {
            Holding::new(String::new(), "device", shape, [(0, Region::full(shape))].into_iter())
                .grid()
        };
        assert!(grid(&[]).is_some() && grid(&[3]).is_some() && grid(&[3, 4]).is_some());
        assert!(grid(&[0, 4]).is_none() && grid(&[2, 2, 2]).is_none());
    }
}
