//! Jobs in simulated time, with faults at times.

use std::time::Duration;

use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::{ProcessId, Simulation};

const SEEDS: u64 = 20;

/// Moves a tree of small arrays around all devices, and returns the values on the last.
fn around(p: &mut Program) -> Result<Option<Vec<f32>>> {
    let devices = p.topology().devices().len();
    let stages = p.mesh(&[("x", devices)])?.split("x")?;
    let mut x: Vec<MpmdArray> = (0..4).map(|i| MpmdArray::scalar(i as f32)).collect();
    for stage in &stages {
        x = p.device_put(&x, stage.replicated())?;
    }
    let values = x
        .iter()
        .map(|x| Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?));
    Ok(values
        .collect::<Result<Option<Vec<_>>>>()?
        .map(|values| values.concat()))
}

/// Runs the job with each seed, and checks its values and that it leaves nothing. Returns the
/// longest simulated time.
fn all_good(job: impl Fn(Simulation) -> Simulation) -> Duration {
    let _limit = watchdog(60);
    let run = |seed| {
        let (results, report) = job(Simulation::new(3, 3).seed(seed)).run_reported(around);
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            results,
            [None, None, Some(vec![0.0, 1.0, 2.0, 3.0])],
            "seed {seed}"
        );
        assert_eq!(report.left, [""; 0], "seed {seed}");
        report.time
    };
    (0..SEEDS).map(run).max().unwrap()
}

#[test]
fn job_leaves_nothing_and_waits_for_no_time_limit() {
    assert!(all_good(|job| job) < Duration::from_secs(1));
}

#[test]
fn suspended_job_goes_on() {
    let (after, time) = (Duration::from_millis(1), Duration::from_secs(3600));
    let slept =
        all_good(|job| (0..3).fold(job, |job, i| job.stop_after(ProcessId(i), after, time)));
    assert!(slept >= time);
}

#[test]
fn goodbye_on_a_slow_link_is_waited_for() {
    let slow = Duration::from_secs(20);
    for after in [Duration::ZERO, Duration::from_millis(6)] {
        all_good(|job| job.hold_after(ProcessId(0), ProcessId(1), after, slow));
    }
}

#[test]
fn process_lost_at_any_time_is_named() {
    let _limit = watchdog(60);
    for seed in 0..200 {
        let after = Duration::from_micros(50 * seed);
        let job = Simulation::new(3, 3)
            .seed(seed)
            .lose_after(ProcessId(1), after);
        for (process, result) in job.run(around).into_iter().enumerate() {
            let Err(error) = result else { continue };
            let error = error.to_string();
            assert!(
                process == 1 || error.contains("process 1"),
                "seed {seed}: {error}"
            );
        }
    }
}
