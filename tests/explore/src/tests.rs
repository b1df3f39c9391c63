//! The first seeds, and those that were red once.

use crate::case::{Case, Job, ORDERS};
use crate::recovery::Recovery;
use crate::worker::Line;

/// Runs the jobs of some seeds, and fails if one of them fails.
fn all_green<J: Job>(seeds: impl IntoIterator<Item = u64>, job: impl Fn(u64) -> J) {
    let mut alone = None;
    for seed in seeds {
        let case = job(seed);
        if alone
            .as_ref()
            .is_none_or(|(program, _)| *program != seed / ORDERS)
        {
            alone = Some((seed / ORDERS, case.run_alone().unwrap()));
        }
        let (report, checked) = case.run(&alone.as_ref().unwrap().1, false);
        assert_eq!(checked, Ok(()), "seed {seed}: {case}");
        assert!(report.switches > 0);
    }
}

#[test]
fn seeds_0_to_199_are_green() {
    all_green(0..200, Case::new);
}

/// Runs seeds that once showed faults:
/// - A finished job kept its runtime: 940.
/// - A job without memory took 18 minutes to report it: 112950.
/// - A goodbye on a slow link was lost: 9640.
/// - A process that had left because of another's failure was blamed: 18360, 33700. Its goodbye was
///   lost too: 1293150, 1622990, 2045090.
/// - A process with unknown operations was blamed: 41490.
/// - A stop of the whole job ended the wait for receivers: 512290.
#[test]
fn seeds_that_were_red_are_green() {
    let red = [
        940, 9640, 18360, 33700, 41490, 112_950, 512_290, 551_330, 556_440, 1_293_150, 1_622_990,
        2_045_090,
    ];
    all_green(red, Case::new);
}

#[test]
fn recoveries_0_to_99_are_green() {
    all_green(0..100, Recovery::new);
}

#[test]
fn elastic_jobs_0_to_199_are_green() {
    all_green(0..200, Recovery::elastic);
}

/// Runs seeds that once showed faults:
/// - A process died before the first epoch (8, 27), or at the end of one (29, 272, 293).
/// - An error came a moment before its cause (95, 231).
/// - A value never came (396), or came from a process that had been replaced (2519).
/// - A send of a process that had left never ended (15949).
/// - A job without processes kept its spares waiting (18249), or sent them wrong messages (31069).
#[test]
fn recoveries_that_were_red_are_green() {
    let red = [8, 27, 29, 95, 231, 272, 293, 396, 2519, 15949, 18249, 31069];
    all_green(red, Recovery::new);
}

#[test]
fn equal_seeds_have_equal_logs() {
    for seed in [3, 7 * ORDERS, 10] {
        let jobs: [Box<dyn Job>; 2] = [Box::new(Case::new(seed)), Box::new(Recovery::new(seed))];
        for job in jobs {
            let alone = job.run_alone().unwrap();
            let (first, second) = (job.run(&alone, true), job.run(&alone, true));
            assert!(first.0.log.lines().count() > 100);
            assert_eq!(first, second, "seed {seed}");
        }
    }
}

#[test]
fn lines_of_workers_are_read_back() {
    let lines = [
        Line::Start(7),
        Line::Done(7, (u64::MAX, 1, 2)),
        Line::Red(8, "two\nlines here".into()),
    ];
    for line in lines {
        assert_eq!(Line::parse(&line.to_string()), Some(line));
    }
    for wrong in ["", "done", "done x 1 2 3", "done 1 2 3", "other 4"] {
        assert_eq!(Line::parse(wrong), None, "{wrong}");
    }
}
