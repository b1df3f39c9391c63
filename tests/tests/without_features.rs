//! A program that was built without UCX or CUDA reports that, and how to get it. It neither hangs
//! nor uses something else.
#![cfg(not(any(feature = "ucx", feature = "cuda")))]

use mpmd_core::launch::variables;
use mpmd_tests::{Job, JobOptions};

#[test]
fn requested_ucx_is_reported_as_not_compiled_in() {
    each_says(variables::TRANSPORT, "ucx", |said| {
        // The text tells how to get it, or lists the transports of the build.
        said.contains("ucx")
            && (said.contains("--features ucx") || said.contains("that this build has"))
    });
}

#[test]
fn requested_cuda_devices_are_reported_as_not_compiled_in() {
    each_says(variables::DEVICE, "cuda", |said| said.contains("built without the feature `cuda`"));
}

/// Starts two processes with this variable. Both must end at once, with a message for which
/// `is_said` is true.
fn each_says(variable: &str, value: &str, is_said: impl Fn(&str) -> bool) {
    const PROCESSES: usize = 2;
    let mut job = Job::prepare(JobOptions::new(env!("CARGO_BIN_EXE_named"), PROCESSES));
    for process in 0..PROCESSES {
        let mut command = job.command(process);
        command.arg("hello").env(variable, value);
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code, 1, "{}", job.report());
        assert!(is_said(&end.stderr), "{}", job.report());
    }
}
