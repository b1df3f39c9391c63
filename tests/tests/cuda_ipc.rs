//! Arrays of CUDA devices between real processes that share one of them: handed over where they
//! are, opened once, and lost with their owner.
//!
//! On the CUDA driver in software, unless `MPMD_TEST_GPU=1` says that there is a real one.
#![cfg(feature = "cuda")]

use std::time::Duration;

use mpmd_core::launch::variables;
use mpmd_tests::{Carrier, Job, JobOptions, Struck};
use rustix::process::Signal;

/// The time within which everybody must have ended where a process dies.
const SOON: Duration = Duration::from_secs(10);

/// A job of the program `handing`, each of whose processes has a CUDA device; with the driver,
/// while the folder is there.
fn start(processes: usize, args: &[&str], settings: &[(&str, &str)]) -> (Job, tempfile::TempDir) {
    let options = JobOptions::new(env!("CARGO_BIN_EXE_named"), processes);
    let options = options
        .over(Carrier::SHM)
        .patience(Duration::from_secs(30))
        .limit(Duration::from_secs(120));
    let folder = tempfile::tempdir().expect("a folder for the driver");
    let driver =
        (!softcuda::real()).then(|| softcuda::install(folder.path()).expect("the driver is built"));
    let mut job = Job::prepare(options);
    for process in 0..processes {
        let mut command = job.command(process);
        command
            .arg("handing")
            .args(args)
            .env(variables::DEVICE, "cuda")
            .envs(settings.iter().copied());
        command.env("MPMD_CUDA_CACHE", folder.path().join("cache"));
        if let Some(driver) = &driver {
            softcuda::environment(&mut command, driver);
        }
        job.spawn(command);
    }
    (job, folder)
}

/// What a process said of `name` at its end.
fn figure(said: &str, name: &str) -> u64 {
    let line = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    line.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {name} in {said}"))
}

#[test]
fn whole_shards_are_used_where_they_are_and_memory_is_opened_once() {
    for (processes, pace) in [(2, "eager"), (3, "seed:7"), (2, "lazy:20")] {
        let (mut job, _folder) = start(processes, &["whole", "100"], &[("SOFTCUDA_PACE", pace)]);
        for said in job.wait_well() {
            if softcuda::real() {
                continue;
            }
            assert_eq!(figure(&said, "bytes copied on the device"), 0, "{said}");
            // A sample of each other process, and the few segments that the arrays of one are in,
            // however many come.
            let (opened, others) = (figure(&said, "memory opened"), processes as u64 - 1);
            assert!(opened > others && opened <= 5 * others, "{said}");
            assert!(figure(&said, "events opened later") <= 60 * others, "{said}");
        }
    }
}

#[test]
fn parts_of_shards_are_taken_by_one_copy() {
    for processes in [2, 3] {
        let (mut job, _folder) = start(processes, &["parts"], &[("SOFTCUDA_PACE", "seed:3")]);
        for said in job.wait_well() {
            if softcuda::real() {
                continue;
            }
            // Of three arrays, of which the last is a whole on each: every piece once, wherever it
            // comes from.
            let whole = 96 * 48 * 4;
            let part = whole / processes as u64;
            assert_eq!(figure(&said, "bytes copied on the device"), 2 * part + whole, "{said}");
        }
    }
}

#[test]
fn many_arrays_are_lent_at_once_and_passed_on() {
    for processes in [2, 3] {
        let (mut job, _folder) = start(processes, &["at-once"], &[]);
        for said in job.wait_well() {
            assert!(softcuda::real() || figure(&said, "bytes copied on the device") == 0, "{said}");
        }
    }
}

/// Kills one process in the middle of steps.
fn strike(processes: usize, victim: usize, pace: &str) -> Struck {
    let (mut job, _folder) = start(processes, &["steps"], &[("SOFTCUDA_PACE", pace)]);
    job.wait_for_output("step 25\n");
    job.strike(victim, Signal::KILL)
}

#[test]
fn who_is_killed_while_all_hold_memory_of_all_is_named_by_the_others_which_end() {
    for (processes, victim, pace) in
        [(2, 0, "eager"), (2, 1, "seed:5"), (3, 1, "eager"), (3, 2, "seed:9")]
    {
        let Struck { ended, took, report } = strike(processes, victim, pace);
        for end in ended {
            assert_eq!(end.code, 1, "{report}");
            // The third may hear first of who has left because of it, and ends with that.
            let others = (0..processes).filter(|process| *process != victim);
            let left = others.map(|process| format!("process {process} is gone (it has left)"));
            let named = left
                .chain([format!("process {victim} is gone")])
                .any(|words| end.stderr.contains(&words));
            assert!(named, "{report}");
            assert!(!end.stderr.contains("panicked"), "{report}");
        }
        assert!(took <= SOON, "{processes} processes without {victim}: {took:?}\n{report}");
    }
}

#[test]
fn a_stop_shorter_than_patience_is_no_failure() {
    let (mut job, _folder) = start(2, &["steps"], &[]);
    job.wait_for_output("step 5\n");
    job.processes[1].signal(Signal::STOP);
    std::thread::sleep(Duration::from_secs(1));
    job.processes[1].signal(Signal::CONT);
    let steps = job.processes[0].output().lines().count();
    job.wait_for_output(&format!("step {}\n", steps + 10));
    for process in &mut job.processes {
        process.signal(Signal::KILL);
    }
    job.wait();
}

/// A driver that has no such handles: arrays go by the host's memory, and both say why, once.
#[test]
fn where_the_driver_shows_no_memory_arrays_take_another_way() {
    if softcuda::real() {
        println!("skipped: a real driver does not fail at will");
        return;
    }
    let (mut job, _folder) = start(2, &["whole", "5"], &[(variables::CUDA_IPC, "0")]);
    for said in job.wait_well() {
        assert_eq!(figure(&said, "memory opened later"), 0, "{said}");
    }
}
