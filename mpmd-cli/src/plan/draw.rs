//! Drawings as text: boxes for arrays of at most two dimensions, tables for the rest.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

use super::holding::{Grid, Holding, numbers};

/// The maximum width of a drawing in characters; `HIGHEST` is that of its height in lines. A larger
/// drawing becomes a table.
const WIDEST: usize = 100;
const HIGHEST: usize = 65;

/// The maximum length of a title in characters. Those of thousands of devices are cut.
const LONGEST_TITLE: usize = 2 * WIDEST;

/// The maximum number of rows of a table without its heading. Further rows are only counted.
const MOST_ROWS: usize = 64;

/// The maximum length of a list of holders within a box, in characters.
const LONGEST_LIST: usize = 24;

/// The minimum width of a column in characters, without its borders.
const NARROWEST: usize = 5;

/// Returns a drawing of an array's regions with their holders: lines of text below a title.
pub(super) fn holding(holding: &Holding) -> String {
    let mut lines = vec![title(holding), String::new()];
    lines.extend(body(holding));
    lines.join("\n")
}

/// Returns the drawings of two arrays' regions: side by side if there is room, else one below the
/// other.
pub(super) fn beside(left: &Holding, right: &Holding) -> String {
    const GAP: usize = 6;
    let (left_lines, right_lines) = (body(left), body(right));
    let width = |lines: &[String]| lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let start = width(&left_lines) + GAP;
    let drawn = left.grid().is_some() && right.grid().is_some();
    if !drawn || start + width(&right_lines) > WIDEST {
        return format!("{}\n\n{}", holding(left), holding(right));
    }
    let mut lines = vec![title(left), title(right), String::new()];
    for i in 0..left_lines.len().max(right_lines.len()) {
        let [left, right] =
            [&left_lines, &right_lines].map(|lines| lines.get(i).map_or("", String::as_str));
        let pad = start - left.chars().count();
        lines.push(format!("{left}{}{right}", " ".repeat(pad)).trim_end().to_owned());
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

fn body(holding: &Holding) -> Vec<String> {
    let drawing = holding.grid().and_then(|grid| boxes(holding, &grid));
    let mut lines = drawing.unwrap_or_else(|| regions(holding));
    if !holding.empty.is_empty() {
        lines.push(format!("nothing: {}", holders(holding, &holding.empty)));
    }
    lines
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

/// Returns the lines of a drawing with a box for each region, or `None` if it would be larger than
/// `WIDEST` or `HIGHEST`.
fn boxes(holding: &Holding, grid: &Grid) -> Option<Vec<String>> {
    let (rows, columns) = (grid.rows.len() - 1, grid.columns.len() - 1);
    if 2 * rows + 2 > HIGHEST || columns * (NARROWEST + 1) > WIDEST {
        return None;
    }
    let labels: Vec<String> = holding.tiles.iter().map(|tile| label(&tile.holders)).collect();
    let starts = column_starts(grid, &labels);
    let margin = if grid.has_rows {
        grid.rows.iter().map(|row| row.to_string().len()).max()? + 3
    } else {
        2
    };
    let width = starts[columns] + 1;
    if margin + width > WIDEST {
        return None;
    }
    let mut canvas = vec![vec![' '; width]; 2 * rows + 1];
    let tile = |row: usize, column: usize| grid.tile_at.get(row)?.get(column).copied().flatten();
    // A line separates two different tiles. Outside of the array there is no tile.
    let left_of = |row: usize, column: usize| (column > 0).then(|| tile(row, column - 1)).flatten();
    let above = |row: usize, column: usize| (row > 0).then(|| tile(row - 1, column)).flatten();
    let vertical =
        |row: usize, column: usize| row < rows && left_of(row, column) != tile(row, column);
    let horizontal =
        |row: usize, column: usize| column < columns && above(row, column) != tile(row, column);
    for row in 0..=rows {
        for column in 0..=columns {
            let (y, x) = (2 * row, starts[column]);
            if horizontal(row, column) {
                canvas[y][x + 1..starts[column + 1]].fill('─');
            }
            if vertical(row, column) {
                canvas[y + 1][x] = '│';
            }
            let up = row > 0 && vertical(row - 1, column);
            let left = column > 0 && horizontal(row, column - 1);
            canvas[y][x] = corner(up, vertical(row, column), left, horizontal(row, column));
        }
    }
    for ((tile_rows, tile_columns), label) in grid.spans.iter().zip(&labels) {
        let y = tile_rows.start + tile_rows.end;
        let (from, to) = (starts[tile_columns.start] + 1, starts[tile_columns.end]);
        let x = from + (to - from).saturating_sub(label.chars().count()) / 2;
        canvas[y][x..].iter_mut().zip(label.chars()).for_each(|(cell, c)| *cell = c);
    }

    let mut lines = Vec::new();
    if grid.has_columns {
        let mut head = String::new();
        for (cut, start) in grid.columns.iter().zip(&starts) {
            head.push_str(&" ".repeat((margin + start).saturating_sub(head.len())));
            head.push_str(&cut.to_string());
        }
        lines.push(head);
    }
    for (y, line) in canvas.into_iter().enumerate() {
        let cut =
            if grid.has_rows && y % 2 == 0 { grid.rows[y / 2].to_string() } else { String::new() };
        let line: String = line.into_iter().collect();
        lines.push(format!("{cut:>width$} {line}", width = margin - 1));
    }
    Some(lines)
}

/// Returns the position of each column's left border, and of the last one's right border, in
/// characters. Every label of a tile and every number above fits.
fn column_starts(grid: &Grid, labels: &[String]) -> Vec<usize> {
    let columns = grid.columns.len() - 1;
    let mut widths: Vec<usize> =
        grid.columns[..columns].iter().map(|cut| cut.to_string().len().max(NARROWEST)).collect();
    let mut spans: Vec<_> = grid.spans.iter().map(|(_, columns)| columns).zip(labels).collect();
    // Narrow spans first: the widths that they need also count for the wide ones.
    spans.sort_by_key(|(columns, _)| columns.len());
    for (columns, label) in spans {
        let has = widths[columns.clone()].iter().sum::<usize>() + columns.len() - 1;
        let needs = label.chars().count() + 2;
        widths[columns.end - 1] += needs.saturating_sub(has);
    }
    let mut starts = vec![0];
    widths.iter().for_each(|width| starts.push(starts[starts.len() - 1] + width + 1));
    starts
}

fn label(holders: &[u32]) -> String {
    let all = numbers(holders);
    if all.len() <= LONGEST_LIST {
        return all;
    }
    let mut shown = 0;
    let text = |shown: usize| format!("{} +{}", numbers(&holders[..shown]), holders.len() - shown);
    while text(shown + 1).len() <= LONGEST_LIST {
        shown += 1;
    }
    text(shown.max(1))
}

fn corner(up: bool, down: bool, left: bool, right: bool) -> char {
    match (up, down, left, right) {
        (false, false, false, false) => ' ',
        (false, false, _, _) => '─',
        (_, _, false, false) => '│',
        (false, true, false, true) => '┌',
        (false, true, true, false) => '┐',
        (true, false, false, true) => '└',
        (true, false, true, false) => '┘',
        (true, true, false, true) => '├',
        (true, true, true, false) => '┤',
        (false, true, true, true) => '┬',
        (true, false, true, true) => '┴',
        (true, true, true, true) => '┼',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_layout::region::Region;

    #[test]
    fn cells_of_any_length_are_shown() {
        let rows = [["a".repeat(70_000), "b".to_owned()], ["c".to_owned(), "d".to_owned()]];
        let lines = table(&rows.map(|row| row.to_vec()), &[]);
        assert_eq!(lines.concat().matches('a').count(), 70_000);
    }

    fn drawn(shape: &[usize], held: &[(usize, &[(usize, usize)])]) -> String {
        let held = held
            .iter()
            .map(|(holder, bounds)| (*holder, bounds.iter().copied().collect::<Region>()));
        body(&Holding::new(String::new(), "device", shape, held)).join("\n")
    }

    #[test]
    fn boxes_of_irregular_tiles_join() {
        let text = drawn(
            &[6, 6],
            &[
                (0, &[(0, 2), (0, 4)]),
                (1, &[(0, 4), (4, 6)]),
                (10, &[(2, 6), (0, 2)]),
                (3, &[(2, 4), (2, 4)]),
                (4, &[(4, 6), (2, 6)]),
                (7, &[(6, 6), (0, 6)]),
            ],
        );
        let expected = [
            "    0     2     4     6",
            "  0 ┌───────────┬─────┐",
            "    │     0     │     │",
            "  2 ├─────┬─────┤  1  │",
            "    │     │  3  │     │",
            "  4 │ 10  ├─────┴─────┤",
            "    │     │     4     │",
            "  6 └─────┴───────────┘",
            "nothing: device 7",
        ];
        assert_eq!(text, expected.join("\n"));
    }

    #[test]
    fn vectors_are_a_row_and_scalars_a_box() {
        let text = drawn(&[8], &[(5, &[(0, 4)]), (1, &[(4, 8)]), (2, &[(4, 8)]), (3, &[(4, 8)])]);
        let expected = "  0     4     8\n  ┌─────┬─────┐\n  │  5  │ 1-3 │\n  └─────┴─────┘";
        assert_eq!(text, expected);
        assert_eq!(drawn(&[], &[(3, &[]), (8, &[])]), "  ┌──────┐\n  │ 3, 8 │\n  └──────┘");
    }

    #[test]
    fn long_lists_say_how_many_more() {
        let even: Vec<u32> = (0..40).map(|i| 2 * i).collect();
        assert_eq!(label(&even), "0, 2, 4, 6, 8, 10 +34");
        assert_eq!(label(&(0..4000).collect::<Vec<_>>()), "0-3999");
    }

    #[test]
    fn large_or_high_dimensional_arrays_are_tables() {
        let text =
            drawn(&[2, 2, 4], &[(1, &[(0, 2), (0, 2), (0, 2)]), (0, &[(0, 2), (0, 2), (2, 4)])]);
        assert_eq!(
            text,
            "region              shape      device\n\
             [0..2, 0..2, 0..2]  [2, 2, 2]  1\n\
             [0..2, 0..2, 2..4]  [2, 2, 2]  0"
        );
        let bounds: Vec<[(usize, usize); 1]> = (0..100).map(|i| [(i, i + 1)]).collect();
        let held: Vec<(usize, &[(usize, usize)])> =
            bounds.iter().enumerate().map(|(i, bounds)| (i, &bounds[..])).collect();
        let text = drawn(&[100], &held);
        assert!(text.starts_with("region") && text.ends_with("and 36 more"), "{text}");
        assert_eq!(
            drawn(&[0, 4], &[(0, &[(0, 0), (0, 4)]), (1, &[(0, 0), (0, 4)])]),
            "nothing: devices 0, 1"
        );
    }
}
