//! A [`Timeline`]: the data of a drawing.

use serde::{Deserialize, Serialize};

/// The past or planned work of the ranks of a pipeline, or of the processes of a job.
///
/// Times are in [`Timeline::unit`], from the beginning of the timeline.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Timeline {
    /// The name of the schedule or the program.
    pub title: String,
    /// `s` for seconds, or `unit` if times are only relative to each other.
    pub unit: String,
    /// End of the last bar.
    pub end: f64,
    /// Unit of memory: `B` for bytes, or a word such as `activations`. If it is empty, small
    /// numbers count as activations and large ones as bytes.
    #[serde(default)]
    pub memory_unit: String,
    /// Starts and ends of steps, in order.
    pub marks: Vec<Mark>,
    /// One row for each rank, or for each process and device.
    pub rows: Vec<Row>,
}

/// A point in time with a name.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Mark {
    /// Time of the mark.
    pub at: f64,
    /// The end of the step that begins there. With `None` it ends at the next mark, or at the end
    /// of the timeline.
    #[serde(default)]
    pub end: Option<f64>,
    /// Name of the step that begins there.
    pub name: String,
}

/// The work of one rank or device.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// A name such as `rank 3`, or `process 1, cpu 0`.
    pub name: String,
    /// The process, if there is one.
    pub process: Option<u32>,
    /// Computations, sorted by start; they do not overlap.
    pub bars: Vec<Bar>,
    /// Outgoing transfers, sorted by start; they may overlap.
    pub moves: Vec<Bar>,
    /// Times without computation between beginning and end, in order, with their reasons.
    pub gaps: Vec<Gap>,
    /// Memory in use. Each value holds until the next point.
    pub memory: Vec<MemoryPoint>,
}

/// The kind of a bar.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A forward pass.
    Forward,
    /// The gradient of a stage's inputs.
    BackwardInput,
    /// The gradient of a stage's parameters.
    BackwardWeight,
    /// Both gradients in one pass.
    Backward,
    /// The transfer of an array.
    Move,
    /// Any other kind.
    #[default]
    Other,
}

/// A computation or a transfer, with start and end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Bar {
    /// Kind of the bar.
    pub kind: Kind,
    /// A name such as `2F7`, or the name of a kernel.
    pub name: String,
    /// The stage, if it belongs to one.
    pub stage: Option<u32>,
    /// The microbatch, if it belongs to one.
    pub microbatch: Option<u32>,
    /// Start time.
    pub start: f64,
    /// End time.
    pub end: f64,
    /// Bytes moved, for a transfer.
    pub bytes: Option<u64>,
    /// Index in [`Timeline::rows`] of a transfer's target.
    #[serde(default)]
    pub to: Option<u32>,
    /// Number of the operation in the program.
    pub op: Option<u64>,
    /// Time at which it was issued, in a run.
    pub issued: Option<f64>,
    /// Description of the last work that it waited for before its start.
    pub waited_for: Option<String>,
    /// Planned start and end, if there is a plan to compare with.
    pub planned: Option<(f64, f64)>,
    /// The line of the program.
    pub at: Option<String>,
}

/// A time in which a row computes nothing.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Gap {
    /// Start time.
    pub start: f64,
    /// End time.
    pub end: f64,
    /// Description of the work that the row waited for: `stage 1, microbatch 4, forward of rank 0`.
    pub waits_for: String,
}

/// The memory in use from a time on.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct MemoryPoint {
    /// Time from which the value holds.
    pub at: f64,
    /// Bytes, or activations in a schedule without bytes.
    pub used: f64,
}

/// A step of a program, from its mark to its end. Steps may overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineStep {
    /// The name of the mark that begins it.
    pub name: String,
    /// Start time.
    pub from: f64,
    /// End time.
    pub until: f64,
    /// Time from the end of the previous step to the end of this one; of the first step, its
    /// length.
    pub takes: f64,
}

impl Timeline {
    /// Returns the steps that take time. A timeline without marks is one step without a name.
    pub fn steps(&self) -> Vec<TimelineStep> {
        let next = self.marks.iter().skip(1).map(|mark| mark.at).chain([self.end]);
        let mut steps: Vec<TimelineStep> = Vec::new();
        for (mark, next) in self.marks.iter().zip(next) {
            let (from, until) = (mark.at, mark.end.unwrap_or(next));
            if until > from {
                let takes = until - steps.last().map_or(from, |before| before.until);
                steps.push(TimelineStep { name: mark.name.clone(), from, until, takes });
            }
        }
        if steps.is_empty() && self.end > 0.0 {
            steps.push(TimelineStep {
                name: String::new(),
                from: 0.0,
                until: self.end,
                takes: self.end,
            });
        }
        steps
    }

    /// Returns the step that takes the median time; of two in the middle, the shorter one.
    pub fn median_step(&self) -> Option<TimelineStep> {
        let mut steps = self.steps();
        steps.sort_by(|a, b| a.takes.total_cmp(&b.takes));
        (!steps.is_empty()).then(|| steps.swap_remove((steps.len() - 1) / 2))
    }

    /// Returns the planned end of the last bar, or `None` if no bar has a plan.
    pub fn planned_end(&self) -> Option<f64> {
        let bars = self.rows.iter().flat_map(|row| &row.bars);
        bars.filter_map(|bar| bar.planned).map(|(_, until)| until).reduce(f64::max)
    }

    /// Returns the idle share of all rows' time between `from` and `until`, as a number from 0 to
    /// 1. It is 0 for an empty interval or without rows.
    pub fn bubble(&self, from: f64, until: f64) -> f64 {
        let whole = (until - from) * self.rows.len() as f64;
        let busy: f64 = self.rows.iter().map(|row| row.busy(from, until)).sum();
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

impl Row {
    /// Returns the time spent computing between `from` and `until`.
    pub fn busy(&self, from: f64, until: f64) -> f64 {
        let within = |bar: &Bar| (bar.end.min(until) - bar.start.max(from)).max(0.0);
        self.bars.iter().map(within).sum()
    }

    /// Returns the largest memory in use, or `None` if memory is not recorded.
    pub fn peak(&self) -> Option<f64> {
        self.memory.iter().map(|point| point.used).reduce(f64::max)
    }

    /// Returns the stages of its bars in ascending order: its first chunk, its second, and so on.
    pub fn stages(&self) -> Vec<u32> {
        let mut stages: Vec<u32> = self.bars.iter().filter_map(|bar| bar.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bubble_is_the_idle_share() {
        let bar = |start, end| Bar { start, end, ..Bar::default() };
        let row = |bars| Row { bars, ..Row::default() };
        let rows = vec![row(vec![bar(0.0, 2.0), bar(3.0, 4.0)]), row(vec![bar(1.0, 4.0)])];
        let timeline = Timeline { end: 4.0, rows, ..Timeline::default() };
        assert_eq!(timeline.bubble(0.0, 4.0), 0.25);
        assert_eq!(timeline.bubble(2.0, 3.0), 0.5);
        assert_eq!(timeline.bubble(4.0, 4.0), 0.0);
    }

    #[test]
    fn steps_span_from_mark_to_mark() {
        let mark = |at, name: &str| Mark { at, name: name.to_owned(), end: None };
        let steps = |marks| {
            let timeline = Timeline { end: 4.0, marks, ..Timeline::default() };
            let all = timeline.steps().into_iter();
            all.map(|step| (step.name, step.from, step.until)).collect::<Vec<_>>()
        };
        assert_eq!(steps(vec![]), [(String::new(), 0.0, 4.0)]);
        let (first, second) = (("a".to_owned(), 0.0, 3.0), ("b".to_owned(), 3.0, 4.0));
        assert_eq!(steps(vec![mark(0.0, "a"), mark(3.0, "b")]), [first.clone(), second]);
        // A mark at the end begins no step.
        assert_eq!(steps(vec![mark(0.0, "a"), mark(3.0, "b"), mark(4.0, "c")]).len(), 2);
        assert_eq!(steps(vec![mark(0.0, "a"), mark(3.0, ""), mark(3.0, "b")])[0], first);
        assert_eq!(Timeline::default().steps(), []);
        assert_eq!(Timeline::default().median_step(), None);
    }

    #[test]
    fn steps_with_own_ends_may_overlap() {
        let mark = |(at, end): (f64, f64)| Mark { at, end: Some(end), name: at.to_string() };
        // The second begins while the first still runs. The third begins after a pause. 80 s follow
        // the last.
        let marks = [(0.0, 6.0), (5.0, 8.0), (10.0, 12.0), (12.0, 20.0)].map(mark).to_vec();
        let timeline = Timeline { end: 100.0, marks, ..Timeline::default() };
        let steps = timeline.steps();
        let found: Vec<_> = steps.iter().map(|step| (step.until, step.takes)).collect();
        assert_eq!(found, [(6.0, 6.0), (8.0, 2.0), (12.0, 4.0), (20.0, 8.0)]);
        assert_eq!(timeline.median_step().map(|step| step.name), Some("10".to_owned()));
    }

    #[test]
    fn rows_report_stages_peak_and_planned_end() {
        let bar = |stage, planned| Bar { stage, planned, ..Bar::default() };
        let bars = vec![
            bar(Some(7), None),
            bar(Some(0), Some((0.0, 2.5))),
            bar(Some(7), None),
            bar(None, None),
        ];
        let memory = [1.0, 3.0, 2.0].map(|used| MemoryPoint { at: used, used }).to_vec();
        let row = Row { bars, memory, ..Row::default() };
        assert_eq!((row.stages(), row.peak()), (vec![0, 7], Some(3.0)));
        assert_eq!((Row::default().stages(), Row::default().peak()), (vec![], None));
        let timeline = Timeline { rows: vec![row, Row::default()], ..Timeline::default() };
        assert_eq!((timeline.planned_end(), Timeline::default().planned_end()), (Some(2.5), None));
    }
}
