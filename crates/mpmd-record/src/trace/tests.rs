//! Tests of the views of a run, which is written by hand here.

use super::*;
use crate::trace::{Label, Role};

mod annotations;

const MILLI: u64 = 1_000_000;

/// A trace under construction. Its methods take milliseconds since the start of the trace.
struct Writing {
    trace: ProcessTrace,
}

impl Writing {
    /// Creates the trace of a process that begins `begins` milliseconds after time 0.
    fn new(process: u32, begins: u64) -> Self {
        let about = TraceHeader {
            process,
            processes: 2,
            devices: vec![process],
            program: "written".to_owned(),
            clock: "one".to_owned(),
            monotonic: begins * MILLI,
            ..TraceHeader::default()
        };
        Self {
            trace: ProcessTrace {
                about,
                ended: true,
                ..ProcessTrace::default()
            },
        }
    }

    fn text(&mut self, text: &str) -> u32 {
        self.trace.texts.push(text.to_owned());
        self.trace.texts.len() as u32 - 1
    }

    fn note(&mut self, at: u64, what: TraceEventKind) {
        self.trace.events.push(TraceEvent {
            at: at * MILLI,
            what,
        });
    }

    fn issued(&mut self, at: u64, op: u64, what: &str, label: Option<Label>, source: u64) {
        let (text, line) = (self.text(what), self.text(&format!("main.rs:{op}:1")));
        self.note(
            at,
            TraceEventKind::Issued {
                op,
                label,
                text,
                line,
                source,
            },
        );
    }

    fn kernel(&mut self, (since, start, end): (u64, u64, u64), op: u64, input: u64) {
        let since = since * MILLI;
        self.note(
            start,
            TraceEventKind::Started {
                op,
                device: 0,
                since,
                input,
                memory: 100 * op,
            },
        );
        self.note(
            end,
            TraceEventKind::Ended {
                op,
                device: 0,
                memory: 50,
            },
        );
        self.note(end, TraceEventKind::Over { op });
    }

    fn piece(&mut self, at: u64, step: PieceStep, op: u64, peer: u32) {
        let ticket = u64::from(step == PieceStep::Posted) * op;
        self.note(
            at,
            TraceEventKind::Piece {
                step,
                op,
                piece: 0,
                peer,
                bytes: 2048,
                ticket,
            },
        );
    }

    fn end(mut self) -> ProcessTrace {
        self.trace.events.sort_by_key(|event| event.at);
        self.trace
    }
}

fn label(stage: u32, microbatch: u32, role: Role) -> Option<Label> {
    Some(Label {
        stage,
        microbatch: Some(microbatch),
        role,
    })
}

/// Returns the traces of two processes that run two steps: see [`steps_of_two_stages`].
fn two_stages() -> Vec<ProcessTrace> {
    steps_of_two_stages(2)
}

/// Returns the traces of two processes. They run steps of two stages with one microbatch. Each
/// step has a forward pass of 10 ms on each stage, with a move of 2 ms between them. Then come both
/// gradients of each stage, with a move back of 1 ms. The second process's clock is 5 ms behind.
fn steps_of_two_stages(steps: u64) -> Vec<ProcessTrace> {
    let (mut front, mut back) = (Writing::new(0, 1000), Writing::new(1, 1005));
    for step in 1..=steps {
        let (op, at) = (10 * (step - 1), 100 * step - 90);
        // The same time on the second process's clock.
        let there = at - 5;
        front.issued(
            at - 9,
            op + 1,
            "jit Up on mesh of (f32)",
            label(0, 0, Role::Forward),
            0,
        );
        front.kernel((at, at, at + 10), op + 1, 0);
        for process in [&mut front, &mut back] {
            process.issued(
                at - 5,
                op + 2,
                "device_put of f32[8] from a to b",
                label(0, 0, Role::SendForward),
                op + 1,
            );
        }
        front.piece(at + 10, PieceStep::Offered, op + 2, 1);
        front.piece(at + 10, PieceStep::Posted, op + 2, 1);
        front.note(at + 13, TraceEventKind::Left { ticket: op + 2 });
        front.note(at + 13, TraceEventKind::Over { op: op + 2 });
        back.note(there + 12, TraceEventKind::Over { op: op + 2 });
        back.piece(there, PieceStep::Expected, op + 2, 0);
        back.piece(there + 12, PieceStep::Arrived, op + 2, 0);
        back.piece(there + 12, PieceStep::Taken, op + 2, 0);
        back.issued(
            at - 5,
            op + 3,
            "jit Down on mesh of (f32)",
            label(1, 0, Role::Forward),
            0,
        );
        back.kernel((there, there + 12, there + 22), op + 3, op + 2);
        back.issued(
            at - 5,
            op + 4,
            "jit DownInput on mesh of (f32)",
            label(1, 0, Role::BackwardInput),
            0,
        );
        back.kernel((there + 22, there + 22, there + 30), op + 4, 0);
        back.issued(
            at - 5,
            op + 5,
            "jit DownWeight on mesh of (f32)",
            label(1, 0, Role::BackwardWeight),
            0,
        );
        back.kernel((there + 30, there + 30, there + 36), op + 5, 0);
        for process in [&mut front, &mut back] {
            process.issued(
                at - 5,
                op + 6,
                "device_put of f32[8] from b to a",
                label(1, 0, Role::SendBackward),
                op + 4,
            );
        }
        back.piece(there + 30, PieceStep::Offered, op + 6, 0);
        back.piece(there + 30, PieceStep::Posted, op + 6, 0);
        front.piece(at, PieceStep::Expected, op + 6, 1);
        front.piece(at + 31, PieceStep::Arrived, op + 6, 1);
        front.piece(at + 31, PieceStep::Taken, op + 6, 1);
        front.note(at + 31, TraceEventKind::Over { op: op + 6 });
        back.note(there + 31, TraceEventKind::Over { op: op + 6 });
        front.issued(
            at - 5,
            op + 7,
            "jit UpInput on mesh of (f32)",
            label(0, 0, Role::BackwardInput),
            0,
        );
        front.kernel((at + 10, at + 31, at + 40), op + 7, op + 6);
        front.issued(
            at - 5,
            op + 8,
            "jit UpWeight on mesh of (f32)",
            label(0, 0, Role::BackwardWeight),
            0,
        );
        front.kernel((at + 40, at + 40, at + 47), op + 8, 0);
        for process in [&mut front, &mut back] {
            process.note(at - 4, TraceEventKind::StepEnd { step, op: op + 8 });
        }
    }
    // The program of process 0 waits before the second step.
    let (text, line) = (front.text("a read of an array"), front.text("main.rs:77:5"));
    front.note(
        100,
        TraceEventKind::Waited {
            since: 60 * MILLI,
            text,
            line,
        },
    );
    vec![front.end(), back.end()]
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9
}

#[test]
fn merged_processes_share_a_clock_and_have_reasons() {
    let run = TracedRun::merge(&two_stages(), Vec::new());
    assert_eq!(
        (run.problems.len(), run.bound, &*run.title),
        (0, 0.0, "written")
    );
    // The run begins with the first issue: 1 ms after the trace of process 0.
    let steps: Vec<_> = run
        .steps
        .iter()
        .map(|step| (step.number, step.start, step.end))
        .collect();
    assert!(
        near(steps[0].1, 0.009) && near(steps[0].2, 0.056) && near(steps[1].1, 0.109),
        "{steps:?}"
    );
    let piece = &run.pieces[0];
    let (start, end) = piece.on_its_way().unwrap();
    assert!((piece.from, piece.to, piece.op) == (0, 1, 2) && near(end - start, 0.002));
    assert!(near(piece.left.unwrap() - start, 0.003));
    let timeline = run.timeline();
    let names: Vec<&str> = timeline.rows.iter().map(|row| &*row.name).collect();
    assert_eq!(names, ["process 0, cpu 0", "process 1, cpu 0"]);
    let bars: Vec<&str> = timeline.rows[1].bars.iter().map(|bar| &*bar.name).collect();
    assert_eq!(bars, ["1F0", "1I0", "1W0", "1F0", "1I0", "1W0"]);
    let first = &timeline.rows[1].bars[0];
    assert_eq!(
        (first.kind, first.stage, first.op),
        (BarKind::Forward, Some(1), Some(3))
    );
    assert_eq!(
        first.waited_for.as_deref(),
        Some("stage 0, microbatch 0, forward on process 0")
    );
    assert_eq!(first.at.as_deref(), Some("main.rs:3:1"));
    let moves: Vec<_> = timeline.rows[0]
        .moves
        .iter()
        .map(|bar| (&*bar.name, bar.bytes, bar.to))
        .collect();
    assert_eq!(moves, [("0F0 to process 1", Some(2048), Some(1)); 2]);
    let gaps: Vec<&str> = timeline.rows[0]
        .gaps
        .iter()
        .map(|gap| &*gap.waits_for)
        .collect();
    let back = "stage 1, microbatch 0, input gradient on process 1";
    let read = "the program, which waited in a read of an array at main.rs:77:5";
    let thread = "the thread of cpu 0, which handed over earlier outputs or had no core";
    assert_eq!(gaps, [thread, back, read, back]);
    assert!(
        timeline.rows[0]
            .memory
            .iter()
            .any(|point| point.used == 700.0)
    );
}

#[test]
fn slow_transfer_is_named_as_the_reason() {
    let mut traces = two_stages();
    // The bytes of the first move were ready at once, so the transfer took long.
    for event in &mut traces[0].events {
        if let TraceEventKind::Piece {
            step: PieceStep::Offered | PieceStep::Posted,
            op: 2,
            ..
        } = event.what
        {
            event.at = 11 * MILLI;
        }
    }
    let timeline = TracedRun::merge(&traces, Vec::new()).timeline();
    let gap = &timeline.rows[1].gaps[0];
    assert_eq!(
        gap.waits_for,
        "2.0 KiB on its way from process 0: stage 0, microbatch 0, forward"
    );
}

#[test]
fn late_thread_is_named_with_its_work() {
    let mut traces = two_stages();
    // The thread of process 0 takes up its weight gradient at once, and begins 5 ms later.
    for event in &mut traces[0].events {
        if let TraceEventKind::Started { op: 8, .. } = event.what {
            event.at += 5 * MILLI;
        }
    }
    let timeline = TracedRun::merge(&traces, Vec::new()).timeline();
    let gap = timeline.rows[0]
        .gaps
        .iter()
        .find(|gap| near(gap.start, 0.049))
        .unwrap();
    assert_eq!(
        gap.waits_for,
        "the thread of cpu 0, which collected the inputs or had no core"
    );
}

#[test]
fn no_step_ends_before_the_one_before() {
    let mut traces = two_stages();
    // A kernel of the first step goes on until the second one has ended.
    for event in &mut traces[1].events {
        if let TraceEventKind::Ended { op: 5, .. } = event.what {
            event.at = 300 * MILLI;
        }
    }
    let run = TracedRun::merge(&traces, Vec::new());
    let ends: Vec<f64> = run.steps.iter().map(|step| step.end).collect();
    assert!(ends[0] > 0.2 && near(ends[0], ends[1]), "{ends:?}");
    let said = run.summary();
    let steps = said
        .lines()
        .find(|line| line.starts_with("steps 1 to 2: "))
        .unwrap();
    assert!(!steps.contains('-'), "{steps}");
}

#[test]
fn work_after_the_last_step_is_no_part_of_it() {
    let whole = TracedRun::merge(&two_stages(), Vec::new());
    let mut traces = two_stages();
    // An evaluation after the steps: a forward pass of each stage, far longer than a step.
    for (process, stage) in [(0, 0), (1, 1)] {
        let op = 21 + u64::from(stage);
        let mut writing = Writing {
            trace: traces.remove(process),
        };
        writing.issued(
            160,
            op,
            "jit Test on mesh of (f32)",
            label(stage, 0, Role::Forward),
            0,
        );
        writing.kernel((160, 160, 2160), op, 0);
        traces.insert(process, writing.end());
    }
    let run = TracedRun::merge(&traces, Vec::new());
    assert!(near(run.end, 2.164), "{}", run.end);
    let bar = Bar {
        kind: BarKind::Forward,
        stage: Some(0),
        microbatch: Some(0),
        end: 0.5,
        ..Bar::default()
    };
    let plan = Timeline {
        rows: vec![TimelineRow {
            bars: vec![bar],
            ..TimelineRow::default()
        }],
        ..Timeline::default()
    };
    let timeline = run.timeline_beside(&plan);
    let ends: Vec<f64> = timeline.marks.iter().filter_map(|mark| mark.end).collect();
    assert!(near(ends[0], 0.056) && near(ends[1], 0.156), "{ends:?}");
    let takes: Vec<f64> = timeline.steps().iter().map(|step| step.takes).collect();
    assert!(near(takes[0], 0.047) && near(takes[1], 0.1), "{takes:?}");
    let planned = |row: usize| {
        timeline.rows[row]
            .bars
            .iter()
            .filter(|bar| bar.planned.is_some())
            .count()
    };
    assert_eq!(
        (planned(0), timeline.rows[0].bars.last().unwrap().planned),
        (2, None)
    );
    assert_eq!(run.costs(), whole.costs());
}

#[test]
fn costs_are_the_medians_without_the_first_step() {
    let run = TracedRun::merge(&two_stages(), Vec::new());
    let costs = run.costs().unwrap();
    assert_eq!((&*costs.unit, costs.stage.len()), ("s", 2));
    let (front, back) = (costs.stage[0], costs.stage[1]);
    assert!(
        near(front.forward, 0.010)
            && near(front.backward_input, 0.009)
            && near(front.backward_weight, 0.007)
    );
    assert!(
        near(back.forward, 0.010)
            && near(back.backward_input, 0.008)
            && near(back.backward_weight, 0.006)
    );
    assert!(near(front.send_forward, 0.002) && near(back.send_backward, 0.001));
    assert_eq!((front.send_backward, back.send_forward), (0.0, 0.0));
    assert_eq!(
        (
            front.output_bytes,
            front.gradient_bytes,
            back.gradient_bytes
        ),
        (2048, 0, 2048)
    );
    let mut without = run.clone();
    without.kernels.retain(|kernel| kernel.op % 10 != 5);
    let fused = without.costs().unwrap().stage[1];
    assert!(near(fused.backward_input, 0.004) && near(fused.backward_weight, 0.004));
    without.kernels.retain(|kernel| kernel.op % 10 != 4);
    let error = without.costs().unwrap_err();
    assert_eq!(
        error.to_string(),
        "the run has no input gradient of stage 1"
    );
    without.kernels.clear();
    assert_eq!(without.costs(), Err(CostsError::NoPasses));
}

#[test]
fn bars_get_their_planned_times() {
    let bar = |kind, stage, start, end| Bar {
        kind,
        stage: Some(stage),
        microbatch: Some(0),
        start,
        end,
        ..Bar::default()
    };
    let bars = vec![
        bar(BarKind::Forward, 0, 0.0, 1.0),
        bar(BarKind::Backward, 0, 3.0, 3.016),
    ];
    let plan = Timeline {
        rows: vec![TimelineRow {
            bars,
            ..TimelineRow::default()
        }],
        ..Timeline::default()
    };
    let timeline = TracedRun::merge(&two_stages(), Vec::new()).timeline_beside(&plan);
    let planned: Vec<_> = timeline.rows[0]
        .bars
        .iter()
        .map(|bar| bar.planned.unwrap())
        .collect();
    for (at, (start, end)) in [(0, (0.0, 1.0)), (1, (3.0, 3.009)), (2, (3.009, 3.016))] {
        for (step, begin) in [(0, 0.009), (1, 0.109)] {
            let found = planned[3 * step + at];
            assert!(
                near(found.0, begin + start) && near(found.1, begin + end),
                "{planned:?}"
            );
        }
    }
    assert!(
        timeline.rows[1]
            .bars
            .iter()
            .all(|bar| bar.planned.is_none())
    );
}

#[test]
fn plan_simulates_the_schedule_with_measured_costs() {
    let mut run = TracedRun::merge(&two_stages(), Vec::new());
    assert!(matches!(run.plan(), Err(NoPlan::NoSchedule)));
    run.schedules
        .push(("two".to_owned(), "0F0,0I0,0W0\n1F0,1I0,1W0".to_owned()));
    // The sum is 10 + 2 + 10 + 8 + 1 + 9 + 7 ms, without idle time.
    assert!(near(run.plan().unwrap().end, 0.047));
    let timeline = run.timeline_with_plan();
    for bar in timeline.rows.iter().flat_map(|row| &row.bars) {
        let (start, end) = bar.planned.unwrap();
        assert!(near(start, bar.start) && near(end, bar.end), "{bar:?}");
    }
    run.schedules[0].1 = "0F0,x".to_owned();
    assert!(
        run.plan()
            .unwrap_err()
            .to_string()
            .starts_with("the schedule in the trace is not in torch's")
    );
    assert!(run.timeline_with_plan().planned_end().is_none());
}

#[test]
fn incomplete_trace_is_reported_and_used() {
    let mut traces = two_stages();
    traces[1].ended = false;
    traces[1].dropped = 3;
    // It was killed during a computation.
    traces[1].events.retain(|event| event.at <= 130 * MILLI);
    let run = TracedRun::merge(
        &traces,
        vec!["the trace of process 2 is missing".to_owned()],
    );
    assert_eq!(run.problems.len(), 3);
    let last = run.kernels.last().unwrap();
    assert!(!last.ended && last.end >= last.start);
    let timeline = run.timeline();
    assert!(
        timeline.rows[1]
            .bars
            .last()
            .unwrap()
            .name
            .ends_with("(did not end)")
    );
    let summary = run.summary();
    for text in [
        "process 2 is missing",
        "process 1 did not end its trace",
        "dropped 3 events",
        "process 0: computes",
    ] {
        assert!(summary.contains(text), "{text} is not in {summary}");
    }
    let alone = TracedRun::merge(&traces[..1], Vec::new());
    assert!(!alone.kernels.is_empty());
    assert!(TracedRun::merge(&[], Vec::new()).timeline().rows.is_empty());
}

#[test]
fn summary_has_step_times_shares_and_waits() {
    let summary = TracedRun::merge(&two_stages(), Vec::new()).summary();
    for text in [
        "written: 2 processes, 12 kernels, 4 pieces sent (8.0 KiB)",
        "steps 1 to 2: 100.00 ms each (median), 100.00 ms at most",
        "process 0: computes 26.0 %, bubble 74.0 %, up to 1.8 KiB on a device",
        "21.00 ms  process 0: stage 1, microbatch 0, input gradient on process 1",
    ] {
        assert!(summary.contains(text), "{text:?} is not in\n{summary}");
    }
}

#[test]
fn wait_in_a_collective_is_no_computing() {
    let mut traces = two_stages();
    // The first operation of the second step runs from 110 to 120 ms.
    let waited = TraceEvent {
        at: 118 * MILLI,
        what: TraceEventKind::CollectiveWaited {
            op: 11,
            device: 0,
            since: 112 * MILLI,
        },
    };
    traces[0].events.push(waited);
    traces[0].events.sort_by_key(|event| event.at);

    let run = TracedRun::merge(&traces, Vec::new());
    let summary = run.summary();
    for text in [
        "process 0: computes 20.0 %, bubble 80.0 % (6.0 % inside collectives), up to",
        "6.00 ms  process 0: other devices, inside a collective of Up",
    ] {
        assert!(summary.contains(text), "{text:?} is not in\n{summary}");
    }

    let timeline = run.timeline();
    let row = &timeline.rows[0];
    let inside = |gap: &&TimelineGap| near(gap.start, 0.111) && near(gap.end, 0.117);
    assert_eq!(row.gaps.iter().filter(inside).count(), 1, "{:?}", row.gaps);
    assert!(row.gaps.is_sorted_by(|a, b| a.start <= b.start));
    let busy = row.busy(0.109, 0.119);
    assert!(near(busy, 0.004), "{busy}");
}

#[test]
fn collective_wait_without_its_kernel_is_left_out() {
    let mut traces = two_stages();
    for (op, since, at) in [(99, 112, 118), (11, 0, 500)] {
        traces[0].events.push(TraceEvent {
            at: at * MILLI,
            what: TraceEventKind::CollectiveWaited {
                op,
                device: 0,
                since: since * MILLI,
            },
        });
    }
    traces[0].events.sort_by_key(|event| event.at);
    let run = TracedRun::merge(&traces, Vec::new());
    assert_eq!(run.collective_waits, []);
}

/// Returns [`two_stages`] with times and sizes that are far too large.
fn beyond_all_bounds() -> Vec<ProcessTrace> {
    let mut traces = two_stages();
    for (trace, clock) in traces.iter_mut().zip(["here", "there"]) {
        trace.about.clock = clock.to_owned();
        trace.about.monotonic_bound = u64::MAX;
        let samples = [
            (0, i64::MIN, u64::MAX),
            (u64::MAX, i64::MAX, u64::MAX),
            (1 << 63, 0, 0),
        ];
        trace.clocks = samples
            .map(|(at, server, bound)| ClockSample { at, server, bound })
            .to_vec();
        for event in &mut trace.events {
            match &mut event.what {
                TraceEventKind::Piece { bytes, .. } => *bytes = u64::MAX,
                TraceEventKind::Started { device, .. } | TraceEventKind::Ended { device, .. } => {
                    *device = u32::MAX
                }
                TraceEventKind::StepEnd { op, .. } => *op = u64::MAX,
                _ => {}
            }
        }
    }
    traces
}

#[test]
fn extreme_times_and_sizes_do_not_overflow() {
    let mut traces = beyond_all_bounds();
    let run = TracedRun::merge(&traces, Vec::new());
    assert!(run.summary().contains("pieces sent"));
    assert_eq!(
        run.costs(),
        Err(CostsError::NoPasses),
        "no operation lies in a step"
    );
    let is_end = |event: &TraceEvent| matches!(event.what, TraceEventKind::StepEnd { .. });
    traces
        .iter_mut()
        .for_each(|trace| trace.events.retain(|event| !is_end(event)));
    assert_eq!(
        TracedRun::merge(&traces, Vec::new()).costs().unwrap().stage[0].output_bytes,
        u64::MAX
    );
    assert!(run.kernels.iter().any(|kernel| kernel.device == u32::MAX));
}

/// Encodes a trace as the bytes of its file.
fn file_of(trace: &ProcessTrace) -> Vec<u8> {
    let mut bytes = file::beginning(&trace.about).unwrap();
    for (number, text) in (0..).zip(&trace.texts) {
        file::TraceChunk::Text {
            number,
            text: text.clone(),
        }
        .write(&mut bytes);
    }
    file::write_events(&trace.events, &mut bytes);
    trace
        .clocks
        .iter()
        .for_each(|clock| file::TraceChunk::Clock(*clock).write(&mut bytes));
    for (name, rows) in trace.schedules.iter().cloned() {
        file::TraceChunk::Schedule { name, rows }.write(&mut bytes);
    }
    file::TraceChunk::Dropped {
        events: trace.dropped,
    }
    .write(&mut bytes);
    file::TraceChunk::End.write(&mut bytes);
    bytes
}

#[test]
fn fuzz_trace_files() {
    let mut traces = two_stages();
    for (trace, clock) in traces.iter_mut().zip(["here", "there"]) {
        trace.about.clock = clock.to_owned();
        let samples = [(0, 7, 3), (1 << 40, 7 + (1 << 40), 9)];
        trace.clocks = samples
            .map(|(at, server, bound)| ClockSample { at, server, bound })
            .to_vec();
        trace.schedules = vec![("written".to_owned(), "0F0,0B0\n1F0,1B0".to_owned())];
    }
    let samples: Vec<Vec<u8>> = traces
        .iter()
        .chain(&beyond_all_bounds())
        .map(file_of)
        .collect();
    assert_eq!(ProcessTrace::of_bytes(&samples[1]).unwrap(), traces[1]);
    let known = traces.swap_remove(1);
    mpmd_fuzz::bytes("trace-files", &samples, |bytes| {
        let Ok(trace) = ProcessTrace::of_bytes(bytes) else {
            return;
        };
        let run = TracedRun::merge(&[trace, known.clone()], Vec::new());
        match bytes.len() % 3 {
            0 => drop(run.timeline_with_plan()),
            1 => drop((run.summary(), run.costs().map(|costs| costs.to_toml()))),
            _ => drop(run.timeline()),
        }
    });
}
