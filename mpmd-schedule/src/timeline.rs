//! A [`Timeline`]: what pictures are drawn of.

use serde::{Deserialize, Serialize};

/// What the ranks of a pipeline, or the processes of a job, did or will do.
///
/// Times are in [`Timeline::unit`], from the beginning of what is shown.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Timeline {
    /// What it is of: the name of a schedule, or of a program.
    pub title: String,
    /// `s`, or `unit` where times are only relative to each other.
    pub unit: String,
    /// When the last bar ends.
    pub end: f64,
    /// What memory is counted in: `B` for bytes, or a word for people, as `activations`. Where it
    /// is empty, small numbers are taken for activations and large ones for bytes.
    #[serde(default)]
    pub memory_unit: String,
    /// Where steps begin and end, in order.
    pub marks: Vec<Mark>,
    /// By rank, or by process and device.
    pub rows: Vec<Row>,
}

/// A point in time with a name.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Mark {
    /// When.
    pub at: f64,
    /// The end of the step that begins there. `None`: the next mark, or the end of the timeline.
    #[serde(default)]
    pub end: Option<f64>,
    /// What begins there.
    pub name: String,
}

/// What one rank or device does.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// As `rank 3`, or `process 1, cpu 0`.
    pub name: String,
    /// The process, where there is one.
    pub process: Option<u32>,
    /// What it computes, by start; bars do not overlap.
    pub bars: Vec<Bar>,
    /// What goes out from it, by start; these may overlap.
    pub moves: Vec<Bar>,
    /// When it computes nothing between the beginning and the end, in order, and why.
    pub gaps: Vec<Gap>,
    /// Memory in use: each holds until the next.
    pub memory: Vec<MemoryPoint>,
}

/// What a bar is of.
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
    /// Both gradients as one.
    Backward,
    /// An array on its way.
    Move,
    /// Anything else.
    #[default]
    Other,
}

/// Something with a beginning and an end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Bar {
    /// What kind of thing.
    pub kind: Kind,
    /// As `2F7`, or the name of a kernel.
    pub name: String,
    /// The stage, where it is of one.
    pub stage: Option<u32>,
    /// The microbatch, where it is of one.
    pub microbatch: Option<u32>,
    /// When it begins.
    pub start: f64,
    /// When it ends.
    pub end: f64,
    /// Bytes that are moved.
    pub bytes: Option<u64>,
    /// The place in [`Timeline::rows`] that a move goes to.
    #[serde(default)]
    pub to: Option<u32>,
    /// The number of the operation in the program.
    pub op: Option<u64>,
    /// When it was issued, in a run.
    pub issued: Option<f64>,
    /// What it waited for last before it began, for people.
    pub waited_for: Option<String>,
    /// When the plan has it begin and end, where there is one to compare with.
    pub planned: Option<(f64, f64)>,
    /// The line of the program.
    pub at: Option<String>,
}

/// A time in which a row computes nothing.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Gap {
    /// From when.
    pub start: f64,
    /// Until when.
    pub end: f64,
    /// What was waited for, for people: `stage 1, microbatch 4, forward of rank 0`.
    pub waits_for: String,
}

/// How much memory is in use from a time on.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct MemoryPoint {
    /// From when.
    pub at: f64,
    /// Bytes, or activations in a schedule without bytes.
    pub used: f64,
}

/// A step of a program, from its mark to its end. Steps may overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The name of the mark that begins it.
    pub name: String,
    /// When it begins.
    pub from: f64,
    /// When it ends.
    pub until: f64,
    /// Time from the end of the previous step to the end of this one; of the first step, its
    /// length.
    pub takes: f64,
}

impl Timeline {
    /// Returns the steps that take time. A timeline without marks is one step without a name.
    pub fn steps(&self) -> Vec<Step> {
        let next = self.marks.iter().skip(1).map(|mark| mark.at).chain([self.end]);
        let mut steps: Vec<Step> = Vec::new();
        for (mark, next) in self.marks.iter().zip(next) {
            let (from, until) = (mark.at, mark.end.unwrap_or(next));
            if until > from {
                let takes = until - steps.last().map_or(from, |before| before.until);
                steps.push(Step { name: mark.name.clone(), from, until, takes });
            }
        }
        if steps.is_empty() && self.end > 0.0 {
            steps.push(Step { name: String::new(), from: 0.0, until: self.end, takes: self.end });
        }
        steps
    }

    /// Returns the step that takes the median time; of two in the middle, the shorter one.
    pub fn median_step(&self) -> Option<Step> {
        let mut steps = self.steps();
        steps.sort_by(|a, b| a.takes.total_cmp(&b.takes));
        (!steps.is_empty()).then(|| steps.swap_remove((steps.len() - 1) / 2))
    }

    /// When the last bar ends by the plan; none where no bar has been planned.
    pub fn planned_end(&self) -> Option<f64> {
        let bars = self.rows.iter().flat_map(|row| &row.bars);
        bars.filter_map(|bar| bar.planned).map(|(_, until)| until).reduce(f64::max)
    }

    /// The time from `from` to `until` in which no row computes, as a share of all rows' time; 0
    /// where there is none.
    pub fn bubble(&self, from: f64, until: f64) -> f64 {
        let whole = (until - from) * self.rows.len() as f64;
        let busy: f64 = self.rows.iter().map(|row| row.busy(from, until)).sum();
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

impl Row {
    /// How long it computes from `from` to `until`.
    pub fn busy(&self, from: f64, until: f64) -> f64 {
        let within = |bar: &Bar| (bar.end.min(until) - bar.start.max(from)).max(0.0);
        self.bars.iter().map(within).sum()
    }

    /// The most memory it has in use; none where that is not known.
    pub fn peak(&self) -> Option<f64> {
        self.memory.iter().map(|point| point.used).reduce(f64::max)
    }

    /// The stages of its bars, in ascending order: its first chunk, its second, …
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
    fn the_bubble_is_what_rows_do_not_compute() {
        let bar = |start, end| Bar { start, end, ..Bar::default() };
        let row = |bars| Row { bars, ..Row::default() };
        let rows = vec![row(vec![bar(0.0, 2.0), bar(3.0, 4.0)]), row(vec![bar(1.0, 4.0)])];
        let timeline = Timeline { end: 4.0, rows, ..Timeline::default() };
        assert_eq!(timeline.bubble(0.0, 4.0), 0.25);
        assert_eq!(timeline.bubble(2.0, 3.0), 0.5);
        assert_eq!(timeline.bubble(4.0, 4.0), 0.0);
    }

    #[test]
    fn steps_are_between_marks() {
        let mark = |at, name: &str| Mark { at, name: name.to_owned(), end: None };
        let steps = |marks| {
            let timeline = Timeline { end: 4.0, marks, ..Timeline::default() };
            let all = timeline.steps().into_iter();
            all.map(|step| (step.name, step.from, step.until)).collect::<Vec<_>>()
        };
        assert_eq!(steps(vec![]), [(String::new(), 0.0, 4.0)]);
        let (first, second) = (("a".to_owned(), 0.0, 3.0), ("b".to_owned(), 3.0, 4.0));
        assert_eq!(steps(vec![mark(0.0, "a"), mark(3.0, "b")]), [first.clone(), second]);
        // A mark at the end begins nothing.
        assert_eq!(steps(vec![mark(0.0, "a"), mark(3.0, "b"), mark(4.0, "c")]).len(), 2);
        assert_eq!(steps(vec![mark(0.0, "a"), mark(3.0, ""), mark(3.0, "b")])[0], first);
        assert_eq!(Timeline::default().steps(), []);
        assert_eq!(Timeline::default().median_step(), None);
    }

    #[test]
    fn steps_end_at_their_own_ends() {
        let mark = |(at, end): (f64, f64)| Mark { at, end: Some(end), name: at.to_string() };
        // The second begins while the first still runs, the third after a pause, and 80 follow.
        let marks = [(0.0, 6.0), (5.0, 8.0), (10.0, 12.0), (12.0, 20.0)].map(mark).to_vec();
        let timeline = Timeline { end: 100.0, marks, ..Timeline::default() };
        let steps = timeline.steps();
        let found: Vec<_> = steps.iter().map(|step| (step.until, step.takes)).collect();
        assert_eq!(found, [(6.0, 6.0), (8.0, 2.0), (12.0, 4.0), (20.0, 8.0)]);
        assert_eq!(timeline.median_step().map(|step| step.name), Some("10".to_owned()));
    }

    #[test]
    fn rows_know_their_stages_their_peak_and_the_plan() {
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
