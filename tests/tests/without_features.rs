//! A program that was built without UCX, or without CUDA, says so, and how to get it, instead of hanging or using another.
#![cfg(not(any(feature = "ucx", feature = "cuda")))]

use mpmd_core::launch::variables;
use mpmd_tests::{Job, JobOptions};

#[test]
fn who_asks_for_ucx_hears_that_it_is_not_compiled_in() {
    const PROCESSES: usize = 2;
    let mut job = Job::prepare(JobOptions::new(env!("CARGO_BIN_EXE_named"), PROCESSES));
    for process in 0..PROCESSES {
        let mut command = job.command(process);
        command.arg("hello").env(variables::TRANSPORT, "ucx");
        job.spawn(command);
    }
    for end in job.wait() {
        assert_eq!(end.code, 1, "{}", job.report());
        let named = end.stderr.contains("ucx");
        // How to get it, or what there is instead.
        let helped = end.stderr.contains("--features ucx") || end.stderr.contains("that this build has");
        assert!(named && helped, "{}", job.report());
    }
}
