//! The figures in the head of a drawing: step time, share of bubble, number of rows, peak memory.

use mpmd_schedule::timeline::{Kind, Row, Timeline};

use super::{colour, text};

/// A figure in the head of a drawing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Figure {
    pub(super) name: &'static str,
    pub(super) value: String,
    /// Explains the value, such as the time that a share refers to.
    pub(super) note: String,
}

/// Returns the figures for the head of a drawing, the most important first.
pub(super) fn figures(timeline: &Timeline) -> Vec<Figure> {
    let mut figures = vec![step_time(timeline)];
    let (from, until) = stepped(timeline);
    let bubble = text::percent(timeline.bubble(from, until));
    let mut of = if timeline.rows.len() == 1 {
        "of its time"
    } else {
        "of all their time"
    }
    .to_owned();
    if (from, until) != (0.0, timeline.end) {
        of.push_str(" in the steps");
    }
    figures.push(Figure {
        name: "bubble",
        value: bubble,
        note: of,
    });
    figures.push(Figure {
        name: rows_name(timeline),
        value: timeline.rows.len().to_string(),
        note: stages(timeline),
    });
    let peaks = timeline
        .rows
        .iter()
        .filter_map(|row| Some((row.peak()?, row)));
    // Of equal peaks, the first.
    let most = peaks.reduce(|most, next| if next.0 > most.0 { next } else { most });
    if let Some((peak, row)) = most {
        let equal = timeline
            .rows
            .iter()
            .filter(|other| other.peak() == Some(peak))
            .count();
        let note = match equal {
            1 => format!("on {}", row.name),
            all if all == timeline.rows.len() => "on each".to_owned(),
            some => format!("on {} and {} more", row.name, some - 1),
        };
        let value = text::memory_with_unit(text::memory_unit(timeline), peak);
        figures.push(Figure {
            name: "peak memory",
            value,
            note,
        });
    }
    figures
}

fn step_time(timeline: &Timeline) -> Figure {
    let steps = timeline.steps();
    let takes = || steps.iter().map(|step| step.takes);
    let median = timeline.median_step().map_or(0.0, |step| step.takes);
    let time = |value| text::time(&timeline.unit, value);
    let mut notes = Vec::new();
    if steps.len() > 1 {
        let (least, most) = (
            takes().fold(f64::INFINITY, f64::min),
            takes().fold(0.0, f64::max),
        );
        notes.push(format!(
            "median of {}: {} to {}",
            steps.len(),
            time(least),
            time(most)
        ));
    }
    if let Some(planned) = planned_length(timeline).filter(|planned| *planned > 0.0) {
        let more = 100.0 * (median / planned - 1.0);
        notes.push(format!("planned {}, {more:+.1} %", time(planned)));
    }
    let name = if steps.len() > 1 {
        "a step"
    } else {
        "step time"
    };
    Figure {
        name,
        value: time(median),
        note: notes.join("; "),
    }
}

/// Returns the median of the steps' planned lengths, in the unit of the timeline. `None` unless
/// every step has a planned bar.
fn planned_length(timeline: &Timeline) -> Option<f64> {
    let steps = timeline.steps();
    let mut spans = vec![(f64::INFINITY, f64::NEG_INFINITY); steps.len()];
    for (start, end) in timeline
        .rows
        .iter()
        .flat_map(|row| &row.bars)
        .filter_map(|bar| bar.planned)
    {
        // Assigned by the planned start: a late bar may begin during the next step.
        let step = steps.partition_point(|step| step.from <= start);
        if let Some(span) = spans.get_mut(step.wrapping_sub(1)) {
            *span = (span.0.min(start), span.1.max(end));
        }
    }
    let mut lengths: Vec<f64> = spans.into_iter().map(|(start, end)| end - start).collect();
    lengths.sort_by(f64::total_cmp);
    let is_whole = lengths.first().is_some_and(|least| *least >= 0.0);
    is_whole.then(|| lengths[(lengths.len() - 1) / 2])
}

/// Returns (the start of the first step, the end of the last) in the unit of the timeline. Without
/// steps, that is the whole time.
pub(super) fn stepped(timeline: &Timeline) -> (f64, f64) {
    let steps = timeline.steps();
    let until = steps.iter().map(|step| step.until).reduce(f64::max);
    (
        steps.first().map_or(0.0, |step| step.from),
        until.unwrap_or(timeline.end),
    )
}

/// Returns the (start, end) of the time that a page shows first: the step of median length, or all
/// if there are no steps.
pub(super) fn opened(timeline: &Timeline) -> (f64, f64) {
    timeline
        .median_step()
        .map_or((0.0, timeline.end), |step| (step.from, step.until))
}

/// Returns the share (0 to 1) of the time from `from` to `until` in which a row does not compute.
pub(super) fn idle(row: &Row, from: f64, until: f64) -> f64 {
    if until > from {
        (1.0 - row.busy(from, until) / (until - from)).max(0.0)
    } else {
        0.0
    }
}

/// Returns the kinds of bars and moves in the timeline, each once, in the order of their numbers.
pub(super) fn kinds(timeline: &Timeline) -> Vec<Kind> {
    let has = |kind: Kind| {
        timeline.rows.iter().any(|row| {
            row.bars
                .iter()
                .chain(&row.moves)
                .any(|bar| bar.kind == kind)
        })
    };
    colour::KINDS
        .into_iter()
        .filter(|kind| has(*kind))
        .collect()
}

/// Returns `ranks` if all rows are named `rank` and a number, else `devices`.
pub(super) fn rows_name(timeline: &Timeline) -> &'static str {
    if prefix(timeline) == "rank " {
        "ranks"
    } else {
        "devices"
    }
}

/// Returns the common prefix of all row names, if each name is this prefix and a number. Empty if
/// not.
pub(super) fn prefix(timeline: &Timeline) -> &str {
    let begin = |row: &Row| {
        row.name
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .len()
    };
    let Some(first) = timeline.rows.first() else {
        return "";
    };
    let prefix = &first.name[..begin(first)];
    let same = |row: &Row| begin(row) < row.name.len() && &row.name[..begin(row)] == prefix;
    if timeline.rows.iter().all(same) {
        prefix
    } else {
        ""
    }
}

/// Returns the largest number of different stages in a row, at least one.
pub(super) fn chunks(timeline: &Timeline) -> usize {
    timeline
        .rows
        .iter()
        .map(|row| row.stages().len())
        .max()
        .unwrap_or(0)
        .max(1)
}

/// Returns the numbers of different stages and microbatches, as `8 stages, 16 microbatches`. A
/// number that is 0 is left out.
fn stages(timeline: &Timeline) -> String {
    let bars = || timeline.rows.iter().flat_map(|row| &row.bars);
    let count = |numbers: Vec<u32>, one: &str, many: &str| {
        let mut numbers = numbers;
        numbers.sort_unstable();
        numbers.dedup();
        match numbers.len() {
            0 => None,
            1 => Some(format!("1 {one}")),
            some => Some(format!("{some} {many}")),
        }
    };
    let stages = count(
        bars().filter_map(|bar| bar.stage).collect(),
        "stage",
        "stages",
    );
    let microbatches = count(
        bars().filter_map(|bar| bar.microbatch).collect(),
        "microbatch",
        "microbatches",
    );
    [stages, microbatches]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(", ")
}

/// Returns all figures, and the least and most idle rows, in one sentence, for screen readers.
pub(super) fn sentence(timeline: &Timeline) -> String {
    let figures = figures(timeline);
    let said = |figure: &Figure| match figure.note.as_str() {
        "" => format!("{} {}", figure.name, figure.value),
        note => format!("{} {} ({note})", figure.name, figure.value),
    };
    let mut text = figures.iter().map(said).collect::<Vec<_>>().join("; ");
    let (from, until) = stepped(timeline);
    let named = |row| (idle(row, from, until), row.name.as_str());
    let mut rows: Vec<(f64, &str)> = timeline.rows.iter().map(named).collect();
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    if let [(least, busiest), .., (most, idlest)] = rows[..] {
        let (least, most) = (text::percent(least), text::percent(most));
        text.push_str(&format!(
            "; least idle is {busiest} ({least}), most {idlest} ({most})"
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_schedule::timeline::{Bar, Mark, MemoryPoint};

    fn two() -> Timeline {
        let bar = |stage, microbatch, start, end| Bar {
            stage: Some(stage),
            microbatch: Some(microbatch),
            start,
            end,
            ..Bar::default()
        };
        let row = |name: &str, bars, used| Row {
            name: name.to_owned(),
            bars,
            memory: vec![MemoryPoint { at: 0.0, used }],
            ..Row::default()
        };
        let rows = vec![
            row(
                "rank 0",
                vec![bar(0, 0, 0.0, 1.0), bar(0, 1, 1.0, 2.0)],
                2.0,
            ),
            row(
                "rank 1",
                vec![bar(1, 0, 1.0, 2.0), bar(1, 1, 2.0, 4.0)],
                1.0,
            ),
        ];
        Timeline {
            title: "two".to_owned(),
            unit: "unit".to_owned(),
            end: 4.0,
            rows,
            ..Timeline::default()
        }
    }

    fn texts(timeline: &Timeline) -> Vec<String> {
        let line = |figure: Figure| format!("{}: {} | {}", figure.name, figure.value, figure.note);
        figures(timeline).into_iter().map(line).collect()
    }

    #[test]
    fn figures_are_those_of_the_timeline() {
        let mut timeline = two();
        let expected = [
            "step time: 4 units | ",
            "bubble: 37.5 % | of all their time",
            "ranks: 2 | 2 stages, 2 microbatches",
            "peak memory: 2 activations | on rank 0",
        ];
        assert_eq!(texts(&timeline), expected);
        timeline.rows[1].memory[0].used = 2.0;
        timeline.rows[0].bars[0].planned = Some((0.0, 3.2));
        let texts = texts(&timeline);
        assert_eq!(texts[0], "step time: 4 units | planned 3.2 units, +25.0 %");
        assert_eq!(texts[3], "peak memory: 2 activations | on each");
    }

    #[test]
    fn several_steps_have_a_median_and_a_range() {
        let mut timeline = two();
        timeline.unit = "s".to_owned();
        let mark = |(at, name): (f64, &str)| Mark {
            at,
            name: name.to_owned(),
            end: None,
        };
        timeline.marks = [(1.0, "step 0"), (3.0, "step 1")].map(mark).to_vec();
        let texts = texts(&timeline);
        assert_eq!(texts[0], "a step: 1 s | median of 2: 1 s to 2 s");
        assert_eq!(texts[1], "bubble: 33.3 % | of all their time in the steps");
        // Each step is planned on its own, from its own start.
        timeline.marks[0].at = 0.0;
        timeline.marks[1].at = 2.0;
        for bar in timeline.rows.iter_mut().flat_map(|row| &mut row.bars) {
            let from = if bar.start < 2.0 { 0.0 } else { 2.0 };
            bar.planned = Some((from, from + 1.5));
        }
        assert_eq!(
            texts_of(&timeline),
            "a step: 2 s | median of 2: 2 s to 2 s; planned 1.5 s, +33.3 %"
        );
    }

    #[test]
    fn time_after_the_last_step_is_in_no_figure() {
        let mut timeline = two();
        let mark = |(at, end): (f64, f64)| Mark {
            at,
            end: Some(end),
            name: String::new(),
        };
        timeline.marks = [(0.0, 1.0), (1.0, 2.0)].map(mark).to_vec();
        let before = texts(&timeline);
        assert_eq!(before[0], "a step: 1 unit | median of 2: 1 unit to 1 unit");
        assert_eq!(before[1], "bubble: 25.0 % | of all their time in the steps");
        // An evaluation follows the last step.
        timeline.rows[0].bars.push(Bar {
            start: 4.0,
            end: 100.0,
            ..Bar::default()
        });
        timeline.end = 100.0;
        assert_eq!(
            (&texts(&timeline)[..2], opened(&timeline)),
            (&before[..2], (0.0, 1.0))
        );
        // A bar's plan counts for its planned step, even if the bar came late.
        timeline.rows[0].bars[0].planned = Some((0.0, 0.5));
        timeline.rows[1].bars[1].planned = Some((0.5, 0.8));
        timeline.rows[0].bars[1].planned = Some((1.0, 1.8));
        let planned = "a step: 1 unit | median of 2: 1 unit to 1 unit; planned 0.8 units, +25.0 %";
        assert_eq!(texts_of(&timeline), planned);
        timeline.rows[0].bars[1].planned = None;
        assert_eq!(texts_of(&timeline), before[0], "one step has no plan");
    }

    #[test]
    fn single_step_is_opened_whole() {
        assert_eq!(opened(&two()), (0.0, 4.0));
        assert_eq!(opened(&Timeline::default()), (0.0, 0.0));
    }

    fn texts_of(timeline: &Timeline) -> String {
        texts(timeline).swap_remove(0)
    }

    #[test]
    fn numbered_names_have_a_prefix() {
        let mut timeline = two();
        assert_eq!(
            (prefix(&timeline), rows_name(&timeline)),
            ("rank ", "ranks")
        );
        timeline.rows[1].name = "process 1, cpu 0".to_owned();
        assert_eq!((prefix(&timeline), rows_name(&timeline)), ("", "devices"));
        timeline.rows[1].name = "rank ".to_owned();
        assert_eq!((prefix(&timeline), prefix(&Timeline::default())), ("", ""));
    }

    #[test]
    fn sentence_names_least_and_most_idle_rows() {
        let text = sentence(&two());
        assert!(
            text.starts_with("step time 4 units; bubble 37.5 % (of all their time)"),
            "{text}"
        );
        assert!(
            text.ends_with("least idle is rank 1 (25.0 %), most rank 0 (50.0 %)"),
            "{text}"
        );
        assert!(sentence(&Timeline::default()).contains("devices 0"));
    }
}
