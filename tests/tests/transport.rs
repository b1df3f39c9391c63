//! Programs know what they run over.

use mpmd_core::launch::variables;
use mpmd_tests::programs::simulated;
use mpmd_tests::{Job, JobOptions};

/// What this build has.
const NAMES: &[&str] = if cfg!(feature = "ucx") { &["shm", "tcp", "ucx"] } else { &["shm", "tcp"] };

/// What the processes of a job with these variables say.
fn over(vars: &[(&str, &str)], processes: usize) -> Vec<String> {
    let mut job = Job::prepare(JobOptions::new(env!("CARGO_BIN_EXE_named"), processes));
    for process in 0..processes {
        let mut command = job.command(process);
        command.arg("transport").envs(vars.iter().copied());
        job.spawn(command);
    }
    job.wait_well()
}

#[test]
fn a_job_runs_over_what_was_asked_for_however_it_spins() {
    assert_eq!(over(&[], 2), ["over tcp\n"; 2]);
    for name in NAMES {
        for spin in ["auto", "never", "always", "50"] {
            let said = over(&[(variables::TRANSPORT, name), (variables::SPIN, spin)], 2);
            assert_eq!(said, [format!("over {name}\n"), format!("over {name}\n")], "{spin}");
        }
    }
}

#[test]
fn threads_of_one_process_run_over_inproc() {
    assert_eq!(simulated("transport", 2, &[]), ["over inproc\n"; 2]);
}
