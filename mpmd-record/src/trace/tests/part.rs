//! Tests of a trace that began while its program ran, and ended before it.

use super::*;

/// Returns five steps of [`two_stages`], traced from `from` to `until`, in milliseconds of process
/// 0.
fn part(from: u64, until: u64) -> Vec<ProcessTrace> {
    let mut traces = steps_of_two_stages(5);
    for (trace, behind) in traces.iter_mut().zip([0, 5]) {
        let (from, until) = ((from - behind) * MILLI, (until - behind) * MILLI);
        trace.about.is_part = true;
        trace.about.monotonic += from;
        trace.events.retain(|event| (from..=until).contains(&event.at));
        for event in &mut trace.events {
            event.at -= from;
            if let What::Started { since, .. } | What::Waited { since, .. } = &mut event.what {
                *since = since.saturating_sub(from);
            }
        }
    }
    traces
}

#[test]
fn cut_steps_and_operations_are_shown_but_not_measured() {
    // Process 0 computes the second step's forward pass, until 120 ms, and process 1 waits for it.
    let traces = part(115, 443);
    let run = Run::merge(&traces, Vec::new());
    assert!(run.is_part && run.problems.is_empty(), "{:?}", run.problems);
    let whole: Vec<_> = run.steps.iter().map(|step| (step.number, step.ops)).collect();
    assert_eq!(whole, [(4, (28, 38))], "steps 2, 3 and 5 are cut");
    let first = &run.kernels[0];
    assert_eq!((first.process, first.op), (0, 11));
    assert!(near(first.start, 0.0) && near(first.end, 0.005), "{first:?}");
    let timeline = run.timeline_with_plan();
    assert_eq!(timeline.rows[0].bars[0].name, "operation 11");
    assert!(timeline.rows.iter().all(|row| row.bars.iter().all(|bar| !bar.name.is_empty())));
    assert_eq!(timeline.marks.len(), 1);
    check_trace_events(&run.to_trace_events());
    let whole = Run::merge(&steps_of_two_stages(5), Vec::new());
    assert_eq!(run.costs().unwrap().stage, whole.costs().unwrap().stage);
    let summary = run.summary();
    for text in ["of a part of the run", "step 4: 47.00 ms"] {
        assert!(summary.contains(text), "{text:?} is not in\n{summary}");
    }
    let of_step = run.of_steps(4..=4).unwrap();
    assert_eq!(of_step.kernels.len(), 6);
}

#[test]
fn part_without_a_whole_step_says_so() {
    let run = Run::merge(&part(115, 130), Vec::new());
    assert_eq!((run.steps.len(), run.costs()), (0, Err(CostsError::NoWholeStep)));
    assert!(run.summary().contains("no step lies within the trace as a whole"));
    check_trace_events(&run.to_trace_events());
    let last = run.kernels.iter().rfind(|kernel| !kernel.ended).unwrap();
    assert_eq!((last.process, last.op), (1, 13));
    let timeline = run.timeline();
    assert_eq!(timeline.rows[1].bars.last().unwrap().name, "operation 13 (ends after the trace)");
}
