//! Conversion of a merged run to a [`Timeline`].

use std::collections::BTreeMap;

use super::merge::{KernelRun, TracedOperation, TracedPiece, TracedRun};
use super::reasons::short;
use crate::trace::{Label, Role};
use mpmd_schedule::timeline::{
    Bar, BarKind, MemoryPoint, Timeline, TimelineGap, TimelineMark, TimelineRow,
};

/// Minimum idle time, in seconds, that is shown as a gap with a reason.
const SHORT: f64 = 1e-6;

impl TracedRun {
    /// Returns the run's timeline, with a row for each device.
    pub fn timeline(&self) -> Timeline {
        let step = |step: &super::RunStep| TimelineMark {
            at: step.start,
            end: Some(step.end),
            name: format!("step {}", step.number),
        };
        let devices = |process: &super::TracedProcess| 0..process.devices.len().max(1) as u32;

        // Index of each process's first row.
        let mut first = BTreeMap::new();
        let mut next = 0;
        for process in &self.processes {
            first.insert(process.process, next);
            next += devices(process).end;
        }

        let processes = self.processes.iter();
        let rows = processes
            .flat_map(|process| {
                devices(process).map(|device| self.row(process.process, device, &first))
            })
            .collect();

        Timeline {
            title: self.title.clone(),
            unit: "s".to_owned(),
            end: self.end,
            memory_unit: "B".to_owned(),
            marks: self.steps.iter().map(step).collect(),
            rows,
        }
    }

    /// Returns the run's timeline with the planned time of each pass. `plan` is a timeline of one
    /// step: a simulation of the pipeline's schedule with the run's own [costs](Self::costs). The
    /// plan of a step begins with the step's first pass. Bars after the last step have no plan.
    pub fn timeline_beside(&self, plan: &Timeline) -> Timeline {
        let bars = plan.rows.iter().flat_map(|row| &row.bars);
        let span = |bar: &Bar| ((bar.kind, bar.stage, bar.microbatch), (bar.start, bar.end));
        let planned: BTreeMap<_, _> = bars.map(span).collect();

        // If both gradients are one bar in the plan, the share of the input gradient in it.
        let costs = self.costs().ok();
        let share = |stage: Option<u32>| {
            let stage = costs
                .as_ref()
                .zip(stage)
                .and_then(|(costs, stage)| costs.stage.get(stage as usize));
            let both = stage.map(|stage| {
                (
                    stage.backward_input,
                    stage.backward_input + stage.backward_weight,
                )
            });
            both.filter(|(_, both)| *both > 0.0)
                .map_or(0.5, |(input, both)| input / both)
        };

        let find = |bar: &Bar| {
            let of = |kind| planned.get(&(kind, bar.stage, bar.microbatch)).copied();
            let whole = || {
                of(BarKind::Backward)
                    .map(|(start, end)| (start, start + share(bar.stage) * (end - start), end))
            };

            match bar.kind {
                BarKind::Forward => of(BarKind::Forward),
                BarKind::BackwardInput => of(BarKind::BackwardInput)
                    .or_else(|| whole().map(|(start, middle, _)| (start, middle))),
                BarKind::BackwardWeight => of(BarKind::BackwardWeight)
                    .or_else(|| whole().map(|(_, middle, end)| (middle, end))),
                BarKind::Backward => of(BarKind::Backward).or_else(|| {
                    let (start, _) = of(BarKind::BackwardInput)?;
                    Some((start, of(BarKind::BackwardWeight)?.1))
                }),
                _ => None,
            }
        };

        let mut timeline = self.timeline();
        let step_of = |op: u64| self.steps.partition_point(|step| step.last_op < op);

        let mut begins: BTreeMap<usize, f64> = BTreeMap::new();
        let bars = timeline.rows.iter().flat_map(|row| &row.bars);
        let counts = |bar: &&Bar| self.is_of_a_step(bar.op.unwrap_or(0));
        for bar in bars
            .filter(|bar| bar.kind == BarKind::Forward)
            .filter(counts)
        {
            let begin = begins
                .entry(step_of(bar.op.unwrap_or(0)))
                .or_insert(bar.start);
            *begin = begin.min(bar.start);
        }

        let bars = timeline.rows.iter_mut().flat_map(|row| &mut row.bars);
        for bar in bars.filter(|bar| self.is_of_a_step(bar.op.unwrap_or(0))) {
            let begin = begins.get(&step_of(bar.op.unwrap_or(0)));
            bar.planned =
                begin.and_then(|begin| find(bar).map(|(start, end)| (begin + start, begin + end)));
        }
        timeline
    }

    /// Returns the timeline row of one device. The row of device 0 also shows the pieces that the
    /// process sends. `first` has the index of each process's first row.
    fn row(&self, process: u32, device: u32, first: &BTreeMap<u32, u32>) -> TimelineRow {
        let of_row = |kernel: &&KernelRun| (kernel.process, kernel.device) == (process, device);
        let kernels: Vec<&KernelRun> = self.kernels.iter().filter(of_row).collect();
        let mut row = TimelineRow {
            name: format!("process {process}, {}", self.device_name(process, device)),
            process: Some(process),
            bars: kernels.iter().map(|kernel| self.bar(kernel)).collect(),
            ..TimelineRow::default()
        };

        let mut idle: f64 = 0.0;
        for kernel in &kernels {
            if kernel.start - idle >= SHORT {
                let waits_for = self.why_idle(kernel, idle);
                row.gaps.push(TimelineGap {
                    start: idle,
                    end: kernel.start,
                    waits_for,
                });
            }
            idle = idle.max(kernel.end);
            row.memory.push(MemoryPoint {
                at: kernel.start,
                used: kernel.memory_at_start as f64,
            });
            row.memory.push(MemoryPoint {
                at: kernel.end,
                used: kernel.memory_at_end as f64,
            });
        }

        let waits = self.collective_waits.iter();
        let waits = waits.filter(|wait| (wait.process, wait.device) == (process, device));
        let long = waits.filter(|wait| wait.end - wait.start >= SHORT);
        row.gaps.extend(long.map(|wait| TimelineGap {
            start: wait.start,
            end: wait.end,
            waits_for: self.why_in_collective(wait),
        }));
        row.gaps.sort_by(|a, b| a.start.total_cmp(&b.start));

        if self.end - idle >= SHORT {
            row.gaps.push(TimelineGap {
                start: idle,
                end: self.end,
                waits_for: "nothing more to do".to_owned(),
            });
        }

        if device == 0 {
            let given = self.pieces.iter().filter(|piece| piece.from == process);
            row.moves = given
                .filter_map(|piece| self.move_of(piece, first))
                .collect();
            row.moves.sort_by(|a, b| a.start.total_cmp(&b.start));
        }

        row
    }

    fn bar(&self, kernel: &KernelRun) -> Bar {
        let operation = self.operation(kernel.process, kernel.op);
        let label = operation.and_then(|operation| operation.label);
        let unfinished = if kernel.ended { "" } else { " (did not end)" };

        Bar {
            kind: kind(label),
            name: format!("{}{unfinished}", name(operation, kernel.op)),
            stage: label.map(|label| label.stage),
            microbatch: label.and_then(|label| label.microbatch),
            start: kernel.start,
            end: kernel.end,
            op: Some(kernel.op),
            issued: operation.map(|operation| operation.issued),
            waited_for: kernel
                .waited_for
                .map(|op| self.reason(kernel.process, op, kernel.since)),
            at: operation.map(|operation| operation.at.to_string()),
            ..Bar::default()
        }
    }

    fn move_of(&self, piece: &TracedPiece, first: &BTreeMap<u32, u32>) -> Option<Bar> {
        let (start, end) = piece.on_its_way()?;
        let known = |process| self.operation(process, piece.op);
        let operation = known(piece.from).or(known(piece.to));
        let label = operation.and_then(|operation| operation.label);

        let name = name(operation, piece.op);
        Some(Bar {
            kind: BarKind::Move,
            name: format!("{name} to process {}", piece.to),
            stage: label.map(|label| label.stage),
            microbatch: label.and_then(|label| label.microbatch),
            start,
            end,
            bytes: Some(piece.bytes),
            to: first.get(&piece.to).copied(),
            op: Some(piece.op),
            issued: operation.map(|operation| operation.issued),
            at: operation.map(|operation| operation.at.to_string()),
            ..Bar::default()
        })
    }

    /// Returns the fraction of the time between `from` and `until`, in seconds, in which a
    /// process's devices computed. From 0 to 1. Kernels that wait in a collective do not compute.
    pub fn busy(&self, process: u32, from: f64, until: f64) -> f64 {
        let kernels = self.kernels.iter();
        let ran = kernels
            .filter(|kernel| kernel.process == process)
            .map(|kernel| (kernel.start, kernel.end));
        let ran = self.share_of_devices(process, ran, from, until);
        ran - self.waiting_in_collectives(process, from, until)
    }

    /// Returns the fraction of the time between `from` and `until`, in seconds, in which kernels of
    /// a process waited for other devices in collectives. From 0 to 1.
    pub fn waiting_in_collectives(&self, process: u32, from: f64, until: f64) -> f64 {
        let waits = self.collective_waits.iter();
        let waited = waits
            .filter(|wait| wait.process == process)
            .map(|wait| (wait.start, wait.end));
        self.share_of_devices(process, waited, from, until)
    }

    /// Returns the sum of the intervals `(start, end)`, as far as they lie between `from` and
    /// `until`, as a fraction of that time of all devices of a process.
    fn share_of_devices(
        &self,
        process: u32,
        intervals: impl Iterator<Item = (f64, f64)>,
        from: f64,
        until: f64,
    ) -> f64 {
        let owned = self.processes.iter().find(|known| known.process == process);
        let count = owned.map_or(1, |process| process.devices.len().max(1));
        let within: f64 = intervals
            .map(|(start, end)| (end.min(until) - start.max(from)).max(0.0))
            .sum();
        if until > from {
            within / (count as f64 * (until - from))
        } else {
            0.0
        }
    }
}

fn kind(label: Option<Label>) -> BarKind {
    match label.map(|label| label.role) {
        Some(Role::Forward) => BarKind::Forward,
        Some(Role::BackwardInput) => BarKind::BackwardInput,
        Some(Role::BackwardWeight) => BarKind::BackwardWeight,
        Some(Role::Backward) => BarKind::Backward,
        _ => BarKind::Other,
    }
}

/// Returns the displayed name of an operation: for a pass or move its name in torch's text format,
/// such as `2F7`, otherwise its description. An operation issued before the trace began has only
/// its number `op`.
fn name(operation: Option<&TracedOperation>, op: u64) -> String {
    let Some(operation) = operation else {
        return format!("operation {op}");
    };

    let description = short(&operation.description);
    let Some(Label {
        stage,
        microbatch: Some(microbatch),
        role,
    }) = operation.label
    else {
        return description.to_owned();
    };

    match role {
        Role::Forward | Role::SendForward => format!("{stage}F{microbatch}"),
        Role::BackwardInput | Role::SendBackward => format!("{stage}I{microbatch}"),
        Role::BackwardWeight => format!("{stage}W{microbatch}"),
        Role::Backward => format!("{stage}B{microbatch}"),
        _ => description.to_owned(),
    }
}
