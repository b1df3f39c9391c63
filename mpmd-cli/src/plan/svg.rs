//! Drawings as self-contained SVG documents: regions with the devices that hold them, coloured by
//! process, and the traffic over each class of links.

use std::fmt::Write as _;

use mpmd_base::bytes_text;

use super::holding::{Grid, Holding};
use super::reshard::ReshardAnswer;
use crate::draw::{escaped, shortened};

/// The minimum width of a document, in units of its `viewBox`, like all lengths here.
const WIDTH: f64 = 900.0;
const MARGIN: f64 = 24.0;

/// The height and spacing of chips. A chip is a small box with the number of a device or rank.
const CHIP_HEIGHT: f64 = 20.0;
const CHIP_GAP: f64 = 4.0;

/// The approximate width of a character at the text sizes used here.
const CHARACTER: f64 = 7.2;

/// The minimum height of a row of regions. `PANEL_HEIGHT` is the minimum height of all rows
/// together.
const ROW: f64 = 34.0;
const PANEL_HEIGHT: f64 = 220.0;

/// The maximum number of rows of a legend or a list. Further rows are only counted.
const MOST_ROWS: usize = 24;

/// Colours of processes, reused from the start: (fill, line) in the light theme, then in the dark
/// theme.
const COLOURS: [[&str; 4]; 8] = [
    ["#dbeafe", "#2563eb", "#173057", "#6aa5ff"],
    ["#fde7d3", "#c2570c", "#4a2a10", "#f0a05a"],
    ["#dcfce7", "#15803d", "#12351f", "#5fcf86"],
    ["#f3e8ff", "#7e22ce", "#35184f", "#c08bf5"],
    ["#fee2e2", "#b91c1c", "#4a1717", "#f28b8b"],
    ["#fef3c7", "#a16207", "#40300c", "#e3bd4f"],
    ["#cffafe", "#0e7490", "#0d3640", "#57c7dd"],
    ["#e5e7eb", "#4b5563", "#2a323c", "#a3adba"],
];

/// The font of a document, as attributes.
const FONT: &str = r#"font-family="ui-sans-serif, system-ui, sans-serif" font-size="13""#;

/// The style rules of the light theme, and those that replace them in the dark theme. The colours
/// of processes follow them.
const LIGHT: &str = ".bg{fill:#ffffff}.t{fill:#1f2933}.m{fill:#6b7785}\
    .tile{fill:#f6f8fa;stroke:#8d99a6}.bar{fill:#8fa3b8}\
    .arrow{stroke:#1f2933;fill:none;stroke-width:1.6}";
const DARK: &str = ".bg{fill:#0f1720}.t{fill:#e6ebf1}.m{fill:#93a1b0}\
    .tile{fill:#16212c;stroke:#5d6b7a}.bar{fill:#52677c}.arrow{stroke:#e6ebf1}";

/// An SVG document under construction. It grows downwards from `bottom`.
struct Page {
    body: String,
    width: f64,
    bottom: f64,
}

/// Returns an SVG document that shows the regions of an array and their holders.
pub(super) fn one(holding: &Holding) -> String {
    let width = panel_width(holding).max(WIDTH - 2.0 * MARGIN);
    let mut page = Page::new(width + 2.0 * MARGIN);
    page.line(&holding.title, "t", 600);
    page.bottom = page.panel(holding, MARGIN, page.bottom + 8.0, width, &|_| 0);
    page.finish()
}

/// Returns an SVG document that shows the source and destination of a plan, and its traffic.
pub(super) fn reshard(found: &ReshardAnswer) -> String {
    const BETWEEN: f64 = 64.0;
    let least = (WIDTH - 2.0 * MARGIN - BETWEEN) / 2.0;
    let widths = [&found.src, &found.dst].map(|holding| panel_width(holding).max(least));
    let mut page = Page::new(widths[0] + BETWEEN + widths[1] + 2.0 * MARGIN);
    page.line(&found.headline(), "t", 600);
    page.line(&found.src.title, "m", 400);
    page.line(&found.dst.title, "m", 400);
    let (top, right) = (page.bottom + 12.0, MARGIN + widths[0] + BETWEEN);
    let process = |device: u32| found.job.place(mpmd_base::DeviceId(device));
    let left_bottom = page.panel(&found.src, MARGIN, top, widths[0], &process);
    let right_bottom = page.panel(&found.dst, right, top, widths[1], &process);
    // Between the panels, halfway down the shorter one.
    let (arrow, middle) =
        (MARGIN + widths[0] + 16.0, (top + 20.0 + left_bottom.min(right_bottom)) / 2.0);
    let _ = writeln!(
        page.body,
        r#"<path class="arrow" d="M{arrow:.1} {middle:.1}h{:.1}m-7 -5l7 5l-7 5"/>"#,
        BETWEEN - 28.0
    );
    page.bottom = left_bottom.max(right_bottom);
    page.legend(found);
    page.links(found);
    page.finish()
}

impl Page {
    fn new(width: f64) -> Self {
        Self { body: String::new(), width: width.max(WIDTH), bottom: MARGIN - 8.0 }
    }

    /// Adds a line of text at the bottom, cut to the width of the page.
    fn line(&mut self, text: &str, class: &str, weight: u32) {
        self.bottom += 22.0;
        let fits = ((self.width - 2.0 * MARGIN) / CHARACTER) as usize;
        let text = shortened(text, fits);
        self.text(MARGIN, self.bottom, &text, class, "start", weight);
    }

    fn text(&mut self, x: f64, y: f64, text: &str, class: &str, anchor: &str, weight: u32) {
        let text = escaped(text);
        let _ = write!(self.body, r#"<text class="{class}" x="{x:.1}" y="{y:.1}" "#);
        let _ =
            writeln!(self.body, r#"text-anchor="{anchor}" font-weight="{weight}">{text}</text>"#);
    }

    /// Draws a rectangle of a CSS class, such as that of a process's colour, with corners of radius
    /// `rounded`.
    fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str, rounded: f64) {
        let _ = write!(self.body, r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" "#);
        let _ = writeln!(self.body, r#"width="{width:.1}" height="{height:.1}" rx="{rounded}"/>"#);
    }

    /// Draws the regions of an array and their holders at this place. `process` returns the place
    /// of a holder's process. Returns the y coordinate of the lower end.
    fn panel(
        &mut self,
        holding: &Holding,
        x: f64,
        y: f64,
        width: f64,
        process: &dyn Fn(u32) -> usize,
    ) -> f64 {
        let mut bottom = match holding.grid() {
            Some(grid) => self.grid(holding, &grid, [x, y, width], process),
            None => self.list(holding, [x, y, width], process),
        };
        if !holding.empty.is_empty() {
            let chips = Chips::new(&holding.empty, width);
            self.text(x, bottom + 22.0, "nothing:", "m", "start", 400);
            self.chips(&chips, &holding.empty, [x, bottom + 30.0], process);
            bottom += 30.0 + chips.height();
        }
        bottom
    }

    fn grid(
        &mut self,
        holding: &Holding,
        grid: &Grid,
        [x, y, width]: [f64; 3],
        process: &dyn Fn(u32) -> usize,
    ) -> f64 {
        let margin = row_margin(grid);
        let xs = places(&grid.columns, x + margin, width - margin, column_least(holding, grid));
        let ys = rows_of(holding, grid, &xs, y + 20.0);
        if grid.has_columns {
            let mut end = f64::MIN;
            for (cut, x) in grid.columns.iter().zip(&xs) {
                let half = cut.to_string().len() as f64 * CHARACTER / 2.0;
                // A number that would touch the previous one is left out.
                if x - half > end + 2.0 {
                    self.text(*x, y + 13.0, &cut.to_string(), "m", "middle", 400);
                    end = x + half;
                }
            }
        }
        if grid.has_rows {
            for (cut, y) in grid.rows.iter().zip(&ys) {
                self.text(x + margin - 6.0, y + 4.5, &cut.to_string(), "m", "end", 400);
            }
        }
        for (tile, (rows, columns)) in holding.tiles.iter().zip(&grid.spans) {
            let (left, top) = (xs[columns.start], ys[rows.start]);
            let (width, height) = (xs[columns.end] - left, ys[rows.end] - top);
            self.rect([left, top, width, height], &tile_class(&tile.holders, process), 0.0);
            let chips = Chips::new(&tile.holders, width - 2.0 * CHIP_GAP);
            let at = [left + (width - chips.width()) / 2.0, top + (height - chips.height()) / 2.0];
            self.chips(&chips, &tile.holders, at, process);
        }
        ys[ys.len() - 1]
    }

    /// Draws an entry for each region, one below the other: its bounds, and the chips of its
    /// holders. Returns the y coordinate of the lower end.
    fn list(
        &mut self,
        holding: &Holding,
        [x, y, width]: [f64; 3],
        process: &dyn Fn(u32) -> usize,
    ) -> f64 {
        let mut top = y;
        for tile in &holding.tiles {
            let chips = Chips::new(&tile.holders, width - 3.0 * CHIP_GAP);
            let height = 26.0 + chips.height() + CHIP_GAP;
            self.rect([x, top, width, height], &tile_class(&tile.holders, process), 4.0);
            let fits = ((width - 12.0) / CHARACTER) as usize;
            let bounds = shortened(&tile.region.to_string(), fits);
            self.text(x + 8.0, top + 18.0, &bounds, "t", "start", 400);
            self.chips(&chips, &tile.holders, [x + 8.0, top + 25.0], process);
            top += height + CHIP_GAP;
        }
        top
    }

    fn chips(
        &mut self,
        chips: &Chips,
        holders: &[u32],
        at: [f64; 2],
        process: &dyn Fn(u32) -> usize,
    ) {
        for (i, holder) in holders.iter().enumerate() {
            let (row, column) = (i / chips.columns, i % chips.columns);
            let (x, y) = (
                at[0] + column as f64 * (chips.chip + CHIP_GAP),
                at[1] + row as f64 * (CHIP_HEIGHT + CHIP_GAP),
            );
            let class = colour(process(*holder));
            self.rect([x, y, chips.chip, CHIP_HEIGHT], &class, 4.0);
            self.text(x + chips.chip / 2.0, y + 14.5, &holder.to_string(), "t", "middle", 400);
        }
    }

    /// Draws the colour of each process, with its host and devices.
    fn legend(&mut self, found: &ReshardAnswer) {
        let processes = found.job.processes();
        self.bottom += 18.0;
        for (place, (process, host)) in processes.iter().enumerate().take(MOST_ROWS) {
            self.bottom += 22.0;
            let class = colour(place);
            self.rect([MARGIN, self.bottom - 12.0, 16.0, 14.0], &class, 3.0);
            let text =
                format!("process {process} on host {host}: devices {}", found.devices_text(place));
            let text = shortened(&text, ((self.width - 2.0 * MARGIN - 26.0) / CHARACTER) as usize);
            self.text(MARGIN + 26.0, self.bottom, &text, "t", "start", 400);
        }
        self.more(processes.len(), "processes");
    }

    /// Draws the traffic over each class of links, and between each pair of processes.
    fn links(&mut self, found: &ReshardAnswer) {
        // One scale for both lists: no pair has more than its class.
        let most =
            found.by_class().iter().map(|(_, traffic)| traffic.bytes).max().unwrap_or(0).max(1);
        self.bottom += 20.0;
        for (class, traffic) in found.by_class() {
            let share = traffic.bytes as f64 / most as f64;
            self.amount(&class.to_string(), share, traffic.pieces, traffic.bytes);
        }
        let pairs: Vec<_> =
            found.by_processes().into_iter().filter(|((from, to), _)| from != to).collect();
        self.bottom += 10.0;
        for ((from, to), traffic) in pairs.iter().take(MOST_ROWS) {
            let [from_number, to_number] = [from, to].map(|place| found.job.processes()[*place].0);
            let class = found.class_of(*from, *to);
            let text = format!("process {from_number} to {to_number}, {class}");
            self.amount(&text, traffic.bytes as f64 / most as f64, traffic.pieces, traffic.bytes);
        }
        self.more(pairs.len(), "pairs of processes");
    }

    /// Draws a line with a name, a bar and an amount. The bar takes `share` (0 to 1) of the room.
    fn amount(&mut self, name: &str, share: f64, pieces: usize, bytes: u64) {
        const NAME: f64 = 250.0;
        const AMOUNT: f64 = 200.0;
        self.bottom += 22.0;
        let (start, length) = (MARGIN + NAME, self.width - 2.0 * MARGIN - NAME - AMOUNT);
        self.text(MARGIN, self.bottom, name, "t", "start", 400);
        if share > 0.0 {
            self.rect([start, self.bottom - 11.0, (share * length).max(2.0), 13.0], "bar", 2.0);
        }
        let plural = if pieces == 1 { "" } else { "s" };
        let text = format!("{} in {pieces} piece{plural}", bytes_text(bytes));
        self.text(self.width - MARGIN, self.bottom, &text, "t", "end", 400);
    }

    fn more(&mut self, all: usize, noun: &str) {
        if all > MOST_ROWS {
            self.line(&format!("and {} more {noun}", all - MOST_ROWS), "m", 400);
        }
    }

    fn finish(self) -> String {
        let (width, height) = (self.width.ceil(), (self.bottom + MARGIN).ceil());
        let colours = |fill: usize, line: usize| {
            let rule = |(i, colours): (usize, &[&str; 4])| {
                format!(".p{i}{{fill:{};stroke:{}}}", colours[fill], colours[line])
            };
            COLOURS.iter().enumerate().map(rule).collect::<String>()
        };
        let (light, dark) = (colours(0, 1), colours(2, 3));
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>
<style>{LIGHT}{light}@media (prefers-color-scheme: dark){{{DARK}{dark}}}</style>
<rect class="bg" width="{width}" height="{height}" rx="8"/>
{}</svg>
"#,
            self.body
        )
    }
}

/// The arrangement of holders' chips in rows and columns. `chip` is the width of a chip.
struct Chips {
    chip: f64,
    columns: usize,
    rows: usize,
}

impl Chips {
    fn new(holders: &[u32], width: f64) -> Self {
        let chip = chip_width(holders);
        let fit = ((width + CHIP_GAP) / (chip + CHIP_GAP)) as usize;
        // Rows of equal length: eight chips are two rows of four, not a full row and a rest.
        let rows = holders.len().div_ceil(fit.clamp(1, holders.len().max(1)));
        let columns = holders.len().div_ceil(rows.max(1)).max(1);
        Self { chip, columns, rows }
    }

    fn width(&self) -> f64 {
        self.columns as f64 * (self.chip + CHIP_GAP) - CHIP_GAP
    }

    fn height(&self) -> f64 {
        self.rows as f64 * (CHIP_HEIGHT + CHIP_GAP) - CHIP_GAP
    }
}

/// Returns the CSS class for the colour of the process at `place`, an index. Colours repeat.
fn colour(place: usize) -> String {
    format!("p{}", place % COLOURS.len())
}

/// Returns the CSS class for the colour of the process of all holders, or `tile` if they are of
/// several processes.
fn tile_class(holders: &[u32], process: &dyn Fn(u32) -> usize) -> String {
    let mut places = holders.iter().map(|holder| process(*holder));
    let first = places.next();
    first.filter(|first| places.all(|place| place == *first)).map_or("tile".to_owned(), colour)
}

fn chip_width(holders: &[u32]) -> f64 {
    let digits = holders.iter().map(|holder| holder.to_string().len()).max().unwrap_or(1);
    (digits as f64 * CHARACTER + 10.0).max(24.0)
}

/// Returns the minimum width of a panel in which every chip has room; 0 if the array has no grid.
fn panel_width(holding: &Holding) -> f64 {
    let Some(grid) = holding.grid() else { return 0.0 };
    row_margin(&grid) + (grid.columns.len() - 1) as f64 * column_least(holding, &grid)
}

/// Returns the width of the column with the row numbers; 0 if the rows have none.
fn row_margin(grid: &Grid) -> f64 {
    let digits = grid.rows.iter().map(|row| row.to_string().len()).max().unwrap_or(0);
    if grid.has_rows { digits as f64 * CHARACTER + 10.0 } else { 0.0 }
}

fn column_least(holding: &Holding, grid: &Grid) -> f64 {
    let chip = holding.tiles.iter().map(|tile| chip_width(&tile.holders)).fold(0.0, f64::max);
    let numbers = grid.columns.iter().map(|cut| cut.to_string().len()).max().unwrap_or(0);
    (chip + 2.0 * CHIP_GAP).max((numbers + 1) as f64 * CHARACTER)
}

/// Returns the coordinates of the cuts within `width` from `start`. They are to scale if every part
/// then has at least the length `least`, else equally spaced.
fn places(cuts: &[usize], start: f64, width: f64, least: f64) -> Vec<f64> {
    let parts = cuts.len() - 1;
    let length = (cuts[parts] - cuts[0]) as f64;
    let smallest = cuts.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(1) as f64;
    let place = |(i, cut): (usize, &usize)| {
        if width * smallest / length >= least {
            start + width * (cut - cuts[0]) as f64 / length
        } else {
            start + width * i as f64 / parts as f64
        }
    };
    cuts.iter().enumerate().map(place).collect()
}

/// Returns the y coordinates of the row borders. Every row is high enough for its chips.
fn rows_of(holding: &Holding, grid: &Grid, xs: &[f64], start: f64) -> Vec<f64> {
    let parts = grid.rows.len() - 1;
    let mut least = ROW;
    for (tile, (rows, columns)) in holding.tiles.iter().zip(&grid.spans) {
        let chips = Chips::new(&tile.holders, xs[columns.end] - xs[columns.start] - 2.0 * CHIP_GAP);
        least = least.max((chips.height() + 2.0 * CHIP_GAP) / rows.len() as f64);
    }
    let few = if grid.has_rows { PANEL_HEIGHT } else { ROW };
    places(&grid.rows, start, few.max(least * parts as f64), least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_to_scale_if_there_is_room() {
        assert_eq!(places(&[0, 1, 4], 10.0, 100.0, 20.0), [10.0, 35.0, 110.0]);
        assert_eq!(places(&[0, 1, 4], 10.0, 100.0, 30.0), [10.0, 60.0, 110.0]);
        assert_eq!(places(&[3, 4], 0.0, 50.0, 60.0), [0.0, 50.0]);
    }

    #[test]
    fn chips_fill_rows_evenly() {
        let of = |count: u32, width| {
            let chips = Chips::new(&(0..count).collect::<Vec<_>>(), width);
            (chips.columns, chips.rows)
        };
        assert_eq!(
            [of(1, 10.0), of(8, 160.0), of(8, 1000.0), of(7, 30.0)],
            [(1, 1), (4, 2), (8, 1), (1, 7)]
        );
    }
}
