//! The drawing: a timeline as one self-contained SVG document, in light and dark colours.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use mpmd_schedule::timeline::{Bar, Row, Timeline};

use super::colour::{self, Theme};
use super::sums::{self, Class};
use super::{facts, text};

const WIDTH: f64 = 1000.0;
const MARGIN: f64 = 20.0;

/// The approximate width of a character at the text sizes used here, in units of the `viewBox`.
const CHARACTER: f64 = 6.3;

/// The widths of the columns at the right: `IDLE` of the idle share, and `MEMORY` of the memory.
const IDLE: f64 = 54.0;
const MEMORY: f64 = 104.0;

/// The limit on the height of all rows together. The height of one row stays between `LEAST_PITCH`
/// and `MOST_PITCH`.
const ROWS: f64 = 780.0;
const LEAST_PITCH: f64 = 12.0;
const MOST_PITCH: f64 = 46.0;

/// From this row height on, memory has its own strip below the bars.
const TALL: f64 = 34.0;

/// If bars are narrower than this on average, the drawing shows sums of them.
const NARROW: f64 = 3.5;

/// An SVG document under construction. It grows downwards.
struct Drawing<'a> {
    timeline: &'a Timeline,
    body: String,
    bottom: f64,
    /// The x coordinate of time 0. `length` is the width of the whole time.
    left: f64,
    length: f64,
    pitch: f64,
    chunks: usize,
    /// The width of the column for memory; 0 if no row has memory.
    memory: f64,
    /// True if bars are too narrow to be drawn one by one.
    is_summed: bool,
    /// The length of the stretches of time in which bars are summed, in the unit of the timeline.
    stretch: f64,
    /// The colours in use, for the style sheet.
    used: BTreeSet<Class>,
}

/// Returns a timeline as one SVG document.
pub(crate) fn svg(timeline: &Timeline) -> String {
    let rows = timeline.rows.len().max(1) as f64;
    let longest = timeline.rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let left = MARGIN + (longest as f64 * CHARACTER).clamp(24.0, 170.0) + 8.0;
    let pitch = (ROWS / rows).floor().clamp(LEAST_PITCH, MOST_PITCH);
    let unit = text::memory_unit(timeline);
    let peaks = timeline.rows.iter().filter_map(|row| row.peak());
    let memory = match peaks.map(|peak| text::memory(unit, peak).chars().count()).max() {
        None => 0.0,
        Some(longest) if pitch >= TALL => longest.max(4) as f64 * CHARACTER + 12.0,
        Some(_) => MEMORY,
    };
    let length = WIDTH - MARGIN - left - IDLE - memory;
    let mut drawing = Drawing {
        timeline,
        body: String::new(),
        bottom: MARGIN,
        left,
        length,
        pitch,
        chunks: facts::chunks(timeline),
        memory,
        is_summed: sums::mean(timeline) / timeline.end * length < NARROW,
        stretch: sums::stretch(timeline, 7.0 / length * timeline.end),
        used: BTreeSet::new(),
    };
    drawing.head();
    drawing.legend();
    drawing.axis();
    let top = drawing.bottom;
    for row in &timeline.rows {
        drawing.row(row);
    }
    drawing.marks(top);
    drawing.finish()
}

impl Drawing<'_> {
    fn x(&self, time: f64) -> f64 {
        let share = if self.timeline.end > 0.0 { time / self.timeline.end } else { 0.0 };
        self.left + self.length * share.clamp(0.0, 1.0)
    }

    fn text(&mut self, [x, y]: [f64; 2], text: &str, class: &str, anchor: &str) {
        let text = text::escaped(text);
        let anchor =
            if anchor == "start" { String::new() } else { format!(r#" text-anchor="{anchor}""#) };
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" x="{x:.1}" y="{y:.1}"{anchor}>{text}</text>"#
        );
    }

    fn rect(&mut self, [x, y, width, height]: [f64; 4], class: &str) {
        let _ = write!(self.body, r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" "#);
        let _ = writeln!(self.body, r#"width="{width:.1}" height="{height:.1}"/>"#);
    }

    fn path(&mut self, path: &str, class: &str) {
        if !path.is_empty() {
            let _ = writeln!(self.body, r#"<path class="{class}" d="{path}"/>"#);
        }
    }

    /// Draws the title, and the figures side by side.
    fn head(&mut self) {
        self.bottom += 16.0;
        let title = text::shortened(&self.timeline.title, 80);
        self.text([MARGIN, self.bottom], &title, "t title", "start");
        let mut x = MARGIN;
        self.bottom += 20.0;
        for figure in facts::figures(self.timeline) {
            let letters =
                figure.value.chars().count() as f64 * 1.6 + figure.note.chars().count() as f64;
            let wide = letters.max(figure.name.len() as f64) * CHARACTER + 30.0;
            if x > MARGIN && x + wide > WIDTH {
                x = MARGIN;
                self.bottom += 42.0;
            }
            self.text([x, self.bottom], figure.name, "m", "start");
            // One text element, so that the note follows the value in any font.
            let [value, note] = [&figure.value, &figure.note].map(|text| text::escaped(text));
            let value = format!(r#"<tspan class="t figure">{value}</tspan>"#);
            let note = format!(r#"<tspan class="m" dx="6">{note}</tspan>"#);
            let y = self.bottom + 18.0;
            let _ = writeln!(self.body, r#"<text x="{x:.1}" y="{y:.1}">{value}{note}</text>"#);
            x += wide;
        }
        self.bottom += 18.0;
    }

    fn legend(&mut self) {
        self.bottom += 26.0;
        let y = self.bottom;
        let mut x = MARGIN;
        for kind in facts::kinds(self.timeline) {
            let number = colour::number(kind);
            if number == 5 {
                continue;
            }
            let shades = if number == 4 { 1 } else { self.chunks.min(4) };
            for i in 0..shades {
                let chunk = if shades > 1 { i * (self.chunks - 1) / (shades - 1) } else { 0 };
                self.used.insert((number, 4 * chunk));
                self.rect([x, y - 10.0, 12.0, 12.0], &class((number, 4 * chunk)));
                x += 12.0;
            }
            self.text([x + 5.0, y], colour::NAMES[number], "t", "start");
            x += 5.0 + colour::NAMES[number].len() as f64 * CHARACTER + 16.0;
        }
        self.rect([x, y - 10.0, 18.0, 12.0], "idle edge");
        self.text([x + 23.0, y], "bubble", "t", "start");
        x += 23.0 + 6.0 * CHARACTER + 16.0;
        let has = |what: &dyn Fn(&Row) -> bool| self.timeline.rows.iter().any(what);
        let (planned, memory) = (self.has_plan(), has(&|row| !row.memory.is_empty()));
        if planned {
            self.rect([x, y - 5.0, 18.0, 2.0], "planned");
            self.text([x + 23.0, y], "planned", "t", "start");
            x += 23.0 + 7.0 * CHARACTER + 16.0;
        }
        if memory {
            self.rect([x, y - 8.0, 18.0, 10.0], "memory");
            self.rect([x, y - 8.0, 18.0, 1.0], "memory-line");
            self.text([x + 23.0, y], "memory", "t", "start");
            x += 23.0 + 6.0 * CHARACTER + 16.0;
        }
        let mut said = Vec::new();
        if self.chunks > 1 {
            said.push("paler: a rank's later chunks");
        }
        if self.is_summed {
            said.push("heights: shares of time");
        }
        self.text([x, y], &said.join("; "), "m", "start");
    }

    /// Draws the labelled times above the rows, and lines down through the rows.
    fn axis(&mut self) {
        self.bottom += 30.0;
        let (y, end) = (self.bottom - 6.0, self.timeline.end);
        let (_, unit) = text::time_unit(&self.timeline.unit, end);
        let unit = unit.to_owned();
        let ticks = text::ticks(&self.timeline.unit, 0.0, end, 10);
        let height = self.timeline.rows.len() as f64 * self.pitch;
        let mut lines = String::new();
        for (i, (time, label)) in ticks.iter().enumerate() {
            let x = self.x(*time);
            let last = i + 1 == ticks.len();
            let label = if last { format!("{label} {unit}") } else { label.clone() };
            let half = label.chars().count() as f64 * CHARACTER / 2.0;
            // The last label stays left of the next column.
            self.text([x.min(self.left + self.length - half), y], &label, "m", "middle");
            let _ = write!(lines, "M{x:.1} {:.1}v{:.1}", self.bottom - 3.0, height + 3.0);
        }
        self.path(&lines, "grid");
        let right = self.left + self.length + IDLE;
        self.text([right - 4.0, y], "idle", "m", "end");
        if self.memory > 0.0 {
            self.text([WIDTH - MARGIN, y], "peak", "m", "end");
        }
    }

    fn row(&mut self, row: &Row) {
        let (top, pitch) = (self.bottom, self.pitch);
        let is_tall = pitch >= TALL && !row.memory.is_empty();
        let has_plan = self.has_plan();
        let strip = if is_tall { (pitch * 0.3).floor() } else { 0.0 };
        let space = if pitch >= 20.0 { 4.0 } else { 1.0 };
        let height = pitch - space - strip - if has_plan { 4.0 } else { 0.0 };
        let middle = top + height / 2.0 + 4.0;
        let most = ((self.left - MARGIN - 8.0) / CHARACTER + 0.01).floor() as usize;
        self.text([self.left - 8.0, middle], &text::shortened(&row.name, most), "t", "end");
        self.rect([self.left, top, self.length, height], "idle");
        if self.is_summed {
            self.summed(row, top, height);
        } else {
            self.exact(row, top, height);
            if has_plan {
                self.planned(row, top + height + 1.0);
            }
        }
        let (from, until) = facts::stepped(self.timeline);
        let idle = text::percent(facts::idle(row, from, until));
        self.text([self.left + self.length + IDLE - 4.0, middle], &idle, "t", "end");
        if let Some(peak) = row.peak() {
            let unit = text::memory_unit(self.timeline);
            let value = text::memory(unit, peak);
            self.text([WIDTH - MARGIN, middle], &value, "t", "end");
            if is_tall {
                self.memory(row, [self.left, top + pitch - strip - 2.0, self.length, strip]);
            } else {
                let width = MEMORY - value.chars().count() as f64 * CHARACTER - 16.0;
                self.memory(row, [self.left + self.length + IDLE + 6.0, top, width, height]);
            }
        }
        self.bottom += pitch;
    }

    /// True if the timeline has planned times, and there is room to draw them.
    fn has_plan(&self) -> bool {
        self.pitch >= 18.0 && !self.is_summed && self.timeline.planned_end().is_some()
    }

    fn exact(&mut self, row: &Row, top: f64, height: f64) {
        let mut paths: Vec<(Class, String)> = Vec::new();
        let mut labels = Vec::new();
        for (bar, of) in row.bars.iter().zip(sums::classes(row)) {
            let (x, until) = (self.x(bar.start), self.x(bar.end));
            // A gap between bars, if there is room.
            let width = until - x - if until - x > 5.0 { 0.8 } else { 0.0 };
            let at = match paths.iter().position(|(other, _)| *other == of) {
                Some(at) => at,
                None => {
                    paths.push((of, String::new()));
                    paths.len() - 1
                }
            };
            let _ = write!(paths[at].1, "M{x:.1} {top:.1}h{width:.1}v{height:.1}h-{width:.1}z");
            if let Some(label) = label(bar, width).filter(|_| height >= 9.0) {
                labels.push((x + width / 2.0, label, of));
            }
        }
        for (of, path) in paths {
            self.used.insert(of);
            self.path(&path, &class(of));
        }
        for (x, label, (kind, quarters)) in labels {
            self.text(
                [x, top + height / 2.0 + 3.6],
                &label,
                &format!("n n{kind}-{quarters}"),
                "middle",
            );
        }
    }

    fn planned(&mut self, row: &Row, y: f64) {
        let mut path = String::new();
        for (start, end) in row.bars.iter().filter_map(|bar| bar.planned) {
            let (x, until) = (self.x(start), self.x(end));
            let _ = write!(path, "M{x:.1} {y:.1}h{:.1}v2h-{0:.1}z", (until - x - 0.8).max(0.4));
        }
        self.path(&path, "planned");
    }

    /// Draws the sums of a row's bars: for each stretch of time the shares of the colours, one
    /// above the other.
    fn summed(&mut self, row: &Row, top: f64, height: f64) {
        let end = self.timeline.end;
        let mut paths: Vec<(Class, String)> = Vec::new();
        let shares = sums::shares(row, end, self.stretch);
        let mut at = 0;
        while at < shares.len() {
            // Equal stretches are drawn as one.
            let same = shares[at..].iter().take_while(|other| alike(other, &shares[at])).count();
            let (x, until) =
                (self.x(at as f64 * self.stretch), self.x((at + same) as f64 * self.stretch));
            let mut sum = 0.0;
            for (of, share) in &shares[at] {
                let (from, to) = (top + height * sum, top + height * (sum + share));
                sum += share;
                let rect = format!("M{x:.0} {from:.1}H{until:.0}V{to:.1}H{x:.0}z");
                match paths.iter_mut().find(|(other, _)| other == of) {
                    Some((_, path)) => path.push_str(&rect),
                    None => paths.push((*of, rect)),
                }
            }
            at += same;
        }
        for (of, path) in paths {
            self.used.insert(of);
            self.path(&path, &class(of));
        }
    }

    /// Draws the curve of a row's memory in the rectangle `[x, y, width, height]`. The scale is the
    /// same in all rows.
    fn memory(&mut self, row: &Row, [x, y, width, height]: [f64; 4]) {
        let most = self.timeline.rows.iter().filter_map(|row| row.peak()).fold(0.0, f64::max);
        let end = self.timeline.end;
        if most <= 0.0 || end <= 0.0 || width < 8.0 {
            return;
        }
        // The maximum of each stretch of time, so that peaks remain visible.
        let columns = (width / 1.5).ceil() as usize;
        let mut levels = vec![0.0f64; columns];
        for (i, point) in row.memory.iter().enumerate() {
            let until = row.memory.get(i + 1).map_or(end, |next| next.at);
            let column =
                |time: f64| ((time / end * columns as f64).max(0.0) as usize).min(columns - 1);
            for level in &mut levels[column(point.at)..=column(until.max(point.at))] {
                *level = level.max(point.used);
            }
        }
        let mut line = String::new();
        let mut before = f64::NAN;
        for (i, level) in levels.iter().enumerate() {
            let (at, up) =
                (x + width * i as f64 / columns as f64, y + height * (1.0 - level / most));
            if i == 0 {
                let _ = write!(line, "M{at:.1} {up:.1}");
            } else if up != before {
                let _ = write!(line, "H{at:.1}V{up:.1}");
            }
            before = up;
        }
        let _ = write!(line, "H{:.1}", x + width);
        let area = format!("{line}V{:.1}H{x:.1}z", y + height);
        self.path(&area, "memory");
        self.path(&line, "memory-curve");
    }

    /// Draws lines at the starts of the steps and at the end of the last one, from `top` down, with
    /// the steps' names below. Draws nothing if one step is the whole timeline.
    fn marks(&mut self, top: f64) {
        let (from, until) = facts::stepped(self.timeline);
        if self.timeline.marks.len() < 2 && (from, until) == (0.0, self.timeline.end) {
            return;
        }
        let mut free = 0.0;
        let mut lines = String::new();
        self.bottom += 14.0;
        for mark in &self.timeline.marks {
            let x = self.x(mark.at);
            let _ = write!(lines, "M{x:.1} {top:.1}V{:.1}", self.bottom - 10.0);
            let width = mark.name.chars().count() as f64 * CHARACTER;
            if x >= free && x + width < WIDTH - MARGIN {
                self.text([x, self.bottom], &mark.name, "m", "start");
                free = x + width + 10.0;
            }
        }
        if until < self.timeline.end {
            let _ = write!(lines, "M{:.1} {top:.1}V{:.1}", self.x(until), self.bottom - 10.0);
        }
        self.path(&lines, "mark");
    }

    fn finish(self) -> String {
        let height = (self.bottom + MARGIN).ceil();
        let title = text::escaped(&self.timeline.title);
        let description = text::escaped(&facts::sentence(self.timeline));
        let (light, dark) = (self.colours(Theme::Light), self.colours(Theme::Dark));
        format!(
            r##"<svg class="mpmd-drawing" xmlns="http://www.w3.org/2000/svg"
viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}"
font-family="ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
font-size="11.5">
<title>{title}</title><desc>{description}</desc>
<style>{light}@media screen and (prefers-color-scheme: dark){{{dark}}}</style>
<defs><pattern id="mpmd-idle" width="5" height="5" patternUnits="userSpaceOnUse"
patternTransform="rotate(45)"><path class="stripe" d="M0 0V5"/></pattern></defs>
<rect class="bg" width="{WIDTH}" height="{height}" rx="8"/>
{}</svg>
"##,
            self.body
        )
    }

    /// Returns the CSS rules of a theme. They apply to drawings only, even if the page has classes
    /// of the same names.
    fn colours(&self, theme: Theme) -> String {
        let [ground, text, muted, grid, stripe, planned, memory, line] = match theme {
            Theme::Light => [
                "#ffffff", "#1f2933", "#5c6875", "#d9dfe6", "#c3ccd5", "#1f2933", "#d5dde6",
                "#5c6875",
            ],
            Theme::Dark => [
                "#0f1720", "#e6ebf1", "#9aa8b6", "#26323e", "#3a4855", "#e6ebf1", "#2c3a48",
                "#9aa8b6",
            ],
        };
        let mut rules = String::new();
        let mut rule = |of: &str, declarations: String| {
            let _ = write!(rules, ".mpmd-drawing {of}{{{declarations}}}");
        };
        rule(".bg", format!("fill:{ground}"));
        rule(".t", format!("fill:{text}"));
        rule(".m", format!("fill:{muted}"));
        rule(".grid", format!("stroke:{grid}"));
        rule(".stripe", format!("stroke:{stripe};stroke-width:3"));
        rule(".planned", format!("fill:{planned};fill-opacity:.55"));
        rule(".memory", format!("fill:{memory}"));
        rule(".memory-line", format!("fill:{line}"));
        rule(".memory-curve", format!("fill:none;stroke:{line}"));
        rule(".mark", format!("stroke:{muted};stroke-dasharray:3 3;fill:none"));
        rule(".edge", format!("stroke:{grid}"));
        if theme == Theme::Light {
            rule(".title", "font-size:17px;font-weight:650".to_owned());
            rule(".figure", "font-size:15.5px;font-weight:650".to_owned());
            rule(".idle", "fill:url(#mpmd-idle)".to_owned());
            rule(".n", "font-size:10.5px".to_owned());
        }
        for (number, quarters) in &self.used {
            let colour =
                colour::shade(colour::KINDS[*number], theme, *quarters as f64 / 4.0, self.chunks);
            rule(&format!(".{}", class((*number, *quarters))), format!("fill:{colour}"));
            rule(&format!(".n{number}-{quarters}"), format!("fill:{}", colour::ink(&colour)));
        }
        rules
    }
}

/// Returns the CSS class of a colour.
fn class((kind, quarters): Class) -> String {
    format!("k{kind}-{quarters}")
}

/// Returns the label of a bar, or `None` if it does not fit the width. The label is the number of
/// the microbatch, or the bar's name if it has none.
fn label(bar: &Bar, width: f64) -> Option<String> {
    let text = bar.microbatch.map_or_else(|| bar.name.clone(), |number| number.to_string());
    let fits = (width - 3.0) / 6.0;
    (!text.is_empty() && text.chars().count() as f64 <= fits).then_some(text)
}

/// True if two stretches of time have the same colours, and their shares differ by less than 0.02.
fn alike(one: &[(Class, f64)], other: &[(Class, f64)]) -> bool {
    let same = |(one, other): (&(Class, f64), &(Class, f64))| {
        one.0 == other.0 && (one.1 - other.1).abs() < 0.02
    };
    one.len() == other.len() && one.iter().zip(other).all(same)
}
