//! Ranges that a program names, in its trace.

use std::panic::{AssertUnwindSafe, catch_unwind};

use mpmd_core::Program;
use mpmd_core::prelude::*;
use mpmd_core::trace::{ProcessTrace, TracedRun};

use crate::common::watchdog;

/// Names ranges: two within each other, one that is left early, and one that panics.
fn names_ranges(p: &mut Program) -> Result<()> {
    let mesh = p.mesh(&[("x", 1)])?;
    let sum = p.annotate("outer", |p| {
        p.annotate("inner", |p| {
            let _x = p.device_put(&MpmdArray::scalar(1.0f32), mesh.replicated())?;
            p.sync()
        })?;
        Ok::<_, mpmd_core::Error>(7)
    })?;
    assert_eq!(sum, 7);
    let early: std::result::Result<(), &str> = p.annotate("early", |_| Err("no such luck"));
    assert_eq!(early, Err("no such luck"));
    let panics = || p.annotate("panics", |_| std::panic::resume_unwind(Box::new(())));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    Ok(())
}

#[test]
fn annotations_are_recorded_also_early_and_by_a_panic() {
    let _limit = watchdog(60);
    let folder = tempfile::tempdir().unwrap();
    let mut p = Program::builder().trace(folder.path()).alone().unwrap();
    names_ranges(&mut p).unwrap();
    p.finish().unwrap();
    let (traces, problems) = ProcessTrace::read_all(folder.path()).unwrap();
    let run = TracedRun::merge(&traces, problems);
    assert_eq!(run.problems, [""; 0]);
    let names: Vec<&str> = run.annotations.iter().map(|range| &*range.name).collect();
    assert_eq!(names, ["outer", "inner", "early", "panics"]);
    let [outer, inner] = [0, 1].map(|at| &run.annotations[at]);
    assert!(
        outer.start <= inner.start && inner.end <= outer.end,
        "{outer:?} {inner:?}"
    );
    assert!(outer.at.contains(file!()), "{outer:?}");
    let wait = run
        .waits
        .iter()
        .find(|wait| inner.start <= wait.start && wait.end <= inner.end);
    assert!(wait.is_some() && run.waits.iter().all(|wait| !names.contains(&&*wait.call)));
    // Without a trace.
    let mut p = Program::builder().alone().unwrap();
    names_ranges(&mut p).unwrap();
    p.finish().unwrap();
}
