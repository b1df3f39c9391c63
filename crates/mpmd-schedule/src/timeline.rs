//! A [`Timeline`]: the data of a drawing.

use serde::{Deserialize, Serialize};

/// The recorded or planned work of the ranks of a pipeline, or of the processes of a job.
///
/// Times are in [`Timeline::unit`], from the beginning of the timeline.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Timeline {
    /// The name of the schedule or the program.
    pub title: String,
    /// `s` for seconds, or `unit` if times are only relative to each other.
    pub unit: String,
    /// End time of the last work, in [`Timeline::unit`].
    pub end: f64,
    /// Unit of memory: `B` for bytes, or a word such as `activations`. If it is empty, small
    /// numbers count as activations and large ones as bytes.
    #[serde(default)]
    pub memory_unit: String,
    /// The steps, in the order of their starts.
    pub marks: Vec<TimelineMark>,
    /// One row for each rank, or for each process and device.
    pub rows: Vec<TimelineRow>,
}

/// The start of a step, with its name.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct TimelineMark {
    /// Start time of the step.
    pub at: f64,
    /// End time of the step. `None` if the step ends at the next mark, or at the end of the
    /// timeline.
    #[serde(default)]
    pub end: Option<f64>,
    /// Name of the step.
    pub name: String,
}

/// The work of one rank or device.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct TimelineRow {
    /// A name such as `rank 3`, or `process 1, cpu 0`.
    pub name: String,
    /// Number of the process that the row belongs to; `None` if it belongs to no process.
    pub process: Option<u32>,
    /// Computations, sorted by start; they do not overlap.
    pub bars: Vec<Bar>,
    /// Outgoing transfers, sorted by start; they may overlap.
    pub moves: Vec<Bar>,
    /// Intervals without computation, in order, each with its reason. They lie between the
    /// beginning and the end of the timeline, between two bars or inside one: a kernel that waits
    /// in a collective.
    pub gaps: Vec<TimelineGap>,
    /// Memory in use, in [`Timeline::memory_unit`]. Each value holds until the next point.
    pub memory: Vec<MemoryPoint>,
}

/// The kind of work that a bar shows.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(rename_all = "snake_case")]
pub enum BarKind {
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
    /// Any other work.
    #[default]
    Other,
}

/// A computation or a transfer, with start and end.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Bar {
    /// Kind of the bar.
    pub kind: BarKind,
    /// A name such as `2F7`, or the name of a kernel.
    pub name: String,
    /// The stage that is computed; `None` if the work belongs to no stage.
    pub stage: Option<u32>,
    /// The microbatch that is computed; `None` if the work belongs to no single microbatch.
    pub microbatch: Option<u32>,
    /// Start time, in [`Timeline::unit`].
    pub start: f64,
    /// End time, in [`Timeline::unit`].
    pub end: f64,
    /// Bytes moved by a transfer; `None` for a computation.
    pub bytes: Option<u64>,
    /// Index in [`Timeline::rows`] of the row that receives the transfer; `None` for a computation.
    #[serde(default)]
    pub to: Option<u32>,
    /// Number of the operation in the program; `None` in a simulation.
    pub op: Option<u64>,
    /// Time at which the program issued the operation; `None` in a simulation.
    pub issued: Option<f64>,
    /// Description of the last work that this bar had to wait for. `None` if the bar did not wait.
    pub waited_for: Option<String>,
    /// Planned (start, end), if the timeline is compared with a plan.
    pub planned: Option<(f64, f64)>,
    /// Source line that issued the operation, as `file:line:column`; `None` in a simulation.
    pub at: Option<String>,
}

/// An interval in which a row computes nothing.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct TimelineGap {
    /// Start time, in [`Timeline::unit`].
    pub start: f64,
    /// End time, in [`Timeline::unit`].
    pub end: f64,
    /// Description of the work that the row waited for: `stage 1, microbatch 4, forward of rank 0`.
    pub waits_for: String,
}

/// A value of the memory in use, valid from a time until the next point.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct MemoryPoint {
    /// Start of the value's validity, in [`Timeline::unit`].
    pub at: f64,
    /// Memory in use, in [`Timeline::memory_unit`].
    pub used: f64,
}

/// A step of a program, from its mark to its end time. Steps may overlap.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineStep {
    /// The name of the step's mark.
    pub name: String,
    /// Start time, in [`Timeline::unit`].
    pub from: f64,
    /// End time, in [`Timeline::unit`].
    pub until: f64,
    /// Time from the end of the previous step to the end of this one, in [`Timeline::unit`]. For
    /// the first step, its own length.
    pub takes: f64,
}

impl Timeline {
    /// Returns the steps of nonzero length, in order. A timeline without marks counts as one step
    /// without a name.
    pub fn steps(&self) -> Vec<TimelineStep> {
        let next = self
            .marks
            .iter()
            .skip(1)
            .map(|mark| mark.at)
            .chain([self.end]);

        let mut steps: Vec<TimelineStep> = Vec::new();
        for (mark, next) in self.marks.iter().zip(next) {
            let from = mark.at;
            let until = mark.end.unwrap_or(next);
            if until > from {
                let takes = until - steps.last().map_or(from, |before| before.until);
                steps.push(TimelineStep {
                    name: mark.name.clone(),
                    from,
                    until,
                    takes,
                });
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

    /// Returns the step of median duration; for an even number, the shorter of the two in the
    /// middle. `None` if there are no steps.
    pub fn median_step(&self) -> Option<TimelineStep> {
        let mut steps = self.steps();
        steps.sort_by(|a, b| a.takes.total_cmp(&b.takes));
        (!steps.is_empty()).then(|| steps.swap_remove((steps.len() - 1) / 2))
    }

    /// Returns the latest planned end of a bar, or `None` if no bar has a planned end.
    pub fn planned_end(&self) -> Option<f64> {
        let bars = self.rows.iter().flat_map(|row| &row.bars);
        bars.filter_map(|bar| bar.planned)
            .map(|(_, until)| until)
            .reduce(f64::max)
    }

    /// Returns the fraction of the time between `from` and `until` in which the rows are idle, from
    /// 0 to 1, over all rows. It is 0 for an empty interval or without rows.
    pub fn bubble(&self, from: f64, until: f64) -> f64 {
        let whole = (until - from) * self.rows.len() as f64;
        let busy: f64 = self.rows.iter().map(|row| row.busy(from, until)).sum();
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

impl TimelineRow {
    /// Returns how long the row computes between `from` and `until`, in [`Timeline::unit`].
    pub fn busy(&self, from: f64, until: f64) -> f64 {
        let within = |start: f64, end: f64| (end.min(until) - start.max(from)).max(0.0);
        let bars = self.bars.iter().map(|bar| within(bar.start, bar.end));
        let is_inside = |gap: &&TimelineGap| {
            let begun = self.bars.partition_point(|bar| bar.start <= gap.start);
            begun > 0 && gap.end <= self.bars[begun - 1].end
        };
        let waits = self.gaps.iter().filter(is_inside);
        let waits = waits.map(|gap| within(gap.start, gap.end));
        bars.sum::<f64>() - waits.sum::<f64>()
    }

    /// Returns the largest memory in use at any time, in [`Timeline::memory_unit`]. `None` if
    /// memory is not recorded.
    pub fn peak(&self) -> Option<f64> {
        self.memory.iter().map(|point| point.used).reduce(f64::max)
    }

    /// Returns the stages of the row's bars, ascending and without repeats.
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
        let bar = |start, end| Bar {
            start,
            end,
            ..Bar::default()
        };
        let row = |bars| TimelineRow {
            bars,
            ..TimelineRow::default()
        };
        let rows = vec![
            row(vec![bar(0.0, 2.0), bar(3.0, 4.0)]),
            row(vec![bar(1.0, 4.0)]),
        ];
        let timeline = Timeline {
            end: 4.0,
            rows,
            ..Timeline::default()
        };
        assert_eq!(timeline.bubble(0.0, 4.0), 0.25);
        assert_eq!(timeline.bubble(2.0, 3.0), 0.5);
        assert_eq!(timeline.bubble(4.0, 4.0), 0.0);
    }

    #[test]
    fn steps_span_from_mark_to_mark() {
        let mark = |at, name: &str| TimelineMark {
            at,
            name: name.to_owned(),
            end: None,
        };
        let steps = |marks| {
            let timeline = Timeline {
                end: 4.0,
                marks,
                ..Timeline::default()
            };
            let all = timeline.steps().into_iter();
            all.map(|step| (step.name, step.from, step.until))
                .collect::<Vec<_>>()
        };
        assert_eq!(steps(vec![]), [(String::new(), 0.0, 4.0)]);
        let (first, second) = (("a".to_owned(), 0.0, 3.0), ("b".to_owned(), 3.0, 4.0));
        assert_eq!(
            steps(vec![mark(0.0, "a"), mark(3.0, "b")]),
            [first.clone(), second]
        );
        // A mark at the end begins no step.
        assert_eq!(
            steps(vec![mark(0.0, "a"), mark(3.0, "b"), mark(4.0, "c")]).len(),
            2
        );
        assert_eq!(
            steps(vec![mark(0.0, "a"), mark(3.0, ""), mark(3.0, "b")])[0],
            first
        );
        assert_eq!(Timeline::default().steps(), []);
        assert_eq!(Timeline::default().median_step(), None);
    }

    #[test]
    fn steps_with_own_ends_may_overlap() {
        let mark = |at: f64, end: f64| TimelineMark {
            at,
            end: Some(end),
            name: at.to_string(),
        };
        // The second begins while the first still runs. The third begins after a pause. 80 s follow
        // the last.
        let marks = [(0.0, 6.0), (5.0, 8.0), (10.0, 12.0), (12.0, 20.0)]
            .map(|(at, end)| mark(at, end))
            .to_vec();
        let timeline = Timeline {
            end: 100.0,
            marks,
            ..Timeline::default()
        };
        let steps = timeline.steps();
        let found: Vec<_> = steps.iter().map(|step| (step.until, step.takes)).collect();
        assert_eq!(found, [(6.0, 6.0), (8.0, 2.0), (12.0, 4.0), (20.0, 8.0)]);
        assert_eq!(
            timeline.median_step().map(|step| step.name),
            Some("10".to_owned())
        );
    }

    #[test]
    fn rows_report_stages_peak_and_planned_end() {
        let bar = |stage, planned| Bar {
            stage,
            planned,
            ..Bar::default()
        };
        let bars = vec![
            bar(Some(7), None),
            bar(Some(0), Some((0.0, 2.5))),
            bar(Some(7), None),
            bar(None, None),
        ];
        let memory = [1.0, 3.0, 2.0]
            .map(|used| MemoryPoint { at: used, used })
            .to_vec();
        let row = TimelineRow {
            bars,
            memory,
            ..TimelineRow::default()
        };
        assert_eq!((row.stages(), row.peak()), (vec![0, 7], Some(3.0)));
        assert_eq!(
            (
                TimelineRow::default().stages(),
                TimelineRow::default().peak()
            ),
            (vec![], None)
        );
        let timeline = Timeline {
            rows: vec![row, TimelineRow::default()],
            ..Timeline::default()
        };
        assert_eq!(
            (timeline.planned_end(), Timeline::default().planned_end()),
            (Some(2.5), None)
        );
    }
}
