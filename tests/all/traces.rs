//! Traces of programs that run as real processes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use mpmd_core::launch::variables;
use mpmd_record::trace::{PieceStep, ProcessTrace, TraceEventKind, TracedRun};
use mpmd_tests::{Carrier, Job, over_each_carrier};

over_each_carrier! {
    every_operation_is_in_the_traces_of_its_processes
    waits_in_collectives_lie_in_their_kernels
    killed_process_leaves_its_trace_so_far
}

fn start(carrier: Carrier, processes: usize, args: &[&str]) -> Job {
    let options = carrier.processes(env!("CARGO_BIN_EXE_named"), processes);
    let mut job = Job::prepare(options);
    for process in 0..processes {
        let mut command = job.command(process);
        command
            .args(args)
            .env(variables::TRACE, job.folder().join("traces"));
        job.spawn(command);
    }
    job
}

fn every_operation_is_in_the_traces_of_its_processes(carrier: Carrier) {
    for processes in [1, 2, 4] {
        let mut job = start(carrier, processes, &["traced"]);
        let said = job.wait_well();
        assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
        let (traces, problems) = ProcessTrace::read_all(&job.folder().join("traces")).unwrap();
        assert_eq!(
            (traces.len(), problems.len()),
            (processes, 0),
            "{problems:?}"
        );
        let mut issued: BTreeSet<(usize, u64)> = BTreeSet::new();
        for line in said[0].lines() {
            let mut words = line.split(' ').skip(1);
            let op: u64 = words.next().unwrap().parse().unwrap();
            let whose = words.next().unwrap();
            let is_front = |process: usize| processes == 1 || process < processes / 2;
            let is_back = |process: usize| processes == 1 || process >= processes / 2;
            let has = |process: &usize| match whose {
                "front" => is_front(*process),
                "back" => is_back(*process),
                _ => true,
            };
            issued.extend((0..processes).filter(has).map(|process| (process, op)));
        }
        let mut found = BTreeSet::new();
        for (process, trace) in traces.iter().enumerate() {
            assert!(trace.ended && trace.truncated.is_none() && trace.dropped == 0);
            found.extend(check_order(process, trace));
        }
        assert_eq!(found, issued, "{processes} processes");
        check_merged(&TracedRun::merge(&traces, problems), processes);
        check_merged(&TracedRun::merge(&on_hosts(traces), Vec::new()), processes);
    }
}

fn waits_in_collectives_lie_in_their_kernels(carrier: Carrier) {
    let mut job = start(carrier, 2, &["joining", "sums", "3"]);
    job.wait_well();
    let (traces, problems) = ProcessTrace::read_all(&job.folder().join("traces")).unwrap();
    let run = TracedRun::merge(&traces, problems);
    for process in 0..2 {
        let waits = run.collective_waits.iter();
        let waits: Vec<_> = waits.filter(|wait| wait.process == process).collect();
        let kernels = run.kernels.iter();
        let sums = kernels.filter(|kernel| {
            let operation = run.operation(process, kernel.op);
            kernel.process == process
                && operation.is_some_and(|operation| operation.description.starts_with("jit Sum"))
        });
        // One round of one collective in each kernel.
        assert_eq!(waits.len(), sums.count(), "{waits:?}");
        assert!(!waits.is_empty());
        for wait in waits {
            let within = run.kernels.iter().any(|kernel| {
                (kernel.process, kernel.device, kernel.op) == (process, wait.device, wait.op)
                    && kernel.start <= wait.start
                    && wait.end <= kernel.end
            });
            assert!(within, "{wait:?}");
        }
    }
}

/// Changes the traces as if each process ran on a host of its own with another clock. Merging then
/// relies on the clock offsets that each process measured against the rendezvous service.
fn on_hosts(mut traces: Vec<ProcessTrace>) -> Vec<ProcessTrace> {
    for (process, trace) in traces.iter_mut().enumerate() {
        assert_eq!(trace.clocks.len(), 2, "at the beginning and at the end");
        trace.about.clock = format!("host {process}");
        trace.about.monotonic += process as u64 * 3_600_000_000_000;
    }
    traces
}

/// Checks that each operation was issued before it began, and began before it ended. Returns
/// (process, operation) for each operation of the trace.
fn check_order(process: usize, trace: &ProcessTrace) -> BTreeSet<(usize, u64)> {
    let (mut issued, mut started, mut over) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
    for event in &trace.events {
        match event.what {
            TraceEventKind::Issued { op, .. } => {
                assert_eq!(issued.insert(op, event.at), None, "operation {op}")
            }
            TraceEventKind::Started {
                op, device, since, ..
            } => {
                assert!(
                    issued[&op] <= event.at && since <= event.at,
                    "operation {op}"
                );
                started.insert((op, device), event.at);
            }
            TraceEventKind::Ended { op, device, .. } => {
                assert!(started[&(op, device)] <= event.at, "operation {op}")
            }
            TraceEventKind::Over { op } => {
                assert!(issued[&op] <= event.at && over.insert(op), "operation {op}");
                let mine = started.range((op, 0)..=(op, u32::MAX));
                assert!(
                    mine.into_iter().all(|(_, at)| *at <= event.at),
                    "operation {op}"
                );
            }
            _ => {}
        }
    }
    assert!(over.iter().eq(issued.keys()), "all that was issued is over");
    over.into_iter().map(|op| (process, op)).collect()
}

fn check_merged(run: &TracedRun, processes: usize) {
    assert_eq!(run.steps.len(), 8);
    assert!(
        run.bound > 0.0 && run.problems.is_empty(),
        "{}: {:?}",
        run.bound,
        run.problems
    );
    assert_eq!(run.pieces.is_empty(), processes == 1);
    for piece in &run.pieces {
        let times = (piece.posted, piece.arrived, piece.taken, piece.expected);
        let (Some(posted), Some(arrived), Some(taken), Some(_)) = times else {
            panic!("a piece has but one end: {piece:?}");
        };
        assert!(
            arrived >= posted - run.bound && taken >= arrived,
            "{piece:?}"
        );
        assert_ne!(piece.from, piece.to);
    }
    for ((process, op), operation) in &run.operations {
        let ended = operation.ended.unwrap();
        assert!(
            operation.issued <= operation.started && operation.started <= ended,
            "{process}, {op}"
        );
        assert!(
            operation.at.contains("tests/src/programs/traced.rs:"),
            "{operation:?}"
        );
    }
    let timeline = run.timeline();
    assert_eq!(timeline.rows.len(), 4);
    for row in &timeline.rows {
        assert!(
            row.bars.windows(2).all(|pair| pair[0].end <= pair[1].start),
            "{}",
            row.name
        );
        assert!(row.memory.iter().any(|point| point.used > 0.0));
    }
    let labelled = timeline
        .rows
        .iter()
        .flat_map(|row| &row.bars)
        .filter(|bar| bar.microbatch.is_some());
    // Of 8 steps with 3 microbatches, on 2 devices of each of 2 stages.
    assert_eq!(labelled.count(), 8 * 3 * 2 * 2);
}

/// Waits until the file, which grows as long as the process lives, has this many bytes.
fn wait_for_bytes(path: &Path, bytes: u64, deadline: Instant) {
    while std::fs::metadata(path).map_or(0, |file| file.len()) < bytes {
        assert!(Instant::now() < deadline, "{} stays small", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn killed_process_leaves_its_trace_so_far(carrier: Carrier) {
    let mut job = start(carrier, 2, &["looping", "reading"]);
    let folder = job.folder().join("traces");
    wait_for_bytes(&folder.join("process-1.trace"), 100_000, job.deadline());
    job.kill(1).unwrap();
    job.wait();
    let (traces, problems) = ProcessTrace::read_all(&folder).unwrap();
    assert_eq!((traces.len(), problems.len()), (2, 0));
    assert!(
        !traces[1].ended && traces[1].events.len() > 1_000,
        "{}",
        traces[1].events.len()
    );
    // The other process fails, and writes its complete trace before it ends.
    assert!(traces[0].ended);
    let run = TracedRun::merge(&traces, problems);
    assert!(
        run.problems
            .iter()
            .any(|problem| problem.contains("process 1")),
        "{:?}",
        run.problems
    );
    assert!(run.steps.len() > 1 && run.kernels.iter().any(|kernel| kernel.process == 1));
    let posted = |trace: &ProcessTrace| {
        let posted = |what: &TraceEventKind| {
            matches!(
                what,
                TraceEventKind::Piece {
                    step: PieceStep::Posted,
                    ..
                }
            )
        };
        trace
            .events
            .iter()
            .filter(|event| posted(&event.what))
            .count()
    };
    assert!(posted(&traces[1]) > 0);
    drop(run.timeline());
    assert!(run.summary().contains("process 1"));
}
