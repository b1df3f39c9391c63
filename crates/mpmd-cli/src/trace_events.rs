//! A timeline as Trace Event JSON, which `ui.perfetto.dev` and `chrome://tracing` open.
//!
//! Each process is a group of tracks: one for the computations of each of its rows, and below it as
//! many for outgoing transfers as overlap at a time. A row without a process is a group of its own.

use mpmd_schedule::timeline::{Bar, BarKind, Timeline, TimelineRow};
use serde_json::{Value, json};

/// Distance between the track numbers of two rows. A row has one track for computations, then
/// tracks for transfers.
const TRACKS_OF_ROW: usize = 1000;

/// Microseconds per unit in a timeline whose times are only relative to each other.
const MICROS_OF_UNIT: f64 = 1e3;
const MICROS_OF_SECOND: f64 = 1e6;

/// Returns a timeline as Trace Event JSON. Times are in microseconds; a unit of relative time is
/// shown as a millisecond.
pub(crate) fn trace_events(timeline: &Timeline) -> Value {
    let scale = match &*timeline.unit {
        "s" => MICROS_OF_SECOND,
        _ => MICROS_OF_UNIT,
    };
    let mut events = Events {
        scale,
        found: Vec::new(),
    };

    for (index, row) in timeline.rows.iter().enumerate() {
        events.add_row(index, row);
    }
    for mark in &timeline.marks {
        events.found.push(json!({
            "name": mark.name, "cat": "step", "ph": "i", "s": "g", "pid": 0, "tid": 0,
            "ts": events.micros(mark.at),
        }));
    }

    json!({
        "traceEvents": events.found,
        "displayTimeUnit": "ms",
        "otherData": {"title": timeline.title, "unit": timeline.unit},
    })
}

struct Events {
    /// Microseconds per unit of the timeline.
    scale: f64,
    found: Vec<Value>,
}

impl Events {
    fn add_row(&mut self, index: usize, row: &TimelineRow) {
        let group = row.process.map_or(index, |process| process as usize);
        let group_name = match row.process {
            Some(process) => format!("process {process}"),
            None => row.name.clone(),
        };
        self.found.push(json!({
            "name": "process_name", "ph": "M", "pid": group, "args": {"name": group_name},
        }));

        let track = index * TRACKS_OF_ROW;
        self.name_track(group, track, &row.name);
        for bar in &row.bars {
            self.add_bar(group, track, bar);
        }
        for gap in &row.gaps {
            self.found.push(json!({
                "name": format!("waits for {}", gap.waits_for), "cat": "wait", "ph": "X",
                "pid": group, "tid": track, "ts": self.micros(gap.start),
                "dur": self.micros(gap.end - gap.start),
            }));
        }

        self.add_transfers(group, track, row);
        for point in &row.memory {
            self.found.push(json!({
                "name": format!("memory of {}", row.name), "ph": "C", "pid": group,
                "ts": self.micros(point.at), "args": {"used": point.used},
            }));
        }
    }

    /// Adds the outgoing transfers of a row. Slices of a track may not overlap, so each transfer
    /// takes the first track that is free at its start.
    fn add_transfers(&mut self, group: usize, track: usize, row: &TimelineRow) {
        let mut ends: Vec<f64> = Vec::new();
        for transfer in &row.moves {
            let free = ends.iter().position(|end| *end <= transfer.start);
            let lane = free.unwrap_or(ends.len()).min(TRACKS_OF_ROW - 2);
            if lane == ends.len() {
                ends.push(0.0);
                let name = format!("{} sends {lane}", row.name);
                self.name_track(group, track + 1 + lane, &name);
            }
            ends[lane] = transfer.end;
            self.add_bar(group, track + 1 + lane, transfer);
        }
    }

    fn add_bar(&mut self, group: usize, track: usize, bar: &Bar) {
        let category = match bar.kind {
            BarKind::Forward => "forward",
            BarKind::BackwardInput => "backward input",
            BarKind::BackwardWeight => "backward weight",
            BarKind::Backward => "backward",
            BarKind::Move => "transfer",
            BarKind::Other => "other",
        };
        let planned = bar
            .planned
            .map(|(start, end)| [self.micros(start), self.micros(end)]);
        self.found.push(json!({
            "name": bar.name, "cat": category, "ph": "X", "pid": group, "tid": track,
            "ts": self.micros(bar.start), "dur": self.micros(bar.end - bar.start),
            "args": {
                "stage": bar.stage, "microbatch": bar.microbatch, "bytes": bar.bytes,
                "operation": bar.op, "issued": bar.issued.map(|at| self.micros(at)),
                "waited for": bar.waited_for, "planned": planned, "at": bar.at,
            },
        }));
    }

    fn name_track(&mut self, group: usize, track: usize, name: &str) {
        self.found.push(json!({
            "name": "thread_name", "ph": "M", "pid": group, "tid": track, "args": {"name": name},
        }));
        self.found.push(json!({
            "name": "thread_sort_index", "ph": "M", "pid": group, "tid": track,
            "args": {"sort_index": track},
        }));
    }

    /// Converts a time of the timeline to microseconds, rounded to nanoseconds.
    fn micros(&self, time: f64) -> f64 {
        (time * self.scale * 1e3).round() / 1e3
    }
}

#[cfg(test)]
mod tests {
    use mpmd_schedule::timeline::{MemoryPoint, TimelineGap, TimelineMark};

    use super::*;

    fn bar(name: &str, start: f64, end: f64) -> Bar {
        Bar {
            name: name.to_owned(),
            start,
            end,
            ..Bar::default()
        }
    }

    #[test]
    fn slices_of_a_track_do_not_overlap() {
        let moves = vec![
            bar("a", 0.0, 2.0),
            bar("b", 1.0, 3.0),
            bar("c", 2.0, 4.0),
            bar("d", 2.5, 2.75),
        ];
        let timeline = Timeline {
            unit: "s".to_owned(),
            rows: vec![TimelineRow {
                name: "rank 0".to_owned(),
                moves,
                ..TimelineRow::default()
            }],
            ..Timeline::default()
        };
        let events = trace_events(&timeline);
        let slices = events["traceEvents"].as_array().unwrap().iter();
        let tracks: Vec<_> = slices
            .filter(|event| event["ph"] == "X")
            .map(|event| (event["name"].as_str().unwrap(), event["tid"].as_u64()))
            .collect();
        let expected = [("a", 1), ("b", 2), ("c", 1), ("d", 3)];
        assert_eq!(tracks, expected.map(|(name, track)| (name, Some(track))));
    }

    #[test]
    fn everything_of_a_timeline_is_an_event() {
        let row = TimelineRow {
            name: "process 3, cpu 0".to_owned(),
            process: Some(3),
            bars: vec![Bar {
                kind: BarKind::Forward,
                waited_for: Some("a piece".to_owned()),
                ..bar("2F7", 0.25, 0.5)
            }],
            gaps: vec![TimelineGap {
                start: 0.0,
                end: 0.25,
                waits_for: "a piece".to_owned(),
            }],
            memory: vec![MemoryPoint {
                at: 0.25,
                used: 7.0,
            }],
            ..TimelineRow::default()
        };
        let mark = TimelineMark {
            at: 0.125,
            end: None,
            name: "step 1".to_owned(),
        };
        let mut timeline = Timeline {
            unit: "s".to_owned(),
            marks: vec![mark],
            rows: vec![row],
            ..Timeline::default()
        };
        let of = |timeline: &Timeline, phase: &str| -> Value {
            let events = trace_events(timeline);
            let all = events["traceEvents"].as_array().unwrap();
            all.iter()
                .find(|event| event["ph"] == phase)
                .unwrap()
                .clone()
        };

        let slice = of(&timeline, "X");
        assert_eq!(slice["name"], "2F7");
        assert_eq!(slice["pid"], 3);
        assert_eq!(slice["ts"], 250_000.0);
        assert_eq!(slice["dur"], 250_000.0);
        assert_eq!(slice["args"]["waited for"], "a piece");
        assert_eq!(of(&timeline, "C")["args"]["used"], 7.0);
        assert_eq!(of(&timeline, "i")["ts"], 125_000.0);
        let waits = trace_events(&timeline).to_string();
        assert!(waits.contains("waits for a piece"), "{waits}");

        timeline.unit = "unit".to_owned();
        assert_eq!(of(&timeline, "X")["ts"], 250.0);
    }
}
