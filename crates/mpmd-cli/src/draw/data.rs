//! Encodes a timeline for the page's script: lists of numbers instead of objects, each text once.

use std::collections::BTreeMap;

use mpmd_schedule::timeline::{Bar, Timeline};
use serde_json::{Map, Value, json};

use super::{colour, facts, text};

/// The number of parts of a time unit that times are rounded to if the timeline is empty. For the
/// unit of a second, the least number.
const DIGITS: f64 = 1e9;

/// The distinct texts of a page, numbered in the order of their first use.
#[derive(Default)]
struct Texts {
    numbers: BTreeMap<String, usize>,
}

impl Texts {
    fn number(&mut self, text: &str) -> usize {
        let next = self.numbers.len();
        *self.numbers.entry(text.to_owned()).or_insert(next)
    }

    fn in_order(self) -> Vec<String> {
        let mut all: Vec<(String, usize)> = self.numbers.into_iter().collect();
        all.sort_by_key(|(_, number)| *number);
        all.into_iter().map(|(text, _)| text).collect()
    }
}

/// Returns the timeline as JSON that may stand in a script element.
///
/// Bars are stored by column. A column without any value is left out; a bar's missing value is
/// null.
pub(super) fn json(timeline: &Timeline) -> String {
    let mut texts = Texts::default();
    let short = rounding(timeline);
    let mut rows = Vec::new();
    for row in &timeline.rows {
        let gap = |gap: &mpmd_schedule::timeline::Gap, texts: &mut Texts| {
            json!([
                short(gap.start),
                short(gap.end),
                texts.number(&gap.waits_for)
            ])
        };
        let memory = row
            .memory
            .iter()
            .flat_map(|point| [short(point.at), json!(point.used)]);
        rows.push(json!({
            "name": row.name,
            "process": row.process,
            "stages": row.stages(),
            "peak": row.peak(),
            "bars": columns(&row.bars, &mut texts, &short),
            "moves": columns(&row.moves, &mut texts, &short),
            "gaps": row.gaps.iter().map(|it| gap(it, &mut texts)).collect::<Vec<_>>(),
            "memory": memory.collect::<Vec<_>>(),
        }));
    }
    let (from, until) = facts::stepped(timeline);
    let opened = facts::opened(timeline);
    let chunks = facts::chunks(timeline);
    let marks = timeline
        .marks
        .iter()
        .map(|mark| json!([mark.at, mark.name, mark.end]));
    let data = json!({
        "title": timeline.title,
        "unit": timeline.unit,
        "memoryUnit": text::memory_unit(timeline),
        "end": timeline.end,
        "stepped": [from, until],
        "opened": [opened.0, opened.1],
        "prefix": facts::prefix(timeline),
        "marks": marks.collect::<Vec<_>>(),
        "kinds": colour::NAMES,
        "chunks": chunks,
        "colours": {
            "light": colours(colour::Theme::Light, chunks),
            "dark": colours(colour::Theme::Dark, chunks),
        },
        "rows": rows,
        "texts": texts.in_order(),
    });
    // Escapes characters that a browser could take for the end of the script or for a comment.
    data.to_string()
        .replace('<', "\\u003c")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

/// Returns, for each kind and chunk, the pair (colour of a bar, colour of text on it).
fn colours(theme: colour::Theme, chunks: usize) -> Value {
    let pair = |kind, chunk: usize| {
        let colour = colour::shade(kind, theme, chunk as f64, chunks);
        json!([colour, colour::ink(&colour)])
    };
    colour::KINDS
        .iter()
        .map(|kind| {
            (0..chunks)
                .map(|chunk| pair(*kind, chunk))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Returns a function that rounds times and returns them as JSON. Its precision is finer than the
/// page can show.
fn rounding(timeline: &Timeline) -> impl Fn(f64) -> Value + use<> {
    let digits = if timeline.end > 0.0 {
        10f64.powf(9.0 - timeline.end.log10().ceil())
    } else {
        DIGITS
    };
    let digits = if timeline.unit == "s" {
        digits.max(DIGITS)
    } else {
        digits
    };
    move |time: f64| json!((time * digits).round() / digits)
}

fn columns(bars: &[Bar], texts: &mut Texts, short: &dyn Fn(f64) -> Value) -> Value {
    let mut columns = Map::new();
    let mut put = |name: &str, column: Vec<Value>| {
        if column.iter().any(|value| !value.is_null()) {
            columns.insert(name.to_owned(), Value::Array(column));
        }
    };
    let each = |value: &dyn Fn(&Bar) -> Value| bars.iter().map(value).collect::<Vec<_>>();
    put("kind", each(&|bar| json!(colour::number(bar.kind))));
    put("start", each(&|bar| short(bar.start)));
    put("end", each(&|bar| short(bar.end)));
    put("stage", each(&|bar| json!(bar.stage)));
    put("microbatch", each(&|bar| json!(bar.microbatch)));
    put("bytes", each(&|bar| json!(bar.bytes)));
    put("to", each(&|bar| json!(bar.to)));
    put("op", each(&|bar| json!(bar.op)));
    put("issued", each(&|bar| bar.issued.map_or(Value::Null, short)));
    put(
        "plannedStart",
        each(&|bar| bar.planned.map_or(Value::Null, |(start, _)| short(start))),
    );
    put(
        "plannedEnd",
        each(&|bar| bar.planned.map_or(Value::Null, |(_, end)| short(end))),
    );
    put(
        "name",
        bars.iter()
            .map(|bar| json!(texts.number(&bar.name)))
            .collect(),
    );
    let mut optional = |text: &Option<String>| {
        text.as_ref()
            .map_or(Value::Null, |text| json!(texts.number(text)))
    };
    put(
        "waitedFor",
        bars.iter().map(|bar| optional(&bar.waited_for)).collect(),
    );
    put("at", bars.iter().map(|bar| optional(&bar.at)).collect());
    Value::Object(columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_schedule::timeline::{Kind, Row};

    #[test]
    fn no_text_can_end_the_script() {
        let title = "</script><!-- \u{2028}".to_owned();
        let text = json(&Timeline {
            title: title.clone(),
            ..Timeline::default()
        });
        assert!(!text.contains('<') && !text.contains('\u{2028}'), "{text}");
        let back: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(back["title"], title);
    }

    #[test]
    fn columns_without_values_are_left_out() {
        let bar = |kind, name: &str, bytes| Bar {
            kind,
            name: name.to_owned(),
            bytes,
            ..Bar::default()
        };
        let bars = vec![
            bar(Kind::Forward, "a", None),
            bar(Kind::Move, "b", Some(3)),
            bar(Kind::Other, "a", None),
        ];
        let rows = vec![Row {
            bars,
            ..Row::default()
        }];
        let data: Value = serde_json::from_str(&json(&Timeline {
            rows,
            ..Timeline::default()
        }))
        .unwrap();
        let columns = &data["rows"][0]["bars"];
        assert_eq!(columns["kind"], json!([0, 5, 4]));
        assert_eq!(
            (&columns["name"], &data["texts"]),
            (&json!([0, 1, 0]), &json!(["a", "b"]))
        );
        assert_eq!(columns["bytes"], json!([null, 3, null]));
        let names: Vec<&String> = columns.as_object().unwrap().keys().collect();
        assert_eq!(names, ["bytes", "end", "kind", "name", "start"]);
    }

    #[test]
    fn times_are_rounded_to_visible_precision() {
        let short = rounding(&Timeline {
            end: 100.0,
            unit: "unit".to_owned(),
            ..Timeline::default()
        });
        assert_eq!(short(1.0 / 3.0).to_string(), "0.3333333");
        let short = rounding(&Timeline {
            end: 100.0,
            unit: "s".to_owned(),
            ..Timeline::default()
        });
        assert_eq!(short(1.0 / 3.0).to_string(), "0.333333333");
    }
}
