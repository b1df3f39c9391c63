//! The HTML page: one self-contained file that needs no network.

use std::fmt::Write as _;

use mpmd_schedule::timeline::{Kind, Timeline};

use super::{colour, data, facts, text};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Returns a timeline as a page that can be zoomed. Without its script the page has the figures and
/// a table.
pub(crate) fn html(timeline: &Timeline) -> String {
    let title = text::escaped(&timeline.title);
    let sentence = text::escaped(&facts::sentence(timeline));
    format!(
        r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{STYLE}</style>
</head>
<body>
<header>
<h1 title="{title}">{title}</h1>
<dl id="figures">{figures}</dl>
</header>
<div id="tools">
<ul id="legend" aria-label="Legend">{legend}</ul>
<div id="controls">{switches}
<span id="zoom" role="group" aria-label="Zoom">
<button id="out" title="Zoom out (-)" aria-label="Zoom out">&#8722;</button>
<button id="in" title="Zoom in (+)" aria-label="Zoom in">+</button>
<button id="reset" title="All of it (0)">Reset</button></span>
<select id="theme" aria-label="Colours" title="Colours">
<option value="auto">Auto</option><option value="light">Light</option>
<option value="dark">Dark</option></select>
<details id="help"><summary aria-label="Help" title="Help">?</summary>
<dl><dt>Wheel</dt>
<dd>zoom in time; with Shift, to the side; over the names, up and down</dd>
<dt>Drag</dt><dd>to the side; on the overview, choose a part</dd>
<dt>+ &#8722; 0</dt><dd>zoom in, out, all of it</dd>
<dt>Arrows</dt><dd>from bar to bar, from rank to rank; with Shift, to the side</dd>
<dt>Home End</dt><dd>the first and the last bar</dd>
<dt>Esc</dt><dd>let go</dd></dl>
</details></div>
</div>
<p class="unseen" id="summary">{sentence}</p>
<main id="chart">
<div id="overview"><span class="corner">all</span><canvas aria-hidden="true"></canvas></div>
<div id="steps" hidden></div>
<div id="axis"><span class="corner" id="corner"></span>
<div id="ticks"></div>
<span class="head" id="idle-head">idle</span>
<span class="head" id="memory-head">peak</span></div>
<div id="scroll" tabindex="0" role="application"
aria-label="Timeline, by rank. Arrow keys go from bar to bar." aria-describedby="summary">
<div id="canvases">
<canvas id="bars" aria-hidden="true"></canvas>
<canvas id="marked" aria-hidden="true"></canvas></div>
<div id="rows"></div>
</div>
<p id="note"></p>
</main>
<div id="tip" role="status" aria-live="polite" hidden></div>
<table class="unseen"><caption>By {rows_name}</caption>
<thead><tr><th>Name</th><th>Idle</th><th>Peak memory</th><th>Computes</th></tr></thead>
<tbody>{table}</tbody></table>
<script type="application/json" id="data">{data}</script>
<script>
{SCRIPT}</script>
</body>
</html>
"#,
        figures = figures(timeline),
        legend = legend(timeline),
        switches = switches(timeline),
        rows_name = facts::rows_name(timeline),
        table = table(timeline),
        data = data::json(timeline),
    )
}

fn figures(timeline: &Timeline) -> String {
    let figure = |figure: facts::Figure| {
        let [value, note] = [&figure.value, &figure.note].map(|text| text::escaped(text));
        format!(
            "<div><dt>{}</dt><dd><b>{value}</b> <span>{note}</span></dd></div>",
            figure.name
        )
    };
    facts::figures(timeline).into_iter().map(figure).collect()
}

/// Returns the list entries of the legend, with a swatch for everything in the timeline. The page's
/// style sheet colours the swatches.
fn legend(timeline: &Timeline) -> String {
    let mut legend = String::new();
    let chunks = facts::chunks(timeline);
    for kind in facts::kinds(timeline) {
        let number = colour::number(kind);
        let shaded = if matches!(kind, Kind::Other | Kind::Move) {
            1
        } else {
            chunks.min(4)
        };
        let swatch = |i: usize| {
            // Of many chunks, the first, the last and two in between.
            let chunk = if shaded > 1 {
                i * (chunks - 1) / (shaded - 1)
            } else {
                0
            };
            format!(r#"<i data-kind="{number}" data-chunk="{chunk}"></i>"#)
        };
        let swatches: String = (0..shaded).map(swatch).collect();
        let _ = write!(legend, "<li>{swatches}{}</li>", colour::NAMES[number]);
    }
    if chunks > 1 {
        legend.push_str(r#"<li class="said">paler: a rank's later chunks</li>"#);
    }
    legend.push_str(r#"<li><i class="idle"></i>bubble</li>"#);
    if timeline.planned_end().is_some() {
        legend.push_str(r#"<li><i class="planned"></i>planned</li>"#);
    }
    if timeline.rows.iter().any(|row| !row.memory.is_empty()) {
        legend.push_str(r#"<li><i class="memory"></i>memory</li>"#);
    }
    legend
}

/// Returns the HTML of the check boxes that show or hide parts of the timeline.
fn switches(timeline: &Timeline) -> String {
    let mut switches = String::new();
    let mut switch = |id: &str, name: &str, on: bool| {
        let on = if on { " checked" } else { "" };
        let _ = write!(
            switches,
            r#"<label><input type="checkbox" id="{id}"{on}>{name}</label>"#
        );
    };
    if timeline.rows.iter().any(|row| !row.moves.is_empty()) {
        switch("show-moves", "Moves", false);
    }
    if timeline.planned_end().is_some() {
        switch("show-planned", "Planned", true);
    }
    if timeline.rows.iter().any(|row| !row.memory.is_empty()) {
        switch("show-memory", "Memory", true);
    }
    switches
}

/// Returns the HTML rows of a table that describes each row of the timeline: name, idle share, peak
/// memory and numbers of bars.
fn table(timeline: &Timeline) -> String {
    let mut table = String::new();
    let (from, until) = facts::stepped(timeline);
    for row in &timeline.rows {
        let name = text::escaped(&row.name);
        let idle = text::percent(facts::idle(row, from, until));
        let unit = text::memory_unit(timeline);
        let peak = row.peak().map_or("unknown".to_owned(), |peak| {
            text::memory_with_unit(unit, peak)
        });
        let mut computes = Vec::new();
        for (kind, name) in colour::KINDS.iter().zip(colour::NAMES) {
            let count = row.bars.iter().filter(|bar| bar.kind == *kind).count();
            if count > 0 {
                computes.push(format!("{count} {name}"));
            }
        }
        let (peak, computes) = (text::escaped(&peak), computes.join(", "));
        let _ = write!(
            table,
            "<tr><th>{name}</th><td>{idle}</td><td>{peak}</td><td>{computes}</td></tr>"
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_schedule::timeline::{Bar, Row};

    #[test]
    fn page_loads_nothing_from_outside() {
        let page = html(&Timeline::default());
        let outside: Vec<&str> = page
            .lines()
            .filter(|line| line.contains("://") && !line.contains("www.w3.org"))
            .collect();
        assert_eq!(outside, [""; 0]);
        assert!(
            !page.contains("@import")
                && page.matches("url(").count() == page.matches("url(#").count()
        );
    }

    #[test]
    fn texts_are_escaped() {
        let bar = Bar {
            name: "</script>".to_owned(),
            ..Bar::default()
        };
        let row = Row {
            name: "<b>".to_owned(),
            bars: vec![bar],
            ..Row::default()
        };
        let page = html(&Timeline {
            title: "a<\"&".to_owned(),
            rows: vec![row],
            end: 1.0,
            ..Timeline::default()
        });
        assert!(
            page.contains("<title>a&lt;&quot;&amp;</title>") && !page.contains("<b>\""),
            "{page}"
        );
        assert_eq!(page.matches("</script>").count(), 2);
    }

    #[test]
    fn only_existing_parts_have_switches() {
        assert_eq!(switches(&Timeline::default()), "");
        let row = Row {
            moves: vec![Bar::default()],
            ..Row::default()
        };
        let text = switches(&Timeline {
            rows: vec![row],
            ..Timeline::default()
        });
        assert!(
            text.contains("show-moves") && !text.contains("show-memory"),
            "{text}"
        );
    }
}
