//! Tests of ranges that a program names.

use super::*;

/// Returns [`two_stages`] with ranges of process 0: `load` twice, within `epoch`, which ends with
/// the second one and has the program's wait in it.
fn annotated() -> Vec<ProcessTrace> {
    let mut traces = two_stages();
    let trace = &mut traces[0];
    for (name, since, at) in [("load", 2, 6), ("load", 100, 105), ("epoch", 2, 105)] {
        let text = trace.texts.len() as u32;
        trace
            .texts
            .extend([name.to_owned(), "main.rs:5:9".to_owned()]);
        let what = TraceEventKind::Annotated {
            since: since * MILLI,
            text,
            line: text + 1,
        };
        trace.events.push(TraceEvent {
            at: at * MILLI,
            what,
        });
    }
    traces
}

#[test]
fn annotations_nest_and_are_no_waits() {
    let run = TracedRun::merge(&annotated(), Vec::new());
    let names: Vec<&str> = run.annotations.iter().map(|range| &*range.name).collect();
    assert_eq!(names, ["epoch", "load", "load"]);
    let without = TracedRun::merge(&two_stages(), Vec::new());
    assert_eq!(run.waits, without.waits);
    assert_eq!(
        run.timeline(),
        without.timeline(),
        "reasons of gaps are the same"
    );
}

#[test]
fn summary_says_how_often_and_how_long_each_took() {
    let summary = TracedRun::merge(&annotated(), Vec::new()).summary();
    for text in [
        "  103.00 ms  process 0: epoch, once (103.00 ms median, 103.00 ms at most)\n",
        "    9.00 ms  process 0: load, 2 times (4.00 ms median, 5.00 ms at most)\n",
    ] {
        assert!(summary.contains(text), "{text:?} is not in\n{summary}");
    }
}
