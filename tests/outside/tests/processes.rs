//! The program as two real processes.

use mpmd::launch::LaunchError;
use mpmd::testing::{ExitKind, Processes};

#[test]
fn real_processes_move_the_tree() -> Result<(), LaunchError> {
    let ends = Processes::new(2, env!("CARGO_BIN_EXE_outside")).start()?.wait()?;
    assert!(ends.iter().all(|end| end.how == ExitKind::Exit(0)), "{ends:?}");
    assert_eq!(ends[0].stdout, "round 1: [None, None, None]\n");
    let values = "[Some([1.0, 1.0]), Some([2.0, 2.0]), Some([3.0, 3.0])]";
    assert_eq!(ends[1].stdout, format!("round 1: {values}\n"));
    Ok(())
}

#[test]
fn killed_process_is_named_by_the_other() -> Result<(), LaunchError> {
    let endless = Processes::new(2, env!("CARGO_BIN_EXE_outside")).args(["1000000000"]);
    let mut job = endless.start()?;
    job.wait_for_output("round 3: ")?;
    job.kill(1)?;
    let ends = job.wait()?;
    assert_eq!((ends[0].code(), ends[1].how), (1, ExitKind::Signal(9)), "{ends:?}");
    assert!(ends[0].stderr.contains("process 1 is gone"), "{ends:?}");
    Ok(())
}
