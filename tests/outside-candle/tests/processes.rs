//! The program as one process and as two.

use std::time::Duration;

use mpmd::launch::LaunchError;
use mpmd::testing::{ExitKind, Processes};

const PROGRAM: &str = env!("CARGO_BIN_EXE_outside-candle");

#[test]
fn model_learns_the_same_in_one_process_and_in_two() -> Result<(), LaunchError> {
    // Far more than it needs, even on a busy machine.
    let deadline = Duration::from_secs(240);
    let run = |processes| Processes::new(processes, PROGRAM).deadline(deadline).start()?.wait();
    let (alone, two) = (run(1)?, run(2)?);
    assert!(alone.iter().chain(&two).all(|end| end.how == ExitKind::Exit(0)), "{alone:?} {two:?}");
    assert_eq!([&two[0].stdout, &two[1].stdout], [&alone[0].stdout, ""]);
    let loss = alone[0].stdout.split(['(', ')']).nth(1).and_then(|loss| loss.parse::<f64>().ok());
    // All bytes are equally likely at a loss of 5.5 nats.
    assert!(loss.is_some_and(|loss| loss < 4.0), "{alone:?}");
    Ok(())
}
