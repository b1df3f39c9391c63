//! Numbers from a merged run: costs for simulations, and a text summary.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::merge::{KernelRun, TracedRun};
use super::reasons::bytes;
use crate::trace::{Label, Role};
use mpmd_base::{counted, seconds_text};
use mpmd_schedule::{Costs, StageCosts};

/// Maximum number of causes of waits that a summary lists, the longest first.
const LONGEST_WAITS: usize = 8;

/// Maximum number of annotation rows in a summary. Each name has a row for each process.
const MOST_ANNOTATIONS: usize = 32;

/// The reason that stage costs cannot be computed from a run.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostsError {
    /// No operation of the run is labelled as a pass.
    #[error("the run has no passes of a pipeline's stages")]
    NoPasses,
    /// A pass of one stage is missing.
    #[error("the run has no {} of stage {stage}", .role.name())]
    Missing {
        /// The stage without the pass.
        stage: u32,
        /// The role of the missing pass.
        role: Role,
    },
}

/// The measured times of all stages' passes and moves, by stage and role.
#[derive(Default)]
struct RoleTimes {
    /// Durations in seconds, one for each pass or move.
    seconds: BTreeMap<(u32, Role), Vec<f64>>,
    /// Size in bytes of the largest move.
    bytes: BTreeMap<(u32, Role), u64>,
}

/// The time span and bytes of all pieces of an operation.
struct MoveTime {
    from: f64,
    until: f64,
    bytes: u64,
}

impl RoleTimes {
    fn add(&mut self, label: Label, took: f64) {
        self.seconds
            .entry((label.stage, label.role))
            .or_default()
            .push(took);
    }

    /// Returns the median time of a stage's passes or moves, rounded to nanoseconds, the
    /// resolution of traces.
    fn median_of(&mut self, stage: u32, role: Role) -> Option<f64> {
        let times = self.seconds.get_mut(&(stage, role))?;
        Some((median(times) * 1e9).round() / 1e9)
    }

    fn bytes_of(&self, stage: u32, role: Role) -> u64 {
        self.bytes.get(&(stage, role)).copied().unwrap_or(0)
    }

    fn costs_of(&mut self, stage: u32) -> Result<StageCosts, CostsError> {
        let missing = |role| CostsError::Missing { stage, role };
        let forward = self
            .median_of(stage, Role::Forward)
            .ok_or(missing(Role::Forward))?;
        let gradients = (
            self.median_of(stage, Role::BackwardInput),
            self.median_of(stage, Role::BackwardWeight),
        );
        let (backward_input, backward_weight) = match gradients {
            (Some(input), Some(weight)) => (input, weight),
            (Some(both), None) | (None, Some(both)) => (both / 2.0, both / 2.0),
            (None, None) => return Err(missing(Role::BackwardInput)),
        };

        Ok(StageCosts {
            forward,
            backward_input,
            backward_weight,
            // Between stages of one process nothing is sent.
            send_forward: self.median_of(stage, Role::SendForward).unwrap_or(0.0),
            send_backward: self.median_of(stage, Role::SendBackward).unwrap_or(0.0),
            output_bytes: self.bytes_of(stage, Role::SendForward),
            gradient_bytes: self.bytes_of(stage, Role::SendBackward),
            ..StageCosts::default()
        })
    }
}

impl TracedRun {
    /// Returns the median time in seconds of each stage's passes and moves.
    ///
    /// The first step is skipped if there are others, since it contains one-time work. Operations
    /// after the last step do not count. A pass on several devices takes as long as its slowest
    /// device. A pass of several operations takes the sum of their times. A repeated forward pass
    /// counts as part of the input gradient that needs it. If a stage computes both gradients in
    /// one pass, each gets half of the time. The bytes of a move are those of the largest one. A
    /// trace does not show the bytes that a pass keeps, so these are 0.
    ///
    /// # Errors
    ///
    /// If the run has no passes, or a stage has no forward pass or no gradient.
    pub fn costs(&self) -> Result<Costs, CostsError> {
        let after = match self.steps.as_slice() {
            [first, _, ..] => first.last_op,
            _ => 0,
        };

        let mut times = RoleTimes::default();
        self.add_pass_times(after, &mut times);
        self.add_move_times(after, &mut times);

        let passes = [Role::Forward, Role::BackwardInput, Role::BackwardWeight];
        let stages = times
            .seconds
            .keys()
            .filter(|(_, role)| passes.contains(role))
            .map(|(stage, _)| stage + 1)
            .max();
        let stages = stages.ok_or(CostsError::NoPasses)?;

        let stage = (0..stages)
            .map(|stage| times.costs_of(stage))
            .collect::<Result<_, _>>()?;
        Ok(Costs {
            unit: "s".to_owned(),
            stage,
        })
    }

    /// Returns true if operation `op` counts for the costs: it belongs to a step and its number is
    /// above `after`.
    fn counts(&self, op: u64, after: u64) -> bool {
        op > after && self.is_of_a_step(op)
    }

    /// Adds to `times` the durations of all passes in each step after operation `after`.
    fn add_pass_times(&self, after: u64, times: &mut RoleTimes) {
        let mut took: BTreeMap<u64, (Label, f64)> = BTreeMap::new();
        for kernel in self
            .kernels
            .iter()
            .filter(|kernel| self.counts(kernel.op, after) && kernel.ended)
        {
            let Some(label) = self
                .operation(kernel.process, kernel.op)
                .and_then(|known| known.label)
            else {
                continue;
            };

            // A repeated forward pass counts with the gradient that needs it. A pass with both
            // gradients is divided later.
            let role = match label.role {
                Role::Recompute | Role::Backward => Role::BackwardInput,
                role => role,
            };
            let label = Label { role, ..label };
            let (_, longest) = took.entry(kernel.op).or_insert((label, 0.0));
            *longest = longest.max(kernel.end - kernel.start);
        }

        let step = |op: u64| self.steps.partition_point(|step| step.last_op < op);
        let mut passes: BTreeMap<(usize, Label), f64> = BTreeMap::new();
        for (op, (label, took)) in took {
            *passes.entry((step(op), label)).or_default() += took;
        }
        for ((_, label), took) in passes {
            times.add(label, took);
        }
    }

    /// Adds to `times` the durations and bytes of all moves between stages after operation `after`.
    fn add_move_times(&self, after: u64, times: &mut RoleTimes) {
        let mut moved: BTreeMap<u64, MoveTime> = BTreeMap::new();
        for piece in self
            .pieces
            .iter()
            .filter(|piece| self.counts(piece.op, after))
        {
            let Some((posted, came)) = piece.on_its_way() else {
                continue;
            };
            let start = piece.offered.unwrap_or(posted);
            let time = moved.entry(piece.op).or_insert(MoveTime {
                from: start,
                until: came,
                bytes: 0,
            });
            time.from = time.from.min(start);
            time.until = time.until.max(came);
            time.bytes = time.bytes.saturating_add(piece.bytes);
        }

        let processes = || self.processes.iter().map(|process| process.process);
        for (op, time) in moved {
            let operation = processes().find_map(|process| self.operation(process, op));
            if let Some(label) = operation.and_then(|operation| operation.label) {
                times.add(label, time.until - time.from);
                let largest = times.bytes.entry((label.stage, label.role)).or_default();
                *largest = time.bytes.max(*largest);
            }
        }
    }

    /// Returns the summary that `mpmd trace` prints: several lines of text.
    pub fn summary(&self) -> String {
        let mut text = String::new();
        let name = if self.title.is_empty() {
            "a run"
        } else {
            &self.title
        };

        let sent = self
            .pieces
            .iter()
            .fold(0u64, |sent, piece| sent.saturating_add(piece.bytes));
        let _ = writeln!(
            text,
            "{name}: {}, {}, {} sent ({}), {}",
            counted(self.processes.len(), "process"),
            counted(self.kernels.len(), "kernel"),
            counted(self.pieces.len(), "piece"),
            bytes(sent),
            seconds_text(self.end)
        );
        let _ = writeln!(
            text,
            "times of different processes agree within {}",
            seconds_text(self.bound)
        );

        for problem in &self.problems {
            let _ = writeln!(text, "note: {problem}");
        }

        self.summarize_steps(&mut text);
        let (from, until) = self.window();

        for process in &self.processes {
            let busy = self.busy(process.process, from, until);
            let peak = self
                .kernels
                .iter()
                .filter(|kernel| kernel.process == process.process);
            let peak = peak
                .map(|kernel| kernel.memory_at_start.max(kernel.memory_at_end))
                .max()
                .unwrap_or(0);

            let inside = match self.waiting_in_collectives(process.process, from, until) {
                0.0 => String::new(),
                share => format!(" ({:.1} % inside collectives)", 100.0 * share),
            };
            let _ = writeln!(
                text,
                "process {}: computes {:.1} %, bubble {:.1} %{inside}, up to {} on a device",
                process.process,
                100.0 * busy,
                100.0 * (1.0 - busy),
                bytes(peak)
            );
        }

        self.summarize_waits(&mut text, from, until);
        self.summarize_annotations(&mut text);
        text
    }

    fn summarize_steps(&self, text: &mut String) {
        // A step takes the time from the previous end to its own end, since steps may overlap.
        let ends: Vec<f64> = self.steps.iter().map(|step| step.end).collect();
        let mut took: Vec<f64> = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let _ = match (self.steps.as_slice(), took.is_empty()) {
            ([], _) => writeln!(text, "the program ended no step"),
            ([one], _) => writeln!(
                text,
                "step {}: {}",
                one.number,
                seconds_text(one.end - one.start)
            ),
            ([first, .., last], _) => {
                let longest = took.iter().copied().fold(0.0, f64::max);
                let median = median(&mut took);
                let first = first.number;
                let last = last.number;
                let median = seconds_text(median);
                let longest = seconds_text(longest);
                writeln!(
                    text,
                    "steps {first} to {last}: {median} each (median), {longest} at most"
                )
            }
        };
    }

    fn summarize_waits(&self, text: &mut String, from: f64, until: f64) {
        let mut idle: BTreeMap<String, (f64, usize)> = BTreeMap::new();

        let mut last: Option<&KernelRun> = None;
        for kernel in self
            .kernels
            .iter()
            .filter(|kernel| kernel.start >= from && kernel.end <= until)
        {
            let before = last.replace(kernel);
            let Some(before) = before else { continue };
            let same = (before.process, before.device) == (kernel.process, kernel.device);
            if same && kernel.start > before.end {
                let why = self.why_idle(kernel, before.end);
                let (whole, count) = idle
                    .entry(format!("process {}: {why}", kernel.process))
                    .or_default();
                *whole = *whole + kernel.start - before.end;
                *count += 1;
            }
        }

        for wait in self
            .collective_waits
            .iter()
            .filter(|wait| wait.start >= from && wait.end <= until)
        {
            let why = self.why_in_collective(wait);
            let (whole, count) = idle
                .entry(format!("process {}: {why}", wait.process))
                .or_default();
            *whole = *whole + wait.end - wait.start;
            *count += 1;
        }

        let mut idle: Vec<(String, (f64, usize))> = idle.into_iter().collect();
        idle.sort_by(|a, b| b.1.0.total_cmp(&a.1.0));
        if !idle.is_empty() {
            let _ = writeln!(text, "the longest waits of devices, by cause:");
        }

        for (cause, (whole, count)) in idle.into_iter().take(LONGEST_WAITS) {
            let times = if count == 1 {
                String::new()
            } else {
                format!(" ({count} times)")
            };
            let _ = writeln!(text, "  {:>9}  {cause}{times}", seconds_text(whole));
        }
    }

    fn summarize_annotations(&self, text: &mut String) {
        let mut took: BTreeMap<(&str, u32), Vec<f64>> = BTreeMap::new();
        for range in &self.annotations {
            took.entry((&range.name, range.process))
                .or_default()
                .push(range.end - range.start);
        }

        if !took.is_empty() {
            let _ = writeln!(text, "ranges that the program named:");
        }
        let more = took.len().saturating_sub(MOST_ANNOTATIONS);

        for ((name, process), mut took) in took.into_iter().take(MOST_ANNOTATIONS) {
            let times = match took.len() {
                1 => "once".to_owned(),
                several => format!("{several} times"),
            };

            let whole = took.iter().sum();
            let longest = took.iter().copied().fold(0.0, f64::max);
            let [whole, median, longest] = [whole, median(&mut took), longest].map(seconds_text);
            let _ = writeln!(
                text,
                "  {whole:>9}  process {process}: {name}, {times} ({median} median, {longest} at \
                 most)"
            );
        }

        if more > 0 {
            let _ = writeln!(text, "  and {more} more, by name and process");
        }
    }

    /// Returns (start, end) in seconds of the time covered by the steps. Skips the first step if
    /// there are others. Without steps, returns the times of the whole run.
    fn window(&self) -> (f64, f64) {
        match self.steps.as_slice() {
            [] => (0.0, self.end),
            [one] => (one.start, one.end),
            [first, .., last] => (first.end, last.end),
        }
    }
}

/// Returns the median, or the lower of the two middle values. Returns 0 for an empty list.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times
        .get(times.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0.0)
}
