//! Regions and other facts as tables of text.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

use super::holding::{Holding, numbers};

/// The maximum length of a title in characters. Those of thousands of devices are cut.
const LONGEST_TITLE: usize = 200;

/// The maximum number of rows of a table without its heading. Further rows are only counted.
const MOST_ROWS: usize = 64;

/// Returns an array's regions with their holders: a table below a title.
pub(super) fn holding(holding: &Holding) -> String {
    let mut lines = vec![title(holding), String::new()];
    lines.extend(regions(holding));
    if !holding.empty.is_empty() {
        lines.push(format!("nothing: {}", holders(holding, &holding.empty)));
    }
    lines.join("\n")
}

/// Formats rows of cells as lines; the first row is the heading. Columns in `numeric` are aligned
/// right.
pub(super) fn table(rows: &[Vec<String>], numeric: &[usize]) -> Vec<String> {
    let mut table = Table::new();
    table.load_style(NOTHING).add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if numeric.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

/// Formats rows as [`table`] does, up to `MOST_ROWS` below the heading. Further rows are only
/// counted.
pub(super) fn long_table(mut rows: Vec<Vec<String>>, numeric: &[usize]) -> Vec<String> {
    let more = rows.len().saturating_sub(MOST_ROWS + 1);
    rows.truncate(MOST_ROWS + 1);
    let mut lines = table(&rows, numeric);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines
}

fn title(holding: &Holding) -> String {
    match holding.title.char_indices().nth(LONGEST_TITLE) {
        Some((end, _)) => format!("{}…", &holding.title[..end]),
        None => holding.title.clone(),
    }
}

fn holders(holding: &Holding, sorted: &[u32]) -> String {
    let plural = if sorted.len() == 1 { "" } else { "s" };
    format!("{}{plural} {}", holding.holder, numbers(sorted))
}

fn regions(holding: &Holding) -> Vec<String> {
    if holding.tiles.is_empty() {
        return Vec::new();
    }
    let mut rows = vec![["region", "shape", holding.holder].map(str::to_owned).to_vec()];
    rows.extend(holding.tiles.iter().map(|tile| {
        let (region, shape) = (tile.region.to_string(), format!("{:?}", tile.region.shape()));
        vec![region, shape, numbers(&tile.holders)]
    }));
    long_table(rows, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_any_length_are_shown() {
        let rows = [["a".repeat(70_000), "b".to_owned()], ["c".to_owned(), "d".to_owned()]];
        let lines = table(&rows.map(|row| row.to_vec()), &[]);
        assert_eq!(lines.concat().matches('a').count(), 70_000);
    }
}
