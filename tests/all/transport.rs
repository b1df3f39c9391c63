//! Programs know the name of their transport.

use mpmd_core::launch::variables;
use mpmd_tests::programs::simulated;
use mpmd_tests::{Carrier, Job};

/// The transports of this build.
const NAMES: &[&str] = if cfg!(feature = "ucx") {
    &["shm", "tcp", "ucx"]
} else {
    &["shm", "tcp"]
};

/// Returns the output of the processes of a job with these variables.
fn over(vars: &[(&str, &str)], processes: usize) -> Vec<String> {
    let mut job = Job::prepare(Carrier::TCP.processes(env!("CARGO_BIN_EXE_named"), processes));
    for process in 0..processes {
        let mut command = job.command(process);
        command.arg("transport").envs(vars.iter().copied());
        job.spawn(command);
    }
    job.wait_well()
}

#[test]
fn job_uses_the_requested_transport_with_any_spin() {
    assert_eq!(over(&[], 2), ["over tcp\n"; 2]);
    for name in NAMES {
        for spin in ["auto", "never", "always", "50"] {
            let said = over(&[(variables::TRANSPORT, name), (variables::SPIN, spin)], 2);
            assert_eq!(
                said,
                [format!("over {name}\n"), format!("over {name}\n")],
                "{spin}"
            );
        }
    }
}

#[test]
fn threads_of_one_process_run_over_inproc() {
    assert_eq!(simulated("transport", 2, &[]), ["over inproc\n"; 2]);
}
